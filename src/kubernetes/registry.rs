//! Follows a cluster. A session watches it with one set of credentials. New credentials are tried in a second session, which
//! replaces the first session after it has read all objects.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::access::{Found, find};
use super::client::{Client, Fault};
use super::exports::{ExportWriter, Exports};
use super::gateway_api::writer::{Due, StatusWriter};
use super::import_objects::Imports;
use super::imports::ImportWriter;
use super::index::Index;
use super::index::watches::{Failures, WatchState};
use super::kinds::{ConfigMap, Kind};
use super::watch::{Event, Watcher, Way, What};
use super::writer::Writer;
use isthmus_aggregator::registry::{Changes, Closed, Registry};
use isthmus_aggregator::spec::RegistrySpec;
use isthmus_aggregator::spec::kubernetes::KubernetesSpec;
use isthmus_files::reading::Readings;
use isthmus_model::identity::TrustDomain;
use isthmus_model::place::ClusterId;
use isthmus_net::channel::cut;
use isthmus_registry::change::{Change, Report};
use isthmus_tasks::background;
use isthmus_tasks::scope::Scope;
use isthmus_tasks::stop::Stop;
use isthmus_world::LaterReader;

/// The interval at which credentials are read again, and the report is renewed.
const TICK: Duration = Duration::from_secs(1);
/// How long the watch of a kind may fail before the registry is reported as unreadable. The restart of a server, or the move of
/// a connection to another server, takes less.
const GRACE: Duration = Duration::from_secs(3);
/// How long a first session waits for kinds that are not needed while they fail in a way that may pass, such as 429 or 503. That
/// is half of the default of `aggregator.startTimeout`, and enough for five attempts: so a gateway that starts while an API
/// server is overloaded has the cluster's network and gateways, and a kind that fails forever does not make it start without
/// the cluster.
const AWAITED: Duration = Duration::from_secs(15);
/// The largest number of batches of events that may wait; then the watches wait.
const EVENTS_MAX: usize = 64;
/// The largest number of batches that are applied before the registry's changes are sent.
const ROUND: usize = 256;
/// The largest number of services whose items are made on the registry's task; more are made on a background thread.
const MADE_HERE_MAX: usize = 64;
/// How long the start waits for the server's version and the mesh's configuration; then the registry starts without them.
const ABOUT_WITHIN: Duration = Duration::from_secs(10);
/// The largest number of reads of credentials that may hang at the same time.
const READINGS: usize = 3;

/// A registry in Kubernetes.
pub struct KubernetesRegistry {
    spec: RegistrySpec,
    kubernetes: Arc<KubernetesSpec>,
    scope: Scope,
    world: LaterReader,
    /// The order to give up the Lease of the writer of conditions.
    stop: Stop,
}

impl KubernetesRegistry {
    /// Makes the registry. Tasks of its connections run in `scope`; the condition `Conflict` of ServiceExports is read from
    /// `world`. With the order to stop, the Lease of the writer of conditions is given up.
    pub fn new(
        spec: RegistrySpec,
        kubernetes: KubernetesSpec,
        scope: Scope,
        world: LaterReader,
        stop: Stop,
    ) -> Self {
        Self { spec, kubernetes: Arc::new(kubernetes), scope, world, stop }
    }
}

impl Registry for KubernetesRegistry {
    fn spec(&self) -> &RegistrySpec {
        &self.spec
    }

    fn run(self: Box<Self>, changes: Changes) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>> {
        let follower = Follower::new(*self, changes);
        // Ends when the receiver of changes is gone.
        Box::pin(async move {
            let _ = follower.run().await;
        })
    }
}

