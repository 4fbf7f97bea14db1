//! Networks, clusters and localities.

use std::fmt;
use std::sync::Arc;

/// A shared text in 8 bytes, where an `Arc<str>` takes 16: each endpoint and candidate has several.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct ThinText(
    /// `None` if the text is empty.
    Option<Arc<Arc<str>>>,
);

impl ThinText {
    fn new(text: &str) -> Self {
        Self((!text.is_empty()).then(|| Arc::new(text.into())))
    }

    fn as_str(&self) -> &str {
        self.0.as_deref().map_or("", |text| text)
    }

    fn shared(&self) -> Arc<str> {
        self.0.as_deref().cloned().unwrap_or_default()
    }
}

macro_rules! text_newtype {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(ThinText);

        impl $name {
            /// Wraps a text; every text is legal, also the empty one.
            pub fn new(text: &str) -> Self {
                Self(ThinText::new(text))
            }

            /// Returns the value as text.
            pub fn as_str(&self) -> &str {
                self.0.as_str()
            }

            /// Returns the shared text, for callers that store text instead of this type.
            pub fn shared(&self) -> Arc<str> {
                self.0.shared()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

text_newtype!(
    /// A set of endpoints that can reach each other directly. `""` is the unknown network.
    Network
);
text_newtype!(
    /// The ID of a registry of services: a Kubernetes cluster, or a file used in place of one.
    ClusterId
);

impl Network {
    /// Returns true for the unknown network, `""`.
    pub fn is_unknown(&self) -> bool {
        self.as_str().is_empty()
    }
}

/// A locality: `region/zone/subzone`. Any part may be empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Locality(ThinText);

impl Locality {
    /// Parses `region`, `region/zone` or `region/zone/subzone`; `None` if there are more parts.
    pub fn parse(text: &str) -> Option<Self> {
        (text.matches('/').count() <= 2).then(|| Self(ThinText::new(text.trim_end_matches('/'))))
    }

    fn part(&self, index: usize) -> &str {
        self.as_str().split('/').nth(index).unwrap_or("")
    }

    /// Returns the first part; empty if unknown.
    pub fn region(&self) -> &str {
        self.part(0)
    }

    /// Returns the second part; empty if unknown.
    pub fn zone(&self) -> &str {
        self.part(1)
    }

    /// Returns the third part; empty if unknown.
    pub fn subzone(&self) -> &str {
        self.part(2)
    }

    /// Returns the region and the zone alone.
    #[must_use]
    pub fn without_subzone(&self) -> Self {
        match self.as_str().match_indices('/').nth(1) {
            Some((at, _)) => Self(ThinText::new(self.as_str()[..at].trim_end_matches('/'))),
            None => self.clone(),
        }
    }

    /// Returns the locality as text.
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    /// Returns the shared text, for callers that store text instead of this type.
    pub fn shared(&self) -> Arc<str> {
        self.0.shared()
    }

    /// Returns how near `other` is to this locality, as one of the levels that `locality: prefer` distinguishes.
    pub fn distance(&self, other: &Self) -> Distance {
        if self.region().is_empty() || self.region() != other.region() {
            Distance::Elsewhere
        } else if self.zone().is_empty() || self.zone() != other.zone() {
            Distance::SameRegion
        } else {
            Distance::SameZone
        }
    }
}

impl fmt::Display for Locality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The levels of `locality: prefer`, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Distance {
    /// Region and zone are equal.
    SameZone,
    /// The region is equal; the zone is another or unknown.
    SameRegion,
    /// The region is another or unknown.
    Elsewhere,
}

impl Distance {
    /// All levels, nearest first.
    pub const ALL: [Self; 3] = [Self::SameZone, Self::SameRegion, Self::Elsewhere];

    /// Returns the level as `explain` and the documents write it.
    pub fn text(self) -> &'static str {
        match self {
            Self::SameZone => "same zone",
            Self::SameRegion => "same region",
            Self::Elsewhere => "elsewhere",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn localities_have_up_to_three_parts_and_a_distance() {
        let here = Locality::parse("us/b/1").expect("legal");
        assert_eq!((here.region(), here.zone(), here.subzone()), ("us", "b", "1"));
        let at = |text| here.distance(&Locality::parse(text).expect("legal"));
        assert_eq!(at("us/b/2"), Distance::SameZone);
        assert_eq!(at("us/c"), Distance::SameRegion);
        assert_eq!(at("us"), Distance::SameRegion);
        assert_eq!(at("eu/b/1"), Distance::Elsewhere);
        assert_eq!(Locality::default().distance(&Locality::default()), Distance::Elsewhere);
        assert_eq!(Locality::parse("a/b/c/d"), None);
        assert_eq!(Locality::parse("us//").map(|us| us.shared()), Some("us".into()));
        assert_eq!(Locality::parse("/"), Some(Locality::default()));
    }
}
