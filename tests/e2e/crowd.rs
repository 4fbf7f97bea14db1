//! Clients that never send a whole hello do not disturb honest ones. `cargo bench --bench crowd` runs this at full scale.

use crate::support::crowd::{Scene, play};
use crate::support::skip;

#[test]
fn a_crowd_of_one_source_ends_with_its_reasons_and_keeps_no_honest_source_out() {
    const EACH: usize = 800;
    const PLACES: usize = 1_000;
    let scene = Scene { silent: EACH, dripping: EACH, hello_timeout: 10, pending_hellos: Some(PLACES) };
    let seen = match play(scene) {
        Ok(seen) => seen,
        Err(why) => return skip(&format!("crowd: {why}")),
    };
    eprintln!("{seen:#?}");
    assert_eq!(seen.at_deadline + seen.evicted, 2 * EACH, "{seen:?}");
    assert!(seen.at_deadline > 0 && seen.evicted >= 2 * EACH - PLACES, "{seen:?}");
    assert_eq!((seen.otherwise, seen.honest_refused), (0, 0), "{seen:?}");
    assert!(seen.beside.calls > 100, "{seen:?}");
    // An entry in the table of incomplete hellos takes less than 2.7 KB; the rest is overhead of the debug build and the
    // allocator.
    let growth = seen.peak.saturating_sub(seen.before);
    assert!(growth < 16 << 20, "{growth} bytes for at most {PLACES} incomplete hellos: {seen:?}");
}
