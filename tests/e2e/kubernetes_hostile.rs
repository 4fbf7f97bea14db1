//! API servers that send what no sane server sends, or nothing at all. The gateway keeps what it knew, names the fault, bounds
//! its memory, goes on serving other registries and connections, and recovers when the server does.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::backend::Backend;
use crate::support::client::{call, tls};
use crate::support::etcd::encoded;
use crate::support::fake_kube::{FakeKube, Finish, Part, Reply};
use crate::support::gateway::{BINARY, Gateway};
use crate::support::kube_world::{Asked, TOKEN, line, status};
use crate::support::pki::PKI;
use crate::support::{eventually, skip, within};

const WEB: &str = "web.shop.svc.cluster.local";
/// The limit of the gateway's resident memory in bytes.
const RSS_MAX: u64 = 400 << 20;

fn with(value: &Value, change: impl FnOnce(&mut Value)) -> Value {
    let mut value = value.clone();
    change(&mut value);
    value
}

fn uid(number: usize) -> String {
    format!("00000000-0000-0000-0000-{number:012}")
}

pub(crate) fn pod(number: usize, ip: &str) -> Value {
    json!({
        "kind": "Pod", "metadata": {"namespace": "shop", "name": format!("pod-{number}"), "uid": uid(number)},
        "spec": {"serviceAccountName": "web", "nodeName": "n1"},
        "status": {"phase": "Running", "podIPs": [{"ip": ip}]}
    })
}

pub(crate) fn service(name: &str, port: u16) -> Value {
    let port = json!({"name": "https", "port": 443, "targetPort": port, "protocol": "TCP"});
    json!({
        "kind": "Service", "metadata": {"namespace": "shop", "name": name, "uid": uid(1)},
        "spec": {"type": "ClusterIP", "clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"], "ports": [port]}
    })
}

/// Returns a slice of a service with these endpoints, each an address and the number of its pod.
pub(crate) fn slice(name: &str, port: u16, endpoints: &[(&str, usize)]) -> Value {
    let endpoint = |(ip, pod): &(&str, usize)| {
        json!({
            "addresses": [ip], "conditions": {"ready": true},
            "targetRef": {"kind": "Pod", "namespace": "shop", "name": format!("pod-{pod}"), "uid": uid(*pod)}
        })
    };
    let labels = json!({"kubernetes.io/service-name": name});
    json!({
        "kind": "EndpointSlice", "metadata": {"namespace": "shop", "name": format!("{name}-1"), "labels": labels},
        "addressType": if endpoints.iter().any(|(ip, _)| ip.contains(':')) { "IPv6" } else { "IPv4" },
        "ports": [{"name": "https", "port": port, "protocol": "TCP"}],
        "endpoints": endpoints.iter().map(endpoint).collect::<Vec<_>>()
    })
}

fn host(name: &str) -> String {
    format!("{name}.shop.svc.cluster.local")
}

/// A fake API server, and a gateway whose own cluster it is.
pub(crate) struct Rig {
    pub(crate) fake: FakeKube,
    pub(crate) gateway: Gateway,
    backend: Backend,
}

const ALLOW: &str = "allow: {addresses: [127.0.0.0/8, 10.0.0.0/8]}";

impl Rig {
    /// Starts a fake with one service, whose only pod is the backend.
    pub(crate) fn fake() -> (FakeKube, Backend) {
        let backend = Backend::tls_echo(PKI.server(WEB), "");
        let fake = FakeKube::start();
        let port = backend.address.port();
        fake.put(&json!({"kind": "Namespace", "metadata": {"name": "shop"}}));
        fake.put(&json!({"kind": "Node", "metadata": {"name": "n1"}}));
        fake.put(&service("web", port));
        fake.put(&slice("web", port, &[("127.0.0.1", 1)]));
        fake.put(&pod(1, "127.0.0.1"));
        (fake, backend)
    }

    fn start_with((fake, backend): (FakeKube, Backend), allow: &str, marked: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("east.kubeconfig"), fake.kubeconfig()).expect("written");
        let more = |setting: &str| if setting.is_empty() { String::new() } else { format!(", {setting}") };
        let config = format!(
            "listen: \"127.0.0.1:0\"\nnode: {{cluster: east, network: net}}\nexports: [{{services: [\"*\"], tls: own{}}}]\n\
             registries: [{{kubernetes: {{cluster: east, kubeconfig: east.kubeconfig, network: net}}{}}}]\n",
            more(marked),
            more(allow)
        );
        Self { gateway: Gateway::start_unready(folder, &config), fake, backend }
    }

    fn start(fake: (FakeKube, Backend)) -> Self {
        Self::start_with(fake, ALLOW, "")
    }

    /// Starts a gateway, and waits until it has read everything and is well.
    #[track_caller]
    pub(crate) fn live(fake: (FakeKube, Backend)) -> Self {
        let rig = Self::start(fake);
        rig.is_well();
        rig
    }

    fn registry(&self) -> Value {
        self.gateway.json("/api/v1/registries")[0].clone()
    }

    /// Returns the problems of the registry, one per line.
    fn problems(&self) -> Vec<String> {
        let registry = self.registry();
        let lists = [&registry["problems"], &registry["report"]["problems"]];
        let lines = lists.iter().filter_map(|list| list.as_array()).flatten();
        lines.map(|line| line.as_str().expect("a line").to_owned()).collect()
    }

    /// Waits for a problem that contains all these texts, and returns it.
    #[track_caller]
    fn names(&self, texts: &[&str]) -> String {
        eventually(&format!("{texts:?}"), || {
            let mut problems = self.problems().into_iter();
            problems.find(|line| texts.iter().all(|text| line.contains(text)))
        })
    }

    /// Waits until the registry is live without problems, and checks that the service can be reached.
    #[track_caller]
    fn is_well(&self) {
        self.gateway.ready();
        eventually("a registry that is well", || {
            (self.registry()["state"] == "live" && self.problems().is_empty()).then_some(())
        });
        eventually("an endpoint", || (self.leads_to("web").len() == 1).then_some(()));
        self.serves();
    }

    /// Checks that the gateway is alive and serves the service that it knew before.
    #[track_caller]
    fn serves(&self) {
        assert_eq!(self.gateway.get("/livez").0, 200);
        let mut session = tls(self.gateway.listener("default"), WEB).expect("a handshake");
        assert_eq!(call(&mut session, "hello").expect("an answer"), "hello");
    }

    /// Returns the addresses to which a service leads.
    fn leads_to(&self, name: &str) -> Vec<String> {
        let explained = self.gateway.json(&format!("/api/v1/explain?sni={}", host(name)));
        let candidates = explained["candidates"].as_array().cloned().unwrap_or_default();
        candidates.iter().map(|one| one["address"].as_str().expect("an address").to_owned()).collect()
    }

    #[track_caller]
    fn leads(&self, name: &str, addresses: &[&str]) {
        eventually(&format!("{name} at {addresses:?}"), || (self.leads_to(name) == addresses).then_some(()));
    }

    /// Returns the peak resident memory of the gateway in bytes.
    fn peak(&self) -> u64 {
        let path = format!("/proc/{}/status", self.gateway.process());
        let status = std::fs::read_to_string(path).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a line");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
    }

    /// Checks that the gateway has never panicked or used too much memory.
    #[track_caller]
    fn was_sound(&self) {
        let log = self.gateway.log();
        assert!(!log.iter().any(|line| line.contains("panicked")), "{log:?}");
        let peak = self.peak();
        eprintln!("the gateway used at most {} MiB", peak >> 20);
        assert!(peak < RSS_MAX, "{peak} bytes");
    }

    /// Makes the fake behave again, and checks that the gateway recovers.
    #[track_caller]
    pub(crate) fn recovers(self) {
        self.fake.behave();
        self.is_well();
        self.was_sound();
    }
}

