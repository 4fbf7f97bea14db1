#!/usr/bin/env python3
"""Holds the xDS server to its protocol: named scenarios with the official messages, over real streams.

    xds_conformance.py --xds HOST:PORT --replica HOST:PORT --admin HOST:PORT --folder FOLDER [--form delta|sotw]

FOLDER has the registry files `east.yaml` and `west.yaml`, which both servers watch and this script rewrites. Prints a
line for each scenario, and ends with 1 if one failed. The letters are those of the catalogue of scenarios (H: harness,
S: streams, W: warming, V: views, T: errors). Needs what xds.txt pins.
"""

import argparse

import grpc
from xds_peer import (
    CDS,
    DELTA,
    EDS,
    LDS,
    RDS,
    SOTW,
    TYPE_URLS,
    Client,
    World,
    addresses,
    admin,
    check,
    cluster_name,
    endpoint,
    eventually,
    identities,
    leave,
    run,
    service,
    weights,
)

A, B, C, Z = (cluster_name(f"{name}.mesh") for name in "abcz")
BEATS = [cluster_name("beat-east.mesh"), cluster_name("beat-west.mesh")]
BOTH = (DELTA, SOTW)

# The gateways of the networks, as the config has them.
GATEWAY = {"east": "192.0.2.1:15443", "west": "192.0.2.2:15443"}
SPIFFE = "spiffe://cluster.local/ns/shop/sa/"

SCENARIOS = []


def scenario(title, *protocols):
    """Enters a scenario, once for each form of the protocol that it is for."""

    def enter(function):
        for protocol in protocols:
            SCENARIOS.append((f"{title} ({protocol})", function, {"protocol": protocol}))
        return function

    return enter


def simple(name, host, **more):
    """A service with one endpoint."""
    return service(f"{name}.mesh", [endpoint(f"10.1.0.{host}", **more)])


def opened(clients, *arguments, **named):
    """A client that is closed with the scenario."""
    client = Client(*arguments, **named)
    clients.callback(client.close)
    return client


def subscribed(admin_at, client):
    """The row of /api/v1/clients of the client's assignments."""
    mine = [each for each in admin(admin_at, "/api/v1/clients") if each["node"] == client.title]
    return mine[0]["types"]["eds"]


def all_of(*names):
    return [*BEATS, *names]


@scenario("H1-H3 a wildcard gets all, what changes and what is new", *BOTH)
def wildcard(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1), simple("b", 2))
    client = opened(clients, xds, protocol)
    client.ask(CDS)
    client.response(CDS, all_of(A, B))
    world.put("east", simple("a", 1, identity=SPIFFE + "new"))
    client.response(CDS, [A] if protocol == DELTA else all_of(A, B))
    world.put("east", simple("c", 3))
    client.response(CDS, [C] if protocol == DELTA else all_of(A, B, C))
    client.is_silent(world)


@scenario("H4-H5 of the names it asks for, and nothing for others", *BOTH)
def subset(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1), simple("b", 2), simple("c", 3))
    client = opened(clients, xds, protocol)
    client.ask(EDS, [A, B])
    client.response(EDS, [A, B])
    world.put("east", simple("b", 22))
    found = client.response(EDS, [B])
    check(addresses(found.resources[B]) == ["10.1.0.22:8080"], f"{found.resources}")
    world.put("east", simple("c", 33))
    client.is_silent(world)


@scenario("H6 T1 a name that is not there is said so at once and once, and comes when it is born", *BOTH)
def unborn(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1))
    for kind, name in ((CDS, Z), (LDS, "z.mesh:80"), (RDS, "z.mesh:80")):
        client = opened(clients, xds, protocol)
        client.ask(kind, [name])
        if protocol == DELTA:
            client.response(kind, [], removed=[name])
        else:
            found = client.response(kind, [], errors=[name])
            error = found.errors[name]
            check(error.code == grpc.StatusCode.NOT_FOUND.value[0], f"{error}")
            check("z.mesh" in error.message, f"the text does not name it: {error}")
        client.is_silent(world)
        world.put("east", simple("z", 9))
        client.response(kind, [name])
        world.remove("east", "z.mesh")
        if protocol == DELTA:
            client.response(kind, [], removed=[name])
        else:
            client.response(kind, [], errors=[name])
        client.is_silent(world)


