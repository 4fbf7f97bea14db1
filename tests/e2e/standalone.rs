//! A newcomer's first steps: the demo, the examples, and the output and exit codes of the commands.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use crate::support::backend::{Backend, refusing};
use crate::support::client::{Tls, call, connect, tls, tls_with};
use crate::support::eventually;
use crate::support::gateway::{BINARY, Gateway};
use crate::support::hbone::{Hbone, client};
use crate::support::kube;
use crate::support::pki::{Issued, PKI};

/// Runs a command to its end, and returns its output.
fn isthmus(arguments: &[&str]) -> Output {
    Command::new(BINARY).args(arguments).env_remove("ISTHMUS_ADMIN").output().expect("the binary starts")
}

fn out(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("text")
}

fn err(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("text")
}

#[track_caller]
fn exits(output: &Output, code: i32) {
    assert_eq!(output.status.code(), Some(code), "{}{}", out(output), err(output));
}

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

// The demo.

/// Returns the demo's command; the demo puts its files into this folder.
fn demo(folder: &TempDir, arguments: &[&str]) -> Command {
    let mut command = Command::new(BINARY);
    command.arg("demo").args(arguments).env("TMPDIR", folder.path()).stdin(Stdio::null());
    command
}

/// Fails unless the demo has removed its files and ended its processes.
#[track_caller]
fn nothing_is_left(folder: &TempDir) {
    let files: Vec<_> = folder.path().read_dir().expect("listed").collect();
    assert!(files.is_empty(), "{files:?}");
    assert_eq!(gateways_of(folder), Vec::<String>::new());
}

/// Returns the command lines of processes whose command line or working directory is in the folder.
fn gateways_of(folder: &TempDir) -> Vec<String> {
    let processes = Path::new("/proc").read_dir().expect("listed").flatten();
    let lines = processes.filter_map(|process| {
        let line = std::fs::read_to_string(process.path().join("cmdline")).ok()?;
        let place = std::fs::read_link(process.path().join("cwd")).unwrap_or_default();
        Some(format!("{line} in {}", place.display()))
    });
    lines.filter(|line| line.contains(text(folder.path()))).collect()
}

#[test]
fn the_demo_goes_as_it_should_and_leaves_nothing_behind() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = demo(&folder, &[]).output().expect("run");
    exits(&output, 0);
    let told = out(&output);
    for expected in [
        "STEP",
        "SHOWN BY",
        "seen from net-east, by weight: catalog-5 1, catalog-6 1, the gateway of net-west 4",
        "the gateway of net-east 2, catalog-1 1, catalog-2 1, catalog-3 1, catalog-4 1",
        "did you mean checkout.shop",
        "checkout-3 as ejected",
        "within the tunnel, spiffe://cluster.local/ns/shop/sa/web and ledger-1 have verified each other",
        "--identity spiffe://cluster.local/ns/bank/sa/teller: admitted",
        "403 identity_denied, explain identity_denied",
        "ratings.shop.south.global is listed in north",
        "20 of 20 calls within north are answered, and north still knows ratings.shop.south.global",
        "exit status: 0",
    ] {
        assert!(told.contains(expected), "no {expected:?} in:\n{told}");
    }
    assert!(told.contains("steps succeeded"), "{told}");
    assert!(!told.contains('\x1b'), "colours, and nobody has a terminal");
    nothing_is_left(&folder);
}

#[test]
fn the_demo_tells_what_it_measured_as_json() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = demo(&folder, &["-o", "json"]).output().expect("run");
    exits(&output, 0);
    let report: Value = serde_json::from_str(&out(&output)).expect("JSON and nothing else");
    assert_eq!(report["as_it_should"], true);
    let steps = report["steps"].as_array().expect("a list");
    let step = |title: &str| steps.iter().find(|step| step["step"] == title).expect(title);
    assert_eq!(step("mesh name, by weight")["ok"], 300);
    assert_eq!(step("not exported")["refused"], 1);
    // The 80 calls are 40 HBONE streams and 40 calls by SNI.
    assert_eq!((&step("HBONE beside SNI")["ok"], &step("double HBONE")["ok"]), (&80.into(), &1.into()));
    assert_eq!(step("identity denied")["refused"], 1);
    // The calls reach south's service before and after the split, and north's own service during it. The refused calls are one
    // to a name that is not exported and one across the split.
    assert_eq!(
        (&step("two organisations")["ok"], &step("two organisations")["refused"]),
        (&60.into(), &2.into())
    );
    assert_eq!(step("bulk")["bytes"], 256 << 20);
}

