//! The admission of connections and CONNECT streams. A connection is admitted by its addresses before a byte is read
//! ([`admit_accepted`]), and by what it asks for ([`admit()`]). There is one admission for all protocols: the snapshot decides, and
//! what it admits takes its slots under the limits.

use isthmus_decisions::admit;
use isthmus_decisions::admit::{admit_proxy, admit_source};
use isthmus_decisions::decision::{Admission, AdmissionRequest, Refusal, Requested, RouteMatch};
use isthmus_decisions::missing::missing_for;
use isthmus_decisions::view::onward::FarGateways;
use isthmus_model::alpn::Protocols;
use isthmus_model::identity::Identity;
use isthmus_model::reason::Reason;
use isthmus_model::record::ConnectionRecord;
use isthmus_model::service::CallerKind;
use isthmus_settings::listener::{Listener, ProxyProtocol};
use isthmus_snapshot::Snapshot;

use super::attempts::Attempts;
use super::core::Core;
use super::entry::Entry;

/// Returns the listener as configured in the snapshot. If the listener is not configured any more, it drains, and `listener`
/// itself is returned.
pub(crate) fn newest<'a>(snapshot: &'a Snapshot, listener: &'a Listener) -> &'a Listener {
    let listeners = &snapshot.policy.listeners;
    let same_bind = || listeners.iter().find(|other| other.bind == listener.bind);
    let named = listeners.iter().find(|other| other.name == listener.name);
    named.or_else(same_bind).map_or(listener, |found| &**found)
}

/// Decides on a connection before a byte is read, by the client's address, or by the proxy's address where a PROXY header
/// is required.
pub(crate) fn admit_accepted(listener: &Listener, entry: &Entry) -> Result<(), Reason> {
    admit_proxy(listener, entry.peer().ip()).inspect_err(|_| {
        let text = format!("the address {} is not in the listener's proxyProtocol.from", entry.peer().ip());
        entry.explain(text);
    })?;
    // Where a PROXY header is required, the source is checked after the header is read.
    let is_known = listener.proxy_protocol == ProxyProtocol::Forbid || entry.proxy().is_some();
    if is_known { admit_source(listener, entry.source().ip()) } else { Ok(()) }
}

/// Returns an error if the listener's `from` does not contain the source, or its `proxyProtocol.from` does not contain the
/// proxy that announced the source. A connection that was accepted while `proxyProtocol` had another mode is checked by its
/// source alone.
pub(crate) fn admit_caller(listener: &Listener, entry: &Entry) -> Result<(), Reason> {
    if let Some(proxy) = entry.proxy() {
        admit_proxy(listener, proxy.ip())?;
    }
    admit_source(listener, entry.source().ip())
}

/// The name or address that a client asks for, and what it says of itself.
pub(crate) struct Asked<'a> {
    /// The listener that accepted the connection, as the snapshot has it.
    pub(crate) listener: &'a Listener,
    pub(crate) requested: Requested<'a>,
    /// The protocols that the client offers by ALPN; `None` if no hello is read.
    pub(crate) alpn: Option<Protocols<'a>>,
    /// The verified identity of the caller of a CONNECT stream.
    pub(crate) identity: Option<&'a Identity>,
    /// The kind of proxy that the caller of a CONNECT stream says it is.
    pub(crate) kind: CallerKind,
    /// True if the caller of a CONNECT stream is a gateway that passes a call on.
    pub(crate) is_passed_on: bool,
}

/// Decides on what a client asks for, records the answer, and takes the slots of an admitted connection or stream.
pub(crate) fn admit(
    core: &Core,
    snapshot: &Snapshot,
    entry: &Entry,
    asked: &Asked<'_>,
) -> Result<Attempts, Reason> {
    let Asked { listener, requested, alpn, identity, kind, is_passed_on } = *asked;
    let source = Some(entry.source().ip());
    let local = entry.record.borrow().local.map(|local| local.ip());
    let draw = Some(core.numbers.random());
    let far: Option<&dyn FarGateways> = Some(&core.mesh.far);
    let request = AdmissionRequest {
        listener,
        requested,
        source,
        alpn,
        identity,
        kind,
        local,
        draw,
        is_passed_on,
        far,
    };
    match admit::admit(snapshot, &request, &mut ()) {
        Ok(Admission { matched, candidates, clusters, permit, onward }) => {
            note_match(&mut entry.record.borrow_mut(), matched);
            entry.facts.borrow_mut().admitted_by = Some(permit);
            take_slots(core, snapshot, entry)?;
            let mut attempts = Attempts::new(core, candidates, clusters);
            attempts.onward = onward;
            Ok(attempts)
        }
        Err(refusal) => {
            let missing = || missing_for(snapshot, refusal.reason, requested).map(Into::into);
            let detail = unresolved(snapshot, &refusal).or_else(missing);
            let mut record = entry.record.borrow_mut();
            record.detail = detail;
            note_match(&mut record, refusal.matched);
            Err(refusal.reason)
        }
    }
}

/// Records the rule that the requested name matched.
fn note_match(record: &mut ConnectionRecord, matched: RouteMatch) {
    (record.route, record.peer) = (matched.rule, matched.peer);
    if let Some(service) = matched.service {
        record.service = Some(service.hostname);
        record.service_namespace = Some(service.namespace);
        record.port = service.port;
        record.subset = Some(service.subset);
    }
}

/// Takes the slots of a connection under the limits of its service and of its caller's peer.
fn take_slots(core: &Core, snapshot: &Snapshot, entry: &Entry) -> Result<(), Reason> {
    let taken = {
        let record = entry.record.borrow();
        let peer = record.peer.as_ref();
        let peer = peer.and_then(|name| snapshot.policy.peers.iter().find(|peer| peer.name == *name));
        match &mut *entry.permit.borrow_mut() {
            Some(permit) => permit.reach(&record, peer.map(|peer| peer.limits)),
            None => Ok(()),
        }
    };
    taken.map_err(|refused| core.refused(entry, refused))
}

/// Returns the detail for a route with endpoints whose host names have no address. Its first word is the code of the
/// problem in `status`.
fn unresolved(snapshot: &Snapshot, refusal: &Refusal) -> Option<Box<str>> {
    let key = refusal.matched.rule.as_ref().filter(|_| refusal.reason == Reason::NoEndpoints)?;
    let route = snapshot.routes().named(key).filter(|_| refusal.matched.service.is_none())?;
    let own = route.candidates.is_some();
    own.then(|| "name_unresolved: none of the host names of the route resolves to an address".into())
}
