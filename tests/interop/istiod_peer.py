#!/usr/bin/env python3
"""An istiod as a ztunnel sees it: WDS over TLS as `localhost`, told by lines of JSON what it has.

    istiod_peer.py FOLDER       writes FOLDER/tls-roots.pem

Standard input has one object a line, each answered by {"done": true} once it holds:
    serve       whether anybody listens; without it all streams end
    token       the bearer token that is accepted
    put         workloads and services by name, as {"service": {…}} or {"workload": {…}}, with the names of the fields below
    raw         resources by name, as bytes in hex
    remove      names
    policies    all policies: "namespace/name"; null: asked for them, it says nothing
    forget      names that are taken away without a word, as if nobody had been connected
    versions    whether resources have versions
    drop        ends all streams
    bomb        sends so many removed names without a letter
Standard output says {"port": …} first; {"asked": {…}} of each request; {"refused": "…"} of each NACK. It ends with its input.

The messages of xDS are the official ones. Those of WDS are written here by their field numbers, since no package has them.
"""

import concurrent.futures
import hashlib
import json
import pathlib
import queue
import socket
import sys
import threading

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from envoy.service.discovery.v3 import ads_pb2_grpc, discovery_pb2
from identity_peer import PEM, Authority, say, serialization

ADDRESS = "type.googleapis.com/istio.workload.Address"
AUTHORIZATION = "type.googleapis.com/istio.security.Authorization"


def varint(number):
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes(out + bytes([number]))


