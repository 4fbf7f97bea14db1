//! Operational faults. A read-only command (`explain`, `status`, `get`, `failures`), a log and a metric name each fault with
//! the same word: a reason of `docs/reasons.md` for the end of a connection, otherwise a code of `docs/problems.md`.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::path::Path;

use serde_json::Value;

use crate::hbone::{BASE, CALLER, OWN, caller, folder, service};
use crate::problems::{has_problem, run};
use crate::support::backend::{Backend, Silent, refusing};
use crate::support::client::{call, connect, hello, tls, tls_with};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::hbone::{Hbone, client};
use crate::support::pki::{PKI, Pki};

/// Returns the codes in the first column of a document's table.
fn words(document: &str) -> Vec<&str> {
    let rows = document.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    rows.collect()
}

/// The faults that were detected, with their words, for the test's output.
#[derive(Default)]
struct Table(Vec<(&'static str, String, &'static str)>);

impl Table {
    fn row(&mut self, fault: &'static str, word: &str, by: &'static str) {
        let (reasons, problems) =
            (include_str!("../../docs/reasons.md"), include_str!("../../docs/problems.md"));
        assert!(words(reasons).contains(&word) || words(problems).contains(&word), "{word} is in no list");
        self.0.push((fault, word.to_owned(), by));
    }

    /// Checks that a connection has ended with a reason, and that the access log, the metric, `isthmus failures` and the
    /// command `by` show that reason.
    fn connection(
        &mut self,
        gateway: &Gateway,
        fault: &'static str,
        reason: &str,
        by: &'static str,
        arguments: &[&str],
    ) -> Value {
        let line = gateway.logged(fault, |line| line["reason"] == reason);
        let metric = gateway.metric("isthmus_connections_total", &[&format!("reason=\"{reason}\"")]);
        assert!(metric >= 1.0, "{fault}: {reason}: {metric}");
        let failures = run(gateway, &["failures", "--reason", reason]);
        assert!(failures.contains(reason), "{fault}: {failures}");
        let shown = run(gateway, arguments);
        assert!(shown.contains(reason), "{fault}: {by} does not say {reason}: {shown}");
        self.row(fault, reason, by);
        line
    }

    /// Checks that `status`, the metric and the log report a problem that is not the end of a connection.
    fn problem(&mut self, gateway: &Gateway, fault: &'static str, code: &str) -> Value {
        let problem = has_problem(gateway, code);
        self.row(fault, code, "status");
        problem
    }

    fn print(&self) {
        for (fault, word, by) in &self.0 {
            eprintln!("{fault:<44} {word:<22} {by}");
        }
    }
}

fn send(address: SocketAddr, bytes: &[u8]) {
    let mut stream = connect(address);
    stream.write_all(bytes).expect("sent");
    let _ = stream.read_to_end(&mut Vec::new());
}

