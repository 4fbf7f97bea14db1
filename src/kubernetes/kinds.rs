//! The kinds of objects that are followed, a file each: which objects are requested, which of their fields are read and kept, and
//! what depends on them. This file lists the kinds, and has the tables of what is kept.

mod authorization_policy;
pub(super) mod claimed;
pub(super) mod class_gateway;
mod config_map;
pub(super) mod derived_service;
pub(super) mod destination_rule;
pub(super) mod endpoint_slice;
pub(super) mod gateway;
pub(super) mod gateway_class;
pub(super) mod gateway_route;
pub(super) mod gateway_status;
pub(super) mod imported_slice;
pub(super) mod listener_set;
pub(super) mod namespace;
pub(super) mod node;
pub(super) mod own_object;
pub(super) mod peer_authentication;
pub(super) mod pod;
pub(super) mod reference_grant;
mod secret;
pub(super) mod selector;
pub(super) mod service;
pub(super) mod service_entry;
pub(super) mod service_export;
pub(super) mod service_import;
pub(super) mod waypoint;
pub(super) mod workload;
pub(super) mod workload_entry;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::Arc;

use serde::de::DeserializeOwned;

use self::authorization_policy::AuthorizationPolicy;
use self::claimed::Claims;
use self::class_gateway::ClassGateway;
pub(super) use self::config_map::ConfigMap;
use self::config_map::LocalHosts;
use self::derived_service::DerivedService;
use self::destination_rule::DestinationRule;
use self::endpoint_slice::{EndpointSlice, SliceRecord};
use self::gateway::Gateway;
use self::gateway_class::GatewayClass;
use self::gateway_route::{RouteId, RouteKind, RouteRecord, TcpRoute, TlsRoute};
use self::imported_slice::ImportedSlice;
use self::listener_set::ListenerSet;
use self::namespace::Namespace;
use self::node::Node;
use self::peer_authentication::PeerAuthentication;
use self::pod::Pod;
use self::reference_grant::ReferenceGrant;
pub(super) use self::secret::Secret;
use self::selector::{Selector, add_to_query};
use self::service::{Service, TrafficDistribution};
use self::service_entry::ServiceEntry;
use self::service_export::ServiceExport;
use self::service_import::ServiceImport;
use self::waypoint::{Waypoint, WaypointClass};
use self::workload::{Deployment, StatefulSet};
use self::workload_entry::WorkloadEntry;
use super::interner::Interner;
use super::objects::Meta;
use super::table::{Key, ObjectKey, Placed, Rows, Table, Touched, Uid};
use isthmus_aggregator::spec::kubernetes::{KubernetesSpec, WATCHED_APART_MAX};
use isthmus_model::endpoint::Labels;
use isthmus_model::identity::TrustDomain;
use isthmus_model::place::Network;

/// The label with the network of a namespace, pod or gateway.
pub(super) const NETWORK_LABEL: &str = "topology.istio.io/network";

/// A kind of object: what is requested, read and kept of it, and what depends on it.
pub(super) trait Watched: DeserializeOwned {
    const FACTS: Facts;

    /// The table of the records that are kept.
    type Rows: Rows + Default;

    /// Returns what is kept of an object; `None` if nothing is.
    fn record(&self, reading: &mut Reading<'_>) -> Option<<Self::Rows as Rows>::Record>;

    /// Marks what depends on an object that has changed.
    fn touch(touched: Touched<<Self::Rows as Rows>::Key, <Self::Rows as Rows>::Record>, tables: &mut Tables);
}

/// The properties of a kind that do not depend on its objects.
#[derive(Debug)]
pub(super) struct Facts {
    /// The plural name, which RBAC and messages use.
    pub(super) plural: &'static str,
    /// The API groups and versions that may have the kind, in the order in which they are tried.
    pub(super) versions: &'static [&'static str],
    /// True if the cluster may lack the kind: it is defined by a CustomResourceDefinition.
    pub(super) is_custom: bool,
    /// True if endpoints cannot be made without this kind.
    pub(super) is_needed: bool,
    namespaces: Namespaces,
    /// The selectors of a request; empty: none.
    labels: Selector,
    fields: &'static str,
    /// The largest number of objects that are kept; further ones are left out, and counted.
    objects_max: usize,
    /// Returns true if a registry with these settings watches the kind.
    is_wanted: fn(&KubernetesSpec) -> bool,
    /// Returns true if these settings make no sense in a cluster that lacks the kind.
    pub(super) is_required: fn(&KubernetesSpec) -> bool,
}