/// Installs CRDs, so that the test can break more kinds.
pub(crate) fn install(fake: &FakeKube) {
    fake.change(|world| world.installed.extend(["gateways", "serviceexports", "serviceimports"]));
}

/// Replaces the answers to some requests for a kind.
fn break_with(
    fake: &FakeKube,
    plural: &'static str,
    so: fn(&Asked) -> bool,
    reply: impl Fn() -> Reply + Send + 'static,
) {
    fake.rule(move |asked| (asked.plural == plural && so(asked)).then(&reply));
}

fn gone() -> Value {
    status(410, "Expired", "too old resource version: 1 (2)", None)
}

#[test]
fn watches_that_fail_each_in_another_way_are_named_and_cost_nothing() {
    let fake = Rig::fake();
    install(&fake.0);
    let rig = Rig::live(fake);
    let fake = &rig.fake;
    let broken = |plural, reply: fn() -> Reply| break_with(fake, plural, Asked::is_watch, reply);
    broken("services", || {
        Reply::ok(vec![Part::Bytes(b"{\"type\":\"ADDED\",\"object\":{]}\n".to_vec()), Part::Hang])
    });
    broken("endpointslices", || {
        Reply::ok(vec![Part::Bytes(
            b"{\"type\":\"ADDED\",\"object\":{\"metadata\":{\"name\":\"\xff\xfe\"}}}\n".to_vec(),
        )])
    });
    broken("pods", || Reply::ok(vec![Part::Bytes(b"{\"type\":\"ADDED\",\"obj".to_vec())]));
    broken("nodes", || Reply::json(503, &status(503, "ServiceUnavailable", "etcd is away", None)));
    broken("gateways", || Reply::text(504, "<html>upstream timed out</html>"));
    broken("serviceexports", || Reply::text(200, [0x1f, 0x8b, 8, 0]).with("content-encoding", "gzip"));
    broken("serviceimports", || Reply::text(200, "<html>hello</html>\n"));
    let all = ["services", "endpointslices", "pods", "nodes", "gateways", "serviceexports", "serviceimports"];
    all.iter().for_each(|plural| fake.end(plural, Finish::Reset));
    rig.names(&["nodes: the API server answered 503 Service Unavailable: etcd is away", "next attempt in"]);
    rig.names(&["gateways: the API server answered 504 Gateway Timeout"]);
    rig.names(&["serviceexports: ", "it has the content encoding gzip"]);
    rig.names(&["serviceimports: ", "an event of the watch is malformed"]);
    rig.names(&["services: ", "an event of the watch is malformed"]);
    rig.names(&["endpointslices: ", "an event of the watch is malformed"]);
    // The watch that is resumed in vain is replaced by a list, whose end is missing as well.
    rig.names(&["pods: ", "the watch ended"]);
    assert_eq!(rig.registry()["state"], "stale");
    let shown = Command::new(BINARY)
        .args(["get", "registries", "-o", "json", "--admin", &rig.gateway.admin().to_string()])
        .output()
        .expect("it runs");
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("the watch ended"), "{shown}");
    rig.serves();
    rig.recovers();
}

