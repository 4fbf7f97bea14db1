//! The reference of the config file in Markdown, generated from the table that the reader uses.

use std::fmt::Write as _;

use isthmus_document::form::Keys;
use isthmus_document::table::{Kind, Object, Presence, Text};

use super::table::Root;

/// Returns the reference: a table of keys for each map, in the order of their first use.
pub fn reference() -> String {
    let mut out = String::from(
        "# Configuration reference\n\nThis page is generated from the code. An example with every key is \
         [isthmus.yaml](isthmus.yaml); the JSON Schema is [isthmus.schema.json](isthmus.schema.json). Pages that \
         explain the keys by task are in [docs](../docs/README.md).\n",
    );
    let objects = objects();
    for object in &objects {
        section(object, &mut out);
    }
    out.push_str("\n## Values\n\n| value | is |\n|---|---|\n");
    for text in texts(&objects) {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "| {} | {} |", text.name, cell(text.expects));
    }
    out
}

/// Returns the maps of the config, in the order of their first use.
pub(super) fn objects() -> Vec<&'static Object> {
    let mut objects: Vec<&'static Object> = vec![Root::OBJECT];
    let mut next = 0;
    while let Some(object) = objects.get(next).copied() {
        for found in object.keys.iter().flat_map(|key| objects_of(key.kind())) {
            if !objects.iter().any(|known| known.name == found.name) {
                objects.push(found);
            }
        }
        next += 1;
    }
    objects
}

/// Returns the forms of text in maps, in order of name.
pub(super) fn texts(objects: &[&'static Object]) -> Vec<&'static Text> {
    let mut texts: Vec<&'static Text> = Vec::new();
    for key in objects.iter().flat_map(|object| object.keys) {
        texts_of(key.kind(), &mut texts);
    }
    texts.sort_by_key(|text| text.name);
    texts
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

fn texts_of(kind: &Kind, texts: &mut Vec<&'static Text>) {
    match kind {
        Kind::Text(text) if texts.iter().any(|known| known.name == text.name) => {}
        Kind::Text(text) => texts.push(text),
        Kind::Map { key, of } => {
            texts_of(&Kind::Text(key), texts);
            texts_of(of, texts);
        }
        Kind::List { of, .. } | Kind::OrOff(of) => texts_of(of, texts),
        Kind::Union(union) => union.kinds.iter().for_each(|kind| texts_of(kind, texts)),
        Kind::Boolean | Kind::Integer { .. } | Kind::Share | Kind::Choice(_) | Kind::Object(_) => {}
    }
}

fn section(object: &Object, out: &mut String) {
    let mut put = |text: std::fmt::Arguments<'_>| {
        // Writing to a String cannot fail.
        let _ = out.write_fmt(text);
    };
    put(format_args!("\n## {}\n\n{}\n\n", object.name, object.doc));
    if !object.one_of.is_empty() {
        put(format_args!("Exactly one of these keys is required: {}.\n\n", object.one_of.join(", ")));
    }
    put(format_args!("| key | value | default | meaning |\n|---|---|---|---|\n"));
    for key in object.keys {
        let absent = match key.presence() {
            Presence::Required => "required".to_owned(),
            Presence::Default(default) => format!("`{default}`"),
            Presence::Absent(words) => words.to_owned(),
        };
        put(format_args!("| `{}` | {} | {absent} | {} |\n", key.name(), form(key.kind()), cell(key.doc())));
    }
}

/// Returns the shortest description of a kind's values. A map is described by a link to its section.
fn form(kind: &Kind) -> String {
    match kind {
        Kind::List { of, .. } => format!("list of: {}", form(of)),
        Kind::Map { key, of } => format!("map of [{}](#values) to: {}", key.name, form(of)),
        Kind::Text(text) => format!("[{}](#values)", text.name),
        Kind::Object(object) => format!("[{0}](#{1})", object.name, object.name.to_lowercase()),
        Kind::OrOff(inner) => format!("{}, or `off`", form(inner)),
        Kind::Choice(words) => words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", "),
        Kind::Union(union) => {
            let forms: Vec<String> = union.kinds.iter().map(form).collect();
            forms.join("; or ")
        }
        Kind::Boolean | Kind::Integer { .. } | Kind::Share => kind.to_string(),
    }
}

fn objects_of(kind: &Kind) -> Vec<&'static Object> {
    match kind {
        Kind::List { of, .. } | Kind::Map { of, .. } | Kind::OrOff(of) => objects_of(of),
        Kind::Object(object) => vec![object],
        Kind::Union(union) => union.kinds.iter().flat_map(objects_of).collect(),
        Kind::Text(_) | Kind::Boolean | Kind::Integer { .. } | Kind::Share | Kind::Choice(_) => Vec::new(),
    }
}
