//! Bytes as text: two lower-case hexadecimal digits each.

use std::fmt;

/// Writes bytes as hexadecimal digits.
#[derive(Clone, Copy, Debug)]
pub struct Hex<'a>(pub &'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Parses hexadecimal digits; upper case is refused.
pub fn parse(text: &[u8]) -> Option<Vec<u8>> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let (pairs, rest) = text.as_chunks::<2>();
    let bytes: Option<_> = pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect();
    bytes.filter(|_| rest.is_empty())
}

/// Parses as many hexadecimal digits as `N` bytes have; upper case is refused.
pub fn parse_array<const N: usize>(text: &[u8]) -> Option<[u8; N]> {
    parse(text)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_written_are_read_and_other_texts_are_refused() {
        for bytes in [&[][..], &[0], &[0, 1, 0x7f, 0x80, 0xff]] {
            assert_eq!(parse(Hex(bytes).to_string().as_bytes()).as_deref(), Some(bytes));
        }
        for text in ["0", "000", "0g", "0A", " 0", "é"] {
            assert_eq!(parse(text.as_bytes()), None, "{text}");
        }
        assert_eq!((parse_array(b"0a0b"), parse_array::<2>(b"0a")), (Some([10, 11]), None));
    }
}
