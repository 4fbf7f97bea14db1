//! The regular expressions of the three programs that mean names, as patterns: an exact name, the end or the start of names, or a part.

use crate::names::{How, Pattern};

/// The largest numbers of groups in a regular expression, and of patterns that it stands for.
const GROUPS_MAX: usize = 4;
const PATTERNS_MAX: usize = 16;

/// Returns the patterns of a regular expression without its delimiters: those whose names it surely matches, and one that may match any
/// name if it matches further ones, such as with a dot without a backslash. Returns `None` if it surely matches none.
pub(super) fn patterns_of(expression: &str) -> Option<Vec<Pattern>> {
    // An optional last dot, as of fully qualified names, is an optional group.
    let expression = expression.replace("[.]", "\\.").replace("\\.?", "(\\.)?");
    let mut patterns = Vec::new();
    let mut is_wider = false;
    for alternative in without_groups(&expression)? {
        // The server name has no port and no path.
        if alternative.contains([':', '/']) {
            continue;
        }
        let Some((pattern, is_open)) = of_one(&alternative) else {
            is_wider = true;
            continue;
        };
        patterns.push(pattern);
        is_wider |= is_open;
    }
    if patterns.is_empty() {
        return None;
    }
    patterns.extend(is_wider.then(|| Pattern::new(How::Other, &expression)));
    Some(patterns)
}

/// Returns a remark on an expression that matches other names than those of the routes.
pub(super) fn further(expression: &str, patterns: &[Pattern]) -> Option<String> {
    let is_exact = patterns.iter().all(Pattern::is_exact);
    let text = || {
        format!(
            "{expression}: matches names that are none of the routes', too; their clients are refused, or take other routes"
        )
    };
    (!is_exact).then(text)
}

/// Returns the pattern of an expression without groups, and true if the expression matches further names.
fn of_one(expression: &str) -> Option<(Pattern, bool)> {
    let (mut is_begun, rest) = expression.strip_prefix('^').map_or((false, expression), |rest| (true, rest));
    let (mut is_ended, rest) = rest.strip_suffix('$').map_or((false, rest), |rest| (true, rest));
    // No name begins with a dot, so that one or more signs before a dot are as good as any signs.
    let many = |rest: &&str| rest.is_empty() || rest.starts_with(['.', '\\']);
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
/// `None` if a group repeats or contains another one, or if the patterns are too many.
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
    let alternatives = group.strip_prefix("?:").unwrap_or(group).split('|');
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
            ("^a\\.test\\.?(:[0-9]+)?(/.*)?$", vec![exact("a.test."), exact("a.test")]),
        ] {
            assert_eq!(patterns_of(expression), Some(wanted), "{expression}");
        }
        for (expression, wanted) in [
            ("^a.test$", exact("a.test")),
            (".+.a.test", Pattern::new(How::Part, ".a.test")),
            ("^(w+|a)\\.test$", exact("a.test")),
        ] {
            let wanted = vec![wanted, Pattern::new(How::Other, expression)];
            assert!(further(expression, &wanted).is_some(), "{expression}");
            assert_eq!(patterns_of(expression), Some(wanted), "{expression}");
        }
        for expression in ["^a[0-9]\\.test$", "^[^.]+\\.test$", "^a\\d$", "^a+$", "^$", "(a"] {
            assert_eq!(patterns_of(expression), None, "{expression}");
        }
    }
}
