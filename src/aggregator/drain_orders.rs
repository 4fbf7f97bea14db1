//! The operators' orders to drain. An order that was written to a registry in etcd lives there: this gateway has a copy of it, which also
//! applies to what other registries say, follows the registry's, and goes with it. Other orders are kept in the state folder alone.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde_json::json;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::etcd::store;
use super::owner::Handle;
use super::spec::etcd::EtcdSpec;
use super::spec::{RegistryKind, RegistrySpec};
use super::status::{RegistryState, Status};
use isthmus_document::drains;
use isthmus_files::line_file::LineFile;
use isthmus_files::whole_file::set_aside;
use isthmus_model::drain::{Drain, DrainTarget};
use isthmus_model::time::unix_seconds;
use isthmus_snapshot::drains::{DrainSource, Drains};
use isthmus_tasks::background;
use isthmus_tasks::scope::Scope;
use isthmus_world::Reader;

/// The name of the list in the state folder.
const FILE: &str = "drains";
/// The largest number of orders.
const ORDERS_MAX: usize = 100;
/// The longest document of an order in bytes.
pub const LINE_BYTES_MAX: u64 = 4_096;
/// The limits of the file. A document is quoted where the line has registries, too.
const LIST: LineFile = LineFile { name: "drains", lines_max: ORDERS_MAX, line_bytes_max: 4 * LINE_BYTES_MAX };
/// The time after which a live registry shows a document that was written to it. From then on the document in the registry holds,
/// whoever has written it.
const SHOWN_WITHIN: Duration = Duration::from_secs(10);

/// The orders of this gateway's operators; cheap to clone.
#[derive(Clone)]
pub struct DrainOrders {
    aggregator: Handle,
    reader: Reader,
    kept: Arc<Mutex<Kept>>,
    /// Held while a change is made and kept.
    turn: Arc<tokio::sync::Mutex<()>>,
    scope: Scope,
}

struct Kept {
    orders: Vec<Order>,
    /// The state folder; `None`: orders are not kept on disk.
    state: Option<PathBuf>,
    /// The registries in etcd, by name.
    registries: Vec<(Arc<str>, EtcdSpec)>,
}

/// An order, and the registries in etcd that have it.
#[derive(Clone, Debug)]
struct Order {
    drain: Arc<Drain>,
    registries: Vec<Written>,
}

/// A registry that an order was written to.
#[derive(Clone, Debug)]
struct Written {
    registry: Arc<str>,
    /// When the order was written, until the registry has shown it.
    unseen: Option<Instant>,
}

/// Where an order is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// The state folder.
    pub state: Option<PathBuf>,
    /// The names of the registries in etcd.
    pub registries: Vec<Arc<str>>,
    /// The places where the change failed, each with its cause.
    pub failed: Vec<String>,
}

impl fmt::Display for Places {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.state, self.registries.is_empty()) {
            (Some(state), true) => write!(f, "kept in {}", state.join(FILE).display())?,
            (None, true) if self.failed.is_empty() => {
                f.write_str("not kept over a restart, since the config has no `state.dir`")?;
            }
            (None, true) => f.write_str("not kept in a state folder")?,
            (_, false) => {
                write!(f, "kept in the registry {}, from which", self.registries.join(", "))?;
                f.write_str(" other replicas read it; they apply it to the items of that registry alone")?;
            }
        }
        if self.registries.is_empty() {
            f.write_str("; it holds for this gateway and its clients alone")?;
        }
        self.failed.iter().try_for_each(|failed| write!(f, "; {failed}"))
    }
}

/// The reason why an order is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    /// There are too many orders.
    #[error("{ORDERS_MAX} drains are ordered, which is the limit; `isthmus undrain` ends one")]
    TooMany,
    /// There is no such order.
    #[error(
        "the {0} is not drained by an order to this gateway; `isthmus drains` shows the source of each drain"
    )]
    Unknown(DrainTarget),
    /// The order could not be deleted from registries that have it, each with the cause.
    #[error("the drain of {target} goes on: {}", failed.join("; "))]
    GoesOn {
        /// The target.
        target: DrainTarget,
        /// The failures, each with its cause.
        failed: Vec<String>,
    },
}

