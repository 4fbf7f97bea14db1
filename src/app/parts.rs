//! The parts of the gateway that a config sets, and the steps by which a config takes effect in them. The start creates the parts
//! idle, except the registries, and then takes the same steps as a reload.
//!
//! ```text
//!         prepare              apply                                          open
//!  config ───────▶ Prepared ────────────▶ certificates, limits, spans, links, … ──────▶ listeners
//!         can fail           cannot fail
//! ```

use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use arc_swap::ArcSwap;
use tokio::sync::mpsc;

use super::beliefs::Keeper;
use super::dns::Dns;
use super::fixed::Fixed;
use super::handles::Handles;
use super::listeners::{Bound, Listeners};
use super::orders;
use super::otlp::Exporter;
use super::peers;
use super::registries::Registries;
use super::upgrade::sockets::Sockets;
use super::xds::Xds;
use isthmus_admin::certificates::Identities;
use isthmus_admin::past::Past;
use isthmus_admin::share_log::Shares;
use isthmus_admin::{Command, InUse, ProgramStatus, Sources};
use isthmus_aggregator::liveness::Liveness;
use isthmus_aggregator::owner::Recalled;
use isthmus_config::Config;
use isthmus_dataplane::handle::Dataplane;
use isthmus_files::reading::Readings;
use isthmus_model::record::GatewayName;
use isthmus_net::handed;
use isthmus_net::own::OwnAddresses;
use isthmus_peer::imports::inbox::Inbox;
use isthmus_peer::links::Links;
use isthmus_snapshot::trust_roots::TrustRoots;
use isthmus_tasks::scope::Scope;
use isthmus_tasks::stop::Stop;
use isthmus_telemetry::Telemetry;
use isthmus_telemetry::outlet::OpenLog;
use isthmus_telemetry::writer::Order;
use isthmus_tls::certificate::pem;
use isthmus_tls::context::CertificateRotation;
use isthmus_tls::trust::TrustBundles;

/// The number of carriers that may wait for a worker.
const CARRIERS_WAITING_MAX: usize = 64;

/// The parts of the gateway that a config sets.
pub(super) struct Parts {
    pub(super) handles: Handles,
    pub(super) fixed: Fixed,
    pub(super) identity: CertificateRotation,
    pub(super) registries: Registries,
    pub(super) dataplane: Dataplane,
    pub(super) listeners: Listeners,
    pub(super) exporter: Exporter,
    /// The links with peers.
    pub(super) links: Links,
    pub(super) status: Arc<ArcSwap<ProgramStatus>>,
    /// Keeps what this process learns.
    pub(super) keeper: Keeper,
    /// The shares of calls that networks have.
    shares: Shares,
    /// True until this process, which takes over from an earlier one, serves. Links with peers wait until then, because both have
    /// the same name.
    pub(super) waits: bool,
}

/// The things that a process takes from an earlier one, or begins with.
pub(super) struct Succession {
    pub(super) sockets: Sockets,
    /// The name of this process among the replicas of the gateway.
    pub(super) instance: Arc<str>,
    /// See [`Parts::waits`].
    pub(super) waits: bool,
    /// The beliefs of the earlier process about names and registries.
    pub(super) recalled: Recalled,
    pub(super) liveness: Liveness,
}

/// A config whose policy is published, with everything open that can fail to open. It takes effect in the other parts by
/// [`Parts::apply`] and [`Parts::open`].
pub(super) struct Prepared {
    pub(super) config: Config,
    pub(super) bound: Bound,
    pub(super) access_log: (Order, OpenLog),
}

impl Parts {
    /// Starts to read the registries of a config, and creates all other parts idle.
    pub(super) async fn start(
        path: &Path,
        config: &Config,
        fixed: Fixed,
        listeners: Listeners,
        telemetry: Telemetry,
        scope: &Scope,
        succession: Succession,
    ) -> Result<Self, String> {
        let Succession { sockets, instance, waits, recalled, liveness } = succession;
        let (inbox, stop, own) = (Inbox::default(), Stop::default(), OwnAddresses::new());
        let (parts, tasks) = ((&inbox, &own, liveness), (scope, &stop));
        let (registries, reader) =
            Registries::start(config, parts, &telemetry.control, tasks, (waits, recalled)).await?;
        let scope = scope.clone();
        let handles = Handles { reader, telemetry, own, scope, stop, sockets };
        let scope = &handles.scope;
        let identity = CertificateRotation::start(scope);
        let exporter = Exporter::start(&handles.telemetry.spans, scope);
        let (link, arrivals) = handed::queue();
        let (workers, limits) = (fixed.workers(), fixed.limits(config));
        let dataplane = Dataplane::start(
            workers,
            limits,
            &handles.reader,
            &handles.telemetry,
            identity.context(),
            handles.own.clone(),
            link,
        )
        .map_err(|error| format!("cannot start the data plane: {error}"))?;
        let (carriers, arriving) = mpsc::channel(CARRIERS_WAITING_MAX);
        scope.spawn(dataplane.control().carry(arriving));
        let arrivals = (arrivals, carriers);
        let links =
            peers::start(config, &handles, &identity, (&inbox, &registries.liveness), arrivals, instance)?;
        let (aggregator, liveness) = (registries.aggregator.clone(), registries.liveness.clone());
        let keeper = Keeper::new(aggregator, liveness, dataplane.control().upstreams().clone());
        scope.spawn(keeper.clone().run(handles.reader.clone()));
        let shares = Shares::default();
        scope.spawn(shares.clone().run(handles.reader.clone()));
        let status = Arc::new(ArcSwap::from_pointee(ProgramStatus::new(path, workers)));
        Ok(Self {
            handles,
            fixed,
            identity,
            registries,
            dataplane,
            listeners,
            exporter,
            links,
            status,
            keeper,
            shares,
            waits,
        })
    }

