//! The conditions of HAProxy's rules, as conditions of the model: the server name, the source, the ALPN protocols and limits of sources.
//! All else is unknown, with a reason.

use std::collections::BTreeMap;

use super::mapping::{Mapping, without_lower};
use crate::Read;
use crate::draft::Fate;
use crate::expressions::{self, Reading};
use crate::names::{How, Pattern};
use crate::rules::{SourceLimit, When, first_match};
use crate::site::names_of;
use crate::sources::Sources;

/// A condition, the parts of it that are not understood, and the ways in which it differs from HAProxy's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Condition {
    pub(super) when: When,
    pub(super) faults: Vec<String>,
    pub(super) differs: Vec<String>,
}

impl Condition {
    fn new(when: When) -> Self {
        Self { when, faults: Vec::new(), differs: Vec::new() }
    }

    fn unknown(fault: impl Into<String>) -> Self {
        Self { when: When::Unknown, faults: vec![fault.into()], differs: Vec::new() }
    }

    fn not(self) -> Self {
        Self { when: self.when.not(), ..self }
    }

    /// Returns the condition made of others by a function of their parts.
    fn of(all: Vec<Self>, whole: impl FnOnce(Vec<When>) -> When) -> Self {
        let mut condition = Self::new(When::Unknown);
        let mut parts = Vec::new();
        for one in all {
            parts.push(one.when);
            condition.faults.extend(one.faults);
            condition.differs.extend(one.differs);
        }
        condition.when = match <[When; 1]>::try_from(parts) {
            Ok([only]) => only,
            Err(parts) => whole(parts),
        };
        condition
    }
}

/// The named conditions of a section. Several lines with the same name are alternatives, also for rules above them.
pub(super) struct Acls<'r> {
    read: Read<'r>,
    named: BTreeMap<String, Vec<Condition>>,
}

impl<'r> Acls<'r> {
    pub(super) fn new(read: Read<'r>) -> Self {
        Self { read, named: BTreeMap::new() }
    }

    /// Adds an `acl` line, given without its first word.
    pub(super) fn add(&mut self, words: &[&str]) -> Condition {
        let Some((name, test)) = words.split_first() else {
            return Condition::unknown("the acl has no name");
        };
        let condition = self.test(test);
        self.named.entry((*name).to_owned()).or_default().push(condition.clone());
        condition
    }

    /// Returns the condition of a rule: the words after its target.
    pub(super) fn condition(&self, words: &[&str]) -> Condition {
        match words.split_first() {
            None => Condition::new(When::Always),
            Some((&"if", words)) => self.alternatives(words),
            Some((&"unless", words)) => self.alternatives(words).not(),
            Some((first, _)) => {
                Condition::unknown(format!("the word {first:?} cannot be converted, only `if` and `unless`"))
            }
        }
    }

    fn alternatives(&self, words: &[&str]) -> Condition {
        let groups = words.split(|word| ["||", "or", "OR"].contains(word));
        Condition::of(groups.map(|group| self.group(group)).collect(), When::Any)
    }

    /// Returns the condition of terms that must all be true.
    fn group(&self, words: &[&str]) -> Condition {
        let mut rest = words;
        let mut terms = Vec::new();
        let mut is_negated = false;
        while let Some((word, after)) = rest.split_first() {
            let bare = word.trim_start_matches('!');
            is_negated ^= (word.len() - bare.len()) % 2 == 1;
            rest = after;
            // A `!` that stands alone is about the term after it.
            if bare.is_empty() {
                continue;
            }
            let condition = match bare {
                "{" => {
                    let end = rest.iter().position(|word| *word == "}");
                    let Some(end) = end else { return Condition::unknown("a `{` has no `}`") };
                    let test = self.test(&rest[..end]);
                    rest = &rest[end + 1..];
                    test
                }
                name => self.named(name),
            };
            terms.push(if is_negated { condition.not() } else { condition });
            is_negated = false;
        }
        if is_negated {
            return Condition::unknown("a condition ends with `!`");
        }
        if terms.is_empty() {
            return Condition::unknown("an alternative has no condition");
        }
        Condition::of(terms, When::All)
    }

