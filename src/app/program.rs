//! The running program: its start, its reaction to events, reloads, and its end.

use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::dns::Dns;
use super::fixed::Fixed;
use super::handles::Handles;
use super::listeners::Listeners;
use super::loading::{Loaded, Loader};
use super::orders::{Reload, Supervisor};
use super::parts::{Parts, Prepared, Succession};
use super::peers;
use super::systemd::ServiceManager;
use super::upgrade::giving::{self, Step, Upgrades};
use super::upgrade::moving::{Given, Giving};
use super::upgrade::sockets::{LISTENER, Sockets, name, name_of};
use super::upgrade::taking::Taking;
use super::wds::Wds;
use super::xds::Xds;
use super::{EXIT_INTERNAL, Failed, THREADS, beliefs, servers, shutdown, threads, upkeep};
use isthmus_admin::certificates::file_problems;
use isthmus_admin::{Command, Sources, problems};
use isthmus_aggregator::liveness::Liveness;
use isthmus_aggregator::owner::Recalled;
use isthmus_config::Config;
use isthmus_dataplane::handle::Control;
use isthmus_files::reading::Readings;
use isthmus_files::watch::FileWatch;
use isthmus_net::budget::raise_descriptor_limit;
use isthmus_net::inherited::Inherited;
use isthmus_net::lookup::Cause;
use isthmus_net::memory::set_budget;
use isthmus_tasks::background;
use isthmus_tasks::scope::Scope;
use isthmus_tasks::stop::Stop as StopOrder;
use isthmus_telemetry::Telemetry;
use isthmus_telemetry::control::{ReloadResult, UpgradeResult};
use isthmus_tls::files;
use isthmus_upgrade::belief::Beliefs;
use isthmus_upgrade::message::{Room, SocketName};
use isthmus_upgrade::place;

/// The time that resetting all connections may take after a second signal.
const RESET_WITHIN: Duration = Duration::from_secs(1);
/// The time that requests to the admin API, and giving up Leases, may take when all connections have ended.
const ANSWERED_WITHIN: Duration = Duration::from_secs(1);
const AGGREGATOR_ENDED: &str = "the aggregator has ended";

/// The inputs of [`Program::start`].
pub(super) struct Inputs<'p> {
    pub(super) path: &'p Path,
    pub(super) config: Config,
    pub(super) inherited: Inherited,
    pub(super) manager: ServiceManager,
    /// The watch on the files of the config.
    pub(super) watch: FileWatch,
    pub(super) telemetry: Telemetry,
    pub(super) scope: Scope,
    pub(super) openings: Readings,
    pub(super) command: mpsc::Sender<Command>,
    /// The program file and the arguments of this process.
    pub(super) file: Result<giving::Program, String>,
    /// The earlier process that this one takes over from.
    pub(super) taking: Option<&'p mut Taking>,
    pub(super) sockets: Sockets,
}

/// The running gateway.
pub(super) struct Program {
    /// The config in use.
    config: Config,
    parts: Parts,
    /// The watch on the files of the config.
    watch: FileWatch,
    /// The limit on concurrent reads of the access log and of certificates that may hang.
    openings: Readings,
    manager: ServiceManager,
    /// The socket file of the admin listener, which a second stop signal removes.
    admin_file: servers::AdminFile,
    upgrades: Upgrades,
    /// The order to stop, for the task that follows the old process of an upgrade.
    stopping: StopOrder,
}

/// The reason to end.
enum Stop {
    /// This order, or the fault.
    Ordered(&'static str),
    /// A new process serves.
    HandedOver(Box<Giving>),
}

impl From<&'static str> for Stop {
    fn from(why: &'static str) -> Self {
        Self::Ordered(why)
    }
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
    /// The next step of an upgrade.
    Upgrade(Step),
    /// The aggregator has ended, which is an internal fault.
    AggregatorEnded,
}

