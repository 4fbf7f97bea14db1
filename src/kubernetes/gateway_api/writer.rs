//! Writes the status of objects of the Gateway API. Only one replica writes at a time: the holder of a Lease. A status is written
//! only if it differs from what the object has, with the version of the object that was read, so that a later change of another
//! controller is never undone.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::super::client::{Client, Fault};
use super::super::kinds::Kind;
use super::super::kinds::gateway_route::{RouteId, RouteKind};
use super::super::kinds::gateway_status::Stamp;
use super::super::lease::{Lease, RENEW_EVERY};
use super::super::notes::Served;
use super::super::writer::Turns;
use super::super::writing::{Duty, Lack, LastWrite, Refused, TOGETHER, Writing, rotate};
use super::events::{About, Events};
use super::listeners::{ParentId, ParentKind};
use super::replicas::{Replica, counting};
use super::status::{Status, Verdict};
use isthmus_aggregator::spec::kubernetes::{GatewayApiSpec, LeaseSpec};
use isthmus_telemetry::clock::rfc3339;
use isthmus_world::{LaterReader, Reader};

/// The time that replicas have to serve a Gateway, before its status names those that do not.
const PENDING_AFTER: Duration = Duration::from_secs(10);
/// The largest number of replicas that a condition names.
const NAMED_MAX: usize = 5;

/// The objects whose status may have to be written. A route is among them only if its status differs.
pub(crate) type Due = BTreeMap<Target, Arc<Wanted>>;

/// An object whose status is written.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Target {
    Class(Arc<str>),
    Parent(ParentId),
    Route(RouteId),
}

/// The status that an object should have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) status: Status,
    pub(crate) stamp: Stamp,
    /// True if the object is a route without any status, so that it need not be read before it is written.
    pub(crate) is_blank: bool,
    /// The Gateway and its generation that every replica must serve for the condition `Programmed` to be true; `None` if the
    /// condition does not depend on the replicas.
    pub(crate) served: Option<(Arc<str>, i64)>,
}

impl Wanted {
    /// Returns the names of the replicas that do not serve the Gateway in its generation.
    fn laggards<'n>(&self, replicas: &'n [Replica]) -> Vec<&'n str> {
        let Some((object, generation)) = &self.served else { return Vec::new() };
        let lags = |(_, serves): &&Replica| serves.get(&**object).is_none_or(|served| served < generation);
        replicas.iter().filter(lags).map(|(name, _)| name.as_str()).collect()
    }

    /// Returns the status with `Programmed` false, because these replicas do not serve the Gateway.
    fn pending(&self, laggards: &[&str]) -> Status {
        let mut status = self.status.clone();
        let named = laggards.iter().take(NAMED_MAX).copied().collect::<Vec<_>>().join(", ");
        let more = match laggards.len().saturating_sub(NAMED_MAX) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let why = format!("these replicas do not serve this generation of the Gateway yet: {named}{more}");
        let conditions = status.listeners.iter_mut().flat_map(|listener| &mut listener.conditions);
        for (kind, verdict) in conditions.chain(&mut status.conditions) {
            if *kind == "Programmed" && verdict.is_true {
                *verdict = Verdict::no("Pending", why.clone());
            }
        }
        status
    }
}

/// A status that was written.
struct Written {
    /// The UID of the object.
    uid: Arc<str>,
    digest: u64,
    last: LastWrite,
}

impl Written {
    /// Returns the write if it was this status of the object with this UID.
    fn of(&self, uid: &str, digest: u64) -> Option<&LastWrite> {
        (*self.uid == *uid && self.digest == digest).then_some(&self.last)
    }
}

/// Writes the status.
pub(crate) struct StatusWriter {
    client: Arc<Client>,
    spec: GatewayApiSpec,
    world: LaterReader,
    /// The statuses that were written last.
    written: BTreeMap<Target, Written>,
    refused: Refused<Target>,
    /// The object whose status was written last.
    last: Option<Target>,
    events: Events,
    /// The generations of Gateways that not every replica serves, and since when.
    waiting: BTreeMap<Target, (i64, Instant)>,
    /// True once this replica has served all Gateways. A replica that starts holds up no status.
    has_served: bool,
}

