//! What is wrong with a document, and where: one line per problem, all of a document at once, in the
//! order in which a reader of the files meets them. The list is bounded, whatever the document.

use std::collections::BTreeSet;
use std::fmt;
use std::path;
use std::sync::Arc;

/// Problems told of; those beyond are only counted.
pub const PROBLEMS_MAX: usize = 100;

/// Problems kept before the list is sorted and cut, so that the first of the file survive the cut.
const PROBLEMS_KEPT: usize = 10 * PROBLEMS_MAX;

/// One thing an operator has to put right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub file: Arc<path::Path>,
    /// From 1; 0 where the problem is the file itself.
    pub line: u32,
    /// In characters, from 1.
    pub column: u32,
    /// As in `listeners[0].bind`; may be empty.
    pub path: String,
    /// What was found and what is allowed.
    pub message: String,
    /// What was probably meant.
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

/// A problem without its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub message: String,
    pub hint: Option<String>,
}

impl Fault {
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None }
    }

    /// The same with what was probably meant.
    #[must_use]
    pub fn hint(self, hint: Option<impl Into<String>>) -> Self {
        Self { hint: hint.map(Into::into), ..self }
    }
}

impl From<String> for Fault {
    fn from(message: String) -> Self {
        Self::new(message)
    }
}

impl From<&str> for Fault {
    fn from(message: &str) -> Self {
        Self::new(message)
    }
}

/// One of the files being read, by the order of reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(u16);

/// Where a value stands. Orders as a reader of the files meets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Position {
    pub file: FileId,
    /// From 1; 0 stands for the file itself.
    pub line: u32,
    /// In characters, from 1.
    pub column: u32,
}

impl Position {
    /// The file itself, where no line is to blame.
    pub fn whole(file: FileId) -> Self {
        Self { file, line: 0, column: 0 }
    }
}

/// The way from the root of a document to a value; lives on the stack of the reader.
#[derive(Clone, Copy, Debug)]
pub enum Path<'p> {
    Root,
    Key(&'p Self, &'p str),
    Index(&'p Self, usize),
}

impl<'p> Path<'p> {
    pub fn key(&'p self, key: &'p str) -> Self {
        Path::Key(self, key)
    }

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

/// The files of one reading, and what is wrong or doubtful in them.
#[derive(Debug, Default)]
pub struct Problems {
    files: Vec<Arc<path::Path>>,
    errors: Bounded,
    warnings: Bounded,
    /// Objects whose keys were listed.
    listed: BTreeSet<&'static str>,
}

impl Problems {
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes note of a file about to be read; `None` after 65,535 of them.
    pub fn add_file(&mut self, path: &path::Path) -> Option<FileId> {
        let id = u16::try_from(self.files.len()).ok().filter(|id| *id < u16::MAX)?;
        self.files.push(path.into());
        Some(FileId(id))
    }

    pub fn file(&self, id: FileId) -> &path::Path {
        &self.files[usize::from(id.0)]
    }

    /// A place as text, for messages that name a second one.
    pub fn place(&self, at: Position) -> String {
        format!("{}:{}:{}", self.file(at.file).display(), at.line, at.column)
    }

    /// Adds what fails the document.
    pub fn error(&mut self, at: Position, path: &dyn fmt::Display, fault: impl Into<Fault>) {
        self.error_with(at, path, || fault.into());
    }

    /// The same, where the text takes time to make: it is made only if it may be told.
    pub fn error_with(&mut self, at: Position, path: &dyn fmt::Display, fault: impl FnOnce() -> Fault) {
        if self.errors.is_beyond(at) {
            self.errors.more += 1;
            return;
        }
        let fault = fault();
        let problem = self.problem(at, path, fault);
        self.errors.push(at, problem);
    }

    /// Adds what is doubtful but does not fail the document.
    pub fn warn(&mut self, at: Position, path: &dyn fmt::Display, fault: impl Into<Fault>) {
        let problem = self.problem(at, path, fault.into());
        self.warnings.push(at, problem);
    }

    /// Returns true for the first caller who is about to list the keys of an object: once is enough.
    pub fn lists_keys_of(&mut self, object: &'static str) -> bool {
        self.listed.insert(object)
    }

    /// Whether nothing is wrong; warnings do not count.
    pub fn is_empty(&self) -> bool {
        self.errors.list.is_empty()
    }

    /// The errors and the warnings, each sorted by place.
    pub fn finish(self) -> (Vec<Problem>, Vec<Problem>) {
        (self.errors.finish(), self.warnings.finish())
    }

    fn problem(&self, at: Position, path: &dyn fmt::Display, fault: Fault) -> Problem {
        Problem {
            file: self.files[usize::from(at.file.0)].clone(),
            line: at.line,
            column: at.column,
            path: path.to_string(),
            message: fault.message,
            hint: fault.hint,
        }
    }
}

/// Problems in order of place, the first [`PROBLEMS_MAX`] of them.
#[derive(Debug, Default)]
struct Bounded {
    list: Vec<(Position, Problem)>,
    more: usize,
    /// The place of the last that is told of, once there are more than are told.
    last: Option<Position>,
}

impl Bounded {
    /// Returns true if a problem there would only be counted.
    fn is_beyond(&self, at: Position) -> bool {
        self.last.is_some_and(|last| at > last)
    }

    fn push(&mut self, at: Position, problem: Problem) {
        if self.list.len() >= PROBLEMS_KEPT {
            self.cut();
        }
        self.list.push((at, problem));
    }

    /// An aliased value is checked wherever it is used, but stands and is told of once.
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
