#!/usr/bin/env python3
"""Writes what a running istiod says of the objects in this file: tests/golden/istiod.json, with which a test compares Isthmus.

    istiod_fields.py RIG ISTIOD CRDS… > ../golden/istiod.json

RIG is the program that tests/kube/build makes, ISTIOD is Istio's pilot-discovery, and CRDS are files with the definitions of Istio
(manifests/charts/base/files/crd-all.gen.yaml) and of the Gateway API. Each object is created in a real API server, whose controllers
fill EndpointSlices; the file holds the objects as the API server then has them. Needs what xds.txt and identity.txt pin, PyYAML,
and openssl.
"""

import base64
import json
import os
import pathlib
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import yaml

import fields

TOKEN = "the-tests-admin"
TLS_MODE = {"security.istio.io/tlsMode": "istio"}
REDIRECTED = {"ambient.istio.io/redirection": "enabled"}
DISTRIBUTION = "networking.istio.io/traffic-distribution"
# The kinds that the file holds, each with its path and whether it has namespaces.
KINDS = {
    "Namespace": ("api/v1", "namespaces", False),
    "Node": ("api/v1", "nodes", False),
    "Service": ("api/v1", "services", True),
    "Pod": ("api/v1", "pods", True),
    "EndpointSlice": ("apis/discovery.k8s.io/v1", "endpointslices", True),
    "GatewayClass": ("apis/gateway.networking.k8s.io/v1", "gatewayclasses", False),
    "Gateway": ("apis/gateway.networking.k8s.io/v1", "gateways", True),
    "DestinationRule": ("apis/networking.istio.io/v1", "destinationrules", True),
    "AuthorizationPolicy": ("apis/security.istio.io/v1", "authorizationpolicies", True),
    "PeerAuthentication": ("apis/security.istio.io/v1", "peerauthentications", True),
}


def meta(key, labels=None, annotations=None):
    namespace, _, name = key.rpartition("/")
    made = {"name": name, "labels": labels or {}, "annotations": annotations or {}}
    return {**made, "namespace": namespace} if namespace else made


def thing(kind, key, spec=None, labels=None, annotations=None, status=None):
    path = KINDS[kind][0]
    made = {"apiVersion": path.removeprefix("apis/").removeprefix("api/"), "kind": kind,
            "metadata": meta(key, labels, annotations)}
    if spec is not None:
        made["spec"] = spec
    if status is not None:
        made["status"] = status
    return made


def port(number, name="", target=None, app=None, protocol="TCP"):
    made = {"port": number, "protocol": protocol, "targetPort": target or number + 8000}
    if name:
        made["name"] = name
    if app is not None:
        made["appProtocol"] = app
    return made


class World:
    """The objects, in the order in which they are created."""

    def __init__(self):
        self.objects = []
        self.terminating = []
        self.used = set()
        self.addresses = 0
        self.virtual = 0

    def add(self, *arguments, **more):
        self.objects.append(thing(*arguments, **more))

    def pod(self, key, labels=None, annotations=None, *, account="default", node="node-1", ready="True", phase="Running",
            ports=(), addresses=None, host=False, owner=None, generate=None, terminating=False):
        if addresses is None:
            self.addresses += 1
            addresses = [f"10.244.{self.addresses // 250}.{self.addresses % 250 + 1}"]
        container = {"name": "main", "image": "none"}
        if ports:
            container["ports"] = [{"name": name, "containerPort": number} for name, number in ports]
        spec = {"containers": [container], "serviceAccountName": account, "nodeName": node}
        if host:
            spec["hostNetwork"] = True
        status = {"phase": phase, "podIPs": [{"ip": ip} for ip in addresses],
                  "conditions": [{"type": "Ready", "status": ready}]}
        if addresses:
            status["podIP"] = addresses[0]
        made = thing("Pod", key, spec, labels, annotations, status)
        if owner:
            made["metadata"]["ownerReferences"] = [
                {"apiVersion": "apps/v1", "kind": owner[0], "name": owner[1], "uid": f"owner-{owner[1]}", "controller": True}]
        if generate:
            made["metadata"]["generateName"] = generate
        self.objects.append(made)
        if terminating:
            self.terminating.append(key)

    def service(self, key, ports=None, labels=None, annotations=None, *, selector="", **spec):
        name = key.rpartition("/")[2]
        spec = {"ports": ports or [port(80, "http")], **spec}
        if selector is not None:
            spec["selector"] = {"app": selector or name}
        if spec.get("clusterIP") != "None" and spec.get("type") != "ExternalName" and "clusterIPs" not in spec:
            self.virtual += 1
            spec["clusterIP"] = f"10.96.1.{self.virtual}"
        self.add("Service", key, spec, labels, annotations)

    def served(self, key, ports=None, labels=None, annotations=None, *, pod_labels=None, pod_annotations=None, pod=None, **spec):
        """A service and one pod of it."""
        self.service(key, ports, labels, annotations, **spec)
        name = key.rpartition("/")[2]
        self.pod(f"{key}-0", {"app": name, **(pod_labels or {})}, pod_annotations, **(pod or {}))

    def slice(self, key, service, addresses, ports, conditions=None, family="IPv4", managed=None, **more):
        labels = {"kubernetes.io/service-name": service}
        if managed:
            labels["endpointslice.kubernetes.io/managed-by"] = managed
        made = thing("EndpointSlice", key, labels=labels)
        ready = conditions or {"ready": True}
        made["addressType"] = family
        made["ports"] = [{"name": name, "port": number, "protocol": "TCP"} for name, number in ports]
        made["endpoints"] = [{"addresses": [ip], "conditions": ready, **more} for ip in addresses]
        self.objects.append(made)