#[test]
fn the_demo_measures_two_kubernetes_clusters_or_says_how_to_get_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let step = |path: &str| {
        let output = demo(&folder, &["-o", "json"]).env("PATH", path).output().expect("run");
        exits(&output, 0);
        let report: Value = serde_json::from_str(&out(&output)).expect("JSON and nothing else");
        let steps = report["steps"].as_array().expect("a list");
        steps.iter().find(|step| step["step"] == "two Kubernetes clusters").expect("the step").clone()
    };
    let without = step("/nowhere");
    assert_eq!((&without["calls"], &without["as_it_should"]), (&0.into(), &true.into()), "{without}");
    assert!(without["notes"].to_string().contains("`tests/kube/build FOLDER`"), "{without}");
    let Some(program) = kube::installed() else { return };
    let with = step(text(program.parent().expect("a folder")));
    assert_eq!((&with["calls"], &with["ok"]), (&10.into(), &10.into()), "{with}");
    eprintln!(
        "a pod's change at the other network's view: {} ms, at most {}",
        with["p50_ms"], with["p99_ms"]
    );
    assert!(with["p50_ms"].as_f64().is_some_and(|time| time > 0.0), "{with}");
    let notes = with["notes"].to_string();
    assert!(notes.contains("its registry is stale after") && notes.contains("stay in use"), "{notes}");
    nothing_is_left(&folder);
}

#[test]
fn an_interrupted_demo_leaves_nothing_behind() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut child =
        demo(&folder, &[]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let first = lines.by_ref().map_while(Result::ok).find(|line| line.starts_with("1. "));
    assert!(first.is_some(), "the first step was not announced");
    assert!(gateways_of(&folder).len() >= 2);
    let status = Command::new("kill").args(["-s", "INT", &child.id().to_string()]).status().expect("kill");
    assert!(status.success());
    // The rest of the output is read, so that the demo does not block on a full pipe.
    lines.for_each(drop);
    let output = child.wait_with_output().expect("ended");
    exits(&output, 1);
    assert!(err(&output).contains("stopped by Ctrl-C"), "{}", err(&output));
    nothing_is_left(&folder);
}

#[test]
fn a_kept_demo_goes_on_until_it_is_interrupted() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut child = demo(&folder, &["--keep"]).stdout(Stdio::piped()).spawn().expect("started");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines().map_while(Result::ok);
    let hint = lines.find(|line| line.contains("isthmus status --admin")).expect("hints");
    let admin = hint.rsplit(' ').next().expect("a URL");
    exits(&isthmus(&["healthcheck", "--admin", admin]), 0);
    let status = Command::new("kill").args(["-s", "INT", &child.id().to_string()]).status().expect("kill");
    assert!(status.success());
    lines.for_each(drop);
    assert!(child.wait().expect("ended").success());
    nothing_is_left(&folder);
}

// The examples.

/// Starts a gateway from a config file of an example. The gateway runs in a copy of the example's folder, and these texts are
/// replaced in the files of the copy.
#[track_caller]
fn start_example(name: &str, config: &str, replacements: &[(&str, &str)]) -> Gateway {
    let folder = tempfile::tempdir().expect("a folder");
    let mut missing: Vec<&str> = replacements.iter().map(|(old, _)| *old).collect();
    for file in root("examples").join(name).read_dir().expect("an example").flatten() {
        let mut content = std::fs::read_to_string(file.path()).expect("text");
        for (old, new) in replacements {
            missing.retain(|missing| !content.contains(missing));
            content = content.replace(old, new);
        }
        if file.file_name() == config {
            for (key, value) in [
                ("admin", "admin: {bind: \"127.0.0.1:0\"}\n"),
                ("telemetry", "telemetry: {log: {format: json}}\n"),
            ] {
                if !content.contains(&format!("\n{key}:")) {
                    content.push_str(value);
                }
            }
            content = content.replace("\ntelemetry:\n", "\ntelemetry:\n  log: {format: json}\n");
        }
        std::fs::write(folder.path().join(file.file_name()), content).expect("written");
    }
    assert!(missing.is_empty(), "not in the example {name}: {missing:?}");
    let mut command = Command::new(BINARY);
    command.args(["run", "-c", config]).current_dir(folder.path());
    Gateway::spawn(command, folder)
}

