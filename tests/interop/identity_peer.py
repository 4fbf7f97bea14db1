#!/usr/bin/env python3
"""An authority that gives a gateway its identity, told by lines of JSON what to do.

    identity_peer.py istio FOLDER       Istio's, over TLS as `localhost`; writes FOLDER/tls-roots.pem
    identity_peer.py workload FOLDER    the SPIFFE Workload API on FOLDER/agent.sock

Standard input has one object a line, each answered by {"done": true} once it holds; all keys are remembered:
    serve       whether anybody listens
    refuse      [code, message] for every call, or null
    lifetime    seconds that certificates are valid
    as          (istio) whom to certify, whatever is asked; null: who is asked for
    chain       (istio) "whole", or "leaf" without any root
    svids       (workload) the identities that are given
    federated   (workload) other trust domains whose bundles are given
Standard output says {"ready": ..., "port": ...} first, and of each call {"call": ...}. It ends with its input. The
messages are the official ones, the transport is grpcio, the certificates are made by `cryptography`.
"""

import concurrent.futures
import datetime
import hashlib
import json
import os
import pathlib
import socket
import sys
import threading
import time

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

UTC = datetime.timezone.utc
DER, PEM = serialization.Encoding.DER, serialization.Encoding.PEM
said = threading.Lock()


def say(line):
    with said:
        print(json.dumps(line), flush=True)


def name(text):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


class Authority:
    """A key that signs, and its certificate: a root, or signed by another."""

    def __init__(self, title, above=None):
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.title = title
        self.above = above
        now = datetime.datetime.now(UTC)
        span = (now - datetime.timedelta(hours=1), now + datetime.timedelta(days=1))
        builder = x509.CertificateBuilder().add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        signer = above or self
        self.certificate = signer.sign(builder.subject_name(name(title)), self.key.public_key(), span)

    def sign(self, builder, public_key, span):
        builder = builder.issuer_name(name(self.title)).public_key(public_key)
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(span[0]).not_valid_after(span[1])
        return builder.sign(self.key, hashes.SHA256())

    def issue(self, names, public_key, lifetime):
        # Certificates count in whole seconds.
        begin = datetime.datetime.now(UTC).replace(microsecond=0)
        builder = x509.CertificateBuilder().subject_name(x509.Name([]))
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
        return self.sign(builder, public_key, (begin, begin + datetime.timedelta(seconds=lifetime)))


