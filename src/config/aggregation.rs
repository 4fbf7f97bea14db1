//! `aggregator`, `dns`, `state` and `xds`: how snapshots are made, and which clients get them.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use isthmus_ads::node::ClientRule;
use isthmus_aggregator::options::Options;
use isthmus_aggregator::resolver::Options as DnsOptions;
use isthmus_document::form::{Timeout, Written};
use isthmus_document::problem::{InvalidValue, Path, Problems};
use isthmus_document::reader::Fields;
use isthmus_model::address::Bind;
use isthmus_tls::presented::PresentedFiles;
use isthmus_wds::options::{Options as WdsOptions, TokenSource};
use isthmus_xds::options::Options as DiscoveryOptions;

use super::addresses::Opened;
use super::file::path_of;
use super::table::Root;
use super::table::mesh as keys;

/// The default audience of ztunnels' tokens: that of Istio's control plane.
const AUDIENCE: &str = "istio-ca";

pub(super) fn options(root: &Fields<'_>, problems: &mut Problems) -> Options {
    let fields = root.map(&Root::AGGREGATOR);
    let stale_after = fields.get(&keys::Aggregator::STALE_AFTER);
    let expire_after = fields.get(&keys::Aggregator::EXPIRE_AFTER);
    let written = fields.at(&keys::Aggregator::EXPIRE_AFTER);
    if let (Some(node), Some(expiry)) = (written, expire_after.filter(|expiry| *expiry <= stale_after)) {
        let [expiry, stale_after] = [expiry, stale_after].map(|time| Timeout::write(&time));
        let path = Path::Root.key(Root::AGGREGATOR.name());
        let fault =
            format!("{expiry} is not longer than staleAfter ({stale_after}), which has no effect then");
        problems.warn(node.position, &path.key(keys::Aggregator::EXPIRE_AFTER.name()), fault);
    }
    Options {
        stale_after,
        expire_after,
        withdrawal_hold: fields.get(&keys::Aggregator::WITHDRAWAL_HOLD),
        start_timeout: fields.get(&keys::Aggregator::START_TIMEOUT),
        state: state(root, problems),
        dns: dns(&root.map(&Root::DNS), problems),
        virtual_addresses: None,
    }
}

/// Returns the state folder.
pub(super) fn state(root: &Fields<'_>, problems: &Problems) -> Option<PathBuf> {
    path_of(&root.map(&Root::STATE), &keys::State::DIR, problems)
}

fn dns(fields: &Fields<'_>, problems: &mut Problems) -> DnsOptions {
    let options = DnsOptions {
        servers: fields.get(&keys::Dns::SERVERS).unwrap_or_default(),
        ttl_min: fields.get(&keys::Dns::MIN_TTL),
        ttl_max: fields.get(&keys::Dns::MAX_TTL),
        hold_missing: fields.get(&keys::Dns::HOLD_MISSING),
    };
    if options.ttl_min <= options.ttl_max {
        return options;
    }
    let (key, node, bound) = match (fields.at(&keys::Dns::MIN_TTL), fields.at(&keys::Dns::MAX_TTL)) {
        (_, Some(node)) => (keys::Dns::MAX_TTL, node, format!("less than minTtl, {:?}", options.ttl_min)),
        (Some(node), None) => (keys::Dns::MIN_TTL, node, format!("more than maxTtl, {:?}", options.ttl_max)),
        (None, None) => return options,
    };
    let path = Path::Root.key(Root::DNS.name());
    problems.error(node.position, &path.key(key.name()), format!("found {node}, which is {bound}"));
    options
}

