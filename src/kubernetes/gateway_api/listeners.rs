//! The evaluation of Gateways and ListenerSets: which of their listeners are served, and where. A function of the objects, the
//! settings, and the addresses of the host.
//!
//! All Gateways of the class share this process. A Gateway that has an address for itself has the connections to that address; all
//! other Gateways share the connections to every other address. At each place, a port has one protocol, that of the oldest listener;
//! and a listener of one namespace excludes the younger listeners of other namespaces for names that its host name has.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use super::super::kinds::Tables;
use super::super::kinds::class_gateway::{
    AllowedNamespaces, ClassGatewayRecord, ListenerSpec, RequestedAddress, RouteKindRef,
};
use super::super::kinds::gateway_route::RouteKind;
use super::super::kinds::gateway_status::Stamp;
use super::super::kinds::listener_set::ListenerSetRecord;
use super::super::table::ObjectKey;
use super::addresses::{self, HostAddresses, Owned};
use super::grants::{GROUP, allows, is_granted};
use super::status::Verdict;
use isthmus_aggregator::spec::kubernetes::GatewayApiSpec;
use isthmus_model::address::Host;
use isthmus_model::name::NamePattern;
use isthmus_registry::gateway_api::{ListenerKey, Place, PlaceProtocol};
use isthmus_registry::name_index::PatternMap;

/// The kind of an object with listeners.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum ParentKind {
    Gateway,
    ListenerSet,
}

impl ParentKind {
    /// Returns the name of the kind.
    pub(crate) const fn text(self) -> &'static str {
        match self {
            Self::Gateway => "Gateway",
            Self::ListenerSet => "ListenerSet",
        }
    }
}

/// The kind, namespace and name of an object with listeners.
pub(crate) type ParentId = (ParentKind, ObjectKey);

/// The Gateways of the class and their ListenerSets, evaluated.
pub(crate) type Parents = BTreeMap<ParentId, Parent>;

/// A Gateway or ListenerSet, evaluated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Parent {
    /// The Gateway: the object itself, or that of the ListenerSet.
    pub(crate) gateway: ObjectKey,
    /// When the object was created, as RFC 3339.
    pub(crate) created: Arc<str>,
    pub(crate) stamp: Stamp,
    /// The condition `Accepted`.
    pub(crate) accepted: Verdict,
    /// The reason why no connection can reach the listeners; `None` if they are served once the process knows them.
    pub(crate) unreachable: Option<Verdict>,
    /// The addresses of the Gateway for clients.
    pub(crate) addresses: Vec<Host>,
    pub(crate) listeners: Vec<Listener>,
    /// The number of ListenerSets that are attached to the Gateway.
    pub(crate) sets: usize,
    /// The sentence that tells an operator the line to write so that the Gateway has what it requests.
    pub(crate) note: Option<String>,
}

impl Parent {
    /// Returns the names of a listener of the object.
    pub(crate) fn key_of(&self, listener: &Listener) -> ListenerKey {
        ListenerKey { owner: self.gateway.namespace.clone(), name: listener.hostname.clone() }
    }
}

/// A listener, evaluated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listener {
    pub(crate) name: String,
    pub(crate) port: i64,
    /// The names that the listener takes.
    pub(crate) hostname: NamePattern,
    /// The conditions `Accepted` and `ResolvedRefs`.
    pub(crate) accepted: Verdict,
    pub(crate) resolved: Verdict,
    /// The condition `Conflicted`, if the listener conflicts with an earlier one.
    pub(crate) conflict: Option<Verdict>,
    /// The protocol; `None` if it is not supported.
    pub(crate) protocol: Option<PlaceProtocol>,
    /// The kinds of routes that may be attached.
    pub(crate) kinds: Vec<RouteKind>,
    pub(crate) allowed: AllowedNamespaces,
    /// The places at which the listener is served; empty if it is not accepted.
    pub(crate) places: Vec<Place>,
}

/// The places of a Gateway, by the addresses that it requests.
#[derive(Clone)]
struct Reach {
    /// The addresses of places; `None`: all addresses of which no Gateway has this port.
    addresses: Vec<Option<IpAddr>>,
    /// The addresses for the status.
    shown: Vec<Host>,
    accepted: Result<(), Verdict>,
    unreachable: Option<Verdict>,
    /// The line that an operator has to write so that the Gateway has what it requests.
    note: Option<String>,
}

