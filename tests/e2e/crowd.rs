//! Clients that never send a whole hello, beside honest ones. The full scale is `cargo bench --bench crowd`.

use crate::support::crowd::{Scene, play};
use crate::support::skip;

#[test]
fn a_crowd_of_one_source_ends_with_its_reasons_and_keeps_no_honest_source_out() {
    const EACH: usize = 800;
    const PLACES: usize = 1_000;
    let scene = Scene { silent: EACH, dripping: EACH, hello_timeout: 4, pending_hellos: Some(PLACES) };
    let seen = match play(scene) {
        Ok(seen) => seen,
        Err(why) => return skip(&format!("crowd: {why}")),
    };
    eprintln!("{seen:#?}");
    assert_eq!(seen.at_deadline + seen.evicted, 2 * EACH, "{seen:?}");
    assert!(seen.at_deadline > 0 && seen.evicted >= 2 * EACH - PLACES, "{seen:?}");
    assert_eq!((seen.otherwise, seen.honest_refused), (0, 0), "{seen:?}");
    assert!(seen.beside.calls > 100, "{seen:?}");
    // A place of the table of incomplete hellos takes less than 2.7 KB; the rest is the tests' build and the allocator.
    let growth = seen.peak.saturating_sub(seen.before);
    assert!(growth < 16 << 20, "{growth} bytes for at most {PLACES} incomplete hellos: {seen:?}");
}
