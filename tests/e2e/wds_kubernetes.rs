//! The WDS server for a cluster of Kubernetes: reviewed tokens, pods, policies and waypoints.

use std::sync::{Arc, Mutex};

use rustls::ClientConfig;
use serde_json::{Value, json};

use crate::support::eventually;
use crate::support::fake_kube::{FakeKube, Reply};
use crate::support::gateway::Gateway;
use crate::support::kube_world::{Asked, status};
use crate::support::pki::PKI;
use crate::support::wds::{ADDRESS, AUTHORIZATION, Ask, Fields, Told, Who, Ztunnel};

const WEB: &str = "east//Pod/shop/web-1";
const CALLER: &str = "east//Pod/shop/caller";
const STRICT: &str = "istio-system/istio_converted_static_strict";

/// A cluster with a service, three pods and a namespace, and a gateway that serves its ztunnels.
pub(crate) struct World {
    pub(crate) fake: FakeKube,
    /// What the API server answers to a TokenReview.
    review: Arc<Mutex<Value>>,
    pub(crate) gateway: Gateway,
    tls: Arc<ClientConfig>,
}

fn reviewed(account: &str, audience: &str, node: Option<&str>) -> Value {
    let extra =
        node.map(|name| json!({"authentication.kubernetes.io/node-name": [name]})).unwrap_or_default();
    let user = json!({"username": format!("system:serviceaccount:{account}"), "extra": extra});
    json!({"status": {"authenticated": true, "user": user, "audiences": [audience]}})
}

fn is_review(asked: &Asked) -> bool {
    asked.path == "/apis/authentication.k8s.io/v1/tokenreviews"
}

fn pod(name: &str, ip: &str, node: &str, labels: &Value) -> Value {
    let uid = format!("{:0>32}", ip.replace('.', ""));
    json!({
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "shop", "uid": uid, "labels": labels,
            "annotations": {"ambient.istio.io/redirection": "enabled"}},
        "spec": {"serviceAccountName": name.split('-').next(), "nodeName": node},
        "status": {"phase": "Running", "podIPs": [{"ip": ip}]},
    })
}

pub(crate) fn policy(name: &str, spec: &Value) -> Value {
    json!({"kind": "AuthorizationPolicy", "metadata": {"name": name, "namespace": "shop"}, "spec": spec})
}

fn mtls(namespace: &str, spec: &Value) -> Value {
    json!({"kind": "PeerAuthentication", "metadata": {"name": "default", "namespace": namespace,
        "creationTimestamp": "2026-01-01T00:00:00Z"}, "spec": spec})
}

fn namespace(name: &str, labels: &Value) -> Value {
    json!({"kind": "Namespace", "metadata": {"name": name, "labels": labels}})
}

/// A Gateway with an address, which takes what `waypoint_for` names; with "", it has no label for this.
fn waypoint(key: (&str, &str), waypoint_for: &str, allowed: &Value) -> Value {
    let labels =
        if waypoint_for.is_empty() { json!({}) } else { json!({"istio.io/waypoint-for": waypoint_for}) };
    json!({"kind": "Gateway", "metadata": {"namespace": key.0, "name": key.1, "labels": labels},
        "spec": {"gatewayClassName": "istio-waypoint",
            "listeners": [{"name": "mesh", "port": 15008, "protocol": "HBONE", "allowedRoutes": allowed}]},
        "status": {"addresses": [{"type": "IPAddress", "value": "10.96.0.10"}]}})
}

impl World {
    pub(crate) fn start(prepare: impl FnOnce(&FakeKube)) -> Self {
        Self::with(CONFIG, prepare)
    }

