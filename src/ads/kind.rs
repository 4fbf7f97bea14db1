//! The resource types of a server.

/// A resource type, one of those that a server serves.
pub trait ResourceKind: Copy + Eq + Send + Sync + 'static {
    /// All types of the server, in the order in which changes are sent.
    const ALL: &'static [Self];
    /// The type of which no response may be in flight when another type is sent; `None`: the types are independent.
    const GATE: Option<Self> = None;

    /// Returns the type URL.
    fn type_url(self) -> &'static str;

    /// Returns the short name that operators and metrics use.
    fn text(self) -> &'static str;

    /// Returns the type of a type URL.
    fn of_type_url(url: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.type_url() == url)
    }

    /// Returns the place of the type in [`Self::ALL`].
    fn index(self) -> usize {
        Self::ALL.iter().position(|kind| *kind == self).unwrap_or_default()
    }

    /// Returns the type URLs of all types, as messages name them.
    fn served() -> String {
        Self::ALL.iter().map(|kind| kind.type_url()).collect::<Vec<_>>().join(", ")
    }
}
