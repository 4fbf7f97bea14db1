//! Objects of one kind of which this program writes its own into a cluster: creates, changes and removes them until they are those
//! that the cluster should have. An object of another program is never touched, and none is written beside it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use futures_util::future::join_all;
use http::{Method, StatusCode};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::client::{Client, Fault};
use super::kinds::Kind;
use super::kinds::own_object::OwnObject;
use super::lease::Term;
use super::table::ObjectKey;
use super::writing::{Duty, LastWrite, Refused, TOGETHER, Writing, rotate};
use isthmus_telemetry::clock::rfc3339;

/// The objects that a cluster should have.
pub(super) type Wanted<C> = BTreeMap<ObjectKey, Arc<C>>;

/// The objects that a cluster has. `None` for an object of another program.
pub(super) type There<C> = BTreeMap<ObjectKey, Option<Arc<C>>>;

/// A write that an object needs.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step<C> {
    Create(Arc<C>),
    Change(Arc<C>),
    Remove,
}

/// The last write of an object.
struct Written<C> {
    step: Step<C>,
    last: LastWrite,
    /// The content that the server has kept; `None` after a removal, or if nothing was written. A server with an older CRD drops
    /// fields that this CRD does not have, and they are not written over and over.
    kept: Option<C>,
}

/// The own objects of a kind, while this replica may write them.
pub(super) struct OwnObjects<O: OwnObject> {
    client: Arc<Client>,
    duty: &'static Duty,
    written: BTreeMap<ObjectKey, Written<O::Content>>,
    refused: Refused<ObjectKey>,
    /// The last object that was written, and whether it was removed.
    last: Option<(bool, ObjectKey)>,
}

impl<O: OwnObject> OwnObjects<O> {
    pub(super) fn new(client: Arc<Client>, duty: &'static Duty) -> Self {
        Self { client, duty, written: BTreeMap::new(), refused: Refused::new(), last: None }
    }

    /// Forgets what was written, because another replica writes now.
    pub(super) fn clear(&mut self) {
        self.written.clear();
        self.refused.clear();
    }

    /// Returns the result to report.
    pub(super) fn result(&self) -> Writing {
        self.refused.result()
    }

    /// Writes what is due, as far as the term allows. `is_held_back` is asked before an object is changed or removed. Fails if the
    /// server does not answer.
    pub(super) async fn write(
        &mut self,
        wanted: &Wanted<O::Content>,
        there: &There<O::Content>,
        is_held_back: impl Fn(&ObjectKey, &O::Content, Option<&O::Content>) -> bool,
        term: Term,
    ) -> Result<(), Fault> {
        let is_used =
            |key: &ObjectKey| wanted.contains_key(key) || there.get(key).is_some_and(Option::is_some);
        self.written.retain(|key, _| is_used(key));
        for (key, written) in &mut self.written {
            let has = there.get(key).and_then(Option::as_deref);
            written.last.note(written.kept.as_ref() == has);
        }
        self.refused.forget(is_used);
        let mut due = steps(wanted, there, is_held_back);
        due.retain(|(key, step)| {
            let has = there.get(key).and_then(Option::as_deref);
            !self.refused.contains(key) && self.is_due(key, step, has)
        });
        let place = |(key, step): &(ObjectKey, Step<O::Content>)| (step.wanted().is_none(), key.clone());
        rotate(&mut due, |one| self.last.as_ref().is_some_and(|last| place(one) <= *last));
        let mut is_refused = false;
        for some in due.chunks(TOGETHER) {
            if term.is_over() {
                break;
            }
            // Objects whose writes the server does not answer are the last of the next turn.
            self.last = some.last().map(place);
            let results = term.within(join_all(some.iter().map(|(key, step)| self.make(key, step)))).await?;
            for ((key, step), result) in some.iter().zip(results) {
                let kept = match result {
                    Ok(kept) => kept,
                    // The object or its namespace has changed, and the watch will report it.
                    Err(fault) if is_of_the_moment(&fault) => None,
                    Err(fault) if fault.status().is_some() => {
                        self.refused.insert(key.clone(), &fault, self.duty);
                        is_refused = true;
                        continue;
                    }
                    Err(fault) => return Err(fault),
                };
                let last = LastWrite::now(self.made(key, step).map(|before| &before.last));
                self.written.insert(key.clone(), Written { step: step.clone(), last, kept });
            }
            // The turn ends, so that a right that no object has is tried only once per turn.
            if is_refused {
                break;
            }
        }
        Ok(())
    }

