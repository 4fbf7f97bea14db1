//! YAML text as a tree with positions. It is built from the parser's events, not by the parser's own
//! recursive loader, so that depth, aliases and memory are bounded whatever the file holds.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use saphyr_parser::{Event, Parser, ScalarStyle, ScanError, Span, StrInput, Tag};

use super::environment::{Environment, expand};
use super::mistakes::cause;
use super::problem::{FileId, InvalidValue, Path, Position, Problems};

/// The largest depth of lists and maps.
pub const DEPTH_MAX: usize = 64;
/// The largest number of values of a document, or of one item of its streamed list. Keys are not counted.
pub const NODES_MAX: usize = 2_000_000;
/// The largest number of values that the aliases of a document expand to, plus the values that its anchors keep.
pub const ALIASED_NODES_MAX: usize = 1_000_000;

/// The longest key that a message quotes from a file that may not be a config, in bytes.
const WORD_BYTES_MAX: usize = 64;
/// The largest number of keys of a map that is searched key by key. For a small map, an index costs more than it saves.
const KEYS_SEARCHED_MAX: usize = 16;

/// Finds keys that a map has already.
#[derive(Default)]
struct KeyIndex {
    /// A hash that nobody can foresee, because the texts may come from the network.
    hasher: RandomState,
    /// The indices of all entries by the hashes of their keys; empty while the map is small.
    table: HashTable<usize>,
}

impl KeyIndex {
    /// Returns the position of an equal key of the map; otherwise adds the key, whose entry the caller must then append.
    fn add(&mut self, entries: &[(Key, Node)], text: &str) -> Option<Position> {
        if entries.len() < KEYS_SEARCHED_MAX {
            return entries.iter().find(|(key, _)| *key.text == *text).map(|(key, _)| key.position);
        }
        let Self { hasher, table } = self;
        let text_at = |at: usize| entries.get(at).map_or(text, |(key, _)| &key.text);
        let hash_at = |at: &usize| hasher.hash_one(text_at(*at));
        if table.is_empty() {
            for at in 0..entries.len() {
                table.insert_unique(hash_at(&at), at, hash_at);
            }
        }
        match table.entry(hasher.hash_one(text), |at| text_at(*at) == text, hash_at) {
            Entry::Occupied(known) => Some(entries[*known.get()].0.position),
            Entry::Vacant(free) => {
                free.insert(entries.len());
                None
            }
        }
    }
}

/// A value with its position.
#[derive(Clone, Debug)]
pub struct Node {
    /// The position of the value.
    pub position: Position,
    /// The value at this position.
    pub value: Value,
}

/// A YAML value.
#[derive(Clone, Debug)]
pub enum Value {
    /// An empty value, `~` or `null`.
    Null,
    /// A text, number or boolean.
    Scalar(Scalar),
    /// A list.
    Sequence(Vec<Node>),
    /// A map, in the order of the document.
    Mapping(Vec<(Key, Node)>),
}

/// A key of a map with its position; unique in its map.
#[derive(Clone, Debug)]
pub struct Key {
    /// The position of the key.
    pub position: Position,
    /// The text of the key.
    pub text: Box<str>,
}

/// A text, with the style that decides whether it may be read as a number.
#[derive(Clone, Debug)]
pub struct Scalar {
    /// The content of the scalar, without quotes and with variables replaced.
    pub text: Box<str>,
    /// The style in which the text was written.
    pub style: Style,
}

/// The style in which a scalar was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Without quotes: `5` is a number.
    Plain,
    /// In quotes, as a block, or tagged `!!str`: `"5"` is a text.
    Quoted,
    /// A scalar that contains an environment variable. The form of the key decides the type, because the style does not show
    /// it.
    Expanded,
    /// With an environment variable that is not set, which has been reported as a problem.
    Unset,
}

/// The type of a scalar in YAML 1.2's core schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScalarType {
    /// A text.
    Text,
    /// A number.
    Number,
    /// A boolean.
    Boolean,
    /// The text contains an environment variable, so it does not show the type. The form of the key decides the type.
    Open,
}

impl Scalar {
    /// Returns the type of the scalar.
    pub fn scalar_type(&self) -> ScalarType {
        match self.style {
            Style::Quoted => ScalarType::Text,
            Style::Expanded | Style::Unset => ScalarType::Open,
            Style::Plain if matches!(&*self.text, "true" | "True" | "TRUE" | "false" | "False" | "FALSE") => {
                ScalarType::Boolean
            }
            Style::Plain if is_number(&self.text) => ScalarType::Number,
            Style::Plain => ScalarType::Text,
        }
    }

