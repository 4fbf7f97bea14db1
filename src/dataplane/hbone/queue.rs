//! Pieces of a stream that wait for the endpoint.

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use bytes::{Buf, Bytes};
use tokio::net::TcpStream;

use crate::net::socket::send;

/// Pieces smaller than this are copied together while they wait, as each pins the buffer it was read into.
const SMALL: usize = 2 * 1024;
/// Pieces written with one system call.
const PIECES: usize = 32;

/// Pieces of a stream that wait for the endpoint.
#[derive(Default)]
pub(super) struct Queue {
    pieces: VecDeque<Bytes>,
    /// Small ones, copied together; behind the others.
    tail: Vec<u8>,
    /// The bytes of all pieces.
    pub(super) bytes: usize,
}

impl Queue {
    /// Returns true if no bytes wait.
    pub(super) fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Adds a piece.
    pub(super) fn push(&mut self, piece: Bytes) {
        if piece.is_empty() {
            return;
        }
        self.bytes += piece.len();
        // The first goes as it is: mostly it is written at once.
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

    /// Copies the first piece if it is small, before a wait: it would keep the whole buffer that it was read into.
    pub(super) fn unpin(&mut self) {
        if let Some(first) = self.pieces.front_mut().filter(|first| first.len() < SMALL) {
            *first = Bytes::copy_from_slice(first);
        }
    }

    /// Writes the bytes that the socket takes at once, and returns their number.
    pub(super) fn write(&mut self, socket: &TcpStream) -> io::Result<usize> {
        self.close_tail();
        let mut slices = [IoSlice::new(&[]); PIECES];
        let mut count = 0;
        for (slice, piece) in slices.iter_mut().zip(&self.pieces) {
            *slice = IoSlice::new(piece);
            count += 1;
        }
        send(socket, &slices[..count])
    }

    /// Drops the first `count` bytes, which were written.
    pub(super) fn advance(&mut self, mut count: usize) {
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
            // Lets the memory go.
            *self = Self::default();
        }
    }
}
