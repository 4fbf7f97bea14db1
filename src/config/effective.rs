//! The config in use with all defaults, in the form of the file: the response of `/api/v1/config`. It has no secrets, because a
//! config only names the files with secrets. The file's own `services` are left out; `/api/v1/services` shows them.
//!
//! A new key needs no code here: [`document`] writes the values of the merged files by the tables of keys, and [`effective`] adds
//! the defaults of the tables. Only short forms, and defaults that depend on another key, are written out below.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Number, Value, json};

use isthmus_document::form::{self, Keys, TextForm};
use isthmus_document::problem::Problems;
use isthmus_document::table::{AnyKey, Kind, Object, Presence};
use isthmus_document::tree::{self, Node};
use isthmus_peer::options::LinkOptions;
use isthmus_settings::steering::Steering;
use isthmus_settings::tuning::LocalityMode;
use isthmus_snapshot::virtual_addresses::Ranges;

use super::Config;
use super::file::relative_to;
use super::listeners::DEFAULT_NAME;
use super::routes::TUNING_KEYS;
use super::table::{Listener, Root};
use super::table::{peers, registries, routes, steering};

type Members = Map<String, Value>;

/// Returns the merged files as JSON, without defaults: durations in seconds or milliseconds, sizes in bytes, and paths as they are
/// from the working directory. A text takes much less memory than the tree.
pub(super) fn document(tree: &Node, problems: &Problems) -> Arc<str> {
    let mut text = String::new();
    write(&mut text, tree, &Kind::Object(Root::OBJECT), problems);
    text.into()
}

/// Writes a value of the files. Returns `None` if the kind does not allow the value; the text may then have a part of it.
fn write(out: &mut String, node: &Node, kind: &Kind, problems: &Problems) -> Option<()> {
    match (&node.value, kind) {
        (_, Kind::OrOff(_)) if node.is_off() => json(out, false),
        (_, Kind::OrOff(inner)) => return write(out, node, inner, problems),
        (_, Kind::Union(union)) => {
            let before = out.len();
            return union.kinds.iter().find_map(|kind| {
                out.truncate(before);
                write(out, node, kind, problems)
            });
        }
        (tree::Value::Scalar(scalar), Kind::Text(form)) if form.name == form::Path::TEXT.name => {
            json(out, path(&scalar.text, problems.file(node.position.file)));
        }
        (tree::Value::Scalar(scalar), kind) => json(out, self::scalar(&scalar.text, kind)?),
        (tree::Value::Sequence(items), Kind::List { of, .. }) => {
            write_all(out, ['[', ']'], items, |out, item| write(out, item, of, problems));
        }
        (tree::Value::Mapping(entries), Kind::Map { key, of }) => {
            write_all(out, ['{', '}'], entries, |out, (own, node)| {
                json(out, (key.write)(&own.text)?);
                out.push(':');
                write(out, node, of, problems)
            });
        }
        (tree::Value::Mapping(entries), Kind::Object(object)) => {
            write_all(out, ['{', '}'], entries, |out, (own, node)| {
                let key = object.key(&own.text)?;
                json(out, key.name());
                out.push(':');
                write(out, node, key.kind(), problems)
            });
        }
        _ => return None,
    }
    Some(())
}

fn json(out: &mut String, value: impl Into<Value>) {
    // A text takes everything.
    let _ = write!(out, "{}", value.into());
}

/// Writes the items that can be written, in brackets.
fn write_all<T>(
    out: &mut String,
    [open, close]: [char; 2],
    items: &[T],
    write: impl Fn(&mut String, &T) -> Option<()>,
) {
    out.push(open);
    let start = out.len();
    for item in items {
        let before = out.len();
        if before > start {
            out.push(',');
        }
        if write(out, item).is_none() {
            out.truncate(before);
        }
    }
    out.push(close);
}

/// Returns a path of a file as it is from the working directory. The words for the access log are no paths.
fn path(text: &str, file: &Path) -> String {
    match text {
        "stdout" | "stderr" => text.to_owned(),
        path => relative_to(file, Path::new(path)).display().to_string(),
    }
}

/// Returns the value that a text is read as; `None` if the kind does not allow the text.
fn scalar(text: &str, kind: &Kind) -> Option<Value> {
    match kind {
        Kind::Text(form) => {
            let text = (form.write)(text)?;
            Some(if form.number { text.parse::<Number>().ok()?.into() } else { text.into() })
        }
        Kind::Boolean => Some(matches!(text, "on" | "true" | "True" | "TRUE").into()),
        Kind::Integer { .. } => text.parse::<u64>().ok().map(Value::from),
        Kind::Share => text.parse::<f64>().ok().map(Value::from),
        Kind::Choice(words) => words.contains(&text).then(|| text.into()),
        Kind::OrOff(inner) => scalar(text, inner),
        Kind::Union(union) => union.kinds.iter().find_map(|kind| scalar(text, kind)),
        Kind::List { .. } | Kind::Map { .. } | Kind::Object(_) => None,
    }
}

