//! The grammar of the registry's keys: `<prefix><namespace>/<hostname>`. Each service has one key, and each valid key has one
//! service. Keys that begin with `<prefix>drains/` are orders to drain.

use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;

use isthmus_document::scalar;
use isthmus_model::drain::DrainTarget;
use isthmus_model::service::ServiceKey;

/// The number of characters after which a key is cut in messages.
const SHOWN_MAX: usize = 200;

/// The folder of the orders to drain, below the prefix. No service can be in a namespace of this name.
const DRAINS: &str = "drains/";

/// The keys of one registry.
#[derive(Clone, Debug)]
pub struct Keys {
    prefix: Arc<str>,
}

/// The reason why a key is not the key of a service.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyFault {
    /// The key is not UTF-8. The text is the prefix of the registry's keys.
    #[error("the key is not UTF-8; expected {0}<namespace>/<hostname>")]
    Text(Arc<str>),
    /// The key has no slash behind the prefix. The text is the prefix of the registry's keys.
    #[error("the key has no slash after its namespace; expected {0}<namespace>/<hostname>")]
    Slash(Arc<str>),
    /// The namespace is malformed.
    #[error("the namespace of the key cannot be used: {0}")]
    Namespace(String),
    /// The host name is malformed.
    #[error("the hostname of the key cannot be used: {0}")]
    Hostname(String),
    /// The host name is not in its canonical form.
    #[error("the host name in the key is not in lower case without a trailing dot; write {0}")]
    Spelling(String),
}

impl Keys {
    /// Creates the grammar of the keys with this prefix, which ends with a slash.
    pub fn new(prefix: Arc<str>) -> Self {
        Self { prefix }
    }

    /// Returns the prefix of the registry's keys.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Returns the first possible key of the registry, and the first key behind all of its keys.
    pub fn range(&self) -> (Vec<u8>, Vec<u8>) {
        let begin = self.prefix.as_bytes().to_vec();
        let mut end = begin.clone();
        // The range ends at the prefix whose last `/` is replaced by the next byte.
        if let Some(last) = end.last_mut() {
            *last = last.saturating_add(1);
        }
        (begin, end)
    }

    /// Returns the service of a key.
    pub fn service(&self, key: &[u8]) -> Result<ServiceKey, KeyFault> {
        let text = std::str::from_utf8(key).map_err(|_| KeyFault::Text(self.prefix.clone()))?;
        let rest = text.strip_prefix(&*self.prefix).unwrap_or(text);
        // A namespace may contain slashes, a host name cannot.
        let (namespace, hostname) =
            rest.rsplit_once('/').ok_or_else(|| KeyFault::Slash(self.prefix.clone()))?;
        let namespace = scalar::text(namespace).map_err(|fault| KeyFault::Namespace(fault.message))?;
        let name = scalar::host_name(hostname).map_err(|fault| KeyFault::Hostname(fault.message))?;
        if name.as_str() != hostname {
            return Err(KeyFault::Spelling(name.to_string()));
        }
        Ok(ServiceKey { namespace: namespace.into(), hostname: name })
    }

    /// Returns the key of the order to drain a target.
    pub fn drain(&self, target: &DrainTarget) -> String {
        format!("{}{DRAINS}{}/{}", self.prefix, target.kind(), target.name())
    }

    /// Returns the name of an order to drain; `None` if the key is of no order.
    pub fn order(&self, key: &[u8]) -> Option<Arc<str>> {
        let text = std::str::from_utf8(key).ok()?.strip_prefix(&*self.prefix)?;
        text.strip_prefix(DRAINS).map(Arc::from)
    }

    /// Returns the key of a service.
    pub fn key(&self, service: &ServiceKey) -> String {
        format!("{}{service}", self.prefix)
    }
}

