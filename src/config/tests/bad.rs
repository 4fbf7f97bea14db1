//! Tests of bad configs: the positions of their problems, and the advice in their messages.

use super::*;

/// Asserts that a text has these problems. Each is given by its position and by fragments of its message, with `…` between
/// them.
#[track_caller]
pub(super) fn refused(text: &str, wanted: &[&str]) {
    let problems = load_text(text).err().unwrap_or_default();
    let told = problems.join("\n");
    assert_eq!(problems.len(), wanted.len(), "{text}\ngave\n{told}");
    for (problem, wanted) in problems.iter().zip(wanted) {
        let mut rest = problem.strip_prefix("c.yaml").unwrap_or(problem);
        for fragment in wanted.split('…') {
            let at =
                rest.find(fragment).unwrap_or_else(|| panic!("{text}\ngave\n{told}\nwithout {fragment}"));
            rest = &rest[at + fragment.len()..];
        }
        assert!(problem.starts_with(&format!("c.yaml{}", wanted.split('…').next().unwrap_or(""))), "{told}");
    }
}

/// Asserts the problems of these lines, which begin on line 2 of a config that is good otherwise.
#[track_caller]
pub(super) fn refused_with(lines: &str, wanted: &[&str]) {
    refused(&format!("listen: ':15443'\n{lines}\n"), wanted);
}

#[test]
fn memory_budgets() {
    for (written, fault) in [
        ("0%", "it is 0%"),
        ("101%", "it is more than 100%"),
        ("1MiB", "1048576 bytes"),
        ("2Gi", "did you mean"),
        ("512", "no unit"),
    ] {
        let text = format!("limits: {{memory: {written}}}");
        refused_with(&text, &[&format!(":2:18: limits.memory: …{fault}")]);
    }
}

#[test]
fn empty_lists() {
    refused_with(
        "listeners: [{name: a, bind: ':1', from: []}]",
        &[
            ":2:41: listeners[0].from: found an empty list, expected one item or more; leave the key out for the default: …",
        ],
    );
    refused_with(
        "exports: [{services: []}]",
        &[":2:22: exports[0].services: found an empty list, expected one item or more"],
    );
    let routes = "routes: {e.f: []}";
    refused_with(routes, &[":2:15: routes[\"e.f\"]: found an empty list, expected one item or more"]);
    let told = load_text(&format!("listen: ':1'\n{routes}\nexports: [{{services: []}}]\n"))
        .expect_err("two")
        .join("\n");
    assert!(!told.contains("leave"), "{told}");
}

#[test]
fn keys() {
    refused(
        "lisen: ':1'",
        &[
            ":1:1: lisen: found the unknown key \"lisen\", expected one of include, node, …(did you mean \"listen\"?)",
            ":1:1: found none of listen, listeners, xds and dnsServer",
        ],
    );
    refused_with(
        "mesh: {clusterDomian: a.b}",
        &[
            ":2:8: mesh.clusterDomian: found the unknown key…expected one of clusterDomain, trustDomain (did you mean \"clusterDomain\"?)",
        ],
    );
    refused_with(
        "drain: {delay: 1s}\nmesh: {}\ndrain: {}",
        &[":4:1: drain: the key \"drain\" is given twice; first at c.yaml:2:1"],
    );
    refused_with(
        "mesh: {<<: {a: b}}",
        &[":2:8: mesh[\"<<\"]: found a merge key (<<), which is not supported"],
    );
    refused_with("mesh: {[a]: b}", &[":2:8: mesh: found a list or map as key"]);
    refused_with("proxy: &a {b: c}\n*a : d", &[":3:1: found an alias as key"]);
    refused_with(
        "listeners: [{bind: ':1'}]",
        &[":2:13: listeners[0]: the key name is missing; expected a text"],
    );
    refused_with(
        "trust: {}\nhobne: {}",
        &[
            ":2:8: trust: found a map, expected a list",
            ":3:1: hobne: found the unknown key…(did you mean \"hbone\"?)",
        ],
    );
}

