//! The status that an object of the Gateway API should have: its digest, which is compared with that of what the object has, and its
//! JSON. Conditions of other types, and parents of other controllers, are kept as they are.

use serde_json::{Value, json};

use super::super::kinds::gateway_route::{ParentRecord, RouteKind};
use super::super::kinds::gateway_status::{Condition, Digest, is_own};
use super::grants::GROUP;

/// The result of a check, as a condition shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) is_true: bool,
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

impl Verdict {
    pub(crate) fn yes(reason: &'static str, message: impl Into<String>) -> Self {
        Self { is_true: true, reason, message: message.into() }
    }

    pub(crate) fn no(reason: &'static str, message: impl Into<String>) -> Self {
        Self { is_true: false, reason, message: message.into() }
    }

    /// Returns the status of the condition.
    fn status(&self) -> &'static str {
        if self.is_true { "True" } else { "False" }
    }
}

/// The status that an object should have. Each kind of object has some of the fields; the others are empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Status {
    /// The generation of the object that the status is about.
    pub(crate) generation: i64,
    pub(crate) conditions: Vec<(&'static str, Verdict)>,
    /// The types and values of addresses.
    pub(crate) addresses: Vec<(&'static str, String)>,
    pub(crate) listeners: Vec<ListenerStatus>,
    pub(crate) attached_sets: usize,
    pub(crate) parents: Vec<ParentStatus>,
    /// The parents of a route whose entries another release of Isthmus writes. They are kept as they are.
    pub(crate) kept: Vec<ParentRecord>,
    /// The names of supported features, sorted.
    pub(crate) features: &'static [&'static str],
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ListenerStatus {
    pub(crate) name: String,
    pub(crate) attached: usize,
    pub(crate) kinds: Vec<RouteKind>,
    pub(crate) conditions: Vec<(&'static str, Verdict)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ParentStatus {
    pub(crate) parent: ParentRecord,
    pub(crate) conditions: Vec<(&'static str, Verdict)>,
}

impl Status {
    /// Returns the digest that an object with this status has.
    pub(crate) fn digest(&self) -> u64 {
        let mut digest = Digest::default();
        let generation = self.generation;
        let conditions = |digest: &mut Digest, place: &str, all: &[(&'static str, Verdict)]| {
            let all: Vec<Condition> = all.iter().map(|one| read_back(one, generation)).collect();
            digest.conditions(place, &all);
        };
        conditions(&mut digest, "", &self.conditions);
        self.addresses.iter().for_each(|(kind, value)| digest.part(&["address", kind, value]));
        self.features.iter().for_each(|name| digest.part(&["feature", name]));
        if self.attached_sets > 0 {
            digest.part(&["attachedListenerSets", &self.attached_sets.to_string()]);
        }
        for listener in &self.listeners {
            digest.part(&["listener", &listener.name, &listener.attached.to_string()]);
            listener.kinds.iter().for_each(|kind| digest.part(&["kind", &listener.name, kind.text()]));
            conditions(&mut digest, &listener.name, &listener.conditions);
        }
        for parent in &self.parents {
            let all: Vec<Condition> =
                parent.conditions.iter().map(|one| read_back(one, generation)).collect();
            digest.entry(parent.parent.digest(&all));
        }
        digest.finish()
    }

    /// Returns the `status` of a GatewayClass whose status is `before`. A condition whose status does not change keeps its time.
    pub(crate) fn of_class(&self, before: &Value, now: &str) -> Value {
        let features: Vec<Value> = self.features.iter().map(|name| json!({"name": name})).collect();
        json!({
            "conditions": self.conditions(&self.conditions, &before["conditions"], now),
            "supportedFeatures": features,
        })
    }

    /// Returns the `status` of a Gateway or ListenerSet whose status is `before`.
    pub(crate) fn of_listeners(&self, before: &Value, now: &str) -> Value {
        let mut status = json!({"conditions": self.conditions(&self.conditions, &before["conditions"], now)});
        let known = before["listeners"].as_array().map(Vec::as_slice).unwrap_or_default();
        let listener = |listener: &ListenerStatus| {
            let before = known.iter().find(|known| known["name"] == *listener.name);
            let before = before.map_or(&Value::Null, |known| &known["conditions"]);
            let kind = |kind: &RouteKind| json!({"group": GROUP, "kind": kind.text()});
            json!({
                "name": listener.name, "attachedRoutes": listener.attached,
                "supportedKinds": listener.kinds.iter().map(kind).collect::<Vec<_>>(),
                "conditions": self.conditions(&listener.conditions, before, now),
            })
        };
        status["listeners"] = self.listeners.iter().map(listener).collect();
        status
    }

    /// Returns the `status` of a Gateway whose status is `before`.
    pub(crate) fn of_gateway(&self, before: &Value, now: &str) -> Value {
        let mut status = self.of_listeners(before, now);
        let address = |(kind, value): &(&'static str, String)| json!({"type": kind, "value": value});
        status["addresses"] = self.addresses.iter().map(address).collect();
        if self.attached_sets > 0 || !before["attachedListenerSets"].is_null() {
            status["attachedListenerSets"] = self.attached_sets.into();
        }
        status
    }

    /// Returns the `status` of a route whose status is `before`. The entries of this controller are those of the release.
    pub(crate) fn of_route(&self, controller: &str, before: &Value, now: &str) -> Value {
        let known = before["parents"].as_array().map(Vec::as_slice).unwrap_or_default();
        let kept: Vec<Value> = self.kept.iter().map(reference).collect();
        let is_own =
            |entry: &&Value| entry["controllerName"] == *controller && !kept.contains(&entry["parentRef"]);
        let (own, others): (Vec<&Value>, Vec<&Value>) = known.iter().partition(is_own);
        let parents = self.parents.iter().map(|parent| {
            let reference = reference(&parent.parent);
            let before = own.iter().find(|known| known["parentRef"] == reference);
            let before = before.map_or(&Value::Null, |known| &known["conditions"]);
            json!({
                "parentRef": reference, "controllerName": controller,
                "conditions": self.conditions(&parent.conditions, before, now),
            })
        });
        let all: Vec<Value> = others.into_iter().cloned().chain(parents).collect();
        json!({"parents": all})
    }

    fn conditions(&self, wanted: &[(&'static str, Verdict)], before: &Value, now: &str) -> Vec<Value> {
        let before = before.as_array().map(Vec::as_slice).unwrap_or_default();
        let one = |(kind, verdict): &(&'static str, Verdict)| {
            let status = verdict.status();
            let same = before.iter().find(|known| known["type"] == *kind && known["status"] == status);
            let since = same.and_then(|known| known["lastTransitionTime"].as_str()).unwrap_or(now);
            json!({
                "type": kind, "status": status, "reason": verdict.reason, "message": verdict.message,
                "lastTransitionTime": since, "observedGeneration": self.generation,
            })
        };
        let others = before.iter().filter(|known| !known["type"].as_str().is_some_and(is_own));
        others.cloned().chain(wanted.iter().map(one)).collect()
    }
}

/// Returns a condition as the API server gives it back.
fn read_back((kind, verdict): &(&'static str, Verdict), generation: i64) -> Condition {
    Condition {
        kind: (*kind).to_owned(),
        status: verdict.status().to_owned(),
        reason: verdict.reason.to_owned(),
        message: verdict.message.clone(),
        observed_generation: generation,
    }
}

fn reference(parent: &ParentRecord) -> Value {
    let mut fields = serde_json::Map::new();
    let texts = [
        ("group", &parent.group),
        ("kind", &parent.kind),
        ("namespace", &parent.namespace),
        ("sectionName", &parent.section),
    ];
    for (key, text) in texts {
        if let Some(text) = text {
            fields.insert(key.to_owned(), (&**text).into());
        }
    }
    fields.insert("name".to_owned(), (&*parent.name).into());
    if let Some(port) = parent.port {
        fields.insert("port".to_owned(), port.into());
    }
    fields.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTROLLER: &str = "isthmus.io/gateway-controller";

    fn parent(name: &str) -> ParentRecord {
        ParentRecord {
            group: Some("gateway.networking.k8s.io".into()),
            kind: None,
            namespace: None,
            name: name.into(),
            section: None,
            port: Some(443),
        }
    }

    #[test]
    fn a_status_keeps_the_entries_of_others_and_the_times_of_what_has_not_changed() {
        let conditions = vec![
            ("Accepted", Verdict::yes("Accepted", "m")),
            ("ResolvedRefs", Verdict::no("InvalidKind", "n")),
        ];
        let parents = vec![ParentStatus { parent: parent("edge"), conditions }];
        let status = Status { generation: 3, parents, ..Status::default() };
        let foreign = json!({"parentRef": {"name": "edge"}, "controllerName": "other", "conditions": [{"type": "Accepted"}]});
        let old = json!([
            {"type": "Accepted", "status": "True", "lastTransitionTime": "then"},
            {"type": "ResolvedRefs", "status": "True", "lastTransitionTime": "then"},
            {"type": "Theirs", "status": "True"},
        ]);
        let own = json!({"parentRef": {"group": "gateway.networking.k8s.io", "name": "edge", "port": 443},
            "controllerName": CONTROLLER, "conditions": old});
        let gone = json!({"parentRef": {"name": "gone"}, "controllerName": CONTROLLER, "conditions": []});
        let after = status.of_route(CONTROLLER, &json!({"parents": [own, foreign, gone]}), "now");
        let parents = after["parents"].as_array().expect("a list");
        assert_eq!(parents.len(), 2);
        assert_eq!(parents[0], foreign);
        let conditions = &parents[1]["conditions"];
        assert_eq!(conditions[0]["type"], "Theirs");
        assert_eq!(
            (&conditions[1]["type"], &conditions[1]["lastTransitionTime"]),
            (&json!("Accepted"), &json!("then"))
        );
        assert_eq!(
            (&conditions[2]["status"], &conditions[2]["lastTransitionTime"]),
            (&json!("False"), &json!("now"))
        );
        assert_eq!(conditions[2]["observedGeneration"], 3);
    }
}
