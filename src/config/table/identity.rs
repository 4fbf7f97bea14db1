//! The keys that say who this gateway is, whom it trusts, and how it takes HBONE.

use crate::document::scalar;
use crate::document::table::{Kind, Object, default, optional, required};

use super::TIMEOUT;

const PATH: Kind = Kind::Text(&scalar::PATH);
const SIZE: Kind = Kind::Text(&scalar::WINDOW);
const PER_SECOND: Kind = Kind::Integer { min: 1, max: 1_000_000 };

pub(in crate::config) static IDENTITY: Object = Object {
    name: "identity",
    doc: "The certificate by which this gateway identifies itself to those who come by HBONE. It has one SPIFFE URI, which \
          is `spiffe://<mesh.trustDomain>/ns/<node.namespace>/sa/<node.serviceAccount>` where the node says both.",
    one_of: &["files", "istioCa", "workloadApi"],
    fields: &[
        optional(
            "files",
            Kind::Object(&IDENTITY_FILES),
            "none",
            "PEM files, read again when they change; a pair that does not match leaves the old one in use.",
        ),
        optional(
            "istioCa",
            Kind::Object(&ISTIO_CA),
            "none",
            "Istio's certificate authority: the key is made here, and the certificate renewed at half its life. The \
             roots that come with it are believed for `mesh.trustDomain` alone, and not where `trust` names that.",
        ),
        optional(
            "workloadApi",
            Kind::Object(&WORKLOAD_API),
            "none",
            "The SPIFFE Workload API, which brings the roots of trust domains too; those that `trust` names are not \
             taken from it.",
        ),
    ],
};

pub(in crate::config) static IDENTITY_FILES: Object = Object {
    name: "identityFiles",
    doc: "A certificate and its key in PEM files.",
    one_of: &[],
    fields: &[
        required("certificate", PATH, "The chain, leaf first."),
        required("key", PATH, "The private key of the leaf."),
    ],
};

pub(in crate::config) static ISTIO_CA: Object = Object {
    name: "istioCa",
    doc: "Istio's certificate authority, as istiod serves it. It is asked to certify `node.namespace` and \
          `node.serviceAccount`, which have to be there, and told `node.cluster`.",
    one_of: &[],
    fields: &[
        required("address", Kind::Text(&scalar::HTTPS), "Where it is: `https://host:port`."),
        required(
            "roots",
            PATH,
            "PEM file of the roots that its own certificate chains to, read for each request.",
        ),
        required("token", PATH, "File of the token that says who asks; read again for each request."),
        default("validity", TIMEOUT, "24h", "How long the certificates asked for are valid."),
    ],
};

pub(in crate::config) static WORKLOAD_API: Object = Object {
    name: "workloadApi",
    doc: "The SPIFFE Workload API.",
    one_of: &[],
    fields: &[required(
        "socket",
        Kind::Text(&scalar::UNIX_SOCKET),
        "Its socket: `unix:///run/spire/agent.sock`.",
    )],
};

pub(in crate::config) static TRUST: Object = Object {
    name: "trust",
    doc: "The roots of one trust domain. A caller's certificate has to chain to those of the domain that it names.",
    one_of: &[],
    fields: &[
        required("trustDomain", Kind::Text(&scalar::TRUST_DOMAIN), "The trust domain; each is there once."),
        required("roots", PATH, "PEM file of its root certificates, read again when it changes."),
    ],
};

pub(in crate::config) static HBONE: Object = Object {
    name: "hbone",
    doc: "What HBONE connections and their streams may cost. A change holds for connections made after it.",
    one_of: &[],
    fields: &[
        default(
            "streams",
            Kind::Integer { min: 1, max: 65_536 },
            "1000",
            "Streams that a connection may have at once.",
        ),
        default(
            "streamWindow",
            SIZE,
            "4MiB",
            "What a client may send on a stream ahead of what its endpoint has taken.",
        ),
        optional(
            "connectionWindow",
            SIZE,
            "`streams` times `streamWindow`, at most 1GiB",
            "The same for all streams of a connection together. Less than all their windows lets streams that \
             stand still stop the others.",
        ),
        default("frameSize", Kind::Text(&scalar::FRAME_SIZE), "64KiB", "Largest frame taken."),
        default("headerBytes", Kind::Text(&scalar::HEADER_BYTES), "16KiB", "Largest header list taken."),
        default(
            "heldPerConnection",
            SIZE,
            "64MiB",
            "What streams of a connection may hold together that their endpoints do not take. Above that, the \
             stream that holds most and has stood still for `stalled` is reset.",
        ),
        default(
            "heldPerWorker",
            SIZE,
            "256MiB",
            "The same for all connections of a data-plane thread. Connections made while it holds more than half of \
             this are offered windows of 256KiB.",
        ),
        default("stalled", TIMEOUT, "10s", "How long a stream may stand still while too much is held."),
        default("handshakeTimeout", TIMEOUT, "10s", "From accept until TLS and HTTP/2 are agreed on."),
        default(
            "pingInterval",
            TIMEOUT,
            "10s",
            "How long a connection is silent before it is asked whether it lives.",
        ),
        default("pingTimeout", TIMEOUT, "20s", "How long it may take to answer."),
        default("idle", TIMEOUT, "1h", "How long a connection may be without a stream."),
        default(
            "resets",
            PER_SECOND,
            "100",
            "Streams per second that a connection may give up before they were answered, or a hundred times as many that are \
             refused; one that does more is closed.",
        ),
        default("pings", PER_SECOND, "100", "PING frames per second that a connection may send."),
        default("settings", PER_SECOND, "50", "SETTINGS frames per second that a connection may send."),
        default(
            "emptyFrames",
            PER_SECOND,
            "1000",
            "Frames per second that a connection may send that carry nothing: empty DATA, PRIORITY, GOAWAY, unknown types, \
             RST_STREAM of no open stream, WINDOW_UPDATE for nothing that was sent. The same for TLS records that carry \
             less than the header of a frame.",
        ),
    ],
};
