#!/usr/bin/env python3
"""gRPC servers of each TLS mode, and a gRPC client, told by lines of JSON what to do.

    ports_caller.py FOLDER              with ca.pem, and server and client, each .pem and .key

Each line of standard input is answered by {"done": …}:
    {"ports": true}                     the ports of the servers: mesh (mutual TLS), own (TLS), none
    {"xds": "HOST:PORT"}                the xDS server; before the first call by xds:///
    {"call": target, "tls": mode}       the answer: the mode of the server, or an error
    {"at once": n, "call": target}      how many of n calls without TLS, all open at the same time, are answered
"""

import concurrent.futures
import json
import os
import pathlib
import sys
import threading

import grpc

PATIENCE = 10
# What is asked of a thousand threads takes long on a busy machine.
AT_ONCE = 45
MODES = ["mesh", "own", "none"]
# gRPC resets some of more than 1,000 calls that Python has not taken yet.
UNLIMITED = [(f"grpc.server.max_pending_requests{which}", 100_000) for which in ("", "_hard_limit")]
FOLDER = pathlib.Path(sys.argv[1])


def read(name):
    return (FOLDER / name).read_bytes()


class Servers:
    """A server of each mode, which answers with its mode. A call with a body waits for all others of its kind."""

    def __init__(self):
        self.servers, self.ports = [], {}
        self.expect(0)
        pair = [(read("server.key"), read("server.pem"))]
        for mode in MODES:
            pool = concurrent.futures.ThreadPoolExecutor(4_000)
            server = grpc.server(pool, options=[("grpc.so_reuseport", 0), *UNLIMITED])
            answer = grpc.unary_unary_rpc_method_handler(lambda body, context, mode=mode: self.answer(mode, body))
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", {"Who": answer}),))
            if mode == "none":
                self.ports[mode] = server.add_insecure_port("127.0.0.1:0")
            else:
                mutual = {"root_certificates": read("ca.pem"), "require_client_auth": True} if mode == "mesh" else {}
                credentials = grpc.ssl_server_credentials(pair, **mutual)
                self.ports[mode] = server.add_secure_port("127.0.0.1:0", credentials)
            server.start()
            self.servers.append(server)

    def expect(self, count):
        """The calls that are open at the same time; each is answered when all are there."""
        self.lock, self.missing, self.all = threading.Lock(), count, threading.Event()

    def answer(self, mode, body):
        if body:
            with self.lock:
                self.missing -= 1
                if self.missing == 0:
                    self.all.set()
            self.all.wait(AT_ONCE)
            if not self.all.is_set():
                raise TimeoutError("not all calls have arrived")
        return mode.encode()


def channel(target, mode):
    if mode == "none":
        return grpc.insecure_channel(target)
    key = {"private_key": read("client.key"), "certificate_chain": read("client.pem")} if mode == "mesh" else {}
    credentials = grpc.ssl_channel_credentials(read("ca.pem"), **key)
    # The name that the servers' certificate has, where the target is an address.
    name = [] if target.startswith("xds:") else [("grpc.ssl_target_name_override", "a.shop.svc.cluster.local")]
    return grpc.secure_channel(target, credentials, options=name)


def call(target, mode):
    with channel(target, mode) as made:
        try:
            return made.unary_unary("/echo/Who")(b"", timeout=PATIENCE).decode()
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"


def at_once(target, count):
    with channel(target, "none") as made:
        method = made.unary_unary("/echo/Who")
        calls = [method.future(b"all", timeout=AT_ONCE + PATIENCE) for _ in range(count)]
        return sum(each.exception() is None for each in calls)


def main():
    servers = Servers()
    for line in sys.stdin:
        order = json.loads(line)
        if "ports" in order:
            done = servers.ports
        elif "xds" in order:
            server = {"server_uri": order["xds"], "channel_creds": [{"type": "insecure"}]}
            node = {"id": "a gRPC client", "metadata": {"NETWORK": "net-east", "CLUSTER_ID": "east"}}
            os.environ["GRPC_XDS_BOOTSTRAP_CONFIG"] = json.dumps({"xds_servers": [server], "node": node})
            done = True
        elif "at once" in order:
            servers.expect(order["at once"])
            done = at_once(order["call"], order["at once"])
        else:
            done = call(order["call"], order["tls"])
        print(json.dumps({"done": done}), flush=True)
    os._exit(0)


main()
