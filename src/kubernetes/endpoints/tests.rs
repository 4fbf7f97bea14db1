//! Endpoints of a cluster whose objects are given as an API server sends them.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::index::Index;
use super::super::kinds::Kind;
use super::super::objects::Bare;
use super::super::watch::{Event, What};
use isthmus_aggregator::spec::kubernetes::KubernetesSpec;
use isthmus_model::endpoint::Health;
use isthmus_model::place::{ClusterId, Network};
use isthmus_model::service::Service;
use isthmus_registry::change::{Change, Item, Key, Mark};

/// The index of a cluster, and the services and marks that it has sent.
pub(crate) struct Cluster {
    pub(crate) index: Index,
    pub(crate) services: BTreeMap<String, Arc<Service>>,
    pub(crate) marks: BTreeMap<String, Mark>,
}

impl Cluster {
    /// Makes a cluster on the network `east` without objects, all of whose kinds were listed.
    pub(crate) fn new(spec: KubernetesSpec) -> Self {
        let spec = KubernetesSpec { network: Some(Network::new("east")), ..spec };
        let domain = spec.trust_domain.clone();
        let watches = Kind::watched(&spec);
        let index = Index::new(Arc::new(spec), ClusterId::new("c"), domain, watches);
        let mut cluster = Self { index, services: BTreeMap::new(), marks: BTreeMap::new() };
        for watch in 0..cluster.index.watches.all.len() {
            cluster.apply(watch, What::Begin);
            cluster.apply(watch, What::Complete);
        }
        cluster
    }

    fn apply(&mut self, watch: usize, what: What) {
        let kind = self.index.watches.all[watch].kind;
        self.index.apply(Event { watch, kind, what });
    }

    fn watch_of(&self, kind: Kind) -> usize {
        self.index.watches.all.iter().position(|watch| watch.kind == kind).expect("watched")
    }

    /// Creates or replaces an object, a JSON text.
    pub(crate) fn put(&mut self, kind: Kind, object: &str) {
        let object = kind.read(object).unwrap_or_else(|error| panic!("{error}: {object}"));
        self.apply(self.watch_of(kind), What::Put(object));
    }

    /// Deletes an object, a JSON text.
    pub(crate) fn delete(&mut self, kind: Kind, object: &str) {
        let Bare { metadata } = serde_json::from_str(object).expect("legal");
        self.apply(self.watch_of(kind), What::Gone(metadata));
    }

    /// Takes over the changes; returns the names of the services that were sent or removed.
    pub(crate) fn renew(&mut self) -> Vec<String> {
        let mut touched = Vec::new();
        for change in self.index.changes() {
            match change {
                Change::Put(Item::Service(service)) => {
                    touched.push(service.key.to_string());
                    self.services.insert(service.key.to_string(), service);
                }
                Change::Put(Item::Mark(mark)) => drop(self.marks.insert(mark_name(&mark.key), mark)),
                Change::Remove(Key::Service(key)) => {
                    touched.push(key.to_string());
                    self.services.remove(&key.to_string());
                }
                Change::Remove(Key::Mark(key)) => drop(self.marks.remove(&mark_name(&key))),
                _ => {}
            }
        }
        touched
    }

    /// Returns the endpoints of a service, a line each: address, ports, health if it is not healthy.
    pub(crate) fn endpoints(&mut self, service: &str) -> Vec<String> {
        self.renew();
        let Some(service) = self.services.get(service) else { return vec!["no service".to_owned()] };
        let of = |endpoint: &isthmus_model::endpoint::Endpoint| {
            let own = service.ports.iter().filter_map(|port| endpoint.template.port_for(port));
            let own: Vec<_> = own.map(|port| port.to_string()).collect();
            let health = match endpoint.health {
                Health::Healthy => "",
                Health::Unhealthy => " unhealthy",
                Health::Draining => " draining",
            };
            format!("{}:{}{health}", endpoint.host, own.join("+"))
        };
        service.endpoints.iter().map(of).collect()
    }
}

