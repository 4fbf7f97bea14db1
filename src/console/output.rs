//! Prints values as tables, JSON or YAML.

use std::io::{self, IsTerminal, Write};
use std::sync::LazyLock;

use serde_json::Value;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use isthmus_api::table::{Column, Table};

/// The output format of a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
#[expect(missing_docs, reason = "a comment would become a help text")]
pub enum Format {
    #[default]
    Table,
    Json,
    Yaml,
}

/// A colour of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "they are named for themselves")]
pub enum Colour {
    Bold,
    Red,
    Green,
    Yellow,
}

/// True if standard output shows colours.
static COLOURS: LazyLock<bool> = LazyLock::new(|| {
    let variable = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    Screen { is_terminal: io::stdout().is_terminal(), no_color: variable("NO_COLOR"), is_dumb }.has_colours()
});

/// The properties of standard output that decide whether colours are shown.
struct Screen {
    is_terminal: bool,
    /// True if the user disables colours (<https://no-color.org>).
    no_color: bool,
    is_dumb: bool,
}

impl Screen {
    /// Returns true if colours are shown: on a terminal that supports them, unless the user disables them.
    fn has_colours(&self) -> bool {
        self.is_terminal && !self.no_color && !self.is_dumb
    }
}

/// Returns true if standard output shows colours.
pub fn has_colours() -> bool {
    *COLOURS
}

/// Returns the text in a colour, if standard output shows colours.
pub fn paint(text: &str, colour: Colour) -> String {
    if *COLOURS { painted(text, colour) } else { text.to_owned() }
}

/// Returns the text with the escape sequences of ECMA-48 §8.3.117.
fn painted(text: &str, colour: Colour) -> String {
    let code = match colour {
        Colour::Bold => 1,
        Colour::Red => 31,
        Colour::Green => 32,
        Colour::Yellow => 33,
    };
    format!("\x1b[{code}m{text}\x1b[0m")
}

/// Prints a value as JSON or YAML.
pub fn structured(out: &mut impl Write, value: &Value, format: Format) -> io::Result<()> {
    match format {
        Format::Yaml => {
            yaml(out, value, 0, YamlContext::Root)?;
            Ok(())
        }
        Format::Table | Format::Json => writeln!(out, "{value:#}"),
    }
}

/// Prints a value as one of a list that never ends: as a line of JSON or as a document of YAML.
pub fn one_of_many(out: &mut impl Write, value: &Value, format: Format) -> io::Result<()> {
    match format {
        Format::Yaml => {
            writeln!(out, "---")?;
            structured(out, value, format)
        }
        Format::Table | Format::Json => writeln!(out, "{value}"),
    }
}

/// Prints rows below a heading, in columns as wide as their longest cell.
pub fn table(out: &mut impl Write, heading: &[&str], rows: &[Vec<String>]) -> io::Result<()> {
    let mut widths: Vec<usize> = heading.iter().map(|cell| cell.width()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.width());
        }
    }
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let text: Vec<String> = cells.zip(&widths).map(|(cell, width)| padded(cell, *width)).collect();
        text.join("  ").trim_end().to_owned()
    };
    writeln!(out, "{}", paint(&line(&mut heading.iter().copied()), Colour::Bold))?;
    for row in rows {
        writeln!(out, "{}", line(&mut row.iter().map(String::as_str)))?;
    }
    Ok(())
}

/// Returns the number of terminal cells that a text takes (Unicode UAX #11).
pub fn cells(text: &str) -> usize {
    text.width()
}

/// Returns a text with spaces up to a width in terminal cells.
pub fn padded(text: &str, width: usize) -> String {
    format!("{text}{:missing$}", "", missing = width.saturating_sub(text.width()))
}

/// Returns the beginning of a text that fits into a width in terminal cells.
pub fn fitting(text: &str, width: usize) -> &str {
    let mut left = width;
    let too_wide = text.char_indices().find(|(_, character)| {
        match left.checked_sub(character.width().unwrap_or_default()) {
            Some(rest) => left = rest,
            None => return true,
        }
        false
    });
    &text[..too_wide.map_or(text.len(), |(at, _)| at)]
}

/// Returns a value as a cell of a table: a list is comma-separated, and a missing value is `-`.
pub fn cell(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) if text.is_empty() => "-".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(list) if list.is_empty() => "-".to_owned(),
        Value::Array(list) => list.iter().map(cell).collect::<Vec<_>>().join(", "),
        other => other.to_string(),
    }
}

