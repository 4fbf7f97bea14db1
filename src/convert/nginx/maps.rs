//! Where `proxy_pass` leads, by the variables of `map`, `geo` and `split_clients`: the rules of a server. nginx looks a value up among
//! the plain keys, then the wildcards, then the regular expressions; that is the order of the rules.

use std::collections::BTreeMap;

use isthmus_document::scalar::host_name;

use super::{Conversion, Server};
use crate::blocks::Directive;
use crate::draft::{Endpoint, Fate, Target};
use crate::expressions::{self, Reading};
use crate::names::{How, Pattern};
use crate::rules::{Lead, RULES_MAX, Rule, Then, When, first_match};
use crate::sources::Sources;
use crate::values::{has_port, server_address};

const SNI: &str = "$ssl_preread_server_name";
const ALPN: &str = "$ssl_preread_alpn_protocols";
const PROTOCOL: &str = "$ssl_preread_protocol";

/// The deepest nesting of variables that is read.
const DEPTH_MAX: usize = 8;

/// A block that gives a variable its value.
pub(super) struct Choice<'a> {
    pub(super) directive: &'a Directive,
    /// True once something uses the variable.
    pub(super) is_used: bool,
}

/// The order in which nginx looks at the keys of a map: of wildcards, the longest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rank {
    Plain,
    Wildcard(std::cmp::Reverse<usize>),
    OpenEnd,
    Expression,
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
    (!name.is_empty() && name.chars().all(is_of_variable)).then_some(name)
}

/// Returns the text before the first variable of a value, the name of that variable, and the text after it.
fn first_variable(value: &str) -> Option<(&str, &str, &str)> {
    let (before, rest) = value.split_once('$')?;
    if let Some((name, after)) = rest.strip_prefix('{').and_then(|rest| rest.split_once('}')) {
        return Some((before, name, after));
    }
    let end = rest.find(|sign| !is_of_variable(sign)).unwrap_or(rest.len());
    Some((before, &rest[..end], &rest[end..]))
}

fn is_of_variable(sign: char) -> bool {
    sign.is_ascii_alphanumeric() || sign == '_'
}

/// Returns a value between two texts; a variable at its end has braces, so that the text after it is no part of its name.
fn between((before, after): (&str, &str), value: &str) -> String {
    match value.rsplit_once('$') {
        Some((head, name)) if !name.is_empty() && name.chars().all(is_of_variable) => {
            format!("{before}{head}${{{name}}}{after}")
        }
        _ => format!("{before}{value}{after}"),
    }
}

/// Returns a value with the port of the server in place of the variable.
fn with_port(value: &str, port: u16) -> String {
    const VARIABLE: &str = "$server_port";
    let value = value.replace("${server_port}", &port.to_string());
    let mut parts = value.split(VARIABLE);
    let mut whole = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.starts_with(is_of_variable) {
            // The name of another variable begins like this one.
            true => whole.push_str(VARIABLE),
            false => whole.push_str(&port.to_string()),
        }
        whole.push_str(part);
    }
    whole
}

/// Returns the two variables of a value and the text between them.
fn pair(value: &str) -> Option<(&str, &str, &str)> {
    let end = value.strip_prefix('$')?.find(|sign| !is_of_variable(sign))? + 1;
    let (first, rest) = value.split_at(end);
    let (between, second) = rest.split_at(rest.find('$')?);
    (!between.is_empty() && variable(first).is_some() && variable(second).is_some())
        .then_some((first, between, second))
}

impl<'a> Conversion<'a> {
    /// Reads a `map`, `geo` or `split_clients` block.
    pub(super) fn choice(&mut self, directive: &'a Directive) {
        let Some(name) = directive.words.last().and_then(|word| variable(word)) else {
            let text = format!("{} sets no variable that is read here", directive.quoted());
            return self.not_converted(directive.line, text);
        };
        for entry in directive.inner().iter().filter(|entry| entry.name() == "include") {
            _ = self.other(entry);
        }
        self.choices.insert(name, Choice { directive, is_used: false });
    }