/// Calls through a gateway, and checks that the backend with this mark answers.
#[track_caller]
fn answered_by(mark: &str, listener: SocketAddr, name: &str) {
    marked(mark, &mut tls(listener, name).expect("admitted"));
}

/// Sends a text, and checks that the answer begins with this mark. The backend sends its mark before each chunk that it reads.
#[track_caller]
fn marked(mark: &str, stream: &mut Tls) {
    let answer = call(stream, "hello").expect("answered");
    assert!(answer.starts_with(mark), "{answer} instead of {mark}");
}

#[test]
fn every_example_is_valid() {
    let mut checked = 0;
    // The certificates are created first, because some configs name them.
    let folder = tempfile::tempdir().expect("a folder");
    let certs = folder.path().join("certs");
    exits(&isthmus(&["certs", "--dir", text(&certs), "--workload", "istio-system/eastwest"]), 0);
    for example in root("examples").read_dir().expect("examples").flatten() {
        for file in example.path().read_dir().expect("a folder").flatten() {
            let path = folder.path().join(file.file_name());
            let content = std::fs::read_to_string(file.path()).expect("text");
            std::fs::write(&path, content.replace("/tmp/isthmus-certs", text(&certs))).expect("written");
        }
        for file in example.path().read_dir().expect("a folder").flatten() {
            let (path, name) = (folder.path().join(file.file_name()), file.file_name());
            // Files of registries and configs of Envoy are no configs of Isthmus.
            let other =
                text(&path).ends_with("-services.yaml") || name.to_string_lossy().starts_with("envoy-");
            if path.extension().is_some_and(|extension| extension == "yaml") && !other {
                exits(&isthmus(&["validate", "--strict", text(&path)]), 0);
                checked += 1;
            }
        }
    }
    assert_eq!(checked, 7);
}

#[test]
fn the_smallest_example_passes_calls_on() {
    let checkout = Backend::tls_echo(PKI.server("checkout.shop.mesh"), "checkout:");
    let billing = Backend::tls_echo(PKI.server("invoices.billing.mesh"), "billing:");
    let (checkout, billing) = (checkout.address.to_string(), billing.address.to_string());
    let gateway = start_example(
        "smallest",
        "isthmus.yaml",
        &[
            (":15443", "127.0.0.1:0"),
            ("10.0.1.5:8443", &checkout),
            ("10.0.2.5:8443, 10.0.2.6:8443", &format!("\"{billing}\"")),
        ],
    );
    answered_by("checkout:", gateway.listener("default"), "checkout.shop.mesh");
    answered_by("billing:", gateway.listener("default"), "invoices.billing.mesh");
    tls(gateway.listener("default"), "shop.mesh").expect_err("no route");
}

#[test]
fn the_edge_example_passes_calls_on_as_its_comments_say() {
    let site = |name: &str, mark| Backend::tls_echo(PKI.server(name), mark).address.to_string();
    let www = site("www.example.com", "www:");
    let customers = site("kim.customers.example.com", "customers:");
    let admin = site("admin.example.com", "admin:");
    let gateway = start_example(
        "edge-sni-router",
        "isthmus.yaml",
        &[
            ("bind: \":443\"", "bind: \"127.0.0.1:0\""),
            ("bind: \":8443\"", "bind: \"127.0.0.2:0\""),
            ("\":15021\"", "\"127.0.0.1:0\""),
            ("127.0.0.1:15020", "127.0.0.1:0"),
            ("10.0.1.10:443", &www),
            ("10.0.1.30:443", &customers),
            ("10.0.1.50:443", &admin),
            ("delay: 5s", "delay: 0s"),
        ],
    );
    let (public, office) = (gateway.listener("public"), gateway.listener("office"));
    answered_by("www:", public, "www.example.com");
    answered_by("customers:", public, "kim.customers.example.com");
    answered_by("admin:", office, "admin.example.com");
    tls(public, "admin.example.com").expect_err("for the office alone");
    let line = gateway.logged("the call", |line| line["route"] == "*.customers.example.com");
    assert_eq!((&line["reason"], &line["listener"]), (&"ok".into(), &"public".into()));
}

