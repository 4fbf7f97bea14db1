//! The composition root of `isthmus run`: creates every part, connects the parts, and executes orders from signals, changed
//! files and the admin API. Orders are executed concurrently with all other work.

#[cfg_attr(not(feature = "kubernetes"), path = "clusters_disabled.rs")]
mod clusters;
mod dns;
mod listeners;
mod loading;
pub mod log;
mod orders;
mod otlp;
mod peers;
mod servers;
mod shutdown;
mod systemd;
mod threads;
mod xds;

use std::convert::Infallible;
use std::path::Path;
use std::pin::{Pin, pin};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use arc_swap::ArcSwap;
use tokio::sync::mpsc;
use tokio::time::sleep_until;

use self::clusters::Clusters;
use dns::Dns;
use isthmus_admin::certificates::{Identities, file_problems};
use isthmus_admin::problems;
use isthmus_admin::{Command, InUse, ProgramStatus, Sources};
use isthmus_aggregator::etcd::registry::EtcdRegistry;
use isthmus_aggregator::file::FileRegistry;
use isthmus_aggregator::owner::{self, Handle};
use isthmus_aggregator::registry::{Changes, Factory, Registry};
use isthmus_aggregator::spec::{RegistryKind, RegistrySpec};
use isthmus_aggregator::status::{RegistryState, RegistryStatus, Status};
use isthmus_config::{Config, LogFormat, Workers};
use isthmus_dataplane::handle::{Dataplane, DescriptorUses, EffectiveLimits};
use isthmus_files::reading::Readings;
use isthmus_files::watch::FileWatch;
#[cfg(feature = "kubernetes")]
use isthmus_kubernetes::registry::KubernetesRegistry;
use isthmus_model::address::{AdminBind, Bind};
use isthmus_model::record::GatewayName;
use isthmus_net::budget::raise_descriptor_limit;
use isthmus_net::handed;
use isthmus_net::inherited::Inherited;
use isthmus_net::own::{LOOK_UP_EVERY, OwnAddresses};
use isthmus_peer::imports::inbox::Inbox;
use isthmus_peer::imports::registry::PeerRegistry;
use isthmus_peer::links::Links;
use isthmus_snapshot::change::Change;
use isthmus_snapshot::dialled::Dialled;
use isthmus_snapshot::trust_roots::TrustRoots;
use isthmus_tasks::background;
use isthmus_tasks::scope::Scope;
use isthmus_telemetry::Telemetry;
use isthmus_telemetry::control::ReloadResult;
use isthmus_tls::certificate::pem;
use isthmus_tls::context::CertificateRotation;
use isthmus_tls::files;
use isthmus_tls::trust::TrustBundles;
use isthmus_world::LaterReader;
use listeners::Listeners;
use loading::{Loaded, Loader};
use orders::{Reload, Supervisor};
use otlp::Exporter;
use systemd::ServiceManager;
use xds::Xds;

/// The largest number of queued commands of the admin API.
const COMMANDS: usize = 16;
/// The number of threads of the control runtime, which runs admin, aggregator and look-ups.
const CONTROL_THREADS: usize = 2;
/// The largest number of threads beside those of the data plane: control, logs, file reads, builds and parsing, notices.
const THREADS: usize = CONTROL_THREADS + 15;
/// The time that resetting all connections may take after a second signal.
const RESET_WITHIN: Duration = Duration::from_millis(200);
/// The time that tasks get to finish when the program ends.
const END_WITHIN: Duration = Duration::from_millis(200);
/// The exit code after an internal fault (EX_SOFTWARE of sysexits.h).
const EXIT_INTERNAL: u8 = 70;
const AGGREGATOR_ENDED: &str = "the aggregator has ended";
/// The largest number of log files whose opening may hang at the same time.
const OPENINGS: usize = 4;

