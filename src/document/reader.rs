//! Checks a tree against its keys ([`check`]), and reads values from it by the same keys ([`Fields`]). The check reports all
//! problems; reading reports none, so that checks of several values together can run on a document that has a mistake
//! elsewhere.

use super::foreign;
use super::form::{Form, Items, Keys, MapOf, MayBeKeys, TextForm};
use super::key::{Key, ReadKey};
use super::nearest::nearest;
use super::problem::{InvalidValue, Path, Position, Problems};
use super::scalar;
use super::table::{AnyKey, Kind, Object, Presence, Text, Union};
use super::tree::{self, Node, Scalar, ScalarType, Style, Value, is_word, shortened};

/// The longest file whose whole text a message may quote, in bytes.
const PLAIN_BYTES_MAX: usize = 16;

/// The fault of an empty list that must have an item.
const EMPTY_LIST: &str = "found an empty list, expected one item or more";

/// Reports all parts of a value that its kind does not allow.
pub fn check(node: &Node, kind: &Kind, path: &Path<'_>, problems: &mut Problems) {
    match (&node.value, kind) {
        (Value::Scalar(Scalar { style: Style::Unset, .. }), _) => {}
        (Value::Sequence(items), Kind::List { of, min }) => {
            if items.len() < *min {
                problems.error(node.position, path, EMPTY_LIST);
            }
            for (index, item) in items.iter().enumerate() {
                check(item, of, &path.index(index), problems);
            }
        }
        (Value::Mapping(entries), Kind::Map { key, of }) => {
            for (own, value) in entries {
                let below = path.key(&own.text);
                if let Err(fault) = (key.check)(&own.text) {
                    problems.error(own.position, &below, refused(&quoted(&own.text), fault, &key.expects));
                }
                check(value, of, &below, problems);
            }
        }
        (Value::Mapping(entries), Kind::Object(object)) => {
            check_object(node.position, entries, object, path, problems);
        }
        (_, Kind::OrOff(_)) if node.is_off() => {}
        (_, Kind::OrOff(inner)) => check_or_off(node, inner, path, problems),
        (_, Kind::Union(union)) => check_union(node, union, path, problems),
        (
            Value::Scalar(scalar),
            Kind::Text(_) | Kind::Boolean | Kind::Integer { .. } | Kind::Share | Kind::Choice(_),
        ) => {
            if let Err(fault) = check_scalar(scalar, kind) {
                problems.error(node.position, path, refused(node, fault, kind));
            }
        }
        (Value::Scalar(scalar), _) if !is_harmless(&scalar.text, path) => {
            // The text may be a whole file with a secret, so it is not quoted.
            problems.error(node.position, path, format!("found a text, expected {kind}"));
        }
        _ => problems.error(node.position, path, format!("found {node}, expected {kind}")),
    }
}

/// Makes the message of a refused value: the value, the reason, and the expected values.
fn refused(
    found: &dyn std::fmt::Display,
    fault: InvalidValue,
    expected: &dyn std::fmt::Display,
) -> InvalidValue {
    let why = if fault.message.is_empty() { String::new() } else { format!(": {}", fault.message) };
    InvalidValue { message: format!("found {found}{why}; expected {expected}"), hint: fault.hint }
}

/// Returns true if an unexpected text is certainly not a secret, so that a message may quote it. If the text is the whole file,
/// the rule is stricter: the file may be an access token, and a token can look like a key.
fn is_harmless(text: &str, path: &Path<'_>) -> bool {
    let is_plain = text.len() <= PLAIN_BYTES_MAX && text.bytes().all(|byte| byte.is_ascii_alphabetic());
    is_word(text) && (is_plain || !matches!(path, Path::Root))
}

fn quoted(text: &str) -> String {
    format!("{:?}", shortened(text))
}

fn check_or_off(node: &Node, inner: &Kind, path: &Path<'_>, problems: &mut Problems) {
    let fits = match &node.value {
        Value::Null => false,
        Value::Scalar(scalar) => !matches!(inner, Kind::Object(_)) && scalar.switch().is_none(),
        Value::Sequence(_) => matches!(inner, Kind::List { .. } | Kind::Union(_)),
        Value::Mapping(_) => matches!(inner, Kind::Object(_) | Kind::Map { .. } | Kind::Union(_)),
    };
    match fits {
        true => check(node, inner, path, problems),
        false => problems.error(node.position, path, format!("found {node}, expected {inner}, or off")),
    }
}

