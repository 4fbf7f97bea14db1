//! Reads the first bytes of an accepted connection under its deadline: the PROXY header, if the listener requires one, and the hello.

use std::net::IpAddr;
use std::ops::ControlFlow::{self, Break, Continue};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use rustix::net::RecvFlags;
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::admission::{admit_caller, newest};
use super::buffers::Scratch;
use super::connections::NO_SOURCE;
use super::core::{Core, Registration};
use super::entry::Entry;
use super::eviction::announced;
use super::permits::LimitRefusal;
use isthmus_model::mesh_name::PROBE_NAME;
use isthmus_model::reason::Reason;
use isthmus_net::admission::refusals::FullLimit;
use isthmus_net::admission::{Holder, Limit};
use isthmus_net::handed::Purpose;
use isthmus_net::socket::original_destination;
use isthmus_settings::listener::{Listener, ListenerProtocol, ProxyProtocol};
use isthmus_wire::client_hello;
use isthmus_wire::client_hello::{CONTENT_HANDSHAKE, Hello, HelloFault, Scanner, Verdict, looks_like};
use isthmus_wire::proxy_protocol::read::{Header, HeaderFault, Verdict as HeaderVerdict};
use isthmus_wire::proxy_protocol::{self, Announced, begins_header};

/// An accepted connection, from which no byte is read yet.
pub(crate) struct Accepted {
    /// The client's socket. It is closed before the permit is free.
    pub(crate) client: TcpStream,
    /// The listener of the policy at the time of the accept.
    pub(crate) listener: Arc<Listener>,
    /// The entry of the connection, which has a permit.
    pub(crate) registration: Registration,
}

impl Accepted {
    /// Returns the worker that serves the connection.
    pub(crate) fn core(&self) -> &Rc<Core> {
        &self.registration.core
    }

    /// Returns the entry of the connection.
    pub(crate) fn entry(&self) -> &Rc<Entry> {
        &self.registration.entry
    }

    /// Returns true if this gateway made the connection itself.
    pub(crate) fn is_own(&self) -> bool {
        let entry = self.entry();
        // The connection is recognised by the addresses of its socket, because a PROXY header announces others. The host may have
        // translated the address that was dialled.
        let dialled = std::iter::once_with(|| original_destination(&self.client)).flatten();
        let reached = entry.record.borrow().local.into_iter().chain(dialled);
        let is_own = self.core().shared.own.is_own_dial(entry.peer(), reached);
        if is_own {
            entry.explain("this gateway connected to itself");
        }
        is_own
    }
}

/// The first bytes of a connection.
pub(crate) struct Peeked<'b> {
    /// The hello, at the begin of the bytes; `None` if they are not read as one, on a listener of protocol `tcp` or for its fallback.
    pub(crate) hello: Option<Hello<'b>>,
    /// The bytes read so far.
    pub(crate) bytes: &'b [u8],
}

/// A connection that no endpoint serves.
pub(crate) enum Unserved {
    /// The connection is refused.
    Refused(Reason),
    /// This gateway made the connection itself.
    Own,
    /// The client closed the connection before its first byte.
    Probe,
    /// The client is a gateway that probes this one by a hello with the name of probes.
    Greeted,
    /// The client closed the connection before its hello was complete.
    Gone,
    /// The connection is HBONE; these are the bytes read so far.
    Hbone(Box<[u8]>),
    /// The connection is a peer's link or enrolment; these are the bytes read so far.
    Link(Purpose, Box<[u8]>),
    /// The connection is a carrier that a peer's gateway opens; these are the bytes read so far.
    Carrier(Box<[u8]>),
}

