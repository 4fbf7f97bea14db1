//! The keys of listeners and routes for those who come from other routers.

use super::bad::{refused, refused_with};
use super::*;
use isthmus_settings::listener::RefusalMode;
use isthmus_settings::route::RouteTarget;

#[test]
fn routes_targets_and_fallbacks_of_listeners_are_routes_with_names() {
    let config = loaded(
        "listeners:\n  - {name: edge, bind: ':1', fallback: '10.0.0.1:22', routes: {a.test: '10.0.0.2:443', '-': ['10.0.0.3:443']}}\n  \
         - {name: 'db:1', bind: ':2', protocol: tcp, from: [10.0.0.0/8], target: {service: pg.mesh, port: 5432}}\n\
         routes: {a.test: {from: [10.0.0.0/8], byAlpn: {acme-tls/1: '10.0.0.9:443'}, endpoints: \
         ['10.0.0.4:443', {address: '10.0.0.5:443', backup: true, maxConnections: 9}]}}\n\
         services: [{hostname: pg.mesh, namespace: shop, ports: [{name: db, port: 5432}]}]\n",
    );
    let names: Vec<&str> = config.policy.routes.iter().map(|route| &*route.name).collect();
    assert_eq!(
        names,
        ["a.test", "a.test#acme-tls/1", "edge/a.test", "edge/-", "edge/fallback", "db_1/target"]
    );
    let [common, alpn, ..] = &config.policy.routes[..] else { panic!("six routes") };
    assert_eq!((common.conditions.own_of.as_deref(), common.conditions.sources.from.len()), (None, 1));
    assert_eq!(common.conditions.by_alpn, [(b"acme-tls/1"[..].into(), alpn.name.clone())]);
    let RouteTarget::Endpoints { endpoints, .. } = &common.to else { panic!("endpoints") };
    let of = |at: usize| (endpoints[at].is_backup, endpoints[at].connections_max.map(|max| max.get()));
    assert_eq!((of(0), of(1)), ((false, None), (true, Some(9))));
    assert!(matches!(&config.policy.routes[5].to, RouteTarget::Service { port: 5432, .. }));
}

#[test]
fn keys_of_listeners_fit_their_protocols() {
    refused(
        "listeners: [{name: a, bind: ':1', protocol: tcp}]",
        &[":1:13: listeners[0]: protocol: tcp needs the key target"],
    );
    refused(
        "listeners: [{name: a, bind: ':1', target: 'h:1'}]",
        &[":1:43: listeners[0].target: target is allowed only with protocol: tcp"],
    );
    refused(
        "listeners: [{name: a, bind: ':1', protocol: tcp, target: 'h:1', from: [10.0.0.0/8], alpn: [h2], fallback: 'h:1'}]",
        &[
            ":1:91: listeners[0].alpn: found alpn on a listener of protocol tcp",
            ":1:107: listeners[0].fallback: found fallback on a listener of protocol tcp",
        ],
    );
    refused(
        "listeners: [{name: a, bind: ':1', protocol: tcp, target: 'h:1', from: [10.0.0.0/8], refusal: close}]",
        &[":1:94: listeners[0].refusal: found refusal on a listener of protocol tcp"],
    );
    refused(
        "listeners: [{name: a, bind: ':1', routes: {a.b: {endpoints: ['h:1'], listeners: [a]}}}]",
        &[
            ":1:81: listeners[0].routes[\"a.b\"].listeners: this key is not allowed here; the place of the target decides on listeners",
        ],
    );
    refused(
        "listeners: [{name: a, bind: ':1', protocol: tcp, from: [::/0], target: {endpoints: ['h:1'], from: [::/0]}}]",
        &[":1:99: listeners[0].target.from: this key is not allowed here; sources are keys of the listener"],
    );
    refused_with(
        "routes: {a.b: {endpoints: ['h:1'], byAlpn: {h2: {endpoints: ['h:2'], from: [::/0]}}}}",
        &[":2:76: routes[\"a.b\"].byAlpn.h2.from: …it is a key of the route"],
    );
}

