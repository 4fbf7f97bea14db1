//! Tests that the conversion admits no client that HAProxy refuses, and leads none elsewhere, without a word.

use super::convert_with;
use crate::draft::{Draft, Fate};

const BACKENDS: &str = "backend web\n server s 10.0.0.1:1\nbackend other\n server s 10.0.0.2:1\n";

fn of_file(path: &str) -> Option<String> {
    match path {
        "h.map" => Some("evil.test Deny\n".to_owned()),
        "hosts.map" => Some("a.test tenant\n".to_owned()),
        _ => None,
    }
}

fn convert(text: &str) -> Draft {
    let mut draft = convert_with(text, &of_file);
    draft.settle();
    draft
}

/// Converts the lines of a frontend that reads the hello.
fn frontend(lines: &str) -> Draft {
    convert(&format!(
        "frontend f\n mode tcp\n bind :443\n tcp-request inspect-delay 5s\n {lines}\n{BACKENDS}"
    ))
}

/// Returns the keys of routes, those that admit nobody with a `!` before them.
fn routes(draft: &Draft) -> String {
    let of = |route: &crate::draft::Route| format!("{}{}", if route.is_closed { "!" } else { "" }, route.key);
    draft.routes.iter().map(of).collect::<Vec<_>>().join(" ")
}

fn is_lost(draft: &Draft) -> bool {
    // Not all tests have a rule that leads to the second backend.
    let is_about_lines = |text: &str| !text.contains("no converted rule leads");
    draft.remarks.iter().any(|one| one.fate == Fate::NotConverted && is_about_lines(&one.text))
}

#[test]
fn what_cannot_be_said_is_left_out_aloud() {
    for (lines, wanted) in [
        // Marks of groups.
        ("use_backend web if { req.ssl_sni -m reg -i ^(?!admin\\.a\\.test|secret\\.a\\.test).* }", ""),
        // Alternatives that only look as if no name matched them. A client without a name matches no name.
        ("reject ^[[:alnum:]-]+\\.evil\\.test$|^evil\\.test$", "-"),
        ("reject (?i:admin|root)\\.evil\\.test$", "-"),
        ("reject ^a\\.test:?$|^b\\.test$", "-"),
        ("reject ^a\\.test\\/?$|^b\\.test$", "-"),
        ("reject ^[^/]+\\.a\\.test$|^a\\.test$", "-"),
        // Signs that only look as if they were alternatives.
        ("reject ^a\\|b\\.test$", "-"),
        ("reject ^([^|x|]|b)\\.test$", "-"),
    ] {
        let rule = match lines.strip_prefix("reject ") {
            Some(expression) => format!(
                "tcp-request content reject if {{ req.ssl_sni -m reg -i {expression} }}\n default_backend web"
            ),
            None => lines.to_owned(),
        };
        let draft = frontend(&rule);
        assert_eq!((routes(&draft).as_str(), is_lost(&draft)), (wanted, true), "{lines}");
    }
    for (condition, wanted) in [
        // Expressions after `lower`.
        ("req.ssl_sni,lower -m reg ^\\S+\\.evil\\.test$", "-"),
        ("req.ssl_sni,lower -m reg ^[^A-Z]+$", "-"),
        ("req.ssl_sni,lower -m reg (?i)EVIL", "-"),
        ("req.ssl_sni,lower -m reg ^EVIL\\.test$", "-"),
        // Bytes without `-m` are hexadecimal.
        ("payload(0,1) 16", ""),
        // Converters after a map.
        ("req.ssl_sni,lower,map(hosts.map,none),map(tenants.map,web) web", ""),
        // Protocols as a whole list.
        ("req.ssl_alpn h2", ""),
    ] {
        let draft =
            frontend(&format!("tcp-request content reject if {{ {condition} }}\n default_backend web"));
        assert_eq!((routes(&draft).as_str(), is_lost(&draft)), (wanted, true), "{condition}");
    }
    // The values of a map are compared as `-i` says.
    for (flag, wanted) in [("-i ", "* - !evil.test"), ("", "* -")] {
        let draft = frontend(&format!(
            "tcp-request content reject if {{ req.ssl_sni,lower,map(h.map) -m str {flag}deny }}\n default_backend web"
        ));
        assert_eq!((routes(&draft).as_str(), is_lost(&draft)), (wanted, false), "{flag}");
    }
}

#[test]
fn an_expression_that_is_read_in_part_is_lost() {
    let draft = frontend(
        "use_backend other if { req.ssl_sni -m reg -i ^(api|[a-z]+-int)\\.a\\.test$ }\n default_backend web",
    );
    assert_eq!((routes(&draft).as_str(), is_lost(&draft)), ("api.a.test * -", true));
    let draft = frontend("use_backend other if { req.ssl_sni -m reg -i ^a.b\\.test$ }\n default_backend web");
    assert!(!is_lost(&draft), "{:?}", draft.remarks);
}

