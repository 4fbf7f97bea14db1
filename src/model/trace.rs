//! The trace context of a connection (W3C Trace Context §3.2), and the sampling of traces.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::hex::{Hex, parse_array as hex};

/// The `traceparent` of a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TraceParent {
    /// The id of the trace.
    pub trace: TraceId,
    /// The caller's span, the parent of ours.
    pub span: SpanId,
    /// True if the caller samples the trace.
    pub sampled: bool,
}

/// The span of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    /// The id of the trace.
    pub trace: TraceId,
    /// The span's own id.
    pub id: SpanId,
    /// The caller's span; `None` if the trace begins here.
    pub parent: Option<SpanId>,
}

/// A ratio sampler for traces without a sampling decision: a trace is sampled if the low 63 bits of its id
/// are less than `below`, so that all gateways decide alike. OpenTelemetry's `TraceIdRatioBased` samplers
/// decide the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampling {
    /// The limit for the low 63 bits of a trace id, from 0 (no trace is sampled) to 2^63 (every trace is sampled).
    pub below: u64,
}

/// Bounds the share of connections that are sampled because of their trace id. A client that chooses its trace ids can choose
/// ids that are always sampled; this bound stops such a client. Random ids stay below the bound.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    /// The number of traces that may be sampled at this moment; at most [`Allowance::MOST`].
    traces: f64,
}

/// A trace id; not all zeroes.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceId(pub [u8; 16]);

/// A span id; not all zeroes.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpanId(pub [u8; 8]);

impl TraceId {
    /// Returns the id of the trace that a TLS connection begins: the last 16 bytes of the random of its ClientHello (RFC 8446
    /// §4.1.2). Every gateway on the path gets the same id, and no gateway can change it.
    pub fn of_hello(random: &[u8]) -> Option<Self> {
        let id: [u8; 16] = *random.last_chunk()?;
        (id != [0; 16]).then_some(Self(id))
    }

    /// Parses 32 hexadecimal digits.
    pub fn parse(text: &str) -> Option<Self> {
        let id = hex(text.to_ascii_lowercase().as_bytes())?;
        (id != [0; 16]).then_some(Self(id))
    }
}

impl TraceParent {
    /// Parses `00-<trace>-<span>-<flags>`; a later version may have more fields after the flags.
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

impl Sampling {
    /// Returns the share of traces that are sampled, from 0 to 1.
    pub fn share(self) -> f64 {
        (self.below as f64 / (1_u64 << 63) as f64).min(1.0)
    }

    /// Makes a sampler for a share of traces, from 0 to 1.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is from 0 to 2^63")]
    pub fn of(share: f64) -> Self {
        Self { below: (share.clamp(0.0, 1.0) * (1_u64 << 63) as f64) as u64 }
    }

    fn chooses(self, trace: TraceId) -> bool {
        let last = u128::from_be_bytes(trace.0) & u128::from(u64::MAX >> 1);
        last < u128::from(self.below)
    }

    /// Returns the span of a connection, or `None` if its trace is not sampled. A trace that the caller samples is sampled;
    /// otherwise the trace id decides. Without a trace of the caller, the connection belongs to the trace of its hello, or to a
    /// new one.
    pub fn span(
        self,
        caller: Option<TraceParent>,
        hello: Option<TraceId>,
        mut random: impl FnMut() -> u64,
    ) -> Option<Span> {
        let trace = match (caller, hello) {
            (Some(caller), _) => caller.trace,
            (None, Some(trace)) => trace,
            (None, None) => TraceId((u128::from(random()) << 64 | u128::from(random().max(1))).to_be_bytes()),
        };
        if !caller.is_some_and(|caller| caller.sampled) && !self.chooses(trace) {
            return None;
        }
        let id = SpanId(random().max(1).to_be_bytes());
        Some(Span { trace, id, parent: caller.map(|caller| caller.span) })
    }
}

impl Allowance {
    /// The number of traces that may be sampled in a burst, whatever the share.
    pub const MOST: f64 = 64.0;
    /// The largest factor by which the sampled share of connections may exceed the configured share.
    pub const SHARES: f64 = 2.0;

    /// Increases the allowance for one more connection.
    pub fn counted(&mut self, sampling: Sampling) {
        self.traces = (self.traces + Self::SHARES * sampling.share()).min(Self::MOST);
    }

    /// Uses up one sampled trace of the allowance; returns false if none is left.
    pub fn take(&mut self) -> bool {
        let may = self.traces >= 1.0;
        if may {
            self.traces -= 1.0;
        }
        may
    }
}

impl Default for Allowance {
    fn default() -> Self {
        Self { traces: Self::MOST }
    }
}

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Hex(&self.0).fmt(f)
    }
}

