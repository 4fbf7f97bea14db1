//! A relay that delays bytes, as a distant network would.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};

use super::raw::connect_from;

pub const ROUND_TRIP: Duration = Duration::from_millis(40);

/// Starts a relay that passes bytes on with a delay, in both directions.
pub fn far(to: SocketAddr) -> SocketAddr {
    far_as(Ipv4Addr::LOCALHOST, to, ROUND_TRIP)
}

/// Starts such a relay whose own connections have this source address.
pub fn far_as(source: Ipv4Addr, to: SocketAddr, round_trip: Duration) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    thread::spawn(move || relay(&listener, source, to, round_trip));
    address
}

/// Relays the connections of a socket that is already listening.
pub fn relay(listener: &TcpListener, source: Ipv4Addr, to: SocketAddr, round_trip: Duration) {
    for near in listener.incoming().map_while(Result::ok) {
        let far = connect_from(source, to);
        far.set_read_timeout(None).expect("set");
        for (from, to) in [(&near, &far), (&far, &near)] {
            from.set_nodelay(true).expect("set");
            delay(from.try_clone().expect("cloned"), to.try_clone().expect("cloned"), round_trip / 2);
        }
    }
}

fn delay(mut from: TcpStream, mut to: TcpStream, by: Duration) {
    // The capacity is the number of pieces that are in flight at a gigabyte per second.
    let (sender, receiver) = sync_channel::<(Instant, Vec<u8>)>(4_096);
    thread::spawn(move || {
        let mut bytes = vec![0; 64 * 1024];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if sender.send((Instant::now() + by, bytes[..count].to_vec())).is_err() {
                return;
            }
        }
    });
    thread::spawn(move || {
        for (due, bytes) in receiver {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                return;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    });
}