/// The namespaces in which a kind is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Namespaces {
    /// The kind is in no namespace.
    None,
    /// The namespaces whose services are read.
    OfServices,
    /// The namespaces whose services are read, and the namespaces that may have gateways.
    OfServicesAndGateways,
    /// The namespaces whose services are read, and the system namespace of the mesh.
    OfServicesAndSystem,
    /// The system namespace of the mesh.
    System,
    /// All namespaces, whichever are read otherwise.
    Every,
}

impl Facts {
    /// A kind of the core API group.
    const CORE: Self = Self {
        plural: "",
        versions: &["api/v1"],
        is_custom: false,
        is_needed: false,
        namespaces: Namespaces::OfServices,
        labels: Selector(&[]),
        fields: "",
        objects_max: 100_000,
        is_wanted: |_| true,
        is_required: |_| false,
    };
}

/// A kind with its table among those of a cluster.
trait Stored: Watched {
    fn rows(tables: &mut Tables) -> &mut Self::Rows;
}

/// Defines what has an arm or a field for each kind, with the table of its records.
macro_rules! kinds {
    ($($kind:ident in $table:ident,)*) => {
        /// A kind of object.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Kind { $($kind,)* }

        impl Kind {
            const ALL: &[Self] = &[$(Self::$kind,)*];

            pub(super) fn facts(self) -> &'static Facts {
                match self { $(Self::$kind => &<$kind as Watched>::FACTS,)* }
            }

            /// Parses an object of this kind.
            pub(super) fn read(self, text: &str) -> Result<Object, serde_json::Error> {
                Ok(match self { $(Self::$kind => Object::$kind(serde_json::from_str(text)?),)* })
            }
        }

        /// An object of a kind that is followed.
        #[derive(Debug)]
        pub(super) enum Object { $($kind(Box<$kind>),)* }

        impl Object {
            pub(super) fn meta(&self) -> &Meta {
                match self { $(Self::$kind(object) => &object.metadata,)* }
            }
        }

        /// The objects of a cluster: a table for each kind, and the marks of what was not made again since they have changed.
        pub(super) struct Tables {
            pub(super) spec: Arc<KubernetesSpec>,
            $(pub(super) $table: <$kind as Watched>::Rows,)*
            /// The slices of each service.
            slices_of: BTreeMap<ObjectKey, BTreeSet<Arc<ObjectKey>>>,
            /// The labels of a namespace that is not known.
            no_labels: Labels,
            /// The host names that a mesh without a configuration keeps to each cluster.
            default_local: LocalHosts,
            pub(super) claims: Claims,
            pub(super) dirty: Dirty,
        }

        $(impl Stored for $kind {
            fn rows(tables: &mut Tables) -> &mut Self::Rows {
                &mut tables.$table
            }
        })*

        impl Tables {
            pub(super) fn new(spec: Arc<KubernetesSpec>) -> Self {
                let mut tables = Self {
                    default_local: LocalHosts::of(None, &spec),
                    spec,
                    $($table: <$kind as Watched>::Rows::default(),)*
                    slices_of: BTreeMap::new(),
                    no_labels: Labels::default(),
                    claims: Claims::default(),
                    dirty: Dirty { gateways: true, ..Dirty::default() },
                };
                if tables.spec.service_entries {
                    tables.pods.keep_index();
                }
                tables
            }

            /// Stores an object that a listing names. Returns false if the object is left out for lack of room.
            pub(super) fn put(&mut self, object: &Object, listing: u32, reading: &mut Reading<'_>) -> bool {
                match object { $(Object::$kind(object) => self.put_one(&**object, &object.metadata, listing, reading),)* }
            }

            /// Removes an object.
            pub(super) fn remove(&mut self, kind: Kind, meta: &Meta, texts: &mut Interner) {
                match kind { $(Kind::$kind => self.remove_one::<$kind>(Key::of(meta, texts)),)* }
            }

            /// Notes that a listing names an object that cannot be read: its record stays.
            pub(super) fn keep(&mut self, kind: Kind, meta: &Meta, listing: u32, texts: &mut Interner) {
                match kind { $(Kind::$kind => {
                    if let Some(key) = Key::of(meta, texts) {
                        $kind::rows(self).keep(&key, listing);
                    }
                })* }
            }

            /// Removes the objects that a listing has not named; of the listing of one namespace, those in it.
            pub(super) fn complete(&mut self, kind: Kind, listing: u32, namespace: Option<&str>) {
                match kind { $(Kind::$kind => {
                    let unnamed = $kind::rows(self).unnamed(listing, namespace);
                    unnamed.into_iter().for_each(|key| self.remove_one::<$kind>(Some(key)));
                })* }
            }
        }
    };
}

