//! The periodic upkeep of a running gateway.

use std::time::Duration;

use isthmus_admin::Sources;
use isthmus_net::own::LOOK_UP_EVERY;
use isthmus_snapshot::dialled::Dialled;
use isthmus_tasks::background;
use isthmus_tasks::scope::Scope;

/// Readmits ejected endpoints, applies new ejection settings to them, drops the state of unused endpoints, and updates the list
/// of this host's addresses, until the scope ends.
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
    scope.spawn(async move {
        let mut every = tokio::time::interval(LOOK_UP_EVERY);
        loop {
            every.tick().await;
            own.look_up_host();
        }
    });
}
