//! The server that a ClientHello asks for, and the part of a connection's record that a hello fills in.

use isthmus_model::alpn::Protocols;
use isthmus_model::record::ConnectionRecord;
use isthmus_model::trace::TraceId;
use isthmus_net::handed::Purpose;
use isthmus_settings::listener::ListenerProtocol;
use isthmus_settings::peer::{CARRY_PROTOCOL, ENROL_PROTOCOL, LINK_PROTOCOL};
use isthmus_wire::client_hello::Hello;

/// Returns the purpose of a connection from a peer's gateway, recognised by its hello: no server name, and a single ALPN
/// protocol (`proto/isthmus/peer/README.md, "Connection"`). Returns `None` for other connections.
pub(crate) fn purpose_of(protocol: ListenerProtocol, hello: &Hello<'_>) -> Option<Purpose> {
    match only_protocol(protocol, hello)? {
        LINK_PROTOCOL => Some(Purpose::Link),
        ENROL_PROTOCOL => Some(Purpose::Enrolment),
        _ => None,
    }
}

/// Returns true if the hello is that of a carrier.
pub(crate) fn is_carrier(protocol: ListenerProtocol, hello: &Hello<'_>) -> bool {
    only_protocol(protocol, hello) == Some(CARRY_PROTOCOL)
}

/// Returns the single ALPN protocol of a hello without a server name, on a listener that takes connections of gateways.
fn only_protocol<'a>(protocol: ListenerProtocol, hello: &Hello<'a>) -> Option<&'a [u8]> {
    if !protocol.takes_hbone() || hello.server_name.is_some() {
        return None;
    }
    let mut offered = hello.alpn?.iter();
    let only = offered.next()?;
    offered.next().is_none().then_some(only)
}

/// Returns true if the hello is that of an HBONE connection. On a listener for both protocols, that is a hello without a
/// server name that offers `h2` alone (`config/REFERENCE.md, "listener"`).
pub(crate) fn is_hbone(protocol: ListenerProtocol, hello: &Hello<'_>) -> bool {
    match protocol {
        ListenerProtocol::Sni | ListenerProtocol::Tcp => false,
        ListenerProtocol::Hbone => true,
        ListenerProtocol::Auto => {
            let mut offered = hello.alpn.unwrap_or(Protocols::NONE).iter();
            hello.server_name.is_none() && offered.next() == Some(b"h2") && offered.next().is_none()
        }
    }
}

/// Records the requested names as received, and the trace that begins with the hello.
pub(crate) fn note_hello(record: &mut ConnectionRecord, hello: &Hello<'_>) {
    record.sni = hello.server_name.map(Into::into);
    record.alpn = hello.alpn.map(|offered| {
        let mut joined = Vec::with_capacity(offered.joined_length());
        offered.join_into(&mut joined);
        joined.into()
    });
    record.hello_trace = TraceId::of_hello(hello.random);
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

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
