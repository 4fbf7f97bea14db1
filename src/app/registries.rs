//! The registries of the config in use: the aggregator that reads them and makes the snapshots, and the sources in which
//! Kubernetes clusters are found.

#[cfg(not(feature = "kubernetes"))]
mod kubernetes;
pub(super) mod reviews;

use std::collections::BTreeMap;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, timeout, timeout_at};

use self::kubernetes::Clusters;
#[cfg(not(feature = "kubernetes"))]
use self::kubernetes::TokenReviewer;
use self::reviews::ClusterReviewer;
use isthmus_aggregator::drain_orders::DrainOrders;
use isthmus_aggregator::etcd::registry::EtcdRegistry;
use isthmus_aggregator::file::FileRegistry;
use isthmus_aggregator::liveness::Liveness;
use isthmus_aggregator::owner::{self, Handle, NotApplied, Recalled};
use isthmus_aggregator::registry::{Changes, Factory, Registry};
use isthmus_aggregator::spec::kubernetes::KubernetesSpec;
use isthmus_aggregator::spec::{RegistryKind, RegistrySpec};
use isthmus_aggregator::status::{RegistryState, RegistryStatus, Status};
use isthmus_config::Config;
use isthmus_istiod::registry::IstiodRegistry;
#[cfg(feature = "kubernetes")]
use isthmus_kubernetes::{reviews::TokenReviewer, sources as kubernetes};
use isthmus_model::drain::Drain;
use isthmus_model::place::ClusterId;
use isthmus_model::time::unix_seconds;
use isthmus_net::own::OwnAddresses;
use isthmus_peer::imports::inbox::Inbox;
use isthmus_peer::imports::registry::PeerRegistry;
use isthmus_registry::change::Change;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::drains::DrainSource;
use isthmus_tasks::background;
use isthmus_tasks::scope::Scope;
use isthmus_tasks::stop::Stop;
use isthmus_telemetry::control::Control;
use isthmus_world::{LaterReader, Reader};

/// The time for which a reload waits for newly added sources of Kubernetes clusters.
const CLUSTERS_WITHIN: Duration = Duration::from_secs(2);
/// The time for which the start waits for name servers to confirm the addresses of an earlier process.
const CONFIRMED_WITHIN: Duration = Duration::from_secs(1);
/// The time for which a new process waits until the orders to drain of the old one are in force.
const DRAINS_WITHIN: Duration = Duration::from_secs(2);

/// The registries of the config in use.
pub(super) struct Registries {
    pub(super) aggregator: Handle,
    /// The operators' orders to drain.
    pub(super) drain_orders: DrainOrders,
    /// The results of the probes of gateways.
    pub(super) liveness: Liveness,
    /// The sources of Kubernetes clusters.
    pub(super) clusters: Clusters,
    known: KnownClusters,
}

/// The settings of the Kubernetes clusters in use, by cluster, for the reviews of tokens.
pub(super) type KnownClusters = Arc<Mutex<BTreeMap<ClusterId, KubernetesSpec>>>;

