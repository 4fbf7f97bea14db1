//! Tests of `networks`, `aggregator`, `dns`, `state` and `xds`.

use super::bad::{refused, refused_with};
use super::*;
use isthmus_ads::node::ClientRule;
use isthmus_aggregator::options::Options;
use isthmus_model::address::Host;
use isthmus_model::place::{ClusterId, Network};
use isthmus_settings::network::Access;
use isthmus_xds::options::Options as Discovery;

fn loaded_with(lines: &str) -> Config {
    loaded(&format!("listen: ':15443'\n{lines}\n"))
}

#[test]
fn a_network_has_access_and_gateways() {
    let config = loaded_with(
        "networks:\n  west:\n    gateways:\n    - {address: west.example.com, sniPort: 15443, hbonePort: 15008, cluster: w1, locality: r/z, \
         weight: 4294967295, identity: 'spiffe://td/ns/a/sa/b'}\n    - {address: 192.0.2.7, hbonePort: 1}\n    - {address: 192.0.2.7, \
         hbonePort: 1}\n  east: {access: direct, gateways: [{address: '::ffff:192.0.2.7', sniPort: 65535}]}\n  north: {}\n",
    );
    let [west, east, north] = config.policy.networks.as_slice() else { panic!("three") };
    assert_eq!((west.access, east.access, north.access), (Access::Gateway, Access::Direct, Access::Gateway));
    let [first, second, third] = west.gateways.as_slice() else { panic!("three") };
    assert_eq!(first.host.to_string(), "west.example.com");
    assert_eq!(
        (first.sni_port, first.hbone_port, first.weight.value()),
        (Some(15443), Some(15008), u32::MAX)
    );
    assert_eq!((first.cluster.as_str(), first.locality.as_str()), ("w1", "r/z"));
    assert_eq!(first.identity.as_ref().map(|own| own.as_str()), Some("spiffe://td/ns/a/sa/b"));
    assert_eq!((second.sni_port, second.hbone_port, second.weight), (None, Some(1), Weight::ONE));
    // A gateway may be listed twice, or in two networks; its weights are added.
    assert_eq!(second, third);
    assert_eq!(east.gateways[0].host, Host::Ip([192, 0, 2, 7].into()));
    assert_eq!(north.gateways, []);
}

#[test]
fn bad_networks() {
    let gateway = |text: &str, wanted: &str| {
        refused_with(&format!("networks:\n  west: {{gateways: [{text}]}}"), &[&format!(":3:{wanted}")]);
    };
    gateway(
        "{address: 192.0.2.7}",
        "21: networks.west.gateways[0]: found neither sniPort nor hbonePort; a gateway needs at least one of them",
    );
    gateway(
        "{address: 192.0.2.7, sniPort: 0}",
        "51: networks.west.gateways[0].sniPort: found the number 0; expected a whole number from 1 to 65535",
    );
    gateway(
        "{address: 192.0.2.7, hbonePort: 65536}",
        "53: networks.west.gateways[0].hbonePort: found the number",
    );
    gateway(
        "{address: 192.0.2.7, sniPort: 1, weight: 0}",
        "62: networks.west.gateways[0].weight: found the number 0; expected a whole number from 1 to 4294967295",
    );
    gateway(
        "{address: 'west.example.com:15443', sniPort: 1}",
        "31: networks.west.gateways[0].address: found \"west.example.com:15443\": it has a port…(did you mean \"west.example.com\"?)",
    );
    gateway("{sniPort: 1}", "21: networks.west.gateways[0]: the key address is missing");
    gateway(
        "192.0.2.7",
        "21: networks.west.gateways[0]: found \"192.0.2.7\", expected a map with the keys address",
    );
    gateway(
        "{adress: 192.0.2.7, address: 192.0.2.7, sniPort: 1}",
        "22: networks.west.gateways[0].adress: found the unknown key…(did you mean \"address\"?)",
    );
    gateway(
        "{address: 192.0.2.7, sniPort: 1, identity: west}",
        "64: networks.west.gateways[0].identity: found \"west\"",
    );
    refused_with(
        "networks: {west: {access: direkt}}",
        &[
            ":2:27: networks.west.access: found \"direkt\"; expected one of gateway, direct (did you mean \"direct\"?)",
        ],
    );
}

