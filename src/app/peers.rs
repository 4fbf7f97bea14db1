//! The links with peers. This module connects the link protocol with the registries that hold the services of peers.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use super::handles::Handles;
use isthmus_aggregator::liveness::Liveness;
use isthmus_aggregator::reported::Report;
use isthmus_config::Config;
use isthmus_model::link::LinkKey;
use isthmus_net::handed::{Carrying, HandedOver};
use isthmus_peer::importer::{Answer, Done, Importer, Received};
use isthmus_peer::imports::inbox::Inbox;
use isthmus_peer::links::Links;
use isthmus_tasks::scope::Scope;
use isthmus_tls::context::CertificateRotation;

/// Passes the updates that links receive to the registries of peers.
struct InboxImporter {
    inbox: Inbox,
    liveness: Liveness,
    scope: Scope,
}

impl Importer for InboxImporter {
    fn up<'a>(&'a self, peer: &'a Arc<str>, link: &'a LinkKey) -> Done<'a> {
        Box::pin(self.inbox.up(peer, link))
    }

    fn deliver<'a>(&'a self, peer: &'a Arc<str>, link: &'a LinkKey, what: Received) -> Answer<'a> {
        Box::pin(async move {
            match what {
                Received::Delta(delta) => self.inbox.delta(peer, link, delta).await,
                Received::Listed(extent) => self.inbox.listed(peer, link, extent).await,
            }
        })
    }

    fn down(&self, peer: &Arc<str>, link: &LinkKey, why: &str, forget: bool) {
        // The caller may be dropping the link, and a drop cannot wait. So a task does the work.
        let (inbox, peer, link) = (self.inbox.clone(), peer.clone(), link.clone());
        let why = why.to_owned();
        self.scope.spawn(async move { inbox.down(&peer, &link, &why, forget).await });
    }

    fn stops(&self, peer: &Arc<str>, gateways: &[SocketAddr], stops: bool) {
        self.liveness.note_stop(peer, gateways, stops);
    }

    fn heartbeats(&self, peer: &Arc<str>, gateways: &[SocketAddr], are_lost: bool) {
        self.liveness.note_heartbeats(peer, gateways, are_lost);
    }

    fn measured(&self, peer: &Arc<str>, reports: &[Report]) {
        self.liveness.note_reports(peer, reports);
    }

    fn renewals(&self, peer: &Arc<str>) -> watch::Receiver<u64> {
        self.inbox.renewals(peer)
    }
}

/// Starts to accept and make links; there are none before [`configure`].
pub(super) fn start(
    config: &Config,
    handles: &Handles,
    identity: &CertificateRotation,
    (inbox, liveness): (&Inbox, &Liveness),
    arrivals: (mpsc::Receiver<HandedOver>, mpsc::Sender<Carrying>),
    instance: Arc<str>,
) -> Result<Links, String> {
    let Handles { reader, telemetry, own, scope, .. } = handles;
    let (inbox, liveness) = (inbox.clone(), liveness.clone());
    let importer = Arc::new(InboxImporter { inbox, liveness, scope: scope.clone() });
    let reader = (reader.clone(), own.clone());
    let links = Links::start(reader, identity, importer, arrivals, instance, telemetry, scope);
    let links = links.map_err(|error| format!("cannot make TLS for links with peers: {error}"))?;
    links.read_times(config.aggregator.state.as_deref());
    Ok(links)
}

/// Applies the peers of a config.
pub(super) async fn configure(links: &Links, config: &Config) {
    let own = &config.policy.mesh.trust_domain;
    let state = config.aggregator.state.as_ref();
    let name_servers = &config.aggregator.dns.servers;
    links.use_name_servers(name_servers);
    links.configure(own, &config.links, state.map(PathBuf::as_path));
    let name = suggested_name(config);
    links.enrolment().configure(own, &name, &config.links, state, name_servers).await;
}

/// Returns the name that the other organisation of an enrolment may use for us: our cluster, or if it is empty, the first label
/// of our trust domain.
fn suggested_name(config: &Config) -> String {
    let cluster = config.policy.node.cluster.to_string();
    let domain = config.policy.mesh.trust_domain.as_str();
    if cluster.is_empty() { domain.split('.').next().unwrap_or(domain).to_owned() } else { cluster }
}

/// Returns the name of this process among the replicas of the gateway.
pub(super) fn instance(config: &Config) -> Arc<str> {
    use std::hash::{BuildHasher, RandomState};
    format!("{}-{:016x}", config.policy.node.name, RandomState::new().hash_one(())).into()
}
