//! The running program: its start, its reaction to events, reloads, and its end.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::sleep_until;

use super::dns::Dns;
use super::fixed::Fixed;
use super::listeners::Listeners;
use super::loading::{Loaded, Loader};
use super::orders::{Reload, Supervisor};
use super::parts::{Parts, Prepared};
use super::systemd::ServiceManager;
use super::xds::Xds;
use super::{EXIT_INTERNAL, Failed, THREADS, servers, shutdown, threads, upkeep};
use isthmus_admin::certificates::file_problems;
use isthmus_admin::{Command, problems};
use isthmus_config::Config;
use isthmus_files::reading::Readings;
use isthmus_files::watch::FileWatch;
use isthmus_net::budget::raise_descriptor_limit;
use isthmus_net::inherited::Inherited;
use isthmus_tasks::scope::Scope;
use isthmus_telemetry::Telemetry;
use isthmus_telemetry::control::ReloadResult;
use isthmus_tls::files;

/// The time that resetting all connections may take after a second signal.
const RESET_WITHIN: Duration = Duration::from_millis(200);
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
    /// Starts all parts, waits for the registries, and opens the listeners.
    pub(super) async fn start(inputs: Inputs<'_>) -> Result<Self, String> {
        let Inputs { path, config, inherited, manager, watch, telemetry, scope, openings, command } = inputs;
        let fixed = Fixed::of(&config, raise_descriptor_limit());
        let (workers, limits) = (fixed.workers(), fixed.limits(&config));
        threads::can_be_made(THREADS + workers)?;
        tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            workers,
            descriptors = limits.descriptors,
            connections = limits.connections,
            pending_hellos = limits.pending_hellos,
            "isthmus starts"
        );
        // Listeners are bound first, so that an address in use is reported before any other work.
        let listeners = Listeners::new(inherited);
        listeners.warn_of_unused(&config.policy);
        let bound = listeners.bind(&config.policy, workers).map_err(|problems| problems.join("; "))?;
        let mut parts = Parts::start(path, &config, fixed, listeners, telemetry, &scope).await?;
        parts.apply(&config).await;
        let xds = config.xds.clone().map(|options| {
            Xds::bind(options, limits.xds_connections, parts.identity.context(), &parts.handles)
        });
        let xds = xds.transpose()?;
        let dns = config
            .dns_server
            .clone()
            .map(|options| Dns::bind(&options, limits.dns_connections, &parts.handles));
        let dns = dns.transpose()?;
        let sources = parts.sources(xds.as_ref(), dns.as_ref(), command);
        let admin_file = servers::open(&config, &sources, &scope).await?;
        upkeep::start(&sources, &scope);
        scope.spawn(sources.dataplane.check(sources.reader.clone()));
        scope.spawn(problems::watch(sources));
        parts.registries.are_read(&config).await;
        parts.update_warnings(&config);
        parts.open(&config, bound).await;
        // The xDS and DNS servers start after the registries have been read. Otherwise an xDS client that reconnects would lose
        // the endpoints of registries that are not read yet, and DNS clients would learn that names do not exist.
        xds.map_or(Ok(()), |xds| xds.serve(&parts.handles))?;
        dns.map_or(Ok(()), |dns| dns.serve(&parts.handles))?;
        let program = Self { config, parts, watch, openings, manager, admin_file };
        program.manager.watch_workers(program.parts.dataplane.control(), &scope);
        program.manager.ready(&program.serving());
        program.parts.update_status(|status| status.serving = true);
        Ok(program)
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
        // Peers are told first. Each continues with the services that it has received, and sends calls to other gateways.
        self.parts.links.stop();
        self.manager.notify(&format!("STOPPING=1\nSTATUS=draining: {why}"));
        supervisor.set_draining();
        self.parts.handles.telemetry.control.draining();
        self.parts.update_status(|status| status.draining = true);
        let Self { parts, config, admin_file, .. } = self;
        let Parts { handles, dataplane, exporter, links, status, registries, .. } = parts;
        let control = dataplane.control();
        let on_close = move || {
            let mut closed = (**status.load()).clone();
            closed.listening.clear();
            status.store(Arc::new(closed));
        };
        let stopped = async {
            shutdown::shutdown(dataplane, config.drain, on_close).await;
            exporter.finish().await;
            // The state of the registries is copied to disk, so that the next process starts with the newest state.
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
    ) -> Result<Infallible, &'static str> {
        let mut trust = self.parts.identity.context().trust;
        // The roots may have changed since the config was applied.
        self.parts.publish_trust_roots();
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
                () = self.parts.links.enrolment().stored() => Event::Enrolled,
                _ = trust.changed() => Event::Trust,
                () = self.parts.registries.clusters.changed() => Event::Clusters,
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
                Event::Changed => supervisor.request_reload("the config file changed", None),
                Event::Trust => {
                    self.parts.publish_trust_roots();
                    supervisor.during(self.parts.dataplane.readmit()).await?;
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
