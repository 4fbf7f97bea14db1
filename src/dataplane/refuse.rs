//! Refuses a client so that it can read the reason: sends an alert and FIN, then discards the client's bytes for a while.
//! Closing a socket with unread bytes would send a reset, which would discard the alert.

use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::{RecvFlags, SendFlags, Shutdown};
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::core::Core;
use isthmus_model::alert::Alert;

/// The largest number of bytes that are discarded.
const DISCARDED_MAX: usize = 64 * 1024;
/// The longest time for which bytes from a client are read and discarded after the last bytes were sent to it.
const LINGER: Duration = Duration::from_secs(1);

/// Sends the client an alert, and waits until the client has had a chance to read it.
pub(crate) async fn refuse(core: &Core, client: &TcpStream, alert: Option<Alert>) {
    if send_alert(client, alert) {
        linger(core, client).await;
    }
}

/// Discards the bytes that a client continues to send, so that the client can read the last bytes sent to it.
pub(crate) async fn linger(core: &Core, client: &TcpStream) {
    let deadline = tokio::time::Instant::now() + LINGER;
    let mut discarded = 0;
    while discarded < DISCARDED_MAX {
        match discard(core, client) {
            Some(0) => return,
            Some(count) => discarded += count,
            None => {
                // The deadline has priority: a client that sends slowly does not keep a descriptor.
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

/// Sends the client an alert without waiting, for connections without an admission slot.
pub(crate) fn at_once(core: &Core, client: &impl AsFd, alert: Option<Alert>) {
    send_alert(client, alert);
    let _ = rustix::net::recv(client, &mut *core.scratch.borrow_mut().bytes, RecvFlags::DONTWAIT);
}

/// Sends the alert and FIN. Returns false if there is no alert or the client has gone.
fn send_alert(client: &impl AsFd, alert: Option<Alert>) -> bool {
    let Some(alert) = alert else {
        return false;
    };
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::send(client, &alert.record(), flags).is_ok()
        && rustix::net::shutdown(client, Shutdown::Write).is_ok()
}

/// Reads and discards bytes. Returns `None` if none have arrived, and 0 at the end of the stream.
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
