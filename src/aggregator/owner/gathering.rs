//! At a start, one round takes the first readings of several registries. Otherwise a service would be merged once for each
//! registry that has it.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::{Instant, Interval, timeout_at};

use super::{Inbox, Message, Owner, ROUND};
use crate::registry::Epoch;

/// The longest time for which the first reading of a registry waits for those of other registries.
const GATHERING: Duration = Duration::from_millis(50);

impl Owner {
    /// If all messages are first readings of registries, waits at most [`GATHERING`] for those of the other registries. Any
    /// other message ends the wait.
    pub(super) async fn gather(&self, messages: &mut Vec<Message>, inbox: &mut Inbox, sweep: &mut Interval) {
        let lives = self.registries.iter().map(|followed| &followed.life);
        let never_read: BTreeSet<Epoch> =
            lives.filter(|life| !life.is_known()).map(|life| life.epoch).collect();
        let reads_first = |message: &Message| match message {
            Message::Changes(epoch, _) => Some(*epoch).filter(|epoch| never_read.contains(epoch)),
            _ => None,
        };
        let Some(read) = messages.iter().map(reads_first).collect::<Option<BTreeSet<Epoch>>>() else {
            return;
        };
        let mut awaited: BTreeSet<Epoch> = never_read.difference(&read).copied().collect();
        let until = Instant::now() + GATHERING;
        while messages.len() < ROUND && !awaited.is_empty() {
            let Ok(Some(message)) = timeout_at(until, inbox.one(sweep)).await else { return };
            let read = reads_first(&message);
            messages.push(message);
            let Some(epoch) = read else { return };
            awaited.remove(&epoch);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::{mpsc, watch};
    use tokio::time::interval_at;

    use super::super::simulation::process;
    use super::*;
    use isthmus_snapshot::change::Change;
    use isthmus_tasks::scope::Scope;

    fn reading(epoch: Epoch) -> (Epoch, Vec<Change>) {
        (epoch, vec![Change::Begin, Change::Complete])
    }

    /// Gathers after a reading of `first`, while the readings of `others` wait in the inbox. Returns the messages of the round,
    /// and the time that the round has waited.
    async fn gathered(owner: &Owner, first: Epoch, others: &[Epoch]) -> (Vec<Message>, Duration) {
        let (changes, changed) = mpsc::channel(8);
        let (_configure, configures) = mpsc::channel(1);
        let (_roots, trust_roots) = watch::channel(Default::default());
        let (_answers, answers) = mpsc::channel(1);
        let (_news, copies) = mpsc::channel(1);
        let mut inbox = Inbox { configures, trust_roots, changes: changed, answers, copies };
        for other in others {
            changes.send(reading(*other)).await.expect("the inbox is there");
        }
        let hour = Duration::from_secs(3_600);
        let mut sweep = interval_at(Instant::now() + hour, hour);
        let (epoch, batch) = reading(first);
        let mut messages = vec![Message::Changes(epoch, batch)];
        let begun = Instant::now();
        owner.gather(&mut messages, &mut inbox, &mut sweep).await;
        (messages, begun.elapsed())
    }

    #[tokio::test]
    async fn a_start_gathers_the_first_readings_and_delays_nothing_else() {
        let scope = Scope::default();
        let (mut owner, _reader) = process(&scope);
        let epochs: Vec<Epoch> = owner.registries.iter().map(|followed| followed.life.epoch).collect();

        let (all, _) = gathered(&owner, epochs[0], &epochs[1..]).await;
        assert_eq!(all.len(), epochs.len());
        let (one, waited) = gathered(&owner, epochs[0], &[]).await;
        assert!(one.len() == 1 && waited >= GATHERING, "{waited:?}: the other registries are missing");

        owner.take(one, Instant::now());
        let (one, _) = gathered(&owner, epochs[0], &epochs[1..]).await;
        assert_eq!(one.len(), 1, "the registry was read before, so its change does not wait");
        let (two, _) = gathered(&owner, epochs[1], &[epochs[0], epochs[2]]).await;
        assert_eq!(two.len(), 2, "a change of a known registry ends the wait");
    }
}
