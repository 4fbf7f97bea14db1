//! The sources of the gateway's own identity: Istio's authority and the SPIFFE Workload API. `tests/interop/identity_peer.py`
//! serves both with grpcio, the official messages, and certificates of another library.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::authority::Authority;
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::pki::{PKI, Pki};

const OURS: &str = "spiffe://td/ns/istio-system/sa/eastwest";

/// The config of a gateway without its section `identity`.
const NODE: &str = "listen: \"127.0.0.1:0\"\nroutes: {a.test: \"127.0.0.1:9\"}\nmesh: {trustDomain: td}\n\
                    node: {namespace: istio-system, serviceAccount: eastwest, cluster: east-1}\n";

/// Returns a folder that contains a token.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("token"), "the first\n").expect("written");
    folder
}

/// Returns a config that requests certificates of Istio's authority.
fn istio(authority: &Authority) -> String {
    let port = authority.port();
    format!(
        "{NODE}identity: {{istioCa: {{address: 'https://localhost:{port}', roots: tls-roots.pem, token: token, validity: 1h}}}}\n"
    )
}

/// Returns a config that uses the Workload API whose files are in the folder.
fn workload(folder: &TempDir) -> String {
    let socket = folder.path().join("agent.sock");
    format!("{NODE}identity: {{workloadApi: {{socket: 'unix://{}'}}}}\n", socket.display())
}

fn source(gateway: &Gateway) -> Value {
    gateway.json("/api/v1/status")["identity"].clone()
}

/// Returns the problem with the certificate; empty if there is none.
fn problem(gateway: &Gateway) -> String {
    source(gateway)["problems"]["certificate"].as_str().unwrap_or_default().to_owned()
}

/// Waits until the problem with the certificate contains this text.
#[track_caller]
fn told(gateway: &Gateway, text: &str) {
    eventually(text, || problem(gateway).contains(text).then_some(()));
}

fn own(gateway: &Gateway) -> Option<Value> {
    let all = gateway.json("/api/v1/certificates");
    all.as_array().expect("a list").iter().find(|each| each["kind"] == "workload").cloned()
}

/// Waits until the certificate in use has this serial number and there is no problem.
#[track_caller]
fn in_use(gateway: &Gateway, serial: &Value) -> Value {
    eventually(&format!("the certificate {serial}"), || {
        own(gateway).filter(|own| {
            own["serial"] == *serial
                && source(gateway)["problems"].as_object().is_some_and(serde_json::Map::is_empty)
        })
    })
}

/// Waits until the certificate that the authority has issued last is in use. What the authority says is read by another thread.
#[track_caller]
fn latest_in_use(gateway: &Gateway, authority: &Authority) {
    eventually("the latest certificate", || {
        (own(gateway)?["serial"] == certified(authority)["serial"]).then_some(())
    });
}

/// Waits until the gateway says that it will ask for a certificate at this time, which it says after it uses the last one.
#[track_caller]
fn asks_next(gateway: &Gateway, at: f64) {
    eventually(&format!("a request at {at}"), || {
        let next = source(gateway)["next"].clone();
        (next.is_string() && seconds(&next) == at).then_some(())
    });
}

/// Returns the trusted trust domains, each with the number of its roots.
fn trusted(gateway: &Gateway) -> Vec<(String, u64)> {
    let all = gateway.json("/api/v1/certificates");
    let roots = all.as_array().expect("a list").iter().filter(|each| each["kind"] == "roots");
    let text = |each: &Value| each["trust_domain"].as_str().expect("text").to_owned();
    roots.map(|each| (text(each), each["count"].as_u64().expect("a number"))).collect()
}

fn domains(names: &[&str]) -> Vec<(String, u64)> {
    names.iter().map(|name| ((*name).to_owned(), 1)).collect()
}

/// Waits until a call has received a certificate; returns the latest such call.
#[track_caller]
fn certified(authority: &Authority) -> Value {
    let latest = || authority.calls().into_iter().rfind(|call| call.get("serial").is_some());
    eventually("a certificate is issued", latest)
}

