//! The problems of a running gateway: `status`, the metric and the log name each with the same word.

use std::net::SocketAddr;
use std::process::Command;

use serde_json::Value;

use crate::hbone::{BASE, CALLER, OWN, folder};
use crate::support::backend::{Backend, refusing};
use crate::support::client::{connect, hello, tls};
use crate::support::eventually;
use crate::support::gateway::{BINARY, Gateway};
use crate::support::pki::PKI;

/// Waits for a problem, and returns it. Checks that its metric counts it, that the log names it, and that the output of
/// `status` begins with the problems.
#[track_caller]
pub(crate) fn has_problem(gateway: &Gateway, code: &str) -> Value {
    let problem = eventually(&format!("problem {code}"), || {
        let status = gateway.json("/api/v1/status");
        let all = status["problems"].as_array().cloned().unwrap_or_default();
        all.into_iter().find(|problem| problem["code"] == code)
    });
    let metric = gateway.metric("isthmus_problems", &[&format!("code=\"{code}\"")]);
    assert!(metric >= 1.0, "{code}: {metric}");
    assert!(problem["look_at"].as_str().is_some_and(|text| !text.is_empty()), "{problem}");
    if code != "draining" && code != "service_conflict" {
        gateway.told(&format!("\"code\":\"{code}\""));
    }
    let table = run(gateway, &["status"]);
    assert!(table.starts_with("PROBLEMS\n"), "{table}");
    assert!(table.contains(&format!("  {code}: ")), "{table}");
    problem
}

/// Runs a command on this gateway, and returns its output.
pub(crate) fn run(gateway: &Gateway, arguments: &[&str]) -> String {
    let admin = format!("http://{}", gateway.admin());
    let output =
        Command::new(BINARY).args(arguments).args(["--admin", &admin]).output().expect("the binary runs");
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
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

#[test]
fn a_healthy_gateway_has_no_problems() {
    let backend = Backend::tls_echo(PKI.server("a.test"), "");
    let gateway =
        Gateway::start(&format!("listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{}\"}}\n", backend.address));
    tls(gateway.listener("default"), "a.test").expect("a handshake");
    assert_eq!(gateway.json("/api/v1/status")["problems"], serde_json::json!([]));
    assert_eq!(gateway.metric("isthmus_problems", &[]), 0.0);
    assert!(!run(&gateway, &["status"]).contains("PROBLEMS"));
}

#[test]
fn endpoints_that_fail_are_problems_until_they_take_a_connection() {
    let dead = refusing();
    let plain = Backend::start(|mut stream| {
        use std::io::{Read, Write};
        let _ = stream.read(&mut [0; 4096]);
        let _ = stream.write_all(b"SSH-2.0-OpenSSH\r\n");
    });
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{dead.test: \"{dead}\", plain.test: \"{}\", lost.test: \"no-such-name.invalid:1\"}}\n",
        plain.address
    ));
    let address = gateway.listener("default");
    for _ in 0..3 {
        tls(address, "dead.test").expect_err("nobody is there");
    }
    let failing = has_problem(&gateway, "endpoint_failing");
    assert!(
        failing["text"].as_str().is_some_and(|text| text.contains("endpoint_refused, 3 in a row")),
        "{failing}"
    );
    use std::io::{Read, Write};
    let mut stream = connect(address);
    stream.write_all(&hello("plain.test")).expect("sent");
    let _ = stream.read_to_end(&mut Vec::new());
    has_problem(&gateway, "endpoint_not_tls");
    let lost = has_problem(&gateway, "name_unresolved");
    assert_eq!(lost["about"], "no-such-name.invalid", "{lost}");
    // The endpoint works again.
    let back = Backend::start_at(dead, |stream| {
        crate::support::backend::tls_echo(stream, PKI.server("dead.test"), "")
    });
    tls(address, "dead.test").expect("a handshake");
    assert_eq!(back.accepted(), 1);
    gateway.told("problem solved");
    let left = gateway.json("/api/v1/status")["problems"].clone();
    assert!(!left.to_string().contains("endpoint_failing"), "{left}");
}

