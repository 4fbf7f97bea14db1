//! The keys of the gateway's certificate, of the trusted roots, and of HBONE.

use std::time::Duration;

use isthmus_document::form;
use isthmus_document::key::keys;
use isthmus_settings::limits::HboneLimits;

/// The default validity of certificates from Istio's authority.
const VALIDITY: Duration = Duration::from_secs(24 * 3600);

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
        /// PEM file of the domain's root certificates, read again when it changes. Without this key, they are those that `identity`
        /// provides for the domain, and `crl` must be set.
        ROOTS "roots": form::Path => "the roots that `identity` provides";
        /// File of the certificate revocation lists of the domain's authorities (X509 CRL, in PEM or DER), such as Istio's `ca-crl.pem`,
        /// read again when it changes. A revoked certificate is refused, and its open connections end. Until the file was read once,
        /// no certificate of the domain is accepted.
        CRL "crl": form::Path => "none";
    }

    /// Limits of HBONE connections and their streams. A change applies to new connections.
    pub(crate) Hbone "hbone" {
        /// Simultaneous streams of one connection.
        STREAMS "streams": form::Integer<u32, 1, 65_536> = HboneLimits::default().streams;
        /// Flow-control window of a stream: bytes that a client may send before the endpoint has accepted them. Without this key, the
        /// window is 600KiB for each millisecond that a message takes to the client and back (measured by the TLS handshake), at most
        /// 24MiB, and at least a sixteenth of what the client's identity may hold (an eighth of `limits.memory`), from 1MiB to 16MiB.
        STREAM_WINDOW "streamWindow": form::Window => "1MiB to 24MiB, by `limits.memory` and the distance of the client";
        /// Deprecated: a smaller share for each connection than `limits.memory` gives. Above it, the gateway resets the stream that
        /// holds most among those that have been stalled for `stalled`.
        HELD_PER_CONNECTION "heldPerConnection": form::HeldSize => "64MiB";
        /// Deprecated: a smaller share than `limits.memory` gives. All data-plane threads together may hold as many times this size
        /// before streams are reset, and twice as much before connections are not read.
        HELD_PER_WORKER "heldPerWorker": form::HeldSize => "as `limits.memory` gives";
        /// Time that a stream may be stalled while more bytes are held than half of a share of `limits.memory`. `timeouts.stalled`
        /// describes the limit of the kernel's memory.
        STALLED "stalled": form::Timeout = HboneLimits::default().stalled;
        /// Time that a connection without streams stays open.
        IDLE "idle": form::Timeout = HboneLimits::default().idle;
    } removed {
        "streamWindowMax" "without streamWindow, the window of a stream is at most 24MiB";
        "connectionWindow" "the window of a connection is streams times the largest window of a stream, at most 1GiB";
        "frameSize" "the largest frame has 64KiB";
        "headerBytes" "the largest header list has 16KiB";
        "handshakeTimeout" "the handshakes may take 10s";
        "pingInterval" "a caller that is silent for 10s gets a PING";
        "pingTimeout" "a caller may take 20s to answer a PING";
        "resets" "a caller may cancel 100 unanswered streams per second";
        "pings" "a caller may send 100 PING frames per second";
        "settings" "a caller may send 50 SETTINGS frames per second";
        "emptyFrames" "a caller may send 1000 frames without effect per second";
    }
}
