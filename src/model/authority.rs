//! The authority of a CONNECT request: its destination (RFC 9113 §8.5, RFC 3986 §3.2).

use super::address::Host;

/// The destination of a request: `hostname:port`, `address:port` or `[address]:port`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Authority {
    /// A host name or one address, never several addresses.
    pub host: Host,
    /// The destination port, 1 to 65535.
    pub port: u16,
}

/// The reason why a text is not an authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthorityFault {
    /// The text has no port.
    #[error("it has no port")]
    NoPort,
    /// The port is not a number from 1 to 65535.
    #[error("its port is not a number from 1 to 65535")]
    Port,
    /// The host is neither a host name nor an address.
    #[error("it is neither a host name nor an address")]
    Host,
}

impl Authority {
    /// Parses `hostname:port`, `address:port` or `[address]:port`.
    pub fn parse(text: &str) -> Result<Self, AuthorityFault> {
        let (host, port) = text.rsplit_once(':').ok_or(AuthorityFault::NoPort)?;
        let decimal = port.bytes().all(|byte| byte.is_ascii_digit()) && !port.starts_with('0');
        let port = port.parse().ok().filter(|port| decimal && *port != 0).ok_or(AuthorityFault::Port)?;
        // An IPv6 address must be in brackets: without them its last group could be read as the port.
        if host.contains(':') && !(host.starts_with('[') && host.ends_with(']')) {
            return Err(AuthorityFault::Host);
        }
        let host = Host::parse(host).map_err(|_| AuthorityFault::Host)?;
        Ok(Self { host, port })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn authorities_are_read_strictly() {
        let read = |text: &str| Authority::parse(text).map(|found| format!("{} {}", found.host, found.port));
        assert_eq!(read("Echo.Default.svc.:80").as_deref(), Ok("echo.default.svc 80"));
        assert_eq!(read("10.0.0.1:65535").as_deref(), Ok("10.0.0.1 65535"));
        assert_eq!(Authority::parse("10.0.0.1.:80"), Authority::parse("10.0.0.1:80"));
        assert_eq!(read("[2001:db8::1]:443").as_deref(), Ok("2001:db8::1 443"));
        assert_eq!(read("[::ffff:10.0.0.1]:443").as_deref(), Ok("10.0.0.1 443"));
        for (text, fault) in [
            ("echo", AuthorityFault::NoPort),
            ("", AuthorityFault::NoPort),
            ("echo:", AuthorityFault::Port),
            ("echo:0", AuthorityFault::Port),
            ("echo:080", AuthorityFault::Port),
            ("echo:+80", AuthorityFault::Port),
            ("echo:65536", AuthorityFault::Port),
            ("echo:80x", AuthorityFault::Port),
            ("2001:db8::1:443", AuthorityFault::Host),
            ("user@echo:80", AuthorityFault::Host),
            ("a..b:80", AuthorityFault::Host),
            ("a b:80", AuthorityFault::Host),
            (":80", AuthorityFault::Host),
            ("http://echo:80", AuthorityFault::Host),
        ] {
            assert_eq!(read(text), Err(fault), "{text}");
        }
    }
}