/// Runs the gateway until it is ordered to stop.
pub fn run(path: &Path) -> ExitCode {
    // The sockets of the service manager must be taken before anything else opens a descriptor.
    let inherited = match Inherited::take() {
        Ok(inherited) => inherited,
        Err(problem) => {
            log::print_problem(&problem);
            return ExitCode::FAILURE;
        }
    };
    use_small_pages();
    if let Err(problem) = threads::can_be_made(THREADS) {
        log::print_problem(&problem);
        return ExitCode::FAILURE;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(CONTROL_THREADS)
        .thread_name("isthmus-control")
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            log::print_problem(&format!("cannot start the control threads: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(run_until_stopped(path, inherited));
    runtime.shutdown_timeout(END_WITHIN);
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failed::Start) => ExitCode::FAILURE,
        Err(Failed::Internal) => ExitCode::from(EXIT_INTERNAL),
    }
}

/// An end of the program that nobody requested. Its cause has been reported.
enum Failed {
    /// The start failed.
    Start,
    /// An internal fault ended the program.
    Internal,
}

/// Reports a problem of the start on stderr, since the log is not started yet.
fn start_failed(problem: &str) -> Failed {
    log::print_problem(problem);
    Failed::Start
}

/// Reads the config, opens the logs, and runs the gateway. Orders are executed from the first moment.
async fn run_until_stopped(path: &Path, inherited: Inherited) -> Result<(), Failed> {
    let (command, commands) = mpsc::channel(COMMANDS);
    let mut supervisor = Supervisor::new(commands)
        .map_err(|error| start_failed(&format!("cannot receive signals: {error}")))?;
    let loader = Loader::new(path);
    let Ok(Loaded { config, files, .. }) = supervisor.during(loader.first()).await else { return Ok(()) };
    let config = config.map_err(|problems| start_failed(&problems.join("\n")))?;
    // `files` has the states of the files before the read, so files that change during a long start are read again.
    let watch = FileWatch::since(files.unwrap_or_default());
    let openings = Readings::new(OPENINGS);
    let opening = supervisor.during(orders::open(&openings, config.access_log.clone())).await;
    let Ok(access_log) = opening else { return Ok(()) };
    let access_log = access_log.map_err(|problem| start_failed(&problem))?;
    let telemetry = Telemetry::start(access_log)
        .map_err(|error| start_failed(&format!("cannot start the threads of the logs: {error}")))?;
    telemetry.gateway.store(gateway_name(&config));
    let scope = Scope::default();
    let manager = ServiceManager::from_environment(&scope);
    manager.tell("STATUS=reading the registries");
    let log = log::start(&config.log, &telemetry.writer);
    let level = config.log.level;
    supervisor.take_logs(log, level, &config.access_log, &telemetry.writer, &openings, &scope);
    let parts = Parts {
        path,
        config,
        inherited,
        manager,
        watch,
        telemetry: telemetry.clone(),
        scope,
        openings,
        command,
    };
    let result = match supervisor.during(Program::start(parts)).await {
        Ok(Ok(program)) => program.serve(supervisor, loader).await,
        Ok(Err(problem)) => {
            tracing::error!("{problem}");
            Err(Failed::Start)
        }
        Err(why) => {
            tracing::info!(why, "the gateway stops before its start is complete");
            Ok(())
        }
    };
    telemetry.writer.flush();
    result
}

/// Disables huge pages, which cost more here than they save, because snapshots are built and dropped piece by piece. With huge
/// pages, a million endpoints take a sixth more memory, and reading a million routes takes a third more processor time, all of
/// it in the kernel.
fn use_small_pages() {
    if let Err(error) = rustix::thread::disable_transparent_huge_pages(true) {
        log::print_problem(&format!("cannot disable huge pages: {error}"));
    }
}

/// The inputs of [`Program::start`].
struct Parts<'p> {
    path: &'p Path,
    config: Config,
    inherited: Inherited,
    manager: ServiceManager,
    /// The watch on the files of the config.
    watch: FileWatch,
    telemetry: Telemetry,
    scope: Scope,
    openings: Readings,
    command: mpsc::Sender<Command>,
}

/// The time for which a reload waits for newly added sources of Kubernetes clusters.
const CLUSTERS_WITHIN: Duration = Duration::from_secs(2);

