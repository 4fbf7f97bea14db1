//! The document of a planned drain: an order, a value in etcd, an annotation, or a line of the state folder. What is accepted is the
//! same after it was kept, and empties its target in steps; a refusal says where.

use std::path::Path;

use isthmus::aggregator::drain_orders::{LINE_BYTES_MAX, line};
use isthmus::document::drains::read;
use isthmus::model::drain::{DrainTarget, PARTS};

use super::{check_problems, random_of};

pub(super) fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let drain = match read(Path::new("drain"), &text) {
        Ok(drain) => drain,
        Err(problems) => return check_problems(&problems, &text),
    };
    let target = &drain.target;
    assert_eq!(DrainTarget::parse(target.kind(), &target.name()).as_ref(), Ok(target));
    let line = line(&drain);
    assert!(!line.contains('\n') && (line.len() as u64) < LINE_BYTES_MAX, "{line:?}");
    assert_eq!(read(Path::new("drain"), &line).as_ref(), Ok(&drain), "{line}");
    let mut random = random_of(data);
    let mut times: Vec<u64> = (0..16).map(|_| random.number() >> random.below(64)).collect();
    times.extend([drain.since, drain.ramp_ends(), u64::MAX]);
    times.sort_unstable();
    let mut before = Some(PARTS);
    for now in times {
        let left = drain.parts_left(now);
        match (before, left) {
            (Some(before), Some(left)) => assert!(left <= before, "{left} after {before} at {now}"),
            (None, left) => assert_eq!(left, None, "a drain begins again at {now}"),
            (Some(_), None) => assert!(drain.until.is_some_and(|until| until <= now)),
        }
        before = left;
    }
}
