//! Orders to the running program, from signals and the admin API. They are executed concurrently with other work.
//!
//! ```text
//!  signals ──┐                    ┌─▶ stop: the work at hand is dropped
//!            ├─▶ Supervisor ──────┼─▶ reload: kept until it can be begun
//!  commands ─┘   (during work)    └─▶ log level, reopened logs: at once
//! ```
//!
//! No function of this module blocks on a log, a disk, or a file system.

use std::pin::pin;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot};

use super::log::LogControl;
use super::upgrade::moving::Waiter as Upgraded;
use isthmus_admin::{Command, Patience};
use isthmus_config::LogLevel;
use isthmus_files::reading::Readings;
use isthmus_tasks::scope::Scope;
use isthmus_telemetry::access_log::AccessLog;
use isthmus_telemetry::writer::Writer;

/// The time that opening a log file may take.
const OPEN_WITHIN: Duration = Duration::from_secs(10);

/// The channel for the result of a reload.
pub(super) type Waiter = oneshot::Sender<Result<String, Vec<String>>>;

/// A requested reload.
pub(super) struct Reload {
    /// The causes of the request, each once, in the order in which they came.
    pub(super) why: Vec<&'static str>,
    pub(super) waiters: Vec<Waiter>,
}

/// The receiver of orders, which also executes them.
pub(super) struct Supervisor {
    signals: Signals,
    commands: mpsc::Receiver<Command>,
    /// The logs; `None` until they are started.
    logs: Option<Logs>,
    /// A reload that was requested but has not begun.
    pub(super) reload: Option<Reload>,
    /// The callers that wait for an upgrade that was requested but has not begun.
    pub(super) upgrade: Option<Vec<(Upgraded, Patience)>>,
    /// True if SIGUSR1 requested to reopen the logs before they were started.
    reopen: bool,
    draining: bool,
    /// True once a signal has ordered to stop.
    signalled: bool,
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
    /// Stop, because of this signal.
    Stop(&'static str),
    /// Reload, because of SIGHUP.
    HangUp,
    ReopenLogs,
    /// Hand over to a new process, because of SIGUSR2.
    Upgrade,
    Command(Command),
}

impl Supervisor {
    /// Installs the signal handlers of the process.
    pub(super) fn new(commands: mpsc::Receiver<Command>) -> std::io::Result<Self> {
        let signals = Signals::new()?;
        Ok(Self {
            signals,
            commands,
            logs: None,
            reload: None,
            upgrade: None,
            reopen: false,
            draining: false,
            signalled: false,
        })
    }

    /// Stores the handles of the logs, and reopens the logs if a signal has requested that before.
    pub(super) fn take_logs(
        &mut self,
        program: LogControl,
        level: LogLevel,
        access_log: &AccessLog,
        writer: &Writer,
        openings: &Readings,
        scope: &Scope,
    ) {
        let (writer, openings) = (writer.clone(), openings.clone());
        let (access_log, scope) = (access_log.clone(), scope.clone());
        let logs = Logs { program, level, writer, access_log, openings, scope };
        if std::mem::take(&mut self.reopen) {
            logs.reopen();
        }
        self.logs = Some(logs);
    }

    /// Applies the log settings of a config.
    pub(super) fn configure_logs(&mut self, level: LogLevel, access_log: &AccessLog) {
        if let Some(logs) = &mut self.logs {
            if logs.level != level {
                logs.level = level;
                let _ = logs.program.set(level.text(), level);
            }
            logs.access_log = access_log.clone();
        }
    }

    /// Records that the program drains. A second signal then ends the program at once, but not the first one after another order
    /// to stop: `isthmus stop` before the SIGTERM of a service manager must not cut connections short.
    pub(super) fn set_draining(&mut self) {
        self.draining = true;
    }

