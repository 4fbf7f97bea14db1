//! The bytes of a message: a head of ten bytes, the message as JSON, and a tail with the bytes that connections hold.
//!
//! ```text
//!  0        4        8     10
//!  ├────────┼────────┼─────┼──────────┼──────────┤
//!  │ JSON   │ tail   │ fds │ JSON     │ tail     │      lengths and the count are little-endian
//! ```
//!
//! The descriptors of a message arrive with its first byte.

/// The length of a head in bytes.
pub const HEAD_BYTES: usize = 10;
/// The longest JSON in bytes.
pub const JSON_BYTES_MAX: usize = 8 << 20;
/// The longest tail in bytes. A connection holds at most the content of two pipes of 1 MiB.
pub const TAIL_BYTES_MAX: usize = 16 << 20;
/// The largest number of descriptors of a message. The kernel allows 253 (`SCM_MAX_FD`).
pub const DESCRIPTORS_MAX: usize = 252;

/// The lengths of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The length of the JSON in bytes.
    pub json: usize,
    /// The length of the tail in bytes.
    pub tail: usize,
    /// The number of descriptors.
    pub descriptors: usize,
}

/// The reason why a message cannot be sent or read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a message of the upgrade socket is too large: {json} bytes of JSON, {tail} bytes of connections, {descriptors} descriptors"
)]
pub struct TooLarge {
    json: usize,
    tail: usize,
    descriptors: usize,
}

impl Head {
    /// Returns the head, unless a length is above its limit.
    pub fn new(json: usize, tail: usize, descriptors: usize) -> Result<Self, TooLarge> {
        if json > JSON_BYTES_MAX || tail > TAIL_BYTES_MAX || descriptors > DESCRIPTORS_MAX {
            return Err(TooLarge { json, tail, descriptors });
        }
        Ok(Self { json, tail, descriptors })
    }

    /// Reads a head.
    pub fn read(bytes: [u8; HEAD_BYTES]) -> Result<Self, TooLarge> {
        let [a, b, c, d, e, f, g, h, i, j] = bytes;
        let length = |bytes| usize::try_from(u32::from_le_bytes(bytes)).unwrap_or(usize::MAX);
        Self::new(length([a, b, c, d]), length([e, f, g, h]), u16::from_le_bytes([i, j]).into())
    }

    /// Writes the head.
    pub fn bytes(self) -> [u8; HEAD_BYTES] {
        // The limits of `new` are below those of the types.
        let length = |length| u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes();
        let count = u16::try_from(self.descriptors).unwrap_or(u16::MAX).to_le_bytes();
        let mut bytes = [0; HEAD_BYTES];
        bytes[..4].copy_from_slice(&length(self.json));
        bytes[4..8].copy_from_slice(&length(self.tail));
        bytes[8..].copy_from_slice(&count);
        bytes
    }

    /// Returns the length of the message in bytes, with its head.
    pub fn whole(self) -> usize {
        HEAD_BYTES + self.json + self.tail
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_head_that_is_written_is_read(
            json in 0..=JSON_BYTES_MAX, tail in 0..=TAIL_BYTES_MAX, descriptors in 0..=DESCRIPTORS_MAX,
        ) {
            let head = Head::new(json, tail, descriptors).expect("within the limits");
            prop_assert_eq!(Head::read(head.bytes()), Ok(head));
        }

        #[test]
        fn whatever_is_read_is_bounded(bytes: [u8; HEAD_BYTES]) {
            if let Ok(head) = Head::read(bytes) {
                prop_assert!(head.whole() <= HEAD_BYTES + JSON_BYTES_MAX + TAIL_BYTES_MAX);
                prop_assert!(head.descriptors <= DESCRIPTORS_MAX);
            }
        }
    }
}
