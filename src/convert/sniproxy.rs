//! Converts a configuration of sniproxy to a draft: listeners stay listeners, and the lines of their tables become routes.

use std::collections::BTreeMap;
use std::net::Ipv6Addr;

use super::blocks::{Directive, End, parse};
use super::draft::{Claim, Draft, Endpoint, Fate, Listener, Target};
use super::expressions;
use super::rules::{Lead, Rule, Then, When};
use super::site::Site;
use super::values::{bind_address, port_of, server_address};
use isthmus_model::address::Bind;

/// Converts a file.
pub(super) fn convert(text: &str) -> Draft {
    let (all, faults) = parse(text, End::Line);
    let mut draft = Draft::default();
    // Faults and directives that are not understood could be about every listener.
    let mut unread = Vec::new();
    for (line, fault) in faults {
        draft.remark(line, Fate::NotConverted, fault);
        unread.push(Rule::could_refuse(line));
    }
    let tables: BTreeMap<&str, &Directive> = all
        .iter()
        .filter(|one| one.name() == "table" && one.block.is_some())
        .map(|table| (table.words.get(1).map_or("", String::as_str), table))
        .collect();
    for directive in &all {
        let (line, quoted) = (directive.line, directive.quoted());
        match directive.name() {
            "listen" | "listener" | "table" => {}
            "user" | "username" | "group" | "groupname" | "pidfile" | "error_log" | "access_log" => {
                draft.remark(
                    line,
                    Fate::NotNeeded,
                    format!("{quoted}: the unit in examples/systemd sets the user; logs are in `telemetry`"),
                );
            }
            "resolver" => {
                draft.remark(
                    line,
                    Fate::NotConverted,
                    format!("{quoted}: set `dns.servers` if the system's name servers are not meant"),
                );
            }
            _ => {
                let text = format!("{quoted} has no counterpart, and could refuse clients");
                draft.remark(line, Fate::NotConverted, text);
                unread.push(Rule::could_refuse(line));
            }
        }
    }
    let listeners = all.iter().filter(|one| ["listen", "listener"].contains(&one.name()));
    let used: Vec<&str> =
        listeners.filter_map(|one| listener(one, &tables, unread.clone(), &mut draft)).collect();
    for (name, table) in tables {
        if !used.contains(&name) {
            draft.remark(
                table.line,
                Fate::NotConverted,
                format!("no listener that is converted uses the table {name:?}"),
            );
        }
    }
    draft
}

/// Converts a listener and its table; returns the name of the table.
fn listener<'a>(
    listener: &Directive,
    tables: &BTreeMap<&'a str, &'a Directive>,
    mut unread: Vec<Rule>,
    draft: &mut Draft,
) -> Option<&'a str> {
    let line = listener.line;
    // The port may be a word of its own.
    let address = &match &listener.words[..] {
        [_, address, port, ..] => format!("{address}:{port}"),
        words => words.get(1).cloned().unwrap_or_default(),
    };
    let Some(mut bind) =
        address.parse::<u16>().ok().map(|port| Bind::Any { port }).or_else(|| bind_address(address))
    else {
        draft.remark(
            line,
            Fate::NotConverted,
            format!("the address {address:?} is not a port, or an address with its port"),
        );
        return None;
    };
    draft.claims.push(Claim { owner: line, bind, proxy: false });
    let port = port_of(bind);
    let (mut table, mut fallback) = ("", None);
    for setting in listener.inner() {
        let (at, quoted) = (setting.line, setting.quoted());
        match (setting.name(), &setting.values()[..]) {
            ("proto" | "protocol", ["tls"]) => {}
            ("proto" | "protocol", _) => {
                draft.remark(
                    line,
                    Fate::NotConverted,
                    format!("{}: isthmus routes TLS only ({quoted})", listener.quoted()),
                );
                return None;
            }
            ("table", [name]) => table = name,
            ("fallback", [address, rest @ ..]) => {
                fallback = Some((at, (*address).to_owned(), rest.contains(&"proxy_protocol")))
            }
            ("ipv6_v6only", ["on" | "yes" | "true"]) => {
                bind = match bind {
                    Bind::Any { port } => Bind::Address((Ipv6Addr::UNSPECIFIED, port).into()),
                    one => one,
                };
            }
            ("bad_requests" | "access_log" | "reuseport" | "ipv6_v6only", _) => {
                draft.remark(at, Fate::NotNeeded, format!("{quoted} has no effect on where connections go"));
            }
            ("source", _) => draft.remark(at, Fate::NotConverted, format!("{quoted} has no counterpart")),
            _ => {
                let text = format!("{quoted} has no counterpart, and could refuse clients");
                draft.remark(at, Fate::NotConverted, text);
                unread.push(Rule::could_refuse(at));
            }
        }
    }
    let Some((name, entries)) = tables.get_key_value(table) else {
        draft.remark(line, Fate::NotConverted, format!("there is no table {table:?}"));
        return None;
    };
    let own = format!("port-{port}");
    let count = draft
        .listeners
        .iter()
        .filter(|known| known.name == own || known.name.starts_with(&format!("{own}-")))
        .count();
    let own = if count == 0 { own } else { format!("{own}-{}", count + 1) };
    let mut site =
        Site { line, listeners: vec![Listener::new((line, line), own, bind, false)], ..Site::default() };
    let mut lead_on = |line: usize, when: When, address: &str, proxy: bool, draft: &mut Draft| {
        let target = target(line, address, &port.to_string(), proxy, draft);
        site.choices.push(Rule::new(line, when, Then::To(site.leads.len())));
        site.leads.push(Lead { name: address.to_owned(), target, ..Lead::default() });
    };
    for entry in entries.inner() {
        let [pattern, address, rest @ ..] = &entry.words[..] else {
            draft.remark(entry.line, Fate::NotConverted, format!("{} has no address", entry.quoted()));
            unread.push(Rule::could_refuse(entry.line));
            continue;
        };
        let proxy = rest.iter().any(|word| word == "proxy_protocol");
        let expressions::Reading { patterns, lack } = expressions::read(&unescaped(pattern));
        lack.into_iter().for_each(|(fate, text)| draft.remark(entry.line, fate, text));
        lead_on(entry.line, When::Names(patterns), address, proxy, draft);
    }
    if let Some((at, address, proxy)) = &fallback {
        lead_on(*at, When::Always, address, *proxy, draft);
    }
    site.phases = vec![unread];
    site.place(draft);
    Some(*name)
}

