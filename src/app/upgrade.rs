//! The upgrade of the running gateway: a new process takes over its sockets and its live connections, and the old one ends when it is
//! empty (`docs/upgrade.md, "Steps"`). The messages are in [`isthmus_upgrade::message`].
//!
//! - `giving`: the old process starts a new one or lets an operator do so, and agrees with it; `moving`: it hands its connections
//!   over; `watching`: whether the new one still answers. `taking`: the new process. `sockets`: the listening sockets of both. `counters`: metrics that go on.

pub(super) mod counters;
pub(super) mod giving;
pub(super) mod moving;
pub(super) mod sockets;
pub(super) mod taking;
mod watching;

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use tokio::time::{Instant, sleep};

/// The time from the order until the new process must be ready; then the old one goes on.
pub(super) const READY_WITHIN: Duration = Duration::from_secs(60);
/// The time that a single answer may take.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// The option of `isthmus run` that names the upgrade socket.
pub(super) const OPTION: &str = "--take-over";
/// The time in which the end of a process that has closed the upgrade socket becomes visible.
const DEAD_WITHIN: Duration = Duration::from_millis(500);
/// The interval at which a process is looked at that may end.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Returns true if a process that has closed the upgrade socket has ended, or ends at once.
pub(super) async fn has_died(process: u32) -> bool {
    let process = i32::try_from(process).ok().and_then(Pid::from_raw);
    let lives = || process.is_some_and(|process| test_kill_process(process).is_ok() && !is_zombie(process));
    let until = Instant::now() + DEAD_WITHIN;
    while lives() {
        if Instant::now() >= until {
            return false;
        }
        sleep(LOOK_EVERY).await;
    }
    true
}

/// Ends a process that hangs.
pub(super) fn end(process: u32) {
    if let Some(process) = i32::try_from(process).ok().and_then(Pid::from_raw) {
        // It may have ended by itself.
        let _ = kill_process(process, Signal::KILL);
    }
}

/// Returns true if the process has ended, and its parent does not know yet.
fn is_zombie(process: Pid) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/stat", process.as_raw_pid()));
    // The state follows the name, which is in brackets and may contain any character.
    status.is_ok_and(|status| {
        status.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['Z', 'X']))
    })
}
