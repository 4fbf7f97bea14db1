//! Connections that move between two processes of the gateway (`docs/upgrade.md, "Steps"`). In the old process, a relay stops at a safe point and
//! offers its sockets, its record and the bytes that it holds as a [`Parcel`]. In the new process, a task with the same sockets
//! waits. Neither moves a byte until [`settle`] says which of the two goes on; the other one drops its descriptors.
//!
//! ```text
//!  old:  relay ──Ordered──▶ Parked ──▶ Gone               new:  Parked ──▶ Here ──▶ relay
//!          ▲                   └──▶ Kept ──▶ relay                 └──▶ Gone
//! ```
//!
//! HBONE connections are not movable, since TLS and HTTP/2 have state in this process. A connection without an endpoint is parked
//! once it has one.

use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::connect::Connected;
use super::core::{Core, Registration};
use super::entry::{Carried, ConnectionFacts, Entry, Transit};
use super::parcel::{Parcel, Place};
use super::readmission::is_still_admitted;
use super::relay::{self, Direction, resume};
use super::retire;
use super::shared::Parked;
use super::upstreams::InFlight;
use isthmus_decisions::decision::Permit;
use isthmus_model::endpoint::Encapsulation;
use isthmus_model::reason::Reason;
use isthmus_model::record::ConnectionProtocol;
use isthmus_net::socket::spread_keep_alive;
use isthmus_settings::export_tls::ExportTls;
use isthmus_snapshot::candidates::EndpointKey;
use isthmus_upgrade::record::{self, Record};

/// The number of times that the tasks of connections run before those that have not stopped are left for later.
const TURNS: usize = 4;

/// Stops at most `most` relayed connections at a safe point, and sends them to `answer`.
pub(crate) async fn park(core: Rc<Core>, most: usize, answer: oneshot::Sender<Parked>) {
    if most == 0 {
        return keep_all(&core, answer);
    }
    let wanted = most.saturating_sub(core.departures.parcels.borrow().len());
    let chosen: Vec<Rc<Entry>> = core
        .connections
        .table
        .borrow()
        .iter()
        .map(|(_, entry)| entry)
        .filter(|entry| is_movable(entry) && matches!(entry.transit(), Transit::Here | Transit::Ordered))
        .take(wanted)
        .cloned()
        .collect();
    // A connection that was ordered before is woken too: it waits for an endpoint's first byte, or for its time to be over.
    chosen.iter().for_each(|entry| entry.set_transit(Transit::Ordered));
    for _ in 0..TURNS {
        if chosen.iter().all(|entry| entry.transit() != Transit::Ordered) {
            break;
        }
        tokio::task::yield_now().await;
    }
    let mut parked = Parked::default();
    let waiting = core.departures.parcels.borrow().len();
    parked.parcels = core.departures.parcels.borrow_mut().split_off(waiting.saturating_sub(most));
    if parked.parcels.len() < most {
        for (_, entry) in core.connections.table.borrow().iter() {
            match entry.transit() {
                Transit::Here | Transit::Ordered if may_become_movable(entry) => parked.later += 1,
                Transit::Here | Transit::Ordered | Transit::Kept => parked.left += 1,
                Transit::Parked | Transit::Gone => {}
            }
        }
    }
    if let Err(parked) = answer.send(parked) {
        // The upgrade has ended.
        settle(&core, &parked.parcels.iter().map(|parcel| parcel.place).collect::<Vec<_>>(), Transit::Kept);
    }
}

/// Goes on with all connections that were to be moved, because there is no process that takes them.
fn keep_all(core: &Core, answer: oneshot::Sender<Parked>) {
    let parcels = core.departures.parcels.take();
    settle(core, &parcels.iter().map(|parcel| parcel.place).collect::<Vec<_>>(), Transit::Kept);
    let mut parked = Parked::default();
    for (_, entry) in core.connections.table.borrow().iter() {
        if entry.transit() == Transit::Ordered {
            entry.set_transit(Transit::Kept);
        }
        parked.left += 1;
    }
    // The caller may have stopped waiting.
    let _ = answer.send(parked);
}

/// Returns true if the connection is relayed and can be moved. One that is ordered to end ends here.
fn is_movable(entry: &Entry) -> bool {
    may_become_movable(entry) && entry.record.borrow().connect.is_some()
}