/// Evaluates the Gateways of the class and their ListenerSets.
pub(crate) fn evaluate(spec: &GatewayApiSpec, tables: &Tables, host: &HostAddresses<'_>) -> Parents {
    let mut parents = Parents::new();
    if tables.gateway_classes.get(&spec.class).is_none_or(|class| class.has_parameters) {
        return parents;
    }
    let gateways = tables.class_gateways.iter().filter(|(_, gateway)| gateway.class == spec.class);
    let mut gateways: Vec<(&ObjectKey, &ClassGatewayRecord)> = gateways.collect();
    gateways.sort_by_key(|(key, gateway)| (&gateway.created, *key));
    let mut sets: Vec<(&ObjectKey, &ListenerSetRecord)> = tables.listener_sets.iter().collect();
    sets.sort_by_key(|(key, set)| (&set.created, *key));
    let is_allowed = |key: &ObjectKey| spec.from.takes(&key.namespace, tables.labels_of(&key.namespace));
    let mut owners = gateways.clone();
    owners.retain(|(key, gateway)| is_allowed(key) && !gateway.has_parameters);
    let owned = Owned::new(spec, &owners, host);
    for (key, record) in gateways {
        let reach = match is_allowed(key) {
            true => reach(spec, (key, record), &owned, host),
            false => Reach::refused(Verdict::no(
                "NotAllowed",
                format!("gatewayApi.gatewaysFrom allows no Gateways of the namespace {}", key.namespace),
            )),
        };
        let (attached, barred): (Vec<_>, Vec<_>) =
            sets.iter().filter(|(_, set)| set.gateway == *key).partition(|(of, _)| {
                let labels = tables.labels_of(&of.namespace);
                allows(&record.allowed_listeners, "None", &key.namespace, &of.namespace, labels)
            });
        let mut context = Context { spec, tables, reach: &reach, known: Vec::new() };
        let accepted = || match &reach.accepted {
            Err(verdict) => verdict.clone(),
            Ok(()) => Verdict::yes("Accepted", "the object has no listeners of its own"),
        };
        let own = context.listeners(ParentKind::Gateway, key, &record.listeners);
        parents.insert(
            (ParentKind::Gateway, key.clone()),
            Parent {
                gateway: key.clone(),
                created: (*record.created).into(),
                stamp: record.stamp.clone(),
                accepted: accepted(),
                unreachable: reach.unreachable.clone(),
                addresses: reach.shown.clone(),
                listeners: own,
                sets: attached.len(),
                note: reach.note.clone(),
            },
        );
        for (of, set) in attached {
            let listeners = context.listeners(ParentKind::ListenerSet, of, &set.listeners);
            let parent = Parent {
                gateway: key.clone(),
                created: (*set.created).into(),
                stamp: set.stamp.clone(),
                accepted: accepted(),
                unreachable: reach.unreachable.clone(),
                addresses: Vec::new(),
                listeners,
                sets: 0,
                note: None,
            };
            parents.insert((ParentKind::ListenerSet, (*of).clone()), parent);
        }
        for (of, set) in barred {
            let why =
                format!("Gateway {key} does not allow ListenerSets of this namespace (allowedListeners)");
            let parent = Parent {
                gateway: key.clone(),
                created: (*set.created).into(),
                stamp: set.stamp.clone(),
                accepted: Verdict::no("NotAllowed", why.clone()),
                unreachable: Some(Verdict::no("NotAllowed", why)),
                addresses: Vec::new(),
                listeners: Vec::new(),
                sets: 0,
                note: None,
            };
            parents.insert((ParentKind::ListenerSet, (*of).clone()), parent);
        }
    }
    exclude(&mut parents);
    for parent in parents.values_mut().filter(|parent| parent.accepted.is_true) {
        if !parent.listeners.is_empty() {
            parent.accepted = of_listeners(&parent.listeners);
        }
    }
    parents
}

/// The listeners at a place so far, the oldest first.
struct Taken {
    protocol: PlaceProtocol,
    /// The first Gateway.
    gateway: ObjectKey,
    /// The Gateway that was the first to have a host name.
    by_name: PatternMap<ObjectKey>,
}

impl Taken {
    /// Returns the reason and the text of a conflict with a younger listener of a Gateway.
    fn conflict(&self, place: Place, gateway: &ObjectKey, listener: &Listener) -> Option<Verdict> {
        let is_foreign = |other: &ObjectKey| other.namespace != gateway.namespace;
        if Some(self.protocol) != listener.protocol && self.gateway != *gateway {
            let why = format!("Gateway {}, which is older, has another protocol at {place}", self.gateway);
            return Some(Verdict::yes("ProtocolConflict", why));
        }
        if self.protocol == PlaceProtocol::Tcp && is_foreign(&self.gateway) {
            let why = format!("Gateway {}, which is older, has all connections at {place}", self.gateway);
            return Some(Verdict::yes("ProtocolConflict", why));
        }
        let name = listener.hostname.to_string();
        let first = self.by_name.matching(&name).find(|other| is_foreign(other))?;
        let why = format!("Gateway {first}, which is older, has a listener with the names {name} at {place}");
        Some(Verdict::yes("HostnameConflict", why))
    }
}