    /// Returns the condition with this name.
    fn named(&self, name: &str) -> Condition {
        match (self.named.get(name), name) {
            (Some(all), _) => Condition::of(all.clone(), When::Any),
            (None, "TRUE" | "WAIT_END") => Condition::new(When::Always),
            (None, "FALSE") => Condition::new(When::never()),
            // These conditions are about a request without TLS.
            (None, "HTTP" | "HTTP_1.0" | "HTTP_1.1" | "HTTP_2.0") => {
                Condition::new(When::All(vec![When::Tls.not(), When::Unknown]))
            }
            (None, "LOCALHOST") => self.test(&["src", "127.0.0.0/8", "::1"]),
            (None, name) => Condition::unknown(format!("this section has no acl {name}")),
        }
    }

    /// Returns the condition of the test of an ACL: a sample fetch (the value that is tested), its flags, and its patterns.
    fn test(&self, words: &[&str]) -> Condition {
        let Some((fetch, mut rest)) = words.split_first() else {
            return Condition::unknown("a condition is empty");
        };
        let (sample, converters) = of_fetch(fetch);
        let (mut method, mut is_blind, mut patterns) = (None, false, Vec::new());
        while let Some((flag, after)) = rest.split_first().filter(|(word, _)| word.starts_with('-')) {
            rest = after;
            match *flag {
                "-i" => is_blind = true,
                "-n" => {}
                "-m" | "-f" => match rest.split_first() {
                    Some((word, after)) => {
                        rest = after;
                        if *flag == "-m" {
                            method = Some(*word);
                        } else if let Some(text) = (self.read)(word) {
                            let lines = text.lines().map(str::trim);
                            let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
                            patterns.extend(lines.map(str::to_owned));
                        } else {
                            return Condition::unknown(format!("the file {word} cannot be read"));
                        }
                    }
                    None => return Condition::unknown(format!("`{flag}` has no value")),
                },
                "--" => break,
                flag => return Condition::unknown(format!("the flag {flag} cannot be converted")),
            }
        }
        patterns.extend(rest.iter().map(|word| (*word).to_owned()));
        let other = || {
            Condition::unknown(format!(
                "the condition {:?} cannot be converted; only conditions on the SNI, the source and ALPN can be",
                words.join(" ")
            ))
        };
        match (sample, converters) {
            ("req_ssl_hello_type" | "req.ssl_hello_type", "") if patterns == ["1"] && method.is_none() => {
                Condition::new(When::Tls)
            }
            ("src", "") if [None, Some("ip")].contains(&method) && !patterns.is_empty() => {
                let blocks: Option<Vec<Sources>> = patterns.iter().map(|text| Sources::block(text)).collect();
                let Some(blocks) = blocks else {
                    return Condition::unknown(format!(
                        "the sources {:?} are no addresses",
                        words[1..].join(" ")
                    ));
                };
                let all = blocks.iter().fold(Sources::default(), |all, one| all.union(one));
                let kin = all.with_kin();
                Condition::new(When::Sources(all, kin))
            }
            ("req.ssl_alpn" | "req_ssl_alpn", "")
                if [None, Some("str"), Some("sub")].contains(&method) && !patterns.is_empty() =>
            {
                // `str` compares the whole list of the client's protocols. Clients offer this one alone, as RFC 8737 demands.
                if method != Some("sub") && patterns.iter().any(|pattern| pattern != "acme-tls/1") {
                    return Condition::unknown(format!(
                        "the condition {:?} is true only for clients that offer no other protocol, which `byAlpn` cannot ask; with `-m sub` \
                         it can be converted",
                        words.join(" ")
                    ));
                }
                Condition::new(When::Any(patterns.into_iter().map(When::Protocol).collect()))
            }
            (sample, "") if limit(sample).is_some() => match &patterns[..] {
                [comparison, number] if ["gt", "ge"].contains(&comparison.as_str()) => {
                    let number = number.parse::<u64>().ok();
                    let most = number.and_then(|number| number.checked_sub(u64::from(comparison == "ge")));
                    match (most.filter(|most| *most > 0), limit(sample)) {
                        (Some(most), Some(limit)) => Condition::new(When::Limit(limit(most))),
                        _ => other(),
                    }
                }
                _ => other(),
            },
            ("req_ssl_sni" | "req.ssl_sni", converters) => match without_lower(converters) {
                (is_lower, "") => names(method, &patterns, is_blind, is_lower),
                (is_lower, rest) => match (Mapping::of(rest), method) {
                    (Some(map), Some("found")) => self.mapped(&map, is_lower, &|_| true),
                    (Some(map), None | Some("str")) => {
                        let is_same = |pattern: &String, value: &str| match is_blind {
                            true => pattern.eq_ignore_ascii_case(value),
                            false => pattern == value,
                        };
                        self.mapped(&map, is_lower, &|value| patterns.iter().any(|one| is_same(one, value)))
                    }
                    _ => other(),
                },
            },
            (sample, "") if is_of_other_bytes(sample, method, &patterns) => {
                Condition::new(When::All(vec![When::Tls.not(), When::Unknown]))
            }
            _ => other(),
        }
    }

