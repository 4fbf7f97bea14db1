"""What the xDS scripts share: a world of registry files to be rewritten, and a client whose every response is checked.

The messages are the official ones (xds-protos), the transport is grpcio: none of the server's own code is used.
"""

import contextlib
import itertools
import json
import os
import pathlib
import queue
import sys
import threading
import time
import urllib.request

import grpc
from envoy.config.cluster.v3 import cluster_pb2
from envoy.config.core.v3 import base_pb2
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.config.listener.v3 import listener_pb2
from envoy.config.route.v3 import route_pb2
from envoy.extensions.transport_sockets.tls.v3 import tls_pb2
from envoy.service.discovery.v3 import discovery_pb2

# For what should take no time; on a shared machine it may take a while.
PATIENCE = 60

CDS, EDS, LDS, RDS = "cds", "eds", "lds", "rds"
TYPE_URLS = {
    CDS: "type.googleapis.com/envoy.config.cluster.v3.Cluster",
    EDS: "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
    LDS: "type.googleapis.com/envoy.config.listener.v3.Listener",
    RDS: "type.googleapis.com/envoy.config.route.v3.RouteConfiguration",
}
KINDS = {url: kind for kind, url in TYPE_URLS.items()}
MESSAGES = {
    CDS: cluster_pb2.Cluster,
    EDS: endpoint_pb2.ClusterLoadAssignment,
    LDS: listener_pb2.Listener,
    RDS: route_pb2.RouteConfiguration,
}
OWN_STREAMS = {
    CDS: ("cluster", "ClusterDiscoveryService", "Clusters"),
    EDS: ("endpoint", "EndpointDiscoveryService", "Endpoints"),
    LDS: ("listener", "ListenerDiscoveryService", "Listeners"),
    RDS: ("route", "RouteDiscoveryService", "Routes"),
}
DELTA, SOTW = "delta", "sotw"


class Failed(AssertionError):
    """What a check says when the server did something else than it should."""


def check(condition, text):
    """Fails with the text; it says what was found."""
    if not condition:
        raise Failed(text)


def cluster_name(service, port=80, subset=""):
    return f"outbound|{port}|{subset}|{service}"


NOBODY = cluster_name("nobody.mesh")


def endpoint(address, **more):
    """An endpoint, as registry files tell of it."""
    return {"address": address, **more}


def service(name, endpoints, port=80, target=8080, **more):
    """A service with one port, as registry files tell of it."""
    return {
        "hostname": name,
        "namespace": "shop",
        "ports": [{"name": "p", "port": port, "targetPort": target, **more.pop("port_more", {})}],
        "endpoints": endpoints,
        **more,
    }


class World:
    """The registries `east` and `west`, each a file. What is not written yet, the server does not know."""

    def __init__(self, folder, xds):
        self.folder = pathlib.Path(folder)
        self.services = {"east": {}, "west": {}}
        self.beats = itertools.count(1)
        self.beat_sent = {}
        self.write("east")
        self.write("west")
        # Who sees when a registry has been taken in: each network has a service that changes with every write.
        self.watchers = {}
        for registry in self.services:
            watcher = Client(xds, network=registry, title=f"the watcher of {registry}")
            watcher.ask(EDS, [cluster_name(f"beat-{registry}.mesh")])
            self.watchers[registry] = watcher
            self.settle(registry)

    def put(self, registry, *services):
        """Writes the registry with these services added or replaced, and waits until the server has it."""
        self.services[registry].update({each["hostname"]: each for each in services})
        self.flush(registry)

    def remove(self, registry, *names):
        for name in names:
            self.services[registry].pop(name, None)
        self.flush(registry)

    def reset(self, registry, *services):
        """The registry has these services and no others."""
        self.services[registry] = {each["hostname"]: each for each in services}
        self.flush(registry)

    def beat(self, registry="east"):
        """A change of nothing but the registry's own service."""
        self.flush(registry)

    def flush(self, registry):
        self.write(registry)
        self.settle(registry)

    def write(self, registry):
        beat = next(self.beats)
        self.beat_sent[registry] = f"10.99.{beat >> 8}.{beat & 255}"
        beats = service(f"beat-{registry}.mesh", [endpoint(self.beat_sent[registry])])
        text = json.dumps({"services": [beats, *self.services[registry].values()]})
        following = self.folder / f".{registry}.next"
        following.write_text(text)
        os.replace(following, self.folder / f"{registry}.yaml")

    def settle(self, registry):
        name = cluster_name(f"beat-{registry}.mesh")
        while True:
            found = self.watchers[registry].response(EDS).resources[name]
            if addresses(found) == [f"{self.beat_sent[registry]}:8080"]:
                return


