"""Steering as clients see it: priorities and weights of an Envoy and of a gRPC client beside the server, while the endpoints of
their own network come and go, and after a reload with the mode `off`.
"""

import argparse
import os
import pathlib
import urllib.request

from xds_peer import EDS, Client, World, check, cluster_name, endpoint, leave, run, service

NAME = "cart.mesh"
CLUSTER = cluster_name(NAME, port=443)
NEAR, FAR = "192.0.2.2:15443", "192.0.2.3:15443"


def cart(endpoints):
    return service(NAME, endpoints, port=443, port_more={"protocol": "TLS"})


def own(count, ready):
    """The endpoints of the clients' own network."""
    return cart([
        endpoint(f"10.1.0.{at}", health="healthy" if at < ready else "unhealthy") for at in range(count)
    ])


def given(assignment, grpc_client):
    """Address to priority and weight: of the endpoint for Envoy, of its part of the locality for gRPC."""
    found = {}
    for locality in assignment.endpoints:
        for each in locality.lb_endpoints:
            socket = each.endpoint.address.socket_address
            weight = each.load_balancing_weight.value
            if grpc_client:
                weight = locality.load_balancing_weight.value // len(locality.lb_endpoints)
            found[f"{socket.address}:{socket.port_value}"] = (locality.priority, weight)
    return found


def steering(clients, world, xds, admin_at, folder):
    both = []
    for grpc_client in (False, True):
        client = Client(xds, network="east", grpc_client=grpc_client)
        clients.callback(client.close)
        client.ask(EDS, [CLUSTER])
        client.response(EDS, [CLUSTER])
        both.append(client)

    def expect(what, ready, spare):
        """The next assignments have these ready endpoints, and for Envoy these others, whose priority is the last one."""
        for client in both:
            wanted = dict(ready)
            if not client.grpc_client and spare:
                last = 1 + max(priority for priority, _ in ready.values())
                wanted.update({address: (last, 1) for address in spare})
            # Registries are read one after another, so that the first response may be of half of the change.
            while (found := given(client.response(EDS, [CLUSTER]).resources[CLUSTER], client.grpc_client)) != wanted:
                print(f"{what}: {client.title}: {found}, not yet {wanted}", flush=True)

    far = [endpoint(f"10.3.0.{at}", network="far") for at in range(3)]
    near = [endpoint(f"10.2.0.{at}") for at in range(10)]
    world.put("west", cart([*near, *far]))
    expect("no endpoint of their own", {NEAR: (0, 1), FAR: (1, 1)}, [])
    world.put("east", own(2, 2))
    home = ["10.1.0.0:8080", "10.1.0.1:8080"]
    expect("own", {home[0]: (0, 1), home[1]: (0, 1), NEAR: (1, 1), FAR: (2, 1)}, [])
    world.put("east", own(4, 1))
    # 1.4 × 1/4 of the calls stay, which is 11 parts of 32.
    spare = [f"10.1.0.{at}:8080" for at in (1, 2, 3)]
    expect("one of four is ready", {home[0]: (0, 11), NEAR: (0, 21), FAR: (1, 1)}, spare)
    world.put("east", own(4, 0))
    expect("own ones not ready", {NEAR: (0, 1), FAR: (1, 1)}, [home[0], *spare])
    # The near network has room for 0.8 of 4 endpoints' calls, the far one for 1.2. The rest is divided 2 : 3.
    world.put("west", cart([*near[:2], *far]))
    expect("no room nearby", {NEAR: (0, 13), FAR: (0, 19)}, [home[0], *spare])
    world.put("east", own(2, 2))
    expect("ready again", {home[0]: (0, 1), home[1]: (0, 1), NEAR: (1, 1), FAR: (2, 1)}, [])

    config = pathlib.Path(folder) / "isthmus.yaml"
    following = config.with_name(".off")
    following.write_text(config.read_text().replace("mode: nearest", "mode: off"))
    os.replace(following, config)
    request = urllib.request.Request(f"http://{admin_at}/api/v1/reload", method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        check(answer.status == 200, f"the reload gave {answer.status}")
    plain = {home[0]: (0, 1), home[1]: (0, 1), NEAR: (0, 2), FAR: (0, 3)}
    expect("off", plain, [])


def main():
    arguments = argparse.ArgumentParser()
    for name in ("xds", "admin", "folder"):
        arguments.add_argument(f"--{name}", required=True)
    found = arguments.parse_args()
    world = World(found.folder, found.xds)
    more = {"xds": found.xds, "admin_at": found.admin, "folder": found.folder}
    return 1 if run([("steering", steering, more)], world=world) else 0


if __name__ == "__main__":
    leave(main())
