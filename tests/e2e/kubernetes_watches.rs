//! Watches that a server answers without telling anything, and the return of a server that was away.

use std::time::Duration;

use serde_json::json;

use crate::kubernetes_hostile::{Rig, service};
use crate::support::fake_kube::{FakeKube, Reply};
use crate::support::kube_world::{Asked, status};
use crate::support::within;

/// The time for three resumed watches and the pauses between them, on a busy machine.
const RESUMED: Duration = Duration::from_secs(60);

/// A reply of the fake API server to a watch that is resumed.
type Answer = fn() -> Reply;

fn lists_of_services(fake: &FakeKube) -> usize {
    fake.seen(|asked| asked.plural == "services" && asked.is_stream()).len()
}

#[test]
fn a_watch_that_is_resumed_in_vain_is_replaced_by_a_listing() {
    let rig = Rig::live(Rig::fake());
    let fake = &rig.fake;
    let error = || {
        let error =
            json!({"type": "ERROR", "object": status(500, "InternalError", "etcd was restored", None)});
        Reply::text(200, format!("{error}\n"))
    };
    let too_large =
        || Reply::json(504, &status(504, "Timeout", "Too large resource version: 9, current: 2", None));
    let answers: [(&str, Answer); 3] =
        [("empty", || Reply::ok(Vec::new())), ("error", error), ("newer", too_large)];
    for (name, answer) in answers {
        let before = lists_of_services(fake);
        fake.rule(move |asked: &Asked| (asked.plural == "services" && asked.is_resumed()).then(answer));
        fake.cut();
        // The watches that are resumed say nothing of this service.
        fake.put(&service(name, 8443));
        within(RESUMED, &format!("{name}: another listing"), || {
            (lists_of_services(fake) > before).then_some(())
        });
        let path = format!("/api/v1/services/{name}.shop.svc.cluster.local");
        within(RESUMED, &format!("{name}: the service"), || (rig.gateway.get(&path).0 == 200).then_some(()));
        fake.behave();
    }
    rig.recovers();
}
