//! Stops in order: not ready, listeners closed, connections ended. Each worker of the data plane drains its own connections,
//! and ends what is left at the deadline.

use crate::config::Drain;
use crate::dataplane::handle::Dataplane;

/// Drains the data plane. `deaf` is called when listeners close.
pub(super) async fn shutdown(dataplane: Dataplane, drain: Drain, deaf: impl FnOnce()) {
    if !drain.delay.is_zero() {
        tracing::info!(delay = ?drain.delay, "no longer ready; still accepting connections");
        tokio::time::sleep(drain.delay).await;
    }
    tracing::info!(timeout = ?drain.timeout, connections = dataplane.control().connections_active(), "draining");
    deaf();
    dataplane.drain(drain.timeout).await;
    tracing::info!("drained");
}