    /// Adds the rules by which the clients of a condition are led to a value, which may have variables.
    pub(super) fn rules_of(&mut self, line: usize, value: &str, when: When, plan: &mut Server<'_>) {
        if !self.affords(line, 1) {
            // The last of many such rules is enough.
            let refusal = Rule::new(line, When::Unknown, Then::Refuse);
            if plan.choices.last() != Some(&refusal) {
                plan.choices.push(refusal);
            }
            return;
        }
        let value = &plan.port.map_or_else(|| value.to_owned(), |port| with_port(value, port));
        let of_block =
            first_variable(value).filter(|_| plan.depth < DEPTH_MAX).and_then(|(before, name, after)| {
                let choice = self.choices.get_mut(name)?;
                // The parts of a block of percentages are endpoints of one route.
                let is_whole = before.is_empty() && after.is_empty();
                (is_whole || choice.directive.name() != "split_clients").then_some((choice, (before, after)))
            });
        let Some((Choice { directive, is_used }, around)) = of_block else {
            if value.is_empty() {
                return plan.choices.push(Rule::new(line, when, Then::Refuse));
            }
            let lead = self.lead(line, value);
            return Self::lead_on(line, when, lead, plan);
        };
        *is_used = true;
        let directive = *directive;
        plan.depth += 1;
        match directive.name() {
            "map" => self.map(directive, &when, around, plan),
            "geo" => self.geo(directive, &when, around, plan),
            _ => {
                let lead = self.split(directive);
                Self::lead_on(line, when, lead, plan);
            }
        }
        plan.depth -= 1;
    }

    /// Adds the rule that leads the clients of a condition there.
    fn lead_on(line: usize, when: When, lead: Lead, plan: &mut Server<'_>) {
        let number = plan.leads.iter().position(|known| known.name == lead.name).unwrap_or_else(|| {
            let target = lead.target.map(|target| Target {
                connect_timeout: plan.connect_timeout.cloned(),
                send_proxy: plan.send_proxy.then_some("v1"),
                ..target
            });
            plan.leads.push(Lead { target, ..lead });
            plan.leads.len() - 1
        });
        plan.choices.push(Rule::new(line, when, Then::To(number)));
    }

    /// Adds the rules of a map whose values have a text before and after them.
    fn map(&mut self, map: &'a Directive, when: &When, around: (&str, &str), plan: &mut Server<'_>) {
        // A file that cannot be read may have any key.
        for entry in map.inner().iter().filter(|entry| entry.words.len() != 1 && entry.name() == "include") {
            plan.choices.push(Rule::new(entry.line, when.and(When::Unknown), Then::Refuse));
        }
        for (line, test, value) in self.outcomes(map, plan) {
            self.rules_of(line, &between(around, value), when.and(test), plan);
        }
    }

    /// Returns the values of a map in the order in which nginx looks at their keys, each with its condition; the default is the last one.
    fn outcomes(&mut self, map: &'a Directive, plan: &mut Server<'_>) -> Vec<(usize, When, &'a str)> {
        let of = map.words.get(1).map_or("", String::as_str);
        plan.reads_hello |= [SNI, ALPN, PROTOCOL].iter().any(|variable| of.contains(variable));
        let has_wildcards = map.inner().iter().any(|entry| entry.name() == "hostnames");
        let mut ranked = Vec::new();
        // nginx closes connections that lead to an empty value.
        let mut default = (map.line, When::Always, "");
        for (line, key, value) in entries(map) {
            if key == "default" {
                default = (line, When::Always, value);
                continue;
            }
            for (rank, test) in self.test((map, line), of, key, has_wildcards, plan) {
                ranked.push((rank, line, test, value));
            }
        }
        ranked.sort_by_key(|(rank, ..)| *rank);
        ranked.into_iter().map(|(_, line, test, value)| (line, test, value)).chain([default]).collect()
    }

    /// Returns the condition that a map gives its variable this value.
    fn has_value(&mut self, map: &'a Directive, wanted: &str, plan: &mut Server<'_>) -> When {
        if !self.affords(map.line, map.inner().len()) {
            return When::Unknown;
        }
        let is_whole = map.inner().iter().all(|entry| entry.name() != "include" || entry.words.len() == 1);
        let outcomes = self.outcomes(map, plan);
        if !is_whole || outcomes.iter().any(|(.., value)| value.contains('$')) {
            return When::Unknown;
        }
        first_match(outcomes.into_iter().map(|(_, test, value)| (test, value.eq_ignore_ascii_case(wanted))))
    }

    /// Returns true if the conversion may still make this number of rules and conditions; adds one remark if not.
    fn affords(&mut self, line: usize, count: usize) -> bool {
        if self.made > RULES_MAX {
            return false;
        }
        self.made += count;
        if self.made > RULES_MAX {
            let text = format!(
                "the maps within one another have more than {RULES_MAX} values in all; the clients of further ones are refused"
            );
            self.not_converted(line, text);
        }
        self.made <= RULES_MAX
    }

