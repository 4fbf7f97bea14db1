//! Applies another config: decides which registries continue, starts the tasks of the new ones, and ends the tasks of those
//! that do not continue.

use std::borrow::Cow;
use std::sync::Arc;

use tokio::time::Instant;

use super::addresses::Addresses;
use super::contained::{self, PanicSite, contained};
use super::{Followed, NotApplied, Owner, Sources, drain_time, own_shard};
use crate::lifecycle::Lifecycle;
use crate::resolver;
use crate::spec::{RegistryKind, RegistrySpec};
use isthmus_registry::change::Dirty;
use isthmus_registry::shard::Shard;
use isthmus_snapshot::build;
use isthmus_snapshot::drains::Drains;
use isthmus_snapshot::inputs::Inputs;

/// A registry of the next config: one that continues, or a new one.
enum Successor {
    /// The registry at this index, unchanged.
    Same(usize),
    New(Box<Lifecycle>),
}

impl Successor {
    fn place(&self) -> Option<usize> {
        match self {
            Self::Same(at) => Some(*at),
            Self::New(_) => None,
        }
    }

    fn shard<'a>(&'a self, registries: &'a [Followed]) -> &'a Arc<Shard> {
        match self {
            Self::Same(at) => &registries[*at].life.shard,
            Self::New(life) => &life.shard,
        }
    }
}

impl Owner {
    /// Applies another config, unless the snapshot cannot be built.
    pub(super) fn configure(&mut self, sources: Sources, now: Instant) -> Result<(), NotApplied> {
        let begun = Instant::now();
        let Sources { policy, services, registries, options } = sources;
        let mut dirty = Dirty::default();
        let own = Arc::new(own_shard(services).sharing_with(&self.own, &mut dirty));
        let lives = self.succession(&registries, &mut dirty);
        let own_dirty = dirty.services.clone();
        let shards = Self::shards_of(&own, lives.iter().map(|next| next.shard(&self.registries)));
        let dirty = match &mut self.addresses {
            Some(addresses) => addresses.renew(&dirty, &shards, &self.copies),
            None => Cow::Borrowed(&dirty),
        };
        let drains = Arc::new(Drains::at(drain_time(), &self.left, &policy, &self.drain_orders, &shards));
        let current = self.publisher.current();
        let identities = self.identities.next(&dirty.services, &current, &shards, now);
        let demands = self.demands.next(&dirty.services, (&policy, &current), &shards, now);
        let inputs = Inputs {
            policy: &policy,
            policy_generation: self.policy_generation + 1,
            shards: &shards,
            trust_roots: &self.trust_roots,
            resolved: self.names.resolved(),
            virtual_addresses: self.addresses.as_ref().map(Addresses::all),
            probes: Some(&self.probes),
            drains: &drains,
            recent: Some(identities.recent()),
            remembered: Some(demands.remembered()),
        };
        let built = contained(|| {
            contained::panic_if_asked(PanicSite::Build, &dirty);
            build::next(&current, inputs, &dirty)
        });
        if let Some(addresses) = &mut self.addresses {
            addresses.built(built.as_ref().map(drop).map_err(drop), &dirty);
        }
        let (next, delta) = built.map_err(NotApplied::Panicked)?;
        self.policy = policy;
        self.policy_generation += 1;
        self.drains = drains;
        self.identities = identities;
        self.demands = demands;
        self.own = own;
        let before = std::mem::replace(&mut self.options, options);
        self.keep_copies(&registries);
        self.succeed(lives);
        self.remember_left(&self.drains.clone());
        self.find_unread(now);
        self.note_changes(&own_dirty);
        self.names.configure(&self.policy, next.routes(), &shards);
        if before.dns != self.options.dns {
            self.resolver.abort();
            let resolver = resolver::run(self.options.dns.clone(), self.names.wanted(), self.answers.clone());
            // The new task looks all names up again; their last addresses stay until then.
            self.resolver = self.scope.spawn(resolver).abort_handle();
        }
        if before.state != self.options.state {
            if let Some(addresses) = &self.addresses {
                addresses.store(&self.copies);
            }
            for followed in &mut self.registries {
                followed.life.copy_problem = None;
                if followed.life.is_known() {
                    self.copies.store(&followed.life.spec.name, followed.life.shard.clone());
                }
            }
        }
        tracing::debug!(routes = self.policy.routes.len(), took = ?begun.elapsed(), "world built");
        self.publish(next, delta);
        self.publish_status();
        Ok(())
    }

