//! Values as tables, JSON or YAML.

use std::io::{self, Write};

use serde_json::Value;

/// How a reading command prints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    #[default]
    Table,
    Json,
    Yaml,
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
    let mut line = |cells: &mut dyn Iterator<Item = &str>| {
        let text: Vec<String> =
            cells.zip(&widths).map(|(cell, width)| format!("{cell:width$}", width = *width)).collect();
        writeln!(out, "{}", text.join("  ").trim_end())
    };
    line(&mut heading.iter().copied())?;
    for row in rows {
        line(&mut row.iter().map(String::as_str))?;
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
                write!(out, "{}:", Value::from(key.as_str()))?;
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
        assert_eq!(
            text,
            "\"a\":\n  - \"b\": 1\n    \"c\": []\n  - - 2\n    - \"x\\n\"\n\"d\": {}\n\"e\":\n  \"f\": null\n"
        );
    }
}
