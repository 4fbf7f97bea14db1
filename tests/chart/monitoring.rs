//! Alerts and dashboard: every metric that they use exists and has the labels that they use.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

use crate::support::helm::{Helm, chart, object, of_kind, sets};
use crate::support::yaml;

/// Returns the metrics that docs/metrics.md lists, which is generated from the code.
fn documented() -> BTreeSet<String> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/metrics.md");
    let text = std::fs::read_to_string(file).expect("docs/metrics.md");
    text.lines().filter_map(|line| Some(line.strip_prefix("| `")?.split_once('`')?.0.to_owned())).collect()
}

/// Returns the names of metrics in an expression.
fn metrics(expression: &str) -> impl Iterator<Item = &str> {
    let words = expression.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    words.filter(|word| ["isthmus_", "istio_", "process_"].iter().any(|prefix| word.starts_with(prefix)))
}

#[track_caller]
fn exist(expressions: &[String]) {
    let documented = documented();
    assert!(documented.len() > 30);
    assert!(!expressions.is_empty());
    for expression in expressions {
        let named: Vec<&str> = metrics(expression).collect();
        assert!(!named.is_empty(), "{expression}");
        for name in named {
            let name =
                ["_bucket", "_sum", "_count"].iter().find_map(|part| name.strip_suffix(part)).unwrap_or(name);
            assert!(documented.contains(name), "{name} in {expression}");
        }
        let pairs = [('(', ')'), ('{', '}'), ('[', ']')];
        for (open, close) in pairs {
            assert_eq!(expression.matches(open).count(), expression.matches(close).count(), "{expression}");
        }
    }
}

/// Returns the values of a key at every depth.
fn all(value: &Value, key: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut open = vec![value];
    while let Some(value) = open.pop() {
        match value {
            Value::Object(map) => {
                found.extend(map.get(key).and_then(Value::as_str).map(str::to_owned));
                open.extend(map.values());
            }
            Value::Array(items) => open.extend(items),
            _ => {}
        }
    }
    found
}

#[test]
fn alerts_and_dashboard_rest_on_metrics_that_exist() {
    let text = std::fs::read_to_string(chart().join("files/alerts.yaml")).expect("alerts");
    exist(&all(&yaml::document(&text), "expr"));
    let text = std::fs::read_to_string(chart().join("files/dashboard.json")).expect("a dashboard");
    let dashboard = serde_json::from_str(&text).expect("JSON");
    exist(&all(&dashboard, "expr"));
    let variables: Vec<String> =
        all(&dashboard, "query").into_iter().filter(|query| query.starts_with("label_values(")).collect();
    exist(&variables);
}

/// Without Kubernetes there is no `pod`, and other programs have metrics of their process too.
#[test]
fn the_dashboard_tells_gateways_apart_from_each_other_and_from_other_programs() {
    let text = std::fs::read_to_string(chart().join("files/dashboard.json")).expect("a dashboard");
    for expression in all(&serde_json::from_str(&text).expect("JSON"), "expr") {
        for labels in expression.split(" by (").skip(1) {
            let labels: Vec<&str> = labels.split(')').next().expect("labels").split(", ").collect();
            assert!(!labels.contains(&"pod") || labels.contains(&"instance"), "{expression}");
        }
        let is_joined = expression.ends_with("and on (job, namespace, pod, instance) isthmus_build_info");
        assert!(!expression.contains("process_") || is_joined, "{expression}");
    }
}

/// The codes in the alerts are codes of docs/reasons.md.
#[test]
fn alerts_name_problems_that_exist() {
    let problems = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reasons.md"));
    let problems = problems.expect("docs/reasons.md");
    let text = std::fs::read_to_string(chart().join("files/alerts.yaml")).expect("alerts");
    for expression in all(&yaml::document(&text), "expr") {
        for codes in ["code=~\"", "code!~\""].iter().filter_map(|matches| expression.split_once(matches)) {
            for code in codes.1.split('"').next().expect("quoted").split('|') {
                assert!(problems.contains(&format!("| `{code}` |")), "{code}");
            }
        }
    }
}

#[test]
fn kinds_of_the_operator_are_rendered_only_where_it_is() {
    let Some(helm) = Helm::installed() else { return };
    let (_, everything) = sets().into_iter().find(|(name, _)| name == "7-everything").expect("a set");
    let kinds = ["PodMonitor", "ServiceMonitor", "PrometheusRule"];
    let without = helm.objects(Some(&everything), &[]);
    assert!(kinds.iter().all(|kind| of_kind(&without, kind).is_empty()));
    let with = helm.objects(Some(&everything), &["--api-versions", "monitoring.coreos.com/v1"]);
    assert_eq!(kinds.map(|kind| of_kind(&with, kind).len()), [2, 2, 1]);
    // The Service exists that the ServiceMonitor selects by a label.
    for monitor in of_kind(&with, "ServiceMonitor") {
        let name = monitor["metadata"]["name"].as_str().expect("a name");
        let service = object(&with, "Service", &format!("{name}-metrics"));
        let wanted = &monitor["spec"]["selector"]["matchLabels"]["isthmus/metrics"];
        assert_eq!(&service["metadata"]["labels"]["isthmus/metrics"], wanted);
        assert!(service["metadata"]["labels"]["topology.istio.io/network"].is_null(), "it is no gateway");
    }
    let map = object(&with, "ConfigMap", "istio-eastwestgateway-dashboard");
    assert_eq!(map["metadata"]["labels"]["grafana_dashboard"], "1");
    serde_json::from_str::<Value>(map["data"]["isthmus.json"].as_str().expect("a text")).expect("JSON");
}
