#!/usr/bin/env python3
"""Writes the ClientHello corpus beside itself: one `.hello` file per case, the same bytes on every run.

    make.py           write the files, remove files of cases that are gone
    make.py --check   change nothing; exit 1 if a file is not what would be written

Nothing but the standard library. The file format is in README.md.
"""

import hashlib
import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
NAME = b"a.example.com"

# Extension types (IANA TLS ExtensionType registry).
SNI, STATUS, GROUPS, POINTS, SIGNATURES, ALPN, SCT, PADDING = 0, 5, 10, 11, 13, 16, 18, 21
ETM, EMS, COMPRESS, RECORD_LIMIT, DELEGATED, TICKET = 22, 23, 27, 28, 34, 35
PSK, EARLY, VERSIONS, COOKIE, PSK_MODES, SHARES, QUIC = 41, 42, 43, 44, 45, 51, 57
ALPS, ECH, RENEGOTIATION = 0x44CD, 0xFE0D, 0xFF01

MLKEM, X25519, P256, P384 = 0x11EC, 29, 23, 24
ISTIO = [b"istio-peer-exchange", b"istio"]


# --- bytes ---------------------------------------------------------------------------------------

def u8(n):
    return n.to_bytes(1, "big")


def u16(n):
    return n.to_bytes(2, "big")


def u24(n):
    return n.to_bytes(3, "big")


def v8(body):
    return u8(len(body)) + body


def v16(body):
    return u16(len(body)) + body


def noise(label, size):
    """Bytes that look random and are not: key shares, randoms, tickets."""
    out, counter = b"", 0
    while len(out) < size:
        out += hashlib.sha256(f"{label}/{counter}".encode()).digest()
        counter += 1
    return out[:size]


# --- extensions: (type, body) --------------------------------------------------------------------

def sni_list(*names, kind=0):
    return b"".join(u8(kind) + v16(name) for name in names)


def sni(name=NAME):
    return (SNI, v16(sni_list(name)))


def alpn(*names):
    return (ALPN, v16(b"".join(v8(name) for name in names)))


def groups(*ids):
    return (GROUPS, v16(b"".join(map(u16, ids))))


def signatures():
    return (SIGNATURES, v16(b"".join(map(u16, (0x0403, 0x0804, 0x0401, 0x0503, 0x0805, 0x0501, 0x0806, 0x0601)))))


def versions(*ids):
    return (VERSIONS, v8(b"".join(map(u16, ids))))


def shares(*pairs):
    return (SHARES, v16(b"".join(u16(group) + v16(key) for group, key in pairs)))


def share(group, label="share"):
    size = {MLKEM: 1216, X25519: 32, P256: 65}[group]
    return (group, noise(f"{label}/{group}", size))


def psk(ticket_size=192):
    identity = v16(noise("ticket", ticket_size)) + noise("age", 4)
    return (PSK, v16(identity) + v16(v8(noise("binder", 32))))


def ech_outer(label="ech"):
    return (ECH, b"\0" + u16(1) + u16(1) + u8(42) + v16(noise(label + "/enc", 32)) + v16(noise(label + "/payload", 208)))


def grease(n):
    return 0x0A0A + 0x1010 * n


MODES = (PSK_MODES, v8(b"\1"))
OCSP = (STATUS, b"\1\0\0\0\0")
RENEGO = (RENEGOTIATION, b"\0")


# --- messages and records ------------------------------------------------------------------------

SUITES_13 = (0x1301, 0x1302, 0x1303)
SUITES_12 = (0xC02B, 0xC02F, 0xC02C, 0xC030, 0xCCA9, 0xCCA8, 0xC013, 0xC014, 0x009C, 0x009D, 0x002F, 0x0035)


def extension_block(extensions):
    return b"".join(u16(kind) + v16(body) for kind, body in extensions)


def body(extensions=None, version=0x0303, session=b"", suites=SUITES_13, compression=b"\0", raw_extensions=None):
    """A ClientHello without its handshake header. `extensions=None` leaves the block out altogether."""
    out = u16(version) + noise("random", 32) + v8(session) + v16(b"".join(map(u16, suites))) + v8(compression)
    if raw_extensions is not None:
        return out + raw_extensions
    return out if extensions is None else out + v16(extension_block(extensions))


def handshake(content, kind=1):
    return u8(kind) + u24(len(content)) + content


def record(fragment, kind=22, version=0x0301):
    return u8(kind) + u16(version) + v16(fragment)