    /// Returns true if a step was not made yet, or if the object has not stayed as it was written, but not shortly after the last
    /// write of the object, so that endpoints that come and go cost one write per interval of turns. An object that another program has by
    /// its name is not shown here, and so neither is its removal: its creation is tried again.
    fn is_due(&self, key: &ObjectKey, step: &Step<O::Content>, has: Option<&O::Content>) -> bool {
        if self.written.get(key).is_some_and(|written| written.last.is_fresh()) {
            return false;
        }
        let is_missing = has.is_none() && matches!(step, Step::Create(_));
        self.made(key, step).is_none_or(|written| {
            (is_missing || written.kept.as_ref() != has) && written.last.may_be_repeated()
        })
    }

    /// Returns the last write of an object, if it was this step.
    fn made(&self, key: &ObjectKey, step: &Step<O::Content>) -> Option<&Written<O::Content>> {
        self.written.get(key).filter(|written| written.step.wanted() == step.wanted())
    }

    /// Makes a step, and returns the content that the server has then; `None` if there is no object of this program.
    async fn make(&self, key: &ObjectKey, step: &Step<O::Content>) -> Result<Option<O::Content>, Fault> {
        let (object, wanted) = match step {
            Step::Create(wanted) => (self.create(key, wanted).await?, wanted),
            Step::Change(wanted) => (self.change(key, wanted).await?, wanted),
            Step::Remove => return self.remove(key).await.map(|()| None),
        };
        let Some(object) = object.filter(|object| object.content().is_some()) else { return Ok(None) };
        let object = match object.status_patch(wanted, &rfc3339(SystemTime::now())) {
            Some(patch) => self.patch(key, "/status", &patch).await?,
            None => Some(object),
        };
        Ok(object.and_then(|object| object.content()))
    }

