//! Where `proxy_pass` leads: to endpoints, or by the variables of `map`, `geo` and `split_clients`.

use isthmus_document::scalar::host_name;

use super::{Conversion, Plan, Planned};
use crate::blocks::Directive;
use crate::draft::{Endpoint, Fate, Target};
use crate::rules::{Names, without_groups};
use crate::values::{has_port, server_address};

const SNI: &str = "$ssl_preread_server_name";
const ALPN: &str = "$ssl_preread_alpn_protocols";
const PROTOCOL: &str = "$ssl_preread_protocol";

/// A block that gives a variable its value.
pub(super) struct Choice<'a> {
    pub(super) directive: &'a Directive,
    /// True once something uses the variable.
    pub(super) is_used: bool,
}

/// Where a value leads.
pub(super) enum Leads<'a> {
    Target(Target),
    /// By this `map`.
    By(&'a Directive),
    /// To no server: nginx closes such connections. The text says why.
    Nowhere(String),
    /// This cannot be converted; the text says why.
    Unknown(String),
}

/// The entries of a `map`, `geo` or `split_clients` block: line, key and value.
fn entries(block: &Directive) -> impl Iterator<Item = (usize, &str, &str)> {
    block.inner().iter().filter_map(|entry| match &entry.words[..] {
        [key, value] if entry.name() != "include" => Some((entry.line, key.as_str(), value.as_str())),
        _ => None,
    })
}

/// Returns the name of the variable that a value consists of.
fn variable(value: &str) -> Option<&str> {
    let name = value.strip_prefix('$')?;
    (!name.contains('$')).then_some(name)
}

impl<'a> Conversion<'a> {
    /// Reads a `map`, `geo` or `split_clients` block.
    pub(super) fn choice(&mut self, directive: &'a Directive) {
        let Some(name) = directive.words.last().and_then(|word| variable(word)) else {
            return self.other(directive);
        };
        for entry in directive.inner().iter().filter(|entry| entry.name() == "include") {
            self.other(entry);
        }
        self.choices.insert(name, Choice { directive, is_used: false });
    }

