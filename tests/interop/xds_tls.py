"""A client of xDS by mutual TLS: asks for all clusters over delta ADS, and prints what comes of it as JSON.

    xds_tls.py ADDRESS NETWORK FOLDER yes|no|stay

FOLDER holds cert.pem, key.pem and roots.pem; with `no` the certificate is not shown. With `stay` the stream is held until
the server ends it, which is printed too.
"""

import itertools
import json
import queue
import sys

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.discovery.v3 import ads_pb2_grpc, discovery_pb2

TYPE = "type.googleapis.com/envoy.config.cluster.v3.Cluster"


def main(address, network, folder, certificate):
    read = lambda name: open(f"{folder}/{name}", "rb").read()
    own = (read("key.pem"), read("cert.pem")) if certificate != "no" else (None, None)
    credentials = grpc.ssl_channel_credentials(read("roots.pem"), *own)
    options = [("grpc.ssl_target_name_override", "gateway.test")]
    node = base_pb2.Node(id="n", user_agent_name="envoy")
    node.metadata.update({"NETWORK": network})
    request = discovery_pb2.DeltaDiscoveryRequest(node=node, type_url=TYPE, resource_names_subscribe=["*"])
    requests = iter([request])
    if certificate == "stay":
        requests = itertools.chain(requests, iter(queue.SimpleQueue().get, None))
    with grpc.secure_channel(address, credentials, options) as channel:
        stub = ads_pb2_grpc.AggregatedDiscoveryServiceStub(channel)
        try:
            for response in stub.DeltaAggregatedResources(requests, timeout=30):
                print(json.dumps({"clusters": [resource.name for resource in response.resources]}), flush=True)
                if certificate != "stay":
                    return
        except grpc.RpcError as error:
            print(json.dumps({"code": error.code().name, "details": error.details()}))


main(*sys.argv[1:])