impl StatusWriter {
    pub(crate) fn new(client: Arc<Client>, spec: &GatewayApiSpec, world: LaterReader) -> Self {
        let reporter = (spec.controller.clone(), spec.writer.holder.clone());
        Self {
            events: Events::new(client.clone(), reporter),
            client,
            spec: spec.clone(),
            world,
            written: BTreeMap::new(),
            refused: Refused::new(),
            last: None,
            waiting: BTreeMap::new(),
            has_served: false,
        }
    }
}

impl Turns for StatusWriter {
    type Objects = Due;
    const DUTY: &'static Duty = &Duty {
        subject: "status of the Gateway API",
        grant: "kubernetes.gatewayApi.class",
        lack: Lack::Problem,
    };
    /// Meanwhile the process begins to serve the change.
    const SETTLE: Option<Duration> = Some(Duration::from_millis(200));

    /// Each release has a class, and replicas of its own.
    fn lease(&self) -> String {
        format!("isthmus-gateway-api-{}", self.spec.class)
    }

    async fn turn(&mut self, due: &Arc<Due>, lease: &mut Lease) -> Result<Duration, Fault> {
        self.written.retain(|_, written| written.last.is_recent());
        for (target, written) in &mut self.written {
            // A route is due only while its status differs.
            written.last.note(due.get(target).is_none_or(|wanted| wanted.stamp.digest == written.digest));
        }
        self.refused.forget(|target| due.contains_key(target));
        if due.is_empty() {
            lease.let_go();
            return Ok(RENEW_EVERY);
        }
        let serves = self.served(due);
        if self.has_served {
            lease.notes.set(serves.clone());
        }
        lease.renew().await?;
        if !lease.is_held() {
            self.written.clear();
            self.refused.clear();
            self.waiting.clear();
            return Ok(RENEW_EVERY);
        }
        let now = Instant::now();
        let wanted = due.values().filter_map(|wanted| wanted.served.as_ref());
        let wanted: Vec<(&str, i64)> = wanted.map(|(object, generation)| (&**object, *generation)).collect();
        let LeaseSpec { namespace, holder, .. } = &self.spec.writer;
        let mut replicas = counting(&self.client, namespace, lease.notes.others(now), &wanted).await;
        replicas.push((holder.to_string(), serves));
        // The pods of replicas were read meanwhile.
        let Some(term) = lease.term() else { return Ok(RENEW_EVERY) };
        let (refused, waiting) = (&self.refused, &mut self.waiting);
        waiting.retain(|target, _| due.contains_key(target));
        let differing = due.iter().filter(|(target, _)| !refused.contains(target));
        let differing = differing.filter_map(|(target, wanted)| {
            let status = judged(target, wanted, &replicas, waiting, now)?;
            let digest = status.digest();
            let before = self.written.get(target).and_then(|before| before.of(&wanted.stamp.uid, digest));
            let is_written = before.is_some_and(|before| !before.may_be_repeated());
            (digest != wanted.stamp.digest && !is_written)
                .then(|| (target.clone(), wanted.clone(), status, digest))
        });
        let mut differing: Vec<_> = differing.collect();
        rotate(&mut differing, |(target, ..)| self.last.as_ref().is_some_and(|last| target <= last));
        self.events.begin();
        for some in differing.chunks(TOGETHER) {
            if term.is_over() {
                break;
            }
            self.last = some.last().map(|(target, ..)| target.clone());
            let writes = some.iter().map(|(target, wanted, status, _)| self.write(target, wanted, status));
            let results = term.within(join_all(writes)).await?;
            let mut told = Vec::new();
            for ((target, wanted, status, digest), result) in some.iter().zip(results) {
                match result {
                    Ok(()) => {
                        let uid = wanted.stamp.uid.clone();
                        let before = self.written.get(target).and_then(|before| before.of(&uid, *digest));
                        let (last, digest) = (LastWrite::now(before), *digest);
                        self.written.insert(target.clone(), Written { uid: uid.clone(), digest, last });
                        told.push((target, uid, status));
                    }
                    // The object has changed, and the watch will report the new version.
                    Err(fault) if fault.status() == Some(StatusCode::CONFLICT) => {}
                    Err(fault) if fault.status().is_some() => {
                        self.refused.insert(target.clone(), &fault, Self::DUTY);
                    }
                    Err(fault) => return Err(fault),
                }
            }
            for (target, uid, status) in &told {
                let Some(about) = about(target, uid) else { continue };
                // A server that does not answer costs the events, but not the turn.
                if term.within(self.events.send(about, status)).await.is_err() {
                    self.events.refuse();
                }
            }
            // The turn ends, so that a right that is missing for all objects is tried only once per turn.
            if self.refused.len() >= TOGETHER {
                return Ok(RENEW_EVERY);
            }
        }
        Ok(term.pause())
    }

    fn result(&self) -> Writing {
        self.refused.result()
    }
}

