//! The output of the commands: lists of a running gateway, filters, the config in use, and mistakes that `validate` finds.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;

use crate::hbone::{BASE, CALLER, OWN, caller, folder, service};
use crate::problems::run;
use crate::support::backend::Backend;
use crate::support::client::tls;
use crate::support::eventually;
use crate::support::gateway::{BINARY, Gateway};
use crate::support::hbone::Hbone;
use crate::support::pki::{PKI, Pki};

fn validate(folder: &std::path::Path, config: &str) -> (Option<i32>, String) {
    std::fs::write(folder.join("isthmus.yaml"), config).expect("written");
    let output = Command::new(BINARY)
        .args(["validate", "-c", "isthmus.yaml"])
        .current_dir(folder)
        .output()
        .expect("the binary runs");
    (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn lists_say_who_called_for_what() {
    let backend = Backend::echo();
    let services = service("echo.shop.mesh", 80, &backend, "");
    let config = BASE.replace("protocol: hbone", "protocol: auto");
    let gateway = Gateway::start_in(
        folder(),
        &format!("{config}services:\n{services}routes: {{a.test: \"{}\"}}\n", backend.address),
        &[],
    );
    let hbone = Hbone::connect(gateway.listener("hbone"), caller()).expect("let in");
    let mut stream = hbone.open("echo.shop.mesh:80").expect("admitted");
    assert_eq!(stream.echo("x"), Ok("x".to_owned()));
    let table = run(&gateway, &["get", "connections"]);
    assert!(table.contains("echo.shop.mesh:80") && table.contains(CALLER), "{table}");
    // `exposed` lists the authorities that HBONE callers use as well as the names of SNI clients.
    let exposed = run(&gateway, &["exposed"]);
    for name in ["echo.shop.mesh:80 ", "outbound_.80_._.echo.shop.mesh ", "a.test "] {
        assert!(exposed.lines().any(|line| line.starts_with(name)), "{name}: {exposed}");
    }
    assert!(run(&gateway, &["get", "routes"]).contains("a.test"));
    assert_eq!(run(&gateway, &["get", "registries"]), "none\n");
    // `failures` filters by reason, name and time.
    assert_eq!(run(&gateway, &["failures"]), "none\n");
    hbone.open("nobody.shop.mesh:80").err().expect("refused");
    tls(gateway.listener("hbone"), "nobody.test").expect_err("refused");
    gateway.logged("both", |line| line["reason"] == "sni_unknown");
    let failures = |arguments: &[&str]| run(&gateway, &[&["failures"], arguments].concat());
    let all = failures(&[]);
    assert!(
        all.contains("nobody.shop.mesh:80") && all.contains(CALLER) && all.contains("nobody.test"),
        "{all}"
    );
    let some = failures(&["--reason", "sni_unknown"]);
    assert!(some.contains("nobody.test") && !some.contains("nobody.shop.mesh"), "{some}");
    let some = failures(&["--name", "shop", "--since", "1m"]);
    assert!(!some.contains("nobody.test") && some.contains("nobody.shop.mesh"), "{some}");
    assert_eq!(failures(&["--reason", "stalled"]), "none\n");
    let misspelt = failures(&["--reason", "sni-unknown"]);
    assert!(misspelt.contains("invalid value") && misspelt.contains("'sni_unknown'"), "{misspelt}");
    assert!(failures(&["--since", "soon"]).contains("invalid value"), "{some}");
    // The YAML output quotes text values.
    let yaml = run(&gateway, &["get", "listeners", "-o", "yaml"]);
    assert!(yaml.starts_with("- name: \"hbone\"\n"), "{yaml}");
    // The output has no colours if it is not a terminal.
    assert!(!run(&gateway, &["status"]).contains('\x1b'));
}

#[test]
fn the_config_in_use_is_shown_with_its_defaults() {
    let gateway = Gateway::start(
        "listen: \"127.0.0.1:0\"\nroutes: {a.test: \"127.0.0.1:9\"}\ntimeouts: {connect: 2s}\n",
    );
    let config = gateway.json("/api/v1/config");
    assert_eq!(config["timeouts"]["connect"], "2s");
    assert_eq!(config["routes"]["a.test"]["ejection"]["failures"], 5, "{config:#}");
    // `get config` does not show a file that was rejected.
    gateway.write_config("listen: \"127.0.0.1:0\"\nroutes: {a.test: nowhere}\n");
    assert_eq!(gateway.post("/api/v1/reload").0, 400);
    assert_eq!(gateway.json("/api/v1/config")["routes"], config["routes"]);
    assert!(run(&gateway, &["get", "config"]).contains("connect: \"2s\""));
    assert!(run(&gateway, &["log-level", "debug"]).contains("debug"));
    assert!(run(&gateway, &["stop"]).contains("draining"));
}

/// A function that puts a mistake into a folder.
type Spoil<'a> = &'a dyn Fn(&std::path::Path);

#[test]
fn certificates_that_cannot_be_used_fail_validate_with_the_line_that_names_them() {
    let other = PKI.issue(&[], Some("spiffe://cluster.local/ns/shop/sa/other"));
    let old = PKI.issue_for(&[OWN], 2001, 2002);
    let nameless = PKI.issue(&["a.test"], None);
    let cases: [(&str, Spoil<'_>, &str); 6] = [
        (
            "missing",
            &|folder| std::fs::remove_file(folder.join("cert.pem")).expect("removed"),
            "cannot be read",
        ),
        (
            "no PEM",
            &|folder| std::fs::write(folder.join("cert.pem"), "x").expect("written"),
            "no certificate",
        ),
        (
            "key of another",
            &|folder| std::fs::write(folder.join("key.pem"), &other.key_pem).expect("written"),
            "the key does not match the certificate",
        ),
        (
            "of another",
            &|folder| {
                std::fs::write(folder.join("cert.pem"), &other.certificate_pem).expect("written");
                std::fs::write(folder.join("key.pem"), &other.key_pem).expect("written");
            },
            "the identity of the certificate is spiffe://cluster.local/ns/shop/sa/other",
        ),
        (
            "no identity",
            &|folder| {
                std::fs::write(folder.join("cert.pem"), &nameless.certificate_pem).expect("written");
                std::fs::write(folder.join("key.pem"), &nameless.key_pem).expect("written");
            },
            "has no SPIFFE identity",
        ),
        (
            "expired",
            &|folder| {
                std::fs::write(folder.join("cert.pem"), &old.certificate_pem).expect("written");
                std::fs::write(folder.join("key.pem"), &old.key_pem).expect("written");
            },
            "the certificate expired at 2002-01-01",
        ),
    ];
    for (case, spoil, wanted) in cases {
        let folder = folder();
        assert_eq!(validate(folder.path(), BASE).0, Some(0), "{case}");
        spoil(folder.path());
        let (code, told) = validate(folder.path(), BASE);
        assert_eq!(code, Some(4), "{case}: {told}");
        let line = told.lines().find(|line| line.starts_with("isthmus.yaml:3:19: identity.files: "));
        assert!(line.is_some_and(|line| line.contains(wanted)), "{case}: {told}");
    }
}

#[test]
fn roots_of_peers_that_cannot_be_used_fail_validate_with_the_line_that_names_them() {
    let (west, south) = (Pki::new("the CA of west"), Pki::new("the CA of south"));
    let old = Pki::of_years("the old CA of west", 2001, 2002);
    let leaf = west.issue(&[], Some("spiffe://west.example/ns/isthmus/sa/gateway")).certificate_pem;
    let garbage = "-----BEGIN CERTIFICATE-----\naGVsbG8=\n-----END CERTIFICATE-----\n";
    let shared = west.ca_pem() + &south.ca_pem();
    let ours = west.ca_pem() + &PKI.ca_pem();
    let config = format!(
        "{}peers:\n  - {{name: south, accept: true, identity: \"spiffe://south.example/ns/isthmus/sa/gateway\", trust: south.pem}}\n  \
         - name: west\n    accept: true\n    identity: \"spiffe://west.example/ns/isthmus/sa/gateway\"\n    trust: west.pem\n",
        BASE.replace("protocol: hbone", "protocol: auto")
    );
    let line = 1 + config.lines().position(|line| line == "    trust: west.pem").expect("the line");
    let told_of = |text: Option<&str>| {
        let folder = folder();
        std::fs::write(folder.path().join("south.pem"), south.ca_pem()).expect("written");
        if let Some(text) = text {
            std::fs::write(folder.path().join("west.pem"), text).expect("written");
        }
        validate(folder.path(), &config)
    };
    for good in [west.ca_pem(), west.ca_pem() + &old.ca_pem()] {
        let (code, told) = told_of(Some(&good));
        assert_eq!(code, Some(0), "{told}");
    }
    for (text, wanted) in [
        (None, "west.pem: cannot be read"),
        (Some(""), "west.pem: "),
        (Some("x"), "west.pem: "),
        (Some("-----BEGIN CERTIFICATE-----\nx"), "west.pem: "),
        (Some(garbage), "west.pem: certificate 1 cannot be read"),
        (
            Some(&*leaf),
            "is not a CA certificate, so it cannot verify others; expected the root certificates of the peer",
        ),
        (
            Some(&*old.ca_pem()),
            "west.pem: all root certificates in the file have expired, the last one at 2002-01-01",
        ),
        (Some(&*shared), "root 2 is also a root of the trust domain south.example"),
        (Some(&*ours), "root 2 is also a root of the trust domain cluster.local"),
    ] {
        let (code, told) = told_of(text);
        assert_eq!(code, Some(4), "{text:?}: {told}");
        let place = format!("isthmus.yaml:{line}:12: peers[1].trust: ");
        let found = told.lines().find(|line| line.starts_with(&place));
        assert!(found.is_some_and(|found| found.contains(wanted)), "{wanted}: {told}");
    }
}

/// The likeliest first mistake of operators with several networks (a registry without a network), and its mirror image (a node
/// without one).
#[test]
fn networks_that_are_not_said_are_warned_of() {
    let folder = tempfile::tempdir().expect("a folder");
    let west = "services:\n  - hostname: api.shop.mesh\n    namespace: shop\n    ports: [{name: https, port: 443, protocol: TLS}]\n    \
                endpoints: [{address: 10.1.0.1}, {address: 10.1.0.2}, {address: gone.invalid}]\n";
    std::fs::write(folder.path().join("west.yaml"), west).expect("written");
    let config = |node: &str, network: &str| {
        format!(
            "node: {{cluster: east{node}}}\nlisten: \":15443\"\nexports: [{{services: [\"*\"]}}]\n\
             registries: [{{file: {{path: west.yaml, cluster: west{network}}}}}]\n"
        )
    };
    let (code, told) = validate(folder.path(), &config(", network: net-east", ""));
    assert_eq!(code, Some(0), "{told}");
    let wanted = "registry west.yaml: 3 of 3 endpoints have no network, but node.network is net-east";
    assert!(told.contains(wanted), "{told}");
    assert!(told.contains("gone.invalid does not resolve"), "{told}");
    let (_, told) = validate(folder.path(), &config("", ", network: net-west"));
    assert!(told.contains("3 of 3 endpoints have a network, but node.network is not set"), "{told}");
    let (_, told) = validate(folder.path(), &config(", network: net-east", ", network: net-west"));
    assert!(!told.contains("endpoints have"), "{told}");
}

/// A peer that is not enrolled, to which all services are exported.
const PEER: &str = "peers: [{name: south, export: [{services: [\"*\"], as: \"{service}.{namespace}.global\"}]}]\n\
                    aggregator: {startTimeout: 1s}\n";

#[test]
fn a_plan_compares_a_file_with_the_running_gateway() {
    let services = service("echo.shop.mesh", 80, &Backend::echo(), "");
    let config = format!("{BASE}services:\n{services}");
    let gateway = Gateway::start_in(folder(), &format!("{config}{PEER}"), &[]);
    let next = gateway.folder().join("next.yaml");
    let plan = |peers: &str| {
        // The plan uses the services of the running gateway, not those of the file.
        std::fs::write(&next, format!("{BASE}{peers}")).expect("written");
        run(&gateway, &["peer", "plan", "-c", &next.display().to_string()])
    };
    assert_eq!(plan(PEER), "nothing changes for any peer\n");
    let other = PEER.replace("{service}.{namespace}.global", "{service}.here");
    assert_eq!(plan(&other), "peer south\n  ~ echo.shop.global -> echo.here (echo.shop.mesh:80/TCP)\n");
    let west = "peers: [{name: west, export: [{services: [\"echo.shop.mesh\"]}], import: [{services: [\"*.west.global\"]}]}]\n";
    let wanted = "peer south (removed)\n  - echo.shop.global (echo.shop.mesh:80/TCP)\n\npeer west (added)\n  + echo.shop.mesh \
                  (echo.shop.mesh:80/TCP)\n  + import *.west.global\n";
    assert_eq!(plan(west), wanted);
    assert_eq!(gateway.json("/api/v1/peers")[0]["exported"], 1, "nothing is applied");
    assert_eq!(gateway.json("/api/v1/peers/south")["exported"][0]["exported_name"], "echo.shop.global");
    assert_eq!(gateway.get("/api/v1/peers/west").0, 404);
    // The gateway already uses its own file.
    let own = Command::new(BINARY)
        .args(["peer", "plan", "-c", "isthmus.yaml", "--admin", &format!("http://{}", gateway.admin())])
        .current_dir(gateway.folder())
        .output()
        .expect("the binary runs");
    assert_eq!(String::from_utf8_lossy(&own.stdout), "nothing changes for any peer\n");
    let warned = String::from_utf8_lossy(&own.stderr).into_owned();
    assert!(warned.contains("the gateway already uses isthmus.yaml"), "{warned}");
    // Two files are compared without a gateway; then the file has a mistake.
    let (old, json) = (gateway.folder().join("isthmus.yaml"), ["-o", "json"]);
    let (old, next) = (old.display().to_string(), next.display().to_string());
    let offline = run(&gateway, &[&["peer", "plan", "-c", &next, "--against", &old], &json[..]].concat());
    let offline: Value = serde_json::from_str(&offline).expect("JSON");
    assert_eq!(offline[0]["unreachable"][0]["service"], "echo.shop.mesh", "{offline:#}");
    assert!(plan("peers: [{name: west, exports: []}]\n").contains("next.yaml:"), "the place of the mistake");
}

/// Returns the texts in backquotes of a table cell.
fn quoted(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

#[test]
fn addresses_that_a_registry_may_not_give_are_told_of() {
    let folder = tempfile::tempdir().expect("a folder");
    let west = "services:\n  - hostname: api.shop.mesh\n    namespace: shop\n    ports: [{name: https, port: 443, protocol: TLS}]\n    \
                endpoints: [{address: 127.0.0.1}, {address: 10.1.0.2}]\n";
    std::fs::write(folder.path().join("west.yaml"), west).expect("written");
    let config = "node: {network: west}\nlisten: \"127.0.0.1:0\"\nexports: [{services: [\"*\"]}]\nregistries: [{file: {path: west.yaml, cluster: \
                  west, network: west}, allow: {services: [\"*.shop.mesh\"]}}]\n";
    let (code, told) = validate(folder.path(), config);
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("registry west.yaml: 1 endpoint is left out by `allow.addresses`"), "{told}");
    let gateway = Gateway::start_in(folder, config, &[]);
    let problem = crate::problems::has_problem(&gateway, "address_not_allowed");
    assert!(problem["text"].as_str().is_some_and(|text| text.contains("allow.addresses")), "{problem}");
}

#[test]
fn answers_have_the_members_that_the_documents_name() {
    let folder = folder();
    let west = service("far.shop.mesh", 80, &Backend::echo(), "").replacen("  - ", "services:\n  - ", 1);
    std::fs::write(folder.path().join("west.yaml"), west).expect("written");
    let config = BASE.replace("protocol: hbone", "protocol: auto");
    let services = service("echo.shop.mesh", 80, &Backend::echo(), "");
    let gateway = Gateway::start_in(
        folder,
        &format!(
            "{config}services:\n{services}routes: {{a.test: \"127.0.0.1:9\"}}\nregistries: [{{file: {{path: west.yaml, cluster: west, \
             network: west}}}}]\nnetworks: {{west: {{gateways: [{{address: 127.0.0.1, sniPort: 9}}]}}}}\n{PEER}"
        ),
        &[],
    );
    let documents = include_str!("../../docs/api.md");
    let mut checked = 0;
    for line in documents.lines().filter(|line| line.starts_with("| `GET /api/v1/")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').collect();
        let [request, answer, members] = cells[..] else { panic!("three cells: {line}") };
        // A row without a file is that of the config, or of an invitation.
        let Some((_, file)) = members.split_once("](../") else { continue };
        let Some(file) = file.trim().strip_suffix(".json)") else { continue };
        let path = quoted(request)[0].trim_start_matches("GET ").split('?').next().expect("a path");
        let path = match path {
            "/api/v1/explain" => "/api/v1/explain?sni=a.test".to_owned(),
            "/api/v1/horizon" => "/api/v1/horizon?network=west&service=far.shop.mesh".to_owned(),
            "/api/v1/traces/{trace}" => "/api/v1/traces/4bf92f3577b34da6a3ce929d0e0e4736".to_owned(),
            path => path.replace("{hostname}", "echo.shop.mesh").replace("{name}", "south"),
        };
        let value = gateway.json(&path);
        let is_list = answer.trim().starts_with("list");
        assert_eq!(value.is_array(), is_list, "{path}: {value}");
        let items = if is_list { value.as_array().cloned().unwrap_or_default() } else { vec![value.clone()] };
        // An item may lack a member that does not apply to its kind.
        let found: BTreeSet<&str> = items
            .iter()
            .filter_map(|item| item.as_object())
            .flat_map(|item| item.keys().map(String::as_str))
            .collect();
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("{file}.json"));
        let golden =
            std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let golden: Value = serde_json::from_str(&golden).expect("JSON");
        let documented: BTreeSet<&str> =
            golden.as_object().expect("an object").keys().map(String::as_str).collect();
        // The gateway has no connections, failures and clients, so these lists are empty.
        for member in documented.iter().filter(|_| !items.is_empty()) {
            // Only a rule that requires a mark has `marked_by`, only a service that an annotation hides has `hidden_by`, only a
            // steered service has `groups`, and networks a `share` of its calls, and only a network with clients has `calls`.
            let is_rare = ["marked_by", "hidden_by", "groups", "share", "calls"].contains(member);
            assert!(found.contains(member) || is_rare, "{path}: {member}: {value:#}");
            checked += 1;
        }
        assert!(found.is_subset(&documented), "{path}: {found:?} are not all in {}", file.display());
    }
    assert!(checked > 90, "{checked} members were checked");
    // The documents list every metric that the gateway serves.
    let documents = include_str!("../../docs/metrics.md");
    let (_, served) = gateway.get("/metrics");
    for family in served.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()) {
        assert!(documents.contains(&format!("| `{family}` |")), "{family} is not in docs/metrics.md");
        assert!(served.contains(&format!("# HELP {family} ")), "{family} has no description");
    }
}

/// Runs `isthmus check`; returns its exit code and the JSON values that it prints, one per line.
fn check(gateway: &Gateway, arguments: &[&str]) -> (Option<i32>, Vec<Value>) {
    let mut command = Command::new(BINARY);
    command.args(["check", "-o", "json"]).args(arguments);
    let output =
        command.env("ISTHMUS_ADMIN", format!("http://{}", gateway.admin())).output().expect("it runs");
    let lines: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (output.status.code(), lines.as_array().expect("a list").clone())
}

fn states<'a>(lines: &'a [Value], area: &str) -> Vec<&'a str> {
    let of_area = lines.iter().filter(|line| line["check"] == area);
    of_area.map(|line| line["state"].as_str().expect("a word")).collect()
}

