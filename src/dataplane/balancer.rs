//! One worker's handles to the run-time state of endpoints, so that a connection looks nothing up by name.
//!
//! A [`Balancer`] belongs to one set of candidates. It keeps a handle for each endpoint that the worker has considered, and
//! the candidates that may be chosen, until an ejection, a health check or an operator changes that. It is dropped some seconds after its
//! last use; a snapshot that replaces the candidates has another one made.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use hashbrown::HashMap;

use super::upstreams::{Group, Upstream, Upstreams};
use crate::balance::selection::Selection;
use crate::balance::{Ask, Availability, Load, choose, choose_from};
use crate::model::place::ClusterId;
use crate::model::reason::Reason;
use crate::snapshot::candidates::Candidates;

/// Balancers that one worker keeps; beyond, one is made for each connection.
const KEPT_MAX: usize = 1 << 17;
/// Ticks after its last use until a balancer is dropped.
const KEPT_FOR: u32 = 16;
/// Selections that one balancer keeps: one for each list of clusters that export rules name.
const SELECTIONS_MAX: usize = 8;

/// Parts of the table of balancers, which are swept one by one.
const SHARDS: usize = 256;

/// The balancers of one worker.
pub(crate) struct Balancers {
    shards: Box<[RefCell<Shard>]>,
}

/// Balancers by the address of their candidates, which the balancer keeps alive.
type Shard = HashMap<usize, Rc<Balancer>>;

/// The state of one set of candidates as one worker sees it.
pub(crate) struct Balancer {
    upstreams: Arc<Upstreams>,
    candidates: Arc<Candidates>,
    group: Arc<Group>,
    /// The endpoints by their indices.
    endpoints: Box<[OnceCell<Arc<Upstream>>]>,
    selections: RefCell<Vec<Rc<Made>>>,
    /// The tick of its last use.
    used: Cell<u32>,
}

/// A selection, and how long it holds.
struct Made {
    clusters: Option<Arc<[ClusterId]>>,
    selection: Selection,
    /// The count of changes that it was made after.
    changes: u64,
    /// When the first ejected endpoint returns, in milliseconds as [`Upstreams::now`] counts.
    until: u64,
}

impl Default for Balancers {
    fn default() -> Self {
        Self { shards: (0..SHARDS).map(|_| RefCell::default()).collect() }
    }
}

impl Balancers {
    /// Returns the balancer of these candidates. `now` is the worker's tick.
    pub(crate) fn of(
        &self,
        candidates: &Arc<Candidates>,
        upstreams: &Arc<Upstreams>,
        now: u32,
    ) -> Rc<Balancer> {
        let address = Arc::as_ptr(candidates) as usize;
        // The lowest bits say nothing, as an allocation is aligned.
        let mut kept = self.shards[(address >> 6) % SHARDS].borrow_mut();
        if let Some(known) = kept.get(&address) {
            debug_assert!(
                Arc::ptr_eq(&known.candidates, candidates),
                "a balancer keeps its candidates alive"
            );
            known.used.set(now);
            return known.clone();
        }
        let balancer = Rc::new(Balancer {
            upstreams: upstreams.clone(),
            candidates: candidates.clone(),
            group: upstreams.group(&candidates.group),
            endpoints: candidates.endpoints().iter().map(|_| OnceCell::new()).collect(),
            selections: RefCell::default(),
            used: Cell::new(now),
        });
        if kept.len() < KEPT_MAX / SHARDS {
            kept.insert(address, balancer.clone());
        }
        balancer
    }

    /// Drops the balancers that were not used for a while, of the parts whose turn it is, with a turn for other tasks after
    /// each part.
    pub(crate) async fn sweep(&self, now: u32) {
        for shard in self.shards.iter().skip((now % KEPT_FOR) as usize).step_by(KEPT_FOR as usize) {
            if shard.borrow().is_empty() {
                continue;
            }
            sweep(&mut shard.borrow_mut(), now);
            tokio::task::yield_now().await;
        }
    }
}

