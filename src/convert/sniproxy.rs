//! Converts a configuration of sniproxy to a draft: listeners stay listeners, and the lines of their tables become routes.

use std::collections::BTreeMap;

use super::blocks::{Directive, End, parse};
use super::draft::{Draft, Endpoint, Fate, Listener, Route, Target};
use super::rules::{Names, without_groups};
use super::values::{bind_address, port_of, server_address};
use isthmus_document::scalar::host_name;
use isthmus_model::address::Bind;

/// Converts a file.
pub(super) fn convert(text: &str) -> Draft {
    let (all, faults) = parse(text, End::Line);
    let mut draft = Draft::default();
    for (line, fault) in faults {
        draft.remark(line, Fate::NotConverted, fault);
    }
    let tables: BTreeMap<&str, &Directive> = all
        .iter()
        .filter(|one| one.name() == "table" && one.block.is_some())
        .map(|table| (table.words.get(1).map_or("", String::as_str), table))
        .collect();
    let mut used = Vec::new();
    for directive in &all {
        let (line, quoted) = (directive.line, directive.quoted());
        match directive.name() {
            "listen" | "listener" => used.extend(listener(directive, &tables, &mut draft)),
            "table" => {}
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
            _ => draft.remark(line, Fate::NotConverted, format!("{quoted} has no counterpart")),
        }
    }
    for (name, table) in tables {
        if !used.contains(&name) {
            draft.remark(
                table.line,
                Fate::NotConverted,
                format!("no listener that is converted uses the table {name:?}"),
            );
        }
    }
    draft.remarks.sort();
    draft.remarks.dedup();
    draft
}

/// Converts a listener and its table; returns the name of the table.
fn listener<'a>(
    listener: &Directive,
    tables: &BTreeMap<&'a str, &'a Directive>,
    draft: &mut Draft,
) -> Option<&'a str> {
    let line = listener.line;
    let address = listener.words.get(1).map_or("", String::as_str);
    let Some(bind) =
        address.parse::<u16>().ok().map(|port| Bind::Any { port }).or_else(|| bind_address(address))
    else {
        draft.remark(
            line,
            Fate::NotConverted,
            format!("the address {address:?} is not a port, or an address with its port"),
        );
        return None;
    };
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
            ("bad_requests" | "access_log" | "reuseport" | "ipv6_v6only", _) => {
                draft.remark(at, Fate::NotNeeded, format!("{quoted} has no effect on where connections go"));
            }
            _ => draft.remark(at, Fate::NotConverted, format!("{quoted} has no counterpart")),
        }
    }
    let Some((name, entries)) = tables.get_key_value(table) else {
        draft.remark(line, Fate::NotConverted, format!("there is no table {table:?}"));
        return None;
    };
    let own = format!("port-{}", port_of(bind));
    let count = draft
        .listeners
        .iter()
        .filter(|known| known.name == own || known.name.starts_with(&format!("{own}-")))
        .count();
    let own = if count == 0 { own } else { format!("{own}-{}", count + 1) };
    draft.listeners.push(Listener::new(line, own.clone(), bind, false));
    let is_free = draft.routes.is_empty();
    let mut taken: Vec<(usize, Names)> = Vec::new();
    let mut refused: Vec<(usize, Names)> = Vec::new();
    let port = port_of(bind).to_string();
    let mut add = |line: usize, names: Names, address: &str, proxy: bool, draft: &mut Draft| {
        let names = names.left_by(taken.iter().map(|(_, names)| names));
        if let Some((earlier, _)) = taken.iter().find(|(_, earlier)| earlier.cover(&names)) {
            let text = format!(
                "{}: an earlier pattern, in line {earlier}, matches all of these names",
                names.keys().join(" and ")
            );
            return draft.remark(line, Fate::NotNeeded, text);
        }
        taken.push((line, names.clone()));
        let Some(target) = target(line, address, &port, proxy, draft) else {
            return refused.push((line, names));
        };
        let is_safe = |key: &String| {
            key == "-"
                || matches!(names, Names::Exact(_))
                || !refused.iter().any(|(_, other)| names.cover(other))
        };
        let (keys, left): (Vec<String>, Vec<String>) = names.keys().into_iter().partition(is_safe);
        if !left.is_empty() {
            let text = format!(
                "{}: left out, because it would also take names whose pattern is not converted",
                left.join(" and ")
            );
            draft.remark(line, Fate::NotConverted, text);
        }
        for key in keys {
            let route = Route { listeners: vec![own.clone()], ..Route::new(line, key, target.clone()) };
            draft.place(route, is_free);
        }
    };
    for entry in entries.inner() {
        let [pattern, address, rest @ ..] = &entry.words[..] else {
            draft.remark(entry.line, Fate::NotConverted, format!("{} has no address", entry.quoted()));
            continue;
        };
        let proxy = rest.iter().any(|word| word == "proxy_protocol");
        match names(pattern) {
            Some((names, is_wider)) => {
                if is_wider {
                    let text = format!(
                        "{pattern}: sniproxy matches a pattern anywhere in a name, and `.` as any sign; the route has the name itself"
                    );
                    draft.remark(entry.line, Fate::Differs, text);
                }
                names.into_iter().for_each(|names| add(entry.line, names, address, proxy, draft));
            }
            None => draft.remark(
                entry.line,
                Fate::NotConverted,
                format!("{pattern}: a regular expression has no counterpart"),
            ),
        }
    }
    if let Some((at, address, proxy)) = &fallback {
        add(*at, Names::All, address, *proxy, draft);
        let address = server_address(address, Some(&port));
        if let Some(listener) = draft.listeners.last_mut() {
            listener.fallback = address.map(|address| (*at, address));
        }
    }
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

