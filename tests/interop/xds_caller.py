#!/usr/bin/env python3
"""gRPC servers, and a gRPC client that finds them over xDS, told by lines of JSON what to do.

    xds_caller.py HOST:PORT             the xDS server; the client is on network `east`, cluster `east`

Standard output says {"ready": true, "servers": [[host, port], …]} first. Each line of standard input is answered by
{"done": …}:
    {"call": service, "times": n}       how often each server answered, by its host; "failed": how many calls failed
The client keeps one channel for each service.
"""

import collections
import concurrent.futures
import json
import os
import sys

# The address of the xDS server is read when gRPC is loaded.
os.environ["GRPC_EXPERIMENTAL_XDS_DATA_ERROR_HANDLING"] = "true"
os.environ["GRPC_XDS_BOOTSTRAP_CONFIG"] = json.dumps(
    {
        "xds_servers": [{"server_uri": sys.argv[1], "channel_creds": [{"type": "insecure"}]}],
        "node": {"id": "a gRPC client", "metadata": {"NETWORK": "east", "CLUSTER_ID": "east"}},
    }
)

import grpc  # noqa: E402

METHOD = "/echo/Where"
PATIENCE = 15


def serve(host):
    """Starts a server that answers with its host; its port."""
    answer = grpc.unary_unary_rpc_method_handler(lambda request, context: host.encode())
    handlers = grpc.method_handlers_generic_handler("echo", {"Where": answer})
    pool = concurrent.futures.ThreadPoolExecutor(4)
    server = grpc.server(pool, handlers=[handlers], options=[("grpc.so_reuseport", 0)])
    port = server.add_insecure_port(f"{host}:0")
    server.start()
    return server, port


def say(line):
    print(json.dumps(line), flush=True)


def main():
    hosts = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    servers = [serve(host) for host in hosts]
    channels = {}
    say({"ready": True, "servers": [[host, port] for host, (_, port) in zip(hosts, servers, strict=True)]})
    for line in sys.stdin:
        order = json.loads(line)
        service = order["call"]
        made = channels.setdefault(service, grpc.insecure_channel(f"xds:///{service}:50051"))
        answered = collections.Counter()
        for _ in range(order["times"]):
            try:
                answered[made.unary_unary(METHOD)(b"", timeout=PATIENCE).decode()] += 1
            except grpc.RpcError as error:
                answered["failed"] += 1
                print(f"{service}: {error.code()}: {error.details()}", file=sys.stderr, flush=True)
        say({"done": answered})


main()