#[test]
fn the_aggregator_has_the_defaults_of_its_options() {
    let config = loaded("listen: ':15443'");
    assert_eq!(config.aggregator, Options::default());
    let default = Options::default();
    let seconds = Duration::from_secs;
    assert_eq!((default.stale_after, default.expire_after), (seconds(120), None));
    assert_eq!((default.withdrawal_hold, default.start_timeout), (seconds(30), seconds(30)));
    assert_eq!((default.dns.ttl_min, default.dns.ttl_max), (seconds(1), seconds(3600)));
    assert_eq!(default.dns.hold_missing, seconds(30));
    let config = loaded_with(
        "aggregator: {staleAfter: 1s, expireAfter: 5m, withdrawalHold: 0s, startTimeout: 250ms}\nstate: {dir: kept}\n\
         dns: {servers: [192.0.2.53, '192.0.2.54:5353', 'fd00::53', '[fd00::54]:54'], minTtl: 2s, maxTtl: 2s, holdMissing: 0s}",
    );
    let options = &config.aggregator;
    assert_eq!((options.stale_after, options.expire_after), (seconds(1), Some(seconds(300))));
    assert_eq!(
        (options.withdrawal_hold, options.start_timeout),
        (Duration::ZERO, Duration::from_millis(250))
    );
    let servers: Vec<String> = options.dns.servers.iter().map(ToString::to_string).collect();
    assert_eq!(servers, ["192.0.2.53:53", "192.0.2.54:5353", "[fd00::53]:53", "[fd00::54]:54"]);
    assert_eq!((options.dns.ttl_min, options.dns.ttl_max), (seconds(2), seconds(2)));
    assert_eq!(options.dns.hold_missing, seconds(0));
    assert!(options.state.as_ref().is_some_and(|dir| dir.is_absolute() && dir.ends_with("kept")));
    assert_eq!(loaded_with("aggregator: {expireAfter: never}").aggregator, default);
    assert_eq!(loaded_with("dns: {servers: []}").aggregator, default);
}

#[test]
fn a_state_directory_is_relative_to_the_file_that_names_it() {
    let directory = tempfile::tempdir().expect("a directory");
    fs::create_dir(directory.path().join("conf.d")).expect("a directory");
    fs::write(directory.path().join("c.yaml"), "include: conf.d/*.yaml\nlisten: ':1'\n").expect("a file");
    fs::write(directory.path().join("conf.d/state.yaml"), "state: {dir: kept}\n").expect("a file");
    let config = load_file(directory.path(), "c.yaml").expect("good");
    assert_eq!(config.aggregator.state, Some(directory.path().join("conf.d/kept")));
}

#[test]
fn bad_aggregators() {
    refused_with(
        "aggregator: {staleAfter: 10}",
        &[":2:26: aggregator.staleAfter: found the number 10: it has no unit…(did you mean \"10s\"?)"],
    );
    refused_with(
        "aggregator: {staleAfter: 0s}",
        &[":2:26: aggregator.staleAfter: found \"0s\": it must be greater than zero"],
    );
    refused_with(
        "aggregator: {expireAfter: nevre}",
        &[
            ":2:27: aggregator.expireAfter: found \"nevre\"…expected never, or a whole number above 0 with its unit…(did you mean \"never\"?)",
        ],
    );
    refused_with("aggregator: {expireAfter: 0s}", &[":2:27: aggregator.expireAfter: found \"0s\""]);
    refused_with(
        "aggregator: {withdrawalHold: never}",
        &[":2:30: aggregator.withdrawalHold: found \"never\""],
    );
    refused_with(
        "aggregator: {startTimout: 1s}",
        &[":2:14: aggregator.startTimout: found the unknown key…(did you mean \"startTimeout\"?)"],
    );
    refused_with("state: {}", &[":2:8: state: the key dir is missing; expected a path"]);
    refused_with("state: {dir: ''}", &[":2:14: state.dir: found \"\": it is empty"]);
    refused_with("state: kept", &[":2:8: state: found \"kept\", expected a map with the keys dir"]);
}

#[test]
fn bad_resolvers() {
    let server = |text: &str, wanted: &str| {
        refused_with(
            &format!("dns: {{servers: [{text}]}}"),
            &[&format!(":2:17: dns.servers[0]: found {wanted}")],
        );
    };
    server(
        "ns.example.com",
        "\"ns.example.com\": a name server cannot be given by name; expected an IP address, with a port if",
    );
    server("'ns.example.com:53'", "\"ns.example.com:53\": a name server cannot be given by name");
    server("'10.0.0.53:0'", "\"10.0.0.53:0\": its port is 0");
    server("'10.0.0.53:65536'", "\"10.0.0.53:65536\": its port is not a number from 1 to 65535");
    refused_with("dns: {minTtl: 2h}", &[":2:15: dns.minTtl: found \"2h\", which is more than maxTtl, 3600s"]);
    refused_with(
        "dns: {minTtl: 10s, maxTtl: 5s}",
        &[":2:28: dns.maxTtl: found \"5s\", which is less than minTtl, 10s"],
    );
    refused_with("dns: {minTtl: 0s}", &[":2:15: dns.minTtl: found \"0s\""]);
}

