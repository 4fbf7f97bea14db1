//! The PROXY protocol with HAProxy and nginx, in front of the gateway and behind it.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr};

use crate::hbone::{BASE, caller, folder, service};
use crate::support::backend::Backend;
use crate::support::balancer::{Balancer, free};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::hbone::Hbone;
use crate::support::raw::{self, connect_from};

const CLIENT: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 7);

/// Starts a gateway that requires a PROXY header, and accepts it only from balancers on this host.
fn requiring(backend: &Backend) -> Gateway {
    Gateway::start(&format!(
        "listeners: [{{name: default, bind: \"127.0.0.1:0\", proxyProtocol: {{mode: require, from: [127.0.0.1/32]}}, \
         from: [127.0.0.7/32]}}]\nroutes: {{a.test: \"{}\"}}\n",
        backend.address
    ))
}

/// Sends a hello to this address, checks its echo, and closes the connection; returns the client's address.
#[track_caller]
fn echoed(address: SocketAddr) -> String {
    let mut client = connect_from(CLIENT, address);
    let hello = raw::hello(b"a.test");
    client.write_all(&hello).expect("sent");
    let mut heard = vec![0; hello.len()];
    client.read_exact(&mut heard).expect("served");
    assert_eq!(heard, hello);
    client.local_addr().expect("connected").to_string()
}

/// Calls through a balancer, and checks that the gateway logs the client as the source.
#[track_caller]
fn announced_by(balancer: &Balancer, gateway: &Gateway) {
    let own = echoed(balancer.address);
    let line = gateway.logged(&own, |line| line["source"] == own);
    let by_balancer = line["proxy"].as_str().is_some_and(|proxy| proxy.starts_with("127.0.0.1:"));
    assert!(by_balancer && line["sni"] == "a.test" && line["endpoint"].is_string(), "{line}");
    let refused = gateway.metric("isthmus_connections_total", &["reason=\"proxy_protocol\""]);
    assert_eq!(refused, 0.0);
}

#[test]
fn haproxy_announces_clients_to_the_gateway() {
    const NAME: &str = "haproxy_announces_clients_to_the_gateway";
    let backend = Backend::echo();
    for option in [
        "send-proxy",
        "send-proxy-v2",
        "send-proxy-v2 proxy-v2-options crc32c",
        "send-proxy-v2 proxy-v2-options crc32c,unique-id",
    ] {
        let gateway = requiring(&backend);
        let address = free();
        let sections = format!(
            "frontend f\n  bind {address}\n  unique-id-format %ci-%cp\n  default_backend b\nbackend b\n  server s {} {option}\n",
            gateway.listener("default")
        );
        let Some(balancer) = Balancer::haproxy(NAME, address, &sections) else { return };
        announced_by(&balancer, &gateway);
    }
}

#[test]
fn health_checks_of_haproxy_are_probes() {
    const NAME: &str = "health_checks_of_haproxy_are_probes";
    let backend = Backend::echo();
    let gateway = requiring(&backend);
    let address = free();
    let sections = format!(
        "frontend f\n  bind {address}\n  default_backend b\nbackend b\n  \
         server s {} send-proxy-v2 check check-send-proxy inter 100ms fall 1\n",
        gateway.listener("default")
    );
    let Some(balancer) = Balancer::haproxy(NAME, address, &sections) else { return };
    eventually("some checks", || (gateway.metric("isthmus_probes_total", &[]) >= 5.0).then_some(()));
    announced_by(&balancer, &gateway);
    // A health check has no client, so it is not logged.
    assert!(gateway.access_log().iter().all(|line| line["proxy"].is_string()), "a check was logged");
    assert!(!balancer.log().iter().any(|line| line.contains("DOWN")), "{:?}", balancer.log());
}

#[test]
fn nginx_announces_clients_to_the_gateway() {
    const NAME: &str = "nginx_announces_clients_to_the_gateway";
    let backend = Backend::echo();
    let gateway = requiring(&backend);
    let address = free();
    let directives = format!(
        "server {{ listen {address}; proxy_pass {}; proxy_protocol on; }}",
        gateway.listener("default")
    );
    let Some(balancer) = Balancer::nginx(NAME, address, &directives) else { return };
    announced_by(&balancer, &gateway);
}

#[test]
fn haproxy_announces_callers_of_hbone() {
    const NAME: &str = "haproxy_announces_callers_of_hbone";
    let backend = Backend::echo();
    let config = BASE
        .replace("protocol: hbone", "protocol: hbone, proxyProtocol: {mode: require, from: [127.0.0.1/32]}");
    let services = service("echo.shop.mesh", 80, &backend, "");
    let gateway = Gateway::start_in(folder(), &format!("{config}services:\n{services}"), &[]);
    let address = free();
    let sections =
        format!("listen f\n  bind {address}\n  server s {} send-proxy-v2\n", gateway.listener("hbone"));
    let Some(balancer) = Balancer::haproxy(NAME, address, &sections) else { return };
    let hbone = Hbone::connect(balancer.address, caller()).expect("let in");
    let mut stream = hbone.open("echo.shop.mesh:80").expect("admitted");
    assert_eq!(stream.echo("hello"), Ok("hello".to_owned()));
    drop(stream);
    let line = gateway.logged("the stream", |line| line["authority"] == "echo.shop.mesh:80");
    assert!(line["proxy"].is_string() && line["proxy"] != line["source"], "{line}");
}

/// Starts a gateway that announces its clients to this endpoint.
fn announcing(version: &str, endpoint: SocketAddr) -> Gateway {
    Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{a.test: {{endpoints: [\"{endpoint}\"], sendProxyProtocol: {version}}}}}\n"
    ))
}

#[test]
fn haproxy_accepts_what_the_gateway_announces() {
    const NAME: &str = "haproxy_accepts_what_the_gateway_announces";
    let backend = Backend::echo();
    let address = free();
    let sections = format!(
        "frontend f\n  bind {address} accept-proxy\n  \
         log-format \"%ci:%cp %[dst]:%[dst_port] %[fc_pp_authority] %[fc_pp_unique_id]\"\n  default_backend b\n\
         backend b\n  server s {}\n",
        backend.address
    );
    let Some(balancer) = Balancer::haproxy(NAME, address, &sections) else { return };
    for version in ["v1", "v2"] {
        let gateway = announcing(version, address);
        let front = gateway.listener("default");
        let own = echoed(front);
        let line = gateway.logged(&own, |line| line["source"] == own);
        let id = line["unique_id"].as_str();
        assert_eq!(id.is_some(), version == "v2", "{line}");
        let expected =
            format!("{own} {front} {} {}", if id.is_some() { "a.test" } else { "-" }, id.unwrap_or("-"));
        assert_eq!(balancer.logged(&own), expected, "{version}");
    }
}

#[test]
fn nginx_accepts_what_the_gateway_announces() {
    const NAME: &str = "nginx_accepts_what_the_gateway_announces";
    let backend = Backend::echo();
    let address = free();
    let directives = format!(
        "log_format f '$proxy_protocol_addr:$proxy_protocol_port $proxy_protocol_server_addr:$proxy_protocol_server_port';\n\
         access_log log f;\nserver {{ listen {address} proxy_protocol; proxy_pass {}; }}",
        backend.address
    );
    let Some(balancer) = Balancer::nginx(NAME, address, &directives) else { return };
    for version in ["v1", "v2"] {
        let gateway = announcing(version, address);
        let front = gateway.listener("default");
        let own = echoed(front);
        assert_eq!(balancer.logged(&own), format!("{own} {front}"), "{version}");
    }
}