/// Checks a node against those forms of the union that fit the node's type. At most one form fits a list or a map. Several
/// forms can fit a scalar, which must be legal in one of them.
fn check_union(node: &Node, union: &Union, path: &Path<'_>, problems: &mut Problems) {
    let fits = |kind: &&Kind| match &node.value {
        Value::Null => false,
        Value::Sequence(_) => matches!(kind, Kind::List { .. }),
        Value::Mapping(_) => matches!(kind, Kind::Object(_) | Kind::Map { .. }),
        Value::Scalar(_) => {
            matches!(
                kind,
                Kind::Text(_) | Kind::Boolean | Kind::Integer { .. } | Kind::Share | Kind::Choice(_)
            )
        }
    };
    let fitting: Vec<&Kind> = union.kinds.iter().filter(fits).collect();
    match (&node.value, fitting.as_slice()) {
        (Value::Scalar(scalar), kinds) if !kinds.is_empty() => {
            let faults: Vec<InvalidValue> =
                kinds.iter().filter_map(|kind| check_scalar(scalar, kind).err()).collect();
            if faults.len() == kinds.len() {
                let told = faults.into_iter().max_by_key(|fault| fault.hint.is_some());
                let told = told.unwrap_or_else(|| "".into());
                problems.error(node.position, path, refused(node, told, &union.expects));
            }
        }
        (_, [kind]) => check(node, kind, path, problems),
        _ => problems.error(node.position, path, format!("found {node}, expected {}", union.expects)),
    }
}

fn check_scalar(scalar: &Scalar, kind: &Kind) -> Result<(), InvalidValue> {
    let text = &*scalar.text;
    match kind {
        Kind::Text(form) => check_text(scalar, form),
        Kind::Boolean => match scalar.switch() {
            Some(_) => Ok(()),
            None => Err(InvalidValue::new("").hint(match text.to_ascii_lowercase().as_str() {
                "yes" | "y" | "true" | "on" => Some("true"),
                "no" | "n" | "false" | "off" => Some("false"),
                _ => None,
            })),
        },
        Kind::Integer { min, max } => {
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            let number = text.parse::<u64>().ok().filter(|_| digits);
            match number {
                Some(_) if scalar.style == Style::Quoted => {
                    Err("the quotes make the value a text; remove them".into())
                }
                Some(number) if (*min..=*max).contains(&number) => Ok(()),
                _ => Err("".into()),
            }
        }
        Kind::Share => match scalar::share(text) {
            Ok(_) if scalar.style == Style::Quoted => {
                Err("the quotes make the value a text; remove them".into())
            }
            result => result.map(drop),
        },
        Kind::Choice(words) if words.contains(&text) => Ok(()),
        Kind::Choice(words) => Err(InvalidValue::new("").hint(nearest(text, words.iter().copied()))),
        _ => Err("".into()),
    }
}

fn check_text(scalar: &Scalar, form: &Text) -> Result<(), InvalidValue> {
    match scalar.scalar_type() {
        ScalarType::Boolean => return Err("it is not a text".into()),
        ScalarType::Number if !form.number => {
            // The error of the text form says more, for example that a duration lacks its unit.
            let quoted = format!("write it in quotes: \"{}\"", shortened(&scalar.text));
            return Err((form.check)(&scalar.text).err().unwrap_or_else(|| quoted.into()));
        }
        ScalarType::Number | ScalarType::Text | ScalarType::Open => {}
    }
    (form.check)(&scalar.text)
}

fn check_object(
    at: Position,
    entries: &[(tree::Key, Node)],
    object: &'static Object,
    path: &Path<'_>,
    problems: &mut Problems,
) {
    let has = |wanted: &str| entries.iter().any(|(key, _)| &*key.text == wanted);
    if let (Some(program), Some((first, _))) = (foreign::program(object, has), entries.first()) {
        let fault = format!(
            "this looks like {program}, not like a config of isthmus; `isthmus schema --reference` lists its keys"
        );
        return problems.error(first.position, path, fault);
    }
    for (key, value) in entries {
        let below = path.key(&key.text);
        match object.key(&key.text) {
            Some(known) if lacks_items(value, known.kind()) => {
                let advice = match known.presence() {
                    Presence::Absent("none") | Presence::Required => String::new(),
                    Presence::Absent(default) => format!("; leave the key out for the default: {default}"),
                    Presence::Default(default) => format!("; leave the key out for the default: {default}"),
                };
                problems.error(value.position, &below, format!("{EMPTY_LIST}{advice}"));
            }
            Some(known) => check(value, known.kind(), &below, problems),
            None if object.removed(&key.text).is_some() => {
                let instead = object.removed(&key.text).unwrap_or_default();
                let fault = "this key has no effect and will be an error in the next release; remove it";
                problems.warn(key.position, &below, format!("{fault}: {instead}"));
            }
            // If the file is not a config, a key that is not a plain word may be a secret, so the path of the problem omits it.
            None => {
                let lists = problems.lists_keys_of(object.name);
                let at = if is_word(&key.text) { &below } else { path };
                problems.error_with(key.position, at, || match lists {
                    true => unknown_key(&key.text, object, &listed_keys(object)),
                    false => unknown_key(&key.text, object, ""),
                });
            }
        }
    }
    for key in object.keys {
        if key.is_required() && !has(key.name()) {
            problems.error(at, path, format!("the key {} is missing; expected {}", key.name(), key.kind()));
        }
    }
    let given = object.one_of.iter().filter(|key| has(key)).count();
    if !object.one_of.is_empty() && given != 1 {
        let found = if given == 0 { "none" } else { "more than one" };
        let keys = object.one_of.join(", ");
        problems.error(at, path, format!("found {found} of the keys {keys}, expected exactly one of them"));
    }
}

