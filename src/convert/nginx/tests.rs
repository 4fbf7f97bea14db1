//! Tests of the conversion of nginx configs.

use super::*;
use crate::draft::Target;

fn keys(draft: &Draft) -> Vec<(&str, &str)> {
    draft.routes.iter().map(|route| (route.key.as_str(), route.target.backend.as_str())).collect()
}

fn address(target: &Target) -> &str {
    &target.endpoints[0].address
}

fn convert(text: &str) -> Draft {
    convert_with(text, &|_| None)
}

fn has(draft: &Draft, line: usize, fate: Fate, part: &str) {
    let found =
        draft.remarks.iter().any(|one| (one.line, one.fate) == (line, fate) && one.text.contains(part));
    assert!(found, "line {line} has no {fate:?} with {part:?}: {:#?}", draft.remarks);
}

const UPSTREAMS: &str = "upstream a { server 10.0.0.1:443 weight=3 max_conns=50; server 10.0.0.2:443 backup; }\n\
                         upstream b { least_conn; server b.test:443; }\n";

fn stream(map: &str) -> Draft {
    convert(&format!(
        "stream {{\n{map}\n{UPSTREAMS}server {{ listen 443; listen [::]:443; ssl_preread on; proxy_pass $up; proxy_protocol on; }}\n}}\n"
    ))
}

#[test]
fn a_map_by_name_is_routes() {
    let draft =
        stream("map $ssl_preread_server_name $up { hostnames; .x.test a; *.y.test b; z.test b; default a; }");
    assert_eq!(
        keys(&draft),
        [("x.test", "a"), ("z.test", "b"), ("*.x.test", "a"), ("*.y.test", "b"), ("*", "a"), ("-", "a")]
    );
    let target = &draft.routes[0].target;
    let of = |at: usize| {
        (target.endpoints[at].weight, target.endpoints[at].backup, target.endpoints[at].connections_max)
    };
    assert_eq!((of(0), of(1)), ((3, false, Some(50)), (1, true, None)));
    assert_eq!((target.send_proxy, draft.routes[1].target.policy), (Some("v1"), Some("leastRequest")));
    let binds: Vec<String> = draft.listeners.iter().map(|listener| listener.bind.to_string()).collect();
    assert_eq!(binds, [":443"]);
    assert_eq!(draft.listeners[0].fallback.as_ref(), Some(target));
}

#[test]
fn a_name_that_leads_nowhere_reaches_no_wider_route() {
    let draft = stream(
        "map $ssl_preread_server_name $up { hostnames; no.x.test deny; *.x.test a; *.y.test b; ~^q[0-9] a; }",
    );
    assert_eq!(keys(&draft), [("*.x.test", "a"), ("*.y.test", "b"), ("no.x.test", "")]);
    assert!(draft.routes[2].is_closed);
    has(&draft, 2, Fate::NotNeeded, "no.x.test: the route admits nobody");
    has(&draft, 2, Fate::NotConverted, "a regular expression has no counterpart");
}

#[test]
fn expressions_that_mean_names_are_names() {
    for (key, wanted) in [
        ("~^a\\.test$", "a.test"),
        ("~*^(.+\\.)?a\\.test$", "a.test *.a.test"),
        ("~\\.a\\.test$", "*.a.test"),
        ("~^.+\\.a\\.test$", "*.a.test"),
        ("~^(a|b)\\.test$", "a.test b.test"),
        ("~^(?:www\\.)?a\\.test$", "a.test www.a.test"),
        ("~a\\.test$", "a.test *.a.test"),
        ("~^a.test$", "a.test"),
        ("~^a[0-9]\\.test$", ""),
        ("~~^a\\.test$", ""),
    ] {
        let draft = stream(&format!("map $ssl_preread_server_name $up {{ {key} a; }}"));
        let found: Vec<&str> = keys(&draft).into_iter().map(|(key, _)| key).collect();
        assert_eq!(found.join(" "), wanted, "{key}");
    }
}