/// The watches of a cluster with one set of credentials.
struct Session {
    client: Arc<Client>,
    way: Arc<Way>,
    version: String,
    /// The digest of the credentials.
    digest: u64,
    /// The time at which the watches began.
    started: Instant,
    index: Index,
    events: mpsc::Receiver<Vec<Event>>,
    tasks: Vec<AbortHandle>,
    last_event: Option<SystemTime>,
    /// Writes the conditions of ServiceExports; `None`: this registry writes none.
    exports: Option<Writer<Exports>>,
    /// Writes ServiceImports; `None`: this registry writes none.
    imports: Option<Writer<Imports>>,
    /// Writes the status of objects of the Gateway API; `None`: this registry reads no such objects.
    due: Option<Writer<Due>>,
    /// The time of the last repeated listing, and its cause as text: the kind of object, or new credentials. `None` if nothing
    /// was listed again.
    relisted: Option<(SystemTime, &'static str)>,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

/// A cluster that cannot be read at the moment.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Failing {
    since: Instant,
    /// The problems that were reported; empty: none yet.
    reported: Vec<String>,
}

/// The attempt with credentials that are not in use.
#[derive(Default)]
enum Trial {
    #[default]
    None,
    /// A task starts a session.
    Starting(JoinHandle<Result<Session, Fault>>),
    /// A session is reading everything.
    Reading(Box<Session>),
}

struct Follower {
    registry: KubernetesRegistry,
    changes: Changes,
    readings: Readings,
    /// The session in use.
    current: Option<Session>,
    trial: Trial,
    /// Errors of the newest credentials, a line each.
    refused: Vec<String>,
    failing: Option<Failing>,
    report: Report,
}

impl Follower {
    fn new(registry: KubernetesRegistry, changes: Changes) -> Self {
        Self {
            registry,
            changes,
            readings: Readings::new(READINGS),
            current: None,
            trial: Trial::None,
            refused: Vec::new(),
            failing: None,
            report: Report::default(),
        }
    }

