//! Counts the records of a TLS connection in the ciphertext as it arrives (RFC 8446 §5.2). Each record costs its receiver
//! more than its bytes alone, and a record may carry no data at all: a KeyUpdate costs two key derivations.

/// The length of a record header in bytes.
const HEADER: usize = 5;
/// The number of bytes of a TLS 1.3 record that are not content: the content type and the authentication tag.
const OVERHEAD: usize = 1 + 16;
/// The length of the shortest record that can carry a frame header, in bytes. HTTP/2 libraries write shorter records only
/// after a full record.
const LEAST: usize = super::frames::HEADER + OVERHEAD;

/// The numbers of records that began in the bytes of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Records {
    /// The number of all records.
    pub all: u32,
    /// The number of records that carry less than a frame header.
    pub tiny: u32,
}

/// Parses the record headers of one direction of a connection.
#[derive(Clone, Debug, Default)]
pub struct RecordMeter {
    /// The number of bytes to skip before the next record.
    skip: usize,
    header: [u8; HEADER],
    /// The number of bytes of the header received so far.
    have: usize,
}

impl RecordMeter {
    /// Parses these bytes and counts the records that began in them.
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
