//! The index of one cluster: the objects of its watches, and the registry items made from them. A changed object marks the
//! services that depend on it, and only these are made again.

mod ambient;
mod conditions;
mod entries;
mod imports;
pub(super) mod items;
mod unreadable;
pub(super) mod watches;
mod waypoints;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use self::ambient::SentAmbient;
use self::items::{ServiceItems, annotation};
use self::unreadable::Unreadable;
use self::watches::{WatchState, Watches};
use super::exports::Exports;
use super::gateway_api::writer::Due;
use super::gateway_api::{GatewayApi, Known};
use super::gateways;
use super::interner::Interner;
use super::kinds::service::{ServiceClass, Unmarkable};
use super::kinds::{Kind, Object, Reading, Tables};
use super::table::{ObjectKey, Rows as _};
use super::watch::{Event, WatchId, What};
use isthmus_aggregator::spec::kubernetes::KubernetesSpec;
use isthmus_model::identity::TrustDomain;
use isthmus_model::place::ClusterId;
use isthmus_model::service::Withheld;
use isthmus_registry::change::{Change, Ignored, Item, Key, RegistryGateway};

/// The objects of a cluster, and the items of the registry that were made from them.
pub(super) struct Index {
    cluster: ClusterId,
    trust_domain: TrustDomain,
    texts: Interner,
    pub(super) tables: Tables,
    pub(super) watches: Watches,
    unreadable: Unreadable,
    /// True if the next changes are a full listing.
    is_listing: bool,
    /// The present and the wanted conditions of each ServiceExport; empty if this registry does not write conditions.
    wanted: Exports,
    wanted_is_new: bool,
    /// The keys of the items that were sent for each service.
    sent: BTreeMap<ObjectKey, Vec<Key>>,
    /// The number of endpoints that are withheld from each service, by reason.
    withheld: BTreeMap<ObjectKey, BTreeMap<Withheld, u32>>,
    /// The reasons why waypoints are not used as their objects ask for, by Service.
    waypoints_ignored: BTreeMap<ObjectKey, String>,
    /// The objects that have no effect.
    pub(super) ignored: Vec<Ignored>,
    /// True if some waypoints were not known after the last event of their watch.
    were_waypoints_unknown: bool,
    sent_gateways: BTreeMap<Key, RegistryGateway>,
    /// Problems of gateways, a line each.
    pub(super) gateway_notes: Vec<String>,
    /// The Services whose annotation with a drain was reported as flawed.
    flawed_drains: BTreeSet<ObjectKey>,
    /// The items for ztunnels that were sent.
    ambient: SentAmbient,
    gateway_api: GatewayApi,
    /// The extent to which Gateways were known after the last event.
    known_gateways: Known,
}

impl Index {
    pub(super) fn new(
        spec: Arc<KubernetesSpec>,
        cluster: ClusterId,
        trust_domain: TrustDomain,
        watches: Vec<(Kind, Option<Arc<str>>)>,
    ) -> Self {
        Self {
            cluster,
            trust_domain,
            texts: Interner::default(),
            watches: Watches::new(watches, &spec),
            tables: Tables::new(spec),
            unreadable: Unreadable::default(),
            is_listing: false,
            wanted: Exports::new(),
            wanted_is_new: false,
            sent: BTreeMap::new(),
            withheld: BTreeMap::new(),
            waypoints_ignored: BTreeMap::new(),
            ignored: Vec::new(),
            were_waypoints_unknown: false,
            sent_gateways: BTreeMap::new(),
            gateway_notes: Vec::new(),
            flawed_drains: BTreeSet::new(),
            ambient: SentAmbient::default(),
            gateway_api: GatewayApi::default(),
            known_gateways: Known::Some,
        }
    }

    /// Returns an index without objects, of the same cluster and watches.
    pub(super) fn placeholder(&self) -> Self {
        let watches = self.watches.all.iter().map(|watch| (watch.kind, watch.namespace.clone())).collect();
        Self::new(self.tables.spec.clone(), self.cluster.clone(), self.trust_domain.clone(), watches)
    }

