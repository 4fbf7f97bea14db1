//! Reads the SNI and ALPN of a TLS ClientHello (RFC 8446 §4.1.2) from the first bytes of a stream,
//! however they are cut into segments and records.
//!
//! There are two steps. The *record walk* is resumable: it gets the bytes received so far and reads each record header once
//! (RFC 8446 §5.1), until the handshake message is complete. Then the *extension walk* reads the message once. A message in
//! one record is read in place; a message in several records is first assembled in the worker's [`Scratch`]. A fault is
//! reported at the byte of the stream that shows it, and bytes are evaluated in order, so the verdict does not depend on
//! how the bytes were cut.

use isthmus_model::alert::Description;
use isthmus_model::alpn::Protocols;
use tls_parser::{TlsExtension, parse_tls_extension_alpn_content, parse_tls_extension_sni_content};

const RECORD_HEADER: usize = 5;
const HANDSHAKE_HEADER: usize = 4;
const RANDOM_BYTES: usize = 32;
/// The longest plaintext record in bytes (RFC 8446 §5.1).
const RECORD_BYTES_MAX: usize = 1 << 14;
const CONTENT_ALERT: u8 = 21;
const ALERT_FATAL: u8 = 2;
/// The type of a record that carries a part of the handshake (RFC 8446 §5.1).
pub const CONTENT_HANDSHAKE: u8 = 22;
const HANDSHAKE_CLIENT_HELLO: u8 = 1;
const EXTENSION_SERVER_NAME: u16 = 0;
const EXTENSION_ALPN: u16 = 16;
const NAME_TYPE_HOST: u8 = 0;

/// The result of scanning the bytes received so far.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict<'a> {
    /// The bytes are valid so far, and the hello is not complete.
    NeedMore,
    /// The hello is complete.
    Whole(Hello<'a>),
    /// The bytes are not a ClientHello that the gateway accepts.
    Refused(HelloFault),
}

/// The fields of a ClientHello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello<'a> {
    /// The host name as received; `None` if the extension is absent.
    pub server_name: Option<&'a [u8]>,
    /// The offered protocols; `None` if the extension is absent.
    pub alpn: Option<Protocols<'a>>,
    /// The client's random; 32 bytes.
    pub random: &'a [u8],
    /// The number of bytes from the start of the stream to the end of the hello, including record headers.
    pub length: usize,
}

/// The reason why a ClientHello is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HelloFault {
    /// The first bytes are not a TLS handshake record.
    #[error("the first bytes are not a TLS handshake record")]
    NotTls,
    /// The hello is longer than `bytes_max`, or a header announces a longer one.
    #[error("the hello is longer than allowed")]
    TooLarge,
    /// The hello came in more than `records_max` records.
    #[error("the hello spans more records than allowed")]
    Fragments,
    /// The hello is malformed or ambiguous; the text names the part.
    #[error("{0}")]
    Malformed(&'static str),
}

/// The first bytes of other protocols, with their names in messages.
const OTHER_PROTOCOLS: &[(&[u8], &str)] = &[
    (b"PROXY ", "a PROXY v1 header"),
    (b"\r\n\r\n\0\r\nQUIT\n", "a PROXY v2 header"),
    (b"PRI * HTTP/2.0", "HTTP/2 without TLS"),
    (b"HTTP/1.", "HTTP"),
    (b"GET ", "HTTP"),
    (b"HEAD ", "HTTP"),
    (b"POST ", "HTTP"),
    (b"PUT ", "HTTP"),
    (b"PATCH ", "HTTP"),
    (b"DELETE ", "HTTP"),
    (b"OPTIONS ", "HTTP"),
    (b"CONNECT ", "HTTP"),
    (b"SSH-", "SSH"),
    (b"\x00\x00\x00\x08\x04\xd2\x16\x2f", "a PostgreSQL SSLRequest"),
    (b"\x00\x00\x00\x08\x04\xd2\x16\x30", "a PostgreSQL GSSENCRequest"),
    (b"\x03\x00\x00", "RDP"),
    (b"\x30\x0c\x02\x01", "LDAP"),
    (b"\x30\x1d\x02\x01", "LDAP StartTLS"),
    (b"220 ", "SMTP or FTP"),
    (b"EHLO ", "SMTP"),
    (b"* OK", "IMAP"),
    (b"\x05", "SOCKS"),
    (b"\x15\x03", "a TLS alert"),
];