// In the order in which they are watched.
kinds! {
    Namespace in namespaces,
    Service in services,
    EndpointSlice in slices,
    Pod in pods,
    Node in nodes,
    Gateway in gateways,
    ServiceExport in exports,
    ServiceImport in imports,
    ImportedSlice in imported_slices,
    DerivedService in derived_services,
    DestinationRule in rules,
    ConfigMap in mesh_configs,
    Secret in secrets,
    AuthorizationPolicy in policies,
    PeerAuthentication in peers,
    Waypoint in waypoints,
    WaypointClass in waypoint_classes,
    GatewayClass in gateway_classes,
    ClassGateway in class_gateways,
    ListenerSet in listener_sets,
    TlsRoute in tls_routes,
    TcpRoute in tcp_routes,
    ReferenceGrant in grants,
    ServiceEntry in service_entries,
    WorkloadEntry in workload_entries,
    Deployment in deployments,
    StatefulSet in stateful_sets,
}

impl Kind {
    /// Returns the kinds that a registry watches, each in all namespaces or in single ones.
    pub(super) fn watched(spec: &KubernetesSpec) -> Vec<(Self, Option<Arc<str>>)> {
        let only = &spec.namespaces.only;
        let is_apart = !only.is_empty() && only.len() <= WATCHED_APART_MAX;
        let mut all = Vec::new();
        for kind in Self::ALL.iter().copied().filter(|kind| (kind.facts().is_wanted)(spec)) {
            let gateways = spec.gateways.iter().flatten();
            let apart: BTreeSet<&Arc<str>> = match kind.facts().namespaces {
                Namespaces::System => BTreeSet::from([&spec.system_namespace]),
                Namespaces::OfServices if is_apart => only.iter().collect(),
                Namespaces::OfServicesAndGateways if is_apart => only.iter().chain(gateways).collect(),
                // The policies of all pods are for ztunnels.
                Namespaces::OfServicesAndSystem if is_apart && !spec.ambient => {
                    only.iter().chain([&spec.system_namespace]).collect()
                }
                Namespaces::None
                | Namespaces::OfServicesAndSystem
                | Namespaces::Every
                | Namespaces::OfServices
                | Namespaces::OfServicesAndGateways => {
                    all.push((kind, None));
                    continue;
                }
            };
            all.extend(apart.into_iter().map(|namespace| (kind, Some(namespace.clone()))));
        }
        all
    }

    /// Returns true for the kinds that only `gatewayApi` needs.
    pub(super) fn is_of_gateway_api(self) -> bool {
        matches!(
            self,
            Self::GatewayClass
                | Self::ClassGateway
                | Self::ListenerSet
                | Self::TlsRoute
                | Self::TcpRoute
                | Self::ReferenceGrant
        )
    }

    /// Returns true if the objects of a kind are only counted, as objects without effect.
    pub(super) fn is_only_counted(self, spec: &KubernetesSpec) -> bool {
        matches!(self, Self::ServiceEntry | Self::WorkloadEntry) && !spec.service_entries
    }

    /// Returns the plural name of the kind.
    pub(super) fn plural(self) -> &'static str {
        self.facts().plural
    }

    /// Returns the path and query of a list or watch; `more` is a part of the query.
    pub(super) fn request(self, version: &str, namespace: Option<&str>, more: &str) -> String {
        let Facts { plural, namespaces, labels, fields, .. } = self.facts();
        let mut path = format!("/{version}/");
        if let Some(namespace) = namespace.filter(|_| *namespaces != Namespaces::None) {
            let _ = write!(path, "namespaces/{namespace}/");
        }
        let _ = write!(path, "{plural}?{more}");
        add_to_query(&mut path, "labelSelector", &labels.text());
        add_to_query(&mut path, "fieldSelector", fields);
        path
    }
}

