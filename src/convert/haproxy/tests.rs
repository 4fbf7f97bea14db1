//! Tests of the conversion of whole HAProxy configs.

use std::collections::BTreeSet;

use super::*;
use crate::draft::Target;

fn convert(text: &str) -> Draft {
    let mut draft = convert_with(text, &|_| None);
    draft.settle();
    draft
}

/// Every line of a file is in the draft or in a remark.
#[test]
fn no_line_is_lost() {
    let text = include_str!("../../../tests/corpus/haproxy/everything.cfg");
    let draft = convert(text);
    let yaml = draft.yaml("everything.cfg");
    let told: BTreeSet<usize> = draft.remarks.iter().map(|remark| remark.line).collect();
    let (sections, _) = sections(text);
    // If a whole section is not converted, the remark on its first line applies to all its lines.
    let whole: Vec<(usize, usize)> = sections
        .iter()
        .filter(|section| {
            draft.remarks.iter().any(|one| one.line == section.head.number && one.text.contains("lines "))
        })
        .map(|section| (section.head.number, section.end()))
        .collect();
    // Lines with these keywords are represented in the result only by their values.
    let values = [
        "use_backend",
        "acl",
        "default_backend",
        "bind",
        "server",
        "mode",
        "balance",
        "timeout",
        "maxconn",
        "hard-stop-after",
    ];
    for line in sections.iter().flat_map(|section| &section.lines) {
        let is_told = told.contains(&line.number)
            || whole.iter().any(|(first, last)| (*first..=*last).contains(&line.number))
            || yaml.contains(&format!("# line {}", line.number))
            || values.contains(&line.words[0].as_str())
            || line.words[..].iter().any(|word| word == "inspect-delay")
            || line.words[0] == "default-server";
        assert!(is_told, "line {} is lost: {:?}\n{yaml}", line.number, line.words);
    }
}

#[test]
fn the_first_rule_of_haproxy_is_the_route() {
    let draft = convert(
        "frontend f\n bind :1\n use_backend a if { req_ssl_sni -m end .x.test }\n use_backend b if { req_ssl_sni w.x.test }\n \
         use_backend b if { req_ssl_sni x.test }\n default_backend b\nbackend a\n server s 10.0.0.1:1\nbackend b\n server s 10.0.0.2:1\n",
    );
    let routes: Vec<_> =
        draft.routes.iter().map(|route| (route.key.as_str(), route.target.backend.as_str())).collect();
    assert_eq!(routes, [("*.x.test", "a"), ("x.test", "b"), ("*", "b"), ("-", "b")]);
    assert!(draft.remarks.iter().any(|remark| (remark.line, remark.fate) == (4, Fate::NotNeeded)));
}

#[test]
fn a_listener_without_routes_and_an_http_section_are_said() {
    let draft = convert(
        "defaults\n mode http\nfrontend web\n bind :80\n default_backend x\nbackend x\n server s 10.0.0.1:80\n",
    );
    let lines: Vec<usize> = draft.remarks.iter().map(|remark| remark.line).collect();
    assert_eq!((lines, draft.listeners.len()), (vec![3, 6], 0));
}

fn has(draft: &Draft, line: usize, fate: Fate, part: &str) {
    let found =
        draft.remarks.iter().any(|one| (one.line, one.fate) == (line, fate) && one.text.contains(part));
    assert!(found, "line {line} has no {fate:?} with {part:?}: {:#?}", draft.remarks);
}

fn keys(draft: &Draft) -> Vec<&str> {
    draft.routes.iter().map(|route| route.key.as_str()).collect()
}

/// Returns the target of the first listener, whose frontend looks at no hello.
fn target(draft: &Draft) -> &Target {
    draft.listeners[0].target.as_ref().expect("a target")
}

fn binds(draft: &Draft) -> Vec<String> {
    draft.listeners.iter().map(|listener| listener.bind.to_string()).collect()
}

