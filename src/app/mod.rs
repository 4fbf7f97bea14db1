//! The composition root of `isthmus run`: makes every part, hands each what it needs, and carries out what signals,
//! changed files and the admin API ask for.

mod listeners;
mod log;
#[cfg(feature = "otlp")]
mod otlp;
mod shutdown;
#[cfg(not(feature = "otlp"))]
mod untraced;
mod xds;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use arc_swap::ArcSwap;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use crate::admin::certificates::Identities;
use crate::admin::problems;
use crate::admin::server::{self, Part};
use crate::admin::{Command, ProgramStatus, Sources};
use crate::aggregator::owner::{self, Handle};
use crate::aggregator::status::RegistryState;
use crate::config::{self, Config, LogFormat, Workers};
use crate::dataplane::handle::{Dataplane, EffectiveLimits};
use crate::model::address::Bind;
use crate::net::budget::raise_descriptor_limit;
use crate::net::labour::labour;
use crate::net::own::OwnAddresses;
use crate::net::scope::Scope;
use crate::net::watch::{FileWatch, Sightings};
use crate::telemetry::Telemetry;
use crate::telemetry::access_log::GatewayName;
use crate::telemetry::control::ReloadResult;
use crate::tls::context::Keeper;
use listeners::Listeners;
use log::LogControl;
#[cfg(feature = "otlp")]
use otlp::Exporter;
#[cfg(not(feature = "otlp"))]
use untraced::Exporter;
use xds::Xds;

/// Commands of the admin API that may wait.
const COMMANDS: usize = 16;
/// Threads of the control side: admin, aggregator, look-ups.
const CONTROL_THREADS: usize = 2;

