//! Writes the lines of a log without waiting for the reader. Lines that a pipe or terminal does not take at once stay
//! pending up to a limit; lost lines are counted, with the reason.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use metrics::Counter;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, OFlags, Stat, Timespec, fstat};
use rustix::io::ioctl_fionread;
use rustix::pipe::fcntl_getpipe_size;

use super::access_log::{AccessLog, Sink};

/// The number of bytes that a writable pipe accepts without waiting (`PIPE_BUF`, pipe(7)).
const PIPE_BYTES: usize = 4096;
/// The number of bytes that may be pending; further lines are lost.
const PENDING_BYTES_MAX: usize = 4 << 20;
/// The time without a successful write after which the reader counts as stuck.
const STUCK_AFTER: Duration = Duration::from_millis(250);
/// The mode of a new log file: its owner may write, and its group may read.
const FILE_MODE: u32 = 0o640;

/// An access log, with its file opened if it has one.
#[derive(Debug)]
pub struct OpenLog {
    /// The log's destination and format.
    pub(super) log: AccessLog,
    file: Option<File>,
}

impl AccessLog {
    /// Opens the file, if there is one. Blocks for as long as the file system does.
    pub fn open(self) -> Result<OpenLog, String> {
        let file = self.path().map(|path| {
            // If the file is a pipe, this does not wait until the pipe has a reader.
            open(OpenOptions::new().create(true).append(true).mode(FILE_MODE), path)
        });
        let file = file.transpose().map_err(|error| self.cannot(&error))?;
        Ok(OpenLog { log: self, file })
    }

    /// Returns the reason why the file cannot be opened; `None` if it can. Does not create the file. Blocks for as long as the
    /// file system does.
    pub fn problem(&self) -> Option<String> {
        let path = self.path()?;
        let opened = match open(OpenOptions::new().append(true), path) {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
                let folder = folder.unwrap_or_else(|| Path::new("."));
                let rights = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
                rustix::fs::access(folder, rights).map_err(io::Error::from)
            }
            Err(error) => Err(error),
        };
        opened.err().map(|error| self.cannot(&error))
    }

    fn path(&self) -> Option<&Path> {
        match self {
            Self::To { sink: Sink::File(path), .. } => Some(path),
            Self::To { sink: Sink::Stdout | Sink::Stderr, .. } | Self::Off => None,
        }
    }

    fn cannot(&self, error: &io::Error) -> String {
        let path = self.path().unwrap_or_else(|| Path::new("")).display();
        format!("telemetry.accessLog.path: cannot open {path}: {error}")
    }
}

fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).map_err(io::Error::other)?;
    options.custom_flags(flags).open(path)
}

/// The count of lost lines of one log.
#[derive(Clone)]
pub(super) struct Lost {
    metric: Counter,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    lines: AtomicU64,
    stuck: AtomicBool,
    /// The reason why lines are being lost; `None` if none are being lost.
    problem: Mutex<Option<String>>,
}

impl Lost {
    /// Creates a count of zero. Lost lines are added to `metric` too.
    pub(super) fn new(metric: Counter) -> Self {
        Self { metric, shared: Arc::default() }
    }

    /// Counts lost lines.
    pub(super) fn add(&self, lines: u64) {
        self.metric.increment(lines);
        self.shared.lines.fetch_add(lines, Ordering::Relaxed);
    }

    /// Returns the number of lost lines.
    pub(super) fn lines(&self) -> u64 {
        self.shared.lines.load(Ordering::Relaxed)
    }

    /// Returns true if the log's reader has read nothing for a while.
    pub(super) fn is_stuck(&self) -> bool {
        self.shared.stuck.load(Ordering::Relaxed)
    }

    /// Returns the reason why lines are being lost; `None` if none are being lost.
    pub(super) fn problem(&self) -> Option<String> {
        self.locked().clone()
    }

    fn set(&self, problem: Option<String>) {
        self.shared.stuck.store(false, Ordering::Relaxed);
        *self.locked() = problem;
    }

    fn locked(&self) -> MutexGuard<'_, Option<String>> {
        self.shared.problem.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Target {
    Nowhere,
    Stdout,
    Stderr,
    File(File),
}

/// The number of bytes that a target accepts in one write without waiting.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// A regular file accepts all bytes or returns an error.
    Whole,
    /// An empty pipe accepts up to `bytes` bytes without waiting; a pipe with unread bytes accepts fewer.
    Pipe { bytes: usize },
    /// A terminal or a socket accepts bytes when it is writable.
    WhenReady,
}

/// The output of one log.
pub(super) struct Outlet {
    target: Target,
    manner: Manner,
    pending: Vec<u8>,
    /// True if the target ends in a part of a line, the rest of which is lost.
    torn: bool,
    /// The time since which the reader has read nothing; `None` while it reads.
    waiting: Option<Instant>,
    lost: Lost,
}

impl Outlet {
    /// Creates an output to standard error.
    pub(super) fn stderr(lost: Lost) -> Self {
        Self::new(Target::Stderr, lost)
    }

    /// Creates an output to the destination of an access log.
    pub(super) fn of(log: OpenLog, lost: Lost) -> Self {
        Self::new(Target::of(log), lost)
    }