#[test]
fn a_defaults_section_inherits_from_the_one_that_it_names() {
    let draft = convert(
        "defaults web\n mode http\ndefaults tcp\n mode tcp\n balance leastconn\n default-server send-proxy-v2\n\
         defaults special from tcp\ndefaults pages from web\ndefaults lost from nowhere\n\
         frontend f from special\n bind :1\n default_backend b\nfrontend p from pages\n bind :2\n default_backend b\n\
         backend b from special\n server s 10.0.0.1:1\n",
    );
    let target = target(&draft);
    assert_eq!((target.policy, target.send_proxy), (Some("leastRequest"), Some("v2")));
    has(&draft, 9, Fate::NotConverted, "no `defaults nowhere`");
    has(&draft, 13, Fate::NotConverted, "mode http");
}

#[test]
fn a_name_that_haproxy_refuses_reaches_no_wider_route() {
    let draft = convert(
        "frontend f\n bind :1\n use_backend deny if { req_ssl_sni -i no.x.test }\n use_backend w if { req_ssl_sni -m end -i .x.test }\n \
         use_backend w if { req_ssl_sni -m end -i .y.test }\n default_backend w\nbackend deny\nbackend w\n server s 10.0.0.1:1\n",
    );
    assert_eq!(keys(&draft), ["*.x.test", "*.y.test", "*", "-", "no.x.test"]);
    let closed = draft.routes.last().expect("a route");
    assert!(closed.is_closed && closed.sources.except == ["0.0.0.0/0"], "{closed:?}");
    has(&draft, 3, Fate::NotNeeded, "no.x.test: the route admits nobody");
    // A disabled backend refuses as an empty one does, and names that are not known may be any; a client without a name has none.
    let draft = convert(
        "frontend f\n bind :1\n use_backend off if { req_ssl_sni -m reg ^[ab] }\n use_backend w if { req_ssl_sni -i b.test }\n \
         default_backend w\nbackend off\n disabled\n server s 10.0.0.2:1\nbackend w\n server s 10.0.0.1:1\n",
    );
    assert_eq!(keys(&draft), ["-"]);
    has(&draft, 4, Fate::NotConverted, "b.test: left out, because line 3 could refuse these clients");
    has(&draft, 6, Fate::NotNeeded, "disabled");
    // Clients of a rule that leads elsewhere reach the default; the remark says so.
    let draft = convert(
        "frontend f\n bind :1\n use_backend v if { req_ssl_sni -m reg ^a }\n default_backend w\n\
         backend v\n server s 10.0.0.2:1\nbackend w\n server s 10.0.0.1:1\n",
    );
    assert_eq!(keys(&draft), ["*", "-"]);
    has(&draft, 4, Fate::Differs, "*: clients that match the rule in line 3");
}

#[test]
fn a_reject_leaves_out_wide_routes_unless_all_clients_were_accepted() {
    let of = |accept: &str| {
        convert(&format!(
            "frontend f\n bind :1\n tcp-request content accept if {accept}\n tcp-request content reject\n \
             use_backend b if {{ req_ssl_sni -i a.test }}\n default_backend b\nbackend b\n server s 10.0.0.1:1\n"
        ))
    };
    assert_eq!(keys(&of("{ req_ssl_sni -i a.test }")), ["a.test"]);
    let draft = of("{ req_ssl_hello_type 1 }");
    assert_eq!(keys(&draft), ["a.test", "*", "-"]);
    has(&draft, 4, Fate::NotNeeded, "routes and `from` leave out what it refuses");
}

#[test]
fn a_disabled_frontend_and_one_without_address_open_nothing() {
    let draft = convert(
        "frontend off\n disabled\n bind :1\n default_backend b\nfrontend tls\n bind :2 ssl\n default_backend b\n\
         frontend on\n bind :3\n use_backend b if { req_ssl_sni -i a.test }\nbackend b\n server s 10.0.0.1:1\n",
    );
    assert_eq!((binds(&draft), keys(&draft)), (vec!["0.0.0.0:3".to_owned()], vec!["a.test"]));
    has(&draft, 5, Fate::NotConverted, "(lines 5 to 7) has no address");
}

#[test]
fn a_parameter_with_no_undoes_that_of_default_server() {
    let draft = convert(
        "frontend f\n bind :1\n default_backend b\nbackend b\n default-server send-proxy check disabled ssl backup\n \
         server s 10.0.0.1:1 no-send-proxy no-check enabled no-ssl no-backup\n",
    );
    let target = target(&draft);
    assert_eq!((target.endpoints.len(), target.send_proxy, &target.health), (1, None, &None));
    assert!(draft.remarks.iter().all(|remark| remark.line < 5), "{:?}", draft.remarks);
}

