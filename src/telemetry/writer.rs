//! The one thread that writes logs, fed by a bounded queue: what the queue cannot take is counted, never waited for.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread;
use std::time::Duration;

use arc_swap::ArcSwap;
use metrics::Counter;

use super::access_log::{AccessLog, GatewayName, Sink, line};
use super::failures::Failures;
use super::recorder::Recorder;
use crate::model::record::ConnectionRecord;

/// Lines that may wait.
const QUEUE: usize = 16_384;
/// How long the thread rests after it wrote something: under load the data path then never has to wake it.
const REST: Duration = Duration::from_millis(5);

enum Message {
    Connection(Arc<ConnectionRecord>),
    /// A line of the program's own log.
    Line(Vec<u8>),
    Use(AccessLog),
    Flush(SyncSender<()>),
}

/// The sending side; cheap to clone.
#[derive(Clone)]
pub struct Writer {
    queue: SyncSender<Message>,
    dropped: Counter,
}

impl Writer {
    pub(super) fn start(
        access_log: AccessLog,
        failures: Failures,
        gateway: Arc<ArcSwap<GatewayName>>,
        recorder: &Recorder,
    ) -> Self {
        let (queue, messages) = sync_channel(QUEUE);
        let dropped = recorder.counter("isthmus_access_log_dropped_total", &[]);
        let thread = thread::Builder::new().name("isthmus-log".to_owned());
        let output = Output::new(access_log, failures, gateway);
        if let Err(error) = thread.spawn(move || output.run(&messages)) {
            // Without the thread every line is counted as dropped; the gateway itself works.
            let _ = writeln!(io::stderr(), "cannot start the log thread: {error}");
        }
        Self { queue, dropped }
    }

    /// Logs a finished connection.
    pub fn connection(&self, record: Arc<ConnectionRecord>) {
        if self.queue.try_send(Message::Connection(record)).is_err() {
            self.dropped.increment(1);
        }
    }

    /// Goes on with another access log, or opens the same file anew.
    pub fn use_access_log(&self, access_log: AccessLog) {
        // Control messages may wait: they come from the control runtime, a few in an hour.
        let _ = self.queue.send(Message::Use(access_log));
    }

    /// Waits until everything said so far is written, or 2 s.
    pub fn flush(&self) {
        let (done, wait) = sync_channel(1);
        if self.queue.try_send(Message::Flush(done)).is_ok() {
            let _ = wait.recv_timeout(Duration::from_secs(2));
        }
    }

    /// A sink for the program's own log.
    pub fn lines(&self) -> Lines {
        Lines { writer: self.clone() }
    }
}

/// Takes the lines of `tracing-subscriber`, each in one write.
#[derive(Clone)]
pub struct Lines {
    writer: Writer,
}

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.writer.queue.try_send(Message::Line(line.to_vec())).is_err() {
            self.writer.dropped.increment(1);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Output {
    access_log: AccessLog,
    file: Option<File>,
    failures: Failures,
    gateway: Arc<ArcSwap<GatewayName>>,
    /// Lines of the access log not written yet.
    pending: Vec<u8>,
}

impl Output {
    fn new(access_log: AccessLog, failures: Failures, gateway: Arc<ArcSwap<GatewayName>>) -> Self {
        let mut output =
            Self { access_log: AccessLog::Off, file: None, failures, gateway, pending: Vec::new() };
        output.open(access_log);
        output
    }

    fn run(mut self, messages: &Receiver<Message>) {
        while let Ok(first) = messages.recv() {
            self.take(first);
            let mut more = 0;
            loop {
                match messages.try_recv() {
                    Ok(message) => self.take(message),
                    Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
                }
                more += 1;
                if more % 1024 == 0 {
                    self.write_pending();
                }
            }
            self.write_pending();
            thread::sleep(REST);
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Connection(record) => self.connection(record),
            Message::Line(line) => {
                // Nothing can be done about a stderr that is gone.
                let _ = io::stderr().write_all(&line);
            }
            Message::Use(access_log) => {
                self.write_pending();
                self.open(access_log);
            }
            Message::Flush(done) => {
                self.write_pending();
                let _ = done.send(());
            }
        }
    }

    fn connection(&mut self, record: Arc<ConnectionRecord>) {
        if let AccessLog::To { format, .. } = self.access_log {
            let gateway = self.gateway.load();
            self.pending.extend_from_slice(line(&record, &gateway, format).as_bytes());
        }
        if record.is_fault() {
            self.failures.push(record);
        }
    }

    fn open(&mut self, access_log: AccessLog) {
        self.file = None;
        if let AccessLog::To { sink: Sink::File(path), .. } = &access_log {
            match OpenOptions::new().create(true).append(true).open(path) {
                Ok(file) => self.file = Some(file),
                Err(error) => tracing::error!(path = %path.display(), %error, "cannot open the access log"),
            }
        }
        self.access_log = access_log;
    }

    fn write_pending(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        // A full disk or a closed pipe loses lines, never the gateway.
        let _ = match (&self.access_log, &mut self.file) {
            (AccessLog::To { sink: Sink::Stdout, .. }, _) => io::stdout().lock().write_all(&self.pending),
            (AccessLog::To { sink: Sink::Stderr, .. }, _) => io::stderr().lock().write_all(&self.pending),
            (AccessLog::To { sink: Sink::File(_), .. }, Some(file)) => file.write_all(&self.pending),
            _ => Ok(()),
        };
        let _ = io::stdout().flush();
        self.pending.clear();
    }
}
