//! Tables of records. A row knows the last listing that has named its object, so that the end of a listing removes the rows of
//! objects that are gone.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use super::interner::Interner;
use super::objects::Meta;

/// The namespace and name of an object.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct ObjectKey {
    pub(super) namespace: Arc<str>,
    pub(super) name: Arc<str>,
}

impl std::fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The UID of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Uid([u8; 16]);

impl Uid {
    /// Parses 32 hexadecimal digits, with or without hyphens.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut bytes = [0; 16];
        let mut count = 0;
        for letter in text.bytes().filter(|letter| *letter != b'-') {
            let digit = u8::try_from(char::from(letter).to_digit(16)?).ok()?;
            *bytes.get_mut(count / 2)? |= if count % 2 == 0 { digit << 4 } else { digit };
            count += 1;
        }
        (count == 32).then_some(Self(bytes))
    }
}

/// The key of an object in its table.
pub(super) trait Key: Clone + Ord {
    /// Returns the key of an object; `None` if the object cannot have one.
    fn of(meta: &Meta, texts: &mut Interner) -> Option<Self>;

    /// Returns the namespace of the object, if the key has it.
    fn namespace(&self) -> Option<&str> {
        None
    }
}

impl Key for ObjectKey {
    fn of(meta: &Meta, texts: &mut Interner) -> Option<Self> {
        Some(Self { namespace: texts.text(&meta.namespace), name: texts.text(&meta.name) })
    }

    fn namespace(&self) -> Option<&str> {
        Some(&self.namespace)
    }
}

impl Key for Arc<ObjectKey> {
    fn of(meta: &Meta, texts: &mut Interner) -> Option<Self> {
        ObjectKey::of(meta, texts).map(Self::new)
    }

    fn namespace(&self) -> Option<&str> {
        Some(&self.namespace)
    }
}

/// The name of an object that is in no namespace.
impl Key for Arc<str> {
    fn of(meta: &Meta, texts: &mut Interner) -> Option<Self> {
        Some(texts.text(&meta.name))
    }
}

impl Key for Uid {
    fn of(meta: &Meta, _: &mut Interner) -> Option<Self> {
        Self::parse(&meta.uid)
    }
}

/// A row that was added, replaced or removed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Touched<K, R> {
    /// The key, as the table has it.
    pub(super) key: K,
    /// The record before the change; `None` for a new row.
    pub(super) before: Option<R>,
}

/// The result of storing a record.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Placed<K, R> {
    /// The table has the same record already.
    Same,
    Touched(Touched<K, R>),
    /// The record is new, and the table is full.
    NoRoom,
}

/// The operations of the index on the rows of each kind.
pub(super) trait Rows {
    type Key: Key;
    type Record;

    /// Stores a record, and the number of the listing that names it. A new record is not stored if there are `most` already.
    fn put(
        &mut self,
        key: Self::Key,
        record: Self::Record,
        listing: u32,
        most: usize,
    ) -> Placed<Self::Key, Self::Record>;

    /// Notes that a listing names an object, whose record stays as it is.
    fn keep(&mut self, key: &Self::Key, listing: u32);

    /// Removes an object. Returns `None` if nothing depends on the removal.
    fn remove(&mut self, key: &Self::Key) -> Option<Touched<Self::Key, Self::Record>>;

    /// Returns the objects that a listing has not named; of the listing of one namespace, those in it.
    fn unnamed(&self, listing: u32, namespace: Option<&str>) -> Vec<Self::Key>;

    /// Returns the number of objects.
    fn len(&self) -> usize;
}

/// The records of one kind.
#[derive(Debug)]
pub(super) struct Table<K, R> {
    rows: BTreeMap<K, Row<R>>,
}

/// A record, and the number of the listing that has named it last.
#[derive(Debug)]
struct Row<R> {
    record: R,
    listing: u32,
}

impl<K, R> Default for Table<K, R> {
    fn default() -> Self {
        Self { rows: BTreeMap::new() }
    }
}