    async fn run(mut self) -> Result<(), Closed> {
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = tick.tick() => {
                    self.renew_credentials().await;
                    self.report().await?;
                }
                () = advance(&mut self.current) => {}
                advanced = self.trial.advance() => if let Err(fault) = advanced {
                    self.refused = vec![fault.to_string()];
                }
            }
            self.promote();
            self.publish().await?;
            self.judge().await?;
        }
    }

    /// Reads the credentials again. If they are neither in use nor on trial, a second session tries them.
    async fn renew_credentials(&mut self) {
        if matches!(self.trial, Trial::Starting(_)) {
            return;
        }
        let found = match find(&self.registry.kubernetes.access, &self.readings).await {
            Ok(found) => found,
            Err(problems) => {
                if self.refused != problems {
                    let registry = &*self.registry.spec.name;
                    tracing::error!(registry, ?problems, "the credentials cannot be used");
                }
                self.refused = problems;
                // The credentials on trial are not those of the cluster any more.
                if self.current.is_some() {
                    self.trial = Trial::None;
                }
                return;
            }
        };
        self.refused.clear();
        let in_use = self.current.as_ref().filter(|session| !session.index.tables.dirty.session);
        let in_use = in_use.map(|session| session.digest);
        if self.trial.reading().map(|session| session.digest).or(in_use) == Some(found.digest) {
            return;
        }
        // The credentials in use were found again, so the second session is not needed.
        if in_use == Some(found.digest) {
            self.trial = Trial::None;
            return;
        }
        let (spec, scope) = (self.registry.kubernetes.clone(), self.registry.scope.clone());
        let known = (self.registry.spec.cluster.clone(), self.registry.world.clone());
        let tasks = (scope, self.registry.stop.clone());
        let start = async move { Session::start(found, spec, known, tasks).await };
        self.trial = Trial::Starting(self.registry.scope.spawn(start));
    }

    /// Replaces the session in use by the one with new credentials, once the new session has read everything that the session in
    /// use has. The first session is used when it has read everything, or after [`AWAITED`] without kinds that are not needed.
    fn promote(&mut self) {
        let in_use = self.current.as_ref().map(|session| &session.index.watches);
        let is_whole = |candidate: &Session| {
            let index = &candidate.index;
            let failures =
                if candidate.started.elapsed() < AWAITED { Failures::Await } else { Failures::Accept };
            index.watches.is_ready(failures)
                && in_use.is_none_or(|in_use| index.watches.lacking(in_use).next().is_none())
        };
        let mut session = match std::mem::take(&mut self.trial) {
            Trial::Reading(session) if is_whole(&session) => *session,
            other => {
                self.trial = other;
                return;
            }
        };
        // The failures were those of the session before, or they only held this session back.
        self.failing = None;
        if self.current.is_some() {
            session.relisted = Some((SystemTime::now(), "new credentials"));
            let server = session.client.server();
            tracing::info!(registry = &*self.registry.spec.name, %server, "the registry now uses the new credentials");
        }
        session.index.begin_listing();
        self.current = Some(session);
    }

    /// Sends the changes of the session in use.
    async fn publish(&mut self) -> Result<(), Closed> {
        let Some(session) = self.current.as_mut().filter(|session| session.index.is_dirty()) else {
            return Ok(());
        };
        let Some(mut changes) = session.changes().await else {
            // The objects of the cluster are lost with the index. The registry keeps its items until another session has read
            // everything.
            tracing::error!(
                registry = &*self.registry.spec.name,
                "internal error: computing the endpoints of the cluster panicked"
            );
            self.current = None;
            let problem =
                "internal error: computing the endpoints of the cluster panicked; the gateway reads the \
                 cluster again"
                    .to_owned();
            return self.changes.send(vec![Change::Failed(vec![problem])]).await;
        };
        session.renew_exports();
        session.renew_due();
        session.renew_imports();
        if changes.is_empty() {
            return Ok(());
        }
        if self.report.server.is_empty() {
            // The first report is sent with the first listing.
            self.report = self.report_now();
            changes.push(Change::Report(Arc::new(self.report.clone())));
        }
        // The changes alone would mean that the whole registry can be read again. One of its kinds still cannot be read, so the
        // failure is reported once more.
        if let Some(failing) = self.failing.as_ref().filter(|failing| !failing.reported.is_empty()) {
            changes.push(Change::Failed(failing.reported.clone()));
        }
        self.changes.send(changes).await
    }

    /// Reports that the cluster cannot be read, or that it can be read again.
    async fn judge(&mut self) -> Result<(), Closed> {
        let problems = self.problems();
        if problems.is_empty() {
            let was_reported = self.failing.take().is_some_and(|failing| !failing.reported.is_empty());
            if was_reported && self.current.is_some() {
                return self.changes.send(vec![Change::Readable]).await;
            }
            return Ok(());
        }
        let failing =
            self.failing.get_or_insert_with(|| Failing { since: Instant::now(), reported: Vec::new() });
        let is_due = self.current.is_none() || failing.since.elapsed() >= GRACE;
        if !is_due || failing.reported == problems {
            return Ok(());
        }
        failing.reported.clone_from(&problems);
        self.changes.send(vec![Change::Failed(problems)]).await
    }

    /// Returns the problems that keep the cluster from being read, a line each.
    fn problems(&self) -> Vec<String> {
        let of_session = |session: &Session, failures: Vec<String>| {
            let server = session.client.server();
            failures.iter().map(|why| format!("{server}: {why}")).collect::<Vec<_>>()
        };
        match (&self.current, self.trial.reading()) {
            (Some(current), _) => of_session(current, current.index.watches.failures()),
            (None, Some(candidate)) => of_session(candidate, candidate.index.watches.holding()),
            (None, None) => self.refused.clone(),
        }
    }

    /// Sends the report on how the cluster is read, if the report has changed.
    async fn report(&mut self) -> Result<(), Closed> {
        let report = self.report_now();
        if report == self.report {
            return Ok(());
        }
        self.report = report.clone();
        self.changes.send(vec![Change::Report(Arc::new(report))]).await
    }

    fn report_now(&self) -> Report {
        let mut report = Report { problems: self.refused.clone(), ..Report::default() };
        if self.current.is_some() {
            report
                .problems
                .iter_mut()
                .for_each(|line| line.push_str("; the credentials read before stay in use"));
        }
        if let (Some(current), Some(candidate)) = (&self.current, self.trial.reading()) {
            let mut failures = candidate.index.watches.failures();
            let lacking = candidate
                .index
                .watches
                .lacking(&current.index.watches)
                .filter(|watch| !watch.kind.facts().is_needed);
            failures.extend(lacking.filter_map(WatchState::failure));
            report.problems.extend(failures.iter().map(|why| {
                format!("the new credentials do not work: {why}; the credentials read before stay in use")
            }));
        }
        let Some(session) = self.current.as_ref().or_else(|| self.trial.reading()) else { return report };
        session.describe(&mut report);
        report
    }
}