#[test]
fn xds_is_opened_where_it_is_named() {
    assert_eq!(loaded("listen: ':15443'").xds, None);
    assert_eq!(loaded_with("xds: off").xds, None);
    // A control plane needs no listener.
    assert!(loaded("xds: {bind: '127.0.0.1:15010'}").xds.is_some());
    let xds = |lines: &str| loaded_with(lines).xds.expect("opened");
    let bind = ([127, 0, 0, 1], 15_010).into();
    assert_eq!(xds("xds: {bind: '127.0.0.1:15010'}"), Discovery { bind, tls: false, clients: None });
    assert_eq!(xds("xds: {bind: '[::1]:0'}").bind.to_string(), "[::1]:0");
    let rules = xds(
        "xds: {bind: '127.0.0.1:15010', clients: [{cidrs: [10.0.0.0/8], networks: [a, b], clusters: [c]}, {cidrs: []}]}",
    );
    let rule = ClientRule {
        identities: Vec::new(),
        cidrs: vec!["10.0.0.0/8".parse().expect("a block")],
        networks: Some(vec![Network::new("a"), Network::new("b")]),
        clusters: Some(vec![ClusterId::new("c")]),
    };
    let any = ClientRule { identities: Vec::new(), cidrs: Vec::new(), networks: None, clusters: None };
    assert_eq!(rules.clients, Some(vec![rule, any]));
}

#[test]
fn bad_xds() {
    refused_with(
        "xds: {bind: '10.0.0.1:15010'}",
        &[
            ":2:13: xds.bind: found \"10.0.0.1:15010\", which is not a loopback address; any other address requires \
             xds.tls…(did you mean \
             \"127.0.0.1:15010\"?)",
        ],
    );
    refused_with(
        "xds: {bind: '0.0.0.0:15010'}",
        &[":2:13: xds.bind: found \"0.0.0.0:15010\", which is not a loopback"],
    );
    refused_with(
        "xds: {bind: ':15010'}",
        &[
            ":2:13: xds.bind: found \":15010\": it has no address before the port…(did you mean \"127.0.0.1:15010\"?)",
        ],
    );
    let secure = "identity: {files: {certificate: c, key: k}}\ntrust: [{trustDomain: td, roots: r}]";
    refused_with(
        &format!("xds: {{bind: '10.0.0.1:15010', tls: {{}}}}\n{secure}"),
        &[
            ":2:13: xds.bind: found \"10.0.0.1:15010\", which is not a loopback address; any other address requires xds.clients",
        ],
    );
    refused_with(
        "xds: {bind: '127.0.0.1:15010', tls: {}}",
        &[":2:6: xds: xds has tls, but there is no identity"],
    );
    let open = "xds: {bind: '0.0.0.0:15010', tls: {}, clients: [{identities: ['spiffe://td/ns/a/*'], networks: [a]}]}";
    let options = loaded_with(&format!("{open}\n{secure}")).xds.expect("opened");
    let rules = options.clients.expect("rules");
    assert!(options.tls && rules[0].identities[0].to_string() == "spiffe://td/ns/a/*");
    refused_with(
        "xds: {bind: '127.0.0.1:15010', clients: [{cidrs: []}, {identities: ['spiffe://td/a']}]}",
        &[":2:68: xds.clients[1].identities: found identities, which require xds.tls"],
    );
    refused_with("xds: {}", &[":2:6: xds: the key bind is missing"]);
    refused_with(
        "xds: {bind: '127.0.0.1:15000'}",
        &[
            ":2:13: xds.bind: found 127.0.0.1:15000, which is also 127.0.0.1:15000 of admin.bind at its default",
        ],
    );
    refused(
        "listen: ':15010'\nxds: {bind: '127.0.0.1:15010'}",
        &[":2:13: xds.bind: found 127.0.0.1:15010, which is also :15010 of listen at c.yaml:1:9"],
    );
    refused_with(
        "xds: {bind: '127.0.0.1:15010', clients: [{networks: []}]}",
        &[":2:53: xds.clients[0].networks: found an empty list"],
    );
    refused_with(
        "xds: {bind: '127.0.0.1:15010', clients: [{cidrs: [10.0.0.1/8], network: a}]}",
        &[
            ":2:51: xds.clients[0].cidrs[0]: found \"10.0.0.1/8\": it has bits set",
            ":2:64: xds.clients[0].network: found the unknown key…(did you mean \"networks\"?)",
        ],
    );
    refused_with(
        "xds: {bind: '127.0.0.1:15010'}\nroutes: {a.b: '127.0.0.1:15010'}",
        &[
            ":3:15: routes[\"a.b\"]: found 127.0.0.1:15010, an address on which this gateway listens (xds.bind)",
        ],
    );
}

