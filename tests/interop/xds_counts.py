#!/usr/bin/env python3
"""A delta client of EDS that counts what it is sent, told by lines of JSON what to do.

    xds_counts.py HOST:PORT NETWORK NAME…       the names of services with port 443

Each line of standard input is answered by {"done": …}:
    {"all": true}       true if there is an assignment for each name
    {"counts": true}    {"responses", "bytes", "resources", "largest": the assignments of the service with most} since the last time
"""

import collections
import json
import sys
import threading

from xds_peer import EDS, TYPE_URLS, Client, Ended, cluster_name

TARGET, NETWORK, *NAMES = sys.argv[1:]


class Counts:
    def __init__(self):
        self.responses = self.bytes = 0
        self.of = collections.Counter()


def read(client, had, box):
    while not isinstance(message := client.incoming.get(), Ended):
        counts = box[0]
        counts.responses += 1
        counts.bytes += message.ByteSize()
        counts.of.update(each.name for each in message.resources)
        had.update(each.name for each in message.resources)
        client.send(type_url=TYPE_URLS[EDS], response_nonce=message.nonce)
    print(f"the stream has ended: {message}", file=sys.stderr, flush=True)


def main():
    client, had, box = Client(TARGET, network=NETWORK), set(), [Counts()]
    client.send(
        type_url=TYPE_URLS[EDS], resource_names_subscribe=[cluster_name(name, port=443) for name in NAMES]
    )
    threading.Thread(target=read, args=(client, had, box), daemon=True).start()
    for line in sys.stdin:
        if "all" in json.loads(line):
            done = len(had) == len(NAMES)
        else:
            counts, box[0] = box[0], Counts()
            done = {
                "responses": counts.responses,
                "bytes": counts.bytes,
                "resources": counts.of.total(),
                "largest": max(counts.of.values(), default=0),
            }
        print(json.dumps({"done": done}), flush=True)


main()