@scenario("H6 an unknown EDS name gets an empty assignment at once", *BOTH)
def unknown_assignment(world, xds, clients, protocol, **_):
    world.reset("east")
    client = opened(clients, xds, protocol)
    names = [Z, cluster_name("z.mesh", 81, "v1"), "outbound_.80_._.z.mesh", "of-another-tongue"]
    client.ask(EDS, names)
    found = client.response(EDS, names)
    check(not any(each.endpoints for each in found.resources.values()), f"{found.resources}")
    world.put("east", simple("z", 9))
    same = [Z, "outbound_.80_._.z.mesh"]
    found = client.response(EDS, same)
    check(all(addresses(found.resources[name]) == ["10.1.0.9:8080"] for name in same), f"{found.resources}")
    client.is_silent(world)


@scenario("H7 one name, then another", *BOTH)
def one_then_another(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1), simple("b", 2))
    client = opened(clients, xds, protocol)
    client.ask(EDS, [A])
    client.response(EDS, [A])
    client.ask(EDS, [B] if protocol == DELTA else [A, B])
    client.response(EDS, [B])
    client.is_silent(world)


@scenario("H8 W4 a service that goes is emptied before its cluster is removed, and comes back", *BOTH)
def removal(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1), simple("b", 2))
    client = opened(clients, xds, protocol)
    client.ask(CDS)
    client.response(CDS, all_of(A, B))
    client.ask(EDS, [A, B])
    client.response(EDS, [A, B])
    world.remove("east", "a.mesh")
    found = client.response(EDS, [A])
    check(not found.resources[A].endpoints, f"{found.resources}")
    client.response(CDS, [] if protocol == DELTA else all_of(B), removed=[A] if protocol == DELTA else [])
    client.is_silent(world)
    world.put("east", simple("a", 1))
    client.response(CDS, [A] if protocol == DELTA else all_of(A, B))
    found = client.response(EDS, [A])
    check(addresses(found.resources[A]) == ["10.1.0.1:8080"], f"{found.resources}")
    client.is_silent(world)


@scenario("W4 the same for a cluster asked for by its name", DELTA)
def removal_by_name(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1))
    client = opened(clients, xds, protocol)
    client.ask(CDS, [A])
    client.response(CDS, [A])
    client.ask(EDS, [A])
    client.response(EDS, [A])
    world.remove("east", "a.mesh")
    found = client.response(EDS, [A])
    check(not found.resources[A].endpoints, f"{found.resources}")
    client.response(CDS, [], removed=[A])
    client.is_silent(world)


@scenario("W4 a service without endpoints has an empty assignment at once", *BOTH)
def no_endpoints(world, xds, clients, protocol, **_):
    world.reset("east", service("a.mesh", []))
    client = opened(clients, xds, protocol)
    client.ask(CDS)
    client.response(CDS, all_of(A))
    client.ask(EDS, [A])
    found = client.response(EDS, [A])
    check(not found.resources[A].endpoints, f"{found.resources}")
    client.is_silent(world)


@scenario("H9-H10 names given up, one and all", *BOTH)
def unsubscribe(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1), simple("b", 2))
    # Some clients give up all with one empty name.
    for nothing in ([], [""]):
        client = opened(clients, xds, protocol)
        client.ask(EDS, [A, B])
        client.response(EDS, [A, B])
        if protocol == DELTA:
            client.ask(EDS, drop=[B])
        else:
            client.ask(EDS, [A])
        client.is_heard()
        world.put("east", simple("a", 11), simple("b", 12))
        client.response(EDS, [A])
        if protocol == DELTA:
            client.ask(EDS, drop=[A])
        else:
            client.ask(EDS, nothing)
            if nothing:
                client.response(EDS, [], errors=nothing)
        client.is_heard()
        world.put("east", simple("a", 1), simple("b", 2))
        client.is_silent(world)


