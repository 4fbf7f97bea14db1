//! The limits of connections and CONNECT streams: a worker takes a [`Permit`] for each, or gets a [`LimitRefusal`] with its explanation
//! for the operator. If a permit needs the slot of another connection, [`super::eviction`] ends that connection.

use std::cell::RefCell;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;

use isthmus_model::reason::Reason;
use isthmus_model::record::ConnectionRecord;
use isthmus_net::admission::bandwidth::Bandwidths;
use isthmus_net::admission::peers::{PeerLimit, Peers, Seat};
use isthmus_net::admission::refusals::{FullLimit, Refusals};
use isthmus_net::admission::services::{Handles, Place, Services};
use isthmus_net::admission::{Admission, Holder, Limit, Released, Verdict};
use isthmus_settings::peer::PeerLimits;

/// The counts of all workers under the limits.
pub(crate) struct Limits {
    /// The admission counts of connections and CONNECT streams.
    pub(crate) admission: Admission,
    /// The counts of connections and CONNECT streams to each service.
    pub(crate) services: Services,
    /// The counts of connections and CONNECT streams of each peer's callers.
    pub(crate) peers: Peers,
    /// The bandwidth of each service and of each peer's callers.
    pub(crate) bandwidths: Bandwidths,
    /// The limits that have refused connections lately.
    pub(crate) refusals: Refusals,
}

/// The permits of one worker.
pub(crate) struct Permits {
    limits: Arc<Limits>,
    /// The handles to the connection counts of services.
    services: Handles,
    /// Holders that have no connection, but whose allowance of new connections is not full yet. A holder is removed once its
    /// allowance is full.
    remembered: RefCell<Vec<Holder>>,
}

/// The slots that a connection occupies under the limits. Dropping this value releases them.
pub(crate) struct Permit {
    permits: Rc<Permits>,
    /// The [holder](isthmus_net::admission) that the admission slot is counted for; `None` once another worker has the slot.
    holder: Option<Holder>,
    /// The slot of the service, if connections to it are limited.
    service: Option<Place>,
    /// The slot of the caller's peer, if the caller belongs to a peer.
    peer: Option<Seat>,
}

/// A refusal by a limit.
#[derive(Debug)]
pub(crate) struct LimitRefusal {
    /// The reason of the refused connection.
    pub(crate) reason: Reason,
    /// The limit, if operators should know that it is reached; `None` for a limit of one source or peer, which exists to refuse.
    pub(crate) limit: Option<FullLimit>,
    /// The explanation for the operator; `None` if the limit has been removed meanwhile.
    pub(crate) detail: Option<Box<str>>,
}

impl LimitRefusal {
    /// Creates a refusal with an explanation.
    pub(crate) fn new(reason: Reason, limit: Option<FullLimit>, detail: impl Into<Box<str>>) -> Self {
        Self { reason, limit, detail: Some(detail.into()) }
    }
}

impl Permits {
    /// Creates the permits of a worker that has given none.
    pub(crate) fn new(limits: Arc<Limits>) -> Rc<Self> {
        Rc::new(Self { limits, services: Handles::default(), remembered: RefCell::default() })
    }

    /// Takes an admission slot for a connection from this source. If the slot was taken from another holder, returns that holder
    /// too; the caller must at once end one of its connections.
    pub(crate) fn admit(
        self: &Rc<Self>,
        holder: Holder,
        source: IpAddr,
    ) -> Result<(Permit, Option<Holder>), LimitRefusal> {
        let loser = self.loser(self.limits.admission.admit(&holder), source)?;
        Ok((self.adopt(Some(holder)), loser))
    }

    /// Creates the permit of a connection for which another worker has taken the slot.
    pub(crate) fn adopt(self: &Rc<Self>, holder: Option<Holder>) -> Permit {
        Permit { permits: self.clone(), holder, service: None, peer: None }
    }

    /// Counts a connection that is already open for a holder, whatever the limits.
    pub(crate) fn count(self: &Rc<Self>, holder: Holder) -> Permit {
        self.limits.admission.count_open(&holder);
        self.adopt(Some(holder))
    }

    /// Returns the holder that loses its slot by a verdict, if any, or the refusal.
    fn loser(&self, verdict: Verdict, source: IpAddr) -> Result<Option<Holder>, LimitRefusal> {
        match verdict {
            Verdict::Admit => Ok(None),
            Verdict::AdmitAndTakeBack(loser) => Ok(Some(loser)),
            Verdict::Refuse(limit) => Err(self.refused(limit, source)),
        }
    }

