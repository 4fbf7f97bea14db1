//! The place of a connection in a distributed trace (W3C Trace Context §3.2).

use std::fmt;

/// `traceparent` of a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceParent {
    pub trace: TraceId,
    pub span: SpanId,
    pub sampled: bool,
}

/// Not all zeroes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TraceId(pub [u8; 16]);

/// Not all zeroes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SpanId(pub [u8; 8]);

impl TraceParent {
    /// From `00-<trace>-<span>-<flags>`; a later version may have more behind it.
    pub fn parse(text: &str) -> Option<Self> {
        let bytes = text.as_bytes();
        let (version, rest) = (bytes.get(..2)?, bytes.get(2..55)?);
        let later = version != b"00";
        let well_formed = rest[0] == b'-' && rest[33] == b'-' && rest[50] == b'-' && version != b"ff";
        let ends = if later { bytes.get(55).is_none_or(|byte| *byte == b'-') } else { bytes.len() == 55 };
        hex::<1>(version)?;
        if !well_formed || !ends {
            return None;
        }
        let (trace, span) = (hex(&rest[1..33])?, hex(&rest[34..50])?);
        let [flags] = hex::<1>(&rest[51..53])?;
        let zeroes = trace == [0; 16] || span == [0; 8];
        (!zeroes).then_some(Self { trace: TraceId(trace), span: SpanId(span), sampled: flags & 1 == 1 })
    }
}

/// Lower-case digits alone.
fn hex<const N: usize>(text: &[u8]) -> Option<[u8; N]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; N];
    if text.len() != 2 * N {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_traceparent_is_read_strictly() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let read = TraceParent::parse(good).expect("legal");
        assert_eq!(
            (read.trace.to_string(), read.span.to_string(), read.sampled),
            (good[3..35].into(), good[36..52].into(), true)
        );
        assert!(TraceParent::parse(&good.replace("-01", "-00")).is_some_and(|read| !read.sampled));
        assert!(TraceParent::parse(&format!("01{}-more", &good[2..])).is_some());
        for bad in [
            "",
            &good[..54],
            &format!("{good}-more"),
            &good.to_uppercase(),
            &good.replace("00-4b", "ff-4b"),
            &good.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            &good.replace("00f067aa0ba902b7", &"0".repeat(16)),
            &good.replace('-', "_"),
            &good.replace("4bf9", "4bg9"),
        ] {
            assert_eq!(TraceParent::parse(bad), None, "{bad}");
        }
    }
}
