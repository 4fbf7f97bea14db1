//! Why a connection ended or was refused: the closed list of SPEC §10, used alike in the access log,
//! the metrics, `explain`, the failures list and the docs.

use std::fmt;

macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident = $text:literal,)*) => {
        /// One word for why a connection ended or was refused.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Reason {
            $($(#[$doc])* $variant,)*
        }

        impl Reason {
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The word, as it stands in logs, labels and headers.
            pub const fn text(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
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
    /// The client closed or reset before it was admitted.
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
    /// A stream held memory and moved nothing.
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