impl Trial {
    /// Returns the session that is reading everything.
    fn reading(&self) -> Option<&Session> {
        match self {
            Self::Reading(session) => Some(session),
            Self::None | Self::Starting(_) => None,
        }
    }

    /// Waits for the session or for its next events, and applies them; waits without end without a session. Nothing is lost if
    /// the future is dropped. Fails if the session cannot be started.
    async fn advance(&mut self) -> Result<(), Fault> {
        match self {
            Self::None => std::future::pending().await,
            Self::Starting(start) => {
                let panicked =
                    |_| Err(Fault::Answer("internal error: starting a session panicked".to_owned()));
                let started = start.await.unwrap_or_else(panicked);
                *self = Self::None;
                *self = Self::Reading(Box::new(started?));
            }
            Self::Reading(session) => {
                if !session.advance().await {
                    *self = Self::None;
                }
            }
        }
        Ok(())
    }
}

/// Waits for the next events of the session in use, and applies them; waits without end without a session.
async fn advance(current: &mut Option<Session>) {
    let Some(session) = current else { return std::future::pending().await };
    if !session.advance().await {
        *current = None;
    }
}

impl Session {
    async fn start(
        found: Found,
        spec: Arc<KubernetesSpec>,
        (cluster, world): (ClusterId, LaterReader),
        (scope, stop): (Scope, Stop),
    ) -> Result<Self, Fault> {
        let Found { access, digest } = found;
        let client = Arc::new(Client::new(access, scope.clone())?);
        let about = async { (version(&client).await, trust_domain(&client, &spec).await) };
        let (version, trust_domain) =
            timeout(ABOUT_WITHIN, about).await.unwrap_or_else(|_| (String::new(), spec.trust_domain.clone()));
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let watches = Kind::watched(&spec);
        let way = Arc::new(Way::default());
        let at = || (cluster.clone(), world.clone());
        let exports = spec.export_writer.clone().map(|lease| {
            let turns = ExportWriter::new(client.clone(), lease.knows, at());
            Writer::spawn(turns, (client.clone(), lease), &cluster, (&scope, &stop))
        });
        let imports = spec.import_writer.clone().map(|lease| {
            let turns = ImportWriter::new(client.clone(), (lease.knows, spec.import_extras), at());
            Writer::spawn(turns, (client.clone(), lease), &cluster, (&scope, &stop))
        });
        let due = spec.gateway_api.as_ref().map(|spec| {
            let lease = spec.writer.clone();
            let turns = StatusWriter::new(client.clone(), spec, world.clone());
            Writer::spawn(turns, (client.clone(), lease), &cluster, (&scope, &stop))
        });
        let tasks = watches.iter().enumerate().map(|(id, (kind, namespace))| {
            let of = (*kind, namespace.clone());
            let watcher = Watcher::new((client.clone(), way.clone()), id, of, sender.clone());
            scope.spawn(watcher.run()).abort_handle()
        });
        Ok(Self {
            tasks: tasks.collect(),
            exports,
            due,
            imports,
            index: Index::new(spec, cluster, trust_domain, watches),
            client,
            way,
            version,
            digest,
            started: Instant::now(),
            events,
            last_event: None,
            relisted: None,
        })
    }

    /// Waits for a batch of events, and applies it and further batches that are already in the queue. Returns false if all
    /// watches have ended.
    async fn advance(&mut self) -> bool {
        let mut next = self.events.recv().await;
        if next.is_none() {
            return false;
        }
        let mut taken = 0;
        while let Some(events) = next {
            events.into_iter().for_each(|event| self.take(event));
            taken += 1;
            next = if taken < ROUND { self.events.try_recv().ok() } else { None };
        }
        self.way.note_crowded(self.index.watches.crowded());
        true
    }

    fn take(&mut self, event: Event) {
        match &event.what {
            What::Begin if self.index.watches.all[event.watch].is_synced => {
                self.relisted = Some((SystemTime::now(), event.kind.plural()));
            }
            What::Put(_) | What::Gone(_) => self.last_event = Some(SystemTime::now()),
            _ => {}
        }
        self.index.apply(event);
    }

