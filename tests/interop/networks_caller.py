#!/usr/bin/env python3
"""gRPC servers of three networks, and a gRPC client that finds services over xDS, told by lines of JSON what to do.

    networks_caller.py FOLDER           with ca.pem, server.pem and server.key

Each line of standard input is answered by {"done": …}:
    {"ports": true}                     the ports of the servers of near, west and asia, on all addresses
    {"xds": "HOST:PORT", "network": N, "cluster": C, "targets": ["HOST:PORT"]}
                                        the xDS server, and one or two services; before the first call
    {"begin": rate}                     calls at this rate per second from now on; with "alone" every other one is to the second service;
                                        "lanes" is the number of calls at a time
    {"end": true}                       [began, took, is alone, network or null] of each call since then, in seconds
"""

import concurrent.futures
import json
import os
import pathlib
import sys
import threading
import time

import grpc

METHOD = "/echo/Where"
PATIENCE = 5
LANES = 32
FOLDER = pathlib.Path(sys.argv[1])


def read(name):
    return (FOLDER / name).read_bytes()


class Calls:
    """Calls at a steady rate, whatever becomes of earlier ones."""

    def __init__(self, channels, rate, alone, lanes):
        self.methods = [channel.unary_unary(METHOD) for channel in channels]
        self.rate, self.alone, self.begun, self.stop = rate, alone, time.monotonic(), threading.Event()
        self.lock, self.number, self.found = threading.Lock(), 0, []
        self.lanes = [threading.Thread(target=self.lane) for _ in range(lanes)]
        for lane in self.lanes:
            lane.start()

    def lane(self):
        while not self.stop.is_set():
            with self.lock:
                number, self.number = self.number, self.number + 1
            time.sleep(max(0.0, self.begun + number / self.rate - time.monotonic()))
            began, alone = time.monotonic(), self.alone and number % 2 == 1
            try:
                network = self.methods[alone](b"", timeout=PATIENCE).decode()
            except Exception as error:
                network = None
                print(f"{number}: {error}", file=sys.stderr, flush=True)
            self.found.append([began - self.begun, time.monotonic() - began, alone, network])

    def end(self):
        self.stop.set()
        for lane in self.lanes:
            lane.join()
        return self.found


def main():
    servers, ports, channels, calls = [], [], [], None
    for line in sys.stdin:
        order = json.loads(line)
        done = True
        if "xds" in order:
            # The address of the xDS server is read when gRPC makes its first xDS channel.
            os.environ["GRPC_XDS_BOOTSTRAP_CONFIG"] = json.dumps(
                {
                    "xds_servers": [{"server_uri": order["xds"], "channel_creds": [{"type": "insecure"}]}],
                    "node": {"id": "a gRPC client", "metadata": {"NETWORK": order["network"], "CLUSTER_ID": order["cluster"]}},
                }
            )
            credentials = grpc.ssl_channel_credentials(read("ca.pem"))
            channels = [grpc.secure_channel(f"xds:///{target}", credentials) for target in order["targets"]]
        elif "ports" in order:
            for network in ("near", "west", "asia"):
                answer = grpc.unary_unary_rpc_method_handler(lambda request, context, name=network: name.encode())
                handlers = grpc.method_handlers_generic_handler("echo", {"Where": answer})
                pool = concurrent.futures.ThreadPoolExecutor(8)
                server = grpc.server(pool, handlers=[handlers], options=[("grpc.so_reuseport", 0)])
                pair = [(read("server.key"), read("server.pem"))]
                ports.append(server.add_secure_port("0.0.0.0:0", grpc.ssl_server_credentials(pair)))
                server.start()
                servers.append(server)
            done = ports
        elif "begin" in order:
            calls = Calls(channels, order["begin"], order["alone"], order.get("lanes", LANES))
        elif "end" in order:
            done = calls.end()
        print(json.dumps({"done": done}), flush=True)


main()