struct Program {
    config: Config,
    /// The values that stay as they were in the config at the start of the process.
    fixed: Fixed,
    /// The watch on the files of the config.
    watch: FileWatch,
    telemetry: Telemetry,
    /// The limit on concurrent attempts to open the access log.
    openings: Readings,
    identity: CertificateRotation,
    /// The sources of Kubernetes clusters.
    clusters: Clusters,
    aggregator: Handle,
    dataplane: Dataplane,
    listeners: Listeners,
    exporter: Exporter,
    /// The links with peers.
    links: Links,
    status: Arc<ArcSwap<ProgramStatus>>,
    manager: ServiceManager,
    descriptors: usize,
    /// The socket file of the admin listener, which a second stop signal removes.
    admin_file: servers::AdminFile,
}

/// The events that the main loop handles, except orders (see `orders`).
enum Event {
    /// A requested reload may begin.
    Begin,
    Loaded(Reload, Box<Loaded>),
    /// The files of the config have changed.
    Changed,
    /// A peer was enrolled.
    Enrolled,
    /// The trusted roots have changed.
    Trust,
    /// Kubernetes clusters were found or removed.
    Clusters,
    /// The aggregator has ended, which is an internal fault.
    AggregatorEnded,
}

impl Program {
    async fn start(parts: Parts<'_>) -> Result<Self, String> {
        let Parts { path, config, inherited, manager, watch, telemetry, scope, openings, command } = parts;
        let descriptors = raise_descriptor_limit();
        let workers = match config.workers {
            Workers::Count(count) => count.get(),
            // The standard library considers the CPU quota of the cgroup and the affinity of the process.
            Workers::Auto => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        };
        threads::can_be_made(THREADS + workers)?;
        let limits = EffectiveLimits::new(&config.policy.limits, descriptors, uses(&config));
        tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            workers,
            descriptors,
            connections = limits.connections,
            pending_hellos = limits.pending_hellos,
            "isthmus starts"
        );
        // Listeners are bound first, so that an address in use is reported before any other work.
        let mut listeners = Listeners::new(inherited);
        listeners.warn_of_unused(&config.policy);
        let bound = listeners.bind(&config.policy, workers).map_err(|problems| problems.join("; "))?;
        let mut clusters = Clusters::new(scope.clone());
        clusters.configure(&config.registries, config.aggregator.start_timeout).await;
        clusters.remember(config.aggregator.state.as_deref()).await;
        let sources = world_sources(&config, &mut clusters);
        let (control, tasks) = (telemetry.control.clone(), scope.clone());
        let registry_tasks = scope.clone();
        // Registries are started before the first snapshot exists, so the reader is set later.
        let snapshots = LaterReader::default();
        let of_registries = snapshots.clone();
        let inbox = Inbox::default();
        let of_peers = inbox.clone();
        let registries: Arc<Factory> =
            Arc::new(move |spec| registry_of(spec, &registry_tasks, &of_registries, &of_peers));
        // The build takes long with a large config, so it runs on a background thread.
        let world = background::run(move || owner::start(sources, registries, &control, &tasks)).await;
        let (aggregator, reader) = world.map_err(|_| "building the first snapshot panicked".to_owned())?;
        // The result is ignored, since only this line sets the reader.
        let _ = snapshots.set(reader.clone());
        let mut identity = CertificateRotation::start(&scope);
        identity.configure(config.identity.clone()).await;
        let exporter = Exporter::start(&telemetry.spans, &scope);
        exporter.configure(config.tracing.as_ref(), &config.policy.node);
        let own = OwnAddresses::new();
        let (link, arrivals) = handed::queue();
        let mut dataplane =
            Dataplane::start(workers, limits, &reader, &telemetry, identity.context(), own.clone(), link)
                .map_err(|error| format!("cannot start the data plane: {error}"))?;
        let links =
            peers::start(&config, &reader, &identity, &inbox, arrivals, &telemetry.control, &scope).await?;
        let status = Arc::new(ArcSwap::from_pointee(ProgramStatus {
            config: path.to_owned(),
            config_since: SystemTime::now(),
            in_use: in_use(&config),
            rejected: Vec::new(),
            warnings: warnings(&config, &clusters),
            restart: Vec::new(),
            serving: false,
            listening: Vec::new(),
            limits,
            workers,
            draining: false,
        }));
        for warning in &config.warnings {
            tracing::warn!("{warning}");
        }
        let xds = config
            .xds
            .clone()
            .map(|options| {
                Xds::bind(
                    options,
                    limits.xds_connections,
                    &own,
                    &reader,
                    identity.context(),
                    &telemetry,
                    &scope,
                )
            })
            .transpose()?;
        let dns = config.dns_server.clone().map(|options| Dns::bind(options, limits.dns_connections));
        let dns = dns.transpose()?;
        let dns_server = dns.as_ref().map(|dns| dns.server(&reader, &own, &telemetry));
        let sources = Sources {
            reader,
            names: dns_server.clone(),
            clients: xds.as_ref().map(Xds::clients).unwrap_or_default(),
            enrolment: links.enrolment().clone(),
            links: links.table(),
            dataplane: dataplane.control(),
            aggregator: aggregator.status.clone(),
            telemetry: telemetry.clone(),
            identities: Identities { context: identity.context(), status: identity.status() },
            program: status.clone(),
            commands: command,
            own: own.clone(),
            started: Instant::now(),
            history: Arc::default(),
            overviews: Arc::default(),
        };
        let admin_file = servers::open(&config, &sources, &scope).await?;
        upkeep(&sources, &scope);
        scope.spawn(sources.dataplane.check(sources.reader.clone()));
        scope.spawn(problems::watch(sources.clone()));
        let names = if xds.is_some() { Names::Awaited } else { Names::Later };
        {
            let mut read = pin!(wait_for_registries(&aggregator, names, config.aggregator.start_timeout));
            loop {
                tokio::select! {
                    () = &mut read => break,
                    () = clusters.changed() => apply_clusters(&aggregator, &config, &mut clusters).await,
                }
            }
        }
        listeners.open(bound, &mut dataplane).await;
        if let Some(xds) = xds {
            // The xDS server starts after the registries have been read: otherwise a client that reconnects would lose the
            // endpoints of registries that are not read yet.
            xds.serve()?;
        }
        if let Some((dns, server)) = dns.zip(dns_server) {
            // The DNS server starts after the registries have been read: otherwise it would answer that names do not exist.
            dns.serve(&server, &sources, &scope)?;
        }
        let program = Self {
            fixed: Fixed::of(&config),
            config,
            watch,
            telemetry,
            openings,
            identity,
            clusters,
            aggregator,
            dataplane,
            listeners,
            exporter,
            links,
            status,
            manager,
            descriptors,
            admin_file,
        };
        program.give_trust_roots();
        program.tell_warnings();
        program.manager.watch_workers(program.dataplane.control(), &scope);
        program.manager.ready(&program.serving());
        program.tell(|status| {
            status.listening = program.listeners.listening();
            status.serving = true;
        });
        Ok(program)
    }

    /// Returns the status line for the service manager: the addresses of the listeners.
    fn serving(&self) -> String {
        let addresses: Vec<String> =
            self.listeners.listening().iter().map(|(name, address)| format!("{name} {address}")).collect();
        if addresses.is_empty() {
            "serving".to_owned()
        } else {
            format!("serving on {}", addresses.join(", "))
        }
    }

    fn tell(&self, change: impl FnOnce(&mut ProgramStatus)) {
        let mut status = (**self.status.load()).clone();
        change(&mut status);
        self.status.store(Arc::new(status));
    }

    async fn serve(mut self, mut supervisor: Supervisor, mut loader: Loader) -> Result<(), Failed> {
        let why = match self.handle_events(&mut supervisor, &mut loader).await {
            Ok(never) => match never {},
            Err(why) => why,
        };
        let internal = why == AGGREGATOR_ENDED;
        match internal {
            true => tracing::error!(
                "{why} because of an internal error; the gateway drains and exits with code {EXIT_INTERNAL}"
            ),
            false => tracing::info!(why, "stopping"),
        }
        drop(loader);
        self.manager.tell(&format!("STOPPING=1\nSTATUS=draining: {why}"));
        supervisor.set_draining();
        self.telemetry.control.draining();
        self.tell(|status| status.draining = true);
        let Self { dataplane, config, exporter, links, status, telemetry, aggregator, admin_file, .. } = self;
        // The links with peers are closed first. Each peer continues with the services that it has received.
        links.stop();
        let control = dataplane.control();
        let deaf = move || {
            let mut closed = (**status.load()).clone();
            closed.listening.clear();
            status.store(Arc::new(closed));
        };
        let stopped = async {
            shutdown::shutdown(dataplane, config.drain, deaf).await;
            exporter.finish().await;
            // The state of the registries is copied to disk, so that the next process starts with the newest state.
            let write = move || {
                aggregator.write_copies();
                links.write_times();
            };
            if tokio::task::spawn_blocking(write).await.is_err() {
                tracing::error!("writing the state folder panicked");
            }
        };
        if supervisor.during(stopped).await.is_err() {
            tracing::warn!("second signal received, exiting at once");
            // A client must not take a transfer that ends here for a complete one, as it would if the kernel closed the sockets.
            let _ = tokio::time::timeout(RESET_WITHIN, control.reset()).await;
            telemetry.writer.flush();
            if let Some(file) = admin_file.get() {
                file.remove();
            }
            // Destructors must not delay this exit.
            std::process::exit(1);
        }
        if internal { Err(Failed::Internal) } else { Ok(()) }
    }

    /// Handles events until an order to stop arrives; the error is the reason to stop.
    async fn handle_events(
        &mut self,
        supervisor: &mut Supervisor,
        loader: &mut Loader,
    ) -> Result<Infallible, &'static str> {
        let mut trust = self.identity.context().trust;
        loop {
            let (may_begin, is_asked) = (loader.may_begin(), supervisor.reload.is_some());
            let event = tokio::select! {
                // Orders have priority, then requested reloads, then other events.
                biased;
                stopped = supervisor.carry_out_next() => {
                    stopped?;
                    continue;
                }
                () = sleep_until(may_begin), if is_asked => Event::Begin,
                (reload, loaded) = loader.loaded() => Event::Loaded(reload, Box::new(loaded)),
                () = self.watch.changed(), if !loader.is_reading() => Event::Changed,
                () = self.links.enrolment().stored() => Event::Enrolled,
                _ = trust.changed() => Event::Trust,
                () = self.clusters.changed() => Event::Clusters,
                () = self.aggregator.ended() => Event::AggregatorEnded,
            };
            match event {
                Event::Begin => {
                    if let Some(reload) = supervisor.reload.take() {
                        self.manager.reloading();
                        loader.begin(reload, self.watch.seen().clone());
                    }
                }
                Event::Enrolled => supervisor.request_reload("a peer was enrolled", None),
                Event::Changed => supervisor.request_reload("the config file changed", None),
                Event::Trust => {
                    self.give_trust_roots();
                    supervisor.during(self.dataplane.readmit()).await?;
                }
                Event::Clusters => supervisor.during(self.renew_clusters()).await?,
                Event::AggregatorEnded => return Err(AGGREGATOR_ENDED),
                Event::Loaded(Reload { why, waiters }, loaded) => {
                    // The problems have already been logged, counted and added to the status.
                    let result = supervisor.during(self.reload(&why.join(", "), *loaded)).await?;
                    supervisor.configure_logs(self.config.log.level, &self.config.access_log);
                    match result.as_ref().err().and_then(|problems| problems.first()) {
                        None => self.manager.ready(&self.serving()),
                        Some(problem) => self
                            .manager
                            .ready(&format!("{}; the changed config is rejected: {problem}", self.serving())),
                    }
                    for waiter in waiters {
                        // The send fails if nobody waits for the result any more.
                        let _ = waiter.send(result.clone());
                    }
                }
            }
        }
    }

    /// Passes the roots of all trust domains to the aggregator, so that clients can verify servers by them.
    fn give_trust_roots(&self) {
        let Some(trust) = self.identity.context().trust.newest() else { return };
        self.aggregator.use_trust_roots(trust_roots(&trust));
    }

    /// Configures the aggregator with the Kubernetes clusters that are found at present.
    async fn renew_clusters(&mut self) {
        apply_clusters(&self.aggregator, &self.config, &mut self.clusters).await;
        self.tell_warnings();
    }

    /// Adds the warnings of the config and of the cluster sources to the status.
    fn tell_warnings(&self) {
        let warnings = warnings(&self.config, &self.clusters);
        self.tell(|status| status.warnings = warnings);
    }

    /// Applies a config that was read; on any error nothing changes.
    async fn reload(&mut self, why: &str, loaded: Loaded) -> Result<String, Vec<String>> {
        let result = self.try_reload(loaded).await;
        match &result {
            Ok(done) => {
                tracing::info!(why, "config {done}");
                self.telemetry.control.reloaded(ReloadResult::Applied);
                self.tell(|status| {
                    status.rejected.clear();
                    status.config_since = SystemTime::now();
                });
            }
            Err(problems) => {
                for problem in problems {
                    tracing::error!(why, "config rejected, the previous one stays in use: {problem}");
                }
                self.telemetry.control.reloaded(ReloadResult::Rejected);
                self.tell(|status| status.rejected.clone_from(problems));
            }
        }
        result
    }

    async fn try_reload(&mut self, loaded: Loaded) -> Result<String, Vec<String>> {
        let Loaded { config, files, known, cost } = loaded;
        self.watch.was_read(known, cost);
        if let Some(files) = &files {
            // The files of a rejected config are watched too, because the mistake may be corrected in a file that only this
            // config uses.
            self.watch.add(files);
        }
        let config = config?;
        // The file is opened again even if its path is the same, because it may have been moved.
        let order = self.telemetry.writer.order();
        let access_log = orders::open(&self.openings, config.access_log.clone()).await;
        let access_log = access_log.map_err(|problem| vec![problem])?;
        let bound = self.listeners.bind(&config.policy, self.dataplane.workers())?;
        // No step after this one can fail, so every part of the config is applied.
        self.clusters.configure(&config.registries, CLUSTERS_WITHIN).await;
        let sources = world_sources(&config, &mut self.clusters);
        let published = self.aggregator.configure(sources).await;
        published.map_err(|not_applied| vec![not_applied.to_string()])?;
        for warning in &config.warnings {
            tracing::warn!("{warning}");
        }
        peers::part(&self.links, &config);
        self.identity.configure(config.identity.clone()).await;
        let unusable = self.identity_problems(&config).await;
        self.listeners.open(bound, &mut self.dataplane).await;
        self.listeners.close_others(&config.policy, &mut self.dataplane, config.drain.timeout).await;
        let limits = EffectiveLimits::new(
            &config.policy.limits,
            self.descriptors,
            DescriptorUses { health_checks: config.policy.has_checks(), ..uses(&self.config) },
        );
        self.dataplane.set_limits(limits);
        self.dataplane.readmit().await;
        self.telemetry.gateway.store(gateway_name(&config));
        self.telemetry.writer.use_access_log(order, access_log);
        self.exporter.configure(config.tracing.as_ref(), &config.policy.node);
        peers::configure(&self.links, &config).await;
        let restart = self.fixed.differs_from(&Fixed::of(&config));
        for what in &restart {
            tracing::warn!("the change of {what} takes effect after a restart; all other changes are in use");
        }
        self.config = config;
        self.give_trust_roots();
        if let Some(files) = &files {
            self.watch.retain(files);
        }
        self.tell(|status| {
            status.listening = self.listeners.listening();
            status.limits = limits;
            status.in_use = in_use(&self.config);
            status.restart = restart.iter().map(ToString::to_string).collect();
        });
        self.tell_warnings();
        Ok(answer(&restart, &unusable))
    }

    /// Reads the files of the certificate and the roots, as `isthmus validate` does, and logs and returns what is wrong with them.
    async fn identity_problems(&self, config: &Config) -> Vec<String> {
        let config = config.without_services();
        let read = self.openings.read(files::READ_WITHIN, move || file_problems(&config)).await;
        let problems = read.unwrap_or_else(|unread| {
            vec![format!("the files of the certificate and the roots cannot be read: {unread}")]
        });
        for problem in &problems {
            tracing::warn!("{problem}");
        }
        problems
    }
}