impl<K: Ord, R> Table<K, R> {
    pub(super) fn get(&self, key: &K) -> Option<&R> {
        self.rows.get(key).map(|row| &row.record)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&K, &R)> {
        self.rows.iter().map(|(key, row)| (key, &row.record))
    }
}

impl<R> Table<ObjectKey, R> {
    /// Returns the objects of a namespace.
    pub(super) fn inside<'a>(
        &'a self,
        namespace: &'a Arc<str>,
    ) -> impl Iterator<Item = (&'a ObjectKey, &'a R)> {
        let first = ObjectKey { namespace: namespace.clone(), name: "".into() };
        let rows = self.rows.range(first..).take_while(move |(key, _)| key.namespace == *namespace);
        rows.map(|(key, row)| (key, &row.record))
    }
}

impl<K: Key, R: PartialEq> Rows for Table<K, R> {
    type Key = K;
    type Record = R;

    fn put(&mut self, key: K, record: R, listing: u32, most: usize) -> Placed<K, R> {
        let count = self.rows.len();
        match self.rows.entry(key) {
            Entry::Occupied(mut known) => {
                let row = known.get_mut();
                row.listing = listing;
                if row.record == record {
                    return Placed::Same;
                }
                let before = Some(std::mem::replace(&mut row.record, record));
                Placed::Touched(Touched { key: known.key().clone(), before })
            }
            Entry::Vacant(_) if count >= most => Placed::NoRoom,
            Entry::Vacant(vacant) => {
                let key = vacant.key().clone();
                vacant.insert(Row { record, listing });
                Placed::Touched(Touched { key, before: None })
            }
        }
    }

    fn keep(&mut self, key: &K, listing: u32) {
        if let Some(row) = self.rows.get_mut(key) {
            row.listing = listing;
        }
    }

    fn remove(&mut self, key: &K) -> Option<Touched<K, R>> {
        let (key, row) = self.rows.remove_entry(key)?;
        Some(Touched { key, before: Some(row.record) })
    }

    fn unnamed(&self, listing: u32, namespace: Option<&str>) -> Vec<K> {
        let is_unnamed = |key: &K, row: &Row<R>| {
            row.listing != listing && (namespace.is_none() || key.namespace() == namespace)
        };
        let unnamed = self.rows.iter().filter(|(key, row)| is_unnamed(key, row));
        unnamed.map(|(key, _)| key.clone()).collect()
    }

    fn len(&self) -> usize {
        self.rows.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uids_are_read_with_and_without_hyphens() {
        let plain = Uid::parse("0123456789abcdef0123456789ABCDEF").expect("legal");
        assert_eq!(Uid::parse("01234567-89ab-cdef-0123-456789abcdef"), Some(plain));
        for bad in ["", "0123", "0123456789abcdef0123456789abcdef0", "x123456789abcdef0123456789abcdef"] {
            assert_eq!(Uid::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_table_tells_what_a_change_has_touched_and_what_a_listing_has_not_named() {
        let key = |namespace: &str, name: &str| ObjectKey { namespace: namespace.into(), name: name.into() };
        let (a, b) = (key("n", "a"), key("m", "b"));
        let mut table = Table::default();
        let touched = |key: &ObjectKey, before| Touched { key: key.clone(), before };
        assert_eq!(table.put(a.clone(), 1, 1, 2), Placed::Touched(touched(&a, None)));
        assert_eq!(table.put(b.clone(), 1, 1, 2), Placed::Touched(touched(&b, None)));
        assert_eq!(table.put(key("n", "c"), 1, 1, 2), Placed::NoRoom);
        assert_eq!(table.put(a.clone(), 1, 2, 2), Placed::Same);
        assert_eq!(table.put(a.clone(), 2, 2, 2), Placed::Touched(touched(&a, Some(1))));
        assert_eq!(table.unnamed(2, None), std::slice::from_ref(&b));
        assert_eq!(table.unnamed(2, Some("n")), [], "the listing of another namespace");
        table.keep(&b, 2);
        assert_eq!(table.unnamed(2, None), []);
        assert_eq!(table.remove(&b), Some(touched(&b, Some(1))));
        assert_eq!((table.remove(&b), table.len()), (None, 1));
    }
}