/// Returns the config in use.
pub fn effective(config: &Config) -> Value {
    // `document` has made this text, so it can be parsed.
    let mut document: Members = serde_json::from_str(&config.document).unwrap_or_default();
    write_out_listener(&mut document);
    for route in each(document.get_mut(Root::ROUTES.name())) {
        write_out_route(route);
    }
    for listener in each(document.get_mut(Root::LISTENERS.name())) {
        each(listener.get_mut(Listener::ROUTES.name())).for_each(write_out_route);
        if let Some(target) = listener.get_mut(Listener::TARGET.name()) {
            write_out_route(target);
        }
    }
    for (peer, link) in each(document.get_mut(Root::PEERS.name())).zip(&config.links) {
        add_link(peer, link);
    }
    let mut shown = Value::Object(with_defaults(document, Root::OBJECT));
    add_dependent_defaults(&mut shown);
    if let Some(admin) = &config.admin {
        // The path of a unix socket may be relative to the file.
        shown[Root::ADMIN.name()] = json!({ "bind": admin.to_string() });
    }
    literal(&mut shown);
    shown
}

/// Replaces the short form of a listener by an entry of `listeners`.
fn write_out_listener(document: &mut Members) {
    if let Some(bind) = document.remove(Root::LISTEN.name()) {
        let listeners = document.entry(Root::LISTENERS.name()).or_insert_with(|| json!([]));
        if let Value::Array(listeners) = listeners {
            listeners.insert(0, json!({ "name": DEFAULT_NAME, "bind": bind }));
        }
    }
}

/// Replaces the short forms of a route and of its endpoints by maps.
fn write_out_route(route: &mut Value) {
    if !route.is_object() {
        let endpoints = match route.take() {
            Value::Array(list) => list,
            one => vec![one],
        };
        *route = json!({ "endpoints": endpoints });
    }
    for endpoint in each(route.get_mut(routes::Route::ENDPOINTS.name())) {
        if endpoint.is_string() {
            *endpoint = json!({ "address": endpoint.take() });
        }
    }
}

/// Adds what the link with a peer uses, which an enrolment may have stored outside the file.
fn add_link(peer: &mut Value, link: &LinkOptions) {
    peer[peers::Peer::ACCEPT.name()] = link.accept.into();
    if !link.dial.is_empty() {
        let addresses: Vec<String> = link.dial.iter().map(ToString::to_string).collect();
        peer[peers::Peer::DIAL.name()] = addresses.into();
    }
    if let Some(trust) = &link.trust {
        peer[peers::Peer::TRUST.name()] = trust.display().to_string().into();
    }
    if let Some(who) = &link.peer.who {
        peer[peers::Peer::IDENTITY.name()] = who.gateway.as_str().into();
        peer[peers::Peer::TRUST_DOMAIN.name()] = who.trust_domain.as_str().into();
        peer[peers::Peer::TRUST_ALIAS.name()] = who.alias.as_str().into();
    }
}

/// Adds the defaults of absent keys to a map of the document, and leaves out empty lists.
fn with_defaults(mut given: Members, object: &Object) -> Members {
    let of_key = |key: &&dyn AnyKey| {
        let value = match given.remove(key.name()) {
            Some(Value::Array(items)) if items.is_empty() => return None,
            Some(value) => completed(value, key.kind()),
            None => default(*key)?,
        };
        Some((key.name().to_owned(), value))
    };
    object.keys.iter().filter_map(of_key).collect()
}

/// Adds the defaults of absent keys to all maps of a value.
fn completed(value: Value, kind: &Kind) -> Value {
    match (value, kind) {
        (value, Kind::OrOff(inner)) => completed(value, inner),
        (value, Kind::Union(union)) => {
            let fits = |kind: &&Kind| {
                let (is_map, is_list) = (value.is_object(), value.is_array());
                match kind {
                    Kind::Object(_) | Kind::Map { .. } => is_map,
                    Kind::List { .. } => is_list,
                    _ => false,
                }
            };
            match union.kinds.iter().find(fits) {
                Some(kind) => completed(value, kind),
                None => value,
            }
        }
        (Value::Object(members), Kind::Object(object)) => Value::Object(with_defaults(members, object)),
        (Value::Object(members), Kind::Map { of, .. }) => {
            Value::Object(members.into_iter().map(|(key, value)| (key, completed(value, of))).collect())
        }
        (Value::Array(items), Kind::List { of, .. }) => {
            items.into_iter().map(|item| completed(item, of)).collect()
        }
        (value, _) => value,
    }
}

