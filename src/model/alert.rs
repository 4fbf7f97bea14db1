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
    pub fn text(self) -> &'static str {
        Description(self as u8).text()
    }

    /// Returns a plaintext record of version 3.3 that contains this alert as a fatal one.
    pub const fn record(self) -> [u8; 7] {
        [21, 3, 3, 0, 2, 2, self as u8]
    }
}

/// The description of an alert that another program has sent: any byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Description(pub u8);

impl Description {
    /// The end of the connection.
    pub const CLOSE_NOTIFY: Self = Self(0);

    /// Returns the name in IANA's registry of TLS alerts; `unassigned` if it has none.
    pub const fn text(self) -> &'static str {
        match self.0 {
            0 => "close_notify",
            10 => "unexpected_message",
            20 => "bad_record_mac",
            22 => "record_overflow",
            40 => "handshake_failure",
            42 => "bad_certificate",
            43 => "unsupported_certificate",
            44 => "certificate_revoked",
            45 => "certificate_expired",
            46 => "certificate_unknown",
            47 => "illegal_parameter",
            48 => "unknown_ca",
            49 => "access_denied",
            50 => "decode_error",
            51 => "decrypt_error",
            70 => "protocol_version",
            71 => "insufficient_security",
            80 => "internal_error",
            86 => "inappropriate_fallback",
            90 => "user_canceled",
            109 => "missing_extension",
            110 => "unsupported_extension",
            112 => "unrecognized_name",
            113 => "bad_certificate_status_response",
            115 => "unknown_psk_identity",
            116 => "certificate_required",
            120 => "no_application_protocol",
            121 => "ech_required",
            _ => "unassigned",
        }
    }

    /// Returns true if a server sends the alert because of what the ClientHello says, so that it may be in order all the same.
    pub const fn is_about_hello(self) -> bool {
        // handshake_failure, illegal_parameter, decode_error, protocol_version, insufficient_security, inappropriate_fallback,
        // missing_extension, unsupported_extension, unrecognized_name, unknown_psk_identity, no_application_protocol
        matches!(self.0, 40 | 47 | 50 | 70 | 71 | 86 | 109 | 110 | 112 | 115 | 120)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alerts_of_the_gateway_have_names() {
        use Alert::*;
        let all = [
            DecodeError,
            IllegalParameter,
            AccessDenied,
            InternalError,
            UnrecognizedName,
            NoApplicationProtocol,
        ];
        let names = "decode_error illegal_parameter access_denied internal_error unrecognized_name no_application_protocol";
        assert_eq!(all.map(Alert::text).join(" "), names);
        assert_eq!(Description(255).text(), "unassigned");
    }

    #[test]
    fn a_record_has_a_fatal_alert() {
        assert_eq!(Alert::UnrecognizedName.record(), [0x15, 3, 3, 0, 2, 2, 112]);
    }
}
