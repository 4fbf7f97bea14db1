//! Compares the scanner with two other readers of hellos. They may differ from it only in the ways that [`Difference`] lists.

use std::collections::BTreeMap;
use std::fmt::Debug;

use isthmus::model::name::is_ip_literal;
use isthmus::wire::client_hello::{HelloFault, Scratch};
use rustls::server::Acceptor;
use rustls::{Error, PeerIncompatible, PeerMisbehaved};
use tls_parser::{TlsClientHelloContents, TlsExtension, TlsMessage, TlsMessageHandshake};

use crate::corpus;
use crate::generate::{self, handshake, list16, record};
use crate::judge::{Judged, Scanned, judged, scan};

/// The number of generated hellos, unless `ISTHMUS_HELLO_CASES` is set.
const CASES: u64 = 100_000;
const SERVER_NAME: u16 = 0;
const ALPN: u16 = 16;
const SIGNATURE_ALGORITHMS: u16 = 13;

/// The ways in which the verdict of rustls may differ from the scanner's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Difference {
    /// The scanner stops at 16 KiB and 64 records, rustls at 64 KiB.
    NarrowerLimits,
    /// The scanner refuses at the byte that shows the fault, rustls at the end of the record or message with that byte.
    EarlierRefusal,
    /// rustls accepts records of up to 2^14 + 2048 bytes, which only ciphertext may have (RFC 8446 §5.2).
    LongerRecords,
    /// rustls also decodes the extensions that an endpoint needs, and refuses a hello without `signature_algorithms`.
    OtherExtensions,
    /// rustls requires the null compression method, which only the endpoint has to check.
    NoNullCompression,
    /// rustls refuses labels that begin or end with a hyphen, and names whose last label is all digits.
    HyphensAndDigits,
    /// The scanner takes an IP address with a trailing dot for an address literal, rustls for an illegal name.
    DottedLiteral,
    /// rustls counts a trailing dot as one of the 253 bytes of a name.
    DotBehindLongest,
    /// rustls ignores entries of unknown type after a host name in the same list.
    UnknownTypeBehindName,
}

impl Difference {
    const ALL: [Self; 9] = [
        Self::NarrowerLimits,
        Self::EarlierRefusal,
        Self::LongerRecords,
        Self::OtherExtensions,
        Self::NoNullCompression,
        Self::HyphensAndDigits,
        Self::DottedLiteral,
        Self::DotBehindLongest,
        Self::UnknownTypeBehindName,
    ];
}

#[derive(Debug, PartialEq)]
enum Theirs {
    NeedMore,
    Accept { name: Option<String>, alpn: Vec<Vec<u8>> },
    Refuse(Error),
}

/// Compares the scanner with rustls on all hellos; returns the counts as text.
pub(crate) fn against_rustls() -> String {
    let mut agreed: BTreeMap<&str, u32> = BTreeMap::new();
    let mut differed: BTreeMap<Difference, u32> = BTreeMap::new();
    let mut scratch = Scratch::new();
    for (label, stream) in streams() {
        let scanned = scan(&stream, &mut scratch);
        let ours = judged(&scanned);
        let theirs = rustls_view(&stream);
        match compare(&stream, &scanned, &ours, &theirs) {
            Compared::Agree => *agreed.entry(ours.word()).or_default() += 1,
            Compared::Differ(difference) => *differed.entry(difference).or_default() += 1,
            Compared::Unexplained => fail(&label, &stream, &scanned, &theirs),
        }
    }
    let told = format!("rustls agrees: {agreed:?}\nrustls differs: {differed:?}");
    if chosen() {
        return told;
    }
    for word in ["admit", "no_sni", "bad_hello", "sni_invalid", "not_tls", "hello_timeout", "hello_too_large"]
    {
        assert!(
            agreed.get(word).is_some_and(|count| *count >= 100),
            "too few hellos were {word}: {agreed:?}"
        );
    }
    for difference in Difference::ALL {
        assert!(differed.contains_key(&difference), "{difference:?} never happened: it is no difference");
    }
    told
}

/// Returns true if environment variables choose other hellos than the default ones; the expected counts do not hold for these.
fn chosen() -> bool {
    ["ISTHMUS_HELLO_CASES", "ISTHMUS_HELLO_SEED"].iter().any(|name| std::env::var_os(name).is_some())
}

