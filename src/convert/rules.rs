//! The conditions of HAProxy's rules, as far as they concern the server name, the source, the ALPN protocols and limits of
//! sources: what a rule matches.

use std::collections::BTreeMap;
use std::net::IpAddr;

use isthmus_document::scalar::host_name;

/// The names that a route matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Names {
    /// One host name.
    Exact(String),
    /// All names below this one.
    Below(String),
    /// All names, but not clients that send none.
    Named,
    /// All clients that speak TLS, also those that send no name.
    All,
}

impl Names {
    /// Returns the keys of the routes for these names.
    pub(super) fn keys(&self) -> Vec<String> {
        match self {
            Self::Exact(name) => vec![name.clone()],
            Self::Below(name) => vec![format!("*.{name}")],
            Self::Named => vec!["*".to_owned()],
            Self::All => vec!["*".to_owned(), "-".to_owned()],
        }
    }

    /// Returns what is left of these names for a rule after others that have taken `taken`: after all names, only clients that send
    /// none.
    pub(super) fn left_by<'a>(&self, mut taken: impl Iterator<Item = &'a Self>) -> Self {
        match self {
            Self::All if taken.any(|earlier| *earlier == Self::Named) => Self::Exact("-".to_owned()),
            _ => self.clone(),
        }
    }

    /// Returns true if every name that `other` matches is also matched by `self`.
    pub(super) fn cover(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::All, _) => true,
            (_, Self::All)
            | (Self::Exact(_) | Self::Below(_), Self::Named)
            | (Self::Exact(_), Self::Below(_)) => false,
            (Self::Named, other) => *other != Self::Exact("-".to_owned()),
            (Self::Exact(one), Self::Exact(other)) => one == other,
            (Self::Below(above), Self::Exact(name) | Self::Below(name)) => {
                let is_same = matches!(other, Self::Below(_)) && name == above;
                is_same || name.strip_suffix(above.as_str()).is_some_and(|rest| rest.ends_with('.'))
            }
        }
    }
}

/// The largest numbers of groups in a regular expression, and of patterns that it stands for.
const GROUPS_MAX: usize = 4;
const PATTERNS_MAX: usize = 16;

/// Returns the patterns without groups that a regular expression stands for: `^a\.test$` and `^b\.test$` for `^(a|b)\.test$`. Returns
/// `None` if a group repeats or contains another one, or if the patterns are too many.
pub(super) fn without_groups(expression: &str) -> Option<Vec<String>> {
    if expression.matches('(').count() > GROUPS_MAX {
        return None;
    }
    let Some((before, rest)) = expression.split_once('(') else { return Some(vec![expression.to_owned()]) };
    let (group, after) = rest.split_once(')')?;
    let (is_optional, after) = after.strip_prefix('?').map_or((false, after), |after| (true, after));
    if group.contains('(') || after.starts_with(['*', '+', '{']) {
        return None;
    }
    let alternatives = group.strip_prefix("?:").unwrap_or(group).split('|');
    let mut all = Vec::new();
    for alternative in alternatives.chain(is_optional.then_some("")) {
        all.extend(without_groups(&format!("{before}{alternative}{after}"))?);
    }
    (all.len() <= PATTERNS_MAX).then_some(all)
}

/// One term of a condition.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Term {
    /// The server name is one of these.
    Names(Vec<Names>),
    /// The client speaks TLS, which every client of isthmus does.
    Tls,
    /// The source is in one of these blocks.
    Sources(Vec<String>),
    /// The client offers one of these protocols by ALPN.
    Protocols(Vec<String>),
    /// The source has too many connections.
    Limit(SourceLimit),
    /// Any other condition, described by the text.
    Other(String),
}

/// A limit of the connections of one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SourceLimit {
    /// At most this number at a time.
    Connections(u64),
    /// At most this number in the period of the table.
    Rate(u64),
}

/// One alternative of a condition: all of its parts must be true.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) names: Vec<Names>,
    /// The blocks of the source; empty: all.
    pub(super) sources: Vec<String>,
    /// The protocols of which the client offers one; empty: any.
    pub(super) protocols: Vec<String>,
}

/// The conditions that a rule matches, and the ways in which the routes for it differ from the rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Matched {
    pub(super) groups: Vec<Group>,
    pub(super) differs: Vec<String>,
}