#[test]
fn checks_by_tls_need_a_server_name() {
    let draft = convert(
        "frontend f\n bind :1\n default_backend b\nbackend b\n server s 10.0.0.1:1 check check-ssl check-sni a.test\n",
    );
    let health = target(&draft).health.as_ref().expect("checks");
    assert_eq!(health.tls.as_deref(), Some("a.test"));
    assert!(draft.remarks.iter().all(|remark| remark.line != 5), "{:?}", draft.remarks);
    let draft = convert(
        "frontend f\n bind :1\n default_backend b\nbackend b\n server s 10.0.0.1:1 check check-ssl\n",
    );
    assert_eq!(target(&draft).health.as_ref().expect("checks").tls, None);
    has(&draft, 5, Fate::Differs, "without a server name");
    // The checks of a route have the name of the route.
    let draft = convert(
        "frontend f\n bind :1\n tcp-request inspect-delay 5s\n use_backend b if { req.ssl_sni -i a.test }\n\
         backend b\n option ssl-hello-chk\n server s 10.0.0.1:1 check\n",
    );
    assert_eq!(draft.routes[0].target.health.as_ref().expect("checks").tls.as_deref(), Some("a.test"));
    assert!(draft.remarks.iter().all(|remark| remark.fate != Fate::NotConverted), "{:?}", draft.remarks);
}

#[test]
fn a_timeout_of_0_is_the_longest() {
    let draft =
        convert("defaults\n timeout client 2s\nlisten l\n bind :1\n timeout client 0\n timeout server 3s\n");
    assert_eq!(draft.timeouts, [("idle", "0s".to_owned())]);
}

#[test]
fn values_that_the_config_refuses_are_replaced_or_left_out() {
    let draft = convert(
        "defaults\n timeout connect 0\n timeout check 0\nfrontend f\n bind :1\n tcp-request inspect-delay 0\n default_backend b\n\
         backend b\n timeout connect 0\n balance random(2)\n server s 10.0.0.1:1 check inter 50ms\n",
    );
    let target = &draft.routes[0].target;
    let health = target.health.as_ref().expect("checks");
    assert_eq!((health.interval.as_deref(), &health.timeout), (Some("100ms"), &None));
    assert_eq!((&target.connect_timeout, target.policy), (&None, Some("random")));
    assert_eq!((draft.timeouts.len(), &draft.listeners[0].hello_timeout), (0, &None));
    has(&draft, 2, Fate::NotConverted, "timeouts.connect");
    has(&draft, 4, Fate::Differs, "hello.timeout");
    has(&draft, 9, Fate::NotConverted, "timeouts.connect");
    has(&draft, 11, Fate::Differs, "100ms");
}

#[test]
fn listeners_do_not_overlap_and_have_the_families_of_haproxy() {
    for (lines, wanted) in [
        ("bind *:1\n bind :::1", &[":1"][..]),
        ("bind *:1\n bind :::1 v6only", &[":1"]),
        ("bind :::1 v6only", &["[::]:1"]),
        ("bind 10.0.0.1:1\n bind 10.0.0.2:1\n bind *:1", &["0.0.0.0:1"]),
        ("bind 10.0.0.1:1\n bind [::1]:1", &["10.0.0.1:1", "[::1]:1"]),
        // Connections to 127.0.9.1 are for the second frontend alone.
        ("bind *:1\nfrontend g\n bind 127.0.9.1:1\n bind :2", &["127.0.9.1:1", "0.0.0.0:2"]),
        ("bind *:1\n bind 127.0.9.1:1 accept-proxy", &["127.0.9.1:1"]),
        ("bind *:1\nfrontend g\n bind 127.0.9.1:1 ssl", &[]),
        ("bind *:1\nfrontend g\n bind :::1 v6only", &["0.0.0.0:1", "[::]:1"]),
    ] {
        let draft = convert(&format!("frontend f\n {lines}\n"));
        assert_eq!(binds(&draft), wanted, "{lines}");
    }
    has(
        &convert("frontend f\n bind *:1\nfrontend g\n bind 127.0.9.1:1\n"),
        2,
        Fate::NotConverted,
        "it would also accept connections to 127.0.9.1:1, on which line 3 decides",
    );
}

