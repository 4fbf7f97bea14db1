//! Tests of the schema and the reference, which are generated from the table, and of the example config.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::super::reference::{objects, texts};
use super::super::table::Root;
use super::*;
use isthmus_document::form::Keys;
use isthmus_document::problem::Problems;
use isthmus_document::reader::check;
use isthmus_document::table::{Kind, Presence};
use isthmus_document::tree::{Source, parse};

const EXAMPLE: &str = "config/isthmus.yaml";
/// Keys that have an effect, and cause a warning.
const DEPRECATED: [&str; 2] = ["heldPerConnection", "heldPerWorker"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("the folder of src").to_owned()
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
    for text in examples() {
        assert_eq!(misfits(&validator(), &as_json(&text)), Vec::<String>::new());
    }
    assert_eq!(&*config.policy.node.name, "eastwest-0");
}

#[test]
fn the_example_shows_every_key() {
    let mut shown = BTreeSet::new();
    examples().iter().for_each(|text| keys_of(&as_json(text), &mut shown));
    let mut known = BTreeSet::new();
    keys_of_schema(&schema(), &mut known);
    let unseen: Vec<_> = known.difference(&shown).filter(|key| !DEPRECATED.contains(&key.as_str())).collect();
    assert!(unseen.is_empty(), "{unseen:?}");
    let reference = reference();
    let untold: Vec<_> = known.iter().filter(|key| !reference.contains(&format!("| `{key}` |"))).collect();
    assert!(untold.is_empty(), "{untold:?}");
}

/// The shown config can be loaded again, which yields an equal config.
#[test]
fn the_effective_config_has_every_key_and_is_read_as_the_same_policy() {
    let (mut has, mut known, mut has_in_section) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for text in examples() {
        let config = loaded(&text);
        let shown = effective(&config);
        let again = loaded(&shown.to_string());
        assert_eq!(format!("{:?}", again.policy), format!("{:?}", config.policy));
        assert_eq!((again.drain, again.workers, again.xds), (config.drain, config.workers, config.xds));
        assert_eq!(again.wds, config.wds);
        keys_of(&shown, &mut has);
        let sections = shown.as_object().into_iter().flatten();
        for (section, keys) in sections.filter_map(|(name, value)| Some((name, value.as_object()?))) {
            has_in_section.extend(keys.keys().map(|key| format!("{section}.{key}")));
        }
    }
    keys_of_schema(&schema(), &mut known);
    let missing: Vec<_> = known.difference(&has).map(String::as_str).collect();
    // The shown config does not have the short form of a listener, merged files, the keys of `services`, and keys that the
    // example leaves empty.
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
    let left_out = [&left_out[..], &DEPRECATED].concat();
    let unexpected: Vec<_> = missing.iter().filter(|key| !left_out.contains(key)).collect();
    assert!(unexpected.is_empty(), "{unexpected:?} are not in the config that /api/v1/config shows");
    for section in Root::OBJECT.keys {
        let (Kind::Object(object) | Kind::OrOff(Kind::Object(object))) = section.kind() else { continue };
        for key in object.names().filter(|key| !left_out.contains(key)) {
            let place = format!("{}.{key}", section.name());
            assert!(
                has_in_section.contains(&place),
                "{place} is not in the config that /api/v1/config shows"
            );
        }
    }
}

/// Short forms are written out, defaults that depend on another key have its value, and each value has one form.
#[test]
fn the_effective_config_says_everything_in_one_form() {
    let config = loaded(
        "listen: ':1'\ntimeouts: {connect: 2500ms, idle: 90m}\nmesh: {trustDomain: td}\nhbone: {heldPerWorker: 1MiB}\nlimits: {memory: 2048MiB}\n\
         routes: {A.b: '[::ffff:1.2.3.4]:5', '*': ['c.d:6'], e: {service: f.g, port: 7}}\npolicies: [{services: ['*']}]\n\
         dnsServer: {zones: [A.global]}\ntelemetry: {accessLog: {path: log}}\nservices: []\nexports: []\n",
    );
    let shown = effective(&config);
    assert_eq!((&shown["listeners"][0]["name"], shown.get("listen")), (&json!("default"), None));
    let route = &shown["routes"]["a.b"];
    assert_eq!(route["endpoints"], json!([{ "address": "1.2.3.4:5", "weight": 1, "backup": false }]));
    assert_eq!(
        (&route["connectTimeout"], &route["loadBalancing"]["locality"]),
        (&json!("2500ms"), &json!("prefer"))
    );
    assert_eq!(shown["routes"]["*"]["endpoints"][0]["address"], "c.d:6");
    assert_eq!(shown["routes"]["e"], json!({ "service": "f.g", "port": 7 }));
    assert_eq!(shown["policies"][0]["loadBalancing"]["locality"], "ignore");
    assert_eq!(
        (&shown["timeouts"]["idle"], &shown["hbone"]["heldPerWorker"]),
        (&json!("5400s"), &json!(1 << 20))
    );
    assert_eq!(shown["limits"]["memory"], "2GiB");
    assert_eq!(shown["dnsServer"]["zones"], json!(["a.global"]));
    assert_eq!(shown["dnsServer"]["vips"].as_array().map(Vec::len), Some(2));
    let log = shown["telemetry"]["accessLog"]["path"].as_str().expect("a path");
    assert!(log.starts_with('/') && log.ends_with("/log"), "{log}");
    assert_eq!((&shown["xds"], &shown["telemetry"]["metrics"]), (&json!(false), &json!(false)));
    assert!(
        ["services", "exports", "identity", "state"].iter().all(|key| shown.get(key).is_none()),
        "{shown}"
    );
}