#[test]
fn the_two_networks_example_passes_calls_on_to_each_side() {
    for (side, hostname, network, endpoints) in [
        ("west", "checkout.shop.svc.cluster.local", 2, &["127.2.1.1", "127.2.1.2"][..]),
        ("east", "reviews.shop.svc.cluster.local", 1, &["127.1.1.1"][..]),
    ] {
        let mesh_name = format!("outbound_.443_._.{hostname}");
        // All endpoints of a service listen on the same port, as in a cluster.
        let first = Backend::start_at(at(endpoints[0], 0), serve(&mesh_name));
        let port = first.address.port();
        for other in &endpoints[1..] {
            Backend::start_at(at(other, port), serve(&mesh_name));
        }
        let gateway = start_example(
            "two-networks",
            &format!("{side}.yaml"),
            &[
                ("targetPort: 8443", &format!("targetPort: {port}")),
                (&format!("127.{network}.0.1:15443"), &format!("127.{network}.0.1:0")),
                (&format!("127.{network}.0.1:15444"), &format!("127.{network}.0.2:0")),
                (&format!("admin: {{bind: \"127.{network}.0.1:15000\"}}"), "admin: {bind: \"127.0.0.1:0\"}"),
            ],
        );
        let mesh = gateway.listener("mesh");
        let mut stream = tls_with(PKI.client(&["istio"]), mesh, &mesh_name).expect("admitted");
        marked("here:", &mut stream);
        tls(mesh, &mesh_name).expect_err("without the mesh's protocol");
        // The handshake fails because the certificate is for the mesh name; that shows that the endpoint was reached.
        let error = tls(gateway.listener("plain"), hostname).expect_err("another name in the certificate");
        assert!(error.to_string().contains("certificate"), "{error}");
        tls(gateway.listener("plain"), "internal-only.shop.svc.cluster.local").expect_err("not exported");
    }
}

const CLIENT_ID: &str = "spiffe://cluster.local/ns/front/sa/web";
const CATALOG_ID: &str = "spiffe://cluster.local/ns/shop/sa/catalog";

/// The addresses of the endpoints in the split-horizon example.
const EAST: [&str; 2] = ["127.1.1.1", "127.1.1.2"];
const WEST: [&str; 4] = ["127.2.1.1", "127.2.1.2", "127.2.1.3", "127.2.2.1"];