#[test]
fn a_listener_does_not_lead_to_the_gateway_itself() {
    for key in ["fallback: '127.0.0.1:15443'", "protocol: tcp, from: [::/0], target: ['127.0.0.1:15443']"] {
        let text = format!(
            "listen: ':15443'\nlisteners: [{{name: a, bind: '127.0.0.1:1', {key}}}]\nroutes: {{a.b: 'h:1'}}"
        );
        let problems = load_text(&text).expect_err("a loop");
        assert!(problems.len() == 1 && problems[0].contains("15443"), "{problems:?}");
    }
}

#[test]
fn a_tcp_listener_that_lets_everyone_in_is_a_warning() {
    let text = "listeners: [{name: a, bind: ':1', protocol: tcp, target: '10.0.0.1:5432'}]\n";
    let warnings: Vec<String> = loaded(text).warnings.iter().map(ToString::to_string).collect();
    assert!(warnings.len() == 1 && warnings[0].contains("without from"), "{warnings:?}");
}

#[test]
fn an_endpoint_is_an_address_or_a_name_of_srv_records() {
    let config =
        loaded("listen: ':1'\nroutes: {a.b: {endpoints: [{srv: _https._tcp.shop.internal, backup: true}]}}");
    let RouteTarget::Endpoints { endpoints, .. } = &config.policy.routes[0].to else { panic!("endpoints") };
    assert_eq!((endpoints[0].to_string(), endpoints[0].port), ("_https._tcp.shop.internal".to_owned(), 0));
    refused_with(
        "routes: {a.b: {endpoints: [{srv: shop.internal}]}}",
        &[":2:34: routes[\"a.b\"].endpoints[0].srv: …a name of SRV records"],
    );
    refused_with(
        "routes: {a.b: {endpoints: [{srv: _a._tcp.b.c, weight: 2}]}}",
        &[":2:55: routes[\"a.b\"].endpoints[0].weight: this key is allowed only with `address`"],
    );
    refused_with(
        "routes: {a.b: {endpoints: [{address: '_a._tcp.b.c:1'}]}}",
        &[":2:38: routes[\"a.b\"].endpoints[0].address: found _a._tcp.b.c, which is a name of SRV records"],
    );
}

#[test]
fn ports_of_gateways_are_listeners_that_no_other_address_may_have() {
    let registry = |cluster: &str, ports: &str| {
        format!(
            "{{kubernetes: {{cluster: {cluster}, gatewayApi: {{class: isthmus, ports: {ports}, refusal: close}}}}}}"
        )
    };
    let alone = loaded(&format!("registries: [{}]", registry("a", "[443, 8443]")));
    let listeners: Vec<(&str, String, bool)> = alone
        .policy
        .listeners
        .iter()
        .map(|listener| (&*listener.name, listener.bind.to_string(), listener.is_of_gateways))
        .collect();
    assert_eq!(
        listeners,
        [("gateway-443", ":443".to_owned(), true), ("gateway-8443", ":8443".to_owned(), true)]
    );
    assert_eq!(alone.policy.listeners[0].refusal, RefusalMode::Close);
    // A route of the config may name such a listener.
    loaded(&format!(
        "registries: [{}]\nroutes: {{a.b: {{endpoints: ['h:1'], listeners: [gateway-443]}}}}",
        registry("a", "[443]")
    ));
    for (text, fault) in [
        (
            format!(
                "listeners: [{{name: a, bind: '10.0.0.1:443'}}]\nregistries: [{}]",
                registry("a", "[443]")
            ),
            "…found :443, which is also 10.0.0.1:443 of listeners[0].bind",
        ),
        (
            format!(
                "listeners: [{{name: gateway-443, bind: ':1'}}]\nregistries: [{}]",
                registry("a", "[443]")
            ),
            "…the listener of this port has the name \"gateway-443\", which another listener has",
        ),
        (
            format!("registries: [{}, {}]", registry("a", "[443]"), registry("b", "[8443]")),
            "…only one registry may have gatewayApi; first at",
        ),
    ] {
        refused_with(&text, &[fault]);
    }
}
