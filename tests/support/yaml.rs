//! Parses the YAML that other programs print into JSON values.

use saphyr_parser::{Event, Parser, ScalarStyle};
use serde_json::{Map, Number, Value};

/// Returns the documents of a text, without empty ones.
#[track_caller]
pub fn documents(text: &str) -> Vec<Value> {
    let mut documents = Vec::new();
    let mut open: Vec<Open> = Vec::new();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.unwrap_or_else(|error| panic!("{error}: {text}"));
        let value = match event {
            Event::SequenceStart(..) => {
                open.push(Open::List(Vec::new()));
                continue;
            }
            Event::MappingStart(..) => {
                open.push(Open::Map(Map::new(), None));
                continue;
            }
            Event::SequenceEnd | Event::MappingEnd => match open.pop().expect("begun") {
                Open::List(items) => Value::Array(items),
                Open::Map(entries, _) => Value::Object(entries),
            },
            Event::Scalar(text, style, ..) => scalar(&text, style),
            Event::Alias(_) => panic!("an alias at {span:?}"),
            _ => continue,
        };
        match open.last_mut() {
            None if value.is_null() => {}
            None => documents.push(value),
            Some(Open::List(items)) => items.push(value),
            Some(Open::Map(entries, key)) => match key.take() {
                None => *key = Some(text_of(&value)),
                Some(key) => assert!(entries.insert(key.clone(), value).is_none(), "{key} twice: {text}"),
            },
        }
    }
    documents
}

/// Returns the only document of a text.
#[track_caller]
pub fn document(text: &str) -> Value {
    let mut documents = documents(text);
    assert_eq!(documents.len(), 1, "{text}");
    documents.remove(0)
}

enum Open {
    List(Vec<Value>),
    /// A map, and the key of the value that comes next.
    Map(Map<String, Value>, Option<String>),
}

fn scalar(text: &str, style: ScalarStyle) -> Value {
    match text {
        _ if style != ScalarStyle::Plain => text.into(),
        "" | "~" | "null" => Value::Null,
        "true" => true.into(),
        "false" => false.into(),
        _ => match (text.parse::<i64>(), text.parse::<f64>()) {
            (Ok(number), _) => number.into(),
            (_, Ok(number)) => Number::from_f64(number).map_or_else(|| text.into(), Value::Number),
            _ => text.into(),
        },
    }
}

fn text_of(key: &Value) -> String {
    key.as_str().map_or_else(|| key.to_string(), str::to_owned)
}