#[test]
fn a_text_that_looks_like_a_variable_is_shown_so_that_it_is_read_as_itself() {
    let config = loaded("listen: ':1'\nnode: {name: 'a$$${PORT}', locality: '$${PORT}'}\n");
    assert_eq!(&*config.policy.node.name, "a$${PORT}");
    let again = loaded(&effective(&config).to_string());
    assert_eq!(again.policy.node, config.policy.node);
}

#[test]
fn what_the_schema_refers_to_it_defines() {
    let schema = schema();
    let (objects, mut names) = (objects(), BTreeSet::new());
    let texts = texts(&objects).into_iter().map(|text| text.name);
    for name in objects.iter().map(|object| object.name).chain(texts) {
        assert!(names.insert(name), "two definitions have the name {name}");
    }
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
        ("listen: ':1'\nadmin: 'off'", true),
        ("listen: ':1'\nadmin: 'false'", false),
        ("listen: ':1'\nadmin: '${OFF}'", true),
        ("listen: ':1'\nadmin: {bind: 'off'}", true),
        ("listen: ':1'\nadmin: {bind: false}", true),
        ("listen: ':1'\ntelemetry: {metrics: 'off', health: 'off', accessLog: {path: 'off'}}", true),
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
        let environment = |name: &str| match name {
            "X" => Some(":1".into()),
            "OFF" => Some("off".into()),
            _ => Some("2".into()),
        };
        let directory = tempfile::tempdir().expect("a directory");
        fs::write(directory.path().join("c.yaml"), text).expect("a file");
        let read = load(&directory.path().join("c.yaml"), &environment, &mut |_| {});
        assert_eq!(read.is_ok(), fits, "{text}: {read:?}");
    }
}

#[test]
fn a_documented_default_is_a_value_of_its_key() {
    let schema = schema();
    let mut defaults = 0;
    for object in objects() {
        let properties = match object.name {
            "config" => &schema["properties"],
            name => &schema["$defs"][name]["properties"],
        };
        for key in object.keys {
            let Presence::Default(default) = key.presence() else { continue };
            let (mut problems, place) = (Problems::new(), format!("{}.{}", object.name, key.name()));
            check(&tree(&default, &mut problems), key.kind(), &KeyPath::Root, &mut problems);
            assert!(problems.is_empty(), "{place}: {:?}", problems.finish());
            let property = &properties[key.name()];
            assert_eq!(
                misfits(&validator_of(property), &property["default"]),
                Vec::<String>::new(),
                "{place}"
            );
            defaults += 1;
        }
    }
    assert!(defaults > 50, "{defaults}");
}