impl StatusWriter {
    /// Returns what this replica serves of the Gateways.
    fn served(&mut self, due: &Due) -> Served {
        let snapshot = self.world.get().map(Reader::latest);
        let gateways = || due.values().filter_map(|wanted| wanted.served.as_ref());
        let served = gateways().filter_map(|(object, _)| {
            let found = snapshot.as_ref()?.gateway_api.gateway(object)?;
            Some((object.to_string(), found.generation))
        });
        let served: Served = served.collect();
        self.has_served |= gateways()
            .all(|(object, wanted)| served.get(&**object).is_some_and(|generation| generation >= wanted));
        served
    }

    /// Writes a status in the first version of the kind that the server has.
    async fn write(&self, target: &Target, wanted: &Wanted, status: &Status) -> Result<(), Fault> {
        for version in kind_of(target).facts().versions {
            match self.write_in(version, target, wanted, status).await {
                // The object was deleted, or the server does not have this version.
                Err(fault) if fault.status() == Some(StatusCode::NOT_FOUND) => {}
                result => return result,
            }
        }
        Ok(())
    }

    async fn write_in(
        &self,
        version: &str,
        target: &Target,
        wanted: &Wanted,
        status: &Status,
    ) -> Result<(), Fault> {
        let path = path(version, target);
        let now = rfc3339(SystemTime::now());
        let (version, status) = if wanted.is_blank {
            (
                Value::from(&*wanted.stamp.resource_version),
                status.of_route(&self.spec.controller, &Value::Null, &now),
            )
        } else {
            let object = self.client.object(&path).await?;
            let object: Value =
                serde_json::from_slice(&object).map_err(|error| Fault::Answer(error.to_string()))?;
            let before = &object["status"];
            let status = match target {
                Target::Route(_) => status.of_route(&self.spec.controller, before, &now),
                Target::Parent((ParentKind::Gateway, _)) => status.of_gateway(before, &now),
                Target::Parent((ParentKind::ListenerSet, _)) => status.of_listeners(before, &now),
                Target::Class(_) => status.of_class(before, &now),
            };
            (object["metadata"]["resourceVersion"].clone(), status)
        };
        let patch = json!({"metadata": {"resourceVersion": version}, "status": status});
        let path = format!("{path}/status?fieldManager=isthmus");
        let body = patch.to_string().into_bytes();
        self.client.write(Method::PATCH, &path, "application/merge-patch+json", body).await.map(drop)
    }
}

/// Returns the status to write. `None`: not every replica serves the Gateway, and there is still time for it.
fn judged(
    target: &Target,
    wanted: &Wanted,
    replicas: &[Replica],
    waiting: &mut BTreeMap<Target, (i64, Instant)>,
    now: Instant,
) -> Option<Status> {
    let laggards = wanted.laggards(replicas);
    if laggards.is_empty() {
        waiting.remove(target);
        return Some(wanted.status.clone());
    }
    let generation = wanted.served.as_ref().map_or(0, |(_, generation)| *generation);
    let since = waiting.get(target).filter(|(of, _)| *of == generation);
    let Some((_, since)) = since else {
        waiting.insert(target.clone(), (generation, now));
        return None;
    };
    (now - *since >= PENDING_AFTER).then(|| wanted.pending(&laggards))
}