    async fn create(&self, key: &ObjectKey, wanted: &O::Content) -> Result<Option<O>, Fault> {
        let mut object = O::new_object(key, wanted);
        if let Some((kind, owner)) = O::owner(key, wanted) {
            let Some((owner, _)) = read::<Value>(&self.client, kind, &owner).await? else { return Ok(None) };
            object["metadata"]["ownerReferences"] = json!([{
                "apiVersion": owner["apiVersion"], "kind": owner["kind"],
                "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"],
            }]);
        }
        for version in O::KIND.facts().versions {
            // The first part is that of the path: `api/v1`, `apis/GROUP/VERSION`.
            object["apiVersion"] = version.split_once('/').map_or(*version, |(_, rest)| rest).into();
            object["kind"] = O::NAME.into();
            let path = format!("{}?fieldManager=isthmus", path(O::KIND, version, &key.namespace, ""));
            if let Some(answer) = self.send(Method::POST, &path, "application/json", &object).await? {
                return Ok(Some(answer));
            }
        }
        Ok(None)
    }

    /// Changes an object, unless it is one of another program by now.
    async fn change(&self, key: &ObjectKey, wanted: &O::Content) -> Result<Option<O>, Fault> {
        let Some((object, _)) = read::<O>(&self.client, O::KIND, key).await? else { return Ok(None) };
        if object.content().is_none() {
            return Ok(None);
        }
        match object.patch(wanted) {
            Some(patch) => self.patch(key, "", &patch).await,
            None => Ok(Some(object)),
        }
    }

    /// Removes an object, unless it is one of another program by now.
    async fn remove(&self, key: &ObjectKey) -> Result<(), Fault> {
        let Some((object, version)) = read::<O>(&self.client, O::KIND, key).await? else { return Ok(()) };
        if object.content().is_none() {
            return Ok(());
        }
        let only = json!({"resourceVersion": object.metadata().resource_version});
        let options = json!({"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": only});
        let path = path(O::KIND, version, &key.namespace, &key.name);
        let body = options.to_string().into_bytes();
        match self.client.write(Method::DELETE, &path, "application/json", body).await {
            Err(fault) if fault.status() != Some(StatusCode::NOT_FOUND) => Err(fault),
            _ => Ok(()),
        }
    }

    async fn patch(&self, key: &ObjectKey, part: &str, patch: &Value) -> Result<Option<O>, Fault> {
        for version in O::KIND.facts().versions {
            let path = path(O::KIND, version, &key.namespace, &key.name);
            let path = format!("{path}{part}?fieldManager=isthmus");
            let answer = self.send(Method::PATCH, &path, "application/merge-patch+json", patch).await?;
            if answer.is_some() {
                return Ok(answer);
            }
        }
        Ok(None)
    }

    /// Sends an object or a patch, and returns the object that the server has then. `None`: the server does not have the object, its
    /// namespace, or this version of the API.
    async fn send(
        &self,
        method: Method,
        path: &str,
        kind: &'static str,
        body: &Value,
    ) -> Result<Option<O>, Fault> {
        match self.client.write(method, path, kind, body.to_string().into_bytes()).await {
            Ok(bytes) => parsed(&bytes).map(Some),
            Err(fault) if fault.status() == Some(StatusCode::NOT_FOUND) => Ok(None),
            Err(fault) => Err(fault),
        }
    }
}

impl<C> Step<C> {
    /// Returns the content that the object has after the step; `None`: it is removed.
    fn wanted(&self) -> Option<&C> {
        match self {
            Self::Create(wanted) | Self::Change(wanted) => Some(wanted),
            Self::Remove => None,
        }
    }
}

/// Returns the writes that make the objects of a cluster those that it should have, the removals last, each sorted by key.
/// `is_held_back` is asked before an object is changed or removed.
fn steps<C: PartialEq>(
    wanted: &Wanted<C>,
    there: &There<C>,
    is_held_back: impl Fn(&ObjectKey, &C, Option<&C>) -> bool,
) -> Vec<(ObjectKey, Step<C>)> {
    let written = wanted.iter().filter_map(|(key, wanted)| {
        let step = match there.get(key) {
            None => Step::Create(wanted.clone()),
            Some(None) => return None,
            Some(Some(has)) if has == wanted || is_held_back(key, has, Some(wanted)) => return None,
            Some(Some(_)) => Step::Change(wanted.clone()),
        };
        Some((key.clone(), step))
    });
    let removed = there.iter().filter_map(|(key, has)| {
        let has = has.as_ref().filter(|_| !wanted.contains_key(key))?;
        (!is_held_back(key, has, None)).then(|| (key.clone(), Step::Remove))
    });
    written.chain(removed).collect()
}

/// Returns an object, and the version of the API in which the server has it.
async fn read<T: DeserializeOwned>(
    client: &Client,
    kind: Kind,
    key: &ObjectKey,
) -> Result<Option<(T, &'static str)>, Fault> {
    for version in kind.facts().versions {
        match client.object(&path(kind, version, &key.namespace, &key.name)).await {
            Ok(bytes) => return Ok(Some((parsed(&bytes)?, *version))),
            Err(fault) if fault.status() == Some(StatusCode::NOT_FOUND) => {}
            Err(fault) => return Err(fault),
        }
    }
    Ok(None)
}

