//! The evaluation of a TLSRoute or TCPRoute: the listeners that it is attached to, the names that it claims there, and its
//! backends. A function of the evaluated listeners and the objects that the route names.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::super::index::items::alias;
use super::super::kinds::Tables;
use super::super::kinds::gateway_route::{BackendRecord, ParentRecord, RouteId, RouteKind, RouteRecord};
use super::super::kinds::service::ServiceClass;
use super::super::table::ObjectKey;
use super::grants::{GROUP, allows, is_granted};
use super::listeners::{Listener, ParentId, ParentKind, Parents};
use super::status::{ParentStatus, Status, Verdict};
use isthmus_model::name::{HostName, NamePattern};
use isthmus_snapshot::gateway_api::{Backend, BackendPort, Claim, GatewayRoute};

/// The group of ServiceImports.
const MULTI_CLUSTER: &str = "multicluster.x-k8s.io";

/// A route, evaluated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Evaluated {
    /// The route as an item of the registry; `None` if no listener accepts it.
    pub(crate) item: Option<Arc<GatewayRoute>>,
    /// The listeners that the route is attached to.
    pub(crate) attached: BTreeSet<(ParentId, String)>,
    /// The status; `None` if no parent is of this controller.
    pub(crate) status: Option<Status>,
}

/// Returns the name of a route as `explain` shows it.
pub(crate) fn object_of((kind, key): &RouteId) -> Arc<str> {
    format!("{} {key}", kind.text()).into()
}

/// Evaluates a route.
pub(crate) fn evaluate(id: &RouteId, route: &RouteRecord, parents: &Parents, tables: &Tables) -> Evaluated {
    let (kind, key) = id;
    let (backends, resolved) = backends(*kind, key, route, tables);
    let (mut claims, mut attached, mut statuses) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
    for reference in &route.parents {
        let Some(parent) = parent_of(reference, key) else { continue };
        let Some(of_parent) = parents.get(&parent) else { continue };
        let found = attachments(id, route, reference, &parent, &of_parent.listeners, tables);
        let accepted = match &found {
            Ok(found) => {
                for (listener, names) in found {
                    attached.insert((parent.clone(), listener.name.clone()));
                    let key = of_parent.key_of(listener);
                    let at = |name: &Option<NamePattern>| {
                        let claim = |place| Claim { place, listener: key.clone(), name: name.clone() };
                        listener.places.iter().copied().map(claim).collect::<Vec<_>>()
                    };
                    claims.extend(names.iter().flat_map(at));
                }
                Verdict::yes("Accepted", "the route is accepted")
            }
            Err(verdict) => verdict.clone(),
        };
        let conditions = vec![("Accepted", accepted), ("ResolvedRefs", resolved.clone())];
        statuses.push(ParentStatus { parent: reference.clone(), conditions });
    }
    let item = (!claims.is_empty()).then(|| {
        Arc::new(GatewayRoute {
            object: object_of(id),
            created: route.created.clone(),
            claims: claims.into_iter().collect(),
            backends: backends.into(),
        })
    });
    let generation = route.stamp.generation;
    let status = Status { generation, parents: statuses, ..Status::default() };
    Evaluated { item, attached, status: Some(status).filter(|status| !status.parents.is_empty()) }
}

/// Returns the object that a reference names; `None` if it can be none of this controller.
fn parent_of(reference: &ParentRecord, route: &ObjectKey) -> Option<ParentId> {
    if reference.group.as_deref().unwrap_or(GROUP) != GROUP {
        return None;
    }
    let kind = match reference.kind.as_deref() {
        None | Some("Gateway") => ParentKind::Gateway,
        Some("ListenerSet") => ParentKind::ListenerSet,
        Some(_) => return None,
    };
    let namespace = reference.namespace.as_ref().unwrap_or(&route.namespace).clone();
    Some((kind, ObjectKey { namespace, name: reference.name.clone() }))
}

/// The names of a route, as it has them, some of which a listener has; `None`: every connection.
type Names = Vec<Option<NamePattern>>;

