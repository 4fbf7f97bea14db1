//! The Gateway API in one cluster: evaluates Gateways, ListenerSets and routes, makes them items of the registry, and says which
//! objects need another status.
//!
//! - `listeners`, `routes`: the evaluation, as functions of the objects. `grants`: references across namespaces. `addresses`: the
//!   addresses that Gateways have for themselves. `names`: whose a name is.
//! - `status`: the status of an object. `writer`: writes it. `events`: events about what it says.
//!   `replicas`: those that have to serve it.
//!
//! A changed route, or a changed service, costs the evaluation of the routes that it concerns. A change of any other object is rare,
//! and everything is evaluated again.

mod addresses;
mod events;
pub(super) mod grants;
pub(super) mod listeners;
mod names;
mod replicas;
pub(super) mod routes;
pub(super) mod status;
#[cfg(test)]
mod tests;
pub(super) mod writer;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, UdpSocket};
use std::sync::Arc;
use std::time::SystemTime;

use self::listeners::{Listener, Parent, ParentId, ParentKind, Parents};
use self::names::Names;
use self::routes::{Evaluated, object_of, parent_of};
use self::status::{ListenerStatus, Status, Verdict};
use self::writer::{Due, Target, Wanted};
use super::kinds::class_gateway::mark_of_class;
use super::kinds::gateway_class::{ClassRecord, NOT_SERVED};
use super::kinds::gateway_route::{ParentRecord, RouteId, RouteKind, RouteRecord};
use super::kinds::gateway_status::Stamp;
use super::kinds::{DirtyGatewayApi, Tables};
use super::table::ObjectKey;
use isthmus_aggregator::spec::kubernetes::GatewayApiSpec;
use isthmus_model::address::Host;
use isthmus_registry::change::{Change, Item, Key};
use isthmus_registry::gateway_api::{GatewayListener, GatewayPlaces, Place, PlaceProtocol};

/// The features that the GatewayClass lists, in order of their names: those of which tests of the conformance suite pass. All tests of
/// ListenerSets, which are served too, need HTTP listeners.
const FEATURES: &[&str] = &["Gateway", "ReferenceGrant", "TCPRoute", "TLSRoute"];

/// The largest number of lines about Gateways.
const NOTES_MAX: usize = 5;

/// The extent to which the Gateways of a cluster, their classes and their ListenerSets are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Known {
    /// All of them have been listed.
    All,
    /// Some of them could not be read.
    Some,
}

/// The objects of the Gateway API of a cluster, evaluated.
#[derive(Debug, Default)]
pub(super) struct GatewayApi {
    parents: Parents,
    routes: BTreeMap<RouteId, Arc<Evaluated>>,
    names: Names,
    /// The routes beyond the limit of their namespace, for each namespace that has some.
    beyond: BTreeMap<Arc<str>, BTreeSet<RouteId>>,
    /// The routes of each service that is a backend.
    of_backend: HashMap<ObjectKey, BTreeSet<RouteId>>,
    /// The number of routes that are attached to each listener.
    attached: HashMap<(ParentId, String), usize>,
    /// The Gateways that were sent.
    sent: BTreeMap<Arc<str>, Arc<GatewayPlaces>>,
    /// The objects whose status may have to be written.
    due: Due,
    due_is_new: bool,
}

impl GatewayApi {
    /// Forgets what was sent, so that the next changes are a full listing.
    pub(super) fn begin_listing(&mut self) {
        *self = Self { due_is_new: true, ..Self::default() };
    }

    /// Returns the objects whose status may have to be written, if they have changed since the last call.
    pub(super) fn new_due(&mut self) -> Option<Due> {
        std::mem::take(&mut self.due_is_new).then(|| self.due.clone())
    }

    /// Returns what operators have to write so that Gateways have what they request, a line each.
    pub(super) fn notes(&self) -> Vec<String> {
        let all: Vec<&String> = self.parents.values().filter_map(|parent| parent.note.as_ref()).collect();
        let mut notes: Vec<String> = all.iter().take(NOTES_MAX).map(ToString::to_string).collect();
        let more = all.len().saturating_sub(NOTES_MAX);
        if more > 0 {
            notes.push(format!("{more} more Gateways request addresses that gatewayApi does not permit"));
        }
        notes
    }

