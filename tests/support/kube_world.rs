//! The objects and answers of a fake API server: versions, pages of lists, events of watches, selectors, and refusals with the
//! real server's messages (`tests/corpus/kube`). This file opens no sockets.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

/// The token of a user that is allowed everything.
pub const TOKEN: &str = "the-fakes-admin";
/// The annotation of the bookmark that ends the initial list on a watch.
const INITIAL_END: &str = "k8s.io/initial-events-end";
/// The kinds, each with the name of its list and its group and version. CRDs define the last nine.
const KINDS: [(&str, &str, &str); 16] = [
    ("Namespace", "namespaces", "api/v1"),
    ("Service", "services", "api/v1"),
    ("Pod", "pods", "api/v1"),
    ("Node", "nodes", "api/v1"),
    ("ConfigMap", "configmaps", "api/v1"),
    ("Secret", "secrets", "api/v1"),
    ("EndpointSlice", "endpointslices", "apis/discovery.k8s.io/v1"),
    ("GatewayClass", "gatewayclasses", "apis/gateway.networking.k8s.io/v1"),
    ("Gateway", "gateways", "apis/gateway.networking.k8s.io/v1"),
    ("ServiceExport", "serviceexports", "apis/multicluster.x-k8s.io/v1beta1"),
    ("ServiceImport", "serviceimports", "apis/multicluster.x-k8s.io/v1beta1"),
    ("DestinationRule", "destinationrules", "apis/networking.istio.io/v1"),
    ("ServiceEntry", "serviceentries", "apis/networking.istio.io/v1"),
    ("WorkloadEntry", "workloadentries", "apis/networking.istio.io/v1"),
    ("AuthorizationPolicy", "authorizationpolicies", "apis/security.istio.io/v1"),
    ("PeerAuthentication", "peerauthentications", "apis/security.istio.io/v1"),
];
const CUSTOM: [&str; 9] = [
    "gatewayclasses",
    "gateways",
    "serviceexports",
    "serviceimports",
    "destinationrules",
    "serviceentries",
    "workloadentries",
    "authorizationpolicies",
    "peerauthentications",
];

/// A parsed request.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    pub path: String,
    /// The URI as the client sent it.
    pub uri: String,
    pub token: String,
    /// The requested kind, such as `pods`; empty if the path names none.
    pub plural: String,
    pub namespace: String,
    pub name: String,
    pub query: BTreeMap<String, String>,
}

impl Asked {
    pub fn new(uri: &str, token: &str) -> Self {
        let (path, query) = uri.split_once('?').unwrap_or((uri, ""));
        let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        let query = pairs.map(|(key, value)| (key.to_owned(), decoded(value))).collect();
        let asked = Self {
            path: path.to_owned(),
            uri: uri.to_owned(),
            token: token.to_owned(),
            query,
            ..Self::default()
        };
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        let after_group = match parts.first() {
            Some(&"api") => parts.get(2..),
            Some(&"apis") => parts.get(3..),
            _ => None,
        };
        let part = |at: Option<&&str>| at.map(|text| (*text).to_owned()).unwrap_or_default();
        match after_group.unwrap_or_default() {
            ["namespaces", namespace, plural, rest @ ..] => Self {
                namespace: (*namespace).to_owned(),
                plural: (*plural).to_owned(),
                name: part(rest.first()),
                ..asked
            },
            [plural, rest @ ..] => Self { plural: (*plural).to_owned(), name: part(rest.first()), ..asked },
            [] => asked,
        }
    }

    fn get(&self, key: &str) -> &str {
        self.query.get(key).map(String::as_str).unwrap_or_default()
    }

    pub fn number(&self, key: &str) -> Option<u64> {
        self.get(key).parse().ok()
    }

    /// Returns true for a watch that begins with a list of the current objects (`sendInitialEvents`).
    pub fn is_stream(&self) -> bool {
        self.is_watch() && self.get("sendInitialEvents") == "true"
    }

    pub fn is_watch(&self) -> bool {
        self.get("watch") == "1"
    }

    /// Returns true for a watch that begins at a version.
    pub fn is_resumed(&self) -> bool {
        self.is_watch() && !self.is_stream()
    }

    /// Returns true for a request for a list or a page of it.
    pub fn is_page(&self) -> bool {
        !self.plural.is_empty() && self.name.is_empty() && !self.is_watch()
    }

