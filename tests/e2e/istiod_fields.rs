//! The gateway sends ztunnels and Envoys for the objects of one cluster what an istiod sends for the same objects, field by
//! field, but for the differences that are listed here. The istiod's values are in `tests/golden/istiod.json`, which
//! `tests/interop/istiod_fields.py` writes with a running istiod.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::support::fake_kube::{FakeKube, Reply};
use crate::support::gateway::Gateway;
use crate::support::kube_world::Asked;
use crate::support::pki::PKI;
use crate::support::python;

const CONFIG: &str = "listen: \"127.0.0.1:0\"\nnode: {cluster: east, network: net-east, namespace: istio-system}\n\
    networks: {net-west: {gateways: [{address: 192.0.2.2, sniPort: 15443}], probe: off}}\n\
    exports: [{services: [\"*\"]}]\n\
    registries: [{kubernetes: {cluster: east, kubeconfig: east.kubeconfig, destinationRules: true, manualEndpoints: true}, allow: {networks: [net-east, net-west]}}]\n\
    xds:\n  bind: \"127.0.0.1:0\"\n  wds:\n    bind: \"127.0.0.1:0\"\n    tls: {certificate: cert.pem, key: key.pem}\n    \
    tokens: {kubernetes: {}}\n    \
    clients: [{identities: ['spiffe://cluster.local/ns/istio-system/sa/ztunnel'], clusters: [east]}]\n";

/// Stands for a field or resource that is not sent.
const ABSENT: &str = "-";

