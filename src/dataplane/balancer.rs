//! One worker's handles to the run-time state of endpoints. With them, a connection needs no lookup by name.
//!
//! A [`Balancer`] belongs to one set of candidates. It keeps a handle for each endpoint that the worker has considered. It also
//! keeps the selection of candidates that may be chosen; an ejection, a health check or an operator's order makes the selection
//! invalid. A balancer is dropped some seconds after its last use. When a snapshot replaces the candidates, a new balancer is
//! made.

use std::cell::{Cell, OnceCell, Ref, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use hashbrown::HashMap;

use super::upstreams::{Group, Upstream, Upstreams};
use isthmus_balance::selection::Selection;
use isthmus_balance::{Ask, Availability, Load, choose, choose_from};
use isthmus_model::place::ClusterId;
use isthmus_model::reason::Reason;
use isthmus_snapshot::candidates::Candidates;

/// The number of balancers that one worker keeps. Beyond this number, each connection gets a balancer of its own.
const KEPT_MAX: usize = 1 << 17;
/// The number of ticks without use after which a balancer is dropped.
const KEPT_FOR: u32 = 16;
/// The number of selections that one balancer keeps: one for each list of clusters that export rules name.
const SELECTIONS_MAX: usize = 8;

/// The number of shards of the table of balancers. One shard is swept at a time.
const SHARDS: usize = 256;

/// The balancers of one worker.
pub(crate) struct Balancers {
    shards: Box<[RefCell<Shard>]>,
}

/// Balancers by the memory address of their candidates. The address stays valid because the balancer owns a reference to
/// the candidates.
type Shard = HashMap<usize, Rc<Balancer>>;

/// The state of one set of candidates, as seen by one worker.
pub(crate) struct Balancer {
    upstreams: Arc<Upstreams>,
    candidates: Arc<Candidates>,
    group: Arc<Group>,
    /// The handles of the endpoints, by index among the candidates; each is filled at its first use.
    endpoints: Box<[OnceCell<Arc<Upstream>>]>,
    selections: RefCell<Vec<KeptSelection>>,
    /// The tick of the balancer's last use.
    used: Cell<u32>,
}

/// A selection and its period of validity.
struct KeptSelection {
    clusters: Option<Arc<[ClusterId]>>,
    selection: Selection,
    /// The count of changes when the selection was made; the selection is invalid once the count differs.
    changes: u64,
    /// The time at which the first ejection ends, in milliseconds on the clock of [`Upstreams::now`]; `u64::MAX` if no endpoint
    /// is ejected. The selection is invalid from this time on.
    until: u64,
}

impl Default for Balancers {
    fn default() -> Self {
        Self { shards: (0..SHARDS).map(|_| RefCell::default()).collect() }
    }
}

impl Balancers {
    /// Returns the balancer of these candidates; creates it if it does not exist. `now` is the worker's tick.
    pub(crate) fn of(
        &self,
        candidates: &Arc<Candidates>,
        upstreams: &Arc<Upstreams>,
        now: u32,
    ) -> Rc<Balancer> {
        let address = Arc::as_ptr(candidates) as usize;
        // The lowest bits of an address carry no information, because allocations are aligned.
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

    /// Drops the balancers that have not been used for `KEPT_FOR` ticks. Each tick sweeps one of `KEPT_FOR` parts of the
    /// shards, and yields to other tasks after each shard.
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
    /// Chooses an endpoint for a connection; returns its index among the candidates.
    pub(crate) fn choose(
        &self,
        ask: &Ask<'_>,
        clusters: Option<&Arc<[ClusterId]>>,
        random: &mut impl FnMut() -> u64,
    ) -> Result<usize, Reason> {
        // A selection with limits of connections holds for one choice only.
        if !ask.tried.is_empty() || ask.candidates.is_limited() {
            return choose(ask, self, random, &mut ());
        }
        choose_from(&self.selection(ask, clusters), ask, self, random, &mut ())
    }

    fn selection(&self, ask: &Ask<'_>, clusters: Option<&Arc<[ClusterId]>>) -> Ref<'_, Selection> {
        // The count is read before the selection is made: if the state changes meanwhile, the next connection makes the
        // selection again.
        let changes = self.group.changes() + self.upstreams.withdrawals().changes();
        let selections = self.selections.borrow();
        let at = selections.iter().position(|made| made.clusters.as_ref() == clusters);
        if let Some(at) = at
            && selections[at].changes == changes
            && (selections[at].until == u64::MAX || self.upstreams.now() < selections[at].until)
        {
            return Ref::map(selections, |selections| &selections[at].selection);
        }
        drop(selections);
        let until = Cell::new(u64::MAX);
        let selection = Selection::new(ask, &Returns { balancer: self, until: &until });
        let made = KeptSelection { clusters: clusters.cloned(), selection, changes, until: until.get() };
        let mut selections = self.selections.borrow_mut();
        let at = at.unwrap_or(if selections.len() < SELECTIONS_MAX { selections.len() } else { 0 });
        match selections.get_mut(at) {
            Some(place) => *place = made,
            None => selections.push(made),
        }
        drop(selections);
        Ref::map(self.selections.borrow(), |selections| &selections[at].selection)
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

/// A view of a balancer that records the time at which the first ejection ends.
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
