//! The tables that documents are checked against: the keys that a map may have, the values of each, its
//! default, and its description. Reader, JSON Schema and reference are made from the same entries, so a key
//! cannot exist in one and not in the others.

use std::fmt;

use super::problem::InvalidValue;

/// A map with known keys.
#[derive(Debug)]
pub struct Object {
    /// The name of the definition in the schema; unique among the objects of a document.
    pub name: &'static str,
    /// The description for users.
    pub doc: &'static str,
    /// The keys.
    pub fields: &'static [Field],
    /// Exactly one of these keys must be present; empty: no such rule.
    pub one_of: &'static [&'static str],
}

/// One key of an [`Object`].
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// The key as written.
    pub key: &'static str,
    /// The values that it may have.
    pub kind: Kind,
    /// The rule for an absent key.
    pub presence: Presence,
    /// The effect of the key, for users.
    pub doc: &'static str,
}

/// The rule for an absent key.
#[derive(Clone, Copy, Debug)]
pub enum Presence {
    /// The key must be present.
    Required,
    /// The default, in YAML.
    Default(&'static str),
    /// The effect of the absence, in words.
    Absent(&'static str),
}

/// The values that a key may have.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// A text of a form.
    Text(&'static Text),
    /// `true`, `false`, `on` or `off`.
    Boolean,
    /// A whole number.
    Integer {
        /// The smallest value.
        min: u64,
        /// The largest value.
        max: u64,
    },
    /// A number from 0 to 1.
    Share,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// `off` or `false`, or a value of another kind.
    OrOff(&'static Self),
    /// A list.
    List {
        /// The kind of the items.
        of: &'static Self,
        /// The smallest number of items.
        min: usize,
    },
    /// A map whose keys the operator chooses.
    Map {
        /// The form of the keys.
        key: &'static Text,
        /// The kind of the values.
        of: &'static Self,
    },
    /// A map with known keys.
    Object(&'static Object),
    /// Short and long forms, distinguished by type: text, number, list or map.
    Union(&'static Union),
}

/// Several forms of one value.
#[derive(Debug)]
pub struct Union {
    /// The name of the definition in the schema.
    pub name: &'static str,
    /// The forms in words; fits behind "expected".
    pub expects: &'static str,
    /// The kinds; at most one per type other than scalars.
    pub kinds: &'static [Kind],
}

/// A form of text.
pub struct Text {
    /// The name of the definition in the schema and of the form in the reference; unique.
    pub name: &'static str,
    /// The form in words; fits behind "expected".
    pub expects: &'static str,
    /// The pattern in the schema (ECMA-262); may allow more than `check`. Empty: no pattern.
    pub pattern: &'static str,
    /// True if a plain number is read as its text.
    pub number: bool,
    /// Parses the text, and returns only the error.
    pub check: fn(&str) -> Result<(), InvalidValue>,
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// Makes an optional key; `default` is YAML.
pub const fn default(key: &'static str, kind: Kind, default: &'static str, doc: &'static str) -> Field {
    Field { key, kind, presence: Presence::Default(default), doc }
}

/// Makes an optional key; `absent` describes the effect of its absence.
pub const fn optional(key: &'static str, kind: Kind, absent: &'static str, doc: &'static str) -> Field {
    Field { key, kind, presence: Presence::Absent(absent), doc }
}

/// Makes a required key.
pub const fn required(key: &'static str, kind: Kind, doc: &'static str) -> Field {
    Field { key, kind, presence: Presence::Required, doc }
}

/// Makes the kind of a list of any length.
pub const fn list(of: &'static Kind) -> Kind {
    Kind::List { of, min: 0 }
}

/// Makes the kind of a list with one item or more: an empty list would mean "all" although its author may
/// have meant "none".
pub const fn some(of: &'static Kind) -> Kind {
    Kind::List { of, min: 1 }
}

/// A TCP port.
pub const PORT: Kind = Kind::Integer { min: 1, max: 65_535 };

impl Object {
    /// Returns the field of a key.
    pub fn field(&self, key: &str) -> Option<&'static Field> {
        self.fields.iter().find(|field| field.key == key)
    }

    /// Returns the keys in the order of the table.
    pub fn keys(&self) -> impl Iterator<Item = &'static str> {
        self.fields.iter().map(|field| field.key)
    }
}

/// Writes the expected values; fits behind "expected".
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text.expects),
            Self::Boolean => f.write_str("true or false"),
            Self::Integer { min, max } => write!(f, "a whole number from {min} to {max}"),
            Self::Share => f.write_str("a number from 0 to 1"),
            Self::Choice([only]) => f.write_str(only),
            Self::Choice(words) => write!(f, "one of {}", words.join(", ")),
            Self::OrOff(kind) => write!(f, "{kind}, or off"),
            Self::List { of, .. } => match of {
                Self::List { .. } | Self::Map { .. } | Self::Object(_) => write!(f, "a list ([…]) of maps"),
                _ => write!(f, "a list ([…]), each item of it {of}"),
            },
            Self::Map { of: Self::Object(object), .. } => {
                write!(f, "a map of names, each with {}", object.name)
            }
            Self::Map { .. } => f.write_str("a map of names to values"),
            Self::Object(object) => {
                write!(f, "a map with the keys {}", object.keys().collect::<Vec<_>>().join(", "))
            }
            Self::Union(union) => f.write_str(union.expects),
        }
    }
}
