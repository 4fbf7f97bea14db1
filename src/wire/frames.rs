//! Finds the headers of an HTTP/2 connection's frames in the bytes as they pass (RFC 9113 §4.1), counts the frames that cost
//! their receiver more than their sender, and limits them per second. The HTTP/2 library interprets everything else.

/// The length of the client's preface in bytes (RFC 9113 §3.4).
const PREFACE: usize = 24;
/// The length of a frame header in bytes (RFC 9113 §4.1).
pub const HEADER: usize = 9;

/// The length of the error code in RST_STREAM in bytes (RFC 9113 §6.4).
const ERROR: usize = 4;

/// The type of a frame with a part of a stream's body.
pub const DATA: u8 = 0x0;
/// The type of a frame that begins a header block.
pub const HEADERS: u8 = 0x1;
/// The type of a frame that ends a stream with an error code.
pub const RST_STREAM: u8 = 0x3;
const SETTINGS: u8 = 0x4;
const PING: u8 = 0x6;
const WINDOW_UPDATE: u8 = 0x8;
const CONTINUATION: u8 = 0x9;
const END_STREAM: u8 = 0x1;

/// The largest number of PING frames per second.
pub const PINGS_MAX: u32 = 100;
/// The largest number of SETTINGS frames per second.
pub const SETTINGS_MAX: u32 = 50;
/// The largest number of frames without effect per second.
pub const EMPTY_MAX: u32 = 1_000;
/// The number of frames in reply to one DATA frame that are not limited. The receiver of the data may open two windows, those of
/// the stream and of the connection, and each of them twice: when the frame arrives and when it is read.
const REPLIES_PER_FRAME: usize = 4;
/// The number of bytes of data that allow one more frame in reply. HTTP/2 libraries reopen the windows of streams and
/// connections in steps of 4 KiB or more.
const BYTES_PER_REPLY: usize = 1024;
/// The largest number of frames in reply that may be in credit.
const REPLIES_MAX: u32 = 1 << 20;

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
    /// The number of DATA frames with content.
    pub data: u32,
    /// The number of bytes in DATA frames, including padding.
    pub data_bytes: usize,
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The type of the frame.
    pub kind: u8,
    /// The flags of the frame.
    pub flags: u8,
    /// The stream of the frame; 0 means the connection.
    pub stream: u32,
    /// The length of the payload in bytes.
    pub length: usize,
    /// The error code of RST_STREAM.
    pub error: Option<u32>,
}

/// Parses the frame headers of one direction of a connection.
#[derive(Clone, Debug, Default)]
pub struct FrameReader {
    /// The number of bytes to skip before the next frame header.
    skip: usize,
    /// A frame header, and the error code of RST_STREAM.
    header: [u8; HEADER + ERROR],
    /// The number of bytes of `header` received so far.
    have: usize,
}

impl FrameReader {
    /// Creates a reader for a direction that begins with a client's preface.
    pub fn of_client() -> Self {
        Self { skip: PREFACE, ..Self::default() }
    }

    /// Parses these bytes, and calls `each` with each frame whose header is complete.
    pub fn feed(&mut self, mut bytes: &[u8], mut each: impl FnMut(Frame)) {
        loop {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = &bytes[skipped..];
            if bytes.is_empty() {
                return;
            }
            let taken = (self.wanted() - self.have).min(bytes.len());
            self.header[self.have..self.have + taken].copy_from_slice(&bytes[..taken]);
            self.have += taken;
            bytes = &bytes[taken..];
            if self.have == self.wanted() {
                each(self.frame());
            }
        }
    }

    /// Returns the number of bytes that the current frame needs in `header`.
    fn wanted(&self) -> usize {
        let has_error = self.have >= HEADER && self.header[3] == RST_STREAM && self.length() >= ERROR;
        if has_error { HEADER + ERROR } else { HEADER }
    }

    fn length(&self) -> usize {
        let [high, middle, low, ..] = self.header;
        usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low)
    }

    /// Returns the frame whose header is complete, and begins the next one.
    fn frame(&mut self) -> Frame {
        let [_, _, _, kind, flags, a, b, c, d, error @ ..] = self.header;
        let (length, have) = (self.length(), std::mem::take(&mut self.have));
        self.skip = length - (have - HEADER);
        Frame {
            kind,
            flags,
            // The first bit is reserved.
            stream: u32::from_be_bytes([a, b, c, d]) & 0x7fff_ffff,
            length,
            error: (have > HEADER).then(|| u32::from_be_bytes(error)),
        }
    }
}

/// Counts the frames of a client.
#[derive(Clone, Debug)]
pub struct FrameMeter {
    reader: FrameReader,
    /// The number of streams that were opened and not reset.
    opened: u32,
    /// The frames counted so far; the caller resets the counts.
    pub counts: Counts,
}

impl Default for FrameMeter {
    /// Creates a meter for a stream that begins with a client's preface.
    fn default() -> Self {
        Self { reader: FrameReader::of_client(), opened: 0, counts: Counts::default() }
    }
}

impl FrameMeter {
    /// Creates a meter for a stream that begins with a server's SETTINGS frame.
    pub fn of_server() -> Self {
        Self { reader: FrameReader::default(), ..Self::default() }
    }

