//! The listener that stands for the carriers which this gateway has opened to a peer: in rules, records and metrics. It has no socket, and
//! the config can name no listener so.

use isthmus_model::address::Bind;
use isthmus_settings::listener::{Listener, ListenerProtocol};
use isthmus_settings::peer::{is_place_of_peer, place_of};

/// Returns the listener of the carriers to a peer.
pub(super) fn of_peer(peer: &str) -> Listener {
    named(&place_of(peer))
}

/// Returns the listener of carriers with this name; `None` if it is the name of another listener.
pub(crate) fn of_name(name: &str) -> Option<Listener> {
    is_place_of_peer(name).then(|| named(name))
}

fn named(name: &str) -> Listener {
    Listener { protocol: ListenerProtocol::Hbone, ..Listener::sni(name.into(), Bind::Any { port: 0 }) }
}
