//! Limits of memory, of each source of connections and of each service, and the definitions of a source and of a service.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use super::address::embedded_ip;

/// The memory budget of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryLimit {
    /// A share, in percent, of the memory that the process can have.
    Percent(u8),
    /// A number of bytes.
    Bytes(u64),
}

impl Default for MemoryLimit {
    fn default() -> Self {
        Self::Percent(60)
    }
}

impl MemoryLimit {
    /// Returns the budget in bytes of a process that can have `available` bytes.
    pub fn of(self, available: u64) -> u64 {
        match self {
            Self::Percent(percent) => available / 100 * u64::from(percent),
            Self::Bytes(bytes) => bytes.min(available),
        }
    }
}

/// The limits of each source. `None`: there is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceLimits {
    /// The largest number of concurrent connections.
    pub connections: Option<usize>,
    /// The largest number of new connections per second. A source may open all of them at once.
    pub new_per_second: Option<u32>,
    /// The largest number of concurrent connections whose hello or handshake is not complete.
    pub pending_hellos: Option<usize>,
    /// The addresses that count as one source.
    pub prefix: SourcePrefix,
}

/// The number of leading bits that the addresses of one source have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourcePrefix {
    /// The number of leading bits of an IPv4 address, at most 32.
    pub ipv4: u8,
    /// The number of leading bits of an IPv6 address, at most 128.
    pub ipv6: u8,
}

impl Default for SourcePrefix {
    /// Returns the prefix of a whole IPv4 address, and of an IPv6 /64, which is the smallest block that a site is given.
    fn default() -> Self {
        Self { ipv4: 32, ipv6: 64 }
    }
}

impl SourcePrefix {
    /// Returns the first address of the block that contains an address. The IPv6 addresses that embed an IPv4 address count as
    /// that address: a 6to4 host has 65,536 blocks of the default length.
    pub fn block(self, ip: IpAddr) -> IpAddr {
        match embedded_ip(ip) {
            IpAddr::V4(v4) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.ipv4.min(32))).unwrap_or(0);
                IpAddr::V4(Ipv4Addr::from_bits(v4.to_bits() & mask))
            }
            IpAddr::V6(v6) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.ipv6.min(128))).unwrap_or(0);
                IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & mask))
            }
        }
    }

    /// Returns the block of an address as users write it: one address, or a network with its prefix length.
    pub fn text(self, ip: IpAddr) -> String {
        let block = self.block(ip);
        match (block, self) {
            (IpAddr::V4(_), Self { ipv4: 32.., .. }) | (IpAddr::V6(_), Self { ipv6: 128.., .. }) => {
                block.to_string()
            }
            (IpAddr::V4(_), Self { ipv4, .. }) => format!("{block}/{ipv4}"),
            (IpAddr::V6(_), Self { ipv6, .. }) => format!("{block}/{ipv6}"),
        }
    }
}

/// The service or route whose connections are counted together for the limit of each service.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ServiceLimitKey {
    /// A service of the mesh by its host name, with all of its ports and subsets.
    Service(Arc<str>),
    /// A route with endpoints of its own, by its key.
    Route(Arc<str>),
}

impl ServiceLimitKey {
    /// Returns the key of a connection whose name means this service, or whose name this rule matched.
    pub fn of(service: Option<&Arc<str>>, rule: Option<&Arc<str>>) -> Option<Self> {
        let service = service.cloned().map(Self::Service);
        service.or_else(|| rule.cloned().map(Self::Route))
    }
}

impl fmt::Display for ServiceLimitKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Service(hostname) => write!(f, "the service {hostname}"),
            Self::Route(key) => write!(f, "the route {key:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_belongs_to_the_block_of_its_family() {
        let text = |ipv4, ipv6, ip: &str| SourcePrefix { ipv4, ipv6 }.text(ip.parse().expect("an address"));
        assert_eq!(text(32, 64, "10.1.2.3"), "10.1.2.3");
        assert_eq!(text(24, 64, "::ffff:10.1.2.3"), "10.1.2.0/24");
        assert_eq!(text(24, 64, "64:ff9b::10.1.2.3"), "10.1.2.0/24");
        assert_eq!(text(32, 64, "2002:a01:203:ffff::1"), "10.1.2.3");
        assert_eq!(text(32, 64, "2002:a01:203::1"), "10.1.2.3");
        assert_eq!(text(0, 64, "10.1.2.3"), "0.0.0.0/0");
        assert_eq!(text(32, 64, "2001:db8:0:1:2:3:4:5"), "2001:db8:0:1::/64");
        assert_eq!(text(32, 128, "2001:db8::5"), "2001:db8::5");
        assert_eq!(text(32, 0, "2001:db8::5"), "::/0");
        assert_eq!(SourcePrefix::default(), SourcePrefix { ipv4: 32, ipv6: 64 });
    }
}