/// The differences that are accepted: a reason, and the fields for which it holds, each as section, name, path, the istiod's value and the
/// gateway's. `*` stands for any text, and ` or ` is between patterns of names. Values are JSON, or `there` for a whole resource.
const ACCEPTED: &[(&str, &[[&str; 5]])] = &[
    (
        "an endpoint without a pod is one workload by its address, whichever slices have it",
        &[
            ["addresses", "*/discovery.k8s.io/EndpointSlice/*", "", "there", "-"],
            ["addresses", "Endpoint/*", "", "-", "there"],
        ],
    ),
    (
        "a pod with the label of another network is behind that network's gateway; istiod ignores the label",
        &[["addresses", "*/network-0", "", "there", "-"]],
    ),
    (
        "a service without TCP ports is none for the gateway",
        &[
            ["addresses", "amb/headless-no-port*", "", "there", "-"],
            ["addresses", "amb/only-udp*", "", "there", "-"],
        ],
    ),
    (
        "ztunnels carry TCP alone",
        &[
            ["addresses", "amb/datagrams*", "service / ports / *", "*", "*"],
            ["addresses", "*/datagrams-0", "workload / services / *", "*", "-"],
            ["addresses", "*/only-udp-0", "workload / services / *", "*", "-"],
        ],
    ),
    (
        "a workload is a member of the services of which it has a port",
        &[
            ["addresses", "*/headless-no-port-0", "workload / services / *", "{}", "-"],
            ["addresses", "*/target-absent-0", "workload / services / *", "{}", "-"],
        ],
    ),
    (
        "no ztunnel reads it, and registries do not say that a port has no protocol",
        &[["addresses", "*", "service / ports / * / app_protocol", "-", r#""TCP""#]],
    ),
    (
        "gRPC-Web; no ztunnel reads it",
        &[["addresses", "*", "service / ports / * / app_protocol", "-", r#""GRPC""#]],
    ),
    (
        "a waypoint of another network is used if none is here",
        &[
            ["addresses", "way/*", "service / load_balancing / *", "-", "*"],
            ["addresses", "entry/gate*", "service / load_balancing / *", "-", "*"],
        ],
    ),
    (
        "callers of other networks need them; istiod sends them in its multi-network mode alone",
        &[["addresses", "*", "service / subject_alt_names", "-", "*"]],
    ),
    ("shares of calls", &[["addresses", "*", "workload / capacity", "-", "*"]]),
    (
        "for an istiod, every selector selects a pod without labels",
        &[["addresses", "*/bare", "workload / authorization_policies", "*", "-"]],
    ),
    (
        "a policy in dry run is sent, so that its refusals are counted; istiod leaves it out by default",
        &[
            ["addresses", "*/dual-0", "workload / authorization_policies", "*", "*"],
            ["policies", "amb/dry", "", "-", "there"],
        ],
    ),
    (
        "one clause for all ports instead of one for each; they refuse the same connections",
        &[["policies", "*/converted_peer_authentication_*", "rules / *", "*", "*"]],
    ),
    (
        "the label istio-locality counts, as for sidecars",
        &[["addresses", "*/locality-0", "workload / locality / *", "*", "*"]],
    ),
    ("the label istio.io/draining counts", &[["addresses", "*/draining-0", "workload / status", "-", "*"]]),
    (
        "no slice has the pod, so that it serves nothing",
        &[["addresses", "*/states-terminating-unready", "workload / *", "*", "-"]],
    ),
    (
        "a service that takes unready pods has them as ready in its slices",
        &[["addresses", "*/unready-*-2", "workload / status", r#""UNHEALTHY""#, "-"]],
    ),
    (
        "a TCP port whose name says UDP is a port where ztunnels are served too",
        &[
            ["clusters", "*|1013||apps.*", "", "-", "there"],
            ["clusters", "*|1015||names.*", "", "-", "there"],
            ["assignments", "*|1013||apps.*", "", "-", "there"],
            ["assignments", "*|1015||names.*", "", "-", "there"],
        ],
    ),
    (
        "networking.istio.io/exportTo hides a service from other networks, not from clients of xDS",
        &[["clusters", "*||export-*", "", "-", "there"], ["assignments", "*||export-*", "", "-", "there"]],
    ),
    (
        "an Envoy's cluster is for TCP",
        &[
            ["clusters", "*|90||datagrams.*", "", "there", "-"],
            ["assignments", "*|90||datagrams.*", "", "there", "-"],
        ],
    ),
    (
        "no endpoint takes the mesh's mutual TLS, so that the cluster needs no secret",
        &[["clusters", "*||disabled-peer.*", "sockets / *", "*", "-"]],
    ),
    (
        "for Istio's telemetry",
        &[
            ["clusters", "*", "alt_stat_name", "*", "-"],
            ["clusters", "*", "filters / *", "*", "-"],
            ["clusters", "*", "metadata / filter_metadata / istio*", "*", "-"],
            ["assignments", "*", "endpoints / * / istio / workload", "*", "-"],
        ],
    ),
    ("routes may have the priority", &[["clusters", "*", "circuit_breakers / HIGH / *", "-", "4294967295"]]),
    (
        "traffic policies of DestinationRules are not read",
        &[
            ["clusters", "*pool.rules*", "circuit_breakers / DEFAULT / *", "*", "4294967295"],
            ["clusters", "*pool.rules*", "connect_timeout", r#""5s""#, r#""3s""#],
            ["clusters", "*hashed.rules*", "ring_hash_lb_config / *", "*", "-"],
            ["clusters", "*outliers.rules*", "outlier_detection / *", "*", "*"],
            ["clusters", "*.rules.*", "sockets / {} / *", "*", "*"],
            [
                "clusters",
                "*disable.rules* or *mutual.rules* or *simple.rules*",
                r#"sockets / {"tlsMode": "istio"} / *"#,
                "-",
                "*",
            ],
            ["clusters", "*pool.rules*", "typed_extension_protocol_options / *", "*", "-"],
        ],
    ),
    (
        "a network that is gone costs each call this time",
        &[["clusters", "*", "connect_timeout", r#""10s""#, r#""3s""#]],
    ),
    (
        "endpoints that are not ready are for need; 0 with panic: false",
        &[["clusters", "*", "common_lb_config / healthy_panic_threshold*", "*", "*"]],
    ),
    (
        "a gateway counts as one endpoint of its zone",
        &[["clusters", "*", "common_lb_config / zone_aware_lb_config / routing_enabled", "-", "{}"]],
    ),
    (
        "endpoints have weights of their own; priorities are by network",
        &[["clusters", "*", "common_lb_config / locality_weighted_lb_config", "{}", "-"]],
    ),
    (
        "an Envoy that gets no endpoints starts after 15 s",
        &[["clusters", "*", "eds_cluster_config / eds_config / initial_fetch_timeout", r#""0s""#, "-"]],
    ),
    (
        "a headless service has its endpoints, as the client may capture nothing",
        &[
            ["clusters", "*headless*", "eds_cluster_config / *", "-", "*"],
            ["clusters", "*headless*", "type", r#""ORIGINAL_DST""#, r#""EDS""#],
            ["clusters", "*headless*", "sockets / all / *", "*", "-"],
            ["clusters", "*headless*", "sockets / *", "*", "*"],
            ["assignments", "*headless*", "", "-", "there"],
        ],
    ),
    (
        "a gateway stands for many endpoints: calls follow weights alone",
        &[["clusters", "*", "lb_policy", "*", "-"]],
    ),
    ("a registry may list a dead network for long", &[["clusters", "*", "outlier_detection / *", "-", "*"]]),
    (
        "HBONE of an Envoy needs listeners of a sidecar",
        &[
            ["clusters", "*", r#"sockets / {"tunnel": "http"} / *"#, "*", "-"],
            ["assignments", "*", "endpoints / * / envoy.transport_socket_match / tunnel", r#""http""#, "-"],
            ["assignments", "*", "endpoints / * / through", "*", "-"],
        ],
    ),
    (
        "the secrets are static ones of the Envoy",
        &[["clusters", "*", r#"sockets / {"tlsMode": "istio"} / * / sds_config / *"#, "*", "-"]],
    ),
    (
        "there is no exchange of metadata",
        &[[
            "clusters",
            "*",
            r#"sockets / {"tlsMode": "istio"} / * / alpn_protocols"#,
            r#"*"istio-peer-exchange","istio"*"#,
            r#"["istio"*"#,
        ]],
    ),
    (
        "without endpoints of the mesh, the socket accepts no server, and needs no secrets",
        &[
            [
                "clusters",
                "*.amb.* or *.way.* or *.far.* or *.entry.* or *.close.* or *||plain-pod.*",
                r#"sockets / {"tlsMode": "istio"} / *"#,
                "*",
                "-",
            ],
            [
                "clusters",
                "*",
                r#"sockets / {"tlsMode": "istio"} / * / verify_certificate_hash"#,
                "-",
                r#"["00*"#,
            ],
        ],
    ),
    (
        "registries do not say that a port has no protocol",
        &[
            [
                "clusters",
                "*",
                "typed_extension_protocol_options / * / use_downstream_protocol_config / *",
                "{}",
                "-",
            ],
            ["clusters", "*", "typed_extension_protocol_options / * / @type", "*", "-"],
        ],
    ),
    ("the same for Envoy, and no bytes", &[["assignments", "*", "* / health_status", r#""HEALTHY""#, "-"]]),
    (
        "a pod that ends keeps its open calls",
        &[["assignments", "*", "* / health_status", r#""UNHEALTHY""#, r#""DRAINING""#]],
    ),
    (
        "the label istio.io/draining counts; an istiod leaves the pod out",
        &[["assignments", "*||draining.*", "*", "*", "*"]],
    ),
    (
        "a pod that ends and is not ready is left out, or is as unready as its slices say",
        &[["assignments", "*||states.amb*", "endpoints / * / *", "*", "-"]],
    ),
    (
        "an istiod gives the endpoints of the client's node; here near ones have priority 0",
        &[["assignments", "*||local*", "endpoints / *", "-", "*"]],
    ),
    (
        "a pod with two addresses is one endpoint with both",
        &[["assignments", "*dual*", "endpoints / *", "*", "*"]],
    ),
    (
        "the target of a slice's endpoint needs the pod's UID",
        &[["assignments", "*||selects-by-slice.*", "endpoints / *", "*", "-"]],
    ),
    (
        "a gateway has its own locality",
        &[["assignments", "*||network.*", "endpoints / * / locality: locality*", "*", "*"]],
    ),
    (
        "endpoints have weights of their own",
        &[["assignments", "*", "endpoints / * / locality: load_balancing_weight", "*", "-"]],
    ),
    (
        "priorities are by network; within one, calls are not divided by zone",
        &[["assignments", "*", "endpoints / * / locality: priority", "*", "-"]],
    ),
    (
        "the node that a slice names gives the locality",
        &[["assignments", "*no-selector-two*", "endpoints / * / locality: locality*", "*", "*"]],
    ),
];

/// A field that differs, or a resource that only one has.
#[derive(Debug)]
struct Difference {
    section: &'static str,
    name: String,
    path: String,
    istiod: String,
    here: String,
}

#[test]
fn clients_are_told_field_by_field_what_an_istiod_tells_them() {
    let Some(python) = python::with_authorities() else { return };
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/istiod.json");
    let istiod: Value =
        serde_json::from_str(&std::fs::read_to_string(golden).expect("golden")).expect("JSON");
    let fake = FakeKube::start();
    let review = json!({"status": {"authenticated": true, "audiences": ["istio-ca"],
        "user": {"username": "system:serviceaccount:istio-system:ztunnel"}}});
    fake.rule(move |asked: &Asked| asked.path.ends_with("/tokenreviews").then(|| Reply::json(201, &review)));
    fake.change(|world| {
        world.installed.extend([
            "authorizationpolicies",
            "peerauthentications",
            "gateways",
            "gatewayclasses",
            "destinationrules",
        ]);
        let objects = istiod["objects"].as_array().expect("a list");
        objects.iter().for_each(|object| world.put(object));
    });
    let folder = tempfile::tempdir().expect("a folder");
    let issued = PKI.issue(&["isthmus.test"], None);
    for (name, text) in [
        ("cert.pem", &issued.certificate_pem),
        ("key.pem", &issued.key_pem),
        ("roots.pem", &PKI.ca_pem()),
        ("east.kubeconfig", &fake.kubeconfig()),
    ] {
        std::fs::write(folder.path().join(name), text).expect("written");
    }
    let gateway = Gateway::start_in(folder, CONFIG, &[]);
    let take = |arguments: &[&str]| -> Value {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop/fields.py");
        let taken = Command::new(&python).arg(script).args(arguments).output().expect("Python starts");
        assert!(taken.status.success(), "{}", String::from_utf8_lossy(&taken.stderr));
        serde_json::from_slice(&taken.stdout).expect("JSON")
    };
    let roots = gateway.folder().join("roots.pem");
    let wds = gateway.listener("wds").to_string();
    let mut here = take(&["ztunnel", &wds, roots.to_str().expect("a path"), "isthmus.test", "a-jwt"]);
    let of_envoy = take(&["envoy", &gateway.listener("xds").to_string()]);
    here.as_object_mut().expect("a map").extend(of_envoy.as_object().expect("a map").clone());
    if let Some(path) = std::env::var_os("ISTHMUS_FIELDS") {
        std::fs::write(path, here.to_string()).expect("written");
    }
    let (unlisted, unused) = judged(&differences(&istiod, &here));
    assert!(unlisted.is_empty(), "{} differences are not listed:\n{}", unlisted.len(), unlisted.join("\n"));
    assert!(unused.is_empty(), "rows that fit no difference:\n{}", unused.join("\n"));
}

/// Returns the differences that no row accepts, and the rows that accept none.
fn judged(differences: &[Difference]) -> (Vec<String>, Vec<String>) {
    let rows = || ACCEPTED.iter().flat_map(|(reason, rows)| rows.iter().map(move |row| (*reason, row)));
    let mut used = BTreeSet::new();
    let mut unlisted = Vec::new();
    for found in differences {
        let Difference { section, name, path, istiod, here } = found;
        let accepts = |(_, [of, names, paths, theirs, ours]): (&str, &[&str; 5])| {
            of == section
                && names.split(" or ").any(|one| fits(one, name))
                && fits(paths, path)
                && fits(theirs, istiod)
                && fits(ours, here)
        };
        match rows().position(accepts) {
            Some(row) => drop(used.insert(row)),
            None => unlisted.push(format!("{section} {name} {path}: istiod {istiod}, here {here}")),
        }
    }
    let unused = rows().enumerate().filter(|(at, _)| !used.contains(at));
    (unlisted, unused.map(|(_, (reason, row))| format!("{row:?}: {reason}")).collect())
}

/// Returns true if a text fits a pattern, in which `*` stands for any text.
fn fits(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((begin, rest)) => text.strip_prefix(begin).is_some_and(|after| {
            let mut starts = after.char_indices().map(|(at, _)| at).chain([after.len()]);
            starts.any(|at| fits(rest, &after[at..]))
        }),
    }
}

/// The fields of each resource by their paths.
type Fields = BTreeMap<String, BTreeMap<String, String>>;

const SECTIONS: [&str; 4] = ["addresses", "policies", "clusters", "assignments"];

fn differences(istiod: &Value, here: &Value) -> Vec<Difference> {
    let mut all = Vec::new();
    for section in SECTIONS {
        let (theirs, ours) = (expanded(&istiod[section]), fields(&here[section]));
        assert!(theirs.len() > 50, "{section}: an istiod sends more");
        let (empty, names) = (BTreeMap::new(), theirs.keys().chain(ours.keys()).collect::<BTreeSet<_>>());
        for name in names {
            let mut add = |path: &str, istiod: &str, here: &str| {
                let [istiod, here, path] = [istiod, here, path].map(str::to_owned);
                all.push(Difference { section, name: name.clone(), path, istiod, here });
            };
            match (theirs.contains_key(name), ours.contains_key(name)) {
                (true, false) => add("", "there", ABSENT),
                (false, true) => add("", ABSENT, "there"),
                _ => {
                    let [theirs, ours] = [&theirs, &ours].map(|all| all.get(name).unwrap_or(&empty));
                    let of = |fields: &BTreeMap<String, String>, path: &str| {
                        fields.get(path).map_or(ABSENT, String::as_str).to_owned()
                    };
                    for path in theirs.keys().chain(ours.keys()).collect::<BTreeSet<_>>() {
                        let (istiod, here) = (of(theirs, path), of(ours, path));
                        if istiod != here {
                            add(path, &istiod, &here);
                        }
                    }
                }
            }
        }
    }
    all
}

/// Returns the fields of resources as a file has them: those that are usual, and for each resource how it differs.
fn expanded(section: &Value) -> Fields {
    let map = |value: &Value| value.as_object().expect("a map").clone();
    let usual = map(&section["usual"]);
    let one = |(name, own): (&String, &Value)| {
        let mut fields = usual.clone();
        fields.extend(map(own));
        let parts: Vec<&str> = name.split('|').skip(1).collect();
        let sni = format!("outbound_.{}", parts.join("_."));
        let whole = |value: &Value| value.to_string().replace("{name}", name).replace("{sni}", &sni);
        let fields = fields.iter().filter(|(_, value)| !value.is_null());
        (name.clone(), fields.map(|(path, value)| (path.clone(), whole(value))).collect())
    };
    map(&section["each"]).iter().map(one).collect()
}

fn fields(section: &Value) -> Fields {
    let of = |(name, value): (&String, &Value)| {
        let mut fields = BTreeMap::new();
        leaves(value, String::new(), &mut fields);
        (name.clone(), fields)
    };
    section.as_object().expect("a map").iter().map(of).collect()
}

/// Adds the fields of a value by their paths. A list of plain values is one field.
fn leaves(value: &Value, path: String, into: &mut BTreeMap<String, String>) {
    let below = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path} / {key}") };
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            fields.iter().for_each(|(key, value)| leaves(value, below(key), into));
        }
        Value::Array(items) if items.iter().any(Value::is_object) => {
            items.iter().enumerate().for_each(|(at, value)| leaves(value, below(&at.to_string()), into));
        }
        _ => drop(into.insert(path, value.to_string())),
    }
}
