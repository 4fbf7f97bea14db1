//! The periodic upkeep of a running gateway.

use std::path::Path;
use std::time::Duration;

use tokio::time::MissedTickBehavior;

use isthmus_admin::Sources;
use isthmus_dataplane::handle::Control;
use isthmus_decisions::dialled::Dialled;
use isthmus_model::limits::MemoryLimit;
use isthmus_net::memory::cgroup::Meter;
use isthmus_net::memory::{JUDGE_EVERY, Judgement, Measured};
use isthmus_net::own::LOOK_UP_EVERY;
use isthmus_tasks::background;
use isthmus_tasks::scope::Scope;
use isthmus_world::Reader;

/// Readmits ejected endpoints, applies new ejection settings to them, drops the state of unused endpoints, updates the list
/// of this host's addresses, and judges the memory budget, until the scope ends.
pub(super) fn start(sources: &Sources, scope: &Scope) {
    let (upstreams, reader) = (sources.dataplane.upstreams().clone(), sources.reader.clone());
    let own = sources.own.clone();
    scope.spawn(async move {
        let mut every = tokio::time::interval(Duration::from_secs(1));
        let mut policy = reader.latest().policy_generation;
        loop {
            every.tick().await;
            upstreams.upkeep();
            let snapshot = reader.latest();
            let is_new =
                std::mem::replace(&mut policy, snapshot.policy_generation) != snapshot.policy_generation;
            if is_new && !upstreams.is_whole() {
                let upstreams = upstreams.clone();
                // This takes long in a large config. If it panics, the ejections end at the time that was set before.
                let limited = background::run(move || {
                    for candidates in
                        Dialled::new(&snapshot.policy).with_gateway_api(&snapshot).all(&snapshot)
                    {
                        upstreams.limit_ejections(candidates);
                    }
                });
                let _ = limited.await;
            }
        }
    });
    scope.spawn(judge_memory(sources.dataplane.clone(), sources.reader.clone(), Meter::find(Path::new("/"))));
    scope.spawn(async move {
        let mut every = tokio::time::interval(LOOK_UP_EVERY);
        loop {
            every.tick().await;
            own.look_up_host();
        }
    });
}

/// Returns the state of the memory budget at this moment; the judgement that the process acts on may be a second old.
pub(super) fn memory(limit: MemoryLimit) -> Judgement {
    let measured = Meter::find(Path::new("/")).measure().unwrap_or_else(|| Measured::unknown(limit));
    Judgement::default().next(limit, measured)
}

/// Judges the memory budget in an endless loop.
async fn judge_memory(dataplane: Control, reader: Reader, meter: Meter) {
    let mut every = tokio::time::interval(JUDGE_EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_warned = false;
    loop {
        every.tick().await;
        let meter = meter.clone();
        // The kernel may take long to sum up a large cgroup.
        let Ok(measured) = tokio::task::spawn_blocking(move || meter.measure()).await else { continue };
        let limit = reader.latest().policy.limits.memory;
        let measured = measured.unwrap_or_else(|| {
            let measured = Measured::unknown(limit);
            if !std::mem::replace(&mut is_warned, true) {
                let available = measured.available;
                tracing::warn!(
                    available,
                    "the kernel does not report the memory of the process; limits.memory is judged without its use"
                );
            }
            measured
        });
        dataplane.judge_memory(limit, measured).await;
    }
}