/// Reads the first bytes, until the deadline of the listener's policy, and returns the result of `decide` for them. `decide` gets them in
/// the worker's buffer, so that only the bytes that are needed later are copied; it must not use that buffer otherwise.
pub(crate) async fn peek<T>(
    accepted: &Accepted,
    decide: impl Fn(&Accepted, &Peeked<'_>) -> Result<T, Unserved>,
) -> Result<T, Unserved> {
    let listener = &accepted.listener;
    if listener.protocol == ListenerProtocol::Tcp && listener.proxy_protocol == ProxyProtocol::Forbid {
        return decide(accepted, &Peeked { hello: None, bytes: &[] });
    }
    let mut peek = Peek {
        accepted,
        scanner: Scanner::new(listener.hello.bytes_max, listener.hello.records_max),
        awaits_header: listener.proxy_protocol != ProxyProtocol::Forbid,
        received: Vec::new(),
        waiting: None,
    };
    // The hello is read at once, without asking the poller, because it has usually arrived with the connection.
    if let Some(decided) = peek.read(&decide) {
        return decided;
    }
    // Boxed, so that the future is not part of the connection's own future while bytes are relayed.
    Box::pin(peek.wait(decide)).await
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
            let oldest = core.connections.pending.borrow_mut().take_oldest_of(source);
            let gives_way = oldest.as_ref().unwrap_or(entry);
            let refused = core.permits.refused(Limit::SourceHellos, gives_way.source().ip());
            let reason = core.refused(gives_way, refused);
            oldest.ok_or(reason)?.cut(reason);
        }
        let cap = core.shared.pending_cap.load(Ordering::Relaxed);
        let given_way = core.connections.pending.borrow_mut().insert(source, entry.id(), entry.clone(), cap);
        if let Some(given_way) = given_way {
            let text = "the gateway has reached its limit of incomplete hellos (limits.pendingHellos)";
            core.give_way(&given_way, LimitRefusal::new(Reason::LimitGlobal, Some(FullLimit::Hellos), text));
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
        self.core.connections.pending.borrow_mut().remove(self.source, self.entry.id());
    }
}

struct Peek<'a> {
    accepted: &'a Accepted,
    scanner: Scanner,
    /// True until the PROXY header that the listener requires is read.
    awaits_header: bool,
    /// The bytes of a header or hello that has arrived only in part.
    received: Vec<u8>,
    /// The place among the pending hellos, once the connection waits for bytes.
    waiting: Option<Waiting<'a>>,
}