    /// Returns where a value leads.
    pub(super) fn leads(&mut self, line: usize, value: &str) -> Leads<'a> {
        if let Some(name) = variable(value) {
            let Some(choice) = self.choices.get_mut(name) else {
                return Leads::Unknown(format!("no block that is converted sets the variable ${name}"));
            };
            choice.is_used = true;
            let directive = choice.directive;
            return match directive.name() {
                "map" => Leads::By(directive),
                "split_clients" => self.split(directive),
                _ => Leads::Unknown(format!(
                    "`{}` chooses a server by the source; a route has one list of endpoints",
                    directive.words.join(" ")
                )),
            };
        }
        if value.contains('$') {
            return Leads::Unknown(format!("the value {value:?} is computed for each connection"));
        }
        if let Some(target) = self.upstream(value) {
            return match target.endpoints.is_empty() {
                true => Leads::Nowhere(format!("the upstream {value} has no server that can be converted")),
                false => Leads::Target(target),
            };
        }
        if value.starts_with("unix:") {
            return Leads::Unknown(format!("{value} is a unix socket, which cannot be an endpoint"));
        }
        match server_address(value, None).filter(|_| has_port(value)) {
            Some(address) => {
                let endpoint = Endpoint {
                    line,
                    name: value.to_owned(),
                    address,
                    weight: 1,
                    backup: false,
                    connections_max: None,
                };
                Leads::Target(Target {
                    backend: value.to_owned(),
                    endpoints: vec![endpoint],
                    ..Target::default()
                })
            }
            None => Leads::Nowhere(format!(
                "{value:?} is neither an upstream nor an address with its port, so nginx closes such connections"
            )),
        }
    }

    /// Returns the endpoints of all parts of a `split_clients` block.
    fn split(&mut self, block: &'a Directive) -> Leads<'a> {
        let mut all =
            Target { backend: block.words.join(" "), policy: Some("sourceHash"), ..Target::default() };
        // The parts are counted in hundredths of a percent, as those of nginx are.
        let mut rest = 10_000_u32;
        for (line, share, value) in entries(block) {
            let part = share.strip_suffix('%').and_then(hundredths).unwrap_or(rest);
            rest = rest.saturating_sub(part);
            let Leads::Target(target) = self.leads(line, value) else {
                return Leads::Unknown(format!(
                    "the part {share} in line {line} leads to no endpoint that can be converted"
                ));
            };
            let whole: u64 = target.endpoints.iter().map(|endpoint| u64::from(endpoint.weight)).sum();
            let weighted = target.endpoints.into_iter().map(|endpoint| {
                let weight = u64::from(part) * u64::from(endpoint.weight) / whole.max(1);
                Endpoint { weight: u32::try_from(weight).unwrap_or(u32::MAX).max(1), ..endpoint }
            });
            all.endpoints.extend(weighted.filter(|_| part > 0));
        }
        if !block.words.get(1).is_some_and(|key| key.contains("remote_addr")) {
            all.policy = Some("random");
        }
        let text = format!(
            "{}: the parts are the weights of endpoints; a source may get another part than with nginx",
            block.quoted()
        );
        self.draft.remark(block.line, Fate::Differs, text);
        Leads::Target(all)
    }

    /// Returns the routes of a `map`.
    pub(super) fn plan(&mut self, map: &'a Directive) -> Plan {
        let mut plan = Plan::default();
        match map.words.get(1).map_or("", String::as_str) {
            SNI => self.by_name(map, &mut plan),
            ALPN => self.by_alpn(map, Names::All, &mut plan),
            PROTOCOL => self.by_protocol(map, &mut plan),
            pair if pair.contains(SNI) => self.by_pair(map, pair, &mut plan),
            other => {
                let text = format!(
                    "{}: {other} has no counterpart, only the name, the protocols and the source have",
                    map.quoted()
                );
                self.not_converted(map.line, text);
            }
        }
        plan
    }

    fn by_name(&mut self, map: &'a Directive, plan: &mut Plan) {
        let has_wildcards = map.inner().iter().any(|entry| entry.name() == "hostnames");
        for (line, key, value) in entries(map) {
            match names(key, has_wildcards) {
                Ok(all) => all.into_iter().for_each(|names| self.entry(line, names, value, Vec::new(), plan)),
                Err(why) => {
                    self.not_converted(line, format!("{key:?}: {why}; its clients get the default"));
                }
            }
        }
        if !plan.routes.iter().any(|route| route.names == Names::All) {
            return;
        }
        let text =
            "isthmus refuses clients that do not speak TLS (not_tls); nginx passes them to the default";
        self.draft.remark(map.line, Fate::Differs, text);
    }

    /// Adds the route of one entry of a map by name.
    fn entry(&mut self, line: usize, names: Names, value: &str, from: Vec<String>, plan: &mut Plan) {
        match self.leads(line, value) {
            Leads::Target(target) => {
                plan.routes.push(Planned { line, names, target, from, by_alpn: Vec::new() });
            }
            Leads::By(map) if map.words.get(1).is_some_and(|of| of == ALPN) => self.by_alpn(map, names, plan),
            Leads::By(map) => {
                self.not_converted(line, format!("{}: a map by name leads to this map", map.quoted()));
                plan.refused.push((line, names));
            }
            Leads::Nowhere(why) => {
                let text = format!("{}: no route, so isthmus refuses it: {why}", names.keys().join(" and "));
                self.draft.remark(line, Fate::NotNeeded, text);
                plan.refused.push((line, names));
            }
            Leads::Unknown(why) => {
                self.not_converted(line, format!("{}: {why}", names.keys().join(" and ")));
                plan.refused.push((line, names));
            }
        }
    }

    /// Reads a map by ALPN protocols for these names: the default leads on, and the others are `byAlpn`.
    fn by_alpn(&mut self, map: &'a Directive, names: Names, plan: &mut Plan) {
        let mut protocols = Vec::new();
        let first = plan.routes.len();
        for (line, key, value) in entries(map) {
            if key == "default" || key.is_empty() {
                match self.leads(line, value) {
                    Leads::By(inner)
                        if names == Names::All && inner.words.get(1).is_some_and(|of| of == SNI) =>
                    {
                        self.by_name(inner, plan);
                    }
                    _ => self.entry(line, names.clone(), value, Vec::new(), plan),
                }
                continue;
            }
            match (protocol(key), self.leads(line, value)) {
                (Some(protocol), Leads::Target(target)) => protocols.push((line, protocol, target)),
                _ => self.not_converted(line, format!("the protocols {key:?}: only single ones that lead to endpoints have a counterpart, as in ~\\bacme-tls/1\\b")),
            }
        }
        let is_alone = plan.routes.len() == first;
        for (line, protocol, target) in protocols {
            if is_alone {
                self.not_converted(line, format!("{protocol}: no route leads on for other protocols"));
            }
            for route in &mut plan.routes[first..] {
                route.by_alpn.push((protocol.clone(), target.clone()));
            }
        }
    }

    /// Reads a map by the version of TLS, which is empty for clients that do not speak TLS: those go to the fallback.
    fn by_protocol(&mut self, map: &'a Directive, plan: &mut Plan) {
        let value =
            |wanted: &[&str]| wanted.iter().find_map(|wanted| entries(map).find(|(_, key, _)| key == wanted));
        let Some((line, _, tls)) = value(&["TLSv1.3", "TLSv1.2", "default"]) else {
            return self.not_converted(map.line, format!("{}: it has no value for TLSv1.2", map.quoted()));
        };
        let others = entries(map).filter(|(_, key, other)| key.starts_with("TLS") && *other != tls);
        for (line, key, _) in others.collect::<Vec<_>>() {
            self.not_converted(line, format!("{key}: a route does not depend on the version of TLS"));
        }
        if let Some((line, _, other)) = value(&["", "default"]) {
            match self.leads(line, other) {
                Leads::Target(target) => plan.fallback = Some(target),
                Leads::Nowhere(_) => {}
                Leads::By(_) | Leads::Unknown(_) => {
                    self.not_converted(
                        line,
                        "`fallback` has one address for all clients that do not speak TLS",
                    );
                }
            }
        }
        match self.leads(line, tls) {
            Leads::By(inner) if inner.words.get(1).is_some_and(|of| of == SNI) => self.by_name(inner, plan),
            Leads::By(inner) if inner.words.get(1).is_some_and(|of| of == ALPN) => {
                self.by_alpn(inner, Names::All, plan)
            }
            _ => self.entry(line, Names::All, tls, Vec::new(), plan),
        }
    }

    /// Reads a map by a variable of `geo` beside the name, such as `"$office:$ssl_preread_server_name"`: the sources become `from`.
    fn by_pair(&mut self, map: &'a Directive, pair: &str, plan: &mut Plan) {
        let (before, after) = pair.split_once(SNI).unwrap_or((pair, ""));
        let of = if after.is_empty() { before } else { after };
        let word: String = of.chars().filter(|sign| sign.is_ascii_alphanumeric() || *sign == '_').collect();
        let separator: String =
            of.chars().filter(|sign| !sign.is_ascii_alphanumeric() && !"_$".contains(*sign)).collect();
        let geo = self.choices.get_mut(word.as_str()).filter(|choice| choice.directive.name() == "geo");
        let Some(geo) = geo.filter(|_| before.is_empty() || after.is_empty()) else {
            return self.not_converted(
                map.line,
                format!("{}: only a `geo` variable beside the name has a counterpart", map.quoted()),
            );
        };
        geo.is_used = true;
        let blocks: Vec<(&str, &str)> =
            entries(geo.directive).map(|(_, block, value)| (block, value)).collect();
        for (line, key, value) in entries(map) {
            if key == "default" {
                self.entry(line, Names::All, value, Vec::new(), plan);
                continue;
            }
            let halves = if before.is_empty() {
                key.rsplit_once(&*separator).map(|(name, of)| (of, name))
            } else {
                key.split_once(&*separator)
            };
            let found = halves.filter(|_| !separator.is_empty() && !key.starts_with('~'));
            let sources = found.map(|(wanted, _)| {
                blocks.iter().filter(move |(block, value)| *value == wanted && *block != "default")
            });
            let from: Vec<String> =
                sources.into_iter().flatten().map(|(block, _)| super::cidr(block)).collect();
            match found.map(|(_, name)| names(name, false)) {
                Some(Ok(all)) if !from.is_empty() => {
                    all.into_iter().for_each(|names| self.entry(line, names, value, from.clone(), plan));
                }
                _ => self.not_converted(
                    line,
                    format!("{key:?} is not a value of ${word} with source addresses, and a name"),
                ),
            }
        }
        let text = "sources that no entry of a name admits are refused; nginx gives them the default";
        self.draft.remark(map.line, Fate::Differs, text);
    }
}