    fn with(config: &str, prepare: impl FnOnce(&FakeKube)) -> Self {
        let fake = FakeKube::start();
        fake.change(|world| {
            world.installed.extend(["authorizationpolicies", "peerauthentications", "gateways"])
        });
        fake.put(&namespace("istio-system", &json!({"topology.istio.io/network": "net-east"})));
        fake.put(&namespace("shop", &json!({})));
        fake.put(&json!({"kind": "Node", "metadata": {"name": "node-1",
            "labels": {"topology.kubernetes.io/region": "r", "topology.kubernetes.io/zone": "z"}}}));
        fake.put(&pod("web-1", "10.0.0.5", "node-1", &json!({"app": "web"})));
        fake.put(&pod("caller", "10.0.0.6", "node-1", &json!({"app": "caller"})));
        fake.put(&pod("other", "10.0.0.7", "node-2", &json!({})));
        fake.put(&json!({"kind": "Service", "metadata": {"name": "web", "namespace": "shop"},
            "spec": {"clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9"], "ports": [{"name": "http", "port": 80, "targetPort": 8080}]}}));
        fake.put(&json!({"kind": "EndpointSlice", "metadata": {"name": "web-1", "namespace": "shop",
                "labels": {"kubernetes.io/service-name": "web"}},
            "addressType": "IPv4", "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
            "endpoints": [{"addresses": ["10.0.0.5"], "conditions": {"ready": true},
                "targetRef": {"kind": "Pod", "uid": format!("{:0>32}", "10005")}}]}));
        prepare(&fake);
        let review = Arc::new(Mutex::new(reviewed("istio-system:ztunnel", "istio-ca", None)));
        let answer = review.clone();
        fake.rule(move |asked: &Asked| {
            is_review(asked).then(|| {
                let answer = answer.lock().expect("not poisoned").clone();
                let code = answer["code"].as_u64().map_or(201, |code| u16::try_from(code).expect("a status"));
                Reply::json(code, &answer)
            })
        });
        let folder = tempfile::tempdir().expect("a folder");
        let issued = PKI.issue(&["isthmus.test"], None);
        for (name, text) in [
            ("cert.pem", &issued.certificate_pem),
            ("key.pem", &issued.key_pem),
            ("east.kubeconfig", &fake.kubeconfig()),
        ] {
            std::fs::write(folder.path().join(name), text).expect("written");
        }
        let gateway = Gateway::start_in(folder, config, &[]);
        Self { fake, review, gateway, tls: PKI.client(&["h2"]) }
    }

    fn answers(&self, review: Value) {
        *self.review.lock().expect("not poisoned") = review;
    }

    /// Returns the number of reviews so far.
    fn reviews(&self) -> usize {
        self.fake.seen(is_review).len()
    }

    fn open(&self, who: &Who) -> Ztunnel {
        Ztunnel::open(self.gateway.listener("wds"), &self.tls, who)
    }

    /// Returns a client that wants everything, and its first responses.
    fn everything(&self) -> (Ztunnel, Told, Told) {
        let mut client = self.open(&who());
        client.begin(&[]);
        let (addresses, policies) = client.first();
        (client, addresses, policies)
    }

    #[track_caller]
    fn refused(&self, who: &Who, code: u32, text: &str) {
        let mut client = self.open(who);
        client.begin(&[]);
        let found = client.ended();
        assert!(found.0 == code && found.1.contains(text), "{found:?}");
    }
}

const CONFIG: &str = "listen: \"127.0.0.1:0\"\nnode: {cluster: east, network: net-east}\nexports: [{services: [\"*\"], tls: own}]\n\
    registries: [{kubernetes: {cluster: east, kubeconfig: east.kubeconfig}}]\n\
    xds:\n  bind: \"127.0.0.1:0\"\n  wds:\n    bind: \"127.0.0.1:0\"\n    tls: {certificate: cert.pem, key: key.pem}\n    \
    tokens: {kubernetes: {}}\n    \
    clients: [{identities: ['spiffe://cluster.local/ns/istio-system/sa/ztunnel'], clusters: [east]}]\n";

fn who() -> Who {
    Who { token: "a-jwt".into(), cluster: "east".into(), metadata: vec![("NODE_NAME", "node-1".into())] }
}

