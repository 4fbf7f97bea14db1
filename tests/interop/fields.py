#!/usr/bin/env python3
"""Takes all that a control plane sends to a ztunnel or to an Envoy beside an application, as JSON.

    fields.py ztunnel ADDRESS [ROOTS NAME TOKEN]    addresses and policies (WDS); with TLS if roots are given
    fields.py envoy ADDRESS                         clusters and assignments (xDS)

Every field that is set is written, under its own name; what the messages here do not know, under its number. Values whose
order has no meaning are sorted. The messages of xDS are the official ones; those of WDS, which no package has, are compiled
from proto/istio. Needs what xds.txt and identity.txt pin.
"""

import importlib
import ipaddress
import itertools
import json
import pathlib
import queue
import sys
import tempfile

import grpc
from google.protobuf import any_pb2, descriptor_pool, duration_pb2, json_format, message_factory, struct_pb2
from google.protobuf import unknown_fields, wrappers_pb2
from grpc_tools import protoc

from envoy.config.cluster.v3 import cluster_pb2
from envoy.config.core.v3 import base_pb2
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.extensions.transport_sockets.raw_buffer.v3 import raw_buffer_pb2  # noqa: F401
from envoy.extensions.transport_sockets.tls.v3 import tls_pb2  # noqa: F401
from envoy.extensions.upstreams.http.v3 import http_protocol_options_pb2  # noqa: F401
from envoy.service.discovery.v3 import ads_pb2_grpc, discovery_pb2

PROTOS = pathlib.Path(__file__).parent.parent.parent / "proto"
CDS = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
EDS = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
ADDRESS = "type.googleapis.com/istio.workload.Address"
AUTHORIZATION = "type.googleapis.com/istio.security.Authorization"
PATIENCE = 60

# Repeated fields whose order has no meaning.
SETS = {
    "subject_alt_names", "match_typed_subject_alt_names", "match_subject_alt_names", "authorization_policies",
    "lb_endpoints", "endpoints", "filters",
}


def compiled():
    """The modules of proto/istio, by the name of the type."""
    builtin = pathlib.Path(protoc.__file__).parent / "_proto"
    files = ["istio/workload.proto", "istio/authorization.proto"]
    with tempfile.TemporaryDirectory(prefix="isthmus-fields-") as folder:
        if protoc.main(["protoc", f"-I{PROTOS}", f"-I{builtin}", f"--python_out={folder}", *files]) != 0:
            raise RuntimeError("protoc failed")
        sys.path.insert(0, folder)
        workload = importlib.import_module("istio.workload_pb2")
        authorization = importlib.import_module("istio.authorization_pb2")
        sys.path.remove(folder)
    return {ADDRESS: workload.Address, AUTHORIZATION: authorization.Authorization}


def plain(message):
    """A message as its fields, which JSON can hold."""
    if isinstance(message, any_pb2.Any):
        name = message.type_url.rsplit("/", 1)[-1]
        try:
            kind = message_factory.GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(name))
        except KeyError:
            return {"@type": name, "value": message.value.hex()}
        inner = kind()
        inner.ParseFromString(message.value)
        return {"@type": name, **plain(inner)}
    if isinstance(message, struct_pb2.Struct):
        return json_format.MessageToDict(message)
    if isinstance(message, duration_pb2.Duration):
        return message.ToJsonString()
    if isinstance(message, (wrappers_pb2.UInt32Value, wrappers_pb2.BoolValue, wrappers_pb2.DoubleValue)):
        return message.value
    made = {}
    for field, value in message.ListFields():
        made[field.name] = field_of(field, value)
    for field in unknown_fields.UnknownFieldSet(message):
        made[f"unknown {field.field_number}"] = str(field.data)
    return made


def field_of(field, value):
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of = field.message_type.fields_by_name["value"]
        return {key: one(of, value[key]) for key in sorted(value)}
    if field.is_repeated:
        values = [one(field, each) for each in value]
        return sorted(values, key=json.dumps) if field.name in SETS else values
    return one(field, value)