def field(number, value):
    """A field of a protobuf message: a number, a text, or the bytes of a message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def message(fields, values):
    return b"".join(fields[name](value) for name, value in values.items())


def plain(number):
    return lambda value: field(number, value)


def each(number, convert=lambda value: value):
    return lambda values: b"".join(field(number, convert(value)) for value in values)


def part(number, convert):
    return lambda value: field(number, convert(value))


def network_address(text):
    network, ip = text.split("/")
    return field(1, network) + field(2, socket.inet_aton(ip))


def port(numbers):
    """The port, the target port, and the protocol if it is known."""
    return b"".join(field(1 + at, number) for at, number in enumerate(numbers))


def gateway_address(text):
    return field(2, network_address(text)) + field(3, 15008)


def balancing(choice):
    """The mode, the scopes and the health policy."""
    mode, scopes, health = choice
    return field(1, bytes(scopes)) + field(2, mode) + field(3, health)


def services(ports):
    one = lambda name, numbers: field(1, name) + field(2, b"".join(field(1, port(pair)) for pair in numbers))
    return b"".join(field(22, one(name, numbers)) for name, numbers in ports.items())


SERVICE = {
    "name": plain(1),
    "namespace": plain(2),
    "hostname": plain(3),
    "addresses": each(4, network_address),
    "ports": each(5, port),
    "waypoint": part(7, gateway_address),
    "balancing": part(8, balancing),
    "families": plain(9),
}
WORKLOAD = {
    "uid": plain(20),
    "name": plain(1),
    "namespace": plain(2),
    "addresses": each(3, socket.inet_aton),
    "network": plain(4),
    "tunnel": plain(5),
    "account": plain(7),
    "gateway": part(19, gateway_address),
    "node": plain(9),
    "canonical": plain(10),
    "revision": plain(11),
    "kind": plain(12),
    "owner": plain(13),
    "services": services,
    "policies": each(16),
    "status": plain(17),
    "cluster": plain(18),
    "capacity": part(27, lambda value: field(1, value)),
}


def address(content):
    if "service" in content:
        return field(2, message(SERVICE, content["service"]))
    return field(1, message(WORKLOAD, content["workload"]))


def policy(name):
    namespace, name = name.split("/")
    return field(1, name) + field(2, namespace)


class Istiod(ads_pb2_grpc.AggregatedDiscoveryServiceServicer):
    def __init__(self, folder):
        tls = Authority("the roots of istiod")
        key = ec.generate_private_key(ec.SECP256R1())
        own = tls.issue([x509.DNSName("localhost")], key.public_key(), 86_400)
        secret = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        self.credentials = grpc.ssl_server_credentials([(secret, own.public_bytes(PEM))])
        (pathlib.Path(folder) / "tls-roots.pem").write_bytes(tls.certificate.public_bytes(PEM))
        # Keeps the port ours while nobody listens there; gRPC shares it.
        self.port = socket.socket()
        self.port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.port.bind(("127.0.0.1", 0))
        self.lock = threading.RLock()
        self.server = None
        self.token = None
        self.versions = True
        self.resources = {}
        self.policies = []
        self.streams = []
        self.nonces = 0

    def tell(self, news):
        with self.lock:
            self.token = news.get("token", self.token)
            self.versions = news.get("versions", self.versions)
            for name in news.get("forget", []):
                self.resources.pop(name)
            changed = {name: address(content) for name, content in news.get("put", {}).items()}
            changed |= {name: bytes.fromhex(text) for name, text in news.get("raw", {}).items()}
            self.resources |= changed
            removed = [name for name in news.get("remove", []) if self.resources.pop(name, None) is not None]
            if changed or removed:
                self.push(ADDRESS, changed, removed)
            if "policies" in news:
                gone = set(self.policies or []) - set(news["policies"] or [])
                self.policies = news["policies"]
                if self.policies is not None:
                    self.push(AUTHORIZATION, {name: policy(name) for name in self.policies}, sorted(gone))
            if "bomb" in news:
                self.push(ADDRESS, {}, [""] * news["bomb"])
            if news.get("drop") or news.get("serve") is False:
                for stream in self.streams:
                    stream.put(None)
        if news.get("serve") and self.server is None:
            self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(max_workers=16))
            ads_pb2_grpc.add_AggregatedDiscoveryServiceServicer_to_server(self, self.server)
            if not self.server.add_secure_port(f"127.0.0.1:{self.port.getsockname()[1]}", self.credentials):
                raise RuntimeError("the port cannot be bound")
            self.server.start()
        if news.get("serve") is False and self.server is not None:
            self.server.stop(0).wait()
            self.server = None

    def push(self, kind, resources, removed):
        for stream in self.streams:
            if kind in stream.kinds:
                stream.put(self.response(kind, resources, removed))

    def response(self, kind, resources, removed):
        self.nonces += 1
        response = discovery_pb2.DeltaDiscoveryResponse(type_url=kind, nonce=str(self.nonces), removed_resources=removed)
        for name, value in resources.items():
            resource = response.resources.add(name=name, version=self.version(value))
            resource.resource.type_url = kind
            resource.resource.value = value
        return response

    def version(self, value):
        return hashlib.sha256(value).hexdigest()[:16] if self.versions else ""

    def DeltaAggregatedResources(self, requests, context):
        metadata = dict(context.invocation_metadata())
        if metadata.get("authorization") != f"Bearer {self.token}":
            say({"denied": metadata.get("authorization")})
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not known")
        stream = queue.Queue()
        stream.kinds = set()
        with self.lock:
            self.streams.append(stream)
        threading.Thread(target=self.read, args=(requests, stream, metadata), daemon=True).start()
        try:
            while (response := stream.get()) is not None:
                yield response
        finally:
            with self.lock:
                self.streams.remove(stream)

    def read(self, requests, stream, metadata):
        try:
            for request in requests:
                self.take(request, stream, metadata)
        except grpc.RpcError:
            pass
        stream.put(None)

    def take(self, request, stream, metadata):
        if request.response_nonce:
            if request.HasField("error_detail"):
                say({"refused": request.error_detail.message})
            return
        known = dict(request.initial_resource_versions)
        fields = request.node.metadata.fields
        say({"asked": {
            "type": request.type_url.rsplit(".")[-1],
            "node": request.node.id,
            "metadata": {name: value.string_value for name, value in fields.items()},
            "cluster": metadata.get("clusterid"),
            "known": known,
        }})
        with self.lock:
            stream.kinds.add(request.type_url)
            if request.type_url == AUTHORIZATION:
                if self.policies is not None:
                    stream.put(self.response(AUTHORIZATION, {name: policy(name) for name in self.policies}, []))
                return
            new = {
                name: value
                for name, value in self.resources.items()
                if not self.versions or known.get(name) != self.version(value)
            }
            stream.put(self.response(ADDRESS, new, sorted(known.keys() - self.resources.keys())))


def main(folder):
    istiod = Istiod(folder)
    say({"port": istiod.port.getsockname()[1]})
    for line in sys.stdin:
        istiod.tell(json.loads(line))
        say({"done": True})


if __name__ == "__main__":
    main(sys.argv[1])
