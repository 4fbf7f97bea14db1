//! Counts the connections of a worker under the limits of bandwidth. [`isthmus_net::admission::bandwidth`] computes the shares, and
//! [`super::shares`] applies those of one connection.
//!
//! Once a second the tick measures the connections that have moved bytes. If the share of one has changed, its task is woken and sets
//! the new rate. So a connection far below its limit makes no system calls for it after its first second, and one without a limit has
//! one comparison for each time that its task runs.

use std::rc::Rc;

use tokio::net::TcpStream;

use super::connections::AT_ONCE;
use super::core::Core;
use super::entry::Entry;
use super::shares::Shares;
use isthmus_net::admission::Holder;
use isthmus_net::admission::bandwidth::{Bandwidths, Owner};
use isthmus_settings::policy::Policy;
use isthmus_snapshot::Snapshot;

/// Returns the limit of an owner in bytes per second.
fn limit_of(policy: &Policy, owner: &Owner) -> Option<u64> {
    match owner {
        Owner::Service(_) => policy.limits.bytes_per_second,
        Owner::Peer(name) => {
            let peer = policy.peers.iter().find(|peer| peer.name == *name);
            peer.and_then(|peer| peer.limits.bytes_per_second)
        }
    }
}

/// Applies the limits of a new config to the limited connections of all workers.
pub(crate) fn configure(bandwidths: &Bandwidths, snapshot: &Snapshot) {
    bandwidths.set_limits(|owner| limit_of(&snapshot.policy, owner));
}

/// Counts an admitted connection under the limits that apply to it, if any do that it is not counted under yet.
pub(crate) fn join(core: &Core, entry: &Rc<Entry>) {
    let snapshot = core.mesh.snapshot();
    let policy = &snapshot.policy;
    let record = entry.record.borrow();
    let service = policy.limits.bytes_per_second.and_then(|_| record.limit_key()).map(Owner::Service);
    let peer = record.peer.clone().map(Owner::Peer);
    let limited = |owner: Owner| limit_of(policy, &owner).map(|limit| (owner, limit));
    let mut joined = false;
    for (owner, limit) in service.into_iter().chain(peer).filter_map(limited) {
        let shares = entry.shares.get_or_init(|| Box::new(Shares::new((record.bytes_up, record.bytes_down))));
        let source = entry.holder().unwrap_or(Holder::Unannounced);
        joined |= shares.join(&core.shared.limits.bandwidths, owner, limit, source);
    }
    if let Some(shares) = entry.shares.get().filter(|_| joined) {
        shares.update();
        list(core, entry, shares);
        entry.wake();
    }
}

/// Applies the limits to a connection that begins to relay, before it moves bytes. A CONNECT stream has no socket to the client.
pub(crate) fn begin(core: &Core, entry: &Rc<Entry>, client: Option<&TcpStream>, endpoint: &TcpStream) {
    join(core, entry);
    if let Some(shares) = entry.shares.get() {
        shares.begin(client, endpoint);
    }
}

fn list(core: &Core, entry: &Rc<Entry>, shares: &Shares) {
    if shares.is_newly_listed() {
        core.connections.limited.borrow_mut().push(entry.clone());
    }
}

/// Measures the connections under a limit that moved bytes since the last tick (`touched`) or before, and wakes those whose shares have
/// changed. Yields to other tasks after each batch.
pub(crate) async fn tick(core: &Core, touched: &[Rc<Entry>]) {
    for entry in touched {
        if let Some(shares) = entry.shares.get() {
            list(core, entry, shares);
        }
    }
    let listed = core.connections.limited.take();
    for some in listed.chunks(AT_ONCE) {
        for entry in some {
            if let Some(shares) = entry.shares.get() {
                shares.measure(entry.bytes());
            }
        }
        tokio::task::yield_now().await;
    }
    for some in listed.chunks(AT_ONCE) {
        for entry in some {
            let Some(shares) = entry.shares.get() else { continue };
            if shares.update() {
                entry.wake();
            }
            if shares.stays_listed() {
                core.connections.limited.borrow_mut().push(entry.clone());
            }
        }
        tokio::task::yield_now().await;
    }
}
