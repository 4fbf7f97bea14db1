//! The orders that a running program gets, from signals and from the admin API, and who obeys them while other work goes on.
//!
//! ```text
//!  signals ──┐                    ┌─▶ stop: the work at hand is dropped
//!            ├─▶ Supervisor ──────┼─▶ reload: kept until it can be begun
//!  commands ─┘   (during work)    └─▶ log level, reopened logs: at once
//! ```
//!
//! Nothing here waits for a log, a disk, or a file system.

use std::pin::pin;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot};

use super::log::LogControl;
use crate::admin::Command;
use crate::config::LogLevel;
use crate::net::reading::Readings;
use crate::net::scope::Scope;
use crate::telemetry::access_log::AccessLog;
use crate::telemetry::writer::Writer;

/// How long a log file may take to be opened.
const OPEN_WITHIN: Duration = Duration::from_secs(10);
/// Log files whose opening may hang at the same time.
const OPENINGS: usize = 4;

/// Who waits for the end of a reload.
pub(super) type Waiter = oneshot::Sender<Result<String, Vec<String>>>;

/// A reload that was asked for.
pub(super) struct Reload {
    pub(super) why: &'static str,
    pub(super) waiters: Vec<Waiter>,
}

/// Obeys orders.
pub(super) struct Supervisor {
    signals: Signals,
    commands: mpsc::Receiver<Command>,
    /// From when there are logs.
    logs: Option<Logs>,
    /// Asked for, and not begun.
    pub(super) reload: Option<Reload>,
    /// SIGUSR1 came before there were logs.
    reopen: bool,
    draining: bool,
}

/// The logs of a running program.
struct Logs {
    program: LogControl,
    level: LogLevel,
    writer: Writer,
    access_log: AccessLog,
    openings: Readings,
    scope: Scope,
}

enum Order {
    /// A signal to stop.
    Stop(&'static str),
    /// Reload, because of a signal.
    HangUp,
    ReopenLogs,
    Command(Command),
}

impl Supervisor {
    /// Takes over the signals of the process.
    pub(super) fn new(commands: mpsc::Receiver<Command>) -> std::io::Result<Self> {
        let signals = Signals::new()?;
        Ok(Self { signals, commands, logs: None, reload: None, reopen: false, draining: false })
    }

    /// Takes over the logs.
    pub(super) fn log_to(
        &mut self,
        program: LogControl,
        level: LogLevel,
        access_log: &AccessLog,
        writer: &Writer,
        scope: &Scope,
    ) {
        let (access_log, writer, scope) = (access_log.clone(), writer.clone(), scope.clone());
        let openings = Readings::new(OPENINGS);
        let logs = Logs { program, level, writer, access_log, openings, scope };
        if std::mem::take(&mut self.reopen) {
            logs.reopen();
        }
        self.logs = Some(logs);
    }

    /// Takes over what the config says of logs.
    pub(super) fn logs_are(&mut self, level: LogLevel, access_log: &AccessLog) {
        if let Some(logs) = &mut self.logs {
            if logs.level != level {
                logs.level = level;
                let _ = logs.program.set(level.text(), level);
            }
            logs.access_log = access_log.clone();
        }
    }

    /// From now on, an order to stop is the second one.
    pub(super) fn drains(&mut self) {
        self.draining = true;
    }

    /// Goes on with the work while orders come. An order to stop ends it: then the result is why.
    pub(super) async fn during<T>(&mut self, work: impl Future<Output = T>) -> Result<T, &'static str> {
        let mut work = pin!(work);
        loop {
            // Orders come first, or work that is always ready would keep them waiting.
            tokio::select! {
                biased;
                order = next(&mut self.signals, &mut self.commands) => if let Some(why) = self.obey(order) {
                    return Err(why);
                },
                done = &mut work => return Ok(done),
            }
        }
    }

    /// Obeys the next order; the error is why to stop. No order is lost where this is dropped.
    pub(super) async fn asked(&mut self) -> Result<(), &'static str> {
        let order = next(&mut self.signals, &mut self.commands).await;
        self.obey(order).map_or(Ok(()), Err)
    }

    /// Asks for a reload on behalf of the program itself.
    pub(super) fn ask(&mut self, why: &'static str, waiter: Option<Waiter>) {
        let reload = self.reload.get_or_insert(Reload { why, waiters: Vec::new() });
        reload.waiters.extend(waiter);
    }

    /// Returns why to stop, if the order says so.
    fn obey(&mut self, order: Order) -> Option<&'static str> {
        match order {
            Order::Stop(why) => return Some(why),
            Order::Command(Command::Drain) if !self.draining => return Some("POST /drain"),
            Order::Command(Command::Drain) => {}
            // Whoever asked is told that the program stops, as the answer is dropped.
            Order::HangUp | Order::Command(Command::Reload(_)) if self.draining => {}
            Order::HangUp => self.ask("SIGHUP", None),
            Order::Command(Command::Reload(answer)) => self.ask("POST /api/v1/reload", Some(answer)),
            Order::Command(Command::LogLevel(level, answer)) => {
                let set = self.logs.as_ref().map(|logs| logs.program.set(&level, logs.level));
                let _ = answer.send(set.unwrap_or_else(|| Err("there is no log yet".to_owned())));
            }
            Order::ReopenLogs => match &self.logs {
                Some(logs) => logs.reopen(),
                None => self.reopen = true,
            },
        }
        None
    }
}

impl Logs {
    /// Opens the file of the access log anew, aside.
    fn reopen(&self) {
        let (log, writer, openings) = (self.access_log.clone(), self.writer.clone(), self.openings.clone());
        let order = writer.order();
        self.scope.spawn(async move {
            let path = log.clone();
            match open(&openings, path).await {
                Ok(open) => {
                    writer.use_access_log(order, open);
                    tracing::info!("log files reopened");
                }
                Err(problem) => tracing::error!("the access log goes on as it is: {problem}"),
            }
        });
    }
}

/// Opens an access log.
pub(super) async fn open(
    openings: &Readings,
    log: AccessLog,
) -> Result<crate::telemetry::outlet::OpenLog, String> {
    let opened = openings.read(OPEN_WITHIN, move || log.open()).await;
    opened.unwrap_or_else(|unread| Err(format!("telemetry.accessLog.path: cannot be opened: {unread}")))
}

/// No order is lost where this is dropped.
async fn next(signals: &mut Signals, commands: &mut mpsc::Receiver<Command>) -> Order {
    tokio::select! {
        // Signals first, and among them those to stop.
        biased;
        order = signals.next() => order,
        Some(command) = commands.recv() => Order::Command(command),
    }
}

/// The signals that mean something to us.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
    user: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
            user: signal(SignalKind::user_defined1())?,
        })
    }

    async fn next(&mut self) -> Order {
        tokio::select! {
            biased;
            _ = self.terminate.recv() => Order::Stop("SIGTERM"),
            _ = self.interrupt.recv() => Order::Stop("SIGINT"),
            _ = self.hang_up.recv() => Order::HangUp,
            _ = self.user.recv() => Order::ReopenLogs,
        }
    }
}
