//! A Lease of the API server, by which one of several replicas writes to it.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};

use super::client::{Client, Fault};
use super::notes::Notes;
use isthmus_aggregator::spec::kubernetes::{Knows, LeaseSpec};
use isthmus_telemetry::clock::rfc3339;

/// The duration of a Lease. This time and the next two are those of client-go's leader election.
const LEASE: Duration = Duration::from_secs(15);
/// The interval at which the holder renews the Lease.
pub(super) const RENEW_EVERY: Duration = Duration::from_secs(2);
/// The time after the last renewal at which the holder stops writing.
const RENEW_WITHIN: Duration = Duration::from_secs(10);
/// The annotation of the Lease that says whether its holder reads the exports of other clusters ([`Knows`]).
const KNOWS: &str = "isthmus.dev/clusters";

/// A Lease for which this replica competes.
pub(super) struct Lease {
    client: Arc<Client>,
    spec: LeaseSpec,
    name: String,
    /// The content of the Lease at the last read, and the time of the first read that had this content.
    seen: Option<(Value, Instant)>,
    /// When this replica last renewed the Lease; `None`: this replica does not hold it.
    renewed: Option<Instant>,
    /// The notes of this replica and of the others.
    pub(super) notes: Notes,
}

impl Lease {
    /// Returns a Lease of this name that this replica does not hold yet.
    pub(super) fn new(client: Arc<Client>, spec: LeaseSpec, name: String) -> Self {
        // Replicas may share a name, but only one of them may write, so each adds a random number to its name.
        let holder = format!("{}_{:016x}", spec.holder, RandomState::new().hash_one(()));
        let notes = Notes::new(&spec.holder);
        let spec = LeaseSpec { holder: holder.into(), ..spec };
        Self { client, spec, name, seen: None, renewed: None, notes }
    }

    /// Returns true if this replica holds the Lease and has renewed it lately.
    pub(super) fn is_held(&self) -> bool {
        self.renewed.is_some_and(|at| at.elapsed() < RENEW_WITHIN)
    }

    /// Returns the time that a turn has for its writes from this moment on; `None` if this replica does not hold the Lease.
    pub(super) fn term(&self) -> Option<Term> {
        let (now, end) = (Instant::now(), self.renewed? + RENEW_WITHIN);
        (now < end).then(|| Term { due: end.min(now + RENEW_EVERY), end })
    }

    /// Stops renewing the Lease, which expires then.
    pub(super) fn let_go(&mut self) {
        self.renewed = None;
    }

    /// Gives up the Lease if this replica holds it, so that another one need not wait until it expires, and withdraws its note.
    pub(super) async fn release(&mut self) {
        if self.renewed.take().is_none() && !self.notes.is_written() {
            return;
        }
        let path = format!("{}/{}", self.list(), self.name);
        let Ok(bytes) = self.client.object(&path).await else { return };
        let Ok(mut lease) = parsed(&bytes) else { return };
        if lease["spec"]["holderIdentity"] == *self.spec.holder {
            lease["spec"]["holderIdentity"] = "".into();
        }
        self.notes.withdraw(&mut lease["metadata"]["annotations"]);
        // If this fails, the Lease and the note expire.
        let _ = self.put(Method::PUT, &path, lease).await;
        self.let_go();
    }

    /// Renews the Lease, or acquires it. A Lease can be acquired if it has no holder, or if its holder has not renewed it for
    /// [`LEASE`] or reads the exports of fewer clusters.
    pub(super) async fn renew(&mut self) -> Result<(), Fault> {
        let list = self.list();
        let path = format!("{list}/{}", self.name);
        let lease: Value = match self.client.object(&path).await {
            Ok(bytes) => parsed(&bytes)?,
            Err(fault) if fault.status() == Some(StatusCode::NOT_FOUND) => {
                let new = json!({"metadata": {"name": self.name, "namespace": &*self.spec.namespace}});
                let mut lease = lease_of(&self.spec, &new);
                self.notes.add(&mut lease["metadata"]["annotations"], Instant::now());
                return self.put(Method::POST, &list, lease).await;
            }
            Err(fault) => return Err(fault),
        };
        let holder = lease["spec"]["holderIdentity"].as_str().unwrap_or_default();
        let is_own = holder == &*self.spec.holder;
        // The times in the Lease are not compared, because the clocks of replicas may differ. Instead, a Lease counts as not
        // renewed while its content stays the same.
        if self.seen.as_ref().is_none_or(|(seen, _)| *seen != lease["spec"]) {
            self.seen = Some((lease["spec"].clone(), Instant::now()));
        }
        let knows_less = self.spec.knows == Knows::OtherClusters
            && lease["metadata"]["annotations"][KNOWS] == Knows::OwnCluster.text();
        let is_free = holder.is_empty()
            || knows_less
            || self.seen.as_ref().is_some_and(|(_, since)| since.elapsed() >= LEASE);
        self.notes.observe(&lease["metadata"]["annotations"], Instant::now());
        if !is_own && !is_free {
            self.renewed = None;
            return self.renew_note(&path, lease).await;
        }
        let mut lease = lease_of(&self.spec, &lease);
        self.notes.add(&mut lease["metadata"]["annotations"], Instant::now());
        self.put(Method::PUT, &path, lease).await
    }