#[test]
fn servers_below_a_faulty_first_line_belong_to_no_other_backend() {
    let draft = convert(
        "frontend f\n bind :1\n default_backend a\nbackend a\n server s 10.0.0.1:1\nbackend \"${B}\"\n server t 10.0.0.2:1\n",
    );
    assert_eq!(target(&draft).endpoints.len(), 1);
    has(&draft, 6, Fate::NotConverted, "(lines 6 to 7) is left out");
}

#[test]
fn a_server_that_is_a_frontend_of_the_file_is_left_out() {
    let draft = convert(
        "frontend f\n bind :443\n bind 10.0.0.9:8443\n default_backend all\n use_backend inner if { req_ssl_sni a.test }\n\
         frontend g\n bind 127.0.0.1:444 accept-proxy\n default_backend all\n\
         backend inner\n server s 127.0.0.1:444 send-proxy-v2\n\
         backend all\n server s 10.0.0.1:443\n server loop 10.0.0.9:8443\n server local localhost:443\n server near 127.0.0.1:445\n",
    );
    for line in [10, 13, 14] {
        has(&draft, line, Fate::NotConverted, "is an address of a frontend of this file");
    }
    let addresses: BTreeSet<&str> =
        draft.routes.iter().flat_map(|route| &route.target.endpoints).map(|one| &*one.address).collect();
    assert_eq!(addresses, BTreeSet::from(["10.0.0.1:443", "127.0.0.1:445"]));
    // A name that HAProxy sends to the second frontend must not reach another backend by the wide route.
    assert!(draft.routes.iter().any(|route| route.key == "a.test" && route.is_closed), "{:?}", draft.routes);
}

#[test]
fn a_section_without_a_name_is_left_out() {
    let draft = convert(
        "frontend\n bind :1\n default_backend b\nbackend\n server s 10.0.0.1:1\nfrontend f\n bind :2\n default_backend b\n\
         backend b\n server s 10.0.0.1:1\n",
    );
    has(
        &draft,
        1,
        Fate::NotConverted,
        "this frontend has no name, which HAProxy refuses; it (lines 1 to 3) is left out",
    );
    has(&draft, 4, Fate::NotConverted, "this backend has no name");
    assert_eq!(binds(&draft), ["0.0.0.0:2"]);
    assert!(draft.remarks.iter().all(|remark| [1, 4, 8].contains(&remark.line)), "{:#?}", draft.remarks);
}

#[test]
fn rules_by_source_and_protocol_and_maps_are_routes() {
    let draft = convert_with(
        "frontend f\n bind :1\n acl office src 10.0.0.0/8\n use_backend acme if { req.ssl_alpn acme-tls/1 }\n \
         use_backend admin if { req_ssl_sni -i admin.test } office\n use_backend %[req.ssl_sni,lower,map_end(hosts.map,web)]\n\
         backend acme\n server s 10.0.0.9:1\nbackend admin\n server s 10.0.0.1:1\nbackend shop\n server s 10.0.0.2:1\n\
         backend none\n tcp-request content reject\nbackend web\n server s 10.0.0.3:1\n",
        &|path| (path == "hosts.map").then(|| "# names\n.shop.test shop\n.no.test none\n".to_owned()),
    );
    assert_eq!(keys(&draft), ["admin.test", "*.shop.test", "*", "*.no.test"]);
    assert_eq!(draft.routes[0].sources.from, ["10.0.0.0/8"]);
    let acme = |(protocol, target): &(String, Target)| {
        (protocol.as_str(), &*target.endpoints[0].address) == ("acme-tls/1", "10.0.0.9:1")
    };
    let mut open = draft.routes.iter().filter(|route| !route.is_closed);
    assert!(open.all(|route| route.by_alpn.iter().all(acme) && route.by_alpn.len() == 1), "{draft:?}");
    has(&draft, 6, Fate::NotConverted, "admin.test: left out for the sources that this rule leads elsewhere");
    has(&draft, 6, Fate::NotNeeded, "refuses all connections");
    // The default does not take the names that are refused.
    has(&draft, 6, Fate::NotNeeded, "*.no.test: the route admits nobody");
}