#[test]
fn types() {
    refused(
        "listen: 15443",
        &[
            ":1:9: listen: found the number 15443: it has no ':'; expected an address to listen on…(did you mean \":15443\"?)",
        ],
    );
    refused_with("listeners: {}", &[":2:12: listeners: found a map, expected a list ([…]) of maps"]);
    refused_with("listeners: x", &[":2:12: listeners: found \"x\", expected a list"]);
    refused_with("routes: [a]", &[":2:9: routes: found a list, expected a map of names"]);
    refused_with("drain: 30s", &[":2:8: drain: found \"30s\", expected a map with the keys delay, timeout"]);
    refused_with("drain:\nmesh: {}", &[":2:1: drain: found nothing, expected a map with the keys"]);
    refused_with(
        "node: {name: 5}",
        &[":2:14: node.name: found the number 5: write it in quotes: \"5\"; expected a text"],
    );
    refused_with("node: {name: true}", &[":2:14: node.name: found true: it is not a text"]);
    refused_with(
        "limits: {connections: '5'}",
        &[
            ":2:23: limits.connections: found \"5\": the quotes make the value a text; remove them; expected a whole number…",
        ],
    );
    refused_with(
        "limits: {connections: 0}",
        &[":2:23: limits.connections: found the number 0; expected a whole number from 1 to"],
    );
    refused_with(
        "defaults: {panic: yes}",
        &[":2:19: defaults.panic: found \"yes\"; expected true or false (did you mean \"true\"?)"],
    );
    refused_with(
        "telemetry: {log: {level: inof}}",
        &[
            ":2:26: telemetry.log.level: found \"inof\"; expected one of error, warn, info, debug, trace (did you mean \"info\"?)",
        ],
    );
    refused_with(
        "workers: many",
        &[":2:10: workers: found \"many\"; expected auto, or a whole number from 1 to 1024"],
    );
    refused_with("workers: 2000", &[":2:10: workers: found the number 2000; expected auto, or"]);
    refused_with("admin: on", &[":2:8: admin: found \"on\", expected a map with the keys bind, or off"]);
    refused_with("services: {}", &[":2:11: services: found a map, expected a list"]);
    refused_with(
        "services: [5]",
        &[":2:12: services[0]: found the number 5, expected a map with the keys hostname"],
    );
    refused_with("node: !thing {name: a}", &[":2:7: node: found the tag \"!thing\""]);
    refused_with(
        "listeners: [{name: a, bind: ':2', protocol: hbnoe}]",
        &[":2:45: listeners[0].protocol: found \"hbnoe\"; expected one of sni, hbone, auto"],
    );
}

#[test]
fn durations_and_sizes() {
    let connect = |value: &str, wanted: &str| {
        refused_with(
            &format!("timeouts: {{connect: {value}}}"),
            &[&format!(":2:21: timeouts.connect: {wanted}")],
        );
    };
    connect(
        "10",
        "found the number 10: it has no unit; expected a whole number above 0 with its unit…(did you mean \"10s\"?)",
    );
    connect("10sec", "found \"10sec\": unknown unit \"sec\"…(did you mean \"10s\"?)");
    connect("0s", "found \"0s\": it must be greater than zero");
    connect("1.5s", "found \"1.5s\": unknown unit \".5s\"");
    connect("s", "found \"s\": it does not begin with a number");
    connect("9999999999999999999999s", "found…its number is too large");
    connect("9000h", "found \"9000h\": it is longer than a year");
    connect("18446744073709551615h", "found…it is longer than a year");
    let bytes = |value: &str, wanted: &str| {
        let text = format!("listeners: [{{name: a, bind: ':1', hello: {{maxBytes: {value}}}}}]");
        refused_with(&text, &[&format!(":2:53: listeners[0].hello.maxBytes: {wanted}")]);
    };
    bytes("16KB", "found \"16KB\": unknown unit \"KB\"; expected a size…(did you mean \"16KiB\"?)");
    bytes("2MiB", "found \"2MiB\": it is 2097152 bytes");
    bytes("5", "found the number 5: it is 5 bytes; expected a size from 256 bytes");
    let rate = |value: &str, wanted: &str| {
        let text = format!("limits: {{perService: {{bytesPerSecond: {value}}}}}");
        refused_with(&text, &[&format!(":2:39: limits.perService.bytesPerSecond: {wanted}")]);
    };
    rate("0", "found the number 0: it is 0 bytes; expected bytes per second, from 1KiB to 128GiB");
    rate("1023", "found the number 1023: it is 1023 bytes");
    rate("-1", "found…it does not begin with a number");
    rate("129GiB", "found \"129GiB\": it is 138512695296 bytes");
    rate("20MB/s", "found \"20MB/s\": unknown unit \"MB/s\"");
    refused_with(
        "defaults: {ejection: {maxShare: 50}}",
        &[":2:33: defaults.ejection.maxShare: found the number 50: it has no '%'…(did you mean \"50%\"?)"],
    );
    refused_with(
        "defaults: {ejection: {maxShare: 0%%}}",
        &[":2:33: defaults.ejection.maxShare: found \"0%%\": it is not a whole number followed by '%'"],
    );
    refused_with(
        "defaults: {ejection: {maxShare: 101%}}",
        &[":2:33: defaults.ejection.maxShare: found \"101%\": it is more than 100%"],
    );
}

#[test]
fn networks() {
    let from = |value: &str, wanted: &str| {
        let text = format!("listeners: [{{name: a, bind: ':1', from: [{value}]}}]");
        refused_with(&text, &[&format!(":2:42: listeners[0].from[0]: {wanted}")]);
    };
    from(
        "10.1.2.3/8",
        "found \"10.1.2.3/8\": it has bits set after its prefix…(did you mean \"10.0.0.0/8\"?)",
    );
    from("10.1.2.3", "found \"10.1.2.3\": it has no prefix length…(did you mean \"10.1.2.3/32\"?)");
    from("10.0.0.0/33", "found \"10.0.0.0/33\": its prefix length is not a number from 0 to 32");
    from("'fd00::/+8'", "found \"fd00::/+8\": its prefix length is not a number from 0 to 128");
    from("here/8", "found \"here/8\": its address is not an IP address; expected a network such as");
    refused_with(
        "listeners: [{name: a, bind: ':1', from: []}]",
        &[":2:41: listeners[0].from: found an empty list"],
    );
    refused_with(
        "networks: {a: {cidrs: [10.0.0.0/8]}, b: {cidrs: [10.0.0.0/8]}}",
        &[":2:50: networks.b.cidrs[0]: \"10.0.0.0/8\" is listed twice; first at c.yaml:2:24"],
    );
}