/// Returns the name of a known protocol other than TLS if the stream begins with its prefix.
pub fn looks_like(bytes: &[u8]) -> Option<&'static str> {
    OTHER_PROTOCOLS.iter().find(|(prefix, _)| bytes.starts_with(prefix)).map(|(_, name)| *name)
}

/// The meaning of the first bytes of a server's answer to a ClientHello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerAnswer {
    /// The handshake goes on, as far as the bytes show.
    Handshake,
    /// An alert ends it.
    Alert(Description),
    /// The bytes are not TLS.
    NotTls,
}

impl ServerAnswer {
    /// Reads the first bytes of an answer.
    pub fn of(bytes: &[u8]) -> Self {
        match bytes {
            // A warning does not end the handshake, except for close_notify.
            [CONTENT_ALERT, _, _, _, _, level, description, ..] => {
                let description = Description(*description);
                let is_end = *level == ALERT_FATAL || description == Description::CLOSE_NOTIFY;
                if is_end { Self::Alert(description) } else { Self::Handshake }
            }
            [] | [CONTENT_ALERT | CONTENT_HANDSHAKE, ..] => Self::Handshake,
            _ => Self::NotTls,
        }
    }

    /// Returns how many bytes the first record of an answer lacks, of which these are the first ones; of a record without a whole
    /// header, those of the header.
    pub fn lacks(bytes: &[u8]) -> u16 {
        let record = match bytes {
            [_, _, _, high, low, ..] => RECORD_HEADER + usize::from(u16::from_be_bytes([*high, *low])),
            _ => RECORD_HEADER,
        };
        u16::try_from(record.saturating_sub(bytes.len())).unwrap_or(u16::MAX)
    }
}

/// The buffers that the scanners of one worker share.
pub struct Scratch {
    /// A message assembled from several records.
    message: Vec<u8>,
    /// One bit per extension type, set if the type was seen; all bits are zero between calls.
    seen: Box<[u64; 1 << 10]>,
}