impl DrainOrders {
    /// Reads the orders that an earlier process has kept, and applies them. Blocks.
    pub fn start(
        aggregator: Handle,
        reader: Reader,
        state: Option<&Path>,
        registries: &[RegistrySpec],
        scope: Scope,
    ) -> Self {
        let orders = match state.map(|state| LIST.load(&state.join(FILE), Order::read)) {
            None => Vec::new(),
            Some(Ok(orders)) => orders,
            Some(Err(error)) => {
                let aside = state.map(|state| set_aside(&state.join(FILE))).unwrap_or_default();
                tracing::error!(%error, "the orders to drain of the last run have no effect, and their file {aside}");
                Vec::new()
            }
        };
        let kept = Kept { orders, state: state.map(Path::to_owned), registries: in_etcd(registries) };
        let all = Self { aggregator, reader, kept: Arc::new(Mutex::new(kept)), turn: Arc::default(), scope };
        all.publish();
        all
    }

    /// Has the orders follow the registries that have them, until the aggregator ends.
    pub async fn follow(self) {
        let mut status = self.aggregator.status.clone();
        // The owner sends a status at least once a second.
        while status.changed().await.is_ok() {
            let now = status.borrow_and_update().clone();
            // The state folder belongs to another process, which follows the registries, too.
            if self.aggregator.is_state_held() || !self.kept().orders.iter().any(Order::is_in_registry) {
                continue;
            }
            let _turn = self.turn.lock().await;
            let drains = self.reader.latest().drains.clone();
            let changes = follow(&mut self.kept().orders, &now, &drains, Instant::now());
            if changes {
                self.publish();
                if let Some(Err(failed)) = self.store().await {
                    tracing::error!("the orders to drain are not kept: {failed}");
                }
            }
        }
    }

    /// Returns all orders.
    pub fn all(&self) -> Vec<Arc<Drain>> {
        self.kept().orders.iter().map(|order| order.drain.clone()).collect()
    }

    /// Returns the documents of all orders, which [`take_over`](Self::take_over) reads.
    pub fn documents(&self) -> Vec<String> {
        self.kept().orders.iter().map(Order::line).collect()
    }

    /// Replaces all orders by those of an earlier process, and keeps them in the state folder. Returns those that have an effect.
    pub async fn take_over(&self, documents: &[String]) -> Vec<Arc<Drain>> {
        let _turn = self.turn.lock().await;
        let mut orders = Vec::new();
        for document in documents {
            match Order::read(document) {
                Some(order) if orders.len() < ORDERS_MAX => orders.push(order),
                Some(_) | None => {
                    tracing::warn!(document, "an order to drain of the old process has no effect");
                }
            }
        }
        let lines = |orders: &[Order]| -> Vec<String> { orders.iter().map(Order::line).collect() };
        let before = std::mem::replace(&mut self.kept().orders, orders.clone());
        if lines(&before) != lines(&orders) {
            self.publish();
            if let Some(Err(failed)) = self.store().await {
                tracing::error!("the orders to drain of the old process are not kept: {failed}");
            }
        }
        self.all()
    }

    /// Uses the places of another config.
    pub fn configure(&self, state: Option<&Path>, registries: &[RegistrySpec]) {
        let mut kept = self.kept();
        (kept.state, kept.registries) = (state.map(Path::to_owned), in_etcd(registries));
        let Kept { orders, registries, .. } = &mut *kept;
        for order in orders {
            // The order goes on here if its registry does not.
            order.registries.retain(|one| registries.iter().any(|(name, _)| *name == one.registry));
        }
    }

    /// Applies an order, which replaces an earlier one of the same target.
    pub async fn order(&self, drain: Drain) -> Result<Places, OrderError> {
        let all = self.clone();
        self.in_turn(async move {
            let drain = Arc::new(drain);
            let now = unix_seconds(SystemTime::now());
            {
                let mut kept = all.kept();
                let orders = &mut kept.orders;
                orders.retain(|known| {
                    known.drain.target != drain.target && known.drain.parts_left(now).is_some()
                });
                if orders.len() >= ORDERS_MAX {
                    return Err(OrderError::TooMany);
                }
                orders.push(Order { drain: drain.clone(), registries: Vec::new() });
            }
            all.publish();
            let mut places = Places::default();
            all.store_in(&mut places).await;
            all.write(&drain, &mut places).await;
            if !places.registries.is_empty() {
                all.store_in(&mut places).await;
            }
            Ok(places)
        })
        .await
        .unwrap_or_else(|| Ok(Places::default()))
    }

