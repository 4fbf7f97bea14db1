//! Reads the outline of an encoded service of a peer. Its limits are checked before it is decoded.

use isthmus_wire::outline::{Refusal, fields_of};

/// The largest number of items in one message of a link.
pub(super) const ITEMS_MAX: usize = 4_096;

/// The numbers of fields of `Service` and `Group`.
const NAME_OF_SERVICE: u64 = 1;
const PORTS_OF_SERVICE: u64 = 4;
const GROUPS_OF_SERVICE: u64 = 5;
const PORTS_OF_GROUP: u64 = 6;

/// The bytes that a service, a port, a group of endpoints and a port of a group take in memory, beside those of their texts.
/// A group may have two endpoints: those that are ready, and those that are not. With them, 100 services of 256 ports and 1,024 groups on
/// different networks are estimated at 47 MiB; measured were 40 MiB where all are ready.
const SERVICE_BYTES: usize = 1_024;
const PORT_BYTES: usize = 64;
const GROUP_BYTES: usize = 416;
const PORT_OF_GROUP_BYTES: usize = 16;

/// The outline of an encoded [`Service`](isthmus_proto::isthmus::peer::v1::Service).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Outline<'a> {
    /// The exported name.
    pub(super) name: &'a str,
    pub(super) ports: usize,
    pub(super) groups: usize,
    /// The largest number of ports of a group.
    pub(super) ports_of_group: usize,
    /// The estimated size of the service in memory, in bytes.
    pub(super) bytes_held: usize,
}

impl<'a> Outline<'a> {
    pub(super) fn of(record: &'a [u8]) -> Result<Self, Refusal> {
        let mut outline = Self { name: "", ports: 0, groups: 0, ports_of_group: 0, bytes_held: 0 };
        let mut ports_of_groups = 0;
        for field in fields_of(record) {
            match field? {
                // If a field occurs again, the last value counts.
                (NAME_OF_SERVICE, name) => {
                    outline.name = str::from_utf8(name).map_err(|_| Refusal::Malformed)?
                }
                (PORTS_OF_SERVICE, _) => outline.ports += 1,
                (GROUPS_OF_SERVICE, group) => {
                    outline.groups += 1;
                    let mut ports = 0;
                    for field in fields_of(group) {
                        ports += usize::from(field?.0 == PORTS_OF_GROUP);
                    }
                    ports_of_groups += ports;
                    outline.ports_of_group = outline.ports_of_group.max(ports);
                }
                _ => {}
            }
        }
        outline.bytes_held = SERVICE_BYTES
            + record.len()
            + outline.ports * PORT_BYTES
            + outline.groups * GROUP_BYTES
            + ports_of_groups * PORT_OF_GROUP_BYTES;
        Ok(outline)
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use isthmus_proto::isthmus::peer::v1 as proto;

    #[test]
    fn an_outline_shows_the_name_and_the_numbers() {
        let group = |ports: usize| proto::Group {
            network: "n".to_owned(),
            weight: 300,
            ports: vec!["p".to_owned(); ports],
            ..proto::Group::default()
        };
        let service = proto::Service {
            name: "a.west.global".to_owned(),
            exported_at: u64::MAX,
            ports: vec![proto::Port::default(); 2],
            groups: vec![group(1), group(3)],
            ..proto::Service::default()
        };
        let record = service.encode_to_vec();
        let outline = Outline::of(&record).expect("well formed");
        assert_eq!(
            (outline.name, outline.ports, outline.groups, outline.ports_of_group),
            ("a.west.global", 2, 2, 3)
        );
        let bytes = SERVICE_BYTES + record.len() + 2 * PORT_BYTES + 2 * GROUP_BYTES + 4 * PORT_OF_GROUP_BYTES;
        assert_eq!(outline.bytes_held, bytes);
        for cut in 1..record.len() {
            // Where the cut is between two fields, the rest is well formed.
            let _ = Outline::of(&record[..cut]);
        }
        assert_eq!(Outline::of(&record[..record.len() - 1]), Err(Refusal::Malformed));
        // A group, a field longer than the message, a number without end, and a name that is not UTF-8.
        for malformed in [&[0x0b][..], &[0x2a, 9, 1], &[0x08, 0xff], &[0xff; 12], &[0x0a, 1, 0xff]] {
            assert_eq!(Outline::of(malformed), Err(Refusal::Malformed), "{malformed:?}");
        }
    }
}