impl Program {
    /// Starts all parts, waits for the registries, and opens the listeners.
    pub(super) async fn start(inputs: Inputs<'_>) -> Result<Self, String> {
        let Inputs { path, config, inherited, manager, watch, telemetry, scope, openings, command, .. } =
            inputs;
        let Inputs { file, mut taking, sockets, .. } = inputs;
        let fixed = Fixed::of(&config, raise_descriptor_limit());
        let (workers, limits) = (fixed.workers(), fixed.limits(&config));
        let (descriptors, room) = fixed.connections_max(&config);
        let (descriptors, room) = (descriptors as u64, room as u64);
        threads::can_be_made(THREADS + workers)?;
        // It holds until the first judgement, so that registries are read within their share.
        set_budget(upkeep::memory(config.policy.limits.memory).budget);
        tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            workers,
            descriptors = limits.descriptors,
            connections = limits.connections,
            pending_hellos = limits.pending_hellos,
            "isthmus starts"
        );
        // Listeners are bound first, so that an address in use is reported before any other work.
        let listeners = Listeners::new(inherited, sockets.clone());
        listeners.warn_of_unused(&config.policy);
        let bound = listeners.bind(&config.policy, workers).map_err(|problems| problems.join("; "))?;
        let instance = taking.as_ref().map(|taking| taking.instance.clone());
        let instance = instance.unwrap_or_else(|| peers::instance(&config));
        let deadline = Instant::now() + config.aggregator.start_timeout;
        let (beliefs, liveness) = (recalled(taking.as_deref(), &config).await, Liveness::default());
        let Beliefs { names, gateways, distances, holds, drains, demands, endpoints, checks } = beliefs;
        liveness.recall(&config.policy.node.network, gateways, distances);
        let recalled = Recalled { names, holds, drains, demands };
        let (sockets_of_parts, waits) = (sockets.clone(), taking.is_some());
        let succession =
            Succession { sockets: sockets_of_parts, instance: instance.clone(), waits, recalled, liveness };
        let mut parts = Parts::start(path, &config, fixed, listeners, telemetry, &scope, succession).await?;
        // Before anything is written to the state folder, so that these beliefs are written again while they wait.
        let control = parts.dataplane.control();
        control.upstreams().recall_endpoints(endpoints);
        control.upstreams().recall_checks(checks);
        parts.apply(&config).await;
        let xds = config.xds.clone().map(|options| {
            Xds::bind(options, limits.xds_connections, parts.identity.context(), &parts.handles)
        });
        let xds = xds.transpose()?;
        let wds = config.wds.as_ref().zip(xds.as_ref()).map(|(options, xds)| {
            let reviewer = parts.registries.reviewer(&scope);
            Wds::bind(options, limits.xds_connections, xds.clients(), reviewer, &parts.handles)
        });
        let wds = wds.transpose()?;
        let dns = config
            .dns_server
            .clone()
            .map(|options| Dns::bind(&options, limits.dns_connections, &parts.handles));
        let dns = dns.transpose()?;
        let sources = parts.sources(xds.as_ref(), dns.as_ref(), command);
        let mut admin_file = servers::AdminFile::default();
        if taking.is_none() {
            admin_file = servers::open(&config, &sources, &parts.handles).await?;
        }
        upkeep::start(&sources, &scope);
        scope.spawn(sources.dataplane.check(sources.reader.clone()));
        scope.spawn(problems::watch(sources.clone()));
        parts.registries.are_read(&config, deadline).await;
        parts.update_warnings(&config);
        if xds.is_some() || dns.is_some() {
            parts.registries.gateways_are_judged(&sources.reader, deadline).await;
        }
        if let Some(taking) = &mut taking {
            // An old process that does not tell its addresses of host names may have some that this one lacks.
            let lacks_names = taking.beliefs().is_none();
            let closed = || {
                let awaited = (lacks_names && Instant::now() < deadline).then(|| names_gate(&sources));
                closed_gates(&sources, &config).into_iter().chain(awaited.flatten()).collect()
            };
            let free = || upkeep::memory(config.policy.limits.memory).free;
            let room = || Room { descriptors, connections: room, memory: free() };
            taking.ready(closed, room, &sources.dataplane, &parts.handles.telemetry).await?;
            if let Some(last) = taking.last_beliefs() {
                control.upstreams().recall_endpoints(last.endpoints);
                parts.registries.aggregator.remember_left(last.drains).await;
            }
        }
        let seen = sources.reader.latest().generation;
        if beliefs::find_endpoints(&sources).await {
            scope.spawn(beliefs::await_endpoints(sources.clone(), seen));
        }
        // Nothing is sent to what was drained before the start.
        let drains = taking.as_mut().and_then(|taking| taking.drains());
        parts.registries.drains_are_in_force(drains.as_deref(), &sources.reader).await;
        // The xDS and DNS servers start after the registries have been read. Otherwise an xDS client that reconnects would lose
        // the endpoints of registries that are not read yet, and DNS clients would learn that names do not exist.
        xds.map_or(Ok(()), |xds| xds.serve(&parts.handles))?;
        wds.map_or(Ok(()), |wds| wds.serve(&parts.handles))?;
        dns.map_or(Ok(()), |dns| dns.serve(&parts.handles))?;
        if let Some(taken_over) = taking.as_deref().map(Taking::taken_over) {
            // The sockets of admin and health were served without a gap, so the first answer there must be that the gateway is ready,
            // and from which process it has taken over.
            parts.update_status(|status| (status.serving, status.taken_over) = (true, Some(taken_over)));
            admin_file = servers::open(&config, &sources, &parts.handles).await?;
        }
        // The counters of an earlier process are there, so they are not traffic of the first step.
        scope.spawn(sources.past.clone().run(parts.handles.telemetry.clone(), sources.dataplane.clone()));
        let status = parts.status.clone();
        let upgrades = Upgrades::open(file, upgrade_path(&config), instance, &sockets, status).await;
        // Connections are accepted last, when nothing can fail any more.
        parts.open(&config, bound).await;
        if let Some(taking) = taking {
            taking.serves(&sockets).await;
            parts.begin_alone(&config).await;
            let taken_over = taking.taken_over();
            parts.update_status(|status| status.taken_over = Some(taken_over));
            manager.main_process(std::process::id());
        }
        let stopping = StopOrder::default();
        let program = Self { config, parts, watch, openings, manager, admin_file, upgrades, stopping };
        program.manager.watch_workers(program.parts.dataplane.control(), &scope);
        let serving = program.serving();
        match &program.config.admin {
            Some(admin) => tracing::info!("{serving}; the commands of isthmus reach it at {admin}"),
            None => tracing::info!("{serving}"),
        }
        program.manager.ready(&serving);
        program.parts.update_status(|status| status.serving = true);
        Ok(program)
    }

    /// Goes on with the connections of the earlier process, in a task.
    pub(super) fn follow(&self, taking: Taking) {
        let Handles { telemetry, scope, .. } = self.parts.handles.clone();
        let (control, status) = (self.parts.dataplane.control(), self.parts.status.clone());
        scope.spawn(taking.follow(control, telemetry, status, self.stopping.receiver()));
    }

    /// Returns the status line for the service manager: the addresses of the listeners.
    fn serving(&self) -> String {
        let listening = self.parts.listeners.listening();
        let addresses: Vec<String> =
            listening.iter().map(|(name, address)| format!("{name} {address}")).collect();
        if addresses.is_empty() {
            "serving".to_owned()
        } else {
            format!("serving on {}", addresses.join(", "))
        }
    }

    /// Handles events and orders until an order to stop arrives, and then drains.
    pub(super) async fn serve(
        mut self,
        mut supervisor: Supervisor,
        mut loader: Loader,
    ) -> Result<(), Failed> {
        let why = match self.handle_events(&mut supervisor, &mut loader).await {
            Ok(never) => match never {},
            Err(Stop::Ordered(why)) => why,
            Err(Stop::HandedOver(giving)) => return Box::pin(self.hand_over(*giving, supervisor)).await,
        };
        self.upgrades.fail("the old process was ordered to stop");
        let internal = why == AGGREGATOR_ENDED;
        match internal {
            true => tracing::error!(
                "{why} because of an internal error; the gateway drains and exits with code {EXIT_INTERNAL}"
            ),
            false => tracing::info!(why, "stopping"),
        }
        drop(loader);
        // Peers are told first. Each continues with the services that it has received, and sends calls to other gateways.
        self.parts.links.stop();
        self.stopping.order();
        self.manager.notify(&format!("STOPPING=1\nSTATUS=draining: {why}"));
        supervisor.set_draining();
        self.parts.handles.telemetry.control.draining();
        self.parts.update_status(|status| status.draining = true);
        let Self { parts, config, admin_file, .. } = self;
        let Parts { handles, dataplane, exporter, links, status, registries, keeper, .. } = parts;
        let control = dataplane.control();
        let on_close = move || {
            let mut closed = (**status.load()).clone();
            closed.listening.clear();
            status.store(Arc::new(closed));
        };
        let stopped = async {
            shutdown::shutdown(dataplane, config.drain, on_close).await;
            exporter.finish().await;
            // The registries give up their Leases, so that another replica need not wait until they expire. They serve no connection
            // any more, and end with the aggregator.
            handles.stop.order();
            let _ = tokio::time::timeout(ANSWERED_WITHIN, handles.stop.finished()).await;
            // The state is copied to disk, so that the next process starts with the newest state.
            keeper.write_last().await;
            let write = move || {
                registries.aggregator.write_copies();
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
            handles.telemetry.writer.flush();
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
    ) -> Result<Infallible, Stop> {
        let mut trust = self.parts.identity.context().trust;
        // The roots may have changed since the config was applied.
        self.parts.publish_trust_roots();
        loop {
            if let Some(waiters) = supervisor.upgrade.take() {
                self.upgrades.ordered(waiters);
            }
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
                () = self.parts.links.enrolment().stored() => Event::Enrolled,
                _ = trust.changed() => Event::Trust,
                () = self.parts.registries.clusters.changed() => Event::Clusters,
                step = self.upgrades.next() => Event::Upgrade(step),
                () = self.parts.registries.aggregator.ended() => Event::AggregatorEnded,
            };
            match event {
                Event::Begin => {
                    if let Some(reload) = supervisor.reload.take() {
                        self.manager.reloading();
                        loader.begin(reload, self.watch.seen().clone());
                    }
                }
                Event::Enrolled => supervisor.request_reload("a peer was enrolled", None),
                Event::Changed => match self.watch.unclosed() {
                    None => supervisor.request_reload("the config file changed", None),
                    Some(path) => {
                        let problem = format!(
                            "{}: is still open for writing after 60 s; it is read once it is closed, or by `isthmus reload`",
                            path.display()
                        );
                        tracing::error!("config not read, the previous one stays in use: {problem}");
                        self.parts.update_status(|status| status.rejected = vec![problem]);
                    }
                },
                Event::Trust => {
                    self.parts.publish_trust_roots();
                    supervisor.during(self.parts.dataplane.readmit()).await?;
                }
                Event::Clusters => supervisor.during(self.renew_clusters()).await?,
                Event::Upgrade(step) => self.upgrade(step, supervisor).await?,
                Event::AggregatorEnded => return Err(AGGREGATOR_ENDED.into()),
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

    /// Takes the next step of an upgrade; the error is the reason to end.
    async fn upgrade(&mut self, step: Step, supervisor: &mut Supervisor) -> Result<(), Stop> {
        let Handles { telemetry, scope, .. } = self.parts.handles.clone();
        let control = self.parts.dataplane.control();
        let failed = match step {
            Step::Arrived(stream) => {
                let Some(channel) = self.upgrades.admit(stream, &scope) else { return Ok(()) };
                let offer = supervisor.during(self.offer(&control)).await?;
                let beliefs = supervisor.during(self.tell()).await?;
                self.upgrades.talk(channel, (offer, beliefs), &scope);
                return Ok(());
            }
            Step::Agreed(mut agreed) => {
                // Kept for another process, if the new one dies.
                let sockets = supervisor.during(self.offer(&control)).await?.unwrap_or_default();
                let drains = supervisor.during(self.parts.keeper.drains()).await?;
                let last = || {
                    let orders = Some(self.parts.registries.drain_orders.documents());
                    (orders, beliefs::message(self.parts.keeper.last(drains)))
                };
                let going = async {
                    agreed.has_room(&control).await?;
                    agreed.go(&control, &telemetry.recorder, last).await
                };
                let begun = supervisor.during(going).await?;
                match begun {
                    Ok(began) => {
                        let giving = self.upgrades.hand_over(*agreed, began, sockets, &scope);
                        return Err(Stop::HandedOver(Box::new(giving)));
                    }
                    Err(why) => why,
                }
            }
            Step::Free(waiters) => {
                if !waiters.is_empty() {
                    self.upgrades.begin(waiters);
                }
                return Ok(());
            }
            Step::Failed(why) => why,
        };
        telemetry.control.upgraded(UpgradeResult::Failed);
        self.upgrades.fail(&failed);
        Ok(())
    }

    /// Returns descriptors of all listening sockets, by name.
    async fn offer(&self, control: &Control) -> std::io::Result<Vec<(SocketName, OwnedFd)>> {
        let mut offer = self.parts.listeners.inherited()?;
        offer.extend(self.parts.handles.sockets.open()?);
        offer.extend(self.upgrades.socket());
        // The sockets of the service manager are offered once, and not those of each worker.
        let bound = control.sockets().await.0.into_iter().map(|(key, socket)| (name_of(&key), socket));
        let bound = bound.filter(|((kind, _), _)| *kind == LISTENER);
        offer.extend(bound.map(|((kind, key), socket)| (name(kind, &key), socket)));
        Ok(offer)
    }

    /// Returns what a new process learns from this one, and writes the state that it reads itself.
    async fn tell(&self) -> Vec<Value> {
        let aggregator = self.parts.registries.aggregator.clone();
        // If it panics, the new process reads copies that are some seconds older.
        let _ = tokio::task::spawn_blocking(move || aggregator.write_copies()).await;
        beliefs::message(self.parts.keeper.collect().await.unwrap_or_default())
    }

    /// Hands the connections over to a process that serves, and ends when none is left.
    async fn hand_over(self, mut giving: Giving, mut supervisor: Supervisor) -> Result<(), Failed> {
        let Self { parts, config, admin_file, manager, mut upgrades, .. } = self;
        supervisor.set_draining();
        manager.main_process(giving.process());
        if giving.takes_admin
            && let Some(file) = admin_file.get()
        {
            file.leave();
        }
        let Parts { handles, dataplane, exporter, links, registries, keeper, .. } = parts;
        keeper.write_last().await;
        keeper.configure(config.aggregator.state.as_deref(), true);
        handles.stop.order();
        handles.sockets.close();
        let aggregator = registries.aggregator.clone();
        let write = move || {
            aggregator.write_copies();
            aggregator.hold_state(true);
            links.hand_over();
        };
        if tokio::task::spawn_blocking(write).await.is_err() {
            tracing::error!("writing the state folder panicked");
        }
        giving.commit().await;
        let (control, within) = (dataplane.control(), config.drain.timeout);
        let gives = async {
            while let Given::Died(sockets) = giving.give(&control, &handles.telemetry, within).await {
                // In the state folder are the orders and the beliefs of the process that has died, too.
                let (drains, beliefs) = match &config.aggregator.state {
                    Some(state) => (None, stored(state).await),
                    None => {
                        let beliefs = keeper.collect().await.unwrap_or_default();
                        (Some(registries.drain_orders.documents()), beliefs)
                    }
                };
                let beliefs = beliefs::message(beliefs);
                let tools = (&*handles.telemetry.recorder, &handles.scope);
                match upgrades.replace(sockets, (drains, beliefs), &control, tools).await {
                    Ok(next) => {
                        giving = next;
                        manager.main_process(giving.process());
                        giving.commit().await;
                    }
                    Err(_) => tracing::error!("nobody listens any more; restart the gateway"),
                }
            }
        };
        let ending = async {
            tokio::join!(shutdown::leave(dataplane, within), gives);
            exporter.finish().await;
            // The callers of `isthmus upgrade` get their answer, and other requests theirs.
            let _ = tokio::time::timeout(ANSWERED_WITHIN, handles.stop.finished()).await;
        };
        if supervisor.during(ending).await.is_err() {
            tracing::warn!("second signal received, exiting at once");
            let _ = tokio::time::timeout(RESET_WITHIN, control.reset()).await;
            handles.telemetry.writer.flush();
            std::process::exit(1);
        }
        // Kept until here, because the tasks of registries end with the aggregator, also the one that gives up the Lease.
        drop((registries, upgrades));
        Ok(())
    }

    /// Configures the aggregator with the Kubernetes clusters that are found at present.
    async fn renew_clusters(&mut self) {
        self.parts.registries.renew_clusters(&self.config).await;
        self.parts.update_warnings(&self.config);
    }

    /// Applies a config that was read; on any error nothing changes.
    async fn reload(&mut self, why: &str, loaded: Loaded) -> Result<String, Vec<String>> {
        let result = self.try_reload(loaded).await;
        match &result {
            Ok(done) => {
                tracing::info!(why, "config {done}");
                self.parts.handles.telemetry.control.reloaded(ReloadResult::Applied);
            }
            Err(problems) => {
                for problem in problems {
                    tracing::error!(why, "config rejected, the previous one stays in use: {problem}");
                }
                self.parts.handles.telemetry.control.reloaded(ReloadResult::Rejected);
                self.parts.update_status(|status| status.rejected.clone_from(problems));
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
        let Prepared { config, access_log, bound } = self.parts.prepare(config?, &self.openings).await?;
        // No step after this one can fail, so every part of the config is applied.
        let restart = self.parts.apply(&config).await;
        let (order, log) = access_log;
        self.parts.handles.telemetry.writer.use_access_log(order, log);
        self.parts.open(&config, bound).await;
        let unusable = self.identity_problems(&config).await;
        if let Some(files) = &files {
            self.watch.retain(files);
        }
        self.config = config;
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

/// Returns the readiness gates that are closed, each with the reason, except those that open when the process serves.
fn closed_gates(sources: &Sources, config: &Config) -> Vec<String> {
    let gates = sources.gates(&config.policy.node.cluster).into_iter();
    let gates = gates.filter(|gate| !matches!(&*gate.name, "listeners" | "dns server"));
    gates.filter_map(|gate| Some(format!("{}: {}", gate.name, gate.closed?))).collect()
}

/// Returns the readiness gate of host names, if some have no address because no name server answers.
fn names_gate(sources: &Sources) -> Option<String> {
    let status = sources.aggregator.status.borrow();
    let failed = status.unresolved.iter().find_map(|(name, cause)| match cause {
        Cause::Failed(error) => Some(format!("host names: {name} has no address: {error}")),
        Cause::Missing => None,
    });
    failed.or_else(|| (status.looking_up > 0).then(|| "host names: they are being looked up".to_owned()))
}

/// Returns what an earlier process knew: the one that this process takes over from, else the last one of the state folder.
async fn recalled(taking: Option<&Taking>, config: &Config) -> Beliefs {
    if let Some(beliefs) = taking.and_then(Taking::beliefs) {
        return beliefs.clone();
    }
    match &config.aggregator.state {
        Some(state) => stored(state).await,
        None => Beliefs::default(),
    }
}

/// Returns the beliefs in the state folder.
async fn stored(state: &Path) -> Beliefs {
    let state = state.to_owned();
    background::run(move || beliefs::load(&state)).await.unwrap_or_default()
}

/// Returns the path of the upgrade socket.
fn upgrade_path(config: &Config) -> Result<PathBuf, String> {
    let runtime = std::env::var_os("RUNTIME_DIRECTORY");
    place::path(runtime.as_deref(), config.aggregator.state.as_deref())
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
