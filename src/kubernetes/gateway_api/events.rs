//! Events on objects of the Gateway API, where `kubectl describe` shows them: the conditions in a status that was written that say
//! that something is wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::super::client::{Client, Fault};
use super::super::table::ObjectKey;
use super::status::{Status, Verdict};
use isthmus_telemetry::clock::rfc3339;

/// The time for which an event of an object and a reason is not sent again.
const AGAIN_AFTER: Duration = Duration::from_secs(60);
/// The largest number of events of one turn. The status has what the others would say.
const SENT_MAX: usize = 40;
/// The pause after the API server has refused an event, or has not answered.
const PAUSE: Duration = Duration::from_secs(60);

/// The program that sends the events.
const COMPONENT: &str = "isthmus";

/// The object of an event.
#[derive(Clone, Copy)]
pub(super) struct About<'a> {
    /// Such as `gateway.networking.k8s.io/v1`.
    pub(super) api_version: &'a str,
    pub(super) kind: &'a str,
    pub(super) key: &'a ObjectKey,
    pub(super) uid: &'a Arc<str>,
}

/// Sends events.
pub(super) struct Events {
    client: Arc<Client>,
    /// The controller and the replica.
    reporter: (Arc<str>, Arc<str>),
    /// The events that were sent last, by the UID of the object and the reason.
    sent: BTreeMap<(Arc<str>, &'static str), Instant>,
    /// The number of events that this turn may still send.
    left: usize,
    /// When the API server refused an event, or did not answer.
    refused: Option<Instant>,
}

impl Events {
    pub(super) fn new(client: Arc<Client>, reporter: (Arc<str>, Arc<str>)) -> Self {
        Self { client, reporter, sent: BTreeMap::new(), left: SENT_MAX, refused: None }
    }

    /// Begins a turn.
    pub(super) fn begin(&mut self) {
        self.left = SENT_MAX;
        self.sent.retain(|_, at| at.elapsed() < AGAIN_AFTER);
        self.refused = self.refused.filter(|at| at.elapsed() < PAUSE);
    }

    /// Sends an event for each reason of a status that was written to the object. An event that cannot be sent is lost: the status
    /// says the same.
    pub(super) async fn send(&mut self, about: About<'_>, status: &Status) {
        for (reason, message) in faults(status) {
            if self.left == 0
                || self.refused.is_some()
                || self.sent.contains_key(&(about.uid.clone(), reason))
            {
                continue;
            }
            self.left -= 1;
            self.sent.insert((about.uid.clone(), reason), Instant::now());
            if let Err(fault) = self.post(about, (reason, &message)).await {
                tracing::debug!(%fault, "no event was sent");
                self.refuse();
            }
        }
    }

    /// Sends no events for [`PAUSE`].
    pub(super) fn refuse(&mut self) {
        self.refused = Some(Instant::now());
    }

    /// Creates an event, or renews the one that the object has for this reason.
    async fn post(
        &self,
        About { api_version, kind, key, uid }: About<'_>,
        (reason, message): (&str, &str),
    ) -> Result<(), Fault> {
        let mut hasher = DefaultHasher::new();
        (uid, reason).hash(&mut hasher);
        // A name has up to 253 characters.
        let object: String = key.name.chars().take(200).collect();
        let name = format!("{}.{:016x}", object.trim_end_matches(['-', '.']), hasher.finish());
        let now = rfc3339(SystemTime::now());
        let (controller, replica) = &self.reporter;
        let event = json!({
            "apiVersion": "v1", "kind": "Event", "metadata": {"name": name, "namespace": &*key.namespace},
            "involvedObject": {
                "apiVersion": api_version, "kind": kind,
                "namespace": &*key.namespace, "name": &*key.name, "uid": &**uid,
            },
            "type": "Warning", "reason": reason, "message": message, "count": 1,
            "firstTimestamp": now, "lastTimestamp": now, "source": {"component": COMPONENT},
            "reportingComponent": &**controller, "reportingInstance": &**replica,
        });
        let all = format!("/api/v1/namespaces/{}/events", key.namespace);
        match self.write(Method::POST, &all, "application/json", &event).await {
            Err(fault) if fault.status() == Some(StatusCode::CONFLICT) => {
                let renewal = json!({"lastTimestamp": now, "message": message});
                let path = format!("{all}/{name}");
                self.write(Method::PATCH, &path, "application/merge-patch+json", &renewal).await
            }
            result => result,
        }
    }

