"""A planned drain as clients see it: an Envoy and a gRPC client get less and less of a network, evenly over the time of the drain, and
nothing of it but a last priority at the end; when the drain ends, they get all of it again.
"""

import argparse
import datetime
import json
import subprocess
import time
import urllib.request

from xds_peer import EDS, Client, check, cluster_name, leave, run

NAME = "cart.mesh"
CLUSTER = cluster_name(NAME, port=443)
EAST, WEST = "192.0.2.2:15443", "192.0.2.3:15443"
# The time of the drain, in seconds.
OVER = 16


def share(assignment):
    """The part of the calls that goes to west, and the priority of west."""
    weights, priority = {}, None
    for locality in assignment.endpoints:
        for each in locality.lb_endpoints:
            socket = each.endpoint.address.socket_address
            address = f"{socket.address}:{socket.port_value}"
            # Envoy gets weights of endpoints, gRPC weights of localities.
            weight = (locality.load_balancing_weight.value or 1) * (each.load_balancing_weight.value or 1)
            if locality.priority == 0:
                weights[address] = weights.get(address, 0) + weight
            if address == WEST:
                priority = locality.priority
    return weights.get(WEST, 0) / sum(weights.values()), priority


def drains(clients, binary, xds, admin_at):
    def isthmus(*arguments):
        subprocess.run([binary, *arguments, "--admin", f"http://{admin_at}"], check=True, stdout=subprocess.DEVNULL)

    both = []
    for grpc_client in (False, True):
        client = Client(xds, network="north", grpc_client=grpc_client)
        clients.callback(client.close)
        client.ask(EDS, [CLUSTER])
        found = share(client.response(EDS, [CLUSTER]).resources[CLUSTER])
        check(found == (0.5, 0), f"{client.title}: equal parts before the drain: {found}")
        both.append(client)

    begun = int(time.time())
    isthmus("drain", "network", "west", "--over", f"{OVER}s", "--reason", "a test", "--force")
    with urllib.request.urlopen(f"http://{admin_at}/api/v1/drains") as answer:
        since = datetime.datetime.fromisoformat(json.load(answer)[0]["since"].replace("Z", "+00:00")).timestamp()
    for client in both:
        steps, ended, late = 0, False, False
        while not ended:
            part, priority = share(client.response(EDS, [CLUSTER]).resources[CLUSTER])
            now = time.time()
            # `left` of a half, beside a whole half.
            left = part / (1 - part)
            # The snapshot is made once a second, and the clock of the order has whole seconds.
            early = max(0, 1 - (now - begun) / OVER) - left
            check(early < 0.05 + 1 / OVER, f"{client.title}: {left:.2f} is left after {now - begun:.1f} s, early by {early:.2f}")
            # The second client is read after the first, so only a response that is too early is wrong for it. A server that lags is late
            # with each response; after a moment in which the machine stood still, the next one is in time again.
            was_late, late = late, left - max(0, 1 - (now - since) / OVER) >= 0.05 + 2.5 / OVER
            check(client is both[1] or not (was_late and late), f"{client.title}: {left:.2f} is left after {now - since:.1f} s, late")
            steps, ended = steps + 1, priority == 1
        # The server merges what a client does not acknowledge, so the second client may skip steps.
        check(steps >= OVER // 2 or client is both[1], f"{client.title}: {steps} steps")
        check(part == 0, f"{client.title}: west has no call at the end")
    isthmus("undrain", "network", "west")
    for client in both:
        while (found := share(client.response(EDS, [CLUSTER]).resources[CLUSTER])) != (0.5, 0):
            print(f"{client.title}: {found}, not yet a half", flush=True)


def main():
    arguments = argparse.ArgumentParser()
    for name in ("xds", "admin", "folder", "binary"):
        arguments.add_argument(f"--{name}", required=True)
    found = arguments.parse_args()
    more = {"binary": found.binary, "xds": found.xds, "admin_at": found.admin}
    return 1 if run([("drains", drains, more)]) else 0


if __name__ == "__main__":
    leave(main())
