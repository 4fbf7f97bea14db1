//! The lines of an HAProxy configuration: sections, and words with quotes and escapes (HAProxy's configuration manual §2.2).

/// A line with at least one word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    /// The number of the line in the file, from 1.
    pub(super) number: usize,
    /// The words of the line, without quotes.
    pub(super) words: Vec<String>,
}

impl Line {
    /// Returns the words as borrowed texts.
    pub(super) fn texts(&self) -> Vec<&str> {
        self.words.iter().map(String::as_str).collect()
    }

    /// Returns false if the line cannot be parsed: then it has one empty word.
    pub(super) fn is_readable(&self) -> bool {
        !self.words[0].is_empty()
    }

    /// Returns the words as they appear in a remark.
    pub(super) fn quoted(&self) -> String {
        format!("`{}`", self.words.join(" "))
    }
}

/// A section: its first line, and the lines below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Section {
    /// The first line, such as `frontend tls`.
    pub(super) head: Line,
    /// The lines below the first one; those that cannot be parsed have one empty word.
    pub(super) lines: Vec<Line>,
    /// The reason why the first line cannot be parsed. Such a section has no name, but the lines below it must not count as
    /// lines of the section above.
    pub(super) fault: Option<&'static str>,
}

impl Section {
    /// Returns the kind of the section: the first word.
    pub(super) fn kind(&self) -> &str {
        self.head.words.first().map_or("", String::as_str)
    }

    /// Returns the name of the section; empty if it has none.
    pub(super) fn name(&self) -> &str {
        self.head.words.get(1).map_or("", String::as_str)
    }

    /// Returns the kind, name and lines of the section, for a remark.
    pub(super) fn title(&self) -> String {
        format!("{} {} ({})", self.kind(), self.name(), self.span())
    }

    /// Returns the numbers of the section's lines, for a remark.
    pub(super) fn span(&self) -> String {
        format!("lines {} to {}", self.head.number, self.end())
    }

    /// Returns the number of the section's last line.
    pub(super) fn end(&self) -> usize {
        self.lines.last().unwrap_or(&self.head).number
    }
}

/// The words with which a section begins.
const KINDS: [&str; 17] = [
    "global",
    "defaults",
    "frontend",
    "backend",
    "listen",
    "resolvers",
    "peers",
    "program",
    "userlist",
    "mailers",
    "cache",
    "http-errors",
    "ring",
    "fcgi-app",
    "log-forward",
    "crt-store",
    "traces",
];

/// Parses a file. A line that cannot be parsed is returned with its number and the reason, unless it begins a section.
pub(super) fn sections(text: &str) -> (Vec<Section>, Vec<(usize, String)>) {
    let (mut sections, mut faults) = (Vec::<Section>::new(), Vec::new());
    for (index, line) in text.lines().enumerate() {
        let number = index + 1;
        let words = match words(line) {
            Ok(words) if words.is_empty() => continue,
            Ok(words) => words,
            Err(fault) => {
                let first = line.split_whitespace().next().unwrap_or_default().trim_matches(['"', '\'']);
                if KINDS.contains(&first) {
                    let head = Line { number, words: vec![first.to_owned()] };
                    sections.push(Section { head, lines: Vec::new(), fault: Some(fault) });
                } else {
                    faults.push((number, fault.to_owned()));
                    let line = Line { number, words: vec![String::new()] };
                    sections.last_mut().into_iter().for_each(|section| section.lines.push(line.clone()));
                }
                continue;
            }
        };
        let line = Line { number, words };
        match sections.last_mut() {
            _ if KINDS.contains(&line.words[0].as_str()) => {
                sections.push(Section { head: line, lines: Vec::new(), fault: None });
            }
            Some(section) => section.lines.push(line),
            None => faults.push((number, "the line is before the first section".to_owned())),
        }
    }
    (sections, faults)
}

/// Returns the words of a line, without its comment.
fn words(line: &str) -> Result<Vec<String>, &'static str> {
    let mut words = Vec::new();
    let mut word = None::<String>;
    let mut quote = None;
    let mut signs = line.chars();
    while let Some(sign) = signs.next() {
        match (quote, sign) {
            (Some('\''), '\'') | (Some('"'), '"') => quote = None,
            (Some('"'), '$') => {
                return Err("the line reads an environment variable; replace the variable by its value");
            }
            (Some('"') | None, '\\') => match signs.next() {
                Some(next) if " \\#\"'$".contains(next) => word.get_or_insert_default().push(next),
                Some('r' | 'n' | 't' | 'x') => return Err("the line has an escape such as `\\n` or `\\x41`"),
                Some(next) => word.get_or_insert_default().extend(['\\', next]),
                None => return Err("the line ends with a backslash"),
            },
            (Some(_), sign) => word.get_or_insert_default().push(sign),
            (None, '\'' | '"') => {
                quote = Some(sign);
                word.get_or_insert_default();
            }
            (None, '#') => break,
            (None, sign) if sign.is_whitespace() => words.extend(word.take()),
            (None, sign) => word.get_or_insert_default().push(sign),
        }
    }
    if quote.is_some() {
        return Err("a quote is not closed");
    }
    words.extend(word);
    // The file is read with this sign in place of bytes that are not UTF-8.
    if words.iter().any(|word| word.contains(char::REPLACEMENT_CHARACTER)) {
        return Err("the line has bytes that are not UTF-8");
    }
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_have_quotes_escapes_and_comments_as_in_haproxy() {
        let of = |line: &str| words(line).map(|words| words.join("|"));
        assert_eq!(of("  server  a\\ b 10.0.0.1:1 # c").as_deref(), Ok("server|a b|10.0.0.1:1"));
        assert_eq!(of(r#"log-format "a \"b\" #c" 'x\y'"#).as_deref(), Ok(r#"log-format|a "b" #c|x\y"#));
        assert_eq!(of("# all").as_deref(), Ok(""));
        assert_eq!(of("x ''").as_deref(), Ok("x|"));
        assert_eq!(of("bind :1 # caf\u{fffd}").as_deref(), Ok("bind|:1"));
        for line in ["a \"b", "a '", "a \\", "bind \"$PORT\"", "server caf\u{fffd}"] {
            assert!(of(line).is_err(), "{line}");
        }
    }

    #[test]
    fn lines_belong_to_the_section_above_them() {
        let (sections, faults) = sections("stray\nfrontend a\n  mode tcp\n\nbackend b\n  x \"\n  y\n");
        assert_eq!(faults.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [1, 6]);
        let short: Vec<_> =
            sections.iter().map(|one| (one.kind(), one.name(), one.lines.len(), one.end())).collect();
        assert_eq!(short, [("frontend", "a", 1, 3), ("backend", "b", 2, 7)]);
    }

    #[test]
    fn a_first_line_with_a_fault_begins_a_section() {
        let (sections, faults) = sections("backend a\n  x\nbackend \"${B}\"\n  y\n\"listen\" 'l\n  z\n");
        let short: Vec<_> =
            sections.iter().map(|one| (one.kind(), one.name(), one.fault.is_some(), one.end())).collect();
        assert_eq!(short, [("backend", "a", false, 2), ("backend", "", true, 4), ("listen", "", true, 6)]);
        assert_eq!(faults, []);
    }
}
