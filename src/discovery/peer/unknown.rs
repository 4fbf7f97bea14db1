//! Connections of peers whose other end is not known yet: bounded, for all sources together and for each.

use std::net::IpAddr;
use std::sync::Arc;

use crate::model::limits::SourceLimits;
use crate::net::admission::{Admission, Holder, Verdict};

/// Connections whose other end is not known yet, of all sources and of one.
const UNKNOWN_MAX: usize = 256;
const UNKNOWN_OF_SOURCE_MAX: usize = 16;

/// A connection among those whose other end is not known yet, until it is dropped.
pub(super) struct Place {
    among: Arc<Admission>,
    holder: Holder,
}

impl Place {
    /// Takes a place for a source, unless it is refused.
    pub(super) fn take(among: &Arc<Admission>, source: IpAddr) -> Option<Self> {
        let holder = among.source(source);
        match among.admit(&holder) {
            // No other connection has to end: each is known or gone within its deadline, and few may be above the limit.
            Verdict::Admit | Verdict::AdmitAndTakeBack(_) => Some(Self { among: among.clone(), holder }),
            Verdict::Refuse(_) => None,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Nothing is remembered of a source: new connections are not limited by time.
        let _ = self.among.release(&self.holder);
    }
}

/// Returns the places for connections whose other end is not known yet.
pub(super) fn unknown() -> Arc<Admission> {
    let admission = Admission::new(UNKNOWN_MAX);
    admission.set_source_limits(&SourceLimits {
        connections: Some(UNKNOWN_OF_SOURCE_MAX),
        ..SourceLimits::default()
    });
    Arc::new(admission)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_keeps_no_other_from_opening_a_link() {
        let unknown = unknown();
        let source = |number: u8| IpAddr::from([203, 0, 113, number]);
        let mut places: Vec<Place> = (0..100).filter_map(|_| Place::take(&unknown, source(1))).collect();
        assert_eq!(places.len(), UNKNOWN_OF_SOURCE_MAX);
        let other = Place::take(&unknown, source(2)).expect("another source");
        places.pop();
        assert!(Place::take(&unknown, source(1)).is_some(), "a place that is given back can be taken again");
        drop((places, other));
        assert_eq!((unknown.holders(), unknown.used()), (0, 0), "nothing is remembered of who has gone");
        let many: Vec<Place> = (0..=255)
            .filter_map(|number| Place::take(&unknown, IpAddr::from([198, 51, 100, number])))
            .collect();
        assert_eq!((many.len(), Place::take(&unknown, source(1)).is_none()), (UNKNOWN_MAX, true));
    }
}