/// Prints a list as a table of these columns, or prints `none` if the list is empty.
pub fn columns<T>(out: &mut impl Write, columns: &[Column<T>], items: &[T]) -> io::Result<()> {
    tabular(out, &Table::of(columns, items))
}

/// Prints a table, or prints `none` if it has no row.
pub fn tabular(out: &mut impl Write, all: &Table) -> io::Result<()> {
    if all.rows.is_empty() {
        return writeln!(out, "none");
    }
    table(out, &all.heading, &all.rows)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum YamlContext {
    Root,
    Item,
    Member,
}

/// Returns a key without quotes if YAML reads it as the same text.
fn yaml_key(key: &str) -> String {
    const WORDS: [&str; 10] = ["true", "false", "null", "yes", "no", "on", "off", "y", "n", ""];
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    let begins = key.bytes().next().is_some_and(|first| first.is_ascii_alphabetic() || first == b'_');
    match begins && key.bytes().all(plain) && !WORDS.contains(&key.to_ascii_lowercase().as_str()) {
        true => key.to_owned(),
        false => Value::from(key).to_string(),
    }
}

/// Prints objects and lists with members in block style, and all other values as JSON, which is valid YAML.
fn yaml(out: &mut impl Write, value: &Value, depth: usize, context: YamlContext) -> io::Result<()> {
    let indent = |out: &mut dyn Write, depth: usize| write!(out, "{:width$}", "", width = depth * 2);
    match value {
        Value::Object(members) if !members.is_empty() => {
            if context == YamlContext::Member {
                writeln!(out)?;
            }
            for (at, (key, member)) in members.iter().enumerate() {
                if at > 0 || context != YamlContext::Item {
                    indent(out, depth)?;
                }
                write!(out, "{}:", yaml_key(key))?;
                yaml(out, member, depth + 1, YamlContext::Member)?;
            }
            Ok(())
        }
        Value::Array(items) if !items.is_empty() => {
            if context == YamlContext::Member {
                writeln!(out)?;
            }
            for (at, item) in items.iter().enumerate() {
                if at > 0 || context != YamlContext::Item {
                    indent(out, depth)?;
                }
                write!(out, "- ")?;
                yaml(out, item, depth + 1, YamlContext::Item)?;
            }
            Ok(())
        }
        other => {
            let space = if context == YamlContext::Member { " " } else { "" };
            writeln!(out, "{space}{other}")
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn printed(print: impl FnOnce(&mut Vec<u8>) -> io::Result<()>) -> String {
        let mut out = Vec::new();
        print(&mut out).expect("memory takes it");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn columns_are_as_wide_as_they_need() {
        let rows = [vec!["a".to_owned(), "long cell".to_owned()], vec!["bcd".to_owned(), String::new()]];
        let text = printed(|out| table(out, &["X", "Y"], &rows));
        assert_eq!(text, "X    Y\na    long cell\nbcd\n");
        let rows = [vec!["東京".to_owned(), "y".to_owned()], vec!["a".to_owned(), "z".to_owned()]];
        assert_eq!(printed(|out| table(out, &["X", "Y"], &rows)), "X     Y\n東京  y\na     z\n");
        assert_eq!((fitting("東京", 3), fitting("abc", 3), fitting("", 0)), ("東", "abc", ""));
    }

    #[test]
    fn yaml_is_in_blocks() {
        let value = json!({"a": [{"b": 1, "c": []}, [2, "x\n"]], "d": {}, "e": {"f": null}});
        let text = printed(|out| structured(out, &value, Format::Yaml));
        assert_eq!(text, "a:\n  - b: 1\n    c: []\n  - - 2\n    - \"x\\n\"\nd: {}\ne:\n  f: null\n");
        let value = json!({"80": 1, "no": 2, "*.a": 3, "a.test": 4});
        let text = printed(|out| structured(out, &value, Format::Yaml));
        assert_eq!(text, "\"80\": 1\n\"no\": 2\n\"*.a\": 3\na.test: 4\n");
    }

    #[test]
    fn colours_are_for_terminals_whose_users_want_them() {
        assert!(Screen { is_terminal: true, no_color: false, is_dumb: false }.has_colours());
        for (is_terminal, no_color, is_dumb) in
            [(false, false, false), (true, true, false), (true, false, true)]
        {
            assert!(!Screen { is_terminal, no_color, is_dumb }.has_colours());
        }
        assert_eq!(painted("x", Colour::Red), "\x1b[31mx\x1b[0m");
        // The output of a test is not a terminal.
        assert_eq!(paint("x", Colour::Red), "x");
    }
}