#[test]
fn tokens_are_reviewed_by_the_cluster_that_they_claim() {
    let world = World::start(|_| {});
    let with = |token: &str| Who { token: token.into(), ..who() };
    world.everything();
    world.answers(json!({"status": {"authenticated": false, "error": "it has expired"}}));
    world.refused(&with("expired"), 16, "it has expired");
    world.answers(reviewed("istio-system:ztunnel", "another", None));
    world.refused(&with("another"), 16, "it is not for the audience");
    world.refused(&with("expired"), 16, "it has expired");
    assert_eq!(world.reviews(), 3, "a refused token is not reviewed again for a minute");
    world.answers(reviewed("shop:web", "istio-ca", None));
    world.refused(&who(), 7, "spiffe://cluster.local/ns/shop/sa/web may not claim");
    world.answers(reviewed("istio-system:ztunnel", "istio-ca", Some("node-2")));
    world.refused(&who(), 7, "its token is of node");
    world.answers(reviewed("istio-system:ztunnel", "istio-ca", Some("node-1")));
    world.everything();
    world.answers(status(403, "Forbidden", "tokenreviews is forbidden", None));
    world.refused(&who(), 14, "the right to create tokenreviews");
    world.refused(&Who { cluster: "west".into(), ..who() }, 16, "no registry in Kubernetes has the cluster");
}

#[test]
fn two_hundred_ztunnels_that_connect_at_once_are_all_served() {
    let world = World::start(|_| {});
    let begins = std::sync::Barrier::new(200);
    std::thread::scope(|threads| {
        for number in 0..200 {
            let (world, begins) = (&world, &begins);
            threads.spawn(move || {
                let who = Who { token: format!("jwt-{number}"), ..who() };
                begins.wait();
                let mut client = world.open(&who);
                client.begin(&[]);
                client.first();
            });
        }
    });
    assert_eq!(world.reviews(), 200);
}

#[test]
fn pods_are_workloads_of_their_nodes_and_services() {
    let world = World::start(|_| {});
    let (_, addresses, _) = world.everything();
    let service = "shop/web.shop.svc.cluster.local";
    assert_eq!(addresses.names(), [CALLER, "east//Pod/shop/other", WEB, service]);
    let web = addresses.workload(WEB);
    assert_eq!((web.text(1), web.text(9), web.text(4)), ("web-1".into(), "node-1".into(), "net-east".into()));
    assert_eq!((web.text(7), web.text(18), web.number(5)), ("web".into(), "east".into(), 1));
    assert_eq!(web.message(24).text(2), "z");
    assert_eq!(web.messages(22)[0].text(1), service);
    assert_eq!([13, 10, 11].map(|field| web.text(field)), ["web-1", "web", "latest"]);
    assert!(!addresses.workload(CALLER).has(22), "it serves nothing");
    assert_eq!(addresses.service(service).message(4).bytes(2), [10, 96, 0, 9]);
    // On demand, the pods of the own node come unasked with the services that they serve, and go when they go.
    let mut client = world.open(&who());
    client.begin_on_demand(&[]);
    assert_eq!(client.first().0.names(), [CALLER, WEB, service]);
    world.fake.delete("pods", "shop/caller");
    assert_eq!(client.told(ADDRESS).removed, [CALLER]);
    world.fake.put(&pod("new", "10.0.0.8", "node-1", &json!({})));
    assert_eq!(client.told(ADDRESS).names(), ["east//Pod/shop/new"]);
}

