//! Tests of `identity`, `trust`, `hbone`, and listeners that take HBONE.

use super::bad::{refused, refused_with};
use super::*;
use isthmus_settings::limits::HboneLimits;
use isthmus_settings::listener::ListenerProtocol;
use isthmus_tls::source::{IstioCa, Source};

const TRUST: &str = "trust: [{trustDomain: td, roots: r.pem}]";

fn with_listener(protocol: &str, rest: &str) -> String {
    format!("listeners: [{{name: a, bind: ':15008', protocol: {protocol}}}]\n{rest}\n")
}

#[test]
fn an_identity_has_one_of_three_sources() {
    let of = |source: &str| {
        let node =
            "node: {namespace: istio-system, serviceAccount: eastwest, cluster: c1}\nmesh: {trustDomain: td}";
        loaded(&with_listener("hbone", &format!("{node}\nidentity: {{{source}}}\n{TRUST}"))).identity
    };
    let options = of("files: {certificate: c.pem, key: tls/k.pem}");
    let Some(Source::Files { certificate, key }) = &options.source else { panic!("files") };
    assert!(certificate.ends_with("c.pem") && certificate.is_absolute() && key.ends_with("tls/k.pem"));
    assert_eq!(
        options.expected.map(|identity| identity.to_string()).as_deref(),
        Some("spiffe://td/ns/istio-system/sa/eastwest")
    );
    let [trust] = options.trust.as_slice() else { panic!("one") };
    assert!(trust.trust_domain.as_str() == "td" && trust.crl.is_none());
    assert!(trust.roots.as_ref().is_some_and(|roots| roots.ends_with("r.pem")));
    let options = of("istioCa: {address: 'https://istiod:15012', roots: r.pem, token: /t, validity: 1h}");
    let Some(Source::IstioCa(IstioCa { istiod, validity })) = options.source else { panic!("istioCa") };
    assert_eq!(istiod.cluster.as_str(), "c1");
    assert_eq!((&*istiod.address, validity.as_secs()), ("https://istiod:15012", 3600));
    assert!(istiod.token.ends_with("t"));
    let options = of("workloadApi: {socket: 'unix:///run/a.sock'}");
    assert_eq!(options.source, Some(Source::WorkloadApi { socket: "/run/a.sock".into() }));
}

#[test]
fn a_listener_of_hbone_needs_identity_and_trust() {
    let files = "identity: {files: {certificate: c, key: k}}";
    for protocol in ["hbone", "auto"] {
        refused(
            &with_listener(protocol, TRUST),
            &[&format!(":1:12: listeners: the listener \"a\" has protocol {protocol}…no identity")],
        );
        refused(&with_listener(protocol, files), &[":1:12: listeners…no trust"]);
        let config = loaded(&with_listener(protocol, &format!("{files}\n{TRUST}")));
        assert_eq!(config.policy.listeners[0].protocol.text(), protocol);
    }
    let bring_their_own = [
        "identity: {workloadApi: {socket: 'unix:/s'}}",
        "identity: {istioCa: {address: 'https://a:1', roots: r, token: t}}\nnode: {namespace: a, serviceAccount: b}",
    ];
    for source in bring_their_own {
        let config = loaded(&with_listener("hbone", source));
        assert_eq!(config.policy.listeners[0].protocol, ListenerProtocol::Hbone);
    }
    refused(
        &format!("listeners: [{{name: a, bind: ':1', protocol: hbone, alpn: [h2]}}]\n{files}\n{TRUST}"),
        &[":1:58: listeners[0].alpn: found alpn on a listener of protocol hbone"],
    );
}

#[test]
fn bad_identities() {
    refused_with("identity: {}", &[":2:11: identity: found none of the keys files, istioCa, workloadApi"]);
    refused_with(
        "identity: {files: {certificate: c, key: k}, workloadApi: {socket: 'unix:/s'}}",
        &[":2:11: identity: found"],
    );
    refused_with(
        "identity: {istioCa: {address: 'https://a:1', roots: r, token: t}}",
        &[":2:11: identity: found istioCa, which requires both node.namespace"],
    );
    let ca = |address: &str| {
        format!(
            "node: {{namespace: a, serviceAccount: b}}\nidentity: {{istioCa: {{address: '{address}', roots: r, token: t}}}}"
        )
    };
    for address in ["http://a:1", "https://a", "https://a:1/path", "https://:1"] {
        refused_with(&ca(address), &[":3:31: identity.istioCa.address: found"]);
    }
    refused_with(
        "identity: {workloadApi: {socket: run/a.sock}}",
        &[":2:34: identity.workloadApi.socket: found \"run/a.sock\": it does not begin with unix:"],
    );
    refused_with(
        "trust: [{trustDomain: td, roots: a}, {trustDomain: td, roots: b}]",
        &[":2:52: trust[1].trustDomain: the trust domain td is listed twice; first at c.yaml:2:23"],
    );
    refused_with("trust: [{trustDomain: td}]", &[":2:23: trust[0]: the key roots is missing"]);
    refused_with(
        "identity: {files: {certificate: c, key: k}}\ntrust: [{trustDomain: td, crl: l}]",
        &[":3:23: trust[0]: the key roots is missing, and identity names no source that provides roots"],
    );
    let of_source = "identity: {workloadApi: {socket: 'unix:/s'}}\ntrust: [{trustDomain: td, crl: l.pem}]";
    let [trust] = &loaded(&format!("listen: ':1'\n{of_source}")).identity.trust[..] else { panic!("one") };
    assert!(trust.roots.is_none() && trust.crl.as_ref().is_some_and(|crl| crl.ends_with("l.pem")));
}

#[test]
fn what_hbone_may_cost() {
    assert_eq!(loaded("listen: ':1'").policy.hbone, HboneLimits::default());
    let config = loaded("listen: ':1'\nhbone: {streams: 10, streamWindow: 64KiB, stalled: 1s}");
    let limits = config.policy.hbone;
    assert_eq!((limits.streams, limits.stream_window, limits.stalled.as_secs()), (10, Some(65_536), 1));
    refused_with("hbone: {streams: 0}", &[":2:18: hbone.streams: found the number 0"]);
    refused_with(
        "hbone: {streamWindow: 8KiB}",
        &[":2:23: hbone.streamWindow: found \"8KiB\": it is 8192 bytes"],
    );
    refused_with("hbone: {streamWindow: 2GiB}", &[":2:23: hbone.streamWindow"]);
}

#[test]
fn a_removed_key_is_a_warning_and_has_no_effect() {
    let config =
        loaded("listen: ':1'\nroutes: {a.b: 'c.d:1'}\nhbone: {pings: 5, streams: 10, frameSize: any}");
    assert_eq!(config.policy.hbone, HboneLimits { streams: 10, ..HboneLimits::default() });
    let warnings: Vec<_> = config.warnings.iter().map(ToString::to_string).collect();
    let wanted = [
        "c.yaml:3:9: hbone.pings: this key has no effect and will be an error in the next release; remove it: a caller may \
         send 100 PING frames per second",
        "c.yaml:3:32: hbone.frameSize: this key has no effect and will be an error in the next release; remove it: the \
         largest frame has 64KiB",
    ];
    assert_eq!(warnings.len(), wanted.len(), "{warnings:?}");
    assert!(warnings.iter().zip(wanted).all(|(found, wanted)| found.ends_with(wanted)), "{warnings:?}");
}