/// Returns the hundredths of a percentage such as `12.5`.
fn hundredths(text: &str) -> Option<u32> {
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let part: u32 = format!("{part:0<2}").get(..2)?.parse().ok()?;
    let whole: u32 = whole.parse().ok().filter(|whole| *whole <= 100)?;
    Some(whole * 100 + part)
}

/// Returns the protocol that a key of a map by ALPN means.
fn protocol(key: &str) -> Option<String> {
    let text = key.strip_prefix("~*").or_else(|| key.strip_prefix('~')).unwrap_or(key);
    let text =
        text.trim_start_matches("\\b").trim_end_matches("\\b").trim_start_matches('^').trim_end_matches('$');
    let is_plain = |sign: char| sign.is_ascii_alphanumeric() || "/-._".contains(sign);
    let text = text.replace("\\.", ".").replace("\\/", "/").replace("\\-", "-");
    (!text.is_empty() && text.chars().all(is_plain)).then_some(text)
}

/// Returns the names that a key of a map by name matches.
pub(super) fn names(key: &str, has_wildcards: bool) -> Result<Vec<Names>, String> {
    let name = |text: &str| {
        host_name(text)
            .map(|name| name.as_str().to_owned())
            .map_err(|error| format!("no host name: {}", error.message))
    };
    let both = |text: &str| Ok(vec![Names::Exact(name(text)?), Names::Below(name(text)?)]);
    match key {
        "default" => Ok(vec![Names::All]),
        // The key of clients that send no name.
        "" => Ok(vec![Names::Exact("-".to_owned())]),
        key if key.starts_with('~') => {
            let all = match of_expression(key) {
                Some(found) => Some(vec![found]),
                None => {
                    without_groups(key).and_then(|all| all.iter().map(|key| of_expression(key)).collect())
                }
            };
            let of = |(text, depth): (String, Depth)| match depth {
                Depth::One => Ok(vec![Names::Exact(name(&text)?)]),
                Depth::Below => Ok(vec![Names::Below(name(&text)?)]),
                Depth::Both => both(&text),
            };
            let all = all.ok_or_else(|| "a regular expression has no counterpart".to_owned())?;
            all.into_iter().map(of).collect::<Result<Vec<_>, String>>().map(|all| all.concat())
        }
        key if has_wildcards && key.starts_with("*.") => Ok(vec![Names::Below(name(&key[2..])?)]),
        key if has_wildcards && key.starts_with('.') => both(&key[1..]),
        key if has_wildcards && key.ends_with(".*") => {
            Err("a name of which the end is open has no counterpart".to_owned())
        }
        key if key.starts_with("*.") || key.starts_with('.') => {
            Err("without `hostnames`, no name matches this key".to_owned())
        }
        key => Ok(vec![Names::Exact(name(key)?)]),
    }
}