    /// Evaluates what has changed, and adds the changes of items.
    pub(super) fn renew(
        &mut self,
        spec: &GatewayApiSpec,
        dirty: DirtyGatewayApi,
        (tables, known): (&Tables, Known),
        changes: &mut Vec<Change>,
    ) {
        let DirtyGatewayApi { is_all, mut routes, backends } = dirty;
        if is_all {
            let addresses = addresses::of_clients(spec, tables);
            let spec = &GatewayApiSpec { addresses, ..spec.clone() };
            self.parents = listeners::evaluate(spec, tables, &addresses::of_host(spec, tables, &is_local));
            self.send_gateways(changes);
            self.names.set_gateways(self.sent.values());
            self.of_backend.clear();
            routes.extend(self.routes.keys().cloned());
            let keys = |kind: RouteKind| tables.routes(kind).iter().map(move |(key, _)| (kind, key.clone()));
            routes.extend(keys(RouteKind::Tls).chain(keys(RouteKind::Tcp)));
        }
        routes.extend(backends.iter().filter_map(|service| self.of_backend.get(service)).flatten().cloned());
        let limit = spec.routes_per_namespace;
        self.renew_beyond(limit, tables, &mut routes);
        let why = format!("the namespace has more than {limit} routes (gatewayApi.routesPerNamespace)");
        let too_many = Verdict::no("TooManyRoutes", why);
        let now = SystemTime::now();
        let mut concerned = routes.clone();
        for id in &routes {
            concerned.extend(self.renew_route(id, tables, &too_many, now, changes));
        }
        self.renew_due(spec, (tables, known), &concerned);
    }

    /// Renews the routes that are beyond the limit of their namespaces, the youngest ones, and adds those that have passed it in either
    /// direction to the routes to evaluate.
    fn renew_beyond(&mut self, limit: usize, tables: &Tables, routes: &mut BTreeSet<RouteId>) {
        let namespaces: BTreeSet<Arc<str>> = routes.iter().map(|(_, key)| key.namespace.clone()).collect();
        for namespace in namespaces {
            let beyond = beyond(limit, tables, &namespace);
            let before = match beyond.is_empty() {
                true => self.beyond.remove(&namespace),
                false => self.beyond.insert(namespace, beyond.clone()),
            };
            routes.extend(before.unwrap_or_default().symmetric_difference(&beyond).cloned());
        }
    }

    /// Sends the places of the Gateways that have changed.
    fn send_gateways(&mut self, changes: &mut Vec<Change>) {
        let mut places: BTreeMap<&ObjectKey, (BTreeSet<_>, BTreeSet<_>)> = BTreeMap::new();
        for parent in self.parents.values() {
            let (all, listeners) = places.entry(&parent.gateway).or_default();
            for listener in &parent.listeners {
                let Some(protocol) = listener.protocol else { continue };
                all.extend(listener.places.iter().map(|place| (*place, protocol)));
                let named = |place: &Place| GatewayListener {
                    place: *place,
                    key: parent.key_of(listener),
                    created: parent.created.clone(),
                };
                let for_tls = listener.places.iter().filter(|_| protocol == PlaceProtocol::Tls);
                listeners.extend(for_tls.map(named));
            }
        }
        let gateways = self.parents.iter().filter(|((kind, _), _)| *kind == ParentKind::Gateway);
        let found = gateways.map(|((kind, key), parent)| {
            let object: Arc<str> = format!("{} {key}", kind.text()).into();
            let (all, listeners) = places.remove(key).unwrap_or_default();
            let generation = parent.stamp.generation;
            let (places, listeners) = (all.into_iter().collect(), listeners.into_iter().collect());
            (object.clone(), Arc::new(GatewayPlaces { object, generation, places, listeners }))
        });
        let found: BTreeMap<_, _> = found.collect();
        let gone = self.sent.keys().filter(|object| !found.contains_key(*object));
        changes.extend(gone.map(|object| Change::Remove(Key::GatewayPlaces(object.clone()))));
        let new = found.iter().filter(|(object, gateway)| self.sent.get(*object) != Some(gateway));
        changes.extend(new.map(|(_, gateway)| Change::Put(Item::GatewayPlaces(gateway.clone()))));
        self.sent = found;
    }