def serial(certificate):
    """As it stands in the certificate, with the zero before a number that would look negative."""
    number = certificate.serial_number
    return number.to_bytes(number.bit_length() // 8 + 1, "big").hex()


class Peer:
    """What both kinds share: a state that is told, and a server that comes and goes."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.state = {"serve": True, "refuse": None, "lifetime": 3600, "as": None, "chain": "whole"}
        self.state |= {"svids": [], "federated": []}
        self.changed = threading.Condition()
        self.server = None

    def tell(self, news):
        with self.changed:
            self.state |= news
            self.changed.notify_all()
        if self.state["serve"] and self.server is None:
            self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(max_workers=8))
            self.register(self.server)
            self.server.start()
        if not self.state["serve"] and self.server is not None:
            self.server.stop(0).wait()
            self.server = None

    @staticmethod
    def refuse(state, context):
        if state["refuse"]:
            code, message = state["refuse"]
            context.abort(grpc.StatusCode[code], message)


class Istio(Peer):
    def __init__(self, folder):
        super().__init__(folder)
        import official

        self.messages = official.module("security.v1alpha1.ca_pb2")
        self.services = official.module("security.v1alpha1.ca_pb2_grpc")
        tls = Authority("the authority's own roots")
        key = ec.generate_private_key(ec.SECP256R1())
        own = tls.issue([x509.DNSName("localhost")], key.public_key(), 86_400)
        secret = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        self.credentials = grpc.ssl_server_credentials([(secret, own.public_bytes(PEM))])
        (self.folder / "tls-roots.pem").write_bytes(tls.certificate.public_bytes(PEM))
        self.root = Authority("the mesh's root")
        self.authority = Authority("the mesh's authority", self.root)
        # Keeps the port ours while nobody listens there; gRPC shares it.
        self.port = socket.socket()
        self.port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.port.bind(("127.0.0.1", 0))

    def register(self, server):
        self.services.add_IstioCertificateServiceServicer_to_server(self, server)
        at = f"127.0.0.1:{self.port.getsockname()[1]}"
        if not server.add_secure_port(at, self.credentials):
            raise RuntimeError(f"{at} cannot be bound")

    def CreateCertificate(self, request, context):
        # Chosen before the call is told: who reads of it may give the next order before this one is answered.
        state = dict(self.state)
        csr = x509.load_pem_x509_csr(request.csr.encode())
        (names,) = [extension.value for extension in csr.extensions]
        public = csr.public_key()
        key = public.public_bytes(DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        call = {
            "at": time.time(),
            "subject": csr.subject.rfc4514_string(),
            "uris": names.get_values_for_type(x509.UniformResourceIdentifier),
            "names": len(list(names)),
            "curve": public.curve.name,
            "key": hashlib.sha256(key).hexdigest(),
            "proved": csr.is_signature_valid,
            "validity": request.validity_duration,
            "metadata": {key: value for key, value in context.invocation_metadata() if isinstance(value, str)},
        }
        if state["refuse"]:
            say({"call": call})
        self.refuse(state, context)
        identity = state["as"] or call["uris"][0]
        leaf = self.authority.issue([x509.UniformResourceIdentifier(identity)], public, state["lifetime"])
        say({"call": call | {"serial": serial(leaf)}})
        chain = [leaf, self.authority.certificate, self.root.certificate]
        if state["chain"] == "leaf":
            chain = chain[:1]
        items = [certificate.public_bytes(PEM).decode() for certificate in chain]
        return self.messages.IstioCertificateResponse(cert_chain=items)


class Workload(Peer):
    def __init__(self, folder):
        super().__init__(folder)
        # All of the package is loaded with its messages, which Istio's authority need not wait for.
        from spiffe._proto import workload_pb2, workload_pb2_grpc

        self.messages, self.services = workload_pb2, workload_pb2_grpc
        self.roots = {}
        self.calls = 0
        self.given, self.serials = self.make(self.state)

    def register(self, server):
        servicer = self.services.SpiffeWorkloadAPIServicer()
        servicer.FetchX509SVID = self.FetchX509SVID
        self.services.add_SpiffeWorkloadAPIServicer_to_server(servicer, server)
        server.add_insecure_port(f"unix:{self.folder}/agent.sock")

    def root(self, domain):
        return self.roots.setdefault(domain, Authority(f"the root of {domain}"))

    def tell(self, news):
        # What every stream is given is made once, so that a test can compare serial numbers.
        if news.keys() & {"svids", "federated", "lifetime"}:
            state = self.state | news
            self.given, self.serials = self.make(state)
        super().tell(news)

    def make(self, state):
        svids, serials = [], {}
        for identity in state["svids"]:
            domain = identity.removeprefix("spiffe://").split("/")[0]
            authority = Authority(f"an authority of {domain}", self.root(domain))
            key = ec.generate_private_key(ec.SECP256R1())
            leaf = authority.issue([x509.UniformResourceIdentifier(identity)], key.public_key(), state["lifetime"])
            serials[identity] = serial(leaf)
            svid = self.messages.X509SVID(
                spiffe_id=identity,
                x509_svid=leaf.public_bytes(DER) + authority.certificate.public_bytes(DER),
                x509_svid_key=key.private_bytes(DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
                bundle=self.root(domain).certificate.public_bytes(DER),
                hint="internal",
            )
            svids.append(svid)
        bundles = {f"spiffe://{domain}": self.root(domain).certificate.public_bytes(DER) for domain in state["federated"]}
        return self.messages.X509SVIDResponse(svids=svids, federated_bundles=bundles, crl=[b"none"]), serials

    def FetchX509SVID(self, request, context):
        metadata = dict(context.invocation_metadata())
        self.calls += 1
        say({"call": {"metadata": {"workload.spiffe.io": metadata.get("workload.spiffe.io")}, "count": self.calls}})
        if metadata.get("workload.spiffe.io") != "true":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "security header missing from request")
        sent = None
        while context.is_active():
            self.refuse(self.state, context)
            if sent is not self.given:
                sent = self.given
                yield sent
            with self.changed:
                # The stream may end without anybody telling.
                self.changed.wait_for(lambda: sent is not self.given or self.state["refuse"], timeout=0.2)


def main(kind, folder):
    peer = {"istio": Istio, "workload": Workload}[kind](folder)
    port = peer.port.getsockname()[1] if kind == "istio" else None
    say({"ready": kind, "port": port})
    for line in sys.stdin:
        news = json.loads(line)
        peer.tell(news)
        say({"done": True, "serials": getattr(peer, "serials", {})})
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
