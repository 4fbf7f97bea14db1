//! The tables that documents are checked against: the keys that a map may have, and the values, default and description of each
//! key. The tables do not depend on the types of the values in the program.

use std::fmt;

use super::problem::InvalidValue;

/// A map with known keys.
pub struct Object {
    /// The name of the definition in the schema; unique among the objects of a document.
    pub name: &'static str,
    /// The description for users.
    pub doc: &'static str,
    /// The keys that the map may have.
    pub keys: &'static [&'static dyn AnyKey],
    /// The keys of which exactly one must be present; empty: there is no such rule.
    pub one_of: &'static [&'static str],
    /// Keys that earlier releases had, each with what holds without it. They have no effect, and each is a warning.
    pub removed: &'static [(&'static str, &'static str)],
}

/// One key of an [`Object`], whatever the type of its values.
pub trait AnyKey: Sync {
    /// Returns the key as written.
    fn name(&self) -> &'static str;
    /// Returns the values that the key may have.
    fn kind(&self) -> &'static Kind;
    /// Returns true if the key must be present.
    fn is_required(&self) -> bool;
    /// Returns the rule for an absent key.
    fn presence(&self) -> Presence;
    /// Returns the description of the key, for users.
    fn doc(&self) -> &'static str;
}

/// The rule for an absent key.
#[derive(Clone, Debug)]
pub enum Presence {
    /// The key must be present.
    Required,
    /// The default, in YAML.
    Default(String),
    /// The effect of an absent key, in words.
    Absent(&'static str),
}

/// The values that a key may have.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// A text that must match this form.
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
    /// The kinds of value that are accepted: any number of scalars, and at most one list and one map.
    pub kinds: &'static [Kind],
}

/// The form of a value that is a text.
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
    /// Parses the text, and writes the value in the only way in which `/api/v1/config` shows it.
    pub write: fn(&str) -> Option<String>,
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl Object {
    /// Returns the key with a name.
    pub fn key(&self, name: &str) -> Option<&'static dyn AnyKey> {
        self.keys.iter().find(|key| key.name() == name).copied()
    }

    /// Returns what holds without a removed key; `None` if no earlier release had the key.
    pub fn removed(&self, name: &str) -> Option<&'static str> {
        self.removed.iter().find(|(removed, _)| *removed == name).map(|(_, advice)| *advice)
    }

    /// Returns the names of the keys in the order of the table.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.keys.iter().map(|key| key.name())
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
                write!(f, "a map with the keys {}", object.names().collect::<Vec<_>>().join(", "))
            }
            Self::Union(union) => f.write_str(union.expects),
        }
    }
}
