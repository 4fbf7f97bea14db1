//! The documents that are generated from the table: the schema and the reference; and the example beside
//! them.

use std::path::PathBuf;

use super::*;

const EXAMPLE: &str = "config/isthmus.yaml";

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn generated_files_are_current() {
    let schema = format!("{}\n", serde_json::to_string_pretty(&schema()).expect("JSON"));
    for (file, text) in [("config/isthmus.schema.json", schema), ("config/REFERENCE.md", reference())] {
        let path = root().join(file);
        if std::env::var_os("ISTHMUS_BLESS").is_some() {
            fs::write(&path, &text).expect("written");
        }
        let found = fs::read_to_string(&path).unwrap_or_default();
        assert!(found == text, "{file} is not what the table says; run the test with ISTHMUS_BLESS=1");
    }
}

#[test]
fn the_example_loads_without_warnings_and_fits_the_schema() {
    let config = load(&root().join(EXAMPLE), &|_| None, &mut |_| {}).expect("good");
    assert_eq!(config.warnings, []);
    let text = fs::read_to_string(root().join(EXAMPLE)).expect("the example");
    let value = as_json(&text);
    assert_eq!(misfits(&validator(), &value), Vec::<String>::new());
    assert_eq!(&*config.policy.node.name, "eastwest-0");
}

#[test]
fn the_example_shows_every_key() {
    let text = fs::read_to_string(root().join(EXAMPLE)).expect("the example");
    let mut shown = BTreeSet::new();
    keys_of(&as_json(&text), &mut shown);
    let mut known = BTreeSet::new();
    keys_of_schema(&schema(), &mut known);
    let unseen: Vec<_> = known.difference(&shown).collect();
    assert!(unseen.is_empty(), "{unseen:?}");
    let reference = reference();
    let untold: Vec<_> = known.iter().filter(|key| !reference.contains(&format!("| `{key}` |"))).collect();
    assert!(untold.is_empty(), "{untold:?}");
}

/// The config in use can be loaded again, and gives an equal config.
#[test]
fn the_effective_config_has_every_key_and_is_read_as_the_same_policy() {
    let config = load(&root().join(EXAMPLE), &|_| None, &mut |_| {}).expect("good");
    let shown = effective(&config);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("c.yaml");
    fs::write(&path, shown.to_string()).expect("written");
    let again = load(&path, &|_| None, &mut |_| {}).expect("good again");
    assert_eq!(format!("{:?}", again.policy), format!("{:?}", config.policy));
    assert_eq!((again.drain, again.workers, again.xds), (config.drain, config.workers, config.xds));
    let (mut has, mut known) = (BTreeSet::new(), BTreeSet::new());
    keys_of(&shown, &mut has);
    keys_of_schema(&schema(), &mut known);
    let missing: Vec<_> = known.difference(&has).map(String::as_str).collect();
    // The short form of a listener, merged files, the keys of `services`, and keys that the example leaves
    // empty.
    let left_out = [
        "addresses",
        "hostname",
        "include",
        "labels",
        "listen",
        "servers",
        "subsets",
        "targetPort",
        "tls",
        "tunnel",
        "waypoint",
    ];
    let unexpected: Vec<_> = missing.iter().filter(|key| !left_out.contains(key)).collect();
    assert!(unexpected.is_empty(), "{unexpected:?} are not in the config that /api/v1/config shows");
}

#[test]
fn what_the_schema_refers_to_it_defines() {
    let schema = schema();
    let text = schema.to_string();
    for reference in text.split("\"#/$defs/").skip(1) {
        let name = reference.split('"').next().expect("a name");
        assert!(schema["$defs"][name].is_object(), "{name}");
    }
    assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
}

