//! The keys of the names of other organisations' services: the DNS server and virtual addresses.

use crate::document::form;
use crate::document::key::keys;

keys! {
    /// Addresses for the services of other organisations.
    pub(in crate::config) DnsServer "dnsServer" {
        /// Ranges of the virtual addresses that imported services get: at most one of IPv4 (/8 to /29) and one of IPv6 (/32 to
        /// /125). A family without a range has no virtual addresses. All replicas need the same ranges. Not 240.240.0.0/16 and
        /// 2001:2::/48, from which istiod gives out addresses itself.
        VIPS "vips": form::NonEmpty<form::Cidr> => "240.250.0.0/16 and fd69:7374:686d::/48";
    }
}