/// As with istiod, a ServiceEntry is a service with the identities that it names, and what it selects or has are workloads.
#[test]
fn entries_are_services_and_workloads() {
    let config = CONFIG.replace("east.kubeconfig}", "east.kubeconfig, serviceEntries: true}");
    let entry = |kind: &str, name: &str, spec: &Value| json!({"kind": kind, "metadata": {"name": name, "namespace": "shop"}, "spec": spec});
    let db = "spiffe://cluster.local/ns/shop/sa/db";
    let world = World::with(&config, |fake| {
        fake.change(|world| world.installed.extend(["serviceentries", "workloadentries"]));
        let vm = json!({"address": "10.9.0.1", "serviceAccount": "vms",
            "labels": {"app": "vm", "networking.istio.io/tunnel": "http"}});
        fake.put(&entry("WorkloadEntry", "vm", &vm));
        let ports = json!([{"number": 80, "name": "http", "protocol": "HTTP", "targetPort": 8080}]);
        let selecting = json!({"hosts": ["vm.test"], "location": "MESH_INTERNAL", "resolution": "STATIC", "ports": ports,
            "addresses": ["240.240.7.1"], "workloadSelector": {"labels": {"app": "vm"}}, "subjectAltNames": [db]});
        fake.put(&entry("ServiceEntry", "vm", &selecting));
    });
    let (mut client, addresses, _) = world.everything();
    let service = addresses.service("shop/vm.test");
    assert_eq!((service.text(2), service.text(3)), ("shop".into(), "vm.test".into()));
    assert_eq!(service.message(4).bytes(2), [240, 240, 7, 1]);
    let vms = "spiffe://cluster.local/ns/shop/sa/vms";
    assert_eq!(service.texts(6), [db, vms]);
    let workload = addresses.workload("Endpoint/net-east/10.9.0.1");
    assert_eq!(
        (workload.text(2), workload.text(7), workload.text(4)),
        ("shop".into(), "vms".into(), "net-east".into())
    );
    assert_eq!((workload.bytes(3), workload.number(5)), (vec![10, 9, 0, 1], 1), "its address, and HBONE");
    let serves = workload.messages(22);
    assert_eq!(serves[0].text(1), "shop/vm.test");
    let port = serves[0].message(2).message(1);
    assert_eq!((port.number(1), port.number(2)), (80, 8080));
    // A workload that goes is told, and so is a changed list of identities.
    world.fake.delete("workloadentries", "shop/vm");
    let told = client.told(ADDRESS);
    assert_eq!(told.removed, ["Endpoint/net-east/10.9.0.1"]);
}

/// The values are those of an istiod of 2026-08 for the same objects.
#[test]
fn services_and_pods_have_the_fields_that_istiod_gives_them() {
    const NAME: &str = "web.shop.svc.cluster.local";
    let key = format!("shop/{NAME}");
    let world = World::start(|_| {});
    let (mut client, addresses, _) = world.everything();
    assert!(!addresses.service(&key).has(8) && !addresses.service(&key).has(9));
    let choice = |told: &Told| {
        let choice = told.service(&key).message(8);
        (choice.number(2), choice.numbers(1), choice.number(3))
    };
    // The annotation of the namespace applies to its services, and to sidecars as well as to ztunnels.
    let mut annotated = namespace("shop", &json!({}));
    annotated["metadata"]["annotations"] = json!({"networking.istio.io/traffic-distribution": "preferclose"});
    world.fake.put(&annotated);
    assert_eq!(choice(&client.told(ADDRESS)), (2, vec![6, 1, 2], 0));
    let service = |spec: &Value| {
        let mut service = json!({"kind": "Service", "metadata": {"name": "web", "namespace": "shop"},
            "spec": {"clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9"], "ipFamilies": ["IPv4"],
                "ports": [{"name": "http", "port": 80, "targetPort": 8080}]}});
        let spec = spec.as_object().expect("a spec").clone();
        service["spec"].as_object_mut().expect("a spec").extend(spec);
        world.fake.put(&service);
    };
    service(&json!({"trafficDistribution": "PreferSameNode"}));
    let told = client.told(ADDRESS);
    assert_eq!((choice(&told), told.service(&key).number(9)), ((2, vec![6, 1, 2, 3, 4], 0), 1));
    service(&json!({"internalTrafficPolicy": "Local", "publishNotReadyAddresses": true}));
    assert_eq!(choice(&client.told(ADDRESS)), (1, vec![4], 1));
    // A pod of a Deployment has the name of the Deployment, so that telemetry has no series for each pod.
    let mut owned = pod(
        "web-7d9f-abcde",
        "10.0.0.9",
        "node-1",
        &json!({"app": "web", "version": "v1", "pod-template-hash": "7d9f"}),
    );
    owned["metadata"]["generateName"] = json!("web-7d9f-");
    owned["metadata"]["ownerReferences"] =
        json!([{"kind": "ReplicaSet", "name": "web-7d9f", "controller": true}]);
    world.fake.put(&owned);
    let told = client.told(ADDRESS);
    let made = told.workload("east//Pod/shop/web-7d9f-abcde");
    assert_eq!([13, 10, 11].map(|field| made.text(field)), ["web", "web", "v1"]);
    assert_eq!(made.number(12), 2);
}