impl Scratch {
    /// Allocates the buffers.
    pub fn new() -> Self {
        Self { message: Vec::new(), seen: Box::new([0; 1 << 10]) }
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

/// The state of scanning the records of one stream for a ClientHello.
#[derive(Debug)]
pub struct Scanner {
    bytes_max: usize,
    records_max: usize,
    /// The offset in the stream at which the next record header begins.
    next: usize,
    /// The number of record headers read so far.
    records: usize,
    /// The number of bytes of the handshake message in the records before `next`.
    gathered: usize,
    /// The handshake header, as far as it was received.
    header: [u8; HANDSHAKE_HEADER],
}

impl Scanner {
    /// Creates a scanner that reads at most `bytes_max` bytes of the stream and `records_max` records.
    pub fn new(bytes_max: usize, records_max: usize) -> Self {
        Self { bytes_max, records_max, next: 0, records: 0, gathered: 0, header: [0; HANDSHAKE_HEADER] }
    }

    /// Scans the bytes received so far. `received` is the whole stream from its first byte; it may only grow between calls.
    pub fn scan<'a>(&mut self, received: &'a [u8], scratch: &'a mut Scratch) -> Verdict<'a> {
        let length = match self.walk_records(received) {
            Ok(None) => return Verdict::NeedMore,
            Ok(Some(length)) => length,
            Err(fault) => return Verdict::Refused(fault),
        };
        let message = if self.records == 0 {
            // No earlier record contains a part of the message, so the message is contiguous.
            received.get(RECORD_HEADER..length).unwrap_or_default()
        } else {
            assemble(&received[..length.min(received.len())], &mut scratch.message);
            &scratch.message
        };
        match read_message(message, &mut scratch.seen) {
            Ok((random, (server_name, alpn))) => Verdict::Whole(Hello { server_name, alpn, random, length }),
            Err(fault) => Verdict::Refused(fault),
        }
    }

    /// Returns the length of the stream up to the end of the hello, once the whole hello was received.
    fn walk_records(&mut self, received: &[u8]) -> Result<Option<usize>, HelloFault> {
        loop {
            let start = self.next + RECORD_HEADER;
            let Some(size) = self.record_size(received.get(self.next..).unwrap_or_default())? else {
                return Ok(None);
            };
            let fragment = received.get(start..).unwrap_or_default();
            let fragment = &fragment[..fragment.len().min(size)];
            let Some(total) = self.message_size(fragment)? else {
                if fragment.len() < size {
                    return Ok(None);
                }
                self.pass(size);
                continue;
            };
            let missing = total - self.gathered.min(total);
            let further_header = if missing > size { RECORD_HEADER } else { 0 };
            if start + missing + further_header > self.bytes_max {
                return Err(HelloFault::TooLarge);
            }
            if missing < size {
                return Err(HelloFault::Malformed("other bytes follow the ClientHello in its record"));
            }
            if fragment.len() < size {
                return Ok(None);
            }
            if missing == size {
                return Ok(Some(start + size));
            }
            self.pass(size);
        }
    }

    /// Advances past a record that was received completely.
    fn pass(&mut self, size: usize) {
        self.next += RECORD_HEADER + size;
        self.records += 1;
        self.gathered += size;
    }

    /// Returns the length in the record header at the start of `bytes`, once the header was received.
    fn record_size(&self, bytes: &[u8]) -> Result<Option<usize>, HelloFault> {
        let Some(content) = bytes.first() else {
            return Ok(None);
        };
        if self.records >= self.records_max {
            return Err(HelloFault::Fragments);
        }
        if self.next + RECORD_HEADER > self.bytes_max {
            return Err(HelloFault::TooLarge);
        }
        let first = self.records == 0;
        if *content != CONTENT_HANDSHAKE {
            let foreign = HelloFault::Malformed("a record of another kind interrupts the ClientHello");
            return Err(if first { HelloFault::NotTls } else { foreign });
        }
        match bytes.get(1) {
            None => return Ok(None),
            Some(3) => {}
            Some(_) if first => return Err(HelloFault::NotTls),
            Some(_) => return Err(HelloFault::Malformed("a record's version is not 3.x")),
        }
        let Some(&[high, low]) = bytes.get(3..RECORD_HEADER) else {
            return Ok(None);
        };
        match usize::from(u16::from_be_bytes([high, low])) {
            0 => Err(HelloFault::Malformed("a record is empty")),
            size if size > RECORD_BYTES_MAX => {
                Err(HelloFault::Malformed("a record is longer than 2^14 bytes"))
            }
            size => Ok(Some(size)),
        }
    }

    /// Returns the length of the handshake message including its header, once the header was received.
    fn message_size(&mut self, fragment: &[u8]) -> Result<Option<usize>, HelloFault> {
        let have = self.gathered.min(HANDSHAKE_HEADER);
        for (slot, byte) in self.header[have..].iter_mut().zip(fragment) {
            *slot = *byte;
        }
        let have = have + fragment.len();
        if have >= 1 && self.header[0] != HANDSHAKE_CLIENT_HELLO {
            return Err(HelloFault::Malformed("the handshake message is not a ClientHello"));
        }
        if have < HANDSHAKE_HEADER {
            return Ok(None);
        }
        let [_, high, middle, low] = self.header;
        let length = u32::from_be_bytes([0, high, middle, low]) as usize;
        Ok(Some(HANDSHAKE_HEADER + length))
    }
}

/// Assembles the message from its records; `stream` must end where the message ends.
fn assemble(stream: &[u8], message: &mut Vec<u8>) {
    message.clear();
    let mut rest = stream;
    while let Some((header, behind)) = rest.split_at_checked(RECORD_HEADER) {
        let size = usize::from(u16::from_be_bytes([header[3], header[4]])).min(behind.len());
        let (fragment, behind) = behind.split_at(size);
        message.extend_from_slice(fragment);
        rest = behind;
    }
}

/// A reader of length-prefixed fields.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, length: usize, what: &'static str) -> Result<&'a [u8], HelloFault> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(HelloFault::Malformed(what))?;
        self.0 = rest;
        Ok(taken)
    }

    fn number8(&mut self, what: &'static str) -> Result<usize, HelloFault> {
        self.take(1, what).map(|bytes| usize::from(bytes[0]))
    }

    fn number16(&mut self, what: &'static str) -> Result<u16, HelloFault> {
        self.take(2, what).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
    }
}

type NamesAndProtocols<'a> = (Option<&'a [u8]>, Option<Protocols<'a>>);