#[test]
fn protocols_sources_parts_and_fallbacks_have_counterparts() {
    let draft = stream(
        "map $ssl_preread_alpn_protocols $up { ~\\bacme-tls/1\\b 10.0.0.9:443; default $name; }\n\
         map $ssl_preread_server_name $name { a.test a; }",
    );
    let [(protocol, target)] = &draft.routes[0].by_alpn[..] else { panic!("{:?}", draft.routes) };
    assert_eq!(
        (protocol.as_str(), target.send_proxy, address(target)),
        ("acme-tls/1", Some("v1"), "10.0.0.9:443")
    );
    let draft = stream(
        "map $ssl_preread_protocol $up { \"\" 127.0.0.1:22; default $name; }\nmap $ssl_preread_server_name $name { a.test a; }",
    );
    assert_eq!(draft.listeners[0].fallback.as_ref().map(address), Some("127.0.0.1:22"));
    assert_eq!(keys(&draft), [("a.test", "a")]);
    let draft = stream(
        "geo $office { default 0; 10.0.0.0/8 1; 192.0.2.7 1; }\n\
         map \"$office:$ssl_preread_server_name\" $up { \"1:a.test\" a; }",
    );
    assert_eq!(draft.listeners[0].sources.from, ["10.0.0.0/8", "192.0.2.7/32"]);
    let draft = stream(
        "split_clients \"$remote_addr\" $part { 25% 10.0.0.7:443; * b; }\nmap $ssl_preread_server_name $up { a.test $part; }",
    );
    let weights: Vec<u32> = draft.routes[0].target.endpoints.iter().map(|one| one.weight).collect();
    assert_eq!((weights, draft.routes[0].target.policy), (vec![2500, 7500], Some("sourceHash")));
}

#[test]
fn a_server_with_one_target_is_a_tcp_listener() {
    let draft = convert(
        "stream {\n limit_conn_zone $binary_remote_addr zone=addr:10m;\n server {\n  listen 5432 proxy_protocol;\n  set_real_ip_from 10.0.0.1;\n  \
         allow 10.0.0.0/8;\n  deny all;\n  limit_conn addr 7;\n  proxy_timeout 1h;\n  proxy_pass db.test:5432;\n }\n \
         server {\n  listen 443 ssl;\n  proxy_pass 10.0.0.1:1;\n }\n}\n",
    );
    let [listener] = &draft.listeners[..] else { panic!("{:?}", draft.listeners) };
    assert_eq!(
        (&listener.sources.from, &listener.proxy_from),
        (&vec!["10.0.0.0/8".to_owned()], &vec!["10.0.0.1/32".to_owned()])
    );
    assert_eq!(listener.target.as_ref().expect("a target").endpoints[0].address, "db.test:5432");
    assert_eq!((draft.per_source.connections, &draft.timeouts[0]), (Some(7), &("idle", "3600s".to_owned())));
    has(&draft, 13, Fate::NotConverted, "ends no TLS");
}

#[test]
fn no_directive_is_lost() {
    let text = include_str!("../../../tests/corpus/nginx/everything.conf");
    let draft = convert(text);
    let yaml = draft.yaml("everything.conf");
    let (all, _) = parse(text, End::Semicolon);
    // Directives whose values are in the config without their lines.
    let values = [
        "stream",
        "server",
        "upstream",
        "map",
        "geo",
        "split_clients",
        "listen",
        "proxy_pass",
        "proxy_protocol",
        "hostnames",
        "default",
        "*",
        "allow",
        "deny",
        "set_real_ip_from",
        "proxy_connect_timeout",
        "preread_timeout",
        "proxy_timeout",
        "least_conn",
        "random",
        "hash",
        "limit_conn",
        "limit_conn_zone",
    ];
    fn each<'d>(all: &'d [Directive], out: &mut Vec<&'d Directive>) {
        for directive in all {
            out.push(directive);
            each(directive.inner(), out);
        }
    }
    let mut directives = Vec::new();
    each(&all, &mut directives);
    for directive in directives {
        let is_told = draft.remarks.iter().any(|remark| remark.line == directive.line)
            || yaml.contains(&format!("# line {}", directive.line))
            || values.contains(&directive.name())
            || directive.name().contains('/');
        assert!(is_told, "line {} is lost: {:?}\n{yaml}", directive.line, directive.words);
    }
}