@scenario("H11 two types on one stream", *BOTH)
def two_types(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1))
    client = opened(clients, xds, protocol)
    client.ask(CDS)
    client.response(CDS, all_of(A))
    client.ask(EDS, [A])
    client.response(EDS, [A])
    world.put("east", simple("a", 11))
    client.response(EDS, [A])
    world.put("east", simple("b", 2))
    client.response(CDS, [B] if protocol == DELTA else all_of(A, B))
    client.is_silent(world)


@scenario("S1 an explicit wildcard", *BOTH)
def star(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1))
    client = opened(clients, xds, protocol)
    client.ask(CDS, ["*"])
    client.response(CDS, all_of(A))
    world.put("east", simple("b", 2))
    client.response(CDS, [B] if protocol == DELTA else all_of(A, B))
    client.is_silent(world)


@scenario("S2 a name after a wildcard that was not named: delta keeps the wildcard", DELTA)
def legacy_kept(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1))
    client = opened(clients, xds, protocol)
    client.ask(CDS)
    client.response(CDS, all_of(A))
    client.ask(CDS, [A])
    client.response(CDS, [A])
    world.put("east", simple("b", 2))
    client.response(CDS, [B])
    client.is_silent(world)


@scenario("S2 a name after a wildcard that was not named: state of the world ends it", SOTW)
def legacy_ended(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1), simple("b", 2))
    client = opened(clients, xds, protocol)
    client.ask(CDS)
    client.response(CDS, all_of(A, B))
    client.ask(CDS, [A])
    client.response(CDS, [A])
    world.put("east", simple("c", 3))
    client.is_silent(world)
    client.ask(CDS, [A, "*"])
    client.response(CDS, all_of(A, B, C))
    world.put("east", simple("z", 9))
    client.response(CDS, all_of(A, B, C, Z))


@scenario("S3 a name given up under a wildcard is answered by what the wildcard covers", DELTA)
def given_up_under_wildcard(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1))
    other = "outbound_.80_._.a.mesh"
    client = opened(clients, xds, protocol)
    client.ask(CDS, ["*", A, other])
    client.response(CDS, all_of(A, other))
    client.ask(CDS, drop=[A])
    client.response(CDS, [A])
    client.ask(CDS, drop=[other])
    client.response(CDS, [], removed=[other])
    client.is_silent(world)


@scenario("S4 a wildcard taken up and given up in one request is none", DELTA)
def star_and_back(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1))
    client = opened(clients, xds, protocol)
    client.ask(CDS, ["*"], drop=["*"])
    client.response(CDS, [])
    world.put("east", simple("b", 2))
    client.is_silent(world)
    client.ask(CDS, [A])
    client.response(CDS, [A])
    client.is_silent(world)


@scenario("S4 a wildcard given up, and taken up again", DELTA)
def star_given_up(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1))
    client = opened(clients, xds, protocol)
    client.ask(CDS)
    client.response(CDS, all_of(A))
    client.ask(CDS, drop=["*"])
    client.is_heard()
    world.put("east", simple("b", 2))
    client.is_silent(world)
    client.ask(CDS, ["*"])
    client.response(CDS, all_of(A, B))


@scenario("S5 who asks again is answered again", *BOTH)
def asked_again(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1), simple("b", 2))
    client = opened(clients, xds, protocol)
    client.ask(EDS, [A, B])
    client.response(EDS, [A, B])
    if protocol == DELTA:
        client.ask(EDS, [A])
    else:
        client.ask(EDS, [B])
        client.ask(EDS, [A, B])
    client.response(EDS, [A])
    client.is_silent(world)


