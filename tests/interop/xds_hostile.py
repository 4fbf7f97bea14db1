#!/usr/bin/env python3
"""Clients that misbehave, by mistake or on purpose: the xDS server lives, stays small, and serves the others.

    xds_hostile.py --xds HOST:PORT --admin HOST:PORT --folder FOLDER --pid PID [--idle HOST:PORT ADMIN PID]

PID is the server's, for its memory. With another server to compare with, only clients that do not read are tried.
Prints a line for each scenario, with what it measured, and ends with 1 if one failed. Needs what xds.txt pins.
"""

import argparse
import contextlib
import pathlib
import resource
import socket
import statistics
import struct
import time

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.discovery.v3 import discovery_pb2

from xds_peer import (
    CDS,
    DELTA,
    EDS,
    PATIENCE,
    SOTW,
    TYPE_URLS,
    Client,
    Response,
    World,
    addresses,
    admin,
    check,
    cluster_name,
    endpoint,
    eventually,
    leave,
    metric,
    run,
    service,
)

A, LARGE = cluster_name("a.mesh"), cluster_name("large.mesh")
# Of streams that never read.
STREAMS = 1_000
# What they may cost beyond idle ones.
GROWTH_MAX = 5_000_000
VERSIONS = 3


class Raw:
    """HTTP/2 by hand: a stream that is opened, spoken into and never read."""

    def __init__(self, address, path="/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources"):
        host, port = address.rsplit(":", 1)
        self.socket = socket.socket()
        # What the kernel holds for it is not what is measured.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect((host, int(port)))
        headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": address}
        headers |= {"content-type": "application/grpc", "te": "trailers"}
        # Literal fields without indexing, not compressed.
        text = b"".join(
            b"\0" + bytes([len(key)]) + key.encode() + bytes([len(value)]) + value.encode()
            for key, value in headers.items()
        )
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        self.socket.sendall(preface + frame(4, 0, 0, b"") + frame(1, 4, 1, text))

    def ask(self, request):
        message = request.SerializeToString()
        self.socket.sendall(frame(0, 0, 1, b"\0" + struct.pack(">I", len(message)) + message))

    def read_some(self, count=1):
        """Waits until so much has come, and takes it."""
        self.socket.settimeout(PATIENCE)
        return self.socket.recv(count)

    def reset(self):
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def node(network="east"):
    made = base_pb2.Node(id="hostile", user_agent_name="envoy")
    made.metadata.update({"NETWORK": network, "CLUSTER_ID": network})
    return made


def opened(clients, *arguments, **named):
    client = Client(*arguments, **named)
    clients.callback(client.close)
    return client


def large(host):
    """A service whose assignment has some 270 KB."""
    endpoints = [endpoint(f"10.3.{index >> 8}.{index & 255}") for index in range(3_300)]
    return service("large.mesh", [*endpoints, endpoint(f"10.4.0.{host}")])