#[test]
fn a_listen_section_is_a_tcp_listener_with_its_sources_and_limits() {
    let draft = convert(
        "listen pg\n bind :5432\n acl near src 10.0.0.0/8\n stick-table type ip size 1m expire 1m store conn_cur,conn_rate(10s)\n \
         tcp-request connection track-sc0 src\n tcp-request connection reject if !near\n \
         tcp-request connection reject if { sc0_conn_cur ge 21 }\n tcp-request connection reject if { sc0_conn_rate gt 100 }\n \
         server a 10.0.0.1:5432 maxconn 50\n server b 10.0.0.2:5432 backup\nlisten tls\n bind :443\n \
         tcp-request inspect-delay 5s\n server c 10.0.0.3:443\n",
    );
    let [pg, tls] = &draft.listeners[..] else { panic!("{:?}", draft.listeners) };
    let target = pg.target.as_ref().expect("a target");
    let of = |at: usize| (target.endpoints[at].backup, target.endpoints[at].connections_max);
    assert_eq!(
        (of(0), of(1), &pg.sources.from[..]),
        ((false, Some(50)), (true, None), &["10.0.0.0/8".to_owned()][..])
    );
    assert_eq!((draft.per_source.connections, draft.per_source.new_per_second), (Some(20), Some(10)));
    assert!(tls.target.is_none() && keys(&draft) == ["*", "-"], "{draft:?}");
    has(&draft, 9, Fate::Differs, "queues");
}

#[test]
fn two_frontends_with_one_name_have_routes_of_their_own() {
    let draft = convert(
        "frontend a\n bind :1\n use_backend x if { req_ssl_sni -i a.test }\nfrontend b\n bind :2\n \
         use_backend y if { req_ssl_sni -i a.test }\nbackend x\n server s 10.0.0.1:1\nbackend y\n server s 10.0.0.2:1\n",
    );
    let own: Vec<_> = draft.routes.iter().map(|route| (route.is_own, route.listeners.join(" "))).collect();
    assert_eq!(own, [(false, "a".to_owned()), (true, "b".to_owned())]);
    let yaml = draft.yaml("x");
    assert!(yaml.contains("    routes:\n      \"a.test\":  # line 6, backend y\n"), "{yaml}");
}

#[test]
fn what_a_line_could_refuse_is_left_out_with_a_comment_at_its_place() {
    let of = |rule: &str| {
        convert(&format!(
            "frontend f\n bind 10.0.0.1:1\n tcp-request inspect-delay 5s\n {rule}\n use_backend b if {{ req_ssl_sni -i a.test }}\n\
             backend b\n server s 10.0.0.2:1\n"
        ))
    };
    for (rule, part) in [
        ("tcp-request content reject if { req.ssl_sni -m reg ^[ab] }", ""),
        ("tcp-request content reject if { req.ssl_sni -m reg ^[ab] } { src 10.0.0.0/8 }", " for 10.0.0.0/8"),
        ("tcp-request content reject if { src -f missing.lst }", ""),
        ("tcp-response content reject", ""),
        ("filter spoe engine guard config guard.conf", ""),
        ("some-line of a later version", ""),
        ("tcp-request content reject if \"{ src $OFFICE }\"", ""),
    ] {
        let draft = of(rule);
        assert_eq!(keys(&draft).is_empty(), part.is_empty(), "{rule}");
        let comment =
            format!("  # line 5: a.test: left out{part}, because line 4 could refuse these clients");
        assert!(draft.yaml("x").contains(&comment), "{rule}: {}", draft.yaml("x"));
        has(&draft, 5, Fate::NotConverted, "a.test: left out");
        assert!(draft.remarks.iter().any(|one| (one.line, one.fate) == (4, Fate::NotConverted)), "{rule}");
    }
    for rule in ["option tcp-smart-accept", "log-tag a", "tcp-request content reject if { src 10.0.0.0/8 }"] {
        let draft = of(rule);
        assert_eq!(keys(&draft), ["a.test"], "{rule}");
        assert!(
            draft.remarks.iter().all(|one| one.fate != Fate::NotConverted),
            "{rule}: {:?}",
            draft.remarks
        );
    }
}