def records(message, *sizes, version=0x0301):
    """`message` in records of these sizes; the last takes the rest."""
    out, at = b"", 0
    for size in sizes:
        out += record(message[at:at + size], version=version)
        at += size
    return out + (record(message[at:], version=version) if at < len(message) else b"")


def hello(extensions, **more):
    return handshake(body(extensions, **more))


def simple(*extensions, **more):
    """The smallest hello of TLS 1.3 with these extensions behind the usual ones, as a message."""
    usual = [versions(0x0304), groups(X25519), signatures(), shares(share(X25519))]
    return hello(usual + list(extensions), session=noise("session", 32), **more)


def one(*extensions, **more):
    return record(simple(*extensions, **more))


# --- what clients send ---------------------------------------------------------------------------

def chrome(name=NAME, post_quantum=True):
    key_shares = [(grease(1), b"\0")] + ([share(MLKEM)] if post_quantum else []) + [share(X25519)]
    supported = [grease(1)] + ([MLKEM] if post_quantum else []) + [X25519, P256, P384]
    extensions = [
        (grease(2), b""), sni(name), *([ech_outer()] if post_quantum else []), shares(*key_shares), versions(grease(3), 0x0304, 0x0303),
        alpn(b"h2", b"http/1.1"), (SCT, b""), (COMPRESS, v8(u16(2))), OCSP, MODES, groups(*supported),
        (TICKET, b""), (POINTS, v8(b"\0")), signatures(), (ALPS, v16(v8(b"h2"))), (EMS, b""), RENEGO,
        (grease(4), b"\0"),
    ]
    suites = (grease(0),) + SUITES_13 + SUITES_12
    bare = hello(extensions, session=noise("session", 32), suites=suites)
    if len(bare) < 512:
        # RFC 7685: pads to 512 bytes, for servers that hang on sizes between 256 and 511.
        extensions.append((PADDING, bytes(512 - len(bare) - 4)))
    return hello(extensions, session=noise("session", 32), suites=suites)


def firefox(name=NAME):
    return hello([
        sni(name), (EMS, b""), RENEGO, groups(MLKEM, X25519, P256, P384, 25, 256, 257), (POINTS, v8(b"\0")),
        (TICKET, b""), alpn(b"h2", b"http/1.1"), OCSP, (DELEGATED, v16(u16(0x0403) + u16(0x0503))), (SCT, b""),
        shares(share(MLKEM), share(X25519), share(P256)), versions(0x0304, 0x0303), signatures(), MODES,
        (RECORD_LIMIT, u16(0x4001)), (COMPRESS, v8(u16(1) + u16(2) + u16(3))), ech_outer("firefox"),
    ], session=noise("session", 32), suites=SUITES_13 + SUITES_12)


def safari(name=NAME):
    return hello([
        (grease(5), b""), sni(name), (EMS, b""), RENEGO, groups(grease(6), MLKEM, X25519, P256, P384, 25),
        (POINTS, v8(b"\0")), alpn(b"h2", b"http/1.1"), OCSP, signatures(), (SCT, b""),
        shares((grease(6), b"\0"), share(MLKEM), share(X25519)), MODES, versions(grease(7), 0x0304, 0x0303),
        (COMPRESS, v8(u16(1))), (grease(8), b"\0"),
    ], session=noise("session", 32), suites=(grease(9),) + SUITES_13 + SUITES_12)


def openssl(name=NAME):
    return hello([
        sni(name), (POINTS, v8(b"\0\1\2")), groups(X25519, P256, 30, 25, P384), (TICKET, b""), (ETM, b""),
        (EMS, b""), signatures(), versions(0x0304, 0x0303), MODES, shares(share(X25519)),
    ], session=noise("session", 32), suites=SUITES_13 + SUITES_12 + (0x00FF,))


def rustls(name=NAME, protocols=()):
    return hello([
        versions(0x0304, 0x0303), sni(name), OCSP, groups(MLKEM, X25519, P256, P384), (POINTS, v8(b"\0")),
        (EMS, b""), (TICKET, b""), MODES, shares(share(MLKEM), share(X25519)), signatures(),
    ] + ([alpn(*protocols)] if protocols else []), session=noise("session", 32), suites=SUITES_13 + (0x00FF,))


def tls12(name=NAME, ticket=b"", session=b""):
    return hello([
        sni(name), (POINTS, v8(b"\0")), groups(X25519, P256), (TICKET, ticket), (EMS, b""), signatures(), RENEGO,
    ], session=session, suites=SUITES_12)