    /// Returns a successor for each spec, in the same order. Adds to `dirty` the items that disappear or change.
    fn succession(&mut self, specs: &[RegistrySpec], dirty: &mut Dirty) -> Vec<Successor> {
        let lives = self.registries.iter().map(|followed| &followed.life);
        let found_since = lives.filter_map(Lifecycle::source_unread_since).min();
        let mut next = Vec::new();
        for spec in specs {
            let same_name = |followed: &Followed| followed.life.spec.name == spec.name;
            let known = self.registries.iter().position(same_name);
            next.push(match known {
                Some(at) if self.registries[at].life.spec == *spec => Successor::Same(at),
                Some(at) => {
                    let epoch = self.next_epoch();
                    let life = self.registries[at].life.succeeded_by(spec.clone(), epoch);
                    dirty.merge(self.registries[at].life.shard.everything());
                    dirty.merge(life.shard.everything());
                    Successor::New(Box::new(life))
                }
                None => {
                    let epoch = self.next_epoch();
                    Successor::New(Box::new(match found_since {
                        // A cluster of a source that was unread since the start: clients may have its items from an earlier process.
                        Some(start) if matches!(spec.kind, RegistryKind::Kubernetes(_)) => {
                            Lifecycle::from_start(spec.clone(), epoch, start)
                        }
                        _ => Lifecycle::new(spec.clone(), epoch),
                    }))
                }
            });
        }
        let kept = next.iter().filter_map(Successor::place);
        let kept: Vec<usize> = kept.collect();
        // The order of the registries is their precedence. If the order changes, the items of a moved registry may be merged
        // differently.
        let reordered = !kept.is_sorted();
        for (at, followed) in self.registries.iter().enumerate() {
            let stays = specs.iter().any(|spec| spec.name == followed.life.spec.name);
            if reordered || !stays {
                dirty.merge(followed.life.shard.everything());
            }
            debug_assert!(stays || !kept.contains(&at), "a registry that goes is not kept");
        }
        next
    }

    /// Replaces the registries, and ends the tasks of registries that do not continue.
    fn succeed(&mut self, next: Vec<Successor>) {
        let mut before: Vec<Option<Followed>> = self.registries.drain(..).map(Some).collect();
        for successor in next {
            let followed = match successor {
                Successor::Same(at) => before[at].take(),
                Successor::New(life) => Some(self.follow(*life)),
            };
            self.registries.extend(followed);
        }
        for gone in before.into_iter().flatten() {
            gone.task.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;
    use crate::owner::simulation::process;
    use crate::spec::kubernetes::{ClusterSource, ClustersSpec, KubernetesSpec};
    use isthmus_registry::listing::Listing;
    use isthmus_tasks::scope::Scope;

    #[tokio::test]
    async fn a_cluster_of_a_source_that_was_unread_since_the_start_is_unread_since_then() {
        let (mut owner, _) = process(&Scope::default());
        let (policy, now) = (owner.policy.clone(), Instant::now());
        let file = owner.registries[0].life.spec.clone();
        let template = KubernetesSpec::plain();
        let source =
            ClustersSpec { source: ClusterSource::Folder("/none".into()), template: template.clone() };
        let source = RegistrySpec {
            name: "source".into(),
            kind: RegistryKind::KubernetesClusters(source),
            ..file.clone()
        };
        let cluster =
            RegistrySpec { name: "cluster".into(), kind: RegistryKind::Kubernetes(template), ..file.clone() };
        let epoch = owner.next_epoch();
        let followed = owner.follow(Lifecycle::from_start(source, epoch, now));
        owner.registries.push(followed);
        let sources = |registries: Vec<RegistrySpec>| Sources {
            policy: policy.clone(),
            services: Listing::default(),
            registries,
            options: Options::default(),
        };
        let added = RegistrySpec { name: "added".into(), ..file };
        owner.configure(sources(vec![cluster, added]), now).expect("applied");
        let unread: Vec<&str> = owner.unread.registries().iter().map(|one| &*one.name).collect();
        assert_eq!(unread, ["cluster"], "a client may have its items from an earlier process");
    }
}