    /// Returns the content of a file that the config names.
    pub(super) fn file(&self, path: &str) -> Option<String> {
        (self.read)(path)
    }

    /// Returns the condition that a map has a value for the server name that `is_wanted`.
    fn mapped(&self, map: &Mapping<'_>, is_lower: bool, is_wanted: &dyn Fn(&str) -> bool) -> Condition {
        let Some(text) = self.file(map.path) else {
            return Condition::unknown(format!("the file {} cannot be read", map.path));
        };
        let Ok(lines) = map.in_order(&text).into_iter().collect::<Result<Vec<_>, _>>() else {
            return Condition::unknown(format!("{} has lines that are not a name and a value", map.path));
        };
        let of_line = |(pattern, value): &(&str, &str)| {
            (of_map(map.method, &[pattern], is_lower).when, is_wanted(value))
        };
        let mut entries: Vec<(When, bool)> = lines.iter().map(of_line).collect();
        let names: Vec<&str> = lines.iter().map(|(name, _)| *name).collect();
        let whole = of_map(map.method, &names, is_lower);
        if map.default.is_some_and(is_wanted) {
            entries.push((When::Names(vec![Pattern::new(How::Any, "")]), true));
        }
        Condition { when: first_match(entries), ..whole }
    }
}

/// Returns the sample of a fetch and its converters: `payload(0,4)` and `hex` of `payload(0,4),hex`.
fn of_fetch(fetch: &str) -> (&str, &str) {
    let mut depth = 0_usize;
    let at = fetch.find(|sign| {
        depth = if sign == '(' { depth + 1 } else { depth.saturating_sub(usize::from(sign == ')')) };
        sign == ',' && depth == 0
    });
    at.map_or((fetch, ""), |at| (&fetch[..at], &fetch[at + 1..]))
}

/// Returns true if a condition on the first bytes is false for a TLS client, whose first byte is 0x16.
fn is_of_other_bytes(sample: &str, method: Option<&str>, patterns: &[String]) -> bool {
    let is_first = ["payload(0,", "req.payload(0,"].iter().any(|start| sample.starts_with(start));
    let is_other = |pattern: &String| match method {
        // HAProxy reads the bytes of a payload as hexadecimal unless `-m` says otherwise.
        None | Some("bin") => pattern.len() >= 2 && !pattern.starts_with("16"),
        Some("str" | "beg") => !pattern.is_empty() && !pattern.starts_with('\u{16}'),
        Some(_) => false,
    };
    is_first && !patterns.is_empty() && patterns.iter().all(is_other)
}