    /// Runs `work` and executes orders meanwhile. An order to stop drops the work; the error is the reason to stop.
    pub(super) async fn during<T>(&mut self, work: impl Future<Output = T>) -> Result<T, &'static str> {
        let mut work = pin!(work);
        loop {
            // Orders have priority: work that is always ready would delay them.
            tokio::select! {
                biased;
                order = next(&mut self.signals, &mut self.commands) => if let Some(why) = self.carry_out(order) {
                    return Err(why);
                },
                done = &mut work => return Ok(done),
            }
        }
    }

    /// Executes the next order; the error is the reason to stop. Cancel safe.
    pub(super) async fn carry_out_next(&mut self) -> Result<(), &'static str> {
        let order = next(&mut self.signals, &mut self.commands).await;
        self.carry_out(order).map_or(Ok(()), Err)
    }

    /// Requests a reload.
    pub(super) fn request_reload(&mut self, why: &'static str, waiter: Option<Waiter>) {
        let reload = self.reload.get_or_insert(Reload { why: Vec::new(), waiters: Vec::new() });
        if !reload.why.contains(&why) {
            reload.why.push(why);
        }
        reload.waiters.extend(waiter);
    }

    /// Executes an order; returns the reason to stop if it is an order to stop.
    fn carry_out(&mut self, order: Order) -> Option<&'static str> {
        match order {
            Order::Stop(why) => {
                if std::mem::replace(&mut self.signalled, true) || !self.draining {
                    return Some(why);
                }
                tracing::info!(why, "the gateway drains already; a second signal ends it at once");
            }
            Order::Command(Command::Drain) if !self.draining => return Some("POST /drain"),
            Order::Command(Command::Drain) => {}
            // While the gateway drains, reloads and upgrades are ignored. The channel for the answer is dropped, which notifies the request
            // that waits for the answer.
            Order::HangUp | Order::Upgrade | Order::Command(Command::Reload(_) | Command::Upgrade(..))
                if self.draining => {}
            Order::HangUp => self.request_reload("SIGHUP", None),
            Order::Command(Command::Reload(answer)) => {
                self.request_reload("POST /api/v1/reload", Some(answer))
            }
            Order::Upgrade => drop(self.upgrade.get_or_insert_default()),
            Order::Command(Command::Upgrade(answer, patience)) => {
                self.upgrade.get_or_insert_default().push((answer, patience));
            }
            Order::Command(Command::LogLevel(level, answer)) => {
                let set = self.logs.as_ref().map(|logs| logs.program.set(&level, logs.level));
                let _ = answer.send(set.unwrap_or_else(|| Err("the log is not open yet".to_owned())));
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
    /// Reopens the file of the access log in the background.
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
                Err(problem) => {
                    tracing::error!("cannot reopen the access log, so its lines still go to the file that is open: {problem}")
                }
            }
        });
    }
}

/// Opens an access log.
pub(super) async fn open(
    openings: &Readings,
    log: AccessLog,
) -> Result<isthmus_telemetry::outlet::OpenLog, String> {
    let opened = openings.read(OPEN_WITHIN, move || log.open()).await;
    opened.unwrap_or_else(|unread| Err(format!("telemetry.accessLog.path: cannot be opened: {unread}")))
}

/// Returns the next order. Cancel safe.
async fn next(signals: &mut Signals, commands: &mut mpsc::Receiver<Command>) -> Order {
    tokio::select! {
        // Signals have priority, and among them the signals to stop.
        biased;
        order = signals.next() => order,
        Some(command) = commands.recv() => Order::Command(command),
    }
}

/// The signals that the program handles.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
    user: Signal,
    other_user: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
            user: signal(SignalKind::user_defined1())?,
            other_user: signal(SignalKind::user_defined2())?,
        })
    }

    async fn next(&mut self) -> Order {
        tokio::select! {
            biased;
            _ = self.terminate.recv() => Order::Stop("SIGTERM"),
            _ = self.interrupt.recv() => Order::Stop("SIGINT"),
            _ = self.hang_up.recv() => Order::HangUp,
            _ = self.user.recv() => Order::ReopenLogs,
            _ = self.other_user.recv() => Order::Upgrade,
        }
    }
}