class Response:
    """One response of either form, opened and checked."""

    def __init__(self, message, protocol, grpc_client):
        self.kind = KINDS.get(message.type_url, message.type_url)
        self.nonce = message.nonce
        self.size = message.ByteSize()
        self.resources, self.versions = {}, {}
        check(message.type_url, f"a response without a type: {message}")
        check(message.nonce, f"a response without a nonce: {message}")
        if protocol == DELTA:
            self.removed = list(message.removed_resources)
            self.version = message.system_version_info
            bodies = [(each.resource, each.name, each.version) for each in message.resources]
        else:
            self.removed = []
            self.version = message.version_info
            bodies = [(each, None, message.version_info) for each in message.resources]
        self.errors = {each.resource_name.name: each.error_detail for each in message.resource_errors}
        check(len(self.errors) == len(message.resource_errors), f"an error twice: {message.resource_errors}")
        for body, name, version in bodies:
            check(body.type_url == message.type_url, f"a {body.type_url} in a response of {message.type_url}")
            opened = MESSAGES[self.kind].FromString(body.value)
            own = opened.cluster_name if self.kind == EDS else opened.name
            check(name in (None, own), f"{own!r} is sent under the name {name!r}")
            check(own not in self.resources, f"{own!r} is twice in one response")
            check(version, f"{own!r} has no version")
            self.resources[own], self.versions[own] = opened, version
            if self.kind == EDS:
                check_assignment(opened, grpc_client)
        for gone in (self.removed, self.errors):
            both = set(gone) & set(self.resources)
            check(not both, f"{both} are told of, and as not there")
        check(len(set(self.removed)) == len(self.removed), f"removed twice: {self.removed}")

    def __str__(self):
        told = sorted(self.resources)
        return f"{self.kind} response {self.nonce!r} of {told}, removed {self.removed}, errors {sorted(self.errors)}"


class Ended:
    """The end of a stream."""

    def __init__(self, error):
        self.code = error.code()
        self.text = error.details()

    def __str__(self):
        return f"the end of the stream: {self.code} {self.text!r}"


