//! SPIFFE identities (SPIFFE-ID §2) and patterns over them.

use std::fmt;
use std::sync::Arc;

/// A SPIFFE trust domain, in lower case.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TrustDomain(Arc<str>);

/// The reason why a text is not a SPIFFE ID, trust domain or pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// The text does not begin with `spiffe://`.
    #[error("it does not begin with 'spiffe://'")]
    Scheme,
    /// The trust domain is empty, longer than 255 bytes, or has a character that is not allowed.
    #[error(
        "its trust domain has a character other than a lower-case letter, a digit, '-', '_' or '.', or is empty"
    )]
    TrustDomain,
    /// The path is empty, or has an empty segment, `.`, `..` or a character that is not allowed.
    #[error(
        "its path has an empty, '.' or '..' segment, or a character other than a letter, a digit, '-', '_' or '.'"
    )]
    Path,
    /// The text is longer than 2048 bytes (SPIFFE-ID §2.3).
    #[error("it is longer than 2048 bytes")]
    TooLong,
}

impl TrustDomain {
    /// Parses a trust domain; upper case is refused.
    pub fn parse(text: &str) -> Result<Self, IdentityError> {
        check_trust_domain(text)?;
        Ok(Self(text.into()))
    }

    /// Returns the trust domain as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TrustDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A SPIFFE ID: `spiffe://<trust domain>/<path>`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity(Arc<str>);

impl Identity {
    /// Parses a SPIFFE ID with a path.
    pub fn parse(text: &str) -> Result<Self, IdentityError> {
        check_path(checked_domain(text)?)?;
        Ok(Self(text.into()))
    }

    /// Returns the SPIFFE ID as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the text, shared, for callers that store it without this type.
    pub fn shared(&self) -> Arc<str> {
        self.0.clone()
    }

    /// Returns the trust domain, without scheme and path.
    pub fn trust_domain(&self) -> &str {
        trust_domain(&self.0)
    }

    /// Returns the identity with the same path in another trust domain.
    pub fn in_domain(&self, domain: &TrustDomain) -> Self {
        let path = &self.0["spiffe://".len() + self.trust_domain().len()..];
        Self(format!("spiffe://{domain}{path}").into())
    }

    /// Returns the namespace and service account if the path has the form of Kubernetes:
    /// `/ns/<namespace>/sa/<account>`.
    pub fn workload(&self) -> Option<(&str, &str)> {
        let mut segments = self.0.strip_prefix("spiffe://")?.split('/').skip(1);
        let found = match (segments.next(), segments.next(), segments.next(), segments.next()) {
            (Some("ns"), Some(namespace), Some("sa"), Some(account)) => (namespace, account),
            _ => return None,
        };
        segments.next().is_none().then_some(found)
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One identity, or all identities below a path (`…/*`: one or more further segments).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum IdentityPattern {
    /// One identity.
    Exact(Identity),
    /// All identities that begin with this text, which ends with `/`.
    Below(Arc<str>),
}

impl IdentityPattern {
    /// Parses a SPIFFE ID, or one that ends with `/*`.
    pub fn parse(text: &str) -> Result<Self, IdentityError> {
        let Some(prefix) = text.strip_suffix("/*") else {
            return Identity::parse(text).map(Self::Exact);
        };
        let path = checked_domain(prefix)?;
        if !path.is_empty() {
            check_path(path)?;
        }
        Ok(Self::Below(format!("{prefix}/").into()))
    }

    /// Returns the trust domain of the identities that the pattern matches.
    pub fn trust_domain(&self) -> &str {
        let text = match self {
            Self::Exact(identity) => identity.as_str(),
            Self::Below(prefix) => prefix,
        };
        trust_domain(text)
    }

    /// Returns true if the pattern matches the identity.
    pub fn matches(&self, identity: &Identity) -> bool {
        match self {
            Self::Exact(exact) => exact == identity,
            Self::Below(prefix) => {
                identity.as_str().strip_prefix(&**prefix).is_some_and(|rest| !rest.is_empty())
            }
        }
    }
}

impl fmt::Display for IdentityPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(identity) => identity.fmt(f),
            Self::Below(prefix) => write!(f, "{prefix}*"),
        }
    }
}

/// Checks a SPIFFE ID up to the end of its trust domain. Returns the path, without the slash before it.
fn checked_domain(text: &str) -> Result<&str, IdentityError> {
    if text.len() > 2048 {
        return Err(IdentityError::TooLong);
    }
    let rest = text.strip_prefix("spiffe://").ok_or(IdentityError::Scheme)?;
    let (domain, path) = rest.split_once('/').unwrap_or((rest, ""));
    check_trust_domain(domain)?;
    Ok(path)
}

fn check_trust_domain(text: &str) -> Result<(), IdentityError> {
    let legal = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.');
    let fine = (1..=255).contains(&text.len()) && text.bytes().all(legal);
    if fine { Ok(()) } else { Err(IdentityError::TrustDomain) }
}

fn trust_domain(text: &str) -> &str {
    let rest = text.strip_prefix("spiffe://").unwrap_or(text);
    rest.split('/').next().unwrap_or(rest)
}

fn check_path(path: &str) -> Result<(), IdentityError> {
    let legal = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    // Short segments are split faster as bytes than as text. A large registry has an identity per endpoint.
    let mut segments = path.as_bytes().split(|byte| *byte == b'/');
    let fine = segments.all(|segment| !matches!(segment, b"" | b"." | b"..") && segment.iter().all(legal));
    if fine { Ok(()) } else { Err(IdentityError::Path) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_parsed_strictly() {
        let identity = Identity::parse("spiffe://td.example/ns/shop/sa/cart").expect("legal");
        assert_eq!(identity.trust_domain(), "td.example");
        assert_eq!(identity.workload(), Some(("shop", "cart")));
        let alias = TrustDomain::parse("west").expect("legal");
        assert_eq!(identity.in_domain(&alias).as_str(), "spiffe://west/ns/shop/sa/cart");
        let other = Identity::parse("spiffe://td.example/ns/shop/sa/cart/more").expect("legal");
        assert_eq!(other.workload(), None);
        assert_eq!(Identity::parse("https://a/b"), Err(IdentityError::Scheme));
        assert_eq!(Identity::parse("spiffe://TD/b"), Err(IdentityError::TrustDomain));
        for path in ["", "a//b", "a/../b", "a%20b", "a/"] {
            let text = format!("spiffe://td/{path}");
            assert_eq!(Identity::parse(&text), Err(IdentityError::Path), "{text}");
        }
    }

    #[test]
    fn a_pattern_takes_one_or_more_further_segments() {
        let pattern = IdentityPattern::parse("spiffe://td/ns/shop/*").expect("legal");
        let at = |text| pattern.matches(&Identity::parse(text).expect("legal"));
        assert!(at("spiffe://td/ns/shop/sa/cart"));
        assert!(!at("spiffe://td/ns/shop2/sa/cart"));
        assert!(!at("spiffe://other/ns/shop/sa/cart"));
        assert!(!at("spiffe://td/ns/shop"));
        assert_eq!(pattern.to_string(), "spiffe://td/ns/shop/*");
        assert_eq!(pattern.trust_domain(), "td");
    }
}