/// Excludes listeners that conflict with older listeners of other Gateways at the same place.
fn exclude(parents: &mut Parents) {
    let mut order: Vec<ParentId> = parents.keys().cloned().collect();
    order.sort_by_cached_key(|id| (parents.get(id).map(|parent| parent.created.clone()), id.1.clone(), id.0));
    let mut all: BTreeMap<Place, Taken> = BTreeMap::new();
    for id in &order {
        let Some(Parent { gateway, listeners, .. }) = parents.get_mut(id) else { continue };
        for listener in listeners {
            let Some(protocol) = listener.protocol else { continue };
            let conflict = |place: &Place| all.get(place)?.conflict(*place, gateway, listener);
            if let Some(conflict) = listener.places.iter().find_map(conflict) {
                listener.places.clear();
                listener.accepted = Verdict { is_true: false, ..conflict.clone() };
                listener.conflict = Some(conflict);
                continue;
            }
            for place in &listener.places {
                let first = || Taken { protocol, gateway: gateway.clone(), by_name: PatternMap::default() };
                let taken = all.entry(*place).or_insert_with(first);
                let is_new = taken.by_name.get(&listener.hostname).is_none();
                if listener.hostname != NamePattern::Any && is_new {
                    taken.by_name.insert(listener.hostname.clone(), gateway.clone());
                }
            }
        }
    }
}

impl Reach {
    /// Returns the places of a Gateway that is not accepted.
    fn refused(why: Verdict) -> Self {
        let unreachable = Some(Verdict::no("Invalid", why.message.clone()));
        Self { addresses: Vec::new(), shown: Vec::new(), accepted: Err(why), unreachable, note: None }
    }
}

/// Returns the places of a Gateway. If it cannot have one of the addresses that it requests, it has none.
fn reach(
    spec: &GatewayApiSpec,
    (key, record): (&ObjectKey, &ClassGatewayRecord),
    owned: &Owned<'_>,
    host: &HostAddresses<'_>,
) -> Reach {
    if record.has_parameters {
        let why = "infrastructure.parametersRef refers to parameters, and this controller knows none";
        return Reach::refused(Verdict::no("InvalidParameters", why));
    }
    let none =
        Reach { addresses: Vec::new(), shown: Vec::new(), accepted: Ok(()), unreachable: None, note: None };
    let mut reach = none.clone();
    let mut unusable = None;
    for RequestedAddress { kind, value } in &record.addresses {
        let address = Host::parse(value).ok();
        let is_ip = matches!(address, Some(Host::Ip(_)));
        if !matches!((kind.as_str(), is_ip), ("" | "IPAddress", true) | ("Hostname", false))
            && !value.is_empty()
        {
            let why =
                format!("the address {value:?} of type {kind} is not supported; IPAddress and Hostname are");
            return Reach::refused(Verdict::no("UnsupportedAddress", why));
        }
        let place = match address {
            // The address is left to the controller.
            _ if value.is_empty() => None,
            Some(shared) if spec.addresses.contains(&shared) => {
                reach.shown.push(shared);
                None
            }
            Some(Host::Ip(ip)) => {
                if let Some(why) = owned.refusal(spec, key, ip, host) {
                    reach.note = reach.note.or_else(|| addresses::line_to_write(spec, key, ip, host));
                    unusable.get_or_insert(why);
                }
                reach.shown.push(Host::Ip(ip));
                Some(ip)
            }
            _ => {
                unusable
                    .get_or_insert_with(|| format!("the address {value} is not one of gatewayApi.addresses"));
                continue;
            }
        };
        if !reach.addresses.contains(&place) {
            reach.addresses.push(place);
        }
    }
    if let Some(why) = unusable {
        let unreachable = Some(Verdict::no("AddressNotUsable", why));
        return Reach { unreachable, note: reach.note, ..none };
    }
    if record.requests_no_address() && !spec.pool.is_empty() {
        let assigned = owned.assigned(key);
        reach.addresses = assigned.map(Some).into_iter().collect();
        reach.shown = assigned.map(Host::Ip).into_iter().collect();
        reach.unreachable = match assigned {
            Some(ip) if (host.is_local)(ip) => None,
            Some(ip) => {
                let why =
                    format!("the address {ip} of gatewayApi.pool is not an address of the gateway's host");
                Some(Verdict::no("AddressNotUsable", why))
            }
            None => {
                let why = "all addresses of gatewayApi.pool belong to other Gateways";
                Some(Verdict::no("AddressNotAssigned", why))
            }
        };
    } else if record.requests_no_address() {
        reach.addresses = vec![None];
        reach.shown = spec.addresses.clone();
        if reach.shown.is_empty() {
            let why = match &spec.service {
                Some(service) => format!(
                    "Service {}/{service} has no address of a load balancer and no external one",
                    spec.writer.namespace
                ),
                None => "connections to every address of the process are served, but no address is known that clients can use; \
                         set gatewayApi.addresses or gatewayApi.service, or spec.addresses of the Gateway"
                    .to_owned(),
            };
            reach.unreachable = Some(Verdict::no("AddressNotAssigned", why));
        }
    }
    reach
}

