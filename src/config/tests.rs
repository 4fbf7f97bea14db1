//! Tests of config files: the values of good files, and the messages about bad files.

use std::collections::BTreeSet;
use std::fs;

use serde_json::{Value, json};

use super::*;
use isthmus_document::problem::Path as KeyPath;
use isthmus_model::endpoint::Weight;
use isthmus_model::limits::MemoryLimit;
use isthmus_settings::route::{RouteName, RouteTarget};
use isthmus_settings::tuning::{LoadBalancing, LocalityMode};
use isthmus_telemetry::access_log::{Format, Sink};

mod aggregation;
mod bad;
mod files;
mod generated;
mod identity;
mod listeners;
mod peers;
mod registries;
mod tracing;

/// Loads a text as the file `c.yaml`.
fn load_text(text: &str) -> Result<Config, Vec<String>> {
    let directory = tempfile::tempdir().expect("a directory");
    // The folder of the pattern that the example includes.
    fs::create_dir(directory.path().join("conf.d")).expect("a directory");
    fs::write(directory.path().join("c.yaml"), text).expect("a file");
    load_file(directory.path(), "c.yaml")
}

/// Loads a file or directory; messages name files relative to the directory.
fn load_file(directory: &Path, file: &str) -> Result<Config, Vec<String>> {
    let environment = |name: &str| match name {
        "PORT" => Some("18443".into()),
        "WEIGHT" => Some("7".into()),
        "KEY" => Some("{a: b}".into()),
        _ => None,
    };
    let prefix = format!("{}/", directory.display());
    load(&directory.join(file), &environment, &mut |_| {})
        .map_err(|list| list.iter().map(|problem| problem.to_string().replace(&prefix, "")).collect())
}

#[track_caller]
fn loaded(text: &str) -> Config {
    load_text(text).unwrap_or_else(|problems| panic!("{}", problems.join("\n")))
}

#[test]
fn the_smallest_file_is_four_lines() {
    let config = loaded(
        "listen: \":15443\"\nroutes:\n  checkout.shop.mesh: 10.0.1.5:8443\n  \"*.billing.mesh\": [10.0.2.5:8443, \
         10.0.2.6:8443]\n",
    );
    let listener = &config.policy.listeners[0];
    assert_eq!((&*listener.name, listener.bind), ("default", Bind::Any { port: 15_443 }));
    let keys: Vec<String> = config.policy.routes.iter().map(|route| route.key.to_string()).collect();
    assert_eq!(keys, ["checkout.shop.mesh", "*.billing.mesh"]);
    let RouteTarget::Endpoints { endpoints, tuning } = &config.policy.routes[1].to else {
        panic!("endpoints")
    };
    assert_eq!((endpoints.len(), endpoints[1].port, endpoints[1].weight), (2, 8443, Weight::ONE));
    assert_eq!((tuning.locality, tuning.connect_timeout), (LocalityMode::Prefer, Duration::from_secs(3)));
    assert_eq!(config.admin, Some(AdminBind::Address(([127, 0, 0, 1], 15_000).into())));
    assert_eq!((config.metrics, config.health, config.workers), (None, None, Workers::Auto));
    assert_eq!(config.drain, Drain { delay: Duration::ZERO, timeout: Duration::from_secs(30) });
    let sink = Sink::Stdout;
    assert_eq!(config.access_log, AccessLog::To { sink, format: Format::Json });
    assert_eq!(config.log, Log { level: LogLevel::Info, format: LogFormat::Text });
    assert!(config.warnings.is_empty());
}

#[test]
fn json_is_yaml() {
    let config = loaded(
        r#"{"listen": ":15443", "routes": {"-": {"endpoints": [{"address": "a.b:1", "weight": 2}]}}}"#,
    );
    assert_eq!(config.policy.routes[0].key, RouteName::NoSni);
}

#[test]
fn off_and_false_mean_the_same() {
    for off in ["off", "false"] {
        let config = loaded(&format!(
            "listen: ':15443'\nadmin: {off}\ndefaults: {{ejection: {off}, panic: {off}}}\ntelemetry: {{accessLog: \
             {off}, metrics: {off}, health: {off}}}\n"
        ));
        let tuning = &config.policy.tuning.default;
        assert_eq!((&config.admin, tuning.ejection, tuning.panic), (&None, None, false));
        assert_eq!(config.access_log, AccessLog::Off);
    }
    assert_eq!(loaded("listen: ':15443'\nadmin: {bind: off}").admin, None);
    for (written, path) in [("unix:/run/a.sock", "/run/a.sock"), ("unix:///run/a.sock", "/run/a.sock")] {
        let config = loaded(&format!("listen: ':15443'\nadmin: {{bind: '{written}'}}"));
        assert_eq!(config.admin, Some(AdminBind::Unix(path.into())));
    }
}