impl Peek<'_> {
    async fn wait<T>(
        mut self,
        decide: impl Fn(&Accepted, &Peeked<'_>) -> Result<T, Unserved>,
    ) -> Result<T, Unserved> {
        let Accepted { listener, client, .. } = self.accepted;
        let entry = self.accepted.entry();
        self.waiting = Some(Waiting::begin(self.accepted.core(), entry).map_err(Unserved::Refused)?);
        let deadline = entry.accepted + listener.hello.timeout;
        loop {
            // An order to end and the deadline take priority over bytes: a client that sends slowly cannot delay them.
            tokio::select! {
                biased;
                reason = entry.cut_ordered() => return Err(Unserved::Refused(reason)),
                () = tokio::time::sleep_until(deadline) => return Err(self.too_late()),
                ready = client.readable() => if ready.is_err() {
                    return Err(Unserved::Refused(Reason::Internal));
                },
            }
            if let Some(decided) = self.read(&decide) {
                return decided;
            }
        }
    }

    /// Reads the bytes that have arrived, and decides on them. Returns `None` while the hello is not complete.
    fn read<T>(
        &mut self,
        decide: impl Fn(&Accepted, &Peeked<'_>) -> Result<T, Unserved>,
    ) -> Option<Result<T, Unserved>> {
        let accepted = self.accepted;
        let client = &accepted.client;
        let mut scratch = accepted.core().buffers.scratch.borrow_mut();
        let Scratch { bytes: buffer, hello } = &mut *scratch;
        let mut read = rustix::net::recv(client, &mut **buffer, RecvFlags::empty()).map(|(count, _)| count);
        if read == Err(Errno::INTR) {
            read = Err(Errno::AGAIN);
        }
        let emptied = match read {
            Ok(count) => count > 0 && count < buffer.len(),
            Err(error) => error == Errno::AGAIN,
        };
        if emptied {
            // Clears tokio's readiness without a system call that would only return `EAGAIN`: the poller is edge-triggered
            // and reports later bytes.
            let _ = client.try_io(Interest::READABLE, || Err::<(), _>(std::io::ErrorKind::WouldBlock.into()));
        }
        let mut received = std::mem::take(&mut self.received);
        let is_first = received.is_empty();
        let count = match read {
            Err(Errno::AGAIN) => {
                self.received = received;
                return None;
            }
            Ok(0) | Err(_) if is_first => return Some(Err(Unserved::Probe)),
            Ok(0) | Err(_) => return Some(Err(Unserved::Gone)),
            Ok(count) => count,
        };
        if !is_first {
            received.extend_from_slice(&buffer[..count]);
        }
        let bytes = if is_first { &buffer[..count] } else { &received[..] };
        match self.judge(bytes, hello) {
            Break(peeked) => Some(peeked.and_then(|peeked| decide(accepted, &peeked))),
            Continue(kept) => {
                let judged = bytes.len() - kept.len();
                if is_first {
                    received.extend_from_slice(&buffer[judged..count]);
                } else {
                    received.drain(..judged);
                }
                self.received = received;
                None
            }
        }
    }

    /// Evaluates the bytes received so far. If there is no result yet, returns the bytes to evaluate again together with
    /// later ones.
    fn judge<'b>(
        &mut self,
        bytes: &'b [u8],
        scratch: &'b mut client_hello::Scratch,
    ) -> ControlFlow<Result<Peeked<'b>, Unserved>, &'b [u8]> {
        let mut bytes = bytes;
        if self.awaits_header {
            match proxy_protocol::read::read(bytes) {
                HeaderVerdict::NeedMore => return Continue(bytes),
                HeaderVerdict::Refused(fault) => return Break(Err(self.header_refused(fault, bytes))),
                HeaderVerdict::Whole { header, length } => {
                    self.awaits_header = false;
                    if let Err(reason) = self.announced(header) {
                        return Break(Err(Unserved::Refused(reason)));
                    }
                    bytes = &bytes[length..];
                }
            }
            if self.accepted.listener.protocol == ListenerProtocol::Tcp {
                return Break(Ok(Peeked { hello: None, bytes }));
            }
            if bytes.is_empty() {
                return Continue(bytes);
            }
        }
        match self.scanner.scan(bytes, scratch) {
            Verdict::NeedMore => Continue(bytes),
            Verdict::Whole(hello) => Break(self.whole(hello, bytes)),
            Verdict::Refused(HelloFault::NotTls) if self.has_fallback(bytes) => {
                Break(Ok(Peeked { hello: None, bytes }))
            }
            Verdict::Refused(fault) => Break(Err(self.hello_refused(fault, bytes))),
        }
    }

    /// Records the time of the complete hello, unless it is that of a probe.
    fn whole<'b>(&self, hello: Hello<'b>, bytes: &'b [u8]) -> Result<Peeked<'b>, Unserved> {
        if hello.server_name.is_some_and(|name| name == PROBE_NAME.as_bytes()) {
            return Err(Unserved::Greeted);
        }
        let entry = self.accepted.entry();
        let after = entry.accepted.elapsed();
        self.accepted.core().local.hello(after);
        entry.record.borrow_mut().hello = Some(after);
        Ok(Peeked { hello: Some(hello), bytes })
    }

    /// Returns true if connections whose first bytes are these go to the fallback of the listener. A PROXY header that the listener
    /// forbids does not: the endpoint might believe it.
    fn has_fallback(&self, bytes: &[u8]) -> bool {
        let Accepted { listener, .. } = self.accepted;
        !begins_header(bytes) && self.accepted.core().mesh.snapshot().routes().has_raw(&listener.name)
    }

    fn hello_refused(&self, fault: HelloFault, bytes: &[u8]) -> Unserved {
        self.accepted.entry().record.borrow_mut().detail =
            fault_detail(fault, &self.accepted.listener, bytes);
        Unserved::Refused(match fault {
            HelloFault::NotTls => Reason::NotTls,
            HelloFault::TooLarge => Reason::HelloTooLarge,
            HelloFault::Fragments => Reason::HelloFragments,
            HelloFault::Malformed(_) => Reason::BadHello,
        })
    }

    /// Applies the limits to the announced source, as a listener without PROXY headers does to the source of an accepted
    /// connection.
    fn announced(&mut self, header: Header) -> Result<(), Reason> {
        let (core, entry) = (self.accepted.core(), self.accepted.entry());
        if !entry.is_unannounced() {
            // The limits were applied when the connection was accepted.
            return Ok(());
        }
        let was_listed = self.waiting.take().is_some();
        note_announced(entry, header);
        if entry.proxy().is_some() {
            admit_caller(newest(&core.mesh.snapshot(), &self.accepted.listener), entry)?;
        }
        // A proxy that speaks for itself (LOCAL) is checked when its hello arrives. Usually no hello arrives, because the proxy
        // only checks the gateway's health.
        announced(core, entry)?;
        if was_listed {
            self.waiting = Some(Waiting::begin(core, entry)?);
        }
        Ok(())
    }

    fn header_refused(&self, fault: HeaderFault, bytes: &[u8]) -> Unserved {
        if self.accepted.is_own() {
            return Unserved::Own;
        }
        let like = match fault {
            HeaderFault::Missing if bytes.first() == Some(&CONTENT_HANDSHAKE) => Some("a TLS handshake"),
            HeaderFault::Missing => looks_like(bytes),
            HeaderFault::Malformed(_) | HeaderFault::TooLong(_) => None,
        };
        let like = like.map_or_else(String::new, |like| format!("; they look like {like}"));
        let text = format!("{fault}{like}");
        self.accepted.entry().explain(text);
        Unserved::Refused(Reason::ProxyProtocol)
    }

    fn too_late(&self) -> Unserved {
        if self.awaits_header {
            let text = "the PROXY header that the listener requires was still incomplete";
            self.accepted.entry().explain(text);
        }
        Unserved::Refused(Reason::HelloTimeout)
    }
}