@scenario("S6 W3 who comes back with versions is sent nothing that it has, by this server or another", DELTA)
def reconnect(world, xds, replica, clients, protocol, **_):
    world.reset("east", simple("a", 1), simple("b", 2))
    client = opened(clients, xds, protocol)
    client.ask(CDS)
    clusters = client.response(CDS, all_of(A, B)).versions
    client.ask(EDS, [A, B])
    assignments = client.response(EDS, [A, B]).versions
    # The other server may be behind by a moment.
    other = opened(clients, replica, protocol)
    other.ask(EDS, [A, B])
    found = dict(other.response(EDS).versions)
    while found != assignments:
        found |= other.response(EDS).versions
    for server in (xds, replica):
        client = opened(clients, server, protocol)
        client.ask(EDS, [A, B], versions=assignments)
        client.ask(CDS, versions=clusters)
        client.response(CDS, [])
        client.is_silent(world)
    world.put("east", simple("b", 22, identity=SPIFFE + "other"))
    client = opened(clients, xds, protocol)
    client.ask(CDS, ["*"], versions=clusters)
    client.response(CDS, [B])
    client.ask(EDS, [A, B], versions=assignments)
    client.response(EDS, [B])
    client.is_silent(world)


@scenario("S7 who comes back is told of what went", DELTA)
def reconnect_with_removals(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1), simple("b", 2))
    other = "outbound_.80_._.a.mesh"
    client = opened(clients, xds, protocol)
    client.ask(CDS, ["*", other])
    versions = client.response(CDS, all_of(A, B, other)).versions
    world.remove("east", "b.mesh")
    client = opened(clients, xds, protocol)
    client.ask(CDS, ["*", other], versions=versions)
    client.response(CDS, [], removed=[B])
    client.is_silent(world)
    client = opened(clients, xds, protocol)
    client.ask(CDS, [A, B], versions={A: versions[A], B: versions[B]})
    client.response(CDS, [], removed=[B])
    client.is_silent(world)
    client = opened(clients, xds, protocol)
    client.ask(LDS, versions={"of another server": "7"})
    client.response(LDS, [], removed=["of another server"])
    client.is_silent(world)


@scenario("S8 the first request of a stream is answered whatever its nonce and version are", SOTW)
def foreign_nonce(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1))
    for kind, names in ((CDS, []), (EDS, [A])):
        client = opened(clients, xds, protocol)
        client.send(type_url=TYPE_URLS[kind], resource_names=names, version_info="7", response_nonce="of another")
        client.names[kind] = names
        client.response(kind, all_of(A) if kind == CDS else [A])
        client.is_silent(world)


@scenario("S9 a request of before the last response is not heard", SOTW)
def stale_world(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1), simple("b", 2))
    client = opened(clients, xds, protocol)
    client.ask(EDS, [A])
    first = client.response(EDS, [A])
    world.put("east", simple("a", 11))
    client.response(EDS, [A])
    client.ask(EDS, [A, B], nonce=first.nonce)
    client.ask(EDS, [], nonce="never given")
    client.names[EDS] = [A]
    client.is_silent(world)
    world.put("east", simple("a", 1))
    client.response(EDS, [A])


@scenario("S10 a stale nonce does not keep delta from hearing which names are meant", DELTA)
def stale_delta(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1), simple("b", 2), simple("c", 3))
    client = opened(clients, xds, protocol)
    client.ask(EDS, [A, C])
    first = client.response(EDS, [A, C])
    world.put("east", simple("a", 11))
    second = client.response(EDS, [A], acknowledge=False)
    client.ask(EDS, [B], drop=[C], nonce=first.nonce)
    client.ask(EDS, nonce="never given", error="of no response")
    client.acknowledge(second)
    client.response(EDS, [B])
    world.put("east", simple("c", 33))
    client.is_silent(world)


@scenario("S11 what was refused is not sent again, the next version is", *BOTH)
def refused(world, xds, admin_at, clients, protocol, **_):
    world.reset("east", simple("a", 1), simple("b", 2))
    client = opened(clients, xds, protocol)
    client.ask(CDS)
    client.response(CDS, all_of(A, B))
    client.ask(EDS, [A])
    client.response(EDS, [A])
    world.put("east", simple("a", 11))
    response = client.response(EDS, [A], acknowledge=False)
    client.acknowledge(response, error="I do not like the address")

    def shown():
        of = subscribed(admin_at, client)
        return of["last_nack"] and (of["last_nack"]["text"], of["nacks"], of["names"])

    found = eventually("the refusal in /api/v1/clients", shown)
    check(found == ("I do not like the address", 1, 1), f"{found}")
    client.is_silent(world)
    world.put("east", simple("a", 12))
    client.response(EDS, [A])
    # Of clusters too.
    world.put("east", simple("b", 2, identity=SPIFFE + "new"))
    response = client.response(CDS, [B] if protocol == DELTA else all_of(A, B), acknowledge=False)
    client.acknowledge(response, error="x" * 100_000)
    client.is_silent(world)
    world.put("east", simple("b", 2, identity=SPIFFE + "newer"))
    client.response(CDS, [B] if protocol == DELTA else all_of(A, B))
    client.is_silent(world)