    fn group(&self) -> &str {
        self.path.strip_prefix("/apis/").and_then(|rest| rest.split('/').next()).unwrap_or_default()
    }
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        match byte {
            b'%' => {
                let hex: String = rest.by_ref().take(2).map(char::from).collect();
                bytes.push(u8::from_str_radix(&hex, 16).expect("hex"));
            }
            byte => bytes.push(byte),
        }
    }
    String::from_utf8(bytes).expect("text")
}

/// The response to a request.
pub enum Answer {
    Json(u16, Value),
    Text(u16, &'static str),
    /// A watch: these lines, then an event for each change after this version.
    Follow(Vec<String>, u64),
    /// A watch that sends these lines and ends.
    Lines(Vec<String>),
}

/// One change of one object.
struct Change {
    version: u64,
    plural: String,
    before: Option<Value>,
    after: Option<Value>,
    /// Bytes that are sent once, in one piece with the event.
    tail: Vec<u8>,
}

/// The objects of a cluster, and the settings of its API server.
pub struct World {
    objects: BTreeMap<(String, String, String), Value>,
    /// The newest version of any object.
    pub version: u64,
    /// The oldest version from which a watch may begin. Watches from older versions, and requests for further pages of older
    /// lists, are refused as too old.
    pub floor: u64,
    changes: Vec<Change>,
    /// The further pages of lists, by continue token: the version of the list, and the items that are left.
    pages: BTreeMap<String, (u64, Vec<Value>)>,
    /// The kinds whose CRDs are installed.
    pub installed: BTreeSet<&'static str>,
    /// The kinds that no user may read.
    pub forbidden: BTreeSet<&'static str>,
    /// The names of users without any rights, by token.
    pub users: BTreeMap<String, String>,
    /// True if a watch may begin with a list of the current objects.
    pub streams: bool,
}

impl Default for World {
    fn default() -> Self {
        Self {
            objects: BTreeMap::new(),
            version: 1000,
            floor: 0,
            changes: Vec::new(),
            pages: BTreeMap::new(),
            installed: BTreeSet::new(),
            forbidden: BTreeSet::new(),
            users: BTreeMap::new(),
            streams: true,
        }
    }
}

impl World {
    /// Creates or replaces an object. An object without a version gets the next version.
    pub fn put(&mut self, object: &Value) {
        self.put_with(object, &[]);
    }

    /// Creates or replaces an object like [`World::put`]; `tail` is sent in one piece with the event of the change.
    pub fn put_with(&mut self, object: &Value, tail: &[u8]) {
        let (_, plural, _) = kind_of(object["kind"].as_str().expect("a kind"));
        let mut object = object.clone();
        let meta = &mut object["metadata"];
        let given = meta["resourceVersion"].as_str().and_then(|text| text.parse().ok());
        self.version = given.unwrap_or(self.version + 1);
        meta["resourceVersion"] = self.version.to_string().into();
        let text = |key: &str| meta[key].as_str().unwrap_or_default().to_owned();
        let key = (plural.to_owned(), text("namespace"), text("name"));
        let fields = object.as_object_mut().expect("an object");
        fields.shift_remove("kind");
        fields.shift_remove("apiVersion");
        let before = self.objects.insert(key, object.clone());
        self.note(plural, before, Some(object), tail);
    }

    /// Removes an object: `delete("pods", "shop/web-0")`.
    pub fn delete(&mut self, plural: &str, key: &str) {
        let (namespace, name) = key.split_once('/').unwrap_or(("", key));
        let before = self.objects.remove(&(plural.to_owned(), namespace.to_owned(), name.to_owned()));
        assert!(before.is_some(), "{plural} {key} is not there");
        self.version += 1;
        self.note(plural, before, None, &[]);
    }

    fn note(&mut self, plural: &str, before: Option<Value>, after: Option<Value>, tail: &[u8]) {
        let (version, plural) = (self.version, plural.to_owned());
        self.changes.push(Change { version, plural, before, after, tail: tail.to_vec() });
    }

    /// Expires all earlier versions: requests for watches that start from them, or for further pages of earlier lists, are
    /// refused as too old.
    pub fn forget(&mut self) {
        self.floor = self.version;
        self.pages.clear();
    }