def one(field, value):
    if field.type == field.TYPE_MESSAGE:
        return plain(value)
    if field.type == field.TYPE_ENUM:
        named = field.enum_type.values_by_number.get(value)
        return named.name if named else value
    if field.type == field.TYPE_BYTES:
        return str(ipaddress.ip_address(value)) if len(value) in (4, 16) else value.hex()
    if field.type == field.TYPE_FLOAT:
        return round(value, 6)
    return value


def by_match(cluster):
    """A cluster, with its sockets by what they match, its limits by priority, and the names of servers in one list."""
    made = plain(cluster)
    sockets = made.pop("transport_socket_matches", [])
    made["sockets"] = {json.dumps(each.get("match", {}), sort_keys=True): with_names(each["transport_socket"]) for each in sockets}
    if "transport_socket" in made:
        made["sockets"]["all"] = with_names(made.pop("transport_socket"))
    thresholds = made.get("circuit_breakers", {}).pop("thresholds", [])
    made["circuit_breakers"] = {each.pop("priority", "DEFAULT"): each for each in thresholds}
    return made


def with_names(socket):
    """A socket, with the names of servers as `KIND: NAME`, whichever of the two fields for them has them."""
    context = socket["typed_config"].get("common_tls_context", {})
    for names in (context.get("combined_validation_context", {}).get("default_validation_context"), context.get("validation_context")):
        if names is None:
            continue
        typed = names.pop("match_typed_subject_alt_names", [])
        kinds = {text for each in typed for text in (f"{kind}: {name}" for kind, name in each["matcher"].items())}
        kinds |= {f"{kind}: {name}" for each in names.pop("match_subject_alt_names", []) for kind, name in each.items()}
        if kinds:
            names["server names"] = sorted(kinds)
    return socket


def by_address(assignment):
    """An assignment, with its endpoints by their addresses; each has the fields of its locality too."""
    made = plain(assignment)
    endpoints = {}
    for locality in made.pop("endpoints", []):
        of_locality = {f"locality: {key}": value for key, value in locality.items() if key != "lb_endpoints"}
        for endpoint in locality.get("lb_endpoints", []):
            address = endpoint["endpoint"].pop("address")
            internal = address.get("envoy_internal_address")
            if internal:
                # The address is in the metadata once more, for the listener that opens the tunnel.
                del endpoint["metadata"]["filter_metadata"]["envoy.filters.listener.original_dst"]
                key, endpoint["through"] = internal["endpoint_id"], internal["server_listener_name"]
            else:
                socket_address = address["socket_address"]
                ip = ipaddress.ip_address(socket_address["address"])
                key = f"[{ip}]:{socket_address['port_value']}" if ip.version == 6 else f"{ip}:{socket_address['port_value']}"
            if not endpoint["endpoint"]:
                del endpoint["endpoint"]
            endpoints[key] = {**endpoint, **of_locality}
    return {**made, "endpoints": endpoints} if endpoints else made


class Stream:
    """An ADS stream, one request and one response at a time."""

    def __init__(self, method, metadata=()):
        self.requests = queue.SimpleQueue()
        self.responses = method(iter(self.requests.get, None), metadata=metadata, timeout=PATIENCE)

    def ask(self, request, wanted):
        """Sends a request and returns the next response of the type."""
        self.requests.put(request)
        for response in self.responses:
            if response.type_url == wanted:
                return response
        raise RuntimeError(f"the stream ended without a response of {wanted}")


def channel(address, roots=None, name=""):
    options = [("grpc.max_receive_message_length", -1)]
    if roots is None:
        return grpc.insecure_channel(address, options)
    credentials = grpc.ssl_channel_credentials(pathlib.Path(roots).read_bytes())
    return grpc.secure_channel(address, credentials, [*options, ("grpc.ssl_target_name_override", name)])