#[test]
fn binds() {
    let listen = |value: &str, wanted: &str| {
        refused(&format!("listen: {value}"), &[&format!(":1:9: listen: {wanted}")])
    };
    listen("':0'", "found \":0\": port 0 is allowed only on a loopback address");
    listen("'10.0.0.1:0'", "found \"10.0.0.1:0\": port 0 is allowed only on a loopback");
    listen("':65536'", "found \":65536\": its port is not a number from 1 to 65535");
    listen("'127.0.0.1:65536'", "found \"127.0.0.1:65536\": its port is not a number from 1 to 65535");
    listen("localhost:443", "found…is not an IP address…(did you mean \"127.0.0.1:443\"?)");
    listen("'*:443'", "found \"*:443\"…(did you mean \":443\"?)");
    listen("'10.0.0.1'", "found \"10.0.0.1\": it has no port");
    listen(
        "'unix:/x.sock'",
        "found \"unix:/x.sock\": only the admin API (admin.bind) can be on a unix socket",
    );
    listen("'::1:443'", "found \"::1:443\": an IPv6 address with a port needs brackets");
    refused_with(
        "routes: {a.b: '::ffff:127.0.0.1:443'}",
        &[":2:15: …needs brackets…(did you mean \"[::ffff:127.0.0.1]:443\"?)"],
    );
    refused_with(
        "admin: {bind: ':15000'}",
        &[
            ":2:15: admin.bind: found \":15000\": it has no address before the port…(did you mean \"127.0.0.1:15000\"?)",
        ],
    );
    let socket = |path: &str, wanted: &str| {
        refused_with(
            &format!("admin: {{bind: 'unix:{path}'}}"),
            &[&format!(":2:15: admin.bind: found {wanted}")],
        );
    };
    socket("", "\"unix:\": the path of the socket is missing");
    socket(
        "@isthmus",
        "\"unix:@isthmus\": an abstract socket has no mode…(did you mean \"unix:./@isthmus\"?)",
    );
    socket("//", "\"unix://\": the path of the socket is missing");
    socket("/run/", "\"unix:/run/\": the path of the socket is missing");
    socket(&"/a".repeat(60), "a path of 120 bytes…the path of a unix socket has at most 107 bytes");
}

#[test]
fn colliding_addresses() {
    let wanted =
        [":2:29: listeners[0].bind: found 10.0.0.1:15443, which is also :15443 of listen at c.yaml:1:9"];
    refused_with("listeners: [{name: a, bind: '10.0.0.1:15443'}]", &wanted);
    refused_with(
        "telemetry: {metrics: {bind: '127.0.0.1:15443'}}",
        &[":2:29: telemetry.metrics.bind: found 127.0.0.1:15443, which is also"],
    );
    refused_with(
        "listeners: [{name: a, bind: '0.0.0.0:7'}, {name: b, bind: '1.2.3.4:7'}, {name: c, bind: '[::]:7'}]",
        &[":2:59: listeners[1].bind"],
    );
    refused(
        "listen: ':15000'",
        &[":1:9: listen: found :15000, which is also 127.0.0.1:15000 of admin.bind at its default"],
    );
    refused_with(
        "listeners: [{name: default, bind: ':7'}]",
        &[":2:20: listeners[0].name: two listeners have the name \"default\"; first at c.yaml:1:9"],
    );
}