#[test]
fn an_export_or_a_route_of_a_service_that_no_registry_has_is_a_problem() {
    let backend = Backend::tls_echo(PKI.server("a.test"), "");
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nexports: [{{services: [there.test, gone.test, \"*.any.test\"]}}]\n\
         routes: {{a.test: \"{}\", b.test: {{service: lost.test, port: 443}}}}\n\
         services: [{{hostname: there.test, namespace: shop, ports: [{{name: p, port: 443}}]}}]\n",
        backend.address
    ));
    has_problem(&gateway, "export_absent");
    let problems = gateway.json("/api/v1/status")["problems"].clone();
    let texts: Vec<&str> =
        problems.as_array().expect("a list").iter().filter_map(|problem| problem["text"].as_str()).collect();
    assert_eq!(
        texts,
        [
            "exports[0] names the service gone.test, which no registry has",
            "the route \"b.test\" names the service lost.test, which no registry has"
        ]
    );
}

#[test]
fn an_own_certificate_near_its_end_is_a_problem_and_one_past_it_is_not_ready() {
    let this_year = 1970
        + i32::try_from(std::time::UNIX_EPOCH.elapsed().expect("after 1970").as_secs() / 31_556_952)
            .expect("a year");
    let folder = folder();
    let write = |folder: &std::path::Path, from: i32, until: i32| {
        let own = PKI.issue_for(&[OWN], from, until);
        std::fs::write(folder.join("key.pem"), &own.key_pem).expect("written");
        std::fs::write(folder.join("cert.pem"), &own.certificate_pem).expect("written");
    };
    write(folder.path(), 2001, this_year + 1);
    let gateway = Gateway::start_in(folder, BASE, &[]);
    has_problem(&gateway, "certificate_expiring");
    write(gateway.folder(), 2001, 2002);
    let expired = has_problem(&gateway, "certificate_expired");
    assert!(expired["text"].as_str().is_some_and(|text| text.contains("expired at 2002-01-01")), "{expired}");
    let (status, verbose) = gateway.get("/readyz?verbose");
    assert_eq!(status, 503);
    assert!(verbose.contains("[-] identity: the certificate expired at 2002-01-01"), "{verbose}");
    let left = gateway.metric("isthmus_certificate_expiry_seconds", &["workload"]);
    assert!(left < -86_400.0, "{left}");
    write(gateway.folder(), 2001, this_year + 100);
    gateway.ready();
    assert_eq!(gateway.json("/api/v1/status")["problems"], serde_json::json!([]));
    assert!(!CALLER.is_empty());
}

#[test]
fn a_refused_xds_client_is_seen_at_the_server() {
    let gateway = Gateway::start(
        "listen: \"127.0.0.1:0\"\nroutes: {a.test: \"127.0.0.1:9\"}\nxds: {bind: \"127.0.0.1:0\", clients: [{networks: [net-east]}]}\n",
    );
    let xds = gateway.listener("xds");
    claim(xds, "net-west");
    let warning = eventually("the warning", || {
        let mut lines =
            gateway.log().into_iter().filter_map(|line| serde_json::from_str::<Value>(&line).ok());
        lines.find(|line| line["message"].as_str().is_some_and(|text| text.starts_with("xDS client refused")))
    });
    assert_eq!((&warning["level"], &warning["node"]), (&"WARN".into(), &"client".into()), "{warning}");
    assert!(warning["message"].as_str().is_some_and(|text| text.contains("net-west")), "{warning}");
    claim(xds, "net-west");
    claim(xds, "net-south");
    assert_eq!(gateway.metric("isthmus_xds_refused_total", &[]), 3.0);
    let refused = gateway.json("/api/v1/status")["xds"]["refused"].clone();
    assert_eq!(refused["total"], 3, "{refused}");
    let recent: Vec<_> = refused["recent"].as_array().expect("a list").iter().collect();
    let of = |at: usize| (recent[at]["network"].as_str(), recent[at]["count"].as_u64());
    assert_eq!([of(0), of(1)], [(Some("net-south"), Some(1)), (Some("net-west"), Some(2))], "{refused}");
    assert!(recent[1]["why"].as_str().is_some_and(|why| why.contains("xds.clients")), "{refused}");
    assert_eq!(gateway.json("/api/v1/clients"), serde_json::json!([]));
    let problem = has_problem(&gateway, "xds_client_refused");
    assert!(
        problem["text"].as_str().is_some_and(|text| text.starts_with("3 xDS clients refused")),
        "{problem}"
    );
}

#[test]
fn a_drained_gateway_lists_no_address_that_is_closed() {
    let silent = Backend::start(|mut stream| {
        use std::io::Read;
        while stream.read(&mut [0; 4096]).is_ok_and(|count| count > 0) {}
    });
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{}\"}}\ndrain: {{timeout: 10s}}\n",
        silent.address
    ));
    use std::io::Write;
    let mut held = connect(gateway.listener("default"));
    held.write_all(&hello("a.test")).expect("sent");
    eventually("it is passed on", || (silent.accepted() == 1).then_some(()));
    gateway.signal("TERM");
    has_problem(&gateway, "draining");
    eventually("its address is closed", || {
        gateway.json("/api/v1/listeners")[0]["address"].is_null().then_some(())
    });
    drop(held);
}