    /// Sends the ServiceExports to the task that writes their conditions, if they have changed.
    fn renew_exports(&mut self) {
        let Some(exports) = &self.exports else { return };
        if let Some(wanted) = self.index.new_conditions() {
            exports.renew(wanted);
        }
    }

    /// Sends the imports and namespaces to the task that writes ServiceImports, if they have changed.
    fn renew_imports(&mut self) {
        let Some(imports) = &self.imports else { return };
        if let Some(new) = self.index.new_imports() {
            imports.renew(new);
        }
    }

    /// Sends the objects of the Gateway API to the task that writes their status, if they have changed.
    fn renew_due(&mut self) {
        let Some(due) = &self.due else { return };
        if let Some(new) = self.index.new_due() {
            due.renew(new);
        }
    }

    /// Returns the changes of the index. Many changes are computed on a background thread. `None`: the computation has
    /// panicked, and the index is lost.
    async fn changes(&mut self) -> Option<Vec<Change>> {
        if self.index.work() <= MADE_HERE_MAX {
            return Some(self.index.changes());
        }
        let none = self.index.placeholder();
        background::run_on(&mut self.index, none, Index::changes).await.ok()
    }

    fn describe(&self, report: &mut Report) {
        use isthmus_telemetry::clock::rfc3339;
        report.server = self.client.server().to_string();
        report.version = self.version.clone();
        report.objects = self.index.tables.counts();
        report.left_out = self.index.left_out();
        let network = self.index.tables.network();
        if network.is_unknown() {
            report.problems.push(format!(
                "the network of the cluster is unknown: the namespace {} has no label topology.istio.io/network, and the \
                 registry has no `network`",
                self.index.tables.spec.system_namespace
            ));
        }
        report.network = network;
        let (streamed, paged) =
            (self.way.streamed.load(Ordering::Relaxed), self.way.paged.load(Ordering::Relaxed));
        report.facts.push(("listed on watches", streamed.to_string()));
        report.facts.push(("listed in pages", paged.to_string()));
        report.facts.push(("watches resumed", self.way.resumed.load(Ordering::Relaxed).to_string()));
        if let Some(at) = self.last_event {
            report.facts.push(("last event", rfc3339(at)));
        }
        if let Some((at, why)) = self.relisted {
            report.facts.push(("last relisting", format!("{} ({why})", rfc3339(at))));
        }
        let spec = &self.index.tables.spec;
        for watch in &self.index.watches.all {
            let is_reported = !watch.kind.facts().is_needed && !watch.kind.is_only_counted(spec);
            if let Some((why, _)) = watch.failing.as_ref().filter(|_| is_reported) {
                report.problems.push(format!("{}: {why}", watch.kind.plural()));
            }
        }
        report.problems.extend(self.client.clock.problem());
        self.exports.iter().for_each(|writer| writer.describe(report));
        self.due.iter().for_each(|writer| writer.describe(report));
        self.imports.iter().for_each(|writer| writer.describe(report));
        self.index.describe_imports(report);
        report.problems.extend(self.index.unusable_exports());
        report.policies_unknown = self.index.policies_unknown();
        report.waypoints_ignored = self.index.waypoints_ignored();
        report.ignored.clone_from(&self.index.ignored);
        report.problems.extend(self.index.gateway_notes.iter().cloned());
        report.problems.extend(self.index.notes_of_gateway_api());
        report.problems.extend(self.index.lacking_kinds());
        for watch in self.index.watches.all.iter().filter(|watch| watch.too_many > 0) {
            let (count, kind) = (watch.too_many, watch.kind.plural());
            report.problems.push(format!("at least {count} {kind} are ignored, because there are too many"));
        }
    }
}

async fn version(client: &Client) -> String {
    let Ok(answer) = client.object("/version").await else { return String::new() };
    let value: serde_json::Value = serde_json::from_slice(&answer).unwrap_or_default();
    value["gitVersion"].as_str().map(cut).unwrap_or_default()
}

