//! The parts of a hello that are kept for as long as its connection lives, in one allocation.

use isthmus_model::alpn::Protocols;
use isthmus_model::trace::TraceId;
use isthmus_wire::client_hello::Hello;

/// The length in bytes of the trace id with which a [`SeenHello`] begins. The id is all zeroes if there is no trace.
const TRACE: usize = 16;
/// The number of bytes before the server name: the trace id, the bits of the extensions, and the length of the server name.
const HEAD: usize = TRACE + 3;
/// The bits of the extensions that the hello contains.
const SERVER_NAME: u8 = 1;
const ALPN: u8 = 2;

/// The server name and protocols of a hello as received, and the id of the trace that begins with this hello.
#[derive(Debug)]
pub(crate) struct SeenHello(Box<[u8]>);

impl SeenHello {
    /// Copies the trace id, the server name and the protocols of a hello.
    pub(crate) fn new(hello: &Hello<'_>) -> Self {
        let name = hello.server_name.unwrap_or_default();
        let protocols = hello.alpn.unwrap_or(Protocols::NONE);
        let mut bytes = Vec::with_capacity(HEAD + name.len() + protocols.joined_length());
        bytes.extend(TraceId::of_hello(hello.random).map_or([0; TRACE], |trace| trace.0));
        let has = |is_there: bool, bit: u8| if is_there { bit } else { 0 };
        bytes.push(has(hello.server_name.is_some(), SERVER_NAME) | has(hello.alpn.is_some(), ALPN));
        // The extension encodes the length of the name in 16 bits (RFC 6066 §3).
        bytes.extend(u16::try_from(name.len()).unwrap_or(0).to_be_bytes());
        bytes.extend_from_slice(name);
        protocols.join_into(&mut bytes);
        Self(bytes.into())
    }

    /// Returns the server name; `None` without the extension.
    pub(crate) fn server_name(&self) -> Option<&[u8]> {
        self.has(SERVER_NAME).then(|| &self.0[HEAD..self.name_end()])
    }

    /// Returns the protocols, comma-separated; `None` without the extension.
    pub(crate) fn alpn(&self) -> Option<&[u8]> {
        self.has(ALPN).then(|| &self.0[self.name_end()..])
    }

    /// Returns the id of the trace that begins with the hello.
    pub(crate) fn trace(&self) -> Option<TraceId> {
        TraceId::of_hello(&self.0[..TRACE])
    }

    fn has(&self, bit: u8) -> bool {
        self.0[TRACE] & bit != 0
    }

    fn name_end(&self) -> usize {
        HEAD + usize::from(u16::from_be_bytes([self.0[TRACE + 1], self.0[TRACE + 2]]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_are_those_of_the_hello() {
        let random: Vec<u8> = (0..32).collect();
        let entries = Protocols::entries_of([&b"h2"[..], b"istio,x"]);
        let alpn = Some(Protocols::from_entries(&entries));
        for (server_name, alpn, joined) in [
            (Some(&b"a.test"[..]), alpn, Some(&b"h2,istio,x"[..])),
            (Some(b"a.test"), None, None),
            (None, alpn, Some(b"h2,istio,x")),
            (None, None, None),
        ] {
            let seen = SeenHello::new(&Hello { server_name, alpn, random: &random, length: 99 });
            assert_eq!((seen.server_name(), seen.alpn()), (server_name, joined));
            assert_eq!(seen.trace(), TraceId::of_hello(&random));
            assert_eq!(seen.trace().map(|trace| trace.0[0]), Some(16));
        }
        let zeroes = SeenHello::new(&Hello { server_name: None, alpn: None, random: &[0; 32], length: 99 });
        assert_eq!(zeroes.trace(), None);
        let name = vec![b'x'; 65_530];
        let long = SeenHello::new(&Hello { server_name: Some(&name), alpn, random: &random, length: 99 });
        assert_eq!((long.server_name(), long.alpn()), (Some(&*name), Some(&b"h2,istio,x"[..])));
    }
}