/// Parses a time of the API; returns seconds since 1970.
fn seconds(time: &Value) -> f64 {
    let text = time.as_str().expect("a time");
    let output =
        std::process::Command::new("date").args(["-u", "-d", text, "+%s.%N"]).output().expect("date");
    String::from_utf8(output.stdout).expect("text").trim().parse().expect("a number")
}

#[test]
fn istios_authority_is_asked_for_what_we_are_and_readiness_waits_for_it() {
    let folder = folder();
    let refuse = json!({"refuse": ["PERMISSION_DENIED", "token of nobody"]});
    let Some(mut authority) = Authority::start("istio", folder.path(), &refuse) else {
        return;
    };
    let gateway = Gateway::start_unready(folder, &istio(&authority));
    told(&gateway, "the server answered with the gRPC status PermissionDenied: token of nobody");
    assert!(
        problem(&gateway).contains(&format!(
            "https://localhost:{} did not issue a certificate for {OURS}",
            authority.port()
        ))
    );
    let (status, ready) = gateway.get("/readyz?verbose");
    assert_eq!(status, 503);
    assert!(ready.contains("identity") && ready.contains("token of nobody"), "{ready}");
    eventually("the time of the next request", || source(&gateway)["next"].is_string().then_some(()));
    assert!(own(&gateway).is_none() && trusted(&gateway).is_empty());

    authority.tell(&json!({"refuse": null}));
    gateway.ready();
    let call = certified(&authority);
    let own = in_use(&gateway, &call["serial"]);
    assert_eq!((&own["identity"], &own["state"]), (&json!(OURS), &json!("valid")));
    assert_eq!((&call["uris"], &call["names"], &call["subject"]), (&json!([OURS]), &json!(1), &json!("")));
    assert_eq!(
        (&call["curve"], &call["proved"], &call["validity"]),
        (&json!("secp256r1"), &json!(true), &json!(3600))
    );
    assert_eq!(call["metadata"]["authorization"], "Bearer the first");
    assert_eq!(call["metadata"]["clusterid"], "east-1");
    assert_eq!(source(&gateway)["source"], "istioCa");
    // The gateway trusts the roots that came with the certificate, for its own trust domain.
    assert_eq!(trusted(&gateway), domains(&["td"]));
}

#[test]
fn a_certificate_is_renewed_at_half_of_its_life_with_another_key_and_the_token_of_the_day() {
    let folder = folder();
    let Some(mut authority) = Authority::start("istio", folder.path(), &json!({"lifetime": 24})) else {
        return;
    };
    let gateway = Gateway::start_in(folder, &istio(&authority), &[]);
    let first = certified(&authority);
    let own = in_use(&gateway, &first["serial"]);
    let (begin, end) = (seconds(&own["not_before"]), seconds(&own["not_after"]));
    assert_eq!(end - begin, 24.0);
    asks_next(&gateway, begin + 12.0);
    std::fs::write(gateway.folder().join("token"), "the second").expect("written");
    authority.tell(&json!({"lifetime": 3600}));
    let second = eventually("a renewal", || Some(certified(&authority)).filter(|call| *call != first));
    let at = second["at"].as_f64().expect("a time");
    assert!(begin + 12.0 <= at && at < end, "{at} of {begin}–{end}");
    assert_ne!(second["key"], first["key"]);
    assert_eq!(second["metadata"]["authorization"], "Bearer the second");
    let own = in_use(&gateway, &second["serial"]);
    asks_next(&gateway, seconds(&own["not_before"]) + 1800.0);
    assert_eq!(authority.calls().len(), 2);
}

#[test]
fn a_refusal_leaves_the_last_certificate_in_use_until_it_has_expired_and_beyond() {
    let folder = folder();
    let Some(mut authority) = Authority::start("istio", folder.path(), &json!({"lifetime": 4})) else {
        return;
    };
    let gateway = Gateway::start_in(folder, &istio(&authority), &[]);
    authority.tell(&json!({"refuse": ["UNAUTHENTICATED", "the token is too old"]}));
    told(&gateway, "the server answered with the gRPC status Unauthenticated: the token is too old");
    let last = certified(&authority)["serial"].clone();
    eventually("it has expired", || own(&gateway).filter(|own| own["state"] == "expired"));
    assert_eq!(own(&gateway).map(|own| own["serial"].clone()), Some(last));
    // The expired certificate stays in use, but callers reject it: the gateway is not ready.
    assert_eq!(gateway.get("/readyz").0, 503);
    let left = gateway.metric("isthmus_certificate_expiry_seconds", &["workload"]);
    assert!(left <= 0.0, "{left}");
    authority.tell(&json!({"refuse": null, "lifetime": 3600}));
    gateway.told("a new certificate is in use");
    gateway.ready();
    eventually("a certificate again", || own(&gateway).filter(|own| own["state"] == "valid"));
    latest_in_use(&gateway, &authority);
}