    /// Applies an event of a watch.
    pub(super) fn apply(&mut self, event: Event) {
        let Event { watch, kind, what } = event;
        match what {
            What::Begin => self.watches.begin(watch),
            What::Put(object) => self.put(watch, kind, &object),
            What::Gone(meta) => {
                self.unreadable.remove(kind, &meta);
                self.tables.remove(kind, &meta, &mut self.texts);
            }
            What::Broken(meta, why) => {
                let listing = self.watches.all[watch].listing;
                self.tables.keep(kind, &meta, listing, &mut self.texts);
                self.unreadable.add(kind, &meta, why, (watch, listing));
            }
            What::Complete => {
                self.complete(watch);
                self.watches.complete(watch);
            }
            What::Absent(why) => {
                if kind.is_of_gateway_api() && self.watches.all[watch].absent.is_none() {
                    tracing::info!(
                        cluster = self.cluster.as_str(),
                        kind = kind.plural(),
                        %why,
                        "the cluster does not have this kind of the Gateway API, so it is not read"
                    );
                }
                self.watches.begin(watch);
                self.complete(watch);
                self.watches.absent(watch, why);
            }
            What::Failing(why, status) => self.watches.all[watch].failing = Some((why, status)),
            What::Resumed => self.watches.all[watch].failing = None,
        }
        let known = self.watches.known_gateways();
        if std::mem::replace(&mut self.known_gateways, known) != known {
            self.tables.dirty.gateway_api.is_all |= self.tables.spec.gateway_api.is_some();
        }
        // The policies are known only if their watches have listed all of them.
        self.tables.dirty.facts |= matches!(kind, Kind::AuthorizationPolicy | Kind::PeerAuthentication);
        if kind == Kind::Waypoint {
            let are_unknown = self.waypoints_unknown().is_some();
            self.tables.dirty.is_all |= are_unknown != self.were_waypoints_unknown;
            self.were_waypoints_unknown = are_unknown;
        }
        self.tables.dirty.imports |= matches!(
            kind,
            Kind::ServiceImport | Kind::ImportedSlice | Kind::DerivedService | Kind::Namespace
        );
    }

    fn put(&mut self, watch: WatchId, kind: Kind, object: &Object) {
        self.unreadable.remove(kind, object.meta());
        let spec = self.tables.spec.clone();
        let mut reading = Reading { spec: &spec, trust_domain: &self.trust_domain, texts: &mut self.texts };
        if !self.tables.put(object, self.watches.all[watch].listing, &mut reading) {
            self.watches.leave_out(watch);
        }
    }

    /// Removes the objects of the watch that its listing has not named.
    fn complete(&mut self, watch: WatchId) {
        let state = &self.watches.all[watch];
        self.tables.complete(state.kind, state.listing, state.namespace.as_deref());
        self.unreadable.complete(watch, state.listing);
    }

    /// Returns true if there is something to send.
    pub(super) fn is_dirty(&self) -> bool {
        let dirty = &self.tables.dirty;
        let ambient = self.tables.spec.ambient && (dirty.facts || dirty.all_pods || !dirty.pods.is_empty());
        dirty.is_all
            || dirty.gateways
            || ambient
            || (dirty.imports && self.tables.spec.import_writer.is_some())
            || !dirty.services.is_empty()
            || !dirty.gateway_api.is_empty()
            || dirty.ignored
            || self.unreadable.is_dirty()
    }

    /// Returns the number of services whose items are made again for the next changes.
    pub(super) fn work(&self) -> usize {
        let dirty = &self.tables.dirty;
        let services = if dirty.is_all { self.tables.services.len() } else { dirty.services.len() };
        let all_pods = dirty.all_pods && self.tables.spec.ambient;
        let pods = if all_pods { self.tables.pods.len() } else { dirty.pods.len() };
        let of_gateway_api = &dirty.gateway_api;
        let routes = match of_gateway_api.is_all {
            true => self.tables.tls_routes.len() + self.tables.tcp_routes.len(),
            false => of_gateway_api.routes.len(),
        };
        services + pods + routes
    }