fn read_message<'a>(
    message: &'a [u8],
    seen: &mut [u64; 1 << 10],
) -> Result<(&'a [u8], NamesAndProtocols<'a>), HelloFault> {
    let mut fields = Fields(message);
    fields.take(HANDSHAKE_HEADER + 2, "the hello ends before its random")?;
    let random = fields.take(RANDOM_BYTES, "the hello ends within its random")?;
    let session = fields.number8("the hello ends before its session id")?;
    if session > 32 {
        return Err(HelloFault::Malformed("the session id is longer than 32 bytes"));
    }
    fields.take(session, "the hello ends within its session id")?;
    let suites = usize::from(fields.number16("the hello ends before its cipher suites")?);
    if suites == 0 || suites % 2 == 1 {
        return Err(HelloFault::Malformed("the length of the cipher suites is odd or zero"));
    }
    fields.take(suites, "the hello ends within its cipher suites")?;
    let compression = fields.number8("the hello ends before its compression methods")?;
    if compression == 0 {
        return Err(HelloFault::Malformed("there is no compression method"));
    }
    fields.take(compression, "the hello ends within its compression methods")?;
    if fields.0.is_empty() {
        return Ok((random, (None, None)));
    }
    let length = usize::from(fields.number16("the hello ends before its extensions")?);
    if length != fields.0.len() {
        return Err(HelloFault::Malformed(
            "the length of the extensions does not match the rest of the hello",
        ));
    }
    let read = read_extensions(fields.0, seen);
    // Clears only the bits that the walk has set, because clearing all 8 KiB would be costly for each hello.
    let mut fields = Fields(fields.0);
    while let (Ok(kind), Ok(size)) = (fields.number16(""), fields.number16("")) {
        seen[usize::from(kind >> 6)] = 0;
        if fields.take(usize::from(size), "").is_err() {
            break;
        }
    }
    read.map(|read| (random, read))
}

fn read_extensions<'a>(
    extensions: &'a [u8],
    seen: &mut [u64; 1 << 10],
) -> Result<NamesAndProtocols<'a>, HelloFault> {
    let mut fields = Fields(extensions);
    let (mut server_name, mut alpn) = (None, None);
    while !fields.0.is_empty() {
        let kind = fields.number16("an extension's type is cut off")?;
        let size = fields.number16("an extension's length is cut off")?;
        let body = fields.take(usize::from(size), "an extension is longer than the rest of the hello")?;
        let (word, bit) = (usize::from(kind >> 6), 1_u64 << (kind & 63));
        if seen[word] & bit != 0 {
            return Err(HelloFault::Malformed("an extension appears twice"));
        }
        seen[word] |= bit;
        match kind {
            EXTENSION_SERVER_NAME => server_name = Some(read_server_name(body)?),
            EXTENSION_ALPN => alpn = Some(read_alpn(body)?),
            _ => {}
        }
    }
    Ok((server_name, alpn))
}

/// Returns the single host name of a ServerNameList (RFC 6066 §3).
fn read_server_name(body: &[u8]) -> Result<&[u8], HelloFault> {
    list_fills(body, "the server name list is empty, or its length is wrong")?;
    let Ok((_, TlsExtension::SNI(names))) = parse_tls_extension_sni_content(body) else {
        return Err(HelloFault::Malformed("the server name list is malformed"));
    };
    // tls-parser stops at the first entry that it cannot read, and returns no error for it.
    let read: usize = names.iter().map(|(_, name)| 3 + name.len()).sum();
    if read + 2 != body.len() {
        return Err(HelloFault::Malformed("the server name list is malformed"));
    }
    match names.as_slice() {
        [(kind, _)] if kind.0 != NAME_TYPE_HOST => {
            Err(HelloFault::Malformed("the server name is of an unknown type"))
        }
        [(_, [])] => Err(HelloFault::Malformed("the server name is empty")),
        [(_, name)] => Ok(name),
        _ => Err(HelloFault::Malformed("there is more than one server name")),
    }
}

fn read_alpn(body: &[u8]) -> Result<Protocols<'_>, HelloFault> {
    let list = list_fills(body, "the ALPN list is empty, or its length is wrong")?;
    let Ok((_, TlsExtension::ALPN(names))) = parse_tls_extension_alpn_content(body) else {
        return Err(HelloFault::Malformed("the ALPN list is malformed"));
    };
    let read: usize = names.iter().map(|name| 1 + name.len()).sum();
    if read != list.len() || names.iter().any(|name| name.is_empty()) {
        return Err(HelloFault::Malformed("the ALPN list is malformed"));
    }
    Ok(Protocols::from_entries(list))
}

