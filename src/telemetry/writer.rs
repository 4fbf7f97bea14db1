//! The threads that write logs: one for the access log and one for the program's own log, each with a bounded queue. Lines that
//! do not fit into the queue, or that the log's reader or the disk does not accept, are counted, and reported at most once a
//! minute. No sender waits.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{io, thread};

use arc_swap::ArcSwap;

use super::access_log::{AccessLog, Format, line};
use super::failures::Failures;
use super::outlet::{Lost, OpenLog, Outlet};
use super::recent::Recent;
use super::recorder::Recorder;
use isthmus_model::record::{ConnectionRecord, GatewayName};

/// The number of lines that may wait in a queue; further ones are lost.
const QUEUE: usize = 16_384;
/// The number of lines that are gathered before they are written.
const GATHERED_MAX: usize = 1024;
/// How long a thread sleeps after it has written something: under load the data path then never has to wake it.
const REST: Duration = Duration::from_millis(5);
/// The interval at which a write is retried while the reader of a log's pipe does not read.
const TRY_EVERY: Duration = Duration::from_millis(50);
/// The interval at which lost lines are reported.
const SAY_EVERY: Duration = Duration::from_secs(60);
/// The longest time that the exit of the program waits for the last lines.
const FLUSH_WITHIN: Duration = Duration::from_secs(1);

enum Message {
    Connection(Arc<ConnectionRecord>),
    /// A line of the program's own log.
    Line(Vec<u8>),
    /// The thread must replace its access log by the one in [`Next`].
    Next,
    Flush(SyncSender<()>),
}

/// The senders of the queues of both logs; cheap to clone.
#[derive(Clone)]
pub struct Writer {
    access: Queue,
    program: Queue,
    next: Arc<Mutex<Next>>,
    /// False while the access log is off.
    logs_connections: Arc<AtomicBool>,
}

/// The queue of one writer thread. Its bound is kept by a counter, because a bounded channel of the standard library allocates
/// all its places at once, here a megabyte for both queues.
#[derive(Clone)]
struct Queue {
    messages: Sender<Message>,
    /// The number of messages in the channel.
    waiting: Arc<AtomicUsize>,
    lost: Lost,
}

/// The access log that the thread must use next.
#[derive(Default)]
struct Next {
    /// The number of replacements of the access log that were requested so far.
    orders: u64,
    /// The sequence number of the newest replacement that took effect.
    newest: u64,
    log: Option<OpenLog>,
}

/// The sequence number of an order to replace the access log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Order(u64);

impl Writer {
    /// Starts both threads. Returns an error if one cannot be started.
    pub(super) fn start(
        access_log: OpenLog,
        (failures, recent): (Failures, Recent),
        gateway: Arc<ArcSwap<GatewayName>>,
        recorder: &Recorder,
    ) -> io::Result<Self> {
        let lost = |metric| Lost::new(recorder.counter(metric, &[]));
        let (access_lost, program_lost) =
            (lost("isthmus_access_log_dropped_total"), lost("isthmus_log_dropped_total"));
        let next = Arc::<Mutex<Next>>::default();
        let logs_connections = Arc::new(AtomicBool::new(access_log.format().is_some()));
        let access = Output {
            name: "access log",
            format: access_log.format(),
            outlet: Outlet::of(access_log, access_lost.clone()),
            said: Said::default(),
            lost: access_lost,
            failures: failures.clone(),
            recent: recent.clone(),
            gateway: gateway.clone(),
            next: next.clone(),
            flushes: Vec::new(),
        };
        let program = Output {
            name: "program's log",
            format: None,
            outlet: Outlet::stderr(program_lost.clone()),
            said: Said::default(),
            lost: program_lost,
            failures,
            recent,
            gateway,
            next: Arc::default(),
            flushes: Vec::new(),
        };
        Ok(Self {
            access: access.start("isthmus-access")?,
            program: program.start("isthmus-log")?,
            next,
            logs_connections,
        })
    }

    /// Returns true if connections that ended without an error are logged too.
    pub fn logs_connections(&self) -> bool {
        self.logs_connections.load(Ordering::Relaxed)
    }

    /// Logs a finished connection.
    pub fn connection(&self, record: Arc<ConnectionRecord>) {
        self.access.send(Message::Connection(record));
    }

    /// Assigns the next sequence number to a replacement of the access log. Opening a log can take long, so a later replacement
    /// may be ready first. A replacement with a lower number never takes the place of one with a higher number.
    pub fn order(&self) -> Order {
        let mut next = locked(&self.next);
        next.orders += 1;
        Order(next.orders)
    }

    /// Replaces the access log by another one, or by the same file opened again. Never waits.
    pub fn use_access_log(&self, order: Order, log: OpenLog) {
        let mut next = locked(&self.next);
        if order.0 < next.newest {
            return;
        }
        next.newest = order.0;
        self.logs_connections.store(log.format().is_some(), Ordering::Relaxed);
        next.log = Some(log);
        drop(next);
        // If the queue is full, the thread still checks for a new log after its next write.
        let _ = self.access.offer(Message::Next);
    }

    /// Waits until all queued lines are written, but at most a second, and not for a log whose reader does not read.
    pub fn flush(&self) {
        let deadline = Instant::now() + FLUSH_WITHIN;
        for queue in [&self.access, &self.program] {
            let (done, wait) = sync_channel(1);
            if !queue.offer(Message::Flush(done)) {
                continue;
            }
            while Instant::now() < deadline && !queue.lost.is_stuck() {
                match wait.recv_timeout(TRY_EVERY) {
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(()) | Err(RecvTimeoutError::Disconnected) => break,
                }
            }
        }
    }