@scenario("S12 a refusal that asks for more is answered", *BOTH)
def refused_and_asked(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1), simple("b", 2))
    client = opened(clients, xds, protocol)
    client.ask(EDS, [A])
    response = client.response(EDS, [A], acknowledge=False)
    client.ask(EDS, [B] if protocol == DELTA else [A, B], nonce=response.nonce, error="no")
    client.response(EDS, [B])
    client.is_silent(world)


@scenario("S13 who acknowledges late is sent the newest state, once", *BOTH)
def late(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1), simple("b", 2))
    client = opened(clients, xds, protocol)
    client.ask(EDS, [A, B])
    response = client.response(EDS, [A, B], acknowledge=False)
    for host in range(15, 20):
        world.put("east", simple("a", host), simple("b", 2 if host == 19 else host))
    client.acknowledge(response)
    found = client.response(EDS, [A])
    check(addresses(found.resources[A]) == ["10.1.0.19:8080"], f"{found.resources}")
    client.is_silent(world)


@scenario("S15 names that nobody had are given up", DELTA)
def phantom(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1))
    client = opened(clients, xds, protocol)
    client.ask(EDS, drop=["never", A, "*"])
    client.ask(CDS, drop=["never", "*"])
    client.is_silent(world)
    client.ask(EDS, [A])
    client.response(EDS, [A])
    client.is_silent(world)


@scenario("S16 a wildcard over nothing has one empty answer", *BOTH)
def empty_wildcard(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1))
    client = opened(clients, xds, protocol)
    client.ask(LDS)
    client.response(LDS, [])
    client.is_silent(world)


@scenario("S16 no names after an explicit wildcard are no names", SOTW)
def nothing_after_star(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1))
    client = opened(clients, xds, protocol)
    client.ask(CDS, ["*"])
    client.response(CDS, all_of(A))
    client.ask(CDS, [])
    client.is_heard()
    world.put("east", simple("b", 2))
    client.is_silent(world)


@scenario("S17 clusters, assignments, listeners, routes: in this order", *BOTH)
def order(world, xds, admin_at, clients, protocol, **_):
    world.reset("east", simple("a", 1))
    client = opened(clients, xds, protocol)
    asked = {RDS: ["z.mesh:80"], LDS: ["z.mesh:80"], EDS: [Z], CDS: [Z]}
    for kind, names in asked.items():
        client.ask(kind, names)
        client.response(kind)
    client.is_silent(world)
    # While an assignment waits for its acknowledgement, listeners do not wait for the next one.
    eventually("the server to hear all acknowledgements", lambda: subscribed(admin_at, client)["names"] == 1)
    world.put("east", simple("z", 9))
    for kind in (CDS, EDS, LDS, RDS):
        client.response(kind, asked[kind])
    client.is_silent(world)


@scenario("S18 types that are not served", *BOTH)
def types_not_served(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1))
    client = opened(clients, xds, protocol)
    secret = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"
    of = ["default"] if protocol == DELTA else []
    client.ask(secret, ["default"])
    client.response(secret, [], removed=of, errors=["default"])
    client.ask(secret, ["default", "roots"])
    client.response(secret, [], removed=[*of, "roots"] if protocol == DELTA else [], errors=["default", "roots"])
    client.ask(EDS, [A])
    client.response(EDS, [A])
    client.ask("type.googleapis.com/none", ["*"])
    client.response("type.googleapis.com/none", [], errors=["*"])
    client.is_silent(world)