    /// Writes the note of this replica into a Lease that another one holds, if it is due.
    async fn renew_note(&mut self, path: &str, mut lease: Value) -> Result<(), Fault> {
        if !self.notes.is_due(Instant::now()) {
            return Ok(());
        }
        self.notes.add(&mut lease["metadata"]["annotations"], Instant::now());
        let body = lease.to_string().into_bytes();
        match self.client.write(Method::PUT, path, "application/json", body).await {
            Ok(_) => Ok(()),
            // Another replica has written the Lease in the meantime, so the note is written with the next renewal.
            Err(fault) if fault.status() == Some(StatusCode::CONFLICT) => {
                self.notes.forget();
                Ok(())
            }
            Err(fault) => {
                self.notes.forget();
                Err(fault)
            }
        }
    }

    /// Returns the path of the Leases of the namespace.
    fn list(&self) -> String {
        format!("/apis/coordination.k8s.io/v1/namespaces/{}/leases", self.spec.namespace)
    }

    async fn put(&mut self, method: Method, path: &str, lease: Value) -> Result<(), Fault> {
        // The other replicas may see the renewal long before a slow server answers.
        let begun = Instant::now();
        match self.client.write(method, path, "application/json", lease.to_string().into_bytes()).await {
            Ok(_) => {
                self.renewed = Some(begun);
                Ok(())
            }
            // Another replica has written its note or itself as the holder in the meantime, which the next renewal shows. Until
            // then, the time of the last renewal counts.
            Err(fault) if fault.status() == Some(StatusCode::CONFLICT) => {
                self.notes.forget();
                Ok(())
            }
            Err(fault) => Err(fault),
        }
    }
}

/// The time that a turn has for all of its writes, whatever their kinds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Term {
    /// When the next renewal of the Lease is due.
    due: Instant,
    /// When this replica stops writing if it has not renewed the Lease.
    end: Instant,
}

impl Term {
    /// Returns true if the Lease has to be renewed before further writes begin. The next turn makes these writes.
    pub(super) fn is_over(self) -> bool {
        Instant::now() >= self.due
    }

    /// Waits for the results of writes. Fails if the server has not answered when this replica has to stop writing.
    pub(super) fn within<T>(self, writes: impl Future<Output = T>) -> impl Future<Output = Result<T, Fault>> {
        // The futures of requests are large.
        let writes = Box::pin(timeout_at(self.end, writes));
        async move { writes.await.map_err(|_| Fault::Overdue) }
    }

    /// Returns the time until the next turn: none if there may be further writes.
    pub(super) fn pause(self) -> Duration {
        if self.is_over() { Duration::ZERO } else { RENEW_EVERY }
    }
}

/// Returns the Lease with this replica as its holder. The server refuses the write if the Lease has changed since `before` was
/// read.
fn lease_of(spec: &LeaseSpec, before: &Value) -> Value {
    let now = micro_time(SystemTime::now());
    let old = &before["spec"];
    let is_own = old["holderIdentity"].as_str() == Some(&*spec.holder);
    let transitions = old["leaseTransitions"].as_i64().unwrap_or(0);
    let transitions = transitions.saturating_add(i64::from(!is_own && !old.is_null()));
    let acquired = if is_own { old["acquireTime"].clone() } else { Value::from(now.as_str()) };
    let object = |value: &Value| value.as_object().cloned().unwrap_or_default();
    let mut metadata = object(&before["metadata"]);
    let mut annotations = object(&before["metadata"]["annotations"]);
    annotations.insert(KNOWS.to_owned(), spec.knows.text().into());
    metadata.insert("annotations".to_owned(), annotations.into());
    json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata,
        "spec": {
            "holderIdentity": &*spec.holder, "leaseDurationSeconds": LEASE.as_secs(),
            "acquireTime": acquired, "renewTime": now, "leaseTransitions": transitions,
        },
    })
}