#[test]
fn check_says_of_each_area_whether_it_is_well() {
    let backend = Backend::echo();
    let config = format!("listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{}\"}}\n", backend.address);
    let gateway = Gateway::start(&config);
    let (code, lines) = check(&gateway, &["--wait", "10s"]);
    assert_eq!(code, Some(0), "{lines:?}");
    for area in ["gateway", "config", "registries", "names", "certificates", "endpoints", "xds", "logs"] {
        assert_eq!(states(&lines, area), ["ok"], "{area}: {lines:?}");
    }
    // `isthmus check` reports a rejected file in the area `config` alone, and that line says what to do next.
    gateway.write_config("listen: \"127.0.0.1:0\"\nroutes: {a.test: nowhere}\n");
    assert_eq!(gateway.post("/api/v1/reload").0, 400);
    let (code, lines) = check(&gateway, &[]);
    assert_eq!((code, states(&lines, "config")), (Some(1), vec!["failed"]), "{lines:?}");
    let failed = lines.iter().find(|line| line["state"] == "failed").expect("one");
    assert!(failed["text"].as_str().is_some_and(|text| text.starts_with("config_rejected: ")), "{failed}");
    assert!(failed["next"].as_str().is_some_and(|next| next.contains("isthmus validate")), "{failed}");
    let table = run(&gateway, &["check"]);
    assert!(table.contains("failed   config ") && table.contains("next: "), "{table}");
    // `--wait` waits until the mistake is repaired while the command runs.
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| check(&gateway, &["--wait", "20s"]));
        std::thread::sleep(std::time::Duration::from_millis(700));
        gateway.reload(&config);
        let (code, lines) = waits.join().expect("it ends");
        assert_eq!(code, Some(0), "{lines:?}");
    });
    // The only endpoint of the route refuses connections.
    gateway.reload("listen: \"127.0.0.1:0\"\nroutes: {a.test: \"127.0.0.1:1\"}\n");
    for _ in 0..3 {
        tls(gateway.listener("default"), "a.test").expect_err("nobody is there");
    }
    let (code, lines) = check(&gateway, &[]);
    assert_eq!((code, states(&lines, "endpoints")), (Some(1), vec!["failed"]), "{lines:?}");
}

