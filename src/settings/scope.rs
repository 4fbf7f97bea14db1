//! The items and the addresses that a registry may give, and the sources that a listener or a route admits.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, LazyLock};

use ipnet::IpNet;

use super::export_tls::TlsSource;
use isthmus_model::address::{canonical_ip, embedded_ip};
use isthmus_model::name::NamePattern;
use isthmus_model::place::Network;

/// The items that a registry may give; all other items are dropped, and their number is reported.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegistryScope {
    /// The services that the registry may provide; empty: all.
    pub services: Vec<NamePattern>,
    /// The networks that the endpoints of the registry may name; `None`: only the registry's own.
    pub networks: Option<Vec<Network>>,
    /// True if the registry itself determines its networks, so that any network is allowed.
    pub finds_network: bool,
    /// The addresses that the endpoints of the registry may have.
    pub addresses: AddressScope,
    /// The source of the TLS modes of the endpoints.
    pub tls: TlsSource,
    /// The meaning of an endpoint that leaves the list.
    pub unlisted: Unlisted,
}

/// The meaning of an endpoint that a registry does not list any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unlisted {
    /// The endpoint was taken away on purpose, because an operator writes the list: there are fewer calls.
    #[default]
    Removed,
    /// The endpoint may be lost, because a program lists what there is: its calls come all the same.
    Lost,
}

/// The addresses that the endpoints of a registry may have, also those to which host names of endpoints resolve.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AddressScope {
    /// Any address that can be connected to.
    #[default]
    Any,
    /// All addresses except loopback and link-local ones, which belong to this host and its surroundings.
    Public,
    /// Addresses in these blocks. A loopback or link-local address is allowed only by a block that lies inside the loopback or
    /// link-local range: an operator who writes `0.0.0.0/0` does not mean loopback.
    Blocks(Arc<[IpNet]>),
}

impl AddressScope {
    /// Returns true if the scope allows the address.
    pub fn allows(&self, address: IpAddr) -> bool {
        let (written, reached) = (canonical_ip(address), embedded_ip(address));
        if reached.is_unspecified() || reached.is_multicast() || reached == IpAddr::V4(Ipv4Addr::BROADCAST) {
            return false;
        }
        let special = SPECIAL_BLOCKS.iter().find(|special| special.contains(&reached));
        match (self, special) {
            (Self::Any, _) => true,
            (Self::Public, special) => special.is_none(),
            (Self::Blocks(blocks), None) => {
                blocks.iter().any(|block| block.contains(&written) || block.contains(&reached))
            }
            (Self::Blocks(blocks), Some(special)) => {
                blocks.iter().any(|block| special.contains(block) && block.contains(&reached))
            }
        }
    }
}

/// Loopback and link-local addresses (RFC 1122 §3.2.1.3, RFC 3927, RFC 4291 §2.5).
static SPECIAL_BLOCKS: LazyLock<[IpNet; 4]> = LazyLock::new(|| {
    let net = |address: IpAddr, length| IpNet::new_assert(address, length);
    [
        net(IpAddr::from([127, 0, 0, 0]), 8),
        net(IpAddr::from([169, 254, 0, 0]), 16),
        net(Ipv6Addr::LOCALHOST.into(), 128),
        net(IpAddr::from([0xfe80, 0, 0, 0, 0, 0, 0, 0]), 10),
    ]
});

/// Returns true if an address is in one of the blocks, or if there are no blocks.
pub fn admits(blocks: &[IpNet], address: IpAddr) -> bool {
    blocks.is_empty() || blocks.iter().any(|block| block.contains(&address))
}

/// The source addresses that a listener or a route admits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceRule {
    /// The blocks that are admitted; empty: all.
    pub from: Vec<IpNet>,
    /// The blocks that are refused although `from` has them.
    pub except: Vec<IpNet>,
}

impl SourceRule {
    /// The rule that admits every source.
    pub const EVERYONE: Self = Self { from: Vec::new(), except: Vec::new() };

