//! The gateway never connects to itself (to its listeners, however their addresses are written), nor to another gateway of its
//! own network.

use std::io::Write;
use std::net::SocketAddr;

use crate::support::client::connect;
use crate::support::dns::NameServer;
use crate::support::eventually;
use crate::support::gateway::{BINARY, Gateway};
use crate::support::namespace;
use crate::support::raw::{self, alert, read_out};

const INTERNAL_ERROR: u8 = 80;
/// Addresses of two interfaces and both families, and a range that the host accepts as local although no interface has these
/// addresses.
const SETUP: &str = "
ip link set lo up
ip link add own0 type veth peer name own1
ip addr add 10.77.0.7/24 dev own0; ip addr add 10.77.0.8/24 dev own0; ip -6 addr add fd77::7/64 dev own0 nodad
ip addr add 10.78.0.7/24 dev own1
ip link set own0 up; ip link set own1 up
ip route add local 10.99.0.0/16 dev lo
";

/// Returns a service with one endpoint, which clients reach by its hostname.
fn service(name: &str, address: &str, port: u16) -> String {
    format!(
        "  - {{hostname: {name}, namespace: own, ports: [{{name: tls, port: 443, targetPort: {port}, protocol: TLS}}], \
         endpoints: [{{address: \"{address}\"}}]}}\n"
    )
}

fn ended(gateway: &Gateway) -> f64 {
    gateway.metric("isthmus_connections_total", &[])
}

/// Sends a hello that must be refused, and returns the reason in the access log.
#[track_caller]
fn refused(gateway: &Gateway, address: SocketAddr, name: &str) -> String {
    let mut client = connect(address);
    client.write_all(&raw::hello(name.as_bytes())).expect("sent");
    let heard = read_out(&mut client).0;
    assert_eq!(heard, alert(INTERNAL_ERROR), "{name}");
    let own = client.local_addr().expect("connected").to_string();
    let line = gateway.logged(name, |line| line["sni"] == name && line["source"] == own);
    line["reason"].as_str().expect("a reason").to_owned()
}

#[test]
fn one_hello_makes_at_most_one_connection_to_ourselves() {
    if !namespace::inside("own::one_hello_makes_at_most_one_connection_to_ourselves", SETUP) {
        return;
    }
    let names = NameServer::start();
    names.points("self.dns.test", "10.77.0.7".parse().expect("an address"));
    let folder = tempfile::tempdir().expect("a folder");
    let spelled = [
        ("interface", "10.77.0.7", 1.0),
        ("other-interface", "10.78.0.7", 1.0),
        ("v6", "fd77::7", 1.0),
        ("mapped", "::ffff:10.77.0.7", 1.0),
        ("loopback", "127.0.0.1", 1.0),
        ("other-loopback", "127.8.8.8", 1.0),
        ("loopback-v6", "::1", 1.0),
        ("name", "self.dns.test", 1.0),
        // The gateway cannot recognise this address as its own; it recognises the connection to itself when that connection
        // arrives.
        ("local-route", "10.99.1.2", 2.0),
    ];
    let services: String = spelled
        .iter()
        .map(|(name, address, _)| service(&format!("{name}.own.test"), address, 15443))
        .collect();
    std::fs::write(folder.path().join("services.yaml"), format!("services:\n{services}")).expect("written");
    let config = format!(
        "node: {{cluster: east, network: net-east}}\nlisten: \":15443\"\ndns: {{servers: [\"{}\"]}}\n\
         registries: [{{file: {{path: services.yaml, cluster: east, network: net-east}}}}]\n\
         exports: [{{services: [\"*\"]}}]\n",
        names.address
    );
    let gateway = Gateway::start_in(folder, &config, &[]);
    eventually("the name", || {
        gateway.get("/api/v1/explain?sni=name.own.test").1.contains("10.77.0.7").then_some(())
    });
    let address: SocketAddr = "127.0.0.1:15443".parse().expect("an address");
    for (name, at, connections) in spelled {
        let before = ended(&gateway);
        let reason = refused(&gateway, address, &format!("{name}.own.test"));
        eprintln!("{name} ({at}): {reason}");
        let made = eventually("all its connections", || {
            let all = ended(&gateway) - before;
            (gateway.metric("isthmus_connections_active", &[]) == 0.0 && all >= connections).then_some(all)
        });
        assert_eq!(made, connections, "{name} ({at})");
        assert!(["endpoint_unreachable", "endpoint_reset"].contains(&reason.as_str()), "{name}: {reason}");
    }
}

