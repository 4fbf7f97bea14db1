//! Limits for connections of peers that are not authenticated yet: for all sources together, and for each source.

use std::net::IpAddr;
use std::sync::Arc;

use isthmus_model::limits::SourceLimits;
use isthmus_net::admission::{Admission, Holder, Verdict};

/// The largest number of unauthenticated connections of all sources.
const UNKNOWN_MAX: usize = 256;
/// The largest number of unauthenticated connections of one source.
const UNKNOWN_OF_SOURCE_MAX: usize = 16;

/// The entry of an unauthenticated connection in the limits, until it is dropped.
pub(super) struct Place {
    among: Arc<Admission>,
    holder: Holder,
}

impl Place {
    /// Adds a connection of this source to the limits; `None` if a limit refuses it.
    pub(super) fn take(among: &Arc<Admission>, source: IpAddr) -> Option<Self> {
        let holder = among.source(source);
        match among.admit(&holder) {
            // The admission may ask to end another connection in return. No connection is ended: each one is authenticated or
            // closed within its deadline, so the limit is exceeded by a few connections and for a short time.
            Verdict::Admit | Verdict::AdmitAndTakeBack(_) => Some(Self { among: among.clone(), holder }),
            Verdict::Refuse(_) => None,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // The result is ignored: the rate of new connections is not limited, so nothing has to be forgotten later.
        let _ = self.among.release(&self.holder);
    }
}

/// Returns the limits for unauthenticated connections.
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
