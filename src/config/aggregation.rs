//! `aggregator`, `dns`, `state` and `xds`: how snapshots are made, and which clients get them.

use std::net::{Ipv4Addr, SocketAddr};

use crate::aggregator::options::Options;
use crate::aggregator::resolver::Options as DnsOptions;
use crate::discovery::{ClientRule, Options as DiscoveryOptions};
use crate::document::problem::{InvalidValue, Path, Problems};
use crate::document::reader::Fields;
use crate::document::scalar;
use crate::model::address::Bind;
use crate::model::place::{ClusterId, Network};

use super::addresses::Opened;
use super::file::relative_to;
use super::table::mesh::{AGGREGATOR, DNS, STATE, XDS, XDS_CLIENT};

pub(super) fn options(root: &Fields<'_>, problems: &mut Problems) -> Options {
    let (default, fields) = (Options::default(), root.fields("aggregator", &AGGREGATOR));
    let read = |key| fields.read(key, scalar::duration);
    let state = root.fields("state", &STATE);
    let dir = state.read("dir", scalar::path).zip(state.node("dir"));
    Options {
        stale_after: read("staleAfter").unwrap_or(default.stale_after),
        // `never` is not a duration, so it reads as absent.
        expire_after: read("expireAfter").or(default.expire_after),
        withdrawal_hold: read("withdrawalHold").unwrap_or(default.withdrawal_hold),
        start_timeout: read("startTimeout").unwrap_or(default.start_timeout),
        state: dir.map(|(dir, node)| relative_to(problems.file(node.position.file), dir)),
        dns: dns(&root.fields("dns", &DNS), problems),
    }
}

fn dns(fields: &Fields<'_>, problems: &mut Problems) -> DnsOptions {
    let default = DnsOptions::default();
    let options = DnsOptions {
        servers: fields.read_all("servers", scalar::name_server),
        ttl_min: fields.read("minTtl", scalar::duration).unwrap_or(default.ttl_min),
        ttl_max: fields.read("maxTtl", scalar::duration).unwrap_or(default.ttl_max),
    };
    let said = ["minTtl", "maxTtl"].into_iter().filter_map(|key| Some((key, fields.node(key)?))).next_back();
    if let Some((key, node)) = said.filter(|_| options.ttl_min > options.ttl_max) {
        let fault = match key {
            "minTtl" => format!("found {node}, which is more than maxTtl, {:?}", options.ttl_max),
            _ => format!("found {node}, which is less than minTtl, {:?}", options.ttl_min),
        };
        problems.error(node.position, &Path::Root.key("dns").key(key), fault);
    }
    options
}

pub(super) fn xds(
    root: &Fields<'_>,
    opened: &mut Vec<Opened>,
    problems: &mut Problems,
) -> Option<DiscoveryOptions> {
    let fields = root.fields("xds", &XDS);
    let bind = fields.read("bind", scalar::bind_address)?;
    let (tls, node) = (fields.node("tls").is_some(), fields.node("bind"));
    let position = node.map(|node| node.position);
    opened.push(Opened { path: "xds.bind".to_owned(), bind: Bind::Address(bind), position });
    let rules = fields.items("clients").iter().map(|node| client(&Fields::new(Some(node), &XDS_CLIENT)));
    let clients = fields.node("clients").map(|_| rules.collect());
    let missing = match (tls, &clients) {
        (false, _) => Some("xds.tls"),
        (true, None) => Some("xds.clients, which says what each client may claim"),
        (true, Some(_)) => None,
    };
    if let (false, Some(node), Some(missing)) = (bind.ip().is_loopback(), node, missing) {
        let meant = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), bind.port());
        let fault = InvalidValue::new(format!(
            "found {node}, which is not a loopback address; that requires {missing}"
        ));
        problems.error(
            node.position,
            &Path::Root.key("xds").key("bind"),
            fault.hint(Some(meant.to_string())),
        );
    }
    Some(DiscoveryOptions { bind, tls, clients })
}

fn client(fields: &Fields<'_>) -> ClientRule {
    let texts = |key| fields.node(key).map(|_| fields.read_all(key, scalar::text));
    ClientRule {
        identities: fields.read_all("identities", scalar::identity_pattern),
        cidrs: fields.read_all("cidrs", scalar::cidr),
        networks: texts("networks").map(|list| list.into_iter().map(Network::new).collect()),
        clusters: texts("clusters").map(|list| list.into_iter().map(ClusterId::new).collect()),
    }
}