fn sweep(kept: &mut Shard, now: u32) {
    kept.retain(|_, balancer| balancer.used.get().saturating_add(KEPT_FOR) > now);
    if kept.len() < kept.capacity() / 4 {
        kept.shrink_to_fit();
    }
}

impl Balancer {
    /// Chooses an endpoint for a connection, by its index among the candidates.
    pub(crate) fn choose(
        &self,
        ask: &Ask<'_>,
        clusters: Option<&Arc<[ClusterId]>>,
        random: &mut impl FnMut() -> u64,
    ) -> Result<usize, Reason> {
        if !ask.tried.is_empty() {
            return choose(ask, self, random, &mut ());
        }
        let made = self.selection(ask, clusters);
        choose_from(&made.selection, ask, self, random, &mut ())
    }

    fn selection(&self, ask: &Ask<'_>, clusters: Option<&Arc<[ClusterId]>>) -> Rc<Made> {
        // Before the selection is made: what changes meanwhile has the next connection make it again.
        let changes = self.group.changes() + self.upstreams.withdrawals().changes();
        let mut selections = self.selections.borrow_mut();
        let at = selections.iter().position(|made| made.clusters.as_ref() == clusters);
        if let Some(made) = at.map(|at| &selections[at])
            && made.changes == changes
            && (made.until == u64::MAX || self.upstreams.now() < made.until)
        {
            return made.clone();
        }
        let until = Cell::new(u64::MAX);
        let selection = Selection::new(ask, &Returns { balancer: self, until: &until });
        let made = Rc::new(Made { clusters: clusters.cloned(), selection, changes, until: until.get() });
        match at {
            Some(at) => selections[at] = made.clone(),
            None if selections.len() < SELECTIONS_MAX => selections.push(made.clone()),
            None => selections[0] = made.clone(),
        }
        made
    }

    /// Returns the run-time state of an endpoint.
    pub(crate) fn endpoint(&self, index: usize) -> &Arc<Upstream> {
        debug_assert!(index < self.endpoints.len(), "{index} is no candidate");
        self.endpoints[index].get_or_init(|| self.upstreams.upstream(&self.candidates.endpoints()[index]))
    }
}

impl Load for Balancer {
    fn has_left_out(&self, _: &Candidates) -> bool {
        self.group.has_left_out() || !self.upstreams.withdrawals().is_empty()
    }

    fn availability(&self, candidates: &Candidates, index: usize) -> Availability {
        match self.endpoints[index].get() {
            Some(upstream) if self.upstreams.withdrawals().is_empty() => {
                self.upstreams.availability_of(upstream)
            }
            _ => self.upstreams.availability(candidates, index),
        }
    }

    fn in_flight(&self, _: &Candidates, index: usize) -> u32 {
        self.endpoint(index).in_flight()
    }

    fn turn(&self, _: &Candidates) -> u64 {
        self.group.take_turn()
    }
}

/// A balancer that notes when the first ejected endpoint returns.
struct Returns<'a> {
    balancer: &'a Balancer,
    until: &'a Cell<u64>,
}

impl Load for Returns<'_> {
    fn has_left_out(&self, candidates: &Candidates) -> bool {
        self.balancer.has_left_out(candidates)
    }

    fn availability(&self, candidates: &Candidates, index: usize) -> Availability {
        let availability = self.balancer.availability(candidates, index);
        if availability == Availability::Ejected {
            let until = self.balancer.endpoint(index).ejected_until();
            self.until.set(self.until.get().min(until));
        }
        availability
    }

    fn in_flight(&self, candidates: &Candidates, index: usize) -> u32 {
        self.balancer.in_flight(candidates, index)
    }

    fn turn(&self, candidates: &Candidates) -> u64 {
        self.balancer.turn(candidates)
    }
}
