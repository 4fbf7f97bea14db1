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
    /// Both sides ended the connection in order.
    Ok = "ok",
    /// The hello was not whole when `hello.timeout` had passed.
    HelloTimeout = "hello_timeout",
    /// The client closed or reset before it was admitted, or answers no more.
    ClientGone = "client_gone",
    /// The hello is longer than `hello.maxBytes`, or says that it will be.
    HelloTooLarge = "hello_too_large",
    /// The hello came in more records than `hello.maxRecords`.
    HelloFragments = "hello_fragments",
    /// The hello is malformed or ambiguous.
    BadHello = "bad_hello",
    /// The first bytes are not a TLS handshake.
    NotTls = "not_tls",
    /// No SNI, or an IP address as SNI, and no `"-"` route.
    NoSni = "no_sni",
    /// The SNI is not a legal host name.
    SniInvalid = "sni_invalid",
    /// No route, and no service this gateway has heard of, has this name.
    SniUnknown = "sni_unknown",
    /// The same for the authority of a CONNECT.
    AuthorityUnknown = "authority_unknown",
    /// The name is known, but no export rule lets this caller reach it here.
    NotExported = "not_exported",
    /// None of the listener's `alpn` was offered.
    AlpnRefused = "alpn_refused",
    /// The source address is outside the listener's `from`.
    SourceDenied = "source_denied",
    /// The PROXY header is missing, forbidden, or malformed.
    ProxyProtocol = "proxy_protocol",
    /// The TLS handshake with the caller failed.
    TlsFailed = "tls_failed",
    /// The caller's certificate does not chain to its trust domain's roots.
    IdentityUntrusted = "identity_untrusted",
    /// The caller's certificate is outside its validity.
    IdentityExpired = "identity_expired",
    /// An identity is asked for, and the caller has none: it shows no certificate, or the listener cannot know one.
    IdentityRequired = "identity_required",
    /// The caller's identity is not among those the export rule names.
    IdentityDenied = "identity_denied",
    /// A CONNECT that cannot be understood.
    BadRequest = "bad_request",
    /// The service has no endpoint on this network that can be chosen.
    NoEndpoints = "no_endpoints",
    /// There are endpoints, none is healthy, and `panic` is off.
    AllUnhealthy = "all_unhealthy",
    /// The endpoint refused the connection.
    EndpointRefused = "endpoint_refused",
    /// The endpoint did not answer within the connect timeout.
    EndpointTimeout = "endpoint_timeout",
    /// There is no way to the endpoint.
    EndpointUnreachable = "endpoint_unreachable",
    /// The client reset the connection.
    ClientReset = "client_reset",
    /// The endpoint reset the connection.
    EndpointReset = "endpoint_reset",
    /// Bytes waited for a peer that read nothing.
    Stalled = "stalled",
    /// No byte in either direction for `timeouts.idle`.
    IdleTimeout = "idle_timeout",
    /// One direction had ended and the other moved nothing for `timeouts.halfClose`.
    HalfCloseTimeout = "half_close_timeout",
    /// A limit per source was reached.
    LimitSource = "limit_source",
    /// A limit per service was reached.
    LimitService = "limit_service",
    /// `limits.connections` or `limits.pendingHellos` was reached.
    LimitGlobal = "limit_global",
    /// The gateway is stopping.
    Draining = "draining",
    /// A reload of the config file took away what had admitted this connection.
    ConfigRemoved = "config_removed",
    /// An operator ended it.
    Killed = "killed",
    /// A fault of our own.
    Internal = "internal",
}

impl Reason {
    /// Returns what an operator checks next.
    pub const fn look_at(self) -> &'static str {
        match self {
            Self::Ok => "nothing; `detail` and `attempts` if it was slow",
            Self::HelloTimeout => "the client, the path to it (MTU), `hello.timeout`",
            Self::ClientGone => "the client, its timeouts; a load balancer's probes",
            Self::HelloTooLarge | Self::HelloFragments => "the client; `listeners[].hello`",
            Self::BadHello => "`detail`; the client, or what is between it and here",
            Self::NotTls => {
                "`detail`: the client speaks something else, or a load balancer adds a PROXY header"
            }
            Self::NoSni => "the client's TLS settings; route `\"-\"`",
            Self::SniInvalid => "`sni`; the client's settings",
            Self::SniUnknown | Self::AuthorityUnknown => {
                "`isthmus explain NAME` (near names), `isthmus exposed`"
            }
            Self::NotExported => "`isthmus explain NAME`; `exports`",
            Self::AlpnRefused => "`alpn`, `detail`; `listeners[].alpn`, `listeners[].protocol`",
            Self::SourceDenied => "`source`; `listeners[].from`",
            Self::ProxyProtocol => "the load balancer before the gateway; `listeners[].proxyProtocol`",
            Self::TlsFailed => "`detail`; `isthmus get certificates`; the caller's TLS version",
            Self::IdentityUntrusted => "`detail`; `isthmus get certificates`; `trust`",
            Self::IdentityExpired => "`detail`: whose certificate it is; whoever renews it; clocks",
            Self::IdentityRequired => {
                "the caller's certificate; `exports[].to.identities` on a listener by server name"
            }
            Self::IdentityDenied => {
                "`source_identity`; `isthmus explain NAME --authority --identity ID`; `exports[].to`"
            }
            Self::BadRequest => "`detail`; the caller",
            Self::NoEndpoints => "`isthmus explain NAME` (`omitted`); `isthmus get endpoints`",
            Self::AllUnhealthy => "`isthmus get endpoints`; `panic`",
            Self::EndpointRefused | Self::EndpointReset => {
                "the endpoint; `isthmus get endpoints`; `isthmus explain NAME --probe`"
            }
            Self::EndpointTimeout => {
                "the endpoint, firewalls; `connectTimeout`; `isthmus explain NAME --probe`"
            }
            Self::EndpointUnreachable => "routes of this host; an endpoint that is this gateway itself",
            Self::ClientReset => "the client; `ended_by`, `bytes_up`, `bytes_down`",
            Self::Stalled => {
                "who does not read: `bytes_up`, `bytes_down`; `timeouts.stalled`, `hbone.stalled`"
            }
            Self::IdleTimeout => "`timeouts.idle`",
            Self::HalfCloseTimeout => "`timeouts.halfClose`; who did not end its direction: `ended_by`",
            Self::LimitSource => "`source`; limits by source",
            Self::LimitService => "`service`; limits by service",
            Self::LimitGlobal => "`isthmus status`; `limits`, the descriptor limit of the process",
            Self::Draining => "nothing: the gateway was stopped",
            Self::ConfigRemoved => "what the last reload took away",
            Self::Killed => "whoever ended it",
            Self::Internal => "the log of the gateway; report it",
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