#[test]
fn the_split_horizon_example_tells_each_side_of_the_other_and_serves_envoy() {
    let config = PKI.mutual_server("catalog.shop.svc.cluster.local", CATALOG_ID);
    let serve = |address: &'static str| {
        let config = config.clone();
        // The endpoint answers every request with its own address.
        move |stream| crate::support::backend::tls_echo(stream, config.clone(), address)
    };
    let first = Backend::start_at(at(EAST[0], 0), serve(EAST[0]));
    let port = first.address.port();
    for address in EAST[1..].iter().chain(&WEST) {
        Backend::start_at(at(address, port), serve(address));
    }
    let port = format!("targetPort: {port}");
    // The west's gateway listens on an ephemeral port, which the east's config must then name.
    let common = [
        ("targetPort: 8443", &*port),
        ("127.1.0.1:15443", "127.1.0.1:0"),
        ("127.2.0.1:15443", "127.2.0.1:0"),
    ];
    let admins = ["127.1.0.1:15000", "127.2.0.1:15000"].map(|admin| (admin, "127.0.0.1:0"));
    let clients = ["127.1.0.1:15010\"\n", "127.2.0.1:15010\"\n"].map(|bind| (bind, "127.0.0.1:0\"\n"));
    let replaced = [&common[..], &admins, &clients].concat();
    let west = start_example("split-horizon", "west.yaml", &replaced);
    let gateway = west.listener("mesh");
    let door = format!("address: 127.2.0.1, sniPort: {}", gateway.port());
    let replaced = [&replaced[..], &[("address: 127.2.0.1, sniPort: 15443", &*door)]].concat();
    let east = start_example("split-horizon", "east.yaml", &replaced);

    let seen = |gateway: &Gateway, network: &str| {
        let query = format!("/api/v1/horizon?network={network}&service=catalog.shop.svc.cluster.local");
        let horizon = gateway.json(&query);
        let entries = horizon["entries"].as_array().expect("a list").iter().map(|entry| {
            let address: SocketAddr =
                entry["address"].as_str().and_then(|text| text.parse().ok()).expect("an address");
            (address.ip().to_string(), entry["weight"].as_u64().expect("a weight"))
        });
        entries.collect::<Vec<_>>()
    };
    let told = |entries: &[(&str, u64)]| -> Vec<(String, u64)> {
        entries.iter().map(|(address, weight)| ((*address).to_owned(), *weight)).collect()
    };
    assert_eq!(seen(&east, "net-east"), told(&[(EAST[0], 1), (EAST[1], 1), ("127.2.0.1", 4)]));
    let [a, b, c, d] = WEST.map(|address| (address, 1));
    assert_eq!(seen(&west, "net-west"), told(&[("127.1.0.1", 2), a, b, c, d]));

    let Some(binary) = crate::support::envoy::installed() else {
        crate::support::skip("examples: there is no Envoy (tests/run installs one)");
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let issued = PKI.issue(&[], Some(CLIENT_ID));
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("written");
    write("ca.pem", &PKI.ca_pem());
    write("front_web.pem", &issued.certificate_pem);
    write("front_web-key.pem", &issued.key_pem);
    let xds = east.listener("xds");
    let config = std::fs::read_to_string(root("examples/split-horizon/envoy-east.yaml")).expect("text");
    let config = config
        .replace("/tmp/isthmus-certs/", "")
        .replace("address: 127.1.0.9, port_value: 8080", "address: 127.1.0.9, port_value: 0")
        .replace("address: 127.1.0.9, port_value: 9901", "address: 127.0.0.1, port_value: 0")
        .replace(
            "address: 127.1.0.1, port_value: 15010",
            &format!("address: {}, port_value: {}", xds.ip(), xds.port()),
        );
    let envoy = crate::support::envoy::Envoy::start(&binary, folder, &config);
    let mut answered = BTreeMap::new();
    for _ in 0..30 {
        let mut stream = connect(envoy.listener("catalog"));
        let answer = call(&mut stream, "/").expect("answered");
        let address = answer.split('/').next().unwrap_or_default().to_owned();
        *answered.entry(address).or_insert(0) += 1;
    }
    let west: i32 = WEST.iter().filter_map(|address| answered.get(*address)).sum();
    assert_eq!(west, 20, "{answered:?}");
    assert_eq!(answered.values().sum::<i32>(), 30, "{answered:?}");
}

#[test]
fn the_hbone_example_knows_its_callers() {
    let folder = tempfile::tempdir().expect("a folder");
    let certs = folder.path().join("certs");
    let workloads =
        ["istio-system/eastwest", "front/web", "bank/teller"].map(|name| ["--workload", name]).concat();
    exits(&isthmus(&[&["certs", "--dir", text(&certs)], &*workloads].concat()), 0);
    let greeter = Backend::start_at(at("127.2.1.1", 0), |mut stream| {
        let mut from = stream.try_clone().expect("a socket");
        let _ = std::io::copy(&mut from, &mut stream);
        let _ = stream.shutdown(std::net::Shutdown::Write);
    });
    let gateway = start_example(
        "hbone",
        "isthmus.yaml",
        &[
            ("bind: \"127.2.0.1:15008\"", "bind: \"127.2.0.1:0\""),
            ("admin: {bind: \"127.2.0.1:15000\"}", "admin: {bind: \"127.0.0.1:0\"}"),
            ("targetPort: 8080", &format!("targetPort: {}", greeter.address.port())),
            ("/tmp/isthmus-certs", text(&certs)),
        ],
    );
    let address = gateway.listener("mesh");
    let enter = |stem: &str| {
        let issued = Issued::read(&certs.join(format!("{stem}.pem")), &certs.join(format!("{stem}-key.pem")));
        Hbone::connect(address, client(Some(issued), &["h2"])).expect("let in")
    };
    let (web, teller) = (enter("front_web"), enter("bank_teller"));
    let (greeter, vault) = ("greeter.shop.svc.cluster.local:80", "vault.shop.svc.cluster.local:80");
    assert_eq!(web.open(greeter).expect("admitted").echo("hello"), Ok("hello".to_owned()));
    assert_eq!(web.open(vault).err(), Some((http::StatusCode::FORBIDDEN, "identity_denied".to_owned())));
    assert_eq!(teller.open(vault).expect("admitted").echo("hello"), Ok("hello".to_owned()));
    // Clients with a server name are routed by SNI on the same port.
    tls(address, "greeter.shop.svc.cluster.local").expect_err("it has no TLS of its own");
    gateway.logged("the other protocol", |line| line["protocol"] == "sni" && line["listener"] == "mesh");

    let Some(binary) = crate::support::envoy::installed() else {
        crate::support::skip("examples: there is no Envoy (tests/run installs one)");
        return;
    };
    let config = std::fs::read_to_string(root("examples/hbone/envoy-caller.yaml")).expect("text");
    let config = config
        .replace("/tmp/isthmus-certs", text(&certs))
        .replace("address: 127.1.0.9, port_value: 8080", "address: 127.0.0.1, port_value: 0")
        .replace("address: 127.1.0.9, port_value: 8081", "address: 127.0.0.1, port_value: 0")
        .replace("address: 127.1.0.9, port_value: 9901", "address: 127.0.0.1, port_value: 0")
        .replace("port_value: 15008", &format!("port_value: {}", address.port()));
    let envoy = crate::support::envoy::Envoy::start(&binary, tempfile::tempdir().expect("a folder"), &config);
    assert_eq!(call(&mut connect(envoy.listener("greeter")), "from Envoy").expect("answered"), "from Envoy");
    assert_eq!(call(&mut connect(envoy.listener("vault")), "from Envoy").unwrap_or_default(), "");
    let line = gateway.logged("the refusal", |line| {
        line["reason"] == "identity_denied"
            && line["source_identity"] == "spiffe://cluster.local/ns/front/sa/web"
    });
    assert_eq!(line["authority"], vault);
}

fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse().expect("an address"), port)
}

fn serve(name: &str) -> impl Fn(std::net::TcpStream) + Send + Sync + 'static {
    let config = PKI.server(name);
    move |stream| crate::support::backend::tls_echo(stream, config.clone(), "here:")
}

// The commands.

#[test]
fn a_bad_file_is_told_with_its_place() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("isthmus.yaml");
    std::fs::write(&path, "listen: \":15443\"\nroutes:\n  a.test: 10.0.1.5\nlisteners_: []\n")
        .expect("written");
    let output = isthmus(&["validate", text(&path)]);
    exits(&output, 1);
    let told = out(&output);
    assert!(told.contains(&format!("{}:3:11: ", path.display())), "{told}");
    assert!(told.contains(&format!("{}:4:1: ", path.display())), "{told}");
    assert_eq!(told.lines().count(), 2, "{told}");
    let absent = isthmus(&["validate", "/nonexistent/isthmus.yaml"]);
    exits(&absent, 1);
    assert!(out(&absent).contains("/nonexistent/isthmus.yaml"), "{}", out(&absent));
}

#[test]
fn warnings_fail_only_when_strict() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("isthmus.yaml");
    let config = "listen: \":15443\"\nnode: {cluster: a, network: a}\nexports: [{services: [nobody.test]}]\n";
    std::fs::write(&path, config).expect("written");
    let output = isthmus(&["validate", text(&path)]);
    exits(&output, 0);
    assert!(out(&output).contains("warning: "), "{}", out(&output));
    exits(&isthmus(&["validate", "--strict", text(&path)]), 1);
}

#[test]
fn a_file_that_the_config_names_and_that_is_missing_is_told_apart_from_a_wrong_config() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("isthmus.yaml");
    let write = |more: &str| {
        let config = format!(
            "node: {{cluster: a, network: a}}\nlisten: \"127.0.0.1:0\"\nroutes: {{a.test: \"10.0.1.5:443\"}}\n{more}"
        );
        std::fs::write(&path, config).expect("written");
    };
    let said = |more: &[&str], code: i32, wanted: &str| {
        let output = isthmus(&[&["validate", text(&path)], more].concat());
        exits(&output, code);
        assert!(out(&output).contains(wanted), "{}", out(&output));
    };
    write("identity: {files: {certificate: cert.pem, key: key.pem}}\n");
    said(&[], 4, "cert.pem");
    said(&["--for-start"], 0, "would start, but something that the file names is missing");
    write("registries: [{file: {path: west.yaml, cluster: west, network: a}}]\n");
    said(&[], 4, "west.yaml");
    write("telemetry: {accessLog: {path: /nonexistent/a.log}}\n");
    said(&["--for-start"], 1, "/nonexistent/a.log");
    // `validate` demands exactly the files that `run` needs to start.
    exits(&isthmus(&["run", "-c", text(&path)]), 1);
    // The service manager may make the folder of the socket; it does not remove a file at its path.
    write("admin: {bind: \"unix:/nonexistent/a.sock\"}\n");
    said(&[], 0, "fine");
    write(&format!("admin: {{bind: \"unix:{}\"}}\n", text(&path)));
    said(&["--for-start"], 1, "the path exists and is not a socket");
    exits(&isthmus(&["run", "-c", text(&path)]), 1);
}

