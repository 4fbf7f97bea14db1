//! The times at which services gained and lost identities. A new one counts as told to clients after a moment, and a lost one is
//! given to them for some minutes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use isthmus_model::identity::Identity;
use isthmus_model::name::HostName;
use isthmus_registry::shard::Shard;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::recent::{Recent, RecentIdentities, declared};

/// The time after which all clients know a new identity: this gateway's own hear of it within 0.1 s, those of other gateways when
/// their registry has changed too.
const TOLD_AFTER: Duration = Duration::from_secs(1);
/// The time for which a lost identity is given to clients. Gateways that read the registry late connect to its endpoints until then.
const KEPT: Duration = Duration::from_secs(300);
/// The largest number of changes that are remembered. If there are more, services with the most changes get theirs without delay or
/// grace, so that the burst of one ServiceEntry costs no other service anything.
const CHANGES_MAX: usize = 10_000;

/// A change of the identities of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Changed {
    Gained(Instant),
    Lost(Instant),
}

impl Changed {
    /// Returns true if the change counts at the time `now`.
    fn is_recent(self, now: Instant) -> bool {
        match self {
            Self::Gained(at) => now < at + TOLD_AFTER,
            Self::Lost(at) => now < at + KEPT,
        }
    }
}

/// The recent changes, and what they mean for the snapshot.
#[derive(Clone, Debug, Default)]
pub(super) struct Identities {
    changes: Arc<BTreeMap<HostName, BTreeMap<Identity, Changed>>>,
    recent: Arc<RecentIdentities>,
}

impl Identities {
    /// Returns the input of the snapshot.
    pub(super) fn recent(&self) -> &Arc<RecentIdentities> {
        &self.recent
    }

    /// Forgets the changes that are not recent any more; returns true if there were some.
    pub(super) fn expire(&mut self, now: Instant) -> bool {
        let touched = |changes: &BTreeMap<Identity, Changed>| changes.values().any(|one| !one.is_recent(now));
        let services = self.changes.iter().filter(|(_, changes)| touched(changes));
        let services: Vec<HostName> = services.map(|(hostname, _)| hostname.clone()).collect();
        for hostname in &services {
            if let Some(changes) = Arc::make_mut(&mut self.changes).get_mut(hostname) {
                changes.retain(|_, one| one.is_recent(now));
            }
        }
        self.renew(&services);
        !services.is_empty()
    }

