//! Reads the hello of a connection under its deadline, and asks for admission.

use std::net::IpAddr;
use std::ops::ControlFlow::{self, Break, Continue};
use std::rc::Rc;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::RecvFlags;
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::attempts::Replay;
use super::core::{Core, NO_SOURCE, admit_caller, newest};
use super::entry::Entry;
use super::eviction::announced;
use super::permits::Refused;
use isthmus_decisions::admit::admit;
use isthmus_decisions::decision::{Admission, AdmissionRequest, Refusal, Requested};
use isthmus_decisions::missing::missing_for;
use isthmus_model::alpn::Protocols;
use isthmus_model::mesh_name::PROBE_NAME;
use isthmus_model::reason::Reason;
use isthmus_model::record::{ConnectionProtocol, ConnectionRecord};
use isthmus_model::service::CallerKind;
use isthmus_model::trace::TraceId;
use isthmus_net::admission::refusals::FullLimit;
use isthmus_net::admission::{Holder, Limit};
use isthmus_net::handed::Purpose;
use isthmus_net::socket::original_destination;
use isthmus_settings::listener::{Listener, ListenerProtocol, ProxyProtocol};
use isthmus_settings::peer::{ENROL_PROTOCOL, LINK_PROTOCOL};
use isthmus_snapshot::Snapshot;
use isthmus_wire::client_hello::{self, CONTENT_HANDSHAKE, Hello, HelloFault, Scanner, Verdict, looks_like};
use isthmus_wire::proxy_protocol::read::{Header, HeaderFault, Verdict as HeaderVerdict};
use isthmus_wire::proxy_protocol::{self, Announced, begins_header};

/// The result of reading the first bytes.
pub(crate) enum Peeked {
    /// The client may connect; the bytes read so far, if there are any, go to the endpoint first.
    Admitted(Admission, Option<Replay>),
    /// The connection is HBONE; these are the bytes read so far.
    Hbone(Box<[u8]>),
    /// The connection is a peer's link or enrolment, which another part of the program serves. Contains the bytes read so far.
    Link(Purpose, Box<[u8]>),
    Refused(Reason),
    /// This gateway made the connection itself.
    Own,
    /// The client closed the connection before its first byte.
    Probe,
    /// The client is a gateway that probes this one by a hello with the name of probes.
    Greeted,
    /// The client closed the connection before its hello was complete.
    Gone,
}

/// Reads the hello and asks for admission, until the deadline of the listener's policy.
pub(crate) async fn peek(
    core: &Rc<Core>,
    entry: &Rc<Entry>,
    listener: &Arc<Listener>,
    client: &TcpStream,
) -> Peeked {
    if listener.protocol == ListenerProtocol::Tcp && listener.proxy_protocol == ProxyProtocol::Forbid {
        return admit_raw(core, entry, client, listener, &[]);
    }
    let mut peek = Peek {
        core,
        entry,
        listener,
        scanner: Scanner::new(listener.hello.bytes_max, listener.hello.records_max),
        awaits_header: listener.proxy_protocol != ProxyProtocol::Forbid,
        received: Vec::new(),
        waiting: None,
    };
    // The hello is read at once, without asking the poller, because it has usually arrived with the connection.
    if let Some(peeked) = peek.read(client) {
        return peeked;
    }
    // Boxed, so that the future is not part of the connection's own future while bytes are relayed.
    Box::pin(peek.wait(client)).await
}

/// Keeps a connection in the list of pending hellos, and counted among the incomplete hellos of its source, until this value is
/// dropped.
pub(crate) struct Waiting<'a> {
    core: &'a Core,
    entry: &'a Rc<Entry>,
    /// The source under which the connection is listed.
    source: IpAddr,
    /// The holder whose incomplete hellos are limited.
    counted: Option<Holder>,
}