#[test]
fn an_admin_api_that_other_hosts_can_reach_is_a_warning() {
    let warned = |bind: &str| {
        let config =
            loaded(&format!("listen: ':15443'\nroutes: {{a.b: 'c.d:1'}}\nadmin: {{bind: '{bind}'}}"));
        config.warnings.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    for bind in ["127.0.0.1:15000", "127.1.0.1:15000", "[::1]:15000", "unix:/run/a.sock"] {
        assert_eq!(warned(bind), [""; 0]);
    }
    for bind in ["0.0.0.0:15000", "[::]:15000", "10.0.0.1:15000"] {
        let [warning] = &warned(bind)[..] else { panic!("one") };
        let wanted = format!(
            "c.yaml:3:15: admin.bind: found {bind}, which is not a loopback address: the admin API has no"
        );
        assert!(warning.contains(&wanted), "{warning}");
    }
}

#[test]
fn values_may_come_from_the_environment_and_are_not_yaml_again() {
    let config = loaded(
        "listen: \"127.0.0.1:${PORT}\"\nnode: {name: \"${KEY}\", cluster: \"$${PORT}\"}\nworkers: ${WEIGHT}\nroutes:\n  \
         a.b: {endpoints: [{address: \"10.0.0.1:${NO:-81}\", weight: \"${WEIGHT}\"}]}\n  \"c.d\": {endpoints: \
         [\"e.f:1\"], panic: \"${NO:-off}\"}\n",
    );
    let node = &config.policy.node;
    assert_eq!((&*node.name, node.cluster.as_str()), ("{a: b}", "${PORT}"));
    assert_eq!(config.workers, Workers::Count(NonZeroUsize::new(7).expect("seven")));
    let RouteTarget::Endpoints { endpoints, .. } = &config.policy.routes[0].to else { panic!("endpoints") };
    assert_eq!((endpoints[0].port, endpoints[0].weight.value()), (81, 7));
    let RouteTarget::Endpoints { tuning, .. } = &config.policy.routes[1].to else { panic!("endpoints") };
    assert!(!tuning.panic);
}

#[test]
fn tuning_is_the_routes_own_or_the_most_specific_policy() {
    let config = loaded(
        "listen: ':1'\ntimeouts: {connect: 2s, idle: 0s, halfClose: 0s}\ndefaults: {connectTimeout: 4s}\npolicies:\n\
         - {services: ['*', 'a.b.c'], panic: false}\n- {services: ['*.c', '*.b.c'], loadBalancing: {policy: random}}\n\
         routes:\n  x.y: {endpoints: ['a.b:1'], ejection: {failures: 2}, loadBalancing: {policy: sourceHash}}\n",
    );
    let order: Vec<String> =
        config.policy.tuning.policies.iter().map(|(pattern, _)| pattern.to_string()).collect();
    assert_eq!(order, ["a.b.c", "*.b.c", "*.c", "*"]);
    let (_, policy) = &config.policy.tuning.policies[1];
    assert_eq!(policy.connect_timeout, Duration::from_secs(2), "a policy wins whole");
    assert_eq!((policy.policy, policy.locality), (LoadBalancing::Random, LocalityMode::Ignore));
    assert_eq!(config.policy.tuning.default.connect_timeout, Duration::from_secs(4));
    let RouteTarget::Endpoints { tuning, .. } = &config.policy.routes[0].to else { panic!("endpoints") };
    assert_eq!((tuning.policy, tuning.locality), (LoadBalancing::SourceHash, LocalityMode::Prefer));
    let ejection = tuning.ejection.expect("on");
    assert_eq!(
        (ejection.failures, ejection.time, ejection.share_max_percent),
        (2, Duration::from_secs(30), 50)
    );
    assert_eq!((config.policy.timeouts.idle, config.policy.timeouts.half_close), (None, None));
}

#[test]
fn routes_without_settings_of_their_own_share_the_default_ones() {
    let config = loaded(
        "listen: ':1'\nroutes:\n  a.b: 'c.d:1'\n  e.f: ['c.d:2']\n  g.h: {endpoints: ['c.d:3']}\n  \
         i.j: {endpoints: ['c.d:4'], panic: false}\n",
    );
    let tunings = config.policy.routes.iter().map(|route| match &route.to {
        RouteTarget::Endpoints { tuning, .. } => tuning,
        RouteTarget::Service { .. } | RouteTarget::Backends(_) => panic!("endpoints"),
    });
    let tunings: Vec<_> = tunings.collect();
    assert!(Arc::ptr_eq(tunings[0], tunings[1]) && Arc::ptr_eq(tunings[0], tunings[2]));
    assert!(tunings[0].panic && !tunings[3].panic);
}

#[test]
fn port_0_may_be_bound_on_loopback_more_than_once() {
    let config = loaded(
        "listeners: [{name: a, bind: '127.0.0.1:0'}, {name: b, bind: '127.0.0.2:0'}, {name: c, bind: '[::1]:0'}]\n\
         admin: {bind: '127.0.0.1:0'}\nxds: {bind: '127.0.0.1:0'}\n",
    );
    assert_eq!(config.policy.listeners.len(), 3);
}

#[test]
fn doubtful_names_are_warnings_where_the_file_knows_all_services() {
    let text = "listen: ':1'\nnode: {cluster: east}\nservices:\n- {hostname: cart.shop.mesh, namespace: shop, ports: [{name: a, port: 1, targetPort: 2}]}\n\
                exports:\n- {services: ['*.shop.mesh', card.shop.mesh], clusters: [eest]}\nroutes:\n  a.b: {service: car.shop.mesh, port: 1}\n  \
                c.d: {service: cart.shop.mesh, port: 2}\n  e.f: {service: cart.shop.mesh, port: 1, subset: v1}\n";
    let places = |config: &Config| {
        let list = config.warnings.iter();
        list.map(|problem| format!("{}:{} {}", problem.line, problem.column, problem.path))
            .collect::<Vec<_>>()
    };
    let warned = loaded(text);
    let wanted = [
        "6:30 exports[0].services[1]",
        "6:58 exports[0].clusters[0]",
        "8:18 routes[\"a.b\"]",
        "9:18 routes[\"c.d\"]",
        "10:18 routes[\"e.f\"]",
    ];
    assert_eq!(places(&warned), wanted);
    assert_eq!(warned.warnings[0].hint.as_deref(), Some("cart.shop.mesh"));
    let other = loaded(&format!("{text}registries: [{{file: {{path: x.yaml, cluster: west}}}}]\n"));
    assert_eq!(places(&other), ["6:58 exports[0].clusters[0]"]);
}

#[test]
fn a_mesh_name_no_client_can_ask_for_is_a_warning() {
    let long = format!("{0}.{0}.{0}.{0}", "a".repeat(60));
    let config = loaded(&format!(
        "listen: ':1'\nroutes: {{a.b: 'c.d:1'}}\nservices:\n- {{hostname: {long}, namespace: n, ports: [{{name: a, port: 443, targetPort: 2}}]}}\n"
    ));
    assert!(
        config.warnings[0].to_string().contains("the longest mesh name of this service has 260 bytes"),
        "{:?}",
        config.warnings
    );
}

#[test]
fn the_memory_budget_is_a_share_or_a_size() {
    let read = |memory: &str| loaded(&format!("listen: ':1'\nlimits: {{{memory}}}\n")).policy.limits.memory;
    assert_eq!(read(""), MemoryLimit::Percent(60));
    assert_eq!(read("memory: 75%"), MemoryLimit::Percent(75));
    assert_eq!(read("memory: 2GiB"), MemoryLimit::Bytes(2 << 30));
    assert_eq!((read("").of(1_000), read("memory: 2GiB").of(1 << 30)), (600, 1 << 30));
}

#[test]
fn limits_of_held_bytes_are_read_and_lead_to_the_memory_budget() {
    let config = loaded(
        "listen: ':1'\nroutes: {a.b: 'c.d:1'}\nhbone: {heldPerWorker: 8MiB, heldPerConnection: 1MiB}\n",
    );
    let hbone = config.policy.hbone;
    assert_eq!((hbone.held_per_worker, hbone.held_per_connection), (Some(8 << 20), 1 << 20));
    let warnings: Vec<String> = config.warnings.iter().map(ToString::to_string).collect();
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(
        warnings.iter().all(|warning| warning.contains("deprecated") && warning.contains("limits.memory"))
    );
}
