//! The table a document is held against: which keys a map may have, what each takes, what holds
//! without it, and the sentence that explains it. Reader, JSON Schema and reference all come from the
//! same entries, so a key cannot exist in one and not in the others.

use std::fmt;

use super::problem::Fault;

/// A map with known keys.
#[derive(Debug)]
pub struct Object {
    /// Unique among the objects of a document; names the definition in the schema.
    pub name: &'static str,
    pub doc: &'static str,
    pub fields: &'static [Field],
    /// Exactly one of these keys has to be there; empty: no such rule.
    pub one_of: &'static [&'static str],
}

/// One key of an [`Object`].
#[derive(Clone, Copy, Debug)]
pub struct Field {
    pub key: &'static str,
    pub kind: Kind,
    pub presence: Presence,
    /// What the key does, for its user.
    pub doc: &'static str,
}

/// What holds where a key is absent.
#[derive(Clone, Copy, Debug)]
pub enum Presence {
    Required,
    /// As YAML.
    Default(&'static str),
    /// In words.
    Absent(&'static str),
}

/// What a value may be.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Text(&'static Text),
    Boolean,
    Integer {
        min: u64,
        max: u64,
    },
    /// A number from 0 to 1.
    Share,
    Choice(&'static [&'static str]),
    /// `off` or `false`, or else.
    OrOff(&'static Self),
    List {
        of: &'static Self,
        min: usize,
    },
    /// A map with keys of the operator's own.
    Map {
        key: &'static Text,
        of: &'static Self,
    },
    Object(&'static Object),
    /// Short and long forms, told apart by whether they are a text, a number, a list or a map.
    Union(&'static Union),
}

/// Several ways to write one thing.
#[derive(Debug)]
pub struct Union {
    pub name: &'static str,
    /// Fits behind "expected".
    pub expects: &'static str,
    pub kinds: &'static [Kind],
}

/// A form of text.
pub struct Text {
    /// Unique; names the definition in the schema and the form in the reference.
    pub name: &'static str,
    /// Fits behind "expected".
    pub expects: &'static str,
    /// For the schema, as ECMA-262 has it; may let through more than `check`. Empty: none.
    pub pattern: &'static str,
    /// Whether a plain number is read as its text.
    pub number: bool,
    pub check: fn(&str) -> Result<(), Fault>,
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// A key that may be left out; `default` is YAML.
pub const fn default(key: &'static str, kind: Kind, default: &'static str, doc: &'static str) -> Field {
    Field { key, kind, presence: Presence::Default(default), doc }
}

/// A key that may be left out; `absent` says what holds then.
pub const fn optional(key: &'static str, kind: Kind, absent: &'static str, doc: &'static str) -> Field {
    Field { key, kind, presence: Presence::Absent(absent), doc }
}

/// A key that has to be there.
pub const fn required(key: &'static str, kind: Kind, doc: &'static str) -> Field {
    Field { key, kind, presence: Presence::Required, doc }
}

/// Any number of values.
pub const fn list(of: &'static Kind) -> Kind {
    Kind::List { of, min: 0 }
}

/// One value or more: an empty list would say "all" where its writer may have meant "none".
pub const fn some(of: &'static Kind) -> Kind {
    Kind::List { of, min: 1 }
}

/// A TCP port.
pub const PORT: Kind = Kind::Integer { min: 1, max: 65_535 };

impl Object {
    pub fn field(&self, key: &str) -> Option<&'static Field> {
        self.fields.iter().find(|field| field.key == key)
    }

    pub fn keys(&self) -> impl Iterator<Item = &'static str> {
        self.fields.iter().map(|field| field.key)
    }
}

/// What is expected, to fit behind that word.
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