def memory(pid):
    """Bytes that the server has in memory."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS"))


def settled_memory(pid):
    """The same when it changes no more."""
    before = memory(pid)
    deadline = time.monotonic() + PATIENCE
    steady = 0
    while steady < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
        after = memory(pid)
        steady = steady + 1 if abs(after - before) < 64 << 10 else 0
        before = after
    return before


def forgotten(admin_at):
    """Waits until the server has let go of all raw streams."""

    def are_gone():
        return all(each["node"] != "hostile" for each in admin(admin_at, "/api/v1/clients"))

    eventually("the last of them to be forgotten", are_gone)


def refusing(world, xds, clients, **_):
    """Refusals one after another, ever so fast."""
    for protocol in (DELTA, SOTW):
        world.put("east", service("a.mesh", [endpoint("10.1.0.1")]))
        client = opened(clients, xds, protocol)
        client.ask(EDS, [A])
        response = client.response(EDS, [A], acknowledge=False)
        for number in range(2_000):
            client.acknowledge(response, error=f"refusal {number} " + "x" * 1_000)
        # Asked again and refused again, each time.
        if protocol == DELTA:
            for _ in range(200):
                client.ask(EDS, [A])
                client.acknowledge(client.response(EDS, [A], acknowledge=False), error="no")
        world.put("east", service("a.mesh", [endpoint("10.1.0.2")]))
        client.response(EDS, [A])
        client.is_silent(world)


def never(world, xds, clients, **_):
    """A client that never acknowledges has one response of a type at most, and the newest when it does."""
    for protocol in (DELTA, SOTW):
        world.put("east", service("a.mesh", [endpoint("10.1.0.1")]))
        client = opened(clients, xds, protocol)
        other = opened(clients, xds, protocol)
        client.ask(EDS, [A])
        response = client.response(EDS, [A], acknowledge=False)
        other.ask(EDS, [A])
        other.response(EDS, [A])
        for host in range(2, 7):
            world.put("east", service("a.mesh", [endpoint(f"10.1.0.{host}")]))
            other.response(EDS, [A])
        check(client.incoming.empty(), "there was another response before the acknowledgement")
        client.acknowledge(response)
        found = client.response(EDS, [A]).resources[A]
        check(addresses(found) == ["10.1.0.6:8080"], f"{found}")


def many_names(world, xds, clients, pid, **_):
    """100,000 names are served, 200,000 are refused."""
    names = [cluster_name(f"service-{number:06}.mesh") for number in range(200_000)]
    before = settled_memory(pid)
    began = time.monotonic()
    client = opened(clients, xds)
    client.ask(EDS, names[:100_000])
    seen = 0
    while seen < 100_000:
        seen += len(client.response(EDS).resources)
    took = time.monotonic() - began
    each = (settled_memory(pid) - before) / 100_000
    print(f"  100,000 names: {took:.1f} s, {each:.0f} bytes for each")
    # 410 measured, and 565 with a table and a list for the only rendering and the only subscriber.
    check(each < 500, f"{each:.0f} bytes for each name")
    client.close()
    for protocol in (DELTA, SOTW):
        client = opened(clients, xds, protocol)
        client.ask(EDS, names)
        end = client.ended()
        check(end.code == grpc.StatusCode.RESOURCE_EXHAUSTED, f"{end}")
        check("names" in end.text, f"{end}")


def oversize(world, xds, clients, pid, **_):
    """A request of 100 MiB is refused before it is taken in."""
    before = settled_memory(pid)
    for protocol in (DELTA, SOTW):
        client = opened(clients, xds, protocol)
        client.ask(EDS, ["x" * (100 << 20)])
        end = client.ended()
        check(end.code == grpc.StatusCode.RESOURCE_EXHAUSTED, f"{end}")
    grown = settled_memory(pid) - before
    print(f"  the server has grown by {grown / (1 << 20):.1f} MiB")
    check(grown < 40 << 20, f"grown by {grown} bytes")


def strange_types(world, xds, clients, **_):
    """Types that are not served, with thousands of names: each is answered, and the 17th ends the stream."""
    names = [f"name-{index}" for index in range(5_000)]
    for protocol in (DELTA, SOTW):
        client = opened(clients, xds, protocol)
        kinds = [f"type.googleapis.com/none.{number}" for number in range(16)]
        for kind in kinds:
            client.ask(kind, names)
        for kind in kinds:
            found = client.response(kind)
            check(len(found.removed) == (len(names) if protocol == DELTA else 0), f"{found}")
            # The other names have the same error.
            check(len(found.errors) == 16, f"{found}")
        client.ask(EDS, [A])
        client.response(EDS, [A])
        client.ask("type.googleapis.com/one.more", ["name"])
        end = client.ended()
        check(end.code == grpc.StatusCode.RESOURCE_EXHAUSTED, f"{end}")


def gone(world, xds, clients, admin_at, **_):
    """Clients that go away in the middle of a response, by the hundred, leave nothing behind."""
    world.put("east", large(1))
    request = discovery_pb2.DeltaDiscoveryRequest(
        node=node(), type_url=TYPE_URLS[EDS], resource_names_subscribe=[LARGE, A]
    )
    for _ in range(200):
        client = Raw(xds)
        client.ask(request)
        client.read_some(64)
        client.reset()
    # Half a message, and half a request.
    client = Raw(xds)
    client.socket.sendall(frame(0, 0, 1, b"\0\0\0\1\0half"))
    client.reset()
    world.put("east", large(2))
    forgotten(admin_at)


def not_its_own(world, xds, clients, **_):
    """Whoever claims a network that is not its own is refused, as often as it tries."""
    for protocol in (DELTA, SOTW):
        for _ in range(100):
            client = Client(xds, protocol, network="north")
            client.ask(CDS)
            end = client.ended()
            client.close()
            check(end.code == grpc.StatusCode.PERMISSION_DENIED, f"{end}")


def garbage(world, xds, clients, **_):
    """Bytes that are no HTTP/2, no gRPC, no message."""
    host, port = xds.rsplit(":", 1)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    texts = [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\0" * 500, b"\xff" * 70_000, preface + b"\xff" * 100, b""]
    for text in texts:
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection, contextlib.suppress(OSError):
            connection.sendall(text)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65_536):
                pass
    with grpc.insecure_channel(xds) as channel:
        call = channel.stream_stream(
            "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources"
        )
        try:
            list(call(iter([b"\xff\xff\xff"]), timeout=PATIENCE))
            check(False, "bytes that are no message were taken")
        except grpc.RpcError as error:
            # What tonic says of a message that cannot be read.
            check(error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT), f"{error}")
    # Without a node, of no type.
    client = opened(clients, xds)
    client.outgoing.put(discovery_pb2.DeltaDiscoveryRequest())
    end = client.ended()
    check(end.code == grpc.StatusCode.PERMISSION_DENIED, f"{end}")


class Crowd:
    """So many clients of a server by hand, each with a connection of its own, that never read."""

    def __init__(self, server):
        self.server = server
        before = metric(server.admin, "isthmus_xds_clients")
        self.raws = [Raw(server.xds) for _ in range(STREAMS)]
        self.ask([], node=node("west"))
        # By metrics, which cost the server little: its memory is looked at.
        there = before + STREAMS
        eventually("all of the crowd", lambda: metric(server.admin, "isthmus_xds_clients") == there)

    def ask(self, names, **more):
        """Each asks for these too; waits until the server has answered as far as it can."""
        pushed = metric(self.server.admin, "isthmus_xds_pushes_total")
        request = discovery_pb2.DeltaDiscoveryRequest(
            type_url=TYPE_URLS[EDS], resource_names_subscribe=names, **more
        )
        for raw in self.raws:
            raw.ask(request)
        due = pushed + (STREAMS if names else 0)
        eventually(
            f"answers about {names}", lambda: metric(self.server.admin, "isthmus_xds_pushes_total") >= due
        )

    def leave(self):
        for raw in self.raws:
            raw.reset()
        forgotten(self.server.admin)


class Server:
    """Where a server is."""

    def __init__(self, xds, admin_at, pid):
        self.xds, self.admin, self.pid = xds, admin_at, pid


def unread(world, servers, clients, **_):
    """1,000 connections that never read one large assignment cost less than 5 MB, and delay nobody."""
    # The descriptors of this process, one for each connection.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * STREAMS)), hard))
    world.put("west", large(1))
    world.put("east", service("a.mesh", [endpoint("10.1.0.1")]))
    # Two servers are treated alike, but for the assignment that the clients of one do not read.
    readers = [opened(clients, server.xds) for server in servers]
    large_readers = [opened(clients, server.xds, network="west") for server in servers]
    for reader, large_reader in zip(readers, large_readers, strict=True):
        reader.ask(EDS, [A])
        reader.response(EDS, [A])
        large_reader.ask(EDS, [LARGE])
        size = large_reader.response(EDS, [LARGE]).size
    check(size > 260_000, f"the assignment has {size} bytes only")

    def changes(count):
        """Milliseconds from the write of a change to its having been read."""
        taken = []
        for host in range(count):
            began = time.monotonic()
            world.put("east", service("a.mesh", [endpoint(f"10.1.{host}.{count}")]))
            for reader in readers:
                reader.response(EDS, [A])
                taken.append((time.monotonic() - began) * 1_000)
        return statistics.median(taken), max(taken)

    def memories():
        return [settled_memory(server.pid) for server in servers]

    quiet = changes(5)
    stuck, idle = (Crowd(server) for server in servers)
    # The same for both once, so that what it takes is there already.
    for crowd in (stuck, idle):
        crowd.ask([])
    before = memories()
    stuck.ask([LARGE])
    idle.ask([])

    def beyond_idle(now):
        return (now[0] - before[0]) - (now[1] - before[1])

    # What was used for a moment is given back late: what stays is what counts.
    deadline = time.monotonic() + PATIENCE
    while beyond_idle(after := memories()) >= GROWTH_MAX and time.monotonic() < deadline:
        world.beat()
    # A server that makes others wait does so each time; a slow moment of the machine passes.
    deadline = time.monotonic() + PATIENCE
    while (busy := changes(5))[0] >= quiet[0] * 1.5 + 50 and time.monotonic() < deadline:
        pass
    for host in range(2, 2 + VERSIONS):
        world.put("west", large(host))
        for reader in large_readers:
            reader.response(EDS, [LARGE])
    at_last = memories()
    figures = [" and ".join(f"{bytes_ / 1e6:.1f}" for bytes_ in pair) for pair in (before, after, at_last)]
    print(f"  an assignment of {size:,} bytes; MB of the server whose {STREAMS:,} clients do not read, and")
    text = "of the other, whose clients ask for nothing: {} before, {} when asked, {} some versions later"
    print("  " + text.format(*figures))
    grown = [beyond_idle(now) for now in (after, at_last)]
    print(f"  beyond the idle ones: {grown[0] / 1e6:.1f} MB, and with {VERSIONS} versions more {grown[1] / 1e6:.1f} MB")
    times = "{:.0f}, {:.0f} ms before; then {:.0f}, {:.0f}".format(*quiet, *busy)
    print(f"  change to arrival (median, worst): {times}")
    check(grown[0] < GROWTH_MAX, f"{grown[0]:,} bytes beyond idle streams")
    # What reading the registry leaves behind is a few MB more or less.
    check(grown[1] < GROWTH_MAX * VERSIONS, f"{grown[1]:,} bytes beyond idle streams with more versions")
    check(busy[0] < quiet[0] * 1.5 + 50, "others wait for those that do not read")
    stuck.leave()
    idle.leave()


def slow(world, xds, clients, **_):
    """Where 5 of 100 clients are stuck, and one reads byte by byte, the others get every change."""
    world.put("east", large(1), service("a.mesh", [endpoint("10.1.0.1")]))
    request = discovery_pb2.DeltaDiscoveryRequest(
        node=node(), type_url=TYPE_URLS[EDS], resource_names_subscribe=[LARGE, A]
    )
    stuck = [Raw(xds) for _ in range(5)]
    for raw in stuck:
        clients.callback(raw.reset)
        raw.ask(request)
    others = [opened(clients, xds, SOTW if number % 2 else DELTA) for number in range(95)]
    for client in others:
        client.ask(EDS, [A])
    for client in others:
        client.response(EDS, [A])
    taken = []
    for host in range(2, 7):
        world.put("east", large(host), service("a.mesh", [endpoint(f"10.1.0.{host}")]))
        began = time.monotonic()
        for client in others:
            client.response(EDS, [A])
        taken.append((time.monotonic() - began) * 1_000)
        stuck[0].read_some()
    print(f"  95 clients had each of 5 changes within {max(taken):.0f} ms of the first")


def main():
    arguments = argparse.ArgumentParser()
    for name in ("xds", "admin", "folder", "pid"):
        arguments.add_argument(f"--{name}", required=True)
    arguments.add_argument("--idle", nargs=3, metavar=("HOST:PORT", "ADMIN", "PID"), help="a server to compare with")
    arguments.add_argument("--only", default="", help="the function's name")
    given = arguments.parse_args()
    world = World(given.folder, given.xds)
    all_of_them = [refusing, never, many_names, oversize, strange_types, not_its_own, garbage, gone, slow]
    servers = [Server(given.xds, given.admin, given.pid)]
    if given.idle:
        servers.append(Server(*given.idle))
        all_of_them = [unread]
    chosen = [each for each in all_of_them if given.only in each.__name__]
    scenarios = [(each.__doc__, each, {}) for each in chosen]
    shared = {"world": world, "xds": given.xds, "pid": given.pid, "admin_at": given.admin, "servers": servers}
    return 1 if run(scenarios, **shared) else 0


if __name__ == "__main__":
    leave(main())