    /// Writes an order to the registries in etcd.
    async fn write(&self, drain: &Drain, places: &mut Places) {
        let registries = self.kept().registries.clone();
        for (name, etcd) in registries {
            match store::drain(&etcd, &self.scope, &drain.target, Some(line(drain))).await {
                Ok(_) => {
                    let written = Written { registry: name.clone(), unseen: Some(Instant::now()) };
                    let mut kept = self.kept();
                    let known = kept.orders.iter_mut().find(|order| order.drain.target == drain.target);
                    known.into_iter().for_each(|order| order.registries.push(written.clone()));
                    places.registries.push(name);
                }
                Err(fault) => places.failed.push(format!(
                    "it cannot be written to the registry {name}, so that other replicas do not have it: {fault}"
                )),
            }
        }
    }

    /// Withdraws the order of a target. `shown_by` are the registries that show an order of the target. Returns the places where nothing
    /// of it is left, and the failures that leave nothing in force.
    pub async fn withdraw(
        &self,
        target: &DrainTarget,
        shown_by: Vec<Arc<str>>,
    ) -> Result<Places, OrderError> {
        let (all, target) = (self.clone(), target.clone());
        let ended = self.in_turn(async move { all.end(target, shown_by).await }).await;
        ended.unwrap_or_else(|| Ok(Places::default()))
    }

    async fn end(&self, target: DrainTarget, shown_by: Vec<Arc<str>>) -> Result<Places, OrderError> {
        let (order, registries) = {
            let kept = self.kept();
            let order = kept.orders.iter().find(|order| order.drain.target == target).cloned();
            (order, kept.registries.clone())
        };
        let is_shown = |name: &Arc<str>| shown_by.contains(name);
        if order.is_none() && !registries.iter().any(|(name, _)| is_shown(name)) {
            return Err(OrderError::Unknown(target));
        }
        let has = |name: &Arc<str>| {
            let mut written = order.iter().flat_map(|order| &order.registries);
            is_shown(name) || written.any(|one| one.registry == *name)
        };
        let (mut goes_on, mut places) = (Vec::new(), Places::default());
        for (name, etcd) in &registries {
            match store::drain(etcd, &self.scope, &target, None).await {
                Ok(()) => places.registries.push(name.clone()),
                Err(fault) => {
                    goes_on.extend(has(name).then(|| name.clone()));
                    places.failed.push(format!("it cannot be deleted from the registry {name}: {fault}"));
                }
            }
        }
        // A copy goes on while a registry has the order.
        let is_copy = order.as_ref().is_some_and(Order::is_in_registry) && !goes_on.is_empty();
        if is_copy {
            let mut kept = self.kept();
            let known = kept.orders.iter_mut().filter(|order| order.drain.target == target);
            known.for_each(|order| order.registries.retain(|one| goes_on.contains(&one.registry)));
        } else {
            self.kept().orders.retain(|order| order.drain.target != target);
        }
        self.publish();
        self.store_in(&mut places).await;
        let failed = places.failed.clone();
        if goes_on.is_empty() { Ok(places) } else { Err(OrderError::GoesOn { target, failed }) }
    }

