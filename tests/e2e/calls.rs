//! `isthmus test call`: each hop of a call has its time and its word, and a fault names the hop.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::process::Command;

use serde_json::Value;

use crate::support::backend::{Backend, Silent, refusing};
use crate::support::gateway::{BINARY, Gateway};
use crate::support::pki::PKI;

/// Runs the command; returns its exit code and its answer.
fn call(gateway: &Gateway, arguments: &[&str]) -> (Option<i32>, Value) {
    let admin = format!("http://{}", gateway.admin());
    let output = Command::new(BINARY)
        .args(["test", "call"])
        .args(arguments)
        .args(["-o", "json", "--admin", &admin])
        .output()
        .expect("it runs");
    let answer = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    (output.status.code(), answer)
}

/// Returns the hop and the word of the first fault; `None` if the call arrives.
fn fault(gateway: &Gateway, arguments: &[&str]) -> Option<(String, String)> {
    let (code, answer) = call(gateway, arguments);
    let hops = answer["hops"].as_array().expect("hops");
    assert!(hops.iter().all(|hop| hop["ms"].is_number()), "{answer}");
    let failed = hops.iter().find(|hop| hop["word"] != "ok");
    assert_eq!(code, Some(i32::from(failed.is_some())), "{answer}");
    let text = |hop: &Value, key: &str| hop[key].as_str().expect("a text").to_owned();
    failed.map(|hop| (text(hop, "hop"), text(hop, "word")))
}

#[test]
fn a_call_through_this_gateway_names_the_hop_that_fails() {
    let tls = Backend::tls_echo(PKI.server("good.test"), "");
    let closing = Backend::start(|mut stream| {
        let _ = stream.read(&mut [0; 4096]);
    });
    let plain = Backend::start(|mut stream| {
        let _ = stream.read(&mut [0; 4096]);
        let _ = stream.write_all(b"220 ready\r\n");
        let _ = stream.read(&mut [0; 1]);
    });
    let silent = Silent::new();
    let gateway = Gateway::start(&format!(
        "listeners:\n  - {{name: a, bind: \"127.0.0.1:0\"}}\n  - {{name: far, bind: \"127.0.0.2:0\", from: [192.0.2.0/24]}}\n\
         timeouts: {{connect: 1s, connectTotal: 1s}}\nroutes:\n  good.test: \"{}\"\n  refused.test: \"{}\"\n  closing.test: \"{}\"\n  \
         plain.test: \"{}\"\n  silent.test: \"{}\"\n  other.test: \"{}\"\n  office.test: {{endpoints: [\"{}\"], from: [192.0.2.0/24]}}\n",
        tls.address,
        refusing(),
        closing.address,
        plain.address,
        silent.address,
        tls.address,
        tls.address
    ));
    let (_, answer) = call(&gateway, &["good.test"]);
    let last = answer["hops"].as_array().and_then(|hops| hops.last()).expect("hops").clone();
    assert_eq!((&last["hop"], &last["address"]), (&"endpoint".into(), &tls.address.to_string().into()));
    assert!(last["detail"].as_str().is_some_and(|detail| detail.contains("good.test")), "{answer}");
    for (arguments, wanted) in [
        (&["good.test"][..], None),
        (&["refused.test"], Some(("endpoint", "endpoint_refused"))),
        (&["closing.test"], Some(("endpoint", "endpoint_closed"))),
        (&["plain.test"], Some(("endpoint", "endpoint_not_tls"))),
        (&["silent.test"], Some(("endpoint", "endpoint_timeout"))),
        (&["other.test"], Some(("endpoint", "endpoint_certificate_name"))),
        (&["nobody.test"], Some(("route", "sni_unknown"))),
        (&["office.test"], Some(("gateway", "source_denied"))),
        (&["good.test", "--listener", "far"], Some(("gateway", "source_denied"))),
    ] {
        let found = fault(&gateway, arguments);
        let found = found.as_ref().map(|(hop, word)| (hop.as_str(), word.as_str()));
        assert_eq!(found, wanted, "{arguments:?}");
    }
}

#[test]
fn a_call_as_a_client_elsewhere_goes_through_the_gateways_of_its_view() {
    let tls = Backend::tls_echo(PKI.server("good.test"), "");
    let config = |gateway: SocketAddr| {
        let service = |name: &str, endpoint: SocketAddr| {
            format!(
                "  - {{hostname: {name}, namespace: shop, ports: [{{name: https, port: 443, protocol: HTTPS}}], endpoints: [{{address: \
                 127.0.0.1, ports: {{https: {}}}}}]}}\n",
                endpoint.port()
            )
        };
        format!(
            "listeners: [{{name: a, bind: \"{gateway}\"}}]\nnode: {{network: n1}}\nservices:\n{}{}{}\
             exports: [{{services: [good.mesh, down.mesh]}}]\n\
             networks:\n  n1: {{probe: off, gateways: [{{address: 127.0.0.1, sniPort: {}}}]}}\n  n2: {{}}\n",
            service("good.mesh", tls.address),
            service("down.mesh", refusing()),
            service("hidden.mesh", tls.address),
            gateway.port()
        )
    };
    let address = crate::support::balancer::free();
    let gateway = Gateway::start(&config(address));
    for (name, wanted) in [
        ("good.mesh", None),
        ("good.mesh:443", None),
        ("down.mesh", Some(("endpoint", "endpoint_refused"))),
        ("hidden.mesh", Some(("view", "no_endpoints"))),
        ("nobody.mesh", Some(("view", "authority_unknown"))),
    ] {
        let found = fault(&gateway, &[name, "--network", "n2"]);
        let found = found.as_ref().map(|(hop, word)| (hop.as_str(), word.as_str()));
        assert_eq!(found, wanted, "{name}");
    }
    // A gateway that does not listen is named with its address.
    let other = config(address)
        .replace(&format!("sniPort: {}", address.port()), &format!("sniPort: {}", refusing().port()));
    gateway.reload(&other);
    assert_eq!(
        fault(&gateway, &["good.mesh", "--network", "n2"]),
        Some(("gateway".into(), "endpoint_refused".into()))
    );
}
