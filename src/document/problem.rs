//! The problems of a document with their positions: all problems of a document at once, one line each, in the
//! order of the files. The list is bounded, whatever the document.

use std::collections::BTreeSet;
use std::fmt;
use std::path;
use std::sync::Arc;

/// The largest number of problems in a list; further ones are only counted.
pub const PROBLEMS_MAX: usize = 100;

/// The length at which the list of problems is sorted by position and shortened. The problems that come first in the file are
/// kept.
const PROBLEMS_KEPT: usize = 10 * PROBLEMS_MAX;

/// A problem that an operator must correct.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file that has the problem.
    pub file: Arc<path::Path>,
    /// The line, from 1; 0 if the problem concerns the file as a whole.
    pub line: u32,
    /// The column in characters, from 1.
    pub column: u32,
    /// The path of the value, such as `listeners[0].bind`; may be empty.
    pub path: String,
    /// The text that was found, and the allowed values.
    pub message: String,
    /// The value that was probably meant.
    pub hint: Option<String>,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        if self.line > 0 {
            write!(f, ":{}:{}", self.line, self.column)?;
        }
        if !self.path.is_empty() {
            write!(f, ": {}", self.path)?;
        }
        write!(f, ": {}", self.message)?;
        match &self.hint {
            Some(hint) => write!(f, " (did you mean {hint:?}?)"),
            None => Ok(()),
        }
    }
}

/// A problem without its position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidValue {
    /// The text that was found, and the allowed values.
    pub message: String,
    /// The value that was probably meant.
    pub hint: Option<String>,
}

impl InvalidValue {
    /// Makes a fault without a hint.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None }
    }

    /// Adds the value that was probably meant, if there is one.
    #[must_use]
    pub fn hint(self, hint: Option<impl Into<String>>) -> Self {
        Self { hint: hint.map(Into::into), ..self }
    }
}

impl From<String> for InvalidValue {
    fn from(message: String) -> Self {
        Self::new(message)
    }
}

impl From<&str> for InvalidValue {
    fn from(message: &str) -> Self {
        Self::new(message)
    }
}

/// The number of a file, in the order of reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(u16);

/// The position of a value. Orders by file, then by line and column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Position {
    /// The file that contains the value.
    pub file: FileId,
    /// The line, from 1; 0 for the file as a whole.
    pub line: u32,
    /// The column in characters, from 1.
    pub column: u32,
}

impl Position {
    /// Returns the position of the file as a whole.
    pub fn whole(file: FileId) -> Self {
        Self { file, line: 0, column: 0 }
    }
}

/// The path from the root of a document to a value, as a linked list on the stack of the reader.
#[derive(Clone, Copy, Debug)]
pub enum Path<'p> {
    /// The root of the document.
    Root,
    /// A key of the map at a path.
    Key(&'p Self, &'p str),
    /// An item of the list at a path.
    Index(&'p Self, usize),
}

impl<'p> Path<'p> {
    /// Returns the path of a key below this one.
    pub fn key(&'p self, key: &'p str) -> Self {
        Path::Key(self, key)
    }

    /// Returns the path of an item below this one.
    pub fn index(&'p self, index: usize) -> Self {
        Path::Index(self, index)
    }
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Path::Root => Ok(()),
            Path::Key(parent, key) => {
                let word = key.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
                match (parent, word && !key.is_empty()) {
                    (Path::Root, true) => f.write_str(key),
                    (_, true) => write!(f, "{parent}.{key}"),
                    (_, false) => write!(f, "{parent}[{key:?}]"),
                }
            }
            Path::Index(parent, index) => write!(f, "{parent}[{index}]"),
        }
    }
}

/// Collects the files of one reading, with errors and warnings.
#[derive(Debug, Default)]
pub struct Problems {
    files: Vec<Arc<path::Path>>,
    errors: Bounded,
    warnings: Bounded,
    /// The objects whose keys a message has already listed; later messages omit the list.
    listed: BTreeSet<&'static str>,
}

impl Problems {
    /// Makes an empty collection.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a file that will be read; `None` after 65,535 files.
    pub fn add_file(&mut self, path: &path::Path) -> Option<FileId> {
        let id = u16::try_from(self.files.len()).ok().filter(|id| *id < u16::MAX)?;
        self.files.push(path.into());
        Some(FileId(id))
    }