/// Returns the condition that a name matches one of these patterns.
fn names(method: Option<&str>, patterns: &[String], is_blind: bool, is_lower: bool) -> Condition {
    let how = match method {
        None | Some("str") => How::Name,
        Some("end") => How::End,
        Some("dom") => How::Labels,
        Some("beg") => How::Start,
        Some("sub") => How::Part,
        Some("found") => How::Any,
        Some(_) => How::Other,
    };
    let mut condition = Condition::new(When::Unknown);
    if patterns.is_empty() && how != How::Any {
        return Condition::unknown("the condition has no name");
    }
    let has_capitals = |text: &str| text.bytes().any(|byte| byte.is_ascii_uppercase());
    // A text with a capital never matches a name that is made lower before; an expression, such as `\S`, may.
    let is_upper = |pattern: &String| is_lower && !is_blind && has_capitals(pattern);
    let mut all: Vec<Pattern> = Vec::new();
    for pattern in patterns {
        match how {
            How::Other if is_upper(pattern) => {
                let fault =
                    format!("{pattern}: an expression with capitals cannot be converted after `lower`");
                condition.faults.push(fault);
                all.push(Pattern::new(how, pattern));
            }
            _ if is_upper(pattern) => {}
            How::Other => all.extend(expression(method.unwrap_or_default(), pattern, &mut condition)),
            how => all.push(Pattern::new(how, pattern)),
        }
    }
    if how == How::Any {
        all.push(Pattern::new(how, ""));
    }
    let whole_names: Vec<String> = patterns.iter().filter(|one| !one.starts_with('.')).cloned().collect();
    match (how, method.unwrap_or_default()) {
        (How::End, _) if !whole_names.is_empty() => condition.differs.push(format!(
            "`-m end {}` also matches names such as bad{}; the routes are such a name and those below it",
            names_of(&whole_names),
            whole_names[0]
        )),
        (How::Labels, _) => condition.differs.push(format!(
            "`-m dom {}` also matches names with such a name in the middle; the routes are that name and those below it",
            names_of(patterns)
        )),
        (How::Start | How::Part, method) => condition.differs.push(format!(
            "`-m {method} {}` matches names of which a route cannot tell; it counts where routes have such names",
            names_of(patterns)
        )),
        _ => {}
    }
    if !is_blind && !is_lower && how != How::Any {
        let text = "without `-i` HAProxy matches upper and lower case separately, but a route ignores case";
        condition.differs.push(text.to_owned());
    }
    condition.when = When::Names(all);
    condition
}

/// Returns the patterns of a regular expression, or of another method that is not known.
fn expression(method: &str, text: &str, condition: &mut Condition) -> Vec<Pattern> {
    if method != "reg" {
        let fault = format!("`-m {method}` cannot be converted; a route is an exact name or \"*.suffix\"");
        condition.faults.push(fault);
        return vec![Pattern::new(How::Other, text)];
    }
    let Reading { patterns, lack } = expressions::read(text);
    match lack {
        Some((Fate::NotConverted, fault)) => condition.faults.push(fault),
        Some((Fate::Differs | Fate::NotNeeded, text)) => condition.differs.push(text),
        None => {}
    }
    patterns
}

/// Returns the condition of lines of a map: their names have no letter case if they are made lower before.
pub(super) fn of_map(method: &str, patterns: &[&str], is_lower: bool) -> Condition {
    if patterns.is_empty() {
        return Condition::new(When::never());
    }
    let patterns: Vec<String> = patterns.iter().map(|one| (*one).to_owned()).collect();
    names(Some(method), &patterns, false, is_lower)
}