#[test]
fn look_ups_of_a_check_end_after_two_seconds() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("isthmus.yaml");
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let server = silent.local_addr().expect("bound");
    let config =
        format!("listen: \":15443\"\nroutes: {{a.test: \"b.test:443\"}}\ndns: {{servers: [\"{server}\"]}}\n");
    std::fs::write(&path, config).expect("written");
    let begun = std::time::Instant::now();
    let output = isthmus(&["validate", text(&path)]);
    let took = begun.elapsed();
    exits(&output, 0);
    assert!(out(&output).contains("no answer within 2s for the name b.test"), "{}", out(&output));
    assert!(took < std::time::Duration::from_secs(9), "{took:?}");
    let offline = isthmus(&["validate", "--offline", text(&path)]);
    exits(&offline, 0);
    assert!(!out(&offline).contains("b.test"), "{}", out(&offline));
}

#[test]
fn wrong_usage_exits_with_2() {
    for arguments in [&["validate"][..], &["no-such-command"], &["run", "--no-such-flag"], &[]] {
        let output = isthmus(arguments);
        exits(&output, 2);
        assert!(err(&output).contains("Usage: isthmus"), "{}", err(&output));
    }
}

#[test]
fn an_admin_api_that_is_not_there_exits_with_3() {
    let admin = refusing().to_string();
    for command in [&["status"][..], &["healthcheck"], &["reload"], &["explain", "a.test"]] {
        let output = isthmus(&[command, &["--admin", &admin]].concat());
        exits(&output, 3);
        assert!(err(&output).contains(&format!("cannot reach the admin API at {admin}")), "{}", err(&output));
    }
}

#[test]
fn the_schema_in_the_repository_is_the_one_that_is_printed() {
    let output = isthmus(&["schema"]);
    exits(&output, 0);
    let kept = std::fs::read_to_string(root("config/isthmus.schema.json")).expect("the schema");
    assert_eq!(out(&output), kept, "write it anew: isthmus schema > config/isthmus.schema.json");
    let output = isthmus(&["schema", "--reference"]);
    exits(&output, 0);
    let kept = std::fs::read_to_string(root("config/REFERENCE.md")).expect("the reference");
    assert_eq!(out(&output), kept, "write it anew: isthmus schema --reference > config/REFERENCE.md");
}

#[test]
fn certificates_come_from_the_same_ca_the_second_time() {
    let folder = tempfile::tempdir().expect("a folder");
    let directory = folder.path().join("certs");
    let arguments = ["certs", "--dir", text(&directory), "--workload", "shop/cart=cart.test"];
    exits(&isthmus(&arguments), 0);
    let read = |name: &str| std::fs::read_to_string(directory.join(name)).expect("written");
    let (authority, workload) = (read("ca.pem"), read("shop_cart.pem"));
    let output = isthmus(&arguments);
    exits(&output, 0);
    assert!(out(&output).starts_with("using "), "{}", out(&output));
    assert_eq!(read("ca.pem"), authority);
    assert_ne!(read("shop_cart.pem"), workload);
}

#[test]
fn a_running_gateway_answers_the_reading_commands() {
    let backend = Backend::echo();
    let config = format!("listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{}\"}}\n", backend.address);
    let gateway = Gateway::start(&config);
    let admin = gateway.admin().to_string();
    let ask = |arguments: &[&str]| isthmus(&[arguments, &["--admin", &admin]].concat());
    let healthy = ask(&["healthcheck"]);
    exits(&healthy, 0);
    assert!(out(&healthy).ends_with("ok\n"), "{}", out(&healthy));
    for command in [
        &["status"][..],
        &["exposed"],
        &["failures"],
        &["get", "listeners"],
        &["get", "services"],
        &["get", "endpoints"],
        &["get", "clients"],
    ] {
        exits(&ask(command), 0);
        let json = ask(&[command, &["-o", "json"]].concat());
        exits(&json, 0);
        serde_json::from_str::<Value>(&out(&json)).expect("JSON");
    }
    assert!(out(&ask(&["exposed"])).contains("a.test"));
    exits(&ask(&["explain", "a.test"]), 0);
    exits(&ask(&["explain", "b.test"]), 1);
    exits(&ask(&["explain", "a.test", "--listener", "none"]), 1);
}