impl Registries {
    /// Starts to read the registries of a config, and publishes the first snapshot, which has the services of the config itself.
    pub(super) async fn start(
        config: &Config,
        (inbox, own, liveness): (&Inbox, &Arc<OwnAddresses>, Liveness),
        telemetry: &Arc<Control>,
        (scope, stop): (&Scope, &Stop),
        (is_held, recalled): (bool, Recalled),
    ) -> Result<(Self, Reader), String> {
        let mut clusters = Clusters::new(scope.clone());
        clusters.configure(&config.registries, config.aggregator.start_timeout).await;
        clusters.remember(config.aggregator.state.as_deref()).await;
        let known = KnownClusters::default();
        let sources = sources(config, &mut clusters, &known);
        // Registries are started before the first snapshot exists, so the reader is set later.
        let snapshots = LaterReader::default();
        let (later, inbox, tasks) = (snapshots.clone(), inbox.clone(), (scope.clone(), stop.clone()));
        let of_peers = liveness.clone();
        let registries: Arc<Factory> =
            Arc::new(move |spec| registry_of(spec, &tasks, &later, (&inbox, &of_peers)));
        let (telemetry, owner_scope) = (telemetry.clone(), scope.clone());
        // The build takes long with a large config, so it runs on a background thread.
        let world = background::run(move || {
            owner::start(sources, registries, &telemetry, &owner_scope, (is_held, recalled))
        })
        .await;
        let (aggregator, reader) = world.map_err(|_| "building the first snapshot panicked".to_owned())?;
        // The result is ignored, since only this line sets the reader.
        let _ = snapshots.set(reader.clone());
        scope.spawn(liveness.clone().run(reader.clone(), aggregator.clone(), own.clone()));
        let (state, specs) = (config.aggregator.state.clone(), config.registries.clone());
        let (handle, seen, drain_scope) = (aggregator.clone(), reader.clone(), scope.clone());
        let orders = move || DrainOrders::start(handle, seen, state.as_deref(), &specs, drain_scope);
        let drain_orders = background::run(orders).await;
        let drain_orders = drain_orders.map_err(|_| "reading the orders to drain panicked".to_owned())?;
        scope.spawn(drain_orders.clone().follow());
        Ok((Self { aggregator, drain_orders, liveness, clusters, known }, reader))
    }

    /// Waits until the orders to drain are in force, which are those of an earlier process if it has handed some over.
    pub(super) async fn drains_are_in_force(&self, handed_over: Option<&[String]>, reader: &Reader) {
        let orders = match handed_over {
            Some(drains) => self.drain_orders.take_over(drains).await,
            None => self.drain_orders.all(),
        };
        let now = unix_seconds(SystemTime::now());
        let wanted: Vec<&Arc<Drain>> =
            orders.iter().filter(|drain| drain.parts_left(now).is_some()).collect();
        let are_in_force = |snapshot: &Snapshot| {
            let of_operators = snapshot.drains.0.iter().filter(|one| one.source == DrainSource::Operator);
            of_operators.map(|active| &active.drain).eq(wanted.iter().copied())
        };
        let applied = async {
            let mut snapshot = reader.latest();
            while !are_in_force(&snapshot) && reader.changed(snapshot.generation).await {
                snapshot = reader.latest();
            }
        };
        if timeout(DRAINS_WITHIN, applied).await.is_err() {
            tracing::warn!("the orders to drain are not in force yet");
        }
    }

    /// Replaces the config; on an error, the previous one stays in use.
    pub(super) async fn configure(&mut self, config: &Config) -> Result<(), NotApplied> {
        self.clusters.configure(&config.registries, CLUSTERS_WITHIN).await;
        self.aggregator.configure(sources(config, &mut self.clusters, &self.known)).await?;
        self.drain_orders.configure(config.aggregator.state.as_deref(), &config.registries);
        Ok(())
    }

    /// Configures the aggregator with the Kubernetes clusters that are found at present.
    pub(super) async fn renew_clusters(&mut self, config: &Config) {
        let configured = self.aggregator.configure(sources(config, &mut self.clusters, &self.known)).await;
        if let Err(not_applied) = configured {
            tracing::error!("cannot apply the Kubernetes clusters that were found: {not_applied}");
        }
    }

    /// Returns the reviewer of tokens by the API servers of the clusters in use.
    pub(super) fn reviewer(&self, scope: &Scope) -> ClusterReviewer {
        ClusterReviewer { clusters: self.known.clone(), reviewer: TokenReviewer::new(scope.clone()) }
    }

    /// Waits until the verdicts on gateways are in the newest snapshot, but at most until `deadline`: a client that reconnects gets no
    /// gateway that is dead.
    pub(super) async fn gateways_are_judged(&self, reader: &Reader, deadline: Instant) {
        let judged = async {
            self.liveness.are_judged(reader).await;
            // It answers when the results of the probes are in the newest snapshot.
            let _ = self.aggregator.beliefs().await;
        };
        if timeout_at(deadline, judged).await.is_err() {
            tracing::warn!("some gateways were not judged within aggregator.startTimeout; clients get them");
        }
    }