    /// Returns a sink for the program's own log.
    pub fn lines(&self) -> Lines {
        Lines { queue: self.program.clone() }
    }
}

impl Queue {
    /// Queues a message, or counts it as lost if the queue is full.
    fn send(&self, message: Message) {
        if !self.offer(message) {
            self.lost.add(1);
        }
    }

    /// Queues a message; returns false if the queue is full, or if its thread has ended.
    fn offer(&self, message: Message) -> bool {
        let has_room = self.waiting.fetch_add(1, Ordering::Relaxed) < QUEUE;
        let is_queued = has_room && self.messages.send(message).is_ok();
        if !is_queued {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        is_queued
    }
}

/// A writer for `tracing-subscriber`, which writes each line with one call.
#[derive(Clone)]
pub struct Lines {
    queue: Queue,
}

impl io::Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.queue.send(Message::Line(line.to_vec()));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// One thread and the log that it writes.
struct Output {
    name: &'static str,
    /// The format of the lines of connections; `None` if connections are not logged.
    format: Option<Format>,
    outlet: Outlet,
    said: Said,
    lost: Lost,
    failures: Failures,
    recent: Recent,
    gateway: Arc<ArcSwap<GatewayName>>,
    next: Arc<Mutex<Next>>,
    /// The callers that wait until no line is pending.
    flushes: Vec<SyncSender<()>>,
}

/// The latest report of lost lines.
#[derive(Default)]
struct Said {
    lines: u64,
    at: Option<Instant>,
}

impl Output {
    fn start(self, thread: &str) -> io::Result<Queue> {
        let (sender, messages) = channel();
        let queue = Queue { messages: sender, waiting: Arc::default(), lost: self.lost.clone() };
        let waiting = queue.waiting.clone();
        thread::Builder::new().name(thread.to_owned()).spawn(move || self.run(&messages, &waiting))?;
        Ok(queue)
    }

    fn run(mut self, messages: &Receiver<Message>, waiting: &AtomicUsize) {
        loop {
            let first = match self.wait() {
                Some(wait) => messages.recv_timeout(wait),
                None => messages.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            if matches!(first, Err(RecvTimeoutError::Disconnected)) {
                break;
            }
            let is_idle = first.is_err();
            let mut gathered = 0;
            for message in first.into_iter().chain(messages.try_iter()).take(GATHERED_MAX) {
                waiting.fetch_sub(1, Ordering::Relaxed);
                self.take(message);
                gathered += 1;
            }
            self.outlet.write();
            self.go_over();
            if !self.outlet.is_pending() {
                for done in self.flushes.drain(..) {
                    // The caller may have stopped waiting.
                    let _ = done.send(());
                }
            }
            self.say();
            if !is_idle && gathered < GATHERED_MAX {
                thread::sleep(REST);
            }
        }
        self.outlet.write();
    }

    /// Returns how long the thread may wait for a message; `None` means forever.
    fn wait(&self) -> Option<Duration> {
        let unsaid = self.lost.lines() > self.said.lines;
        let until = |at: Instant| (at + SAY_EVERY).saturating_duration_since(Instant::now());
        match (self.outlet.is_pending(), self.said.at) {
            (true, _) => Some(TRY_EVERY),
            (false, Some(at)) if unsaid => Some(until(at)),
            (false, _) => None,
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Connection(record) => self.connection(record),
            Message::Line(line) => self.outlet.push(&line),
            // Lines queued before this message belong to the previous log.
            Message::Next => {
                self.outlet.write();
                self.go_over();
            }
            Message::Flush(done) => self.flushes.push(done),
        }
    }

    fn connection(&mut self, record: Arc<ConnectionRecord>) {
        if let Some(format) = self.format {
            let gateway = self.gateway.load();
            self.outlet.push(line(&record, &gateway, format).as_bytes());
        }
        self.recent.push(&record);
        if record.is_fault() {
            self.failures.push(record);
        }
    }

    fn go_over(&mut self) {
        let Some(log) = locked(&self.next).log.take() else { return };
        self.format = log.format();
        self.outlet.go_over_to(log);
    }

    /// Logs how many lines were lost, at most once a minute.
    fn say(&mut self) {
        let lines = self.lost.lines();
        if lines == self.said.lines || self.said.at.is_some_and(|at| at.elapsed() < SAY_EVERY) {
            return;
        }
        let why = self.lost.problem().unwrap_or_else(|| "the queue was full".to_owned());
        tracing::warn!(lines = lines - self.said.lines, "lines of the {} were lost: {why}", self.name);
        self.said = Said { lines, at: Some(Instant::now()) };
    }
}

impl OpenLog {
    fn format(&self) -> Option<Format> {
        match self.log {
            AccessLog::Off => None,
            AccessLog::To { format, .. } => Some(format),
        }
    }
}

fn locked(next: &Mutex<Next>) -> MutexGuard<'_, Next> {
    // A poisoned lock is usable, because each change is complete in itself.
    next.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_takes_as_many_messages_as_its_bound_and_counts_the_others() {
        let (messages, read) = channel();
        let lost = Lost::new(metrics::Counter::noop());
        let queue = Queue { messages, waiting: Arc::default(), lost };
        let line = || Message::Line(b"a".to_vec());
        (0..QUEUE).for_each(|_| queue.send(line()));
        assert_eq!(queue.lost.lines(), 0);
        (0..3).for_each(|_| queue.send(line()));
        assert_eq!(queue.lost.lines(), 3);
        assert_eq!(read.try_iter().count(), QUEUE);
        drop(read);
        queue.waiting.store(0, Ordering::Relaxed);
        assert!(!queue.offer(line()), "the thread has ended");
        assert_eq!(queue.waiting.load(Ordering::Relaxed), 0, "what is not queued does not wait");
    }
}