#[test]
fn an_address_that_the_host_has_had_for_a_moment_is_an_own_one() {
    if !namespace::inside("own::an_address_that_the_host_has_had_for_a_moment_is_an_own_one", SETUP) {
        return;
    }
    let services = service("late.own.test", "10.77.0.99", 15443);
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("services.yaml"), format!("services:\n{services}")).expect("written");
    let config = "node: {cluster: east, network: net-east}\nlisten: \":15443\"\n\
                  registries: [{file: {path: services.yaml, cluster: east, network: net-east}}]\n\
                  exports: [{services: [\"*\"]}]\n";
    let gateway = Gateway::start_in(folder, config, &[]);
    namespace::shell("ip addr add 10.77.0.99/24 dev own0");
    let address = "127.0.0.1:15443".parse().expect("an address");
    for connections in 1..=5 {
        // The gateway usually recognises the address as its own before it dials. Right after the address was added, the gateway
        // dials, and recognises its own connection when that connection arrives.
        let reason = refused(&gateway, address, "late.own.test");
        assert!(["endpoint_unreachable", "endpoint_reset"].contains(&reason.as_str()), "{reason}");
        eventually("their end", || (gateway.metric("isthmus_connections_active", &[]) == 0.0).then_some(()));
        assert!(ended(&gateway) <= f64::from(2 * connections), "a loop");
    }
    eventually("it is known", || {
        let before = ended(&gateway);
        refused(&gateway, address, "late.own.test");
        (ended(&gateway) - before == 1.0).then_some(())
    });
}

#[test]
fn two_gateways_of_a_network_do_not_pass_connections_to_one_another() {
    if !namespace::inside("own::two_gateways_of_a_network_do_not_pass_connections_to_one_another", SETUP) {
        return;
    }
    let gateway = |own: &str| {
        let services = "services:\n  - {hostname: loop.own.test, namespace: own, ports: [{name: tls, port: 443, \
                        targetPort: 15443, protocol: TLS}], endpoints: [{address: 10.77.0.7}, {address: 10.77.0.8}]}\n";
        let config = format!(
            "node: {{cluster: east, network: net-east}}\nlisten: \"{own}:15443\"\n\
             networks: {{net-east: {{gateways: [{{address: 10.77.0.7, sniPort: 15443}}, {{address: 10.77.0.8, sniPort: \
             15443}}]}}}}\nexports: [{{services: [\"*\"]}}]\n\
             registries: [{{file: {{path: services.yaml, cluster: east, network: net-east}}}}]\n"
        );
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("services.yaml"), services).expect("written");
        Gateway::start_in(folder, &config, &[])
    };
    let (one, other) = (gateway("10.77.0.7"), gateway("10.77.0.8"));
    for (asked, neighbour, address) in [(&one, &other, "10.77.0.7:15443"), (&other, &one, "10.77.0.8:15443")]
    {
        let before = ended(neighbour);
        let address = address.parse().expect("an address");
        assert_eq!(refused(asked, address, "loop.own.test"), "no_endpoints");
        assert_eq!(ended(neighbour), before, "the other gateway was connected to");
        let told = asked.get("/api/v1/explain?sni=loop.own.test").1;
        assert!(told.contains("\"why\":\"gateway\""), "{told}");
    }
}

