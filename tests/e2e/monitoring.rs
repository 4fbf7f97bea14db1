//! The metrics of a gateway with all of its parts, and the alerts and the dashboard that use them. Prometheus' own tool checks
//! all of it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::federation::Pair;
use crate::support::client::tls;
use crate::support::promtool::Promtool;
use crate::support::{eventually, yaml};

/// Labels that Prometheus and Kubernetes add, and the label of buckets.
const ADDED: [&str; 5] = ["namespace", "pod", "job", "instance", "le"];

/// Returns the metrics of a gateway that has every part, after some traffic.
fn exposition() -> String {
    let pair = Pair::new();
    let _west = pair.start_west("");
    let more = "routes: {a.test: {endpoints: [\"127.0.0.1:9\"], health: {interval: 1s}}}\n\
                dnsServer: {bind: \"127.0.0.1:0\", zones: [global]}\nxds: {bind: \"127.0.0.1:0\"}\n\
                limits: {perSource: {connections: 100}, perService: {connections: 100}}\n\
                registries: [{file: {path: none.yaml, cluster: north, network: net-north}}]\naggregator: {startTimeout: 1s}\n";
    let config = pair.east_config(more);
    let east = crate::support::organisation::start(pair.east.folder(&[&pair.west]), &config);
    let listener = east.json("/api/v1/listeners")[0]["name"].as_str().expect("a name").to_owned();
    tls(east.listener(&listener), "nobody.test").expect_err("refused");
    eventually("all parts", || {
        let text = east.get("/metrics").1;
        let parts = ["isthmus_peer_rtt_seconds{", "isthmus_endpoint_healthy{", "reason=\"sni_unknown\""];
        parts.iter().all(|part| text.contains(part)).then_some(text)
    })
}

fn files() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("charts/isthmus/files")
}

/// Collects the values of a key at every depth.
fn all(value: &Value, key: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            found.extend(map.get(key).and_then(Value::as_str).map(str::to_owned));
            map.values().for_each(|value| all(value, key, found));
        }
        Value::Array(items) => items.iter().for_each(|value| all(value, key, found)),
        _ => {}
    }
}

fn expressions() -> (Vec<String>, Vec<String>) {
    let read = |name: &str| std::fs::read_to_string(files().join(name)).expect("a file");
    let (mut alerts, mut dashboard) = (Vec::new(), Vec::new());
    all(&yaml::document(&read("alerts.yaml")), "expr", &mut alerts);
    all(&serde_json::from_str(&read("dashboard.json")).expect("JSON"), "expr", &mut dashboard);
    (alerts, dashboard)
}

/// Returns the names of metrics in an expression.
fn metrics(expression: &str) -> BTreeSet<&str> {
    let words = expression.split(|sign: char| !sign.is_ascii_alphanumeric() && sign != '_');
    let ours = |word: &&str| ["isthmus_", "istio_", "process_"].iter().any(|prefix| word.starts_with(prefix));
    words.filter(ours).collect()
}

/// Returns the labels that an expression names, in braces or after `by` and `on`.
fn labels(expression: &str) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    for part in expression.split('{').skip(1) {
        let matchers = part.split('}').next().unwrap_or_default();
        // A value in quotes may contain commas; outside of quotes, a label stands before each `=`.
        for (index, outside) in matchers.split('"').enumerate() {
            let name = outside.trim_start_matches(',').trim_end_matches(['=', '~', '!']).trim();
            found.extend((index % 2 == 0 && !name.is_empty()).then_some(name));
        }
    }
    for word in ["by (", "on ("] {
        for part in expression.split(word).skip(1) {
            found.extend(part.split(')').next().unwrap_or_default().split(',').map(str::trim));
        }
    }
    found
}

#[test]
fn the_metrics_are_as_prometheus_wants_them() {
    let Some(tool) = Promtool::installed() else { return };
    let text = exposition();
    for family in
        ["isthmus_limit{", "isthmus_dns_queries_total{", "isthmus_registry_state{", "isthmus_xds_clients "]
    {
        assert!(text.contains(family), "no {family}: {text}");
    }
    assert_eq!(tool.run(&["check", "metrics"], &text), (true, String::new()), "{text}");
    let (_, said) = tool.run(&["check", "metrics"], "# TYPE x counter\nx 1\n");
    assert!(said.contains("_total"), "the tool finds mistakes: {said}");
}

#[test]
fn alerts_and_dashboard_parse_and_name_metrics_and_labels_that_are_served() {
    let text = exposition();
    let (alerts, dashboard) = expressions();
    let samples = |metric: &str| -> Vec<&str> {
        let of = |line: &&str| line.split(['{', ' ']).next() == Some(metric);
        text.lines().filter(of).collect()
    };
    let documented = include_str!("../../docs/metrics.md");
    let mut compared = 0;
    for expression in alerts.iter().chain(&dashboard) {
        let metrics = metrics(expression);
        assert!(!metrics.is_empty(), "{expression}");
        let served: Vec<&str> = metrics.iter().flat_map(|metric| samples(metric)).collect();
        for metric in &metrics {
            let family = ["_bucket", "_sum", "_count"]
                .iter()
                .find_map(|part| metric.strip_suffix(part))
                .unwrap_or(metric);
            assert!(documented.contains(&format!("| `{family}` |")), "{family} in {expression}");
        }
        // A metric without samples belongs to a kind of traffic that this gateway has not had. The labels of such a metric
        // cannot be checked.
        if metrics.iter().all(|metric| !samples(metric).is_empty()) {
            for label in labels(expression).into_iter().filter(|label| !ADDED.contains(label)) {
                let is_served = served.iter().any(|line| {
                    line.contains(&format!("{{{label}=\"")) || line.contains(&format!(",{label}=\""))
                });
                assert!(is_served, "no metric has the label {label} of {expression}");
                compared += 1;
            }
        }
    }
    assert!(compared > 30, "only {compared} labels were compared");
    // The dashboard and the alerts cover each area.
    for area in [
        "isthmus_endpoint_healthy",
        "isthmus_limit",
        "isthmus_peer_up",
        "isthmus_dns_",
        "isthmus_registry_",
        "isthmus_problems",
    ] {
        for (place, list) in [("alerts", &alerts), ("dashboard", &dashboard)] {
            assert!(list.iter().any(|expression| expression.contains(area)), "{area} is not in the {place}");
        }
    }
    let Some(tool) = Promtool::installed() else { return };
    let rules = files().join("alerts.yaml");
    let (parses, said) = tool.run(&["check", "rules", &rules.display().to_string()], "");
    assert!(parses, "{said}");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("dashboard.yaml");
    let check = |expressions: &[String]| {
        let rules: Vec<Value> = expressions
            .iter()
            .enumerate()
            .map(|(number, expression)| {
                // Grafana replaces its variables; these values stand for them.
                let expression = expression.replace("$__rate_interval", "1m").replace(['$'], "x");
                serde_json::json!({"record": format!("panel:{number}"), "expr": expression})
            })
            .collect();
        let groups = serde_json::json!({"groups": [{"name": "dashboard", "rules": rules}]});
        std::fs::write(&path, groups.to_string()).expect("written");
        tool.run(&["check", "rules", &path.display().to_string()], "")
    };
    let (parses, said) = check(&dashboard);
    assert!(parses, "{said}");
    assert!(!check(&["sum by (".to_owned()]).0, "the tool finds mistakes");
}
