//! Ends live connections on the order of an operator.

use std::rc::Rc;

use tokio::sync::oneshot;

use super::connections::AT_ONCE;
use super::core::Core;
use super::entry::Entry;
use super::shared::Condemned;
use isthmus_model::reason::Reason;

/// Ends the chosen connections in batches and sends their number to `answer`.
pub(crate) async fn kill(core: Rc<Core>, which: Condemned, answer: oneshot::Sender<usize>) {
    let entries = core.connections.entries();
    let mut killed = 0;
    for some in entries.chunks(AT_ONCE) {
        for entry in some {
            if !entry.is_cut() && core.connections.has(entry) && is_meant(entry, &which) {
                entry.cut(Reason::Killed);
                killed += 1;
            }
        }
        tokio::task::yield_now().await;
    }
    // The operator's request may have ended meanwhile.
    let _ = answer.send(killed);
}

fn is_meant(entry: &Entry, which: &Condemned) -> bool {
    match which {
        Condemned::Connection(id) => entry.id() == *id,
        Condemned::Endpoint(which) => {
            let record = entry.record.borrow();
            let service = record.destination().map_or("", |name| &**name);
            record.endpoint.is_some_and(|address| which.covers(service, address))
        }
    }
}