def waypoint(world, key, labels=None, allowed="Same", hostname=None):
    namespace, _, name = key.rpartition("/")
    listener = {"name": "mesh", "port": 15008, "protocol": "HBONE", "allowedRoutes": {"namespaces": {"from": allowed}}}
    address = {"type": "Hostname", "value": hostname or f"{name}.{namespace}.svc.cluster.local"}
    world.service(key, [port(15008, "mesh", 15008, "all")], {"gateway.networking.k8s.io/gateway-name": name,
                                                             "gateway.istio.io/managed": "istio.io-mesh-controller"})
    world.pod(f"{key}-0", {"app": name, "gateway.networking.k8s.io/gateway-name": name,
                           "gateway.istio.io/managed": "istio.io-mesh-controller"}, account=name)
    status = {"addresses": [address], "conditions": [
        {"type": "Programmed", "status": "True", "reason": "Programmed", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}
    world.add("Gateway", key, {"gatewayClassName": "isthmus-test-waypoint", "listeners": [listener]}, labels, status=status)


def policy(world, key, spec, annotations=None):
    world.add("AuthorizationPolicy", key, spec, annotations=annotations)


def source(**conditions):
    return {"from": [{"source": conditions}]}


def to(**conditions):
    return {"to": [{"operation": conditions}]}


def namespaces(world):
    ambient = {"istio.io/dataplane-mode": "ambient"}
    world.add("Namespace", "istio-system", labels={"topology.istio.io/network": "net-east"})
    world.add("Namespace", "shop", labels={"istio-injection": "enabled"})
    world.add("Namespace", "amb", labels=ambient)
    world.add("Namespace", "plain")
    world.add("Namespace", "close", labels=ambient, annotations={DISTRIBUTION: "PreferClose"})
    world.add("Namespace", "way", labels={**ambient, "istio.io/use-waypoint": "gate"})
    world.add("Namespace", "far", labels={**ambient, "istio.io/use-waypoint": "open", "istio.io/use-waypoint-namespace": "way"})
    world.add("Namespace", "entry", labels={**ambient, "istio.io/use-waypoint": "gate", "istio.io/ingress-use-waypoint": "true"})
    world.add("Namespace", "strict", labels=ambient)
    world.add("Namespace", "lax", labels=ambient)
    world.add("Namespace", "rules", labels={"istio-injection": "enabled"})
    region, zone, subzone = "topology.kubernetes.io/region", "topology.kubernetes.io/zone", "topology.istio.io/subzone"
    world.add("Node", "node-1", labels={region: "r1", zone: "z1", subzone: "s1"})
    world.add("Node", "node-2", labels={region: "r1", zone: "z2"})
    world.add("Node", "node-3")


def protocols(world):
    names = ["http", "http2", "https", "tls", "tcp", "grpc", "grpc-web", "grpc-web-ui", "grpc-websocket", "grpc-api", "grpcweb",
             "http-web", "mongo", "redis", "mysql", "udp-like", "hbone", "web", "http3", "httpx", "auto"]
    apps = ["http", "HTTP2", "https", "TLS", "tcp", "grpc", "GRPC-Web", "grpc-web.example", "kubernetes.io/h2c", "kubernetes.io/ws",
            "kubernetes.io/wss", "mongo", "redis", "udp", "example.com/odd", "http-x", "hbone", "kubernetes.io/H2C", "tls-x"]
    named = [port(1000 + at, name) for at, name in enumerate(names)]
    world.served("shop/names", named, pod_labels=TLS_MODE)
    world.served("amb/names", named, pod_annotations=REDIRECTED)
    by_app = [port(1000 + at, f"p{at}", app=app) for at, app in enumerate(apps)]
    world.served("shop/apps", by_app, pod_labels=TLS_MODE)
    world.served("amb/apps", by_app, pod_annotations=REDIRECTED)
    world.served("amb/app-first", [port(80, "http", app="grpc"), port(81, "grpc", app="odd"), port(82, "tls", app="http")],
                 pod_annotations=REDIRECTED)
    world.served("shop/unnamed", [port(80)], pod_labels=TLS_MODE)
    world.served("shop/mail", [port(25, "a"), port(53, "b"), port(3306, "c"), port(27017, "d")], pod_labels=TLS_MODE)
    world.served("amb/datagrams", [port(53, "dns", protocol="UDP"), port(53, "dns-tcp"), port(90, "sctp", protocol="SCTP")],
                 pod_annotations=REDIRECTED)
    world.served("amb/only-udp", [port(53, "dns", protocol="UDP")], pod_annotations=REDIRECTED)
    world.served("amb/target-named", [port(80, "http", "web"), port(81, "more", "other")], pod_annotations=REDIRECTED,
                 pod={"ports": (("web", 8080), ("other", 9090))})
    world.service("amb/target-differs", [port(80, "http", "web")])
    for at, number in enumerate((8080, 9090)):
        world.pod(f"amb/target-differs-{at}", {"app": "target-differs"}, REDIRECTED, ports=(("web", number),))
    world.service("amb/target-absent", [port(80, "http", "web")])
    world.pod("amb/target-absent-0", {"app": "target-absent"}, REDIRECTED)
    world.served("amb/same-target", [port(80, "http", 8080), port(81, "http-more", 8080)], pod_annotations=REDIRECTED)


def shapes(world):
    world.served("amb/headless", clusterIP="None", pod_annotations=REDIRECTED)
    world.service("amb/headless-set", [port(80, "http")], clusterIP="None")
    for at in range(2):
        world.pod(f"amb/headless-set-{at}", {"app": "headless-set"}, REDIRECTED, owner=("StatefulSet", "headless-set"))
    world.service("amb/headless-no-port", clusterIP="None")
    world.objects[-1]["spec"]["ports"] = []
    world.pod("amb/headless-no-port-0", {"app": "headless-no-port"}, REDIRECTED)
    world.served("shop/headless", clusterIP="None", pod_labels=TLS_MODE)
    world.service("amb/named-elsewhere", [port(80, "http")], selector=None, type="ExternalName", externalName="www.example.com")
    world.service("amb/no-selector", [port(80, "http", 8080)], selector=None)
    world.slice("amb/no-selector-a", "no-selector", ["192.0.2.10", "192.0.2.11"], [("http", 8080)])
    world.service("amb/no-selector-two", [port(80, "http", 8080), port(81, "tcp", 8081)], selector=None)
    world.slice("amb/no-selector-two-a", "no-selector-two", ["192.0.2.20"], [("http", 8080)], {"ready": False})
    world.slice("amb/no-selector-two-b", "no-selector-two", ["192.0.2.21"], [("http", 8080), ("tcp", 9091)], nodeName="node-2")
    world.service("amb/no-endpoints")
    world.service("amb/selects-by-slice", [port(80, "http", 8080)], selector=None)
    world.slice("amb/selects-by-slice-a", "selects-by-slice", ["10.244.0.2"], [("http", 8080)],
                targetRef={"kind": "Pod", "namespace": "shop", "name": "names-0"})
    world.service("amb/two-select", [port(80, "http")], selector="shared")
    world.service("amb/two-select-more", [port(90, "tcp")], selector="shared")
    world.pod("amb/shared-0", {"app": "shared"}, REDIRECTED)
    world.served("amb/load-balancer", type="LoadBalancer", pod_annotations=REDIRECTED)
    world.served("amb/node-port", type="NodePort", pod_annotations=REDIRECTED)
    world.served("amb/external-ips", externalIPs=["198.51.100.7"], pod_annotations=REDIRECTED)
    world.served("amb/sticky", sessionAffinity="ClientIP", pod_annotations=REDIRECTED)
    world.served("amb/export-dot", annotations={"networking.istio.io/exportTo": "."}, pod_annotations=REDIRECTED)
    world.served("shop/export-none", annotations={"networking.istio.io/exportTo": "~"}, pod_labels=TLS_MODE)
    world.served("plain/export-elsewhere", annotations={"networking.istio.io/exportTo": "amb"})


def families(world):
    dual = {"ipFamilyPolicy": "RequireDualStack"}
    both = ["10.244.200.1", "fd00:244::1"]
    world.served("amb/dual", ipFamilies=["IPv4", "IPv6"], clusterIPs=["10.96.2.1", "fd00:96::1"], clusterIP="10.96.2.1", **dual,
                 pod_annotations=REDIRECTED, pod={"addresses": both})
    world.served("amb/dual-six-first", ipFamilies=["IPv6", "IPv4"], clusterIPs=["fd00:96::2", "10.96.2.2"], clusterIP="fd00:96::2",
                 **dual, pod_annotations=REDIRECTED, pod={"addresses": ["fd00:244::2", "10.244.200.2"]})
    world.served("amb/six", ipFamilies=["IPv6"], clusterIPs=["fd00:96::3"], clusterIP="fd00:96::3", ipFamilyPolicy="SingleStack",
                 pod_annotations=REDIRECTED, pod={"addresses": ["fd00:244::3"]})
    world.served("amb/four-dual-pods", pod_annotations=REDIRECTED, pod={"addresses": ["10.244.200.4", "fd00:244::4"]})
    world.served("amb/dual-headless", ipFamilies=["IPv4", "IPv6"], clusterIP="None", clusterIPs=["None"], **dual,
                 pod_annotations=REDIRECTED, pod={"addresses": ["10.244.200.5", "fd00:244::5"]})
    world.served("shop/dual", ipFamilies=["IPv4", "IPv6"], clusterIPs=["10.96.2.6", "fd00:96::6"], clusterIP="10.96.2.6", **dual,
                 pod_labels=TLS_MODE, pod={"addresses": ["10.244.200.6", "fd00:244::6"]})


def choices(world):
    for name, spec, annotations in (
        ("prefer-close", {"trafficDistribution": "PreferClose"}, None),
        ("prefer-zone", {"trafficDistribution": "PreferSameZone"}, None),
        ("prefer-node", {"trafficDistribution": "PreferSameNode"}, None),
        ("annotated", {}, {DISTRIBUTION: "PreferSameNode"}),
        ("annotated-odd", {}, {DISTRIBUTION: "Odd"}),
        ("local", {"internalTrafficPolicy": "Local"}, None),
        ("local-close", {"internalTrafficPolicy": "Local", "trafficDistribution": "PreferClose"}, None),
        ("unready-too", {"publishNotReadyAddresses": True}, None),
        ("unready-close", {"publishNotReadyAddresses": True, "trafficDistribution": "PreferClose"}, None),
    ):
        for namespace, more in (("amb", {"pod_annotations": REDIRECTED}), ("shop", {"pod_labels": TLS_MODE})):
            key = f"{namespace}/{name}"
            world.service(key, None, None, annotations, **spec)
            for at, (node, ready) in enumerate((("node-1", "True"), ("node-2", "True"), ("node-3", "False"))):
                world.pod(f"{key}-{at}", {"app": name, **more.get("pod_labels", {})}, more.get("pod_annotations"), node=node,
                          ready=ready)
    world.served("close/inherits", pod_annotations=REDIRECTED)
    world.served("close/own", trafficDistribution="PreferSameNode", pod_annotations=REDIRECTED)
    world.served("close/no-choice", annotations={DISTRIBUTION: "Any"}, pod_annotations=REDIRECTED)


def pods(world):
    world.service("amb/states")
    for name, more in (
        ("ready", {}), ("unready", {"ready": "False"}), ("unknown", {"ready": "Unknown"}),
        ("pending", {"phase": "Pending", "ready": "False"}), ("succeeded", {"phase": "Succeeded", "ready": "False"}),
        ("failed", {"phase": "Failed", "ready": "False"}), ("terminating", {"terminating": True}),
        ("no-address", {"phase": "Pending", "addresses": []}), ("terminating-unready", {"terminating": True, "ready": "False"}),
    ):
        world.pod(f"amb/states-{name}", {"app": "states"}, REDIRECTED, **more)
    world.service("shop/states")
    for name, more in (("ready", {}), ("unready", {"ready": "False"}), ("terminating", {"terminating": True}),
                       ("succeeded", {"phase": "Succeeded", "ready": "False"})):
        world.pod(f"shop/states-{name}", {"app": "states", **TLS_MODE}, **more)
    world.service("amb/accounts")
    world.service("shop/accounts")
    for at, account in enumerate(("one", "two", "two")):
        world.pod(f"amb/accounts-{at}", {"app": "accounts"}, REDIRECTED, account=account, node=f"node-{at + 1}")
        world.pod(f"shop/accounts-{at}", {"app": "accounts", **TLS_MODE}, account=account, node=f"node-{at + 1}")
    world.served("amb/host-network", pod_annotations=REDIRECTED, pod={"host": True, "addresses": ["198.51.100.1"]})
    world.served("shop/host-network", pod_labels=TLS_MODE, pod={"host": True, "addresses": ["198.51.100.2"]})
    for name, labels, annotations in (
        ("label-http", {"networking.istio.io/tunnel": "http"}, None),
        ("redirected-odd", {}, {"ambient.istio.io/redirection": "pending"}),
        ("both", TLS_MODE, REDIRECTED),
        ("sidecar", TLS_MODE, None),
        ("sidecar-disabled", {"security.istio.io/tlsMode": "disabled"}, None),
        ("locality", {"istio-locality": "r9.z9.s9"}, REDIRECTED),
        ("network", {"topology.istio.io/network": "net-west"}, REDIRECTED),
        ("draining", {"istio.io/draining": "now"}, REDIRECTED),
    ):
        world.served(f"amb/{name}", pod_labels=labels, pod_annotations=annotations)
    world.served("shop/plain-pod")
    world.served("shop/network", pod_labels={**TLS_MODE, "topology.istio.io/network": "net-west"})
    world.service("shop/mixed")
    world.pod("shop/mixed-0", {"app": "mixed", **TLS_MODE})
    world.pod("shop/mixed-1", {"app": "mixed"}, node="node-2")
    world.service("shop/mixed-ambient")
    world.pod("shop/mixed-ambient-0", {"app": "mixed-ambient", **TLS_MODE})
    world.pod("shop/mixed-ambient-1", {"app": "mixed-ambient"}, REDIRECTED)
    world.pod("plain/alone", {"app": "alone"})
    world.pod("amb/bare", {}, REDIRECTED, node="node-3")
    canonical = "service.istio.io/canonical-name"
    for name, labels, more in (
        ("deployed-7d9f-abcde", {"app": "deployed", "version": "v1", "pod-template-hash": "7d9f"},
         {"owner": ("ReplicaSet", "deployed-7d9f"), "generate": "deployed-7d9f-"}),
        ("job-29012345-abcde", {"app": "job"}, {"owner": ("Job", "job-29012345"), "generate": "job-29012345-"}),
        ("job-long-1700000000-x", {}, {"owner": ("Job", "job-long-1700000000"), "generate": "job-long-1700000000-"}),
        ("set-0", {"app": "set"}, {"owner": ("StatefulSet", "set"), "generate": "set-"}),
        ("daemon-abcde", {"app.kubernetes.io/name": "n", "app.kubernetes.io/version": "v9"},
         {"owner": ("DaemonSet", "daemon"), "generate": "daemon-"}),
        ("named", {canonical: "c", "service.istio.io/canonical-revision": "r9", "app": "a"}, {}),
        ("workload-name", {"service.istio.io/workload-name": "w"}, {}),
        ("empty-labels", {canonical: "", "app": "", "version": ""}, {}),
        ("controller-2-x", {"deploymentconfig": "dc"}, {"owner": ("ReplicationController", "controller-2"), "generate": "controller-2-"}),
        ("rollout-5c-x", {"rollouts-pod-template-hash": "5c"}, {"owner": ("ReplicaSet", "rollout-5c"), "generate": "rollout-5c-"}),
        ("truncated-abcde", {"pod-template-hash": "7d9f"}, {"owner": ("ReplicaSet", "truncated-7d9f"), "generate": "trunca"}),
    ):
        world.pod(f"plain/{name}", labels, **more)


def waypoints(world):
    use, own = "istio.io/use-waypoint", "istio.io/use-waypoint-namespace"
    world.add("GatewayClass", "isthmus-test-waypoint", {"controllerName": "example.com/none"})
    world.add("GatewayClass", "isthmus-test-all", {"controllerName": "example.com/none"}, {"istio.io/waypoint-for": "all"})
    waypoint(world, "way/gate")
    waypoint(world, "way/all", {"istio.io/waypoint-for": "all"})
    waypoint(world, "way/workloads", {"istio.io/waypoint-for": "workload"})
    waypoint(world, "way/nothing", {"istio.io/waypoint-for": "none"})
    waypoint(world, "way/class-all")
    world.objects[-1]["spec"]["gatewayClassName"] = "isthmus-test-all"
    waypoint(world, "way/open", {"istio.io/waypoint-for": "all"}, "All")
    waypoint(world, "way/next")
    waypoint(world, "entry/gate")
    world.served("way/inherits", pod_annotations=REDIRECTED)
    world.served("way/none", labels={use: "none"}, pod_annotations=REDIRECTED, pod_labels={use: "none"})
    for name in ("all", "workloads", "nothing", "class-all", "absent"):
        world.served(f"way/by-{name}", labels={use: name}, pod_annotations=REDIRECTED, pod_labels={use: name})
    world.served("way/headless", clusterIP="None", pod_annotations=REDIRECTED)
    world.served("way/canary", labels={"istio.io/use-waypoint-canary": "next", use: "gate"},
                 annotations={"istio.io/use-waypoint-canary-weight": "20"}, pod_annotations=REDIRECTED)
    world.served("far/inherits", pod_annotations=REDIRECTED)
    world.served("far/not-allowed", labels={use: "gate", own: "way"}, pod_annotations=REDIRECTED)
    world.served("entry/inherits", pod_annotations=REDIRECTED)
    world.served("entry/not-ingress", labels={"istio.io/ingress-use-waypoint": "false"}, pod_annotations=REDIRECTED)


def security(world):
    world.add("PeerAuthentication", "strict/default", {"mtls": {"mode": "STRICT"}})
    world.add("PeerAuthentication", "lax/default", {"mtls": {"mode": "PERMISSIVE"}})
    def ports(mode, **levels):
        return {"mtls": {"mode": mode}, "portLevelMtls": {number[1:]: {"mode": level} for number, level in levels.items()}}
    cases = {
        "plain": None, "unset": {"mtls": {"mode": "UNSET"}}, "disable": {"mtls": {"mode": "DISABLE"}}, "strict": {"mtls": {"mode": "STRICT"}},
        "permissive": {"mtls": {"mode": "PERMISSIVE"}},
        "strict-open": ports("STRICT", p8080="PERMISSIVE"), "strict-two-open": ports("STRICT", p8080="PERMISSIVE", p8081="DISABLE"),
        "strict-same": ports("STRICT", p8080="STRICT"), "open-strict": ports("PERMISSIVE", p8080="STRICT"),
        "open-two-strict": ports("PERMISSIVE", p8080="STRICT", p8081="STRICT"),
        "unset-strict": ports("UNSET", p8080="STRICT"), "unset-open": ports("UNSET", p8080="PERMISSIVE"),
        "unset-disable": ports("UNSET", p8080="DISABLE"), "unset-mixed": ports("UNSET", p8080="PERMISSIVE", p8081="STRICT"),
        "strict-mixed": ports("STRICT", p8080="PERMISSIVE", p8081="STRICT", p8082="UNSET"),
        "disable-strict": ports("DISABLE", p8080="STRICT"),
    }
    for namespace in ("strict", "lax"):
        for name, spec in cases.items():
            world.pod(f"{namespace}/{name}", {"app": name}, REDIRECTED)
            if spec:
                world.add("PeerAuthentication", f"{namespace}/{name}", {"selector": {"matchLabels": {"app": name}}, **spec})
    world.add("PeerAuthentication", "strict/younger", {"mtls": {"mode": "PERMISSIVE"}})
    world.served("shop/strict-peer", pod_labels=TLS_MODE)
    world.add("PeerAuthentication", "shop/strict-peer", {"selector": {"matchLabels": {"app": "strict-peer"}}, "mtls": {"mode": "STRICT"}})
    world.served("shop/disabled-peer", pod_labels=TLS_MODE)
    world.add("PeerAuthentication", "shop/disabled-peer", {"selector": {"matchLabels": {"app": "disabled-peer"}}, "mtls": {"mode": "DISABLE"}})

    principal = "cluster.local/ns/shop/sa/web"
    # An istiod of 2026-08 ends on a rule with an empty `from` or `to`.
    policy(world, "istio-system/everywhere", {"action": "DENY", "rules": [source(principals=["cluster.local/ns/x/sa/bad"])]})
    policy(world, "istio-system/selecting", {"selector": {"matchLabels": {"app": "states"}}, "rules": [source(namespaces=["amb"])]})
    policy(world, "amb/nothing", {"selector": {"matchLabels": {"app": "nothing"}}})
    policy(world, "amb/of-namespace", {"action": "DENY", "rules": [source(principals=["cluster.local/ns/x/sa/bad"])]})
    policy(world, "amb/everything", {"selector": {"matchLabels": {"app": "everything"}}, "rules": [{}]})
    policy(world, "amb/dry", {"selector": {"matchLabels": {"app": "dual"}}, "rules": [{}]}, {"istio.io/dry-run": "true"})
    policy(world, "amb/dry-false", {"selector": {"matchLabels": {"app": "dual"}}, "rules": [{}]}, {"istio.io/dry-run": "false"})
    policy(world, "amb/dry-odd", {"selector": {"matchLabels": {"app": "dual"}}, "rules": [{}]}, {"istio.io/dry-run": "odd"})
    policy(world, "amb/audit", {"selector": {"matchLabels": {"app": "dual"}}, "action": "AUDIT", "rules": [{}]})
    policy(world, "amb/custom", {"selector": {"matchLabels": {"app": "dual"}}, "action": "CUSTOM", "provider": {"name": "x"}, "rules": [{}]})
    policy(world, "amb/targeted", {"targetRefs": [{"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "g"}], "rules": [{}]})
    policy(world, "amb/target-service", {"targetRefs": [{"kind": "Service", "group": "", "name": "dual"}], "rules": [{}]})
    conditions = {
        "principals": source(principals=[principal, "*", "cluster.local/ns/shop/*", "*/sa/web"]),
        "not-principals": source(notPrincipals=[principal]),
        "namespaces": source(namespaces=["a", "b*", "*c"], notNamespaces=["d"]),
        "accounts": source(serviceAccounts=["web", "other/web"], notServiceAccounts=["bad"]),
        "ips": source(ipBlocks=["10.0.0.1", "10.0.0.0/8", "fd00::/16"], notIpBlocks=["10.1.0.0/16"]),
        "remote-ips": source(remoteIpBlocks=["10.0.0.1"], principals=[principal]),
        "request-principals": source(requestPrincipals=["*"]),
        "ports": to(ports=["80", "443"], notPorts=["81"]),
        "methods": to(methods=["GET"], ports=["80"]), "paths": to(paths=["/a"]), "hosts": to(hosts=["h"], notPorts=["1"]),
        "from-to": {**source(principals=[principal]), **to(ports=["80"])},
        "two-from": {"from": [{"source": {"principals": [principal]}}, {"source": {"namespaces": ["x"]}}]},
        "when-principal": {"when": [{"key": "source.principal", "values": [principal], "notValues": ["x"]}]},
        "when-namespace": {"when": [{"key": "source.namespace", "values": ["x*"]}]},
        "when-ip": {"when": [{"key": "source.ip", "values": ["10.0.0.0/8"], "notValues": ["10.1.0.1"]}]},
        "when-destination": {"when": [{"key": "destination.ip", "values": ["10.0.0.9"]}, {"key": "destination.port", "notValues": ["80"]}]},
        "when-header": {"when": [{"key": "request.headers[x]", "values": ["y"]}]},
        "when-not-header": {"when": [{"key": "request.headers[x]", "notValues": ["y"]}]},
        "when-sni": {"when": [{"key": "connection.sni", "values": ["y"]}], **to(ports=["80"])},
        "when-account": {"when": [{"key": "source.serviceAccount", "values": ["amb/web", "x/y"]}]},
        "remote-ip-when": {"when": [{"key": "remote.ip", "values": ["10.0.0.1"]}]},
        "trust-domain": source(principals=["other.domain/ns/x/sa/y"]),
    }
    for name, rule in conditions.items():
        for action in ("ALLOW", "DENY"):
            spec = {"action": action, "selector": {"matchLabels": {"app": "conditions"}}, "rules": [rule, source(principals=[principal])]}
            policy(world, f"amb/{action.lower()}-{name}", spec)
    world.pod("amb/conditions", {"app": "conditions"}, REDIRECTED)


def destination_rules(world):
    def rule(name, **spec):
        world.served(f"rules/{name}", pod_labels={**TLS_MODE, "version": "v1"})
        world.add("DestinationRule", f"rules/{name}", {"host": f"{name}.rules.svc.cluster.local", **spec})
    pool = {"tcp": {"maxConnections": 10, "connectTimeout": "5s"}, "http": {"http2MaxRequests": 20, "h2UpgradePolicy": "UPGRADE"}}
    rule("subsets", subsets=[{"name": "v1", "labels": {"version": "v1"}}, {"name": "v2", "labels": {"version": "v2"}}])
    rule("pool", trafficPolicy={"connectionPool": pool})
    rule("outliers", trafficPolicy={"outlierDetection": {"consecutive5xxErrors": 7, "interval": "30s"}})
    rule("disable", trafficPolicy={"tls": {"mode": "DISABLE"}})
    rule("mutual", trafficPolicy={"tls": {"mode": "ISTIO_MUTUAL"}})
    rule("simple", trafficPolicy={"tls": {"mode": "SIMPLE", "sni": "x.example"}})
    rule("random", trafficPolicy={"loadBalancer": {"simple": "RANDOM"}})
    rule("hashed", trafficPolicy={"loadBalancer": {"consistentHash": {"httpHeaderName": "x"}}})


def world():
    made = World()
    for part in (namespaces, protocols, shapes, families, choices, pods, waypoints, security, destination_rules):
        part(made)
    return made


class Processes:
    """Processes that end with the script."""

    def __init__(self, folder):
        self.folder, self.all = folder, []

    def start(self, name, arguments, environment=None):
        log = open(self.folder / f"{name}.log", "wb")
        self.all.append(subprocess.Popen(arguments, cwd=self.folder, stdin=subprocess.PIPE, stdout=log, stderr=log,
                                         env={**os.environ, **(environment or {})}))

    def stop(self):
        for process in reversed(self.all):
            process.send_signal(signal.SIGKILL)
            process.wait()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def certificates(folder):
    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem")
    for name in ("server", "accounts"):
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
                "-extfile", "names", "-out", f"{name}.pem")
    (folder / "tokens.csv").write_text(f"{TOKEN},admin,admin,system:masters\n")


class Api:
    """An API server with its etcd and controllers."""

    def __init__(self, rig, folder, processes):
        certificates(folder)
        etcd, self.port = f"127.0.0.1:{free_port()}", free_port()
        processes.start("etcd", [rig, "--attached", "etcd", "--data", "data", "--listen", etcd])
        processes.start("apiserver", [rig, "--attached", "apiserver", *(
            f"--etcd-servers=http://{etcd} --bind-address=127.0.0.1 --secure-port={self.port} --client-ca-file=ca.pem "
            "--cert-dir=certificates --tls-cert-file=server.pem --tls-private-key-file=server.key --token-auth-file=tokens.csv "
            "--service-cluster-ip-range=10.96.0.0/16,fd00:96::/108 --service-account-issuer=https://kubernetes.default.svc "
            "--service-account-signing-key-file=accounts.key --service-account-key-file=accounts.pem --authorization-mode=RBAC "
            "--disable-admission-plugins=ServiceAccount --endpoint-reconciler-type=none --advertise-address=192.0.2.1").split()])
        self.context = ssl.create_default_context(cafile=folder / "ca.pem")
        self.context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        ca = base64.b64encode((folder / "ca.pem").read_bytes()).decode()
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "east",
                  "clusters": [{"name": "east", "cluster": {"certificate-authority-data": ca, "server": f"https://127.0.0.1:{self.port}"}}],
                  "contexts": [{"name": "east", "context": {"cluster": "east", "user": "east"}}],
                  "users": [{"name": "east", "user": {"token": TOKEN}}]}
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(json.dumps(config))
        until("the API server", lambda: self.call("GET", "/readyz") is not None)
        until("its namespaces", lambda: self.call("GET", "/api/v1/namespaces/default"))
        processes.start("controllers", [rig, "--attached", "controllers", "--kubeconfig", "kubeconfig",
                                        "--service-account-private-key-file", "accounts.key"])

    def call(self, method, path, body=None, kind="application/json"):
        """The answer, or None if there is none or it refuses."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"https://127.0.0.1:{self.port}{path}", data, method=method,
                                         headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": kind})
        try:
            with urllib.request.urlopen(request, context=self.context, timeout=30) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            self.refused = f"{method} {path}: {error.code} {error.read().decode()}"
            return None
        except OSError as error:
            self.refused = f"{method} {path}: {error}"
            return None
        return json.loads(text) if text.startswith(b"{") else text

    def must(self, *arguments):
        answer = self.call(*arguments)
        if answer is None:
            raise RuntimeError(self.refused)
        return answer

    def create(self, made):
        path, plural, has_namespace = KINDS[made["kind"]]
        inside = f"namespaces/{made['metadata'].get('namespace')}/" if has_namespace else ""
        at = f"/{path}/{inside}{plural}"
        self.must("POST", at, made)
        if "status" in made:
            self.must("PATCH", f"{at}/{made['metadata']['name']}/status", {"status": made["status"]}, "application/merge-patch+json")

    def objects(self):
        for kind, (path, plural, _) in KINDS.items():
            for made in self.must("GET", f"/{path}/{plural}")["items"]:
                yield {"kind": kind, **made}


def until(what, check, limit=120):
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if check():
            return
        time.sleep(0.2)
    raise RuntimeError(f"no {what} within {limit} s")


def settled(take, quiet=3):
    """What `take` gives, once it has given the same several times in a row."""
    last, same = None, 0
    end = time.monotonic() + 120
    while time.monotonic() < end:
        now = take()
        same = same + 1 if now == last else 0
        last = now
        if same >= quiet:
            return now
        time.sleep(1)
    raise RuntimeError("it does not settle")


def fill(api, crds):
    for file in crds:
        for made in yaml.safe_load_all(pathlib.Path(file).read_text()):
            if made and made["kind"] == "CustomResourceDefinition":
                api.must("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", made)
    for path, plural, _ in KINDS.values():
        until(plural, lambda path=path, plural=plural: api.call("GET", f"/{path}/{plural}") is not None)
    made = world()
    for one in made.objects:
        if one["metadata"]["name"] == "younger":
            # The oldest PeerAuthentication applies, and times have seconds.
            time.sleep(2)
        api.create(one)
    for key in made.terminating:
        namespace, name = key.split("/")
        api.must("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}", {"gracePeriodSeconds": 86400})
    return {one["metadata"]["name"] for one in made.objects}


def tidy(objects):
    """The objects without what differs from run to run. UIDs and times are numbered."""
    uids, times = {}, {}

    def uid(text):
        return uids.setdefault(text, f"00000000-0000-4000-8000-{len(uids) + 1:012}")

    def walk(value):
        if isinstance(value, dict):
            kept = {}
            for key, each in value.items():
                if key in ("managedFields", "resourceVersion", "generation", "lastTransitionTime", "selfLink"):
                    continue
                kept[key] = uid(each) if key == "uid" else walk(each)
            return kept
        return [walk(each) for each in value] if isinstance(value, list) else value

    made = [walk(one) for one in objects]
    stamps = sorted({one["metadata"]["creationTimestamp"] for one in made})
    for one in made:
        metadata = one["metadata"]
        at = stamps.index(metadata["creationTimestamp"])
        metadata["creationTimestamp"] = f"2026-01-01T00:{at // 60:02}:{at % 60:02}Z"
        if "deletionTimestamp" in metadata:
            metadata["deletionTimestamp"] = "2026-01-03T00:00:00Z"
        metadata.get("annotations", {}).pop("endpoints.kubernetes.io/last-change-trigger-time", None)
        kept = {"name", "namespace", "labels", "annotations", "creationTimestamp", "deletionTimestamp"}
        if one["kind"] == "Pod":
            kept |= {"uid", "generateName", "ownerReferences"}
            for owner in metadata.get("ownerReferences", []):
                del owner["uid"]
            spec, status = one["spec"], one["status"]
            one["spec"] = {key: spec[key] for key in ("serviceAccountName", "nodeName", "hostNetwork") if key in spec}
            ports = [{"ports": each["ports"]} for each in spec["containers"] if "ports" in each]
            if ports:
                one["spec"]["containers"] = ports
            one["status"] = {key: status[key] for key in ("phase", "podIPs", "conditions") if key in status}
        elif one["kind"] in ("Node", "Namespace"):
            one.pop("spec", None)
            one.pop("status", None)
        one["metadata"] = {key: value for key, value in metadata.items() if key in kept and value != {}}
    return made


def main(rig, istiod, *crds):
    with tempfile.TemporaryDirectory(prefix="isthmus-istiod-") as name:
        folder = pathlib.Path(name)
        processes = Processes(folder)
        try:
            made = run(folder, processes, rig, istiod, crds)
        except BaseException:
            for log in folder.glob("*.log"):
                print(f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-30:]), file=sys.stderr)
            raise
        finally:
            processes.stop()
    print(lines(made))


def run(folder, processes, rig, istiod, crds):
    api = Api(rig, folder, processes)
    names = fill(api, crds)
    settled(lambda: sorted(json.dumps([one["metadata"]["name"], one["endpoints"]], sort_keys=True)
                           for one in api.objects() if one["kind"] == "EndpointSlice"))
    (folder / "mesh.yaml").write_text("rootNamespace: istio-system\ntrustDomain: cluster.local\n")
    gateway = {"address": "192.0.2.2", "port": 15443}
    networks = {"net-west": {"endpoints": [{"fromRegistry": "west"}], "gateways": [gateway]},
                "net-east": {"endpoints": [{"fromRegistry": "east"}]}}
    (folder / "networks.yaml").write_text(json.dumps({"networks": networks}))
    discovery = f"127.0.0.1:{free_port()}"
    http, monitoring, control = (free_port() for _ in range(3))
    environment = {"PILOT_ENABLE_AMBIENT": "true", "CLUSTER_ID": "east", "POD_NAMESPACE": "istio-system", "POD_NAME": "istiod-1",
                   "ENABLE_CA_SERVER": "false", "INJECTION_WEBHOOK_CONFIG_NAME": "", "VALIDATION_WEBHOOK_CONFIG_NAME": "",
                   "PILOT_CERT_PROVIDER": "none", "PILOT_ENABLE_GATEWAY_API_DEPLOYMENT_CONTROLLER": "false",
                   "PILOT_ENABLE_GATEWAY_API_STATUS": "false"}
    processes.start("istiod", [istiod, "discovery", "--kubeconfig", "kubeconfig", "--meshConfig", "mesh.yaml", "--networksConfig",
                               "networks.yaml", "--grpcAddr", discovery, "--secureGRPCAddr", "", "--httpsAddr", "",
                               "--httpAddr", f"127.0.0.1:{http}", "--monitoringAddr", f"127.0.0.1:{monitoring}", "--clusterID", "east",
                               "--ctrlz_address", "127.0.0.1", "--ctrlz_port", str(control)], environment)

    def is_ready():
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{http}/ready", timeout=5).status == 200
        except OSError:
            return False

    until("istiod", is_ready)
    told = settled(lambda: {**fields.ztunnel(discovery), **fields.envoy(discovery)})
    ours = lambda one: one["metadata"].get("namespace", "") not in ("default", "kube-system", "kube-public", "kube-node-lease") and (
        one["kind"] != "Namespace" or one["metadata"]["name"] in names)
    objects = tidy(one for one in api.objects() if ours(one))
    # The API server's own Service is not among them.
    told = {section: {name: value for name, value in all_of.items() if "kubernetes.default." not in name}
            for section, all_of in told.items()}
    return {"objects": objects, **told}


def leaves(value, path, into):
    """The fields of a value by their paths. A list of plain values is one field."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            leaves(each, f"{path} / {key}" if path else key, into)
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        for at, each in enumerate(value):
            leaves(each, f"{path} / {at}" if path else str(at), into)
    else:
        into[path] = value
    return into


def usual(resources):
    """The fields of resources: those that most of them have, and for each resource how it differs; `null` is a field that it has
    not. In texts, `{name}` is the resource's own name, and `{sni}` the same as a server name."""
    def short(text, name):
        parts = name.split("|")
        text = text.replace(name, "{name}")
        return text.replace("outbound_." + "_.".join(parts[1:]), "{sni}") if len(parts) == 4 else text

    all_of = {}
    counts = {}
    for name, resource in resources.items():
        fields_of = leaves(resource, "", {})
        all_of[name] = {path: json.loads(short(json.dumps(value), name)) for path, value in fields_of.items()}
        for path, value in all_of[name].items():
            of_path = counts.setdefault(path, {})
            text = json.dumps(value)
            of_path[text] = of_path.get(text, 0) + 1
    most = {}
    for path, values in sorted(counts.items()):
        text, count = max(values.items(), key=lambda each: each[1])
        if count * 2 > len(resources):
            most[path] = json.loads(text)
    differ = {}
    for name, mine in all_of.items():
        own = {path: value for path, value in mine.items() if path not in most or most[path] != value}
        differ[name] = {**own, **{path: None for path in most if path not in mine}}
    return {"usual": most, "each": differ}


def lines(made):
    """JSON with one line for each object, usual field and resource."""
    def compact(value):
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    def of(values):
        return "{\n" + ",\n".join(f"{json.dumps(name)}:{compact(values[name])}" for name in sorted(values)) + "\n}"

    parts = ['"objects":[\n' + ",\n".join(compact(each) for each in made.pop("objects")) + "\n]"]
    for section, resources in made.items():
        both = usual(resources)
        parts.append(f'"{section}":{{"usual":{of(both["usual"])},"each":{of(both["each"])}}}')
    return "{" + ",\n".join(parts) + "}"


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