#[test]
fn an_outage_of_the_authority_is_told_of_and_survived() {
    let folder = folder();
    let Some(mut authority) = Authority::start("istio", folder.path(), &json!({"lifetime": 6})) else {
        return;
    };
    let gateway = Gateway::start_in(folder, &istio(&authority), &[]);
    authority.tell(&json!({"serve": false, "lifetime": 3600}));
    let last = certified(&authority);
    told(&gateway, "cannot connect: Connection refused");
    assert_eq!(own(&gateway).map(|own| own["identity"].clone()), Some(json!(OURS)));
    // The gateway asks the authority again within 20 s.
    let next = seconds(&source(&gateway)["next"]);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    assert!(next < (now + Duration::from_secs(20)).as_secs_f64());
    authority.tell(&json!({"serve": true}));
    let call = eventually("it is asked again", || Some(certified(&authority)).filter(|call| *call != last));
    in_use(&gateway, &call["serial"]);
}

#[test]
fn answers_that_are_not_for_us_or_without_a_root_are_refused() {
    let folder = folder();
    let other = "spiffe://td/ns/shop/sa/cart";
    let Some(mut authority) = Authority::start("istio", folder.path(), &json!({"as": other})) else {
        return;
    };
    let gateway = Gateway::start_unready(folder, &istio(&authority));
    told(
        &gateway,
        &format!("the identity of the certificate is {other}, but node and mesh.trustDomain require {OURS}"),
    );
    assert!(own(&gateway).is_none() && trusted(&gateway).is_empty());
    authority.tell(&json!({"as": null, "chain": "leaf"}));
    told(
        &gateway,
        "the answer is invalid: number of certificates: 1; expected at least 2, a certificate and a root",
    );
    assert!(own(&gateway).is_none() && trusted(&gateway).is_empty());
    assert_eq!(gateway.get("/readyz").0, 503);
    authority.tell(&json!({"chain": "whole"}));
    gateway.ready();
    // An answer without a root may still have been under way, so the certificate need not be the last one.
    let issued = || authority.calls().into_iter().filter_map(|call| call.get("serial").cloned());
    eventually("a certificate of the authority", || {
        own(&gateway).filter(|own| issued().any(|serial| serial == own["serial"]))
    });
}

#[test]
fn the_authoritys_own_certificate_is_verified_by_roots_that_may_be_replaced() {
    let folder = folder();
    let Some(authority) = Authority::start("istio", folder.path(), &json!({})) else {
        return;
    };
    let right = std::fs::read(folder.path().join("tls-roots.pem")).expect("the authority's roots");
    let at = folder.path().join("tls-roots.pem");
    std::fs::write(&at, PKI.ca_pem()).expect("written");
    // As a file configures the roots of the gateway's trust domain, the gateway does not use those that the authority sends.
    std::fs::write(folder.path().join("two.pem"), PKI.ca_pem() + &Pki::new("another").ca_pem())
        .expect("written");
    let config = istio(&authority) + "trust: [{trustDomain: td, roots: two.pem}]\n";
    let gateway = Gateway::start_unready(folder, &config);
    told(&gateway, "the TLS handshake failed: the certificate is not trusted");
    assert_eq!(authority.calls(), [Value::Null; 0], "the token was sent to who knows whom");
    std::fs::remove_file(&at).expect("removed");
    told(&gateway, "tls-roots.pem: cannot be read");
    std::fs::write(&at, right).expect("written");
    gateway.ready();
    in_use(&gateway, &certified(&authority)["serial"]);
    assert_eq!(trusted(&gateway), [("td".to_owned(), 2)]);
}

