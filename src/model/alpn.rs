//! The application protocols that a client offers by ALPN (RFC 7301 §3.1).

/// The entries of a ProtocolNameList, without the list's own length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protocols<'a>(&'a [u8]);

impl<'a> Protocols<'a> {
    /// An empty offer.
    pub const NONE: Self = Self(&[]);

    /// Wraps entries that were checked to be well formed; iteration ends at a malformed entry.
    pub fn from_entries(entries: &'a [u8]) -> Self {
        Self(entries)
    }

    /// Iterates over the names in the client's order.
    pub fn iter(self) -> impl Iterator<Item = &'a [u8]> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let (length, behind) = rest.split_first()?;
            let (name, behind) = behind.split_at_checked(usize::from(*length))?;
            rest = behind;
            Some(name)
        })
    }

    /// Returns the length of [`Self::join_into`] in bytes.
    pub fn joined_length(self) -> usize {
        // Each entry has a length byte before the name; the joined text has a comma between any two names.
        self.0.len().saturating_sub(1)
    }

    /// Appends the names, comma-separated, as the access log shows them.
    pub fn join_into(self, bytes: &mut Vec<u8>) {
        for (at, name) in self.iter().enumerate() {
            if at > 0 {
                bytes.push(b',');
            }
            bytes.extend_from_slice(name);
        }
    }

    /// Encodes names as entries; names longer than 255 bytes are left out.
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
        let mut joined = Vec::new();
        protocols.join_into(&mut joined);
        assert_eq!((&*joined, protocols.joined_length()), (&b"h2,istio"[..], 8));
        assert_eq!(Protocols::NONE.joined_length(), 0);
    }
}