/// The settings with which an object is read.
pub(super) struct Reading<'a> {
    pub(super) spec: &'a KubernetesSpec,
    /// The trust domain of the mesh, which may be another one than that of the settings.
    pub(super) trust_domain: &'a TrustDomain,
    pub(super) texts: &'a mut Interner,
}

/// The items that have to be made again.
#[derive(Debug, Default)]
pub(super) struct Dirty {
    pub(super) services: BTreeSet<ObjectKey>,
    /// True if all services have to be made again.
    pub(super) is_all: bool,
    pub(super) gateways: bool,
    pub(super) gateway_api: DirtyGatewayApi,
    /// True if the session has to begin again, because the mesh's own configuration names another trust domain.
    pub(super) session: bool,
    /// The pods whose workloads have to be made again.
    pub(super) pods: BTreeSet<Uid>,
    /// True if all workloads have to be made again.
    pub(super) all_pods: bool,
    /// True if the policies have to be collected again.
    pub(super) facts: bool,
    /// True if the imports, their slices or the namespaces may have changed.
    pub(super) imports: bool,
    /// True if other objects may be ignored.
    pub(super) ignored: bool,
}

impl Dirty {
    /// Marks the policies, and all workloads, which they may select.
    fn mark_ambient(&mut self) {
        (self.facts, self.all_pods) = (true, true);
    }
}

/// The objects of the Gateway API that have to be evaluated again.
#[derive(Debug, Default)]
pub(super) struct DirtyGatewayApi {
    /// True if the Gateways and all routes have to be evaluated again.
    pub(super) is_all: bool,
    pub(super) routes: BTreeSet<RouteId>,
    /// The services whose routes have to be evaluated again.
    pub(super) backends: BTreeSet<ObjectKey>,
}

impl DirtyGatewayApi {
    pub(super) fn is_empty(&self) -> bool {
        !self.is_all && self.routes.is_empty() && self.backends.is_empty()
    }
}

impl Tables {
    /// Returns the routes of a kind.
    pub(super) fn routes(&self, kind: RouteKind) -> &Table<ObjectKey, Box<RouteRecord>> {
        match kind {
            RouteKind::Tls => &self.tls_routes,
            RouteKind::Tcp => &self.tcp_routes,
        }
    }

    /// Marks the routes of the Gateway API whose backend a service is.
    fn mark_backend(&mut self, service: &ObjectKey) {
        if self.spec.gateway_api.is_some() {
            self.dirty.gateway_api.backends.insert(service.clone());
        }
    }

    fn put_one<T: Stored>(
        &mut self,
        object: &T,
        meta: &Meta,
        listing: u32,
        reading: &mut Reading<'_>,
    ) -> bool {
        let Some(key) = Key::of(meta, reading.texts) else { return true };
        let Some(record) = object.record(reading) else {
            self.remove_one::<T>(Some(key));
            return true;
        };
        match T::rows(self).put(key, record, listing, T::FACTS.objects_max) {
            Placed::Same => {}
            Placed::Touched(touched) => T::touch(touched, self),
            Placed::NoRoom => return false,
        }
        true
    }

    fn remove_one<T: Stored>(&mut self, key: Option<<T::Rows as Rows>::Key>) {
        if let Some(touched) = key.and_then(|key| T::rows(self).remove(&key)) {
            T::touch(touched, self);
        }
    }

    /// Marks a service whose endpoints have changed, and the gateways if the service is one.
    fn mark_endpoints(&mut self, service: ObjectKey) {
        self.dirty.gateways |= self.services.get(&service).is_some_and(|service| service.entrance.is_some());
        self.dirty.services.insert(service);
    }

    /// Returns the slices of a service.
    pub(super) fn slices_of(&self, service: &ObjectKey) -> impl Iterator<Item = &SliceRecord> {
        let slices = self.slices_of.get(service).into_iter().flatten();
        slices.filter_map(|name| self.slices.get(name))
    }

    /// Returns the host names that the mesh keeps to each cluster.
    pub(super) fn local_hosts(&self) -> &LocalHosts {
        let named = self.mesh_configs.iter().next();
        named.map_or(&self.default_local, |(_, record)| &record.local)
    }

    /// Returns the labels of a namespace; none if it is not known.
    pub(super) fn labels_of(&self, namespace: &Arc<str>) -> &Labels {
        self.namespaces.get(namespace).map_or(&self.no_labels, |found| &found.labels)
    }