/// Returns true if the value is an empty list, and the kind is a list that must have an item.
fn lacks_items(value: &Node, kind: &Kind) -> bool {
    matches!((&value.value, kind), (Value::Sequence(items), Kind::List { min: 1.., .. }) if items.is_empty())
}

fn listed_keys(object: &'static Object) -> String {
    format!(", expected one of {}", object.names().collect::<Vec<_>>().join(", "))
}

/// Makes the message of an unknown key; `expected` is the end of the message.
fn unknown_key(key: &str, object: &'static Object, expected: &str) -> InvalidValue {
    if key == "<<" {
        return "found a merge key (<<), which is not supported; repeat the keys".into();
    }
    let found =
        if is_word(key) { format!("the unknown key {}", quoted(key)) } else { "an unknown key".to_owned() };
    let hint = foreign::meant(object, key).or_else(|| nearest(key, object.names()));
    InvalidValue::new(format!("found {found}{expected}")).hint(hint.filter(|_| is_word(key)))
}

/// A map that is read by its keys. A wrong value is read as absent; `check` reports it.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'n> {
    node: Option<&'n Node>,
    object: &'static Object,
}

impl<'n> Fields<'n> {
    /// Reads a node. All keys are absent if there is no node, or if it is not a map.
    pub fn of<K: Keys>(node: Option<&'n Node>) -> Self {
        Self { node, object: K::OBJECT }
    }

    /// Returns the node under a key.
    pub fn at(&self, key: &(impl AnyKey + ?Sized)) -> Option<&'n Node> {
        debug_assert!(
            self.object.key(key.name()).is_some_and(|known| known.doc() == key.doc()),
            "the key {} is not one of {}",
            key.name(),
            self.object.name
        );
        self.node?.get(key.name())
    }

    /// Returns true if the value under a key is `off`.
    pub fn is_off(&self, key: &impl AnyKey) -> bool {
        self.at(key).is_some_and(Node::is_off)
    }

    /// Reads the value of a key.
    pub fn get<K: ReadKey>(&self, key: &K) -> K::Read {
        key.read(self.at(key))
    }

    /// Reads the value of a key by `parse` instead of the form's own parser, for example to share memory between equal values.
    pub fn get_by<F: TextForm>(
        &self,
        key: &Key<F>,
        parse: impl FnOnce(&'n str) -> Result<F::Value, InvalidValue>,
    ) -> Option<F::Value> {
        parse(self.at(key)?.text()?).ok()
    }

    /// Reads the value of a key, with its node.
    pub fn found<F: Form>(&self, key: &Key<F>) -> Option<(F::Value, &'n Node)> {
        self.get(key).zip(self.at(key))
    }

    /// Returns the map under a key.
    pub fn map<F: Form + MayBeKeys>(&self, key: &Key<F>) -> Self {
        Self::of::<F::Keys>(self.at(key))
    }

    /// Returns the maps of the list under a key, with their indices and nodes.
    pub fn maps<F: Items<Item: Keys>>(&self, key: &Key<F>) -> impl Iterator<Item = (usize, Self, &'n Node)> {
        let items = self.at(key).map_or(&[][..], Node::items).iter().enumerate();
        items.map(|(index, node)| (index, Self::of::<F::Item>(Some(node)), node))
    }

    /// Returns the values of the list under a key, with their indices and nodes. Items that are wrong are left out.
    pub fn values<F: Items>(
        &self,
        key: &Key<F>,
    ) -> impl Iterator<Item = (usize, <F::Item as Form>::Value, &'n Node)> {
        let items = self.at(key).map_or(&[][..], Node::items).iter().enumerate();
        items.filter_map(|(index, node)| Some((index, F::Item::read(node)?, node)))
    }

    /// Returns the entries of the map under a key.
    pub fn entries<K, F>(&self, key: &Key<MapOf<K, F>>) -> &'n [(tree::Key, Node)]
    where
        MapOf<K, F>: Form,
    {
        self.at(key).map_or(&[], Node::entries)
    }
}
