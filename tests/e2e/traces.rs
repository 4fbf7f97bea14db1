//! The trace ID that the access logs of both organisations have for one call, and `isthmus explain --trace` at both gateways.

use std::process::Command;
use std::sync::{Arc, Mutex};

use http::Request;
use rustls::KeyLog;

use crate::federation::Pair;
use crate::support::backend::Backend;
use crate::support::client::{Tls, call, tls_with};
use crate::support::gateway::{BINARY, Gateway};
use crate::support::hbone::{Hbone, client};
use crate::support::organisation::start;
use crate::support::pki::PKI;

const ECHO: &str = "echo.pay.west.global";
const SECRET: &str = "secret.pay.west.global";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

/// Starts the gateways of west and east. West has an exported service and an internal service. East has routes that send both
/// names to west's gateway.
fn start_both(pair: &Pair, backend: &Backend) -> (Gateway, Gateway) {
    let service = |name: &str| {
        format!(
            "  - {{hostname: {name}.pay.svc.cluster.local, namespace: pay, ports: [{{name: https, port: 443, protocol: TLS, \
             targetPort: {}}}], endpoints: [{{address: 127.0.0.1}}]}}\n",
            backend.address.port()
        )
    };
    let west = pair.start_west(&format!("services:\n{}{}", service("echo"), service("secret")));
    let to_west = format!("127.0.0.1:{}", pair.west_port);
    let routes = format!("routes: {{{ECHO}: \"{to_west}\", {SECRET}: \"{to_west}\"}}\n");
    let config = pair.east_config(&routes).replace("*.pay.west.global", "other.pay.west.global");
    let east = start(pair.east.folder(&[&pair.west]), &config);
    (west, east)
}

/// Stores the random values of a client's hellos, which its key log receives.
#[derive(Debug, Default)]
struct Randoms(Mutex<Vec<Vec<u8>>>);

impl KeyLog for Randoms {
    fn log(&self, _: &str, client_random: &[u8], _: &[u8]) {
        self.0.lock().expect("not poisoned").push(client_random.to_vec());
    }
}