#[test]
fn routes() {
    let route = |value: &str, wanted: &str| {
        refused_with(&format!("routes:\n  a.b: {value}"), &[&format!(":3:{wanted}")])
    };
    route(
        "10.0.0.1",
        "8: routes[\"a.b\"]: found \"10.0.0.1\": it has no port; expected an address with its port (\"10.0.0.1:443\"), a list of them, or a map with `endpoints` or `service`",
    );
    route("5", "8: routes[\"a.b\"]: found the number 5: it has no port; expected an address with its port");
    route("", "3: routes[\"a.b\"]: found nothing, expected an address with its port");
    route("[]", "8: routes[\"a.b\"]: found an empty list");
    route(
        "['c.d:1', 7]",
        "18: routes[\"a.b\"][1]: found the number 7: it has no port; expected an address with its port (\"10.0.0.1:443\"), or a map with `address` or `srv`",
    );
    route(
        "[{adress: 'c.d:1', address: 'c.d:1'}]",
        "10: routes[\"a.b\"][0].adress: found the unknown key \"adress\", expected one of address, srv, weight, locality, backup, maxConnections (did you mean \"address\"?)",
    );
    route(
        "{endpoints: [{address: c.d}]}",
        "31: routes[\"a.b\"].endpoints[0].address: found \"c.d\": it has no port; expected an address with its port",
    );
    for (foreign, meant) in [
        ("healthCheck", "health"),
        ("sendProxy", "sendProxyProtocol"),
        ("timeout", "connectTimeout"),
        ("server", "endpoints"),
    ] {
        route(
            &format!("{{endpoints: ['c.d:1'], {foreign}: 1s}}"),
            &format!("31: routes[\"a.b\"].{foreign}: found the unknown key…(did you mean {meant:?}?)"),
        );
    }
    route("'c.d:0'", "8: routes[\"a.b\"]: found \"c.d:0\": its port is 0");
    route("'c.d:65536'", "8: routes[\"a.b\"]: found \"c.d:65536\": its port is not a number from 1 to 65535");
    route(
        "'http://c.d:80'",
        "8: routes[\"a.b\"]: found \"http://c.d:80\": it is not an address or host name…(did you mean \"c.d:80\"?)",
    );
    route("'10.0.0.300:80'", "8: routes[\"a.b\"]: found \"10.0.0.300:80\": its last label is a number");
    route(
        "'fd00::1'",
        "8: routes[\"a.b\"]: found \"fd00::1\": an IPv6 address with a port needs brackets…(did you mean \"[fd00::1]:443\"?)",
    );
    route(
        "'[10.0.0.1]:80'",
        "8: routes[\"a.b\"]: found \"[10.0.0.1]:80\": the text in its brackets is not an IPv6 address",
    );
    route(
        "[{address: 'c.d:1', weight: 0}]",
        "36: routes[\"a.b\"][0].weight: found the number 0; expected a whole number from 1 to",
    );
    route("{}", "8: routes[\"a.b\"]: found none of the keys endpoints, service, expected exactly one");
    route(
        "{endpoints: ['c.d:1'], service: e.f, port: 1}",
        "8: routes[\"a.b\"]: found more than one of the keys endpoints, service",
    );
    route("{service: e.f}", "8: routes[\"a.b\"]: the key port is missing");
    route(
        "{service: e.f, port: 0}",
        "29: routes[\"a.b\"].port: found the number 0; expected a whole number from 1 to 65535",
    );
    route(
        "{service: e.f, port: 1, panic: true}",
        "39: routes[\"a.b\"].panic: this key is allowed only with `endpoints`; a service is configured by `policies`",
    );
    route(
        "{endpoints: ['c.d:1'], subset: v1}",
        "39: routes[\"a.b\"].subset: this key is allowed only with `service`",
    );
    route(
        "{endpoints: ['c.d:1'], listeners: [defualt]}",
        "43: routes[\"a.b\"].listeners[0]: found \"defualt\", expected the name of a listener: default (did you mean \"default\"?)",
    );
    route(
        "'127.0.0.1:15443'",
        "8: routes[\"a.b\"]: found 127.0.0.1:15443, an address on which this gateway listens (listen)",
    );
    route(
        "[{address: '127.0.0.1:15000'}]",
        "19: routes[\"a.b\"][0].address: found 127.0.0.1:15000, an address on which this gateway listens (admin.bind)",
    );
}

#[test]
fn route_names() {
    let name = |name: &str, wanted: &str| {
        refused_with(&format!("routes:\n  {name}: 'c.d:1'"), &[&format!(":3:3: routes[{wanted}")]);
    };
    name("a.*.b", "\"a.*.b\"]: found \"a.*.b\": '*' is allowed only alone or as the whole first label");
    name("'*a.b'", "\"*a.b\"]: found \"*a.b\": '*' is allowed only");
    name("a..b", "\"a..b\"]: found \"a..b\": it has an empty label");
    name("'a b'", "\"a b\"]: found \"a b\": it has a character other");
    name("'https://a.b/'", "\"https://a.b/\"]: found…(did you mean \"a.b\"?)");
    name(".a.b", "\".a.b\"]: found \".a.b\": it begins with a dot…(did you mean \"*.a.b\"?)");
    name("'~^a.*$'", "\"~^a.*$\"]: found \"~^a.*$\": there are no regular expressions");
    name("10.0.0.1", "\"10.0.0.1\"]: found \"10.0.0.1\": its last label is a number");
    refused_with(
        "routes:\n  a.b: 'c.d:1'\n  A.b: 'c.d:1'\n  'a.b.': 'c.d:1'",
        &[
            ":4:3: routes[\"A.b\"]: two routes have the name \"A.b\"…first at c.yaml:3:3",
            ":5:3: routes[\"a.b.\"]: two routes have the name \"a.b.\"…first at c.yaml:3:3",
        ],
    );
}