/// Runs the gateway until it is told to stop.
pub fn run(path: &Path) -> ExitCode {
    use_small_pages();
    let (config, seen) = load(path);
    // A start may take long: what changes meanwhile is to be read again.
    let watch = FileWatch::since(seen);
    let config = match config {
        Ok(config) => config,
        Err(problems) => {
            for problem in problems {
                log::complain(&problem);
            }
            return ExitCode::FAILURE;
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(CONTROL_THREADS)
        .thread_name("isthmus-control")
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            log::complain(&format!("cannot start the control threads: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let telemetry = Telemetry::start(config.access_log.clone());
    telemetry.gateway.store(gateway_name(&config));
    let result = runtime.block_on(async {
        let log = log::start(&config.log, &telemetry.writer);
        let program = Program::start(path, config, watch, telemetry.clone(), log).await?;
        program.serve().await;
        Ok::<(), String>(())
    });
    if let Err(problem) = &result {
        tracing::error!("{problem}");
    }
    telemetry.writer.flush();
    runtime.shutdown_timeout(Duration::from_secs(1));
    if result.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Huge pages are of no use to a world that is built and let go piece by piece: with a million endpoints it takes a
/// sixth more memory in them, and reading a million routes a third more processor time, all of it the kernel's.
fn use_small_pages() {
    if let Err(error) = rustix::thread::disable_transparent_huge_pages(true) {
        log::complain(&format!("cannot do without huge pages: {error}"));
    }
}

/// Reads and checks the config file; what is wrong with it, a line each. And how the files were before they were read.
fn load(path: &Path) -> (Result<Config, Vec<String>>, Sightings) {
    let mut seen = Sightings::default();
    let config = config::load(path, &|name| std::env::var(name).ok(), &mut |path| seen.note(path));
    (config.map_err(|problems| problems.iter().map(ToString::to_string).collect()), seen)
}

struct Program {
    path: PathBuf,
    config: Config,
    /// What the process keeps of the config that it was started with.
    fixed: Fixed,
    /// Of the files that the config came from.
    watch: FileWatch,
    telemetry: Telemetry,
    log: LogControl,
    identity: Keeper,
    aggregator: Handle,
    dataplane: Dataplane,
    listeners: Listeners,
    exporter: Exporter,
    status: Arc<ArcSwap<ProgramStatus>>,
    commands: mpsc::Receiver<Command>,
    descriptors: usize,
}

/// What the program waits for.
enum Event {
    Stop(&'static str),
    Reload(&'static str),
    /// Other roots are trusted than before.
    Trust,
    ReopenLogs,
    Command(Command),
}

impl Program {
    async fn start(
        path: &Path,
        config: Config,
        watch: FileWatch,
        telemetry: Telemetry,
        log: LogControl,
    ) -> Result<Self, String> {
        let descriptors = raise_descriptor_limit();
        let workers = match config.workers {
            Workers::Count(count) => count.get(),
            // The standard library looks at the CPU quota of the cgroup and at the affinity of the process.
            Workers::Auto => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        };
        let limits = EffectiveLimits::new(&config.policy.limits, descriptors, config.xds.is_some());
        tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            workers,
            descriptors,
            connections = limits.connections,
            pending_hellos = limits.pending_hellos,
            "isthmus starts"
        );
        // Bound first: an address in use is known before anything else is done.
        let mut listeners = Listeners::default();
        let bound = listeners.bind(&config.policy, workers).map_err(|problems| problems.join("; "))?;
        let scope = Scope::default();
        let (aggregator, reader) = owner::start(world_sources(&config), &telemetry.control, &scope);
        let mut identity = Keeper::start(&scope);
        identity.configure(config.identity.clone()).await;
        let exporter = Exporter::start(&telemetry.spans, &scope);
        exporter.configure(config.tracing.as_ref(), &config.policy.node);
        let own = OwnAddresses::new();
        let mut dataplane =
            Dataplane::start(workers, limits, &reader, &telemetry, identity.context(), own.clone())
                .map_err(|error| format!("cannot start the data plane: {error}"))?;
        let (command, commands) = mpsc::channel(COMMANDS);
        let status = Arc::new(ArcSwap::from_pointee(ProgramStatus {
            config: path.to_owned(),
            config_since: SystemTime::now(),
            rejected: Vec::new(),
            warnings: texts(&config.warnings),
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
        let sources = Sources {
            reader,
            clients: xds.as_ref().map(Xds::clients).unwrap_or_default(),
            dataplane: dataplane.control(),
            aggregator: aggregator.status.clone(),
            telemetry: telemetry.clone(),
            identities: Identities { context: identity.context(), status: identity.status() },
            program: status.clone(),
            commands: command,
            own: own.clone(),
            started: Instant::now(),
            memory: Arc::default(),
        };
        open_servers(&config, &sources, &scope).await?;
        upkeep(&sources, &scope);
        scope.spawn(problems::watch(sources.clone()));
        wait_for_registries(&aggregator, config.aggregator.start_timeout).await;
        listeners.open(bound, &mut dataplane).await;
        if let Some(xds) = xds {
            // Only when registries have said what there is: a client that comes back would lose what they still list.
            xds.serve()?;
        }
        let program = Self {
            path: path.to_owned(),
            fixed: Fixed::of(&config),
            config,
            watch,
            telemetry,
            log,
            identity,
            aggregator,
            dataplane,
            listeners,
            exporter,
            status,
            commands,
            descriptors,
        };
        program.tell(|status| {
            status.listening = program.listeners.listening();
            status.serving = true;
        });
        Ok(program)
    }

    fn tell(&self, change: impl FnOnce(&mut ProgramStatus)) {
        let mut status = (**self.status.load()).clone();
        change(&mut status);
        self.status.store(Arc::new(status));
    }

    async fn serve(mut self) {
        let Ok(mut signals) = Signals::new() else {
            tracing::error!("cannot listen to signals");
            return;
        };
        let mut trust = self.identity.context().trust;
        loop {
            let event = tokio::select! {
                // Orders to stop come first.
                biased;
                event = signals.next() => event,
                Some(command) = self.commands.recv() => Event::Command(command),
                () = self.watch.changed() => Event::Reload("the config file changed"),
                _ = trust.changed() => Event::Trust,
            };
            match event {
                Event::Stop(why) => {
                    tracing::info!(why, "stopping");
                    break;
                }
                Event::Command(Command::Drain) => {
                    tracing::info!(why = "POST /drain", "stopping");
                    break;
                }
                Event::Trust => self.dataplane.readmit().await,
                Event::ReopenLogs => self.telemetry.writer.use_access_log(self.config.access_log.clone()),
                Event::Reload(why) => {
                    // Problems were logged, counted and put into the status.
                    let _ = self.reload(why).await;
                }
                Event::Command(Command::Reload(answer)) => {
                    let _ = answer.send(self.reload("POST /api/v1/reload").await);
                }
                Event::Command(Command::LogLevel(level, answer)) => {
                    let _ = answer.send(self.log.set(&level, self.config.log.level));
                }
            }
        }
        self.tell(|status| status.draining = true);
        let status = self.status.clone();
        let deaf = move || {
            let mut closed = (**status.load()).clone();
            closed.listening.clear();
            status.store(Arc::new(closed));
        };
        shutdown::shutdown(self.dataplane, self.config.drain, signals, deaf).await;
        self.exporter.finish().await;
    }

    /// Takes the file as it is now into use; on any error nothing changes.
    async fn reload(&mut self, why: &str) -> Result<String, Vec<String>> {
        // Before it is read, which takes time: what changes meanwhile is to be read again.
        self.watch.look().await;
        let result = self.try_reload().await;
        match &result {
            Ok(done) => {
                tracing::info!(why, "config taken into use: {done}");
                self.telemetry.control.reloaded(ReloadResult::Applied);
                self.tell(|status| {
                    status.rejected.clear();
                    status.config_since = SystemTime::now();
                });
            }
            Err(problems) => {
                for problem in problems {
                    tracing::error!(why, "config rejected, nothing changed: {problem}");
                }
                self.telemetry.control.reloaded(ReloadResult::Rejected);
                self.tell(|status| status.rejected.clone_from(problems));
            }
        }
        result
    }

    async fn try_reload(&mut self) -> Result<String, Vec<String>> {
        let path = self.path.clone();
        let (config, seen) =
            labour(move || load(&path)).await.map_err(|_| vec!["reading the config panicked".to_owned()])?;
        // Also of a config that is rejected: what mends it may be in a file that is new to it.
        self.watch.add(&seen);
        let config = config?;
        // The last thing that can fail: from here on, everything is taken into use.
        let bound = self.listeners.bind(&config.policy, self.dataplane.workers())?;
        for warning in &config.warnings {
            tracing::warn!("{warning}");
        }
        self.identity.configure(config.identity.clone()).await;
        self.aggregator.configure(world_sources(&config)).await;
        self.listeners.open(bound, &mut self.dataplane).await;
        self.listeners.close_others(&config.policy, &mut self.dataplane, config.drain.timeout).await;
        let limits = EffectiveLimits::new(&config.policy.limits, self.descriptors, self.config.xds.is_some());
        self.dataplane.set_limits(limits);
        self.dataplane.readmit().await;
        self.telemetry.gateway.store(gateway_name(&config));
        self.telemetry.writer.use_access_log(config.access_log.clone());
        self.exporter.configure(config.tracing.as_ref(), &config.policy.node);
        if config.log.level != self.config.log.level {
            let _ = self.log.set(config.log.level.text(), config.log.level);
        }
        let restart = self.fixed.differs_from(&Fixed::of(&config));
        for what in &restart {
            tracing::warn!("{what} has changed, which needs a restart; all else is in use");
        }
        self.config = config;
        self.watch.retain(&seen);
        self.tell(|status| {
            status.listening = self.listeners.listening();
            status.limits = limits;
            status.warnings = texts(&self.config.warnings);
            status.restart = restart.iter().map(ToString::to_string).collect();
        });
        Ok(if restart.is_empty() {
            "applied".to_owned()
        } else {
            format!("applied, but for {}, which needs a restart", restart.join(", "))
        })
    }
}

/// How the access log names this gateway.
fn gateway_name(config: &Config) -> Arc<GatewayName> {
    let node = &config.policy.node;
    Arc::new(GatewayName {
        name: node.name.clone(),
        network: node.network.shared(),
        cluster: node.cluster.shared(),
    })
}

fn texts(problems: &[crate::document::problem::Problem]) -> Vec<String> {
    problems.iter().map(ToString::to_string).collect()
}

/// What a process keeps of the config that it was started with, whatever it reads later.
struct Fixed {
    workers: Workers,
    admin: Option<SocketAddr>,
    metrics: Option<Bind>,
    health: Option<Bind>,
    xds: Option<crate::discovery::Options>,
    log: LogFormat,
}

impl Fixed {
    fn of(config: &Config) -> Self {
        Self {
            workers: config.workers,
            admin: config.admin,
            metrics: config.metrics,
            health: config.health,
            xds: config.xds.clone(),
            log: config.log.format,
        }
    }

    /// The keys whose values differ.
    fn differs_from(&self, next: &Self) -> Vec<&'static str> {
        let changed = [
            ("workers", self.workers != next.workers),
            ("admin.bind", self.admin != next.admin),
            ("telemetry.metrics.bind", self.metrics != next.metrics),
            ("telemetry.health.bind", self.health != next.health),
            ("xds", self.xds != next.xds),
            ("telemetry.log.format", self.log != next.log),
        ];
        changed.into_iter().filter(|(_, changed)| *changed).map(|(name, _)| name).collect()
    }
}

fn world_sources(config: &Config) -> owner::Sources {
    owner::Sources {
        policy: config.policy.clone(),
        services: config.services.clone(),
        registries: config.registries.clone(),
        options: config.aggregator.clone(),
    }
}

async fn open_servers(config: &Config, sources: &Sources, scope: &Scope) -> Result<(), String> {
    let servers = [
        (Part::Admin, "admin", config.admin.map(Bind::Address)),
        (Part::Metrics, "metrics", config.metrics),
        (Part::Health, "health", config.health),
    ];
    for (part, name, bind) in servers {
        let Some(bind) = bind else {
            continue;
        };
        let cannot = |error: std::io::Error| format!("cannot listen on {bind} ({name}): {error}");
        let listening = crate::net::listen::listen(bind, 1).map_err(cannot)?;
        tracing::info!(listener = name, address = %listening.address, "listening");
        for socket in listening.sockets {
            let listener = TcpListener::from_std(socket.into()).map_err(cannot)?;
            server::serve(part, listener, sources.clone(), scope);
        }
    }
    Ok(())
}

/// Lets ejected endpoints back in time, forgets unused ones, and notices new addresses of this host.
fn upkeep(sources: &Sources, scope: &Scope) {
    let upstreams = sources.dataplane.upstreams().clone();
    let own = sources.own.clone();
    scope.spawn(async move {
        let mut every = tokio::time::interval(Duration::from_secs(1));
        loop {
            every.tick().await;
            upstreams.upkeep();
            own.look_up_host();
        }
    });
}

/// Waits until each registry has said something, if only that it cannot be read; the gateway then listens without
/// those that have not.
async fn wait_for_registries(aggregator: &Handle, timeout: Duration) {
    let mut status = aggregator.status.clone();
    let heard = status.wait_for(|status| {
        status
            .registries
            .iter()
            .all(|registry| registry.state != RegistryState::Missing || !registry.problems.is_empty())
    });
    if tokio::time::timeout(timeout, heard).await.is_err() {
        tracing::warn!("some registries have not answered; listening without them");
    }
}

/// The signals that mean something to us.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
    user: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
            user: signal(SignalKind::user_defined1())?,
        })
    }

    async fn next(&mut self) -> Event {
        tokio::select! {
            biased;
            _ = self.terminate.recv() => Event::Stop("SIGTERM"),
            _ = self.interrupt.recv() => Event::Stop("SIGINT"),
            _ = self.hang_up.recv() => Event::Reload("SIGHUP"),
            _ = self.user.recv() => Event::ReopenLogs,
        }
    }

    /// Waits for one more order to stop.
    async fn stop_again(&mut self) {
        while !matches!(self.next().await, Event::Stop(_)) {}
    }
}
