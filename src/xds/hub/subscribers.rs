//! Mailboxes by slot. The cost of adding or removing a mailbox does not depend on the number of others.

use std::sync::Arc;

use super::mailbox::Mailbox;

/// A list of mailboxes, 8 bytes each. Its memory is released when the list becomes empty.
#[derive(Default)]
pub(super) struct Subscribers {
    slots: Vec<Option<Arc<Mailbox>>>,
    /// The indices of the free entries of `slots`.
    free: Vec<u32>,
}

/// The index of a mailbox in a list.
#[derive(Debug)]
pub(super) struct Slot(u32);

impl Subscribers {
    pub(super) fn insert(&mut self, mailbox: Arc<Mailbox>) -> Slot {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            // The limit of streams is far below `u32::MAX`.
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        let entry = &mut self.slots[slot as usize];
        debug_assert!(entry.is_none(), "a free slot is empty");
        *entry = Some(mailbox);
        Slot(slot)
    }

    /// Frees a slot; returns true if the list is empty.
    pub(super) fn remove(&mut self, slot: &Slot) -> bool {
        let removed = self.slots.get_mut(slot.0 as usize).and_then(Option::take);
        debug_assert!(removed.is_some(), "a slot is given back once");
        if removed.is_some() {
            self.free.push(slot.0);
        }
        let is_empty = self.is_empty();
        if is_empty {
            *self = Self::default();
        }
        is_empty
    }

    pub(super) fn is_empty(&self) -> bool {
        debug_assert!(self.free.len() <= self.slots.len(), "free slots are slots");
        self.free.len() == self.slots.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<Mailbox>> {
        self.slots.iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_taken_again_and_an_empty_list_holds_nothing() {
        let mut list = Subscribers::default();
        let slots: Vec<Slot> = (0..3).map(|_| list.insert(Arc::default())).collect();
        assert!(!list.remove(&slots[1]));
        assert_eq!((list.iter().count(), list.slots.len()), (2, 3));
        let again = list.insert(Arc::default());
        assert_eq!((again.0, list.slots.len()), (1, 3));
        assert!(!list.remove(&slots[0]) && !list.remove(&again) && list.remove(&slots[2]));
        assert_eq!((list.slots.capacity(), list.free.capacity(), list.iter().count()), (0, 0, 0));
    }
}
