//! The regular expressions of the three programs that mean names, as patterns: an exact name, the end or the start of names, or a part.

use crate::draft::Fate;
use crate::names::{How, Pattern};

/// The largest numbers of groups in a regular expression, and of patterns that it stands for.
const GROUPS_MAX: usize = 4;
const PATTERNS_MAX: usize = 16;

/// The patterns of a regular expression, and what they lack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reading {
    /// The patterns whose names the expression surely matches, and one of unknown names if it matches further ones.
    pub(super) patterns: Vec<Pattern>,
    /// The remark on an expression that matches other names than those of the routes.
    pub(super) lack: Option<(Fate, String)>,
}

/// Reads a regular expression without its delimiters.
pub(super) fn read(expression: &str) -> Reading {
    let unknown = Pattern::new(How::Other, expression);
    let (mut patterns, mut is_open, mut is_partial) = (Vec::new(), false, false);
    let alternatives = without_groups(&plain(expression)).filter(|_| !has_odd_delimiters(expression));
    let all = alternatives.unwrap_or_else(|| vec![expression.to_owned()]);
    for alternative in all.iter().filter(|one| !has_port_or_path(one)) {
        // The gateway reads a name with a last dot as the name without it.
        let without_dot = alternative.strip_suffix("\\.$").map(|rest| format!("{rest}$"));
        if without_dot.is_some_and(|other| all.contains(&other)) {
            continue;
        }
        match of_one(alternative) {
            Some((pattern, is_wider)) => {
                patterns.push(pattern);
                is_open |= is_wider;
            }
            None => is_partial = true,
        }
    }
    let is_exact = patterns.iter().all(Pattern::is_exact) && !is_open;
    let lack = if patterns.is_empty() {
        let text = format!("{expression}: a regular expression has no counterpart");
        Some((Fate::NotConverted, text))
    } else if is_partial {
        let text = format!(
            "{expression}: a part of the regular expression has no counterpart; its clients are refused, or take other routes"
        );
        Some((Fate::NotConverted, text))
    } else if !is_exact {
        let text = format!(
            "{expression}: matches names that are none of the routes', too; their clients are refused, or take other routes"
        );
        Some((Fate::Differs, text))
    } else {
        None
    };
    if is_partial || is_open || patterns.is_empty() {
        patterns.push(unknown);
    }
    Reading { patterns, lack }
}

/// Returns an expression in which a dot has one form, and an optional one is a group.
fn plain(expression: &str) -> String {
    expression.replace("[.]", "\\.").replace("\\.?", "(\\.)?")
}

/// Returns true if an alternative has a literal sign of a port or of a path, which no server name has.
fn has_port_or_path(alternative: &str) -> bool {
    let Some(at) = alternative.find([':', '/']) else { return false };
    let (before, after) = (&alternative[..at], &alternative[at + 1..]);
    // In a class of signs and after `\c`, the sign is not itself, and before `?`, `*` and `{` it may be missing.
    !before.contains('[') && !before.ends_with("\\c") && !after.starts_with(['?', '*', '{'])
}

/// Returns true if an expression has a sign of groups or alternatives that is none: after a backslash, or in a class such as `[^|]`.
fn has_odd_delimiters(expression: &str) -> bool {
    let expression = expression.replace("[.]", "\\.");
    if ["\\|", "\\(", "\\)", "\\Q"].iter().any(|odd| expression.contains(odd)) {
        return true;
    }
    let mut rest = expression.as_str();
    while let Some((_, class)) = rest.split_once('[') {
        let first = usize::from(class.starts_with('^'));
        // A bracket that comes first is a sign of the class, and `[:alnum:]` ends with a bracket of its own.
        let from = first + usize::from(class[first..].starts_with(']'));
        let mut end = from;
        loop {
            let Some(at) = class[end..].find([']', '[']) else { return true };
            end += at;
            match class[end..].strip_prefix("[:").and_then(|named| named.find(":]")) {
                Some(length) => end += length + 4,
                None if class[end..].starts_with('[') => end += 1,
                None => break,
            }
        }
        // The two kinds of expressions of HAProxy read a bracket after a backslash in different ways.
        if class[..end].contains(['|', '(', ')']) || class[..end].ends_with('\\') {
            return true;
        }
        rest = &class[end + 1..];
    }
    false
}