    /// Returns the conditions that a value matches a key of a map.
    fn test(
        &mut self,
        (map, line): (&Directive, usize),
        of: &str,
        key: &str,
        has_wildcards: bool,
        plan: &mut Server<'_>,
    ) -> Vec<(Rank, When)> {
        let rank = if key.starts_with('~') { Rank::Expression } else { Rank::Plain };
        let unknown = |conversion: &mut Self, why: &str| {
            conversion.not_converted(line, format!("{key:?}: {why}"));
            vec![(rank, When::Unknown)]
        };
        let halves = pair(of).and_then(|(first, between, second)| {
            let split = if first == SNI { key.rsplit_once(between) } else { key.split_once(between) };
            split.filter(|_| rank == Rank::Plain).map(|halves| (first, second, halves))
        });
        if let Some((first, second, (left, right))) = halves {
            let mut tests = self.test((map, line), first, left, false, plan);
            let right = self.test((map, line), second, right, false, plan);
            tests.extend(right);
            return vec![(rank, When::All(tests.into_iter().map(|(_, test)| test).collect()))];
        }
        match of {
            SNI => self.name_test(line, key, has_wildcards),
            ALPN if key.is_empty() => vec![(rank, When::Protocol(String::new()))],
            ALPN => match protocol(key) {
                Some(protocol) => vec![(rank, When::Protocol(protocol))],
                None => unknown(self, "only single protocols have a counterpart, as in ~\\bacme-tls/1\\b"),
            },
            PROTOCOL if rank == Rank::Plain => vec![(rank, When::Version(key.to_owned()))],
            of => {
                let name = variable(of).unwrap_or_default();
                let block =
                    self.choices.get_mut(name).filter(|choice| choice.directive.name() != "split_clients");
                // With `hostnames`, such a key has many values.
                let is_plain = rank == Rank::Plain
                    && !(has_wildcards && (key.starts_with(['.', '*']) || key.ends_with('*')));
                let Some(block) = block.filter(|_| is_plain && plan.depth < DEPTH_MAX) else {
                    let why =
                        format!("{of} has no counterpart here; the name, the protocols and the source have");
                    return unknown(self, &why);
                };
                block.is_used = true;
                let directive = block.directive;
                if directive.name() == "map" {
                    plan.depth += 1;
                    let test = self.has_value(directive, key, plan);
                    plan.depth -= 1;
                    return match test {
                        When::Unknown => unknown(self, "the values of the map are not known here"),
                        test => vec![(rank, test)],
                    };
                }
                let sources = sources(directive).filter(|_| !plan.hides_sources);
                match sources {
                    Some(sources) => {
                        let same = sources.iter().filter(|(value, _)| value.eq_ignore_ascii_case(key));
                        let of = same.fold(Sources::default(), |all, (_, one)| all.union(one));
                        vec![(rank, When::Sources(of.clone(), of))]
                    }
                    None => unknown(self, "the sources of the `geo` block are not known here"),
                }
            }
        }
    }

    /// Returns the conditions that the server name matches a key of a map.
    fn name_test(&mut self, line: usize, key: &str, has_wildcards: bool) -> Vec<(Rank, When)> {
        let names = |how, text| When::Names(vec![Pattern::new(how, text)]);
        if let Some((expression, case)) = expression(key) {
            return self.expression_test(line, expression, case);
        }
        match self::names(key, has_wildcards) {
            Ok(all) => all.into_iter().map(|(rank, name)| (rank, When::Names(vec![name]))).collect(),
            Err(why) => {
                self.not_converted(line, format!("{key:?}: {why}"));
                if let Some(start) = key.strip_suffix('*') {
                    return vec![(Rank::OpenEnd, names(How::Start, start))];
                }
                let nameless = When::All(vec![names(How::Nameless, ""), When::Unknown]);
                vec![(Rank::Plain, When::Any(vec![names(How::Other, key), nameless]))]
            }
        }
    }

    /// Returns the conditions that the server name matches a regular expression.
    fn expression_test(&mut self, line: usize, expression: &str, case: Case) -> Vec<(Rank, When)> {
        let Reading { mut patterns, lack } = expressions::read(expression);
        let nameless = Pattern::new(How::Nameless, "");
        // nginx compares an expression with an empty name, too.
        if patterns.contains(&Pattern::new(How::Any, "")) && !expression.contains('+') {
            patterns.push(nameless.clone());
        }
        let is_unknown = patterns.iter().any(Pattern::is_unknown);
        if let Some((fate, text)) = lack {
            self.draft.remark(line, fate, text);
        }
        let has_capitals = || expression.bytes().any(|byte| byte.is_ascii_uppercase());
        if case == Case::Distinct && !is_unknown && has_capitals() {
            let text = format!(
                "{expression}: without `~*` nginx distinguishes upper and lower case, but a route ignores case"
            );
            self.draft.remark(line, Fate::Differs, text);
        }
        let all = patterns.into_iter().map(|pattern| When::Names(vec![pattern]));
        let maybe = is_unknown.then(|| When::All(vec![When::Names(vec![nameless]), When::Unknown]));
        all.chain(maybe).map(|when| (Rank::Expression, when)).collect()
    }