    /// Returns the path of a file.
    pub fn file(&self, id: FileId) -> &path::Path {
        &self.files[usize::from(id.0)]
    }

    /// Returns a position as text, for messages that name a second position.
    pub fn place(&self, at: Position) -> String {
        format!("{}:{}:{}", self.file(at.file).display(), at.line, at.column)
    }

    /// Adds an error, which makes the document unusable.
    pub fn error(&mut self, at: Position, path: &dyn fmt::Display, fault: impl Into<InvalidValue>) {
        self.error_with(at, path, || fault.into());
    }

    /// Adds an error whose text is made only if it can appear in the list.
    pub fn error_with(
        &mut self,
        at: Position,
        path: &dyn fmt::Display,
        fault: impl FnOnce() -> InvalidValue,
    ) {
        if self.errors.is_beyond(at) {
            self.errors.more += 1;
            return;
        }
        let fault = fault();
        let problem = self.problem(at, path, fault);
        self.errors.push(at, problem);
    }

    /// Adds a warning; the document can be used all the same.
    pub fn warn(&mut self, at: Position, path: &dyn fmt::Display, fault: impl Into<InvalidValue>) {
        let problem = self.problem(at, path, fault.into());
        self.warnings.push(at, problem);
    }

    /// Returns true if the message is the first one to list the keys of an object; later messages omit the list.
    pub fn lists_keys_of(&mut self, object: &'static str) -> bool {
        self.listed.insert(object)
    }

    /// Returns true if there are no errors; warnings do not count.
    pub fn is_empty(&self) -> bool {
        self.errors.list.is_empty()
    }

    /// Returns the errors and the warnings, each in order of position.
    pub fn finish(self) -> (Vec<Problem>, Vec<Problem>) {
        (self.errors.finish(), self.warnings.finish())
    }

    fn problem(&self, at: Position, path: &dyn fmt::Display, fault: InvalidValue) -> Problem {
        Problem {
            file: self.files[usize::from(at.file.0)].clone(),
            line: at.line,
            column: at.column,
            path: visible(path.to_string()),
            message: visible(fault.message),
            hint: fault.hint,
        }
    }
}

/// Returns a text with its control characters escaped, because it may quote a file and is shown on terminals.
fn visible(text: String) -> String {
    if !text.contains(char::is_control) {
        return text;
    }
    let mut shown = String::with_capacity(text.len() + 8);
    for sign in text.chars() {
        match sign.is_control() {
            true => shown.extend(sign.escape_debug()),
            false => shown.push(sign),
        }
    }
    shown
}

/// The first [`PROBLEMS_MAX`] problems in order of position.
#[derive(Debug, Default)]
struct Bounded {
    list: Vec<(Position, Problem)>,
    more: usize,
    /// The position of the last problem in the list if the list was full when it was last shortened; otherwise `None`. Problems
    /// at later positions are only counted.
    last: Option<Position>,
}

impl Bounded {
    /// Returns true if a problem at this position would be counted, but not shown.
    fn is_beyond(&self, at: Position) -> bool {
        self.last.is_some_and(|last| at > last)
    }

    fn push(&mut self, at: Position, problem: Problem) {
        if self.list.len() >= PROBLEMS_KEPT {
            self.cut();
        }
        self.list.push((at, problem));
    }

    /// Sorts the list, removes duplicates and cuts the list. An aliased value is checked wherever it is used, but its problems
    /// are reported once.
    fn cut(&mut self) {
        self.list.sort_by_key(|(at, _)| *at);
        self.list.dedup();
        self.more += self.list.len().saturating_sub(PROBLEMS_MAX);
        self.list.truncate(PROBLEMS_MAX);
        self.last = self.list.last().map(|(at, _)| *at).filter(|_| self.list.len() == PROBLEMS_MAX);
    }

    fn finish(mut self) -> Vec<Problem> {
        self.cut();
        let more = self.more;
        let mut list: Vec<_> = self.list.into_iter().map(|(_, problem)| problem).collect();
        if let Some(last) = list.last().filter(|_| more > 0) {
            list.push(Problem {
                line: 0,
                column: 0,
                path: String::new(),
                message: format!("and {more} more"),
                hint: None,
                file: last.file.clone(),
            });
        }
        list
    }
}
