//! The safe point of a relay, at which no byte is in a pipe: there it can stop, and go on later or in another process.

use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::Instant;

use super::waits::Waits;
use super::{Direction, End, Flow, Held, Relay, Way};
use crate::bandwidth;
use crate::connect::Connected;
use crate::core::Core;
use crate::entry::Entry;
use crate::examine::{self, Sides};
use isthmus_model::reason::Reason;
use isthmus_upgrade::record;

/// The age of a connection until which it is not parked while another endpoint may still be tried. Such a connection would lose
/// that possibility, because only this process knows the other endpoints.
const RETRIED_UNTIL: Duration = Duration::from_secs(1);

/// The state of a relay that has stopped at a safe point: no byte is in a pipe.
#[derive(Debug)]
pub(crate) struct Parked {
    pub(crate) up: Direction,
    pub(crate) down: Direction,
    /// True once the endpoint has sent its first byte.
    pub(crate) taken: bool,
    /// The time of the client's last byte or of the tick before it, if the endpoint has sent none since.
    pub(crate) asked: Option<Instant>,
    /// The fault of the endpoint by which the connection failed.
    pub(crate) failure: Option<Reason>,
}

impl Held {
    /// Returns the bytes as held; `None` if there are none.
    fn of(bytes: Box<[u8]>) -> Option<Box<Self>> {
        (!bytes.is_empty()).then(|| Box::new(Self { bytes, written: 0 }))
    }
}

impl Direction {
    /// Returns the bytes that wait for the sink.
    pub(crate) fn rest(&self) -> &[u8] {
        self.held.as_deref().map_or(&[], |held| &held.bytes[held.written..])
    }

    /// Returns the state of a direction at a safe point, for another process. The held bytes are [`rest`](Self::rest); the pipe is
    /// empty and stays here. The pattern names every field, so that a new one is carried or left here on purpose.
    pub(crate) fn carried(&self, owed: Option<record::Owed>) -> record::Direction {
        let Self { held: _, pipe: _, piped, splicing: _, small_splices: _, unreported: _, urgent, flow } =
            self;
        debug_assert_eq!(*piped, 0, "a safe point has no bytes in a pipe");
        let (read_out, ended) = (flow.is_read_out(), *flow == Flow::Ended);
        record::Direction { read_out, ended, urgent: *urgent, owed }
    }

    /// Creates the direction that another process has [carried](Self::carried) here, with the bytes that wait for the sink.
    pub(crate) fn resumed(carried: &record::Direction, held: Box<[u8]>) -> Self {
        let record::Direction { read_out, ended, urgent, owed: _ } = carried;
        let flow = match (*ended, *read_out) {
            (true, _) => Flow::Ended,
            (false, true) => Flow::ReadOut,
            (false, false) => Flow::Open,
        };
        Self { held: Held::of(held), urgent: *urgent, flow, ..Self::default() }
    }
}

/// Continues a relay that has stopped, in this process or in another one.
pub(crate) async fn resume(
    core: &Rc<Core>,
    entry: &Rc<Entry>,
    client: &TcpStream,
    connected: &Connected,
    parked: Parked,
) -> End {
    core.clock.resume(entry);
    bandwidth::begin(core, entry, Some(client), &connected.socket);
    let is_raw = entry.is_raw();
    if !parked.taken && !is_raw {
        core.shared.upstreams.asked(&connected.in_flight, None, Instant::now());
    }
    let Parked { up, down, taken, asked, failure } = parked;
    let mut relay = Relay {
        core,
        entry,
        client,
        connected,
        attempts: None,
        up,
        down,
        taken,
        lacks: 0,
        is_raw,
        waits: Waits::resumed(asked, &core.clock),
        failure,
        tuned: false,
    };
    let end = poll_fn(|context| relay.poll(context)).await;
    relay.settle();
    end
}

impl Relay<'_> {
    /// Returns true if another endpoint may be tried soon, should this one end the connection.
    pub(super) fn may_try_another(&self) -> bool {
        self.is_repeatable() && self.entry.accepted.elapsed() < RETRIED_UNTIL
    }

    /// Takes the state of the relay. On an error nothing is lost.
    pub(super) fn park(&mut self) -> io::Result<Box<Parked>> {
        for way in [Way::Up, Way::Down] {
            self.empty_pipe(way)?;
            self.release(way);
        }
        // Another process does not know the bounds. While memory is short, those of silent readers stay nevertheless.
        let sides = self.sides();
        let waiting = sides.waiting.map(|waits| waits && examine::is_short(self.core));
        examine::unbound(self.entry, &Sides { waiting, ..sides });
        if let Some(replay) = self.attempts.as_mut().and_then(|attempts| attempts.replay.take()) {
            debug_assert!(self.up.held.is_none(), "bytes are read once the hello is written");
            self.up.held = self.up.held.take().or_else(|| Held::of(replay.bytes[replay.sent..].into()));
        }
        Ok(Box::new(Parked {
            up: std::mem::take(&mut self.up),
            down: std::mem::take(&mut self.down),
            taken: self.taken,
            asked: self.waits.asked(),
            failure: self.failure,
        }))
    }

    /// Holds the bytes of a pipe as those of a read.
    fn empty_pipe(&mut self, way: Way) -> io::Result<()> {
        let direction = self.direction(way);
        let Some(pipe) = direction.pipe.as_ref().filter(|_| direction.piped > 0) else { return Ok(()) };
        debug_assert!(direction.held.is_none(), "a direction holds bytes in one place");
        let mut bytes = vec![0; direction.piped];
        let mut filled = 0;
        while filled < bytes.len() {
            match rustix::io::read(&pipe.read, &mut bytes[filled..])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => filled += count,
            }
        }
        direction.piped = 0;
        direction.held = Held::of(bytes.into());
        Ok(())
    }
}
