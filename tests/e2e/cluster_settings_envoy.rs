//! The clusters that Envoy and gRPC get, each setting by what a real client does with it: a call for each protocol of a port and
//! each TLS mode, many connections to one service, endpoints that are dead without a word of the registry, and zones.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread;

use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::json;
use tempfile::TempDir;

use crate::horizon_envoy::{counted, envoy};
use crate::support::backend::{Backend, refusing};
use crate::support::client::{call, connect, tls};
use crate::support::envoy::Envoy;
use crate::support::gateway::Gateway;
use crate::support::horizon::{
    CLIENT_ID, LISTENER, SERVER_ID, Told, call_once, checkout, client, client_config, control_plane_with,
    endpoint, put, service, start_client, told, west_gateway_at,
};
use crate::support::pki::PKI;
use crate::support::python::{self, Peer};
use crate::support::{eventually, skip};

const PROTOCOLS: [&str; 6] = ["TCP", "HTTP", "HTTP2", "GRPC", "TLS", "HTTPS"];
const MODES: [&str; 3] = ["mesh", "own", "none"];
/// The name in the certificates of servers.
const ANY: &str = "*.shop.svc.cluster.local";

/// A listener that passes HTTP on to a service.
const HTTP_LISTENER: &str = r#"
    - name: {NAME}
      address: {socket_address: {address: 127.0.0.1, port_value: 0}}
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: {NAME}
                http2_protocol_options: {max_concurrent_streams: 100000}
                route_config:
                  validate_clusters: false
                  virtual_hosts:
                    - name: all
                      domains: ["*"]
                      routes: [{match: {prefix: "/"}, route: {cluster: "outbound|443||{NAME}.shop.svc.cluster.local"}}]
                http_filters:
                  - name: envoy.filters.http.router
                    typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
"#;

/// A control plane of the east without a west.
fn control_plane(east: &str) -> (TempDir, Gateway) {
    let registries = tempfile::tempdir().expect("a folder");
    put(registries.path(), "east.yaml", east);
    put(registries.path(), "west.yaml", "  []\n");
    let unused = "192.0.2.1:15443".parse().expect("an address");
    let control = Gateway::start(&control_plane_with(registries.path(), &[unused], "127.0.0.1:0", ""));
    (registries, control)
}

/// Answers one request of HTTP/1.1. The preface of HTTP/2 gets no answer.
fn answer_http(mut stream: impl Read + Write) -> io::Result<()> {
    let (mut head, mut bytes) = (Vec::new(), [0; 1024]);
    while !head.ends_with(b"\r\n\r\n") {
        let count = stream.read(&mut bytes)?;
        head.extend_from_slice(&bytes[..count]);
        if count == 0 || head.starts_with(b"PRI") {
            return Ok(());
        }
    }
    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\nconnection: close\r\n\r\nhttp")
}

/// Starts a server of HTTP/1.1 that accepts TLS by this config, or none.
fn http_server(config: Option<Arc<ServerConfig>>) -> Backend {
    Backend::start(move |stream| {
        // Errors are ignored here, because the client's checks detect them.
        let _ = match &config {
            None => answer_http(stream),
            Some(config) => {
                let connection = ServerConnection::new(config.clone()).expect("a connection");
                answer_http(StreamOwned::new(connection, stream))
            }
        };
    })
}

/// Sends a request of HTTP/1.1; returns the body of the answer.
fn get(mut stream: impl Read + Write) -> String {
    let request = "GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    let mut said = Vec::new();
    // Errors are ignored here, because the answer is missing then.
    let _ = stream.write_all(request.as_bytes()).and_then(|()| stream.read_to_end(&mut said));
    let said = String::from_utf8_lossy(&said).into_owned();
    said.rsplit("\r\n").next().unwrap_or_default().to_owned()
}