impl Matched {
    /// Returns true if the rule matches all clients that speak TLS.
    pub(super) fn is_all(&self) -> bool {
        self.groups == [Group { names: vec![Names::All], ..Group::default() }]
    }
}

/// The named conditions of a section. Several lines with the same name are alternatives.
#[derive(Debug, Default)]
pub(super) struct Acls(BTreeMap<String, Vec<Term>>);

impl Acls {
    /// Adds an `acl` line, given without its first word. Returns the differences from HAProxy's behaviour, or the reason why no
    /// rule can use the line.
    pub(super) fn add(&mut self, words: &[&str]) -> Result<Vec<String>, String> {
        let Some((name, test)) = words.split_first() else { return Err("the acl has no name".to_owned()) };
        let mut differs = Vec::new();
        let term = term(test, &mut differs);
        let result = match &term {
            Term::Other(text) => Err(format!("{text}; rules that use the acl {name} are not converted")),
            Term::Names(_) | Term::Tls | Term::Sources(_) | Term::Protocols(_) | Term::Limit(_) => {
                Ok(differs)
            }
        };
        self.0.entry((*name).to_owned()).or_default().push(term);
        result
    }

    /// Returns the names that a condition matches; `words` are the words after the target of a rule. The error describes the
    /// part that cannot be converted.
    pub(super) fn matched(&self, words: &[&str]) -> Result<Matched, String> {
        let Some((first, words)) = words.split_first() else {
            let all = Group { names: vec![Names::All], ..Group::default() };
            return Ok(Matched { groups: vec![all], differs: Vec::new() });
        };
        if *first != "if" {
            return Err(format!("the word {first:?} cannot be converted, only `if`"));
        }
        let mut matched = Matched::default();
        for group in words.split(|word| ["||", "or", "OR"].contains(word)) {
            let found = self.group(group, &mut matched.differs)?;
            // Alternatives that differ only in their names are one.
            match matched
                .groups
                .iter_mut()
                .find(|one| (&one.sources, &one.protocols) == (&found.sources, &found.protocols))
            {
                Some(known) => known.names.extend(found.names),
                None => matched.groups.push(found),
            }
        }
        Ok(matched)
    }

    /// Returns the blocks of the only sources for which a condition is false, such as `if !{ src 10.0.0.0/8 }`.
    pub(super) fn all_but(&self, words: &[&str]) -> Option<Vec<String>> {
        let text = words.join(" ");
        let rest =
            text.strip_prefix("unless ").or_else(|| text.strip_prefix("if !"))?.trim_start().to_owned();
        let words: Vec<&str> = std::iter::once("if").chain(rest.split_whitespace()).collect();
        let matched = self.matched(&words).ok()?;
        match &matched.groups[..] {
            [Group { names, sources, protocols }] if *names == [Names::All] && protocols.is_empty() => {
                Some(sources.clone()).filter(|sources| !sources.is_empty())
            }
            _ => None,
        }
    }

    /// Returns the limit of sources above which a condition is true.
    pub(super) fn limit(&self, words: &[&str]) -> Option<SourceLimit> {
        let term = match words {
            ["if", "{", test @ .., "}"] => term(test, &mut Vec::new()),
            ["if", name] => self.0.get(*name).filter(|terms| terms.len() == 1)?.first()?.clone(),
            _ => return None,
        };
        if let Term::Limit(limit) = term { Some(limit) } else { None }
    }