#[test]
fn a_pattern_of_the_schema_allows_what_the_reader_allows() {
    let mut forms: BTreeMap<&str, (&[&str], &[&str])> = BTreeMap::from([
        ("alpn", (&["h2"][..], &[""][..])),
        ("bandwidth", (&["500000", "20MiB"], &["20MB", "20MiB/s"])),
        ("bind", (&[":15443", "10.0.0.1:1", "[::1]:1"], &["15443"])),
        ("adminBind", (&["127.0.0.1:15000", "unix:/run/a.sock"], &["localhost:1", "unix:"])),
        ("bindAddress", (&["127.0.0.1:15000", "[::1]:15000"], &["localhost:1"])),
        ("checkInterval", (&["100ms", "5s", "1h"], &["99ms", "0s", "5"])),
        ("cidr", (&["10.0.0.0/8", "fd00::/8"], &["10.0.0.0"])),
        ("collector", (&["http://collector:4317"], &["https://collector:4317", "http://c:1/x"])),
        ("duration", (&["0s", "250ms", "10s", "5m", "1h"], &["10", "1.5s", "10 s"])),
        ("etcd", (&["https://etcd-0.example:2379", "http://127.0.0.1:2379"], &["etcd:2379"])),
        ("etcdPrefix", (&["/isthmus/services/"], &["/isthmus"])),
        ("helloSize", (&["4096", "16KiB"], &["16K"])),
        ("host", (&["10.0.0.1", "fd00::1", "db.internal"], &["a/b"])),
        ("hostname", (&["a.b", "a_b"], &["a b", "*.b"])),
        ("https", (&["https://a.b:1"], &["http://a.b:1"])),
        ("cost", (&["0", "0.02", "12.345678"], &["-1", "1.", ".5", "0.1234567"])),
        ("controllerName", (&["isthmus.io/gateway-controller", "a/b/c"], &["a", "/b", "A/b", "a/"])),
        ("steeringMode", (&["off", "nearest"], &["adaptive", "order"])),
        ("spiffeId", (&["spiffe://td/ns/a"], &["td/ns/a", "spiffe://td/ns/*"])),
        ("spiffeIdPattern", (&["spiffe://td/ns/a", "spiffe://td/ns/*"], &["td/*"])),
        ("ip", (&["10.0.0.1", "fd00::1"], &["host"])),
        ("label", (&["", "a b"], &[])),
        ("locality", (&["a", "a/b", "a/b/c"], &["/a", "a/b/c/d"])),
        ("memory", (&["60%", "614MiB", "2GiB"], &["60", "2Gi", "%"])),
        ("namespace", (&["shop"], &["west/shop", ""])),
        ("nameServer", (&["10.0.0.53", "10.0.0.53:5353", "[fd00::53]:5353"], &["ns.example"])),
        ("path", (&["a/b"], &[""])),
        ("pattern", (&["a.b", "*.b", "*"], &["a*", "*b"])),
        ("nameTemplate", (&["{service}.{namespace}.east.global", "a.b"], &["a b", ""])),
        ("peerName", (&["west", "w-1"], &["West", "a.b", "-a"])),
        ("percent", (&["0%", "100%"], &["50"])),
        ("routeKey", (&["-", "*", "*.b", "a.b"], &["a b"])),
        ("srvName", (&["_https._tcp.shop.internal"], &["shop.internal", "_https.a"])),
        ("subset", (&["v1"], &["V1", ""])),
        ("target", (&["10.0.0.1:443", "[fd00::1]:443", "db.internal:443"], &["db.internal"])),
        ("text", (&["a b"], &[""])),
        ("time", (&["2026-01-31T18:30:00Z", "2026-01-31T18:30:00.5+01:00"], &["2026-01-31", "18:30"])),
        ("timeout", (&["1ms", "010s"], &["0s", "00m", "1"])),
        ("trustDomain", (&["cluster.local"], &["Cluster.local"])),
        ("unixSocket", (&["unix:///run/a", "unix:/run/a"], &["/run/a"])),
        ("window", (&["65536", "64KiB"], &["64k"])),
    ]);
    for text in texts(&objects()) {
        let (good, bad) = forms.remove(text.name).unwrap_or_else(|| panic!("{} has no samples", text.name));
        let validator = validator_of(&json!({ "$ref": format!("#/$defs/{}", text.name) }));
        for (samples, fits) in [(good, true), (bad, false)] {
            for sample in samples {
                let read = (text.check)(sample).is_ok();
                assert_eq!(
                    (read, validator.is_valid(&json!(sample))),
                    (fits, fits),
                    "{}: {sample:?}",
                    text.name
                );
            }
        }
    }
    assert!(forms.is_empty(), "{forms:?}");
}

/// Returns the example config once for each of the three certificate sources that a comment in it lists.
fn examples() -> Vec<String> {
    let text = fs::read_to_string(root().join(EXAMPLE)).expect("the example");
    let (_, wds) = text.split_once("#   wds:\n").expect("a comment with the WDS server");
    let wds = wds.lines().map_while(|line| line.strip_prefix("#     "));
    let wds = wds.map(|line| format!("    {line}\n")).collect::<String>();
    let (_, sources) = text.split_once("#   identity:\n").expect("a comment with sources");
    let sources = sources.lines().map_while(|line| line.strip_prefix("#     "));
    let (_, peers) = text.split_once("#   peers:\n").expect("a comment with peers");
    let peers: Vec<&str> = peers.lines().map_while(|line| line.strip_prefix("#   ")).collect();
    let peers = format!("peers:\n{}", peers.join("\n"));
    let text = text.replace("\nxds:\n", &format!("\nxds:\n  wds:\n{wds}"));
    let examples: Vec<_> =
        sources.map(|source| format!("{text}\nidentity:\n  {source}\n{peers}\n")).collect();
    assert_eq!(examples.len(), 3);
    examples
}

/// Returns a validator of the whole schema, which checks patterns too, as an editor does.
fn validator() -> jsonschema::Validator {
    jsonschema::draft202012::new(&schema()).expect("a schema")
}

/// Returns a validator of a part of the schema.
fn validator_of(part: &Value) -> jsonschema::Validator {
    let mut part = part.clone();
    part["$defs"] = schema()["$defs"].clone();
    jsonschema::draft202012::new(&part).expect("a schema")
}

fn misfits(validator: &jsonschema::Validator, value: &Value) -> Vec<String> {
    validator.iter_errors(value).map(|error| format!("{}: {error}", error.instance_path())).collect()
}

/// Converts a YAML text to JSON, as the schema check of an editor sees it.
fn as_json(text: &str) -> Value {
    json_of(&tree(text, &mut Problems::new()))
}

fn tree(text: &str, problems: &mut Problems) -> isthmus_document::tree::Node {
    let file = problems.add_file(Path::new("x")).expect("a file");
    parse(Source { file, text, environment: None }, None, problems).expect("YAML")
}

fn json_of(node: &isthmus_document::tree::Node) -> Value {
    use isthmus_document::tree::{ScalarType, Value as Tree};
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