    async fn write(&self, method: Method, path: &str, kind: &'static str, body: &Value) -> Result<(), Fault> {
        self.client.write(method, path, kind, body.to_string().into_bytes()).await.map(drop)
    }
}

/// Returns the reasons of the conditions that say that something is wrong, each with its message, and each message once.
fn faults(status: &Status) -> Vec<(&'static str, String)> {
    let listeners = status
        .listeners
        .iter()
        .map(|listener| (format!("listener {}: ", listener.name), &listener.conditions));
    let parents =
        status.parents.iter().map(|parent| (format!("parent {}: ", parent.parent.name), &parent.conditions));
    let places = listeners.chain(parents).chain([(String::new(), &status.conditions)]);
    let is_fault = |kind: &str, verdict: &Verdict| match kind {
        "Conflicted" => verdict.is_true,
        _ => !verdict.is_true,
    };
    let (mut reasons, mut messages) = (BTreeSet::new(), BTreeSet::new());
    let mut all = Vec::new();
    for (place, conditions) in places {
        for (_, verdict) in conditions.iter().filter(|(kind, verdict)| is_fault(kind, verdict)) {
            if messages.insert(&verdict.message) && reasons.insert(verdict.reason) {
                all.push((verdict.reason, format!("{place}{}", verdict.message)));
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::super::scripted;
    use super::super::status::ListenerStatus;
    use super::*;
    use isthmus_tasks::scope::Scope;
    use tokio::sync::mpsc;

    fn status(message: &str) -> Status {
        let no = |reason, message: &str| Verdict::no(reason, message);
        let listener = ListenerStatus {
            name: "tls".to_owned(),
            attached: 0,
            kinds: Vec::new(),
            conditions: vec![
                ("Accepted", no("PortUnavailable", message)),
                ("Conflicted", no("NoConflicts", "no other listener conflicts with this one")),
                ("Programmed", no("Invalid", message)),
                ("ResolvedRefs", Verdict::yes("ResolvedRefs", "fine")),
            ],
        };
        Status { listeners: vec![listener], ..Status::default() }
    }

    #[test]
    fn a_status_has_an_event_for_each_fault_and_none_for_what_follows_from_it() {
        assert_eq!(faults(&status("port 1")), [("PortUnavailable", "listener tls: port 1".to_owned())]);
        let conflict = ("Conflicted", Verdict::yes("HostnameConflict", "taken"));
        let status = Status { conditions: vec![conflict], ..Status::default() };
        assert_eq!(faults(&status), [("HostnameConflict", "taken".to_owned())]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_object_has_one_event_a_reason_that_is_renewed_each_minute_at_most() {
        let scope = Scope::default();
        let (client, mut requests) = scripted::server(&scope).await;
        let (asked_for, mut asked) = mpsc::channel(64);
        scope.spawn(async move {
            let mut is_there = false;
            loop {
                let asked = requests.next().await;
                let body: Value = serde_json::from_slice(&asked.body).expect("JSON");
                let object = body["involvedObject"]["apiVersion"].as_str().unwrap_or_default();
                let line =
                    format!("{} {object} {}", asked.method, body["message"].as_str().unwrap_or_default());
                let _ = asked_for.try_send(line);
                let is_new = asked.method == Method::PATCH || !std::mem::replace(&mut is_there, true);
                asked.with(if is_new { StatusCode::CREATED } else { StatusCode::CONFLICT }, "{}");
            }
        });
        let mut events = Events::new(client, ("c".into(), "r".into()));
        let key = ObjectKey { namespace: "shop".into(), name: "web".into() };
        let uid = "uid".into();
        let route =
            About { api_version: "gateway.networking.k8s.io/v1", kind: "TLSRoute", key: &key, uid: &uid };
        for (wait, message) in [(0, "port 1"), (59, "port 2"), (2, "port 3")] {
            tokio::time::advance(Duration::from_secs(wait)).await;
            events.begin();
            events.send(route, &status(message)).await;
        }
        let lines: Vec<String> = std::iter::from_fn(|| asked.try_recv().ok()).collect();
        let version = "gateway.networking.k8s.io/v1";
        assert_eq!(
            lines,
            [
                format!("POST {version} listener tls: port 1"),
                format!("POST {version} listener tls: port 3"),
                "PATCH  listener tls: port 3".to_owned(),
            ]
        );
    }
}
