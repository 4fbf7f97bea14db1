//! The links with peers: connects the part that speaks with a peer to the registry that takes its services.

use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use crate::aggregator::peer::inbox::Inbox;
use crate::config::Config;
use crate::discovery::peer::importer::{Done, Importer, Received, Refusals};
use crate::discovery::peer::links::Links;
use crate::net::handed::HandedOver;
use crate::net::scope::Scope;
use crate::tls::context::CertificateRotation;
use crate::world::Reader;

/// Hands what links receive to the registries of peers.
struct Registries {
    inbox: Inbox,
    scope: Scope,
}

impl Importer for Registries {
    fn up<'a>(&'a self, peer: &'a Arc<str>, instance: &'a Arc<str>) -> Done<'a> {
        Box::pin(self.inbox.up(peer, instance))
    }

    fn deliver<'a>(&'a self, peer: &'a Arc<str>, instance: &'a Arc<str>, what: Received) -> Refusals<'a> {
        Box::pin(async move {
            match what {
                Received::Delta(delta) => self.inbox.delta(peer, instance, delta).await,
                Received::Listed => {
                    self.inbox.listed(peer, instance).await;
                    Vec::new()
                }
            }
        })
    }

    fn down(&self, peer: &Arc<str>, instance: &Arc<str>, why: &str, forget: bool) {
        // The link may have been dropped, so that nobody waits for this.
        let (inbox, peer, instance) = (self.inbox.clone(), peer.clone(), instance.clone());
        let why = why.to_owned();
        self.scope.spawn(async move { inbox.down(&peer, &instance, &why, forget).await });
    }

    fn renewals(&self, peer: &Arc<str>) -> watch::Receiver<u64> {
        self.inbox.renewals(peer)
    }
}

/// Starts the links of a config.
pub(super) fn start(
    config: &Config,
    reader: &Reader,
    identity: &CertificateRotation,
    inbox: &Inbox,
    arrivals: mpsc::Receiver<HandedOver>,
    scope: &Scope,
) -> Result<Links, String> {
    let importer = Arc::new(Registries { inbox: inbox.clone(), scope: scope.clone() });
    let links = Links::start(
        reader.clone(),
        identity.context(),
        identity.roots(),
        importer,
        arrivals,
        instance(config),
        scope,
    );
    let links = links.map_err(|error| format!("cannot make TLS for links with peers: {error}"))?;
    links.read_times(config.aggregator.state.as_deref());
    configure(&links, config);
    Ok(links)
}

/// Applies the peers of a config.
pub(super) fn configure(links: &Links, config: &Config) {
    let own = &config.policy.mesh.trust_domain;
    let state = config.aggregator.state.as_ref();
    links.enrolment().configure(own, &suggested_name(config), &config.links, state);
    links.configure(own, &config.links, state.map(PathBuf::as_path));
}

/// Returns the name that the other side of an enrolment may give us: our cluster's, else the first label of our trust domain.
fn suggested_name(config: &Config) -> String {
    let cluster = config.policy.node.cluster.to_string();
    let domain = config.policy.mesh.trust_domain.as_str();
    if cluster.is_empty() { domain.split('.').next().unwrap_or(domain).to_owned() } else { cluster }
}

/// Parts from peers that the config does not have. To be called before their roots are removed.
pub(super) fn part(links: &Links, config: &Config) {
    links.part(&config.links);
}

/// Names this process among the replicas of the gateway.
fn instance(config: &Config) -> Arc<str> {
    use std::hash::{BuildHasher, RandomState};
    format!("{}-{:016x}", config.policy.node.name, RandomState::new().hash_one(())).into()
}