/// The names that a regular expression matches.
#[derive(Clone, Copy)]
enum Depth {
    One,
    Below,
    Both,
}

/// Returns the name of a regular expression that means one name, all below it, or both.
fn of_expression(key: &str) -> Option<(String, Depth)> {
    let text = key.strip_prefix("~*").or_else(|| key.strip_prefix('~'))?;
    let text = text.strip_suffix('$')?;
    let forms = [
        ("^(.+\\.)?", Depth::Both),
        ("^(.*\\.)?", Depth::Both),
        ("^(?:.+\\.)?", Depth::Both),
        ("(^|\\.)", Depth::Both),
        ("^.+\\.", Depth::Below),
        ("^.*\\.", Depth::Below),
        ("^(.+)\\.", Depth::Below),
        ("\\.", Depth::Below),
        ("^", Depth::One),
    ];
    let (rest, depth) =
        forms.into_iter().find_map(|(form, depth)| Some((text.strip_prefix(form)?, depth)))?;
    let plain = rest.replace("\\.", ".").replace("\\-", "-");
    // A dot without a backslash matches any sign.
    let has_open_dots = rest.replace("\\.", "").contains('.');
    let is_plain = |sign: char| sign.is_ascii_alphanumeric() || "-_.".contains(sign);
    (!has_open_dots && plain.chars().all(is_plain)).then_some((plain, depth))
}
