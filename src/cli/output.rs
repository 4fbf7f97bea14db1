//! Values as tables, JSON or YAML.

use std::io::{self, IsTerminal, Write};
use std::sync::LazyLock;

use serde_json::Value;

/// How a reading command prints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    #[default]
    Table,
    Json,
    Yaml,
}

/// A colour of a text, where there are colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colour {
    Bold,
    Red,
    Green,
    Yellow,
}

/// Whether standard output takes colours.
static COLOURS: LazyLock<bool> = LazyLock::new(|| {
    let variable = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    has_colours(io::stdout().is_terminal(), variable("NO_COLOR"), dumb)
});

/// Colours are for a terminal, and not for one that cannot show them or whose user wants none (https://no-color.org).
fn has_colours(terminal: bool, no_color: bool, dumb: bool) -> bool {
    terminal && !no_color && !dumb
}

/// The text in a colour, if standard output takes colours.
pub fn paint(text: &str, colour: Colour) -> String {
    if *COLOURS { painted(text, colour) } else { text.to_owned() }
}

/// The escape sequences of ECMA-48 §8.3.117.
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
            yaml(out, value, 0, Place::Root)?;
            Ok(())
        }
        Format::Table | Format::Json => writeln!(out, "{value:#}"),
    }
}

/// Prints rows under a heading, in columns as wide as they need.
pub fn table(out: &mut impl Write, heading: &[&str], rows: &[Vec<String>]) -> io::Result<()> {
    let mut widths: Vec<usize> = heading.iter().map(|cell| cell.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let text: Vec<String> =
            cells.zip(&widths).map(|(cell, width)| format!("{cell:width$}", width = *width)).collect();
        text.join("  ").trim_end().to_owned()
    };
    writeln!(out, "{}", paint(&line(&mut heading.iter().copied()), Colour::Bold))?;
    for row in rows {
        writeln!(out, "{}", line(&mut row.iter().map(String::as_str)))?;
    }
    Ok(())
}

/// A value as a cell of a table: lists comma-separated, absent ones as `-`.
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

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Root,
    Item,
    Member,
}

/// A key without quotes where YAML reads it as the same text.
fn yaml_key(key: &str) -> String {
    const WORDS: [&str; 10] = ["true", "false", "null", "yes", "no", "on", "off", "y", "n", ""];
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    let begins = key.bytes().next().is_some_and(|first| first.is_ascii_alphabetic() || first == b'_');
    match begins && key.bytes().all(plain) && !WORDS.contains(&key.to_ascii_lowercase().as_str()) {
        true => key.to_owned(),
        false => Value::from(key).to_string(),
    }
}

/// Block style for what has members, JSON (which is YAML) for all else.
fn yaml(out: &mut impl Write, value: &Value, depth: usize, place: Place) -> io::Result<()> {
    let indent = |out: &mut dyn Write, depth: usize| write!(out, "{:width$}", "", width = depth * 2);
    match value {
        Value::Object(members) if !members.is_empty() => {
            if place == Place::Member {
                writeln!(out)?;
            }
            for (at, (key, member)) in members.iter().enumerate() {
                if at > 0 || place != Place::Item {
                    indent(out, depth)?;
                }
                write!(out, "{}:", yaml_key(key))?;
                yaml(out, member, depth + 1, Place::Member)?;
            }
            Ok(())
        }
        Value::Array(items) if !items.is_empty() => {
            if place == Place::Member {
                writeln!(out)?;
            }
            for (at, item) in items.iter().enumerate() {
                if at > 0 || place != Place::Item {
                    indent(out, depth)?;
                }
                write!(out, "- ")?;
                yaml(out, item, depth + 1, Place::Item)?;
            }
            Ok(())
        }
        other => {
            let space = if place == Place::Member { " " } else { "" };
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
        assert!(has_colours(true, false, false));
        for (terminal, no_color, dumb) in [(false, false, false), (true, true, false), (true, false, true)] {
            assert!(!has_colours(terminal, no_color, dumb));
        }
        assert_eq!(painted("x", Colour::Red), "\x1b[31mx\x1b[0m");
        // The output of a test is no terminal.
        assert_eq!(paint("x", Colour::Red), "x");
    }
}