    fn new(target: Target, lost: Lost) -> Self {
        let manner = target.manner();
        Self { target, manner, pending: Vec::new(), torn: false, waiting: None, lost }
    }

    /// Adds complete lines to the lines that are pending.
    pub(super) fn push(&mut self, lines: &[u8]) {
        if self.pending.len() + lines.len() > PENDING_BYTES_MAX {
            self.lost.add(count(lines));
        } else {
            self.pending.extend_from_slice(lines);
        }
    }

    /// Returns true if lines are pending.
    pub(super) fn is_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Replaces the log. Pending lines go to the new log.
    pub(super) fn go_over_to(&mut self, log: OpenLog) {
        self.write();
        let before = self.target.file_id();
        self.target = Target::of(log);
        self.manner = self.target.manner();
        self.torn &= before.is_some() && before == self.target.file_id();
        self.waiting = None;
        self.lost.set(None);
        if matches!(self.target, Target::Nowhere) {
            self.pending.clear();
        }
    }

    /// Writes as many pending bytes as the target takes without waiting.
    pub(super) fn write(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let was_torn = std::mem::take(&mut self.torn);
        if was_torn {
            // The line feed separates the next line from the incomplete one.
            self.pending.insert(0, b'\n');
        }
        let mut written = 0;
        let end = loop {
            let rest = &self.pending[written..];
            if rest.is_empty() {
                break Ok(());
            }
            match self.target.write(rest, self.manner) {
                Ok(0) => break Err(ErrorKind::WriteZero.into()),
                Ok(bytes) => written += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => break Err(error),
            }
        };
        let mid_line = written > 0 && self.pending[written - 1] != b'\n';
        if was_torn && written == 0 {
            // The line feed is not part of a line, so it is neither kept nor counted as lost.
            self.pending.remove(0);
            self.torn = true;
        }
        match end {
            Ok(()) => {
                self.pending.clear();
                if self.waiting.take().is_some() || self.lost.locked().is_some() {
                    self.lost.set(None);
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.pending.drain(..written);
                if written > 0 {
                    self.waiting = None;
                }
                let since = *self.waiting.get_or_insert_with(Instant::now);
                if since.elapsed() >= STUCK_AFTER && !self.lost.is_stuck() {
                    self.lost.set(Some("the reader of the log does not read".to_owned()));
                    self.lost.shared.stuck.store(true, Ordering::Relaxed);
                }
            }
            Err(error) => {
                self.torn |= mid_line;
                self.lost.add(count(&self.pending[written..]));
                self.pending.clear();
                self.waiting = None;
                self.lost.set(Some(format!("cannot write: {error}")));
            }
        }
    }
}

impl Target {
    fn of(log: OpenLog) -> Self {
        match (log.log, log.file) {
            (AccessLog::To { sink: Sink::Stdout, .. }, _) => Self::Stdout,
            (AccessLog::To { sink: Sink::Stderr, .. }, _) => Self::Stderr,
            (AccessLog::To { sink: Sink::File(_), .. }, Some(file)) => Self::File(file),
            (AccessLog::To { sink: Sink::File(_), .. }, None) | (AccessLog::Off, _) => Self::Nowhere,
        }
    }

    fn manner(&self) -> Manner {
        if matches!(self, Self::Nowhere) {
            return Manner::Whole;
        }
        match self.stat().map(|stat| FileType::from_raw_mode(stat.st_mode)) {
            Some(FileType::RegularFile) => Manner::Whole,
            Some(FileType::Fifo) => Manner::Pipe { bytes: self.pipe_bytes() },
            _ => Manner::WhenReady,
        }
    }

    /// Returns the device and inode; `None` if there is no file or they cannot be determined.
    fn file_id(&self) -> Option<(u64, u64)> {
        self.stat().map(|stat| (stat.st_dev, stat.st_ino))
    }

    fn stat(&self) -> Option<Stat> {
        match self {
            Self::Nowhere => None,
            Self::Stdout => fstat(io::stdout()).ok(),
            Self::Stderr => fstat(io::stderr()).ok(),
            Self::File(file) => fstat(file).ok(),
        }
    }

    fn pipe_bytes(&self) -> usize {
        let size = match self {
            Self::Nowhere => return PIPE_BYTES,
            Self::Stdout => fcntl_getpipe_size(io::stdout()),
            Self::Stderr => fcntl_getpipe_size(io::stderr()),
            Self::File(file) => fcntl_getpipe_size(file),
        };
        size.unwrap_or(PIPE_BYTES)
    }

