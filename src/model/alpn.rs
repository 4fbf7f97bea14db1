//! The protocols a client offers (RFC 7301 §3.1).

/// The entries of a ProtocolNameList, without the list's own length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protocols<'a>(&'a [u8]);

impl<'a> Protocols<'a> {
    /// Nothing is offered.
    pub const NONE: Self = Self(&[]);

    /// From entries that are known to be well formed; what is malformed ends the list.
    pub fn from_entries(entries: &'a [u8]) -> Self {
        Self(entries)
    }

    /// The names in the client's order.
    pub fn iter(self) -> impl Iterator<Item = &'a [u8]> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let (length, behind) = rest.split_first()?;
            let (name, behind) = behind.split_at_checked(usize::from(*length))?;
            rest = behind;
            Some(name)
        })
    }

    /// The names, comma-separated, as they stand in the access log.
    pub fn joined(self) -> Box<[u8]> {
        self.iter().collect::<Vec<_>>().join(&b',').into()
    }

    /// The entries for a list of names; names longer than 255 bytes are left out.
    pub fn entries_of<'n>(names: impl IntoIterator<Item = &'n [u8]>) -> Vec<u8> {
        let mut entries = Vec::new();
        for name in names {
            if let Ok(length) = u8::try_from(name.len()) {
                entries.push(length);
                entries.extend_from_slice(name);
            }
        }
        entries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_listed_in_order() {
        let entries = Protocols::entries_of([&b"h2"[..], b"istio"]);
        let protocols = Protocols::from_entries(&entries);
        assert_eq!(protocols.iter().collect::<Vec<_>>(), [&b"h2"[..], b"istio"]);
        assert_eq!(&*protocols.joined(), b"h2,istio");
    }
}