fn mark_name(key: &isthmus_registry::change::MarkKey) -> String {
    format!("{} {}", key.service, key.object)
}

/// Returns a slice of the service `shop/web` with this name, port and address.
fn slice(name: &str, port: &str, endpoint: &str) -> String {
    format!(
        r#"{{"metadata":{{"namespace":"shop","name":"{name}","labels":{{"kubernetes.io/service-name":"web"}}}},
            "addressType":"IPv4","ports":[{port}],"endpoints":[{endpoint}]}}"#
    )
}

#[test]
fn two_numbers_of_one_port_at_one_address_are_two_endpoints() {
    let at = |address: &str| format!(r#"{{"addresses":["{address}"]}}"#);
    let port = |number: u16| format!(r#"{{"name":"https","port":{number}}}"#);
    let slices = [
        slice("a", &port(8080), &at("10.12.1.3")),
        slice("b", &port(9090), &at("10.12.1.3")),
        slice("c", &port(9090), &at("10.12.1.3")),
        slice("d", r#"{"name":"admin","port":7000}"#, &at("10.12.1.3")),
    ];
    let service = r#"{"metadata":{"namespace":"shop","name":"web"},
        "spec":{"ports":[{"name":"https","port":443},{"name":"admin","port":9000}]}}"#;
    let made = |order: &[usize]| {
        let mut cluster = Cluster::new(KubernetesSpec { manual_endpoints: true, ..KubernetesSpec::plain() });
        cluster.put(Kind::Service, service);
        order.iter().for_each(|at| cluster.put(Kind::EndpointSlice, &slices[*at]));
        cluster.endpoints("shop/web.shop.svc.cluster.local")
    };
    let both = ["10.12.1.3:9090", "10.12.1.3:8080+7000"];
    assert_eq!(made(&[0, 1, 2, 3]), both);
    assert_eq!(made(&[3, 2, 1, 0]), both);
    assert_eq!(made(&[2, 1]), ["10.12.1.3:9090"], "the same number twice");
}

#[test]
fn a_pod_whose_port_moves_is_at_both_numbers_while_slices_list_both() {
    let mut cluster = Cluster::new(KubernetesSpec::plain());
    let uid = "0123456789abcdef0123456789abcdef";
    cluster.put(
        Kind::Service,
        r#"{"metadata":{"namespace":"shop","name":"web"},"spec":{"ports":[{"name":"https","port":443}]}}"#,
    );
    let pod = format!(
        r#"{{"metadata":{{"namespace":"shop","name":"p","uid":"{uid}"}},"status":{{"podIPs":[{{"ip":"10.0.0.1"}},{{"ip":"2001:db8::1"}}]}}}}"#
    );
    cluster.put(Kind::Pod, &pod);
    let at = |address: &str| {
        format!(r#"{{"addresses":["{address}"],"targetRef":{{"kind":"Pod","uid":"{uid}"}}}}"#)
    };
    let port = |number: u16| format!(r#"{{"name":"https","port":{number}}}"#);
    let six = slice("six", &port(8443), &at("2001:db8::1")).replace("IPv4", "IPv6");
    cluster.put(Kind::EndpointSlice, &slice("four", &port(8443), &at("10.0.0.1")));
    cluster.put(Kind::EndpointSlice, &six);
    let name = "shop/web.shop.svc.cluster.local";
    assert_eq!(cluster.endpoints(name), ["10.0.0.1,2001:db8::1:8443"], "both families are one endpoint");
    let new = slice("new", &port(9443), &at("10.0.0.1"));
    cluster.put(Kind::EndpointSlice, &new);
    assert_eq!(cluster.endpoints(name), ["10.0.0.1:9443", "10.0.0.1,2001:db8::1:8443"]);
    cluster.delete(Kind::EndpointSlice, &new);
    assert_eq!(cluster.endpoints(name), ["10.0.0.1,2001:db8::1:8443"]);
}