    /// Does everything that can fail before a config takes effect: opens its access log, binds its addresses, and publishes its
    /// policy with the registries' services. On an error nothing changes.
    pub(super) async fn prepare(
        &mut self,
        config: Config,
        openings: &Readings,
    ) -> Result<Prepared, Vec<String>> {
        // The file is opened again even if its path is the same, because it may have been moved.
        let order = self.handles.telemetry.writer.order();
        let log = orders::open(openings, config.access_log.clone()).await.map_err(|problem| vec![problem])?;
        let bound = self.listeners.bind(&config.policy, self.dataplane.workers())?;
        let published = self.registries.configure(&config).await;
        published.map_err(|not_applied| vec![not_applied.to_string()])?;
        Ok(Prepared { config, bound, access_log: (order, log) })
    }

    /// Applies a config to all parts but the listeners and the logs. Returns the keys whose changes need a restart.
    pub(super) async fn apply(&mut self, config: &Config) -> Vec<&'static str> {
        for warning in &config.warnings {
            tracing::warn!("{warning}");
        }
        // Links with removed peers end while the roots of these peers are still trusted.
        self.links.part(&config.links);
        self.identity.configure(config.identity.clone()).await;
        self.publish_trust_roots();
        let limits = self.fixed.limits(config);
        self.dataplane.set_limits(limits);
        self.handles.telemetry.gateway.store(gateway_name(config));
        self.exporter.configure(config.tracing.as_ref(), &config.policy.node);
        self.keeper.configure(config.aggregator.state.as_deref(), self.waits);
        if !self.waits {
            peers::configure(&self.links, config).await;
        }
        let restart = self.fixed.changed(config);
        for key in &restart {
            tracing::warn!("the change of {key} takes effect after a restart; all other changes are in use");
        }
        let in_use = in_use(config);
        self.update_status(|status| {
            status.in_use = in_use;
            status.config_since = SystemTime::now();
            status.rejected.clear();
            status.restart = restart.iter().map(ToString::to_string).collect();
            status.limits = limits;
        });
        self.update_warnings(config);
        restart
    }

    /// Begins what only one process of the gateway may do: to write to the state folder, and to have links with peers.
    pub(super) async fn begin_alone(&mut self, config: &Config) {
        self.waits = false;
        self.registries.aggregator.hold_state(false);
        self.keeper.configure(config.aggregator.state.as_deref(), false);
        peers::configure(&self.links, config).await;
    }

    /// Opens and closes listeners, and ends the connections that the config does not admit.
    pub(super) async fn open(&mut self, config: &Config, bound: Bound) {
        self.listeners.open(bound, &mut self.dataplane).await;
        self.listeners.close_others(&config.policy, &mut self.dataplane, config.drain.timeout).await;
        self.dataplane.readmit().await;
        let listening = self.listeners.listening();
        self.update_status(|status| status.listening = listening);
    }

    /// Passes the roots of all trust domains to the aggregator, so that xDS clients can verify servers by them.
    pub(super) fn publish_trust_roots(&self) {
        let Some(trust) = self.identity.context().trust.newest() else { return };
        self.registries.aggregator.use_trust_roots(trust_roots(&trust));
    }

    /// Adds the warnings of the config, and the warnings and problems of the cluster sources, to the status.
    pub(super) fn update_warnings(&self, config: &Config) {
        let of_config = config.warnings.iter().map(ToString::to_string);
        let warnings = of_config.chain(self.registries.clusters.problems()).collect();
        let claimed_twice = self.registries.clusters.claimed_twice();
        self.update_status(|status| {
            status.warnings = warnings;
            status.claimed_twice = claimed_twice;
        });
    }

    /// Changes the status that the admin API shows.
    pub(super) fn update_status(&self, change: impl FnOnce(&mut ProgramStatus)) {
        let mut status = (**self.status.load()).clone();
        change(&mut status);
        self.status.store(Arc::new(status));
    }

    /// Returns the inputs of the admin API.
    pub(super) fn sources(
        &self,
        xds: Option<&Xds>,
        dns: Option<&Dns>,
        commands: mpsc::Sender<Command>,
    ) -> Sources {
        let Handles { reader, telemetry, own, .. } = self.handles.clone();
        Sources {
            reader,
            names: dns.map(Dns::server),
            clients: xds.map(Xds::clients).unwrap_or_default(),
            enrolment: self.links.enrolment().clone(),
            links: self.links.table(),
            dataplane: self.dataplane.control(),
            drain_orders: self.registries.drain_orders.clone(),
            aggregator: self.registries.aggregator.clone(),
            liveness: self.registries.liveness.clone(),
            telemetry,
            identities: Identities { context: self.identity.context(), status: self.identity.status() },
            program: self.status.clone(),
            commands,
            own,
            started: Instant::now(),
            history: Arc::default(),
            overviews: Arc::default(),
            shares: self.shares.clone(),
            past: Past::default(),
        }
    }
}

/// Returns the root certificates of each trust domain in PEM.
fn trust_roots(trust: &TrustBundles) -> TrustRoots {
    let roots = trust.domains().map(|(domain, bundle)| (domain.as_str().into(), pem(&bundle.roots).into()));
    TrustRoots(roots.collect())
}

/// Returns the identification of this gateway for the access log.
fn gateway_name(config: &Config) -> Arc<GatewayName> {
    let node = &config.policy.node;
    Arc::new(GatewayName {
        name: node.name.clone(),
        network: node.network.shared(),
        cluster: node.cluster.shared(),
    })
}

/// Returns a function that returns the config in use as JSON.
fn in_use(config: &Config) -> InUse {
    let config = config.without_services();
    InUse(Arc::new(move || isthmus_config::effective(&config)))
}