#[test]
fn check_of_a_file_needs_no_gateway_and_a_gateway_that_is_away_has_an_exit_code_of_its_own() {
    let folder = tempfile::tempdir().expect("a folder");
    let check = |config: &str| {
        std::fs::write(folder.path().join("isthmus.yaml"), config).expect("written");
        let output = Command::new(BINARY)
            .args(["check", "-c", "isthmus.yaml"])
            .current_dir(folder.path())
            .output()
            .expect("it runs");
        (output.status.code(), String::from_utf8(output.stdout).expect("text"))
    };
    let (code, text) = check("listen: \"127.0.0.1:0\"\nroutes: {a.test: \"127.0.0.1:9\"}\n");
    assert_eq!((code, &*text), (Some(0), "ok       config  isthmus.yaml has no mistakes\n"));
    let (code, text) = check("listen: \"127.0.0.1:0\"\nexports: [{services: [gone.mesh]}]\n");
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("warning  config  ") && text.contains("gone.mesh"), "{text}");
    let (code, text) = check("listen: nowhere\n");
    assert_eq!(code, Some(1), "{text}");
    assert!(text.starts_with("failed   config  isthmus.yaml:1:9: "), "{text}");
    let output =
        Command::new(BINARY).args(["check", "--admin", "http://127.0.0.1:1"]).output().expect("it runs");
    let text = String::from_utf8(output.stdout).expect("text");
    assert_eq!((output.status.code(), output.stderr.is_empty()), (Some(3), true), "{text}");
    assert!(text.starts_with("failed   gateway  cannot reach the admin API"), "{text}");
}