impl<'a> Waiting<'a> {
    /// Adds a connection to the list. If its source has too many pending hellos, ends the connection of that source that has
    /// waited longest at this worker; if there is none, returns an error. If the list is full, ends a connection of the source
    /// with the most pending connections: the one that has waited longest.
    pub(crate) fn begin(core: &'a Core, entry: &'a Rc<Entry>) -> Result<Self, Reason> {
        let admission = &core.shared.limits.admission;
        let holder = entry.holder();
        let source = match &holder {
            Some(Holder::Source(source)) => *source,
            Some(Holder::Unannounced | Holder::Identity(_)) | None => NO_SOURCE,
        };
        let waiting =
            Self { core, entry, source, counted: holder.filter(|holder| admission.counts_hellos(holder)) };
        if let Some(holder) = &waiting.counted
            && !admission.begin_hello(holder)
        {
            let oldest = core.pending.borrow_mut().take_oldest_of(source);
            let gives_way = oldest.as_ref().unwrap_or(entry);
            let refused = core.permits.refused(Limit::SourceHellos, gives_way.source().ip());
            let reason = core.refused(gives_way, refused);
            oldest.ok_or(reason)?.cut(reason);
        }
        let cap = core.pending_cap();
        let given_way = core.pending.borrow_mut().insert(source, entry.id(), entry.clone(), cap);
        if let Some(given_way) = given_way {
            let text = "the gateway has reached its limit of incomplete hellos (limits.pendingHellos)";
            core.give_way(&given_way, Refused::new(Reason::LimitGlobal, Some(FullLimit::Hellos), text));
        }
        Ok(waiting)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(holder) = &self.counted {
            self.core.shared.limits.admission.end_hello(holder);
        }
        // The list may have dropped the connection to make room for another one.
        self.core.pending.borrow_mut().remove(self.source, self.entry.id());
    }
}

struct Peek<'a> {
    core: &'a Core,
    entry: &'a Rc<Entry>,
    listener: &'a Arc<Listener>,
    scanner: Scanner,
    /// True until the PROXY header that the listener requires is read.
    awaits_header: bool,
    /// The bytes of a header or hello that has arrived only in part.
    received: Vec<u8>,
    /// The place among the pending hellos, once the connection waits for bytes.
    waiting: Option<Waiting<'a>>,
}

impl<'a> Peek<'a> {
    async fn wait(mut self, client: &TcpStream) -> Peeked {
        match Waiting::begin(self.core, self.entry) {
            Ok(waiting) => self.waiting = Some(waiting),
            Err(reason) => return Peeked::Refused(reason),
        }
        let deadline = self.entry.accepted + self.listener.hello.timeout;
        loop {
            // An order to end and the deadline take priority over bytes: a client that sends slowly cannot delay them.
            tokio::select! {
                biased;
                reason = self.entry.cut_ordered() => return Peeked::Refused(reason),
                () = tokio::time::sleep_until(deadline) => return self.too_late(),
                ready = client.readable() => if ready.is_err() {
                    return Peeked::Refused(Reason::Internal);
                },
            }
            if let Some(peeked) = self.read(client) {
                return peeked;
            }
        }
    }

    /// Reads the bytes that have arrived. Returns `None` while the hello is not complete.
    fn read(&mut self, client: &TcpStream) -> Option<Peeked> {
        let mut scratch = self.core.scratch.borrow_mut();
        let scratch = &mut *scratch;
        let mut read =
            rustix::net::recv(client, &mut *scratch.bytes, RecvFlags::empty()).map(|(count, _)| count);
        if read == Err(Errno::INTR) {
            read = Err(Errno::AGAIN);
        }
        let emptied = match read {
            Ok(count) => count > 0 && count < scratch.bytes.len(),
            Err(error) => error == Errno::AGAIN,
        };
        if emptied {
            // Clears tokio's readiness without a system call that would only return `EAGAIN`: the poller is edge-triggered
            // and reports later bytes.
            let _ = client.try_io(Interest::READABLE, || Err::<(), _>(std::io::ErrorKind::WouldBlock.into()));
        }
        match read {
            Err(Errno::AGAIN) => return None,
            Ok(0) | Err(_) if self.received.is_empty() => {
                return Some(Peeked::Probe);
            }
            Ok(0) | Err(_) => return Some(Peeked::Gone),
            Ok(count) if self.received.is_empty() => {
                match self.judge(client, &scratch.bytes[..count], &mut scratch.hello) {
                    Continue(kept) => self.received.extend_from_slice(kept),
                    Break(peeked) => return Some(peeked),
                }
            }
            Ok(count) => {
                let mut received = std::mem::take(&mut self.received);
                received.extend_from_slice(&scratch.bytes[..count]);
                match self.judge(client, &received, &mut scratch.hello) {
                    Continue(kept) => {
                        let judged = received.len() - kept.len();
                        received.drain(..judged);
                        self.received = received;
                    }
                    Break(peeked) => return Some(peeked),
                }
            }
        }
        None
    }

