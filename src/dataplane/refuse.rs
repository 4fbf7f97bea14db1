//! Refuses a client so that it can read the reason: sends an alert and FIN, then discards the client's bytes for a while.
//! Closing a socket with unread bytes would send a reset, which would discard the alert. A listener may be configured to send FIN
//! alone, or a reset, for clients that count nothing else as a refusal.

use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::{RecvFlags, SendFlags, Shutdown};
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::core::Core;
use isthmus_model::alert::Alert;
use isthmus_net::socket::reset_on_close;
use isthmus_settings::listener::RefusalMode;

/// The largest number of bytes that are discarded.
const DISCARDED_MAX: usize = 64 * 1024;
/// The longest time for which bytes from a client are read and discarded after the last bytes were sent to it.
const LINGER: Duration = Duration::from_secs(1);

/// The last bytes to a refused TLS client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Farewell {
    mode: RefusalMode,
    alert: Alert,
}

impl Farewell {
    /// Returns the last bytes to a client that gets this alert; `None` if it gets none, because it may not speak TLS.
    pub(crate) fn of(mode: RefusalMode, alert: Option<Alert>) -> Option<Self> {
        alert.map(|alert| Self { mode, alert })
    }

    /// Sends the last bytes. Returns true if the client needs time to read them.
    fn send(self, client: &impl AsFd) -> bool {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let is_sent = match self.mode {
            RefusalMode::Alert => rustix::net::send(client, &self.alert.record(), flags).is_ok(),
            RefusalMode::Close => true,
            RefusalMode::Reset => {
                reset_on_close(client);
                return false;
            }
        };
        is_sent && rustix::net::shutdown(client, Shutdown::Write).is_ok()
    }
}

/// Refuses the client, and waits until the client has had a chance to read the last bytes.
pub(crate) async fn refuse(core: &Core, client: &TcpStream, farewell: Option<Farewell>) {
    if farewell.is_some_and(|farewell| farewell.send(client)) {
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

/// Refuses the client without waiting, for connections without an admission slot.
pub(crate) fn at_once(core: &Core, client: &impl AsFd, farewell: Option<Farewell>) {
    farewell.map(|farewell| farewell.send(client));
    let _ = rustix::net::recv(client, &mut *core.buffers.scratch.borrow_mut().bytes, RecvFlags::DONTWAIT);
}

/// Reads and discards bytes. Returns `None` if none have arrived, and 0 at the end of the stream.
fn discard(core: &Core, client: &TcpStream) -> Option<usize> {
    let mut scratch = core.buffers.scratch.borrow_mut();
    let read = client.try_io(Interest::READABLE, || {
        Ok(rustix::net::recv(client, &mut *scratch.bytes, RecvFlags::empty())?.0)
    });
    match read {
        Ok(count) => Some(count),
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => None,
        Err(_) => Some(0),
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::testing::{on_paused_clock, pair};

    #[test]
    fn a_refused_client_has_a_second_to_read_its_alert() {
        on_paused_clock(async |rig| {
            let (_client, accepted) = pair().await;
            let begun = Instant::now();
            linger(&rig.core, &accepted).await;
            assert_eq!(begun.elapsed().as_secs(), 1);
        });
    }
}
