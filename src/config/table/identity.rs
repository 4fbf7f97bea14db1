//! The keys of the gateway's certificate, of the trusted roots, and of HBONE.

use std::time::Duration;

use isthmus_document::form;
use isthmus_document::key::keys;
use isthmus_snapshot::policy::HboneLimits;

/// The default validity of certificates from Istio's authority.
const VALIDITY: Duration = Duration::from_secs(24 * 3600);

type PerSecond = form::Integer<u32, 1, 1_000_000>;

keys! {
    /// This gateway's own certificate, which HBONE callers and xDS clients verify. It must have exactly one SPIFFE
    /// URI. If `node` sets `namespace` and `serviceAccount`, that URI must be
    /// `spiffe://<mesh.trustDomain>/ns/<node.namespace>/sa/<node.serviceAccount>`.
    pub(crate) Identity "identity" one of [FILES, ISTIO_CA, WORKLOAD_API] {
        /// PEM files, which are read again when they change. If the new certificate and key do not match, the
        /// gateway keeps the old pair.
        FILES "files": IdentityFiles => "none";
        /// Istio's certificate authority. The gateway generates the key and renews the certificate at half of its
        /// lifetime. Root certificates that the authority sends are trusted for `mesh.trustDomain` only, and
        /// ignored if `trust` lists that domain.
        ISTIO_CA "istioCa": IstioCa => "none";
        /// The SPIFFE Workload API, for example of SPIRE. It also provides the roots of trust domains; the gateway
        /// ignores those of domains that `trust` lists.
        WORKLOAD_API "workloadApi": WorkloadApi => "none";
    }

    /// A certificate and its key in PEM files.
    pub(crate) IdentityFiles "identityFiles" {
        /// Certificate chain, leaf first.
        CERTIFICATE "certificate": form::Path => required;
        /// Private key of the leaf certificate.
        KEY "key": form::Path => required;
    }

    /// Istio's certificate authority, as istiod serves it. The gateway requests a certificate for `node.namespace`
    /// and `node.serviceAccount`, both of which are required, and sends `node.cluster` along.
    pub(crate) IstioCa "istioCa" {
        /// Address of the authority: `https://host:port`.
        ADDRESS "address": form::Https => required;
        /// PEM file of the roots that verify the authority's own server certificate, read for each request.
        ROOTS "roots": form::Path => required;
        /// File of the token that authenticates the gateway to the authority, read for each request.
        TOKEN "token": form::Path => required;
        /// Lifetime of the certificates that the gateway requests.
        VALIDITY "validity": form::Timeout = VALIDITY;
    }

    /// The SPIFFE Workload API.
    pub(crate) WorkloadApi "workloadApi" {
        /// Socket of the Workload API: `unix:///run/spire/agent.sock`.
        SOCKET "socket": form::UnixSocket => required;
    }

    /// The roots of one trust domain. A caller's certificate must chain to the roots of the trust domain in its
    /// SPIFFE ID. Envoy clients of `xds` get the roots of services whose endpoints are not of `mesh.trustDomain` alone.
    pub(crate) Trust "trust" {
        /// Trust domain, unique in the list.
        TRUST_DOMAIN "trustDomain": form::TrustDomain => required;
        /// PEM file of the domain's root certificates, read again when it changes.
        ROOTS "roots": form::Path => required;
    }

    /// Limits of HBONE connections and their streams. A change applies to new connections.
    pub(crate) Hbone "hbone" {
        /// Simultaneous streams of one connection.
        STREAMS "streams": form::Integer<u32, 1, 65_536> = HboneLimits::default().streams;
        /// Flow-control window of a stream: bytes that a client may send before the endpoint has accepted them. It is 600KiB for each
        /// millisecond that a message takes to the client and back (measured by the TLS handshake), but at least `streamWindow` and at most
        /// `streamWindowMax`.
        STREAM_WINDOW "streamWindow": form::Window = HboneLimits::default().stream_window;
        /// Largest flow-control window of a stream; at least `streamWindow`.
        STREAM_WINDOW_MAX "streamWindowMax": form::Window => "`streamWindow` if that is given, otherwise 24MiB";
        /// Flow-control window of all streams of a connection together. If it is smaller than `streams` times
        /// `streamWindow`, stalled streams can block the others.
        CONNECTION_WINDOW "connectionWindow": form::Window => "`streams` times `streamWindow`, at most 1GiB";
        /// Largest HTTP/2 frame that the gateway accepts.
        FRAME_SIZE "frameSize": form::FrameSize = HboneLimits::default().frame_size;
        /// Largest header list that the gateway accepts.
        HEADER_BYTES "headerBytes": form::HeaderSize = HboneLimits::default().header_bytes;
        /// Bytes that the gateway holds for all streams of a connection because the endpoints have not accepted
        /// them. Above this limit, the gateway resets the stream that holds most among those that have been stalled
        /// for `stalled`.
        HELD_PER_CONNECTION "heldPerConnection": form::HeldSize = HboneLimits::default().held_per_connection;
        /// Bytes held for all connections of one data-plane thread. While a thread holds more than half of this
        /// limit, new connections get windows of 256KiB.
        HELD_PER_WORKER "heldPerWorker": form::HeldSize = HboneLimits::default().held_per_worker;
        /// Time that a stream may be stalled while more bytes are held than a limit allows; also the time that a connection of
        /// any listener may be stalled while the kernel holds too much memory for peers that do not read.
        STALLED "stalled": form::Timeout = HboneLimits::default().stalled;
        /// Time from accept until the TLS and HTTP/2 handshakes are complete.
        HANDSHAKE_TIMEOUT "handshakeTimeout": form::Timeout = HboneLimits::default().handshake_timeout;
        /// Time without traffic after which the gateway sends a PING.
        PING_INTERVAL "pingInterval": form::Timeout = HboneLimits::default().ping_interval;
        /// Time that the caller may take to answer a PING.
        PING_TIMEOUT "pingTimeout": form::Timeout = HboneLimits::default().ping_timeout;
        /// Time that a connection without streams stays open.
        IDLE "idle": form::Timeout = HboneLimits::default().idle;
        /// Streams per second that a caller may cancel before the gateway has answered them. The limit for refused
        /// streams is a hundred times this value. The gateway closes a connection that exceeds either limit.
        RESETS "resets": PerSecond = HboneLimits::default().resets;
        /// PING frames per second that a caller may send on a connection.
        PINGS "pings": PerSecond = HboneLimits::default().pings;
        /// SETTINGS frames per second that a caller may send on a connection.
        SETTINGS "settings": PerSecond = HboneLimits::default().settings;
        /// Frames without effect per second that a caller may send on a connection: empty DATA, PRIORITY, GOAWAY,
        /// unknown types, RST_STREAM for a stream that is not open, WINDOW_UPDATE for bytes that were not sent. The
        /// same limit applies to TLS records shorter than a frame header.
        EMPTY_FRAMES "emptyFrames": PerSecond = HboneLimits::default().empty_frames;
    }
}
