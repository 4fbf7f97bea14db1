//! HTTP/2 as bytes: a client that writes any frame, legal or not, without a library that keeps the state of the protocol.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;

use rustls::ClientConfig;

use super::client::{Tls, tls_with};

pub const DATA: u8 = 0x0;
pub const HEADERS: u8 = 0x1;
pub const PRIORITY: u8 = 0x2;
pub const RST_STREAM: u8 = 0x3;
pub const SETTINGS: u8 = 0x4;
pub const PING: u8 = 0x6;
pub const GOAWAY: u8 = 0x7;
pub const WINDOW_UPDATE: u8 = 0x8;
pub const CONTINUATION: u8 = 0x9;
pub const END_HEADERS: u8 = 0x4;
pub const ACK: u8 = 0x1;

/// A connection after TLS and the preface.
pub struct Frames {
    pub tls: Tls,
    /// The payload of the server's first SETTINGS.
    settings: Vec<u8>,
}

/// A received frame.
#[derive(Clone, Debug)]
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

/// Returns the bytes of a frame.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("short").to_be_bytes();
    let mut bytes = vec![length[1], length[2], length[3], kind, flags];
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// Returns a header block of literals without Huffman codes (RFC 7541 §6.2.2).
pub fn block(headers: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    let text = |block: &mut Vec<u8>, text: &str| {
        // A length of 127 or more continues in further bytes (RFC 7541 §5.1).
        match text.len() {
            short @ 0..127 => block.push(u8::try_from(short).expect("short")),
            long => {
                block.push(0x7f);
                let mut rest = long - 127;
                while rest >= 128 {
                    block.push(u8::try_from(rest % 128 + 128).expect("a byte"));
                    rest /= 128;
                }
                block.push(u8::try_from(rest).expect("a byte"));
            }
        }
        block.extend(text.as_bytes());
    };
    for (name, value) in headers {
        block.push(0x00);
        text(&mut block, name);
        text(&mut block, value);
    }
    block
}

/// Returns a HEADERS frame with a CONNECT request.
pub fn connect(stream: u32, authority: &str) -> Vec<u8> {
    frame(HEADERS, END_HEADERS, stream, &block(&[(":method", "CONNECT"), (":authority", authority)]))
}

impl Frames {
    /// Connects, performs the TLS handshake, sends the preface, and exchanges and acknowledges SETTINGS in both directions.
    pub fn connect(address: SocketAddr, config: Arc<ClientConfig>) -> io::Result<Self> {
        let mut tls = tls_with(config, address, "127.0.0.1")?;
        tls.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")?;
        tls.write_all(&frame(SETTINGS, 0, 0, &[]))?;
        tls.flush()?;
        let mut frames = Self { tls, settings: Vec::new() };
        // The server's settings apply after they are acknowledged.
        frames.settings = frames.until(SETTINGS)?.payload;
        frames.send(&frame(SETTINGS, ACK, 0, &[]))?;
        // The server widens the connection's window when it acknowledges the client's SETTINGS. A client that used the wide
        // window before the acknowledgement would violate the protocol.
        while frames.until(SETTINGS)?.flags & ACK == 0 {}
        Ok(frames)
    }

    /// Returns the window that the server offers for each stream (RFC 9113 §6.5.2).
    pub fn stream_window(&self) -> u32 {
        const INITIAL_WINDOW_SIZE: [u8; 2] = [0, 4];
        let mut settings = self.settings.chunks_exact(6);
        let window = settings.find_map(|setting| setting.strip_prefix(&INITIAL_WINDOW_SIZE));
        window.map_or(65_535, |bytes| u32::from_be_bytes(bytes.try_into().expect("four bytes")))
    }

    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.tls.write_all(bytes)?;
        self.tls.flush()
    }

    /// Returns the next frame; an error means that the connection has ended.
    pub fn next(&mut self) -> io::Result<Frame> {
        let mut head = [0; 9];
        self.tls.read_exact(&mut head)?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]) & 0x7fff_ffff;
        let mut payload = vec![0; usize::try_from(length).expect("it fits")];
        self.tls.read_exact(&mut payload)?;
        Ok(Frame { kind: head[3], flags: head[4], stream, payload })
    }

    /// Reads frames up to the next one of this kind, and returns that one.
    pub fn until(&mut self, kind: u8) -> io::Result<Frame> {
        loop {
            let frame = self.next()?;
            if frame.kind == kind {
                return Ok(frame);
            }
        }
    }

    /// Returns the error code of the server's GOAWAY; `None` if the connection ends without one.
    pub fn go_away(&mut self) -> Option<u32> {
        let frame = self.until(GOAWAY).ok()?;
        let code = frame.payload.get(4..8)?;
        Some(u32::from_be_bytes(code.try_into().ok()?))
    }
}