/// Returns the hellos of the corpus and the generated ones, each with the setting that generates it again.
fn streams() -> impl Iterator<Item = (String, Vec<u8>)> {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let first = number("ISTHMUS_HELLO_SEED");
    let usual = if first.is_some() { 1 } else { CASES };
    let count = number("ISTHMUS_HELLO_CASES").unwrap_or(usual);
    let first = first.unwrap_or(0);
    let generated =
        (first..first + count).map(|seed| (format!("ISTHMUS_HELLO_SEED={seed}"), generate::stream(seed)));
    corpus::read().into_iter().map(|case| (case.name, case.stream)).chain(generated)
}

enum Compared {
    Agree,
    Differ(Difference),
    Unexplained,
}

fn compare(stream: &[u8], scanned: &Scanned, ours: &Judged, theirs: &Theirs) -> Compared {
    use Compared::{Agree, Differ, Unexplained};
    match (ours, theirs) {
        (Judged::Incomplete | Judged::Nothing, Theirs::NeedMore) => Agree,
        (Judged::Incomplete | Judged::Nothing, Theirs::Accept { .. } | Theirs::Refuse(_)) => Unexplained,
        (Judged::Admit { .. } | Judged::Refuse { word: "no_sni" }, Theirs::NeedMore) => Unexplained,
        (Judged::Admit { .. } | Judged::Refuse { word: "no_sni" }, Theirs::Accept { .. }) => {
            if same(scanned, ours, theirs) { Agree } else { Unexplained }
        }
        (Judged::Admit { .. } | Judged::Refuse { word: "no_sni" }, Theirs::Refuse(error)) => {
            refused_by_them_alone(stream, scanned, ours, error).map_or(Unexplained, Differ)
        }
        (Judged::Refuse { .. }, Theirs::Refuse(_)) => Agree,
        (Judged::Refuse { .. }, Theirs::NeedMore | Theirs::Accept { .. }) => {
            refused_by_us_alone(scanned, theirs, stream).map_or(Unexplained, Differ)
        }
    }
}

/// Returns true if both readers accept the hello and read the same name and ALPN list.
fn same(scanned: &Scanned, ours: &Judged, theirs: &Theirs) -> bool {
    let Scanned::Whole { alpn: our_alpn, .. } = scanned else { return false };
    let Theirs::Accept { name: their_name, alpn: their_alpn } = theirs else { return false };
    let same_name = match ours {
        Judged::Admit { name, .. } => {
            // rustls keeps the trailing dot of a name.
            their_name.as_deref().map(|theirs| theirs.strip_suffix('.').unwrap_or(theirs)) == Some(name)
        }
        _ => their_name.is_none(),
    };
    same_name && our_alpn.as_deref().unwrap_or_default() == their_alpn.as_slice()
}

fn refused_by_us_alone(scanned: &Scanned, theirs: &Theirs, stream: &[u8]) -> Option<Difference> {
    let Scanned::Refused(fault) = scanned else { return None };
    match (fault, theirs) {
        (HelloFault::TooLarge | HelloFault::Fragments, _) => Some(Difference::NarrowerLimits),
        (HelloFault::Malformed("a record is longer than 2^14 bytes"), _) => {
            let size = stream.get(3..5).map(|size| u16::from_be_bytes([size[0], size[1]]));
            size.filter(|size| *size < 16_384 + 2048).map(|_| Difference::LongerRecords)
        }
        (HelloFault::NotTls, Theirs::NeedMore) => Some(Difference::EarlierRefusal),
        (
            HelloFault::Malformed(
                "the handshake message is not a ClientHello"
                | "a record of another kind interrupts the ClientHello"
                | "a record's version is not 3.x"
                | "a record is empty"
                | "other bytes follow the ClientHello in its record",
            ),
            Theirs::NeedMore,
        ) => Some(Difference::EarlierRefusal),
        (
            HelloFault::Malformed("there is more than one server name" | "the server name list is malformed"),
            Theirs::Accept { .. },
        ) => {
            let body = extensions_of(stream)?.into_iter().find(|(kind, _)| *kind == SERVER_NAME)?.1;
            unknown_type_behind_name(&body).then_some(Difference::UnknownTypeBehindName)
        }
        (HelloFault::NotTls | HelloFault::Malformed(_), _) => None,
    }
}

