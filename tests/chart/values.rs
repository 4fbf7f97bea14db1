//! The values: what the schema refuses, and that the schema, `values.yaml` and the README agree.

use serde_json::Value;

use crate::support::helm::{Helm, chart};
use crate::support::yaml;

fn read(name: &str) -> String {
    std::fs::read_to_string(chart().join(name)).expect(name)
}

#[test]
fn unknown_and_wrong_values_are_refused_by_name() {
    let Some(helm) = Helm::installed() else { return };
    let cases = [
        (r#"networkGatway="n""#, &["networkGatway", "not allowed"][..]),
        (r#"service.typ="NodePort""#, &["/service", "typ", "not allowed"]),
        (r#"service.type="External""#, &["/service/type", "LoadBalancer"]),
        (r#"kubernetes.namespaces.onyl=["a"]"#, &["/kubernetes/namespaces", "onyl"]),
        (r#"drain.delaySeconds="15s""#, &["/drain/delaySeconds", "integer"]),
        (r#"drain.timeoutSeconds=0"#, &["/drain/timeoutSeconds", "minimum"]),
        (r#"terminationGracePeriodSeconds=60"#, &["terminationGracePeriodSeconds", "not allowed"]),
        (r#"exports=[{"service":["*.local"]}]"#, &["/exports/0", "services"]),
        (r#"exports=[{"services":["*.local"],"tls":"any"}]"#, &["/exports/0/tls"]),
        (
            r#"exports=[{"services":["*"],"marked":{"labels":{"a":"b"},"serviceExport":true}}]"#,
            &["/exports/0/marked"],
        ),
        (r#"replicaCount=-1"#, &["/replicaCount", "minimum"]),
        (r#"kind="StatefulSet""#, &["/kind", "DaemonSet"]),
        (r#"image.digest="abc""#, &["/image/digest", "sha256"]),
        (r#"identity.source="vault""#, &["/identity/source", "workloadApi"]),
        (r#"sni.from=["10.0.0.1"]"#, &["/sni/from/0"]),
        (r#"aggregator.xds.clients=[{"network":"n"}]"#, &["/aggregator/xds/clients/0", "network"]),
        (r#"resources.limits.memory="much""#, &["/resources/limits/memory"]),
        // Rules that no schema can express.
        (r#"image.repository="""#, &["image.repository is empty", "examples/docker/Dockerfile"]),
        (r#"config={"node":{"name":"x"}}"#, &["config.node", "networkGateway, cluster, locality"]),
        (r#"config={"drain":{}}"#, &["config.drain", "drain.delaySeconds"]),
        (r#"config={"telemetry":{"health":"off"}}"#, &["config.telemetry.health"]),
        (r#"config={"telemetry":"off"}"#, &["config.telemetry: found \"off\", expected a map"]),
        (
            r#"config={"telemetry":{"log":"json"}}"#,
            &["config.telemetry.log: found \"json\", expected a map", "format: json"],
        ),
        (r#"roles.aggregator=true"#, &["aggregator.xds.clients is empty"]),
        (r#"gatewayObject.enabled=true"#, &["gatewayObject.enabled", "networkGateway is empty"]),
        (r#"serviceAccount.create=false"#, &["serviceAccount.name is empty"]),
        (r#"autoscaling={"enabled":true} kind="DaemonSet""#, &["autoscaling.enabled", "kind=Deployment"]),
    ];
    for (value, wanted) in cases {
        // A blank separates two values.
        let values = value.split(' ').flat_map(|value| ["--set-json", value]);
        let arguments: Vec<&str> =
            ["--set-json", r#"image.repository="r/isthmus""#].into_iter().chain(values).collect();
        let error = helm.template(None, &arguments).err().unwrap_or_else(|| panic!("{value} is taken"));
        assert!(wanted.iter().all(|part| error.contains(part)), "{value}: {error}");
    }
}

/// A key that has only comments below it has no value.
#[test]
fn a_part_of_the_config_without_a_value_is_empty() {
    let Some(helm) = Helm::installed() else { return };
    let rendered = |value: &str| {
        let arguments = ["--set-json", r#"image.repository="r/isthmus""#, "--set-json", value];
        helm.template(None, &arguments).unwrap_or_else(|error| panic!("{value}: {error}"))
    };
    for value in [r#"config={"telemetry":null}"#, r#"config={"telemetry":{"log":null}}"#, "config=null"] {
        rendered(value);
    }
}

/// Returns true for an object of the schema without fixed keys: its keys are Kubernetes' own or the user's, or `isthmus
/// validate` checks them.
fn is_open(schema: &Value) -> bool {
    schema["type"] == "object" && schema["properties"].is_null()
}

#[test]
fn the_schema_knows_every_value_and_no_other() {
    fn compare(path: &str, schema: &Value, values: &Value) {
        if is_open(schema) || schema["type"] != "object" {
            return;
        }
        assert_eq!(schema["additionalProperties"], false, "{path}");
        let properties = schema["properties"].as_object().expect("properties");
        let values = values.as_object().expect("a map");
        for (key, value) in values {
            let property = properties.get(key).unwrap_or_else(|| panic!("{path}.{key} is not in the schema"));
            compare(&format!("{path}.{key}"), property, value);
        }
        // Objects that occur in several places, such as probes and resources, and choices need not have a default for every key.
        let fixed = !["resources", "probes", "allow", "gatewaysFrom"].iter().any(|part| path.contains(part));
        for key in properties.keys().filter(|key| fixed && *key != "global") {
            assert!(values.contains_key(key), "{path}.{key} is in the schema and not in values.yaml");
        }
    }
    let schema = serde_json::from_str(&read("values.schema.json")).expect("JSON");
    compare("", &schema, &yaml::document(&read("values.yaml")));
    // The objects in lists, too, have fixed keys or are Kubernetes' own.
    fn closed(path: &str, schema: &Value) {
        match schema {
            Value::Object(map) => {
                if map.contains_key("properties") {
                    assert_eq!(schema["additionalProperties"], false, "{path}");
                }
                map.iter().for_each(|(key, value)| closed(&format!("{path}/{key}"), value));
            }
            Value::Array(items) => items.iter().for_each(|item| closed(path, item)),
            _ => {}
        }
    }
    closed("", &schema);
}

/// With `ISTHMUS_BLESS=1`, this test rewrites the table.
#[test]
fn the_readme_has_every_value_with_its_comment() {
    let table = table(&read("values.yaml"));
    let readme = read("README.md");
    let (begin, end) = ("<!-- values -->\n", "<!-- end of values -->\n");
    let (before, rest) = readme.split_once(begin).expect("a beginning");
    let (_, after) = rest.split_once(end).expect("an end");
    let wanted = format!("{before}{begin}{table}{end}{after}");
    if std::env::var_os("ISTHMUS_BLESS").is_some() {
        std::fs::write(chart().join("README.md"), &wanted).expect("written");
    } else {
        assert!(readme == wanted, "README.md is not what values.yaml says; ISTHMUS_BLESS=1 writes it");
    }
}

/// Returns the table of the keys of `values.yaml`. Each line of that file has at most one key, and the comment before a key
/// describes it.
fn table(values: &str) -> String {
    let mut table = "| value | default | |\n|---|---|---|\n".to_owned();
    let mut path: Vec<&str> = Vec::new();
    let mut comment: Vec<&str> = Vec::new();
    for line in values.lines() {
        let text = line.trim_start();
        if let Some(more) = text.strip_prefix('#') {
            comment.push(more.trim());
        } else if text.is_empty() {
            comment.clear();
        } else {
            let (key, default) = text.split_once(':').unwrap_or_else(|| panic!("no key: {line}"));
            assert!(!comment.is_empty(), "{line:?} has no comment");
            path.truncate((line.len() - text.len()) / 2);
            path.push(key);
            let name: Vec<String> = path
                .iter()
                .map(|key| if key.contains('.') { format!("\"{key}\"") } else { (*key).to_owned() })
                .collect();
            let default = default.trim();
            let default = if default.is_empty() { String::new() } else { format!("`{default}`") };
            table += &format!(
                "| `{}` | {default} | {} |\n",
                name.join("."),
                comment.join(" ").replace('|', "\\|")
            );
            comment.clear();
        }
    }
    table
}
