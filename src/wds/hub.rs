//! The tables of all viewers that have clients. Each is kept by one task, which ends with its last client.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use tonic::Status;

use isthmus_decisions::view::Viewer;
use isthmus_model::place::ClusterId;
use isthmus_tasks::scope::Scope;
use isthmus_world::{Reader, Since};

use super::table::{Builder, Table};

/// The largest number of viewers. Clients of a mesh have one viewer per network, cluster and address family.
const VIEWERS_MAX: usize = 256;
/// The shortest time between two tables of a viewer, so that the changes of a busy mesh are sent together.
const PACE: Duration = Duration::from_millis(100);
/// The number of services that are rendered before the task yields.
const BATCH: usize = 64;

/// A receiver of the newest table; `None` until the first table is made.
pub type Tables = watch::Receiver<Option<Arc<Table>>>;

/// The tables of all viewers.
pub struct Hub {
    reader: Reader,
    scope: Scope,
    /// The clusters that the operator says to have no policies.
    without_policies: Vec<ClusterId>,
    tables: Mutex<HashMap<Viewer, watch::Sender<Option<Arc<Table>>>>>,
}

/// Removes the tables of a viewer if the task that makes them panics. The streams of its clients then end, and the clients connect
/// again.
struct Kept {
    hub: Arc<Hub>,
    viewer: Viewer,
    is_removed: bool,
}

impl Drop for Kept {
    fn drop(&mut self) {
        if !self.is_removed {
            self.hub.tables.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.viewer);
        }
    }
}

impl Hub {
    /// Makes a hub without tables; its tasks run in `scope`. `without_policies` are the clusters that the operator says to have no
    /// policies.
    pub fn new(reader: Reader, scope: Scope, without_policies: Vec<ClusterId>) -> Arc<Self> {
        Arc::new(Self { reader, scope, without_policies, tables: Mutex::default() })
    }

    /// Returns the newest snapshot.
    pub fn reader(&self) -> &Reader {
        &self.reader
    }

    /// Returns an error that names what to do if the policies of a cluster are not known.
    pub fn check_policies(&self, cluster: &ClusterId) -> Result<(), Status> {
        if self.without_policies.contains(cluster) || self.reader.latest().facts_of(cluster).is_some() {
            return Ok(());
        }
        Err(Status::failed_precondition(format!(
            "the authorization policies of cluster {:?} are not known, so its ztunnels would admit what the policies deny: give the \
             registry of the cluster the right to list authorizationpolicies and peerauthentications of security.istio.io, and gateways \
             of gateway.networking.k8s.io, or mend the policy that the problem policies_unknown names; or name the cluster in \
             xds.wds.withoutPolicies if it has none",
            cluster.as_str()
        )))
    }

    /// Returns the tables of a viewer; `None` if there are too many viewers.
    pub fn subscribe(self: &Arc<Self>, viewer: &Viewer) -> Option<Tables> {
        let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sender) = tables.get(viewer) {
            return Some(sender.subscribe());
        }
        if tables.len() == VIEWERS_MAX {
            return None;
        }
        let (sender, receiver) = watch::channel(None);
        tables.insert(viewer.clone(), sender.clone());
        self.scope.spawn(self.clone().keep(viewer.clone(), sender));
        Some(receiver)
    }

    /// Makes the tables of a viewer until it has no clients.
    async fn keep(self: Arc<Self>, viewer: Viewer, sender: watch::Sender<Option<Arc<Table>>>) {
        let mut kept = Kept { hub: self.clone(), viewer: viewer.clone(), is_removed: false };
        let mut builder = Builder::new(viewer.clone(), self.without_policies.contains(&viewer.cluster));
        let mut generation = None;
        loop {
            let next = self.reader.latest();
            if generation != Some(next.generation) {
                let since =
                    generation.map_or(Since::Everything, |seen| self.reader.since(seen, next.generation));
                generation = Some(next.generation);
                let mut work = builder.begin(&next, since);
                let services: Vec<_> = work.services.iter().cloned().collect();
                for batch in services.chunks(BATCH) {
                    batch.iter().for_each(|hostname| builder.render(hostname, &mut work));
                    tokio::task::yield_now().await;
                }
                sender.send_replace(Some(Arc::new(builder.finish(work))));
                sleep(PACE).await;
            }
            tokio::select! {
                biased;
                () = sender.closed() => {}
                goes_on = self.reader.changed(next.generation) => if !goes_on {
                    return;
                },
            }
            let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
            // New clients subscribe under the lock.
            if sender.receiver_count() == 0 {
                tables.remove(&viewer);
                kept.is_removed = true;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use isthmus_snapshot::delta::Delta;
    use isthmus_snapshot::testing::Mesh;
    use isthmus_world::Publisher;

    #[tokio::test(start_paused = true)]
    async fn the_first_change_is_sent_at_once_and_the_next_ones_together_after_100_ms() {
        let mesh = Mesh::new(Vec::new(), Vec::new());
        let (mut publisher, reader) = Publisher::new(mesh.snapshot());
        let hub = Hub::new(reader, Scope::default(), Vec::new());
        let mut tables = hub.subscribe(&Viewer::default()).expect("room");
        let begun = Instant::now();
        tables.changed().await.expect("a table");
        assert_eq!(begun.elapsed(), Duration::ZERO);
        for generation in 2..=5 {
            let next = isthmus_snapshot::build::all(mesh.world(), generation);
            publisher.publish(next, Delta { generation, everything: true, ..Delta::default() });
        }
        tables.changed().await.expect("a table");
        assert_eq!(begun.elapsed().as_millis(), 100);
        let more = tokio::time::timeout(Duration::from_secs(60), tables.changed()).await;
        assert!(more.is_err(), "the changes were sent together");
    }
}
