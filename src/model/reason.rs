//! The reason why a connection ended or was refused: the closed list of SPEC §10, used alike in the access
//! log, the metrics, `explain`, the failures list and the documents.

use std::fmt;

macro_rules! reasons {
    ($($(#[doc = $doc:literal])* $variant:ident = $text:literal,)*) => {
        /// The reason why a connection ended or was refused.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Reason {
            $($(#[doc = $doc])* $variant,)*
        }

        impl Reason {
            /// All reasons, in the order of SPEC §10.
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
        }
    };
}

reasons! {
    /// The connection ended normally.
    Ok = "ok",
    /// The ClientHello was incomplete when `hello.timeout` had passed.
    HelloTimeout = "hello_timeout",
    /// The client closed or reset the connection before it was admitted, or no longer answers.
    ClientGone = "client_gone",
    /// The ClientHello is longer than `hello.maxBytes`, or announces a length above it.
    HelloTooLarge = "hello_too_large",
    /// The ClientHello spans more TLS records than `hello.maxRecords`.
    HelloFragments = "hello_fragments",
    /// The ClientHello is malformed or ambiguous.
    BadHello = "bad_hello",
    /// The first bytes are not a TLS handshake.
    NotTls = "not_tls",
    /// The client sent no SNI, or an IP address as SNI, and there is no route `"-"`.
    NoSni = "no_sni",
    /// The SNI is not a legal host name.
    SniInvalid = "sni_invalid",
    /// No route and no known service has the name that the client sent as SNI.
    SniUnknown = "sni_unknown",
    /// No known service has the name or address in the `:authority` of a CONNECT.
    AuthorityUnknown = "authority_unknown",
    /// The service is known, but no export rule allows this caller to reach it through this listener.
    NotExported = "not_exported",
    /// The client offered none of the protocols in the listener's `alpn`.
    AlpnRefused = "alpn_refused",
    /// The source address is outside the listener's `from`.
    SourceDenied = "source_denied",
    /// The PROXY header that the listener requires is missing or malformed, or its sender is not trusted.
    ProxyProtocol = "proxy_protocol",
    /// The TLS handshake with the caller failed.
    TlsFailed = "tls_failed",
    /// The caller's certificate does not chain to its trust domain's roots.
    IdentityUntrusted = "identity_untrusted",
    /// The caller's certificate has expired or is not valid yet.
    IdentityExpired = "identity_expired",
    /// An identity is required and the caller has none: it showed no certificate, or the listener is an SNI listener.
    IdentityRequired = "identity_required",
    /// The caller's identity is not among those that the export rule names.
    IdentityDenied = "identity_denied",
    /// The CONNECT request is malformed, or the method is not CONNECT.
    BadRequest = "bad_request",
    /// The service has no usable endpoint on the gateway's own network.
    NoEndpoints = "no_endpoints",
    /// No endpoint is healthy, and `panic` is off; or all endpoints are draining, or an operator has taken them out.
    AllUnhealthy = "all_unhealthy",
    /// The endpoint refused the connection.
    EndpointRefused = "endpoint_refused",
    /// The endpoint did not accept the connection within the connect timeout.
    EndpointTimeout = "endpoint_timeout",
    /// The endpoint cannot be reached from this host, or is this gateway itself.
    EndpointUnreachable = "endpoint_unreachable",
    /// The client reset the connection.
    ClientReset = "client_reset",
    /// The endpoint reset the connection.
    EndpointReset = "endpoint_reset",
    /// The client or the endpoint read nothing for too long while bytes waited for it.
    Stalled = "stalled",
    /// No byte was sent in either direction for `timeouts.idle`.
    IdleTimeout = "idle_timeout",
    /// One direction had ended, and no byte was sent in the other direction for `timeouts.halfClose`.
    HalfCloseTimeout = "half_close_timeout",
    /// The source has reached a limit of `limits.perSource`: connections, new connections per second, or incomplete hellos.
    LimitSource = "limit_source",
    /// The service has reached its limit of connections (`limits.perService`).
    LimitService = "limit_service",
    /// `limits.connections` or `limits.pendingHellos` was reached.
    LimitGlobal = "limit_global",
    /// The gateway is stopping.
    Draining = "draining",
    /// The config file was reloaded and no longer allows this connection.
    ConfigRemoved = "config_removed",
    /// An operator closed the connection.
    Killed = "killed",
    /// An internal error of the gateway.
    Internal = "internal",
}

impl Reason {
    /// Returns what an operator checks next.
    pub const fn look_at(self) -> &'static str {
        match self {
            Self::Ok => "nothing, or `detail` and `attempts` if the connection was slow",
            Self::HelloTimeout => "the client, the path to it (MTU), `hello.timeout`",
            Self::ClientGone => "the client, its timeouts; a load balancer's probes",
            Self::HelloTooLarge | Self::HelloFragments => "the client; `listeners[].hello`",
            Self::BadHello => "`detail`; the client, or a middlebox between client and gateway",
            Self::NotTls => {
                "`detail`: the client speaks another protocol, or a load balancer adds a PROXY header (`listeners[].proxyProtocol`)"
            }
            Self::NoSni => "the client's TLS settings; route `\"-\"`",
            Self::SniInvalid => "`sni`; the client's settings",
            Self::SniUnknown | Self::AuthorityUnknown => {
                "`isthmus explain NAME` (near names), `isthmus exposed`"
            }
            Self::NotExported => "`isthmus explain NAME`; `exports`",
            Self::AlpnRefused => "`alpn`, `detail`; `listeners[].alpn`, `listeners[].protocol`",
            Self::SourceDenied => "`source`; `listeners[].from`",
            Self::ProxyProtocol => {
                "`detail`; the load balancer before the gateway; `listeners[].proxyProtocol`"
            }
            Self::TlsFailed => "`detail`; `isthmus get certificates`; the caller's TLS version",
            Self::IdentityUntrusted => {
                "`detail`; `isthmus get certificates`; the key `trust` of this gateway's config"
            }
            Self::IdentityExpired => {
                "`detail`, which names the certificate; the renewal of that certificate; the clocks of \
                                      both hosts"
            }
            Self::IdentityRequired => {
                "the caller's certificate; on an SNI listener, `peers[].from` for callers of a peer, or \
                 `exports[].to.identities`"
            }
            Self::IdentityDenied => {
                "`source_identity`; `isthmus explain NAME --authority --identity ID`; `exports[].to`"
            }
            Self::BadRequest => "`detail`; the caller",
            Self::NoEndpoints => "`isthmus explain NAME` (`omitted`); `isthmus get endpoints`",
            Self::AllUnhealthy => "`isthmus get endpoints`; `isthmus explain NAME`; `panic`",
            Self::EndpointRefused | Self::EndpointReset => {
                "the endpoint; `isthmus get endpoints`; `isthmus explain NAME --probe`"
            }
            Self::EndpointTimeout => {
                "the endpoint, firewalls; `connectTimeout`; `isthmus explain NAME --probe`"
            }
            Self::EndpointUnreachable => "the host's routing table; `detail`",
            Self::ClientReset => "the client; `ended_by`, `bytes_up`, `bytes_down`",
            Self::Stalled => {
                "`bytes_up` and `bytes_down`, which show whether the client or the endpoint stopped reading; \
                 `timeouts.stalled`, `hbone.stalled`"
            }
            Self::IdleTimeout => "`timeouts.idle`",
            Self::HalfCloseTimeout => {
                "`ended_by`; the program that kept its direction open; `timeouts.halfClose`"
            }
            Self::LimitSource => "`source`, `detail`; `isthmus explain NAME --from IP`; `limits.perSource`",
            Self::LimitService => "`service`, `route`; `isthmus explain NAME`; `limits.perService`",
            Self::LimitGlobal => "`isthmus status`; `limits`, the descriptor limit of the process",
            Self::Draining => "nothing: the gateway was stopped",
            Self::ConfigRemoved => "`from`, `routes`, `exports` and `trust` in the last change of the config",
            Self::Killed => "the operator who closed the connection",
            Self::Internal => "the log of the gateway; please report it",
        }
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
             client_reset, endpoint_reset, stalled, idle_timeout, half_close_timeout, limit_source, \
             limit_service, limit_global, draining, config_removed, killed, internal";
        let ours: Vec<_> = Reason::ALL.iter().map(|reason| reason.text()).collect();
        assert_eq!(ours.join(", "), contract);
    }
}
