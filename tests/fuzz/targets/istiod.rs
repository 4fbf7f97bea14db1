//! The responses of an istiod: each a byte, a length in two bytes and a message. The lowest bit of the byte chooses the type of the
//! resources, the next one whether the response is a listing.

use std::collections::BTreeMap;

use isthmus::istiod::reading::{Applied, Reading, Wanted};
use isthmus::model::place::{ClusterId, Network};
use isthmus::proto::envoy::service::discovery::v3::DeltaDiscoveryResponse;
use isthmus::registry::change::Change;
use isthmus::wire::outline::decode;

/// The largest number of items in a response of this target.
const ITEMS_MAX: usize = 4_096;
/// The largest number of mistakes that an answer names, with the number of the others, and the longest text of one.
const MISTAKES_MAX: usize = 11;
const MISTAKE_BYTES_MAX: usize = 4_096;

/// The items of a registry, as its changes say, by key.
type Items = BTreeMap<String, String>;

pub(super) fn run(data: &[u8]) {
    let wanted = Wanted {
        network: Network::new("east"),
        cluster: ClusterId::new("c1"),
        ambient: true,
        ..Wanted::default()
    };
    let mut reading = Reading::new(wanted);
    let mut items = Items::new();
    let mut rest = data;
    while let [kind, high, low, more @ ..] = rest {
        let length = usize::from(u16::from_be_bytes([*high, *low])).min(more.len());
        let (message, behind) = more.split_at(length);
        rest = behind;
        let Ok(response) = decode::<DeltaDiscoveryResponse>(message, ITEMS_MAX) else { continue };
        let is_listing = kind & 2 > 0;
        let mut apply = |response: DeltaDiscoveryResponse| match kind & 1 {
            0 => reading.addresses(response, is_listing),
            _ => reading.authorizations(response, is_listing),
        };
        let (first, second) = (apply(response.clone()), apply(response));
        assert_eq!(first.refused, second.refused);
        check(&first);
        fold(&mut items, first.changes);
        let before = items.clone();
        fold(&mut items, second.changes);
        assert_eq!(items, before, "the same response again changes something");
    }
    assert!(reading.versions().len() <= rest.len() + data.len());
}

fn check(applied: &Applied) {
    assert!(applied.refused.len() <= MISTAKES_MAX, "{:?}", applied.refused);
    for mistake in &applied.refused {
        assert!((1..=MISTAKE_BYTES_MAX).contains(&mistake.len()), "{mistake}");
    }
}

/// Applies changes to the items.
fn fold(items: &mut Items, changes: Vec<Change>) {
    for change in changes {
        match change {
            Change::Begin => items.clear(),
            Change::Put(item) => drop(items.insert(format!("{:?}", item.key()), format!("{item:?}"))),
            Change::Remove(key) => {
                assert!(items.remove(&format!("{key:?}")).is_some(), "{key:?} is removed, and was not there");
            }
            Change::Complete => {}
            other => panic!("{other:?}"),
        }
    }
}