    /// Returns the boolean that the text means. `on` and `off` may be in quotes, because JSON has no other form of them.
    pub fn switch(&self) -> Option<bool> {
        match &*self.text {
            "on" => Some(true),
            "off" => Some(false),
            _ if self.style == Style::Quoted => None,
            "true" | "True" | "TRUE" => Some(true),
            "false" | "False" | "FALSE" => Some(false),
            _ => None,
        }
    }
}

impl Node {
    /// Returns the text of a scalar.
    pub fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Scalar(scalar) => Some(&scalar.text),
            Value::Null | Value::Sequence(_) | Value::Mapping(_) => None,
        }
    }

    /// Returns the items of a list; none if the value is not a list.
    pub fn items(&self) -> &[Self] {
        match &self.value {
            Value::Sequence(items) => items,
            Value::Null | Value::Scalar(_) | Value::Mapping(_) => &[],
        }
    }

    /// Returns the entries of a map; none if the value is not a map.
    pub fn entries(&self) -> &[(Key, Self)] {
        match &self.value {
            Value::Mapping(entries) => entries,
            Value::Null | Value::Scalar(_) | Value::Sequence(_) => &[],
        }
    }

    /// Returns the boolean of a scalar: `true` and `false`; `on` and `off` mean the same.
    pub fn switch(&self) -> Option<bool> {
        match &self.value {
            Value::Scalar(scalar) => scalar.switch(),
            Value::Null | Value::Sequence(_) | Value::Mapping(_) => None,
        }
    }

    /// Returns true if the value is `off` or `false`.
    pub fn is_off(&self) -> bool {
        self.switch() == Some(false)
    }

    /// Returns true if the value is a map.
    pub fn is_map(&self) -> bool {
        matches!(self.value, Value::Mapping(_))
    }

    /// Returns the value of a key of a map.
    pub fn get(&self, key: &str) -> Option<&Self> {
        self.entries().iter().find(|(own, _)| &*own.text == key).map(|(_, node)| node)
    }
}

/// Writes the value as an operator would name it: `"10x"`, `the number 5`, `a list`.
impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Value::Null => f.write_str("nothing"),
            Value::Sequence(_) => f.write_str("a list"),
            Value::Mapping(_) => f.write_str("a map"),
            Value::Scalar(scalar) => {
                let text = shortened(&scalar.text);
                match scalar.scalar_type() {
                    ScalarType::Number => write!(f, "the number {text}"),
                    ScalarType::Boolean => f.write_str(&text),
                    ScalarType::Text | ScalarType::Open => write!(f, "{text:?}"),
                }
            }
        }
    }
}

/// Returns at most 80 characters of a text, for a message.
pub fn shortened(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(80) {
        Some((end, _)) => Cow::Owned(format!("{}…", &text[..end])),
        None => Cow::Borrowed(text),
    }
}

/// Returns true if a text looks like a key of a config or a name: short, and without the characters of
/// passwords and encoded keys. Only such texts are quoted from a file that is not a config.
pub fn is_word(text: &str) -> bool {
    (1..=WORD_BYTES_MAX).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.*<".contains(&byte))
}

/// Returns true for decimal, octal and hexadecimal integers and floats (YAML 1.2 §10.3.2).
fn is_number(text: &str) -> bool {
    if let Some(octal) = text.strip_prefix("0o") {
        return !octal.is_empty() && octal.bytes().all(|byte| matches!(byte, b'0'..=b'7'));
    }
    if let Some(hex) = text.strip_prefix("0x") {
        return !hex.is_empty() && hex.bytes().all(|byte| byte.is_ascii_hexdigit());
    }
    let bare = text.strip_prefix(['-', '+']).unwrap_or(text);
    match bare {
        ".inf" | ".Inf" | ".INF" | ".nan" | ".NaN" | ".NAN" => true,
        _ => {
            bare.bytes().next().is_some_and(|byte| byte.is_ascii_digit() || byte == b'.')
                && bare.bytes().any(|byte| byte.is_ascii_digit())
                && bare.parse::<f64>().is_ok()
        }
    }
}

/// A text to parse.
#[derive(Clone, Copy)]
pub struct Source<'s> {
    /// The file to which the positions in the tree refer.
    pub file: FileId,
    /// The YAML text.
    pub text: &'s str,
    /// The source of variables; `None`: `${…}` is text like any other.
    pub environment: Option<Environment<'s>>,
}