#[test]
fn check_from_zero_ends_at_the_first_step_that_is_not_done() {
    let backend = Backend::tls_echo(PKI.server("a.test"), "");
    let config = format!("listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{}\"}}\n", backend.address);
    let gateway = Gateway::start("listen: \"127.0.0.1:0\"\nexports: [{services: [a.mesh]}]\n");
    let file = gateway.folder().join("isthmus.yaml");
    let from_zero = ["--from-zero", "-c", file.to_str().expect("a path")];
    let (code, lines) = check(&gateway, &from_zero);
    assert_eq!((code, states(&lines, "names")), (Some(1), vec!["failed"]), "{lines:?}");
    assert_eq!(lines.last().expect("steps")["check"], "names", "{lines:?}");
    gateway.reload(&config);
    // The overview is made once a second.
    let lines = eventually("all steps but the call", || {
        let (code, lines) = check(&gateway, &from_zero);
        (code == Some(0) && states(&lines, "calls") == ["warning"]).then_some(lines)
    });
    let next = lines.iter().find(|line| line["check"] == "calls").expect("a step")["next"].clone();
    assert_eq!(next, "`isthmus test call a.test`");
    tls(gateway.listener("default"), "a.test").expect("a handshake");
    eventually("the call", || {
        let (code, lines) = check(&gateway, &from_zero);
        (code == Some(0) && states(&lines, "calls") == ["ok"]).then_some(())
    });
    // Without a file, and without a gateway.
    let empty = tempfile::tempdir().expect("a folder");
    let alone = |arguments: &[&str]| {
        let mut command = Command::new(BINARY);
        command.args(["check", "--from-zero", "--admin", "http://127.0.0.1:1"]).args(arguments);
        let output = command.current_dir(empty.path()).output().expect("it runs");
        (output.status.code(), String::from_utf8(output.stdout).expect("text"))
    };
    let (code, text) = alone(&from_zero[1..]);
    assert!(code == Some(3) && text.contains("next: `isthmus run -c "), "{text}");
    if !std::path::Path::new("/etc/isthmus/isthmus.yaml").exists() {
        let (code, text) = alone(&[]);
        assert!(code == Some(1) && text.starts_with("failed   config  no config file found"), "{text}");
    }
}