/// Returns the condition `Accepted` of an object with listeners.
fn of_listeners(listeners: &[Listener]) -> Verdict {
    let invalid: Vec<&str> = listeners
        .iter()
        .filter(|listener| !listener.accepted.is_true)
        .map(|listener| listener.name.as_str())
        .collect();
    if invalid.is_empty() {
        return Verdict::yes("Accepted", "all listeners are accepted");
    }
    let message = format!("these listeners are not valid: {}", invalid.join(", "));
    Verdict { is_true: invalid.len() < listeners.len(), reason: "ListenersNotValid", message }
}

/// The state of the evaluation of one Gateway and its ListenerSets.
struct Context<'a> {
    spec: &'a GatewayApiSpec,
    tables: &'a Tables,
    reach: &'a Reach,
    /// The listeners of the Gateway's objects so far, but those that lost their port or host name to an object before them.
    known: Vec<ListenerSpec>,
}

impl Context<'_> {
    fn listeners(&mut self, kind: ParentKind, key: &ObjectKey, specs: &[ListenerSpec]) -> Vec<Listener> {
        let (mut all, mut lasting) = (Vec::new(), Vec::new());
        for (index, spec) in specs.iter().enumerate() {
            let earlier = self.known.iter().find_map(|known| conflict(known, spec, "an earlier object"));
            if earlier.is_none() {
                lasting.push(spec.clone());
            }
            // No listener of one object that conflicts with another one of it is served.
            let beside = specs.iter().enumerate().filter(|(other, _)| *other != index);
            let own =
                || beside.map(|(_, other)| other).find_map(|other| conflict(other, spec, "this object"));
            all.push(self.listener(kind, key, spec, earlier.or_else(own)));
        }
        self.known.extend(lasting);
        all
    }

    fn listener(
        &self,
        kind: ParentKind,
        key: &ObjectKey,
        spec: &ListenerSpec,
        conflict: Option<Verdict>,
    ) -> Listener {
        let protocol = protocol_of(spec);
        let of_protocol = match protocol {
            Some(PlaceProtocol::Tls) => &[RouteKind::Tls][..],
            Some(PlaceProtocol::Tcp) => &[RouteKind::Tcp],
            None => &[],
        };
        let asked = &spec.allowed_routes.kinds;
        let names = |kind: RouteKind, asked: &RouteKindRef| {
            asked.group.as_deref().unwrap_or(GROUP) == GROUP && asked.kind == kind.text()
        };
        let supported = |asked: &RouteKindRef| of_protocol.iter().any(|kind| names(*kind, asked));
        // TLS that is terminated is supported for no kind of route.
        let is_terminated = protocol == Some(PlaceProtocol::Tls) && !spec.tls.is_passed_through();
        let kinds: Vec<RouteKind> = of_protocol
            .iter()
            .copied()
            .filter(|kind| asked.is_empty() || asked.iter().any(|asked| names(*kind, asked)))
            .filter(|_| !is_terminated)
            .collect();
        let hostname = match spec.hostname.as_str() {
            "" => Some(NamePattern::Any),
            text => NamePattern::parse(text).ok(),
        };
        let resolved = match asked.iter().find(|asked| !supported(asked)) {
            Some(foreign) => {
                let why = format!("routes of kind {} cannot be attached to this listener", foreign.kind);
                Verdict::no("InvalidRouteKinds", why)
            }
            None => self.certificates(kind, key, spec),
        };
        let accepted = match (&conflict, self.usable(spec, protocol, hostname.as_ref())) {
            (Some(conflict), _) => Verdict { is_true: false, ..conflict.clone() },
            (None, Err(verdict)) => verdict,
            (None, Ok(())) => Verdict::yes("Accepted", "the listener is accepted"),
        };
        let places = if accepted.is_true { self.places_of(spec.port) } else { Vec::new() };
        Listener {
            name: spec.name.clone(),
            port: spec.port,
            hostname: hostname.unwrap_or(NamePattern::Any),
            accepted,
            resolved,
            conflict,
            protocol,
            kinds,
            allowed: spec.allowed_routes.namespaces.clone(),
            places,
        }
    }

    /// Returns the places of a port; none if no connection can reach the Gateway.
    fn places_of(&self, port: i64) -> Vec<Place> {
        let Ok(port) = u16::try_from(port) else { return Vec::new() };
        let addresses = self.reach.addresses.iter().filter(|_| self.reach.accepted.is_ok());
        addresses.map(|address| Place { port, address: *address }).collect()
    }

    /// Returns an error if the listener asks for what this controller does not offer.
    fn usable(
        &self,
        spec: &ListenerSpec,
        protocol: Option<PlaceProtocol>,
        hostname: Option<&NamePattern>,
    ) -> Result<(), Verdict> {
        let ListenerSpec { port, tls, .. } = spec;
        let Some(protocol) = protocol else {
            let why = format!("the protocol {} is not supported; TLS and TCP are", spec.protocol);
            return Err(Verdict::no("UnsupportedProtocol", why));
        };
        if protocol == PlaceProtocol::Tls && !tls.is_passed_through() {
            let why = "tls.mode Terminate is not supported, because TLS is passed through unchanged; use Passthrough";
            return Err(Verdict::no("UnsupportedValue", why));
        }
        if !self.spec.ports.iter().any(|open| i64::from(*open) == *port) {
            let ports: Vec<String> = self.spec.ports.iter().map(ToString::to_string).collect();
            let why =
                format!("the port {port} is not one of gatewayApi.ports, which are {}", ports.join(", "));
            return Err(Verdict::no("PortUnavailable", why));
        }
        match hostname {
            None => Err(Verdict::no("UnsupportedValue", format!("{:?} is no host name", spec.hostname))),
            Some(_) => Ok(()),
        }
    }

    /// Checks the first reference to a certificate, which only the mode Terminate uses.
    fn certificates(&self, kind: ParentKind, key: &ObjectKey, spec: &ListenerSpec) -> Verdict {
        let first = spec.tls.certificate_refs.first().filter(|_| !spec.tls.is_passed_through());
        if let Some(certificate) = first {
            let namespace =
                if certificate.namespace.is_empty() { &*key.namespace } else { &certificate.namespace };
            let target = ObjectKey { namespace: namespace.into(), name: certificate.name.as_str().into() };
            if !certificate.group.is_empty() || !matches!(certificate.kind.as_str(), "" | "Secret") {
                let why = format!("the certificate {target} is a {}, not a Secret", certificate.kind);
                return Verdict::no("InvalidCertificateRef", why);
            }
            let from = (kind.text(), &*key.namespace);
            if !is_granted(&self.tables.grants, from, ("", "Secret"), &target) {
                let why = format!("no ReferenceGrant permits the reference to Secret {target}");
                return Verdict::no("RefNotPermitted", why);
            }
            let why = format!("Secret {target} is not read, because this controller does not terminate TLS");
            return Verdict::no("InvalidCertificateRef", why);
        }
        Verdict::yes("ResolvedRefs", "all references are resolved")
    }
}

/// Returns the protocol of a listener; `None` if it is not supported.
fn protocol_of(spec: &ListenerSpec) -> Option<PlaceProtocol> {
    match spec.protocol.as_str() {
        "TLS" => Some(PlaceProtocol::Tls),
        "TCP" => Some(PlaceProtocol::Tcp),
        _ => None,
    }
}

/// Returns the condition `Conflicted` of a listener that conflicts with another one of its Gateway, which is one of `whose`.
fn conflict(other: &ListenerSpec, spec: &ListenerSpec, whose: &str) -> Option<Verdict> {
    let (known, protocol) = (protocol_of(other)?, protocol_of(spec)?);
    if other.port != spec.port {
        return None;
    }
    let (name, port) = (&other.name, spec.port);
    if known != protocol {
        let why = format!("the listener {name:?} of {whose} has another protocol on port {port}");
        return Some(Verdict::yes("ProtocolConflict", why));
    }
    (other.hostname == spec.hostname).then(|| {
        let host = &spec.hostname;
        let why = format!("the listener {name:?} of {whose} has the same host name {host:?} on port {port}");
        Verdict::yes("HostnameConflict", why)
    })
}