fn refused_by_them_alone(
    stream: &[u8],
    scanned: &Scanned,
    ours: &Judged,
    error: &Error,
) -> Option<Difference> {
    let Scanned::Whole { server_name, .. } = scanned else { return None };
    let raw = server_name.as_deref().unwrap_or_default();
    match error {
        Error::PeerIncompatible(PeerIncompatible::NullCompressionRequired) => {
            Some(Difference::NoNullCompression)
        }
        Error::PeerMisbehaved(PeerMisbehaved::ServerNameMustContainOneHostName) if is_ip_literal(raw) => {
            raw.ends_with(b".").then_some(Difference::DottedLiteral)
        }
        Error::PeerMisbehaved(PeerMisbehaved::ServerNameMustContainOneHostName) if raw.len() > 253 => {
            raw.ends_with(b".").then_some(Difference::DotBehindLongest)
        }
        Error::PeerMisbehaved(PeerMisbehaved::ServerNameMustContainOneHostName) => {
            hyphens_or_digits(raw).then_some(Difference::HyphensAndDigits)
        }
        _ => {
            // Without the extensions that the scanner ignores, rustls must read the same as the scanner. If rustls still
            // refuses the hello, the reason must be the name or the compression methods, because rustls checks these after it
            // has decoded the extensions.
            let reduced = rustls_view(&without_other_extensions(stream)?);
            let name_refused =
                reduced == Theirs::Refuse(PeerMisbehaved::ServerNameMustContainOneHostName.into());
            let explained = same(scanned, ours, &reduced)
                || (name_refused && (hyphens_or_digits(raw) || raw.ends_with(b".")))
                || reduced == Theirs::Refuse(PeerIncompatible::NullCompressionRequired.into());
            explained.then_some(Difference::OtherExtensions)
        }
    }
}

fn hyphens_or_digits(name: &[u8]) -> bool {
    let name = name.strip_suffix(b".").unwrap_or(name);
    let mut labels: Vec<&[u8]> = name.split(|byte| *byte == b'.').collect();
    let hyphen = labels.iter().any(|label| label.starts_with(b"-") || label.ends_with(b"-"));
    hyphen || labels.pop().is_some_and(|last| last.iter().all(u8::is_ascii_digit))
}

/// Returns true if a name list begins with a host name and continues with an entry of another type.
fn unknown_type_behind_name(body: &[u8]) -> bool {
    let [_, _, 0, high, low, rest @ ..] = body else { return false };
    let length = usize::from(u16::from_be_bytes([*high, *low]));
    rest.get(length).is_some_and(|kind| *kind != 0)
}

fn rustls_view(stream: &[u8]) -> Theirs {
    let mut acceptor = Acceptor::default();
    let mut rest = stream;
    while !rest.is_empty() {
        if let Err(error) = acceptor.read_tls(&mut rest) {
            return Theirs::Refuse(Error::General(error.to_string()));
        }
        match acceptor.accept() {
            Ok(None) => {}
            Err((error, _)) => return Theirs::Refuse(error),
            Ok(Some(accepted)) => {
                let hello = accepted.client_hello();
                let name = hello.server_name().map(str::to_owned);
                let alpn = hello.alpn().map(|names| names.map(<[u8]>::to_vec).collect());
                return Theirs::Accept { name, alpn: alpn.unwrap_or_default() };
            }
        }
    }
    Theirs::NeedMore
}

// --- tls-parser ------------------------------------------------------------------------------------

/// Compares the scanner with tls-parser on all hellos; returns the counts as text.
pub(crate) fn against_tls_parser() -> String {
    let mut scratch = Scratch::new();
    let (mut same, mut stopped, mut refused, mut incomplete) = (0, 0, 0, 0);
    for (label, stream) in streams() {
        let scanned = scan(&stream, &mut scratch);
        let Some(first) = single_record(&stream) else {
            continue;
        };
        match (tls_parser::parse_tls_plaintext(first), &scanned) {
            (Err(tls_parser::Err::Incomplete(_)), Scanned::NeedMore | Scanned::Refused(_)) => incomplete += 1,
            // tls-parser misreads hellos of several records, so the comparison with rustls covers them.
            (_, Scanned::NeedMore) => {}
            (Ok((_, plaintext)), Scanned::Whole { server_name, alpn, .. }) => {
                let [TlsMessage::Handshake(TlsMessageHandshake::ClientHello(hello))] =
                    plaintext.msg.as_slice()
                else {
                    // tls-parser accepts a second message only in a record that the scanner refuses.
                    fail(&label, &stream, &scanned, &plaintext);
                };
                let Some(found) = names_and_protocols(hello) else {
                    // tls-parser stops at the first extension that it cannot decode, and does not say why.
                    stopped += 1;
                    continue;
                };
                let ours: Vec<_> = server_name.iter().cloned().collect();
                if found != (ours, alpn.clone().into_iter().collect()) {
                    fail(&label, &stream, &scanned, &found);
                }
                same += 1;
            }
            (Ok((_, plaintext)), Scanned::Refused(fault)) => {
                if !explains(fault, &plaintext.msg, first) {
                    fail(&label, &stream, &scanned, &plaintext);
                }
                refused += 1;
            }
            // The scanner also refuses what tls-parser cannot parse; both judge the head of a hello alike.
            (Err(_), Scanned::Refused(_)) => refused += 1,
            (Err(error), Scanned::Whole { .. }) => fail(&label, &stream, &scanned, &error),
        }
    }
    assert!(chosen() || (same > 10_000 && refused > 1000 && incomplete > 1000));
    format!("tls-parser: {same} the same, {stopped} given up, {refused} refused, {incomplete} incomplete")
}