#[test]
fn check_of_a_listener_for_metrics_or_health_is_told_where_the_admin_api_is() {
    let gateway = Gateway::start(
        "listen: \"127.0.0.1:0\"\nroutes: {a.test: \"127.0.0.1:1\"}\n\
         telemetry: {log: {format: json}, metrics: {bind: \"127.0.0.1:0\"}, health: {bind: \"127.0.0.1:0\"}}\n",
    );
    for listener in ["metrics", "health"] {
        let admin = format!("http://{}", gateway.listener(listener));
        let output = Command::new(BINARY).args(["check", "--admin", &admin]).output().expect("it runs");
        let text = String::from_utf8(output.stdout).expect("text");
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("the admin API is at the address admin.bind of the config"), "{text}");
        assert!(text.contains("give the `admin.bind` of the gateway with `--admin`"), "{text}");
        assert!(!text.contains("start the gateway"), "the gateway runs: {text}");
    }
}

/// A running command that prints a line of JSON for each change, with its output lines so far; killed when dropped.
struct Following {
    child: std::process::Child,
    lines: std::sync::Arc<std::sync::Mutex<Vec<Value>>>,
}

impl Following {
    fn start(gateway: &Gateway, command: &[&str]) -> Self {
        let mut child = Command::new(BINARY)
            .args(command)
            .args(["-o", "json", "--admin", &format!("http://{}", gateway.admin())])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("it runs");
        let lines = std::sync::Arc::<std::sync::Mutex<Vec<Value>>>::default();
        let (output, sink) = (child.stdout.take().expect("piped"), lines.clone());
        std::thread::spawn(move || {
            use std::io::BufRead as _;
            for line in std::io::BufReader::new(output).lines().map_while(Result::ok) {
                sink.lock()
                    .expect("not poisoned")
                    .push(serde_json::from_str(&line).expect("JSON on each line"));
            }
        });
        Self { child, lines }
    }

