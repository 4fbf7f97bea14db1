//! Clients below TLS: handwritten hellos, chosen source addresses, and the way in which a connection ends.

use std::io::{ErrorKind, Read};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use socket2::{Domain, Socket, Type};

use super::PATIENCE;

/// The largest fragment of a record in bytes.
const RECORD_MAX: usize = 1 << 14;

/// Returns a legal hello with this host name.
pub fn hello(name: &[u8]) -> Vec<u8> {
    records(&message(name, None))
}

/// Returns a legal hello of this many bytes, record headers included.
pub fn hello_of(name: &[u8], length: usize) -> Vec<u8> {
    let bare = message(name, Some(0)).len();
    // The number of records follows from the length, because each record but the last is full.
    let headers = 5 * length.div_ceil(RECORD_MAX + 5);
    let hello = records(&message(name, Some(length - headers - bare)));
    assert_eq!(hello.len(), length, "no hello of this length can be made");
    hello
}

fn message(name: &[u8], padding: Option<usize>) -> Vec<u8> {
    let entry = [&[0][..], &counted(name)].concat();
    let mut extensions = extension(0, &counted(&entry));
    // Extension supported_versions: TLS 1.3 only.
    extensions.extend(extension(43, &[2, 3, 4]));
    if let Some(padding) = padding {
        extensions.extend(extension(21, &vec![0; padding]));
    }
    // Version, random, no session, two suites, no compression.
    let mut body = [&[3, 3][..], &[7; 32], &[0], &[0, 4, 0x13, 1, 0x13, 2], &[1, 0]].concat();
    body.extend(counted(&extensions));
    let length = u32::try_from(body.len()).expect("fits").to_be_bytes();
    [&[1][..], &length[1..], &body].concat()
}

fn extension(kind: u16, body: &[u8]) -> Vec<u8> {
    [&kind.to_be_bytes()[..], &counted(body)].concat()
}

fn counted(bytes: &[u8]) -> Vec<u8> {
    let length = u16::try_from(bytes.len()).expect("fits").to_be_bytes();
    [&length[..], bytes].concat()
}

fn records(message: &[u8]) -> Vec<u8> {
    let record = |fragment: &[u8]| [&[22, 3, 1][..], &counted(fragment)].concat();
    message.chunks(RECORD_MAX).flat_map(record).collect()
}

/// Connects from a given address, with a time limit on every read.
pub fn connect_from(source: impl Into<IpAddr>, address: SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None).expect("a socket");
    socket.bind(&SocketAddr::new(source.into(), 0).into()).expect("a source address");
    socket.connect_timeout(&address.into(), PATIENCE).expect("the gateway");
    socket.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
    socket.set_tcp_nodelay(true).expect("set");
    socket.into()
}

/// How a stream ended for its reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Fin,
    Reset,
}

/// Reads to the end of the stream; returns all bytes, and how the stream ended.
#[track_caller]
pub fn read_out(stream: &mut TcpStream) -> (Vec<u8>, End) {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => (bytes, End::Fin),
        Err(error) if error.kind() == ErrorKind::ConnectionReset => (bytes, End::Reset),
        Err(error) => panic!("neither an end nor a reset, but {error} after {bytes:?}"),
    }
}

/// Returns the record of a fatal alert.
pub fn alert(description: u8) -> Vec<u8> {
    vec![21, 3, 3, 0, 2, 2, description]
}

/// Returns true if the stream has neither unread bytes nor an end.
pub fn is_silent(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).expect("set");
    let seen = stream.peek(&mut [0]);
    stream.set_nonblocking(false).expect("set");
    seen.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}
