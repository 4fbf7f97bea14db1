//! The upgrade of the running gateway: a new process takes over its sockets and its live connections, and the old one ends when it is
//! empty (SPEC §20). The messages are in [`isthmus_upgrade::message`].
//!
//! - `giving`: the old process starts a new one or lets an operator do so, and agrees with it; `moving`: it hands its connections
//!   over. `taking`: the new process. `sockets`: the listening sockets of both. `counters`: metrics that go on.

pub(super) mod counters;
pub(super) mod giving;
pub(super) mod moving;
pub(super) mod sockets;
pub(super) mod taking;

use std::time::Duration;

/// The time from the order until the new process must be ready; then the old one goes on.
pub(super) const READY_WITHIN: Duration = Duration::from_secs(60);
/// The time that a single answer may take.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// The option of `isthmus run` that names the upgrade socket.
pub(super) const OPTION: &str = "--take-over";