    /// Evaluates the bytes received so far. If there is no result yet, returns the bytes to evaluate again together with
    /// later ones.
    fn judge<'b>(
        &mut self,
        client: &TcpStream,
        bytes: &'b [u8],
        scratch: &mut client_hello::Scratch,
    ) -> ControlFlow<Peeked, &'b [u8]> {
        let mut bytes = bytes;
        if self.awaits_header {
            match proxy_protocol::read::read(bytes) {
                HeaderVerdict::NeedMore => return Continue(bytes),
                HeaderVerdict::Refused(fault) => return Break(self.header_refused(client, fault, bytes)),
                HeaderVerdict::Whole { header, length } => {
                    self.awaits_header = false;
                    if let Err(reason) = self.announced(header) {
                        return Break(Peeked::Refused(reason));
                    }
                    bytes = &bytes[length..];
                }
            }
            if self.listener.protocol == ListenerProtocol::Tcp {
                return Break(admit_raw(self.core, self.entry, client, self.listener, bytes));
            }
            if bytes.is_empty() {
                return Continue(bytes);
            }
        }
        let verdict = self.scanner.scan(bytes, scratch);
        conclude(self.core, self.entry, client, self.listener, &verdict, bytes).map_or(Continue(bytes), Break)
    }

    /// Applies the limits to the announced source, as a listener without PROXY headers does to the source of an accepted
    /// connection.
    fn announced(&mut self, header: Header) -> Result<(), Reason> {
        let Self { core, entry, listener, .. } = *self;
        if !entry.is_unannounced() {
            // The limits were applied when the connection was accepted.
            return Ok(());
        }
        let was_listed = self.waiting.take().is_some();
        note_announced(entry, header);
        if entry.proxy().is_some() {
            admit_caller(newest(&core.snapshot(), listener), entry)?;
        }
        // A proxy that speaks for itself (LOCAL) is checked when its hello arrives. Usually no hello arrives, because the proxy
        // only checks the gateway's health.
        announced(core, entry)?;
        if was_listed {
            self.waiting = Some(Waiting::begin(core, entry)?);
        }
        Ok(())
    }

    fn header_refused(&self, client: &TcpStream, fault: HeaderFault, bytes: &[u8]) -> Peeked {
        if is_own(self.core, self.entry, client) {
            return Peeked::Own;
        }
        let like = match fault {
            HeaderFault::Missing if bytes.first() == Some(&CONTENT_HANDSHAKE) => Some("a TLS handshake"),
            HeaderFault::Missing => looks_like(bytes),
            HeaderFault::Malformed(_) | HeaderFault::TooLong(_) => None,
        };
        let like = like.map_or_else(String::new, |like| format!("; they look like {like}"));
        let text = format!("{fault}{like}");
        self.entry.explain(text);
        Peeked::Refused(Reason::ProxyProtocol)
    }

    fn too_late(&self) -> Peeked {
        if self.awaits_header {
            let text = "the PROXY header that the listener requires was still incomplete";
            self.entry.explain(text);
        }
        Peeked::Refused(Reason::HelloTimeout)
    }
}