/// Returns a key as text for messages, on one line and of bounded length. Two keys never have the same text.
pub fn shown(key: &[u8]) -> Arc<str> {
    let text = String::from_utf8_lossy(key);
    let is_whole = matches!(text, std::borrow::Cow::Borrowed(_)) && text.chars().count() <= SHOWN_MAX;
    let mut shown: String = text.chars().take(SHOWN_MAX).flat_map(escaped).collect();
    if !is_whole {
        let mut hash = DefaultHasher::new();
        hash.write(key);
        shown = format!("{shown}… ({} bytes, hash {:016x})", key.len(), hash.finish());
    }
    shown.into()
}

fn escaped(sign: char) -> impl Iterator<Item = char> {
    let plain = (!sign.is_control() && sign != '\\').then_some(sign);
    let escape = plain.is_none().then(|| sign.escape_default());
    plain.into_iter().chain(escape.into_iter().flatten())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys() -> Keys {
        Keys::new("/isthmus/services/".into())
    }

    #[test]
    fn a_key_is_of_one_service_and_back() {
        let service = keys().service(b"/isthmus/services/shop/cart.shop.mesh").expect("legal");
        assert_eq!((&*service.namespace, service.hostname.as_str()), ("shop", "cart.shop.mesh"));
        assert_eq!(keys().key(&service), "/isthmus/services/shop/cart.shop.mesh");
        let nested = keys().service(b"/isthmus/services/a/b/cart.mesh").expect("legal");
        assert_eq!(&*nested.namespace, "a/b");
        assert_eq!(keys().key(&nested), "/isthmus/services/a/b/cart.mesh");
    }

    #[test]
    fn keys_outside_of_the_grammar_say_what_is_wrong() {
        for (key, wanted) in [
            (&b"/isthmus/services/cart.mesh"[..], "no slash after its namespace"),
            (b"/isthmus/services/", "no slash after its namespace"),
            (b"/isthmus/services//cart.mesh", "the namespace of the key cannot be used: it is empty"),
            (b"/isthmus/services/shop/", "the hostname of the key cannot be used: it is empty"),
            (b"/isthmus/services/shop/10.0.0.1", "the hostname of the key cannot be used: its last label"),
            (
                b"/isthmus/services/shop/Cart.mesh",
                "not in lower case without a trailing dot; write cart.mesh",
            ),
            (
                b"/isthmus/services/shop/cart.mesh.",
                "not in lower case without a trailing dot; write cart.mesh",
            ),
            (b"/isthmus/services/shop/c\xffrt.mesh", "not UTF-8"),
            (b"/isthmus/services/sh\np/cart.mesh", "it has a control character"),
        ] {
            let fault = keys().service(key).expect_err("illegal").to_string();
            assert!(fault.contains(wanted), "{key:?}: {fault}");
        }
    }

    #[test]
    fn the_range_is_that_of_the_prefix() {
        let (begin, end) = keys().range();
        assert_eq!((&*begin, &*end), (&b"/isthmus/services/"[..], &b"/isthmus/services0"[..]));
    }

    #[test]
    fn keys_are_shown_on_one_line_and_apart() {
        assert_eq!(&*shown(b"/a/b"), "/a/b");
        assert_eq!(&*shown(b"a\n\x1b[31m\\"), "a\\n\\u{1b}[31m\\\\");
        assert_eq!(&*shown("straße".as_bytes()), "straße");
        let (one, other) = ([b'k'; 5_000], [b'k'; 5_001]);
        assert!(shown(&one).chars().count() < 260 && shown(&one) != shown(&other));
        assert_ne!(shown(b"\xff"), shown(b"\xfe"));
        assert_ne!(shown("\u{fffd}".as_bytes()), shown(b"\xff"));
    }

    proptest::proptest! {
        #[test]
        fn whatever_the_key_there_is_an_answer(key: Vec<u8>) {
            let whole = [b"/isthmus/services/", &*key].concat();
            if let Ok(service) = keys().service(&whole) {
                proptest::prop_assert_eq!(keys().key(&service).into_bytes(), whole);
            }
            let text = shown(&key);
            proptest::prop_assert!(!text.chars().any(char::is_control));
        }
    }
}
