//! Compares the protobuf messages of the gateway with the official definitions. `tests/interop/descriptors.py` makes the
//! comparison.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use isthmus::proto::DESCRIPTORS;
use prost::Message;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet};

use crate::support::{python, skip};

#[test]
fn the_messages_are_the_official_ones_field_by_field() {
    let Some(python) = python() else {
        return;
    };
    let (same, report) = compare(&python, DESCRIPTORS);
    eprint!("{report}");
    assert!(same, "{report}");
}

/// The test above proves something only because the comparison finds every kind of difference.
#[test]
fn every_kind_of_difference_from_the_official_messages_is_reported() {
    let Some(python) = python() else {
        return;
    };
    let cases: [(Alteration, &str); 12] = [
        (|set| field(set).number = Some(16), "Node.user_agent_version: the number is 16, officially 7"),
        (|set| field(set).name = Some("agent".into()), "Node.agent: not among the official fields"),
        (|set| field(set).set_type(Type::Bytes), "the type is 'TYPE_BYTES', officially 'TYPE_STRING'"),
        (|set| field(set).set_label(Label::Repeated), "officially 'LABEL_OPTIONAL'"),
        (|set| field(set).oneof_index = None, "the oneof is None, officially 'user_agent_version_type'"),
        (
            |set| node(set).field[3].type_name = Some(".envoy.config.core.v3.Metadata".into()),
            "Node.locality: the type is '.envoy.config.core.v3.Metadata', officially",
        ),
        (
            |set| node(set).oneof_decl[0].name = Some("agent".into()),
            "Node.agent: not among the official oneofs",
        ),
        (|set| node(set).name = Some("Client".into()), "v3.Client: not among the official messages"),
        (
            |set| file(set, HEALTH).enum_type[0].value[3].number = Some(9),
            "DRAINING: the number is 9, officially 3",
        ),
        (
            |set| file(set, BASE).package = Some("envoy.core".into()),
            "the package is 'envoy.core', officially",
        ),
        (
            |set| file(set, BASE).name = Some("envoy/none.proto".into()),
            "envoy/none.proto: no such official file",
        ),
        (|set| set.file.clear(), "TOO FEW: 0 fields"),
    ];
    for (alter, expected) in cases {
        let mut set = FileDescriptorSet::decode(DESCRIPTORS).expect("descriptors");
        alter(&mut set);
        let (same, report) = compare(&python, &set.encode_to_vec());
        assert!(!same && report.contains(expected), "no {expected:?} in {report}");
    }
}

type Alteration = fn(&mut FileDescriptorSet);

const BASE: &str = "envoy/config/core/v3/base.proto";
const HEALTH: &str = "envoy/config/core/v3/health_check.proto";

fn file<'a>(set: &'a mut FileDescriptorSet, name: &str) -> &'a mut FileDescriptorProto {
    set.file.iter_mut().find(|file| file.name() == name).expect("the file")
}

fn node(set: &mut FileDescriptorSet) -> &mut DescriptorProto {
    file(set, BASE).message_type.iter_mut().find(|message| message.name() == "Node").expect("Node")
}

/// Returns a field that belongs to a oneof.
fn field(set: &mut FileDescriptorSet) -> &mut FieldDescriptorProto {
    node(set).field.iter_mut().find(|field| field.name() == "user_agent_version").expect("the field")
}

fn python() -> Option<OsString> {
    let python = python::with_official_messages();
    if python.is_none() {
        skip("interop: there are no official messages (tests/run installs them)");
    }
    python
}

/// Returns true if the script finds the descriptors equal to the official ones, and its output.
fn compare(python: &OsString, descriptors: &[u8]) -> (bool, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("descriptors.bin");
    std::fs::write(&path, descriptors).expect("written");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop/descriptors.py");
    let output = Command::new(python).arg(script).arg(path).output().expect("Python starts");
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}