#[test]
fn services() {
    let service = |rest: &str, wanted: &[&str]| {
        let text = format!(
            "services:\n- hostname: a.b\n  namespace: n\n  ports: [{{name: p, port: 1, targetPort: 2}}]\n  {rest}"
        );
        refused_with(&text, wanted);
    };
    let endpoint =
        |rest: &str, wanted: &str| service(&format!("endpoints: [{rest}]"), &[&format!(":6:{wanted}")]);
    endpoint(
        "{address: 10.0.0.1, weight: 0}",
        "43: services[0].endpoints[0].weight: found the number 0; expected a whole number from 1 to 4294967295",
    );
    endpoint(
        "{address: '10.0.0.1:80'}",
        "25: services[0].endpoints[0].address: found \"10.0.0.1:80\": it has a port, but only an address is allowed here…(did you mean \"10.0.0.1\"?)",
    );
    endpoint(
        "{address: 10.0.0.1, ports: {q: 1}}",
        "43: services[0].endpoints[0].ports.q: found \"q\", expected the name of a port of the service: p",
    );
    endpoint(
        "{address: 10.0.0.1, health: ill}",
        "43: services[0].endpoints[0].health: found \"ill\"; expected one of healthy",
    );
    endpoint(
        "{address: 10.0.0.1, identity: 'cluster.local/ns/a'}",
        "45: services[0].endpoints[0].identity: found…'spiffe://'…(did you mean \"spiffe://cluster.local/ns/a\"?)",
    );
    endpoint(
        "{address: 10.0.0.1, locality: a/b/c/d}",
        "45: services[0].endpoints[0].locality: found \"a/b/c/d\": it has more than three parts",
    );
    endpoint(
        "{address: 127.0.0.1, ports: {p: 15443}}",
        "25: services[0].endpoints[0].address: found 127.0.0.1:15443, an address on which this gateway listens (listen)",
    );
    endpoint(
        "{address: 10.0.0.1, tunnel: gre}",
        "43: services[0].endpoints[0].tunnel: found \"gre\"; expected one of none, hbone",
    );
    service(
        "addresses: [240.0.0.1, '::ffff:240.0.0.1']",
        &[":6:26: services[0].addresses[1]: \"::ffff:240.0.0.1\" is listed twice"],
    );
    service("subsets: {V1: {a: b}}", &[":6:13: services[0].subsets.V1: found \"V1\"…(did you mean \"v1\"?)"]);
    service(
        "subsets: {v1: {a: 1}}",
        &[":6:21: services[0].subsets.v1.a: found the number 1: write it in quotes: \"1\""],
    );
    refused_with(
        "services: [{hostname: a.b, namespace: n, ports: [{name: p, port: 1}, {name: p, port: 2}, {name: q, port: 1}]}]",
        &[
            ":2:77: services[0].ports[1].name: \"p\" is listed twice in this service; first at c.yaml:2:50",
            ":2:106: services[0].ports[2].port: the number 1 is listed twice in this service; first at c.yaml:2:50",
        ],
    );
    refused_with(
        "services: [{hostname: a.b, namespace: n, ports: []}]",
        &[":2:49: services[0].ports: found an empty list"],
    );
    refused_with(
        "services: [{hostname: a.b, namespace: west/n, ports: [{name: p, port: 1}]}]",
        &[":2:39: services[0].namespace: found \"west/n\": it has a '/'"],
    );
}

#[test]
fn exports_policies_and_registries() {
    refused_with("exports: [{}]", &[":2:11: exports[0]: the key services is missing"]);
    refused_with(
        "exports: [{services: ['*'], ports: [70000]}]",
        &[":2:37: exports[0].ports[0]: found the number 70000; expected a whole number from 1 to 65535"],
    );
    refused_with(
        "exports: [{services: ['*'], to: {identities: ['spiffe://TD/ns/*']}}]",
        &[":2:47: exports[0].to.identities[0]: found \"spiffe://TD/ns/*\": its trust domain has"],
    );
    refused_with(
        "exports: [{services: ['*'], listeners: [x]}]",
        &[":2:41: exports[0].listeners[0]: found \"x\", expected the name of a listener: default"],
    );
    refused_with(
        "exports: [{services: ['*'], to: }]",
        &[":2:29: exports[0].to: found nothing, expected a map"],
    );
    refused_with(
        "policies: [{services: [a.b]}, {services: [A.B.]}]",
        &[":2:43: policies[1].services[0]: \"A.B.\" is in two policies; first at c.yaml:2:24"],
    );
    refused_with(
        "registries: [{file: {path: a.yaml}}]",
        &[":2:21: registries[0].file: the key cluster is missing"],
    );
    refused_with(
        "registries: [{file: {path: a, cluster: b}}, {file: {path: a, cluster: c}}]",
        &[":2:59: registries[1].file.path: two registries read the file \"a\"; first at c.yaml:2:28"],
    );
    refused_with(
        "mesh: {trustDomain: Cluster.Local}",
        &[":2:21: mesh.trustDomain: found…(did you mean \"cluster.local\"?)"],
    );
    refused_with("node: {network: ''}", &[":2:17: node.network: found \"\": it is empty"]);
    refused_with(
        "node: {network: \"a\\nb\"}",
        &[":2:17: node.network: found \"a\\nb\": it has a control character"],
    );
}

