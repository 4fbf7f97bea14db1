//! The refused streams of each caller within a second, over all its connections with one worker. A caller that reconnects does
//! not begin anew.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use hashbrown::HashMap;

/// The largest number of callers that are counted within a second. Each has proven its identity. The streams of further callers
/// count for their connection alone.
const CALLERS_MAX: usize = 4_096;

/// The numbers of refused streams by the caller's identity.
#[derive(Debug, Default)]
pub(crate) struct StreamRefusals {
    /// The worker's tick in which the streams are counted.
    second: Cell<u32>,
    callers: RefCell<HashMap<Arc<str>, u32>>,
}

impl StreamRefusals {
    /// Counts a refused stream; returns the number of refused streams of the caller in this second.
    pub(super) fn count(&self, identity: Arc<str>, second: u32) -> u32 {
        let mut callers = self.callers.borrow_mut();
        if self.second.replace(second) != second {
            callers.clear();
        }
        if callers.len() >= CALLERS_MAX && !callers.contains_key(&identity) {
            return 0;
        }
        let count = callers.entry(identity).or_default();
        *count = count.saturating_add(1);
        *count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_are_counted_over_their_connections_and_anew_each_second() {
        let refusals = StreamRefusals::default();
        assert_eq!(["a", "b", "a"].map(|who| refusals.count(who.into(), 1)), [1, 1, 2]);
        assert_eq!(refusals.count("a".into(), 2), 1);
        for number in 0..2 * CALLERS_MAX {
            refusals.count(number.to_string().into(), 2);
        }
        assert_eq!(refusals.callers.borrow().len(), CALLERS_MAX);
        assert_eq!(refusals.count("a".into(), 2), 2, "who is known is counted on");
    }
}
