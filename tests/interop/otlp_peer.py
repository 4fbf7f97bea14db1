#!/usr/bin/env python3
"""A collector that takes spans by OTLP over gRPC, told by lines of JSON what to do.

    otlp_peer.py

Standard input has one object a line, each answered by {"done": true} once it holds; all keys are remembered:
    serve       whether anybody listens
    mute        (without serve) whether connections are taken by somebody who never says a word
    delay       seconds that every answer takes
    refuse      [code, message] for every call, or null
    times       how many calls are refused (all if it is absent or null)
    reject      how many spans of each call are said to be rejected
Standard output says {"ready": true, "port": ...} first, and of each call {"call": {"resource": ..., "spans": [...]}},
also of those that are refused. It ends with its input. The messages are the official ones, the transport is grpcio.
"""

import concurrent.futures
import json
import os
import socket
import sys
import threading
import time

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

said = threading.Lock()


def say(line):
    with said:
        print(json.dumps(line), flush=True)


def plain(attributes):
    values = {}
    for attribute in attributes:
        assert attribute.key not in values, f"{attribute.key} is there twice"
        values[attribute.key] = getattr(attribute.value, attribute.value.WhichOneof("value"))
    return values


def span(span, scope):
    return {
        "scope": scope.name,
        "trace": span.trace_id.hex(),
        "id": span.span_id.hex(),
        "parent": span.parent_span_id.hex(),
        "state": span.trace_state,
        "flags": span.flags,
        "name": span.name,
        "kind": type(span).SpanKind.Name(span.kind),
        "start": span.start_time_unix_nano,
        "end": span.end_time_unix_nano,
        "status": type(span.status).StatusCode.Name(span.status.code),
        "message": span.status.message,
        "attributes": plain(span.attributes),
    }


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self):
        self.state = {"serve": False, "mute": False, "delay": 0, "refuse": None, "times": None, "reject": 0}
        self.lock = threading.Lock()
        self.server = None
        self.silent = None
        # Keeps the port ours while nobody listens there; others share it.
        self.held = self.bound(0)
        self.port = self.held.getsockname()[1]

    @staticmethod
    def bound(port):
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", port))
        return held

    def tell(self, news):
        with self.lock:
            self.state |= news
        serve, mute = self.state["serve"], self.state["mute"] and not self.state["serve"]
        if self.silent and not mute:
            self.silent.close()
            self.silent = None
        if self.server and not serve:
            self.server.stop(0).wait()
            self.server = None
        if serve and not self.server:
            self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(max_workers=8))
            trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self.server)
            if not self.server.add_insecure_port(f"127.0.0.1:{self.port}"):
                raise RuntimeError(f"port {self.port} cannot be bound")
            self.server.start()
        if mute and not self.silent:
            # The kernel completes connections that nobody accepts.
            self.silent = self.bound(self.port)
            self.silent.listen(1000)

    def chosen(self):
        """What this call gets; chosen before the call is told, whose reader may give the next order at once."""
        with self.lock:
            state = dict(self.state)
            if state["refuse"] and state["times"] is not None:
                self.state["times"] -= 1
                if self.state["times"] == 0:
                    self.state |= {"refuse": None, "times": None}
            return state

    def Export(self, request, context):
        state = self.chosen()
        for each in request.resource_spans:
            spans = [span(one, scope.scope) for scope in each.scope_spans for one in scope.spans]
            say({"call": {"resource": plain(each.resource.attributes), "spans": spans, "at": time.time()}})
        time.sleep(state["delay"])
        if state["refuse"]:
            code, message = state["refuse"]
            context.abort(grpc.StatusCode[code], message)
        response = trace_service_pb2.ExportTraceServiceResponse()
        if state["reject"]:
            response.partial_success.rejected_spans = state["reject"]
            response.partial_success.error_message = "too many"
        return response


def main():
    collector = Collector()
    say({"ready": True, "port": collector.port})
    for line in sys.stdin:
        collector.tell(json.loads(line))
        say({"done": True})
    os._exit(0)


if __name__ == "__main__":
    main()