/// Looks for a complete PROXY header among the bytes that have arrived, without consuming them. If there is one, returns the
/// holder of the source address in the header. This is called when too many connections
/// wait for their PROXY header already: a client whose header has arrived is then subject to the limits of its own address.
pub(crate) fn announced_at_once(core: &Core, entry: &Entry, client: &TcpStream) -> Option<Holder> {
    let mut scratch = core.buffers.scratch.borrow_mut();
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

/// Returns the detail of a refused hello, if the reason alone is not specific enough.
fn fault_detail(fault: HelloFault, listener: &Listener, bytes: &[u8]) -> Option<Box<str>> {
    let forbidden = listener.proxy_protocol == ProxyProtocol::Forbid && begins_header(bytes);
    let key = if forbidden { ", which the listener's proxyProtocol.mode forbids" } else { "" };
    match fault {
        HelloFault::NotTls => {
            looks_like(bytes).map(|like| format!("the first bytes look like {like}{key}").into())
        }
        HelloFault::Malformed(what) => Some(what.into()),
        HelloFault::TooLarge | HelloFault::Fragments => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::AsyncWriteExt;
    use tokio::time::{Instant, sleep};

    use super::*;
    use crate::testing::{on_paused_clock, pair};
    use isthmus_model::address::Bind;
    use isthmus_model::record::ConnectionProtocol;

    /// A byte now and then gives the client no more time.
    #[test]
    fn a_client_has_10_s_for_its_hello() {
        on_paused_clock(async |rig| {
            let (mut sender, client) = pair().await;
            rig.core.scope.spawn(async move {
                for byte in [22, 3, 1, 0, 9] {
                    sleep(Duration::from_secs(3)).await;
                    sender.write_all(&[byte]).await.expect("sent");
                }
            });
            let (entry, begun) = (rig.entry(ConnectionProtocol::Sni), Instant::now());
            let listener = Arc::new(Listener::sni("default".into(), Bind::Any { port: 1 }));
            let accepted = Accepted { registration: rig.core.register(entry), listener, client };
            let peeked = peek(&accepted, |_, _| Ok(())).await;
            assert!(matches!(peeked, Err(Unserved::Refused(Reason::HelloTimeout))));
            assert_eq!(begun.elapsed().as_secs(), 10);
        });
    }
}