class Client:
    """A stream of its own connection. It acknowledges every response unless it is told not to."""

    ids = itertools.count(1)

    def __init__(
        self, target, protocol=DELTA, own=None, *, network="east", cluster=None, grpc_client=False, title=None
    ):
        self.protocol, self.own, self.grpc_client = protocol, own, grpc_client
        # The registry whose endpoints it is given by address.
        self.home = network if network in ("east", "west") else "east"
        self.title = title or f"client {next(self.ids)}"
        self.node = base_pb2.Node(id=self.title, user_agent_name="gRPC C-core" if grpc_client else "envoy")
        self.node.metadata.update({"NETWORK": network, "CLUSTER_ID": cluster or network})
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 << 20)]
        self.channel = grpc.insecure_channel(target, options)
        if own:
            folder, service_name, method = OWN_STREAMS[own]
        else:
            folder, service_name, method = "discovery", "AggregatedDiscoveryService", "AggregatedResources"
        prefix = "Delta" if protocol == DELTA else "Stream"
        answer = discovery_pb2.DeltaDiscoveryResponse if protocol == DELTA else discovery_pb2.DiscoveryResponse
        call = self.channel.stream_stream(
            f"/envoy.service.{folder}.v3.{service_name}/{prefix}{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        self.outgoing = queue.SimpleQueue()
        self.incoming = queue.SimpleQueue()
        self.nonces = set()
        self.last_nonce = {}
        self.names = {}
        self.call = call(iter(self.outgoing.get, None))
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        try:
            for message in self.call:
                self.incoming.put(message)
        except grpc.RpcError as error:
            self.incoming.put(Ended(error))

    def close(self):
        self.call.cancel()
        self.outgoing.put(None)
        self.channel.close()

    def send(self, **fields):
        """A request as written; the node goes with the first."""
        request = discovery_pb2.DeltaDiscoveryRequest if self.protocol == DELTA else discovery_pb2.DiscoveryRequest
        self.outgoing.put(request(node=self.node, **fields))
        self.node = None

    def type_url(self, kind):
        """On its own stream a type need not be named."""
        return "" if self.own else TYPE_URLS.get(kind, kind)

    def ask(self, kind, names=(), drop=(), versions=None, nonce=None, error=None):
        """Delta: subscribes and unsubscribes. State of the world: `names` are all names."""
        fields = {"type_url": self.type_url(kind)}
        if error is not None:
            fields["error_detail"] = {"code": 3, "message": error}
        if self.protocol == DELTA:
            self.send(
                resource_names_subscribe=names,
                resource_names_unsubscribe=drop,
                initial_resource_versions=versions or {},
                response_nonce=nonce or "",
                **fields,
            )
        else:
            self.names[kind] = list(names)
            nonce = self.last_nonce.get(kind, "") if nonce is None else nonce
            self.send(resource_names=names, response_nonce=nonce, **fields)

    def acknowledge(self, response, error=None):
        """ACK, or NACK with a text."""
        if self.protocol == DELTA:
            self.ask(response.kind, nonce=response.nonce, error=error)
        else:
            self.ask(response.kind, self.names.get(response.kind, []), nonce=response.nonce, error=error)

    def next(self, patience=PATIENCE):
        try:
            message = self.incoming.get(timeout=patience)
        except queue.Empty:
            raise Failed(f"{self.title} waited {patience} s for a response in vain") from None
        if isinstance(message, Ended):
            return message
        response = Response(message, self.protocol, self.grpc_client)
        check(response.nonce not in self.nonces, f"the nonce {response.nonce!r} was used before")
        self.nonces.add(response.nonce)
        self.last_nonce[response.kind] = response.nonce
        return response

    def response(self, kind, names=None, removed=(), errors=(), acknowledge=True):
        """The next response, which must be of this type, of exactly these names where they are given."""
        response = self.next()
        check(isinstance(response, Response), f"{self.title} got {response}")
        check(response.kind == kind, f"{self.title} expected {kind}, and got a {response}")
        if names is not None:
            expected = (sorted(names), sorted(removed), sorted(errors))
            found = (sorted(response.resources), sorted(response.removed), sorted(response.errors))
            check(found == expected, f"{self.title} expected {expected}, and got a {response}")
        if acknowledge:
            self.acknowledge(response)
        return response

    def ended(self):
        """The code with which the stream ends; what comes before is read over."""
        while isinstance(found := self.next(), Response):
            self.acknowledge(found)
        return found

    def is_silent(self, world):
        """Nothing comes but what is asked for here: an answer to what was before would come in between."""
        beat = cluster_name(f"beat-{self.home}.mesh")
        others = self.names.get(EDS, [])
        self.ask(EDS, [beat] if self.protocol == DELTA else [*others, beat])
        self.response(EDS, [beat])
        world.beat(self.home)
        # A second server may be behind by some beats.
        while addresses(self.response(EDS, [beat]).resources[beat]) != [f"{world.beat_sent[self.home]}:8080"]:
            pass
        self.give_up(beat, others)
        self.is_heard()

    def is_heard(self):
        """The server knows what was given up: it has answered to what was asked after that, a name that nobody has."""
        others = self.names.get(EDS, [])
        self.ask(EDS, [NOBODY] if self.protocol == DELTA else [*others, NOBODY])
        self.response(EDS, [NOBODY])
        self.give_up(NOBODY, others)

    def give_up(self, name, others):
        """Of assignments; state of the world names those that are left."""
        if self.protocol == DELTA:
            self.ask(EDS, drop=[name])
        else:
            self.ask(EDS, others)


def addresses(assignment):
    """`address:port` of all endpoints, in order."""
    sockets = [
        each.endpoint.address.socket_address for locality in assignment.endpoints for each in locality.lb_endpoints
    ]
    return [f"{socket.address}:{socket.port_value}" for socket in sockets]


def weights(assignment):
    """Address and port to weight, of each endpoint."""
    return {
        f"{each.endpoint.address.socket_address.address}:{each.endpoint.address.socket_address.port_value}": (
            each.load_balancing_weight.value
        )
        for locality in assignment.endpoints
        for each in locality.lb_endpoints
    }


def check_assignment(assignment, grpc_client):
    """What Envoy and gRPC demand of an assignment, or misunderstand without a word (xds-server.md, 2.4)."""
    found = addresses(assignment)
    name = assignment.cluster_name
    check(name, "an assignment without a name")
    check(len(set(found)) == len(found), f"{name}: an address twice in {found}")
    priorities = {locality.priority for locality in assignment.endpoints}
    check(priorities == set(range(len(priorities))), f"{name}: the priorities {priorities} have gaps")
    seen, total = set(), {}
    for locality in assignment.endpoints:
        place = locality.locality
        key = (place.region, place.zone, place.sub_zone, locality.priority)
        check(key not in seen, f"{name}: the locality {key} is there twice")
        seen.add(key)
        check(len(locality.lb_endpoints) > 0, f"{name}: the locality {key} is empty")
        weight = locality.load_balancing_weight
        if grpc_client:
            check(weight.value > 0, f"{name}: the locality {key} has no weight")
        check(not locality.HasField("load_balancing_weight") or weight.value > 0, f"{name}: {key} has weight 0")
        total[locality.priority] = total.get(locality.priority, 0) + weight.value
        within = 0
        for each in locality.lb_endpoints:
            socket = each.endpoint.address.socket_address
            check(socket.port_value > 0, f"{name}: port 0 in {found}")
            check(each.load_balancing_weight.value > 0, f"{name}: {socket.address} has no weight, or 0")
            within += each.load_balancing_weight.value
            if grpc_client:
                check(each.health_status in (0, 1), f"{name}: {socket.address} is not ready, which gRPC passes over")
        check(within < 1 << 32, f"{name}: the weights of {key} add up to {within}")
    check(all(sum_ < 1 << 32 for sum_ in total.values()), f"{name}: the weights of localities add up to {total}")


def identities(cluster):
    """The SPIFFE URIs that a cluster's peers are matched against."""
    for match in cluster.transport_socket_matches:
        if match.name == "mesh":
            context = tls_pb2.UpstreamTlsContext.FromString(match.transport_socket.typed_config.value)
            validation = context.common_tls_context.combined_validation_context.default_validation_context
            names = validation.match_typed_subject_alt_names
            return sorted(each.matcher.exact or each.matcher.prefix for each in names)
    return None


def admin(address, path):
    """JSON of the admin API."""
    with urllib.request.urlopen(f"http://{address}{path}", timeout=PATIENCE) as answer:
        return json.load(answer)


def metric(address, name):
    """The sum of a metric's samples."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.replace("{", " ").split(" ")[0] == name)


def eventually(what, ready):
    """Waits until `ready` gives something."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if found := ready():
            return found
        time.sleep(0.01)
    raise Failed(f"waited {PATIENCE} s in vain: {what}")


def run(scenarios, **given):
    """Runs named scenarios one after another, all of them; the number of those that failed."""
    failed = 0
    for title, scenario, arguments in scenarios:
        began = time.monotonic()
        with contextlib.ExitStack() as clients:
            try:
                scenario(clients=clients, **arguments, **given)
                said = "ok"
            except (Failed, grpc.RpcError, KeyError, IndexError) as error:
                failed += 1
                said = f"FAILED: {type(error).__name__}: {error}"
        print(f"{title}: {said} ({time.monotonic() - began:.2f} s)", flush=True)
    return failed


def leave(code):
    """Ends the process at once: gRPC's threads may otherwise wait for one another when the interpreter ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