    /// Makes a change after those before it, and to its end, even if nobody waits for the result any more. Returns `None` if the
    /// program ends meanwhile.
    async fn in_turn<T: Send + 'static>(
        &self,
        change: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let (answer, answered) = oneshot::channel();
        let turn = self.turn.clone();
        self.scope.spawn(async move {
            let _turn = turn.lock().await;
            // The operator may have given up.
            let _ = answer.send(change.await);
        });
        answered.await.ok()
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        // A poisoned lock is usable: each change is a single step.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self) {
        self.aggregator.use_drain_orders(Arc::new(self.all()));
    }

    async fn store_in(&self, places: &mut Places) {
        match self.store().await {
            Some(Ok(state)) => places.state = Some(state),
            Some(Err(failed)) if !places.failed.contains(&failed) => places.failed.push(failed),
            Some(Err(_)) | None => {}
        }
    }

    /// Writes the orders to the state folder, and returns the folder; `None`: the config has none.
    async fn store(&self) -> Option<Result<PathBuf, String>> {
        let (lines, state) = {
            let kept = self.kept();
            (kept.orders.iter().map(Order::line).collect::<Vec<_>>(), kept.state.clone()?)
        };
        let path = state.join(FILE);
        let work = move || LIST.store(&path, lines.into_iter());
        Some(match background::run(work).await {
            Ok(Ok(())) => Ok(state),
            Ok(Err(error)) => Err(format!("it cannot be written to {}: {error}", state.display())),
            Err(_) => Err("internal error: writing the state folder panicked".to_owned()),
        })
    }
}

impl Order {
    fn is_in_registry(&self) -> bool {
        !self.registries.is_empty()
    }

    /// Returns the order as one line: its document, with the registries that have it.
    fn line(&self) -> String {
        let document = line(&self.drain);
        if self.registries.is_empty() {
            return document;
        }
        let registries: Vec<&str> = self.registries.iter().map(|one| &*one.registry).collect();
        json!({"order": document, "registries": registries}).to_string()
    }

    fn read(line: &str) -> Option<Self> {
        let value: serde_json::Value = serde_json::from_str(line).ok()?;
        let (document, registries) = match (value["order"].as_str(), value["registries"].as_array()) {
            (Some(document), Some(registries)) => (document, registries.as_slice()),
            _ => (line, &[][..]),
        };
        let drain = drains::read(Path::new(FILE), document).ok()?.into();
        let written =
            |name: &serde_json::Value| Some(Written { registry: name.as_str()?.into(), unseen: None });
        Some(Self { drain, registries: registries.iter().filter_map(written).collect() })
    }
}

/// Has orders follow the registries that have them: takes over what another replica has amended, and drops an order that is not in its
/// registries any more. Returns true if an order changes.
fn follow(orders: &mut Vec<Order>, status: &Status, drains: &Drains, now: Instant) -> bool {
    let mut changes = false;
    orders.retain_mut(|order| {
        let count = order.registries.len();
        let Order { drain, registries } = order;
        registries.retain_mut(|written| {
            let of_it = |active: &&isthmus_snapshot::drains::ActiveDrain| {
                matches!(&active.source, DrainSource::Registry(name) if *name == written.registry)
                    && active.drain.target == drain.target
            };
            let mut registry = status.registries.iter().filter(|one| one.name == written.registry);
            // A registry that is not live may show an old order.
            if registry.next().is_none_or(|registry| registry.state != RegistryState::Live) {
                return true;
            }
            let shown = drains.0.iter().find(of_it).map(|active| &active.drain);
            let is_late = |since: Instant| now.duration_since(since) >= SHOWN_WITHIN;
            let is_settled = written.unseen.is_none_or(is_late);
            match shown {
                Some(shown) if shown == drain => written.unseen = None,
                Some(shown) if is_settled => {
                    (*drain, written.unseen) = (shown.clone(), None);
                    changes = true;
                }
                None if is_settled => return false,
                Some(_) | None => {}
            }
            true
        });
        changes |= registries.len() < count;
        count == 0 || !registries.is_empty()
    });
    changes
}

/// Returns the registries in etcd.
fn in_etcd(registries: &[RegistrySpec]) -> Vec<(Arc<str>, EtcdSpec)> {
    let etcd = |spec: &RegistrySpec| match &spec.kind {
        RegistryKind::Etcd(etcd) => Some((spec.name.clone(), etcd.clone())),
        _ => None,
    };
    registries.iter().filter_map(etcd).collect()
}