#[test]
fn rules_on_connections_judge_the_load_balancer_that_sends_a_header() {
    let draft = convert(
        "frontend f\n bind 10.0.0.1:1 accept-proxy\n bind 10.0.0.1:2\n tcp-request inspect-delay 5s\n \
         tcp-request connection reject if !{ src 10.9.0.0/16 }\n tcp-request content reject if { src 128.0.0.0/1 }\n \
         default_backend b\nbackend b\n server s 10.0.0.2:1\n",
    );
    let [direct, proxied] = &draft.listeners[..] else { panic!("{:?}", draft.listeners) };
    assert_eq!(
        (&direct.sources.from[..], &direct.proxy_from[..]),
        (&["10.9.0.0/16".to_owned()][..], &[][..])
    );
    assert_eq!(proxied.proxy_from, ["10.9.0.0/16"]);
    assert_eq!((proxied.proxy, &proxied.sources.except[0]), (true, &"128.0.0.0/1".to_owned()));
    // A limit of load balancers is none of clients.
    let draft = convert(
        "frontend f\n bind 10.0.0.1:1 accept-proxy\n stick-table type ip size 1m store conn_cur\n \
         tcp-request connection track-sc0 src\n tcp-request connection reject if { sc0_conn_cur gt 9 }\n default_backend b\n\
         backend b\n server s 10.0.0.2:1\n",
    );
    assert!(keys(&draft).is_empty());
    has(&draft, 5, Fate::NotConverted, "counts load balancers");
}

/// Returns the backends and the first addresses of the routes, by their keys.
fn routes(draft: &Draft) -> Vec<(&str, &str)> {
    draft
        .routes
        .iter()
        .map(|route| (route.key.as_str(), route.target.endpoints[0].address.as_str()))
        .collect()
}

#[test]
fn backends_that_are_computed_of_the_name_are_routes() {
    let of = |target: &str| {
        convert_with(
            &format!(
                "frontend f\n bind :1\n tcp-request inspect-delay 5s\n use_backend {target}\n use_backend never if {{ req_ssl_sni -i c.test }}\n \
                 default_backend rest\nbackend be-a.test-tls\n server s 10.0.0.1:1\nbackend never\n server s 10.0.0.8:1\n\
                 backend rest\n server s 10.0.0.9:1\n"
            ),
            &|path| (path == "hosts.map").then(|| "x.test a.test\ny.test lost\n".to_owned()),
        )
    };
    let draft = of("be-%[req.ssl_sni,lower]-tls");
    assert_eq!(routes(&draft), [("a.test", "10.0.0.1:1"), ("*", "10.0.0.9:1"), ("-", "10.0.0.9:1")]);
    // HAProxy looks at no rule below one that computes a backend, and takes the default if there is none of that name.
    has(&draft, 5, Fate::NotNeeded, "an earlier rule matches all of these names");
    let draft = of("be-%[req.ssl_sni,lower,map(hosts.map)]-tls");
    assert_eq!(routes(&draft), [("x.test", "10.0.0.1:1"), ("*", "10.0.0.9:1"), ("-", "10.0.0.9:1")]);
    let draft = of("be-%[req.ssl_sni,map(hosts.map,a.test)]-tls");
    assert_eq!(
        routes(&draft),
        [("x.test", "10.0.0.1:1"), ("y.test", "10.0.0.9:1"), ("*", "10.0.0.1:1"), ("-", "10.0.0.9:1")]
    );
    let draft = of("be-%[req.ssl_sni,map(gone.map)]-tls");
    has(&draft, 4, Fate::NotConverted, "gone.map cannot be read");
}

