"""Callers and workloads by HBONE, made of Python's ssl and h2: they share nothing with the gateway.

    hbone_peer.py call GATEWAY AUTHORITY FOLDER [HEADER=VALUE ...]
        One CONNECT; sends what comes on stdin, ends its direction, prints what comes back.
    hbone_peer.py double GATEWAY AUTHORITY FOLDER
        As a ztunnel calls across networks: CONNECT in the outer tunnel, in it TLS of its own to the workload, in that
        a second CONNECT to the same authority, then bytes. Checks whom it meets at both ends.
    hbone_peer.py workload ADDRESS FOLDER
        Ends inner tunnels as a workload's node does, and echoes; prints `listening`, then a line of JSON per CONNECT.

FOLDER holds cert.pem, key.pem and roots.pem of whoever it is. The first line on stdout is JSON with the answers.
"""

import json
import socket
import ssl
import sys
import threading

import h2.config
import h2.connection
import h2.events
import h2.settings

BAGGAGE = (
    "k8s.cluster.name=c1,k8s.namespace.name=shop,k8s.deployment.name=cart,service.name=cart,"
    "service.version=v1,cloud.region=r1,cloud.availability_zone=z1"
)
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"


def context(folder, server):
    kind = ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
    made = ssl.SSLContext(kind)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_cert_chain(f"{folder}/cert.pem", f"{folder}/key.pem")
    made.load_verify_locations(f"{folder}/roots.pem")
    made.set_alpn_protocols(["h2"])
    return made


def identity(peer):
    """The URIs of a certificate as ssl shows it."""
    return [value for kind, value in peer.get("subjectAltName", ()) if kind == "URI"]


class Pipe:
    """TLS over anything that can send and receive bytes: a socket, or a stream of another HTTP/2 connection."""

    def __init__(self, below, made, server=False):
        self.below = below
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = made.wrap_bio(self.incoming, self.outgoing, server_side=server)
        self.run(self.tls.do_handshake)
        assert self.tls.selected_alpn_protocol() == "h2", self.tls.selected_alpn_protocol()

    def run(self, step):
        while True:
            try:
                result = step()
                self.flush()
                return result
            except ssl.SSLWantReadError:
                self.flush()
                more = self.below.recv(65536)
                if more:
                    self.incoming.write(more)
                else:
                    self.incoming.write_eof()

    def flush(self):
        if self.outgoing.pending:
            self.below.sendall(self.outgoing.read())

    def sendall(self, data):
        self.tls.write(data)
        self.flush()

    def recv(self, size):
        try:
            return self.run(lambda: self.tls.read(size))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""

    def peer(self):
        return identity(self.tls.getpeercert())


class Http2:
    """One HTTP/2 connection with one stream of interest."""

    def __init__(self, below, client=True):
        self.below = below
        config = h2.config.H2Configuration(client_side=client, header_encoding="utf-8")
        self.h2 = h2.connection.H2Connection(config=config)
        self.h2.local_settings = h2.settings.Settings(
            client=client,
            initial_values={
                h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 4 << 20,
                h2.settings.SettingCodes.MAX_FRAME_SIZE: 1 << 20,
                h2.settings.SettingCodes.ENABLE_PUSH: 0,
            },
        )
        # What is told to the peer above; the library checks by this.
        self.h2.max_inbound_frame_size = 1 << 20
        self.h2.initiate_connection()
        self.h2.increment_flow_control_window((16 << 20) - 65535)
        self.flush()
        self.stream, self.headers, self.received, self.ended, self.broken = None, None, b"", False, None

    def flush(self):
        data = self.h2.data_to_send()
        if data:
            self.below.sendall(data)

    def pump(self):
        """Takes in what comes next; false at the end."""
        data = self.below.recv(65536)
        if not data:
            self.ended = True
            return False
        for event in self.h2.receive_data(data):
            if isinstance(event, (h2.events.ResponseReceived, h2.events.RequestReceived)):
                self.stream, self.headers = event.stream_id, dict(event.headers)
            elif isinstance(event, h2.events.DataReceived):
                self.received += event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                self.ended = True
            elif isinstance(event, h2.events.StreamReset):
                self.ended, self.broken = True, int(event.error_code)
        self.flush()
        return True

    def connect(self, authority, headers):
        self.stream = self.h2.get_next_available_stream_id()
        pseudo = [(":method", "CONNECT"), (":authority", authority)]
        self.h2.send_headers(self.stream, pseudo + headers)
        self.flush()
        while self.headers is None and not self.ended:
            self.pump()
        return {key: value for key, value in (self.headers or {}).items()}

    def sendall(self, data):
        while data:
            room = min(self.h2.local_flow_control_window(self.stream), self.h2.max_outbound_frame_size)
            if room <= 0:
                self.pump()
                continue
            self.h2.send_data(self.stream, data[:room])
            self.flush()
            data = data[room:]

    def end(self):
        self.h2.end_stream(self.stream)
        self.flush()

    def recv(self, size):
        while not self.received and not self.ended:
            self.pump()
        taken, self.received = self.received[:size], self.received[size:]
        return taken


def dial(address):
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=20)


def call(gateway, authority, folder, *headers):
    outer = Pipe(dial(gateway), context(folder, False))
    http = Http2(outer)
    answer = http.connect(authority, [tuple(header.split("=", 1)) for header in headers])
    print(json.dumps({"peer": outer.peer(), "answer": answer}), flush=True)
    if answer.get(":status") != "200":
        return
    http.sendall(sys.stdin.buffer.read())
    http.end()
    while data := http.recv(65536):
        sys.stdout.buffer.write(data)
    assert http.broken is None, http.broken


def double(gateway, authority, folder):
    headers = [
        ("baggage", BAGGAGE),
        ("forwarded", f'for="127.0.0.1:5";host={authority.rsplit(":", 1)[0]}'),
        ("traceparent", TRACE),
    ]
    outer = Pipe(dial(gateway), context(folder, False))
    tunnel = Http2(outer)
    first = tunnel.connect(authority, headers)
    if first.get(":status") != "200":
        print(json.dumps({"outer": first}), flush=True)
        return
    inner = Pipe(tunnel, context(folder, False))
    http = Http2(inner)
    second = http.connect(authority, headers + [("x-forwarded-network", "west")])
    print(json.dumps({"outer": first, "inner": second, "gateway": outer.peer(), "workload": inner.peer()}), flush=True)
    http.sendall(sys.stdin.buffer.read())
    http.end()
    while data := http.recv(65536):
        sys.stdout.buffer.write(data)


def workload(address, folder):
    host, port = address.rsplit(":", 1)
    listener = socket.create_server((host, int(port)), backlog=64)
    print("listening", flush=True)
    made = context(folder, True)

    def serve(client):
        tls = Pipe(client, made, server=True)
        http = Http2(tls, client=False)
        while http.headers is None and not http.ended:
            http.pump()
        print(json.dumps({"peer": tls.peer(), "headers": http.headers}), flush=True)
        http.h2.send_headers(http.stream, [(":status", "200"), ("baggage", "k8s.namespace.name=west")])
        http.flush()
        while data := http.recv(65536):
            http.sendall(data)
        http.end()

    while True:
        client, _ = listener.accept()
        client.settimeout(20)
        threading.Thread(target=serve, args=(client,), daemon=True).start()


if __name__ == "__main__":
    {"call": call, "double": double, "workload": workload}[sys.argv[1]](*sys.argv[2:])