    /// Waits until every registry, or the last good copy of it, has been read, but at most until `deadline`. If there is an xDS server,
    /// also waits until each host name has been looked up once: a network whose gateway has an unresolved host name cannot be reached,
    /// so a client that reconnects during the start would lose the endpoints of that network.
    pub(super) async fn are_read(&mut self, config: &Config, deadline: Instant) {
        let (mut status, has_xds) = (self.aggregator.status.clone(), config.xds.is_some());
        let all_in =
            |status: &Arc<Status>| (!has_xds || status.looking_up == 0) && missing(status).next().is_none();
        let are_confirmed = |status: &Arc<Status>| !has_xds || status.recalled == 0;
        let waited = async {
            // Addresses of an earlier process serve as well, but a name server that answers knows better.
            let confirmed = status.wait_for(|status| all_in(status) && are_confirmed(status));
            let _ = timeout(CONFIRMED_WITHIN, confirmed).await;
            status.wait_for(all_in).await.map(drop)
        };
        let mut all_in = pin!(timeout_at(deadline, waited));
        let in_time = loop {
            tokio::select! {
                ended = &mut all_in => break ended.is_ok(),
                () = self.clusters.changed() => self.renew_clusters(config).await,
            }
        };
        if in_time {
            return;
        }
        for registry in missing(&self.aggregator.status.borrow()) {
            let problem = registry.problems.first().map_or("still being read", String::as_str);
            tracing::warn!(registry = &*registry.name, problem, "the registry was not read in time");
        }
        tracing::warn!(
            "some registries were not read within aggregator.startTimeout; the listeners open without their services"
        );
    }
}

/// Returns the registries that have not been read, except those of peers.
fn missing(status: &Status) -> impl Iterator<Item = &RegistryStatus> {
    let awaited = status.registries.iter().filter(|registry| !registry.is_peer);
    awaited.filter(|registry| registry.state == RegistryState::Missing)
}

fn sources(config: &Config, clusters: &mut Clusters, known: &KnownClusters) -> owner::Sources {
    let registries = clusters.expanded(&config.registries, &config.policy.node.cluster);
    let of_kubernetes = registries.iter().filter_map(|registry| match &registry.kind {
        RegistryKind::Kubernetes(spec) => Some((registry.cluster.clone(), spec.clone())),
        _ => None,
    });
    *known.lock().unwrap_or_else(PoisonError::into_inner) = of_kubernetes.collect();
    owner::Sources {
        policy: config.policy.clone(),
        services: config.services.clone(),
        registries,
        options: config.aggregator.clone(),
    }
}

/// A source of clusters that was not read yet, as a registry that cannot be read.
struct UnreadSource(RegistrySpec);

impl Registry for UnreadSource {
    fn spec(&self) -> &RegistrySpec {
        &self.0
    }

    fn run(self: Box<Self>, changes: Changes) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let problem = "the source was not read yet, so its clusters are not known; the warnings of `isthmus status` name the cause";
        Box::pin(async move {
            // Fails only if nobody receives changes any more.
            let _ = changes.send(vec![Change::Failed(vec![problem.to_owned()])]).await;
            std::future::pending().await
        })
    }
}

/// Creates the registry that a spec describes.
fn registry_of(
    spec: &RegistrySpec,
    (scope, stop): &(Scope, Stop),
    world: &LaterReader,
    (inbox, liveness): (&Inbox, &Liveness),
) -> Box<dyn Registry> {
    match &spec.kind {
        RegistryKind::File { path } => Box::new(FileRegistry::new(spec.clone(), path.clone())),
        RegistryKind::Etcd(etcd) => Box::new(EtcdRegistry::new(spec.clone(), etcd.clone(), scope.clone())),
        RegistryKind::Istiod(istiod) => {
            Box::new(IstiodRegistry::new(spec.clone(), istiod.clone(), scope.clone()))
        }
        RegistryKind::Kubernetes(cluster) => kubernetes::registry(spec, cluster, scope, world, stop),
        RegistryKind::KubernetesClusters(_) => Box::new(UnreadSource(spec.clone())),
        RegistryKind::Peer(peer) => {
            Box::new(PeerRegistry::new(spec.clone(), peer.clone(), inbox.clone(), liveness.clone()))
        }
    }
}