    /// Makes the next changes a full listing.
    pub(super) fn begin_listing(&mut self) {
        self.sent.clear();
        self.sent_gateways.clear();
        self.ambient = SentAmbient::default();
        (self.tables.dirty.facts, self.tables.dirty.all_pods) = (true, true);
        self.tables.dirty.is_all = true;
        self.tables.dirty.imports = true;
        self.tables.dirty.gateways = true;
        self.tables.dirty.gateway_api.is_all = self.tables.spec.gateway_api.is_some();
        self.gateway_api.begin_listing();
        self.unreadable.begin_listing();
        self.is_listing = true;
    }

    /// Returns the changes since the last call.
    pub(super) fn changes(&mut self) -> Vec<Change> {
        let mut changes = Vec::new();
        let is_listing = std::mem::take(&mut self.is_listing);
        if is_listing {
            changes.push(Change::Begin);
        }
        let mut dirty = std::mem::take(&mut self.tables.dirty.services);
        if std::mem::take(&mut self.tables.dirty.is_all) {
            self.tables.dirty.ignored = true;
            dirty.extend(self.tables.services.iter().map(|(key, _)| key.clone()));
            dirty.extend(self.tables.claims.hosts().map(|host| self.tables.unit_of(host)));
            dirty.extend(self.sent.keys().cloned());
        }
        for key in dirty {
            self.renew(&key, &mut changes);
        }
        if std::mem::take(&mut self.tables.dirty.gateways) {
            self.renew_gateways(&mut changes);
        }
        self.renew_ambient(&mut changes);
        let of_gateway_api = std::mem::take(&mut self.tables.dirty.gateway_api);
        if let Some(spec) = self.tables.spec.gateway_api.clone().filter(|_| !of_gateway_api.is_empty()) {
            let known = self.watches.known_gateways();
            self.gateway_api.renew(&spec, of_gateway_api, (&self.tables, known), &mut changes);
        }
        changes.extend(self.unreadable.changes());
        self.renew_ignored();
        if is_listing {
            changes.push(Change::Complete);
        }
        self.texts.sweep();
        changes
    }

    /// Makes the items of a service again, and adds the changes.
    fn renew(&mut self, key: &ObjectKey, changes: &mut Vec<Change>) {
        self.renew_conditions(key);
        let ServiceItems { items, kept, mistake } = self.items(key);
        let keys: Vec<Key> = items.iter().map(Item::key).chain(kept.iter().cloned()).collect();
        if let Some(before) = self.sent.get(key) {
            let gone = before.iter().filter(|before| !keys.contains(before));
            changes.extend(gone.cloned().map(Change::Remove));
        }
        changes.extend(items.into_iter().map(Change::Put));
        changes.extend(kept.into_iter().map(Change::Keep));
        let is_flawed = mistake.is_some();
        if is_flawed || self.flawed_drains.contains(key) {
            let object = annotation(key).into();
            changes.push(Change::Flawed { object, problems: mistake.into_iter().collect() });
        }
        match is_flawed {
            true => drop(self.flawed_drains.insert(key.clone())),
            false => drop(self.flawed_drains.remove(key)),
        }
        match keys.is_empty() {
            true => drop(self.sent.remove(key)),
            false => drop(self.sent.insert(key.clone(), keys)),
        }
    }