#[test]
fn virtual_addresses_come_from_ranges_that_nothing_else_uses() {
    let ranges = |lines: &str| {
        let ranges = loaded_with(lines).aggregator.virtual_addresses;
        ranges.map(|ranges| ranges.list().iter().map(ToString::to_string).collect::<Vec<_>>())
    };
    assert_eq!(ranges(""), None);
    assert_eq!(ranges("dnsServer: off"), None);
    let both = ["240.250.0.0/16", "fd69:7374:686d::/48"].map(str::to_owned).to_vec();
    assert_eq!(ranges("dnsServer: {zones: [global]}"), Some(both));
    assert_eq!(
        ranges("dnsServer: {zones: [global], vips: [10.96.7.0/24]}"),
        Some(vec!["10.96.7.0/24".to_owned()])
    );
    let bad = |text: &str, wanted: &str| {
        refused_with(
            &format!("dnsServer: {{zones: [a], vips: [{text}]}}"),
            &[&format!(":2:32: dnsServer.vips[0]: {wanted}")],
        );
    };
    bad(
        "240.240.0.0/16",
        "found \"240.240.0.0/16\", which overlaps 240.240.0.0/16, from which istiod assigns virtual addresses",
    );
    bad("240.0.0.0/8", "found \"240.0.0.0/8\", which overlaps 240.240.0.0/16");
    bad("'2001:2:0:7::/64'", "found \"2001:2:0:7::/64\", which overlaps 2001:2::/48");
    bad("127.9.0.0/16", "found \"127.9.0.0/16\", which overlaps the loopback addresses, 127.0.0.0/8");
    bad(
        "10.0.0.0/30",
        "found \"10.0.0.0/30\"; the prefix length of a range of virtual addresses is from /8 to /29",
    );
    bad(
        "'fd00::/16'",
        "found \"fd00::/16\"; the prefix length of a range of virtual addresses is from /32 to /125",
    );
    refused_with(
        "dnsServer: {zones: [a], vips: [10.1.0.0/16, 10.2.0.0/16]}",
        &[":2:45: dnsServer.vips[1]: found \"10.2.0.0/16\", a second IPv4 range"],
    );
}

#[test]
fn the_dns_server_listens_on_one_address_that_is_its_own() {
    let server = loaded_with("dnsServer: {zones: [global, ClusterSet.local]}").dns_server.expect("on");
    assert_eq!(server.bind.to_string(), "127.0.0.1:15053");
    assert_eq!(
        server.zones.iter().map(|zone| zone.as_str()).collect::<Vec<_>>(),
        ["global", "clusterset.local"]
    );
    assert!(server.upstream.is_empty());
    refused_with("dnsServer: {}", &[":2:12: dnsServer: …zones"]);
    refused_with(
        "dnsServer: {zones: [a], bind: '0.0.0.0:53'}",
        &[":2:31: dnsServer.bind: found \"0.0.0.0:53\", which stands for all addresses of the host"],
    );
    refused_with(
        "dnsServer: {zones: [a], bind: '127.0.0.1:53', upstream: [127.0.0.1]}",
        &[
            ":2:58: dnsServer.upstream[0]: found \"127.0.0.1\", an address on which this gateway listens (dnsServer.bind)",
        ],
    );
    refused_with(
        "dnsServer: {zones: [a], bind: '127.0.0.1:5353'}\nroutes: {a.b: '127.0.0.1:5353'}",
        &[
            ":3:15: routes[\"a.b\"]: found 127.0.0.1:5353, an address on which this gateway listens (dnsServer.bind)",
        ],
    );
    refused_with(
        "dnsServer: {zones: [a], bind: '127.0.0.1:5353'}\nxds: {bind: '127.0.0.1:5353'}",
        &[":3:13: xds.bind: found 127.0.0.1:5353, which is also 127.0.0.1:5353 of dnsServer.bind"],
    );
    assert!(loaded("dnsServer: {zones: [a]}").policy.listeners.is_empty(), "it is enough to run");
}
