//! Tests that the conversion admits no client that nginx refuses, and leads none elsewhere, without a word.

use super::convert_with;
use crate::draft::{Draft, Fate};

/// Converts maps for the variable `$up`.
fn stream(maps: &str) -> Draft {
    let upstream = "upstream web { server 10.0.0.1:443; }";
    let server = "server { listen 443; ssl_preread on; proxy_pass $up; }";
    convert_with(&format!("stream {{\n{maps}\n{upstream}\n{server}\n}}\n"), &|_| None)
}

/// Returns the keys of routes, those that admit nobody with a `!` before them.
fn routes(draft: &Draft) -> String {
    let of = |route: &crate::draft::Route| format!("{}{}", if route.is_closed { "!" } else { "" }, route.key);
    draft.routes.iter().map(of).collect::<Vec<_>>().join(" ")
}

fn is_lost(draft: &Draft) -> bool {
    draft.remarks.iter().any(|remark| remark.fate == Fate::NotConverted)
}

#[test]
fn what_cannot_be_said_is_left_out_aloud() {
    for (key, wanted) in [
        ("~^(?!admin\\.a\\.test$|secret\\.a\\.test$).*$", ""),
        ("~~^a\\.test$", ""),
        ("~^(api|[a-z]+-int)\\.a\\.test$", "api.a.test"),
    ] {
        let draft = stream(&format!("map $ssl_preread_server_name $up {{ {key} web; }}"));
        assert_eq!((routes(&draft).as_str(), is_lost(&draft)), (wanted, true), "{key}");
    }
    for key in ["h2", "~^h2$", "~^h2"] {
        let draft = stream(&format!("map $ssl_preread_alpn_protocols $up {{ {key} nowhere; default web; }}"));
        assert_eq!((routes(&draft).as_str(), is_lost(&draft)), ("", true), "{key}");
    }
}

#[test]
fn values_of_maps_have_no_letter_case() {
    let draft = stream(
        "map $ssl_preread_server_name $kind { evil.test Deny; default ok; }\n\
         map $kind $up { deny nowhere; default web; }",
    );
    assert_eq!((routes(&draft).as_str(), is_lost(&draft)), ("* - !evil.test", false));
    let draft = stream(
        "geo $near { default No; 10.0.0.0/8 YES; }\nmap $near $up { yes web; }\n\
         map $ssl_preread_server_name $name { default $up; }",
    );
    assert!(draft.remarks.iter().all(|remark| remark.line != 3 || remark.fate != Fate::NotConverted));
    // With `hostnames`, a key has many values.
    let draft = stream(
        "map $ssl_preread_server_name $kind { evil.test a.deny; default ok; }\n\
         map $kind $up { hostnames; *.deny nowhere; default web; }",
    );
    assert_eq!((routes(&draft).as_str(), is_lost(&draft)), ("", true));
}

#[test]
fn an_expression_with_capitals_differs() {
    for (key, wanted) in [("~^Admin\\.test$", true), ("~*^Admin\\.test$", false), ("~^admin\\.test$", false)]
    {
        let draft = stream(&format!("map $ssl_preread_server_name $up {{ {key} web; }}"));
        let differs = draft.remarks.iter().any(|one| one.fate == Fate::Differs && one.text.contains("case"));
        assert_eq!((routes(&draft).as_str(), differs), ("admin.test", wanted), "{key}");
    }
}

#[test]
fn variables_end_where_their_names_do() {
    for value in ["${kind}_tls", "\"${kind}_tls\"", "$whole"] {
        let draft = stream(&format!(
            "map $ssl_preread_server_name $kind {{ a.test web; }}\nmap \"\" $kind_tls {{ default web; }}\n\
             map \"\" $whole {{ default ${{kind}}_tls; }}\n\
             map $ssl_preread_server_name $up {{ default {value}; }}\nupstream web_tls {{ server 10.0.0.2:443; }}"
        ));
        let leads: Vec<&str> = draft.routes.iter().map(|route| route.target.backend.as_str()).collect();
        assert_eq!((routes(&draft).as_str(), &leads[..]), ("a.test", &["web_tls"][..]), "{value}");
    }
    let draft = stream(
        "map $ssl_preread_server_name $server_portal { default 443; }\n\
         map $ssl_preread_server_name $up { default 10.0.0.3:$server_portal; }",
    );
    assert_eq!(draft.routes[0].target.backend, "10.0.0.3:443");
}

#[test]
fn maps_within_one_another_make_a_bounded_number_of_rules() {
    let entries = |of: &str| {
        let all = (0..8).map(|at| format!("n{at}.test {of};"));
        all.collect::<Vec<_>>().join(" ")
    };
    let mut maps = format!("map $ssl_preread_server_name $m7 {{ {} default web; }}\n", entries("other"));
    for at in (0..7).rev() {
        let name = if at == 0 { "up".to_owned() } else { format!("m{at}") };
        maps +=
            &format!("map $ssl_preread_server_name ${name} {{ {} }}\n", entries(&format!("$m{}", at + 1)));
    }
    let draft = stream(&maps);
    let is_told = |part: &str| draft.remarks.iter().filter(|one| one.text.contains(part)).count();
    assert_eq!(is_told("values in all"), 1, "{:?}", draft.remarks);
    assert_eq!(routes(&draft), "");
}