    /// Returns what makes all terms of a condition true.
    fn group(&self, words: &[&str], differs: &mut Vec<String>) -> Result<Group, String> {
        let (mut found, mut rest) = (None, words);
        let mut group = Group::default();
        if rest.is_empty() {
            return Err("an alternative has no condition".to_owned());
        }
        while let Some((word, after)) = rest.split_first() {
            if word.starts_with('!') {
                return Err(format!("the negation {word} cannot be converted"));
            }
            let terms = if *word == "{" {
                let end = after.iter().position(|word| *word == "}").ok_or("a `{` has no `}`")?;
                let term = term(&after[..end], differs);
                rest = &after[end + 1..];
                vec![term]
            } else {
                rest = after;
                match (self.0.get(*word), *word) {
                    (Some(terms), _) => terms.clone(),
                    (None, "TRUE" | "WAIT_END") => vec![Term::Tls],
                    (None, word) => return Err(format!("this section has no acl {word}")),
                }
            };
            let names = match &terms[..] {
                [Term::Sources(_), ..] if group.sources.is_empty() => {
                    group.sources = sources(&terms)?;
                    None
                }
                [Term::Protocols(protocols)] if group.protocols.is_empty() => {
                    group.protocols.clone_from(protocols);
                    None
                }
                _ => alternatives(terms)?,
            };
            match (names, &found) {
                (None, _) => {}
                (names, None) => found = names,
                (Some(_), Some(_)) => {
                    return Err(
                        "two conditions on the server name in one rule cannot be converted".to_owned()
                    );
                }
            }
        }
        group.names = found.unwrap_or_else(|| vec![Names::All]);
        Ok(group)
    }
}

/// Returns the blocks of terms that are all about the source.
fn sources(terms: &[Term]) -> Result<Vec<String>, String> {
    let mut all = Vec::new();
    for term in terms {
        match term {
            Term::Sources(blocks) => all.extend_from_slice(blocks),
            _ => return Err("an acl about the source and about another thing cannot be converted".to_owned()),
        }
    }
    Ok(all)
}

/// Returns the names for which at least one of the terms is true; `None` if a term is true for all clients.
fn alternatives(terms: Vec<Term>) -> Result<Option<Vec<Names>>, String> {
    let mut all = Vec::new();
    for term in terms {
        match term {
            Term::Names(names) => all.extend(names),
            Term::Tls => return Ok(None),
            Term::Other(text) => return Err(text),
            Term::Sources(_) | Term::Protocols(_) | Term::Limit(_) => {
                return Err("the conditions of one acl or rule cannot be converted together".to_owned());
            }
        }
    }
    Ok(Some(all))
}