/// Returns true if the write may succeed once the watch has reported what has changed: another program has written the object, or its
/// namespace is being deleted.
fn is_of_the_moment(fault: &Fault) -> bool {
    match fault {
        Fault::Refused { status: StatusCode::CONFLICT, .. } => true,
        Fault::Refused { status: StatusCode::FORBIDDEN, message, .. } => {
            message.contains("because it is being terminated")
        }
        _ => false,
    }
}

/// Returns the path of an object; with an empty name, that of the objects of a namespace.
fn path(kind: Kind, version: &str, namespace: &str, name: &str) -> String {
    let separator = if name.is_empty() { "" } else { "/" };
    format!("/{version}/namespaces/{namespace}/{}{separator}{name}", kind.plural())
}

fn parsed<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Fault> {
    serde_json::from_slice(bytes).map_err(|error| Fault::Answer(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::super::kinds::imported_slice::{ImportedSlice, SliceContent, SliceOf};
    use super::super::scripted;
    use super::super::writing::Lack;
    use super::*;
    use isthmus_tasks::scope::Scope;
    use std::time::Duration;

    fn key(name: &str) -> ObjectKey {
        ObjectKey { namespace: "shop".into(), name: name.into() }
    }

    #[test]
    fn objects_are_created_changed_and_removed_and_those_of_others_stay() {
        let (old, new) = (Arc::new("old"), Arc::new("new"));
        let wanted = ["new", "same", "changed", "foreign"].map(|name| (key(name), new.clone()));
        let there = [
            ("same", Some(new.clone())),
            ("changed", Some(old.clone())),
            ("foreign", None),
            ("gone", Some(old)),
            ("theirs", None),
        ];
        let there = there.map(|(name, own)| (key(name), own)).into();
        let steps = |is_held_back: bool| steps(&wanted.clone().into(), &there, |_, _, _| is_held_back);
        let created = (key("new"), Step::Create(new.clone()));
        assert_eq!(
            steps(false),
            [(key("changed"), Step::Change(new)), created.clone(), (key("gone"), Step::Remove)]
        );
        assert_eq!(steps(true), [created]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_object_is_changed_after_two_seconds_and_repaired_after_thirty() {
        const DUTY: Duty = Duty { subject: "x", grant: "x", lack: Lack::Fact };
        let client = Arc::new(scripted::client(&Scope::default()));
        let mut objects = OwnObjects::<ImportedSlice>::new(client, &DUTY);
        let content = |cluster: &str| SliceContent {
            import: "web".into(),
            of: SliceOf::Cluster(cluster.into()),
            is_ipv6: false,
            ports: Default::default(),
            endpoints: Default::default(),
        };
        let (wanted, changed) = (content("east"), content("west"));
        let step = Step::Create(Arc::new(wanted.clone()));
        let kept = Some(wanted.clone());
        let written = Written { step: step.clone(), last: LastWrite::now(None), kept };
        objects.written.insert(key("web"), written);
        let next = Step::Change(Arc::new(changed.clone()));
        let is_next_due = || objects.is_due(&key("web"), &next, Some(&wanted));
        tokio::time::advance(Duration::from_millis(1_999)).await;
        assert!(!is_next_due());
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(is_next_due());
        let is_due = |has: Option<&SliceContent>| objects.is_due(&key("web"), &step, has);
        tokio::time::advance(Duration::from_millis(27_999)).await;
        assert!(!is_due(Some(&changed)) && !is_due(None));
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(is_due(Some(&changed)) && is_due(None) && !is_due(Some(&wanted)));
    }

    #[test]
    fn a_namespace_that_is_deleted_is_no_missing_right() {
        let fault = |status, message: &str| {
            let message = message.to_owned();
            is_of_the_moment(&Fault::Refused { status, message, retry_after: None })
        };
        let forbidden = StatusCode::FORBIDDEN;
        assert!(fault(
            forbidden,
            "unable to create new content in namespace a because it is being terminated"
        ));
        assert!(!fault(forbidden, "serviceimports is forbidden") && fault(StatusCode::CONFLICT, ""));
    }
}