    /// Evaluates a route again. Returns the routes of which some names may have another owner now.
    fn renew_route(
        &mut self,
        id: &RouteId,
        tables: &Tables,
        too_many: &Verdict,
        now: SystemTime,
        changes: &mut Vec<Change>,
    ) -> BTreeSet<RouteId> {
        let record = record_of(id, tables);
        let refusal = self.beyond.get(&id.1.namespace).filter(|beyond| beyond.contains(id)).map(|_| too_many);
        let new = record.map(|record| Arc::new(routes::evaluate(id, record, &self.parents, tables, refusal)));
        let old = match &new {
            Some(new) => self.routes.insert(id.clone(), new.clone()),
            None => self.routes.remove(id),
        };
        self.index_backends(id, record);
        for listener in old.iter().flat_map(|old| &old.attached) {
            self.attached.entry(listener.clone()).and_modify(|count| *count = count.saturating_sub(1));
        }
        for listener in new.iter().flat_map(|new| &new.attached) {
            *self.attached.entry(listener.clone()).or_default() += 1;
        }
        let item = |of: &Option<Arc<Evaluated>>| of.as_ref().and_then(|of| of.item.clone());
        let concerned = self.names.set(id, item(&old).as_ref(), item(&new).as_ref(), now);
        match (item(&old), item(&new)) {
            (old, Some(new)) if old.as_ref() != Some(&new) => {
                changes.push(Change::Put(Item::GatewayRoute(new)))
            }
            (Some(_), None) => changes.push(Change::Remove(Key::GatewayRoute(object_of(id)))),
            (_, _) => {}
        }
        concerned
    }

    /// Notes the services that are backends of a route. Services that were backends before stay noted, until everything is evaluated
    /// again: a change of such a service costs one evaluation in vain.
    fn index_backends(&mut self, id: &RouteId, record: Option<&RouteRecord>) {
        for backend in record.iter().flat_map(|record| &record.backends) {
            self.of_backend.entry(backend.target.clone()).or_default().insert(id.clone());
        }
    }

    /// Renews the list of objects whose status may have to be written. Gateways are always on it, because their status also depends
    /// on what the process serves.
    fn renew_due(
        &mut self,
        spec: &GatewayApiSpec,
        (tables, known): (&Tables, Known),
        routes: &BTreeSet<RouteId>,
    ) {
        for id in routes {
            let target = Target::Route(id.clone());
            let found = self.routes.get(id).zip(record_of(id, tables));
            let due = found.and_then(|(found, record)| {
                let entries = record.own.iter().map(|entry| &entry.parent);
                let kept = entries.filter(|parent| !self.is_own(spec, (tables, known), id, parent));
                let status = Status { kept: kept.cloned().collect(), ..found.status(id, &self.names) };
                let stamp = record.stamp_without(&status.kept);
                let is_due = status.digest() != stamp.digest;
                is_due.then_some(Wanted { status, stamp, is_blank: !record.has_status, served: None })
            });
            self.set_due(target, due);
        }
        let leaving = self.leaving(spec, tables, known);
        let count = self.due.len();
        let parents = &self.parents;
        // Another release may serve a class of another name, so a decision about that class stays.
        let classes = || {
            let all = tables.gateway_classes.iter();
            all.filter(|(name, class)| **name == spec.class || class.is_undecided)
        };
        let names: BTreeSet<&Arc<str>> = classes().map(|(name, _)| name).collect();
        self.due.retain(|target, _| match target {
            Target::Route(_) => true,
            Target::Parent(id) => parents.contains_key(id) || leaving.contains_key(id),
            Target::Class(name) => names.contains(name),
        });
        self.due_is_new |= self.due.len() != count;
        let mut all: Vec<_> = leaving.into_iter().map(|(id, wanted)| (Target::Parent(id), wanted)).collect();
        for (name, class) in classes() {
            let status = status_of_class(&spec.class, name, class);
            let wanted = Wanted { status, stamp: class.stamp.clone(), is_blank: false, served: None };
            all.push((Target::Class(name.clone()), wanted));
        }
        for (id, parent) in &self.parents {
            let object = format!("{} {}", ParentKind::Gateway.text(), parent.gateway);
            let status = status_of(&spec.class, parent, |listener| {
                self.attached.get(&(id.clone(), listener.to_owned())).copied().unwrap_or(0)
            });
            let generation = self.parents.get(&(ParentKind::Gateway, parent.gateway.clone()));
            let served = generation.map(|gateway| (object.into(), gateway.stamp.generation));
            let served = served.filter(|_| parent.unreachable.is_none());
            let wanted = Wanted { status, stamp: parent.stamp.clone(), is_blank: false, served };
            all.push((Target::Parent(id.clone()), wanted));
        }
        all.into_iter().for_each(|(target, wanted)| self.set_due(target, Some(wanted)));
    }

