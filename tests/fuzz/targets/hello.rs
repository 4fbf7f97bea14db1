//! The ClientHello scanner: its verdict depends neither on how the bytes are cut nor on the bytes after the hello.

use super::random_of;
use crate::judge::{Judged, judge, judge_pieces};

const CUTS: usize = 4;
/// The largest input that is also fed byte by byte, which takes quadratic time.
const DRIPPED_MAX: usize = 512;

pub(super) fn run(data: &[u8]) {
    let mut random = random_of(data);
    let whole = judge(data);
    for _ in 0..CUTS {
        let ends = random.cuts(data.len());
        assert_eq!(judge_pieces(data, ends.iter().copied()).0, whole, "cut at {ends:?}");
    }
    if data.len() <= DRIPPED_MAX {
        let (dripped, decided_at) = judge_pieces(data, 1..=data.len());
        assert_eq!(dripped, whole, "byte by byte");
        if !matches!(whole, Judged::Incomplete | Judged::Nothing) {
            assert_eq!(
                judge(&data[..decided_at]),
                whole,
                "decided at {decided_at}, and changed by what follows"
            );
        }
    }
    if let Judged::Admit { name, length, .. } = &whole {
        assert!(*length <= data.len(), "a hello of {length} in {} bytes", data.len());
        assert!(
            !name.is_empty() && name.len() <= 253 && !name.bytes().any(|byte| byte.is_ascii_uppercase()),
            "{name:?}"
        );
    }
}