/// Returns the trust domain of the cluster's mesh configuration, if `mesh_config` is set and the mesh configuration names one.
/// Otherwise returns `trust_domain` of the settings.
async fn trust_domain(client: &Client, spec: &KubernetesSpec) -> TrustDomain {
    let configured = spec.trust_domain.clone();
    if !spec.mesh_config {
        return configured;
    }
    let path = format!("/api/v1/namespaces/{}/configmaps/istio", spec.system_namespace);
    let Ok(answer) = client.object(&path).await else { return configured };
    let map: ConfigMap = serde_json::from_slice(&answer).unwrap_or_default();
    map.trust_domain().unwrap_or(configured)
}

#[cfg(test)]
mod tests {
    use http::StatusCode;

    use super::super::scripted;
    use super::*;
    use isthmus_aggregator::registry::Epoch;
    use isthmus_aggregator::spec::RegistryKind;
    use isthmus_model::place::Network;
    use isthmus_settings::scope::RegistryScope;

    const KINDS: [Kind; 2] = [Kind::Service, Kind::Namespace];

    /// Returns a session whose watches of services and namespaces are in these states.
    fn session(scope: &Scope, services: What, namespaces: What) -> Session {
        let spec = KubernetesSpec { network: Some(Network::new("n")), ..KubernetesSpec::plain() };
        let domain = spec.trust_domain.clone();
        let watches = KINDS.map(|kind| (kind, None)).to_vec();
        let (_, events) = mpsc::channel(1);
        let mut session = Session {
            client: Arc::new(scripted::client(scope)),
            way: Arc::default(),
            version: String::new(),
            digest: 0,
            started: Instant::now(),
            index: Index::new(Arc::new(spec), ClusterId::new("east"), domain, watches),
            events,
            tasks: Vec::new(),
            last_event: None,
            exports: None,
            imports: None,
            due: None,
            relisted: None,
        };
        for (watch, what) in [services, namespaces].into_iter().enumerate() {
            session.take(Event { watch, kind: KINDS[watch], what });
        }
        session
    }

    /// Returns a registry without a session, and the batches that it sends.
    fn follower(scope: &Scope) -> (Follower, mpsc::Receiver<(Epoch, Vec<Change>)>) {
        let spec = RegistrySpec {
            name: "k".into(),
            cluster: ClusterId::new("east"),
            network: Network::new("n"),
            scope: RegistryScope::default(),
            kind: RegistryKind::Kubernetes(KubernetesSpec::plain()),
        };
        let later = (LaterReader::default(), Stop::default());
        let registry =
            KubernetesRegistry::new(spec, KubernetesSpec::plain(), scope.clone(), later.0, later.1);
        let (changes, sent) = Changes::for_tests();
        (Follower::new(registry, changes), sent)
    }

    fn failing() -> What {
        What::Failing("no".into(), Some(StatusCode::TOO_MANY_REQUESTS))
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_fails_is_reported_after_three_seconds_and_the_end_of_the_failure_at_once() {
        let scope = Scope::default();
        let (mut follower, mut sent) = follower(&scope);
        follower.current = Some(session(&scope, failing(), What::Complete));
        follower.judge().await.expect("open");
        tokio::time::advance(Duration::from_millis(2_999)).await;
        follower.judge().await.expect("open");
        assert!(sent.try_recv().is_err(), "a server may be restarted");
        tokio::time::advance(Duration::from_millis(1)).await;
        follower.judge().await.expect("open");
        let (_, batch) = sent.try_recv().expect("the failure");
        assert!(matches!(&batch[..], [Change::Failed(_)]), "{batch:?}");
        follower.judge().await.expect("open");
        assert!(sent.try_recv().is_err(), "it is reported once");
        follower.current = Some(session(&scope, What::Complete, What::Complete));
        follower.judge().await.expect("open");
        let (_, batch) = sent.try_recv().expect("the end");
        assert!(matches!(&batch[..], [Change::Readable]), "{batch:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_first_session_waits_fifteen_seconds_for_a_kind_that_is_not_needed() {
        let scope = Scope::default();
        let (mut follower, _sent) = follower(&scope);
        follower.trial = Trial::Reading(Box::new(session(&scope, What::Complete, failing())));
        tokio::time::advance(Duration::from_millis(14_999)).await;
        follower.promote();
        assert!(follower.current.is_none());
        tokio::time::advance(Duration::from_millis(1)).await;
        follower.promote();
        assert!(follower.current.is_some());
    }
}
