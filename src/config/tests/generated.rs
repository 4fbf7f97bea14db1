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
    assert_eq!(misfits(&value, &schema(), &schema(), "config"), Vec::<String>::new());
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
        let schema = schema();
        let misfits = misfits(&as_json(text), &schema, &schema, "config");
        assert_eq!(misfits.is_empty(), fits, "{text}: {misfits:?}");
        let environment = |name: &str| Some(if name == "X" { ":1" } else { "2" }.to_owned());
        let directory = tempfile::tempdir().expect("a directory");
        fs::write(directory.path().join("c.yaml"), text).expect("a file");
        let read = load(&directory.path().join("c.yaml"), &environment, &mut |_| {});
        assert_eq!(read.is_ok(), fits, "{text}: {read:?}");
    }
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

/// Checks a value against the part of JSON Schema that this schema uses. Patterns are checked by the reader's
/// own function.
fn misfits(value: &Value, schema: &Value, root: &Value, path: &str) -> Vec<String> {
    if let Some(reference) = schema["$ref"].as_str() {
        let name = reference.strip_prefix("#/$defs/").expect("a definition");
        return misfits(value, &root["$defs"][name], root, path);
    }
    let mut found = Vec::new();
    let mut fail = |why: &str| found.push(format!("{path}: {why}: {value}"));
    let alternatives = |key: &str| {
        let forms = schema[key].as_array()?;
        Some(forms.iter().filter(|form| misfits(value, form, root, path).is_empty()).count())
    };
    if alternatives("anyOf") == Some(0) {
        fail("none of the forms");
    }
    if alternatives("oneOf").is_some_and(|fitting| fitting != 1) {
        fail("not one of the forms");
    }
    let right_type = match schema["type"].as_str() {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("integer") => value.is_u64(),
        Some("number") => value.is_number(),
        Some("boolean") => value.is_boolean(),
        Some(other) => panic!("{other}"),
        None => true,
    };
    if !right_type {
        fail("type");
    }
    if schema["enum"].as_array().is_some_and(|words| !words.contains(value)) {
        fail("enum");
    }
    let below = |bound: &str, low: bool| match (schema[bound].as_f64(), value.as_f64()) {
        (Some(bound), Some(value)) if low => value < bound,
        (Some(bound), Some(value)) => value > bound,
        _ => false,
    };
    if below("minimum", true) || below("maximum", false) {
        fail("range");
    }
    if let (Some(pattern), Some(text)) = (schema["pattern"].as_str(), value.as_str())
        && !fits_pattern(pattern, text)
    {
        fail("pattern");
    }
    if let Some(items) = value.as_array() {
        if schema["minItems"].as_u64().is_some_and(|min| u64::try_from(items.len()).expect("small") < min) {
            fail("minItems");
        }
        for (index, item) in items.iter().enumerate().filter(|_| !schema["items"].is_null()) {
            found.extend(misfits(item, &schema["items"], root, &format!("{path}[{index}]")));
        }
    }
    let Some(map) = value.as_object() else { return found };
    for key in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if !map.contains_key(key) {
            found.push(format!("{path}: lacks {key}"));
        }
    }
    for (key, value) in map {
        let path = format!("{path}.{key}");
        let additional = &schema["additionalProperties"];
        match &schema["properties"][key] {
            Value::Null if *additional == json!(false) => found.push(format!("{path}: unknown")),
            Value::Null if additional.is_object() => found.extend(misfits(value, additional, root, &path)),
            Value::Null => {}
            known => found.extend(misfits(value, known, root, &path)),
        }
        if schema["propertyNames"].is_object() {
            found.extend(misfits(&json!(key), &schema["propertyNames"], root, &path));
        }
    }
    found
}

fn fits_pattern(pattern: &str, text: &str) -> bool {
    let forms = [
        &scalar::TEXT,
        &scalar::PATH,
        &scalar::DURATION,
        &scalar::TIMEOUT,
        &scalar::HELLO_BYTES,
        &scalar::PERCENT,
        &scalar::HOST_NAME,
        &scalar::PATTERN,
        &scalar::CIDR,
        &scalar::IP,
        &scalar::HOST,
        &scalar::TARGET,
        &scalar::BIND,
        &scalar::BIND_ADDRESS,
        &scalar::NAME_SERVER,
        &scalar::IDENTITY,
        &scalar::IDENTITY_PATTERN,
        &scalar::TRUST_DOMAIN,
        &scalar::LOCALITY,
        &scalar::SUBSET,
        &scalar::ALPN,
        &scalar::WINDOW,
        &scalar::FRAME_SIZE,
        &scalar::HEADER_BYTES,
        &scalar::HTTPS,
        &scalar::UNIX_SOCKET,
        &scalar::COLLECTOR,
        &scalar::ETCD,
        &scalar::ETCD_PREFIX,
        &table::routes::ROUTE_KEY,
    ];
    if pattern == "\\$\\{" {
        return text.contains("${");
    }
    let of_pattern: Vec<_> = forms.iter().filter(|form| form.pattern == pattern).collect();
    assert!(!of_pattern.is_empty(), "a pattern of no form: {pattern}");
    of_pattern.iter().any(|form| (form.check)(text).is_ok())
}
