//! The reason why a connection ended or was refused. The list is closed: the access log, the metrics, `explain`, the failures list
//! and `docs/reasons.md, "Reasons"`, which is generated from it, have these words and no others.

use std::fmt;

use crate::alert::Alert::{self, *};
use crate::side::Side::{self, *};

/// Defines the reasons. Each row has the meaning in one sentence, the word, the party that ended the connection, the TLS alert that a
/// refused SNI client gets, the HTTP status that a refused HBONE caller gets, and what an operator checks next.
macro_rules! reasons {
    ($($(#[doc = $doc:literal])* $variant:ident = $text:literal, by $by:expr, alert $alert:expr, status $status:expr, look at $look_at:literal;)*) => {
        /// The reason why a connection ended or was refused.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Reason {
            $($(#[doc = $doc])* $variant,)*
        }

        impl Reason {
            /// All reasons, in the order of their page.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Returns the reason as logs, labels and headers write it.
            pub const fn text(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }

            /// Returns the meaning of the reason in one sentence.
            pub fn meaning(self) -> &'static str {
                match self {
                    $(Self::$variant => concat!($($doc),*).trim(),)*
                }
            }

            /// Returns the party that ended a connection with this reason. If the connection ended normally, returns `first`, the party
            /// that ended its direction first.
            pub fn ended_by(self, first: Option<Side>) -> Option<Side> {
                let by = match self {
                    $(Self::$variant => $by,)*
                };
                by.or(first)
            }

            /// Returns the TLS alert for a refused SNI client; `None` if it gets none from the gateway.
            pub const fn alert(self) -> Option<Alert> {
                match self {
                    $(Self::$variant => $alert,)*
                }
            }

            /// Returns the HTTP status of the answer to a CONNECT; `None` for a reason that answers none.
            pub const fn status(self) -> Option<u16> {
                match self {
                    $(Self::$variant => $status,)*
                }
            }

            /// Returns what an operator checks next.
            pub const fn look_at(self) -> &'static str {
                match self {
                    $(Self::$variant => $look_at,)*
                }
            }
        }
    };
}

reasons! {
    /// The connection ended normally.
    Ok = "ok", by None, alert None, status Some(200),
        look at "nothing, or `detail` and `attempts` if the connection was slow";
    /// The ClientHello was incomplete when `hello.timeout` had passed.
    HelloTimeout = "hello_timeout", by Some(Gateway), alert None, status None,
        look at "the client, the path to it (MTU), `hello.timeout`";
    /// The client closed or reset the connection after its first byte, and before it was admitted.
    ClientGone = "client_gone", by Some(Client), alert None, status None,
        look at "the client, its timeouts";
    /// The ClientHello is longer than `hello.maxBytes`, or announces a length above it.
    HelloTooLarge = "hello_too_large", by Some(Gateway), alert Some(IllegalParameter), status None,
        look at "the client; `listeners[].hello`";
    /// The ClientHello spans more TLS records than `hello.maxRecords`.
    HelloFragments = "hello_fragments", by Some(Gateway), alert Some(IllegalParameter), status None,
        look at "the client; `listeners[].hello`";
    /// The ClientHello is malformed or ambiguous.
    BadHello = "bad_hello", by Some(Gateway), alert Some(DecodeError), status None,
        look at "`detail`; the client, or a middlebox between client and gateway";
    /// The first bytes are not a TLS handshake.
    NotTls = "not_tls", by Some(Gateway), alert None, status None,
        look at "`detail`: the client speaks another protocol, or a load balancer adds a PROXY header (`listeners[].proxyProtocol`)";
    /// The client sent no SNI, or an IP address as SNI, and there is no route `"-"`.
    NoSni = "no_sni", by Some(Gateway), alert Some(UnrecognizedName), status None,
        look at "the client's TLS settings; route `\"-\"`";
    /// The SNI is not a legal host name.
    SniInvalid = "sni_invalid", by Some(Gateway), alert Some(IllegalParameter), status None,
        look at "`sni`; the client's settings";
    /// No route and no known service has the name that the client sent as SNI.
    SniUnknown = "sni_unknown", by Some(Gateway), alert Some(UnrecognizedName), status None,
        look at "`isthmus explain NAME` (near names), `isthmus exposed`";
    /// No known service has the name or address in the `:authority` of a CONNECT.
    AuthorityUnknown = "authority_unknown", by Some(Gateway), alert None, status Some(404),
        look at "`isthmus explain NAME` (near names), `isthmus exposed`";
    /// The service is known, but no export rule allows this caller to reach it through this listener.
    NotExported = "not_exported", by Some(Gateway), alert Some(UnrecognizedName), status Some(404),
        look at "`isthmus explain NAME`; `exports`";
    /// The client offered none of the protocols in the listener's `alpn`.
    AlpnRefused = "alpn_refused", by Some(Gateway), alert Some(NoApplicationProtocol), status None,
        look at "`alpn`, `detail`; `listeners[].alpn`, `listeners[].protocol`";
    /// The source address is outside the `from` of the listener or of the route.
    SourceDenied = "source_denied", by Some(Gateway), alert Some(AccessDenied), status Some(403),
        look at "`source`; `listeners[].from`";
    /// The PROXY header that the listener requires is missing or malformed, or its sender is not trusted.
    ProxyProtocol = "proxy_protocol", by Some(Gateway), alert Some(AccessDenied), status None,
        look at "`detail`; the load balancer before the gateway; `listeners[].proxyProtocol`";
    /// The TLS handshake with the caller failed.
    TlsFailed = "tls_failed", by Some(Gateway), alert None, status None,
        look at "`detail`; `isthmus get certificates`; the caller's TLS version";
    /// The caller's certificate does not chain to its trust domain's roots.
    IdentityUntrusted = "identity_untrusted", by Some(Gateway), alert None, status Some(403),
        look at "`detail`; `isthmus get certificates`; the key `trust` of this gateway's config";
    /// The caller's certificate has expired or is not valid yet.
    IdentityExpired = "identity_expired", by Some(Gateway), alert None, status None,
        look at "`detail`, which names the certificate; the renewal of that certificate; the clocks of both hosts";
    /// An identity is required and the caller has none: it showed no certificate, or the listener is an SNI listener.
    IdentityRequired = "identity_required", by Some(Gateway), alert Some(UnrecognizedName), status None,
        look at "the caller's certificate; on an SNI listener, `peers[].from` for callers of a peer, or `exports[].to.identities`";
    /// The caller's identity is not among those that the export rule names.
    IdentityDenied = "identity_denied", by Some(Gateway), alert None, status Some(403),
        look at "`source_identity`; `isthmus explain NAME --authority --identity ID`; `exports[].to`";
    /// The CONNECT request is malformed, or the method is not CONNECT.
    BadRequest = "bad_request", by Some(Gateway), alert None, status Some(400),
        look at "`detail`; the caller";
    /// The service has no usable endpoint on the gateway's own network.
    NoEndpoints = "no_endpoints", by Some(Gateway), alert Some(InternalError), status Some(503),
        look at "`isthmus explain NAME` (`omitted`); `isthmus get endpoints`";
    /// No endpoint is healthy, and `panic` is off; or all endpoints are draining, or an operator has taken them out.
    AllUnhealthy = "all_unhealthy", by Some(Gateway), alert Some(InternalError), status Some(503),
        look at "`isthmus get endpoints`; `isthmus explain NAME`; `panic`";
    /// The endpoint refused the connection.
    EndpointRefused = "endpoint_refused", by Some(Endpoint), alert Some(InternalError), status Some(503),
        look at "the endpoint; `isthmus get endpoints`; `isthmus explain NAME --probe`";
    /// The endpoint did not accept the connection within the connect timeout.
    EndpointTimeout = "endpoint_timeout", by Some(Gateway), alert Some(InternalError), status Some(503),
        look at "the endpoint, firewalls; `connectTimeout`; `isthmus explain NAME --probe`";
    /// The endpoint cannot be reached from this host, or is this gateway itself.
    EndpointUnreachable = "endpoint_unreachable", by Some(Gateway), alert Some(InternalError), status Some(503),
        look at "the host's routing table; `detail`";
    /// The service is one of a peer that is called on carriers, and this gateway has no carrier of the peer.
    CarrierNone = "carrier_none", by Some(Gateway), alert Some(InternalError), status Some(503),
        look at "`isthmus peers`; `peers[].carry` on both sides; the peer's gateways, which dial the carriers";
    /// The carrier of the connection was lost.
    CarrierLost = "carrier_lost", by Some(Endpoint), alert Some(InternalError), status Some(503),
        look at "`isthmus peers`; the peer's gateway, and the path to it";
    /// The call came from a peer, on a carrier or from another gateway of this mesh, and would go out to a peer or network again, or the
    /// gateways of two organisations have passed it on. The caller sees the name as unknown.
    HopLimit = "hop_limit", by Some(Gateway), alert Some(UnrecognizedName), status Some(404),
        look at "`import` and `export` of the peers, `networks.*.egress` and `cidrs`: two gateways lead a name in a circle";
    /// The connection was reset because it had no pause in which it could be closed: it was older than `maxConnectionAge`, or a planned
    /// drain has emptied its endpoint or this gateway.
    Drained = "drained", by Some(Gateway), alert None, status None,
        look at "`detail`; `isthmus drains`, `maxConnectionAge`";
    /// The client reset the connection.
    ClientReset = "client_reset", by Some(Client), alert None, status None,
        look at "the client; `ended_by`, `bytes_up`, `bytes_down`";
    /// The endpoint reset the connection.
    EndpointReset = "endpoint_reset", by Some(Endpoint), alert Some(InternalError), status Some(503),
        look at "the endpoint; `isthmus get endpoints`; `isthmus explain NAME --probe`";
    /// The endpoint closed the connection after the hello without a byte, while the client was still there.
    EndpointClosed = "endpoint_closed", by Some(Endpoint), alert Some(InternalError), status None,
        look at "the endpoint; `isthmus get endpoints`; `isthmus explain NAME --probe`";
    /// The endpoint answered a ClientHello with bytes that are not TLS.
    EndpointNotTls = "endpoint_not_tls", by Some(Endpoint), alert None, status None,
        look at "the port of the endpoint: `isthmus get endpoints`; `detail`";
    /// The endpoint answered a ClientHello with a TLS alert in place of a ServerHello.
    EndpointAlert = "endpoint_alert", by Some(Endpoint), alert Some(InternalError), status None,
        look at "`detail`, which names the alert; the endpoint's certificates and names; `isthmus explain NAME --probe`";
    /// The client left at least 250 ms after its hello, and the endpoint had sent no byte.
    EndpointSilent = "endpoint_silent", by Some(Client), alert None, status None,
        look at "`detail`, which tells how long the client waited; `isthmus get endpoints`; `isthmus explain NAME --probe`";
    /// The endpoint no longer acknowledged bytes.
    EndpointVanished = "endpoint_vanished", by Some(Endpoint), alert None, status None,
        look at "the endpoint's host, and the path to it";
    /// The client no longer acknowledged bytes.
    ClientVanished = "client_vanished", by Some(Client), alert None, status None,
        look at "the client's host, and the path to it";
    /// The client or the endpoint read nothing for too long while bytes waited for it.
    Stalled = "stalled", by Some(Gateway), alert None, status None,
        look at "`bytes_up` and `bytes_down`, which show whether the client or the endpoint stopped reading; `timeouts.stalled`, `hbone.stalled`";
    /// No byte was sent in either direction for `timeouts.idle`.
    IdleTimeout = "idle_timeout", by Some(Gateway), alert None, status None,
        look at "`timeouts.idle`";
    /// One direction had ended, and no byte was sent in the other direction for `timeouts.halfClose`.
    HalfCloseTimeout = "half_close_timeout", by Some(Gateway), alert None, status None,
        look at "`ended_by`; the program that kept its direction open; `timeouts.halfClose`";
    /// The source has reached a limit of `limits.perSource`: connections, new connections per second, or incomplete hellos.
    LimitSource = "limit_source", by Some(Gateway), alert Some(InternalError), status Some(503),
        look at "`source`, `detail`; `isthmus explain NAME --from IP`; `limits.perSource`";
    /// The service has reached its limit of connections (`limits.perService`), or its healthy endpoints theirs (`maxConnections`).
    LimitService = "limit_service", by Some(Gateway), alert Some(InternalError), status Some(503),
        look at "`service`, `route`; `isthmus explain NAME`; `limits.perService`";
    /// `limits.connections` or `limits.pendingHellos` was reached.
    LimitGlobal = "limit_global", by Some(Gateway), alert Some(InternalError), status Some(503),
        look at "`isthmus status`; `limits`, the descriptor limit of the process";
    /// The gateway is stopping.
    Draining = "draining", by Some(Gateway), alert Some(InternalError), status Some(503),
        look at "nothing: the gateway was stopped";
    /// The config file was reloaded and no longer allows this connection.
    ConfigRemoved = "config_removed", by Some(Gateway), alert None, status None,
        look at "`from`, `routes`, `exports` and `trust` in the last change of the config";
    /// An operator closed the connection.
    Killed = "killed", by Some(Gateway), alert None, status None,
        look at "the operator who closed the connection";
    /// An internal error of the gateway.
    Internal = "internal", by Some(Gateway), alert Some(InternalError), status Some(503),
        look at "the log of the gateway; please report it";
}

impl Reason {
    /// Returns the reason with this text.
    pub fn named(text: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|reason| reason.text() == text)
    }

    /// Returns true if an endpoint has refused a ClientHello, for which the hello or the endpoint may be at fault.
    pub const fn refuses_hello(self) -> bool {
        matches!(self, Self::EndpointClosed | Self::EndpointAlert | Self::EndpointNotTls)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_the_contract() {
        let contract = "ok, hello_timeout, client_gone, hello_too_large, hello_fragments, bad_hello, not_tls, \
             no_sni, sni_invalid, sni_unknown, authority_unknown, not_exported, alpn_refused, source_denied, \
             proxy_protocol, tls_failed, identity_untrusted, identity_expired, identity_required, identity_denied, \
             bad_request, no_endpoints, all_unhealthy, endpoint_refused, endpoint_timeout, endpoint_unreachable, \
             carrier_none, carrier_lost, hop_limit, drained, client_reset, endpoint_reset, endpoint_closed, endpoint_not_tls, endpoint_alert, \
             endpoint_silent, endpoint_vanished, \
             client_vanished, stalled, idle_timeout, half_close_timeout, limit_source, \
             limit_service, limit_global, draining, config_removed, killed, internal";
        let ours: Vec<_> = Reason::ALL.iter().map(|reason| reason.text()).collect();
        assert_eq!(ours.join(", "), contract);
    }

    #[test]
    fn a_connection_that_ended_normally_was_ended_by_the_party_that_ended_its_direction_first() {
        for first in [None, Some(Client), Some(Endpoint)] {
            assert_eq!(Reason::Ok.ended_by(first), first);
            assert_eq!(Reason::EndpointSilent.ended_by(first), Some(Client));
            assert_eq!(Reason::EndpointRefused.ended_by(first), Some(Endpoint));
            assert_eq!(Reason::EndpointTimeout.ended_by(first), Some(Gateway));
        }
    }

    #[test]
    fn unknown_not_exported_and_offered_by_another_peer_are_alike_on_the_wire() {
        for reason in [Reason::NotExported, Reason::HopLimit] {
            assert_eq!(Reason::SniUnknown.alert(), reason.alert());
            assert_eq!(Reason::AuthorityUnknown.status(), reason.status());
        }
        assert_eq!(Reason::HelloTimeout.alert(), None);
    }
}