#[test]
fn texts_that_are_no_config() {
    refused("", &[":1:1: found an empty file"]);
    refused("# nothing\n", &[":1:1: found an empty file"]);
    refused("---\n", &[":…found an empty file"]);
    refused(
        "listen",
        &[
            ":1:1: found \"listen\", expected a map with the keys",
            ":1:1: found none of listen, listeners, xds and dnsServer",
        ],
    );
    refused(
        "mesh: {}",
        &[":1:1: found none of listen, listeners, xds and dnsServer, so the gateway has nothing to do"],
    );
    refused("listeners: []", &[":1:1: found none of"]);
    refused("xds: off", &[":1:1: found none of"]);
    refused("listen: ':1'\n---\nlisten: ':1'\n", &[":2:1: found a second document"]);
    refused("mesh:\n\tclusterDomain: a.b\n", &[":2:1: found a tab in the indentation"]);
    refused("mesh:\n  clusterDomain: a.b\n \t trustDomain: c\n", &[":3:2: found a tab in the indentation"]);
    refused("mesh: {clusterDomain: a\n", &[":…found no valid YAML"]);
    refused("mesh: *a\n", &[":1:7: found no valid YAML"]);
    refused("a: \"b\n", &[":…found no valid YAML"]);
}

#[test]
fn variables() {
    refused_with(
        "node: {name: \"a${NOPE}\"}",
        &[":2:14: node.name: the environment variable NOPE is not set"],
    );
    refused_with(
        "limits: {connections: \"${NOPE}\"}\nnode: {name: \"${\"}",
        &[
            ":2:23: limits.connections: the environment variable NOPE is not set",
            ":3:14: node.name: found '${' without '}'",
        ],
    );
    refused_with(
        "limits: {connections: \"${KEY}\"}",
        &[":2:23: limits.connections: found \"{a: b}\"; expected a whole number"],
    );
}

#[test]
fn all_faults_are_told_at_once_in_the_order_of_the_file() {
    refused(
        "routes: {a.b: 5}\nlisteners:\n- {name: a, bind: x}\n- {name: a, bind: ':2'}\nlimit: {}\nservices: [{}]\n",
        &[
            ":1:15: routes",
            ":3:19: listeners[0].bind",
            ":4:10: listeners[1].name",
            ":5:1: limit: found the unknown key…(did you mean \"limits\"?)",
            ":6:12: services[0]: the key hostname is missing",
            ":6:12: services[0]: the key namespace is missing",
            ":6:12: services[0]: the key ports is missing",
        ],
    );
}

#[test]
fn the_list_of_faults_is_cut() {
    let mut text = "listen: ':1'\n".to_owned();
    for number in 0..5000 {
        text.push_str(&format!("key{number}: x\n"));
    }
    let problems = load_text(&text).expect_err("bad");
    assert_eq!(problems.len(), 101);
    assert!(problems[0].starts_with("c.yaml:2:1: key0"), "{}", problems[0]);
    assert_eq!(problems[100], "c.yaml: and 4900 more");
}

#[test]
fn aliases_are_values_and_cannot_explode() {
    let text = "listen: ':1'\nroutes:\n  a.b: &e {endpoints: ['c.d:1'], connectTimeout: &t 7s}\n  e.f: *e\ntimeouts: {connect: *t}\n";
    let config = loaded(text);
    assert_eq!(config.policy.routes[0].to, config.policy.routes[1].to);
    assert_eq!(config.policy.timeouts.connect, Duration::from_secs(7));
    let mut bomb = "listen: ':1'\na0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..60 {
        let below = vec![format!("*a{}", level - 1); 10].join(", ");
        bomb.push_str(&format!("a{level}: &a{level} [{below}]\n"));
    }
    let problems = load_text(&bomb).expect_err("bad");
    assert!(
        problems.iter().any(|problem| problem.contains("aliases that stand for more than")),
        "{problems:?}"
    );
    refused_with(
        "mesh: &m {clusterDomain: *m}",
        &[":2:26: mesh.clusterDomain: found an alias within the value that it refers to"],
    );
}

#[test]
fn depth_is_bounded_for_every_way_to_nest() {
    let chain = |levels: usize| {
        let mut text = "listen: ':1'\na0: &a0 [x]\n".to_owned();
        for level in 1..levels {
            text.push_str(&format!("a{level}: &a{level} [*a{}]\n", level - 1));
        }
        text
    };
    let blocks =
        |levels: usize| (0..levels).map(|level| format!("{}a:\n", " ".repeat(level))).collect::<String>();
    for text in [
        format!("listen: {}", "[".repeat(100_000)),
        format!("listen: {}", "{a: ".repeat(100_000)),
        format!("listen: {}", "- ".repeat(100_000)),
        format!("? {}", "? ".repeat(100_000)),
        format!("a: {}{}", "[".repeat(200), "]".repeat(200)),
        chain(1000),
        blocks(1000),
    ] {
        let problems = load_text(&text).expect_err("bad");
        assert!(problems.iter().all(|problem| problem.len() < 2000), "short texts");
    }
    let problems = load_text(&blocks(1000)).expect_err("bad");
    assert!(problems[0].contains("more than 64 deep"), "{problems:?}");
}