/// Returns the answer to a reload that was applied. `restart` lists the changes that need a restart, `unusable` the problems of
/// the files of certificates and roots. These files are read apart from the config, so their problems do not prevent a reload:
/// where a file cannot be used, its last good contents stay in use.
fn answer(restart: &[&str], unusable: &[String]) -> String {
    let mut text = "applied".to_owned();
    if !restart.is_empty() {
        text += &format!(", except {}, which takes effect after a restart", restart.join(", "));
    }
    if !unusable.is_empty() {
        text += &format!("; warning: certificates or roots have problems: {}", unusable.join("; "));
    }
    text
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

/// Returns the warnings of the config, and the problems of the cluster sources.
fn warnings(config: &Config, clusters: &Clusters) -> Vec<String> {
    [texts(&config.warnings), clusters.problems()].concat()
}

fn texts(problems: &[isthmus_document::problem::Problem]) -> Vec<String> {
    problems.iter().map(ToString::to_string).collect()
}

/// The values that a reload does not change. They stay as they were in the config at the start of the process.
struct Fixed {
    workers: Workers,
    admin: Option<AdminBind>,
    metrics: Option<Bind>,
    health: Option<Bind>,
    xds: Option<isthmus_xds::options::Options>,
    dns_server: Option<isthmus_dns::Options>,
    log: LogFormat,
}

impl Fixed {
    fn of(config: &Config) -> Self {
        Self {
            workers: config.workers,
            admin: config.admin.clone(),
            metrics: config.metrics,
            health: config.health,
            xds: config.xds.clone(),
            dns_server: config.dns_server.clone(),
            log: config.log.format,
        }
    }

    /// Returns the keys whose values differ between two configs.
    fn differs_from(&self, next: &Self) -> Vec<&'static str> {
        let changed = [
            ("workers", self.workers != next.workers),
            ("admin.bind", self.admin != next.admin),
            ("telemetry.metrics.bind", self.metrics != next.metrics),
            ("telemetry.health.bind", self.health != next.health),
            ("xds", self.xds != next.xds),
            ("dnsServer", self.dns_server != next.dns_server),
            ("telemetry.log.format", self.log != next.log),
        ];
        changed.into_iter().filter(|(_, changed)| *changed).map(|(name, _)| name).collect()
    }
}

