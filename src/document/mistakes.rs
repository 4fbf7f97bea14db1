//! Finds mistakes in YAML of which a parser reports only the consequences: an unquoted `*` or `${…}`, a line with another indentation
//! than its neighbours, an unclosed list, map or quote.

/// A mistake: its line (from 1), its column (from 0), and the advice.
pub(super) struct Mistake {
    pub(super) line: usize,
    pub(super) column: usize,
    pub(super) message: String,
}

/// The longest name that a message quotes, in characters.
const NAME_CHARACTERS_MAX: usize = 80;

/// Returns the likely cause of a parser error at a line (from 1).
pub(super) fn cause(text: &str, line: usize, complaint: &str) -> Option<Mistake> {
    if complaint.contains("anchor") || complaint.contains("alias") {
        return unquoted_star(text, line);
    }
    if complaint.contains("simple key") {
        // The parser reads a name that begins with * as an alias, and misses the colon only in the next line that has a key.
        let before =
            (1..line).rev().find(|line| line_of(text, *line).is_some_and(|text| !text.trim().is_empty()));
        let star = before.into_iter().chain([line]).find_map(|line| unquoted_star(text, line));
        if star.is_some() {
            return star;
        }
    }
    unquoted_variable(text, line, complaint)
        .or_else(|| unclosed(text, line, complaint))
        .or_else(|| uneven(text, line))
        .or_else(|| second_colon(text, line, complaint))
}

fn line_of(text: &str, line: usize) -> Option<&str> {
    text.lines().nth(line.checked_sub(1)?)
}

/// Finds a name that begins with `*` without quotes, which YAML reads as an alias.
fn unquoted_star(text: &str, line: usize) -> Option<Mistake> {
    let content = line_of(text, line)?;
    let signs: Vec<char> = content.chars().collect();
    let begins = |at: usize| {
        signs[at] == '*'
            && signs[..at]
                .iter()
                .rev()
                .find(|sign| **sign != ' ')
                .is_none_or(|before| "[{,:-".contains(*before))
    };
    let column = (0..signs.len()).find(|at| begins(*at))?;
    let name = signs[column..].iter().take_while(|sign| !" :,]}#".contains(**sign));
    let name: String = name.take(NAME_CHARACTERS_MAX).collect();
    let message = format!("a name that begins with * needs quotes: \"{name}\"");
    Some(Mistake { line, column, message })
}

/// Finds a variable without quotes in a list or map in one line, where `{` begins another map.
fn unquoted_variable(text: &str, line: usize, complaint: &str) -> Option<Mistake> {
    let content = line_of(text, line).filter(|_| complaint.contains("flow"))?;
    let mut quote = None;
    let begins = |(at, sign): &(usize, char)| {
        match (quote, sign) {
            (None, '"' | '\'') => quote = Some(*sign),
            (Some(open), sign) if open == *sign => quote = None,
            _ => {}
        }
        quote.is_none() && content[*at..].starts_with("${")
    };
    let (at, _) = content.char_indices().find(begins)?;
    content[..at].contains(['[', '{']).then_some(())?;
    // The text is not quoted, because it may be a secret.
    let message = "a value with ${…} needs quotes inside of [] and {}: \"${NAME}\"".to_owned();
    Some(Mistake { line, column: content[..at].chars().count(), message })
}

/// Finds a list, map or quoted text that is still open where the parser stops.
fn unclosed(text: &str, line: usize, complaint: &str) -> Option<Mistake> {
    let about = ["flow", "quoted", "illegal placement", "end of stream", "indentation"];
    if !about.iter().any(|word| complaint.contains(word)) {
        return None;
    }
    let mut open: Vec<(char, usize, usize)> = Vec::new();
    for (number, content) in text.lines().enumerate().take(line) {
        let mut before = None;
        let mut signs = content.chars().enumerate().peekable();
        while let Some((column, sign)) = signs.next() {
            if let Some((quote @ ('"' | '\''), ..)) = open.last().copied() {
                match sign {
                    '\\' if quote == '"' => drop(signs.next()),
                    _ if sign == quote => drop(open.pop()),
                    _ => {}
                }
                before = Some(sign);
                continue;
            }
            let in_flow = !open.is_empty();
            let begins = before.is_none_or(|before| "[{,:- ".contains(before));
            match sign {
                '#' if begins => break,
                '"' | '\'' if begins => open.push((sign, number + 1, column)),
                '[' | '{' if begins || in_flow => open.push((sign, number + 1, column)),
                ']' | '}' if in_flow => drop(open.pop()),
                _ => {}
            }
            before = Some(sign);
        }
    }
    let (sign, at, column) = open.pop()?;
    let what = match sign {
        '[' => "list",
        '{' => "map",
        _ => "quote",
    };
    let message = format!("the {what} opened at {at}:{} is not closed", column + 1);
    Some(Mistake { line: at, column, message })
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start_matches(' ').len()
}

/// Finds a line of a map or list with another indentation than its neighbours.
fn uneven(text: &str, line: usize) -> Option<Mistake> {
    let content = line_of(text, line)?;
    let own = indent(content);
    let is_content = |line: &&str| !line.trim().is_empty() && !line.trim_start().starts_with('#');
    let before = text.lines().take(line - 1).filter(is_content).last()?;
    let neighbour = indent(before);
    let has_value = before.trim_end().rsplit_once(": ").is_some_and(|(_, value)| !value.trim().is_empty());
    // The line is indented deeper than a line that already has a value, or less deep than the line above it and unlike every
    // earlier line.
    let deeper = own > neighbour && has_value;
    let between =
        own < neighbour && !text.lines().take(line - 1).filter(is_content).any(|above| indent(above) == own);
    if !deeper && !between {
        return None;
    }
    let message = format!("this line is indented by {own}, its neighbours by {neighbour}");
    Some(Mistake { line, column: own, message })
}

/// Finds `a: b: c`: a plain value cannot contain `: `.
fn second_colon(text: &str, line: usize, complaint: &str) -> Option<Mistake> {
    let content = line_of(text, line).filter(|_| complaint.contains("mapping values"))?;
    let (_, value) = content.split_once(": ")?;
    let (first, _) = value.split_once(": ")?;
    let column = content.chars().count() - value.chars().count() + first.chars().count();
    let message = "found a second ': ' in this line; a value that has one needs quotes".to_owned();
    Some(Mistake { line, column, message })
}