def node(kind, address, name, metadata):
    namespace = metadata["NAMESPACE"]
    made = base_pb2.Node(id=f"{kind}~{address}~{name}.{namespace}~{namespace}.svc.cluster.local")
    made.user_agent_name = "envoy"
    made.metadata.update(metadata)
    return made


def ztunnel(address, roots=None, name="", token=""):
    """What a ztunnel is told: the addresses and the policies by name."""
    metadata = {"NAMESPACE": "istio-system", "NAME": "ztunnel-1", "NODE_NAME": "node-1", "CLUSTER_ID": "east",
                "NETWORK": "net-east"}
    own = node("ztunnel", "1.1.1.1", "ztunnel-1", metadata)
    headers = [("clusterid", "east")]
    if token:
        headers.append(("authorization", f"Bearer {token}"))
    messages = compiled()
    told = {}
    with channel(address, roots, name) as connected:
        method = ads_pb2_grpc.AggregatedDiscoveryServiceStub(connected).DeltaAggregatedResources
        for kind, key in ((ADDRESS, "addresses"), (AUTHORIZATION, "policies")):
            stream = Stream(method, headers)
            response = stream.ask(discovery_pb2.DeltaDiscoveryRequest(node=own, type_url=kind), kind)
            told[key] = {}
            for resource in response.resources:
                message = messages[kind]()
                message.ParseFromString(resource.resource.value)
                told[key][resource.name] = plain(message)
            stream.requests.put(None)
    return told


def envoy(address):
    """What an Envoy beside an application is told: the clusters and assignments of its outbound calls by name."""
    metadata = {"NAMESPACE": "shop", "NAME": "client-1", "CLUSTER_ID": "east", "NETWORK": "net-east",
                "INTERCEPTION_MODE": "REDIRECT", "ISTIO_VERSION": "1.31.0", "MESH_ID": "cluster.local",
                "SERVICE_ACCOUNT": "client", "INSTANCE_IPS": "10.244.9.9", "LABELS": {"app": "client"}}
    own = node("sidecar", "10.244.9.9", "client-1", metadata)
    own.locality.region, own.locality.zone, own.locality.sub_zone = "r1", "z1", "s1"
    told = {"clusters": {}, "assignments": {}}
    with channel(address) as connected:
        stream = Stream(ads_pb2_grpc.AggregatedDiscoveryServiceStub(connected).StreamAggregatedResources)
        response = stream.ask(discovery_pb2.DiscoveryRequest(node=own, type_url=CDS), CDS)
        stream.requests.put(discovery_pb2.DiscoveryRequest(
            type_url=CDS, version_info=response.version_info, response_nonce=response.nonce))
        names = []
        for resource in response.resources:
            message = cluster_pb2.Cluster()
            message.ParseFromString(resource.value)
            if message.name.startswith("outbound|"):
                told["clusters"][message.name] = by_match(message)
                if message.type == cluster_pb2.Cluster.EDS:
                    names.append(message.eds_cluster_config.service_name or message.name)
        request = discovery_pb2.DiscoveryRequest(type_url=EDS, resource_names=names)
        while len(told["assignments"]) < len(names):
            response = stream.ask(request, EDS)
            request = discovery_pb2.DiscoveryRequest(type_url=EDS, resource_names=names,
                                                     version_info=response.version_info,
                                                     response_nonce=response.nonce)
            for resource in response.resources:
                message = endpoint_pb2.ClusterLoadAssignment()
                message.ParseFromString(resource.value)
                told["assignments"][message.cluster_name] = by_address(message)
        stream.requests.put(None)
    return told


def main(arguments):
    takes = {"ztunnel": ztunnel, "envoy": envoy}
    if len(arguments) < 2 or arguments[0] not in takes:
        sys.exit(__doc__)
    print(json.dumps(takes[arguments[0]](*arguments[1:]), sort_keys=True))


if __name__ == "__main__":
    main(sys.argv[1:])