/// Returns the names that a pattern means, and true if the pattern matches more than them; `None` for a regular expression that
/// means no names.
fn names(pattern: &str) -> Option<(Vec<Names>, bool)> {
    // sniproxy's own syntax takes one backslash away.
    let mut text = String::new();
    let mut signs = pattern.chars();
    while let Some(sign) = signs.next() {
        text.extend(if sign == '\\' { signs.next() } else { Some(sign) });
    }
    if [".*", "^.*$", ".*$", "^.*", ".+", "^.+$"].contains(&text.as_str()) {
        return Some((vec![Names::Named], false));
    }
    let mut all = Vec::new();
    let mut is_wider = false;
    for pattern in without_groups(&text)? {
        let (names, is_wider_too) = of_pattern(&pattern)?;
        all.push(names);
        is_wider |= is_wider_too;
    }
    Some((all, is_wider))
}

/// Returns the names that a pattern without groups means, and true if it matches more than them.
fn of_pattern(text: &str) -> Option<(Names, bool)> {
    let (begun, rest) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
    let (ended, rest) = rest.strip_suffix('$').map_or((false, rest), |rest| (true, rest));
    let below = [".*\\.", ".+\\.", ".*."].iter().find_map(|prefix| rest.strip_prefix(prefix));
    let core = below.unwrap_or(rest);
    let has_open_dots = core.replace("\\.", "").contains('.');
    let plain = core.replace("\\.", ".").replace("\\-", "-");
    let name = host_name(&plain).ok().map(|name| name.as_str().to_owned())?;
    let names = if below.is_some() { Names::Below(name) } else { Names::Exact(name) };
    let is_wider = has_open_dots || !ended || (!begun && below.is_none());
    Some((names, is_wider))
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
                ("-", "10.0.0.9:443")
            ]
        );
        let [listener] = &draft.listeners[..] else { panic!("one listener") };
        assert_eq!(listener.fallback, Some((5, "10.0.0.9:443".to_owned())));
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
        has(13, Fate::Differs, "anywhere in a name");
        has(14, Fate::NotConverted, "open relay");
        has(15, Fate::NotConverted, "regular expression");
        has(5, Fate::NotConverted, "*: left out");
    }
}