#[test]
fn a_fallback_admits_no_source_that_nginx_refuses() {
    let draft = stream(
        "geo $near { default nowhere; 10.0.0.0/8 127.0.0.1:22; }\n\
         map $ssl_preread_protocol $up { \"\" $near; default $name; }\nmap $ssl_preread_server_name $name { a.test a; }",
    );
    assert_eq!((&draft.listeners[0].fallback, keys(&draft)), (&None, vec![("a.test", "a")]));
    has(&draft, 2, Fate::NotConverted, "the listener has no `fallback`");
}

#[test]
fn files_that_are_included_are_read_with_the_line_of_their_directive() {
    let read = |path: &str| match path {
        "/etc/nginx/streams/*.conf" => {
            Some("map $ssl_preread_server_name $up {\n  include names.map;\n}\n".to_owned())
        }
        "names.map" => Some("a.test a;\nb.test b;\n".to_owned()),
        "deny.conf" => Some("deny 10.0.0.0/8;\nodd\n".to_owned()),
        _ => None,
    };
    let of = |line: &str| {
        let server = format!("server {{ listen 443; ssl_preread on; {line} proxy_pass $up; }}");
        convert_with(
            &format!("stream {{\ninclude /etc/nginx/streams/*.conf;\n{UPSTREAMS}{server}\n}}\n"),
            &read,
        )
    };
    let draft = of("");
    assert_eq!(keys(&draft), [("a.test", "a"), ("b.test", "b")]);
    assert_eq!(draft.routes[0].line, 2);
    let draft = of("include deny.conf;");
    has(&draft, 5, Fate::NotConverted, "deny.conf:2: `odd` has no end");
    let draft = of("include gone.conf;");
    assert!(draft.routes.is_empty());
    has(&draft, 5, Fate::NotConverted, "`include gone.conf`: the file cannot be read");
}

#[test]
fn values_of_maps_are_parts_of_addresses_and_keys_of_maps() {
    let of = |maps: &str, pass: &str| {
        convert(&format!(
            "stream {{\n{maps}\n{UPSTREAMS}server {{ listen 443; ssl_preread on; proxy_pass {pass}; }}\n}}\n"
        ))
    };
    let draft = of(
        "map $ssl_preread_alpn_protocols $port { ~\\bacme-tls/1\\b 10443; default 443; }",
        "127.0.0.1:$port",
    );
    assert_eq!(keys(&draft), [("*", "127.0.0.1:443"), ("-", "127.0.0.1:443")]);
    assert_eq!(address(&draft.routes[0].by_alpn[0].1), "127.0.0.1:10443");
    let draft =
        of("map $ssl_preread_server_name $host { a.test 10.0.0.1; b.test 10.0.0.2; }", "$host:$server_port");
    assert_eq!(keys(&draft), [("a.test", "10.0.0.1:443"), ("b.test", "10.0.0.2:443")]);
    let draft = of(
        "map $ssl_preread_server_name $kind { hostnames; *.a.test own; a.test own; default other; }\nmap $kind $up { own a; other b; }",
        "$up",
    );
    assert_eq!(keys(&draft), [("a.test", "a"), ("*.a.test", "a"), ("*", "b"), ("-", "b")]);
    let draft =
        of("map $ssl_preread_server_name $up { a.test a; default $ssl_preread_server_name:443; }", "$up");
    assert_eq!(keys(&draft), [("a.test", "a")]);
    has(&draft, 2, Fate::NotConverted, "open relay");
}
