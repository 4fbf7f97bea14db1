//! One tick of a worker, once a second: reports the bytes that connections have relayed, and ends connections that were
//! idle for too long. The cost grows with the number of connections that moved bytes, not with the number of open ones.

use std::rc::Rc;
use std::time::Duration;

use super::bandwidth;
use super::connections::AT_ONCE;
use super::core::Core;
use super::entry::Entry;
use super::examine;
use super::hbone::held;
use super::retire;
use isthmus_model::reason::Reason;
use isthmus_model::record::ConnectionProtocol;
use isthmus_settings::limits::Timeouts;

/// The time for which a half-closed connection may continue if its endpoint has not sent a byte.
const UNANSWERED: Duration = Duration::from_secs(30);

/// Performs one tick of a worker, and yields to other tasks after each batch of connections.
pub(crate) async fn tick(core: &Core) {
    let (timeouts, hbone) = {
        let snapshot = core.mesh.snapshot();
        (snapshot.policy.timeouts, snapshot.policy.hbone)
    };
    let (touched, due) = core.clock.advance();
    let touched: Vec<Rc<Entry>> = {
        let table = core.connections.table.borrow();
        touched.into_iter().filter_map(|key| table.get(key).cloned()).collect()
    };
    let now = core.clock.now();
    for some in touched.chunks(AT_ONCE) {
        for entry in some {
            let (up, down) = core.report_bytes(entry);
            if entry.opened.get() + 1 == now {
                // The task now sets socket options that only longer connections need; at the start they would cost system
                // calls for short connections too.
                entry.wake();
            }
            entry.standstill.touch(now, up > 0 && down == 0);
            look(core, entry, &timeouts, up > 0);
        }
        tokio::task::yield_now().await;
    }
    bandwidth::tick(core, &touched).await;
    for some in due.chunks(AT_ONCE) {
        for key in some {
            let entry = core.connections.at(*key);
            // If the connection has ended since, another one may have its key.
            if let Some(entry) = entry.filter(|entry| (1..=now).contains(&entry.standstill.deadline.get())) {
                entry.standstill.deadline.set(0);
                look(core, &entry, &timeouts, false);
            }
        }
        tokio::task::yield_now().await;
    }
    retire::follow_drains(core);
    held::relieve(core, &hbone);
    examine::relieve(core);
    core.mesh.balancers.sweep(now).await;
    core.permits.forget_unused();
    core.local.stalled_memory(core.stalled.bytes());
}

/// Ends a connection that was idle for too long, or schedules its next check. `asks` is true if the client has sent something since
/// the last tick.
fn look(core: &Core, entry: &Rc<Entry>, timeouts: &Timeouts, asks: bool) {
    if !core.connections.has(entry) {
        return;
    }
    let now = core.clock.now();
    let due = |timeout: Duration| entry.moved.get().saturating_add(ticks(timeout));
    // An HBONE connection has a time of its own for being idle.
    let idle =
        timeouts.idle.filter(|_| !entry.carries_streams()).map(|timeout| (due(timeout), Reason::IdleTimeout));
    let half_close = half_close(entry, timeouts).map(|timeout| (due(timeout), Reason::HalfCloseTimeout));
    let end = idle.into_iter().chain(half_close).min_by_key(|(due, _)| *due);
    if let Some((_, reason)) = end.filter(|(due, _)| *due <= now) {
        entry.cut(reason);
        return;
    }
    let examined = entry.examination_due(now);
    let retired = retire::look(core, entry, now, asks);
    match end.map(|(due, _)| due).into_iter().chain(examined).chain(retired).min() {
        None => core.clock.forget(entry),
        Some(due) => core.clock.schedule(entry, due),
    }
}

/// Returns how long a half-closed connection may continue. The time is short if the endpoint has sent nothing: a TLS server
/// answers a hello at once, so such a client waits for an answer that will not come.
fn half_close(entry: &Entry, timeouts: &Timeouts) -> Option<Duration> {
    if !entry.is_half_closed() {
        return None;
    }
    let record = entry.record.borrow();
    let unanswered =
        record.bytes_down == 0 && record.stream.is_none() && record.protocol == ConnectionProtocol::Sni;
    let most = unanswered.then_some(UNANSWERED);
    timeouts.half_close.into_iter().chain(most).min()
}

/// Returns the timeout in ticks, rounded up, plus one because the first tick is partly over.
fn ticks(timeout: Duration) -> u32 {
    u32::try_from(timeout.as_secs() + u64::from(timeout.subsec_nanos() > 0))
        .unwrap_or(u32::MAX)
        .saturating_add(1)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::testing::on_paused_clock;

    /// A tick is a second, and the first one is partly over.
    #[test]
    fn an_endpoint_has_30_s_to_answer_a_client_that_has_closed_its_direction() {
        on_paused_clock(async |rig| {
            let mut one = rig.relay(ConnectionProtocol::Sni).await;
            one.client.shutdown().await.expect("shut down");
            assert_eq!(one.endpoint.read(&mut [0]).await.expect("passed on"), 0);
            for second in 0..=30 {
                assert!(!one.entry.is_cut(), "after {second} ticks");
                rig.tick().await;
            }
            assert!(one.entry.is_cut(), "after 31 ticks");
            assert_eq!(one.ended.await.expect("it ends"), Reason::HalfCloseTimeout);
        });
    }
}
