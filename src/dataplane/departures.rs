//! The connections of one worker that are to leave it: because it drains, a planned drain has scheduled their ends, or another process
//! takes them over.

use std::cell::{Cell, RefCell};

use super::parcel::Parcel;
use super::retirement::Scheduled;

/// The departures of one worker.
#[derive(Default)]
pub(crate) struct Departures {
    /// True if HBONE connections must end when their open streams have ended.
    pub(crate) is_draining: Cell<bool>,
    /// The tick from which the gateway, which stops, closes connections in shorter pauses; `None`: it does not stop.
    pub(crate) last_tries: Cell<Option<u32>>,
    /// The planned drains whose connections have times at which they end.
    pub(crate) scheduled: RefCell<Scheduled>,
    /// The connections that have stopped and wait to be handed over to another process.
    pub(crate) parcels: RefCell<Vec<Parcel>>,
}
