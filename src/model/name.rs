//! Host names: one canonical form, made in one place. Names from clients and files are compared only after
//! [`canonical`].

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

/// The longest host name in bytes (RFC 1035 §2.3.4, without the root's empty label).
pub const NAME_BYTES_MAX: usize = 253;
/// The longest label in bytes (RFC 1035 §2.3.4).
pub const LABEL_BYTES_MAX: usize = 63;

/// Returns true if a text is a DNS label as Kubernetes has it (RFC 1123 §2.1): lower-case letters, digits and `-` between letters and
/// digits.
pub fn is_dns_label(text: &str) -> bool {
    let is_edge = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = text.as_bytes();
    text.len() <= LABEL_BYTES_MAX
        && bytes.first().is_some_and(is_edge)
        && bytes.last().is_some_and(is_edge)
        && bytes.iter().all(|byte| is_edge(byte) || *byte == b'-')
}

/// The reason why a text is not a host name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The name is empty.
    #[error("it is empty")]
    Empty,
    /// The name is longer than [`NAME_BYTES_MAX`].
    #[error("it is longer than 253 bytes")]
    TooLong,
    /// The name has an empty label.
    #[error("it has an empty label")]
    EmptyLabel,
    /// A label is longer than [`LABEL_BYTES_MAX`].
    #[error("it has a label longer than 63 bytes")]
    LabelTooLong,
    /// The name has a character other than letters, digits, `-`, `_` and `.`.
    #[error("it has a character other than a letter, a digit, '-', '_' or '.'")]
    Character,
}

/// The canonical form of each byte of a name; 0 for bytes that no name contains.
const CANONICAL: [u8; 256] = {
    let mut canonical = [0; 256];
    let mut byte = 0_u8;
    while byte < 128 {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.') {
            canonical[byte as usize] = byte.to_ascii_lowercase();
        }
        byte += 1;
    }
    canonical
};

/// A buffer for one canonical name, so that the data path makes one without an allocation.
pub struct NameBuffer([u8; NAME_BYTES_MAX]);

impl NameBuffer {
    /// Returns an empty buffer.
    pub const fn new() -> Self {
        Self([0; NAME_BYTES_MAX])
    }
}

impl Default for NameBuffer {
    fn default() -> Self {
        Self::new()
    }
}

/// Checks a received name and writes its canonical form to `buffer`: in ASCII lower case and without one trailing dot.
/// Underscores are legal, because Istio's SNI names contain them.
pub fn canonical<'b>(raw: &[u8], buffer: &'b mut NameBuffer) -> Result<&'b str, NameError> {
    let raw = raw.strip_suffix(b".").unwrap_or(raw);
    if raw.is_empty() {
        return Err(NameError::Empty);
    }
    let mut is_legal = true;
    for (slot, byte) in buffer.0.iter_mut().zip(raw) {
        *slot = CANONICAL[usize::from(*byte)];
        is_legal &= *slot != 0;
    }
    if !is_legal || raw.iter().skip(NAME_BYTES_MAX).any(|byte| CANONICAL[usize::from(*byte)] == 0) {
        return Err(NameError::Character);
    }
    if raw.len() > NAME_BYTES_MAX {
        return Err(NameError::TooLong);
    }
    for label in raw.split(|byte| *byte == b'.') {
        match label.len() {
            0 => return Err(NameError::EmptyLabel),
            1..=LABEL_BYTES_MAX => {}
            _ => return Err(NameError::LabelTooLong),
        }
    }
    // Every byte was checked to be ASCII above, so this cannot fail.
    std::str::from_utf8(&buffer.0[..raw.len()]).map_err(|_| NameError::Character)
}

/// Returns true if a received name spells an IP address, which is not a host name (RFC 6066 §3).
pub fn is_ip_literal(raw: &[u8]) -> bool {
    let raw = raw.strip_suffix(b".").unwrap_or(raw);
    std::str::from_utf8(raw).is_ok_and(|text| text.parse::<IpAddr>().is_ok())
}

/// A canonical host name.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostName(Arc<str>);

impl HostName {
    /// Parses a name and makes it canonical.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        canonical(text.as_bytes(), &mut NameBuffer::new()).map(|name| Self(name.into()))
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns true if the name is one of SRV records (RFC 2782), such as `_https._tcp.shop.internal`.
    pub fn is_service(&self) -> bool {
        let mut labels = self.0.split('.');
        let mut begins = || labels.next().is_some_and(|label| label.len() > 1 && label.starts_with('_'));
        begins() && begins() && labels.next().is_some()
    }

    /// Returns the shared text of the name, for callers that store text instead of this type (labels, log fields).
    pub fn shared(&self) -> Arc<str> {
        self.0.clone()
    }
}

impl std::borrow::Borrow<str> for HostName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

/// A set of names: one name, all names below a suffix (one or more labels), or every name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum NamePattern {
    /// One name.
    Exact(HostName),
    /// All names below this suffix, written `*.suffix`; the suffix itself does not match.
    Suffix(HostName),
    /// Every name, written `*`.
    Any,
}

/// The reason why a text is not a name pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// The text has a `*` that is not alone or the whole first label.
    #[error("'*' is allowed only alone or as the whole first label ('*.suffix')")]
    Star,
    /// The text is not a host name.
    #[error(transparent)]
    Name(#[from] NameError),
}

