//! The items that the scope of a registry leaves out, in the words of the problems and of `isthmus validate`.

use isthmus_api::text::counted;
use isthmus_registry::shard::Counts;

/// Returns a sentence on the services and endpoints that `allow.services` and `allow.networks` leave out, if there are any.
pub fn by_name_or_network(counts: &Counts) -> Option<String> {
    let services = (counts.denied_items > 0)
        .then(|| format!("{} left out by `allow.services`", are(counts.denied_items, "service")));
    let endpoints = (counts.denied_endpoints > 0).then(|| {
        format!(
            "{} left out by `allow.networks` (without that key, only endpoints on the registry's own network are used)",
            are(counts.denied_endpoints, "endpoint")
        )
    });
    let all: Vec<String> = services.into_iter().chain(endpoints).collect();
    (!all.is_empty()).then(|| all.join(", "))
}

/// Returns a sentence on the endpoints that `allow.addresses` leaves out, if there are any.
pub fn by_address(counts: &Counts) -> Option<String> {
    (counts.denied_addresses > 0).then(|| {
        format!(
            "{} left out by `allow.addresses` (without that key, loopback and link-local addresses are left out)",
            are(counts.denied_addresses, "endpoint")
        )
    })
}

fn are(count: usize, thing: &str) -> String {
    format!("{} {}", counted(count, thing), if count == 1 { "is" } else { "are" })
}
