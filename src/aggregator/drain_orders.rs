//! The operators' orders to drain: kept in the state folder, and written to the registries in etcd, so that other replicas apply
//! them as well.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use tokio::sync::oneshot;

use super::etcd::store;
use super::owner::Handle;
use super::spec::{RegistryKind, RegistrySpec};
use isthmus_document::drains;
use isthmus_files::line_file::LineFile;
use isthmus_files::whole_file::set_aside;
use isthmus_model::drain::{Drain, DrainTarget};
use isthmus_model::time::unix_seconds;
use isthmus_tasks::background;
use isthmus_tasks::scope::Scope;

/// The name of the list in the state folder.
const FILE: &str = "drains";
/// The largest number of orders.
const ORDERS_MAX: usize = 100;
/// The longest line of the file in bytes.
pub const LINE_BYTES_MAX: u64 = 4_096;
/// The limits of the file.
const LIST: LineFile = LineFile { name: "drains", lines_max: ORDERS_MAX, line_bytes_max: LINE_BYTES_MAX };

/// The orders of this gateway's operators; cheap to clone.
#[derive(Clone)]
pub struct DrainOrders {
    aggregator: Handle,
    kept: Arc<Mutex<Kept>>,
    /// Held while a change is made and kept.
    turn: Arc<tokio::sync::Mutex<()>>,
    scope: Scope,
}

struct Kept {
    orders: Vec<Arc<Drain>>,
    /// The state folder; `None`: orders are not kept on disk.
    state: Option<PathBuf>,
    /// The registries in etcd.
    registries: Vec<RegistrySpec>,
}

/// Where an order is kept, or was kept until it was withdrawn.
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
        match &self.state {
            Some(state) => write!(f, "kept in {}", state.join(FILE).display())?,
            None if self.failed.is_empty() => {
                f.write_str("not kept over a restart, since the config has no `state.dir`")?;
            }
            None => f.write_str("not kept in a state folder")?,
        }
        match self.registries.is_empty() {
            true => f.write_str("; it holds for this gateway and its clients alone")?,
            false => write!(f, "; other replicas read it from the registry {}", self.registries.join(", "))?,
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
}

impl DrainOrders {
    /// Reads the orders that an earlier process has kept, and applies them. Blocks.
    pub fn start(
        aggregator: Handle,
        state: Option<&Path>,
        registries: &[RegistrySpec],
        scope: Scope,
    ) -> Self {
        let read = |line: &str| drains::read(Path::new(FILE), line).ok().map(Arc::new);
        let orders = match state.map(|state| LIST.load(&state.join(FILE), read)) {
            None => Vec::new(),
            Some(Ok(orders)) => orders,
            Some(Err(error)) => {
                let aside = state.map(|state| set_aside(&state.join(FILE))).unwrap_or_default();
                tracing::error!(%error, "the orders to drain of the last run have no effect, and their file {aside}");
                Vec::new()
            }
        };
        let kept = Kept { orders, state: state.map(Path::to_owned), registries: in_etcd(registries) };
        let all = Self { aggregator, kept: Arc::new(Mutex::new(kept)), turn: Arc::default(), scope };
        all.publish();
        all
    }