const ROUTES: &str = "\
node: {name: gw, cluster: east, network: net-east}
listeners:
  - {name: open, bind: \"127.0.0.1:0\"}
  - {name: mesh, bind: \"127.0.0.2:0\", alpn: [istio]}
  - {name: closed, bind: \"127.0.0.3:0\", from: [10.0.0.0/8]}
exports: [{services: [far.shop.mesh]}]
registries: [{file: {path: west.yaml, cluster: west, network: net-west}}]
aggregator: {staleAfter: 1h}
";

/// Returns the text of a registry file with this number of services, which all have the same endpoint.
fn registry(services: usize) -> String {
    let one = |number: usize| {
        format!(
            "  - hostname: {}.shop.mesh\n    namespace: shop\n    ports: [{{name: https, port: 443, protocol: TLS}}]\n    \
             endpoints: [{{address: 10.9.0.1}}]\n",
            if number == 0 { "far".to_owned() } else { format!("s{number}") }
        )
    };
    format!("services:\n{}", (0..services).map(one).collect::<String>())
}

fn replace(folder: &Path, name: &str, text: &str) {
    let next = folder.join(".next");
    std::fs::write(&next, text).expect("written");
    std::fs::rename(next, folder.join(name)).expect("renamed");
}

#[test]
fn every_fault_of_the_night_has_one_word() {
    let mut table = Table::default();
    by_server_name(&mut table);
    by_hbone(&mut table);
    of_registries_and_config(&mut table);
    of_logs_and_spans(&mut table);
    of_the_certificate(&mut table);
    of_xds_clients(&mut table);
    of_the_drain(&mut table);
    table.print();
    let rows: std::collections::BTreeSet<&str> = table.0.iter().map(|(fault, ..)| *fault).collect();
    assert!(rows.len() >= 24, "{rows:?}");
}

fn by_server_name(table: &mut Table) {
    let good = Backend::tls_echo(PKI.server("two.test"), "good:");
    let (dead, silent) = (refusing(), Silent::new());
    let plain = Backend::start(|mut stream| {
        let _ = stream.read(&mut [0; 4096]);
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    });
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("west.yaml"), registry(2)).expect("written");
    let gateway = Gateway::start_in(
        folder,
        &format!(
            "{ROUTES}routes:\n  checkout.test: \"{0}\"\n  dead.test: \"{dead}\"\n  slow.test: {{endpoints: [\"{1}\"], connectTimeout: 200ms}}\n  \
             plain.test: \"{2}\"\n  lost.test: \"no-such-name.invalid:443\"\n  two.test:\n    endpoints: [\"{0}\", \"{dead}\"]\n    \
             ejection: {{failures: 1, time: 60s}}\n    loadBalancing: {{policy: roundRobin}}\n",
            good.address, silent.address, plain.address
        ),
        &[],
    );
    let (open, mesh, closed) =
        (gateway.listener("open"), gateway.listener("mesh"), gateway.listener("closed"));
    tls(open, "chekout.test").expect_err("a typing error");
    table.connection(&gateway, "SNI typo", "sni_unknown", "explain", &["explain", "chekout.test"]);
    assert!(run(&gateway, &["explain", "chekout.test"]).contains("checkout.test"), "the near name");
    tls(open, "s1.shop.mesh").expect_err("no rule");
    table.connection(&gateway, "not exported", "not_exported", "explain", &["explain", "s1.shop.mesh"]);
    tls(closed, "checkout.test").expect_err("from elsewhere");
    let asked = ["explain", "checkout.test", "--listener", "closed", "--from", "127.0.0.1"];
    table.connection(&gateway, "source denied", "source_denied", "explain", &asked);
    tls_with(PKI.client(&["h2"]), mesh, "checkout.test").expect_err("no istio");
    let asked = ["explain", "checkout.test", "--listener", "mesh", "--alpn", "h2"];
    table.connection(&gateway, "wrong ALPN", "alpn_refused", "explain", &asked);
    for (fault, bytes, like) in [
        ("HTTP on an SNI port", &b"GET / HTTP/1.1\r\n\r\n"[..], "the first bytes look like HTTP"),
        ("SSH on an SNI port", b"SSH-2.0-OpenSSH\r\n", "the first bytes look like SSH"),
        (
            "PROXY header on an SNI port",
            b"PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\n",
            "the first bytes look like a PROXY v1 header, which the listener's proxyProtocol.mode forbids",
        ),
    ] {
        send(open, bytes);
        gateway.logged(fault, |line| line["detail"] == like);
        table.connection(&gateway, fault, "not_tls", "failures", &["failures"]);
    }
    for _ in 0..3 {
        tls(open, "dead.test").expect_err("nobody is there");
    }
    let asked = ["explain", "dead.test"];
    table.connection(&gateway, "endpoint dead, only one", "endpoint_refused", "explain", &asked);
    table.problem(&gateway, "endpoint dead, only one (status)", "endpoint_failing");
    for _ in 0..2 {
        let mut stream = tls_any(open, "two.test");
        assert_eq!(call(&mut stream, "x").expect("an answer"), "good:x");
    }
    let line = gateway.logged("endpoint dead, one of two", |line| line["attempts"] == 2);
    assert_eq!(line["reason"], "ok", "the call went well: {line}");
    assert!(line["detail"].as_str().is_some_and(|detail| detail.contains("endpoint_refused")), "{line}");
    let failed = gateway.metric("isthmus_endpoint_failures_total", &["two.test", "endpoint_refused"]);
    assert!(failed >= 1.0, "{failed}");
    for arguments in [&["explain", "two.test"][..], &["get", "endpoints"]] {
        let shown = run(&gateway, arguments);
        assert!(shown.contains("ejected") && shown.contains("endpoint_refused"), "{shown}");
    }
    table.row("endpoint dead, one of two", "endpoint_refused", "explain");
    table.problem(&gateway, "endpoint dead, one of two (status)", "endpoint_ejected");
    tls(open, "slow.test").expect_err("too late");
    let asked = ["explain", "slow.test"];
    table.connection(&gateway, "endpoint slow to connect", "endpoint_timeout", "explain", &asked);
    send(open, &hello("plain.test"));
    let line = gateway.logged("no TLS", |line| line["sni"] == "plain.test");
    assert!(line["detail"].as_str().is_some_and(|detail| detail.starts_with("endpoint_not_tls: ")), "{line}");
    assert!(run(&gateway, &["explain", "plain.test"]).contains("endpoint_not_tls: "));
    table.problem(&gateway, "endpoint does not speak TLS", "endpoint_not_tls");
    tls(open, "lost.test").expect_err("nowhere");
    let line = table.connection(
        &gateway,
        "name does not resolve",
        "no_endpoints",
        "explain",
        &["explain", "lost.test"],
    );
    assert!(line["detail"].as_str().is_some_and(|detail| detail.starts_with("name_unresolved: ")), "{line}");
    assert!(
        run(&gateway, &["explain", "lost.test"])
            .contains("name_unresolved: no-such-name.invalid does not resolve")
    );
    assert!(run(&gateway, &["get", "endpoints"]).contains("unresolved"));
    table.problem(&gateway, "name does not resolve (status)", "name_unresolved");
    tls(open, "far.shop.mesh").expect_err("elsewhere");
    let asked = ["explain", "far.shop.mesh"];
    gateway.logged("elsewhere", |line| line["sni"] == "far.shop.mesh");
    table.connection(&gateway, "service only on another network", "no_endpoints", "explain", &asked);
    let shown = run(&gateway, &asked);
    assert!(shown.contains("1 other network (net-west)"), "{shown}");
}

/// Connects as a client that accepts any certificate.
fn tls_any(address: SocketAddr, name: &str) -> crate::support::client::Tls {
    let mut config = (*PKI.client(&[])).clone();
    config.dangerous().set_certificate_verifier(std::sync::Arc::new(crate::support::client::AnyCertificate));
    tls_with(config.into(), address, name).expect("a handshake")
}

fn by_hbone(table: &mut Table) {
    let backend = Backend::echo();
    let config = BASE.replace(
        "exports: [{services: [\"*\"]}]",
        "exports: [{services: [vault.shop.mesh], to: {identities: [\"spiffe://cluster.local/ns/bank/*\"]}}]",
    );
    let services = service("vault.shop.mesh", 80, &backend, "");
    let gateway = Gateway::start_in(folder(), &format!("{config}services:\n{services}"), &[]);
    let address = gateway.listener("hbone");
    tls(address, "checkout.test").expect_err("no HBONE");
    let line =
        table.connection(&gateway, "SNI client on an HBONE port", "alpn_refused", "failures", &["failures"]);
    assert_eq!(line["sni"], "checkout.test", "{line}");
    let hbone = Hbone::connect(address, caller()).expect("let in");
    hbone.open("vault.shop.mesh:80").err().expect("not for it");
    let asked = ["explain", "vault.shop.mesh:80", "--authority", "--identity", CALLER];
    table.connection(&gateway, "identity denied", "identity_denied", "explain", &asked);
    let shown = run(&gateway, &["failures"]);
    assert!(shown.contains("vault.shop.mesh:80") && shown.contains(CALLER), "{shown}");
    let stranger = Pki::new("of another domain");
    let foreign = client(Some(stranger.issue(&[], Some("spiffe://elsewhere/ns/a/sa/b"))), &["h2"]);
    assert!(Hbone::connect(address, foreign).is_err());
    let line =
        table.connection(&gateway, "trust domain missing", "identity_untrusted", "failures", &["failures"]);
    assert!(
        line["detail"].as_str().is_some_and(|detail| detail.contains("spiffe://elsewhere/ns/a/sa/b")),
        "{line}"
    );
    let expired = client(Some(PKI.issue_for(&[CALLER], 2001, 2002)), &["h2"]);
    assert!(Hbone::connect(address, expired).is_err());
    let line = table.connection(
        &gateway,
        "client certificate expired",
        "identity_expired",
        "failures",
        &["failures"],
    );
    assert!(line["detail"].as_str().is_some_and(|detail| detail.contains(CALLER)), "{line}");
    assert!(Hbone::connect(address, client(None, &["h2"])).is_err());
    table.connection(&gateway, "no client certificate", "identity_required", "failures", &["failures"]);
}

fn of_registries_and_config(table: &mut Table) {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("west.yaml"), registry(30)).expect("written");
    let config = format!("{ROUTES}routes: {{a.test: \"127.0.0.1:9\"}}\n");
    let gateway = Gateway::start_in(folder, &config, &[]);
    replace(gateway.folder(), "west.yaml", "services: [{hostname: 5}]\n");
    table.problem(&gateway, "registry broken", "registry_stale");
    assert!(run(&gateway, &["get", "registries"]).contains("stale"));
    replace(gateway.folder(), "west.yaml", &registry(2));
    table.problem(&gateway, "registry shrunk", "registry_held");
    gateway.write_config("listen: \"127.0.0.1:0\"\nroutes: {a.test: nowhere}\n");
    let told = run(&gateway, &["reload"]);
    assert!(told.contains("isthmus.yaml:"), "{told}");
    table.problem(&gateway, "broken file at reload", "config_rejected");
    assert!(gateway.metric("isthmus_config_reloads_total", &["rejected"]) >= 1.0);
    let holder = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = holder.local_addr().expect("bound").port();
    gateway.write_config(&config.replace(
        "- {name: open, bind: \"127.0.0.1:0\"}",
        &format!("- {{name: open, bind: \"127.0.0.1:{taken}\"}}"),
    ));
    let told = run(&gateway, &["reload"]);
    assert!(told.contains("Address already in use") && told.contains("`ss -ltnp "), "{told}");
    table.problem(&gateway, "port clash at reload", "config_rejected");
    drop(holder);
}

fn of_logs_and_spans(table: &mut Table) {
    let config = |path: &str| {
        format!(
            "listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"127.0.0.1:9\"}}\ntelemetry: {{log: {{format: json}}, accessLog: {{path: {path}}}}}\n"
        )
    };
    let gateway = Gateway::start(&config("/dev/full"));
    tls(gateway.listener("default"), "nobody.test").expect_err("unknown");
    let lost = table.problem(&gateway, "log disk full", "access_log_lost");
    assert!(lost["text"].as_str().is_some_and(|text| text.contains("lost since the start")), "{lost}");
    assert!(gateway.metric("isthmus_access_log_dropped_total", &[]) >= 1.0);
    // A path that cannot be opened is a mistake of the config, so the reload is rejected.
    gateway.write_config(&config("/nonexistent/access.log"));
    assert!(run(&gateway, &["reload"]).contains("/nonexistent/access.log"));
    table.problem(&gateway, "log path wrong", "config_rejected");
    let nobody = refusing();
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"127.0.0.1:9\"}}\ntelemetry: {{log: {{format: json}}, tracing: {{otlp: \"http://{nobody}\", \
         sample: 1}}}}\n"
    ));
    tls(gateway.listener("default"), "nobody.test").expect_err("unknown");
    table.problem(&gateway, "collector down", "spans_lost");
    assert!(gateway.metric("isthmus_spans_dropped_total", &[]) >= 1.0);
}

