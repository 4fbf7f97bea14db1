//! The parties of a connection.

/// A party of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The party that connected to the gateway.
    Client,
    /// The party to which the gateway connected.
    Endpoint,
    /// This gateway.
    Gateway,
}

impl Side {
    /// Returns the party as the access log writes it.
    pub fn text(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Endpoint => "endpoint",
            Self::Gateway => "gateway",
        }
    }
}
