//! Names in the hellos of clients, in configs and from peers: an accepted name is unchanged after it is printed and parsed
//! again.

use isthmus::document::scalar;
use isthmus::model::address::Host;
use isthmus::model::authority::Authority;
use isthmus::model::identity::{Identity, IdentityPattern};
use isthmus::model::mesh_name::{self, Dialect};
use isthmus::model::name::{HostName, NameBuffer, NamePattern, canonical, is_ip_literal};
use isthmus::model::place::Locality;
use isthmus::model::trace::TraceParent;

pub(super) fn run(data: &[u8]) {
    is_ip_literal(data);
    let mut buffer = NameBuffer::new();
    if let Ok(name) = canonical(data, &mut buffer) {
        assert!(!name.is_empty() && name.len() <= 253, "{name:?}");
        let legal = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_.".contains(&byte);
        assert!(name.bytes().all(legal), "{name:?}");
        assert!(name.split('.').all(|label| (1..=63).contains(&label.len())), "{name:?}");
        assert_eq!(canonical(name.as_bytes(), &mut NameBuffer::new()), Ok(name));
        if let Dialect::Mesh(parts) = mesh_name::read(name) {
            assert_eq!(parts.text(), name);
        }
    }
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(name) = HostName::parse(text) {
        assert_eq!(HostName::parse(name.as_str()).as_ref(), Ok(&name));
        assert!(
            text.eq_ignore_ascii_case(name.as_str()) || text.len() == name.as_str().len() + 1,
            "{text:?}: {name}"
        );
    }
    if let Ok(pattern) = NamePattern::parse(text) {
        let again = NamePattern::parse(&pattern.to_string());
        assert!(again.is_ok_and(|again| again == pattern), "{pattern}");
        pattern.matches("a.example");
    }
    if let Ok(host) = Host::parse(text) {
        assert_eq!(Host::parse(&host.to_string()).as_ref(), Ok(&host));
    }
    if let Ok(authority) = Authority::parse(text) {
        assert!(authority.port > 0, "{text:?}");
    }
    if let Ok(identity) = Identity::parse(text) {
        assert_eq!(Identity::parse(identity.as_str()).as_ref(), Ok(&identity));
        assert!(identity.as_str().contains(identity.trust_domain()));
        if let Ok(pattern) = IdentityPattern::parse(text) {
            assert!(pattern.matches(&identity), "{pattern} does not match itself");
        }
    }
    if let Ok(pattern) = IdentityPattern::parse(text) {
        assert!(
            IdentityPattern::parse(&pattern.to_string()).is_ok_and(|again| again == pattern),
            "{pattern}"
        );
    }
    if let Some(locality) = Locality::parse(text) {
        assert_eq!(Locality::parse(locality.as_str()).as_ref(), Some(&locality));
    }
    let _ = TraceParent::parse(text);
    // Parsing these values of a config must not panic; the target `config` compares their meaning.
    if let Ok((host, port)) = scalar::target(text) {
        assert!(port > 0, "{host}");
    }
    let _ = (
        scalar::bind(text),
        scalar::admin_bind(text),
        scalar::cidr(text),
        scalar::etcd(text),
        scalar::duration(text),
    );
    let _ = (
        scalar::size(text),
        scalar::share(text),
        scalar::percent(text),
        scalar::alpn(text),
        scalar::subset(text),
    );
    let _ =
        (scalar::collector(text), scalar::https(text), scalar::unix_socket(text), scalar::name_server(text));
    let _ = (
        scalar::route_name(text),
        scalar::pattern(text),
        scalar::label_value(text),
        scalar::etcd_prefix(text),
    );
}