    fn write(&mut self, bytes: &[u8], manner: Manner) -> io::Result<usize> {
        match self {
            Self::Nowhere => Ok(bytes.len()),
            // Written without the standard library's buffer, which would not report how many bytes were written.
            Self::Stdout => Ok(rustix::io::write(io::stdout(), taken(io::stdout().as_fd(), bytes, manner)?)?),
            Self::Stderr => Ok(rustix::io::write(io::stderr(), taken(io::stderr().as_fd(), bytes, manner)?)?),
            Self::File(file) => {
                let bytes = taken(file.as_fd(), bytes, manner)?;
                file.write(bytes)
            }
        }
    }
}

/// Returns the first bytes, as many as the target takes without waiting: complete lines, if one fits. Returns the error
/// `WouldBlock` if the target takes none.
fn taken<'b>(fd: BorrowedFd<'_>, bytes: &'b [u8], manner: Manner) -> io::Result<&'b [u8]> {
    let most = match manner {
        Manner::Whole => return Ok(bytes),
        Manner::Pipe { bytes } if ioctl_fionread(fd) == Ok(0) => bytes,
        Manner::Pipe { .. } | Manner::WhenReady => PIPE_BYTES,
    };
    let mut polled = [PollFd::new(&fd, PollFlags::OUT)];
    if poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? == 0 {
        return Err(ErrorKind::WouldBlock.into());
    }
    let bytes = &bytes[..bytes.len().min(most)];
    let lines = bytes.iter().rposition(|byte| *byte == b'\n').map_or(bytes.len(), |last| last + 1);
    Ok(&bytes[..lines])
}

/// Returns the number of line feeds.
fn count(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|byte| **byte == b'\n').count() as u64
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::access_log::Format;

    fn to(path: &Path) -> AccessLog {
        AccessLog::To { sink: Sink::File(path.to_owned()), format: Format::Json }
    }

    fn outlet(path: &Path) -> (Outlet, Lost) {
        let lost = Lost::new(Counter::noop());
        (Outlet::of(to(path).open().expect("opened"), lost.clone()), lost)
    }

    #[test]
    fn lines_that_a_full_disk_does_not_take_are_counted_with_the_reason() {
        let (mut outlet, lost) = outlet(Path::new("/dev/full"));
        outlet.push(b"one\ntwo\n");
        outlet.write();
        assert_eq!(lost.lines(), 2);
        let problem = lost.problem().expect("a problem");
        assert!(problem.contains("No space left on device"), "{problem}");
        // The problem ends when the log is on a disk with free space.
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.log");
        outlet.go_over_to(to(&path).open().expect("opened"));
        outlet.push(b"three\n");
        outlet.write();
        assert_eq!((lost.lines(), lost.problem()), (2, None));
        assert_eq!(std::fs::read_to_string(&path).expect("read"), "three\n");
        let mode = std::fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o137, 0, "{mode:o}");
    }

    #[test]
    fn a_pipe_that_nobody_reads_holds_up_nobody_and_gets_all_that_fits_later() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo");
        assert!(made.success());
        assert!(to(&path).open().is_err_and(|text| text.contains("cannot open")), "without a reader");
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).expect("small");
        let mut reader = OpenOptions::new().read(true).custom_flags(flags).open(&path).expect("a reader");
        let (mut outlet, lost) = outlet(&path);
        let line = [&[b'x'; 999][..], b"\n"].concat();
        let lines = 2 * PENDING_BYTES_MAX / line.len();
        for _ in 0..lines {
            outlet.push(&line);
            outlet.write();
        }
        assert!(outlet.is_pending() && lost.lines() > 0);
        // The lines that were written and those that are pending are complete.
        let mut bytes = vec![0; 1 << 16];
        let mut read = 0;
        while outlet.is_pending() {
            read += reader.read(&mut bytes).expect("readable");
            outlet.write();
        }
        while let Ok(more @ 1..) = reader.read(&mut bytes) {
            read += more;
        }
        assert_eq!(read, (lines - usize::try_from(lost.lines()).expect("few")) * line.len());
    }

    #[test]
    fn what_follows_a_torn_line_begins_a_new_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.log");
        let (mut outlet, _) = outlet(&path);
        outlet.torn = true;
        outlet.push(b"whole\n");
        outlet.write();
        assert_eq!(std::fs::read_to_string(&path).expect("read"), "\nwhole\n");
    }

    #[test]
    fn a_torn_line_is_remembered_until_a_line_feed_follows_it() {
        let (mut full, lost) = outlet(Path::new("/dev/full"));
        full.torn = true;
        for lines in 1..3 {
            full.push(b"lost\n");
            full.write();
            assert!(full.torn && lost.lines() == lines);
        }
        let folder = tempfile::tempdir().expect("a folder");
        let [path, other] = ["a.log", "b.log"].map(|name| folder.path().join(name));
        let (mut outlet, _) = outlet(&path);
        for (path, expected) in [(&path, "\nwhole\n"), (&other, "whole\n")] {
            outlet.torn = true;
            outlet.go_over_to(to(path).open().expect("opened"));
            outlet.push(b"whole\n");
            outlet.write();
            assert_eq!(std::fs::read_to_string(path).expect("read"), expected);
        }
    }

    #[test]
    fn whether_a_log_can_be_opened_is_said_without_making_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.log");
        assert_eq!(to(&path).problem(), None);
        assert!(!path.exists());
        let problem = to(&folder.path().join("no/a.log")).problem().expect("a problem");
        assert!(problem.contains("telemetry.accessLog.path: cannot open"), "{problem}");
        assert!(to(folder.path()).problem().is_some(), "a folder");
    }
}