    /// Waits for an output line that matches.
    #[track_caller]
    fn until(&self, what: &str, so: impl Fn(&Value) -> bool) -> Value {
        eventually(what, || self.line(&so))
    }

    /// Waits for an output line that matches, and does `act` before each look. A command reports no change before it has read the
    /// lists for the first time, which takes long on a busy machine.
    #[track_caller]
    fn until_told(&self, what: &str, mut act: impl FnMut(), so: impl Fn(&Value) -> bool) -> Value {
        eventually(what, || {
            act();
            std::thread::sleep(std::time::Duration::from_millis(1500));
            self.line(&so)
        })
    }

    fn line(&self, so: impl Fn(&Value) -> bool) -> Option<Value> {
        self.lines.lock().expect("not poisoned").iter().find(|line| so(line)).cloned()
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn watch_tells_what_changes_and_nothing_else() {
    let backend = Backend::echo();
    let route = |address: &str| format!("listen: \"127.0.0.1:0\"\nroutes: {{a.test: [{address}]}}\n");
    let one = format!("\"{}\"", backend.address);
    let gateway = Gateway::start(&route(&one));
    let listener = gateway.listener("default");
    // A failure from before the start of `watch` is not reported.
    tls(listener, "before.test").expect_err("refused");
    gateway.logged("a refusal", |line| line["sni"] == "before.test");
    let failures = Following::start(&gateway, &["watch", "failures"]);
    let connections = Following::start(&gateway, &["watch", "connections"]);
    let endpoints = Following::start(&gateway, &["watch", "endpoints"]);
    // `failures --watch` begins with the failures so far.
    let all = Following::start(&gateway, &["failures", "--watch"]);
    all.until("the failure before", |line| line["sni"] == "before.test");
    // The first failure that is told of is one from after the start.
    let fail = || drop(tls(listener, "after.test").expect_err("refused"));
    let failed = failures.until_told("a failure", fail, |line| line["change"] == "failed");
    assert_eq!(
        (&failed["value"]["sni"], &failed["value"]["reason"]),
        (&"after.test".into(), &"sni_unknown".into())
    );
    let mut open = Vec::new();
    let call = || {
        let mut client = crate::support::client::connect(listener);
        std::io::Write::write_all(&mut client, &crate::support::client::hello("a.test")).expect("sent");
        open.push(client);
    };
    // A refused connection is told of as well if it is seen before its end.
    let is_ours = |line: &Value| line["change"] == "opened" && line["value"]["sni"] == "a.test";
    let opened = connections.until_told("a connection", call, is_ours);
    drop(open);
    let ended = |line: &Value| line["change"] == "closed" && line["value"]["id"] == opened["value"]["id"];
    connections.until("its end", ended);
    all.until("the failure after", |line| line["sni"] == "after.test");
    // `watch` reports an endpoint when it is added, changes its state, and is removed.
    let gone = "\"127.0.0.1:1\"";
    let has = |change: &'static str| {
        move |line: &Value| line["change"] == change && line["value"]["address"] == "127.0.0.1:1"
    };
    let add = || {
        gateway.reload(&route(&one));
        std::thread::sleep(std::time::Duration::from_millis(1500));
        gateway.reload(&route(&format!("{one}, {gone}")));
    };
    endpoints.until_told("a new endpoint", add, has("added"));
    for _ in 0..40 {
        drop(tls(listener, "a.test"));
    }
    let changed = endpoints.until("an ejection", has("changed"));
    assert_eq!(changed["value"]["state"], "ejected", "{changed}");
    endpoints.lines.lock().expect("not poisoned").clear();
    gateway.reload(&route(&one));
    endpoints.until("an endpoint that went", has("removed"));
}

#[test]
fn the_version_is_a_command_and_validate_prints_json() {
    let output = |arguments: &[&str]| Command::new(BINARY).args(arguments).output().expect("the binary runs");
    assert_eq!(output(&["version"]).stdout, output(&["--version"]).stdout);
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, config: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, config).expect("written");
        path.to_str().expect("text").to_owned()
    };
    let fine = file("fine.yaml", "listen: \"127.0.0.1:0\"\nroutes: {a.test: \"127.0.0.1:9\"}\n");
    let wrong = file("wrong.yaml", "listen: \"127.0.0.1:0\"\nrutes: {}\n");
    let output = output(&["validate", "--json", &fine, &wrong]);
    let reports: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let verdicts: Vec<&str> =
        reports.as_array().expect("a list").iter().filter_map(|report| report["verdict"].as_str()).collect();
    assert_eq!((output.status.code(), &verdicts[..]), (Some(1), &["fine", "wrong"][..]), "{reports}");
    assert_eq!((reports[0]["file"].as_str(), &reports[0]["errors"]), (Some(&*fine), &serde_json::json!([])));
    assert!(reports[1]["errors"][0].as_str().is_some_and(|error| error.contains("rutes")), "{reports}");
}