#[test]
fn policies_pass_through_whole_and_at_once() {
    let deny = json!({"action": "DENY", "rules": [{"from": [{"source": {"principals": ["cluster.local/ns/shop/sa/bad"]}}]}]});
    let world = World::start(|fake| fake.put(&policy("all", &deny)));
    let (mut client, addresses, policies) = world.everything();
    assert_eq!(policies.names(), [STRICT, "shop/all"]);
    let all = &policies.resources["shop/all"].1;
    assert_eq!((all.text(1), all.text(2), all.number(3), all.number(4)), ("all".into(), "shop".into(), 1, 1));
    let source = all.message(5).message(1).message(2).message(3);
    assert_eq!(source.text(1), "cluster.local/ns/shop/sa/bad");
    assert!(!addresses.workload(WEB).has(16), "no policy selects it");
    // A policy with a selector comes before the workload that names it.
    let selecting = json!({"selector": {"matchLabels": {"app": "web"}}, "rules": [{"to": [{"operation": {"ports": ["8080"]}}]}]});
    world.fake.put(&policy("web", &selecting));
    let told = client.told(AUTHORIZATION);
    assert_eq!(told.names(), ["shop/web"]);
    let ports = told.resources["shop/web"].1.message(5).message(1).message(2).numbers(9);
    assert_eq!(ports, [8080]);
    let told = client.told(ADDRESS);
    assert_eq!((told.names(), told.workload(WEB).texts(16)), (vec![WEB], vec!["shop/web".to_owned()]));
    for port in 1..=3 {
        let changed = json!({"selector": {"matchLabels": {"app": "web"}}, "rules": [{"to": [{"operation": {"ports": [port.to_string()]}}]}]});
        world.fake.put(&policy("web", &changed));
        let told = client.told(AUTHORIZATION);
        let rule = told.resources["shop/web"].1.message(5);
        assert_eq!(rule.message(1).message(2).numbers(9), [port]);
    }
    // A mesh that is strict refuses plain connections at each workload.
    world.fake.put(&mtls("istio-system", &json!({"mtls": {"mode": "STRICT"}})));
    let told = client.told(ADDRESS);
    assert_eq!(told.names().len(), 3);
    assert_eq!(told.workload(WEB).texts(16), [STRICT, "shop/web"]);
    // A namespace that is not is an exception.
    world.fake.put(&mtls("shop", &json!({"mtls": {"mode": "PERMISSIVE"}})));
    assert_eq!(client.told(ADDRESS).workload(WEB).texts(16), ["shop/web"]);
    // A policy in dry run is marked as one, and enforced as soon as the annotation is gone.
    let mut tried = policy("all", &deny);
    for annotations in [json!({"istio.io/dry-run": "true"}), json!({})] {
        tried["metadata"]["annotations"] = annotations.clone();
        world.fake.put(&tried);
        let told = client.told(AUTHORIZATION);
        let is_dry_run = told.resources["shop/all"].1.number(6) == 1;
        assert_eq!(is_dry_run, annotations != json!({}));
    }
    world.fake.delete("authorizationpolicies", "shop/all");
    assert_eq!(client.told(AUTHORIZATION).removed, ["shop/all"]);
}

#[test]
fn a_cluster_whose_policies_cannot_be_listed_is_not_served() {
    let world =
        World::start(|fake| fake.change(|world| assert!(world.forbidden.insert("peerauthentications"))));
    world.refused(&who(), 9, "the right to list authorizationpolicies and peerauthentications");
    let refused = world.gateway.json("/api/v1/status")["xds"]["refused"].clone();
    assert!(refused.to_string().contains("are not known"), "{refused}");
}

#[test]
fn a_cluster_without_the_kinds_of_policies_has_none() {
    let world = World::start(|fake| fake.change(|world| world.installed.clear()));
    assert_eq!(world.everything().2.names(), [STRICT]);
}