@scenario("all resources of a type that is not served", *BOTH)
def nothing_is_served(world, xds, clients, protocol, **_):
    for kind in ("type.googleapis.com/istio.workload.Address", ""):
        client = opened(clients, xds, protocol)
        client.ask(kind)
        end = client.ended()
        check(end.code == grpc.StatusCode.UNIMPLEMENTED and repr(kind)[1:-1] in end.text, f"{end}")


@scenario("each type's own stream, whose requests need not name it", *BOTH)
def own_streams(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1))
    for host, (kind, name) in enumerate([(CDS, A), (EDS, A), (LDS, "a.mesh:80"), (RDS, "a.mesh:80")], start=11):
        client = opened(clients, xds, protocol, own=kind)
        client.ask(kind, [name])
        client.response(kind, [name])
        world.put("east", simple("a", host, identity=SPIFFE + kind))
        if kind in (CDS, EDS):
            client.response(kind, [name])
        other = next(url for of, url in TYPE_URLS.items() if of != kind)
        client.send(type_url=other)
        end = client.ended()
        check(end.code == grpc.StatusCode.INVALID_ARGUMENT and TYPE_URLS[kind] in end.text, f"{end}")
    client = opened(clients, xds, protocol, own=CDS)
    client.ask(CDS)
    client.response(CDS, all_of(A))


@scenario("methods that are not served say so", DELTA)
def other_methods(xds, **_):
    with grpc.insecure_channel(xds) as channel:
        for method in (
            "envoy.service.cluster.v3.ClusterDiscoveryService/FetchClusters",
            "envoy.service.discovery.v2.AggregatedDiscoveryService/StreamAggregatedResources",
            "envoy.service.status.v3.ClientStatusDiscoveryService/FetchClientStatus",
        ):
            try:
                channel.unary_unary(f"/{method}")(b"", timeout=10)
                check(False, f"{method} was answered")
            except grpc.RpcError as error:
                check(error.code() == grpc.StatusCode.UNIMPLEMENTED, f"{method}: {error}")


@scenario("W1 an assignment follows the cluster that changed, though it is the same", *BOTH)
def assignment_follows(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1), simple("b", 2))
    client = opened(clients, xds, protocol)
    client.ask(CDS)
    client.response(CDS, all_of(A, B))
    client.ask(EDS, [A, B])
    client.response(EDS, [A, B])
    world.put("east", simple("a", 1, identity=SPIFFE + "w1"))
    client.response(CDS, [A] if protocol == DELTA else all_of(A, B))
    client.response(EDS, [A])
    client.is_silent(world)


@scenario("W2 an assignment asked for before its cluster comes again after it", *BOTH)
def assignment_first(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1))
    client = opened(clients, xds, protocol)
    client.ask(EDS, [A])
    client.response(EDS, [A])
    client.ask(CDS)
    client.response(CDS, all_of(A))
    client.response(EDS, [A])
    client.is_silent(world)


@scenario("pods that come and go never rewrite a cluster", *BOTH)
def pods(world, xds, clients, protocol, **_):
    known = SPIFFE + "a"
    world.reset("east", simple("a", 1, identity=known), simple("b", 2))
    client = opened(clients, xds, protocol)
    client.ask(CDS)
    found = client.response(CDS, all_of(A, B)).resources[A]
    check(known in identities(found), f"{identities(found)}")
    client.ask(EDS, [A])
    client.response(EDS, [A])
    steps = [
        ([endpoint("10.1.0.5", identity=known)], 1),
        ([], 0),
        ([endpoint("10.1.0.6", identity=known)], 1),
        ([endpoint("10.1.0.6", identity=known), endpoint("10.1.0.7", identity=known, health="unhealthy")], 2),
    ]
    for endpoints, count in steps:
        world.put("east", service("a.mesh", endpoints))
        found = client.response(EDS, [A]).resources[A]
        check(len(addresses(found)) == count, f"{found}")
    client.is_silent(world)
    # A new identity is a new cluster. The one of before stays for five minutes: a gateway may still connect to its endpoint.
    world.put("east", simple("a", 1, identity=SPIFFE + "other"))
    found = client.response(CDS).resources[A]
    check({known, SPIFFE + "other"} <= set(identities(found)), f"{identities(found)}")
    client.response(EDS, [A])


