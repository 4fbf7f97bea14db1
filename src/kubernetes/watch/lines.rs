//! The lines of a watch, each of which is one event, from the parts of its body.

use super::super::client::Fault;

/// The largest size of a line of a watch, which is one object, in bytes.
pub(super) const LINE_BYTES_MAX: usize = 8 << 20;

/// The bytes of a body, split into lines.
#[derive(Default)]
pub(super) struct Lines {
    bytes: Vec<u8>,
    /// The offset of the first line that was not returned yet.
    begin: usize,
    /// The offset up to which no line end was found.
    looked: usize,
}

impl Lines {
    pub(super) fn push(&mut self, part: &[u8]) -> Result<(), Fault> {
        self.bytes.drain(..self.begin);
        self.looked -= self.begin;
        self.begin = 0;
        if self.bytes.len() + part.len() > LINE_BYTES_MAX {
            return Err(Fault::Answer(format!("an object is larger than {} MiB", LINE_BYTES_MAX >> 20)));
        }
        self.bytes.extend_from_slice(part);
        Ok(())
    }

    /// Returns true if all lines were taken, and no part of a further line has arrived.
    pub(super) fn is_between(&self) -> bool {
        self.begin == self.bytes.len()
    }

    pub(super) fn next(&mut self) -> Option<&[u8]> {
        let end = self.bytes[self.looked..].iter().position(|byte| *byte == b'\n');
        let Some(end) = end else {
            self.looked = self.bytes.len();
            return None;
        };
        let (begin, end) = (self.begin, self.looked + end);
        self.begin = end + 1;
        self.looked = self.begin;
        debug_assert!(begin <= end && self.begin <= self.bytes.len());
        Some(&self.bytes[begin..end])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_whatever_the_parts() {
        let text = b"{\"a\":1}\n{\"b\":2}\n\n{\"c\":3}\nrest";
        for size in 1..text.len() {
            let mut lines = Lines::default();
            let mut found = Vec::new();
            for part in text.chunks(size) {
                lines.push(part).expect("short");
                while let Some(line) = lines.next() {
                    found.push(String::from_utf8(line.to_vec()).expect("text"));
                }
            }
            assert_eq!(found, ["{\"a\":1}", "{\"b\":2}", "", "{\"c\":3}"], "parts of {size}");
            assert_eq!(&lines.bytes[lines.begin..], b"rest");
        }
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let mut lines = Lines::default();
        let part = vec![b'x'; 1 << 20];
        let pushed = (0..9).map(|_| lines.push(&part)).collect::<Result<Vec<()>, Fault>>();
        assert!(pushed.is_err());
    }
}