#[test]
fn a_policy_that_cannot_be_read_ends_the_streams_of_its_cluster() {
    let world = World::start(|_| {});
    let (mut client, ..) = world.everything();
    world.fake.put(&policy("odd", &json!({"rules": 7})));
    let (code, text) = client.ended();
    assert!(code == 9 && text.contains("are not known"), "{code} {text}");
    let named = eventually("a problem that names the policy", || {
        let problems = world.gateway.json("/api/v1/status")["problems"].clone();
        let mut problems = problems.as_array()?.iter();
        problems.find(|problem| problem["code"] == "policies_unknown").cloned()
    });
    assert_eq!(named["about"], "kubernetes/east");
    let text = named["text"].as_str().expect("a text");
    assert!(text.contains("authorizationpolicies shop/odd: "), "{text}");
    world.fake.delete("authorizationpolicies", "shop/odd");
    eventually("the cluster is served again", || {
        let mut client = world.open(&who());
        client.ask(AUTHORIZATION, &Ask::default());
        matches!(client.next(), crate::support::wds::Next::Told(_)).then_some(())
    });
}

#[test]
fn services_and_workloads_that_use_a_waypoint_name_it() {
    let world = World::start(|fake| {
        fake.put(&namespace("shop", &json!({"istio.io/use-waypoint": "gate"})));
        fake.put(&waypoint(("shop", "gate"), "", &json!({})));
        fake.put(&waypoint(("shop", "own"), "workload", &json!({})));
    });
    let (mut client, addresses, _) = world.everything();
    let waypoint = addresses.service("shop/web.shop.svc.cluster.local").message(7);
    let hostname = waypoint.message(1);
    assert_eq!((hostname.text(1), hostname.text(2)), ("shop".into(), "gate.shop.svc.cluster.local".into()));
    assert_eq!(waypoint.number(3), 15_008);
    assert!(!addresses.workload(WEB).has(8));
    world.fake.put(&pod("caller", "10.0.0.6", "node-1", &json!({"istio.io/use-waypoint": "own"})));
    assert_eq!(
        client.told(ADDRESS).workload(CALLER).message(8).message(1).text(2),
        "own.shop.svc.cluster.local"
    );
    world.fake.put(&namespace("shop", &json!({"istio.io/use-waypoint": "none"})));
    assert!(!client.told(ADDRESS).service("shop/web.shop.svc.cluster.local").has(7));
}

#[test]
fn a_waypoint_takes_what_it_is_for_from_the_namespaces_that_it_allows() {
    let uses = |waypoint: &str, namespace: &str| json!({"istio.io/use-waypoint": waypoint, "istio.io/use-waypoint-namespace": namespace});
    let world = World::start(|fake| {
        fake.put(&namespace("shop", &uses("gate", "shop")));
        fake.put(&waypoint(("shop", "gate"), "all", &json!({})));
        // The Service and a pod of the waypoint use none themselves.
        fake.put(&json!({"kind": "Service",
            "metadata": {"name": "gate", "namespace": "shop",
                "labels": {"gateway.istio.io/managed": "istio.io-mesh-controller"}},
            "spec": {"clusterIP": "10.96.0.10", "clusterIPs": ["10.96.0.10"], "ports": [{"name": "mesh", "port": 15008}]}}));
        fake.put(&pod(
            "gate-1",
            "10.0.0.9",
            "node-2",
            &json!({"gateway.networking.k8s.io/gateway-name": "gate"}),
        ));
    });
    let (_, addresses, _) = world.everything();
    assert!(!addresses.service("shop/gate.shop.svc.cluster.local").has(7));
    assert!(!addresses.workload("east//Pod/shop/gate-1").has(8));
    // The waypoint of the service and that of the pod; "" for none.
    let is_told = |what: &str, wanted: (&str, &str)| {
        eventually(what, || {
            let (_, told, _) = world.everything();
            let (service, workload) = (told.service("shop/web.shop.svc.cluster.local"), told.workload(WEB));
            let name =
                |has: bool, waypoint: Fields| if has { waypoint.message(1).text(2) } else { String::new() };
            let found =
                (name(service.has(7), service.message(7)), name(workload.has(8), workload.message(8)));
            (found == (wanted.0.to_owned(), wanted.1.to_owned())).then_some(())
        });
    };
    let gate = "gate.shop.svc.cluster.local";
    is_told("both", (gate, gate));
    world.fake.put(&waypoint(("shop", "gate"), "workload", &json!({})));
    is_told("the workload", ("", gate));
    world.fake.put(&waypoint(("shop", "gate"), "none", &json!({})));
    is_told("neither", ("", ""));
    // One in another namespace must allow this one.
    world.fake.put(&namespace("shop", &uses("far", "istio-system")));
    world.fake.put(&waypoint(("istio-system", "far"), "all", &json!({"namespaces": {"from": "All"}})));
    is_told(
        "one that all may use",
        ("far.istio-system.svc.cluster.local", "far.istio-system.svc.cluster.local"),
    );
    world.fake.put(&waypoint(("istio-system", "far"), "all", &json!({})));
    is_told("one of its own namespace", ("", ""));
    // One without an address is not there yet.
    world.fake.put(&namespace("shop", &uses("gate", "shop")));
    let mut absent = waypoint(("shop", "gate"), "all", &json!({}));
    world.fake.put(&absent);
    is_told("both again", (gate, gate));
    absent["status"] = json!({});
    world.fake.put(&absent);
    is_told("one without an address", ("", ""));
}