    /// Returns the Gateways and ListenerSets that are served by no release any more, but have the conditions that this release has
    /// written. Once these are withdrawn, the object is left to others.
    fn leaving(&self, spec: &GatewayApiSpec, tables: &Tables, known: Known) -> BTreeMap<ParentId, Wanted> {
        if known != Known::All {
            return BTreeMap::new();
        }
        let gateways = tables.class_gateways.iter().filter(|(_, gateway)| gateway.is_written);
        let gateways =
            gateways.map(|(key, gateway)| ((ParentKind::Gateway, key.clone()), key, &gateway.stamp));
        let sets = tables.listener_sets.iter().filter(|(_, set)| set.is_written);
        let sets = sets.map(|(key, set)| ((ParentKind::ListenerSet, key.clone()), &set.gateway, &set.stamp));
        let all = gateways.chain(sets).filter(|(id, gateway, _)| {
            !self.parents.contains_key(id) && !is_of_another_release(spec, tables, gateway)
        });
        let wanted = |stamp: &Stamp| {
            let stamp = stamp.clone();
            Wanted { status: withdrawn(spec, stamp.generation), stamp, is_blank: false, served: None }
        };
        all.map(|(id, _, stamp)| (id, wanted(stamp))).collect()
    }

    /// Returns true if an entry for this parent, in the status of a route that has it from Isthmus, is this release's to write or to
    /// withdraw: the parent is served by this release, or by nobody of this controller. Another release writes the entries for
    /// Gateways of its class.
    fn is_own(
        &self,
        spec: &GatewayApiSpec,
        (tables, known): (&Tables, Known),
        (_, route): &RouteId,
        parent: &ParentRecord,
    ) -> bool {
        let Some(parent) = parent_of(parent, route) else { return true };
        if self.parents.contains_key(&parent) {
            return true;
        }
        let only = &tables.spec.namespaces.only;
        // An object that is not known does not exist only if it would be known.
        let is_gone =
            |key: &ObjectKey| known == Known::All && (only.is_empty() || only.contains(&key.namespace));
        let gateway = match parent {
            (ParentKind::Gateway, key) => key,
            (ParentKind::ListenerSet, key) => match tables.listener_sets.get(&key) {
                Some(set) => set.gateway.clone(),
                None => return is_gone(&key),
            },
        };
        match tables.class_gateways.get(&gateway) {
            None => is_gone(&gateway),
            Some(found) if found.class == spec.class => true,
            Some(found) => known == Known::All && tables.gateway_classes.get(&found.class).is_none(),
        }
    }

    /// Sets the status that an object should have; `None`: it need not be written.
    fn set_due(&mut self, target: Target, wanted: Option<Wanted>) {
        self.due_is_new |= match wanted {
            Some(wanted) if self.due.get(&target).is_some_and(|known| **known == wanted) => false,
            Some(wanted) => {
                self.due.insert(target, wanted.into());
                true
            }
            None => self.due.remove(&target).is_some(),
        };
    }
}

