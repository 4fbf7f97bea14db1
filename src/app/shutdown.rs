//! Stops the gateway in this order: it reports that it is not ready, closes the listeners, and ends the connections. Each
//! data-plane worker drains its own connections, and ends those that remain at the deadline.

use std::time::Duration;

use isthmus_config::Drain;
use isthmus_dataplane::handle::Dataplane;

/// Ends the data plane while a new process goes on with its listening sockets and takes its connections over.
pub(super) async fn leave(dataplane: Dataplane, within: Duration) {
    tracing::info!(timeout = ?within, connections = dataplane.control().connections_active(), "handing over");
    dataplane.leave(within).await;
}

/// Drains the data plane, and calls `on_close` when the listeners close.
pub(super) async fn shutdown(dataplane: Dataplane, drain: Drain, on_close: impl FnOnce()) {
    if !drain.delay.is_zero() {
        tracing::info!(delay = ?drain.delay, "the gateway is not ready any more, and accepts connections until the delay has \
                                              passed");
        tokio::time::sleep(drain.delay).await;
    }
    tracing::info!(timeout = ?drain.timeout, connections = dataplane.control().connections_active(), "draining");
    on_close();
    dataplane.drain(drain.timeout).await;
    tracing::info!("drained");
}