fn world_sources(config: &Config, clusters: &mut Clusters) -> owner::Sources {
    owner::Sources {
        policy: config.policy.clone(),
        services: config.services.clone(),
        registries: clusters.expanded(&config.registries, &config.policy.node.cluster),
        options: config.aggregator.clone(),
    }
}

/// Configures the aggregator with the Kubernetes clusters that are found at present.
async fn apply_clusters(aggregator: &Handle, config: &Config, clusters: &mut Clusters) {
    let sources = world_sources(config, clusters);
    if let Err(not_applied) = aggregator.configure(sources).await {
        tracing::error!("cannot apply the Kubernetes clusters that were found: {not_applied}");
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
#[cfg_attr(
    not(feature = "kubernetes"),
    expect(unused_variables, reason = "only clusters are compared by it")
)]
fn registry_of(spec: &RegistrySpec, scope: &Scope, world: &LaterReader, inbox: &Inbox) -> Box<dyn Registry> {
    match &spec.kind {
        RegistryKind::File { path } => Box::new(FileRegistry::new(spec.clone(), path.clone())),
        #[cfg(feature = "kubernetes")]
        RegistryKind::Kubernetes(kubernetes) => {
            Box::new(KubernetesRegistry::new(spec.clone(), kubernetes.clone(), scope.clone(), world.clone()))
        }
        RegistryKind::KubernetesClusters(_) => Box::new(UnreadSource(spec.clone())),
        RegistryKind::Peer(peer) => Box::new(PeerRegistry::new(spec.clone(), peer.clone(), inbox.clone())),
        // In a build without Kubernetes, the check of the config has refused such a registry already.
        #[cfg(not(feature = "kubernetes"))]
        RegistryKind::Kubernetes(_) => Box::new(UnreadSource(spec.clone())),
        RegistryKind::Etcd(etcd) => Box::new(EtcdRegistry::new(spec.clone(), etcd.clone(), scope.clone())),
    }
}

