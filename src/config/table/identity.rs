//! The keys of the gateway's certificate, of the trusted roots, and of HBONE.

use crate::document::scalar;
use crate::document::table::{Kind, Object, default, optional, required};

use super::TIMEOUT;

const PATH: Kind = Kind::Text(&scalar::PATH);
const SIZE: Kind = Kind::Text(&scalar::WINDOW);
const PER_SECOND: Kind = Kind::Integer { min: 1, max: 1_000_000 };

pub(in crate::config) static IDENTITY: Object = Object {
    name: "identity",
    doc: "This gateway's own certificate, which HBONE callers and xDS clients verify. It must have exactly one \
          SPIFFE URI. If `node` sets `namespace` and `serviceAccount`, that URI must be \
          `spiffe://<mesh.trustDomain>/ns/<node.namespace>/sa/<node.serviceAccount>`.",
    one_of: &["files", "istioCa", "workloadApi"],
    fields: &[
        optional(
            "files",
            Kind::Object(&IDENTITY_FILES),
            "none",
            "PEM files, which are read again when they change. If the new certificate and key do not match, the \
             gateway keeps the old pair.",
        ),
        optional(
            "istioCa",
            Kind::Object(&ISTIO_CA),
            "none",
            "Istio's certificate authority. The gateway generates the key and renews the certificate at half of \
             its lifetime. Root certificates that the authority sends are trusted for `mesh.trustDomain` only, \
             and ignored if `trust` lists that domain.",
        ),
        optional(
            "workloadApi",
            Kind::Object(&WORKLOAD_API),
            "none",
            "The SPIFFE Workload API, for example of SPIRE. It also provides the roots of trust domains; the \
             gateway ignores those of domains that `trust` lists.",
        ),
    ],
};

pub(in crate::config) static IDENTITY_FILES: Object = Object {
    name: "identityFiles",
    doc: "A certificate and its key in PEM files.",
    one_of: &[],
    fields: &[
        required("certificate", PATH, "Certificate chain, leaf first."),
        required("key", PATH, "Private key of the leaf certificate."),
    ],
};

pub(in crate::config) static ISTIO_CA: Object = Object {
    name: "istioCa",
    doc: "Istio's certificate authority, as istiod serves it. The gateway requests a certificate for \
          `node.namespace` and `node.serviceAccount`, both of which are required, and sends `node.cluster` along.",
    one_of: &[],
    fields: &[
        required("address", Kind::Text(&scalar::HTTPS), "Address of the authority: `https://host:port`."),
        required(
            "roots",
            PATH,
            "PEM file of the roots that verify the authority's own server certificate, read for each request.",
        ),
        required(
            "token",
            PATH,
            "File of the token that authenticates the gateway to the authority, read for each \
             request.",
        ),
        default("validity", TIMEOUT, "24h", "Lifetime of the certificates that the gateway requests."),
    ],
};

pub(in crate::config) static WORKLOAD_API: Object = Object {
    name: "workloadApi",
    doc: "The SPIFFE Workload API.",
    one_of: &[],
    fields: &[required(
        "socket",
        Kind::Text(&scalar::UNIX_SOCKET),
        "Socket of the Workload API: `unix:///run/spire/agent.sock`.",
    )],
};

pub(in crate::config) static TRUST: Object = Object {
    name: "trust",
    doc: "The roots of one trust domain. A caller's certificate must chain to the roots of the trust domain in \
          its SPIFFE ID.",
    one_of: &[],
    fields: &[
        required("trustDomain", Kind::Text(&scalar::TRUST_DOMAIN), "Trust domain, unique in the list."),
        required("roots", PATH, "PEM file of the domain's root certificates, read again when it changes."),
    ],
};

pub(in crate::config) static HBONE: Object = Object {
    name: "hbone",
    doc: "Limits of HBONE connections and their streams. A change applies to new connections.",
    one_of: &[],
    fields: &[
        default(
            "streams",
            Kind::Integer { min: 1, max: 65_536 },
            "1000",
            "Simultaneous streams of one connection.",
        ),
        default(
            "streamWindow",
            SIZE,
            "4MiB",
            "Flow-control window of a stream: bytes that a client may send before the endpoint has accepted them.",
        ),
        optional(
            "connectionWindow",
            SIZE,
            "`streams` times `streamWindow`, at most 1GiB",
            "Flow-control window of all streams of a connection together. If it is smaller than `streams` times \
             `streamWindow`, stalled streams can block the others.",
        ),
        default(
            "frameSize",
            Kind::Text(&scalar::FRAME_SIZE),
            "64KiB",
            "Largest HTTP/2 frame that the gateway \
             accepts.",
        ),
        default(
            "headerBytes",
            Kind::Text(&scalar::HEADER_BYTES),
            "16KiB",
            "Largest header list that the gateway \
             accepts.",
        ),
        default(
            "heldPerConnection",
            SIZE,
            "64MiB",
            "Bytes that the gateway holds for all streams of a connection because the endpoints have not accepted \
             them. Above this limit, the gateway resets the stream that holds most among those that have been \
             stalled for `stalled`.",
        ),
        default(
            "heldPerWorker",
            SIZE,
            "256MiB",
            "Bytes held for all connections of one data-plane thread. While a thread holds more than half of this \
             limit, new connections get windows of 256KiB.",
        ),
        default(
            "stalled",
            TIMEOUT,
            "10s",
            "Time that a stream may be stalled while more bytes are held than a \
             limit allows.",
        ),
        default(
            "handshakeTimeout",
            TIMEOUT,
            "10s",
            "Time from accept until the TLS and HTTP/2 handshakes are \
             complete.",
        ),
        default("pingInterval", TIMEOUT, "10s", "Time without traffic after which the gateway sends a PING."),
        default("pingTimeout", TIMEOUT, "20s", "Time that the caller may take to answer a PING."),
        default("idle", TIMEOUT, "1h", "Time that a connection without streams stays open."),
        default(
            "resets",
            PER_SECOND,
            "100",
            "Streams per second that a caller may cancel before the gateway has answered them. The limit for \
             refused streams is a hundred times this value. The gateway closes a connection that exceeds either \
             limit.",
        ),
        default("pings", PER_SECOND, "100", "PING frames per second that a caller may send on a connection."),
        default(
            "settings",
            PER_SECOND,
            "50",
            "SETTINGS frames per second that a caller may send on a connection.",
        ),
        default(
            "emptyFrames",
            PER_SECOND,
            "1000",
            "Frames without effect per second that a caller may send on a connection: empty DATA, PRIORITY, \
             GOAWAY, unknown types, RST_STREAM for a stream that is not open, WINDOW_UPDATE for bytes that were \
             not sent. The same limit applies to TLS records shorter than a frame header.",
        ),
    ],
};
