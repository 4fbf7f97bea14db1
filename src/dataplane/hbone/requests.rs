//! Finds the requests that the HTTP/2 library refuses by itself, because it cannot read them or their headers are too large. The
//! library does not report them, so they are found in the bytes: such a request has a HEADERS frame of the client, is never
//! handed over, and gets a frame of the gateway that ends its stream.

use std::collections::VecDeque;

use isthmus_wire::frames::{DATA, Frame, FrameReader, HEADERS, RST_STREAM};

/// The largest number of requests that are remembered until they are handed over or refused. The library holds fewer, so more
/// are refused streams whose frames wait for a client that does not read.
const WAITING_MAX: usize = 1_024;

/// The requests of one connection that are neither handed over nor refused yet.
#[derive(Default)]
pub(super) struct Requests {
    /// The largest stream that the client has opened.
    last: u32,
    waiting: VecDeque<u32>,
    sent: FrameReader,
    /// True if this gateway sends the requests.
    is_of_client: bool,
    refused: Vec<LibraryRefusal>,
}

/// How the library has refused a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LibraryRefusal {
    /// It has reset the stream with this error code.
    Reset(u32),
    /// It has answered with a status: the headers are too large.
    Answered,
}

impl Requests {
    /// Creates the state of a connection on which this gateway sends the requests, so that there are none to find.
    pub(super) fn of_client() -> Self {
        Self { sent: FrameReader::of_client(), is_of_client: true, ..Self::default() }
    }

    /// Records a HEADERS frame of the client, which opens a stream unless it has the trailers of an open one.
    pub(super) fn received(&mut self, stream: u32) {
        if stream > self.last && !self.is_of_client {
            self.last = stream;
            if self.waiting.len() < WAITING_MAX {
                self.waiting.push_back(stream);
            }
        }
    }

    /// Records that the library has handed over a request.
    pub(super) fn handed_over(&mut self, stream: u32) {
        self.forget(stream);
    }

    /// Finds the refusals in bytes that the library has written. Returns the number of DATA frames that begin there, and of the bytes in
    /// them.
    pub(super) fn written(&mut self, bytes: &[u8]) -> (usize, usize) {
        let (mut frames, mut data) = (0, 0);
        let mut sent = std::mem::take(&mut self.sent);
        sent.feed(bytes, |Frame { kind, stream, error, length, .. }| {
            if kind == DATA {
                frames += 1;
                data += length;
            }
            if matches!(kind, HEADERS | RST_STREAM) && self.forget(stream) {
                self.refused.push(error.map_or(LibraryRefusal::Answered, LibraryRefusal::Reset));
            }
        });
        self.sent = sent;
        (frames, data)
    }

    /// Removes and returns the refusals that were found.
    pub(super) fn take_refused(&mut self) -> Vec<LibraryRefusal> {
        std::mem::take(&mut self.refused)
    }

    /// Removes a request; returns true if it was waiting.
    fn forget(&mut self, stream: u32) -> bool {
        // Streams are opened in ascending order.
        self.waiting.binary_search(&stream).is_ok_and(|at| self.waiting.remove(at).is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
        let length = u8::try_from(payload.len()).expect("short");
        [&[0, 0, length, kind, 4, 0, 0, 0, stream][..], payload].concat()
    }

    #[test]
    fn a_request_that_is_answered_without_being_handed_over_was_refused() {
        let written = [
            frame(HEADERS, 1, b"200"),
            frame(0, 1, &[RST_STREAM; 200]),
            frame(RST_STREAM, 3, &[0, 0, 0, 1]),
            frame(RST_STREAM, 1, &[0, 0, 0, 8]),
            frame(HEADERS, 5, b"431"),
            frame(RST_STREAM, 5, &[0, 0, 0, 0]),
        ]
        .concat();
        for step in 1..written.len() {
            let mut requests = Requests::default();
            [1, 3, 5, 7, 1].into_iter().for_each(|stream| requests.received(stream));
            requests.handed_over(1);
            requests.handed_over(7);
            let data = written.chunks(step).map(|bytes| requests.written(bytes));
            let data = data.fold((0, 0), |(frames, all), (more, bytes)| (frames + more, all + bytes));
            assert_eq!(data, (1, 200));
            assert_eq!(
                requests.take_refused(),
                [LibraryRefusal::Reset(1), LibraryRefusal::Answered],
                "in pieces of {step}"
            );
            assert_eq!((requests.take_refused(), requests.waiting.len()), (vec![], 0));
        }
    }

    #[test]
    fn the_requests_of_a_client_that_does_not_read_are_bounded() {
        let mut requests = Requests::default();
        (0..10_000).for_each(|at| requests.received(2 * at + 1));
        assert_eq!(requests.waiting.len(), WAITING_MAX);
    }
}
