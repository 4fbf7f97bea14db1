#!/usr/bin/env python3
"""Compares a FileDescriptorSet with the official descriptors of xDS, of who certifies us, and of etcd, field by field.

    descriptors.py FILE

Every message, field, oneof, enum and value in FILE must be in the official file of the same path, under the same name,
number and type; what the official ones have beyond it is no difference. Prints each difference and what was compared,
and ends with 1 if there was one, or if so little was compared that it proves nothing. Needs what xds.txt, identity.txt
and etcd.txt pin.
"""

import importlib
import sys
from collections import Counter

import official
from google.protobuf import descriptor_pb2

# Where the official ones are under another path, and what has to be compiled first.
MODULES = {
    "spiffe/workload.proto": "spiffe._proto.workload_pb2",
    "etcd/api/etcdserverpb/rpc.proto": "aetcd.rpc.rpc_pb2",
    "etcd/api/mvccpb/kv.proto": "aetcd.rpc.kv_pb2",
}
COMPILED = ["security.v1alpha1.ca_pb2"]

# Just below what proto/ has, so that an empty set does not pass.
LEAST = {"messages": 55, "fields": 145, "values of enums": 33}

Field = descriptor_pb2.FieldDescriptorProto


def main(path):
    ours = descriptor_pb2.FileDescriptorSet()
    with open(path, "rb") as file:
        ours.ParseFromString(file.read())
    comparison = Comparison()
    for file in ours.file:
        # The imports are the protobuf library's own, in ours as in the official ones; what is below isthmus/ is our own, and no
        # package has what is below istio/.
        if not file.name.startswith(("google/protobuf/", "isthmus/", "istio/")):
            comparison.file(file)
    for difference in comparison.differences:
        print(f"DIFFERENT: {difference}")
    counts = comparison.counts
    print("compared: " + ", ".join(f"{counts[what]} {what}" for what in ("files", *LEAST)))
    too_few = [what for what, least in LEAST.items() if counts[what] < least]
    for what in too_few:
        print(f"TOO FEW: {counts[what]} {what}, where there should be {LEAST[what]} at least")
    return 1 if comparison.differences or too_few else 0


class Comparison:
    def __init__(self):
        self.differences = []
        self.counts = Counter()

    def same(self, where, what, ours, official):
        if ours != official:
            self.differences.append(f"{where}: {what} is {ours!r}, officially {official!r}")

    def pairs(self, where, what, ours, official):
        """Those of ours, each with the official one of its name; the others are differences."""
        by_name = {item.name: item for item in official}
        for item in ours:
            if item.name in by_name:
                self.counts[what] += 1
                yield f"{where}.{item.name}", item, by_name[item.name]
            else:
                self.differences.append(f"{where}.{item.name}: not among the official {what}")

    def file(self, ours):
        usual = ours.name.removesuffix(".proto").replace("/", ".") + "_pb2"
        name = MODULES.get(ours.name, usual)
        try:
            module = official.module(name) if name in COMPILED else importlib.import_module(name)
        except ImportError as error:
            self.differences.append(f"{ours.name}: no such official file ({error})")
            return
        theirs = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(theirs)
        self.counts["files"] += 1
        self.same(ours.name, "the package", ours.package, theirs.package)
        self.same(ours.name, "the syntax", ours.syntax, theirs.syntax)
        for pair in self.pairs(ours.package, "messages", ours.message_type, theirs.message_type):
            self.message(*pair)
        self.enums(ours.package, ours.enum_type, theirs.enum_type)

    def message(self, where, ours, official):
        self.same(where, "being the entry of a map", ours.options.map_entry, official.options.map_entry)
        for name, field, its_official in self.pairs(where, "fields", ours.field, official.field):
            self.same(name, "the number", field.number, its_official.number)
            self.same(name, "the type", Field.Type.Name(field.type), Field.Type.Name(its_official.type))
            self.same(name, "the type", field.type_name, its_official.type_name)
            self.same(name, "the label", Field.Label.Name(field.label), Field.Label.Name(its_official.label))
            self.same(name, "the oneof", oneof(ours, field), oneof(official, its_official))
            self.same(name, "being optional", field.proto3_optional, its_official.proto3_optional)
            self.same(name, "being packed", packed(field), packed(its_official))
        for _ in self.pairs(where, "oneofs", ours.oneof_decl, official.oneof_decl):
            pass
        for pair in self.pairs(where, "messages", ours.nested_type, official.nested_type):
            self.message(*pair)
        self.enums(where, ours.enum_type, official.enum_type)

    def enums(self, where, ours, official):
        for name, enum, its_official in self.pairs(where, "enums", ours, official):
            for value, our_value, its_value in self.pairs(name, "values of enums", enum.value, its_official.value):
                self.same(value, "the number", our_value.number, its_value.number)


def oneof(message, field):
    return message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else None


def packed(field):
    return field.options.packed if field.options.HasField("packed") else None


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