/// Connects through a gateway; returns the connection and the trace ID, computed from the random value of its hello.
fn connect(gateway: &Gateway, name: &str) -> (Tls, String) {
    let randoms = Arc::new(Randoms::default());
    let mut config = (*PKI.client(&[])).clone();
    config.key_log = randoms.clone();
    let tls = tls_with(Arc::new(config), gateway.listener("mesh"), name).expect("a handshake");
    let random = randoms.0.lock().expect("not poisoned")[0].clone();
    (tls, random[16..].iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Runs `isthmus explain --trace`; returns its exit code and its output.
fn explain(gateway: &Gateway, trace: &str, more: &[&str]) -> (Option<i32>, String) {
    let admin = format!("http://{}", gateway.admin());
    let output =
        Command::new(BINARY).args(["explain", "--trace", trace, "--admin", &admin]).args(more).output();
    let output = output.expect("the binary runs");
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.code(), text)
}

#[track_caller]
fn has(text: &str, all: &[&str]) {
    for wanted in all {
        assert!(text.contains(wanted), "{wanted} in {text}");
    }
}

#[test]
fn a_tls_call_has_one_trace_id_in_both_access_logs_and_explain_tells_its_story_on_either_side() {
    let (pair, backend) = (Pair::new(), Backend::tls_echo(PKI.server(ECHO), ""));
    let (west, east) = start_both(&pair, &backend);
    let (mut tls, trace) = connect(&east, ECHO);
    assert_eq!(call(&mut tls, "hello").expect("answered"), "hello");
    // `explain --trace` shows the connection while it is open.
    for gateway in [&west, &east] {
        let (code, text) = explain(gateway, &trace, &[]);
        has(
            &text,
            &[": open\n", &format!("trace_id          {trace}"), &format!("sni               {ECHO}")],
        );
        assert_eq!(code, Some(0), "{text}");
    }
    tls.conn.send_close_notify();
    drop(tls);
    let of = |gateway: &Gateway| gateway.logged("the call", |line| line["trace_id"] == *trace);
    let (of_west, of_east) = (of(&west), of(&east));
    assert_eq!((&of_west["sni"], &of_east["sni"]), (&ECHO.into(), &ECHO.into()));
    assert_eq!((&of_west["peer"], &of_east["gateway"]), (&"east".into(), &"gw-east".into()));
    for (gateway, line, more) in [
        (&west, &of_west, "peer              east"),
        (&east, &of_east, "route             echo.pay.west.global"),
    ] {
        let (code, text) = explain(gateway, &trace.to_uppercase(), &[]);
        let endpoint = format!("endpoint          {}", line["endpoint"].as_str().expect("it was dialled"));
        let reason = format!("connection {}: ok\n", line["id"]);
        has(
            &text,
            &[
                &reason,
                &endpoint,
                more,
                "reason            ok",
                "admitted: ok",
                "of the config in use for this connection:\n 1. listener",
            ],
        );
        assert_eq!(code, Some(0), "{text}");
        let answer = gateway.json(&format!("/api/v1/traces/{trace}"));
        assert_eq!(answer["connections"].as_array().map(Vec::len), Some(1), "{answer:#}");
        assert_eq!(&answer["connections"][0]["connection"], line, "the words are those of the log");
        assert_eq!(answer["connections"][0]["decision"]["verdict"], "admitted", "{answer:#}");
    }
    // No connection has the first trace ID; the second one is malformed.
    let (code, text) = explain(&west, TRACE, &[]);
    assert_eq!(code, Some(1), "{text}");
    has(&text, &["no connection of the trace", "ask the other gateways on the path"]);
    assert_eq!(explain(&west, "4bf9", &[]).0, Some(2));
    assert_eq!(west.get("/api/v1/traces/4bf9").0, 400);
    assert_eq!(explain(&west, TRACE, &["name.test"]).0, Some(2), "a name or a trace");
}

#[test]
fn a_call_that_the_other_side_refuses_is_explained_there_by_the_callers_trace_id() {
    let (pair, backend) = (Pair::new(), Backend::tls_echo(PKI.server(ECHO), ""));
    let (west, east) = start_both(&pair, &backend);
    tls_with(PKI.client(&[]), east.listener("mesh"), SECRET).expect_err("it is not exported");
    let trace = east.logged("the call", |line| line["sni"] == SECRET)["trace_id"].clone();
    let trace = trace.as_str().expect("an id");
    let line = west.logged("the refusal", |line| line["trace_id"] == trace);
    let reason = line["reason"].as_str().expect("a reason");
    assert!(["sni_unknown", "not_exported"].contains(&reason), "{line}");
    let (code, text) = explain(&west, trace, &[]);
    assert_eq!(code, Some(1), "{text}");
    has(
        &text,
        &[
            &format!("connection {}: {reason}\n", line["id"]),
            &format!("reason            {reason}"),
            &format!("refused: {reason}"),
        ],
    );
    // East has passed the call on, so the reason is in west's log.
    let (code, text) = explain(&east, trace, &["-o", "json"]);
    let found: serde_json::Value =
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert_eq!(found["connections"][0]["decision"]["verdict"], "admitted", "{found:#}");
    assert_eq!(found["connections"][0]["connection"]["reason"] == "ok", code == Some(0), "{found:#}");
}

#[test]
fn an_hbone_call_is_found_by_its_callers_traceparent() {
    let (pair, backend) = (Pair::new(), Backend::echo());
    let (west, _east) = start_both(&pair, &backend);
    let caller = pair.east.pki.issue(&[], Some("spiffe://east.example/ns/front/sa/web"));
    let hbone = Hbone::connect(west.listener("mesh"), client(Some(caller), &["h2"])).expect("let in");
    let ask = |name: &str, trace: &str| {
        let request = Request::connect(format!("{name}:443"))
            .header("traceparent", format!("00-{trace}-00f067aa0ba902b7-00"));
        hbone.ask(request.body(()).expect("a request"))
    };
    let mut stream = ask(ECHO, TRACE).expect("exported");
    assert_eq!(stream.echo("hello"), Ok("hello".to_owned()));
    stream.end();
    assert_eq!(stream.read(1), Ok(Vec::new()));
    drop(stream);
    let line = west.logged("the stream", |line| line["trace_id"] == TRACE);
    let (code, text) = explain(&west, TRACE, &[]);
    assert_eq!(code, Some(0), "{text}");
    has(
        &text,
        &[
            &format!("connection {}: ok\n", line["id"]),
            "authority         echo.pay.west.global:443",
            "source_identity   spiffe://east.example/ns/front/sa/web",
            "admitted: ok",
        ],
    );
    // Several connections of one trace are shown together, the newest first.
    let refused = ask(SECRET, TRACE).err().expect("not exported");
    let line = west.logged("the refusal", |line| line["trace_id"] == TRACE && line["reason"] != "ok");
    let (code, text) = explain(&west, TRACE, &[]);
    assert_eq!(code, Some(1), "{text}");
    let reason = line["reason"].as_str().expect("a reason");
    let place = |wanted: &str| text.find(wanted).unwrap_or_else(|| panic!("{wanted} in {text}"));
    assert!(place(&format!(": {reason}\n")) < place(": ok\n"), "{text}");
    assert!(!refused.1.is_empty());
}