fn may_become_movable(entry: &Entry) -> bool {
    let record = entry.record.borrow();
    record.protocol != ConnectionProtocol::Hbone && record.stream.is_none() && !entry.is_cut()
}

/// Says which process goes on with parked connections: this one ([`Transit::Here`], or [`Transit::Kept`] if it does not offer them
/// again), or the other one ([`Transit::Gone`]).
pub(crate) fn settle(core: &Core, places: &[Place], transit: Transit) {
    for place in places {
        let entry = core.connections.at(place.key);
        if let Some(entry) =
            entry.filter(|entry| entry.id() == place.id && entry.transit() == Transit::Parked)
        {
            entry.set_transit(transit);
        }
    }
}

/// Offers a connection that has stopped to the other process. If that fails, this process goes on with it.
pub(crate) fn offer(
    core: &Core,
    entry: &Entry,
    sockets: [&TcpStream; 2],
    in_flight: &InFlight,
    parked: &relay::Parked,
) {
    core.report_bytes(entry);
    let copies = sockets.map(|socket| socket.as_fd().try_clone_to_owned());
    let record = record_of(core, entry, in_flight, parked);
    match (copies, record) {
        ([Ok(client), Ok(endpoint)], Some(record)) => {
            let place = Place { worker: core.numbers.index(), key: entry.key(), id: entry.id() };
            let [up, down] = [&parked.up, &parked.down].map(|direction| direction.rest().into());
            entry.set_transit(Transit::Parked);
            core.departures.parcels.borrow_mut().push(Parcel { place, record, client, endpoint, up, down });
        }
        ([Err(error), _] | [_, Err(error)], _) => {
            tracing::warn!(id = entry.id(), %error, "a connection cannot be handed over, and ends in this process");
            entry.set_transit(Transit::Kept);
        }
        (_, None) => entry.set_transit(Transit::Kept),
    }
}

/// Waits until it is known which process goes on with a stopped connection, and relays if it is this one.
pub(crate) async fn go_on(
    registration: Registration,
    client: TcpStream,
    connected: Connected,
    mut parked: relay::Parked,
) {
    let (core, entry) = (&registration.core, &registration.entry);
    loop {
        if !entry.stays_here().await {
            return core.finish_handed_over(entry);
        }
        match resume(core, entry, &client, &connected, parked).await {
            relay::End::Parked(again) => {
                offer(core, entry, [&client, &connected.socket], &connected.in_flight, &again);
                parked = *again;
            }
            relay::End::Closed(reason) | relay::End::NotTaken(reason, _) => {
                return core.finish(entry, reason);
            }
        }
    }
}

/// Returns the record of a connection; `None` if it cannot be moved.
fn record_of(core: &Core, entry: &Entry, in_flight: &InFlight, parked: &relay::Parked) -> Option<Record> {
    let Carried { accepted, record, facts, moved, standstill, retirement } = entry.carried();
    // The caller's identity, that of an own dial and the PROXY header concern connections that are not moved, or their begin.
    let ConnectionFacts { admitted_by, caller: _, held: _, own_dial: _, destination: _, header: _ } =
        &*facts.borrow();
    let permit = match admitted_by.as_ref()? {
        Permit::Route => record::Permit::Route,
        Permit::GatewayRoute => record::Permit::GatewayRoute,
        Permit::Export { hostname, port, tls } => record::Permit::Export {
            hostname: hostname.to_string(),
            port: *port,
            own: *tls == ExportTls::Own,
        },
        // Callers of a peer prove their identity by HBONE.
        // The other end of a carrier's stream is in this process, too.
        Permit::Peer(_) | Permit::Carried => return None,
    };
    let connection = record.borrow().clone();
    connection.endpoint?;
    let now = core.clock.now();
    let [owed_up, owed_down] = standstill.progress(now);
    let relay::Parked { up, down, taken, asked, failure } = parked;
    let key = in_flight.key();
    Some(Record {
        connection,
        permit,
        endpoint: record::Endpoint { group: key.group.to_string(), first: key.address },
        age: accepted.elapsed(),
        asked: asked.map(|asked| asked.elapsed()),
        idle: now.saturating_sub(moved),
        // The new process counts the age again. An end that was set because this process stops does not concern it.
        drained_in: core
            .departures
            .scheduled
            .borrow()
            .has(entry.id())
            .then(|| retirement.drained_in(now))
            .flatten(),
        up: up.carried(owed_up),
        down: down.carried(owed_down),
        answered: *taken,
        failure: failure.map(|reason| reason.text().to_owned()),
    })
}