    /// Returns the changes after the next snapshot, in which the services of `dirty` have the identities that the shards declare.
    pub(super) fn next<'d>(
        &self,
        dirty: impl IntoIterator<Item = &'d HostName>,
        current: &Snapshot,
        shards: &[Arc<Shard>],
        now: Instant,
    ) -> Self {
        let mut next = self.clone();
        let mut services = Vec::new();
        for hostname in dirty {
            // A service that is new has no clients that know others of its identities.
            let Some(view) = current.service(hostname.as_str()) else { continue };
            let before: BTreeSet<&Identity> = view.declared_identities().collect();
            let after = declared(hostname.as_str(), shards);
            let gained = after.iter().filter(|identity| !before.contains(identity) && !before.is_empty());
            let lost = before.iter().copied().filter(|identity| !after.contains(*identity));
            let gained = gained.map(|identity| (identity, Changed::Gained(now)));
            let changes: Vec<_> = gained.chain(lost.map(|identity| (identity, Changed::Lost(now)))).collect();
            if changes.is_empty() {
                continue;
            }
            let known = Arc::make_mut(&mut next.changes).entry(hostname.clone()).or_default();
            for (identity, change) in changes {
                // Clients still have an identity that returns before it was forgotten.
                match (known.get(identity).copied(), change) {
                    (Some(Changed::Lost(_)), Changed::Gained(_)) => drop(known.remove(identity)),
                    _ => drop(known.insert(identity.clone(), change)),
                }
            }
            services.push(hostname.clone());
        }
        services.extend(next.make_room());
        next.renew(&services);
        next
    }

    /// Forgets the changes of the services that have the most, until there are at most [`CHANGES_MAX`]. Returns these services.
    fn make_room(&mut self) -> Vec<HostName> {
        let mut count: usize = self.changes.values().map(BTreeMap::len).sum();
        if count <= CHANGES_MAX {
            return Vec::new();
        }
        let changes = Arc::make_mut(&mut self.changes);
        let mut services: Vec<(usize, HostName)> =
            changes.iter().map(|(hostname, changes)| (changes.len(), hostname.clone())).collect();
        services.sort_unstable_by(|one, next| next.cmp(one));
        let give_way = services.into_iter().map_while(|(of_service, hostname)| {
            let is_over = count > CHANGES_MAX;
            count = count.saturating_sub(of_service);
            is_over.then_some(hostname)
        });
        let gone: Vec<HostName> = give_way.collect();
        gone.iter().for_each(|hostname| drop(changes.remove(hostname)));
        gone
    }

    /// Makes the input of the snapshot again for these services.
    fn renew(&mut self, services: &[HostName]) {
        if services.is_empty() {
            return;
        }
        let all = Arc::make_mut(&mut self.recent);
        for hostname in services {
            let changes = self.changes.get(hostname).filter(|changes| !changes.is_empty());
            let Some(changes) = changes else {
                Arc::make_mut(&mut self.changes).remove(hostname);
                all.0.remove(hostname);
                continue;
            };
            let mut recent = Recent::default();
            for (identity, change) in changes {
                let of_kind = match change {
                    Changed::Gained(_) => &mut recent.new,
                    Changed::Lost(_) => &mut recent.lost,
                };
                of_kind.insert(identity.clone());
            }
            all.0.insert(hostname.clone(), recent.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::simulation::process;
    use super::super::{Message, Owner};
    use super::*;
    use isthmus_model::endpoint::{Endpoint, EndpointTemplate};
    use isthmus_model::service::PortProtocol;
    use isthmus_registry::change::{Change, Item};
    use isthmus_settings::export_tls::AskedBy;
    use isthmus_snapshot::candidates::Role;
    use isthmus_snapshot::testing::{endpoint, port, service};
    use isthmus_tasks::scope::Scope;
    use isthmus_world::Reader;

    const NAME: &str = "s0.mesh";

    fn of_account(account: &str) -> Identity {
        Identity::parse(&format!("spiffe://cluster.local/ns/shop/sa/{account}")).expect("legal")
    }

    /// An owner, and the time at which it started.
    struct Run(Owner, Reader, Instant);

    impl Run {
        fn new() -> Self {
            let (owner, reader) = process(&Scope::default());
            Self(owner, reader, Instant::now())
        }

        /// Gives the service endpoints of these accounts, some milliseconds after the start.
        fn put(&mut self, milliseconds: u64, accounts: &[&str]) {
            let endpoints = accounts.iter().zip(1..).map(|(account, host)| {
                let identity = Some(of_account(account));
                let template = EndpointTemplate { identity, ..EndpointTemplate::default() };
                Endpoint { template: template.into(), ..endpoint(&format!("10.0.0.{host}"), 1) }
            });
            let service = service(NAME, vec![port(80, PortProtocol::Tcp)], endpoints.collect());
            let changes = vec![Change::Begin, Change::Put(Item::Service(service.into())), Change::Complete];
            let epoch = self.0.registries[0].life.epoch;
            self.take(milliseconds, Message::Changes(epoch, changes));
        }

        fn sweep(&mut self, milliseconds: u64) {
            self.take(milliseconds, Message::Sweep);
        }

        fn take(&mut self, milliseconds: u64, message: Message) {
            self.0.take(vec![message], self.2 + Duration::from_millis(milliseconds));
        }

        /// Returns the accounts by which clients verify the service, and those whose endpoints the gateway uses.
        fn told(&self) -> (String, String) {
            let snapshot = self.1.latest();
            let view = snapshot.service(NAME).expect("the service");
            let accounts = |all: BTreeSet<&Identity>| {
                all.iter().filter_map(|one| Some(one.workload()?.1)).collect::<Vec<_>>().join(" ")
            };
            let candidates = view.ports[0].candidates("", AskedBy::MeshName).expect("all of them");
            let used = candidates.endpoints().iter().filter(|one| one.role() == Role::Regular);
            let used = used.filter_map(|one| {
                let mut all = view.parts.iter().flat_map(|part| part.service.endpoints.iter());
                let host = one.key.address.ip().to_string();
                all.find(|endpoint| endpoint.host.to_string() == host)?.template.identity.as_ref()
            });
            (accounts(view.identities().collect()), accounts(used.collect()))
        }
    }

    fn told(known: &str, used: &str) -> (String, String) {
        (known.to_owned(), used.to_owned())
    }

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_of_a_new_identity_is_used_a_second_after_clients_are_told() {
        let mut run = Run::new();
        run.put(0, &["a"]);
        assert_eq!(run.told(), told("a", "a"), "nothing is known of a new service");
        run.put(10_000, &["a", "b"]);
        assert_eq!(run.told(), told("a b", "a"));
        run.sweep(10_999);
        assert_eq!(run.told(), told("a b", "a"));
        run.sweep(11_000);
        assert_eq!(run.told(), told("a b", "a b"));
        // A second endpoint of a known identity is used at once.
        run.put(12_000, &["a", "b", "b"]);
        assert_eq!(run.told(), told("a b", "a b"));
    }

    #[tokio::test(start_paused = true)]
    async fn an_identity_that_has_left_is_told_for_five_minutes() {
        let mut run = Run::new();
        run.put(0, &["a", "b"]);
        run.put(10_000, &["a"]);
        assert_eq!(run.told(), told("a b", "a"));
        run.sweep(309_999);
        assert_eq!(run.told(), told("a b", "a"));
        run.sweep(310_000);
        assert_eq!(run.told(), told("a", "a"));
        // One that returns meanwhile is known to clients still.
        run.put(400_000, &["a", "b"]);
        run.sweep(500_000);
        run.put(500_000, &["a"]);
        run.put(600_000, &["a", "b"]);
        assert_eq!(run.told(), told("a b", "a b"));
        run.sweep(1_000_000);
        assert_eq!(run.told(), told("a b", "a b"));
    }

    #[tokio::test(start_paused = true)]
    async fn endpoints_of_new_identities_are_used_where_there_are_no_others() {
        let mut run = Run::new();
        run.put(0, &["a"]);
        run.put(10_000, &["b"]);
        let snapshot = run.1.latest();
        let view = snapshot.service(NAME).expect("the service");
        let candidates = view.ports[0].candidates("", AskedBy::MeshName).expect("all of them");
        assert_eq!(candidates.endpoints().len(), 1, "it is in reserve, and the only one");
        run.put(20_000, &[]);
        run.put(30_000, &["c"]);
        assert_eq!(run.told(), told("a b c", "c"), "without endpoints there was nothing to choose");
    }

    #[tokio::test(start_paused = true)]
    async fn the_service_with_the_most_changes_gives_way_to_the_others() {
        let mut run = Run::new();
        run.put(0, &["a"]);
        let many: Vec<Identity> = (0..CHANGES_MAX).map(|at| of_account(&format!("m{at}"))).collect();
        let burst = |name: &str| {
            let hostname = service(name, vec![], vec![]).key.hostname;
            let lost = many.iter().map(|identity| (identity.clone(), Changed::Lost(run.2)));
            let changes = Arc::new(BTreeMap::from([(hostname.clone(), lost.collect())]));
            let mut identities = Identities { changes, ..Identities::default() };
            identities.renew(&[hostname]);
            identities
        };
        let (other, own) = (burst("s1.mesh"), burst(NAME));
        run.0.identities = other;
        run.put(1_000, &["b"]);
        assert_eq!(run.told().0, "a b", "the other service has the most changes");
        let known: Vec<&str> = run.0.identities.changes.keys().map(HostName::as_str).collect();
        assert_eq!((known, run.0.identities.recent.0.len()), (vec![NAME], 1));
        run.0.identities = own;
        run.put(2_000, &["c"]);
        assert_eq!(run.told().0, "c", "all changes of this service take effect at once");
        assert!(run.0.identities.changes.is_empty() && run.0.identities.recent.0.is_empty());
    }
}