/// Returns the object of events about it; `None` for a class, which is in no namespace.
fn about<'a>(target: &'a Target, uid: &'a Arc<str>) -> Option<About<'a>> {
    let (kind, key) = match target {
        Target::Class(_) => return None,
        Target::Parent((kind, key)) => (kind.text(), key),
        Target::Route((kind, key)) => (kind.text(), key),
    };
    let version = kind_of(target).facts().versions.first()?;
    Some(About { api_version: version.trim_start_matches("apis/"), kind, key, uid })
}

/// Returns the kind of an object.
fn kind_of(target: &Target) -> Kind {
    match target {
        Target::Class(_) => Kind::GatewayClass,
        Target::Parent((ParentKind::Gateway, _)) => Kind::ClassGateway,
        Target::Parent((ParentKind::ListenerSet, _)) => Kind::ListenerSet,
        Target::Route((RouteKind::Tls, _)) => Kind::TlsRoute,
        Target::Route((RouteKind::Tcp, _)) => Kind::TcpRoute,
    }
}

/// Returns the path of an object in a version of its kind.
fn path(version: &str, target: &Target) -> String {
    let plural = kind_of(target).plural();
    match target {
        Target::Class(name) => format!("/{version}/{plural}/{name}"),
        Target::Parent((_, key)) | Target::Route((_, key)) => {
            format!("/{version}/namespaces/{}/{plural}/{}", key.namespace, key.name)
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::super::super::notes::Note;
    use super::super::super::scripted;
    use super::super::super::table::ObjectKey;
    use super::super::super::testing::spec_of;
    use super::*;
    use isthmus_aggregator::spec::kubernetes::Knows;
    use isthmus_registry::change::{Dirty, Item};
    use isthmus_registry::gateway_api::GatewayPlaces;
    use isthmus_snapshot::testing::{Mesh, shard};
    use isthmus_tasks::scope::Scope;
    use isthmus_world::Publisher;

    fn wanted(generation: i64) -> Wanted {
        let yes = || Verdict::yes("Programmed", "connections are served");
        let status = Status { generation, conditions: vec![("Programmed", yes())], ..Status::default() };
        let stamp = Stamp { generation, resource_version: "1".into(), ..Stamp::default() };
        Wanted { status, stamp, is_blank: false, served: Some(("Gateway a/b".into(), generation)) }
    }

    fn replica(name: &str, serves: Option<i64>) -> Replica {
        (
            name.to_owned(),
            serves.map(|generation| ("Gateway a/b".to_owned(), generation)).into_iter().collect(),
        )
    }

    #[test]
    fn a_gateway_is_programmed_once_every_replica_serves_it_and_laggards_are_named_after_a_while() {
        let target = Target::Class("x".into());
        let (mut waiting, begin) = (BTreeMap::new(), Instant::now());
        let later = begin + Duration::from_secs(10);
        let mut condition = |generation, replicas: &[Replica], now| {
            let status = judged(&target, &wanted(generation), replicas, &mut waiting, now)?;
            let (_, verdict) = &status.conditions[0];
            Some((verdict.is_true, verdict.reason, verdict.message.clone()))
        };
        let is_true = |judged: Option<(bool, &str, String)>| judged.map(|(is_true, ..)| is_true);
        let all = [replica("one", Some(2)), replica("two", Some(3))];
        assert_eq!(is_true(condition(2, &all, begin)), Some(true));
        assert_eq!(condition(3, &all, begin), None, "there is still time");
        assert_eq!(condition(3, &all, later - Duration::from_nanos(1)), None, "there is still time");
        let (is_programmed, reason, message) = condition(3, &all, later).expect("the time is over");
        assert_eq!((is_programmed, reason), (false, "Pending"));
        assert_eq!(message, "these replicas do not serve this generation of the Gateway yet: one");
        assert_eq!(condition(4, &all, later), None, "another generation has its own time");
        assert_eq!(is_true(condition(4, &[replica("one", Some(4))], later)), Some(true));
        let many: Vec<Replica> = (0..7).map(|number| replica(&number.to_string(), None)).collect();
        assert_eq!(condition(5, &many, begin), None);
        let (_, _, message) = condition(5, &many, later).expect("the time is over");
        assert!(message.ends_with("yet: 0, 1, 2, 3, 4 and 2 more"), "{message}");
    }

    /// Returns a client of a server that takes every write but does not answer requests for a path with this text, the Lease of the
    /// writer, and the times of the writes of statuses.
    async fn server(
        scope: &Scope,
        unanswered: &'static str,
    ) -> (Arc<Client>, Lease, mpsc::Receiver<Instant>) {
        let (client, mut requests) = scripted::server(scope).await;
        let spec = LeaseSpec { namespace: "n".into(), holder: "a".into(), knows: Knows::OwnCluster };
        let lease = Lease::new(client.clone(), spec, "isthmus-gateway-api-isthmus".into());
        let (noted, patches) = mpsc::channel(64);
        scope.spawn(async move {
            let mut open = Vec::new();
            loop {
                let asked = requests.next().await;
                let body = asked.body.clone();
                match asked.method {
                    Method::GET if asked.path.contains("/leases/") => asked.with(StatusCode::NOT_FOUND, "{}"),
                    Method::GET => asked.with(StatusCode::OK, r#"{"metadata":{"resourceVersion":"1"}}"#),
                    Method::PATCH => {
                        let _ = noted.try_send(Instant::now());
                        asked.with(StatusCode::OK, "{}");
                    }
                    _ if asked.path.contains(unanswered) => open.push(asked),
                    _ => asked.with(StatusCode::OK, body),
                }
            }
        });
        (client, lease, patches)
    }

    #[tokio::test(start_paused = true)]
    async fn a_status_that_does_not_stay_is_written_again_after_thirty_seconds() {
        let scope = Scope::default();
        let (client, mut lease, mut patches) = server(&scope, "/nothing").await;
        let mut writer = StatusWriter::new(client, &spec_of("isthmus"), LaterReader::default());
        let target = Target::Class("x".into());
        let due = Arc::new(Due::from([(target, Arc::new(Wanted { served: None, ..wanted(1) }))]));
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(45) {
            writer.turn(&due, &mut lease).await.expect("the server answers");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        let written: Vec<Instant> = std::iter::from_fn(|| patches.try_recv().ok()).collect();
        assert_eq!(written, [begun, begun + Duration::from_secs(30)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_takes_no_events_loses_no_status() {
        let scope = Scope::default();
        let (client, mut lease, mut patches) = server(&scope, "/events").await;
        let mut writer = StatusWriter::new(client, &spec_of("isthmus"), LaterReader::default());
        let status = Status {
            conditions: vec![("Programmed", Verdict::no("Invalid", "no listener"))],
            ..wanted(1).status
        };
        let due = (0..4).map(|at| {
            let key = ObjectKey { namespace: "n".into(), name: format!("g{at}").into() };
            let stamp = Stamp { uid: format!("{at}").into(), ..wanted(1).stamp };
            let wanted = Wanted { served: None, status: status.clone(), stamp, ..wanted(1) };
            (Target::Parent((ParentKind::Gateway, key)), Arc::new(wanted))
        });
        let due = Arc::new(due.collect::<Due>());
        for _ in 0..2 {
            writer.turn(&due, &mut lease).await.expect("an event is no part of the turn");
        }
        let written: Vec<Instant> = std::iter::from_fn(|| patches.try_recv().ok()).collect();
        assert_eq!(written.len(), 4, "each status is written once: {written:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_replica_that_has_died_holds_up_a_status_only_while_its_pod_is_ready() {
        let scope = Scope::default();
        let (client, mut requests) = scripted::server(&scope).await;
        let begun = Instant::now();
        let note = json!(Note::new("two", [("Gateway a/b".to_owned(), 0)].into())).to_string();
        let lease = json!({"metadata": {"annotations": {"replica.isthmus.dev/two": note}}}).to_string();
        let (noted, mut patches) = mpsc::channel(64);
        scope.spawn(async move {
            loop {
                let asked = requests.next().await;
                let ready = if begun.elapsed() < Duration::from_secs(3) { "True" } else { "False" };
                let pod = json!({"status": {"conditions": [{"type": "Ready", "status": ready}]}});
                let body = match asked.method {
                    Method::GET if asked.path.contains("/leases/") => lease.clone(),
                    Method::GET if asked.path.contains("/pods?") => json!({"items": [pod]}).to_string(),
                    Method::PATCH => {
                        let patch: Value = serde_json::from_slice(&asked.body).expect("JSON");
                        let status = patch["status"]["conditions"][0]["status"].to_string();
                        let _ = noted.try_send((begun.elapsed(), status));
                        "{}".to_owned()
                    }
                    _ => "{}".to_owned(),
                };
                asked.with(StatusCode::OK, body);
            }
        });
        let spec = LeaseSpec { namespace: "n".into(), holder: "a".into(), knows: Knows::OwnCluster };
        let mut lease = Lease::new(client.clone(), spec, "isthmus-gateway-api-isthmus".into());
        let mut mesh = Mesh::new(Vec::new(), vec![shard("east", "n1", Vec::new())]);
        let (object, places, listeners) = ("Gateway a/b".into(), Vec::new(), Vec::new());
        let gateway = GatewayPlaces { object, generation: 1, places, listeners };
        let served = Item::GatewayPlaces(gateway.into());
        Arc::make_mut(&mut mesh.shards[0]).put(served, &mut Dirty::default());
        let world = LaterReader::default();
        assert!(world.set(Publisher::new(mesh.snapshot()).1).is_ok());
        let mut writer = StatusWriter::new(client, &spec_of("isthmus"), world);
        let due = Arc::new(Due::from([(Target::Class("x".into()), Arc::new(wanted(1)))]));
        while begun.elapsed() < Duration::from_secs(20) {
            let pause = writer.turn(&due, &mut lease).await.expect("the server answers");
            tokio::time::sleep(pause).await;
        }
        let (at, status) = patches.try_recv().expect("it is written");
        assert_eq!((at, status.as_str()), (Duration::from_secs(4), "\"True\""));
        assert!(patches.try_recv().is_err(), "it was never pending");
    }

    #[tokio::test(start_paused = true)]
    async fn an_object_that_was_created_again_or_has_lost_its_status_is_written_at_once() {
        let scope = Scope::default();
        let (client, mut lease, mut patches) = server(&scope, "/nothing").await;
        let mut writer = StatusWriter::new(client, &spec_of("isthmus"), LaterReader::default());
        let digest = wanted(1).status.digest();
        let begun = Instant::now();
        // The UID and the digest of the object that is read, from this second on.
        let read = [(0, "u", 0), (2, "u", digest), (4, "u", 0), (6, "u", digest), (8, "u", 0), (50, "v", 0)];
        for second in 0..55 {
            let (_, uid, digest) = read.into_iter().rev().find(|(from, ..)| *from <= second).expect("read");
            let stamp = Stamp { uid: uid.into(), digest, ..wanted(1).stamp };
            let wanted = Wanted { served: None, stamp, ..wanted(1) };
            let due = Arc::new(Due::from([(Target::Class("x".into()), Arc::new(wanted))]));
            writer.turn(&due, &mut lease).await.expect("the server answers");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        let written = std::iter::from_fn(|| patches.try_recv().ok());
        let written: Vec<u64> = written.map(|at: Instant| (at - begun).as_secs()).collect();
        // The status is lost at 4 and at 8: once it is written at once, and then after 30 s. At 50 the object is a new one.
        assert_eq!(written, [0, 4, 34, 50]);
    }
}
