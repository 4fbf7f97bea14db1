#!/usr/bin/env python3
"""gRPC's own xDS client, led by the xDS server to gRPC servers on loopback addresses.

    xds_grpc.py --xds HOST:PORT --admin HOST:PORT --folder FOLDER

Each server answers with its own address. The client knows nothing but `xds:///a.mesh:50051`. Prints a line for each
scenario, with what it measured, and ends with 1 if one failed. Needs what xds.txt pins.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import threading
import time

# The address of the xDS server is read when gRPC is loaded.
ARGUMENTS = argparse.ArgumentParser()
for name in ("xds", "admin", "folder"):
    ARGUMENTS.add_argument(f"--{name}", required=True)
GIVEN = ARGUMENTS.parse_args()
os.environ["GRPC_EXPERIMENTAL_XDS_DATA_ERROR_HANDLING"] = "true"
os.environ["GRPC_XDS_BOOTSTRAP_CONFIG"] = json.dumps(
    {
        "xds_servers": [{"server_uri": GIVEN.xds, "channel_creds": [{"type": "insecure"}]}],
        "node": {"id": "a gRPC client", "metadata": {"NETWORK": "east", "CLUSTER_ID": "east"}},
    }
)

import grpc  # noqa: E402

from xds_peer import PATIENCE, World, admin, check, endpoint, eventually, leave, run, service  # noqa: E402

METHOD = "/echo/Where"
PORT = 50051
# So many that chance stays well within what is allowed.
CALLS = 4_000


class Server:
    """A gRPC server on an address of its own that says which one it is."""

    def __init__(self, host):
        self.host = host
        answer = grpc.unary_unary_rpc_method_handler(lambda request, context: host.encode())
        handlers = grpc.method_handlers_generic_handler("echo", {"Where": answer})
        # Otherwise several servers may share a port.
        options = [("grpc.so_reuseport", 0)]
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), handlers=[handlers], options=options)
        self.port = self.server.add_insecure_port(f"{host}:0")
        self.server.start()

    def endpoint(self, **more):
        return endpoint(self.host, ports={"p": self.port}, **more)


def channel(clients, target):
    made = grpc.insecure_channel(f"xds:///{target}:{PORT}")
    clients.callback(made.close)
    return made


def call(made, patience=PATIENCE):
    return made.unary_unary(METHOD)(b"", timeout=patience, wait_for_ready=False).decode()


def echo(name, *endpoints):
    return service(f"{name}.mesh", list(endpoints), port=PORT)


def split(world, servers, clients, **_):
    """Calls are split by weight, within one locality and over several."""
    cases = {"a": ("us/a", "us/a", "us/a"), "b": ("us/a", "us/b", "us/c")}
    for name, localities in cases.items():
        endpoints = [
            each.endpoint(weight=weight, locality=locality)
            for each, weight, locality in zip(servers, (1, 3, 6), localities, strict=True)
        ]
        world.put("east", echo(name, *endpoints))
        made = channel(clients, f"{name}.mesh")
        call(made)

        def settled(made=made):
            return len({call(made) for _ in range(30)}) == 3

        eventually("calls to all three", settled)
        counts = collections.Counter(call(made) for _ in range(CALLS))
        shares = [counts[each.host] / CALLS for each in servers[:3]]
        print(f"  {CALLS} calls over {localities} by weights 1:3:6: {[f'{share:.1%}' for share in shares]}")
        for share, expected in zip(shares, (0.1, 0.3, 0.6), strict=True):
            check(abs(share - expected) <= 0.03, f"{share:.3f} instead of {expected}")
    mine = [each for each in admin(GIVEN.admin, "/api/v1/clients") if each["node"] == "a gRPC client"]
    check(mine and mine[0]["client"] == "grpc", f"{mine}")
    nacks = {kind: of["nacks"] for each in mine for kind, of in each["types"].items()}
    check(set(nacks) == {"lds", "rds", "cds", "eds"} and not any(nacks.values()), f"refusals: {mine}")


def come_and_go(world, servers, clients, **_):
    """Endpoints come and go, and no call fails."""
    one, other = servers[:2]
    world.put("east", echo("a", one.endpoint()))
    made = channel(clients, "a.mesh")
    stop, seen, failed = threading.Event(), collections.Counter(), []

    def calls():
        while not stop.is_set():
            try:
                seen[call(made)] += 1
            except grpc.RpcError as error:
                failed.append(error)

    callers = [threading.Thread(target=calls) for _ in range(4)]
    for caller in callers:
        caller.start()
    try:
        for endpoints in ([one, other], [other], [other, one], [one]):
            world.put("east", echo("a", *(each.endpoint() for each in endpoints)))
            names = {each.host for each in endpoints}

            def settled(names=names):
                before = seen.copy()
                time.sleep(0.05)
                return set((seen.copy() - before)) == names

            eventually(f"calls to {names} alone", settled)
    finally:
        stop.set()
        for caller in callers:
            caller.join()
    print(f"  {sum(seen.values())} calls, {len(failed)} failed")
    check(not failed, f"{failed[:1]}")


def missing(world, servers, clients, **_):
    """A service nobody has told of fails at once, with its name in the text, and is found when it is born."""
    world.remove("east", "late.mesh")
    made = channel(clients, "late.mesh")
    began = time.monotonic()
    try:
        call(made)
        check(False, "a call to nowhere was answered")
    except grpc.RpcError as error:
        took = time.monotonic() - began
        print(f"  failed after {took * 1000:.0f} ms: {error.code().name}: {error.details()}")
        check(error.code() == grpc.StatusCode.UNAVAILABLE, f"{error}")
        check("late.mesh" in error.details(), f"{error.details()}")
        check("no service " in error.details(), f"not our text: {error.details()}")
        # Without being told it waits for 15 s.
        check(took < 5, f"it took {took} s")
    began = time.monotonic()
    world.put("east", echo("late", servers[0].endpoint()))

    def answered():
        try:
            return call(made) == servers[0].host
        except grpc.RpcError:
            return False

    eventually("the service that came later", answered)
    print(f"  answered {(time.monotonic() - began) * 1000:.0f} ms after it was written")
    # Without endpoints it fails at once too.
    world.put("east", echo("late"))

    def refused():
        try:
            call(made)
            return None
        except grpc.RpcError as error:
            return error.details()

    print(f"  without endpoints: {eventually('a failure', refused)}")


def unready(world, servers, clients, **_):
    """Endpoints that are not ready, and those of other networks without a route by host name, get no calls."""
    one, other, third = servers[:3]
    world.put("west", echo("a", endpoint("10.2.0.1")))
    world.put(
        "east",
        echo("a", one.endpoint(health="unhealthy"), other.endpoint(health="draining", weight=9), third.endpoint()),
    )
    made = channel(clients, "a.mesh")
    found = {call(made) for _ in range(50)}
    check(found == {third.host}, f"calls went to {found}")


def main():
    world = World(GIVEN.folder, GIVEN.xds)
    servers = [Server(f"127.0.0.{host}") for host in (2, 3, 4)]
    scenarios = [(each.__doc__, each, {}) for each in (split, come_and_go, missing, unready)]
    failed = run(scenarios, world=world, servers=servers)
    for each in servers:
        each.server.stop(None)
    return 1 if failed else 0


if __name__ == "__main__":
    leave(main())
