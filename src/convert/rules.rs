//! The conditions of HAProxy's rules, as far as they concern the server name: the names that a rule matches.

use std::collections::BTreeMap;

use isthmus_document::scalar::host_name;

/// The names that a route matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Names {
    /// One host name.
    Exact(String),
    /// All names below this one.
    Below(String),
    /// All clients that speak TLS, also those that send no name.
    All,
}

impl Names {
    /// Returns the keys of the routes for these names.
    pub(super) fn keys(&self) -> Vec<String> {
        match self {
            Self::Exact(name) => vec![name.clone()],
            Self::Below(name) => vec![format!("*.{name}")],
            Self::All => vec!["*".to_owned(), "-".to_owned()],
        }
    }

    /// Returns true if every name that `other` matches is also matched by `self`.
    pub(super) fn cover(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::All, _) => true,
            (_, Self::All) | (Self::Exact(_), Self::Below(_)) => false,
            (Self::Exact(one), Self::Exact(other)) => one == other,
            (Self::Below(above), Self::Exact(name) | Self::Below(name)) => {
                let is_same = matches!(other, Self::Below(_)) && name == above;
                is_same || name.strip_suffix(above.as_str()).is_some_and(|rest| rest.ends_with('.'))
            }
        }
    }
}

/// One term of a condition.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Term {
    /// The server name is one of these.
    Names(Vec<Names>),
    /// The client speaks TLS, which every client of isthmus does.
    Tls,
    /// Any other condition, described by the text.
    Other(String),
}

/// The names that a rule matches, and the ways in which the routes for them differ from the rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Matched {
    pub(super) names: Vec<Names>,
    pub(super) differs: Vec<String>,
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
            Term::Names(_) | Term::Tls => Ok(differs),
        };
        self.0.entry((*name).to_owned()).or_default().push(term);
        result
    }

    /// Returns the names that a condition matches; `words` are the words after the target of a rule. The error describes the
    /// part that cannot be converted.
    pub(super) fn matched(&self, words: &[&str]) -> Result<Matched, String> {
        let Some((first, words)) = words.split_first() else {
            return Ok(Matched { names: vec![Names::All], differs: Vec::new() });
        };
        if *first != "if" {
            return Err(format!("the word {first:?} cannot be converted, only `if`"));
        }
        let mut matched = Matched::default();
        for group in words.split(|word| ["||", "or", "OR"].contains(word)) {
            matched.names.extend(self.group(group, &mut matched.differs)?);
        }
        Ok(matched)
    }

    /// Returns the names for which all terms of a condition are true.
    fn group(&self, words: &[&str], differs: &mut Vec<String>) -> Result<Vec<Names>, String> {
        let (mut found, mut rest) = (None, words);
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
            let names = alternatives(terms)?;
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
        Ok(found.unwrap_or_else(|| vec![Names::All]))
    }
}

/// Returns the names for which at least one of the terms is true; `None` if a term is true for all clients.
fn alternatives(terms: Vec<Term>) -> Result<Option<Vec<Names>>, String> {
    let mut all = Vec::new();
    for term in terms {
        match term {
            Term::Names(names) => all.extend(names),
            Term::Tls => return Ok(None),
            Term::Other(text) => return Err(text),
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
            "the condition {:?} cannot be converted; only conditions on the SNI can be",
            words.join(" ")
        )),
    }
}

/// Returns the names that a pattern matches.
fn of_pattern(method: &str, pattern: &str, differs: &mut Vec<String>) -> Result<Vec<Names>, String> {
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
        let keys = |names: Vec<Names>| names.iter().flat_map(Names::keys).collect::<Vec<_>>().join(" ");
        acls.matched(&words).map(|matched| keys(matched.names))
    }

    #[test]
    fn conditions_on_the_server_name_are_names() {
        let mut acls = Acls::default();
        for (line, is_used) in [
            ("shop req_ssl_sni -i shop.test", true),
            ("shop req.ssl_sni,lower -m end .shop.test", true),
            ("tls req.ssl_hello_type 1", true),
            ("office src 10.0.0.0/8", false),
        ] {
            let words: Vec<&str> = line.split(' ').collect();
            assert_eq!(acls.add(&words).is_ok(), is_used, "{line}");
        }
        for (condition, wanted) in [
            ("if shop", "shop.test *.shop.test"),
            ("if tls shop", "shop.test *.shop.test"),
            ("if { req_ssl_sni a.test B.test } or { req.ssl_sni -m str -- c.test }", "a.test b.test c.test"),
            ("if tls", "* -"),
            ("if { req_ssl_hello_type 1 } shop || { req_ssl_sni d.test }", "shop.test *.shop.test d.test"),
        ] {
            assert_eq!(names(&acls, condition).as_deref(), Ok(wanted), "{condition}");
        }
        for condition in [
            "unless shop",
            "if !shop",
            "if office",
            "if shop office",
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
    fn names_cover_those_below_them() {
        let (exact, below) =
            (|name: &str| Names::Exact(name.to_owned()), |name: &str| Names::Below(name.to_owned()));
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