/// Returns the pattern of an expression without groups, and true if the expression matches further names.
fn of_one(expression: &str) -> Option<(Pattern, bool)> {
    let (mut is_begun, rest) = expression.strip_prefix('^').map_or((false, expression), |rest| (true, rest));
    let (mut is_ended, rest) = rest.strip_suffix('$').map_or((false, rest), |rest| (true, rest));
    // No name begins with a dot, so that one or more signs before a dot are as good as any signs.
    let many = |rest: &&str| rest.is_empty() || rest.starts_with('.') || rest.starts_with("\\.");
    let any = rest.strip_prefix(".*").or_else(|| rest.strip_prefix(".+").filter(many));
    is_begun &= any.is_none();
    let rest = any.unwrap_or(rest);
    let any = rest.strip_suffix(".*").filter(|before| !before.ends_with('\\'));
    is_ended &= any.is_none();
    let (text, is_open) = literal(any.unwrap_or(rest))?;
    let how = match (is_begun, is_ended) {
        (true, true) if text.is_empty() => return None,
        _ if text.is_empty() => How::Any,
        (true, true) => How::Name,
        (false, true) => How::End,
        (true, false) => How::Start,
        (false, false) => How::Part,
    };
    Some((Pattern::new(how, &text), is_open))
}

/// Returns the text that an expression stands for, and true if a sign of it stands for others, too.
fn literal(expression: &str) -> Option<(String, bool)> {
    let (mut text, mut is_open) = (String::new(), false);
    let mut signs = expression.chars();
    while let Some(sign) = signs.next() {
        let sign = match sign {
            '\\' => signs.next().filter(|next| !next.is_ascii_alphanumeric())?,
            sign => {
                is_open |= sign == '.';
                sign
            }
        };
        let is_of_name = sign.is_ascii_alphanumeric() || "-_.".contains(sign);
        text.push(Some(sign).filter(|_| is_of_name)?);
    }
    Some((text, is_open))
}