fn of_the_certificate(table: &mut Table) {
    let folder = folder();
    let own = PKI.issue_for(&[OWN], 2001, 2002);
    std::fs::write(folder.path().join("cert.pem"), &own.certificate_pem).expect("written");
    std::fs::write(folder.path().join("key.pem"), &own.key_pem).expect("written");
    let gateway = Gateway::start_unready(folder, BASE);
    table.problem(&gateway, "own certificate expired", "certificate_expired");
    assert!(run(&gateway, &["get", "certificates"]).contains("expired"));
    assert_eq!(gateway.get("/readyz").0, 503);
}

fn of_xds_clients(table: &mut Table) {
    let gateway = Gateway::start(
        "listen: \"127.0.0.1:0\"\nroutes: {a.test: \"127.0.0.1:9\"}\nxds: {bind: \"127.0.0.1:0\", clients: [{networks: [net-east]}]}\n",
    );
    claim(gateway.listener("xds"), "net-west");
    table.problem(&gateway, "xDS client refused", "xds_client_refused");
}

/// Opens an xDS stream, and sends one request whose node claims to be on `network`, as Envoy's first request does. Returns when
/// the server has closed the connection or ended the stream.
pub(crate) fn claim(address: SocketAddr, network: &str) {
    use isthmus::proto::envoy::config::core::v3::Node;
    use isthmus::proto::envoy::service::discovery::v3::DiscoveryRequest;
    use prost::Message;
    let text = |text: &str| prost_types::Value {
        kind: Some(prost_types::value::Kind::StringValue(text.to_owned())),
    };
    let metadata = prost_types::Struct { fields: [("NETWORK".to_owned(), text(network))].into() };
    let node = Node { id: "client".to_owned(), metadata: Some(metadata), ..Node::default() };
    let type_url = "type.googleapis.com/envoy.config.cluster.v3.Cluster".to_owned();
    let message =
        DiscoveryRequest { node: Some(node), type_url, ..DiscoveryRequest::default() }.encode_to_vec();
    let mut framed = vec![0];
    framed.extend(u32::try_from(message.len()).expect("short").to_be_bytes());
    framed.extend(message);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let socket = tokio::net::TcpStream::connect(address).await.expect("the xDS server");
        let (mut send, connection) = h2::client::handshake(socket).await.expect("HTTP/2");
        let path = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources";
        let request = http::Request::post(format!("http://{address}{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())
            .expect("a request");
        let asked = async {
            let (response, mut body) = send.send_request(request, false).expect("sent");
            body.send_data(framed.into(), false).expect("sent");
            let mut answer = response.await.expect("an answer").into_body();
            while let Some(Ok(_)) = answer.data().await {}
        };
        tokio::select! {
            _ = connection => {}
            () = asked => {}
        }
    });
}

fn of_the_drain(table: &mut Table) {
    let held = Backend::start(|mut stream| while stream.read(&mut [0; 4096]).is_ok_and(|count| count > 0) {});
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{}\"}}\ndrain: {{timeout: 20s}}\n",
        held.address
    ));
    let mut client = connect(gateway.listener("default"));
    client.write_all(&hello("a.test")).expect("sent");
    eventually("it is passed on", || (held.accepted() == 1).then_some(()));
    gateway.signal("TERM");
    table.problem(&gateway, "drain", "draining");
    gateway.told("draining");
    assert_eq!(gateway.get("/readyz").0, 503);
    drop(client);
}