fn parsed(bytes: &[u8]) -> Result<Value, Fault> {
    serde_json::from_slice(bytes).map_err(|error| Fault::Answer(error.to_string()))
}

/// Returns a time as `MicroTime` of Kubernetes.
fn micro_time(time: SystemTime) -> String {
    let text = rfc3339(time);
    format!("{}000Z", text.trim_end_matches('Z'))
}

#[cfg(test)]
mod tests {
    use isthmus_tasks::scope::Scope;

    use super::super::scripted::{self, Requests};
    use super::*;

    /// Stores one Lease, as an API server does.
    async fn store(mut requests: Requests) {
        let mut stored: Option<Value> = None;
        loop {
            let asked = requests.next().await;
            if asked.method == Method::GET {
                match &stored {
                    Some(lease) => asked.with(StatusCode::OK, lease.to_string()),
                    None => asked.with(StatusCode::NOT_FOUND, "{}"),
                }
                continue;
            }
            stored = serde_json::from_slice(&asked.body).ok();
            let body = asked.body.clone();
            asked.with(StatusCode::OK, body);
        }
    }

    fn lease(client: &Arc<Client>, holder: &str) -> Lease {
        let spec =
            LeaseSpec { namespace: "istio-system".into(), holder: holder.into(), knows: Knows::OwnCluster };
        Lease::new(client.clone(), spec, "x".to_owned())
    }

    #[tokio::test(start_paused = true)]
    async fn a_holder_that_does_not_renew_stops_writing_after_ten_seconds_and_is_followed_after_fifteen() {
        let scope = Scope::default();
        let (client, requests) = scripted::server(&scope).await;
        scope.spawn(store(requests));
        let (mut one, mut other) = (lease(&client, "one"), lease(&client, "other"));
        one.renew().await.expect("acquired");
        other.renew().await.expect("read");
        assert!(one.is_held() && !other.is_held());
        tokio::time::sleep(Duration::from_millis(9_999)).await;
        assert!(one.is_held());
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert!(!one.is_held(), "two replicas would write");
        tokio::time::sleep(Duration::from_millis(4_999)).await;
        other.renew().await.expect("read");
        assert!(!other.is_held());
        tokio::time::sleep(Duration::from_millis(1)).await;
        other.renew().await.expect("acquired");
        assert!(other.is_held());
        other.release().await;
        one.renew().await.expect("acquired");
        assert!(one.is_held() && !other.is_held(), "a Lease that was given up is free at once");
    }

    #[test]
    fn a_lease_says_who_holds_it_and_whom_it_knows_whatever_it_was() {
        let spec =
            LeaseSpec { namespace: "istio-system".into(), holder: "b_1".into(), knows: Knows::OtherClusters };
        let before = json!({
            "metadata": {"name": "x", "resourceVersion": "7", "annotations": {"a": "b", KNOWS: "own"}},
            "spec": {"holderIdentity": "a_1", "leaseTransitions": 3, "acquireTime": "then"},
        });
        let taken = lease_of(&spec, &before);
        assert_eq!(
            taken["metadata"],
            json!({"name": "x", "resourceVersion": "7", "annotations": {"a": "b", KNOWS: "several"}})
        );
        assert_eq!(taken["spec"]["leaseTransitions"], 4);
        let renewed = lease_of(&spec, &taken);
        assert_eq!(renewed["spec"]["leaseTransitions"], 4);
        assert_eq!(renewed["spec"]["acquireTime"], taken["spec"]["acquireTime"]);
        for odd in [
            json!(null),
            json!("x"),
            json!({"metadata": "x", "spec": []}),
            json!({"metadata": {"annotations": [7]}, "spec": {"leaseTransitions": i64::MAX}}),
        ] {
            let made = lease_of(&spec, &odd);
            assert_eq!(made["metadata"]["annotations"], json!({KNOWS: "several"}), "{odd}");
            assert_eq!(made["spec"]["holderIdentity"], "b_1");
        }
    }

    #[test]
    fn times_have_microseconds() {
        assert_eq!(micro_time(SystemTime::UNIX_EPOCH), "1970-01-01T00:00:00.000000Z");
    }
}