#[test]
fn messages_do_not_repeat_hostile_texts() {
    let problems = load_text(&format!("listen: \"\\e[31m{}\"\n", "x".repeat(100_000))).expect_err("bad");
    assert!(problems[0].len() < 500 && !problems[0].contains('\u{1b}'), "{problems:?}");
}

#[test]
fn the_key_path_is_written_as_operators_write_it() {
    let routes = KeyPath::Root.key("routes");
    let route = routes.key("api.example.com");
    assert_eq!(
        route.key("endpoints").index(1).key("address").to_string(),
        "routes[\"api.example.com\"].endpoints[1].address"
    );
}

#[test]
fn two_listeners_cannot_take_a_free_port_of_one_address() {
    refused(
        "listeners: [{name: a, bind: '127.0.0.1:0'}, {name: b, bind: '127.0.0.1:0'}]",
        &[
            ":1:61: listeners[1].bind: found 127.0.0.1:0, which is also 127.0.0.1:0 of listeners[0].bind…only one listener \
             can take a free port of an address",
        ],
    );
    assert!(load_text("listeners: [{name: a, bind: '127.0.0.1:0'}, {name: b, bind: '127.0.0.2:0'}]").is_ok());
}

#[test]
fn names_that_begin_with_a_star_need_quotes() {
    let needs = "found no valid YAML: a name that begins with * needs quotes: ";
    refused_with("routes:\n  *.example.com: h:1", &[&format!(":3:3: {needs}\"*.example.com\"")]);
    refused_with("routes:\n  *: h:1", &[&format!(":3:3: {needs}\"*\"")]);
    refused_with(
        "routes:\n  a.test: h:1\n  *.example.com: h:1\n\n  b.test: h:1",
        &[&format!(":4:3: {needs}\"*.example.com\"")],
    );
    refused_with("*: {}\nroutes: {}", &[&format!(":2:1: {needs}\"*\"")]);
    refused_with("routes: {a.b: 'h:1', *.x.y: 'h:2'}", &[&format!(":2:22: {needs}\"*.x.y\"")]);
    refused_with("exports:\n  - services: [*.x.y]", &[&format!(":3:16: {needs}\"*.x.y\"")]);
}

#[test]
fn lines_lists_and_quotes_that_do_not_fit() {
    refused_with(
        "routes:\n  a.test: 'h:1'\n   b.test: 'h:2'",
        &[":4:4: found no valid YAML: this line is indented by 3, its neighbours by 2"],
    );
    refused_with(
        "routes:\n  a.test: 'h:1'\n b.test: 'h:2'",
        &[":4:2: found no valid YAML: this line is indented by 1, its neighbours by 2"],
    );
    refused(
        "listen: ':1'\nlimits: {connections: ${N}}\n",
        &[":2:23: found no valid YAML: a value with ${…} needs quotes inside of [] and {}: \"${NAME}\""],
    );
    refused_with(
        "routes:\n  a.test: ['h:1', 'h:2'\nworkers: 1",
        &[":3:11: found no valid YAML: the list opened at 3:11 is not closed"],
    );
    refused_with(
        "routes:\n  a.test: {service: a.b, port: 1\nworkers: 1",
        &[":3:11: found no valid YAML: the map opened at 3:11 is not closed"],
    );
    refused(
        "listen: ':1\nroutes:\n  a.test: h:1\n",
        &[":1:9: found no valid YAML: the quote opened at 1:9 is not closed"],
    );
    refused_with(
        "node: {name: \"x}",
        &[":2:14: found no valid YAML: the quote opened at 2:14 is not closed"],
    );
    refused_with(
        "node: {name: x} # it's [ fine\nroutes:\n  a.test: b: c",
        &[":4:12: found no valid YAML: found a second ': ' in this line"],
    );
}

#[test]
fn words_of_other_programs() {
    refused(
        "apiVersion: v1\nkind: Service\nmetadata: {name: x}",
        &[":1:1: this looks like a Kubernetes manifest", ":1:1: found none of listen"],
    );
    refused(
        "static_resources: {listeners: []}",
        &[":1:1: this looks like an Envoy bootstrap", ":1:1: found none of listen"],
    );
    refused_with(
        "frontend: {}\nbackend: {}\nroutes: {a.b: {endpoints: [{host: h}]}, c.d: {endpoints: ['h:1'], lb_policy: x}}",
        &[
            ":2:1: frontend: found the unknown key \"frontend\", expected one of include,…(did you mean \"listeners\"?)",
            ":3:1: backend: found the unknown key \"backend\" (did you mean \"routes\"?)",
            ":4:28: routes[\"a.b\"].endpoints[0]: found none of the keys address, srv",
            ":4:29: routes[\"a.b\"].endpoints[0].host: …(did you mean \"address\"?)",
            ":4:67: routes[\"c.d\"].lb_policy: …(did you mean \"loadBalancing\"?)",
        ],
    );
}