fn target(line: usize, address: &str, port: &str, proxy: bool, draft: &mut Draft) -> Option<Target> {
    if address == "*" || address.starts_with("*:") {
        let text = format!(
            "{address}: isthmus connects to no name that a client chooses, because such a router is an open relay; write a route for each name"
        );
        draft.remark(line, Fate::NotConverted, text);
        return None;
    }
    let Some(found) = server_address(address, Some(port)) else {
        draft.remark(line, Fate::NotConverted, format!("{address:?} is not the address of one host"));
        return None;
    };
    let endpoint = Endpoint {
        line,
        name: address.to_owned(),
        address: found,
        weight: 1,
        backup: false,
        connections_max: None,
    };
    // sniproxy sends version 1.
    Some(Target {
        backend: address.to_owned(),
        endpoints: vec![endpoint],
        send_proxy: proxy.then_some("v1"),
        ..Target::default()
    })
}

/// Returns a pattern without the backslashes of sniproxy's own syntax.
fn unescaped(pattern: &str) -> String {
    let mut text = String::new();
    let mut signs = pattern.chars();
    while let Some(sign) = signs.next() {
        text.extend(if sign == '\\' { signs.next() } else { Some(sign) });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(draft: &Draft) -> Vec<(&str, &str)> {
        draft.routes.iter().map(|route| (route.key.as_str(), route.target.backend.as_str())).collect()
    }

    #[test]
    fn tables_are_routes_and_the_fallback_takes_the_rest() {
        let draft = convert(
            "user daemon\nlistener 0.0.0.0:443 {\n  proto tls\n  table hosts\n  fallback 10.0.0.9:443\n}\nlisten 80 {\n  proto http\n}\n\
             table hosts {\n  ^a\\\\.test$ 10.0.0.1:8443\n  .*\\\\.b\\\\.test$ 10.0.0.2 proxy_protocol\n  c.test [2001:db8::1]:443\n  \
             .*\\\\.d\\\\.test *:443\n  ^x[0-9]$ 10.0.0.3\n}\n",
        );
        assert_eq!(
            keys(&draft),
            [
                ("a.test", "10.0.0.1:8443"),
                ("*.b.test", "10.0.0.2"),
                ("c.test", "[2001:db8::1]:443"),
                ("*.c.test", "[2001:db8::1]:443"),
                ("-", "10.0.0.9:443")
            ]
        );
        let [listener] = &draft.listeners[..] else { panic!("one listener") };
        let fallback = listener.fallback.as_ref().expect("a fallback");
        assert_eq!((fallback.endpoints[0].line, &*fallback.endpoints[0].address), (5, "10.0.0.9:443"));
        assert_eq!(draft.routes[1].target.endpoints[0].address, "10.0.0.2:443");
        assert_eq!(
            (draft.routes[1].target.send_proxy, draft.routes[0].target.send_proxy),
            (Some("v1"), None)
        );
        let has = |line: usize, fate: Fate, part: &str| {
            let found = draft
                .remarks
                .iter()
                .any(|one| (one.line, one.fate) == (line, fate) && one.text.contains(part));
            assert!(found, "line {line} has no {part:?}: {:#?}", draft.remarks);
        };
        has(7, Fate::NotConverted, "TLS only");
        has(13, Fate::Differs, "none of the routes'");
        has(14, Fate::NotConverted, "open relay");
        has(15, Fate::NotConverted, "regular expression");
        has(5, Fate::NotConverted, "*: left out");
    }
}
