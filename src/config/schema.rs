//! The JSON Schema (draft 2020-12) of the config file, generated from the table that the reader uses.

use serde_json::{Map, Value, json};

use isthmus_document::form::Keys;
use isthmus_document::table::{AnyKey, Kind, Object, Presence, Text, Union};

use super::table::Root;

/// Returns the schema of a whole config file. A value that is not free text may also be a text with a
/// variable, which only the reader can check.
pub fn schema() -> Value {
    let mut definitions = Definitions(Map::new());
    let mut root = definitions.object(Root::OBJECT);
    definitions.0.insert(
        "variable".to_owned(),
        json!({
            "description": "A text in which ${NAME} or ${NAME:-default} stands for an environment variable.",
            "type": "string",
            "pattern": "\\$\\{",
        }),
    );
    let mut schema = Map::new();
    schema.insert("$schema".to_owned(), json!("https://json-schema.org/draft/2020-12/schema"));
    schema.insert("title".to_owned(), json!("isthmus"));
    schema.append(&mut root);
    definitions.0.sort_keys();
    schema.insert("$defs".to_owned(), Value::Object(definitions.0));
    Value::Object(schema)
}

/// The definitions so far, by name.
struct Definitions(Map<String, Value>);

impl Definitions {
    fn object(&mut self, object: &'static Object) -> Map<String, Value> {
        let mut properties = Map::new();
        for key in object.keys {
            properties.insert(key.name().to_owned(), self.key(*key));
        }
        let required = object.keys.iter().filter(|key| key.is_required());
        let required: Vec<&str> = required.map(|key| key.name()).collect();
        let mut schema = Map::new();
        schema.insert("description".to_owned(), json!(object.doc));
        schema.insert("type".to_owned(), json!("object"));
        schema.insert("additionalProperties".to_owned(), json!(false));
        schema.insert("properties".to_owned(), Value::Object(properties));
        if !required.is_empty() {
            schema.insert("required".to_owned(), json!(required));
        }
        if !object.one_of.is_empty() {
            let forms: Vec<Value> = object.one_of.iter().map(|key| json!({ "required": [key] })).collect();
            schema.insert("oneOf".to_owned(), json!(forms));
        }
        schema
    }

    fn key(&mut self, key: &dyn AnyKey) -> Value {
        let mut schema = Map::new();
        schema.insert("description".to_owned(), json!(key.doc()));
        if let Presence::Default(default) = key.presence() {
            schema.insert("default".to_owned(), default_value(&default));
        }
        if let Value::Object(mut kind) = self.kind(key.kind()) {
            schema.append(&mut kind);
        }
        Value::Object(schema)
    }

    fn kind(&mut self, kind: &'static Kind) -> Value {
        let variable = json!({ "$ref": "#/$defs/variable" });
        match kind {
            Kind::Text(text) => self.define(text.name, |_| text_schema(text)),
            Kind::Boolean => json!({ "anyOf": [{ "type": "boolean" }, { "enum": ["on", "off"] }, variable] }),
            Kind::Integer { min, max } => {
                json!({ "anyOf": [{ "type": "integer", "minimum": min, "maximum": max }, variable] })
            }
            Kind::Share => json!({ "anyOf": [{ "type": "number", "minimum": 0, "maximum": 1 }, variable] }),
            Kind::Choice(words) => json!({ "anyOf": [{ "enum": words }, variable] }),
            Kind::OrOff(inner) => {
                json!({ "anyOf": [{ "enum": ["off", false] }, variable, self.kind(inner)] })
            }
            Kind::List { of, min } => json!({ "type": "array", "items": self.kind(of), "minItems": min }),
            Kind::Map { key, of } => {
                let key = self.define(key.name, |_| text_schema(key));
                json!({ "type": "object", "propertyNames": key, "additionalProperties": self.kind(of) })
            }
            Kind::Object(object) => self.define(object.name, |all| Value::Object(all.object(object))),
            Kind::Union(union) => self.define(union.name, |all| all.union(union)),
        }
    }

    fn union(&mut self, union: &'static Union) -> Value {
        let forms: Vec<Value> = union.kinds.iter().map(|kind| self.kind(kind)).collect();
        json!({ "description": format!("Takes {}.", union.expects), "anyOf": forms })
    }

    fn define(&mut self, name: &'static str, make: impl FnOnce(&mut Self) -> Value) -> Value {
        if !self.0.contains_key(name) {
            // The entry is inserted first, so that a definition that refers to itself does not recurse without end.
            self.0.insert(name.to_owned(), Value::Null);
            let made = make(self);
            self.0.insert(name.to_owned(), made);
        }
        json!({ "$ref": format!("#/$defs/{name}") })
    }
}

fn text_schema(text: &Text) -> Value {
    let description = format!("Takes {}.", text.expects);
    let mut forms = vec![match text.pattern {
        "" => json!({ "type": "string" }),
        pattern => json!({ "type": "string", "pattern": pattern }),
    }];
    if text.number {
        // Only a form whose pattern has a decimal point takes other numbers than whole ones.
        let is_whole = !text.pattern.contains("\\.");
        forms.push(if is_whole {
            json!({ "type": "integer" })
        } else {
            json!({ "type": "number", "minimum": 0 })
        });
    }
    if !text.pattern.is_empty() {
        forms.push(json!({ "$ref": "#/$defs/variable" }));
    }
    json!({ "description": description, "anyOf": forms })
}

/// Parses numbers and booleans as such, all else as text.
fn default_value(default: &str) -> Value {
    match default {
        "true" => json!(true),
        "false" => json!(false),
        _ => match default.parse::<serde_json::Number>() {
            Ok(number) => json!(number),
            Err(_) => json!(default),
        },
    }
}
