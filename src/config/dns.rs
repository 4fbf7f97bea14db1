//! `dnsServer`: virtual addresses for the services of other organisations.

use std::ops::RangeInclusive;

use ipnet::IpNet;

use super::table::Root;
use super::table::dns::DnsServer;
use crate::document::problem::{Path, Problems};
use crate::document::reader::Fields;
use crate::snapshot::virtual_addresses::Ranges;

/// The prefix lengths of an IPv4 range: a network of one host's own to the largest that is in use nowhere else.
const IPV4_PREFIXES: RangeInclusive<u8> = 8..=29;
/// The prefix lengths of an IPv6 range.
const IPV6_PREFIXES: RangeInclusive<u8> = 32..=125;

/// Returns the ranges of virtual addresses; `None` without `dnsServer`.
pub(super) fn virtual_addresses(root: &Fields<'_>, problems: &mut Problems) -> Option<Ranges> {
    root.at(&Root::DNS_SERVER).filter(|node| !node.is_off())?;
    let fields = root.map(&Root::DNS_SERVER);
    if fields.at(&DnsServer::VIPS).is_none() {
        return Some(Ranges::default());
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
                    "found {node}; the prefix of a range of virtual addresses is /{first} to /{last}"
                ))
            }
            (IpNet::V4(_), Ranges { ipv4: Some(_), .. }) => {
                Some(format!("found {node}, a second IPv4 range"))
            }
            (IpNet::V6(_), Ranges { ipv6: Some(_), .. }) => {
                Some(format!("found {node}, a second IPv6 range"))
            }
            _ => overlap(block).map(|what| format!("found {node}, which overlaps {what}")),
        };
        match (fault, block) {
            (Some(fault), _) => problems.error(node.position, &path.index(index), fault),
            (None, IpNet::V4(range)) => ranges.ipv4 = Some(range),
            (None, IpNet::V6(range)) => ranges.ipv6 = Some(range),
        }
    }
    Some(ranges)
}

fn prefixes(block: IpNet) -> RangeInclusive<u8> {
    match block {
        IpNet::V4(_) => IPV4_PREFIXES,
        IpNet::V6(_) => IPV6_PREFIXES,
    }
}

/// Returns what a range must not overlap and does.
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
    let of_istiod = of_istiod.map(|other| format!("{other}, from which istiod gives out addresses itself"));
    let mut never = NEVER.iter().filter(|(other, _)| other.parse().is_ok_and(|other| overlaps(&other)));
    of_istiod.or_else(|| never.next().map(|(other, what)| format!("{what}, {other}")))
}
