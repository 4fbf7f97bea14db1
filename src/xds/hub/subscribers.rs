//! Mailboxes by slot. The cost of adding or removing a mailbox does not depend on the number of others.

use std::sync::Arc;

use super::mailbox::Mailbox;

/// A list of mailboxes, 8 bytes each. Its memory is released when the list becomes empty. The first slot needs no allocation,
/// because most resources have one subscriber where there are very many of them: it takes 64 of 565 bytes less per name.
#[derive(Default)]
pub(super) struct Subscribers {
    first: Option<Arc<Mailbox>>,
    more: Option<Box<Slots>>,
}

/// The slots after the first one.
#[derive(Default)]
struct Slots {
    slots: Vec<Option<Arc<Mailbox>>>,
    /// The indices of the free entries of `slots`.
    free: Vec<u32>,
}

/// The index of a mailbox in a list: 0 is the first one, and the others follow.
#[derive(Debug)]
pub(super) struct Slot(u32);

impl Subscribers {
    pub(super) fn insert(&mut self, mailbox: Arc<Mailbox>) -> Slot {
        if self.first.is_none() {
            self.first = Some(mailbox);
            return Slot(0);
        }
        let more = self.more.get_or_insert_default();
        let at = more.free.pop().unwrap_or_else(|| {
            more.slots.push(None);
            // The limit of streams is far below `u32::MAX`.
            u32::try_from(more.slots.len() - 1).unwrap_or(u32::MAX)
        });
        let entry = &mut more.slots[at as usize];
        debug_assert!(entry.is_none(), "a free slot is empty");
        *entry = Some(mailbox);
        Slot(at + 1)
    }

    /// Frees a slot; returns true if the list is empty.
    pub(super) fn remove(&mut self, slot: &Slot) -> bool {
        let removed = match (slot.0.checked_sub(1), &mut self.more) {
            (None, _) => self.first.take(),
            (Some(_), None) => None,
            (Some(at), Some(more)) => {
                let removed = more.slots.get_mut(at as usize).and_then(Option::take);
                more.free.extend(removed.is_some().then_some(at));
                if more.free.len() == more.slots.len() {
                    self.more = None;
                }
                removed
            }
        };
        debug_assert!(removed.is_some(), "a slot is given back once");
        self.is_empty()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first.is_none() && self.more.is_none()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<Mailbox>> {
        self.first.iter().chain(self.more.iter().flat_map(|more| more.slots.iter().flatten()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_taken_again_and_an_empty_list_holds_nothing() {
        let mut list = Subscribers::default();
        let slots: Vec<Slot> = (0..4).map(|_| list.insert(Arc::default())).collect();
        let numbers = |list: &Subscribers| list.more.as_ref().map_or(0, |more| more.slots.len());
        assert!(!list.remove(&slots[1]));
        assert_eq!((list.iter().count(), numbers(&list)), (3, 3));
        let again = list.insert(Arc::default());
        assert_eq!((again.0, numbers(&list)), (1, 3));
        assert!(!list.remove(&slots[0]) && !list.remove(&again) && !list.remove(&slots[2]));
        let first = list.insert(Arc::default());
        assert_eq!((first.0, list.iter().count()), (0, 2));
        assert!(!list.remove(&slots[3]) && list.more.is_none());
        assert!(list.remove(&first) && list.iter().count() == 0);
        assert_eq!(size_of::<Subscribers>(), 16);
    }
}