    pub fn answer(&mut self, asked: &Asked) -> Answer {
        if asked.path == "/version" {
            return Answer::Json(200, json!({"gitVersion": "v1.35.0-fake"}));
        }
        let user = self.users.get(&asked.token);
        if user.is_none() && asked.token != TOKEN {
            return refusal(401, "Unauthorized", "Unauthorized", None);
        }
        let user = user.cloned();
        let path = format!("/{}/", kind_of_plural(&asked.plural).map_or("?", |(_, _, group)| group));
        let is_custom = CUSTOM.contains(&&*asked.plural);
        if !asked.path.starts_with(&path) || (is_custom && !self.installed.contains(&*asked.plural)) {
            return Answer::Text(404, "404 page not found\n");
        }
        if user.is_some() || self.forbidden.contains(&*asked.plural) {
            return forbidden(asked, user.as_deref().unwrap_or("the-fakes-admin"));
        }
        if !asked.name.is_empty() {
            return self.one(asked);
        }
        let selector = match Selector::parse(asked) {
            Ok(selector) => selector,
            Err(refused) => return refused,
        };
        if asked.is_watch() { self.watch(asked, &selector) } else { self.list(asked, &selector) }
    }

    fn one(&self, asked: &Asked) -> Answer {
        let key = (asked.plural.clone(), asked.namespace.clone(), asked.name.clone());
        match self.objects.get(&key) {
            Some(object) => Answer::Json(200, whole(&asked.plural, object)),
            None => {
                let message = format!("{} \"{}\" not found", asked.plural, asked.name);
                let details = json!({"name": asked.name, "kind": asked.plural});
                refusal(404, "NotFound", &message, Some(details))
            }
        }
    }

    fn selected(&self, asked: &Asked, selector: &Selector) -> Vec<Value> {
        let of_kind = self.objects.iter().filter(|((plural, namespace, _), object)| {
            *plural == asked.plural && is_in(namespace, asked) && selector.takes(object)
        });
        of_kind.map(|(_, object)| object.clone()).collect()
    }

    fn list(&mut self, asked: &Asked, selector: &Selector) -> Answer {
        let limit = asked.number("limit").and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
        let version = asked.number("resourceVersion").unwrap_or(0);
        if version > self.version {
            return too_large(version, self.version);
        }
        if asked.get("resourceVersionMatch") == "Exact" && version < self.floor {
            let message = "The resourceVersion for the provided list is too old.";
            return refusal(410, "Expired", message, None);
        }
        let (version, mut items) = match asked.query.get("continue") {
            None => (self.version, self.selected(asked, selector)),
            Some(token) if !token.starts_with("page-") => {
                let message =
                    "invalid continue token: continue key is not valid: illegal base64 data at input byte 0";
                return refusal(400, "BadRequest", message, None);
            }
            Some(token) => match self.pages.get(token) {
                Some(page) => page.clone(),
                None => return expired_page(),
            },
        };
        let rest = items.split_off(items.len().min(limit));
        let mut meta = json!({"resourceVersion": version.to_string()});
        if !rest.is_empty() {
            let token = format!("page-{}", self.pages.len() + 1);
            meta["continue"] = token.clone().into();
            if selector.is_empty() {
                meta["remainingItemCount"] = rest.len().into();
            }
            self.pages.insert(token, (version, rest));
        }
        let (kind, _, group) = kind_of_plural(&asked.plural).expect("known");
        let version = group.trim_start_matches("apis/").trim_start_matches("api/");
        Answer::Json(
            200,
            json!({"kind": format!("{kind}List"), "apiVersion": version, "metadata": meta, "items": items}),
        )
    }

    fn watch(&self, asked: &Asked, selector: &Selector) -> Answer {
        if asked.is_stream() && !self.streams {
            return no_streams();
        }
        if asked.is_stream() {
            let added = self.selected(asked, selector);
            let mut lines: Vec<String> =
                added.iter().map(|object| line("ADDED", &asked.plural, object)).collect();
            let meta =
                json!({"resourceVersion": self.version.to_string(), "annotations": {INITIAL_END: "true"}});
            lines.push(bookmark(&asked.plural, meta));
            return Answer::Follow(lines, self.version);
        }
        let from = asked.number("resourceVersion").unwrap_or(0);
        if from < self.floor {
            let message = format!("too old resource version: {from} ({})", self.floor);
            let error = status(410, "Expired", &message, None);
            return Answer::Lines(vec![format!("{}\n", json!({"type": "ERROR", "object": error}))]);
        }
        Answer::Follow(Vec::new(), from)
    }