#[test]
fn explanations_come_as_json_and_yaml() {
    let path = root("examples/smallest/isthmus.yaml");
    let explain = |name, format| isthmus(&["explain", name, "-c", text(&path), "-o", format]);
    let output = explain("checkout.shop.mesh", "json");
    exits(&output, 0);
    let value: Value = serde_json::from_str(&out(&output)).expect("JSON");
    assert_eq!(value["candidates"][0]["address"], "10.0.1.5:8443");
    let output = explain("chekout.shop.mesh", "json");
    exits(&output, 1);
    let value: Value = serde_json::from_str(&out(&output)).expect("JSON");
    assert_eq!((&value["reason"], &value["near"][0]), (&"sni_unknown".into(), &"checkout.shop.mesh".into()));
    let output = explain("checkout.shop.mesh", "yaml");
    exits(&output, 0);
    assert!(out(&output).contains("\nverdict: \"admitted\"\n"), "{}", out(&output));
}

#[test]
fn the_completion_knows_the_commands() {
    let output = isthmus(&["completion", "bash"]);
    exits(&output, 0);
    let script = out(&output);
    assert!(script.contains("_isthmus()") && script.contains("healthcheck"), "{script}");
}

#[test]
fn each_command_has_a_manual_page() {
    let folder = tempfile::tempdir().expect("a folder");
    let pages = folder.path().join("man1");
    exits(&isthmus(&["man", text(&pages)]), 0);
    let page = |name: &str| std::fs::read_to_string(pages.join(name)).expect("a page");
    assert!(page("isthmus.1").contains("isthmus\\-explain(1)"), "{}", page("isthmus.1"));
    assert!(page("isthmus-explain.1").contains("SPIFFE ID of the HBONE caller"));
    assert!(page("isthmus-peer-invite.1").contains(".TH"));
    let output = isthmus(&["man", "/proc/pages"]);
    exits(&output, 1);
    assert!(err(&output).contains("cannot write the manual pages to /proc/pages: "), "{}", err(&output));
}

#[test]
fn a_port_in_use_is_told_and_ends_the_start() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("bound");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("isthmus.yaml");
    let config = format!("listen: \"{address}\"\nadmin: off\nroutes: {{a.test: 10.0.0.1:443}}\n");
    std::fs::write(&path, config).expect("written");
    let output = isthmus(&["run", "-c", text(&path)]);
    exits(&output, 1);
    let told = err(&output);
    assert!(told.contains(&format!("cannot listen on {address}")), "{told}");
    assert!(told.contains("in use"), "{told}");
}

#[test]
fn a_missing_config_is_told_with_where_it_was_looked_for() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = Command::new(BINARY).arg("run").current_dir(folder.path()).output().expect("run");
    exits(&output, 1);
    let told = err(&output);
    assert!(told.contains("isthmus.yaml or /etc/isthmus/isthmus.yaml"), "{told}");
    let output = isthmus(&["run", "-c", "/nonexistent.yaml"]);
    exits(&output, 1);
    assert!(err(&output).contains("/nonexistent.yaml"), "{}", err(&output));
}

#[test]
fn a_reload_says_what_came_of_it() {
    let gateway = Gateway::start("listen: \"127.0.0.1:0\"\nroutes: {a.test: 10.0.0.1:443}\n");
    let admin = gateway.admin().to_string();
    exits(&isthmus(&["reload", "--admin", &admin]), 0);
    gateway.write_config("listen: \"127.0.0.1:0\"\nroutes: {a.test: nonsense}\n");
    let output = isthmus(&["reload", "--admin", &admin]);
    exits(&output, 1);
    assert!(out(&output).contains("isthmus.yaml:"), "{}", out(&output));
    let status = eventually("the rejected file in the status", || {
        let told = out(&isthmus(&["status", "--admin", &admin]));
        told.contains("rejected").then_some(told)
    });
    assert!(status.contains("the file on disk was rejected"), "{status}");
}