impl NamePattern {
    /// Parses `name`, `*.suffix` or `*`.
    pub fn parse(text: &str) -> Result<Self, PatternError> {
        if text == "*" {
            return Ok(Self::Any);
        }
        let (suffix, rest) = match text.strip_prefix("*.") {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        if rest.contains('*') {
            return Err(PatternError::Star);
        }
        let name = HostName::parse(rest)?;
        Ok(if suffix { Self::Suffix(name) } else { Self::Exact(name) })
    }

    /// Returns true if the pattern matches a canonical name.
    pub fn matches(&self, name: &str) -> bool {
        match self {
            Self::Exact(exact) => exact.as_str() == name,
            Self::Suffix(suffix) => name
                .strip_suffix(suffix.as_str())
                .and_then(|rest| rest.strip_suffix('.'))
                .is_some_and(|labels| !labels.is_empty()),
            Self::Any => true,
        }
    }

    /// Returns true if the pattern matches every name that `inner` matches.
    pub fn contains(&self, inner: &Self) -> bool {
        match (self, inner) {
            (Self::Any, _) => true,
            (Self::Suffix(suffix), Self::Suffix(longer)) => suffix == longer || self.matches(longer.as_str()),
            (Self::Exact(_) | Self::Suffix(_), Self::Exact(name)) => self.matches(name.as_str()),
            (Self::Exact(_), Self::Suffix(_)) | (Self::Exact(_) | Self::Suffix(_), Self::Any) => false,
        }
    }

    /// Returns the names that both patterns match; `None` if there are none. Of two patterns, one always contains the other, or they
    /// have no name in common.
    pub fn intersection<'a>(&'a self, other: &'a Self) -> Option<&'a Self> {
        match (self.contains(other), other.contains(self)) {
            (true, _) => Some(other),
            (_, true) => Some(self),
            (false, false) => None,
        }
    }
}

impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(name) => name.fmt(f),
            Self::Suffix(suffix) => write!(f, "*.{suffix}"),
            Self::Any => f.write_str("*"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(raw: &[u8]) -> Result<String, NameError> {
        canonical(raw, &mut NameBuffer::new()).map(str::to_owned)
    }

    #[test]
    fn names_are_lower_cased_and_lose_one_trailing_dot() {
        assert_eq!(name(b"Api.Example.COM.").as_deref(), Ok("api.example.com"));
        assert_eq!(name(b"a.b.."), Err(NameError::EmptyLabel));
        assert_eq!(name(b"outbound_.443_.v1_.a.b").as_deref(), Ok("outbound_.443_.v1_.a.b"));
    }

    #[test]
    fn illegal_names_are_refused() {
        assert_eq!(name(b""), Err(NameError::Empty));
        assert_eq!(name(b"."), Err(NameError::Empty));
        assert_eq!(name(b".a"), Err(NameError::EmptyLabel));
        assert_eq!(name(b"a..b"), Err(NameError::EmptyLabel));
        assert_eq!(name(b"a\0b"), Err(NameError::Character));
        assert_eq!(name("é.fr".as_bytes()), Err(NameError::Character));
        assert_eq!(name(&[b'a'; 64]), Err(NameError::LabelTooLong));
        let long = format!("{0}.{0}.{0}.{0}", "a".repeat(63));
        assert_eq!(name(long.as_bytes()), Err(NameError::TooLong));
        assert!(name(&long.as_bytes()[2..]).is_ok());
        // A name with several faults is refused for an illegal character first, then for its length, then for its first bad label.
        assert_eq!(name(format!("{long}.a..\0").as_bytes()), Err(NameError::Character));
        assert_eq!(name(format!("..{long}").as_bytes()), Err(NameError::TooLong));
        assert_eq!(name(format!("{}..a", "a".repeat(64)).as_bytes()), Err(NameError::LabelTooLong));
        for byte in 0..=u8::MAX {
            let is_legal = byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
            let expected = if is_legal { Ok(char::from(byte).to_ascii_lowercase().into()) } else { Err(()) };
            assert_eq!(name(&[byte]).map_err(drop), expected, "{byte}");
        }
    }

    #[test]
    fn ip_literals_are_told_from_names() {
        for literal in ["10.0.0.4", "10.0.0.4.", "::1", "2001:db8::1", "::ffff:1.2.3.4"] {
            assert!(is_ip_literal(literal.as_bytes()), "{literal}");
        }
        for other in ["10.0.0", "a.10.0.0.4", "300.1.1.1"] {
            assert!(!is_ip_literal(other.as_bytes()), "{other}");
        }
    }

    #[test]
    fn a_suffix_pattern_takes_one_or_more_labels() {
        let pattern = NamePattern::parse("*.Shop.mesh").expect("legal");
        assert!(pattern.matches("a.shop.mesh") && pattern.matches("a.b.shop.mesh"));
        assert!(!pattern.matches("shop.mesh") && !pattern.matches("xshop.mesh"));
        assert_eq!(NamePattern::parse("a.*.b"), Err(PatternError::Star));
        assert_eq!(NamePattern::parse("*a.b"), Err(PatternError::Star));
        assert_eq!(pattern.to_string(), "*.shop.mesh");
    }

    #[test]
    fn the_common_names_of_two_patterns_are_those_of_the_narrower_one() {
        for (one, other, both) in [
            ("a.test", "*", Some("a.test")),
            ("a.test", "a.test", Some("a.test")),
            ("a.test", "b.test", None),
            ("a.test", "*.test", Some("a.test")),
            ("test", "*.test", None),
            ("*.test", "a.test", Some("a.test")),
            ("*.test", "*.test", Some("*.test")),
            ("*.com", "*.example.com", Some("*.example.com")),
            ("*.example.com", "*.com", Some("*.example.com")),
            ("*.example.com", "*.example.org", None),
            ("*.ample.com", "*.example.com", None),
            ("*", "*.test", Some("*.test")),
            ("*", "*", Some("*")),
        ] {
            let pattern = |text: &str| NamePattern::parse(text).expect("legal");
            let (one, other) = (pattern(one), pattern(other));
            let found = one.intersection(&other).map(ToString::to_string);
            assert_eq!(found.as_deref(), both, "{one} and {other}");
        }
    }
}