#[test]
fn an_optional_last_dot_takes_no_wide_route_away() {
    let draft = frontend(
        "tcp-request content reject if { req.ssl_sni -m reg -i ^bad\\.test\\.?$ }\n default_backend web",
    );
    assert_eq!((routes(&draft).as_str(), is_lost(&draft)), ("* - !bad.test", false), "{:?}", draft.remarks);
}

#[test]
fn a_name_within_a_refused_suffix_has_its_route() {
    let draft = frontend(
        "tcp-request content accept if { req.ssl_sni -i a.b.test }\n \
         tcp-request content reject if { req.ssl_sni -i -m end .b.test }\n default_backend web",
    );
    assert_eq!(routes(&draft), "a.b.test * - !*.b.test");
}

#[test]
fn a_backend_may_choose_servers_by_the_name_alone() {
    let draft = convert(
        "frontend f\n mode tcp\n bind :443\n default_backend b\nbackend b\n tcp-request inspect-delay 5s\n \
         use-server www if { req_ssl_sni -i www.example.com }\n server www 10.0.0.1:1\n server s 10.0.0.2:1\n",
    );
    assert_eq!(routes(&draft), "www.example.com * -");
    assert_eq!(draft.routes[0].target.endpoints.len(), 1);
}

#[test]
fn the_clients_of_a_server_that_is_left_out_reach_no_other() {
    let of = |server: &str, name: &str| {
        frontend(&format!(
            "default_backend b\nbackend b\n use-server {name} if {{ req.ssl_sni -i a.test }}\n {server}\n server s 10.0.0.2:1"
        ))
    };
    for (server, name) in [
        ("server-template w 3 w.test:443 resolvers r", "w1"),
        ("server s1 10.0.0.1:1", "%[req.ssl_sni]"),
        ("server s1 10.0.0.1:1 ssl verify none", "s1"),
        ("server s1 /run/s1.sock", "s1"),
    ] {
        let draft = of(server, name);
        assert_eq!((routes(&draft).as_str(), is_lost(&draft)), ("* - !a.test", true), "{server}");
    }
    // HAProxy passes over a server that is down.
    assert_eq!(routes(&of("server s1 10.0.0.1:1 disabled", "s1")), "* -");
}

#[test]
fn rules_by_one_large_map_copy_none_of_its_lines() {
    let names = 2_000;
    let map: String = (0..names).map(|at| format!("n{at}.test b{}\n", at % 10)).collect();
    let rules = |of: &dyn Fn(usize) -> String| (0..10).map(of).collect::<String>();
    let text = format!(
        "frontend f\n mode tcp\n bind :443\n tcp-request inspect-delay 5s\n{}{}",
        rules(&|at| format!(" use_backend b{at} if {{ req.ssl_sni,lower,map(large.map) -m str b{at} }}\n")),
        rules(&|at| format!("backend b{at}\n mode tcp\n server s 10.0.0.{at}:1\n")),
    );
    let draft = convert_with(&text, &|_| Some(map.clone()));
    assert_eq!((draft.routes.len(), is_lost(&draft)), (names, false));
}

#[test]
fn rules_beyond_the_largest_number_refuse_their_clients() {
    let map: String = (0..30).map(|at| format!("n{at}.test web\n")).collect();
    let line = " use_backend %[req.ssl_sni,lower,map(large.map)] if { src 10.0.0.1 }\n";
    let count = crate::rules::RULES_MAX / 30 + 2;
    let text = format!(
        "frontend f\n mode tcp\n bind :443\n tcp-request inspect-delay 5s\n{} default_backend web\n{BACKENDS}",
        line.repeat(count)
    );
    let draft = convert_with(&text, &|_| Some(map.clone()));
    let told = draft.remarks.iter().filter(|one| one.text.contains("rules in all")).count();
    assert_eq!((told, &draft.listeners[0].sources.from), (1, &vec!["10.0.0.1/32".to_owned()]));
}

#[test]
fn a_map_has_one_remark_of_each_kind() {
    let map: String = (0..50).map(|at| format!("n{at}.test web\n")).collect();
    let text = format!(
        "frontend f\n mode tcp\n bind :443\n tcp-request inspect-delay 5s\n \
         use_backend %[req.ssl_sni,map_dom(large.map)]\n{BACKENDS}"
    );
    let draft = convert_with(&text, &|_| Some(map.clone()));
    let differs: Vec<&str> =
        draft.remarks.iter().filter(|one| one.fate == Fate::Differs).map(|one| one.text.as_str()).collect();
    assert_eq!(differs.len(), 3, "{differs:?}");
    assert!(differs[1].contains("n0.test, n1.test, n2.test, n3.test, n4.test and 45 more"), "{differs:?}");
}