#[test]
fn schema_and_reader_agree_on_what_is_wrong() {
    let validator = validator();
    for (text, fits) in [
        ("listen: ':1'", true),
        ("listen: 15443", false),
        ("lisen: ':1'", false),
        ("listen: '${X}'\nworkers: '${N}'", true),
        ("listen: ':1'\nworkers: 0", false),
        ("listen: ':1'\nworkers: three", false),
        ("listen: ':1'\nadmin: off", true),
        ("listen: ':1'\nadmin: false", true),
        ("listen: ':1'\nadmin: on", false),
        ("listen: ':1'\nroutes: {a.b: {service: c.d, port: 1}}", true),
        ("listen: ':1'\nroutes: {a.b: {port: 1}}", false),
        ("listen: ':1'\nroutes: {a.b: [{adress: 'c.d:1'}]}", false),
        ("listen: ':1'\nroutes: {a.b: []}", false),
        ("listen: ':1'\nroutes: {a.b: }", false),
        ("listen: ':1'\nroutes: {'a b': 'c.d:1'}", false),
        ("listen: ':1'\nnode: {name: 5}", false),
        ("listen: ':1'\ntimeouts: {connect: 10}", false),
        ("listeners: [{name: a, bind: ':1', hello: {maxBytes: 4096}}]", true),
        ("listen: ':1'\ntelemetry: {tracing: off}", true),
        ("listen: ':1'\ntelemetry: {tracing: {sample: 1}}", false),
        ("listen: ':1'\ntelemetry: {tracing: {otlp: 'http://c:4317', sample: 1.5}}", false),
        ("listen: ':1'\ntelemetry: {tracing: {otlp: 'http://c:4317', sample: 'all'}}", false),
        ("listen: ':1'\ntelemetry: {tracing: {otlp: 'https://c:4317'}}", false),
    ] {
        let misfits = misfits(&validator, &as_json(text));
        assert_eq!(misfits.is_empty(), fits, "{text}: {misfits:?}");
        let environment = |name: &str| Some(if name == "X" { ":1" } else { "2" }.to_owned());
        let directory = tempfile::tempdir().expect("a directory");
        fs::write(directory.path().join("c.yaml"), text).expect("a file");
        let read = load(&directory.path().join("c.yaml"), &environment, &mut |_| {});
        assert_eq!(read.is_ok(), fits, "{text}: {read:?}");
    }
}

/// The schema as an editor uses it, patterns included.
fn validator() -> jsonschema::Validator {
    jsonschema::draft202012::new(&schema()).expect("a schema")
}

fn misfits(validator: &jsonschema::Validator, value: &Value) -> Vec<String> {
    validator.iter_errors(value).map(|error| format!("{}: {error}", error.instance_path())).collect()
}

/// Converts a YAML text to JSON, as the schema check of an editor sees it.
fn as_json(text: &str) -> Value {
    use crate::document::problem::Problems;
    use crate::document::tree::{Source, parse};
    let mut problems = Problems::new();
    let file = problems.add_file(Path::new("x")).expect("a file");
    let tree = parse(Source { file, text, environment: None }, None, &mut problems).expect("YAML");
    json_of(&tree)
}

fn json_of(node: &crate::document::tree::Node) -> Value {
    use crate::document::tree::{ScalarType, Value as Tree};
    match &node.value {
        Tree::Null => Value::Null,
        Tree::Sequence(items) => items.iter().map(json_of).collect(),
        Tree::Mapping(entries) => {
            entries.iter().map(|(key, value)| (key.text.to_string(), json_of(value))).collect()
        }
        Tree::Scalar(scalar) => match scalar.scalar_type() {
            ScalarType::Boolean => json!(&*scalar.text == "true"),
            ScalarType::Number => serde_json::from_str(&scalar.text).expect("a number"),
            ScalarType::Text | ScalarType::Open => json!(&*scalar.text),
        },
    }
}

fn keys_of(value: &Value, keys: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) => map.iter().for_each(|(key, value)| {
            keys.insert(key.clone());
            keys_of(value, keys);
        }),
        Value::Array(items) => items.iter().for_each(|item| keys_of(item, keys)),
        _ => {}
    }
}

fn keys_of_schema(schema: &Value, keys: &mut BTreeSet<String>) {
    match schema {
        Value::Object(map) => map.iter().for_each(|(name, value)| {
            if let (true, Some(properties)) = (name == "properties", value.as_object()) {
                keys.extend(properties.keys().cloned());
            }
            keys_of_schema(value, keys);
        }),
        Value::Array(items) => items.iter().for_each(|item| keys_of_schema(item, keys)),
        _ => {}
    }
}