    fn renew_gateways(&mut self, changes: &mut Vec<Change>) {
        let (found, notes) = gateways::find(&self.tables, &self.cluster);
        self.gateway_notes = notes;
        let found: BTreeMap<Key, RegistryGateway> =
            found.into_iter().map(|gateway| (Key::Gateway(gateway.key.clone()), gateway)).collect();
        for key in self.sent_gateways.keys().filter(|key| !found.contains_key(key)) {
            changes.push(Change::Remove(key.clone()));
        }
        for (key, gateway) in &found {
            if self.sent_gateways.get(key) != Some(gateway) {
                changes.push(Change::Put(Item::Gateway(gateway.clone())));
            }
        }
        self.sent_gateways = found;
    }

    /// Returns the objects of the Gateway API whose status may have to be written, if they have changed since the last call.
    pub(super) fn new_due(&mut self) -> Option<Due> {
        self.gateway_api.new_due()
    }

    /// Returns a line for each kind that the settings require and the cluster lacks.
    pub(super) fn lacking_kinds(&self) -> BTreeSet<String> {
        let spec = &self.tables.spec;
        let required = self.watches.all.iter().filter(|watch| (watch.kind.facts().is_required)(spec));
        let line = |watch: &WatchState| Some(format!("{}: {}", watch.kind.plural(), watch.absent.as_ref()?));
        required.filter_map(line).collect()
    }

    /// Returns what operators have to write so that Gateways have what they request, a line each.
    pub(super) fn notes_of_gateway_api(&self) -> Vec<String> {
        self.gateway_api.notes()
    }

    /// Returns the number of objects and endpoints that are left out, by reason.
    pub(super) fn left_out(&self) -> Vec<(&'static str, usize)> {
        let (mut external, mut hidden, mut other_ports) = (0, 0, 0);
        for (_, service) in self.tables.services.iter() {
            external += usize::from(service.class == ServiceClass::ExternalName);
            hidden += usize::from(matches!(service.unmarkable, Some(Unmarkable::Hidden(_))));
            other_ports += service.other_ports();
        }
        let mut withheld: BTreeMap<Withheld, usize> = BTreeMap::new();
        for (why, count) in self.withheld.values().flatten() {
            *withheld.entry(*why).or_default() += *count as usize;
        }
        let mut all =
            vec![("external name", external), ("hidden by exportTo", hidden), ("port not TCP", other_ports)];
        all.extend(Withheld::ALL.iter().map(|why| (why.text(), withheld.get(why).copied().unwrap_or(0))));
        all.push(("too many", self.watches.all.iter().map(|watch| watch.too_many).sum()));
        all.retain(|(_, count)| *count > 0);
        all
    }
}

#[cfg(test)]
mod tests {
    use http::StatusCode;

    use super::watches::Failures;
    use super::*;
    use crate::testing::spec_of;
    use isthmus_aggregator::spec::kubernetes::{GatewayApiSpec, Knows, LeaseSpec};
    use isthmus_model::place::Network;
    use isthmus_registry::change::MarkKind;

    /// Returns an index whose watches of services and namespaces are in these states.
    fn index(services: What, namespaces: What) -> Index {
        index_of(
            KubernetesSpec { network: Some(Network::new("net-east")), ..KubernetesSpec::plain() },
            services,
            namespaces,
        )
    }

    fn index_of(spec: KubernetesSpec, services: What, namespaces: What) -> Index {
        let domain = spec.trust_domain.clone();
        let kinds = [Kind::Service, Kind::Namespace];
        let watches = kinds.map(|kind| (kind, None)).to_vec();
        let mut index = Index::new(Arc::new(spec), ClusterId::new("east"), domain, watches);
        for (watch, what) in [services, namespaces].into_iter().enumerate() {
            index.apply(Event { watch, kind: kinds[watch], what });
        }
        index
    }

    fn failing(status: StatusCode) -> What {
        What::Failing("no".into(), Some(status))
    }