/// Starts the peer with gRPC servers of each mode and a gRPC client; returns it with the addresses of the servers.
fn grpc_peer(python: OsString, folder: &TempDir) -> (Peer, BTreeMap<String, SocketAddr>) {
    let (server, client) = (PKI.issue(&[ANY], Some(SERVER_ID)), PKI.issue(&[], Some(CLIENT_ID)));
    for (name, text) in [
        ("ca.pem", &PKI.ca_pem()),
        ("server.pem", &server.certificate_pem),
        ("server.key", &server.key_pem),
        ("client.pem", &client.certificate_pem),
        ("client.key", &client.key_pem),
    ] {
        std::fs::write(folder.path().join(name), text).expect("written");
    }
    let mut peer = Peer::start(python, "ports_caller.py", &[folder.path().as_os_str()]);
    let ports = peer.tell(&json!({"ports": true}))["done"].clone();
    let ports: BTreeMap<String, u16> = serde_json::from_value(ports).expect("ports");
    let address = |port| SocketAddr::from(([127, 0, 0, 1], port));
    (peer, ports.into_iter().map(|(mode, port)| (mode, address(port))).collect())
}

#[test]
fn a_port_of_each_protocol_and_tls_mode_is_called_through_envoy_and_by_grpc() {
    let Some(binary) = envoy() else { return };
    let Some(python) = python::installed() else {
        return skip("clusters: there is no Python with gRPC (tests/run installs it)");
    };
    let folder = tempfile::tempdir().expect("a folder");
    let (mut peer, grpc) = grpc_peer(python, &folder);
    let (mutual, own) = (PKI.mutual_server(ANY, SERVER_ID), PKI.server(ANY));
    let http = [
        ("mesh", http_server(Some(mutual))),
        ("own", http_server(Some(own.clone()))),
        ("none", http_server(None)),
    ];
    let bytes = [
        ("mesh", endpoint("mesh", SERVER_ID)),
        ("own", Backend::tls_echo(own, "own:")),
        ("none", Backend::echo()),
    ];
    let of = |all: &[(&str, Backend)], mode: &str| {
        all.iter().find(|(of, _)| *of == mode).map(|(_, backend)| backend.address).expect("there")
    };
    let rows: Vec<(String, &str, &str)> = PROTOCOLS
        .into_iter()
        .flat_map(|protocol| MODES.map(|mode| (format!("{protocol}-{mode}").to_lowercase(), protocol, mode)))
        .collect();
    let (mut registry, mut listeners) = (String::new(), String::new());
    for (name, protocol, mode) in &rows {
        let address = match *protocol {
            "HTTP" => of(&http, mode),
            "HTTP2" | "GRPC" => grpc[*mode],
            _ => of(&bytes, mode),
        };
        let told = Told { address, zone: "a/a", weight: 1, health: "healthy" };
        let more = format!("tls: {mode}, identity: \"{SERVER_ID}\"");
        registry += &service(name, &format!("protocol: {protocol}"), &[told], &more);
        // A gRPC server for each protocol and mode, for clients that find it over xDS.
        let told = Told { address: grpc[*mode], ..told };
        registry += &service(&format!("g-{name}"), &format!("protocol: {protocol}"), &[told], &more);
        let is_http = matches!(*protocol, "HTTP" | "HTTP2" | "GRPC") && *mode != "own";
        let listener = if is_http { HTTP_LISTENER } else { LISTENER };
        listeners += &listener.replace("{NAME}", name);
    }
    let (_registries, control) = control_plane(&registry);
    let envoy = start_client(&binary, &client_config(control.listener("xds"), &listeners));
    peer.tell(&json!({"xds": control.listener("xds").to_string()}));
    let mut failed = Vec::new();
    for (name, protocol, mode) in &rows {
        let (listener, host) = (envoy.listener(name), format!("{name}.shop.svc.cluster.local"));
        let (answer, expected) = match (*protocol, *mode) {
            ("HTTP", "own") => (tls(listener, &host).map(get), "http"),
            ("HTTP", _) => (Ok(get(connect(listener))), "http"),
            // Envoy ends the TLS of the mesh; that of the application is the client's.
            ("HTTP2" | "GRPC", _) => {
                let tls = if *mode == "own" { "own" } else { "none" };
                let answer = peer.tell(&json!({"call": listener.to_string(), "tls": tls}));
                (Ok(answer["done"].as_str().unwrap_or_default().to_owned()), *mode)
            }
            (_, "own") => (tls(listener, &host).and_then(|mut tls| call(&mut tls, "hello")), "own:hello"),
            (_, "mesh") => (call_once(listener, CLIENT_ID).endpoint.map_err(io::Error::other), "mesh"),
            _ => (call(&mut connect(listener), "hello"), "hello"),
        };
        let answer = answer.map_err(|error| error.to_string());
        if answer.as_deref() != Ok(expected) {
            failed.push(format!("{name} through Envoy: {answer:?}"));
        }
        let target = format!("xds:///g-{host}:443");
        let answer = peer.tell(&json!({"call": target, "tls": mode}));
        if answer["done"] != *mode {
            failed.push(format!("{name} by gRPC: {answer}"));
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn an_envoy_without_secrets_calls_services_outside_the_mesh() {
    let Some(binary) = envoy() else { return };
    let (plain, own) = (Backend::echo(), Backend::tls_echo(PKI.server(ANY), "own:"));
    let list = |name, protocol, backend, tls: &str| {
        service(name, &format!("protocol: {protocol}"), &[told(backend, "a/a", 1)], &format!("tls: {tls}"))
    };
    let registry = list("plain", "HTTP", &plain, "none") + &list("own", "TLS", &own, "own");
    let (registries, control) = control_plane(&registry);
    let listeners = ["plain", "own"].map(|name| LISTENER.replace("{NAME}", name)).concat();
    let config = client_config(control.listener("xds"), &listeners);
    let (begin, end) =
        (config.find("  secrets:\n").expect("there"), config.find("  clusters:\n").expect("there"));
    let envoy = start_client(&binary, &(config[..begin].to_owned() + &config[end..]));
    assert_eq!(call(&mut connect(envoy.listener("plain")), "hello").expect("answered"), "hello");
    let mut stream = tls(envoy.listener("own"), "own.shop.svc.cluster.local").expect("a handshake");
    assert_eq!(call(&mut stream, "hello").expect("answered"), "own:hello");
    let types = || control.json("/api/v1/clients")[0]["types"].clone();
    assert_eq!(types()["cds"]["nacks"], 0, "{}", types());

    // An endpoint of the mesh needs the secrets, which this Envoy lacks. Until it accepts the cluster, it calls such an endpoint in
    // no way at all.
    let met = Backend::echo();
    put(
        registries.path(),
        "east.yaml",
        &(list("plain", "HTTP", &met, "mesh") + &list("own", "TLS", &own, "own")),
    );
    eventually("a refusal of the cluster", || (types()["cds"]["nacks"].as_u64() > Some(0)).then_some(()));
    eventually("the new endpoint", || {
        envoy.weights("outbound|443||plain.shop.svc.cluster.local").contains_key(&met.address).then_some(())
    });
    let answer = call(&mut connect(envoy.listener("plain")), "hello");
    assert!(answer.as_deref().map_or(true, str::is_empty), "{answer:?}");
    assert_eq!(call(&mut stream, "again").expect("answered"), "own:again");
}

/// The number of connections, which Envoy's own limit of 1,024 would cut. `ISTHMUS_CONNECTIONS` sets another one.
fn connections() -> usize {
    std::env::var("ISTHMUS_CONNECTIONS").ok().and_then(|text| text.parse().ok()).unwrap_or(1_200)
}

#[test]
fn a_service_has_more_connections_and_calls_than_envoy_allows_by_itself() {
    let Some(binary) = envoy() else { return };
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    thread::spawn(move || {
        let mut held = Vec::new();
        for mut stream in listener.incoming().map_while(Result::ok) {
            // Errors are ignored here, because the client's checks detect them.
            let _ = stream.write_all(b".");
            held.push(stream);
        }
    });
    let folder = tempfile::tempdir().expect("a folder");
    let mut peer = python::installed().map(|python| grpc_peer(python, &folder));
    let plain = |address| Told { address, zone: "a/a", weight: 1, health: "healthy" };
    let mut registry = service("plain", "protocol: TCP", &[plain(address)], "tls: none");
    if let Some((_, grpc)) = &peer {
        registry += &service("grpc", "protocol: GRPC", &[plain(grpc["none"])], "tls: none");
    }
    let (_registries, control) = control_plane(&registry);
    let listeners = LISTENER.replace("{NAME}", "plain") + &HTTP_LISTENER.replace("{NAME}", "grpc");
    let envoy = start_client(&binary, &client_config(control.listener("xds"), &listeners));
    let mut open: Vec<_> = (0..connections()).map(|_| connect(envoy.listener("plain"))).collect();
    let answered = open.iter_mut().filter_map(|stream| stream.read_exact(&mut [0]).ok()).count();
    assert_eq!(answered, connections());
    if let Some((peer, _)) = &mut peer {
        peer.tell(&json!({"xds": control.listener("xds").to_string()}));
        for target in
            [envoy.listener("grpc").to_string(), "xds:///grpc.shop.svc.cluster.local:443".to_owned()]
        {
            let count = connections().min(2_000);
            let answered = peer.tell(&json!({"call": target, "at once": count}));
            assert_eq!(answered["done"], count, "{target}");
        }
    }
}

#[test]
fn calls_leave_a_network_that_is_dead_although_its_registry_lists_it() {
    let Some(binary) = envoy() else { return };
    let registries = tempfile::tempdir().expect("a folder");
    let dead: Vec<Told> =
        (0..6).map(|_| Told { address: refusing(), zone: "east/a", weight: 1, health: "healthy" }).collect();
    let far = endpoint("west", SERVER_ID);
    put(registries.path(), "east.yaml", &checkout(&dead));
    put(registries.path(), "west.yaml", &checkout(&[told(&far, "west/a", 1)]));
    let west = west_gateway_at(registries.path(), "127.0.0.1:0");
    let more = "steering: {mode: nearest}\n";
    let config = control_plane_with(registries.path(), &[west.listener("mesh")], "127.0.0.1:0", more);
    let control = Gateway::start(&config);
    let envoy = client(&binary, control.listener("xds"), &["checkout"], "DELTA_GRPC");
    let listener = envoy.listener("checkout");
    let mut in_row = 0;
    eventually("calls that arrive", || {
        let arrived = call_once(listener, CLIENT_ID).endpoint.is_ok();
        in_row = if arrived { in_row + 1 } else { 0 };
        (in_row == 20).then_some(())
    });
    // Endpoints return after a while, and each costs three calls then. With half of them left out at most, most calls would fail.
    let failed = (0..300).filter(|_| call_once(listener, CLIENT_ID).endpoint.is_err()).count();
    assert!(failed <= dead.len() * 3, "{failed} of 300 calls failed");
}

#[test]
fn the_division_among_networks_holds_for_envoys_in_several_zones() {
    let Some(binary) = envoy() else { return };
    let registries = tempfile::tempdir().expect("a folder");
    let near: Vec<_> = (0..8).map(|_| endpoint("east", SERVER_ID)).collect();
    let near: Vec<_> = near.iter().map(|backend| told(backend, "east/a", 1)).collect();
    let far = endpoint("west", SERVER_ID);
    put(registries.path(), "east.yaml", &checkout(&near));
    put(registries.path(), "west.yaml", &checkout(&[told(&far, "west/a", 24)]));
    let west = west_gateway_at(registries.path(), "127.0.0.1:0");
    let config = control_plane_with(registries.path(), &[west.listener("mesh")], "127.0.0.1:0", "");
    let config =
        config.replace("{address: 127.0.0.1, sniPort", "{address: 127.0.0.1, locality: west/a, sniPort");
    assert!(config.contains("locality: west/a"), "{config}");
    let control = Gateway::start(&config);
    // Envoy's own cluster, which has an Envoy in each of two zones.
    let peer = |region: &str| {
        format!(
            "          - locality: {{region: {region}, zone: a}}\n            lb_endpoints: [{{endpoint: {{address: {{socket_address: \
             {{address: 127.0.0.1, port_value: 9}}}}}}}}]\n"
        )
    };
    let local = format!(
        "    - name: local\n      type: STATIC\n      load_assignment:\n        cluster_name: local\n        endpoints:\n{}{}",
        peer("east"),
        peer("west")
    );
    let config = client_config(control.listener("xds"), &LISTENER.replace("{NAME}", "checkout"))
        .replace("  cluster: client\n", "  cluster: client\n  locality: {region: east, zone: a}\n")
        .replace("static_resources:\n", "cluster_manager: {local_cluster_name: local}\nstatic_resources:\n")
        .replace("  clusters:\n", &format!("  clusters:\n{local}"));
    let envoy: Envoy = start_client(&binary, &config);
    let counts = counted(envoy.listener("checkout"), 400);
    let east = counts.get("east").copied().unwrap_or_default();
    assert!((80..=120).contains(&east), "a quarter of the weight is near: {counts:?}");
}