/// Returns the listeners to which a reference attaches a route, with the names that the route claims there. The error is the
/// condition `Accepted`.
fn attachments<'a>(
    (kind, key): &RouteId,
    route: &RouteRecord,
    reference: &ParentRecord,
    (parent_kind, parent): &ParentId,
    listeners: &'a [Listener],
    tables: &Tables,
) -> Result<Vec<(&'a Listener, Names)>, Verdict> {
    if route.rules != 1 {
        let why = format!("the route has {} rules, and exactly one is supported", route.rules);
        return Err(Verdict::no("UnsupportedValue", why));
    }
    let is_named = |listener: &&Listener| {
        reference.section.as_ref().is_none_or(|section| **section == *listener.name)
            && reference.port.is_none_or(|port| port == listener.port)
    };
    let named: Vec<&Listener> = listeners.iter().filter(is_named).collect();
    if named.is_empty() {
        let section = reference.section.as_ref().map(|section| format!(" {section:?}")).unwrap_or_default();
        let port = reference.port.map(|port| format!(" on port {port}")).unwrap_or_default();
        let why = format!("{} {parent} has no listener{section}{port}", parent_kind.text());
        return Err(Verdict::no("NoMatchingParent", why));
    }
    let labels = tables.labels_of(&key.namespace);
    let refusal = |listener: &Listener| -> Option<String> {
        let name = &listener.name;
        if !listener.accepted.is_true {
            return Some(format!("the listener {name:?} is not accepted ({})", listener.accepted.reason));
        }
        if !listener.kinds.contains(kind) {
            return Some(format!("the listener {name:?} takes no {}", kind.text()));
        }
        let is_allowed = allows(&listener.allowed, "Same", &parent.namespace, &key.namespace, labels);
        (!is_allowed)
            .then(|| format!("the listener {name:?} allows no routes of namespace {}", key.namespace))
    };
    let (mut open, mut refusals) = (Vec::new(), Vec::new());
    for listener in named {
        match refusal(listener) {
            None => open.push(listener),
            Some(why) => refusals.push(why),
        }
    }
    if open.is_empty() {
        return Err(Verdict::no("NotAllowedByListeners", refusals.join("; ")));
    }
    let with_names = open.into_iter().map(|listener| (listener, names_at(*kind, route, &listener.hostname)));
    let attached: Vec<(&Listener, Names)> = with_names.filter(|(_, names)| !names.is_empty()).collect();
    if attached.is_empty() {
        let why = "no host name of the route is among those of the listener";
        return Err(Verdict::no("NoMatchingListenerHostname", why));
    }
    Ok(attached)
}

/// Returns the names of a route that have names of a listener.
fn names_at(kind: RouteKind, route: &RouteRecord, listener: &NamePattern) -> Names {
    if kind == RouteKind::Tcp {
        return vec![None];
    }
    let all = route.hostnames.iter().filter_map(|name| NamePattern::parse(name).ok());
    let names: BTreeSet<NamePattern> = all.filter(|name| name.intersection(listener).is_some()).collect();
    names.into_iter().map(Some).collect()
}

/// Returns the backends of a route, and the condition `ResolvedRefs`: the first reason why a backend cannot be used.
fn backends(
    kind: RouteKind,
    key: &ObjectKey,
    route: &RouteRecord,
    tables: &Tables,
) -> (Vec<Backend>, Verdict) {
    let mut first = None;
    let backends = route.backends.iter().map(|record| {
        let to = backend(kind, key, record, tables).map_err(|verdict| {
            let why: Arc<str> = verdict.message.as_str().into();
            first.get_or_insert(verdict);
            why
        });
        Backend { weight: record.weight, to }
    });
    let backends = backends.collect();
    (backends, first.unwrap_or_else(|| Verdict::yes("ResolvedRefs", "all references are resolved")))
}

/// Returns the service port of a backend. The error is the condition `ResolvedRefs`.
fn backend(
    kind: RouteKind,
    key: &ObjectKey,
    record: &BackendRecord,
    tables: &Tables,
) -> Result<BackendPort, Verdict> {
    let BackendRecord { group, kind: target_kind, target, port, .. } = record;
    let is_import = match (&**group, &**target_kind) {
        ("", "Service") => false,
        (MULTI_CLUSTER, "ServiceImport") => true,
        _ => {
            let why =
                format!("backends of kind {target_kind} are not supported; Service and ServiceImport are");
            return Err(Verdict::no("InvalidKind", why));
        }
    };
    if !is_granted(&tables.grants, (kind.text(), &key.namespace), (group, target_kind), target) {
        let why = format!("no ReferenceGrant permits the reference to {target_kind} {target}");
        return Err(Verdict::no("RefNotPermitted", why));
    }
    let missing = |why: String| Verdict::no("BackendNotFound", why);
    let Some(port) = *port else {
        return Err(missing(format!("the reference to {target_kind} {target} has no port")));
    };
    let hostname = if is_import {
        // The merged service of the cluster set decides which ports there are.
        let is_known = tables.imports.get(target).is_some() || tables.exports.get(target).is_some();
        is_known.then(|| alias(target)).flatten()
    } else {
        let Some(service) = tables.services.get(target) else {
            return Err(missing(format!("Service {target} does not exist")));
        };
        if service.class == ServiceClass::ExternalName {
            return Err(missing(format!("Service {target} is of type ExternalName, which is not supported")));
        }
        if !tables.spec.namespaces.takes(&target.namespace, tables.labels_of(&target.namespace)) {
            return Err(missing(format!("the namespace of Service {target} is not read")));
        }
        if !service.ports.iter().any(|own| own.number == port) {
            return Err(missing(format!("Service {target} has no TCP port {port}")));
        }
        let name = format!("{}.{}.svc.{}", target.name, target.namespace, tables.spec.cluster_domain);
        HostName::parse(&name).ok()
    };
    let hostname = hostname.ok_or_else(|| missing(format!("{target_kind} {target} does not exist")))?;
    Ok(BackendPort { hostname, port })
}