/// Takes over a connection of another process, which waits for [`settle`]. Its slots under the limits are taken whatever the
/// limits, and it is admitted again as by a reload. On an error the connection stays in the other process.
pub(crate) fn take_over(core: &Rc<Core>, parcel: Parcel) -> Result<Place, String> {
    let Parcel { record, client, endpoint, up: held_up, down: held_down, place: _ } = parcel;
    let Record {
        connection,
        permit,
        endpoint: key,
        age,
        asked,
        idle,
        drained_in,
        up,
        down,
        answered,
        failure,
    } = record;
    let snapshot = core.mesh.shared_snapshot();
    let listener = snapshot
        .listener(&connection.listener)
        .ok_or_else(|| format!("the new config has no listener {:?}", connection.listener))?;
    let permit = match permit {
        record::Permit::Route => Permit::Route,
        record::Permit::GatewayRoute => Permit::GatewayRoute,
        record::Permit::Export { hostname, port, own } => {
            let tls = if own { ExportTls::Own } else { ExportTls::Mesh };
            Permit::Export { hostname: hostname.into(), port, tls }
        }
    };
    let id = connection.id;
    let [client, endpoint] = [client, endpoint].map(|socket| watched(socket, id));
    let (client, endpoint) = (client?, endpoint?);
    let source: IpAddr = connection.source.ip();
    let now = core.clock.now();
    let counts = core.local.listener(&listener.name);
    let mut entry = Entry::new(counts, connection, now);
    entry.accepted = ago(age);
    // The options for long connections are set again with the first turn.
    entry.opened.set(core.clock.ago(1));
    entry.moved.set(core.clock.ago(idle));
    entry.resume([up.ended, down.ended]);
    entry.standstill.resume(now, [&up, &down].map(|direction| direction.owed.as_ref()));
    entry.set_transit(Transit::Parked);
    {
        let mut facts = entry.facts.borrow_mut();
        facts.admitted_by = Some(permit);
        facts.destination = Some(core.local.destination(&entry.record.borrow()));
    }
    let mut slots = core.permits.count(core.shared.limits.admission.source(source));
    slots.count_for_service(&entry.record.borrow());
    slots.count_for_peer(&entry.record.borrow());
    entry.permit.replace(Some(slots));
    entry.listener.accepted();
    let tuning = snapshot.tuning_of(&key.group);
    let key = EndpointKey { group: key.group.into(), address: key.first };
    let upstreams = &core.shared.upstreams;
    let in_flight = upstreams.begin(upstreams.upstream_at(&key));
    let connected = Connected { socket: endpoint, in_flight, encapsulation: Encapsulation::None };
    let parked = relay::Parked {
        up: Direction::resumed(&up, held_up),
        down: Direction::resumed(&down, held_down),
        taken: answered,
        asked: asked.map(ago),
        failure: failure.and_then(|text| Reason::named(&text)),
    };
    if !is_still_admitted(&snapshot, &entry) {
        entry.cut(Reason::ConfigRemoved);
    }
    let entry = Rc::new(entry);
    let registration = core.register(entry.clone());
    retire::limit_age(core, &entry, tuning.and_then(|tuning| tuning.max_connection_age));
    retire::go_on(core, &entry, drained_in);
    core.scope.spawn(go_on(registration, client, connected, parked));
    Ok(Place { worker: core.numbers.index(), key: entry.key(), id })
}

fn watched(socket: OwnedFd, id: u64) -> Result<TcpStream, String> {
    // This process does not examine a connection that stays silent. If the kernel refuses, the usual schedule holds.
    let _ = spread_keep_alive(&socket, id);
    let problem = |error: std::io::Error| format!("the new process cannot use the socket: {error}");
    TcpStream::from_std(socket.into()).map_err(problem)
}

/// Returns the time that was this long ago, or the present if the clock does not go back so far.
fn ago(time: Duration) -> Instant {
    let now = Instant::now();
    now.checked_sub(time).unwrap_or(now)
}
