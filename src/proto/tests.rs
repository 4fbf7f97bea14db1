//! The outlines of the generated messages.

use std::fmt::Debug;

use isthmus_wire::outline::{Outlined, Refusal, decode};
use proptest::prelude::*;
use prost::Message;

use crate::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest};
use crate::etcdserverpb::{RangeResponse, WatchResponse};
use crate::isthmus::peer::v1 as peer;
use crate::istio::security::Authorization;
use crate::istio::workload::Address;
use crate::{X509svid, X509svidResponse};

/// More bytes than the memory that is free for any message would allow, if each had an empty item.
const BOMB: usize = 1 << 20;

/// Returns the encoded field of this number and content.
fn field(number: u8, content: &[u8]) -> Vec<u8> {
    let mut encoded = vec![number << 3 | 2];
    prost::encoding::encode_varint(content.len() as u64, &mut encoded);
    encoded.extend_from_slice(content);
    encoded
}

fn refusal<M: Outlined + Debug>(message: &[u8]) -> Refusal {
    decode::<M>(message, usize::MAX).expect_err("refused")
}

#[test]
fn no_door_takes_a_message_of_empty_items() {
    let empty = |number: u8| field(number, &[]).repeat(BOMB);
    let within = |numbers: &[u8]| {
        let (last, outer) = numbers.split_last().expect("a number");
        outer.iter().rev().fold(empty(*last), |message, number| field(*number, &message))
    };
    let numbers = vec![1; 2 * BOMB];
    for (what, refusal) in [
        ("names", refusal::<DeltaDiscoveryRequest>(&empty(3))),
        ("names of less", refusal::<DeltaDiscoveryRequest>(&empty(4))),
        ("versions", refusal::<DeltaDiscoveryRequest>(&empty(5))),
        ("features of a node", refusal::<DeltaDiscoveryRequest>(&within(&[1, 10]))),
        ("details of an error", refusal::<DeltaDiscoveryRequest>(&within(&[7, 3]))),
        ("all names", refusal::<DiscoveryRequest>(&empty(3))),
        ("resources", refusal::<DeltaDiscoveryResponse>(&empty(2))),
        ("aliases", refusal::<DeltaDiscoveryResponse>(&within(&[2, 4]))),
        ("removed names", refusal::<DeltaDiscoveryResponse>(&empty(6))),
        ("errors", refusal::<DeltaDiscoveryResponse>(&empty(9))),
        ("addresses of a workload", refusal::<Address>(&within(&[1, 3]))),
        ("rules", refusal::<Authorization>(&empty(5))),
        ("clauses, matches, names", refusal::<Authorization>(&within(&[5, 1, 2, 1]))),
        ("ports of a match", refusal::<Authorization>(&field(5, &field(1, &field(2, &field(9, &numbers)))))),
        ("keys", refusal::<RangeResponse>(&empty(2))),
        ("events", refusal::<WatchResponse>(&empty(11))),
        ("certificates", refusal::<X509svidResponse>(&empty(1))),
        ("bundles", refusal::<X509svidResponse>(&empty(3))),
        ("addresses of a party", refusal::<peer::EnrolRequest>(&within(&[2, 3]))),
    ] {
        assert!(matches!(refusal, Refusal::Memory(..)), "{what}: {refusal}");
    }
}

#[test]
fn metadata_of_a_node_is_bounded_in_number_and_depth() {
    let node = |metadata: &[u8]| field(1, &field(3, metadata));
    let entry = |value: &[u8]| field(1, &[field(1, b"k"), field(2, value)].concat());
    let list = |count: usize| entry(&field(6, &field(1, &[8, 0]).repeat(count)));
    let read = |metadata: &[u8]| decode::<DeltaDiscoveryRequest>(&*node(metadata), usize::MAX).map(drop);
    assert_eq!(read(&entry(&[]).repeat(256)), Ok(()));
    assert_eq!(read(&entry(&[]).repeat(257)), Err(Refusal::Metadata(257, 256)));
    assert_eq!(read(&list(4_095)), Ok(()));
    assert_eq!(read(&list(4_096)), Err(Refusal::NestedMetadata(4_097, 4_096)));
    let nested = |levels: usize| (0..levels).fold(entry(&[]), |inner, _| entry(&field(5, &inner)));
    assert_eq!(read(&nested(20)), Ok(()));
    assert_eq!(read(&nested(21)), Err(Refusal::Nesting));
}

#[test]
fn requests_with_short_names_and_responses_with_small_resources_are_taken() {
    let names = |count: usize, length: usize| -> Vec<String> {
        (0..count).map(|number| format!("{number:0length$}")).collect()
    };
    let request = DeltaDiscoveryRequest {
        resource_names_subscribe: names(400_000, 10),
        initial_resource_versions: names(100_000, 16).into_iter().map(|name| (name, String::new())).collect(),
        ..DeltaDiscoveryRequest::default()
    };
    assert_eq!(decode(&*request.encode_to_vec(), 1 << 19).as_ref(), Ok(&request));
    let resource = |name: String| crate::envoy::service::discovery::v3::Resource {
        name,
        resource: Some(prost_types::Any {
            type_url: "type.googleapis.com/istio.workload.Address".to_owned(),
            value: Vec::new(),
        }),
        ..Default::default()
    };
    let resources = names(50_000, 10).into_iter().map(resource).collect();
    let response = DeltaDiscoveryResponse { resources, ..DeltaDiscoveryResponse::default() };
    assert_eq!(decode(&*response.encode_to_vec(), 1 << 19).as_ref(), Ok(&response));
}

/// Panics if the outline refuses a message without need.
fn check<M: Outlined + PartialEq + Debug>(bytes: &[u8]) {
    match (M::decode(bytes), decode::<M>(bytes, usize::MAX)) {
        (Ok(one), Ok(other)) => assert_eq!(one, other),
        (Ok(_), Err(Refusal::Metadata(..) | Refusal::NestedMetadata(..) | Refusal::Nesting)) => {}
        (Ok(_), Err(refusal)) => panic!("{refusal}: {bytes:?}"),
        (Err(_), outlined) => assert!(outlined.is_err()),
    }
}

proptest! {
    #[test]
    fn all_that_decodes_is_taken_within_the_limits(
        bytes in proptest::collection::vec(any::<u8>(), 0..256),
        names in proptest::collection::vec(".{0,9}", 0..9),
        cut in 0_usize..64,
    ) {
        let svid = |name: &String| X509svid { spiffe_id: name.clone(), ..X509svid::default() };
        let request = DeltaDiscoveryRequest { resource_names_subscribe: names.clone(), ..Default::default() };
        let response = X509svidResponse { svids: names.iter().map(svid).collect(), ..Default::default() };
        for message in [request.encode_to_vec(), response.encode_to_vec(), bytes] {
            for part in [&message[..], &message[..cut.min(message.len())]] {
                check::<DeltaDiscoveryRequest>(part);
                check::<DeltaDiscoveryResponse>(part);
                check::<Address>(part);
                check::<Authorization>(part);
                check::<WatchResponse>(part);
                check::<X509svidResponse>(part);
                check::<peer::Message>(part);
            }
        }
    }
}