#[test]
fn suggestions_are_what_was_meant() {
    refused_with(
        "routes: {a.b: {endpoints: ['h:1'], connectTimeout: 3000}, b.c: '::1:443', c.d: 'h:1,h:2', d.e: '0.0.0.0:443'}",
        &[
            ":2:52: …it has no unit…(did you mean \"3000ms\"?)",
            ":2:64: …needs brackets…(did you mean \"[::1]:443\"?)",
            ":2:80: …several addresses are a list…(did you mean \"[h:1, h:2]\"?)",
            ":2:96: …which is not the address of one process",
        ],
    );
}

#[test]
fn what_is_doubtful_is_warned_of() {
    let text = "listen: ':15443'\ninclude: nothere*.yaml\nlisteners: [{name: idle, bind: ':1'}]\nroutes:\n  default: \
                {endpoints: ['h:443'], listeners: [default]}\n  a.b: {endpoints: ['h:1', 'H:1'], listeners: [default]}\n\
                aggregator: {expireAfter: 1m}\n";
    let folder = tempfile::tempdir().expect("a directory");
    let path = folder.path().join("c.yaml");
    fs::write(&path, text).expect("written");
    let config = load(&path, &|_| None, &mut |_| {}).expect("good");
    let told: Vec<String> = config.warnings.iter().map(ToString::to_string).collect();
    let told = told.join("\n");
    for wanted in [
        "c.yaml:2:10: include: \"nothere*.yaml\" matches no file",
        "c.yaml:3:13: listeners[0]: nothing can be reached through the listener \"idle\": no route and no export",
        "c.yaml:5:3: routes.default: found \"default\", which is not a wildcard: it matches only clients that send exactly \
         this name (did you mean \
         \"*\"?)",
        "c.yaml:6:28: routes[\"a.b\"].endpoints[1]: h:1 is listed twice",
        "c.yaml:7:27: aggregator.expireAfter: 1m is not longer than staleAfter (2m), which has no effect then",
    ] {
        assert!(told.contains(wanted), "{told}\nhas not\n{wanted}");
    }
}

#[test]
fn steering() {
    refused_with(
        "steering: {mode: adaptive}",
        &[
            ":2:18: steering.mode: found \"adaptive\": this version cannot divide calls by load; expected off or nearest",
        ],
    );
    refused_with(
        "steering: {rings: [2ms, 20ms, 20ms, 5ms], costWeight: -1ms, maxRemote: 120%}",
        &[
            ":2:31: steering.rings[2]: \"20ms\" is not larger than the ring before it; …",
            ":2:37: steering.rings[3]: \"5ms\" is not larger than the ring before it; …",
            ":2:55: steering.costWeight: …",
            ":2:72: steering.maxRemote: …it is more than 100%",
        ],
    );
    refused_with(
        "steering: {rings: [-2ms, 0s]}",
        &[":2:20: steering.rings[0]: …", ":2:26: steering.rings[1]: …it must be greater than zero"],
    );
    refused_with("steering: {rings: []}", &[":2:19: steering.rings: found an empty list…"]);
    let networks = "networks: {a: {}, b: {}, c: {}}";
    refused_with(
        &format!(
            "{networks}\nsteering: {{mode: nearest}}\npolicies: [{{services: ['*'], steering: {{shares: {{a: 50%, b: 30%, c: 30%}}}}}}]"
        ),
        &[":4:49: policies[0].steering.shares: the shares are 110% together, expected at most 100%"],
    );
    refused_with(
        &format!("{networks}\npolicies: [{{services: ['*'], steering: {{shares: {{a: 50%}}}}}}]"),
        &[
            ":3:49: policies[0].steering.shares: shares need a mode that divides the rest; write `mode: nearest` …",
        ],
    );
    refused_with(
        &format!("{networks}\npolicies: [{{services: ['*'], steering: {{failover: [a], only: [b, x]}}}}]"),
        &[
            ":3:51: policies[0].steering.failover: it holds for steered services alone; write `mode: nearest` …",
            ":3:52: policies[0].steering.failover[0]: \"a\" is not in `only`, so that no call goes there",
            ":3:62: policies[0].steering.only: it holds for steered services alone; write `mode: nearest` …",
            ":3:66: policies[0].steering.only[1]: no network \"x\" is known; …",
        ],
    );
    refused_with(
        "node: {network: net-a}\nnetworks:\n  net-b: {distance: {net-a: 0s, net-x: 3ms}, cost: {net_b: -1}}\n\
         policies: [{services: ['*'], steering: {mode: nearest, shares: {net-c: 1%}}}]",
        &[
            ":4:29: networks[\"net-b\"].distance[\"net-a\"]: …it must be greater than zero",
            ":4:33: networks[\"net-b\"].distance[\"net-x\"]: no network \"net-x\" is known; …",
            ":4:53: networks[\"net-b\"].cost.net_b: no network \"net_b\" is known; …did you mean …net-b…",
            ":4:60: networks[\"net-b\"].cost.net_b: found the number -1; expected a number from 0 …",
            ":5:65: policies[0].steering.shares[\"net-c\"]: no network \"net-c\" is known; …",
        ],
    );
}