/// Parses the test of an ACL: a sample fetch (the value that is tested), its flags, and its patterns.
fn term(words: &[&str], differs: &mut Vec<String>) -> Term {
    let Some((fetch, mut rest)) = words.split_first() else {
        return Term::Other("a condition is empty".to_owned());
    };
    let (sample, converters) = fetch.split_once(',').unwrap_or((fetch, ""));
    let (mut method, mut is_blind) = ("str", converters == "lower");
    while let Some((flag, after)) = rest.split_first().filter(|(word, _)| word.starts_with('-')) {
        rest = after;
        match *flag {
            "-i" => is_blind = true,
            "-n" => {}
            "-m" => match rest.split_first() {
                Some((word, after)) => (method, rest) = (word, after),
                None => return Term::Other("`-m` has no method".to_owned()),
            },
            "--" => break,
            flag => return Term::Other(format!("the flag {flag} cannot be converted")),
        }
    }
    match sample {
        "req_ssl_hello_type" | "req.ssl_hello_type" if rest == ["1"] && converters.is_empty() => Term::Tls,
        "src" if converters.is_empty() && ["str", "ip"].contains(&method) => {
            let blocks: Option<Vec<String>> = rest.iter().map(|text| block(text)).collect();
            match blocks.filter(|blocks| !blocks.is_empty()) {
                Some(blocks) => Term::Sources(blocks),
                None => Term::Other(format!("the sources {:?} are no addresses", rest.join(" "))),
            }
        }
        "req.ssl_alpn" | "req_ssl_alpn"
            if converters.is_empty() && ["str", "sub"].contains(&method) && !rest.is_empty() =>
        {
            Term::Protocols(rest.iter().map(|text| (*text).to_owned()).collect())
        }
        _ if limit(sample).is_some() && converters.is_empty() => match rest {
            [comparison @ ("gt" | "ge"), number] => {
                match number.parse::<u64>().ok().filter(|number| *number > 0) {
                    Some(number) => {
                        let most = if *comparison == "gt" { number } else { number - 1 };
                        limit(sample).map_or(Term::Tls, |limit| Term::Limit(limit(most.max(1))))
                    }
                    None => Term::Other(format!("{number:?} is no number of connections")),
                }
            }
            _ => Term::Other(format!("the condition {:?} cannot be converted", words.join(" "))),
        },
        "req_ssl_sni" | "req.ssl_sni" if ["", "lower"].contains(&converters) => {
            let mut names = Vec::new();
            for pattern in rest {
                match of_pattern(method, pattern, differs) {
                    Ok(found) => names.extend(found),
                    Err(text) => return Term::Other(text),
                }
            }
            if !is_blind {
                differs.push(
                    "without `-i` HAProxy matches upper and lower case separately, but a route ignores case"
                        .to_owned(),
                );
            }
            if names.is_empty() {
                Term::Other("the condition has no name".to_owned())
            } else {
                Term::Names(names)
            }
        }
        _ => Term::Other(format!(
            "the condition {:?} cannot be converted; only conditions on the SNI, the source and ALPN can be",
            words.join(" ")
        )),
    }
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

/// Returns a block of addresses in the form of the config.
fn block(text: &str) -> Option<String> {
    let (address, length) =
        text.split_once('/').map_or((text, None), |(address, length)| (address, Some(length)));
    let address: IpAddr = address.parse().ok()?;
    let whole: u8 = if address.is_ipv4() { 32 } else { 128 };
    let length =
        length.map_or(Some(whole), |length| length.parse().ok()).filter(|length| *length <= whole)?;
    Some(format!("{address}/{length}"))
}

/// Returns the names that a pattern matches.
pub(super) fn of_pattern(
    method: &str,
    pattern: &str,
    differs: &mut Vec<String>,
) -> Result<Vec<Names>, String> {
    let name = |text: &str| match host_name(text) {
        Ok(name) => Ok(name.as_str().to_owned()),
        Err(error) => Err(format!("{pattern:?} is not a host name: {}", error.message)),
    };
    match (method, pattern.strip_prefix('.')) {
        ("str", None) => Ok(vec![Names::Exact(name(pattern)?)]),
        ("str", Some(_)) => Err(format!("{pattern:?} is not a host name")),
        ("end", Some(rest)) => Ok(vec![Names::Below(name(rest)?)]),
        ("end", None) => {
            let name = name(pattern)?;
            differs.push(format!(
                "`-m end {pattern}` also matches names such as bad{pattern}; the routes are {name} and *.{name}"
            ));
            Ok(vec![Names::Exact(name.clone()), Names::Below(name)])
        }
        ("dom", rest) => {
            let name = name(rest.unwrap_or(pattern))?;
            differs.push(format!(
                "`-m dom {pattern}` also matches names with {name} in the middle; the routes are {name} and \
                                  *.{name}"
            ));
            Ok(vec![Names::Exact(name.clone()), Names::Below(name)])
        }
        (method, _) => {
            Err(format!("`-m {method}` cannot be converted; a route is an exact name or \"*.suffix\""))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(acls: &Acls, condition: &str) -> Result<String, String> {
        let words: Vec<&str> = condition.split(' ').collect();
        let keys = |group: Group| {
            let names = group.names.iter().flat_map(Names::keys).collect::<Vec<_>>().join(" ");
            let from = if group.sources.is_empty() {
                String::new()
            } else {
                format!(" from {}", group.sources.join(" "))
            };
            let alpn = if group.protocols.is_empty() {
                String::new()
            } else {
                format!(" alpn {}", group.protocols.join(" "))
            };
            format!("{names}{from}{alpn}")
        };
        acls.matched(&words)
            .map(|matched| matched.groups.into_iter().map(keys).collect::<Vec<_>>().join("; "))
    }

    #[test]
    fn conditions_on_the_server_name_are_names() {
        let mut acls = Acls::default();
        for (line, is_used) in [
            ("shop req_ssl_sni -i shop.test", true),
            ("shop req.ssl_sni,lower -m end .shop.test", true),
            ("tls req.ssl_hello_type 1", true),
            ("office src 10.0.0.0/8 192.0.2.1", true),
            ("listed src -f blocklist", false),
            ("busy sc0_conn_cur gt 20", true),
        ] {
            let words: Vec<&str> = line.split(' ').collect();
            assert_eq!(acls.add(&words).is_ok(), is_used, "{line}");
        }
        for (condition, wanted) in [
            ("if shop", "shop.test *.shop.test"),
            ("if tls shop", "shop.test *.shop.test"),
            ("if { req_ssl_sni a.test B.test } or { req.ssl_sni -m str -- c.test }", "a.test b.test c.test"),
            ("if tls", "* -"),
            ("if office", "* - from 10.0.0.0/8 192.0.2.1/32"),
            ("if shop office", "shop.test *.shop.test from 10.0.0.0/8 192.0.2.1/32"),
            ("if { req.ssl_alpn acme-tls/1 }", "* - alpn acme-tls/1"),
            (
                "if { req_ssl_sni a.test } or office shop",
                "a.test; shop.test *.shop.test from 10.0.0.0/8 192.0.2.1/32",
            ),
            ("if { req_ssl_hello_type 1 } shop || { req_ssl_sni d.test }", "shop.test *.shop.test d.test"),
        ] {
            assert_eq!(names(&acls, condition).as_deref(), Ok(wanted), "{condition}");
        }
        assert_eq!(acls.limit(&["if", "busy"]), Some(SourceLimit::Connections(20)));
        assert_eq!(acls.limit(&["if", "{", "src_conn_rate", "ge", "5", "}"]), Some(SourceLimit::Rate(4)));
        let office = Some(vec!["10.0.0.0/8".to_owned(), "192.0.2.1/32".to_owned()]);
        assert_eq!(
            (acls.all_but(&["unless", "office"]), acls.all_but(&["if", "!office"])),
            (office.clone(), office)
        );
        assert_eq!(acls.all_but(&["if", "!{", "src", "::1", "}"]), Some(vec!["::1/128".to_owned()]));
        assert_eq!(acls.all_but(&["if", "office"]), None);
        for condition in [
            "unless shop",
            "if !shop",
            "if listed",
            "if busy",
            "if shop shop",
            "if nobody",
            "if { req_ssl_sni -m reg ^a }",
            "if { req_ssl_sni -f names.lst }",
            "if { req_ssl_sni",
            "if { req_ssl_hello_type 2 }",
            "if { req_ssl_sni *.a.test }",
            "if { req_ssl_sni -i 10.0.0.1 }",
            "if shop or",
            "if",
        ] {
            assert!(names(&acls, condition).is_err(), "{condition}: {:?}", names(&acls, condition));
        }
    }

    #[test]
    fn an_end_without_a_dot_takes_more_than_a_route() {
        let mut differs = Vec::new();
        let names = of_pattern("end", "a.test", &mut differs).expect("names");
        assert_eq!(names, [Names::Exact("a.test".to_owned()), Names::Below("a.test".to_owned())]);
        assert_eq!(differs.len(), 1);
    }

    #[test]
    fn groups_of_alternatives_are_patterns_of_their_own() {
        let of = |expression: &str| without_groups(expression).map(|all| all.join(" "));
        for (expression, wanted) in [
            ("^a$", Some("^a$")),
            ("^(a|b)\\.(?:x|y)$", Some("^a\\.x$ ^a\\.y$ ^b\\.x$ ^b\\.y$")),
            ("^(www\\.)?a$", Some("^www\\.a$ ^a$")),
            ("^(a)*$", None),
            ("^((a))$", None),
            ("(a|b)(a|b)(a|b)(a|b)(a|b)", None),
            ("(1|2|3|4|5)(1|2|3|4)", None),
            ("^(a", None),
        ] {
            assert_eq!(of(expression).as_deref(), wanted, "{expression}");
        }
    }

    #[test]
    fn names_cover_those_below_them() {
        let (exact, below) =
            (|name: &str| Names::Exact(name.to_owned()), |name: &str| Names::Below(name.to_owned()));
        assert!(
            Names::Named.cover(&below("a"))
                && Names::All.cover(&Names::Named)
                && !Names::Named.cover(&Names::All)
        );
        assert!(!Names::Named.cover(&exact("-")) && !below("a").cover(&Names::Named));
        assert!(Names::All.cover(&below("a")) && below("a.b").cover(&exact("x.a.b")));
        assert!(
            below("b").cover(&below("a.b")) && below("b").cover(&below("b")) && exact("a").cover(&exact("a"))
        );
        for (one, other) in [
            (below("a.b"), exact("a.b")),
            (below("a.b"), exact("xa.b")),
            (below("a.b"), below("b")),
            (exact("a"), below("a")),
            (below("a"), Names::All),
        ] {
            assert!(!one.cover(&other), "{one:?} {other:?}");
        }
    }
}