/// A list under a key of the root. Its items are passed to `item` one by one and not kept, so that a large document is never in
/// memory as a whole. The tree has an empty list in its place.
pub struct Stream<'s> {
    /// The key of the list.
    pub key: &'static str,
    /// Receives an item with its index.
    pub item: &'s mut dyn FnMut(usize, Node, &mut Problems),
}

/// Parses the one document of a text. Returns `None` if it cannot be read to its end, after reporting the cause. A document
/// that has only comments is [`Value::Null`].
pub fn parse<'s>(source: Source<'s>, stream: Option<Stream<'s>>, problems: &'s mut Problems) -> Option<Node> {
    let builder = Builder {
        parser: Parser::new_from_str(source.text),
        source,
        stream,
        problems,
        nodes: 0,
        aliased: 0,
        anchors: HashMap::new(),
    };
    builder.document().ok()
}

/// The document cannot be read further; the cause was reported.
struct Stop;

struct Builder<'s> {
    parser: Parser<'s, StrInput<'s>>,
    source: Source<'s>,
    stream: Option<Stream<'s>>,
    problems: &'s mut Problems,
    nodes: usize,
    aliased: usize,
    /// Anchors by the parser's number; `None` while the anchored value is being read.
    anchors: HashMap<usize, Option<(Node, usize)>>,
}

impl<'s> Builder<'s> {
    fn document(mut self) -> Result<Node, Stop> {
        let root = loop {
            let (event, span) = self.next()?;
            match event {
                Event::StreamEnd => {
                    let position = Position { file: self.source.file, line: 1, column: 1 };
                    return Ok(Node { position, value: Value::Null });
                }
                Event::StreamStart | Event::DocumentStart(_) | Event::Nothing => {}
                first => break self.node(first, span, 0, &Path::Root)?,
            }
        };
        loop {
            match self.next()? {
                (Event::StreamEnd, _) => return Ok(root),
                (Event::DocumentStart(_), span) => {
                    return Err(self.stop(
                        span,
                        &Path::Root,
                        "found a second document; a file holds one".into(),
                    ));
                }
                _ => {}
            }
        }
    }

    // Without the attribute, each event is copied once more: events are large, and a large registry has millions of them.
    #[inline]
    fn next(&mut self) -> Result<(Event<'s>, Span), Stop> {
        match self.parser.next_event() {
            Some(Ok(event)) => Ok(event),
            Some(Err(error)) => Err(self.unreadable(&error)),
            None => Ok((Event::StreamEnd, Span::default())),
        }
    }

    fn node(&mut self, event: Event<'s>, span: Span, depth: usize, path: &Path<'_>) -> Result<Node, Stop> {
        self.nodes += 1;
        if self.nodes > NODES_MAX {
            return Err(self.stop(span, path, format!("found more than {NODES_MAX} values here").into()));
        }
        if depth > DEPTH_MAX {
            let fault = format!("found lists and maps more than {DEPTH_MAX} deep");
            return Err(self.stop(span, path, fault.into()));
        }
        let nodes_before = self.nodes - 1;
        let (anchor, value) = match event {
            Event::Alias(anchor) => return self.alias(anchor, span, depth, path),
            Event::Scalar(text, style, anchor, tag) => {
                (anchor, self.scalar(text, style, tag.as_deref(), span, path))
            }
            Event::SequenceStart(anchor, tag) => {
                self.check_tag(tag.as_deref(), &["seq"], span, path);
                self.open(anchor);
                (anchor, Value::Sequence(self.sequence(depth, path)?))
            }
            Event::MappingStart(anchor, tag) => {
                self.check_tag(tag.as_deref(), &["map"], span, path);
                self.open(anchor);
                (anchor, Value::Mapping(self.mapping(depth, path)?))
            }
            _ => return Err(self.stop(span, path, "found the end of the document within a value".into())),
        };
        let node = Node { position: self.position(span), value };
        if anchor > 0 {
            let size = self.nodes.saturating_sub(nodes_before).max(1);
            self.charge(size, span, path)?;
            self.anchors.insert(anchor, Some((node.clone(), size)));
        }
        Ok(node)
    }

    fn open(&mut self, anchor: usize) {
        if anchor > 0 {
            self.anchors.insert(anchor, None);
        }
    }

