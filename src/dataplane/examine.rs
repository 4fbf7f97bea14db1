//! Examines the sockets of connections that have stopped moving bytes, and bounds the kernel memory of connections whose
//! peers do not read.

use std::rc::Rc;
use std::time::Duration;

use tokio::net::TcpStream;

use super::core::Core;
use super::entry::Entry;
use super::standstill::Observed;
use isthmus_model::reason::Reason;
use isthmus_net::budget::stalled_memory;
use isthmus_net::socket::{bound_received, spread_keep_alive};

/// The sockets of a connection's two peers, and whether bytes wait for them.
pub(super) struct Sides<'a> {
    /// The connection to the client; `None` if the client's side is one stream of an HBONE connection.
    pub(super) client: Option<&'a TcpStream>,
    /// The connection to the endpoint.
    pub(super) endpoint: &'a TcpStream,
    /// True if bytes wait in this process: first for the endpoint, then for the client.
    pub(super) waiting: [bool; 2],
}

/// The results of examining a connection.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// The reason to end the connection with, if it must end.
    pub(super) end: Option<Reason>,
    /// True if the kernel holds received bytes that are not read yet. The first value is for the client's socket, the second
    /// for the endpoint's.
    pub(super) unread: [bool; 2],
    /// True if the kernel holds no bytes of either direction that a peer has not acknowledged, or this process has not read.
    pub(super) is_quiet: bool,
    /// The time since either peer's last byte arrived; zero if the kernel does not report it.
    pub(super) silence: Duration,
}

/// Bounds the receive buffers of a new connection if stalled connections already hold much kernel memory. `client` is `None` if
/// the client's side is one stream of an HBONE connection.
pub(super) fn begin(core: &Core, client: Option<&TcpStream>, endpoint: &TcpStream) {
    if core.kernel_memory.get() > memory_max(core) / 2 {
        for socket in client.into_iter().chain([endpoint]) {
            // If the kernel refuses, [`relieve`] bounds the memory later.
            let _ = bound_received(socket);
        }
    }
}

/// Returns the limit of kernel memory, in bytes, for the connections of this worker whose peers do not read.
fn memory_max(core: &Core) -> u64 {
    stalled_memory() / core.shared.workers.len().max(1) as u64
}

/// Ends stalled connections while the kernel holds too much memory for peers that do not read. The connection that holds most
/// is ended first. Called once per tick. A connection is stalled if it has moved no bytes for `stalled`. If the memory is above
/// twice the limit, about a second without moved bytes is enough.
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
        entry.explain(
            "the connection was reset because clients and endpoints that stopped reading hold too much kernel memory",
        );
        entry.cut(Reason::Stalled);
    }
}

/// Examines both peers of a connection if the worker's tick has requested the examination.
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
    let (up, down) = entry.bytes();
    let observed = [
        Observed { sink: endpoint, waiting: for_endpoint, moved: up, gone: Reason::EndpointVanished },
        Observed { sink: client, waiting: for_client, moved: down, gone: Reason::ClientVanished },
    ];
    let judgement = entry.standstill.judge(now, &timeouts, &observed);
    if let Some(next) = judgement.next {
        core.clock.reschedule(entry, next);
    }
    if let Some(reason) = judgement.end {
        entry.explain(detail(reason));
    }
    let is_quiet = [&client, &endpoint].iter().all(|state| state.unacknowledged == 0 && state.unread == 0);
    if is_quiet {
        for socket in sides.client.into_iter().chain([sides.endpoint]) {
            // If the kernel refuses, the usual schedule holds.
            let _ = spread_keep_alive(socket, entry.id());
        }
    }
    Found { end: judgement.end, unread, is_quiet, silence: client.received.min(endpoint.received) }
}

fn detail(reason: Reason) -> &'static str {
    match reason {
        Reason::Stalled => "the client or the endpoint has read nothing for the time in timeouts.stalled",
        Reason::EndpointVanished => "the endpoint has stopped acknowledging bytes and window probes",
        _ => "the client has stopped acknowledging bytes and window probes",
    }
}
