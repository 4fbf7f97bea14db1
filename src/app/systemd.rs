//! What the service manager is told, by the protocol of sd_notify(3): readiness, reloads, the end, a line of status, and, while
//! every worker turns, that the watchdog need not bite.

use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram as StdDatagram};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::net::UnixDatagram;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};

use crate::dataplane::handle::Control;
use crate::net::scope::Scope;

/// Messages that may wait for a manager that does not read; further ones are lost.
const MESSAGES_MAX: usize = 64;
/// The longest line of status, in characters.
const STATUS_MAX: usize = 512;

/// The service manager that has started this process; without one, nothing is told to anybody.
pub(super) struct ServiceManager {
    messages: Option<mpsc::Sender<String>>,
}

impl ServiceManager {
    /// Finds the manager by `NOTIFY_SOCKET`. Messages are sent by a task, so that a manager that does not read holds up nothing.
    pub(super) fn from_environment(scope: &Scope) -> Self {
        let none = Self { messages: None };
        let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return none };
        let socket = match connected(&name) {
            Ok(socket) => socket,
            Err(error) => {
                super::log::print_problem(&format!("NOTIFY_SOCKET {}: {error}", name.display()));
                return none;
            }
        };
        let (messages, mut waiting) = mpsc::channel::<String>(MESSAGES_MAX);
        scope.spawn(async move {
            while let Some(message) = waiting.recv().await {
                if let Err(error) = socket.send(message.as_bytes()).await {
                    tracing::warn!(%error, "the service manager cannot be told: {}", message.escape_default());
                }
            }
        });
        Self { messages: Some(messages) }
    }

    /// Sends assignments, one a line.
    pub(super) fn tell(&self, message: &str) {
        let Some(messages) = &self.messages else { return };
        if messages.try_send(message.to_owned()).is_err() {
            tracing::warn!("the service manager does not read; lost: {}", message.escape_default());
        }
    }

    /// The gateway serves, or serves again after a reload.
    pub(super) fn ready(&self, status: &str) {
        let shown = |c: char| if c.is_control() { ' ' } else { c };
        let line: String = status.chars().map(shown).take(STATUS_MAX).collect();
        self.tell(&format!("READY=1\nSTATUS={line}"));
    }

    /// A reload begins. The time lets the manager tell this reload from one before its signal.
    pub(super) fn reloading(&self) {
        let now = clock_gettime(ClockId::Monotonic);
        let microseconds = i128::from(now.tv_sec) * 1_000_000 + i128::from(now.tv_nsec) / 1_000;
        self.tell(&format!("RELOADING=1\nMONOTONIC_USEC={microseconds}"));
    }

    /// Feeds the watchdog, if the manager has one for this process, twice in its time, for as long as every worker answers.
    pub(super) fn watch_workers(&self, workers: Control, scope: &Scope) {
        let (Some(messages), Some(time)) = (self.messages.clone(), watchdog()) else { return };
        scope.spawn(async move {
            let mut every = interval(time / 2);
            every.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                every.tick().await;
                if workers.alive(time / 4).await {
                    let _ = messages.try_send("WATCHDOG=1".to_owned());
                } else {
                    tracing::error!("a worker does not turn; the watchdog of the service manager is not fed");
                }
            }
        });
    }
}

/// The time after which the manager takes this process for hung (`WatchdogSec=`).
fn watchdog() -> Option<Duration> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let is_ours = number("WATCHDOG_PID").is_none_or(|process| process == u64::from(std::process::id()));
    let time = number("WATCHDOG_USEC").filter(|_| is_ours).map(Duration::from_micros)?;
    // A shorter time can only be a mistake, and would keep the workers busy.
    Some(time.max(Duration::from_millis(100)))
}

/// A socket that sends to a path, or to an abstract name that begins with `@`.
fn connected(name: &OsStr) -> std::io::Result<UnixDatagram> {
    let socket = StdDatagram::unbound()?;
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(name)?,
    };
    socket.connect_addr(&address)?;
    socket.set_nonblocking(true)?;
    UnixDatagram::from_std(socket)
}