    /// Parses these bytes and returns the number of frames whose headers were completed in them. Calls `headers` with the stream
    /// of each HEADERS frame.
    pub fn feed(&mut self, bytes: &[u8], mut headers: impl FnMut(u32)) -> usize {
        let mut frames = 0;
        let mut reader = std::mem::take(&mut self.reader);
        reader.feed(bytes, |frame| {
            frames += 1;
            self.count(frame);
            if frame.kind == HEADERS {
                headers(frame.stream);
            }
        });
        self.reader = reader;
        frames
    }

    fn count(&mut self, Frame { kind, flags, length, .. }: Frame) {
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
            DATA => {
                self.counts.data_bytes = self.counts.data_bytes.saturating_add(length);
                if length == 0 {
                    return;
                }
                &mut self.counts.data
            }
            CONTINUATION => return,
            _ => &mut self.counts.empty,
        };
        *count = count.saturating_add(1);
    }
}

/// Limits the frames of one direction of a connection that cost their receiver more than their sender.
///
/// WINDOW_UPDATE frames are replies to data. PING frames are too: gRPC libraries send one with the data that they receive, to
/// measure the bandwidth. So the data that was sent in the other direction allows a number of them.
#[derive(Debug, Default)]
pub struct FrameLimits {
    meter: FrameMeter,
    /// The number of frames that the sender may send in reply to data.
    replies: u32,
}

impl FrameLimits {
    /// Limits the frames that `meter` parses.
    pub fn new(meter: FrameMeter) -> Self {
        Self { meter, replies: 0 }
    }

    /// Counts the frames in these bytes, and returns the number of frames whose headers were completed in them. Calls `headers`
    /// with the stream of each HEADERS frame.
    pub fn received(&mut self, bytes: &[u8], headers: impl FnMut(u32)) -> usize {
        let before = self.meter.counts;
        let frames = self.meter.feed(bytes, headers);
        let Counts { windows, pings, empty, .. } = self.meter.counts;
        let windows = self.without_reason(windows);
        let pings = self.without_reason(pings.saturating_sub(before.pings));
        let counts = &mut self.meter.counts;
        counts.windows = 0;
        counts.empty = empty.saturating_add(windows);
        counts.pings = before.pings.saturating_add(pings);
        frames
    }

    /// Returns how many of these frames are no replies to data.
    fn without_reason(&mut self, frames: u32) -> u32 {
        let replies = frames.min(self.replies);
        self.replies -= replies;
        frames - replies
    }

    /// Counts DATA frames that were sent in the other direction, and the bytes in them.
    pub fn data_sent(&mut self, frames: usize, bytes: usize) {
        let replies = frames.saturating_mul(REPLIES_PER_FRAME).saturating_add(bytes / BYTES_PER_REPLY);
        let replies = u32::try_from(replies).unwrap_or(u32::MAX);
        self.replies = self.replies.saturating_add(replies).min(REPLIES_MAX);
    }

    /// Begins the counts of another second.
    pub fn begin_second(&mut self) {
        self.meter.counts = Counts::default();
    }

    /// If there were too many frames of one kind in this second, returns the name of the kind.
    pub fn excess(&self) -> Option<&'static str> {
        let Counts { pings, settings, empty, .. } = self.meter.counts;
        let checks = [
            (pings, PINGS_MAX, "PING frames"),
            (settings, SETTINGS_MAX, "SETTINGS frames"),
            (empty, EMPTY_MAX, "frames without effect"),
        ];
        checks.into_iter().find(|(count, limit, _)| count > limit).map(|(_, _, what)| what)
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
            let began: usize = stream.chunks(step).map(|piece| meter.feed(piece, |_| ())).sum();
            assert_eq!(began, 14, "in pieces of {step}");
            assert_eq!(
                meter.counts,
                Counts { pings: 2, settings: 1, empty: 5, windows: 1, data: 1, data_bytes: 200 },
                "in pieces of {step}"
            );
            assert_eq!((meter.reader.skip, meter.reader.have), (0, 0));
        }
    }

    /// Returns limits, and the excess after so many frames of this kind.
    fn after(limits: &mut FrameLimits, frames: u32, kind: u8, length: u8) -> Option<&'static str> {
        for _ in 0..frames {
            limits.received(&frame(kind, 0, length), |_| ());
        }
        limits.excess()
    }

    #[test]
    fn a_sender_may_send_so_many_costly_frames_per_second_and_no_more() {
        for (most, kind, length, what) in [
            (PINGS_MAX, PING, 8, "PING frames"),
            (SETTINGS_MAX, SETTINGS, 6, "SETTINGS frames"),
            (EMPTY_MAX, 0x2, 5, "frames without effect"),
            (EMPTY_MAX, WINDOW_UPDATE, 4, "frames without effect"),
        ] {
            let mut limits = FrameLimits::new(FrameMeter::of_server());
            assert_eq!(after(&mut limits, most, kind, length), None, "{what}");
            assert_eq!(after(&mut limits, 1, kind, length), Some(what));
            limits.begin_second();
            assert_eq!(after(&mut limits, most, kind, length), None, "{what}");
        }
    }

    #[test]
    fn data_allows_frames_in_reply() {
        for (kind, most) in [(PING, PINGS_MAX), (WINDOW_UPDATE, EMPTY_MAX)] {
            let mut limits = FrameLimits::new(FrameMeter::of_server());
            limits.data_sent(2, 100 << 10);
            assert_eq!(after(&mut limits, 2 * 4 + 100 + most, kind, 8), None);
            assert!(after(&mut limits, 1, kind, 8).is_some());
        }
    }
}