/// Returns which features of the config need file descriptors of their own.
fn uses(config: &Config) -> DescriptorUses {
    DescriptorUses {
        xds: config.xds.is_some(),
        dns: config.dns_server.is_some(),
        health_checks: config.policy.has_checks(),
    }
}

/// Runs the periodic upkeep: readmits ejected endpoints, applies new ejection settings to them, drops the state of unused
/// endpoints, and updates the list of this host's addresses.
fn upkeep(sources: &Sources, scope: &Scope) {
    let (upstreams, reader) = (sources.dataplane.upstreams().clone(), sources.reader.clone());
    let own = sources.own.clone();
    scope.spawn(async move {
        let mut every = tokio::time::interval(Duration::from_secs(1));
        let mut policy = reader.latest().policy_generation;
        loop {
            every.tick().await;
            upstreams.upkeep();
            let snapshot = reader.latest();
            let is_new =
                std::mem::replace(&mut policy, snapshot.policy_generation) != snapshot.policy_generation;
            if is_new && !upstreams.is_whole() {
                let upstreams = upstreams.clone();
                // This takes long in a large config. If it panics, the ejections end at the time that was set before.
                let limited = background::run(move || {
                    for candidates in Dialled::new(&snapshot.policy).all(&snapshot) {
                        upstreams.limit_ejections(candidates);
                    }
                });
                let _ = limited.await;
            }
        }
    });
    scope.spawn(async move {
        let mut every = tokio::time::interval(LOOK_UP_EVERY);
        loop {
            every.tick().await;
            own.look_up_host();
        }
    });
}

