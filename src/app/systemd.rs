//! Notifications to the service manager by the protocol of sd_notify(3): readiness, reloads, the end, a status line, and, while
//! every worker responds, the keep-alive of the watchdog.

use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram as StdDatagram};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::net::UnixDatagram;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};

use isthmus_dataplane::handle::Control;
use isthmus_tasks::scope::Scope;

/// The largest number of messages that wait for a manager that does not read; further messages are lost.
const MESSAGES_MAX: usize = 64;
/// The length of the longest status line, in characters.
const STATUS_MAX: usize = 512;

/// The service manager that has started this process; if there is none, no message is sent.
pub(super) struct ServiceManager {
    messages: Option<mpsc::Sender<String>>,
    /// True once another process is the main process of the service.
    ended: Arc<AtomicBool>,
}

impl ServiceManager {
    /// Finds the manager by `NOTIFY_SOCKET`. A task sends the messages, so that a manager that does not read them delays
    /// nothing.
    pub(super) fn from_environment(scope: &Scope) -> Self {
        let none = Self { messages: None, ended: Arc::default() };
        let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return none };
        let socket = match connected(&name) {
            Ok(socket) => socket,
            Err(error) => {
                super::log::print_problem(&format!(
                    "cannot use the socket in NOTIFY_SOCKET, {}: {error}",
                    name.display()
                ));
                return none;
            }
        };
        let (messages, mut waiting) = mpsc::channel::<String>(MESSAGES_MAX);
        scope.spawn(async move {
            while let Some(message) = waiting.recv().await {
                if let Err(error) = socket.send(message.as_bytes()).await {
                    tracing::warn!(%error, "cannot send this notification to the service manager: {}", message.escape_default());
                }
            }
        });
        Self { messages: Some(messages), ended: Arc::default() }
    }

    /// Sends a message to the service manager: assignments such as `READY=1`, one per line.
    pub(super) fn notify(&self, message: &str) {
        let Some(messages) = &self.messages else { return };
        if messages.try_send(message.to_owned()).is_err() {
            tracing::warn!(
                "the service manager does not read its socket, so this notification is lost: {}",
                message.escape_default()
            );
        }
    }

    /// Notifies the manager that the gateway serves, after the start or after a reload.
    pub(super) fn ready(&self, status: &str) {
        let shown = |c: char| if c.is_control() { ' ' } else { c };
        let line: String = status.chars().map(shown).take(STATUS_MAX).collect();
        self.notify(&format!("READY=1\nSTATUS={line}"));
    }

    /// Notifies the manager that another process is the main process of the service.
    pub(super) fn main_process(&self, process: u32) {
        self.notify(&format!("MAINPID={process}"));
        self.ended.store(process != std::process::id(), Ordering::Relaxed);
    }

    /// Notifies the manager that a reload begins. The message contains the time, so that the manager can distinguish this
    /// reload from one that began before the manager sent its signal.
    pub(super) fn reloading(&self) {
        let now = clock_gettime(ClockId::Monotonic);
        let microseconds = i128::from(now.tv_sec) * 1_000_000 + i128::from(now.tv_nsec) / 1_000;
        self.notify(&format!("RELOADING=1\nMONOTONIC_USEC={microseconds}"));
    }

    /// Notifies the watchdog of the manager twice per `WatchdogSec`, as long as every worker responds. Does nothing if the
    /// manager has no watchdog for this process.
    pub(super) fn watch_workers(&self, workers: Control, scope: &Scope) {
        let (Some(messages), Some(time)) = (self.messages.clone(), watchdog()) else { return };
        let ended = self.ended.clone();
        scope.spawn(async move {
            let mut every = interval(time / 2);
            every.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                every.tick().await;
                if ended.load(Ordering::Relaxed) {
                    return;
                }
                if workers.alive(time / 4).await {
                    let _ = messages.try_send("WATCHDOG=1".to_owned());
                } else {
                    tracing::error!(
                        "a data-plane thread does not respond, so the watchdog of the service manager is not \
                         notified"
                    );
                }
            }
        });
    }
}

/// Returns the time after which the manager considers this process hung (`WatchdogSec=`).
fn watchdog() -> Option<Duration> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let is_ours = number("WATCHDOG_PID").is_none_or(|process| process == u64::from(std::process::id()));
    let time = number("WATCHDOG_USEC").filter(|_| is_ours).map(Duration::from_micros)?;
    // The time is at least 100 ms, since a shorter one is probably a mistake and would keep the workers busy.
    Some(time.max(Duration::from_millis(100)))
}

/// Returns a socket that sends to a path, or to an abstract name that begins with `@`.
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