/// Looks for a complete PROXY header among the bytes that have arrived, without consuming them. If there is one, returns the
/// holder of the source address in the header. This is called when too many connections
/// wait for their PROXY header already: a client whose header has arrived is then subject to the limits of its own address.
pub(crate) fn announced_at_once(core: &Core, entry: &Entry, client: &TcpStream) -> Option<Holder> {
    let mut scratch = core.scratch.borrow_mut();
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let (count, _) =
        rustix::net::recv(client, &mut scratch.bytes[..proxy_protocol::V2_BYTES_MAX], flags).ok()?;
    let HeaderVerdict::Whole { header, .. } = proxy_protocol::read::read(&scratch.bytes[..count]) else {
        return None;
    };
    note_announced(entry, header);
    Some(core.shared.limits.admission.source(entry.source().ip()))
}

fn note_announced(entry: &Entry, header: Header) {
    if let Header::Proxied(Announced { source, destination }) = header {
        entry.announce(source, destination);
    }
}

/// Returns true if this gateway made the connection itself.
fn is_own(core: &Core, entry: &Entry, client: &TcpStream) -> bool {
    // The connection is recognised by the addresses of its socket, because a PROXY header announces others. The host may have
    // translated the address that was dialled.
    let dialled = std::iter::once_with(|| original_destination(client)).flatten();
    let is_own =
        core.shared.own.is_own_dial(entry.peer(), entry.record.borrow().local.into_iter().chain(dialled));
    if is_own {
        entry.explain("this gateway connected to itself");
    }
    is_own
}

/// Decides on the hello. Returns `None` while it is not complete.
fn conclude(
    core: &Core,
    entry: &Entry,
    client: &TcpStream,
    listener: &Arc<Listener>,
    verdict: &Verdict<'_>,
    bytes: &[u8],
) -> Option<Peeked> {
    let hello = match verdict {
        Verdict::NeedMore => return None,
        Verdict::Whole(hello) => hello,
        Verdict::Refused(HelloFault::NotTls) if has_fallback(core, listener, bytes) => {
            return Some(admit_raw(core, entry, client, listener, bytes));
        }
        Verdict::Refused(fault) => {
            entry.record.borrow_mut().detail = fault_detail(fault, listener, bytes);
            return Some(Peeked::Refused(match fault {
                HelloFault::NotTls => Reason::NotTls,
                HelloFault::TooLarge => Reason::HelloTooLarge,
                HelloFault::Fragments => Reason::HelloFragments,
                HelloFault::Malformed(_) => Reason::BadHello,
            }));
        }
    };
    if hello.server_name.is_some_and(|name| name == PROBE_NAME.as_bytes()) {
        return Some(Peeked::Greeted);
    }
    let after = entry.accepted.elapsed();
    core.local.hello(after);
    entry.record.borrow_mut().hello = Some(after);
    if is_own(core, entry, client) {
        return Some(Peeked::Own);
    }
    // A reload may have narrowed the listener's `from` since the connection was accepted.
    let snapshot = core.snapshot();
    let listener = newest(&snapshot, listener);
    if let Err(reason) = admit_caller(listener, entry) {
        return Some(Peeked::Refused(reason));
    }
    if !snapshot.policy.peers.is_empty()
        && let Some(purpose) = purpose_of(listener.protocol, hello)
    {
        return Some(Peeked::Link(purpose, bytes.into()));
    }
    if is_hbone(listener.protocol, hello) {
        let mut offered = hello.alpn.unwrap_or(Protocols::NONE).iter();
        if offered.any(|name| name == b"h2") {
            return Some(Peeked::Hbone(bytes.into()));
        }
        note_hello(&mut entry.record.borrow_mut(), hello);
        let text = "the listener accepts only HBONE, but the hello does not offer the ALPN protocol h2";
        entry.explain(text);
        return Some(Peeked::Refused(Reason::AlpnRefused));
    }
    note_hello(&mut entry.record.borrow_mut(), hello);
    let alpn = Some(hello.alpn.unwrap_or(Protocols::NONE));
    Some(match ask(core, &snapshot, entry, listener, Requested::ServerName(hello.server_name), alpn) {
        Ok(admission) => {
            let replay = Replay { bytes: bytes.into(), sent: 0, repeatable: bytes.len() == hello.length };
            Peeked::Admitted(admission, Some(replay))
        }
        Err(reason) => Peeked::Refused(reason),
    })
}

