//! The state of the watches of a cluster, known from their events, and whether they have read enough to be used.

use std::sync::Arc;

use http::StatusCode;

use super::super::gateway_api::Known;
use super::super::kinds::Kind;
use super::super::watch::WatchId;
use isthmus_aggregator::spec::kubernetes::KubernetesSpec;

/// The watches of a cluster.
#[derive(Debug)]
pub(crate) struct Watches {
    pub(crate) all: Vec<WatchState>,
}

/// The state of one watch, known from its events.
#[derive(Debug)]
pub(crate) struct WatchState {
    pub(crate) kind: Kind,
    pub(crate) namespace: Option<Arc<str>>,
    /// True if the first listing of the registry must have the kind.
    is_awaited: bool,
    /// The number of the listing in progress, or else of the last one.
    pub(crate) listing: u32,
    /// True once a listing was read to its end.
    pub(crate) is_synced: bool,
    /// A sentence about the versions of the kind that the cluster has, if it has none that is read.
    pub(crate) absent: Option<Arc<str>>,
    pub(crate) failing: Option<(Arc<str>, Option<StatusCode>)>,
    /// True while a listing is in progress.
    is_listing: bool,
    /// The number of objects of the last listing that were left out because there are too many; 1 if only later objects were
    /// left out.
    pub(crate) too_many: usize,
}

impl WatchState {
    /// Returns true if a listing was read to its end, or if the cluster does not have the kind.
    fn is_read(&self) -> bool {
        self.is_synced || self.absent.is_some()
    }

    /// Returns true if the server does not let these credentials read the kind.
    fn is_forbidden(&self) -> bool {
        matches!(self.failing, Some((_, Some(StatusCode::FORBIDDEN | StatusCode::UNAUTHORIZED))))
    }

    /// Returns a line that says why the kind cannot be followed, if so.
    pub(crate) fn failure(&self) -> Option<String> {
        let (why, _) = self.failing.as_ref()?;
        let plural = self.kind.plural();
        Some(match &self.namespace {
            None => format!("{plural}: {why}"),
            Some(namespace) => format!("{plural} of namespace {namespace}: {why}"),
        })
    }
}

/// The treatment of failures that may pass, such as an overloaded server, of kinds that are not needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failures {
    /// The kind is awaited.
    Await,
    /// The index is used without the kind.
    Accept,
}

impl Watches {
    /// Makes the state of watches that have not begun. If the spec does not name the network of the cluster, a label of a
    /// namespace does, so that the namespaces must be read first.
    pub(super) fn new(kinds: Vec<(Kind, Option<Arc<str>>)>, spec: &KubernetesSpec) -> Self {
        let names_network = |kind: Kind| kind == Kind::Namespace && spec.network.is_none();
        let state = |(kind, namespace): (Kind, _)| WatchState {
            kind,
            namespace,
            is_awaited: kind.facts().is_needed || names_network(kind),
            listing: 0,
            is_synced: false,
            absent: None,
            failing: None,
            is_listing: false,
            too_many: 0,
        };
        Self { all: kinds.into_iter().map(state).collect() }
    }

    /// Begins a listing.
    pub(super) fn begin(&mut self, watch: WatchId) {
        let state = &mut self.all[watch];
        state.listing += 1;
        (state.is_listing, state.too_many) = (true, 0);
    }

    /// Ends a listing.
    pub(super) fn complete(&mut self, watch: WatchId) {
        let state = &mut self.all[watch];
        (state.is_listing, state.is_synced, state.absent, state.failing) = (false, true, None, None);
    }

    /// Ends a listing, because the cluster does not have the kind.
    pub(super) fn absent(&mut self, watch: WatchId, why: Arc<str>) {
        let state = &mut self.all[watch];
        (state.is_listing, state.absent, state.failing) = (false, Some(why), None);
    }

    /// Counts an object that is left out because there are too many.
    pub(super) fn leave_out(&mut self, watch: WatchId) {
        let state = &mut self.all[watch];
        // After a listing, several events may name the same object, which must not be counted several times. So only the first
        // event is counted, and only if the listing has left out nothing.
        if state.is_listing || state.too_many == 0 {
            state.too_many += 1;
        }
    }

    /// Returns the kinds of which objects were left out because there are too many.
    pub(crate) fn crowded(&self) -> impl Iterator<Item = Kind> {
        self.all.iter().filter(|watch| watch.too_many > 0).map(|watch| watch.kind)
    }

    /// Returns true if every watch was listed once. A kind that need not be awaited may fail instead: at once if the server
    /// forbids to read it, else only if such failures are accepted.
    pub(crate) fn is_ready(&self, failures: Failures) -> bool {
        self.all.iter().all(|watch| {
            let is_optional = !watch.is_awaited && watch.failing.is_some();
            watch.is_read() || (is_optional && (failures == Failures::Accept || watch.is_forbidden()))
        })
    }

    /// Returns the watches that have not read a kind that the watches in use have. They do not have a kind that their
    /// credentials may not read any more. They have nothing if a needed kind cannot be followed, since its objects become older
    /// and older.
    pub(crate) fn lacking<'i>(&'i self, in_use: &'i Self) -> impl Iterator<Item = &'i WatchState> {
        let is_followed = in_use.failures().is_empty();
        let has = move |used: &WatchState| {
            is_followed && used.is_synced && used.absent.is_none() && !used.is_forbidden()
        };
        // Both have the same watches, because the spec decides what is watched.
        let pairs = self.all.iter().zip(&in_use.all);
        pairs.filter(move |(own, used)| !own.is_read() && has(used)).map(|(own, _)| own)
    }

    /// Returns the extent to which the objects are known that may be parents of routes.
    pub(crate) fn known_gateways(&self) -> Known {
        let is_of_parents =
            |kind| matches!(kind, Kind::GatewayClass | Kind::ClassGateway | Kind::ListenerSet);
        let mut watches = self.all.iter().filter(|watch| is_of_parents(watch.kind));
        match watches.all(|watch| watch.is_read() && watch.too_many == 0) {
            true => Known::All,
            false => Known::Some,
        }
    }

    /// Returns a line for each kind whose failure holds back the first listing for a while, or without end.
    pub(crate) fn holding(&self) -> Vec<String> {
        let is_holding = |watch: &&WatchState| watch.is_awaited || !(watch.is_read() || watch.is_forbidden());
        self.all.iter().filter(is_holding).filter_map(WatchState::failure).collect()
    }

    /// Returns a line for each needed kind that cannot be followed.
    pub(crate) fn failures(&self) -> Vec<String> {
        let failing = self.all.iter().filter(|watch| watch.kind.facts().is_needed);
        failing.filter_map(WatchState::failure).collect()
    }
}