    /// Returns the distribution of the traffic of a namespace's services that have none of their own.
    pub(super) fn distribution_of(&self, namespace: &Arc<str>) -> Option<TrafficDistribution> {
        self.namespaces.get(namespace)?.distribution
    }

    /// Returns the network of the cluster.
    pub(super) fn network(&self) -> Network {
        if let Some(network) = &self.spec.network {
            return network.clone();
        }
        let label = self.labels_of(&self.spec.system_namespace).get(NETWORK_LABEL);
        label.map(|text| Network::new(text)).unwrap_or_default()
    }

    /// Returns the number of objects of the kinds that the report on a registry has.
    pub(super) fn counts(&self) -> Vec<(&'static str, usize)> {
        let counts = [
            (Kind::Namespace, self.namespaces.len()),
            (Kind::Service, self.services.len()),
            (Kind::EndpointSlice, self.slices.len()),
            (Kind::Pod, self.pods.len()),
            (Kind::Node, self.nodes.len()),
            (Kind::Gateway, self.gateways.len()),
            (Kind::ServiceExport, self.exports.len()),
        ];
        let of_gateway_api = [
            (Kind::TlsRoute, self.tls_routes.len()),
            (Kind::TcpRoute, self.tcp_routes.len()),
            (Kind::ListenerSet, self.listener_sets.len()),
            (Kind::ReferenceGrant, self.grants.len()),
        ];
        let of_entries = [
            (Kind::ServiceEntry, self.service_entries.len()),
            (Kind::WorkloadEntry, self.workload_entries.len()),
        ];
        let of_entries = of_entries.into_iter().filter(|_| self.spec.service_entries);
        let workloads =
            [(Kind::Deployment, self.deployments.len()), (Kind::StatefulSet, self.stateful_sets.len())];
        let workloads = workloads.into_iter().filter(|_| self.spec.replicas);
        let of_gateway_api = of_gateway_api.into_iter().filter(|_| self.spec.gateway_api.is_some());
        let counts = counts.into_iter().chain(of_gateway_api).chain(of_entries).chain(workloads);
        counts.map(|(kind, count)| (kind.plural(), count)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::IntOrText;

    #[test]
    fn requests_are_those_of_the_api() {
        let pods = Kind::Pod.request("api/v1", Some("shop"), "limit=500");
        assert_eq!(
            pods,
            "/api/v1/namespaces/shop/pods?limit=500&fieldSelector=status.phase%21%3DFailed%2Cstatus.phase%21%3DSucceeded"
        );
        assert_eq!(Kind::Node.request("api/v1", Some("shop"), "watch=1"), "/api/v1/nodes?watch=1");
        for kind in Kind::ALL.iter().copied() {
            let all = kind.request(kind.facts().versions[0], None, "limit=1");
            assert!(all.parse::<http::uri::PathAndQuery>().is_ok(), "{all}");
        }
    }

    #[test]
    fn nulls_absent_and_unknown_fields_are_taken() {
        let nulls = r#"{"kind":"EndpointSlice","metadata":null,"addressType":null,"ports":null,"endpoints":null,"x":{"y":[1]}}"#;
        let slice: EndpointSlice = serde_json::from_str(nulls).expect("legal");
        assert!(slice.endpoints.is_empty() && slice.metadata.name.is_empty());
        let inner = r#"{"endpoints":[{"addresses":["10.0.0.1"],"conditions":null,"targetRef":null,"nodeName":null}]}"#;
        let slice: EndpointSlice = serde_json::from_str(inner).expect("legal");
        assert_eq!(slice.endpoints[0].conditions.ready, None);
        for empty in ["{}", r#"{"spec":{"ports":[{}]}}"#, r#"{"spec":null,"status":{"loadBalancer":null}}"#] {
            let _: Service = serde_json::from_str(empty).expect("legal");
        }
        let named = r#"{"spec":{"type":"NodePort","clusterIPs":["None"],"externalIPs":["192.0.2.1"],"ports":[{"targetPort":"web","port":80},{"targetPort":8080}]}}"#;
        let service: Service = serde_json::from_str(named).expect("legal");
        assert_eq!((service.spec.kind.as_str(), service.spec.cluster_ips[0].as_str()), ("NodePort", "None"));
        assert_eq!(service.spec.external_ips, ["192.0.2.1"]);
        assert!(matches!(service.spec.ports[0].target_port, IntOrText::Text(_)));
        assert!(matches!(service.spec.ports[1].target_port, IntOrText::Number(8080)));
        assert!(serde_json::from_str::<Pod>(r#"{"status":{"podIPs":[{"ip":7}]}}"#).is_err(), "a wrong type");
        let pod: Pod = serde_json::from_str(r#"{"status":{"podIPs":[{"ip":"10.0.0.1"}]}}"#).expect("legal");
        assert_eq!(pod.status.pod_ips[0].ip, "10.0.0.1");
    }

    #[test]
    fn a_changed_object_marks_what_depends_on_it() {
        let spec = Arc::new(KubernetesSpec::plain());
        let trust_domain = spec.trust_domain.clone();
        let mut tables = Tables::new(spec.clone());
        let mut texts = Interner::default();
        let marked = |tables: &mut Tables| {
            let Dirty { services, is_all, gateways, .. } = std::mem::take(&mut tables.dirty);
            (services.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "), is_all, gateways)
        };
        marked(&mut tables);
        let uid = "0123456789abcdef0123456789abcdef";
        let slice = format!(
            r#""metadata":{{"name":"a-1","namespace":"n","labels":{{"kubernetes.io/service-name":"a"}}}},"addressType":"IPv4",
               "endpoints":[{{"addresses":["10.0.0.1"],"targetRef":{{"kind":"Pod","uid":"{uid}"}}}}]"#
        );
        let pod = format!(
            r#""metadata":{{"name":"p","namespace":"n","uid":"{uid}"}},"spec":{{"nodeName":"node"}}"#
        );
        let object = |rest: &str| format!(r#""metadata":{{"name":"a","namespace":"n"}},{rest}"#);
        let cluster = |name: &str| format!(r#""metadata":{{"name":"{name}"}}"#);
        for (kind, text, expected) in [
            (Kind::Service, object(r#""spec":{}"#), ("n/a", false, false)),
            (Kind::EndpointSlice, slice.clone(), ("n/a", false, false)),
            (Kind::EndpointSlice, slice, ("", false, false)),
            (Kind::Pod, pod.clone(), ("n/a", false, false)),
            (Kind::Pod, pod, ("", false, false)),
            (Kind::Node, cluster("node"), ("n/a", false, true)),
            (Kind::Node, cluster("other"), ("", false, true)),
            (Kind::ServiceExport, object(r#""status":{}"#), ("n/a", false, false)),
            (Kind::ServiceImport, object(r#""spec":{"ips":["10.1.0.1"]}"#), ("n/a", false, false)),
            (Kind::Namespace, cluster("n"), ("n/a", false, false)),
            (Kind::Namespace, cluster("istio-system"), ("", true, false)),
            (Kind::DestinationRule, object(r#""spec":{"host":"a"}"#), ("n/a", false, false)),
            (
                Kind::DestinationRule,
                object(r#""spec":{"host":"*.n.svc.cluster.local"}"#),
                ("n/a", false, false),
            ),
            (Kind::Gateway, object(r#""spec":{}"#), ("", false, true)),
            (Kind::Secret, object(r#""data":{}"#), ("", false, false)),
        ] {
            let object = kind.read(&format!("{{{text}}}")).expect("legal");
            let mut reading = Reading { trust_domain: &trust_domain, spec: &spec, texts: &mut texts };
            assert!(tables.put(&object, 1, &mut reading));
            let (services, is_all, gateways) = marked(&mut tables);
            assert_eq!((&*services, is_all, gateways), expected, "{text}");
        }
        let mut complete = |kind, namespace| {
            tables.complete(kind, 2, namespace);
            (marked(&mut tables).0, tables.pods.len())
        };
        assert_eq!(complete(Kind::Pod, None), (String::new(), 0));
        assert_eq!(complete(Kind::EndpointSlice, Some("other")), (String::new(), 0));
        assert_eq!(complete(Kind::EndpointSlice, Some("n")), ("n/a".to_owned(), 0));
        assert_eq!(complete(Kind::Service, None).0, "n/a");
        assert_eq!(
            tables.counts()[..4],
            [("namespaces", 2), ("services", 0), ("endpointslices", 0), ("pods", 0)]
        );
    }
}