impl fmt::Debug for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Hex(&self.0).fmt(f)
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

    /// Returns a generator of ascending numbers from 1.
    fn numbers() -> impl FnMut() -> u64 {
        let mut last = 0;
        move || {
            last += 1;
            last
        }
    }

    #[test]
    fn a_trace_is_chosen_by_its_caller_or_by_its_id() {
        let caller = |last: u64, sampled| TraceParent {
            trace: TraceId((7 << 64 | u128::from(last)).to_be_bytes()),
            span: SpanId([9; 8]),
            sampled,
        };
        let (none, half, all) = (Sampling::of(0.0), Sampling::of(0.5), Sampling::of(1.0));
        let (low, high) = ((1 << 62) - 1, 1 << 62);
        let chosen = |sampling: Sampling, caller| sampling.span(Some(caller), None, numbers()).is_some();
        assert!(chosen(none, caller(high, true)) && !chosen(none, caller(low, false)));
        assert!(chosen(half, caller(low, false)) && !chosen(half, caller(high, false)));
        // Only the low 63 bits count, so the highest bit changes nothing.
        assert!(chosen(half, caller(1 << 63, false)));
        assert!(chosen(all, caller(u64::MAX, false)));
        assert_eq!(
            none.span(Some(caller(1, true)), None, numbers()),
            Some(Span {
                trace: caller(1, true).trace,
                id: SpanId(1_u64.to_be_bytes()),
                parent: Some(SpanId([9; 8]))
            })
        );
    }

    #[test]
    fn ids_that_clients_make_to_be_sampled_are_bounded_and_random_ones_are_not() {
        let sampled = |share: f64, connections: usize, mut id: Box<dyn FnMut() -> u64>| {
            let (sampling, mut allowance) = (Sampling::of(share), Allowance::default());
            let mut counts = (0, 0);
            for _ in 0..connections {
                allowance.counted(sampling);
                let trace = TraceId((1 << 64 | u128::from(id())).to_be_bytes());
                if sampling.span(None, Some(trace), numbers()).is_some() {
                    counts.0 += 1;
                    counts.1 += usize::from(allowance.take());
                }
            }
            counts
        };
        let made = || Box::new(|| 1);
        assert_eq!(sampled(0.01, 10_000, made()), (10_000, 64 + 199));
        assert_eq!(sampled(1.0, 10_000, made()), (10_000, 10_000), "all are to be sampled");
        let mut state = 7_u64;
        let random = move || {
            // SplitMix64.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ mixed >> 31
        };
        for share in [0.001, 0.01, 0.3] {
            let (chosen, taken) = sampled(share, 200_000, Box::new(random));
            assert!(chosen > 100 && taken == chosen, "{share}: {taken} of {chosen}");
        }
    }

    #[test]
    fn without_a_caller_a_trace_begins() {
        let root = Sampling::of(1.0).span(None, None, numbers()).expect("all are chosen");
        assert_eq!(root.trace, TraceId((1 << 64 | 2_u128).to_be_bytes()));
        assert_eq!((root.id, root.parent), (SpanId(3_u64.to_be_bytes()), None));
        assert_eq!(Sampling::of(0.0).span(None, None, numbers()), None);
        let zeroes = Sampling::of(1.0).span(None, None, || 0).expect("all are chosen");
        assert!(zeroes.trace.0 != [0; 16] && zeroes.id.0 != [0; 8]);
    }

    #[test]
    fn a_trace_that_begins_with_a_hello_has_its_id_on_every_gateway() {
        let mut random = [1; 32];
        random[31] = 9;
        let hello = TraceId::of_hello(&random).expect("not all zeroes");
        assert_eq!(hello.to_string(), format!("{}09", "01".repeat(15)));
        for first in [3, 77] {
            let mut next = first;
            let ids = || std::mem::replace(&mut next, first + 1);
            let span = Sampling::of(1.0).span(None, Some(hello), ids).expect("all are chosen");
            assert_eq!((span.trace, span.id, span.parent), (hello, SpanId(u64::to_be_bytes(first)), None));
        }
        let caller = TraceParent { trace: TraceId([5; 16]), span: SpanId([6; 8]), sampled: true };
        let span =
            Sampling::of(0.0).span(Some(caller), Some(hello), numbers()).expect("the caller has chosen");
        assert_eq!((span.trace, span.parent), (caller.trace, Some(caller.span)));
        assert_eq!(TraceId::of_hello(&[[7; 16], [0; 16]].concat()), None, "an id is not all zeroes");
        assert_eq!(TraceId::of_hello(&[7; 15]), None);
    }

    #[test]
    fn a_trace_id_is_read_as_it_is_written() {
        let text = "4bf92f3577b34da6a3ce929d0e0e4736";
        assert_eq!(TraceId::parse(text).map(|trace| trace.to_string()).as_deref(), Some(text));
        assert_eq!(TraceId::parse(&text.to_uppercase()), TraceId::parse(text));
        for bad in ["", &text[1..], &format!("{text}0"), &"0".repeat(32), &text.replace('b', "g")] {
            assert_eq!(TraceId::parse(bad), None, "{bad}");
        }
    }

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
