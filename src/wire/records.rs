//! Counts the records of a TLS connection from its ciphertext as it comes (RFC 8446 §5.2). Each costs its receiver more
//! than its bytes, and one may carry nothing at all: a KeyUpdate costs two derivations of keys.

/// What every record begins with, in bytes.
const HEADER: usize = 5;
/// Of a record of TLS 1.3: the content type, and the tag of the cipher.
const OVERHEAD: usize = 1 + 16;
/// A record with less than this carries less than the header of a frame, in bytes. No HTTP/2 library writes such records,
/// but behind a full one.
const LEAST: usize = super::frames::HEADER + OVERHEAD;

/// Records that began in some bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Records {
    pub all: u32,
    /// Those that carry less than the header of a frame.
    pub tiny: u32,
}

/// Follows one direction of a connection.
#[derive(Clone, Debug, Default)]
pub struct RecordMeter {
    /// Bytes to pass over before the next record.
    skip: usize,
    header: [u8; HEADER],
    /// How many bytes of the header have come.
    have: usize,
}

impl RecordMeter {
    /// Follows these bytes.
    pub fn feed(&mut self, mut bytes: &[u8]) -> Records {
        let mut records = Records::default();
        loop {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = &bytes[skipped..];
            if bytes.is_empty() {
                return records;
            }
            let taken = (HEADER - self.have).min(bytes.len());
            self.header[self.have..self.have + taken].copy_from_slice(&bytes[..taken]);
            self.have += taken;
            bytes = &bytes[taken..];
            if self.have == HEADER {
                self.have = 0;
                let [_, _, _, high, low] = self.header;
                self.skip = usize::from(u16::from_be_bytes([high, low]));
                records.all += 1;
                records.tiny += u32::from(self.skip < LEAST);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_counted_however_they_are_cut() {
        let lengths: [u16; 5] = [22, 26, 25, 16_401, 18];
        let record = |length: u16| [&[23, 3, 3][..], &length.to_be_bytes(), &vec![7; length.into()]].concat();
        let stream: Vec<u8> = lengths.into_iter().flat_map(record).collect();
        for step in [1, 2, 3, 5, 7, 64, 4_096, stream.len()] {
            let mut meter = RecordMeter::default();
            let (mut all, mut tiny) = (0, 0);
            for piece in stream.chunks(step) {
                let records = meter.feed(piece);
                (all, tiny) = (all + records.all, tiny + records.tiny);
            }
            assert_eq!((all, tiny), (5, 3), "in pieces of {step}");
            assert_eq!((meter.skip, meter.have), (0, 0));
        }
    }
}
