//! The pieces of a stream that wait for the endpoint.

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use bytes::{Buf, Bytes};
use tokio::net::TcpStream;

use isthmus_net::socket::send;

/// Pieces smaller than this are copied together while they wait, because each piece keeps the whole buffer that it was read
/// into.
const SMALL: usize = 2 * 1024;
/// The number of pieces that one system call writes.
const PIECES: usize = 32;

/// The pieces of a stream that wait for the endpoint.
#[derive(Default)]
pub(crate) struct Queue {
    pieces: VecDeque<Bytes>,
    /// The small pieces, copied together; they follow the others in the stream.
    tail: Vec<u8>,
    /// The number of bytes of all pieces.
    pub(crate) bytes: usize,
}

impl Queue {
    /// Returns true if no bytes wait.
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Adds a piece.
    pub(crate) fn push(&mut self, piece: Bytes) {
        if piece.is_empty() {
            return;
        }
        self.bytes += piece.len();
        // The first piece is not copied, because it is usually written at once.
        if piece.len() < SMALL && !(self.pieces.is_empty() && self.tail.is_empty()) {
            self.tail.extend_from_slice(&piece);
            return;
        }
        self.close_tail();
        self.pieces.push_back(piece);
    }

    fn close_tail(&mut self) {
        if !self.tail.is_empty() {
            self.pieces.push_back(std::mem::take(&mut self.tail).into());
        }
    }

    /// Copies the first piece if it is small; called before a wait. Otherwise the piece would keep the whole buffer that it was
    /// read into.
    pub(crate) fn unpin(&mut self) {
        if let Some(first) = self.pieces.front_mut().filter(|first| first.len() < SMALL) {
            *first = Bytes::copy_from_slice(first);
        }
    }

    /// Writes as many bytes as the socket takes at once, and returns their number.
    pub(crate) fn write(&mut self, socket: &TcpStream) -> io::Result<usize> {
        self.close_tail();
        let mut slices = [IoSlice::new(&[]); PIECES];
        let mut count = 0;
        for (slice, piece) in slices.iter_mut().zip(&self.pieces) {
            *slice = IoSlice::new(piece);
            count += 1;
        }
        send(socket, &slices[..count])
    }

    /// Drops the first `count` bytes, which have been written.
    pub(crate) fn advance(&mut self, mut count: usize) {
        debug_assert!(count <= self.bytes, "{count} bytes were written of {}", self.bytes);
        self.bytes -= count;
        while let Some(first) = self.pieces.front_mut().filter(|_| count > 0) {
            let gone = count.min(first.len());
            first.advance(gone);
            count -= gone;
            if first.is_empty() {
                self.pieces.pop_front();
            }
        }
        if self.bytes == 0 {
            // Frees the memory.
            *self = Self::default();
        }
    }
}
