//! Stops in order: not ready, then deaf, then empty, then gone.

use super::Signals;
use crate::config::Drain;
use crate::dataplane::handle::Dataplane;

/// Drains; a second signal ends the process at once. `deaf` is called when listeners close.
pub(super) async fn shutdown(dataplane: Dataplane, drain: Drain, mut signals: Signals, deaf: impl FnOnce()) {
    let drained = async {
        if !drain.delay.is_zero() {
            tracing::info!(delay = ?drain.delay, "not ready; still accepting");
            tokio::time::sleep(drain.delay).await;
        }
        tracing::info!(timeout = ?drain.timeout, connections = dataplane.control().connections_active(), "draining");
        deaf();
        dataplane.drain(drain.timeout).await;
        tracing::info!("drained");
    };
    tokio::select! {
        biased;
        () = signals.stop_again() => {
            tracing::warn!("a second signal: ending at once");
            // No destructor may hold this up.
            std::process::exit(1);
        }
        () = drained => {}
    }
}