@scenario("V1 each network sees its own endpoints, and the other's gateway with the weight behind it", *BOTH)
def split_horizon(world, xds, clients, protocol, **_):
    zones = [
        endpoint(f"10.2.{zone}.{host}", locality=f"us/zone-{zone}", weight=2) for zone in range(3) for host in (1, 2)
    ]
    zones.append(endpoint("10.2.9.9", health="unhealthy", weight=100))
    world.reset("east", service("a.mesh", [endpoint("10.1.0.1", weight=3), endpoint("10.1.0.2", weight=5)]))
    world.reset("west", service("a.mesh", zones))
    for grpc_client in (False, True):
        # gRPC calls gateways by host name, for which the mesh's ports have no route: its own endpoints are all it gets.
        client = opened(clients, xds, protocol, network="east", grpc_client=grpc_client)
        client.ask(EDS, [A])
        found = weights(client.response(EDS, [A]).resources[A])
        own = {"10.1.0.1:8080": 3, "10.1.0.2:8080": 5}
        check(found == (own if grpc_client else own | {GATEWAY["west"]: 12}), f"seen from east: {found}")
    client = opened(clients, xds, protocol, network="west")
    client.ask(EDS, [A])
    found = weights(client.response(EDS, [A]).resources[A])
    # 6 endpoints of 2, one of 100 that is not ready, and 8 behind the gateway, in smallest whole numbers.
    expected = {f"10.2.{zone}.{host}:8080": 1 for zone in range(3) for host in (1, 2)}
    check(found == expected | {"10.2.9.9:8080": 50, GATEWAY["east"]: 4}, f"seen from west: {found}")


@scenario("V1 through a gateway by host name, one entry for three zones", *BOTH)
def split_horizon_by_hostname(world, xds, clients, protocol, **_):
    tls = {"port": 443, "port_more": {"protocol": "TLS"}}
    zones = [endpoint(f"10.2.{zone}.1", locality=f"us/zone-{zone}", weight=2) for zone in range(3)]
    world.reset("east", service("a.mesh", [endpoint("10.1.0.1", weight=3)], **tls))
    world.reset("west", service("a.mesh", zones, **tls))
    name = cluster_name("a.mesh", 443)
    for grpc_client in (False, True):
        client = opened(clients, xds, protocol, network="east", grpc_client=grpc_client)
        client.ask(EDS, [name])
        assignment = client.response(EDS, [name]).resources[name]
        found = weights(assignment)
        check(found == {"10.1.0.1:8080": 1, GATEWAY["west"]: 2}, f"seen from east: {found}")
        if grpc_client:
            localities = sorted(each.load_balancing_weight.value for each in assignment.endpoints)
            check(localities == [1, 2], f"the weights of the localities are {localities}")


@scenario("V3 a pod replaced in west: no message to clients in east", *BOTH)
def replaced_elsewhere(world, xds, clients, protocol, **_):
    world.reset("east", simple("a", 1))
    world.reset("west", simple("a", 51, identity=SPIFFE + "a"))
    east = opened(clients, xds, protocol, network="east")
    west = opened(clients, xds, protocol, network="west")
    for client in (east, west):
        client.ask(CDS)
        client.response(CDS, all_of(A))
        client.ask(EDS, [A])
        client.response(EDS, [A])
    for host in range(52, 57):
        world.put("west", simple("a", host, identity=SPIFFE + "a"))
        client.response(EDS, [A])
    east.is_silent(world)
    west.is_silent(world)