/// Returns the value that an absent key has by the table; `None` if there is none. A map without required keys has the defaults of
/// its keys.
fn default(key: &dyn AnyKey) -> Option<Value> {
    match (key.presence(), key.kind()) {
        (Presence::Default(text), kind) => scalar(&text, kind),
        (Presence::Absent("off"), Kind::OrOff(_)) => Some(false.into()),
        (Presence::Absent(_), Kind::Object(object) | Kind::OrOff(Kind::Object(object)))
            if object.one_of.is_empty() && !object.keys.iter().any(|key| key.is_required()) =>
        {
            let members = with_defaults(Members::new(), object);
            (!members.is_empty()).then_some(Value::Object(members))
        }
        _ => None,
    }
}

/// Adds the defaults that depend on other keys, which the tables give only in words, and removes those that do not apply.
fn add_dependent_defaults(shown: &mut Value) {
    let connect = shown["timeouts"]["connect"].clone();
    let trust_domain = shown["mesh"]["trustDomain"].clone();
    let tuning = |of: &mut Value, locality: LocalityMode| {
        absent(&mut of[routes::CONNECT_TIMEOUT.name()], || connect.clone());
        let balancing = &mut of[routes::LOAD_BALANCING.name()];
        absent(&mut balancing[routes::LoadBalancing::LOCALITY.name()], || locality.text().into());
    };
    tuning(&mut shown[Root::DEFAULTS.name()], LocalityMode::Ignore);
    let mode = shown[Root::STEERING.name()][steering::Steering::MODE.name()].clone();
    let rings = || Steering::default().rings.iter().map(form::seconds).collect();
    absent(&mut shown[Root::STEERING.name()][steering::Steering::RINGS.name()], rings);
    for policy in each(shown.get_mut(Root::POLICIES.name())) {
        tuning(policy, LocalityMode::Ignore);
        let steering = &mut policy[routes::Policy::STEERING.name()];
        absent(&mut steering[steering::PolicySteering::MODE.name()], || mode.clone());
    }
    let of_route = |route: &mut Value| {
        match route.as_object_mut().filter(|route| route.contains_key(routes::Route::SERVICE.name())) {
            // The policies of the service apply.
            Some(route) => TUNING_KEYS.iter().for_each(|key| drop(route.remove(key.name()))),
            None => tuning(route, LocalityMode::Prefer),
        }
    };
    each(shown.get_mut(Root::ROUTES.name())).for_each(of_route);
    for listener in each(shown.get_mut(Root::LISTENERS.name())) {
        each(listener.get_mut(Listener::ROUTES.name())).for_each(of_route);
        listener.get_mut(Listener::TARGET.name()).into_iter().for_each(of_route);
    }
    for registry in each(shown.get_mut(Root::REGISTRIES.name())) {
        for kind in
            [registries::Registry::KUBERNETES.name(), registries::Registry::KUBERNETES_CLUSTERS.name()]
        {
            let Some(of) = registry.get_mut(kind) else { continue };
            absent(&mut of[registries::TRUST_DOMAIN.name()], || trust_domain.clone());
            let system = of[registries::SYSTEM.name()].clone();
            absent(&mut of[registries::GATEWAYS.name()], || json!({ "namespaces": [system] }));
        }
    }
    if let Some(server) = shown.get_mut(Root::DNS_SERVER.name()).filter(|server| server.is_object()) {
        let ranges = || Ranges::default().list().iter().map(ToString::to_string).collect();
        absent(&mut server["vips"], ranges);
    }
}

/// Sets a value that is absent.
fn absent(value: &mut Value, default: impl FnOnce() -> Value) {
    if value.is_null() {
        *value = default();
    }
}

/// Returns the items of a list, or the values of a map.
fn each(value: Option<&mut Value>) -> impl Iterator<Item = &mut Value> {
    let (items, members) = match value {
        Some(Value::Array(items)) => (Some(items), None),
        Some(Value::Object(members)) => (None, Some(members)),
        _ => (None, None),
    };
    items.into_iter().flatten().chain(members.into_iter().flat_map(Map::values_mut))
}

/// Escapes `${` in all texts, so that a reader takes none of them for a variable.
fn literal(value: &mut Value) {
    match value {
        Value::String(text) if text.contains("${") => *text = text.replace("${", "$${"),
        Value::Array(items) => items.iter_mut().for_each(literal),
        Value::Object(members) => members.values_mut().for_each(literal),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
