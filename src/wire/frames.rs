//! Counts the frames of an HTTP/2 connection that cost their receiver more than their sender, in the bytes as they arrive
//! (RFC 9113 §4.1). The HTTP/2 library interprets everything else.

/// The length of the client's preface in bytes (RFC 9113 §3.4).
const PREFACE: usize = 24;
/// The length of a frame header in bytes (RFC 9113 §4.1).
pub const HEADER: usize = 9;

const DATA: u8 = 0x0;
const HEADERS: u8 = 0x1;
const RST_STREAM: u8 = 0x3;
const SETTINGS: u8 = 0x4;
const PING: u8 = 0x6;
const WINDOW_UPDATE: u8 = 0x8;
const CONTINUATION: u8 = 0x9;
const END_STREAM: u8 = 0x1;

/// The numbers of frames since the counts were last reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// The number of PING frames, including acknowledgements.
    pub pings: u32,
    /// The number of SETTINGS frames, including acknowledgements.
    pub settings: u32,
    /// The number of frames without content: empty DATA that does not end a stream, RST_STREAM beyond the number of opened
    /// streams, GOAWAY, PRIORITY, and unknown types.
    pub empty: u32,
    /// The number of WINDOW_UPDATE frames, which are needless unless data was sent.
    pub windows: u32,
}

/// Parses the frame headers of one direction of a connection.
#[derive(Clone, Debug)]
pub struct FrameMeter {
    /// The number of bytes to skip before the next frame header.
    skip: usize,
    header: [u8; HEADER],
    /// The number of bytes of the header received so far.
    have: usize,
    /// The number of streams that were opened and not reset.
    opened: u32,
    /// The frames counted so far; the caller resets the counts.
    pub counts: Counts,
}

impl Default for FrameMeter {
    /// Creates a meter for a stream that begins with a client's preface.
    fn default() -> Self {
        Self { skip: PREFACE, header: [0; HEADER], have: 0, opened: 0, counts: Counts::default() }
    }
}

impl FrameMeter {
    /// Parses these bytes and returns the number of frames whose headers were completed in them.
    pub fn feed(&mut self, mut bytes: &[u8]) -> usize {
        let mut frames = 0;
        loop {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = &bytes[skipped..];
            if bytes.is_empty() {
                return frames;
            }
            let taken = (HEADER - self.have).min(bytes.len());
            self.header[self.have..self.have + taken].copy_from_slice(&bytes[..taken]);
            self.have += taken;
            bytes = &bytes[taken..];
            if self.have == HEADER {
                self.have = 0;
                frames += 1;
                self.frame();
            }
        }
    }

    fn frame(&mut self) {
        let [high, middle, low, kind, flags, ..] = self.header;
        let length = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        self.skip = length;
        let count = match kind {
            PING => &mut self.counts.pings,
            SETTINGS => &mut self.counts.settings,
            DATA if length == 0 && flags & END_STREAM == 0 => &mut self.counts.empty,
            WINDOW_UPDATE => &mut self.counts.windows,
            HEADERS => {
                self.opened = self.opened.saturating_add(1);
                return;
            }
            // Callers may end each opened stream with one RST_STREAM; only further ones are counted as empty frames.
            RST_STREAM if self.opened > 0 => {
                self.opened -= 1;
                return;
            }
            DATA | CONTINUATION => return,
            _ => &mut self.counts.empty,
        };
        *count = count.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, length: u8) -> Vec<u8> {
        let mut frame = vec![0, 0, length, kind, flags, 0, 0, 0, 1];
        frame.extend(vec![0x6; length.into()]);
        frame
    }

    #[test]
    fn frames_are_counted_however_they_are_cut() {
        let mut stream = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        let frames = [(SETTINGS, 0, 12), (PING, 0, 8), (PING, 1, 8), (DATA, 0, 0), (DATA, END_STREAM, 0)];
        let frames = frames.into_iter().chain([
            (DATA, 0, 200),
            (0x2, 0, 5),
            (0xbe, 0, 0),
            (HEADERS, 4, 30),
            (CONTINUATION, 4, 3),
            (WINDOW_UPDATE, 0, 4),
            (RST_STREAM, 0, 4),
            (RST_STREAM, 0, 4),
            (0x7, 0, 8),
        ]);
        stream.extend(frames.flat_map(|(kind, flags, length)| frame(kind, flags, length)));
        for step in 1..stream.len() {
            let mut meter = FrameMeter::default();
            let began: usize = stream.chunks(step).map(|piece| meter.feed(piece)).sum();
            assert_eq!(began, 14, "in pieces of {step}");
            assert_eq!(
                meter.counts,
                Counts { pings: 2, settings: 1, empty: 5, windows: 1 },
                "in pieces of {step}"
            );
            assert_eq!((meter.skip, meter.have), (0, 0));
        }
    }
}