/// Returns the patterns without groups that a regular expression stands for: `^a\.test$` and `^b\.test$` for `^(a|b)\.test$`. Returns
/// `None` if a group repeats, contains another one or is no group of alternatives, or if the patterns are too many.
fn without_groups(expression: &str) -> Option<Vec<String>> {
    if expression.matches('(').count() > GROUPS_MAX {
        return None;
    }
    let Some((before, rest)) = expression.split_once('(') else {
        return Some(expression.split('|').map(str::to_owned).collect());
    };
    let (group, after) = rest.split_once(')')?;
    let (is_optional, after) = after.strip_prefix('?').map_or((false, after), |after| (true, after));
    // An alternative outside of groups would belong to a part of the expression only.
    let outside = after.split('(').next().unwrap_or_default();
    if group.contains('(')
        || after.starts_with(['*', '+', '{'])
        || [before, outside].iter().any(|part| part.contains('|'))
    {
        return None;
    }
    let group = group.strip_prefix("?:").unwrap_or(group);
    // Another mark at its beginning changes what it means, as in `(?!a|b)` and `(?i:a)`.
    if group.starts_with(['?', '*']) {
        return None;
    }
    let alternatives = group.split('|');
    let mut all = Vec::new();
    for alternative in alternatives.chain(is_optional.then_some("")) {
        all.extend(without_groups(&format!("{before}{alternative}{after}"))?);
    }
    (all.len() <= PATTERNS_MAX).then_some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_alternatives_are_patterns_of_their_own() {
        let of = |expression: &str| without_groups(expression).map(|all| all.join(" "));
        for (expression, wanted) in [
            ("^a$", Some("^a$")),
            ("^a$|^b$", Some("^a$ ^b$")),
            ("^(a|b)\\.(?:x|y)$", Some("^a\\.x$ ^a\\.y$ ^b\\.x$ ^b\\.y$")),
            ("^(www\\.)?a$", Some("^www\\.a$ ^a$")),
            ("^(a|b)$|c", None),
            ("^a|(b)$", None),
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
    fn expressions_that_mean_names_are_patterns() {
        let exact = |text: &str| Pattern::new(How::Name, text);
        let end = |text: &str| Pattern::new(How::End, text);
        for (expression, wanted) in [
            ("^a\\.test$", vec![exact("a.test")]),
            ("^a[.]test$", vec![exact("a.test")]),
            ("^(.+\\.)?a\\.test$", vec![end(".a.test"), exact("a.test")]),
            ("(^|\\.)a\\.test$", vec![exact("a.test"), end(".a.test")]),
            ("\\.a\\.test$", vec![end(".a.test")]),
            ("^.*\\.a\\.test$", vec![end(".a.test")]),
            ("^(.+)\\.a\\.test$", vec![end(".a.test")]),
            ("a\\.test$", vec![end("a.test")]),
            ("^a\\.", vec![Pattern::new(How::Start, "a.")]),
            ("a\\.test", vec![Pattern::new(How::Part, "a.test")]),
            (".*", vec![Pattern::new(How::Any, "")]),
            ("^.+$", vec![Pattern::new(How::Any, "")]),
            // The form of OpenShift's router.
            ("^a\\.test\\.?(:[0-9]+)?(/.*)?$", vec![exact("a.test")]),
            ("^bad\\.test\\.?$", vec![exact("bad.test")]),
            ("^a\\.test:[0-9]+$|^b\\.test$", vec![exact("b.test")]),
        ] {
            assert_eq!(read(expression).patterns, wanted, "{expression}");
        }
        for (expression, wanted, fate) in [
            ("^a.test$", exact("a.test"), Fate::Differs),
            (".+.a.test", Pattern::new(How::Part, ".a.test"), Fate::Differs),
            ("^(w+|a)\\.test$", exact("a.test"), Fate::NotConverted),
            ("^(api|[a-z]+-int)\\.test$", exact("api.test"), Fate::NotConverted),
            ("^[[:alnum:]-]+\\.a\\.test$|^a\\.test$", exact("a.test"), Fate::NotConverted),
            ("^a\\.test:?$|^b\\.test$", exact("b.test"), Fate::NotConverted),
            ("^a\\.test\\/?$|^b\\.test$", exact("b.test"), Fate::NotConverted),
            ("^[^/]+\\.a\\.test$|^a\\.test$", exact("a.test"), Fate::NotConverted),
        ] {
            let Reading { patterns, lack } = read(expression);
            assert_eq!(patterns, [wanted, Pattern::new(How::Other, expression)], "{expression}");
            assert_eq!(lack.map(|(fate, _)| fate), Some(fate), "{expression}");
        }
    }

    #[test]
    fn an_expression_that_means_no_names_is_unknown() {
        for expression in [
            "^a[0-9]\\.test$",
            "^[^.]+\\.test$",
            "^a\\d$",
            "^a+$",
            "^$",
            "(a",
            // Marks of groups, and signs that look like groups or alternatives.
            "^(?!admin\\.test|secret\\.test).*",
            "(?i:admin|root)\\.test$",
            "(?i)a\\.test$",
            "^a\\|b\\.test$",
            "^([^|x|]|b)\\.test$",
            "^([[:alnum:]|x]|b)\\.test$",
            "^([]|x]|b)\\.test$",
            "^([\\]|x]|b)\\.test$",
            "^[(]a\\.test$|^b\\.test$",
            "\\Qx|^b$|y\\E",
            "^a\\.test\\.$",
        ] {
            let Reading { patterns, lack } = read(expression);
            let is_unknown = patterns.iter().flat_map(Pattern::keys).next().is_none();
            assert!(is_unknown, "{expression}: {patterns:?}");
            let fate = lack.map(|(fate, _)| fate);
            // A name with a last dot is a pattern of which no route is.
            assert_eq!(fate, (!expression.ends_with("\\.$")).then_some(Fate::NotConverted), "{expression}");
        }
    }
}