#[test]
fn the_workload_api_gives_certificates_and_bundles_and_takes_them_back() {
    let folder = folder();
    let mut state = json!({"svids": ["spiffe://td/somebody/else", OURS], "federated": []});
    let Some(mut authority) = Authority::start("workload", folder.path(), &state) else {
        return;
    };
    let config = workload(&folder);
    let first = authority.tell(&state);
    let gateway = Gateway::start_in(folder, &config, &[]);
    let own = in_use(&gateway, &first[OURS]);
    assert_eq!((&own["identity"], &own["state"]), (&json!(OURS), &json!("valid")));
    assert_eq!(source(&gateway)["source"], "workloadApi");
    assert_eq!(trusted(&gateway), domains(&["td"]));
    // The certificate is rotated, and other trust domains are federated.
    state["federated"] = json!(["west", "north"]);
    let second = authority.tell(&state);
    assert_ne!(first[OURS], second[OURS]);
    in_use(&gateway, &second[OURS]);
    assert_eq!(trusted(&gateway), domains(&["north", "td", "west"]));
    state["federated"] = json!(["north"]);
    let third = authority.tell(&state);
    in_use(&gateway, &third[OURS]);
    assert_eq!(trusted(&gateway), domains(&["north", "td"]));
    // There was only one call, so every update came over the same stream.
    assert_eq!(authority.calls(), [json!({"metadata": {"workload.spiffe.io": "true"}, "count": 1})]);
}

#[test]
fn a_workload_api_that_refuses_goes_or_has_nothing_takes_nothing_away() {
    let folder = folder();
    let state = json!({"refuse": ["PERMISSION_DENIED", "no identity issued"]});
    let Some(mut authority) = Authority::start("workload", folder.path(), &state) else {
        return;
    };
    let config = workload(&folder);
    let gateway = Gateway::start_unready(folder, &config);
    told(&gateway, "the server answered with the gRPC status PermissionDenied: no identity issued");
    assert_eq!(gateway.get("/readyz").0, 503);
    authority.tell(&json!({"refuse": null}));
    told(&gateway, "the answer has no identity");
    authority.tell(&json!({"svids": ["spiffe://td/somebody/else"]}));
    told(
        &gateway,
        &format!(
            "the identity of the certificate is spiffe://td/somebody/else, but node and mesh.trustDomain \
                             require {OURS}"
        ),
    );
    assert!(trusted(&gateway).is_empty());
    let first = authority.tell(&json!({"svids": [OURS], "federated": ["west"]}));
    gateway.ready();
    in_use(&gateway, &first[OURS]);
    authority.tell(&json!({"serve": false}));
    told(&gateway, "the Workload API at ");
    assert_eq!(own(&gateway).map(|own| own["serial"].clone()).as_ref(), Some(&first[OURS]));
    assert_eq!(trusted(&gateway), domains(&["td", "west"]));
    let second = authority.tell(&json!({"serve": true, "federated": []}));
    in_use(&gateway, &second[OURS]);
    assert_eq!(trusted(&gateway), domains(&["td"]));
}

#[test]
fn a_reload_goes_over_to_another_source() {
    let folder = folder();
    let Some(istios) = Authority::start("istio", folder.path(), &json!({})) else {
        return;
    };
    let Some(mut spire) = Authority::start("workload", folder.path(), &json!({})) else {
        return;
    };
    let given = spire.tell(&json!({"svids": [OURS], "federated": ["west"]}));
    let (one, other) = (istio(&istios), workload(&folder));
    let gateway = Gateway::start_in(folder, &one, &[]);
    in_use(&gateway, &certified(&istios)["serial"]);
    gateway.reload(&other);
    in_use(&gateway, &given[OURS]);
    assert_eq!(
        (source(&gateway)["source"].as_str(), trusted(&gateway)),
        (Some("workloadApi"), domains(&["td", "west"]))
    );
    gateway.reload(&one);
    eventually("the other's roots are gone", || (trusted(&gateway) == domains(&["td"])).then_some(()));
    latest_in_use(&gateway, &istios);
    assert_eq!(istios.calls().len(), 2);
    // Without a source of roots, the gateway trusts none.
    gateway.reload(NODE);
    assert!(trusted(&gateway).is_empty() && source(&gateway).is_null());
}
