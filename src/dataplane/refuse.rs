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

/// What is discarded at most.
const DISCARDED_MAX: usize = 64 * 1024;
/// How long bytes are waited for.
const LINGER: Duration = Duration::from_secs(1);

/// Tells the client, and waits until it has had a chance to hear.
pub(crate) async fn refuse(core: &Core, client: &TcpStream, reason: Reason) {
    if tell(client, reason) {
        linger(core, client).await;
    }
}

/// Discards what a client still sends, so that it can read what it was told before FIN.
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

/// Tells the client, without waiting: where there is no room to wait.
pub(crate) fn at_once(core: &Core, client: &impl AsFd, reason: Reason) {
    tell(client, reason);
    let _ = rustix::net::recv(client, &mut *core.scratch.borrow_mut().bytes, RecvFlags::DONTWAIT);
}

/// Sends the alert and FIN; whether that made sense.
fn tell(client: &impl AsFd, reason: Reason) -> bool {
    let Some(alert) = Alert::of(reason) else {
        return false;
    };
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::send(client, &alert.record(), flags).is_ok()
        && rustix::net::shutdown(client, Shutdown::Write).is_ok()
}

/// Reads and drops; `None` where there is nothing now, 0 at the end.
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