/// The treatment of host names during the start: the start waits until each has been looked up once, or it does not wait. A
/// network whose gateway has an unresolved host name cannot be reached. Without the wait, an xDS client that reconnects during
/// the start would therefore lose the endpoints of that network.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Names {
    Awaited,
    Later,
}

/// Waits until every registry, or the last good copy of it, has been read. After the timeout the gateway starts without the
/// missing ones.
async fn wait_for_registries(aggregator: &Handle, names: Names, timeout: Duration) {
    let mut status = aggregator.status.clone();
    let all_in = |status: &Arc<Status>| {
        (names == Names::Later || status.looking_up == 0) && missing(status).next().is_none()
    };
    if tokio::time::timeout(timeout, status.wait_for(all_in)).await.is_ok() {
        return;
    }
    let status = status.borrow();
    for registry in missing(&status) {
        let problem = registry.problems.first().map_or("still being read", String::as_str);
        tracing::warn!(registry = &*registry.name, problem, "the registry was not read in time");
    }
    tracing::warn!(
        "some registries were not read within aggregator.startTimeout; the listeners open without their services"
    );
}

fn missing(status: &Status) -> impl Iterator<Item = &RegistryStatus> {
    let awaited = status.registries.iter().filter(|registry| !registry.is_peer);
    awaited.filter(|registry| registry.state == RegistryState::Missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_applied_reload_names_what_is_not_in_use() {
        assert_eq!(answer(&[], &[]), "applied");
        let certificate = "c.yaml:3:1: identity.files: the certificate expired";
        assert_eq!(
            answer(&["workers", "xds"], &[certificate.to_owned()]),
            format!(
                "applied, except workers, xds, which takes effect after a restart; warning: certificates or roots have problems: \
                 {certificate}"
            )
        );
    }
}
