//! Metrics of the xDS server.

use std::time::Duration;

use metrics::{Counter, Gauge, Histogram};

use super::recorder::Recorder;

/// The handles of the xDS server's metrics, with two counters for each resource type.
pub struct Discovery {
    clients: Gauge,
    types: Vec<(&'static str, Counter, Counter)>,
    convergence: Histogram,
    refused: Counter,
    unserved: Counter,
}

impl Discovery {
    /// Creates the handles for these resource types.
    pub fn new(recorder: &Recorder, types: impl IntoIterator<Item = &'static str>) -> Self {
        let of = |name: &'static str| {
            let labels = [("type", name)];
            let pushes = recorder.counter("isthmus_xds_pushes_total", &labels);
            (name, pushes, recorder.counter("isthmus_xds_rejects_total", &labels))
        };
        Self {
            clients: recorder.gauge("isthmus_xds_clients", &[]),
            types: types.into_iter().map(of).collect(),
            convergence: recorder.histogram("isthmus_xds_convergence_seconds"),
            refused: recorder.counter("isthmus_xds_refused_total", &[]),
            unserved: recorder.counter("isthmus_xds_unserved_total", &[]),
        }
    }

    /// Counts the start of a client's stream.
    pub fn come(&self) {
        self.clients.increment(1.0);
    }

    /// Counts a stream that was refused because no rule allows the network or cluster that its client claims, or because a
    /// request has too many items.
    pub fn refused(&self) {
        self.refused.increment(1);
    }

    /// Counts a request for a type that is not served.
    pub fn unserved(&self) {
        self.unserved.increment(1);
    }

    /// Counts the end of a client's stream.
    pub fn gone(&self) {
        self.clients.decrement(1.0);
    }

    /// Counts a response that was sent.
    pub fn pushed(&self, kind: &str) {
        if let Some((_, pushes, _)) = self.types.iter().find(|(name, ..)| *name == kind) {
            pushes.increment(1);
        }
    }

    /// Counts a response that a client refused.
    pub fn rejected(&self, kind: &str) {
        if let Some((.., rejects)) = self.types.iter().find(|(name, ..)| *name == kind) {
            rejects.increment(1);
        }
    }

    /// Records the time from a change to a client's acknowledgement.
    pub fn converged(&self, after: Duration) {
        self.convergence.record(after.as_secs_f64());
    }
}
