//! The TLS alert that tells a refused client the reason (RFC 8446 §6).

/// The description of an alert (RFC 8446 §6, RFC 6066 §9, RFC 7301 §3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alert {
    /// A message could not be decoded.
    DecodeError = 50,
    /// A field of a message is out of range.
    IllegalParameter = 47,
    /// Access is denied.
    AccessDenied = 49,
    /// An error that has nothing to do with the peer.
    InternalError = 80,
    /// No server with the name in the SNI is known (RFC 6066 §9).
    UnrecognizedName = 112,
    /// None of the offered protocols is supported (RFC 7301 §3.2).
    NoApplicationProtocol = 120,
}

impl Alert {
    /// Returns the name in IANA's registry of TLS alerts.
    pub const fn text(self) -> &'static str {
        match self {
            Self::DecodeError => "decode_error",
            Self::IllegalParameter => "illegal_parameter",
            Self::AccessDenied => "access_denied",
            Self::InternalError => "internal_error",
            Self::UnrecognizedName => "unrecognized_name",
            Self::NoApplicationProtocol => "no_application_protocol",
        }
    }

    /// Returns a plaintext record of version 3.3 that contains this alert as a fatal one.
    pub const fn record(self) -> [u8; 7] {
        [21, 3, 3, 0, 2, 2, self as u8]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_has_a_fatal_alert() {
        assert_eq!(Alert::UnrecognizedName.record(), [0x15, 3, 3, 0, 2, 2, 112]);
    }
}
