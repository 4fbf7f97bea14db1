//! The listeners: protocols, PROXY headers, limits of a ClientHello, refusals.

use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;

use super::scope::SourceRule;
use isthmus_model::address::Bind;

isthmus_model::words!(ListenerProtocol, ProxyMode, RefusalMode);

/// One listener. Its socket is keyed by `bind`; all other fields can change without touching the socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    /// The name of the listener, unique.
    pub name: Arc<str>,
    /// The address of the socket.
    pub bind: Bind,
    /// The protocols that the listener accepts.
    pub protocol: ListenerProtocol,
    /// The required ALPN protocols: a hello that is routed by SNI must offer at least one of them; empty: no check.
    pub alpn: Vec<Box<[u8]>>,
    /// Source addresses that are admitted.
    pub sources: SourceRule,
    /// The rule for PROXY headers at the beginning of connections.
    pub proxy_protocol: ProxyProtocol,
    /// Limits of the ClientHello.
    pub hello: HelloLimits,
    /// How a TLS client learns that it is refused.
    pub refusal: RefusalMode,
    /// True if the port belongs to Gateways of the Gateway API (`gatewayApi.ports`). Only routes apply on it: those of the
    /// Gateways, and those of the config file.
    pub is_of_gateways: bool,
}

impl Listener {
    /// Returns a listener of protocol SNI that admits every source.
    pub fn sni(name: Arc<str>, bind: Bind) -> Self {
        Self {
            name,
            bind,
            protocol: ListenerProtocol::Sni,
            alpn: Vec::new(),
            sources: SourceRule::EVERYONE,
            proxy_protocol: ProxyProtocol::Forbid,
            hello: HelloLimits::default(),
            refusal: RefusalMode::Alert,
            is_of_gateways: false,
        }
    }
}

/// The rule of a listener for PROXY headers at the beginning of its connections. There is no mode with an optional header,
/// because every client could forge one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ProxyProtocol {
    /// Connections have no header. A connection that begins with one is refused, because it is not TLS.
    #[default]
    Forbid,
    /// Each connection begins with a header, which announces the client's address.
    Require {
        /// The addresses of TCP peers whose headers are trusted; not empty.
        from: Vec<IpNet>,
    },
}

/// The mode of [`ProxyProtocol`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProxyMode {
    /// Connections have no header.
    #[default]
    Forbid,
    /// Each connection begins with a header.
    Require,
}

impl ProxyMode {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 2] = [Self::Forbid, Self::Require];

    /// Returns the value as the config file writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Forbid => "forbid",
            Self::Require => "require",
        }
    }
}

/// The protocols that a listener accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ListenerProtocol {
    /// TLS, routed by its server name and passed on as it is.
    #[default]
    Sni,
    /// HTTP/2 CONNECT over mutual TLS, terminated here.
    Hbone,
    /// Both SNI and HBONE: a hello without server name that offers `h2` alone is HBONE.
    Auto,
    /// Any bytes, passed on as they are to the target of the listener.
    Tcp,
}

impl ListenerProtocol {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 4] = [Self::Sni, Self::Hbone, Self::Auto, Self::Tcp];

    /// Returns true if connections are routed by the server name of their hello.
    pub fn takes_sni(self) -> bool {
        matches!(self, Self::Sni | Self::Auto)
    }

    /// Returns true if connections may be HBONE.
    pub fn takes_hbone(self) -> bool {
        matches!(self, Self::Hbone | Self::Auto)
    }

    /// Returns the value as the config file writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Sni => "sni",
            Self::Hbone => "hbone",
            Self::Auto => "auto",
            Self::Tcp => "tcp",
        }
    }
}

/// How a TLS client that gets an alert learns that it is refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RefusalMode {
    /// The client gets a TLS alert that names the kind of fault, and then the end of the connection.
    #[default]
    Alert,
    /// The client gets the end of the connection (FIN) alone.
    Close,
    /// The connection is reset (RST).
    Reset,
}

impl RefusalMode {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 3] = [Self::Alert, Self::Close, Self::Reset];

    /// Returns the value as the config file writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Alert => "alert",
            Self::Close => "close",
            Self::Reset => "reset",
        }
    }
}

/// Limits of a ClientHello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HelloLimits {
    /// The timeout for the whole hello, measured from accept; then the connection is refused.
    pub timeout: Duration,
    /// The largest number of bytes up to the end of the hello, record headers included.
    pub bytes_max: usize,
    /// The largest number of TLS records that the hello may span.
    pub records_max: usize,
}

impl Default for HelloLimits {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(10), bytes_max: 16 * 1024, records_max: 64 }
    }
}
