//! Writes the status of objects of the Gateway API. Only one replica writes at a time: the holder of a Lease. A status is written
//! only if it differs from what the object has, with the version of the object that was read, so that a later change of another
//! controller is never undone.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::super::client::{Client, Fault};
use super::super::kinds::Kind;
use super::super::kinds::gateway_route::{RouteId, RouteKind};
use super::super::kinds::gateway_status::Stamp;
use super::super::lease::{Lease, RENEW_EVERY};
use super::super::writing::{Duty, Refused, Writing};
use super::listeners::{ParentId, ParentKind};
use super::status::{Status, Verdict};
use isthmus_aggregator::spec::kubernetes::LeaseSpec;
use isthmus_snapshot::Snapshot;
use isthmus_tasks::stop::Stopped;
use isthmus_telemetry::clock::rfc3339;
use isthmus_world::{LaterReader, Reader};

/// The writes of this task, and their right.
pub(crate) const DUTY: Duty =
    Duty { subject: "status of the Gateway API", grant: "kubernetes.gatewayApi.class" };
/// The name of the Lease.
const LEASE_NAME: &str = "isthmus-gateway-api";
/// The time from a change to the first write, in which further changes arrive and the process begins to serve the change.
const SETTLE: Duration = Duration::from_millis(200);
/// The largest number of writes at the same time.
const TOGETHER: usize = 8;
/// The largest number of writes between two renewals of the Lease.
const WRITES_MAX: usize = 400;
/// The time for which a status is not written again, if it does not stay: another controller may write the same fields.
const AGAIN_AFTER: Duration = Duration::from_secs(30);

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
    /// The Gateway and its generation that the process must serve for the condition `Programmed` to be true; `None` if the condition
    /// does not depend on the process.
    pub(crate) served: Option<(Arc<str>, i64)>,
}

impl Wanted {
    /// Returns the status, with `Programmed` false as long as this process does not serve the Gateway.
    fn judged(&self, snapshot: Option<&Snapshot>) -> Status {
        let mut status = self.status.clone();
        let is_served = |(object, generation): &(Arc<str>, i64)| {
            let found = snapshot.and_then(|snapshot| snapshot.gateway_api.gateway(object));
            found.is_some_and(|gateway| gateway.generation >= *generation)
        };
        if self.served.as_ref().is_none_or(is_served) {
            return status;
        }
        let conditions = status.listeners.iter_mut().flat_map(|listener| &mut listener.conditions);
        for (kind, verdict) in conditions.chain(&mut status.conditions) {
            if *kind == "Programmed" && verdict.is_true {
                let why = "the gateway does not serve this generation of the Gateway yet";
                *verdict = Verdict::no("Pending", why);
            }
        }
        status
    }
}

/// The task that writes the status.
pub(crate) struct StatusWriter {
    client: Arc<Client>,
    lease: Lease,
    world: LaterReader,
    due: watch::Receiver<Arc<Due>>,
    writing: watch::Sender<Writing>,
    /// The digests that were written last, and when.
    written: BTreeMap<Target, (u64, Instant)>,
    refused: Refused<Target>,
}

impl StatusWriter {
    pub(crate) fn new(
        client: Arc<Client>,
        spec: LeaseSpec,
        world: LaterReader,
        due: watch::Receiver<Arc<Due>>,
        writing: watch::Sender<Writing>,
    ) -> Self {
        let lease = Lease::new(client.clone(), spec, LEASE_NAME);
        Self { client, lease, world, due, writing, written: BTreeMap::new(), refused: Refused::new() }
    }

    /// Writes until the task is aborted or the order to stop, and then gives up the Lease.
    pub(crate) async fn run(mut self, mut stopped: Stopped) {
        loop {
            let (writing, pause) = match self.turn().await {
                Ok(Turn::More) => (self.refused.result(), Duration::ZERO),
                Ok(Turn::Done) => (self.refused.result(), RENEW_EVERY),
                Err(fault) => Writing::of_turn(&fault, &DUTY),
            };
            let is_held = self.lease.is_held();
            writing.publish(&self.writing, |why| tracing::info!("the status of the Gateway API is {why}"));
            tokio::select! {
                // The order to stop comes first, so that another replica can go on at once.
                biased;
                () = stopped.ordered() => return self.lease.release().await,
                () = sleep(pause) => {}
                changed = self.due.changed(), if is_held => match changed {
                    Ok(()) => sleep(SETTLE).await,
                    // The session has ended, and this task will be aborted.
                    Err(_) => sleep(RENEW_EVERY).await,
                }
            }
        }
    }

