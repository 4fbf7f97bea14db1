//! The meters of HTTP/2 frames and of TLS records: the counts do not depend on how the bytes are cut.

use isthmus::wire::frames::FrameMeter;
use isthmus::wire::records::{RecordMeter, Records};

use super::random_of;

pub(super) fn run(data: &[u8]) {
    let ends = random_of(data).cuts(data.len());
    let pieces = || {
        let begins = std::iter::once(0).chain(ends.iter().copied());
        begins.zip(ends.iter().copied()).map(|(begin, end)| &data[begin..end])
    };

    let mut whole = FrameMeter::default();
    let frames = whole.feed(data, |_| ());
    let mut cut = FrameMeter::default();
    let sum: usize = pieces().map(|piece| cut.feed(piece, |_| ())).sum();
    assert_eq!((sum, cut.counts), (frames, whole.counts), "cut at {ends:?}");
    assert!(frames <= data.len() / 9, "{frames} frames in {} bytes", data.len());

    let whole = RecordMeter::default().feed(data);
    let mut cut = RecordMeter::default();
    let sum = pieces().map(|piece| cut.feed(piece)).fold(Records::default(), |sum, records| Records {
        all: sum.all + records.all,
        tiny: sum.tiny + records.tiny,
    });
    assert_eq!(sum, whole, "cut at {ends:?}");
    assert!(whole.tiny <= whole.all, "{whole:?}");
}
