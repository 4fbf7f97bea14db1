//! The evaluation of a TLSRoute or TCPRoute: the listeners that it is attached to, the names that it claims there, and its
//! backends. A function of the evaluated listeners and the objects that the route names.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::super::index::items::alias;
use super::super::kinds::Tables;
use super::super::kinds::gateway_route::{BackendRecord, ParentRecord, RouteId, RouteKind, RouteRecord};
use super::super::kinds::service::{ServiceClass, ServiceRecord};
use super::super::table::ObjectKey;
use super::grants::{GROUP, allows, is_granted};
use super::listeners::{Listener, ParentId, ParentKind, Parents};
use super::status::{ParentStatus, Status, Verdict};
use isthmus_model::name::{HostName, NamePattern};
use isthmus_registry::gateway_api::{Claim, GatewayRoute};
use isthmus_settings::backend::{Backend, BackendPort};

/// The group of ServiceImports.
const MULTI_CLUSTER: &str = "multicluster.x-k8s.io";

/// The largest number of names that a condition names.
const NAMED_MAX: usize = 5;

/// A route, evaluated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Evaluated {
    /// The route as an item of the registry; `None` if no listener accepts it.
    pub(crate) item: Option<Arc<GatewayRoute>>,
    /// The listeners that the route is attached to.
    pub(crate) attached: BTreeSet<(ParentId, String)>,
    /// The parents that are of this controller.
    parents: Vec<OfParent>,
    /// The condition `ResolvedRefs`.
    resolved: Verdict,
    generation: i64,
}

/// A parent of a route, evaluated.
#[derive(Clone, Debug, PartialEq, Eq)]
struct OfParent {
    reference: ParentRecord,
    /// The claims at the listeners of the parent, or the condition `Accepted`.
    claims: Result<Vec<Claim>, Verdict>,
}

/// The answers to whose a name is.
pub(crate) trait Owners {
    /// Returns who has the names of a claim, if it is not the route itself.
    fn other_owner(&self, route: &Arc<str>, claim: &Claim) -> Option<String>;

    /// Returns a sentence about the route of another namespace that had the names of a claim a short while ago.
    fn earlier_owner(&self, route: &Arc<str>, claim: &Claim) -> Option<String>;
}

impl Evaluated {
    /// Returns the status of the route, with an entry for each parent that is of this controller.
    pub(crate) fn status(&self, id: &RouteId, owners: &impl Owners) -> Status {
        let object = object_of(id);
        let of_parent = |OfParent { reference, claims }: &OfParent| {
            let accepted = match claims {
                Ok(claims) => accepted(id.0, &object, claims, owners),
                Err(verdict) => verdict.clone(),
            };
            let conditions = vec![("Accepted", accepted), ("ResolvedRefs", self.resolved.clone())];
            ParentStatus { parent: reference.clone(), conditions }
        };
        let parents: Vec<ParentStatus> = self.parents.iter().map(of_parent).collect();
        Status { generation: self.generation, parents, ..Status::default() }
    }
}

/// Returns the names of a claim as messages show them.
pub(crate) fn text_of(claim: &Claim) -> String {
    match claim.applied() {
        Some(name) => name.to_string(),
        None => format!("every connection to {}", claim.place),
    }
}

/// Returns the condition `Accepted` of a route that listeners accept. It is false if all names of a TLSRoute belong to others; of
/// several TCPRoutes of a listener, the standard accepts all, of which the oldest is served.
fn accepted(kind: RouteKind, object: &Arc<str>, claims: &[Claim], owners: &impl Owners) -> Verdict {
    let mut lost = BTreeSet::new();
    let mut is_all = !claims.is_empty();
    for claim in claims {
        match owners.other_owner(object, claim) {
            Some(other) => drop(lost.insert(format!("{} belongs to {other}", text_of(claim)))),
            None => is_all = false,
        }
    }
    let earlier: BTreeSet<String> =
        claims.iter().filter_map(|claim| owners.earlier_owner(object, claim)).collect();
    let listed = |all: &BTreeSet<String>| {
        let mut named: Vec<&str> = all.iter().take(NAMED_MAX).map(String::as_str).collect();
        let more = all.len().saturating_sub(NAMED_MAX);
        let more = if more > 0 { format!("{more} more") } else { String::new() };
        named.extend(Some(more.as_str()).filter(|more| !more.is_empty()));
        named.join("; ")
    };
    if is_all && kind == RouteKind::Tls {
        return Verdict::no("HostnameConflict", listed(&lost));
    }
    let mut message = "the route is accepted".to_owned();
    if !lost.is_empty() {
        message = format!("{message}, but {}", listed(&lost));
    }
    if !earlier.is_empty() {
        message = format!("{message}; {}", listed(&earlier));
    }
    Verdict::yes("Accepted", message)
}

