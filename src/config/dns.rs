//! `dnsServer`: the DNS server, and virtual addresses for the services of other organisations.

use std::net::{Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;

use ipnet::IpNet;

use super::addresses::{Opened, Own};
use super::table::Root;
use super::table::dns::DnsServer;
use isthmus_dns::Options;
use isthmus_document::problem::{InvalidValue, Path, Problems};
use isthmus_document::reader::Fields;
use isthmus_model::address::Bind;
use isthmus_snapshot::virtual_addresses::Ranges;

/// The prefix lengths of an IPv4 range. The largest range is a whole class A network; the smallest range has six addresses for
/// services.
const IPV4_PREFIXES: RangeInclusive<u8> = 8..=29;
/// The prefix lengths of an IPv6 range.
const IPV6_PREFIXES: RangeInclusive<u8> = 32..=125;

/// Returns the settings of the DNS server; `None` without `dnsServer`.
pub(super) fn server(
    root: &Fields<'_>,
    opened: &mut Vec<Opened>,
    problems: &mut Problems,
) -> Option<Options> {
    root.at(&Root::DNS_SERVER).filter(|node| !node.is_off())?;
    let fields = root.map(&Root::DNS_SERVER);
    let bind = fields.get(&DnsServer::BIND);
    let node = fields.at(&DnsServer::BIND);
    let path = Path::Root.key(Root::DNS_SERVER.name());
    let path = path.key(DnsServer::BIND.name());
    opened.push(Opened {
        path: path.to_string(),
        bind: Bind::Address(bind),
        position: node.map(|node| node.position),
    });
    if let Some(node) = node.filter(|_| bind.ip().is_unspecified()) {
        let fault = format!(
            "found {node}, which stands for all addresses of the host; a DNS server must answer from the address that received \
             the query"
        );
        let meant = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), bind.port());
        problems.error(node.position, &path, InvalidValue::new(fault).hint(Some(meant.to_string())));
    }
    Some(Options {
        bind,
        zones: fields.get(&DnsServer::ZONES).unwrap_or_default().into(),
        ranges: ranges(&fields, problems),
        upstream: fields.get(&DnsServer::UPSTREAM).unwrap_or_default(),
    })
}

/// Reports servers in `upstream` that are this gateway itself: it would forward queries to itself without end.
pub(super) fn upstream_is_another(root: &Fields<'_>, own: &Own<'_>, problems: &mut Problems) {
    let path = Path::Root.key(Root::DNS_SERVER.name());
    let path = path.key(DnsServer::UPSTREAM.name());
    for (index, server, node) in root.map(&Root::DNS_SERVER).values(&DnsServer::UPSTREAM) {
        if let Some(own) = own.listener_at(server.ip(), server.port()) {
            let fault = format!(
                "found {node}, an address on which this gateway listens ({}); expected another DNS server",
                own.path
            );
            problems.error(node.position, &path.index(index), fault);
        }
    }
}

/// Returns the ranges of virtual addresses.
fn ranges(fields: &Fields<'_>, problems: &mut Problems) -> Ranges {
    if fields.at(&DnsServer::VIPS).is_none() {
        return Ranges::default();
    }
    let mut ranges = Ranges { ipv4: None, ipv6: None };
    let path = Path::Root.key(Root::DNS_SERVER.name());
    let path = path.key(DnsServer::VIPS.name());
    for (index, block, node) in fields.values(&DnsServer::VIPS) {
        let block = block.trunc();
        let fault = match (block, &ranges) {
            _ if !prefixes(block).contains(&block.prefix_len()) => {
                let (first, last) = (prefixes(block).start().to_owned(), prefixes(block).end().to_owned());
                Some(format!(
                    "found {node}; the prefix length of a range of virtual addresses is from /{first} to /{last}"
                ))
            }
            (IpNet::V4(_), Ranges { ipv4: Some(_), .. }) => {
                Some(format!("found {node}, a second IPv4 range; at most one is allowed"))
            }
            (IpNet::V6(_), Ranges { ipv6: Some(_), .. }) => {
                Some(format!("found {node}, a second IPv6 range; at most one is allowed"))
            }
            _ => overlap(block).map(|what| format!("found {node}, which overlaps {what}")),
        };
        match (fault, block) {
            (Some(fault), _) => problems.error(node.position, &path.index(index), fault),
            (None, IpNet::V4(range)) => ranges.ipv4 = Some(range),
            (None, IpNet::V6(range)) => ranges.ipv6 = Some(range),
        }
    }
    ranges
}

fn prefixes(block: IpNet) -> RangeInclusive<u8> {
    match block {
        IpNet::V4(_) => IPV4_PREFIXES,
        IpNet::V6(_) => IPV6_PREFIXES,
    }
}

/// Describes the reserved addresses that a range overlaps; `None`: it overlaps none.
fn overlap(block: IpNet) -> Option<String> {
    const NEVER: [(&str, &str); 6] = [
        ("127.0.0.0/8", "the loopback addresses"),
        ("169.254.0.0/16", "the link-local addresses"),
        ("224.0.0.0/4", "the multicast addresses"),
        ("0.0.0.0/8", "the unspecified addresses"),
        ("fe80::/10", "the link-local addresses"),
        ("ff00::/8", "the multicast addresses"),
    ];
    let overlaps = |other: &IpNet| other.contains(&block) || block.contains(other);
    let of_istiod = Ranges::OF_ISTIOD.iter().find(|other| overlaps(other));
    let of_istiod = of_istiod.map(|other| format!("{other}, from which istiod assigns virtual addresses"));
    let mut never = NEVER.iter().filter(|(other, _)| other.parse().is_ok_and(|other| overlaps(&other)));
    of_istiod.or_else(|| never.next().map(|(other, what)| format!("{what}, {other}")))
}