#[test]
fn lists_in_pages_that_fail_each_in_another_way_are_named() {
    let fake = Rig::fake();
    install(&fake.0);
    fake.0.change(|world| world.streams = false);
    let rig = {
        let broken = |plural, reply: fn() -> Reply| break_with(&fake.0, plural, Asked::is_page, reply);
        let page = |meta: Value, items: Value| Reply::json(200, &json!({"metadata": meta, "items": items}));
        broken("services", move || {
            let half = br#"{"metadata":{"resourceVersion":"1"},"items":[{"metadata":{"na"#;
            Reply::ok(vec![Part::Bytes(half.to_vec()), Part::Reset])
        });
        broken("pods", || Reply::json(200, &json!({"metadata": {}, "items": []})));
        broken("endpointslices", || {
            Reply::json(200, &json!({"metadata": {"resourceVersion": "1", "continue": "same"}, "items": []}))
        });
        fake.0.rule(move |asked| {
            let next = asked.number("continue").unwrap_or(0) + 1;
            let meta = json!({"resourceVersion": "1", "continue": next.to_string()});
            (asked.plural == "nodes").then(|| page(meta, json!([])))
        });
        broken("namespaces", || Reply::text(200, "hello"));
        broken("gateways", || Reply::text(200, r#"{"metadata":{"resourceVersion":"1"},"items":[{}"#));
        broken("serviceexports", || Reply::json(410, &gone()));
        broken("serviceimports", || {
            Reply::json(200, &json!({"metadata": {"resourceVersion": "1"}, "items": {}}))
        });
        Rig::start(fake)
    };
    rig.names(&["services: the connection broke"]);
    rig.names(&["pods: ", "the list has no resourceVersion"]);
    rig.names(&["endpointslices: ", "the list never ends"]);
    rig.names(&["nodes: ", "the list never ends"]);
    rig.names(&["namespaces: ", "the list is malformed"]);
    rig.names(&["gateways: ", "the list is malformed: EOF"]);
    rig.names(&["serviceexports: ", "repeatedly"]);
    rig.names(&["serviceimports: ", "the list is malformed: invalid type: map, expected a list of items"]);
    assert_eq!(rig.registry()["state"], "missing");
    assert_eq!((rig.gateway.get("/livez").0, rig.gateway.get("/readyz").0), (200, 503));
    rig.recovers();
}

#[test]
fn lists_on_watches_that_fail_each_in_another_way_are_named_and_begin_anew() {
    let fake = Rig::fake();
    let rig = {
        let broken = |plural, reply: fn() -> Reply| break_with(&fake.0, plural, Asked::is_stream, reply);
        broken("services", || {
            let one = line(
                "ADDED",
                "services",
                &json!({"metadata": {"name": "cut", "namespace": "shop", "resourceVersion": "7"}}),
            );
            Reply::ok(vec![Part::Bytes(one.into_bytes()), Part::Reset])
        });
        broken("endpointslices", || {
            let meta = json!({"annotations": {"k8s.io/initial-events-end": "true"}});
            Reply::text(200, line("BOOKMARK", "endpointslices", &json!({"metadata": meta})))
        });
        broken("pods", || {
            Reply::text(
                200,
                line("ADDED", "pods", &json!({"metadata": {"name": "x", "resourceVersion": "7"}})),
            )
        });
        // One list consists of a response head only, one arrives at a byte per second; neither is an error yet.
        broken("nodes", || Reply::ok(vec![Part::Hang]));
        broken("namespaces", || Reply::ok(vec![Part::Drip(vec![b' '; 100])]));
        Rig::start(fake)
    };
    rig.names(&["services: the connection broke"]);
    rig.names(&[
        "endpointslices: ",
        "the bookmark that ends the watch's initial list has no resourceVersion",
    ]);
    rig.names(&["pods: ", "the watch ended before the end of its list"]);
    assert_eq!((rig.gateway.get("/livez").0, rig.gateway.get("/readyz").0), (200, 503));
    // A list that breaks gives no version from which a watch could resume.
    assert!(rig.fake.seen(Asked::is_resumed).is_empty());
    rig.recovers();
}

#[test]
fn one_bad_object_costs_no_other_and_its_last_good_state_stays() {
    for streams in [true, false] {
        let fake = Rig::fake();
        fake.0.change(|world| world.streams = streams);
        // Every optional field is null, and there are unknown fields.
        fake.0.put(&json!({
            "kind": "Service", "unknown": {"a": [1]}, "spec": null, "status": null,
            "metadata": {"namespace": "shop", "name": "null", "uid": null, "labels": null, "annotations": null}
        }));
        fake.0.put(&json!({
            "kind": "EndpointSlice", "addressType": null, "ports": null, "endpoints": null,
            "metadata": {"namespace": "shop", "name": "null", "labels": {"kubernetes.io/service-name": "null"}}
        }));
        fake.0.put(&json!({
            "kind": "EndpointSlice", "addressType": "IPv4", "ports": [null, {"name": null, "port": null}],
            "endpoints": [null, {"addresses": null, "conditions": null, "targetRef": null}, {"addresses": [null]}],
            "metadata": {"namespace": "shop", "name": "nulls", "labels": {"kubernetes.io/service-name": "web"}}
        }));
        fake.0.put(&json!({
            "kind": "Pod", "spec": null, "status": {"phase": null, "podIPs": null},
            "metadata": {"namespace": "shop", "name": "null", "uid": uid(77)}
        }));
        // These fields have the wrong type.
        let bad = json!({
            "kind": "Pod", "status": {"podIPs": [{"ip": 7}]},
            "metadata": {"namespace": "shop", "name": "bad", "uid": uid(9), "labels": {"a": []}}
        });
        fake.0.put(&bad);
        let port = fake.1.address.port();
        fake.0.put(&service("other", 80));
        fake.0.put(&slice("other", 80, &[("10.0.0.2", 2)]));
        fake.0.put(&pod(2, "10.0.0.2"));
        let rig = Rig::start(fake);
        rig.leads("web", &[&format!("127.0.0.1:{port}")]);
        rig.names(&["pods shop/bad: "]);
        assert_eq!(rig.registry()["state"], "live", "{:?}", rig.registry());
        rig.leads("other", &["10.0.0.2:80"]);
        // Objects become invalid on the watch, and then valid again.
        rig.fake.put(&with(&slice("web", port, &[]), |slice| slice["endpoints"] = "none".into()));
        rig.fake.put(&with(&pod(2, "10.0.0.2"), |pod| pod["metadata"]["labels"] = 7.into()));
        rig.fake
            .put(&with(&service("other", 80), |service| service["spec"]["ports"] = json!([{"port": "x"}])));
        for object in ["endpointslices shop/web-1: ", "pods shop/pod-2: ", "services shop/other: "] {
            rig.names(&[object]);
        }
        // Objects on the watch without a version or a name are rejected.
        rig.fake.send("pods", line("MODIFIED", "pods", &with(&pod(1, "10.0.0.9"), |_| {})));
        rig.names(&["pods shop/pod-1: the object has no metadata.resourceVersion"]);
        rig.fake.send("pods", line("MODIFIED", "pods", &json!({"metadata": [7]})));
        rig.names(&["pods : invalid type: integer"]);
        rig.fake.send("pods", line("MODIFIED", "pods", &json!({"metadata": {"uid": "x"}})));
        rig.names(&["pods : the object has no metadata.name"]);
        assert_eq!(rig.registry()["flawed"], 7, "{:?}", rig.problems());
        rig.serves();
        rig.leads("other", &["10.0.0.2:80"]);
        rig.fake.put(&slice("web", port, &[("127.0.0.1", 1)]));
        rig.fake.put(&pod(1, "127.0.0.1"));
        rig.fake.put(&pod(2, "10.0.0.3"));
        rig.fake.put(&slice("other", 80, &[("10.0.0.3", 2)]));
        rig.fake.put(&service("other", 80));
        rig.fake.delete("pods", "shop/bad");
        rig.fake.delete("endpointslices", "shop/nulls");
        rig.leads("other", &["10.0.0.3:80"]);
        eventually("one flaw", || (rig.registry()["flawed"] == 1).then_some(()));
        rig.serves();
        rig.was_sound();
    }
}

#[test]
fn a_broken_object_that_goes_while_nobody_watches_is_forgotten_by_the_next_listing() {
    for streams in [true, false] {
        let fake = Rig::fake();
        fake.0.change(|world| world.streams = streams);
        let rig = Rig::live(fake);
        let flawed = || rig.registry()["flawed"].clone();
        rig.fake.put(&with(&pod(9, "10.0.0.9"), |pod| pod["metadata"]["labels"] = 7.into()));
        rig.names(&["pods shop/pod-9: "]);
        assert_eq!(flawed(), 1);
        // No watch reports the pod's deletion. The fake refuses new watches until the pod is deleted. After that, the version
        // from which the gateway resumes its watch is too old.
        break_with(&rig.fake, "pods", Asked::is_watch, || {
            Reply::json(503, &status(503, "ServiceUnavailable", "etcd is away", None))
        });
        let attempts = || rig.fake.seen(|asked| asked.plural == "pods" && asked.is_resumed()).len();
        let before = attempts();
        rig.fake.end("pods", Finish::Reset);
        eventually("a watch that is refused", || (attempts() > before).then_some(()));
        rig.fake.delete("pods", "shop/pod-9");
        rig.fake.change(|world| world.forget());
        assert_eq!(flawed(), 1, "nobody has told of its end");
        rig.fake.behave();
        rig.is_well();
        assert_eq!(flawed(), 0);
        eventually("the relisting, in the report", || {
            let relisted = rig.registry()["report"]["facts"]["last relisting"].clone();
            relisted.as_str().filter(|text| text.ends_with("(pods)")).map(|_| ())
        });
        rig.was_sound();
    }
}

#[test]
fn what_came_before_a_bad_line_is_not_lost() {
    let rig = Rig::live(Rig::fake());
    rig.fake.put(&service("other", 80));
    rig.fake.put(&slice("other", 80, &[("10.0.0.2", 2)]));
    eventually("the service", || (rig.registry()["services"] == 2).then_some(()));
    // The event of a pod and a line that breaks the watch arrive in one piece. The next watch resumes from the pod's version.
    for (number, tail) in
        [(2, "]\n"), (3, "{\"type\":\"ERROR\",\"object\":{\"code\":503}}\n"), (4, "{\"type\":")]
    {
        let ip = format!("10.0.0.{number}");
        rig.fake.change(|world| world.put_with(&pod(number, &ip), tail.as_bytes()));
        if number == 4 {
            rig.fake.end("pods", Finish::InOrder);
        }
        rig.fake.put(&slice("other", 80, &[(&ip, number)]));
        rig.leads("other", &[&format!("{ip}:80")]);
    }
    rig.is_well();
    assert_eq!(rig.fake.seen(|asked| asked.plural == "pods" && asked.is_stream()).len(), 1);
    rig.was_sound();
}

#[test]
fn huge_objects_are_flawed_or_named_and_memory_stays_bounded() {
    let huge = || "x".repeat(20 << 20);
    let fake = Rig::fake();
    fake.0.change(|world| world.streams = false);
    let labels = json!({"a": huge()});
    fake.0.put(&with(&service("huge", 80), |service| service["metadata"]["labels"] = labels));
    let rig = Rig::start(fake);
    rig.names(&["services shop/huge: the object is larger than 8 MiB"]);
    rig.leads("web", &[&rig.backend.address.to_string()]);
    assert_eq!(rig.registry()["state"], "live");
    rig.fake.put(&service("huge", 80));
    rig.is_well();
    break_with(&rig.fake, "nodes", Asked::is_resumed, move || {
        Reply::text(
            200,
            line("ADDED", "nodes", &json!({"metadata": {"name": "huge", "labels": {"a": huge()}}})),
        )
    });
    rig.fake.end("nodes", Finish::Reset);
    rig.names(&["nodes: ", "larger than 8 MiB"]);
    rig.serves();
    rig.recovers();
}

#[test]
fn lists_without_end_are_given_up_and_memory_stays_bounded() {
    let fake = Rig::fake();
    install(&fake.0);
    fake.0.change(|world| world.streams = false);
    let rig = Rig::live(fake);
    // One kind has endless pages of small objects, each with a new continue token; the other has one page with more objects
    // than the limit.
    let item = r#"{"metadata":{"name":"a","namespace":"b","resourceVersion":"1"}},"#.repeat(50_000);
    let page = format!(r#""items":[{}]}}"#, item.trim_end_matches(','));
    rig.fake.rule(move |asked| {
        let next = asked.number("continue").unwrap_or(0) + 1;
        let body = format!(r#"{{"metadata":{{"resourceVersion":"1","continue":"{next}"}},{page}"#);
        (asked.plural == "serviceimports" && asked.is_page()).then(|| Reply::text(200, body))
    });
    break_with(&rig.fake, "serviceexports", Asked::is_page, || {
        Reply::text(200, format!(r#"{{"items":[{}0]}}"#, "0,".repeat(20 << 20)))
    });
    for plural in ["serviceimports", "serviceexports"] {
        break_with(&rig.fake, plural, Asked::is_resumed, || Reply::json(410, &gone()));
        rig.fake.end(plural, Finish::Reset);
    }
    rig.names(&["serviceexports: ", "more than 250000 items"]);
    rig.names(&["serviceimports: ", "the list never ends"]);
    rig.serves();
    rig.recovers();
}

#[test]
fn a_list_on_a_watch_without_end_keeps_nobody_waiting_and_memory_stays_bounded() {
    let rig = Rig::live(Rig::fake());
    // An endless list of new services, of which only 50,000 are accepted. After the end of the watch, the registry lists again
    // and gets the missing ones.
    break_with(&rig.fake, "services", Asked::is_watch, || {
        let lines = |number: u64| {
            let one = |at: u64| {
                let meta = json!({"name": format!("s{number}-{at}"), "namespace": "shop", "resourceVersion": "5000"});
                line("ADDED", "services", &json!({"metadata": meta, "spec": {"ports": [{"port": 80}]}}))
            };
            (0..100).map(one).collect::<String>().into_bytes()
        };
        Reply::ok(vec![Part::Endless(Box::new(lines))])
    });
    rig.fake.change(|world| world.forget());
    rig.fake.end("services", Finish::Reset);
    rig.names(&["services are ignored, because there are too many"]);
    assert_eq!(rig.registry()["report"]["objects"]["services"], 50_000);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(3) {
        rig.serves();
        thread::sleep(Duration::from_millis(100));
    }
    rig.recovers();
}

#[test]
fn a_server_that_accepts_and_says_nothing_is_named() {
    let rig = Rig::live(Rig::fake());
    rig.fake.mute();
    rig.names(&["there was no answer within 5 s"]);
    assert_eq!(rig.registry()["state"], "stale");
    rig.serves();
    rig.recovers();
}

#[test]
fn a_server_that_answers_no_request_hinders_nothing_else() {
    let rig = Rig::live(Rig::fake());
    rig.fake.rule(|_| Some(Reply::ok(vec![Part::Hang])));
    ["services", "pods", "endpointslices"].iter().for_each(|plural| rig.fake.end(plural, Finish::InOrder));
    eventually("requests", || (rig.fake.seen(Asked::is_resumed).len() >= 3).then_some(()));
    rig.serves();
    // A watch that sends one byte per second has not failed.
    rig.fake.behave();
    rig.is_well();
    rig.fake.rule(|asked| asked.is_resumed().then(|| Reply::ok(vec![Part::Drip(vec![b' '; 100])])));
    rig.fake.cut();
    rig.serves();
    rig.recovers();
}

#[test]
fn the_wait_that_a_server_asks_for_is_kept_and_shown() {
    let rig = Rig::live(Rig::fake());
    break_with(&rig.fake, "pods", Asked::is_resumed, || {
        Reply::json(429, &status(429, "TooManyRequests", "slow down", None)).with("retry-after", "4")
    });
    break_with(&rig.fake, "nodes", Asked::is_resumed, || {
        Reply::json(429, &status(429, "TooManyRequests", "", Some(json!({"retryAfterSeconds": 299}))))
    });
    rig.fake.end("nodes", Finish::InOrder);
    rig.fake.end("pods", Finish::InOrder);
    rig.names(&["pods: the API server answered 429 Too Many Requests: slow down; next attempt in 4s"]);
    rig.names(&[
        "nodes: the API server answered 429 Too Many Requests: TooManyRequests; next attempt in 299s",
    ]);
    let refused = || rig.fake.seen(|asked| asked.plural == "pods" && asked.is_resumed());
    let seen = eventually("two attempts", || Some(refused()).filter(|seen| seen.len() >= 2));
    assert!(seen[1].at - seen[0].at >= Duration::from_secs(4));
    rig.serves();
    // The gateway requests the nodes again only after 299 s. The registry is live all the same, because it does not need them.
    rig.fake.behave();
    eventually("pods that are followed", || (rig.registry()["state"] == "live").then_some(()));
    rig.serves();
    rig.was_sound();
}

#[test]
fn versions_that_are_too_old_again_and_again_are_named_and_not_asked_for_without_pause() {
    let fake = Rig::fake();
    fake.0.change(|world| world.streams = false);
    let rig = Rig::live(fake);
    break_with(&rig.fake, "pods", Asked::is_resumed, || Reply::json(410, &gone()));
    break_with(&rig.fake, "services", Asked::is_resumed, || {
        Reply::text(200, format!("{}\n", json!({"type": "ERROR", "object": gone()})))
    });
    // The server ends these watches as soon as they begin.
    break_with(&rig.fake, "endpointslices", Asked::is_resumed, || Reply::ok(Vec::new()));
    let all = ["pods", "services", "endpointslices"];
    let begun = Instant::now();
    all.iter().for_each(|plural| rig.fake.end(plural, Finish::Reset));
    rig.names(&["endpointslices: the connection broke: the watch ended after 0 s"]);
    rig.names(&["pods: ", "repeatedly"]);
    rig.names(&["services: ", "repeatedly"]);
    for plural in all {
        let asked = rig.fake.seen(|asked| asked.plural == plural).len() as u64;
        assert!(asked < 10 + 3 * begun.elapsed().as_secs(), "{plural}: {asked} in {:?}", begun.elapsed());
    }
    rig.serves();
    rig.recovers();
}

#[test]
fn foreign_pods_and_addresses_are_not_believed() {
    let fake = Rig::fake();
    let metadata = "169.254.169.254";
    let cases: [(&str, &str, usize, &str); 7] = [
        ("loopback", "127.0.0.9", 10, "127.0.0.9"),
        ("metadata", metadata, 11, metadata),
        ("mapped", "::ffff:169.254.169.254", 12, "::ffff:169.254.169.254"),
        ("six", "::1", 13, "::1"),
        ("unspecified", "0.0.0.0", 14, "0.0.0.0"),
        ("multicast", "224.0.0.1", 15, "224.0.0.1"),
        // The pod has another address than the slice claims.
        ("claimed", "10.0.0.66", 16, "10.0.0.16"),
    ];
    for (name, claimed, number, own) in cases {
        fake.0.put(&service(name, 80));
        fake.0.put(&slice(name, 80, &[(claimed, number)]));
        fake.0.put(&pod(number, own));
    }
    // The slices name a pod of another namespace, a pod that does not exist, and a pod by a malformed UID.
    fake.0.put(&with(&pod(20, "10.0.0.20"), |pod| pod["metadata"]["namespace"] = "bank".into()));
    fake.0.put(&service("foreign", 80));
    fake.0.put(&slice("foreign", 80, &[("10.0.0.20", 20), ("10.0.0.21", 21)]));
    fake.0.put(&service("odd", 80));
    fake.0.put(&with(&slice("odd", 80, &[("10.0.0.1", 1)]), |slice| {
        slice["endpoints"][0]["targetRef"]["uid"] = "../../etc/passwd".into();
    }));
    fake.0.put(&service("good", 80));
    fake.0.put(&slice("good", 80, &[("10.0.0.30", 30)]));
    fake.0.put(&pod(30, "10.0.0.30"));
    let rig = Rig::start_with(fake, "", "");
    rig.leads("good", &["10.0.0.30:80"]);
    let names = cases.iter().map(|case| case.0).chain(["foreign", "odd", "web"]);
    for name in names {
        assert_eq!(rig.leads_to(name), Vec::<String>::new(), "{name}");
    }
    let left_out = json!({"claimed": 3, "waiting for pod": 1});
    eventually("the report", || (rig.registry()["report"]["left_out"] == left_out).then_some(()));
    assert_eq!(rig.registry()["denied_addresses"], 7);
    rig.was_sound();
}

#[test]
fn kinds_that_are_absent_or_forbidden_hold_readiness_only_if_they_are_needed() {
    // A kind whose CRD is not installed is not a problem, and the gateway does not soon request it again.
    let rig = Rig::live(Rig::fake());
    let asked = |plural: &str| rig.fake.seen(|asked| asked.plural == plural).len();
    assert_eq!((asked("gateways"), asked("serviceexports")), (1, 2), "one for each version");
    rig.was_sound();

    let fake = Rig::fake();
    install(&fake.0);
    fake.0.change(|world| world.forbidden.extend(["nodes", "gateways"]));
    let rig = Rig::start(fake);
    rig.gateway.ready();
    rig.names(&["nodes: forbidden (nodes is forbidden: User"]);
    rig.names(&["gateways: forbidden (gateways.gateway.networking.k8s.io is forbidden: User"]);
    assert_eq!(rig.registry()["state"], "live");
    rig.serves();

    let fake = Rig::fake();
    fake.0.change(|world| world.forbidden.extend(["services"]));
    let rig = Rig::start(fake);
    rig.names(&["services: forbidden (services is forbidden: User"]);
    assert_eq!((rig.gateway.get("/livez").0, rig.gateway.get("/readyz").0), (200, 503));
    rig.fake.change(|world| world.forbidden.clear());
    rig.recovers();

    // The server rejects credentials that it accepted before.
    let rig = Rig::live(Rig::fake());
    rig.fake.rule(|_| Some(Reply::json(401, &status(401, "Unauthorized", "Unauthorized", None))));
    rig.fake.cut();
    rig.names(&["pods: unauthorized: the API server does not accept the credentials (Unauthorized)"]);
    rig.serves();
    rig.recovers();
}

/// Starts a gateway that writes the conditions of these ServiceExports, all of Services that exist.
fn with_exports(fake: (FakeKube, Backend), names: &[&str]) -> Rig {
    install(&fake.0);
    for name in names {
        fake.0.put(&service(name, 80));
        fake.0.put(&json!({"kind": "ServiceExport", "metadata": {"namespace": "shop", "name": name}}));
    }
    Rig::start_with(fake, ALLOW, "marked: {serviceExport: true}")
}

fn forbids(asked: &Asked) -> Reply {
    Reply::json(
        403,
        &status(403, "Forbidden", &format!("{} {} is forbidden", asked.plural, asked.name), None),
    )
}

/// A path of the Lease.
fn is_lease(asked: &Asked) -> bool {
    asked.path.contains("/leases")
}

#[test]
fn a_right_to_write_conditions_is_tried_once_a_minute_until_it_is_granted() {
    let fake = Rig::fake();
    fake.0.rule(|asked| is_lease(asked).then(|| forbids(asked)));
    let rig = with_exports(fake, &["web"]);
    let tries = || rig.fake.seen(is_lease).len();
    eventually("a try", || (tries() == 1).then_some(()));
    eventually("a fact of the report", || {
        let facts = rig.registry()["report"]["facts"].to_string();
        facts.contains("not written: forbidden").then_some(())
    });
    assert_eq!(rig.problems(), Vec::<String>::new());
    // Without the pause, there would be a try every two seconds.
    thread::sleep(Duration::from_secs(10));
    assert_eq!(tries(), 1);
    rig.fake.behave();
    // There is a try each minute.
    within(Duration::from_secs(120), "the right that was granted is used", || (tries() > 1).then_some(()));
    rig.was_sound();
}

#[test]
fn an_export_whose_conditions_are_refused_does_not_hold_up_the_others() {
    let fake = Rig::fake();
    fake.0.rule(|asked| is_lease(asked).then(|| Reply::json(201, &json!({}))));
    // A policy of the cluster denies the status of one export, which is the first in the order of names.
    fake.0.rule(|asked| {
        let is_status = asked.path.ends_with("/status") && asked.plural == "serviceexports";
        is_status.then(|| if asked.name == "a" { forbids(asked) } else { Reply::json(200, &json!({})) })
    });
    let rig = with_exports(fake, &["a", "b", "c"]);
    let written =
        |name: &str| rig.fake.seen(|asked| asked.name == name && asked.path.ends_with("/status")).len();
    eventually("the other exports", || (written("b") > 0 && written("c") > 0).then_some(()));
    let tries = written("a");
    thread::sleep(Duration::from_secs(5));
    assert_eq!((written("a"), tries > 0), (tries, true));
    let facts = rig.registry()["report"]["facts"].to_string();
    assert!(facts.contains("serviceexports a is forbidden"), "{facts}");
    rig.was_sound();
}

#[test]
fn a_kind_whose_server_is_overloaded_at_the_start_is_awaited() {
    let fake = Rig::fake();
    let busy = || Reply::json(503, &status(503, "ServiceUnavailable", "busy", None));
    break_with(&fake.0, "nodes", |_| true, busy);
    let rig = Rig::start(fake);
    rig.names(&["nodes: ", "busy"]);
    assert_eq!((rig.gateway.get("/livez").0, rig.gateway.get("/readyz").0), (200, 503));
    assert_eq!(rig.registry()["state"], "missing");
    rig.recovers();
}

#[test]
fn what_is_amiss_with_a_cluster_is_in_the_status() {
    let fake = Rig::fake();
    install(&fake.0);
    let rig = Rig::live(fake);
    let fake = &rig.fake;
    // Waits until the status has a problem of the registry with all these texts.
    let shown = |texts: &[&str]| {
        eventually(&format!("{texts:?} in the status"), || {
            let problems = rig.gateway.json("/api/v1/status")["problems"].clone();
            let mut all = problems.as_array().expect("a list").iter();
            let is_it = |problem: &&Value| problem["code"] == "registry_impaired";
            let text = all.find(is_it).map_or_else(String::new, |problem| problem["text"].to_string());
            texts.iter().all(|part| text.contains(part)).then_some(())
        });
    };
    let is_well = || {
        eventually("no problem", || {
            (rig.gateway.json("/api/v1/status")["problems"] == json!([])).then_some(())
        });
    };
    for (ahead, side) in [(3_600, "s ahead of"), (-100, "s behind")] {
        fake.set_clock(ahead);
        shown(&["the clock of the API server is", side, "synchronise both clocks"]);
        fake.set_clock(20);
        is_well();
    }
    // Teams have exported a Service that does not exist, and one that cannot be exported.
    let export =
        |name: &str| json!({"kind": "ServiceExport", "metadata": {"namespace": "shop", "name": name}});
    fake.put(&export("web"));
    fake.put(&export("nothing"));
    shown(&["a ServiceExport has no effect: the Service shop/nothing does not exist"]);
    let external = json!({"type": "ExternalName", "externalName": "example.com"});
    fake.put(&json!({"kind": "Service", "metadata": {"namespace": "shop", "name": "ext"}, "spec": external}));
    fake.put(&export("ext"));
    shown(&["2 ServiceExports have no effect; the first one: the Service shop/ext is of type ExternalName"]);
    fake.delete("serviceexports", "shop/ext");
    fake.put(&service("nothing", 80));
    is_well();
    // The load balancer of this gateway has no address yet. If the clock is wrong as well, both problems are shown.
    let ports = json!([{"name": "tls", "port": 15443, "targetPort": 15443}]);
    let meta = json!({"namespace": "istio-system", "name": "eastwest", "labels": {"topology.istio.io/network": "net"}});
    fake.put(&json!({"kind": "Service", "metadata": meta, "spec": {"type": "LoadBalancer", "ports": ports}}));
    fake.set_clock(-100);
    shown(&[
        "Service istio-system/eastwest, a gateway of network net, has no address",
        "the clock of the API server",
    ]);
    fake.set_clock(1);
    fake.delete("services", "istio-system/eastwest");
    is_well();
    // If the config names no network, the cluster's network is the label of the system namespace.
    let config = format!(
        "listen: \"127.0.0.1:0\"\nnode: {{cluster: east, network: net}}\nexports: [{{services: [\"*\"], tls: own}}]\n\
         registries: [{{kubernetes: {{cluster: east, kubeconfig: east.kubeconfig}}, {ALLOW}}}]\n"
    );
    rig.gateway.reload(&config);
    shown(&[
        "the network of the cluster is unknown: the namespace istio-system has no label topology.istio.io/network",
    ]);
    let labels = json!({"topology.istio.io/network": "net"});
    fake.put(&json!({"kind": "Namespace", "metadata": {"name": "istio-system", "labels": labels}}));
    is_well();
    rig.was_sound();
}

#[test]
fn kubeconfigs_that_start_programs_or_read_files_are_refused_with_their_place() {
    let fake = FakeKube::start();
    let (good, user) = (fake.cluster(), format!("{{token: {TOKEN}}}"));
    let by_user = |user: &str| fake.kubeconfig_of(&good, user);
    let by_cluster = |cluster: &str| fake.kubeconfig_of(cluster, &user);
    let started = "touch, args: [started]";
    let alias_bomb = (1..30).fold("a0: &a0 [x, x]\n".to_owned(), |text, at| {
        let before = at - 1;
        format!("{text}a{at}: &a{at} [*a{before}, *a{before}, *a{before}, *a{before}]\n")
    });
    let kubeconfigs: [(String, &str); 16] = [
        (
            by_user(&format!(
                "{{exec: {{apiVersion: client.authentication.k8s.io/v1, command: {started}}}}}"
            )),
            "users[0].user.exec",
        ),
        (
            by_user(&format!(
                "{{auth-provider: {{name: gcp, config: {{cmd-path: touch, cmd-args: started}}}}, token: {TOKEN}}}"
            )),
            r#"users[0].user["auth-provider"]"#,
        ),
        (by_user("{tokenFile: token}"), "users[0].user.tokenFile"),
        (
            by_user("{client-certificate: c.pem, client-key-data: eA==}"),
            r#"users[0].user["client-certificate"]"#,
        ),
        (by_user("{client-certificate-data: eA==, client-key: k.pem}"), r#"users[0].user["client-key"]"#),
        (by_user("{as: \"a\\nb\", token: x}"), "users[0].user.as"),
        (by_user("{}"), "found neither token nor client-certificate-data"),
        (
            by_cluster(&format!("{good}, insecure-skip-tls-verify: true")),
            r#"clusters[0].cluster["insecure-skip-tls-verify"]"#,
        ),
        (
            by_cluster(&format!("{good}, proxy-url: \"http://127.0.0.1:1\"")),
            r#"clusters[0].cluster["proxy-url"]"#,
        ),
        (
            by_cluster(&format!("{good}, certificate-authority: ca.pem")),
            r#"clusters[0].cluster["certificate-authority"]"#,
        ),
        (by_cluster(&good.replace("https:", "http:")), "clusters[0].cluster.server"),
        (by_cluster("server: \"https://127.0.0.1:1\""), "certificate-authority-data"),
        (
            by_cluster("server: \"https://127.0.0.1:1\", certificate-authority-data: \"?\""),
            r#"clusters[0].cluster["certificate-authority-data"]"#,
        ),
        (format!("{}#{}\n", fake.kubeconfig(), "x".repeat(10 << 20)), "kubeconfig"),
        ("{".to_owned(), "kubeconfig"),
        (format!("{alias_bomb}{}", "current-context: x\n"), "kubeconfig"),
    ];
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("written");
    let mut registries = Vec::new();
    for (at, (text, _)) in kubeconfigs.iter().enumerate() {
        file(&format!("{at}.kubeconfig"), text);
        registries.push(format!("{{kubernetes: {{cluster: c{at}, kubeconfig: {at}.kubeconfig}}}}"));
    }
    for name in ["token", "c.pem", "k.pem", "ca.pem"] {
        file(name, "secret");
    }
    file(
        "isthmus.yaml",
        &format!(
            "admin: {{bind: \"127.0.0.1:0\"}}\ntelemetry: {{log: {{format: json}}}}\nlisten: \"127.0.0.1:0\"\nnode: {{cluster: own}}\n\
             aggregator: {{startTimeout: 1s}}\n\
             registries: [{}]\n",
            registries.join(", ")
        ),
    );
    let strace = Command::new("strace").args(["-D", "-f", "-o", "/dev/null", "true"]).output();
    let is_traced = strace.is_ok_and(|strace| strace.status.success());
    let mut command = Command::new(if is_traced { "strace" } else { BINARY });
    if is_traced {
        // With -D, strace runs as a grandchild, so that the gateway is the child of this process.
        command.args(["-D", "-f", "-e", "trace=execve,openat", "-o", "trace", BINARY]);
    } else {
        skip(
            "kubernetes_hostile: strace does not work here, so programs that are started are not looked for",
        );
    }
    command.args(["run", "-c", "isthmus.yaml"]).current_dir(folder.path());
    let gateway = Gateway::spawn(command, folder);
    let shown = |at: usize| {
        gateway.json("/api/v1/registries")[at]["problems"].as_array().cloned().unwrap_or_default()
    };
    for (at, (_, place)) in kubeconfigs.iter().enumerate() {
        let problems =
            eventually(&format!("{at}: {place}"), || Some(shown(at)).filter(|shown| !shown.is_empty()));
        let is_named = problems.iter().any(|line| line.as_str().is_some_and(|line| line.contains(place)));
        assert!(is_named, "{at}: {place}: {problems:?}");
        let text = json!(problems).to_string();
        assert!(text.len() < 4_000 && !text.contains(TOKEN) && !text.contains("secret"), "{text}");
    }
    assert!(!gateway.folder().join("started").exists());
    assert!(fake.seen(|_| true).is_empty());
    if is_traced {
        let trace = std::fs::read_to_string(gateway.folder().join("trace")).expect("a trace");
        assert_eq!(trace.matches("execve(").count(), 1, "{trace}");
        assert!(trace.contains("0.kubeconfig"), "{trace}");
        for secret in ["/token\"", "\"token\"", "c.pem\"", "k.pem\"", "ca.pem\""] {
            assert!(!trace.contains(secret), "{secret}: {trace}");
        }
    }
    let log = gateway.log();
    assert!(!log.iter().any(|line| line.contains("panicked")), "{log:?}");
}

/// Returns a Secret as `istioctl create-remote-secret` writes it: kubeconfigs by cluster.
fn secret(name: &str, kubeconfigs: &[(&str, &str)]) -> Value {
    let data =
        kubeconfigs.iter().map(|(cluster, text)| ((*cluster).to_owned(), encoded(text.as_bytes()).into()));
    json!({
        "kind": "Secret", "data": data.collect::<serde_json::Map<_, _>>(),
        "metadata": {"namespace": "istio-system", "name": name, "labels": {"istio/multiCluster": "true"}}
    })
}

/// Starts a gateway with the fake's service account mounted at the usual path of a pod. Returns `None`, after reporting a skip,
/// if this host allows no mount namespace.
fn start_in_pod(fake: &FakeKube, config: &str) -> Option<Gateway> {
    const PLACE: &str = "/run/secrets/kubernetes.io/serviceaccount";
    let can = Command::new("unshare").args(["-m", "mount", "-t", "tmpfs", "none", "/run"]).output();
    if !can.is_ok_and(|can| can.status.success()) {
        skip(
            "kubernetes_hostile: no mount namespace can be made here (unshare -m), so there is no service account of a pod",
        );
        return None;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("written");
    std::fs::create_dir(folder.path().join("account")).expect("made");
    file("account/token", TOKEN);
    file("account/ca.crt", &fake.ca_pem());
    file(
        "isthmus.yaml",
        &format!("admin: {{bind: \"127.0.0.1:0\"}}\ntelemetry: {{log: {{format: json}}}}\n{config}"),
    );
    let mount = format!(
        "mount -t tmpfs none /run; mkdir -p {PLACE}; mount --bind account {PLACE}; exec \"$0\" \"$@\""
    );
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-ec", &mount, BINARY, "run", "-c", "isthmus.yaml"]).current_dir(folder.path());
    command.env("KUBERNETES_SERVICE_HOST", "127.0.0.1");
    command.env("KUBERNETES_SERVICE_PORT", fake.address.port().to_string());
    Some(Gateway::spawn(command, folder))
}

#[test]
fn two_secrets_with_one_cluster_at_the_start_are_in_the_status() {
    let (fake, _backend) = Rig::fake();
    let good = fake.kubeconfig();
    let created = |secret: &Value, time: &str| {
        with(secret, |secret| secret["metadata"]["creationTimestamp"] = time.into())
    };
    fake.put(&created(&secret("older", &[("west", &good)]), "2026-01-01T00:00:00Z"));
    let newer = secret("newer", &[("west", &good), ("north", &good)]);
    fake.put(&created(&newer, "2026-01-02T00:00:00Z"));
    // The config itself names one of the clusters.
    let config = "listen: \"127.0.0.1:0\"\nnode: {cluster: own, network: net}\nexports: [{services: [\"*\"], tls: own}]\n\
                  registries: [{kubernetes: {cluster: north}}, {kubernetesClusters: {secrets: {namespace: istio-system}}}]\n";
    let Some(gateway) = start_in_pod(&fake, config) else { return };
    let clusters = || -> Vec<Value> {
        let registries = gateway.json("/api/v1/registries").as_array().cloned().unwrap_or_default();
        registries.iter().map(|registry| registry["cluster"].clone()).collect()
    };
    eventually("both clusters", || (clusters() == ["north", "west"]).then_some(()));
    // The conflicts have existed since the start. The problems of the first listing stay in the status.
    let why = "Secret istio-system/newer[west]: the kubeconfig is ignored, because the older Secret istio-system/older also has the \
         cluster west";
    let problems = || -> Vec<Value> {
        let problems = gateway.json("/api/v1/status")["problems"].as_array().cloned().unwrap_or_default();
        let claimed = problems.iter().filter(|problem| problem["code"] == "cluster_claimed_twice");
        claimed.map(|problem| problem["text"].clone()).collect()
    };
    let named = "kubernetesClusters/secrets/istio-system: the cluster north is ignored, because another registry reads it \
                 already";
    assert_eq!(problems(), [why]);
    assert_eq!(gateway.json("/api/v1/status")["config"]["warnings"], json!([named]));
    [why, named].iter().for_each(|why| gateway.told(why));
    // A Secret that is created later takes nothing over, whatever its name. When the oldest one is deleted, the next one counts.
    fake.put(&created(&secret("aaa", &[("west", &good)]), "2026-01-03T00:00:00Z"));
    let third = "Secret istio-system/aaa[west]: the kubeconfig is ignored, because the older Secret istio-system/older also has the \
         cluster west";
    eventually("two problems", || (problems() == [why, third]).then_some(()));
    fake.delete("secrets", "istio-system/older");
    let third = third.replace("Secret istio-system/older", "Secret istio-system/newer");
    eventually("one problem", || (problems() == [third.as_str()]).then_some(()));
    assert_eq!(clusters(), ["north", "west"]);
}

#[test]
fn secrets_with_many_clusters_or_one_twice_or_with_mistakes_cost_no_other() {
    let (fake, backend) = Rig::fake();
    let config = format!(
        "listen: \"127.0.0.1:0\"\nnode: {{cluster: own, network: net}}\nexports: [{{services: [\"*\"], tls: own}}]\n\
         aggregator: {{startTimeout: 1s}}\nregistries: [{{kubernetesClusters: {{secrets: {{namespace: istio-system}}}}, {ALLOW}}}]\n"
    );
    let good = fake.kubeconfig();
    let names: Vec<String> = (0..10).map(|number| format!("c{number}")).collect();
    let ten: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), good.as_str())).collect();
    fake.put(&secret("ten", &ten));
    let exec = fake.kubeconfig_of(&fake.cluster(), "{exec: {command: touch, args: [started]}}");
    fake.put(&secret("bad", &[("bad", &exec), ("../evil", "x"), ("empty", "")]));
    let namespace = json!({"kind": "Namespace", "metadata": {"name": "istio-system", "labels": {"topology.istio.io/network": "net"}}});
    fake.put(&namespace);
    let Some(gateway) = start_in_pod(&fake, &config) else { return };
    let states = || -> Vec<String> {
        let registries = gateway.json("/api/v1/registries");
        let live =
            registries.as_array().expect("a list").iter().filter(|registry| registry["state"] == "live");
        live.map(|registry| registry["cluster"].as_str().expect("a name").to_owned()).collect()
    };
    eventually("ten clusters", || (states() == names).then_some(()));
    let told = |path: &str, text: &str| {
        eventually(text, || gateway.get(path).1.contains(text).then_some(()));
    };
    told("/api/v1/registries", "Secret istio-system/bad[bad]:1:");
    told("/api/v1/registries", "users[0].user.exec: refused");
    // If two Secrets of the same age have one cluster, the Secret whose name sorts first counts.
    fake.put(&secret("zzz", &[("c3", &exec)]));
    told(
        "/api/v1/status",
        "Secret istio-system/zzz[c3]: the kubeconfig is ignored, because the older Secret istio-system/ten also has the cluster c3",
    );
    let serves = || {
        let mut session = tls(gateway.listener("default"), WEB).expect("a handshake");
        assert_eq!(call(&mut session, "hello").expect("an answer"), "hello");
    };
    serves();
    // The clusters of a Secret that becomes unreadable stay. The clusters of a Secret that is deleted are removed.
    fake.put(&with(&secret("ten", &ten), |secret| secret["data"] = json!({"c0": 7})));
    fake.delete("secrets", "istio-system/bad");
    told("/api/v1/status", "Secret istio-system/ten: invalid type");
    eventually("no bad cluster", || {
        (gateway.json("/api/v1/registries").as_array().expect("a list").len() == 10).then_some(())
    });
    assert_eq!(states(), names);
    serves();
    fake.put(&secret("ten", &ten[..1]));
    fake.delete("secrets", "istio-system/zzz");
    eventually("one cluster", || (states() == ["c0"]).then_some(()));
    assert!(!gateway.folder().join("started").exists());
    let log = gateway.log();
    assert!(!log.iter().any(|line| line.contains("panicked")), "{log:?}");
    drop(backend);
}