#[test]
fn a_gateway_that_hangs_costs_a_command_three_seconds() {
    let gateway = Gateway::start("listen: \"127.0.0.1:0\"\nroutes: {a.test: \"127.0.0.1:9\"}\n");
    gateway.signal("STOP");
    let begun = std::time::Instant::now();
    let told = run(&gateway, &["get", "services"]);
    let took = begun.elapsed();
    gateway.signal("CONT");
    assert!(told.contains("no answer within 3 s"), "{told}");
    assert!(took < std::time::Duration::from_secs(8), "{took:?}");
}

#[test]
fn the_completion_of_bash_has_the_names_of_services() {
    let services =
        "services: [{hostname: checkout.shop.mesh, namespace: shop, ports: [{name: web, port: 443}]}]";
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{cart.test: \"127.0.0.1:9\"}}\nnode: {{cluster: c, network: n}}\n{services}\n"
    ));
    let folder = std::path::Path::new(BINARY).parent().expect("a folder");
    let completed = |words: &str| {
        let script = format!(
            "source <(isthmus completion bash)\nCOMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n\
             _isthmus_names isthmus \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD - 1]}}\"\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"\n"
        );
        let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap_or_default());
        let output = Command::new("bash")
            .args(["-c", &script])
            .env("PATH", path)
            .env("ISTHMUS_ADMIN", gateway.admin().to_string())
            .output();
        String::from_utf8_lossy(&output.expect("bash runs").stdout).into_owned()
    };
    assert!(completed("isthmus explain check").lines().any(|word| word == "checkout.shop.mesh"));
    assert!(completed("isthmus test call che").lines().any(|word| word == "checkout.shop.mesh"));
    assert!(!completed("isthmus get che").contains("checkout.shop.mesh"));
    assert!(completed("isthmus explain --pro").contains("--probe"));
}