/// Returns the routes of a namespace that are not among the oldest ones, as many as the limit allows.
fn beyond(limit: usize, tables: &Tables, namespace: &Arc<str>) -> BTreeSet<RouteId> {
    let of = |kind: RouteKind| {
        let inside = tables.routes(kind).inside(namespace);
        inside.map(move |(key, record)| (&record.created, kind, key))
    };
    let mut all: Vec<_> = of(RouteKind::Tls).chain(of(RouteKind::Tcp)).collect();
    if all.len() <= limit {
        return BTreeSet::new();
    }
    all.sort();
    all.drain(limit..).map(|(_, kind, key)| (kind, key.clone())).collect()
}

fn record_of<'t>((kind, key): &RouteId, tables: &'t Tables) -> Option<&'t RouteRecord> {
    tables.routes(*kind).get(key).map(|record| &**record)
}

/// Returns the status of a class of this controller; `served` is the name of the class whose Gateways are served.
fn status_of_class(served: &Arc<str>, name: &Arc<str>, class: &ClassRecord) -> Status {
    let (accepted, features) = if name != served {
        let why = "no gateway is configured for this class; gatewayApi.class names the class that one serves";
        (Verdict::no(NOT_SERVED, why), &[][..])
    } else if class.has_parameters {
        let why = "parametersRef refers to parameters, and this controller knows none";
        (Verdict::no("InvalidParameters", why), FEATURES)
    } else {
        (Verdict::yes("Accepted", "Isthmus serves the Gateways of this class"), FEATURES)
    };
    let conditions = vec![("Accepted", accepted)];
    Status { generation: class.stamp.generation, conditions, features, ..Status::default() }
}

/// Returns true if the Gateway is of a class of this controller that another release may serve.
fn is_of_another_release(spec: &GatewayApiSpec, tables: &Tables, gateway: &ObjectKey) -> bool {
    let class = tables.class_gateways.get(gateway).map(|gateway| &gateway.class);
    class.is_some_and(|class| *class != spec.class && tables.gateway_classes.get(class).is_some())
}

/// Returns the status of a Gateway or ListenerSet that is served no more.
fn withdrawn(spec: &GatewayApiSpec, generation: i64) -> Status {
    let why = format!("no GatewayClass of the controller {} serves this object", spec.controller);
    let verdict = || Verdict::no("Pending", why.clone());
    Status {
        generation,
        conditions: vec![("Accepted", verdict()), ("Programmed", verdict())],
        ..Status::default()
    }
}

/// Returns true if the host has the address, so that clients can connect to it.
fn is_local(address: IpAddr) -> bool {
    !address.is_unspecified() && !address.is_multicast() && UdpSocket::bind((address, 0)).is_ok()
}

/// Returns the status of a Gateway or ListenerSet. The condition `Programmed` is that of a process that serves it, and is judged by
/// the writer.
fn status_of(class: &str, parent: &Parent, attached: impl Fn(&str) -> usize) -> Status {
    let programmed = |accepted: &Verdict| match (&parent.unreachable, accepted.is_true) {
        (_, false) => Verdict::no("Invalid", accepted.message.clone()),
        (Some(why), true) => why.clone(),
        (None, true) => Verdict::yes("Programmed", "connections are served"),
    };
    let listener = |listener: &Listener| {
        let no_conflict = || Verdict::no("NoConflicts", "no other listener conflicts with this one");
        ListenerStatus {
            name: listener.name.clone(),
            attached: attached(&listener.name),
            kinds: listener.kinds.clone(),
            conditions: vec![
                ("Accepted", listener.accepted.clone()),
                ("Conflicted", listener.conflict.clone().unwrap_or_else(no_conflict)),
                ("Programmed", programmed(&listener.accepted)),
                ("ResolvedRefs", listener.resolved.clone()),
            ],
        }
    };
    let message = mark_of_class(class) + &parent.accepted.message;
    let accepted = Verdict { message, ..parent.accepted.clone() };
    let address = |host: &Host| match host {
        Host::Name(name) => ("Hostname", name.to_string()),
        Host::Ip(_) | Host::Ips(_) => ("IPAddress", host.to_string()),
    };
    Status {
        generation: parent.stamp.generation,
        conditions: vec![("Accepted", accepted), ("Programmed", programmed(&parent.accepted))],
        addresses: parent.addresses.iter().map(address).collect(),
        listeners: parent.listeners.iter().map(listener).collect(),
        attached_sets: parent.sets,
        ..Status::default()
    }
}