pub(super) fn xds(
    root: &Fields<'_>,
    opened: &mut Vec<Opened>,
    problems: &mut Problems,
) -> Option<DiscoveryOptions> {
    let fields = root.map(&Root::XDS);
    let (bind, node) = fields.found(&keys::Xds::BIND)?;
    let path = Path::Root.key(Root::XDS.name());
    let path = path.key(keys::Xds::BIND.name());
    opened.push(Opened { path: path.to_string(), bind: Bind::Address(bind), position: Some(node.position) });
    let tls = fields.at(&keys::Xds::TLS).is_some();
    if !tls {
        identities_need_tls(&fields, problems);
    }
    let rules = fields.maps(&keys::Xds::CLIENTS).map(|(_, fields, _)| client(&fields));
    let clients = fields.at(&keys::Xds::CLIENTS).map(|_| rules.collect());
    let missing = match (tls, &clients) {
        (false, _) => Some("xds.tls"),
        (true, None) => Some("xds.clients, which says what each client may claim"),
        (true, Some(_)) => None,
    };
    if let (false, Some(missing)) = (bind.ip().is_loopback(), missing) {
        let meant = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), bind.port());
        let fault = InvalidValue::new(format!(
            "found {node}, which is not a loopback address; any other address requires {missing}"
        ));
        problems.error(node.position, &path, fault.hint(Some(meant.to_string())));
    }
    Some(DiscoveryOptions { bind, tls, clients })
}

/// Reads the settings of the WDS server.
pub(super) fn wds(root: &Fields<'_>, opened: &mut Vec<Opened>, problems: &Problems) -> Option<WdsOptions> {
    let fields = root.map(&Root::XDS).map(&keys::Xds::WDS);
    let (bind, node) = fields.found(&keys::Wds::BIND)?;
    let path = Path::Root.key(Root::XDS.name());
    let path = path.key(keys::Xds::WDS.name());
    let path = path.key(keys::Wds::BIND.name());
    opened.push(Opened { path: path.to_string(), bind: Bind::Address(bind), position: Some(node.position) });
    let (tls, tokens) = (fields.map(&keys::Wds::TLS), fields.map(&keys::Wds::TOKENS));
    let tokens = match path_of(&tokens, &keys::WdsTokens::FILE, problems) {
        Some(path) => TokenSource::File(path),
        None => {
            let review = tokens.map(&keys::WdsTokens::KUBERNETES);
            let audience = review.get(&keys::WdsTokenReview::AUDIENCE);
            TokenSource::Kubernetes {
                audience: audience.map_or_else(|| AUDIENCE.to_owned(), |text| text.to_string()),
            }
        }
    };
    let clients = fields.maps(&keys::Wds::CLIENTS).map(|(_, fields, _)| ClientRule {
        identities: fields.get(&keys::WdsClient::IDENTITIES).unwrap_or_default(),
        cidrs: Vec::new(),
        networks: fields.get(&keys::WdsClient::NETWORKS),
        clusters: fields.get(&keys::WdsClient::CLUSTERS),
    });
    Some(WdsOptions {
        bind,
        tls: PresentedFiles {
            certificate: path_of(&tls, &keys::WdsTls::CERTIFICATE, problems)?,
            key: path_of(&tls, &keys::WdsTls::KEY, problems)?,
        },
        tokens,
        clients: clients.collect(),
        without_policies: fields.get(&keys::Wds::WITHOUT_POLICIES).unwrap_or_default(),
    })
}

/// Reports rules with identities where the server has no TLS: the identity of a client is that of its certificate.
fn identities_need_tls(xds: &Fields<'_>, problems: &mut Problems) {
    let list = Path::Root.key(Root::XDS.name());
    let list = list.key(keys::Xds::CLIENTS.name());
    for (index, fields, _) in xds.maps(&keys::Xds::CLIENTS) {
        let Some((identities, node)) = fields.found(&keys::XdsClient::IDENTITIES) else { continue };
        if !identities.is_empty() {
            let fault = "found identities, which require xds.tls: without it no client has an identity, so this rule would match \
                         no client";
            let rule = list.index(index);
            problems.error(node.position, &rule.key(keys::XdsClient::IDENTITIES.name()), fault);
        }
    }
}

fn client(fields: &Fields<'_>) -> ClientRule {
    ClientRule {
        identities: fields.get(&keys::XdsClient::IDENTITIES).unwrap_or_default(),
        cidrs: fields.get(&keys::XdsClient::CIDRS).unwrap_or_default(),
        networks: fields.get(&keys::XdsClient::NETWORKS),
        clusters: fields.get(&keys::XdsClient::CLUSTERS),
    }
}
