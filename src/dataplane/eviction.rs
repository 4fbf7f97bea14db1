//! Takes admission slots for connections and CONNECT streams, and ends other connections to make room where the limits demand it.

use std::rc::Rc;
use std::time::Duration;

use super::connections::NO_SOURCE;
use super::core::Core;
use super::entry::Entry;
use super::permits::{LimitRefusal, Permit};
use super::shared::Message;
use isthmus_model::reason::Reason;
use isthmus_net::admission::Holder;
use isthmus_net::admission::refusals::FullLimit;

/// The time that a PROXY header may take to arrive after the accept; a proxy sends it as soon as it has connected.
const ANNOUNCED_WITHIN: Duration = Duration::from_millis(20);
/// The number of a holder's connections that are compared to choose which one to end.
const COMPARED_MAX: usize = 16;

/// Takes an admission slot for a connection or stream.
pub(crate) fn admit(core: &Core, entry: &Entry, holder: Holder) -> Result<Permit, LimitRefusal> {
    let (permit, loser) = core.permits.admit(holder, entry.source().ip())?;
    if let Some(loser) = loser {
        take_back(core, loser, 0);
    }
    Ok(permit)
}

/// Applies the limits to the source that a connection has announced, and counts the connection for that source.
pub(crate) fn announced(core: &Core, entry: &Entry) -> Result<(), Reason> {
    let source = entry.source().ip();
    let exchanged = match &mut *entry.permit.borrow_mut() {
        Some(permit) => permit.announce(source),
        // The slot belongs to a newer connection, and this one has been ordered to end.
        None => return Err(Reason::LimitGlobal),
    };
    match exchanged {
        Ok(loser) => {
            if let Some(loser) = loser {
                take_back(core, loser, 0);
            }
            Ok(())
        }
        Err(refused) => Err(core.refused(entry, refused)),
    }
}

/// Makes room for a connection that has not announced its source: ends the connection of this worker that has waited longest for
/// its PROXY header, and returns the permit of that connection. So connections that announce nothing do not keep out clients
/// behind a proxy. If this worker has no such connection, returns an error and asks the other workers to end one, so that a later
/// connection finds a free slot.
pub(crate) fn take_slot_of_unannounced(core: &Core) -> Result<Permit, LimitRefusal> {
    let oldest = oldest_unannounced(core).and_then(|oldest| {
        let permit = oldest.permit.take();
        cut_for_another(core, &oldest, FullLimit::Unannounced);
        permit
    });
    oldest.ok_or_else(|| {
        take_back(core, Holder::Unannounced, 0);
        let text = "the connections whose PROXY header has not arrived have a fifth of limits.connections, which is all that \
                    they may have";
        LimitRefusal::new(Reason::LimitGlobal, Some(FullLimit::Unannounced), text)
    })
}

/// Ends one connection of a holder. For a source or an identity, it is the one that has been idle longest among the first few
/// found; for [`Holder::Unannounced`], the one that has waited longest. If this worker has none, asks the next worker; `asked` is
/// the number of workers asked before. If the next worker's mailbox is full, the request is dropped, and the number of connections
/// above the limit stays one higher.
pub(crate) fn take_back(core: &Core, holder: Holder, asked: usize) {
    let workers = &core.shared.workers;
    let (victim, full) = match holder {
        Holder::Unannounced => (oldest_unannounced(core), FullLimit::Unannounced),
        Holder::Source(_) | Holder::Identity(_) => (idle_longest_of(core, &holder), FullLimit::Connections),
    };
    if let Some(victim) = victim {
        cut_for_another(core, &victim, full);
    } else if asked + 1 < workers.len() {
        let next = &workers[(core.numbers.index() + 1) % workers.len()];
        let _ = next.mailbox.try_send(Message::TakeBack { holder, asked: asked + 1 });
    }
}

/// Ends a connection whose slot another one gets, because this limit is reached.
fn cut_for_another(core: &Core, entry: &Entry, full: FullLimit) {
    let text = "the gateway has reached its limit of connections (limits.connections), and gave the place to another connection";
    core.give_way(entry, LimitRefusal::new(Reason::LimitGlobal, Some(full), text));
}

/// Removes a connection from the list of pending connections and returns it: the one that has waited longest for its PROXY header.
/// Returns `None` if the header of that connection may still be in transit.
fn oldest_unannounced(core: &Core) -> Option<Rc<Entry>> {
    let mut pending = core.connections.pending.borrow_mut();
    let waits =
        pending.oldest_of(NO_SOURCE).is_some_and(|oldest| oldest.accepted.elapsed() >= ANNOUNCED_WITHIN);
    if waits { pending.take_oldest_of(NO_SOURCE) } else { None }
}

/// Returns a connection of a holder. Finds the first few connections of the holder from a random position in the table, and returns
/// the one of them that has been idle longest. The largest holder owns a large share of the table, so the search is short wherever
/// it begins.
fn idle_longest_of(core: &Core, holder: &Holder) -> Option<Rc<Entry>> {
    let table = core.connections.table.borrow();
    let places = table.capacity().max(1);
    let from = usize::try_from(core.numbers.random()).unwrap_or_default() % places;
    let found = (from..places).chain(0..from).filter_map(|place| table.get(place));
    let found = found.filter(|entry| entry.is_held_by(holder) && !entry.is_cut()).take(COMPARED_MAX);
    found.min_by_key(|entry| entry.moved.get()).cloned()
}