/// Returns true if connections whose first bytes are these go to the fallback of the listener. A PROXY header that the listener
/// forbids does not: the endpoint might believe it.
fn has_fallback(core: &Core, listener: &Listener, bytes: &[u8]) -> bool {
    !begins_header(bytes) && core.snapshot().routes().has_raw(&listener.name)
}

/// Decides on a connection from which no hello is read. `bytes` are those that were read.
fn admit_raw(
    core: &Core,
    entry: &Entry,
    client: &TcpStream,
    listener: &Arc<Listener>,
    bytes: &[u8],
) -> Peeked {
    if is_own(core, entry, client) {
        return Peeked::Own;
    }
    entry.record.borrow_mut().protocol = ConnectionProtocol::Tcp;
    let snapshot = core.snapshot();
    let listener = newest(&snapshot, listener);
    if let Err(reason) = admit_caller(listener, entry) {
        return Peeked::Refused(reason);
    }
    match ask(core, &snapshot, entry, listener, Requested::Nothing, None) {
        Ok(admission) => {
            // The bytes may be a request, so they are sent to one endpoint only.
            let replay = Replay { bytes: bytes.into(), sent: 0, repeatable: false };
            Peeked::Admitted(admission, (!bytes.is_empty()).then_some(replay))
        }
        Err(reason) => Peeked::Refused(reason),
    }
}

/// Returns the detail for a route with endpoints whose host names have no address. Its first word is the code of the
/// problem in `status`.
fn unresolved(snapshot: &Snapshot, refusal: &Refusal) -> Option<Box<str>> {
    let key = refusal.matched.rule.as_ref().filter(|_| refusal.reason == Reason::NoEndpoints)?;
    let route = snapshot.routes().named(key).filter(|_| refusal.matched.service.is_none())?;
    let own = route.candidates.is_some();
    own.then(|| "name_unresolved: none of the host names of the route resolves to an address".into())
}

/// Records the requested names as received, and the trace that begins with the hello.
fn note_hello(record: &mut ConnectionRecord, hello: &Hello<'_>) {
    record.sni = hello.server_name.map(Into::into);
    record.alpn = hello.alpn.map(|offered| {
        let mut joined = Vec::with_capacity(offered.joined_length());
        offered.join_into(&mut joined);
        joined.into()
    });
    record.hello_trace = TraceId::of_hello(hello.random);
}

/// Returns the detail of a refused hello, if the reason alone is not specific enough.
fn fault_detail(fault: &HelloFault, listener: &Listener, bytes: &[u8]) -> Option<Box<str>> {
    let forbidden = listener.proxy_protocol == ProxyProtocol::Forbid && begins_header(bytes);
    let key = if forbidden { ", which the listener's proxyProtocol.mode forbids" } else { "" };
    match fault {
        HelloFault::NotTls => {
            looks_like(bytes).map(|like| format!("the first bytes look like {like}{key}").into())
        }
        HelloFault::Malformed(what) => Some((*what).into()),
        HelloFault::TooLarge | HelloFault::Fragments => None,
    }
}

/// Returns the purpose of a connection from a peer's gateway, recognised by its hello: no server name, and a single ALPN
/// protocol (`proto/isthmus/peer/README.md, "Connection"`). Returns `None` for other connections.
fn purpose_of(protocol: ListenerProtocol, hello: &Hello<'_>) -> Option<Purpose> {
    if !protocol.takes_hbone() || hello.server_name.is_some() {
        return None;
    }
    let mut offered = hello.alpn?.iter();
    let purpose = match offered.next()? {
        name if name == LINK_PROTOCOL => Purpose::Link,
        name if name == ENROL_PROTOCOL => Purpose::Enrolment,
        _ => return None,
    };
    offered.next().is_none().then_some(purpose)
}