/// A ztunnel does not ask for a waypoint that a resource names by its host name: without it, the calls fail.
#[test]
fn a_waypoint_comes_with_what_uses_it() {
    let world = World::start(|fake| {
        fake.put(&namespace("shop", &json!({"istio.io/use-waypoint": "gate"})));
        fake.put(&waypoint(("shop", "gate"), "all", &json!({})));
        fake.put(&pod(
            "gate-1",
            "10.0.0.9",
            "node-2",
            &json!({"gateway.networking.k8s.io/gateway-name": "gate"}),
        ));
        fake.put(&json!({"kind": "Service", "metadata": {"name": "gate", "namespace": "shop", "labels": {"istio.io/use-waypoint": "none"}},
            "spec": {"clusterIP": "10.96.0.10", "clusterIPs": ["10.96.0.10"], "ports": [{"name": "mesh", "port": 15008}]}}));
        fake.put(&json!({"kind": "EndpointSlice", "metadata": {"name": "gate-1", "namespace": "shop",
                "labels": {"kubernetes.io/service-name": "gate"}},
            "addressType": "IPv4", "ports": [{"name": "mesh", "port": 15008, "protocol": "TCP"}],
            "endpoints": [{"addresses": ["10.0.0.9"], "conditions": {"ready": true},
                "targetRef": {"kind": "Pod", "uid": format!("{:0>32}", "10009")}}]}));
    });
    let (web, gate) = ("shop/web.shop.svc.cluster.local", "shop/gate.shop.svc.cluster.local");
    let mut client = world.open(&who().with("NODE_NAME", "node-9"));
    client.begin_on_demand(&[]);
    assert!(client.first().0.resources.is_empty());
    client.ask(ADDRESS, &Ask { subscribe: &[web], ..Ask::default() });
    assert_eq!(client.told(ADDRESS).names(), ["east//Pod/shop/gate-1", WEB, gate, web]);
    // A pod with a waypoint of its own.
    world.fake.put(&pod("other", "10.0.0.7", "node-2", &json!({"istio.io/use-waypoint": "gate"})));
    let mut client = world.open(&who().with("NODE_NAME", "node-9"));
    client.begin_on_demand(&[]);
    client.first();
    let of_pod = eventually("the pod names its waypoint", || {
        client.ask(ADDRESS, &Ask { subscribe: &["net-east/10.0.0.7"], ..Ask::default() });
        let told = client.told(ADDRESS);
        told.resources.contains_key(gate).then_some(told)
    });
    assert!(of_pod.resources.contains_key("east//Pod/shop/gate-1"), "{:?}", of_pod.names());
}