    /// Returns all orders.
    pub fn all(&self) -> Vec<Arc<Drain>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).orders.clone()
    }

    /// Returns the documents of all orders, which [`take_over`](Self::take_over) reads.
    pub fn documents(&self) -> Vec<String> {
        self.all().iter().map(|drain| line(drain)).collect()
    }

    /// Replaces all orders by those of an earlier process, and keeps them in the state folder. Returns those that have an effect.
    pub async fn take_over(&self, documents: &[String]) -> Vec<Arc<Drain>> {
        let _turn = self.turn.lock().await;
        let read = |document: &String| match drains::read(Path::new(FILE), document) {
            Ok(drain) => Some(Arc::new(drain)),
            Err(problems) => {
                tracing::warn!(document, ?problems, "an order to drain of the old process has no effect");
                None
            }
        };
        let orders: Vec<Arc<Drain>> = documents.iter().filter_map(read).take(ORDERS_MAX).collect();
        let before = {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut kept.orders, orders.clone())
        };
        if before != orders {
            self.publish();
            if let Some(Err(failed)) = self.store().await {
                tracing::error!("the orders to drain of the old process are not kept: {failed}");
            }
        }
        orders
    }

    /// Uses the places of another config.
    pub fn configure(&self, state: Option<&Path>, registries: &[RegistrySpec]) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        (kept.state, kept.registries) = (state.map(Path::to_owned), in_etcd(registries));
    }

    /// Applies an order, which replaces an earlier one of the same target.
    pub async fn order(&self, drain: Drain) -> Result<Places, OrderError> {
        let drain = Arc::new(drain);
        let now = unix_seconds(SystemTime::now());
        let (target, value) = (drain.target.clone(), line(&drain));
        self.change(target, Some(value), move |orders| {
            orders.retain(|known| known.target != drain.target && known.parts_left(now).is_some());
            if orders.len() >= ORDERS_MAX {
                return Err(OrderError::TooMany);
            }
            orders.push(drain);
            Ok(())
        })
        .await
    }

    /// Withdraws the order of a target. `is_elsewhere` is true if a registry has an order of the target.
    pub async fn withdraw(&self, target: &DrainTarget, is_elsewhere: bool) -> Result<Places, OrderError> {
        let gone = target.clone();
        self.change(target.clone(), None, move |orders| {
            let before = orders.len();
            orders.retain(|known| known.target != gone);
            if orders.len() == before && !is_elsewhere { Err(OrderError::Unknown(gone)) } else { Ok(()) }
        })
        .await
    }

    /// Changes the orders, and keeps the change of this target. Changes are made one after another, each to its end, even if nobody
    /// waits for the result any more.
    async fn change(
        &self,
        target: DrainTarget,
        value: Option<String>,
        change: impl FnOnce(&mut Vec<Arc<Drain>>) -> Result<(), OrderError> + Send + 'static,
    ) -> Result<Places, OrderError> {
        let (answer, answered) = oneshot::channel();
        let all = self.clone();
        self.scope.spawn(async move {
            let _turn = all.turn.lock().await;
            let changed = change(&mut all.kept.lock().unwrap_or_else(PoisonError::into_inner).orders);
            let result = match changed {
                Ok(()) => {
                    all.publish();
                    Ok(all.keep(&target, value).await)
                }
                Err(error) => Err(error),
            };
            // The operator may have given up.
            let _ = answer.send(result);
        });
        answered.await.unwrap_or_else(|_| Ok(Places::default()))
    }

    fn publish(&self) {
        let orders = self.kept.lock().unwrap_or_else(PoisonError::into_inner).orders.clone();
        self.aggregator.use_drain_orders(Arc::new(orders));
    }

    /// Writes the orders to the state folder, and the value of one target, or its absence, to the registries in etcd.
    async fn keep(&self, target: &DrainTarget, value: Option<String>) -> Places {
        let mut places = Places::default();
        match self.store().await {
            Some(Ok(state)) => places.state = Some(state),
            Some(Err(failed)) => places.failed.push(failed),
            None => {}
        }
        let registries = self.kept.lock().unwrap_or_else(PoisonError::into_inner).registries.clone();
        for registry in registries {
            let RegistryKind::Etcd(etcd) = &registry.kind else { continue };
            match store::drain(etcd, &self.scope, target, value.clone()).await {
                Ok(()) => places.registries.push(registry.name.clone()),
                Err(fault) => {
                    places
                        .failed
                        .push(format!("it cannot be written to the registry {}: {fault}", registry.name));
                }
            }
        }
        places
    }

    /// Writes the orders to the state folder, and returns the folder; `None`: the config has none.
    async fn store(&self) -> Option<Result<PathBuf, String>> {
        let (orders, state) = {
            let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            (kept.orders.clone(), kept.state.clone()?)
        };
        let path = state.join(FILE);
        let work = move || LIST.store(&path, orders.iter().map(|drain| line(drain)));
        Some(match background::run(work).await {
            Ok(Ok(())) => Ok(state),
            Ok(Err(error)) => Err(format!("it cannot be written to {}: {error}", state.display())),
            Err(_) => Err("internal error: writing the state folder panicked".to_owned()),
        })
    }
}

/// Returns the registries in etcd.
fn in_etcd(registries: &[RegistrySpec]) -> Vec<RegistrySpec> {
    let is_etcd = |spec: &&RegistrySpec| matches!(spec.kind, RegistryKind::Etcd(_));
    registries.iter().filter(is_etcd).cloned().collect()
}

/// Returns an order as one line.
pub fn line(drain: &Drain) -> String {
    let document: BTreeMap<&str, String> = drains::written(drain).into_iter().collect();
    serde_json::to_string(&document).unwrap_or_default()
}