    /// Returns the events of a watch that are newer than `version`, and the newest version of all objects. Each event includes
    /// the bytes that are sent in one piece with it.
    pub fn since(&mut self, asked: &Asked, version: u64) -> (Vec<Vec<u8>>, u64) {
        let selector = Selector::parse(asked).unwrap_or_else(|_| panic!("it was parsed before"));
        let of_kind = self.changes.iter_mut().filter(|change| {
            let object = change.after.as_ref().or(change.before.as_ref()).expect("one of them");
            let namespace = object["metadata"]["namespace"].as_str().unwrap_or_default();
            change.version > version && change.plural == asked.plural && is_in(namespace, asked)
        });
        let events = of_kind.filter_map(|change| {
            let mut event = event(change, &selector)?.into_bytes();
            event.append(&mut change.tail);
            Some(event)
        });
        (events.collect(), self.version)
    }

    /// Returns a bookmark with the newest revision.
    pub fn bookmark(&self, plural: &str) -> String {
        bookmark(plural, json!({"resourceVersion": self.version.to_string()}))
    }

    /// Returns the bookmark that ends a watch in order, if the client asked for bookmarks.
    pub fn last_bookmark(&self, asked: &Asked) -> Option<String> {
        let is_asked = asked.get("allowWatchBookmarks") == "true";
        is_asked.then(|| self.bookmark(&asked.plural))
    }
}

/// Returns the event that a watch with this selector receives for a change. An object that the selector does not match any more
/// is `DELETED`, with its last matching state and the new version.
fn event(change: &Change, selector: &Selector) -> Option<String> {
    let selected = |object: &&Value| selector.takes(object);
    let (before, after) = (change.before.as_ref().filter(selected), change.after.as_ref().filter(selected));
    let (kind, object) = match (before, after) {
        (None, None) => return None,
        (None, Some(after)) => ("ADDED", after.clone()),
        (Some(_), Some(after)) => ("MODIFIED", after.clone()),
        (Some(before), None) => {
            let mut object = before.clone();
            object["metadata"]["resourceVersion"] = change.version.to_string().into();
            ("DELETED", object)
        }
    };
    Some(line(kind, &change.plural, &object))
}

fn is_in(namespace: &str, asked: &Asked) -> bool {
    asked.namespace.is_empty() || asked.namespace == namespace
}

fn kind_of(kind: &str) -> (&'static str, &'static str, &'static str) {
    *KINDS.iter().find(|known| known.0 == kind).expect("a known kind")
}

fn kind_of_plural(plural: &str) -> Option<(&'static str, &'static str, &'static str)> {
    KINDS.iter().find(|known| known.1 == plural).copied()
}

/// Returns an object with its kind and version, which items of a list lack.
fn whole(plural: &str, object: &Value) -> Value {
    let (kind, _, group) = kind_of_plural(plural).expect("known");
    let mut all =
        json!({"kind": kind, "apiVersion": group.trim_start_matches("apis/").trim_start_matches("api/")});
    for (key, value) in object.as_object().expect("an object") {
        all[key] = value.clone();
    }
    all
}

/// Returns a line of a watch: one event.
pub fn line(kind: &str, plural: &str, object: &Value) -> String {
    format!("{}\n", json!({"type": kind, "object": whole(plural, object)}))
}

fn bookmark(plural: &str, meta: Value) -> String {
    let mut object = json!({ "metadata": meta });
    if plural == "pods" {
        object["spec"] = json!({"containers": null});
        object["status"] = json!({});
    }
    line("BOOKMARK", plural, &object)
}

/// Returns the `Status` object of a refusal.
pub fn status(code: u16, reason: &str, message: &str, details: Option<Value>) -> Value {
    let mut status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message, "reason": reason,
        "code": code
    });
    if let Some(details) = details {
        status["details"] = details;
    }
    status
}

fn refusal(code: u16, reason: &str, message: &str, details: Option<Value>) -> Answer {
    Answer::Json(code, status(code, reason, message, details))
}