    /// Copies the anchored value, and counts the values in it: a short text must not become a large tree.
    fn alias(&mut self, anchor: usize, span: Span, depth: usize, path: &Path<'_>) -> Result<Node, Stop> {
        let Some(Some((node, size))) = self.anchors.get(&anchor) else {
            return Err(self.stop(span, path, "found an alias within the value that it refers to".into()));
        };
        let (size, deep) = (*size, depth + height(node) > DEPTH_MAX);
        if deep {
            let fault = format!("found lists and maps more than {DEPTH_MAX} deep, by an alias");
            return Err(self.stop(span, path, fault.into()));
        }
        self.charge(size, span, path)?;
        self.nodes += size;
        match self.anchors.get(&anchor) {
            Some(Some((node, _))) => Ok(node.clone()),
            _ => Err(Stop),
        }
    }

    fn charge(&mut self, size: usize, span: Span, path: &Path<'_>) -> Result<(), Stop> {
        self.aliased = self.aliased.saturating_add(size);
        if self.aliased <= ALIASED_NODES_MAX {
            return Ok(());
        }
        let fault = format!("found aliases that stand for more than {ALIASED_NODES_MAX} values together");
        Err(self.stop(span, path, fault.into()))
    }

    fn sequence(&mut self, depth: usize, path: &Path<'_>) -> Result<Vec<Node>, Stop> {
        let mut items = Vec::new();
        loop {
            let (event, span) = self.next()?;
            if event == Event::SequenceEnd {
                return Ok(items);
            }
            let item = self.node(event, span, depth + 1, &path.index(items.len()))?;
            items.push(item);
        }
    }

    fn mapping(&mut self, depth: usize, path: &Path<'_>) -> Result<Vec<(Key, Node)>, Stop> {
        let mut entries: Vec<(Key, Node)> = Vec::new();
        let mut index = KeyIndex::default();
        loop {
            let (event, span) = self.next()?;
            if event == Event::MappingEnd {
                // A large document consists mostly of maps with a few keys. The spare capacity of these maps would cost much
                // memory.
                entries.shrink_to_fit();
                return Ok(entries);
            }
            let key = self.key(event, span, path)?;
            let below = path.key(&key.text);
            let (event, span) = self.next()?;
            let value = if depth == 0 && self.stream.as_ref().is_some_and(|stream| stream.key == &*key.text) {
                self.streamed(event, span, &below)?
            } else {
                let mut value = self.node(event, span, depth + 1, &below)?;
                if matches!(value.value, Value::Null) {
                    value.position = key.position;
                }
                value
            };
            if let Some(first) = index.add(&entries, &key.text) {
                let first = self.problems.place(first);
                if is_word(&key.text) {
                    let fault =
                        format!("the key {:?} is given twice; first at {first}", shortened(&key.text));
                    self.problems.error(key.position, &below, fault);
                } else {
                    let fault = format!("found a key that is given twice; first at {first}");
                    self.problems.error(key.position, path, fault);
                }
                continue;
            }
            entries.push((key, value));
        }
    }

    fn key(&mut self, event: Event<'s>, span: Span, path: &Path<'_>) -> Result<Key, Stop> {
        match event {
            Event::Scalar(text, style, 0, None) if !(text.is_empty() && style == ScalarStyle::Plain) => {
                Ok(Key { position: self.position(span), text: text.into() })
            }
            Event::Scalar(..) => {
                Err(self.stop(span, path, "found an empty, tagged or anchored key; a key is a text".into()))
            }
            Event::Alias(_) => Err(self.stop(span, path, "found an alias as key; a key is a text".into())),
            _ => Err(self.stop(span, path, "found a list or map as key; a key is a text".into())),
        }
    }

    /// Passes the items of the streamed list to the receiver. A value that is not a list stays in the tree, where the reader
    /// refuses it.
    fn streamed(&mut self, event: Event<'s>, span: Span, path: &Path<'_>) -> Result<Node, Stop> {
        let position = self.position(span);
        if !matches!(event, Event::SequenceStart(0, None)) {
            let mut node = self.node(event, span, 1, path)?;
            if let Value::Sequence(items) = &mut node.value {
                for (index, item) in std::mem::take(items).into_iter().enumerate() {
                    self.give(index, item);
                }
            }
            return Ok(node);
        }
        let outside = self.nodes;
        for index in 0.. {
            let (event, span) = self.next()?;
            if event == Event::SequenceEnd {
                break;
            }
            self.nodes = 0;
            let item = self.node(event, span, 2, &path.index(index))?;
            self.give(index, item);
        }
        self.nodes = outside;
        Ok(Node { position, value: Value::Sequence(Vec::new()) })
    }

    fn give(&mut self, index: usize, item: Node) {
        if let Some(stream) = &mut self.stream {
            (stream.item)(index, item, self.problems);
        }
    }