    /// Adds the rules of a `geo` block whose values have a text before and after them.
    fn geo(&mut self, geo: &'a Directive, when: &When, around: (&str, &str), plan: &mut Server<'_>) {
        let Some(sources) = sources(geo).filter(|_| !plan.hides_sources) else {
            let text = format!("{}: its sources are not known here", geo.quoted());
            self.not_converted(geo.line, text);
            return plan.choices.push(Rule::new(geo.line, when.clone(), Then::Refuse));
        };
        for (value, of) in sources {
            let when = when.and(When::Sources(of.clone(), of));
            self.rules_of(geo.line, &between(around, value), when, plan);
        }
    }

    /// Returns where a value without variables leads.
    fn lead(&mut self, line: usize, value: &str) -> Lead {
        let mut lead = Lead { name: value.to_owned(), ..Lead::default() };
        let address = server_address(value, None).filter(|_| has_port(value));
        if value.contains(SNI) {
            let text = format!(
                "{value:?}: isthmus connects to no name that a client chooses, because such a router is an open relay; write a route for \
                 each name"
            );
            self.not_converted(line, text);
        } else if value.contains('$') {
            self.not_converted(line, format!("the value {value:?} is computed for each connection"));
        } else if let Some((target, unread)) = self.upstream(value) {
            lead.target = Some(target).filter(|target| !target.endpoints.is_empty());
            lead.rules = unread;
        } else if value.starts_with("unix:") {
            self.not_converted(line, format!("{value} is a unix socket, which cannot be an endpoint"));
        } else if let Some(address) = address {
            let name = value.to_owned();
            let endpoint = Endpoint { line, name, address, weight: 1, backup: false, connections_max: None };
            let (backend, endpoints) = (value.to_owned(), vec![endpoint]);
            lead.target = Some(Target { backend, endpoints, ..Target::default() });
        } else {
            // Neither an upstream nor an address with its port: nginx closes such connections.
            lead.refuses = true;
        }
        lead
    }

    /// Returns the endpoints of all parts of a `split_clients` block.
    fn split(&mut self, block: &'a Directive) -> Lead {
        let mut all =
            Target { backend: block.words.join(" "), policy: Some("sourceHash"), ..Target::default() };
        let mut lead = Lead { name: all.backend.clone(), ..Lead::default() };
        // The parts are counted in hundredths of a percent, as those of nginx are.
        let mut rest = 10_000_u32;
        for (line, share, value) in entries(block) {
            let part = share.strip_suffix('%').and_then(hundredths).unwrap_or(rest);
            rest = rest.saturating_sub(part);
            let of = self.lead(line, value);
            lead.rules.extend(of.rules);
            let Some(target) = of.target else {
                let text = format!("the part {share} leads to no endpoint that can be converted");
                self.not_converted(line, text);
                return lead;
            };
            let whole: u64 = target.endpoints.iter().map(|endpoint| u64::from(endpoint.weight)).sum();
            let weighted = target.endpoints.into_iter().map(|endpoint| {
                let weight = u64::from(part) * u64::from(endpoint.weight) / whole.max(1);
                Endpoint { weight: u32::try_from(weight).unwrap_or(u32::MAX).max(1), ..endpoint }
            });
            all.endpoints.extend(weighted.filter(|_| part > 0));
        }
        if rest > 0 {
            self.not_converted(
                block.line,
                format!("{}: nginx refuses the part that is left", block.quoted()),
            );
            return lead;
        }
        if !block.words.get(1).is_some_and(|key| key.contains("remote_addr")) {
            all.policy = Some("random");
        }
        let text = format!(
            "{}: the parts are the weights of endpoints; a source may get another part than with nginx",
            block.quoted()
        );
        self.draft.remark(block.line, Fate::Differs, text);
        Lead { target: Some(all), ..lead }
    }
}