/// Returns the limit that a sample fetch counts.
fn limit(sample: &str) -> Option<fn(u64) -> SourceLimit> {
    let name = sample.split('(').next().unwrap_or(sample);
    match name {
        "src_conn_cur" | "sc_conn_cur" | "sc0_conn_cur" | "sc1_conn_cur" | "sc2_conn_cur" => {
            Some(SourceLimit::Connections)
        }
        "src_conn_rate" | "sc_conn_rate" | "sc0_conn_rate" | "sc1_conn_rate" | "sc2_conn_rate" => {
            Some(SourceLimit::Rate)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(path: &str) -> Option<String> {
        match path {
            "names.lst" => Some("# names\na.test\n\n b.test\n".to_owned()),
            "hosts.map" => Some("# names\na.test a\n\n b.test   b\n".to_owned()),
            _ => None,
        }
    }

    fn names(how: How, texts: &[&str]) -> When {
        When::Names(texts.iter().map(|text| Pattern::new(how, text)).collect())
    }

    #[test]
    fn conditions_are_read_as_haproxy_reads_them() {
        let mut acls = Acls::new(&read);
        for line in [
            "shop req_ssl_sni -i shop.test",
            "shop req.ssl_sni,lower -m end .shop.test",
            "office src 10.0.0.0/8",
            "busy sc0_conn_cur gt 20",
            "listed req.ssl_sni -i -f names.lst c.test",
            "odd dst 10.0.0.1",
        ] {
            acls.add(&line.split(' ').collect::<Vec<_>>());
        }
        let block = Sources::block("10.0.0.0/8").expect("a block");
        let office = When::Sources(block.clone(), block.with_kin());
        let shop = When::Any(vec![names(How::Name, &["shop.test"]), names(How::End, &[".shop.test"])]);
        for (condition, wanted) in [
            ("if shop", shop.clone()),
            ("unless office", office.clone().not()),
            ("if !office", office.clone().not()),
            ("if ! office", office.clone().not()),
            ("if !!office", office.clone()),
            ("if !{ src 10.0.0.0/8 }", office.clone().not()),
            ("if ! { src 10.0.0.0/8 } shop", When::All(vec![office.clone().not(), shop.clone()])),
            ("if shop office or busy", {
                let limit = When::Limit(SourceLimit::Connections(20));
                When::Any(vec![When::All(vec![shop, office]), limit])
            }),
            ("if listed", names(How::Name, &["a.test", "b.test", "c.test"])),
            ("if { req.ssl_sni -m found }", names(How::Any, &[""])),
            ("if { req.ssl_sni -m reg -i ^a }", names(How::Start, &["a"])),
            ("if { req.ssl_sni -m reg -i \\.a\\.test$ }", names(How::End, &[".a.test"])),
            ("if { req.ssl_sni -m reg -i ^a[0-9] }", names(How::Other, &["^a[0-9]"])),
            ("if { req.ssl_sni,lower,map(hosts.map) -m found }", names(How::Name, &["a.test", "b.test"])),
            ("if { req.ssl_sni,lower,map(hosts.map) b }", names(How::Name, &["b.test"])),
            ("if { payload(0,4) -m bin 5353482d }", When::All(vec![When::Tls.not(), When::Unknown])),
            ("if { req.payload(0,1) -m bin 16 }", When::Unknown),
            ("if { req.ssl_sni,lower A.test b.test }", names(How::Name, &["b.test"])),
            ("if { src_conn_rate ge 5 }", When::Limit(SourceLimit::Rate(4))),
            ("if { req.ssl_alpn acme-tls/1 }", When::Any(vec![When::Protocol("acme-tls/1".to_owned())])),
            ("if FALSE", When::never()),
            ("", When::Always),
            ("if odd", When::Unknown),
            ("if nobody", When::Unknown),
            ("if", When::Unknown),
            ("if !", When::Unknown),
            ("if { src -f no.lst }", When::Unknown),
            ("if { src localhost }", When::Unknown),
            ("if { req.ssl_sni,field(1,.) a }", When::Unknown),
            ("whenever shop", When::Unknown),
        ] {
            let words: Vec<&str> = condition.split_whitespace().collect();
            let found = acls.condition(&words);
            assert_eq!(found.when, wanted, "{condition}");
            assert_eq!(
                found.when == When::Unknown,
                !found.faults.is_empty() && wanted == When::Unknown,
                "{condition}"
            );
        }
    }
}