/// Returns the name of a route as `explain` shows it.
pub(crate) fn object_of((kind, key): &RouteId) -> Arc<str> {
    format!("{} {key}", kind.text()).into()
}

/// Evaluates a route. `refusal` is the condition `Accepted` of a route that no parent may accept.
pub(crate) fn evaluate(
    id: &RouteId,
    route: &RouteRecord,
    parents: &Parents,
    tables: &Tables,
    refusal: Option<&Verdict>,
) -> Evaluated {
    let (kind, key) = id;
    let (backends, resolved) = backends(*kind, key, route, tables);
    let (mut claims, mut attached, mut of_parents) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
    for reference in &route.parents {
        let Some(parent) = parent_of(reference, key) else { continue };
        let Some(of_parent) = parents.get(&parent) else { continue };
        let found = match refusal {
            Some(verdict) => Err(verdict.clone()),
            None => attachments(id, route, reference, &parent, &of_parent.listeners, tables),
        };
        let found = found.map(|found| {
            let mut own = Vec::new();
            for (listener, names) in found {
                attached.insert((parent.clone(), listener.name.clone()));
                let key = of_parent.key_of(listener);
                for name in names {
                    let claim = |place| Claim { place, listener: key.clone(), name: name.clone() };
                    own.extend(listener.places.iter().copied().map(claim));
                }
            }
            claims.extend(own.iter().cloned());
            own
        });
        of_parents.push(OfParent { reference: reference.clone(), claims: found });
    }
    let item = (!claims.is_empty()).then(|| {
        Arc::new(GatewayRoute {
            object: object_of(id),
            created: route.created.clone(),
            claims: claims.into_iter().collect(),
            backends: backends.into(),
        })
    });
    Evaluated { item, attached, parents: of_parents, resolved, generation: route.generation() }
}

/// Returns the object that a reference names; `None` if it can be none of this controller.
pub(crate) fn parent_of(reference: &ParentRecord, route: &ObjectKey) -> Option<ParentId> {
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

/// Returns true if the cluster itself exports the service with this port. An import is written a little later than its port is there.
fn exports(tables: &Tables, service: &ObjectKey, port: u16) -> bool {
    let found = tables.exports.get(service).and_then(|_| tables.services.get(service));
    found.is_some_and(|found| found.ports.iter().any(|own| own.number == port))
}

/// Returns the `appProtocol` of a port, if it is one without TLS.
fn plain_protocol(service: &ServiceRecord, port: u16) -> Option<&str> {
    let found =
        service.exported_ports.iter().find(|found| found.port == port && &*found.protocol == "TCP")?;
    let is_plain = |protocol: &&str| matches!(*protocol, "http" | "kubernetes.io/h2c" | "kubernetes.io/ws");
    Some(&*found.app_protocol).filter(is_plain)
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
        let import = tables.imports.get(target);
        let export = tables.exports.get(target);
        let lacks = |ports: &[u16]| !ports.is_empty() && !ports.contains(&port);
        if import.is_some_and(|import| lacks(&import.ports)) && !exports(tables, target, port) {
            return Err(missing(format!("ServiceImport {target} has no port {port}")));
        }
        (import.is_some() || export.is_some()).then(|| alias(target)).flatten()
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
        if let Some(plain) = plain_protocol(service, port).filter(|_| kind == RouteKind::Tls) {
            let why = format!(
                "port {port} of Service {target} has the appProtocol {plain}, and a TLSRoute passes on the TLS of clients"
            );
            return Err(Verdict::no("UnsupportedProtocol", why));
        }
        let name = format!("{}.{}.svc.{}", target.name, target.namespace, tables.spec.cluster_domain);
        HostName::parse(&name).ok()
    };
    let hostname = hostname.ok_or_else(|| missing(format!("{target_kind} {target} does not exist")))?;
    Ok(BackendPort { hostname, port })
}