/// Returns the sources that have each value of a `geo` block: the longest block that has a source gives it its value. Returns `None` if
/// the block is not about the client, or has more than blocks and a default.
fn sources(geo: &Directive) -> Option<BTreeMap<&str, Sources>> {
    let of = geo.words.get(1).filter(|_| geo.words.len() > 2);
    let is_plain = geo.inner().iter().all(|entry| entry.words.len() == 2);
    if of.is_some_and(|of| !["$remote_addr", "$binary_remote_addr"].contains(&of.as_str())) || !is_plain {
        return None;
    }
    let mut values: BTreeMap<&str, Sources> = BTreeMap::new();
    let default = entries(geo).find(|(_, block, _)| *block == "default").map_or("", |(.., value)| value);
    values.insert(default, Sources::all());
    let blocks = geo.inner().iter().filter(|entry| entry.name() != "default");
    let blocks = blocks.map(|entry| {
        let block = Sources::block(entry.name())?;
        let length =
            entry.name().split_once('/').map_or(Some(128), |(_, length)| length.parse::<u8>().ok())?;
        Some((length, block, entry.words[1].as_str()))
    });
    let mut blocks: Vec<(u8, Sources, &str)> = blocks.collect::<Option<_>>()?;
    blocks.sort_by_key(|(length, ..)| *length);
    for (_, block, value) in blocks {
        for of in values.values_mut() {
            *of = of.minus(&block);
        }
        let of = values.entry(value).or_default();
        *of = of.union(&block);
    }
    Some(values)
}

/// Returns the hundredths of a percentage such as `12.5`.
fn hundredths(text: &str) -> Option<u32> {
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let part: u32 = format!("{part:0<2}").get(..2)?.parse().ok()?;
    let whole: u32 = whole.parse().ok().filter(|whole| *whole <= 100)?;
    Some(whole * 100 + part)
}

/// The way in which a regular expression treats upper and lower case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Case {
    Distinct,
    Ignored,
}

/// Returns the regular expression of a key.
fn expression(key: &str) -> Option<(&str, Case)> {
    let blind = key.strip_prefix("~*").map(|text| (text, Case::Ignored));
    blind.or_else(|| key.strip_prefix('~').map(|text| (text, Case::Distinct)))
}

/// Returns the protocol that a key of a map by ALPN means.
fn protocol(key: &str) -> Option<String> {
    let (text, is_part) = expression(key).map_or((key, false), |(text, _)| (text, true));
    let text = if is_part { text.trim_start_matches("\\b").trim_end_matches("\\b") } else { text };
    let (begun, text) = text.strip_prefix('^').filter(|_| is_part).map_or((false, text), |text| (true, text));
    let (ended, text) = text.strip_suffix('$').filter(|_| is_part).map_or((false, text), |text| (true, text));
    let is_plain = |sign: char| sign.is_ascii_alphanumeric() || "/-._".contains(sign);
    let text = text.replace("\\.", ".").replace("\\/", "/").replace("\\-", "-");
    // A key that is no part is compared with all protocols of the client. Clients offer this one alone, as RFC 8737 demands.
    let is_offered = is_part && !begun && !ended || text == "acme-tls/1";
    (is_offered && !text.is_empty() && text.chars().all(is_plain)).then_some(text)
}

/// Returns the names that a key of a map by name matches, which is no regular expression.
fn names(key: &str, has_wildcards: bool) -> Result<Vec<(Rank, Pattern)>, String> {
    let name = |text: &str| {
        let name = host_name(text).map_err(|error| format!("no host name: {}", error.message))?;
        Ok::<_, String>(name.as_str().to_owned())
    };
    let exact = |text: &str| Ok::<_, String>(Pattern::new(How::Name, &name(text)?));
    let below = |text: &str| Ok::<_, String>(Pattern::below(&name(text)?));
    let wildcard = |text: &str| Rank::Wildcard(std::cmp::Reverse(text.len()));
    match key {
        // The key of clients that send no name.
        "" => Ok(vec![(Rank::Plain, Pattern::new(How::Nameless, ""))]),
        key if has_wildcards && key.starts_with("*.") => Ok(vec![(wildcard(&key[2..]), below(&key[2..])?)]),
        key if has_wildcards && key.starts_with('.') => {
            Ok(vec![(Rank::Plain, exact(&key[1..])?), (wildcard(&key[1..]), below(&key[1..])?)])
        }
        key if has_wildcards && key.ends_with(".*") => {
            Err("a name of which the end is open has no counterpart".to_owned())
        }
        key if key.starts_with("*.") || key.starts_with('.') => {
            Err("without `hostnames`, no name matches this key".to_owned())
        }
        key => Ok(vec![(Rank::Plain, exact(key)?)]),
    }
}