    /// Renews the Lease, and writes if this replica holds it.
    async fn turn(&mut self) -> Result<Turn, Fault> {
        let due = self.due.borrow_and_update().clone();
        self.written.retain(|target, (_, at)| due.contains_key(target) && at.elapsed() < AGAIN_AFTER);
        self.refused.forget(|target| due.contains_key(target));
        if due.is_empty() {
            self.lease.let_go();
            return Ok(Turn::Done);
        }
        self.lease.renew().await?;
        if !self.lease.is_held() {
            self.written.clear();
            self.refused.clear();
            return Ok(Turn::Done);
        }
        let snapshot = self.world.get().map(Reader::latest);
        let differing = due.iter().filter(|(target, _)| !self.refused.contains(target));
        let differing = differing.filter_map(|(target, wanted)| {
            let status = wanted.judged(snapshot.as_deref());
            let digest = status.digest();
            let is_written = self.written.get(target).is_some_and(|(written, _)| *written == digest);
            (digest != wanted.stamp.digest && !is_written)
                .then(|| (target.clone(), wanted.clone(), status, digest))
        });
        let differing: Vec<_> = differing.take(WRITES_MAX).collect();
        let turn = if differing.len() == WRITES_MAX { Turn::More } else { Turn::Done };
        for some in differing.chunks(TOGETHER) {
            let writes = some.iter().map(|(target, wanted, status, _)| self.write(target, wanted, status));
            let results = join_all(writes).await;
            for ((target, _, _, digest), result) in some.iter().zip(results) {
                match result {
                    Ok(()) => drop(self.written.insert(target.clone(), (*digest, Instant::now()))),
                    // The object has changed, and the watch will report the new version.
                    Err(fault) if fault.status() == Some(StatusCode::CONFLICT) => {}
                    Err(fault) if fault.status().is_some() => {
                        self.refused.insert(target.clone(), &fault, &DUTY);
                    }
                    Err(fault) => return Err(fault),
                }
            }
            // The turn ends, so that a right that is missing for all objects is tried only once per turn.
            if self.refused.len() >= TOGETHER {
                return Ok(Turn::Done);
            }
        }
        Ok(turn)
    }

    async fn write(&self, target: &Target, wanted: &Wanted, status: &Status) -> Result<(), Fault> {
        let path = path(target);
        let now = rfc3339(SystemTime::now());
        let (version, status) = if wanted.is_blank {
            (Value::from(&*wanted.stamp.resource_version), status.of_route(&Value::Null, &now))
        } else {
            let object = match self.client.object(&path).await {
                Ok(object) => object,
                Err(fault) if fault.status() == Some(StatusCode::NOT_FOUND) => return Ok(()),
                Err(fault) => return Err(fault),
            };
            let object: Value =
                serde_json::from_slice(&object).map_err(|error| Fault::Answer(error.to_string()))?;
            let before = &object["status"];
            let status = match target {
                Target::Route(_) => status.of_route(before, &now),
                Target::Parent((ParentKind::Gateway, _)) => status.of_gateway(before, &now),
                Target::Parent((ParentKind::ListenerSet, _)) | Target::Class(_) => {
                    status.of_listeners(before, &now)
                }
            };
            (object["metadata"]["resourceVersion"].clone(), status)
        };
        let patch = json!({"metadata": {"resourceVersion": version}, "status": status});
        let path = format!("{path}/status?fieldManager=isthmus");
        let body = patch.to_string().into_bytes();
        match self.client.write(Method::PATCH, &path, "application/merge-patch+json", body).await {
            Ok(_) => Ok(()),
            Err(fault) if fault.status() == Some(StatusCode::NOT_FOUND) => Ok(()),
            Err(fault) => Err(fault),
        }
    }
}

/// The result of a turn.
enum Turn {
    /// Further objects wait to be written.
    More,
    Done,
}

/// Returns the path of an object.
fn path(target: &Target) -> String {
    let of = |kind: Kind, namespace: &str, name: &str| {
        format!("/{}/namespaces/{namespace}/{}/{name}", kind.facts().versions[0], kind.plural())
    };
    match target {
        Target::Class(name) => {
            let kind = Kind::GatewayClass;
            format!("/{}/{}/{name}", kind.facts().versions[0], kind.plural())
        }
        Target::Parent((ParentKind::Gateway, key)) => of(Kind::ClassGateway, &key.namespace, &key.name),
        Target::Parent((ParentKind::ListenerSet, key)) => of(Kind::ListenerSet, &key.namespace, &key.name),
        Target::Route((RouteKind::Tls, key)) => of(Kind::TlsRoute, &key.namespace, &key.name),
        Target::Route((RouteKind::Tcp, key)) => of(Kind::TcpRoute, &key.namespace, &key.name),
    }
}