#[test]
fn the_value_of_a_map_is_looked_up_in_the_next() {
    let of = |maps: &str| {
        convert_with(
            &format!(
                "frontend f\n bind :1\n tcp-request inspect-delay 5s\n use_backend %[req.ssl_sni,lower,{maps}]\n default_backend rest\n\
                 backend one\n server s 10.0.0.1:1\nbackend two\n server s 10.0.0.2:1\nbackend rest\n server s 10.0.0.9:1\n"
            ),
            &|path| {
                let text = match path {
                    "sites.map" => "a.test shop\nb.test blog\nc.test gone\n",
                    "backends.map" => "shop one\nshop two\nblog two\nother two\n",
                    "faulty.map" => "shop\n",
                    _ => return None,
                };
                Some(text.to_owned())
            },
        )
    };
    let rest = [("*", "10.0.0.9:1"), ("-", "10.0.0.9:1")];
    let both = [("a.test", "10.0.0.1:1"), ("b.test", "10.0.0.2:1")];
    let draft = of("map(sites.map),map(backends.map)");
    assert_eq!(routes(&draft), [&both[..], &rest].concat());
    // The default of the first map is looked up too, that of the second is taken as it is.
    let draft = of("map(sites.map,other),map(backends.map,one)");
    let all = [&both[..], &[("c.test", "10.0.0.1:1"), ("*", "10.0.0.2:1"), ("-", "10.0.0.9:1")]].concat();
    assert_eq!(routes(&draft), all);
    for (maps, fault) in [
        ("map(sites.map),map(gone.map)", "gone.map cannot be read"),
        ("map(sites.map),map(faulty.map)", "faulty.map cannot be read"),
        ("map(sites.map),map_end(backends.map)", "is computed for each connection"),
        ("map(sites.map),upper", "is computed for each connection"),
        ("map(sites.map)map(backends.map)", "is computed for each connection"),
    ] {
        let draft = of(maps);
        has(&draft, 4, Fate::NotConverted, fault);
        assert!(!routes(&draft).iter().any(|(key, _)| *key == "a.test"), "{maps}");
    }
}

#[test]
fn servers_that_rules_choose_have_routes_of_their_own() {
    let draft = convert(
        "frontend f\n bind :1\n tcp-request inspect-delay 5s\n default_backend b\nbackend b\n use-server one if { req_ssl_sni -i a.test }\n \
         use-server odd if { path_beg /a }\n server one 10.0.0.1:1 weight 0 send-proxy\n server odd 10.0.0.2:1\n \
         server-template w 3 pods.test:443 resolvers dns\n server-template srv 1-2 _https._tcp.pods.test resolvers dns\n",
    );
    assert_eq!(routes(&draft), [("a.test", "10.0.0.1:1"), ("*", "10.0.0.2:1"), ("-", "10.0.0.2:1")]);
    assert_eq!(draft.routes[0].target.send_proxy, Some("v1"));
    let addresses: Vec<&str> =
        draft.routes[1].target.endpoints.iter().map(|endpoint| endpoint.address.as_str()).collect();
    assert_eq!(addresses, ["10.0.0.2:1", "pods.test:443", "_https._tcp.pods.test"]);
    assert!(draft.yaml("x").contains("{srv: \"_https._tcp.pods.test\"}"), "{}", draft.yaml("x"));
    has(&draft, 6, Fate::Differs, "HAProxy takes another one");
    has(&draft, 7, Fate::NotConverted, "its clients get one of all servers");
}

#[test]
fn protocols_have_targets_with_their_settings_and_bytes_that_are_no_tls_a_fallback() {
    let draft = convert(
        "frontend f\n bind :1\n tcp-request inspect-delay 5s\n use_backend ssh if { payload(0,4) -m bin 5353482d }\n \
         use_backend imap if { req.ssl_alpn -m sub imap }\n use_backend smtp if { req.ssl_alpn -m sub smtp }\n default_backend web\n\
         backend ssh\n server s 10.0.0.4:22\nbackend imap\n server s 10.0.0.1:1 send-proxy check maxconn 9\n\
         backend smtp\n server s 10.0.0.2:1\nbackend web\n server s 10.0.0.3:1 send-proxy-v2\n server t 10.0.0.5:1 backup\n",
    );
    let [imap, smtp] = &draft.routes[0].by_alpn[..] else { panic!("{:?}", draft.routes) };
    assert_eq!((imap.1.send_proxy, imap.1.health.is_some()), (Some("v1"), true));
    let yaml = draft.yaml("x");
    for part in [
        "      \"smtp\": \"10.0.0.2:1\"  # line 13\n",
        "      \"imap\":  # backend imap\n",
        "    fallback:  # backend web\n",
    ] {
        assert!(yaml.contains(part), "{part}: {yaml}");
    }
    assert_eq!(smtp.0, "smtp");
    has(&draft, 5, Fate::Differs, "takes the first rule, and `byAlpn` the client's first one of imap, smtp");
    has(&draft, 7, Fate::Differs, "do not speak TLS and match the rule in line 4");
    assert!(
        draft.remarks.iter().all(|one| !(one.line == 4 && one.fate == Fate::NotConverted)),
        "{:?}",
        draft.remarks
    );
}