/// Returns the first record of the stream if it contains the whole hello.
fn single_record(stream: &[u8]) -> Option<&[u8]> {
    let [22, 3, _, high, low, body @ ..] = stream else { return None };
    let size = usize::from(u16::from_be_bytes([*high, *low]));
    let [_, middle @ ..] = body.get(..4)? else { return None };
    let length = u32::from_be_bytes([0, middle[0], middle[1], middle[2]]) as usize;
    (length + 4 <= size).then(|| &stream[..stream.len().min(5 + size)])
}

type NamesAndProtocols = (Vec<Vec<u8>>, Vec<Vec<Vec<u8>>>);

/// Returns all host names and all ALPN lists that tls-parser finds; `None` if it stops before the end.
fn names_and_protocols(hello: &TlsClientHelloContents<'_>) -> Option<NamesAndProtocols> {
    let (rest, extensions) =
        tls_parser::parse_tls_client_hello_extensions(hello.ext.unwrap_or_default()).ok()?;
    if !rest.is_empty() {
        return None;
    }
    let (mut names, mut protocols) = (Vec::new(), Vec::new());
    for extension in extensions {
        match extension {
            TlsExtension::SNI(list) => names.extend(list.into_iter().map(|(_, name)| name.to_vec())),
            TlsExtension::ALPN(list) => protocols.push(list.into_iter().map(<[u8]>::to_vec).collect()),
            _ => {}
        }
    }
    Some((names, protocols))
}