@scenario("V4 what a client may not claim is denied", *BOTH)
def denied(world, xds, clients, protocol, **_):
    for network, cluster in (("north", "east"), ("east", "north"), ("", "east")):
        client = opened(clients, xds, protocol, network=network, cluster=cluster)
        client.ask(CDS)
        end = client.ended()
        check(end.code == grpc.StatusCode.PERMISSION_DENIED, f"{network} {cluster}: {end}")
        check("xds.clients" in end.text and cluster in end.text, f"{end}")
    client = opened(clients, xds, protocol)
    client.ask(EDS, [A])
    client.response(EDS, [A])


@scenario("V5 assignments that both kinds of clients take", *BOTH)
def acceptable(world, xds, clients, protocol, **_):
    most = (1 << 32) - 1
    odd = [
        [endpoint("10.1.0.1", weight=most), endpoint("10.1.0.2", weight=most), endpoint("10.1.0.3", weight=1)],
        [endpoint("10.1.0.1", locality="us/a"), endpoint("10.1.0.1", locality="us/b", weight=7)],
        [endpoint(f"10.1.0.{host}", locality="us/a", weight=host) for host in range(1, 9)],
        [endpoint("10.1.0.1", locality="us"), endpoint("10.1.0.2", locality="us/"), endpoint("10.1.0.3", weight=9)],
        [endpoint("10.1.0.1", health="unhealthy"), endpoint("10.1.0.2", health="draining", locality="us/a")],
        [endpoint("10.1.0.1"), endpoint("::ffff:10.1.0.1"), endpoint("fd00::1"), endpoint("fd00:0::1")],
        [endpoint("10.1.0.1", locality="us/a/s", weight=2), endpoint("10.1.0.2", locality="us/a/s", weight=3)],
    ]
    names = [cluster_name(f"odd-{index}.mesh") for index in range(len(odd))]
    services = [service(f"odd-{index}.mesh", endpoints) for index, endpoints in enumerate(odd)]
    world.reset("east", *services)
    world.reset("west", *services)
    for network in ("east", "west"):
        for grpc_client in (False, True):
            client = opened(clients, xds, protocol, network=network, grpc_client=grpc_client)
            client.ask(EDS, names)
            # What a response must be like is checked with each.
            client.response(EDS, names)
    world.reset("west")


@scenario("a client that comes back with very many names is told of the last one that changed", DELTA)
def many_reconnect(world, xds, clients, protocol, **_):
    names = [f"{number:05}" for number in range(25_000)]
    world.reset("east", simple("z", 9))
    client = opened(clients, xds, protocol)
    client.ask(EDS, [*names, Z])
    versions = {}
    while len(versions) < len(names) + 1:
        versions |= client.response(EDS).versions
    client.is_silent(world)
    world.put("east", simple("z", 99))
    # Names are looked at in their order, and this is the last.
    client = opened(clients, xds, protocol)
    client.ask(EDS, [*names, Z], versions=versions)
    client.response(EDS, [Z])
    client.is_silent(world)


@scenario("responses to very many names stay below what clients take", SOTW)
def many_names(world, xds, clients, protocol, **_):
    names = [cluster_name(f"service-with-a-name-of-some-length-{number:05}.mesh") for number in range(40_000)]
    client = opened(clients, xds, protocol)
    client.ask(EDS, names)
    seen = 0
    while seen < len(names):
        response = client.response(EDS)
        check(response.size < 3 << 20, f"a response of {response.size} bytes")
        seen += len(response.resources)
    client.is_silent(world)


def main():
    arguments = argparse.ArgumentParser()
    for name in ("xds", "replica", "admin", "folder"):
        arguments.add_argument(f"--{name}", required=True)
    arguments.add_argument("--form", choices=BOTH, help="only scenarios of this form of the protocol")
    arguments.add_argument("--only", default="", help="scenarios whose title has this text")
    given = arguments.parse_args()
    world = World(given.folder, given.xds)
    forms = [given.form] if given.form else BOTH
    chosen = [each for each in SCENARIOS if given.only in each[0] and each[2]["protocol"] in forms]
    failed = run(chosen, world=world, xds=given.xds, replica=given.replica, admin_at=given.admin)
    print(f"{len(chosen) - failed} of {len(chosen)} scenarios as they should be")
    return 1 if failed or not chosen else 0


if __name__ == "__main__":
    leave(main())
