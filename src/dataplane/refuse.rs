//! Refuses a client so that it can read why: an alert, FIN, and then its bytes are discarded for a while,
//! because closing on unread bytes would be a reset that takes the alert with it.

use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::{RecvFlags, SendFlags, Shutdown};
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::core::Core;
use crate::model::reason::Reason;
use crate::wire::alert::Alert;

/// The most bytes that are discarded.
const DISCARDED_MAX: usize = 64 * 1024;
/// How long the client's bytes are discarded.
const LINGER: Duration = Duration::from_secs(1);

/// Sends the client the alert of a reason, and waits until it has had a chance to read it.
pub(crate) async fn refuse(core: &Core, client: &TcpStream, reason: Reason) {
    if send_alert(client, reason) {
        linger(core, client).await;
    }
}

/// Discards the bytes that a client still sends, so that it can read what it was sent before FIN.
pub(crate) async fn linger(core: &Core, client: &TcpStream) {
    let deadline = tokio::time::Instant::now() + LINGER;
    let mut discarded = 0;
    while discarded < DISCARDED_MAX {
        match discard(core, client) {
            Some(0) => return,
            Some(count) => discarded += count,
            None => {
                // The deadline wins: a dripping client does not keep a descriptor.
                let readable = tokio::select! {
                    biased;
                    () = tokio::time::sleep_until(deadline) => return,
                    readable = client.readable() => readable,
                };
                if readable.is_err() {
                    return;
                }
            }
        }
    }
}

/// Sends the client the alert of a reason without waiting, for connections that have no place.
pub(crate) fn at_once(core: &Core, client: &impl AsFd, reason: Reason) {
    send_alert(client, reason);
    let _ = rustix::net::recv(client, &mut *core.scratch.borrow_mut().bytes, RecvFlags::DONTWAIT);
}

/// Sends the alert and FIN; returns false if the reason has none, or the client has gone.
fn send_alert(client: &impl AsFd, reason: Reason) -> bool {
    let Some(alert) = Alert::of(reason) else {
        return false;
    };
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::send(client, &alert.record(), flags).is_ok()
        && rustix::net::shutdown(client, Shutdown::Write).is_ok()
}

/// Reads and drops bytes; returns `None` if none have come, 0 at the end.
fn discard(core: &Core, client: &TcpStream) -> Option<usize> {
    let mut scratch = core.scratch.borrow_mut();
    let read = client.try_io(Interest::READABLE, || {
        Ok(rustix::net::recv(client, &mut *scratch.bytes, RecvFlags::empty())?.0)
    });
    match read {
        Ok(count) => Some(count),
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => None,
        Err(_) => Some(0),
    }
}
