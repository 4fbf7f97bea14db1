//! A YAML text as a tree in which every value knows its place. Built from the parser's events, not by
//! the parser's own (recursive) loader, so that depth, aliases and memory are bounded here: nothing a
//! file says can make us recurse or grow without end.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use saphyr_parser::{Event, Parser, ScalarStyle, ScanError, Span, StrInput, Tag};

use super::environment::{Environment, expand};
use super::mistakes::cause;
use super::problem::{Fault, FileId, Path, Position, Problems};

/// Lists and maps within one another.
pub const DEPTH_MAX: usize = 64;
/// Values of one document, or of one item of its streamed list; keys are not counted.
pub const NODES_MAX: usize = 2_000_000;
/// Values that one document's aliases may stand for, together with those its anchors keep.
pub const ALIASED_NODES_MAX: usize = 1_000_000;

/// Longest key of an unknown file that is quoted.
const WORD_BYTES_MAX: usize = 64;
/// Keys of one map that are searched one by one; an index for each small map costs more than it saves.
const KEYS_SEARCHED_MAX: usize = 16;

/// One value and where it stands.
#[derive(Clone, Debug)]
pub struct Node {
    pub position: Position,
    pub value: Value,
}

/// What a value is.
#[derive(Clone, Debug)]
pub enum Value {
    Null,
    Scalar(Scalar),
    Sequence(Vec<Node>),
    Mapping(Vec<(Key, Node)>),
}

/// A key of a map and where it stands; unique in its map.
#[derive(Clone, Debug)]
pub struct Key {
    pub position: Position,
    pub text: Box<str>,
}

/// A text, with what tells whether it may be read as a number.
#[derive(Clone, Debug)]
pub struct Scalar {
    pub text: Box<str>,
    pub style: Style,
}

/// How a scalar was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Without quotes: `5` is a number.
    Plain,
    /// In quotes or as a block, or tagged `!!str`: `"5"` is a text.
    Quoted,
    /// Written with a variable: whatever the reader takes it for.
    Expanded,
    /// Its variable is not set, which has been told of.
    Unset,
}

/// What a scalar is to YAML 1.2's core schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScalarType {
    Text,
    Number,
    Boolean,
    /// Its writer left the type to the reader.
    Open,
}

impl Scalar {
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
}

impl Node {
    /// The text of a scalar.
    pub fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Scalar(scalar) => Some(&scalar.text),
            Value::Null | Value::Sequence(_) | Value::Mapping(_) => None,
        }
    }

    /// The items of a list; none if it is no list.
    pub fn items(&self) -> &[Self] {
        match &self.value {
            Value::Sequence(items) => items,
            Value::Null | Value::Scalar(_) | Value::Mapping(_) => &[],
        }
    }

    /// The entries of a map; none if it is no map.
    pub fn entries(&self) -> &[(Key, Self)] {
        match &self.value {
            Value::Mapping(entries) => entries,
            Value::Null | Value::Scalar(_) | Value::Sequence(_) => &[],
        }
    }

    /// The value of a key of a map.
    pub fn get(&self, key: &str) -> Option<&Self> {
        self.entries().iter().find(|(own, _)| &*own.text == key).map(|(_, node)| node)
    }
}

/// As an operator would name what was found: `"10x"`, `the number 5`, `a list`.
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

/// At most 80 characters of a text, for a message.
pub fn shortened(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(80) {
        Some((end, _)) => Cow::Owned(format!("{}…", &text[..end])),
        None => Cow::Borrowed(text),
    }
}

/// Returns true if a text looks like a key of a config or a name: short, and without the characters that passwords and
/// encoded keys have. Of a file that is no config nothing else is quoted.
pub fn is_word(text: &str) -> bool {
    (1..=WORD_BYTES_MAX).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.*<".contains(&byte))
}

/// YAML 1.2 §10.3.2: decimal, octal and hexadecimal integers, floats.
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

/// A text to be read.
#[derive(Clone, Copy)]
pub struct Source<'s> {
    pub file: FileId,
    pub text: &'s str,
    /// Absent: `${…}` is text like any other.
    pub environment: Option<Environment<'s>>,
}

/// A list under a key of the root whose items are given away one by one and not kept, so that a large
/// document is never held whole. It stays in the tree as an empty list.
pub struct Stream<'s> {
    pub key: &'static str,
    /// Takes an item with its index.
    pub item: &'s mut dyn FnMut(usize, Node, &mut Problems),
}

/// The tree of the one document of a text. `None` if it could not be read to its end, which has then
/// been told of. A document of nothing but comments is [`Value::Null`].
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

/// The document cannot be read further; the reason has been told.
struct Stop;

struct Builder<'s> {
    parser: Parser<'s, StrInput<'s>>,
    source: Source<'s>,
    stream: Option<Stream<'s>>,
    problems: &'s mut Problems,
    nodes: usize,
    aliased: usize,
    /// By the parser's number; `None` while the anchored value is being read.
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

    /// The anchored value again, in full: what was cheap to write must not be dear to hold.
    fn alias(&mut self, anchor: usize, span: Span, depth: usize, path: &Path<'_>) -> Result<Node, Stop> {
        let Some(Some((node, size))) = self.anchors.get(&anchor) else {
            return Err(self.stop(span, path, "found an alias within the value it stands for".into()));
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
        let mut seen: HashMap<Box<str>, Position> = HashMap::new();
        loop {
            let (event, span) = self.next()?;
            if event == Event::MappingEnd {
                // Maps of a few keys are most of a large document.
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
            let first = match seen.is_empty() {
                true => entries.iter().find(|(own, _)| own.text == key.text).map(|(own, _)| own.position),
                false => seen.get(&key.text).copied(),
            };
            if let Some(first) = first {
                let first = self.problems.place(first);
                if is_word(&key.text) {
                    let fault =
                        format!("the key {:?} is there twice; first at {first}", shortened(&key.text));
                    self.problems.error(key.position, &below, fault);
                } else {
                    let fault = format!("found a key that is there twice; first at {first}");
                    self.problems.error(key.position, path, fault);
                }
                continue;
            }
            if !seen.is_empty() {
                seen.insert(key.text.clone(), key.position);
            }
            entries.push((key, value));
            if entries.len() == KEYS_SEARCHED_MAX {
                seen = entries.iter().map(|(key, _)| (key.text.clone(), key.position)).collect();
            }
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

    /// Gives the items away; whatever is no list stays in the tree, for the reader to refuse.
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

    fn stop(&mut self, span: Span, path: &Path<'_>, fault: Fault) -> Stop {
        let position = self.position(span);
        self.problems.error(position, path, fault);
        Stop
    }

    /// The parser's complaint; tabs, the usual cause, by name. A tab can end a text that began on an
    /// earlier line, which is what the parser then points to.
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

/// From the parser's line (from 1) and column (from 0).
fn position(file: FileId, line: usize, column: usize) -> Position {
    let clamped = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    Position { file, line: clamped(line), column: clamped(column.saturating_add(1)) }
}

/// Whether a tag is `!` alone, which makes a plain scalar a text (YAML 1.2 §6.9.1).
fn is_non_specific(tag: &Tag) -> bool {
    matches!((&*tag.handle, &*tag.suffix), ("", "!") | ("!", ""))
}

/// The column of a tab before anything else on a line.
fn indenting_tab(line: &str) -> Option<usize> {
    line.chars().take_while(|sign| matches!(sign, ' ' | '\t')).position(|sign| sign == '\t')
}

/// Levels of lists and maps in a value.
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