#[test]
fn no_registry_leads_to_the_gateways_own_servers() {
    if !namespace::inside("own::no_registry_leads_to_the_gateways_own_servers", SETUP) {
        return;
    }
    let names = NameServer::start();
    names.points("localhost.dns.test", "127.0.0.1".parse().expect("an address"));
    names.points("own.dns.test", "10.77.0.7".parse().expect("an address"));
    let ports = [("admin", 15000), ("xds", 15010), ("metrics", 15020), ("health", 15021)];
    let addresses = [
        ("v4", "127.0.0.1"),
        ("mapped", "::ffff:127.0.0.1"),
        ("v6", "::1"),
        ("own", "10.77.0.7"),
        ("own-name", "own.dns.test"),
        ("name", "localhost.dns.test"),
    ];
    let mut services = String::from("services:\n");
    for (server, port) in ports {
        for (spelling, address) in addresses {
            services += &service(&format!("{spelling}.{server}.test"), address, port);
        }
    }
    let config = |allow: &str| {
        format!(
            "node: {{cluster: east, network: net-east}}\nlisten: \"127.0.0.1:0\"\nadmin: {{bind: \"127.0.0.1:15000\"}}\n\
             xds: {{bind: \"127.0.0.1:15010\"}}\n\
             telemetry: {{log: {{format: json}}, metrics: {{bind: \":15020\"}}, health: {{bind: \":15021\"}}}}\n\
             dns: {{servers: [\"{}\"]}}\n\
             registries: [{{file: {{path: services.yaml, cluster: east, network: net-east}}{allow}}}]\n\
             exports: [{{services: [\"*\"]}}]\n",
            names.address
        )
    };
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("services.yaml"), services).expect("written");
    let gateway = Gateway::start_in(folder, &config(", allow: {services: [\"*.test\"]}"), &[]);
    let address = gateway.listener("default");
    for name in ["own.dns.test", "localhost.dns.test"] {
        let looked_up = |line: &String| line.contains("name resolved") && line.contains(name);
        eventually(name, || gateway.log().iter().any(looked_up).then_some(()));
    }
    let is_ours = |spelling: &str, server: &str| {
        // The admin and xDS servers listen only on 127.0.0.1.
        let everywhere = server == "metrics" || server == "health";
        everywhere || !["v6", "own", "own-name"].contains(&spelling)
    };
    for (server, _) in ports {
        for (spelling, _) in addresses {
            let reason = refused(&gateway, address, &format!("{spelling}.{server}.test"));
            let wanted: &[&str] = match (spelling, is_ours(spelling, server)) {
                ("own" | "own-name", true) => &["endpoint_unreachable"],
                ("own" | "own-name", false) => &["endpoint_refused"],
                _ => &["no_endpoints"],
            };
            assert!(wanted.contains(&reason.as_str()), "{spelling}.{server}: {reason}");
        }
    }
    // `status`, `explain` and `validate` name the key that leaves the endpoints out.
    let told = gateway.get("/api/v1/status").1;
    assert!(told.contains("allow.addresses"), "{told}");
    let told = gateway.get("/api/v1/explain?sni=v4.admin.test").1;
    assert!(told.contains("\"why\":\"address not allowed\"") && told.contains("allow.addresses"), "{told}");
    let validated = std::process::Command::new(BINARY)
        .args(["validate", "isthmus.yaml"])
        .current_dir(gateway.folder())
        .output()
        .expect("it runs");
    let told =
        String::from_utf8_lossy(&validated.stdout).into_owned() + &String::from_utf8_lossy(&validated.stderr);
    assert!(told.contains("allow.addresses"), "{told}");
    // A registry that may name loopback still cannot reach the gateway's own servers.
    gateway.reload(&config(", allow: {services: [\"*.test\"], addresses: [\"127.0.0.0/8\", \"::1/128\"]}"));
    let again =
        || gateway.get("/api/v1/explain?sni=v4.admin.test").1.contains("127.0.0.1:15000").then_some(());
    eventually("the registry, which is read again", again);
    for (server, _) in ports {
        for spelling in ["v4", "mapped", "v6", "name"] {
            let reason = refused(&gateway, address, &format!("{spelling}.{server}.test"));
            let wanted = if is_ours(spelling, server) { "endpoint_unreachable" } else { "endpoint_refused" };
            assert_eq!(reason, wanted, "{spelling}.{server}");
        }
    }
}

#[test]
fn a_config_that_names_an_own_address_is_refused_whatever_the_interface() {
    if !namespace::inside("own::a_config_that_names_an_own_address_is_refused_whatever_the_interface", SETUP)
    {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let validate = |endpoint: &str| {
        let config = format!("listen: \":15443\"\nroutes: {{a.test: \"{endpoint}\"}}\n");
        std::fs::write(folder.path().join("isthmus.yaml"), config).expect("written");
        let run = std::process::Command::new(BINARY)
            .args(["validate", "isthmus.yaml"])
            .current_dir(folder.path())
            .output()
            .expect("it runs");
        (
            run.status.code(),
            String::from_utf8_lossy(&run.stderr).into_owned() + &String::from_utf8_lossy(&run.stdout),
        )
    };
    for own in [
        "10.77.0.7:15443",
        "10.78.0.7:15443",
        "[fd77::7]:15443",
        "[::ffff:10.77.0.7]:15443",
        "127.0.0.5:15443",
    ] {
        let (code, told) = validate(own);
        assert!(
            code == Some(1) && told.contains("an address on which this gateway listens (listen)"),
            "{own}: {told}"
        );
    }
    for other in ["10.77.0.9:15443", "10.77.0.7:443"] {
        assert_eq!(validate(other).0, Some(0), "{other}");
    }
}
