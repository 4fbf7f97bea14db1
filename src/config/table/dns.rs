//! The keys of the DNS server and of virtual addresses.

use std::net::{Ipv4Addr, SocketAddr};

use isthmus_document::form;
use isthmus_document::key::keys;

keys! {
    /// The DNS server. It answers for the services of other organisations with virtual addresses, and for exported services of our
    /// own with their addresses.
    pub(crate) DnsServer "dnsServer" {
        /// Address of the server, for UDP and TCP. `0.0.0.0` and `[::]` are not allowed, because a DNS server must
        /// answer from the address that received the query.
        BIND "bind": form::BindAddress = SocketAddr::from((Ipv4Addr::LOCALHOST, 15_053));
        /// Zones that the server answers for: the services whose host names are in them, if they are imported or exported.
        ZONES "zones": form::NonEmpty<form::HostName> => required;
        /// Ranges of the virtual addresses that imported services get: at most one of IPv4 (/8 to /29) and one of IPv6
        /// (/32 to /125). A family without a range has no virtual addresses. All replicas need the same ranges. A range
        /// must not overlap 240.240.0.0/16 or 2001:2::/48, from which istiod assigns virtual addresses.
        VIPS "vips": form::NonEmpty<form::Cidr> => "240.250.0.0/16 and fd69:7374:686d::/48";
        /// DNS servers to which the gateway forwards queries for all other names, if the client has a loopback, private,
        /// link-local or shared (100.64.0.0/10) address. With an empty list the gateway refuses these queries.
        UPSTREAM "upstream": form::List<form::NameServer> => "other names are refused";
    }
}