def resuming(*more):
    """TLS 1.3 with a ticket; the pre-shared key is the last extension (RFC 8446 §4.2.11)."""
    return simple(sni(), MODES, *more, psk())


def sized(stream_size, split=0):
    """A hello whose stream, in records of `split` bytes (0: one record), is exactly this long."""
    for filling in range(stream_size):
        message = simple(sni(), (PADDING, bytes(max(0, stream_size - 400))), (0x7777, bytes(filling)))
        headers = -(-len(message) // split) if split else 1
        if len(message) + 5 * headers == stream_size:
            sizes = [split] * (len(message) // split) if split else []
            return records(message, *sizes)
        if len(message) + 5 * headers > stream_size:
            break
    raise ValueError(stream_size)


# --- cases ---------------------------------------------------------------------------------------

CASES = []


def case(name, about, stream, expect, length=None):
    """`length` of an admitted hello, where bytes of something else follow it."""
    CASES.append((name, about, stream, expect, length))


def admit(name=NAME, *protocols):
    out = "admit " + name.decode()
    escaped = ["".join(chr(b) if 33 <= b < 127 and b not in b",\\" else f"\\x{b:02x}" for b in p) for p in protocols]
    return out + (" alpn " + ",".join(escaped) if escaped else "")


BROWSER = (b"h2", b"http/1.1")


def clients():
    case("chrome", "GREASE, ECH outer, post-quantum share, ALPS; two segments", record(chrome()), admit(NAME, *BROWSER))
    case("chrome-classic", "before post-quantum shares: GREASE, padding to 517 bytes", record(chrome(post_quantum=False)), admit(NAME, *BROWSER))
    case("firefox", "delegated credentials, record size limit, three shares", record(firefox()), admit(NAME, *BROWSER))
    case("safari", "GREASE without ECH", record(safari()), admit(NAME, *BROWSER))
    case("openssl-3.0", "no post-quantum share, encrypt-then-mac", record(openssl()), admit())
    case("rustls-post-quantum", "X25519MLKEM768 beside X25519", record(rustls()), admit())
    case("rustls-istio", "post-quantum, mesh name, Istio's ALPN",
         record(rustls(b"outbound_.443_._.reviews.shop.svc.cluster.local", ISTIO)),
         admit(b"outbound_.443_._.reviews.shop.svc.cluster.local", *ISTIO))
    case("post-quantum-sni-last", "the name lies in the second segment",
         record(hello([versions(0x0304), groups(MLKEM), signatures(), shares(share(MLKEM), share(X25519)), MODES,
                       (PADDING, bytes(200)), sni()])), admit())
    case("tls13-ticket", "a pre-shared key from a ticket, last extension", record(resuming()), admit())
    case("tls13-ticket-post-quantum", "a ticket of 1024 bytes behind a post-quantum share",
         record(hello([versions(0x0304), groups(MLKEM), signatures(), shares(share(MLKEM)), sni(), MODES, psk(1024)])),
         admit())
    case("tls12-ticket", "RFC 5077 session ticket of 192 bytes", record(tls12(ticket=noise("ticket", 192))), admit())
    case("tls12-session-id", "resumption by session id", record(tls12(session=noise("session", 32))), admit())
    case("tls12-only", "no supported_versions", record(tls12()), admit())
    case("tls12-no-extensions-but-sni", "the smallest hello with a name",
         record(hello([sni()], suites=SUITES_12)), admit())
    case("tls10", "client version 3.1", record(hello([sni()], version=0x0301, suites=(0x002F, 0x000A))), admit())
    case("ssl3-version", "client version 3.0, with SNI",
         record(hello([sni()], version=0x0300, suites=(0x000A,)), version=0x0300), admit())
    case("ssl3-bare", "client version 3.0, no extensions at all",
         record(hello(None, version=0x0300, suites=(0x000A,)), version=0x0300), "no_sni")
    case("version-0304", "client version 3.4, which no client should send", one(sni(), version=0x0304), admit())
    case("quic-parameters", "QUIC transport parameters over TCP", one(sni(), (QUIC, noise("quic", 60))), admit())
    case("cookie", "a second hello with a cookie, sent first", one((COOKIE, v16(noise("cookie", 64))), sni()), admit())
    case("unknown-extensions", "200 extensions nobody knows", one(sni(), *[(0x5000 + n, b"x") for n in range(200)]), admit())
    case("many-suites", "1000 cipher suites", one(sni(), suites=SUITES_13 + tuple(range(0x2000, 0x2000 + 997))), admit())
    case("compression-list", "deflate offered beside null", one(sni(), compression=b"\1\0"), admit())
    case("ech-outer", "the outer hello of ECH: its name is a public one",
         one(sni(b"public.ech.example"), ech_outer("real"), alpn(b"h2")), admit(b"public.ech.example", b"h2"))


def names():
    def good(name, about, spelled, canonical=None):
        case("name-" + name, about, one(sni(spelled)), admit(canonical or spelled))

    def bad(name, about, spelled, outcome="sni_invalid"):
        case("name-" + name, about, one(sni(spelled)), outcome)

    good("mesh-subset", "Istio's name of a subset", b"outbound_.443_.v1_.reviews.shop.svc.cluster.local")
    good("mesh-no-subset", "Istio's name without a subset", b"outbound_.8080_._.api.ns1.svc.cluster.local")
    good("mesh-upper", "a mesh name in mixed case", b"OutBound_.443_.V1_.Reviews.Shop.SVC.cluster.local",
         b"outbound_.443_.v1_.reviews.shop.svc.cluster.local")
    good("upper", "upper case", b"A.EXAMPLE.COM", b"a.example.com")
    good("trailing-dot", "one trailing dot", b"a.example.com.", b"a.example.com")
    good("one-label", "a single label", b"localhost")
    good("underscore", "underscores first and last", b"_a_._b_.example")
    good("hyphens", "labels that begin and end with a hyphen", b"-a-.example")
    good("digits", "digits, but no address", b"1.2.3")
    good("label-63", "the longest label", b"a" * 63 + b".example")
    longest = b".".join([b"a" * 63, b"b" * 63, b"c" * 63, b"d" * 61])
    good("253", "the longest name", longest)
    good("253-dot", "the longest name and a trailing dot", longest + b".", longest)
    good("punycode", "an A-label", b"xn--bcher-kva.example")
    case("name-sni-first", "the name is the first extension", record(hello([sni(), signatures()])), admit())
    case("name-sni-last", "the name is the last extension", one((PADDING, bytes(300)), sni()), admit())

    bad("nul", "an embedded NUL", b"a.example.com\0.evil.example")
    bad("nul-last", "a NUL at the end", b"a.example.com\0")
    bad("escape", "an ANSI escape sequence", b"a\x1b[31mred.example.com")
    bad("newline", "a line feed, to forge a log line", b"a.example.com\nreason=ok")
    bad("quote", "a quotation mark", b'a".example.com')
    bad("utf8", "a U-label in UTF-8", "bücher.example".encode())
    bad("latin1", "a byte over 127 that is no UTF-8", b"b\xfccher.example")
    bad("space", "a space", b"a example.com")
    bad("star", "a star alone: a key of the routes, no name", b"*")
    bad("star-suffix", "a wildcard as name", b"*.example.com")
    bad("port", "a colon and port", b"a.example.com:443")
    bad("slash", "a slash", b"a.example.com/x")
    bad("percent", "percent-encoding", b"a%2eexample.com")
    bad("brackets", "an IPv6 address in brackets", b"[2001:db8::1]")
    bad("empty-label", "an empty label", b"a..example.com")
    bad("leading-dot", "an empty first label", b".example.com")
    bad("two-dots", "two trailing dots", b"a.example.com..")
    bad("dot", "a dot alone", b".")
    bad("label-64", "a label of 64 bytes", b"a" * 64 + b".example")
    bad("254", "254 bytes", longest + b"d")
    bad("300", "300 bytes", b"a." * 149 + b"aa")
    bad("5000", "5000 bytes", b"a." * 2499 + b"aa")
    bad("ipv4", "an IPv4 address", b"10.0.0.4", "no_sni")
    bad("ipv4-dot", "an IPv4 address and a trailing dot", b"10.0.0.4.", "no_sni")
    bad("ipv6", "an IPv6 address", b"2001:db8::1", "no_sni")
    bad("ipv6-mapped", "an IPv4-mapped address", b"::ffff:10.0.0.4", "no_sni")

    case("no-sni", "no SNI extension", one(alpn(b"h2")), "no_sni")
    case("no-extensions", "the extension block is left out", record(hello(None)), "no_sni")
    case("empty-extensions", "an extension block of length 0", record(hello([])), "no_sni")
    minus = b"-"
    case("name-minus", "the spelling of the route for no SNI; a legal name all the same", one(sni(minus)), admit(minus))


def name_lists():
    def bad(name, about, extension_body):
        case("sni-" + name, about, one((SNI, extension_body)), "bad_hello")

    entry = sni_list(NAME)
    bad("empty-extension", "no bytes at all", b"")
    bad("one-byte", "half of the list's length", b"\0")
    bad("empty-list", "a list of length 0", v16(b""))
    bad("empty-list-with-entry", "a list of length 0, and an entry behind it", v16(b"") + entry)
    bad("empty-name", "a name of length 0", v16(sni_list(b"")))
    bad("list-too-long", "the list's length passes the extension's end", u16(len(entry) + 1) + entry)
    bad("list-too-short", "the list's length leaves a byte over", u16(len(entry) - 1) + entry)
    bad("list-then-bytes", "bytes behind the list", v16(entry) + b"\0")
    bad("name-too-long", "the name's length passes the list's end", v16(b"\0" + u16(len(NAME) + 1) + NAME))
    bad("name-too-short", "the name's length leaves bytes over", v16(b"\0" + u16(len(NAME) - 1) + NAME))
    bad("entry-cut", "an entry's header cut off", v16(b"\0\0"))
    bad("entry-then-cut", "a second entry's header cut off", v16(entry + b"\0"))
    bad("two-names", "two host names", v16(entry + sni_list(b"b.example.com")))
    bad("same-name-twice", "one host name said twice in a list", v16(entry + entry))
    bad("unknown-type", "one name of type 1", v16(sni_list(NAME, kind=1)))
    bad("unknown-type-first", "a name of type 1, then a host name", v16(sni_list(b"x", kind=1) + entry))
    bad("unknown-type-last", "a host name, then a name of type 1", v16(entry + sni_list(b"x", kind=1)))
    bad("type-255", "one name of type 255", v16(sni_list(NAME, kind=255)))
    case("sni-twice", "two SNI extensions", one(sni(), sni(b"b.example.com")), "bad_hello")
    case("sni-twice-same", "the same SNI extension twice", one(sni(), sni()), "bad_hello")
    case("sni-twice-apart", "two SNI extensions, first and last",
         record(hello([sni(), signatures(), versions(0x0304), sni(b"b.example.com")])), "bad_hello")


def protocols():
    case("alpn-h2", "one protocol", one(sni(), alpn(b"h2")), admit(NAME, b"h2"))
    every = [b"istio", b"istio-peer-exchange", b"istio-http/1.0", b"istio-http/1.1", b"istio-h2"]
    case("alpn-istio-all", "all that Istio's gateway accepts", one(sni(), alpn(*every)), admit(NAME, *every))
    case("alpn-istio", "what a sidecar offers", one(alpn(*ISTIO), sni()), admit(NAME, *ISTIO))
    case("alpn-grease", "a GREASE protocol of two bytes", one(sni(), alpn(b"\x0a\x0a", b"h2")), admit(NAME, b"\x0a\x0a", b"h2"))
    case("alpn-hostile", "a protocol with an escape, a comma and a line feed",
         one(sni(), alpn(b"\x1b[31m", b"a,b", b"x\ny")), admit(NAME, b"\x1b[31m", b"a,b", b"x\ny"))
    case("alpn-255", "the longest protocol name", one(sni(), alpn(b"p" * 255)), admit(NAME, b"p" * 255))

    def bad(name, about, extension_body):
        case("alpn-" + name, about, one(sni(), (ALPN, extension_body)), "bad_hello")

    bad("empty-extension", "no bytes at all", b"")
    bad("empty-list", "a list of length 0", v16(b""))
    bad("empty-name", "a protocol of length 0", v16(v8(b"")))
    bad("empty-name-among", "a protocol of length 0 between two others", v16(v8(b"h2") + v8(b"") + v8(b"istio")))
    bad("list-too-long", "the list's length passes the extension's end", u16(4) + v8(b"h2"))
    bad("list-too-short", "the list's length leaves bytes over", u16(3) + v8(b"h2") + v8(b"x"))
    bad("name-too-long", "a protocol passes the list's end", v16(u8(9) + b"h2"))
    case("alpn-twice", "two ALPN extensions", one(sni(), alpn(b"h2"), alpn(b"istio")), "bad_hello")


def malformed():
    case("duplicate-known", "supported_groups twice", one(sni(), groups(P256)), "bad_hello")
    case("duplicate-unknown", "an unknown extension twice", one((0x5555, b""), sni(), (0x5555, b"x")), "bad_hello")
    case("duplicate-grease", "one GREASE extension twice", one((0x2A2A, b""), sni(), (0x2A2A, b"")), "bad_hello")
    case("duplicate-65535", "the highest type twice", one((0xFFFF, b""), (0xFFFF, b""), sni()), "bad_hello")
    block = extension_block([sni(), signatures()])

    def raw(name, about, bytes_of_block):
        case("extensions-" + name, about, record(handshake(body(raw_extensions=bytes_of_block))), "bad_hello")

    raw("length-cut", "one byte of the block's length", b"\0")
    raw("too-long", "the block's length passes the hello's end", u16(len(block) + 1) + block)
    raw("too-short", "the block's length leaves bytes over", u16(len(block) - 4) + block)
    raw("bytes-behind", "a byte behind the block", v16(block) + b"\0")
    raw("zero-and-bytes", "a block of length 0 and bytes behind it", u16(0) + block)
    raw("type-cut", "an extension's type cut off", v16(block + b"\x12"))
    raw("header-cut", "an extension's length cut off", v16(block + b"\x12\x34\0"))
    raw("body-cut", "an extension longer than the block", v16(block + b"\x12\x34\0\x05abcd"))
    raw("only-header-cut", "a block that holds half an extension header", v16(b"\0\0\0"))

    def message(name, about, content):
        case("hello-" + name, about, record(handshake(content)), "bad_hello")

    start = u16(0x0303) + noise("random", 32)
    message("empty", "a handshake message of length 0", b"")
    message("one-byte", "a hello of one byte", b"\3")
    message("random-cut", "ends in the random", start[:20])
    message("no-session", "ends before the session id", start)
    message("session-33", "a session id of 33 bytes", body([sni()], session=noise("session", 33)))
    message("session-cut", "ends in the session id", start + u8(32) + b"short")
    message("no-suites", "ends before the cipher suites", start + u8(0))
    message("suites-zero", "no cipher suite", body([sni()], suites=()))
    message("suites-odd", "half a cipher suite", start + u8(0) + v16(b"\x13\x01\x13") + v8(b"\0") + v16(block))
    message("suites-cut", "ends in the cipher suites", start + u8(0) + u16(200) + b"\x13\x01")
    message("no-compression", "ends before the compression methods", start + u8(0) + v16(b"\x13\x01"))
    message("compression-zero", "no compression method", body([sni()], compression=b""))
    message("compression-cut", "ends in the compression methods", start + u8(0) + v16(b"\x13\x01") + u8(9) + b"\0")
    case("hello-length-short", "the handshake length ends the hello inside its extensions",
         record(u8(1) + u24(len(simple(sni())) - 4 - 7) + simple(sni())[4:]), "bad_hello")


def other_messages():
    content = body([sni()])
    case("server-hello", "a ServerHello", record(handshake(content, kind=2)), "bad_hello")
    case("hello-request", "a HelloRequest", record(handshake(b"", kind=0)), "bad_hello")
    case("client-key-exchange", "a ClientKeyExchange", record(handshake(noise("key", 66), kind=16)), "bad_hello")
    message = simple(sni())
    case("second-hello-in-record", "two ClientHellos in one record", record(message + message), "bad_hello")
    case("finished-in-record", "a Finished behind the hello in its record",
         record(message + handshake(noise("finished", 32), kind=20)), "bad_hello")
    case("byte-in-record", "one more byte in the hello's record", record(message + b"\0"), "bad_hello")
    case("byte-in-last-record", "one more byte in the last of two records",
         records(message + b"\0", 100), "bad_hello")


def fragments():
    message = simple(sni(), alpn(b"h2"))
    found = admit(NAME, b"h2")
    case("records-2", "a first record of 100 bytes", records(message, 100), found)
    at = message.index(NAME) + 5
    case("records-in-name", "cut inside the name", records(message, at), found)
    case("records-in-header", "cut inside the handshake header", records(message, 2), found)
    case("records-bytewise-header", "a record for each byte of the handshake header", records(message, 1, 1, 1, 1), found)
    case("records-versions", "record versions 3.1, 3.3 and 3.4",
         record(message[:50]) + record(message[50:90], version=0x0303) + record(message[90:], version=0x0304), found)
    case("records-post-quantum", "a post-quantum hello in two records",
         records(chrome(), 1000), admit(NAME, *BROWSER))
    case("records-istio-3", "a mesh name over three records",
         records(rustls(b"outbound_.443_._.reviews.shop.svc.cluster.local", ISTIO), 60, 10),
         admit(b"outbound_.443_._.reviews.shop.svc.cluster.local", *ISTIO))
    case("records-63", "62 records of one byte and a last one", records(message, *[1] * 62), found)
    case("records-64", "63 records of one byte and a last one", records(message, *[1] * 63), found)
    case("records-65", "64 records of one byte and a last one", records(message, *[1] * 64), "hello_fragments")
    case("records-bytewise", "a record for every byte", records(message, *[1] * len(message)), "hello_fragments")
    case("records-malformed-name", "an illegal name over two records",
         records(simple(sni(b"a b.example.com")), 80), "sni_invalid")
    case("records-duplicate", "SNI twice over two records", records(simple(sni(), sni()), 80), "bad_hello")
    case("record-empty-first", "a record of length 0 before the hello", record(b"") + record(message), "bad_hello")
    case("record-empty-middle", "a record of length 0 inside the hello",
         record(message[:80]) + record(b"") + record(message[80:]), "bad_hello")
    case("record-alert-inside", "an alert inside the hello",
         record(message[:80]) + record(b"\1\0", kind=21) + record(message[80:]), "bad_hello")
    case("record-data-inside", "application data inside the hello",
         record(message[:80]) + record(b"data", kind=23) + record(message[80:]), "bad_hello")
    case("record-version-inside", "a second record of version 5.5",
         record(message[:80]) + record(message[80:], version=0x0505), "bad_hello")
    case("record-over-2-14", "a record longer than 2^14 bytes", b"\x16\x03\x01" + u16(0x4001) + message, "bad_hello")
    case("record-over-2-14-header", "its header, and nothing more", b"\x16\x03\x01\x40\x01", "bad_hello")
    case("record-2-14-header", "the header of the longest record, and nothing more", b"\x16\x03\x01\x40\0", "hello_timeout")
    case("record-65535", "a record of 65535 bytes", b"\x16\x03\x01\xff\xff" + message, "bad_hello")
    case("record-version-0300", "record version 3.0", record(message, version=0x0300), found)
    case("record-version-0304", "record version 3.4", record(message, version=0x0304), found)
    case("record-version-03ff", "record version 3.255", record(message, version=0x03FF), found)
    case("record-version-0505", "record version 5.5", record(message, version=0x0505), "not_tls")
    case("record-version-0203", "record version 2.3", record(message, version=0x0203), "not_tls")


def sizes():
    case("size-15k", "15 KB in one record", sized(15_000), admit())
    case("size-limit", "a stream of exactly 16384 bytes", sized(16_384), admit())
    case("size-limit-records", "16384 bytes in records of 1000", sized(16_384, split=1000), admit())
    case("size-over", "a stream of 16385 bytes", sized(16_385), "hello_too_large")
    case("size-over-records", "16385 bytes in records of 1000", sized(16_385, split=1000), "hello_too_large")
    big = simple(sni(), *[(0x6000 + n, bytes(10_000)) for n in range(4)])
    case("size-40k", "40 KB in three records", records(big, 16_384, 16_384), "hello_too_large")
    case("size-40k-header", "the header of a hello of 40 KB, and nothing more",
         records(big, 16_384, 16_384)[:9], "hello_too_large")
    case("size-16m", "a handshake length of 16 MB", b"\x16\x03\x01\x40\x00\x01\xff\xff\xff", "hello_too_large")
    case("size-16m-small-record", "a handshake length of 16 MB in a small record",
         record(b"\x01\xff\xff\xff" + noise("body", 60)), "hello_too_large")


def followers():
    first = record(resuming((EARLY, b"")))
    case("then-early-data", "early data behind the hello", first + record(noise("early", 700), kind=23, version=0x0303),
         admit(), len(first))
    case("then-ccs-and-early-data", "a compatibility CCS, then early data",
         first + record(b"\1", kind=20, version=0x0303) + record(noise("early", 90), kind=23, version=0x0303),
         admit(), len(first))
    first = one(sni())
    case("then-ccs", "a CCS behind the hello", first + record(b"\1", kind=20, version=0x0303), admit(), len(first))
    case("then-hello", "a second hello in a record of its own: the endpoint's business",
         first + one(sni(b"b.example.com")), admit(), len(first))
    case("then-garbage", "bytes that are no TLS: the endpoint's business", first + b"GET / HTTP/1.1\r\n\r\n",
         admit(), len(first))
    case("then-empty-record", "a record of length 0: the endpoint's business", first + record(b""), admit(), len(first))
    case("no-sni-then-data", "no name, and data behind", one(alpn(b"h2")) + record(b"data", kind=23), "no_sni")
    case("bad-then-data", "SNI twice, and data behind", one(sni(), sni()) + record(b"data", kind=23), "bad_hello")


def foreign():
    def other(name, about, stream):
        case("not-tls-" + name, about, stream, "not_tls")

    other("http", "HTTP/1.1", b"GET / HTTP/1.1\r\nHost: a.example.com\r\n\r\n")
    other("http2", "the HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    other("ssh", "an SSH banner", b"SSH-2.0-OpenSSH_9.2\r\n")
    other("sslv2", "an SSLv2 hello", b"\x80\x2e\x01\x03\x01\x00\x15\x00\x00\x00\x10" + noise("sslv2", 37))
    other("alert", "an alert first", record(b"\2\x28", kind=21))
    other("ccs", "a change_cipher_spec first", record(b"\1", kind=20))
    other("data", "application data first", record(b"data", kind=23))
    other("heartbeat", "a heartbeat first", record(b"\1\x40\0", kind=24))
    other("proxy-v1", "a PROXY v1 header where none is allowed",
          b"PROXY TCP4 192.0.2.1 192.0.2.2 56324 443\r\n" + one(sni()))
    other("proxy-v2", "a PROXY v2 header where none is allowed",
          b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\xc0\0\2\1\xc0\0\2\2\xdc\x04\1\xbb" + one(sni()))
    other("dtls", "a DTLS hello", b"\x16\xfe\xfd" + bytes(8) + v16(simple(sni())))
    other("postgres", "Postgres' SSLRequest", b"\0\0\0\x08\x04\xd2\x16\x2f")
    other("socks5", "a SOCKS5 greeting", b"\x05\x01\x00")
    other("zeroes", "zeroes", bytes(64))
    other("one-byte", "one byte", b"G")
    other("two-bytes", "a handshake record of version 5", b"\x16\x05")


def truncated():
    whole = one(sni())
    case("cut-one-byte", "the first byte of a record", whole[:1], "hello_timeout")
    case("cut-header", "part of a record header", whole[:4], "hello_timeout")
    case("cut-after-header", "a record header", whole[:5], "hello_timeout")
    case("cut-handshake-header", "part of the handshake header", whole[:8], "hello_timeout")
    case("cut-half", "half of a hello", whole[:len(whole) // 2], "hello_timeout")
    case("cut-last-byte", "all but the last byte", whole[:-1], "hello_timeout")
    case("cut-segment", "the first segment of a post-quantum hello", record(chrome())[:1448], "hello_timeout")
    two = records(simple(sni()), 100)
    case("cut-second-record", "the second record is missing", two[:105], "hello_timeout")
    case("cut-second-header", "the second record's header is cut off", two[:108], "hello_timeout")
    case("cut-bad-name", "an illegal name in a hello that never ends: nothing is judged before it is whole",
         one(sni(b"a b"))[:-1], "hello_timeout")
    case("empty", "no byte at all", b"", "client_gone")


for group in (clients, names, name_lists, protocols, malformed, other_messages, fragments, sizes, followers, foreign,
              truncated):
    group()


# --- files ---------------------------------------------------------------------------------------

def text(name, about, stream, expect, length):
    head = [f"# name: {name}", f"# about: {about}", f"# expect: {expect}"]
    if expect.startswith("admit"):
        head.append(f"# length: {len(stream) if length is None else length}")
    rows = [stream[at:at + 32].hex() for at in range(0, len(stream), 32)]
    return "\n".join(head + rows) + "\n"


def main():
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit(__doc__)
    wanted = {}
    for one_case in CASES:
        file = one_case[0] + ".hello"
        if file in wanted:
            sys.exit(f"two cases are called {one_case[0]}")
        wanted[file] = text(*one_case)
    found = {file for file in os.listdir(FOLDER) if file.endswith(".hello")}
    wrong = sorted(found - set(wanted))
    for file, content in wanted.items():
        path = os.path.join(FOLDER, file)
        same = file in found and open(path, encoding="ascii").read() == content
        if not same:
            wrong.append(file)
            if not check:
                with open(path, "w", encoding="ascii") as out:
                    out.write(content)
    if check:
        for file in wrong:
            print(f"{file} is not what make.py writes")
        sys.exit(1 if wrong else 0)
    for file in found - set(wanted):
        os.remove(os.path.join(FOLDER, file))
    print(f"{len(wanted)} hellos, {len(wrong)} files changed")


main()