    /// Returns the refusal of a connection from this source by a limit.
    pub(crate) fn refused(&self, limit: Limit, source: IpAddr) -> LimitRefusal {
        let all = self.limits.admission.limit();
        let limits = self.limits.admission.source_limits();
        let source = limits.prefix.text(source);
        let detail = match limit {
            Limit::All => {
                Some(format!("the gateway already has {all} connections, its limit (limits.connections)"))
            }
            Limit::SourceConnections => limits.connections.map(|most| {
                format!("{source} already has {most} connections, its limit (limits.perSource.connections)")
            }),
            Limit::SourceRate => limits.new_per_second.map(|most| {
                format!(
                    "{source} opened more than {most} connections in a second (limits.perSource.newPerSecond)"
                )
            }),
            Limit::SourceHellos => limits.pending_hellos.map(|most| {
                format!(
                    "{source} already has {most} incomplete hellos, its limit (limits.perSource.pendingHellos)"
                )
            }),
        };
        let full = (limit == Limit::All).then_some(FullLimit::Connections);
        LimitRefusal { reason: limit.reason(), limit: full, detail: detail.map(Into::into) }
    }

    /// Forgets sources without connections whose allowance of new connections is full, and services without connections.
    pub(crate) fn forget_unused(&self) {
        self.remembered.borrow_mut().retain(|holder| !self.limits.admission.forget(holder));
        self.services.sweep(&self.limits.services);
    }
}

impl Permit {
    /// Returns the holder that the admission slot is counted for.
    pub(crate) fn holder(&self) -> Option<&Holder> {
        self.holder.as_ref()
    }

    /// Keeps the admission slot for another worker, and returns its holder.
    pub(crate) fn hand_over(mut self) -> Option<Holder> {
        self.holder.take()
    }

    /// Exchanges the admission slot of [`Holder::Unannounced`] for a slot of the source that the connection has announced. Returns
    /// the holder whose connection must be ended, as [`Permits::admit`]. A refused connection keeps its old slot.
    pub(crate) fn announce(&mut self, source: IpAddr) -> Result<Option<Holder>, LimitRefusal> {
        let admission = &self.permits.limits.admission;
        let holder = admission.source(source);
        let loser = self.permits.loser(admission.exchange(&holder), source)?;
        self.holder = Some(holder);
        Ok(loser)
    }

    /// Takes the slots of a connection whose name matched a rule: one of the caller's peer, whose limits are `of_peer`, and one of
    /// the service, if connections to it are limited.
    pub(crate) fn reach(
        &mut self,
        record: &ConnectionRecord,
        of_peer: Option<PeerLimits>,
    ) -> Result<(), LimitRefusal> {
        let Limits { services, peers, .. } = &*self.permits.limits;
        if let Some((name, limits)) = record.peer.as_ref().zip(of_peer) {
            let PeerLimits { connections, new_per_second, .. } = limits;
            let seat = peers.admit(name, connections, new_per_second).map_err(|limit| {
                let text = match limit {
                    PeerLimit::Connections => format!(
                        "the callers of the peer {name} already have {connections} connections, their limit \
                         (peers[].limits.connections)"
                    ),
                    PeerLimit::Rate => format!(
                        "the callers of the peer {name} opened more than {new_per_second} connections in a second \
                         (peers[].limits.newPerSecond)"
                    ),
                };
                LimitRefusal::new(Reason::LimitSource, None, text)
            })?;
            self.peer = Some(seat);
        }
        if let Some(most) = services.limit()
            && let Some(key) = record.limit_key()
        {
            let place = self.permits.services.admit(services, &key).ok_or_else(|| {
                let text = format!(
                    "{key} already has {most} connections, its limit (limits.perService.connections)"
                );
                LimitRefusal::new(Reason::LimitService, Some(FullLimit::Service(key)), text)
            })?;
            self.service = Some(place);
        }
        Ok(())
    }

    /// Counts an open connection for the peer of its caller, if the caller belongs to one.
    pub(crate) fn count_for_peer(&mut self, record: &ConnectionRecord) {
        self.peer = record.peer.as_ref().map(|peer| self.permits.limits.peers.count(peer));
    }

    /// Counts an open connection for its service, unless it is counted already. Called after a new config, which may have added
    /// a limit for each service.
    pub(crate) fn count_for_service(&mut self, record: &ConnectionRecord) {
        let services = &self.permits.limits.services;
        if services.limit().is_some()
            && self.service.is_none()
            && let Some(key) = record.limit_key()
        {
            self.service = Some(self.permits.services.count(services, &key));
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let Some(holder) = self.holder.take() else { return };
        if self.permits.limits.admission.release(&holder) == Released::Remembered {
            self.permits.remembered.borrow_mut().push(holder);
        }
    }
}