fn forbidden(asked: &Asked, user: &str) -> Answer {
    let (plural, group) = (&asked.plural, asked.group());
    let verb = if asked.is_watch() { "watch" } else { "list" };
    let place = match asked.namespace.as_str() {
        "" => "at the cluster scope".to_owned(),
        namespace => format!("in the namespace \"{namespace}\""),
    };
    let (named, details) = match group {
        "" => (plural.clone(), json!({"kind": plural})),
        group => (format!("{plural}.{group}"), json!({"group": group, "kind": plural})),
    };
    let message = format!(
        "{named} is forbidden: User \"{user}\" cannot {verb} resource \"{plural}\" in API group \"{group}\" {place}"
    );
    refusal(403, "Forbidden", &message, Some(details))
}

fn expired_page() -> Answer {
    let message = "The provided continue parameter is too old to display a consistent list result. You can start a new list without \
                   the continue parameter, or use the continue token in this response to retrieve the remainder of the results. \
                   Continuing with the provided token results in an inconsistent list - objects that were created, modified, or \
                   deleted between the time the first chunk was returned and now may show up in the list.";
    let mut body = status(410, "Expired", message, None);
    body["metadata"]["continue"] = "page-of-another-list".into();
    Answer::Json(410, body)
}

fn too_large(version: u64, current: u64) -> Answer {
    let message = format!("Timeout: Too large resource version: {version}, current: {current}");
    let cause = json!({"reason": "ResourceVersionTooLarge", "message": "Too large resource version"});
    refusal(504, "Timeout", &message, Some(json!({"causes": [cause], "retryAfterSeconds": 1})))
}

fn no_streams() -> Answer {
    let cause = "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled";
    let message = format!("ListOptions.meta.k8s.io \"\" is invalid: sendInitialEvents: Forbidden: {cause}");
    let cause = json!({
        "reason": "FieldValueForbidden", "message": format!("Forbidden: {cause}"), "field": "sendInitialEvents"
    });
    let details = json!({"group": "meta.k8s.io", "kind": "ListOptions", "causes": [cause]});
    refusal(422, "Invalid", &message, Some(details))
}

/// The selectors of a request. Each requirement on a label or a field has a key, a value, and whether the object must match it.
struct Selector {
    labels: Vec<(String, Option<String>, bool)>,
    fields: Vec<(String, String, bool)>,
}

const FIELDS: [&str; 5] =
    ["metadata.name", "metadata.namespace", "status.phase", "status.podIP", "spec.nodeName"];

impl Selector {
    fn parse(asked: &Asked) -> Result<Self, Answer> {
        let parts = |key: &str| -> Vec<String> {
            let all = asked.get(key).split(',').filter(|part| !part.is_empty());
            all.map(str::to_owned).collect()
        };
        let label = |part: &String| match (part.strip_prefix('!'), part.split_once('=')) {
            (Some(key), _) => (key.to_owned(), None, false),
            (None, Some((key, value))) => (key.to_owned(), Some(value.to_owned()), true),
            (None, None) => (part.clone(), None, true),
        };
        let field = |part: &String| {
            let (key, value) = part.split_once('=').expect("a value");
            match key.strip_suffix('!') {
                Some(key) => (key.to_owned(), value.to_owned(), false),
                None => (key.to_owned(), value.to_owned(), true),
            }
        };
        let fields: Vec<_> = parts("fieldSelector").iter().map(field).collect();
        if let Some((unknown, ..)) = fields.iter().find(|(key, ..)| !FIELDS.contains(&key.as_str())) {
            let message = format!("field label not supported: {unknown}");
            return Err(refusal(400, "BadRequest", &message, None));
        }
        Ok(Self { labels: parts("labelSelector").iter().map(label).collect(), fields })
    }

    fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    fn takes(&self, object: &Value) -> bool {
        let labels = self.labels.iter().all(|(key, value, wanted)| {
            let found = object["metadata"]["labels"][key].as_str();
            let has = found.is_some_and(|found| value.as_ref().is_none_or(|value| value == found));
            has == *wanted
        });
        let fields = self.fields.iter().all(|(key, value, wanted)| {
            let found = key.split('.').fold(object, |object, part| &object[part]);
            (found.as_str().unwrap_or_default() == value) == *wanted
        });
        labels && fields
    }
}