/// Returns the document of an order as one line.
pub fn line(drain: &Drain) -> String {
    let document: BTreeMap<&str, String> = drains::written(drain).into_iter().collect();
    serde_json::to_string(&document).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use isthmus_snapshot::drains::ActiveDrain;

    use super::*;
    use crate::status::RegistryStatus;

    fn drain(name: &str, to: u8) -> Arc<Drain> {
        let document = format!("{{\"network\": \"{name}\", \"to\": \"{to}%\"}}");
        drains::read(Path::new("a test"), &document).expect("a drain").into()
    }

    fn in_registry(drain: &Arc<Drain>, unseen: Option<Instant>) -> Order {
        let registries = vec![Written { registry: "etcd".into(), unseen }];
        Order { drain: drain.clone(), registries }
    }

    /// Returns what is left of these orders when the registry, in this state, shows these drains.
    fn after(mut orders: Vec<Order>, state: RegistryState, shown: &[&Arc<Drain>]) -> (Vec<u8>, bool) {
        let status = Status { registries: vec![RegistryStatus::of("etcd", state)], ..Status::default() };
        let active = |drain: &&Arc<Drain>| {
            let source = DrainSource::Registry("etcd".into());
            ActiveDrain { drain: (*drain).clone(), source, left: 0 }
        };
        let drains = Drains(shown.iter().map(active).collect());
        let changes = follow(&mut orders, &status, &drains, Instant::now());
        (orders.iter().map(|order| order.drain.to_percent).collect(), changes)
    }

    #[tokio::test(start_paused = true)]
    async fn a_copy_of_an_order_follows_its_registry_and_goes_with_it() {
        use RegistryState::{Live, Missing, Stale};
        let (mine, amended) = (drain("west", 0), drain("west", 50));
        let other = drain("east", 10);
        let just_now = || Some(Instant::now());
        tokio::time::advance(SHOWN_WITHIN).await;
        let long_ago = Instant::now().checked_sub(SHOWN_WITHIN);
        let copy = |unseen| vec![in_registry(&mine, unseen)];
        assert_eq!(after(copy(None), Live, &[&mine]), (vec![0], false));
        assert_eq!(after(copy(None), Live, &[&amended]), (vec![50], true), "another replica amended it");
        assert_eq!(after(copy(None), Live, &[&other]), (vec![], true), "another replica ended it");
        for state in [Stale, Missing] {
            assert_eq!(after(copy(None), state, &[]), (vec![0], false), "nothing is known");
        }
        // The registry may show a moment later what was written to it.
        assert_eq!(after(copy(just_now()), Live, &[]), (vec![0], false));
        assert_eq!(after(copy(just_now()), Live, &[&amended]), (vec![0], false), "the earlier order");
        assert_eq!(after(copy(long_ago), Live, &[]), (vec![], true));
        assert_eq!(after(copy(long_ago), Live, &[&amended]), (vec![50], true));
        // An order that no registry has is nobody else's.
        let own = Order { drain: mine.clone(), registries: Vec::new() };
        assert_eq!(after(vec![own], Live, &[]), (vec![0], false));
    }

    #[tokio::test(start_paused = true)]
    async fn an_order_ends_with_the_last_registry_that_has_it() {
        let mine = drain("west", 0);
        let mut order = in_registry(&mine, None);
        order.registries.push(Written { registry: "second".into(), unseen: None });
        let status = ["etcd", "second"].map(|name| RegistryStatus::of(name, RegistryState::Live)).to_vec();
        let status = Status { registries: status, ..Status::default() };
        let shown = |name: &str| {
            let source = DrainSource::Registry(name.into());
            Drains(vec![ActiveDrain { drain: mine.clone(), source, left: 0 }])
        };
        let mut orders = vec![order];
        assert!(follow(&mut orders, &status, &shown("second"), Instant::now()));
        assert_eq!(orders[0].registries.len(), 1);
        assert!(follow(&mut orders, &status, &Drains::default(), Instant::now()));
        assert!(orders.is_empty());
    }

    #[test]
    fn an_order_is_read_as_it_is_written() {
        let plain = Order { drain: drain("west", 1), registries: Vec::new() };
        for order in [plain, in_registry(&drain("b c", 0), None)] {
            let read = Order::read(&order.line()).expect("read");
            assert_eq!((&read.drain, read.registries.len()), (&order.drain, order.registries.len()));
            assert_eq!(read.line(), order.line());
        }
        for damaged in ["", "{}", "[]", "{\"order\": 5, \"registries\": []}"] {
            assert!(Order::read(damaged).is_none(), "{damaged}");
        }
    }
}
