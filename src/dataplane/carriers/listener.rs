//! The listener that stands for the carriers which this gateway has opened to a peer: in rules, records and metrics. It has no socket, and
//! the config can name no listener so.

use isthmus_model::address::Bind;
use isthmus_settings::listener::{Listener, ListenerProtocol};
use isthmus_settings::peer::place_of;

/// Returns the listener of the carriers to a peer.
pub(crate) fn of_peer(peer: &str) -> Listener {
    let listener = Listener::sni(place_of(peer).into(), Bind::Any { port: 0 });
    Listener { protocol: ListenerProtocol::Hbone, ..listener }
}
