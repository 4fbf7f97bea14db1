//! A task that writes objects to the API server. Only one replica writes at a time: the holder of a Lease.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::sleep;

use super::client::{Client, Fault};
use super::lease::{Lease, RENEW_EVERY};
use super::writing::{Duty, Lack, Writing};
use isthmus_aggregator::spec::kubernetes::LeaseSpec;
use isthmus_model::place::ClusterId;
use isthmus_registry::change::Report;
use isthmus_tasks::scope::Scope;
use isthmus_tasks::stop::{Stop, Stopped};

/// The part of a writer that depends on the objects that it writes.
pub(super) trait Turns: Send + 'static {
    /// The objects that the session has read for this writer.
    type Objects: Default + Send + Sync + 'static;
    /// The writes, and their right.
    const DUTY: &'static Duty;
    /// The time from a change of the objects to the next turn, in which further changes arrive; `None`: a change waits for the
    /// renewal of the Lease.
    const SETTLE: Option<Duration> = None;

    /// Returns the name of the Lease.
    fn lease(&self) -> String;

    /// Renews the Lease, and writes what is due if this replica holds it. Returns the time until the next turn. Fails if the Lease
    /// cannot be renewed, or the server does not answer.
    fn turn(
        &mut self,
        objects: &Arc<Self::Objects>,
        lease: &mut Lease,
    ) -> impl Future<Output = Result<Duration, Fault>> + Send;

    /// Returns the result of the writes of single objects.
    fn result(&self) -> Writing;
}

/// A running writer, which ends when this is dropped, and earlier by the order to stop.
pub(super) struct Writer<O> {
    objects: watch::Sender<Arc<O>>,
    writing: watch::Receiver<Writing>,
    lack: Lack,
    task: AbortHandle,
}

impl<O: Default + Send + Sync + 'static> Writer<O> {
    /// Starts a writer for a cluster.
    pub(super) fn spawn<T: Turns<Objects = O>>(
        turns: T,
        (client, spec): (Arc<Client>, LeaseSpec),
        cluster: &ClusterId,
        (scope, stop): (&Scope, &Stop),
    ) -> Self {
        let (objects, objects_there) = watch::channel(Arc::default());
        let (result, writing) = watch::channel(Writing::default());
        let lease = Lease::new(client, spec, turns.lease());
        let task = run(turns, lease, objects_there, (cluster.clone(), result), stop.receiver());
        Self { objects, writing, lack: T::DUTY.lack, task: scope.spawn(task).abort_handle() }
    }

    /// Tells the writer which objects are there now.
    pub(super) fn renew(&self, objects: O) {
        self.objects.send_replace(Arc::new(objects));
    }

    /// Adds the result of the last turn to the report on the registry.
    pub(super) fn describe(&self, report: &mut Report) {
        self.writing.borrow().describe(self.lack, report);
    }
}

impl<O> Drop for Writer<O> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Takes turns until the task is aborted or the order to stop, and then gives up the Lease.
async fn run<T: Turns>(
    mut turns: T,
    mut lease: Lease,
    mut objects: watch::Receiver<Arc<T::Objects>>,
    (cluster, result): (ClusterId, watch::Sender<Writing>),
    mut stopped: Stopped,
) {
    loop {
        let there = objects.borrow_and_update().clone();
        let (writing, pause) = match turns.turn(&there, &mut lease).await {
            Ok(pause) => (turns.result(), pause),
            Err(fault) => Writing::of_turn(&fault, T::DUTY),
        };
        writing.publish(&result, |subject, why| {
            tracing::info!(cluster = cluster.as_str(), "{subject}: {why}");
        });
        let settle = T::SETTLE.filter(|_| lease.is_held());
        tokio::select! {
            // The order to stop comes first, so that another replica can go on at once.
            biased;
            () = stopped.ordered() => return lease.release().await,
            () = sleep(pause) => {}
            // Without a sender, the session has ended, and this task will be aborted.
            changed = objects.changed(), if settle.is_some() => {
                sleep(settle.filter(|_| changed.is_ok()).unwrap_or(RENEW_EVERY)).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;
    use tokio::time::Instant;

    use super::super::gateway_api::writer::StatusWriter;
    use super::super::scripted;
    use super::*;
    use http::StatusCode;
    use isthmus_aggregator::spec::kubernetes::Knows;

    /// Renews the Lease in each turn, and notes the number of objects and the time of the turn.
    struct Noting(mpsc::Sender<(u32, Instant)>);

    impl Turns for Noting {
        type Objects = u32;
        const DUTY: &'static Duty = &Duty { subject: "x", grant: "x", lack: Lack::Fact };
        const SETTLE: Option<Duration> = StatusWriter::SETTLE;

        fn lease(&self) -> String {
            "x".to_owned()
        }

        async fn turn(&mut self, objects: &Arc<u32>, lease: &mut Lease) -> Result<Duration, Fault> {
            lease.renew().await?;
            let _ = self.0.try_send((**objects, Instant::now()));
            Ok(RENEW_EVERY)
        }

        fn result(&self) -> Writing {
            Writing::Works
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_comes_each_two_seconds_and_a_fifth_of_a_second_after_a_change() {
        let (scope, stop) = (Scope::default(), Stop::default());
        let (client, mut requests) = scripted::server(&scope).await;
        scope.spawn(async move {
            loop {
                let asked = requests.next().await;
                let body = asked.body.clone();
                match asked.method {
                    http::Method::GET => asked.with(StatusCode::NOT_FOUND, "{}"),
                    _ => asked.with(StatusCode::OK, body),
                }
            }
        });
        let spec = LeaseSpec { namespace: "n".into(), holder: "a".into(), knows: Knows::OwnCluster };
        let (noted, mut turns) = mpsc::channel(64);
        let writer = Writer::spawn(Noting(noted), (client, spec), &ClusterId::new("east"), (&scope, &stop));
        let mut turn = async || turns.recv().await.expect("it runs");
        let (_, first) = turn().await;
        assert_eq!(turn().await, (0, first + Duration::from_secs(2)));
        sleep(Duration::from_millis(500)).await;
        writer.renew(1);
        sleep(Duration::from_millis(100)).await;
        writer.renew(2);
        assert_eq!(turn().await, (2, first + Duration::from_millis(2_700)), "both changes in one turn");
        assert_eq!(turn().await, (2, first + Duration::from_millis(4_700)));
    }
}