/// Returns true if a hello that tls-parser accepts really has the fault for which the scanner refuses it, judged by a second
/// look at its bytes.
fn explains(fault: &HelloFault, messages: &[TlsMessage<'_>], record: &[u8]) -> bool {
    let HelloFault::Malformed(text) = fault else {
        return matches!(fault, HelloFault::TooLarge);
    };
    let [TlsMessage::Handshake(TlsMessageHandshake::ClientHello(hello))] = messages else {
        return *text == "the handshake message is not a ClientHello"
            || *text == "other bytes follow the ClientHello in its record";
    };
    let mut extensions = Vec::new();
    let reaches_the_end = walk_extensions(record, &mut extensions).is_some();
    let kinds: Vec<u16> = extensions.iter().map(|(kind, _)| *kind).collect();
    let body = |wanted| extensions.iter().find(|(kind, _)| *kind == wanted).map(|(_, body)| body.as_slice());
    match *text {
        "an extension appears twice" => (1..kinds.len()).any(|at| kinds[..at].contains(&kinds[at])),
        "the server name list is empty, or its length is wrong" => {
            body(SERVER_NAME).is_some_and(|body| !fills(body))
        }
        "the server name list is malformed"
        | "there is more than one server name"
        | "the server name is empty"
        | "the server name is of an unknown type" => body(SERVER_NAME).is_some_and(|body| {
            let [_, _, kind, high, low, name @ ..] = body else { return true };
            *kind != 0 || name.is_empty() || usize::from(u16::from_be_bytes([*high, *low])) != name.len()
        }),
        "the ALPN list is empty, or its length is wrong" => body(ALPN).is_some_and(|body| !fills(body)),
        "the ALPN list is malformed" => body(ALPN).is_some_and(|body| {
            let mut rest = &body[2..];
            while let [size, behind @ ..] = rest {
                let Some(behind) = behind.get(usize::from(*size)..).filter(|_| *size > 0) else {
                    return true;
                };
                rest = behind;
            }
            false
        }),
        "a record is longer than 2^14 bytes" => record.len() > 5 + (1 << 14),
        "the length of the cipher suites is odd or zero" => hello.ciphers.is_empty(),
        "there is no compression method" => hello.comp.is_empty(),
        "the length of the extensions does not match the rest of the hello"
        | "the hello ends before its extensions"
        | "an extension's type is cut off"
        | "an extension's length is cut off"
        | "an extension is longer than the rest of the hello"
        | "other bytes follow the ClientHello in its record" => !reaches_the_end,
        _ => false,
    }
}

/// Returns true if a list is not empty and its 16-bit length is the length of everything after it.
fn fills(body: &[u8]) -> bool {
    matches!(body, [high, low, rest @ ..]
        if !rest.is_empty() && usize::from(u16::from_be_bytes([*high, *low])) == rest.len())
}

// --- another look at the bytes ---------------------------------------------------------------------

type Extensions = Vec<(u16, Vec<u8>)>;

/// Returns the handshake message of a stream, joined from its records.
fn message_of(stream: &[u8]) -> Option<Vec<u8>> {
    let (mut message, mut rest) = (Vec::new(), stream);
    while let [_, _, _, high, low, behind @ ..] = rest {
        let size = usize::from(u16::from_be_bytes([*high, *low])).min(behind.len());
        message.extend(&behind[..size]);
        rest = &behind[size..];
        if let [_, a, b, c, body @ ..] = message.as_slice() {
            let length = u32::from_be_bytes([0, *a, *b, *c]) as usize;
            if body.len() >= length {
                return (body.len() == length).then_some(message);
            }
        }
    }
    None
}

/// Returns the offset of the extension block in a message: after version, random, session ID, suites and compression methods.
fn head_length(message: &[u8]) -> Option<usize> {
    let mut at = 4 + 2 + 32;
    at += 1 + usize::from(*message.get(at)?);
    at += 2 + usize::from(u16::from_be_bytes([*message.get(at)?, *message.get(at + 1)?]));
    at += 1 + usize::from(*message.get(at)?);
    (at <= message.len()).then_some(at)
}

/// Returns the extensions of a hello, if they fill it exactly.
fn extensions_of(stream: &[u8]) -> Option<Extensions> {
    let mut found = Vec::new();
    walk_extensions(stream, &mut found).map(|()| found)
}

/// Collects the extensions as far as they can be parsed; returns `None` unless they end exactly at the end of the hello.
fn walk_extensions(stream: &[u8], found: &mut Extensions) -> Option<()> {
    let message = message_of(stream)?;
    let mut rest = message.get(head_length(&message)?..)?;
    if rest.is_empty() {
        return Some(());
    }
    if u16::from_be_bytes([rest[0], *rest.get(1)?]) != u16::try_from(rest.len() - 2).ok()? {
        return None;
    }
    rest = &rest[2..];
    while !rest.is_empty() {
        let header = rest.get(..4)?;
        let size = usize::from(u16::from_be_bytes([header[2], header[3]]));
        found.push((u16::from_be_bytes([header[0], header[1]]), rest.get(4..4 + size)?.to_vec()));
        rest = &rest[4 + size..];
    }
    Some(())
}

/// Returns the hello in one record, with SNI and ALPN as its only extensions besides the one that rustls requires.
fn without_other_extensions(stream: &[u8]) -> Option<Vec<u8>> {
    let message = message_of(stream)?;
    let mut kept = extensions_of(stream)?;
    kept.retain(|(kind, _)| matches!(*kind, SERVER_NAME | ALPN));
    kept.push((SIGNATURE_ALGORITHMS, list16(&[4, 3])));
    let block: Vec<u8> =
        kept.iter().flat_map(|(kind, body)| [kind.to_be_bytes().to_vec(), list16(body)].concat()).collect();
    let body = [&message[4..head_length(&message)?], &list16(&block)].concat();
    Some(record(22, 1, &handshake(1, &body)))
}

fn fail(label: &str, stream: &[u8], ours: &dyn Debug, theirs: &dyn Debug) -> ! {
    let hex: String = stream.iter().map(|byte| format!("{byte:02x}")).collect();
    let theirs: String = format!("{theirs:?}").chars().take(2000).collect();
    panic!("an unlisted difference\n{label}\nours: {ours:?}\ntheirs: {theirs}\n{hex}");
}
