//! The rate at which the kernel sends the bytes of a TCP socket (`SO_MAX_PACING_RATE` of socket(7)).

use std::io;
use std::os::fd::AsFd;

use super::option::set_option;
use super::socket::{UNSENT_MAX, bound_unsent};

/// The rate that means that the kernel does not limit the socket.
pub const UNPACED: u64 = u64::MAX;
/// The smallest bound of unsent bytes of a paced socket: about one packet of the loopback interface.
const UNSENT_MIN: u64 = 64 << 10;

/// Limits the rate at which the kernel sends the socket's bytes, in bytes per second. The kernel buffers about a quarter of a second of
/// unsent bytes, so that a change of the rate takes effect soon. TCP itself paces the socket; no queueing discipline is needed.
pub fn pace(socket: &impl AsFd, bytes_per_second: u64) -> io::Result<()> {
    let unsent = (bytes_per_second / 4).clamp(UNSENT_MIN, UNSENT_MAX.into());
    bound_unsent(socket, u32::try_from(unsent).unwrap_or(UNSENT_MAX))?;
    set_option(socket, libc::SO_MAX_PACING_RATE, &bytes_per_second.to_ne_bytes())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use super::*;

    /// The number of bytes of a transfer. The kernel does not pace the first ten packets, on loopback up to 640 KiB.
    const BYTES: usize = 4 << 20;

    /// Returns the time that the transfer takes.
    fn transfer(pace_at: impl FnOnce(&TcpStream)) -> Duration {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let mut sender = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
        let (mut receiver, _) = listener.accept().expect("accepted");
        pace_at(&sender);
        let begun = Instant::now();
        let sending = std::thread::spawn(move || sender.write_all(&vec![7; BYTES]));
        receiver.read_exact(&mut vec![0; BYTES]).expect("received");
        sending.join().expect("no panic").expect("sent");
        begun.elapsed()
    }

    #[test]
    fn the_kernel_sends_no_faster_than_the_rate_until_it_is_lifted() {
        let paced = transfer(|socket| pace(socket, BYTES as u64).expect("the kernel paces"));
        assert!(paced >= Duration::from_millis(700), "{paced:?} for the bytes of a second");
        let lifted = transfer(|socket| {
            pace(socket, 64 << 10).expect("the kernel paces");
            pace(socket, UNPACED).expect("the kernel paces");
        });
        assert!(lifted < Duration::from_secs(20), "{lifted:?} for the bytes of 64 s at the lower rate");
    }
}