/// Returns the content of a list. The 16-bit length of the list must equal the number of bytes that follow, and must not be
/// zero.
fn list_fills<'a>(body: &'a [u8], what: &'static str) -> Result<&'a [u8], HelloFault> {
    let mut fields = Fields(body);
    let length = usize::from(fields.number16(what)?);
    if length == 0 || length != fields.0.len() {
        return Err(HelloFault::Malformed(what));
    }
    Ok(fields.0)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns a hello with these extensions as one handshake message without a record header.
    pub(crate) fn message(extensions: &[(u16, Vec<u8>)]) -> Vec<u8> {
        let mut list = Vec::new();
        for (kind, body) in extensions {
            list.extend(kind.to_be_bytes());
            list.extend(u16::try_from(body.len()).expect("short").to_be_bytes());
            list.extend(body);
        }
        let mut body = vec![3, 3];
        body.extend([7; 32]);
        body.extend([0, 0, 2, 0x13, 0x01, 1, 0]);
        body.extend(u16::try_from(list.len()).expect("short").to_be_bytes());
        body.extend(list);
        let mut message = vec![1];
        message.extend(&u32::try_from(body.len()).expect("short").to_be_bytes()[1..]);
        message.extend(body);
        message
    }

    pub(crate) fn sni(name: &[u8]) -> (u16, Vec<u8>) {
        let length = u16::try_from(name.len()).expect("short");
        let mut body = (length + 3).to_be_bytes().to_vec();
        body.push(0);
        body.extend(length.to_be_bytes());
        body.extend(name);
        (0, body)
    }

    /// Returns the message in records of these sizes; the last record contains the rest.
    pub(crate) fn records(message: &[u8], sizes: &[usize]) -> Vec<u8> {
        let mut stream = Vec::new();
        let mut rest = message;
        let mut sizes = sizes.iter();
        while !rest.is_empty() {
            let size = sizes.next().copied().unwrap_or(rest.len()).min(rest.len());
            let (fragment, behind) = rest.split_at(size);
            stream.extend([22, 3, 1]);
            stream.extend(u16::try_from(size).expect("short").to_be_bytes());
            stream.extend(fragment);
            rest = behind;
        }
        stream
    }

    type NameAndLength = (Option<Vec<u8>>, usize);

    /// Scans a stream and returns the result with an owned name. Asserts that a scan byte by byte gives the same result.
    fn verdict(stream: &[u8]) -> Result<Option<NameAndLength>, HelloFault> {
        let mut scratch = Scratch::new();
        let mut judge = |scanner: &mut Scanner, bytes: &[u8]| match scanner.scan(bytes, &mut scratch) {
            Verdict::NeedMore => Ok(None),
            Verdict::Whole(hello) => Ok(Some((hello.server_name.map(<[u8]>::to_vec), hello.length))),
            Verdict::Refused(fault) => Err(fault),
        };
        let whole = judge(&mut Scanner::new(16_384, 64), stream);
        let mut dripping = Scanner::new(16_384, 64);
        let mut dripped = Ok(None);
        for end in 0..=stream.len() {
            dripped = judge(&mut dripping, &stream[..end]);
            if dripped != Ok(None) {
                break;
            }
        }
        assert_eq!(whole, dripped, "a verdict depends on how the bytes were cut");
        assert!(scratch.seen.iter().all(|word| *word == 0), "a bit of the extension map stayed set");
        whole
    }

    fn name_of(stream: &[u8]) -> Option<Vec<u8>> {
        verdict(stream).expect("admitted").expect("whole").0
    }

    #[test]
    fn the_name_is_read_from_one_record_or_many() {
        let message = message(&[(10, vec![0, 2, 0, 29]), sni(b"a.example.com"), (43, vec![2, 3, 4])]);
        for sizes in [&[][..], &[1; 40], &[3, 1, 60], &[70], &[4, 4, 4]] {
            assert_eq!(
                name_of(&records(&message, sizes)).as_deref(),
                Some(&b"a.example.com"[..]),
                "{sizes:?}"
            );
        }
        let mut stream = records(&message, &[]);
        let length = stream.len();
        stream.extend([20, 3, 3, 0, 1, 1]);
        assert_eq!(verdict(&stream), Ok(Some((Some(b"a.example.com".to_vec()), length))));
    }

    #[test]
    fn a_hello_without_extensions_has_no_name() {
        let mut message = message(&[]);
        let end = message.len() - 2;
        message.truncate(end);
        message[3] -= 2;
        assert_eq!(name_of(&records(&message, &[])), None);
    }

    #[test]
    fn bytes_that_are_no_tls_are_known_at_once() {
        for stream in [&b"GET / HTTP/1.1"[..], b"\x80\x2e\x01", b"\x15\x03\x01", b"PROXY ", b"\x16\x05\x05"] {
            assert_eq!(verdict(stream), Err(HelloFault::NotTls), "{stream:?}");
        }
        assert_eq!(verdict(b"\x16\x03\x00"), Ok(None));
    }

    #[test]
    fn sizes_are_bounded_and_known_from_headers() {
        assert_eq!(verdict(&[22, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff]), Err(HelloFault::TooLarge));
        assert!(matches!(verdict(&[22, 3, 1, 0x40, 1]), Err(HelloFault::Malformed(_))));
        assert!(matches!(verdict(&[22, 3, 1, 0, 0]), Err(HelloFault::Malformed(_))));
        let message = message(&[sni(b"a.example.com"), (21, vec![0; 100])]);
        assert_eq!(verdict(&records(&message, &[1; 64])), Err(HelloFault::Fragments));
        assert!(name_of(&records(&message, &[1; 63])).is_some());
    }

    #[test]
    fn ambiguous_hellos_are_refused() {
        let refused = |extensions: &[(u16, Vec<u8>)]| {
            let stream = records(&message(extensions), &[]);
            assert!(matches!(verdict(&stream), Err(HelloFault::Malformed(_))), "{extensions:?}");
        };
        refused(&[sni(b"a"), sni(b"a")]);
        refused(&[(13, vec![]), sni(b"a"), (13, vec![])]);
        refused(&[sni(b"")]);
        refused(&[(0, vec![])]);
        refused(&[(0, vec![0, 0])]);
        refused(&[(0, vec![0, 4, 1, 0, 1, b'a'])]);
        refused(&[(0, vec![0, 8, 0, 0, 1, b'a', 0, 0, 1, b'b'])]);
        refused(&[(0, vec![0, 5, 0, 0, 1, b'a', 9])]);
        refused(&[(16, vec![0, 1, 0])]);
        refused(&[(16, vec![0, 3, 2, b'h'])]);
    }

    #[test]
    fn protocols_are_listed_in_order() {
        let stream =
            records(&message(&[(16, vec![0, 9, 2, b'h', b'2', 5, b'i', b's', b't', b'i', b'o'])]), &[]);
        let mut scratch = Scratch::new();
        let Verdict::Whole(hello) = Scanner::new(16_384, 64).scan(&stream, &mut scratch) else {
            panic!("not whole");
        };
        let names: Vec<_> = hello.alpn.expect("offered").iter().collect();
        assert_eq!(names, [&b"h2"[..], b"istio"]);
    }

    #[test]
    fn the_first_bytes_of_a_server_are_a_handshake_an_alert_or_no_tls() {
        let alert = |level, description| ServerAnswer::of(&[21, 3, 3, 0, 2, level, description]);
        assert_eq!(alert(2, 112), ServerAnswer::Alert(Description(112)));
        assert_eq!(
            alert(1, 112),
            ServerAnswer::Handshake,
            "a warning, after which the ServerHello comes (RFC 6066 §3)"
        );
        assert_eq!(alert(1, 0), ServerAnswer::Alert(Description::CLOSE_NOTIFY));
        for begun in [&[][..], &[21], &[22, 3, 3]] {
            assert_eq!(ServerAnswer::of(begun), ServerAnswer::Handshake);
        }
        assert_eq!(ServerAnswer::of(b"SSH-2.0"), ServerAnswer::NotTls);
        let lacks = [&[22, 3][..], &[22, 3, 3, 1, 2], &[22, 3, 3, 0, 2, 9], &[22, 3, 3, 0, 1, 9, 22, 3]];
        assert_eq!(lacks.map(ServerAnswer::lacks), [3, 258, 1, 0]);
    }
}
