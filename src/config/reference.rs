//! The reference of the config file in Markdown, from the table that the reader uses.

use std::fmt::Write as _;

use crate::document::table::{Field, Kind, Object, Presence};

use super::table::ROOT;

/// The reference: a table of keys for each map, in the order in which they are met.
pub fn reference() -> String {
    let mut out = String::from(
        "# Configuration reference\n\n\
         Written by the program from the table its reader uses (`config/src` is the source; see the test \
         `generated_files_are_current`). An example with every key is `isthmus.yaml`, the JSON Schema \
         `isthmus.schema.json`.\n",
    );
    let mut objects: Vec<&'static Object> = vec![&ROOT];
    let mut next = 0;
    while let Some(object) = objects.get(next).copied() {
        section(object, &mut out);
        for field in object.fields {
            for found in objects_of(&field.kind) {
                if !objects.iter().any(|known| known.name == found.name) {
                    objects.push(found);
                }
            }
        }
        next += 1;
    }
    out
}

fn section(object: &Object, out: &mut String) {
    let mut put = |text: std::fmt::Arguments<'_>| {
        // Writing to a String cannot fail.
        let _ = out.write_fmt(text);
    };
    put(format_args!("\n## {}\n\n{}\n\n", object.name, object.doc));
    if !object.one_of.is_empty() {
        put(format_args!("Exactly one of the keys {} has to be there.\n\n", object.one_of.join(", ")));
    }
    put(format_args!("| key | takes | without it | |\n|---|---|---|---|\n"));
    for Field { key, kind, presence, doc } in object.fields {
        let absent = match presence {
            Presence::Required => "required".to_owned(),
            Presence::Default(default) => format!("`{default}`"),
            Presence::Absent(words) => (*words).to_owned(),
        };
        put(format_args!("| `{key}` | {} | {absent} | {doc} |\n", form(kind)));
    }
}

/// What a kind takes, in the fewest words; maps by the name of their section.
fn form(kind: &Kind) -> String {
    match kind {
        Kind::List { of, .. } => format!("list of: {}", form(of)),
        Kind::Map { key, of } => format!("map of {} to: {}", key.name, form(of)),
        Kind::Object(object) => format!("[{0}](#{1})", object.name, object.name.to_lowercase()),
        Kind::OrOff(inner) => format!("{}, or `off`", form(inner)),
        Kind::Choice(words) => words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", "),
        Kind::Union(union) => {
            let forms: Vec<String> = union.kinds.iter().map(form).collect();
            forms.join("; or ")
        }
        Kind::Text(_) | Kind::Boolean | Kind::Integer { .. } => kind.to_string().replace('|', "\\|"),
    }
}

fn objects_of(kind: &Kind) -> Vec<&'static Object> {
    match kind {
        Kind::List { of, .. } | Kind::Map { of, .. } | Kind::OrOff(of) => objects_of(of),
        Kind::Object(object) => vec![object],
        Kind::Union(union) => union.kinds.iter().flat_map(objects_of).collect(),
        Kind::Text(_) | Kind::Boolean | Kind::Integer { .. } | Kind::Choice(_) => Vec::new(),
    }
}
