//! Examines the sockets of connections that stand still, and bounds the kernel memory of connections whose peers do not read.

use std::rc::Rc;
use std::time::Duration;

use tokio::net::TcpStream;

use super::core::Core;
use super::entry::Entry;
use super::standstill::Observed;
use crate::model::reason::Reason;
use crate::net::budget::stalled_memory;
use crate::net::socket::bound_received;

/// The two peers of a connection, and whether bytes wait for them.
pub(super) struct Sides<'a> {
    /// `None` where the client's side is a stream of many.
    pub(super) client: Option<&'a TcpStream>,
    /// The connection to the endpoint.
    pub(super) endpoint: &'a TcpStream,
    /// True if bytes wait in this process, for the endpoint and for the client.
    pub(super) waiting: [bool; 2],
}

/// The findings of an examination.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Why the connection ends, if it does.
    pub(super) end: Option<Reason>,
    /// True if bytes came that are not read, from the client and from the endpoint.
    pub(super) unread: [bool; 2],
}

/// Bounds the receive buffers of a new connection if connections that stand still hold much kernel memory.
pub(super) fn begin(core: &Core, sockets: &[&TcpStream]) {
    if core.kernel_memory.get() > memory_max(core) / 2 {
        for socket in sockets {
            // If the kernel refuses, `relieve` still bounds the memory.
            let _ = bound_received(socket);
        }
    }
}

/// Returns the bytes of kernel memory that connections of this worker may hold whose peers do not read.
fn memory_max(core: &Core) -> u64 {
    stalled_memory() / core.shared.workers.len().max(1) as u64
}

/// Ends connections that stand still if together they hold too much kernel memory; the connection that holds most ends first.
/// Called with each tick. `stalled` is how long a connection may stand still meanwhile.
pub(super) fn relieve(core: &Core, stalled: Duration) {
    let most = memory_max(core);
    let mut held = core.kernel_memory.get();
    if held <= most {
        return;
    }
    let patience = if held > 2 * most { Duration::ZERO } else { stalled };
    let ticks = u32::try_from(patience.as_secs().max(1)).unwrap_or(u32::MAX);
    let table = core.table.borrow();
    let memory = |entry: &Rc<Entry>| entry.standstill.memory.get();
    let still = |entry: &Rc<Entry>| entry.moved.get().saturating_add(ticks) < core.clock.now();
    let mut holders: Vec<&Rc<Entry>> =
        table.iter().map(|(_, entry)| entry).filter(|entry| memory(entry) > 0 && still(entry)).collect();
    holders.sort_by_key(|entry| std::cmp::Reverse(memory(entry)));
    for entry in holders {
        if held <= most {
            return;
        }
        held = held.saturating_sub(memory(entry).into());
        entry.facts.borrow_mut().detail = Some("peers that read nothing hold too much kernel memory".into());
        entry.cut(Reason::Stalled);
    }
}

/// Examines both peers, as the tick has ordered.
pub(super) fn examine(core: &Core, entry: &Rc<Entry>, sides: &Sides<'_>) -> Found {
    let now = core.clock.now();
    let timeouts = core.snapshot().policy.timeouts;
    let state = |socket: &TcpStream| core.diag.as_ref().and_then(|diag| diag.state(socket));
    let endpoint = state(sides.endpoint).unwrap_or_default();
    let client = sides.client.and_then(state).unwrap_or_default();
    let unread = [client.unread > 0, endpoint.unread > 0];
    let held = client.memory.saturating_add(endpoint.memory);
    core.set_kernel_memory(entry, if sides.waiting.contains(&true) { held } else { 0 });
    let [for_endpoint, for_client] = sides.waiting;
    let (up, down) = (entry.up.get(), entry.down.get());
    let observed = [
        Observed { sink: endpoint, waiting: for_endpoint, moved: up, gone: Reason::EndpointReset },
        Observed { sink: client, waiting: for_client, moved: down, gone: Reason::ClientGone },
    ];
    let judgement = entry.standstill.judge(now, &timeouts, &observed);
    if let Some(next) = judgement.next {
        core.clock.reschedule(entry, next);
    }
    if let Some(reason) = judgement.end {
        entry.facts.borrow_mut().detail = Some(detail(reason).into());
    }
    Found { end: judgement.end, unread }
}

fn detail(reason: Reason) -> &'static str {
    match reason {
        Reason::Stalled => "a peer has read nothing for timeouts.stalled",
        Reason::EndpointReset => "the endpoint has left bytes or window probes unacknowledged",
        _ => "the client has left bytes or window probes unacknowledged",
    }
}