/// Returns true if the hello is that of an HBONE connection. On a listener for both protocols, that is a hello without a
/// server name that offers `h2` alone (`config/REFERENCE.md, "listener"`).
fn is_hbone(protocol: ListenerProtocol, hello: &Hello<'_>) -> bool {
    match protocol {
        ListenerProtocol::Sni | ListenerProtocol::Tcp => false,
        ListenerProtocol::Hbone => true,
        ListenerProtocol::Auto => {
            let mut offered = hello.alpn.unwrap_or(Protocols::NONE).iter();
            hello.server_name.is_none() && offered.next() == Some(b"h2") && offered.next().is_none()
        }
    }
}

fn ask(
    core: &Core,
    snapshot: &Snapshot,
    entry: &Entry,
    listener: &Listener,
    requested: Requested<'_>,
    alpn: Option<Protocols<'_>>,
) -> Result<Admission, Reason> {
    let source = Some(entry.source().ip());
    let local = entry.record.borrow().local.map(|local| local.ip());
    let draw = Some(core.random());
    let kind = CallerKind::default();
    let question = AdmissionRequest { listener, requested, source, alpn, identity: None, kind, local, draw };
    let answer = admit(snapshot, &question, &mut ());
    if let Err(refusal) = &answer {
        let missing = || missing_for(snapshot, refusal.reason, question.requested).map(Into::into);
        entry.record.borrow_mut().detail = unresolved(snapshot, refusal).or_else(missing);
    }
    core.admitted(entry, answer)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use tokio::io::AsyncWriteExt;
    use tokio::time::{Instant, sleep};

    use super::*;
    use crate::testing::{on_paused_clock, pair};
    use isthmus_model::address::Bind;

    /// A byte now and then gives the client no more time.
    #[test]
    fn a_client_has_10_s_for_its_hello() {
        on_paused_clock(async |rig| {
            let (mut client, accepted) = pair().await;
            rig.core.scope.spawn(async move {
                for byte in [22, 3, 1, 0, 9] {
                    sleep(Duration::from_secs(3)).await;
                    client.write_all(&[byte]).await.expect("sent");
                }
            });
            let (entry, begun) = (rig.entry(ConnectionProtocol::Sni), Instant::now());
            let listener = Arc::new(Listener::sni("default".into(), Bind::Any { port: 1 }));
            let peeked = peek(&rig.core, &entry, &listener, &accepted).await;
            assert!(matches!(peeked, Peeked::Refused(Reason::HelloTimeout)));
            assert_eq!(begun.elapsed().as_secs(), 10);
        });
    }

    #[test]
    fn the_parts_are_those_of_the_hello() {
        let random: Vec<u8> = (0..32).collect();
        let entries = Protocols::entries_of([&b"h2"[..], b"istio,x"]);
        let alpn = Some(Protocols::from_entries(&entries));
        let noted = |hello: &Hello<'_>| {
            let mut record = ConnectionRecord::new(1, UNIX_EPOCH, "l".into(), ([10, 0, 0, 1], 4000).into());
            note_hello(&mut record, hello);
            record
        };
        for (server_name, alpn, joined) in [
            (Some(&b"a.test"[..]), alpn, Some(&b"h2,istio,x"[..])),
            (Some(b"a.test"), None, None),
            (None, alpn, Some(b"h2,istio,x")),
            (None, None, None),
        ] {
            let record = noted(&Hello { server_name, alpn, random: &random, length: 99 });
            assert_eq!((record.sni.as_deref(), record.alpn.as_deref()), (server_name, joined));
            assert_eq!(record.hello_trace, TraceId::of_hello(&random));
            assert_eq!(record.hello_trace.map(|trace| trace.0[0]), Some(16));
        }
        let zeroes = noted(&Hello { server_name: None, alpn: None, random: &[0; 32], length: 99 });
        assert_eq!(zeroes.hello_trace, None);
    }
}