    #[test]
    fn a_kind_that_is_not_needed_is_awaited_unless_it_is_forbidden_or_absent() {
        let is_ready = |namespaces, failures| index(What::Complete, namespaces).watches.is_ready(failures);
        for passing in [failing(StatusCode::TOO_MANY_REQUESTS), What::Failing("no route".into(), None)] {
            assert!(!is_ready(passing, Failures::Await));
        }
        assert!(is_ready(failing(StatusCode::TOO_MANY_REQUESTS), Failures::Accept));
        assert!(is_ready(failing(StatusCode::FORBIDDEN), Failures::Await));
        assert!(is_ready(What::Absent("none".into()), Failures::Await));
        let needed = index(failing(StatusCode::FORBIDDEN), What::Complete);
        assert!(!needed.watches.is_ready(Failures::Accept), "services are needed");
        let holding = |status| index(What::Complete, failing(status)).watches.holding();
        assert_eq!(holding(StatusCode::TOO_MANY_REQUESTS), ["namespaces: no"]);
        assert_eq!(holding(StatusCode::FORBIDDEN), Vec::<String>::new());
    }

    #[test]
    fn a_destination_rule_touches_the_services_of_its_host() {
        let spec = KubernetesSpec { destination_rules: true, ..KubernetesSpec::plain() };
        let domain = spec.trust_domain.clone();
        let kinds = [Kind::Service, Kind::DestinationRule];
        let watches = kinds.map(|kind| (kind, None)).to_vec();
        let mut index = Index::new(Arc::new(spec), ClusterId::new("east"), domain, watches);
        let put = |index: &mut Index, watch: usize, name: &str, spec: &str| {
            let object =
                format!(r#"{{"metadata":{{"namespace":"shop","name":"{name}"}},"spec":{{{spec}}}}}"#);
            let object = kinds[watch].read(&object).expect("legal");
            index.apply(Event { watch, kind: kinds[watch], what: What::Put(object) });
        };
        for service in ["a", "b", "c"] {
            put(&mut index, 0, service, r#""ports":[{"port":80}]"#);
        }
        let _ = index.changes();
        for (host, touched) in [
            ("a", 1),
            ("a.shop.svc.cluster.local", 1),
            ("b.shop.svc.cluster.local", 2),
            ("b.elsewhere.svc.cluster.local", 1),
            ("example.com", 0),
            ("*.shop.svc.cluster.local", 3),
            ("c", 3),
            ("*b.shop.svc.cluster.local", 2),
            ("*.elsewhere.svc.cluster.local", 1),
            ("*", 3),
        ] {
            let subset = format!(r#""subsets":[{{"name":"v","labels":{{"for":"{touched}"}}}}]"#);
            put(&mut index, 1, "rule", &format!(r#""host":"{host}",{subset}"#));
            assert_eq!(index.work(), touched, "{host} and the host before");
            let _ = index.changes();
        }
    }

    #[test]
    fn services_that_the_mesh_keeps_to_their_cluster_are_marked_and_their_names_of_the_set_are_not() {
        let spec = KubernetesSpec { mesh_config: true, ..KubernetesSpec::plain() };
        let domain = spec.trust_domain.clone();
        let kinds = [Kind::Service, Kind::ServiceExport, Kind::ConfigMap];
        let watches = kinds.map(|kind| (kind, None)).to_vec();
        let mut index = Index::new(Arc::new(spec), ClusterId::new("east"), domain, watches);
        let put = |index: &mut Index, watch: usize, metadata: &str, more: &str| {
            let object = format!(r#"{{"metadata":{{{metadata}}},{more}}}"#);
            let object = kinds[watch].read(&object).expect("legal");
            index.apply(Event { watch, kind: kinds[watch], what: What::Put(object) });
        };
        let ports = r#""spec":{"ports":[{"port":80}]}"#;
        for namespace in ["kube-system", "shop"] {
            let metadata = format!(r#""namespace":"{namespace}","name":"web""#);
            put(&mut index, 0, &metadata, ports);
            put(&mut index, 1, &metadata, r#""spec":{}"#);
        }
        let marked = |index: &mut Index| {
            let changes = index.changes();
            let mut marks: Vec<String> = changes
                .iter()
                .filter_map(|change| match change {
                    Change::Put(Item::Mark(mark)) if mark.kind == MarkKind::ClusterLocal => {
                        Some(format!("{} {}", mark.key.service.hostname, mark.key.object))
                    }
                    Change::Remove(Key::Mark(key)) => {
                        Some(format!("not {} {}", key.service.hostname, key.object))
                    }
                    _ => None,
                })
                .collect();
            marks.sort();
            marks
        };
        let (system, shop) = ("web.kube-system.svc.cluster.local", "web.shop.svc.cluster.local");
        let of_system = format!("{system} *.kube-system.svc.cluster.local");
        assert_eq!(marked(&mut index), std::slice::from_ref(&of_system));
        let mesh = format!("serviceSettings: [{{settings: {{clusterLocal: true}}, hosts: [{shop}]}}]");
        let istio = r#""namespace":"istio-system","name":"istio""#;
        put(&mut index, 2, istio, &format!(r#""data":{{"mesh":"{mesh}"}}"#));
        assert_eq!(marked(&mut index), [of_system.clone(), format!("{shop} {shop}")]);
        put(&mut index, 2, istio, r#""data":{"mesh":"trustDomain: cluster.local"}"#);
        assert_eq!(marked(&mut index), [format!("not {shop} {shop}"), of_system]);
        put(&mut index, 2, istio, r#""data":{"mesh":"trustDomain: cluster.local\n"}"#);
        assert_eq!(index.work(), 0, "nothing that matters has changed");
    }

    #[test]
    fn the_port_of_a_service_may_have_no_name_and_a_target_that_pods_name() {
        let spec = KubernetesSpec { manual_endpoints: true, ..KubernetesSpec::plain() };
        let domain = spec.trust_domain.clone();
        let kinds = [Kind::Service, Kind::EndpointSlice];
        let watches = kinds.map(|kind| (kind, None)).to_vec();
        let mut index = Index::new(Arc::new(spec), ClusterId::new("east"), domain, watches);
        let service = r#"{"metadata":{"namespace":"shop","name":"web"},
            "spec":{"ports":[{"port":80,"targetPort":"http"}]}}"#;
        let slice = r#"{"metadata":{"namespace":"shop","name":"web-1","labels":{"kubernetes.io/service-name":"web"}},
            "addressType":"IPv4","ports":[{"port":8080}],"endpoints":[{"addresses":["10.0.0.1"]}]}"#;
        for (watch, object) in [service, slice].into_iter().enumerate() {
            let object = kinds[watch].read(object).expect("legal");
            index.apply(Event { watch, kind: kinds[watch], what: What::Put(object) });
        }
        let changes = index.changes();
        let mut services = changes.iter().filter_map(|change| match change {
            Change::Put(Item::Service(service)) => Some(service),
            _ => None,
        });
        let service = services.next().expect("a service");
        assert_eq!(service.endpoints[0].template.port_for(&service.ports[0]), Some(8080));
    }

    #[test]
    fn namespaces_are_awaited_where_one_of_them_names_the_network() {
        let forbidden = || index_of(KubernetesSpec::plain(), What::Complete, failing(StatusCode::FORBIDDEN));
        assert!(!forbidden().watches.is_ready(Failures::Accept));
        assert_eq!(forbidden().watches.holding(), ["namespaces: no"]);
        assert!(
            index_of(KubernetesSpec::plain(), What::Complete, What::Complete)
                .watches
                .is_ready(Failures::Await)
        );
    }

    #[test]
    fn policies_that_no_ztunnel_gets_may_be_unknown() {
        let unknown = |ambient| {
            let spec = KubernetesSpec { ambient, destination_rules: true, ..KubernetesSpec::plain() };
            let (domain, kind) = (spec.trust_domain.clone(), Kind::PeerAuthentication);
            let mut index = Index::new(Arc::new(spec), ClusterId::new("east"), domain, vec![(kind, None)]);
            index.apply(Event { watch: 0, kind, what: failing(StatusCode::TOO_MANY_REQUESTS) });
            index.policies_unknown()
        };
        assert_eq!((unknown(true).is_some(), unknown(false)), (true, None));
    }

    #[test]
    fn new_credentials_must_have_read_what_the_present_ones_have() {
        let lacking = |new: Index, present: &Index| {
            new.watches.lacking(&present.watches).map(|watch| watch.kind.plural()).collect::<Vec<_>>()
        };
        let without = || index(What::Complete, failing(StatusCode::FORBIDDEN));
        let whole = index(What::Complete, What::Complete);
        assert_eq!(lacking(without(), &whole), ["namespaces"]);
        assert_eq!(lacking(index(What::Complete, What::Absent("none".into())), &whole), Vec::<&str>::new());
        let mut later = index(What::Complete, What::Complete);
        later.apply(Event { watch: 1, kind: Kind::Namespace, what: failing(StatusCode::TOO_MANY_REQUESTS) });
        assert_eq!(lacking(without(), &later), ["namespaces"], "the present ones still have them");
        later.apply(Event { watch: 1, kind: Kind::Namespace, what: failing(StatusCode::FORBIDDEN) });
        assert_eq!(lacking(without(), &later), Vec::<&str>::new(), "a right that the present ones lost");
        let mut lost = index(What::Complete, What::Complete);
        lost.apply(Event { watch: 0, kind: Kind::Service, what: failing(StatusCode::BAD_GATEWAY) });
        assert_eq!(lacking(without(), &lost), Vec::<&str>::new(), "the present ones are of no use");
    }

    #[test]
    fn a_kind_that_the_settings_require_and_the_cluster_lacks_is_named_with_the_versions_that_it_has() {
        let of = |spec: KubernetesSpec| {
            let domain = spec.trust_domain.clone();
            let watches = Kind::watched(&spec);
            let mut index = Index::new(Arc::new(spec), ClusterId::new("east"), domain, watches.clone());
            for (watch, (kind, _)) in watches.into_iter().enumerate() {
                let why = if kind == Kind::TlsRoute { "it has only v1alpha2" } else { "it has none" };
                let what = if kind.facts().is_custom { What::Absent(why.into()) } else { What::Complete };
                index.apply(Event { watch, kind, what });
            }
            index
        };
        let lines = |index: &Index| index.lacking_kinds().into_iter().collect::<Vec<_>>();
        // ServiceExports and Gateway objects of networks are read wherever there are any.
        assert_eq!(lines(&of(KubernetesSpec::plain())), Vec::<String>::new());
        let rules = KubernetesSpec { destination_rules: true, ..KubernetesSpec::plain() };
        assert_eq!(lines(&of(rules)), ["destinationrules: it has none"]);
        let writer = LeaseSpec { namespace: "n".into(), holder: "h".into(), knows: Knows::OwnCluster };
        let marked = KubernetesSpec { export_writer: Some(writer.clone()), ..KubernetesSpec::plain() };
        assert_eq!(lines(&of(marked)), ["serviceexports: it has none"]);
        let api = GatewayApiSpec { writer, ..spec_of("isthmus") };
        let mut index = of(KubernetesSpec { gateway_api: Some(api), ..KubernetesSpec::plain() });
        let without =
            ["gatewayclasses: it has none", "gateways: it has none", "referencegrants: it has none"];
        assert_eq!(lines(&index), [&without[..], &["tlsroutes: it has only v1alpha2"]].concat());
        let routes =
            index.watches.all.iter().position(|watch| watch.kind == Kind::TlsRoute).expect("watched");
        index.apply(Event { watch: routes, kind: Kind::TlsRoute, what: What::Begin });
        index.apply(Event { watch: routes, kind: Kind::TlsRoute, what: What::Complete });
        assert_eq!(lines(&index), without, "the CRD was installed");
    }
}