    /// Returns true if the rule admits a source.
    pub fn admits(&self, address: IpAddr) -> bool {
        admits(&self.from, address) && !self.except.iter().any(|block| block.contains(&address))
    }
}

impl fmt::Display for SourceRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |blocks: &[IpNet]| blocks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let from = if self.from.is_empty() { "any".to_owned() } else { list(&self.from) };
        match self.except.is_empty() {
            true => f.write_str(&from),
            false => write!(f, "{from} except {}", list(&self.except)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exception_refuses_sources_that_the_rule_has() {
        let blocks = |texts: &[&str]| texts.iter().map(|text| text.parse().expect("a block")).collect();
        let of = |from: &[&str], except: &[&str]| SourceRule { from: blocks(from), except: blocks(except) };
        let admits = |rule: &SourceRule, ip: &str| rule.admits(ip.parse().expect("an address"));
        let rule = of(&["10.0.0.0/8"], &["10.1.0.0/16"]);
        assert!(admits(&rule, "10.0.0.1") && !admits(&rule, "10.1.0.1") && !admits(&rule, "11.0.0.1"));
        assert_eq!(rule.to_string(), "10.0.0.0/8 except 10.1.0.0/16");
        let rule = of(&[], &["10.1.0.0/16"]);
        assert!(admits(&rule, "::1") && !admits(&rule, "10.1.0.1"));
        assert_eq!(
            (rule.to_string(), SourceRule::EVERYONE.to_string()),
            ("any except 10.1.0.0/16".to_owned(), "any".to_owned())
        );
    }

    #[test]
    fn special_addresses_are_allowed_only_by_blocks_of_their_own() {
        let allows = |scope: &AddressScope, ip: &str| scope.allows(ip.parse().expect("an address"));
        let blocks = |blocks: &[&str]| {
            AddressScope::Blocks(blocks.iter().map(|block| block.parse().expect("a block")).collect())
        };
        let special = [
            "127.0.0.1",
            "127.9.9.9",
            "::1",
            "::ffff:127.0.0.1",
            "::127.0.0.1",
            "64:ff9b::127.0.0.1",
            "2002:7f00:1::1",
            "64:ff9b:1::127.0.0.1",
            "2001:0:102:304::5601:5601",
            "169.254.169.254",
            "64:ff9b::169.254.169.254",
            "2002:a9fe:a9fe::",
            "fe80::1",
        ];
        let everything = blocks(&["0.0.0.0/0", "::/0"]);
        for ip in special {
            assert!(allows(&AddressScope::Any, ip), "{ip}");
            assert!(!allows(&AddressScope::Public, ip) && !allows(&everything, ip), "{ip}");
        }
        let own = blocks(&["127.0.0.0/8", "::1/128", "169.254.169.254/32", "fe80::/64"]);
        assert!(special.iter().all(|ip| allows(&own, ip)));
        assert!(!allows(&own, "169.254.1.1") && !allows(&own, "10.0.0.1"));
        assert!(allows(&everything, "10.0.0.1") && allows(&AddressScope::Public, "2001:db8::1"));
        // A block may name an address in either form.
        for block in ["10.0.0.0/8", "64:ff9b::/96"] {
            assert!(allows(&blocks(&[block]), "64:ff9b::10.0.0.1"), "{block}");
        }
        assert!(!allows(&blocks(&["64:ff9b::/96"]), "10.0.0.1"));
        for never in [
            "0.0.0.0",
            "::",
            "224.0.0.1",
            "ff02::1",
            "255.255.255.255",
            "::ffff:0.0.0.0",
            "64:ff9b::224.0.0.1",
            "2002::1",
        ] {
            for scope in [&AddressScope::Any, &AddressScope::Public, &everything, &own] {
                assert!(!allows(scope, never), "{never} by {scope:?}");
            }
        }
    }
}
