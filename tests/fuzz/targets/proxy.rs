//! PROXY headers: the verdict does not depend on how the bytes are cut, and a written header is read back unchanged.

use isthmus::wire::proxy_protocol::read::{Header, Verdict, read};
use isthmus::wire::proxy_protocol::write;

use super::random_of;

/// The length of the longest input whose prefixes are all tried, in bytes. Of a longer input, only some random prefixes are
/// tried.
const PREFIXES_MAX: usize = 256;

pub(super) fn run(data: &[u8]) {
    let whole = read(data);
    let mut random = random_of(data);
    let prefixes: Vec<usize> = match data.len() {
        0..=PREFIXES_MAX => (0..data.len()).collect(),
        length => (0..16).map(|_| random.below(length)).collect(),
    };
    for end in prefixes {
        match read(&data[..end]) {
            Verdict::NeedMore => {}
            decided => assert_eq!(decided, whole, "decided after {end} bytes, and changed by what follows"),
        }
    }
    let Verdict::Whole { header, length } = whole else { return };
    assert!(length <= data.len(), "a header of {length} in {} bytes", data.len());
    let Header::Proxied(announced) = header else { return };
    for written in [write::v1(&announced), write::v2(&announced, Some("a.example"), "id")] {
        let again = read(&written);
        let Verdict::Whole { header: Header::Proxied(again), length } = again else {
            panic!("{announced:?} is written as {written:?}, which is read as {again:?}")
        };
        assert_eq!((again, length), (announced, written.len()));
    }
}