    fn scalar(
        &mut self,
        text: Cow<'s, str>,
        style: ScalarStyle,
        tag: Option<&Tag>,
        span: Span,
        path: &Path<'_>,
    ) -> Value {
        let core = ["str", "int", "float", "bool", "null"];
        self.check_tag(tag, &core, span, path);
        let is_text = tag.is_some_and(|tag| tag.suffix == "str" || is_non_specific(tag));
        let plain = style == ScalarStyle::Plain && !is_text;
        if plain && matches!(&*text, "" | "~" | "null" | "Null" | "NULL") {
            return Value::Null;
        }
        let unexpanded = if plain { Style::Plain } else { Style::Quoted };
        let Some(environment) = self.source.environment else {
            return Value::Scalar(Scalar { text: text.into(), style: unexpanded });
        };
        match expand(&text, environment) {
            Ok(Cow::Owned(text)) => Value::Scalar(Scalar { text: text.into(), style: Style::Expanded }),
            Ok(Cow::Borrowed(_)) => Value::Scalar(Scalar { text: text.into(), style: unexpanded }),
            Err(fault) => {
                let position = self.position(span);
                self.problems.error(position, path, fault);
                Value::Scalar(Scalar { text: "".into(), style: Style::Unset })
            }
        }
    }

    fn check_tag(&mut self, tag: Option<&Tag>, core: &[&str], span: Span, path: &Path<'_>) {
        let Some(tag) = tag else { return };
        let known = tag.is_yaml_core_schema() && core.contains(&&*tag.suffix);
        let non_specific = is_non_specific(tag);
        if !known && !non_specific {
            let position = self.position(span);
            let found = tag.to_string();
            let fault = format!("found the tag {:?}; tags are not supported", shortened(&found));
            self.problems.error(position, path, fault);
        }
    }

    fn position(&self, span: Span) -> Position {
        position(self.source.file, span.start.line(), span.start.col())
    }

    fn stop(&mut self, span: Span, path: &Path<'_>, fault: InvalidValue) -> Stop {
        let position = self.position(span);
        self.problems.error(position, path, fault);
        Stop
    }

    /// Reports why the text cannot be parsed. The usual cause is a tab in the indentation; without such a tab, the parser's own
    /// error is reported. The tab may be on a later line than the parser's error: the parser reports the line on which the text
    /// before the tab begins.
    fn unreadable(&mut self, error: &ScanError) -> Stop {
        let line = error.marker().line();
        let later = if error.info().contains("tab") { usize::MAX } else { 1 };
        let lines = self.source.text.lines().enumerate().skip(line.saturating_sub(1)).take(later);
        let tab = lines.filter_map(|(at, text)| Some((at + 1, indenting_tab(text)?))).next();
        let (line, column, fault) = match tab {
            Some((line, column)) => {
                (line, column, "found a tab in the indentation; YAML is indented by spaces".into())
            }
            None => match cause(self.source.text, line, error.info()) {
                Some(mistake) => {
                    (mistake.line, mistake.column, format!("found no valid YAML: {}", mistake.message))
                }
                None => (line, error.marker().col(), format!("found no valid YAML: {}", error.info())),
            },
        };
        let position = position(self.source.file, line, column);
        self.problems.error(position, &Path::Root, fault);
        Stop
    }
}

/// Converts the parser's line (from 1) and column (from 0).
fn position(file: FileId, line: usize, column: usize) -> Position {
    let clamped = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    Position { file, line: clamped(line), column: clamped(column.saturating_add(1)) }
}

/// Returns true if a tag is `!` alone, which makes a plain scalar a text (YAML 1.2 §6.9.1).
fn is_non_specific(tag: &Tag) -> bool {
    matches!((&*tag.handle, &*tag.suffix), ("", "!") | ("!", ""))
}

/// Returns the column of a tab that comes before anything else on a line.
fn indenting_tab(line: &str) -> Option<usize> {
    line.chars().take_while(|sign| matches!(sign, ' ' | '\t')).position(|sign| sign == '\t')
}

/// Returns the number of levels of lists and maps in a value.
fn height(node: &Node) -> usize {
    let below = match &node.value {
        Value::Null | Value::Scalar(_) => return 0,
        Value::Sequence(items) => items.iter().map(height).max(),
        Value::Mapping(entries) => entries.iter().map(|(_, node)| height(node)).max(),
    };
    1 + below.unwrap_or(0)
}

#[cfg(test)]
mod tests;
