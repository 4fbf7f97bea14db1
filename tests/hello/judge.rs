//! The verdict on a stream in the words of the corpus. It combines the scanner's verdict on the hello with the verdict on the
//! server name.

use isthmus::model::name::{NameBuffer, canonical, is_ip_literal};
use isthmus::wire::client_hello::{HelloFault, Scanner, Scratch, Verdict};

/// The defaults of `hello.maxBytes` and `hello.maxRecords`.
const BYTES_MAX: usize = 16 * 1024;
const RECORDS_MAX: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Judged {
    Admit {
        name: String,
        alpn: Vec<Vec<u8>>,
        length: usize,
    },
    Refuse {
        word: &'static str,
    },
    /// More bytes are needed.
    Incomplete,
    /// No byte was received.
    Nothing,
}

impl Judged {
    pub(crate) fn word(&self) -> &'static str {
        match self {
            Self::Admit { .. } => "admit",
            Self::Refuse { word } => word,
            Self::Incomplete => "hello_timeout",
            Self::Nothing => "client_gone",
        }
    }
}

/// The scanner's verdict alone, without borrowed data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Scanned {
    NeedMore,
    Whole { server_name: Option<Vec<u8>>, alpn: Option<Vec<Vec<u8>>>, length: usize },
    Refused(HelloFault),
}

pub(crate) fn judge(stream: &[u8]) -> Judged {
    judge_pieces(stream, [stream.len()]).0
}

/// Gives a stream to the scanner in pieces that end at the offsets `ends`. Returns the verdict, and the end of the piece that
/// decided the verdict.
pub(crate) fn judge_pieces(stream: &[u8], ends: impl IntoIterator<Item = usize>) -> (Judged, usize) {
    let mut scanner = Scanner::new(BYTES_MAX, RECORDS_MAX);
    let mut scratch = Scratch::new();
    for end in ends {
        let scanned = copied(scanner.scan(&stream[..end], &mut scratch));
        if scanned != Scanned::NeedMore {
            return (judged(&scanned), end);
        }
    }
    (if stream.is_empty() { Judged::Nothing } else { Judged::Incomplete }, stream.len())
}

pub(crate) fn scan(stream: &[u8], scratch: &mut Scratch) -> Scanned {
    copied(Scanner::new(BYTES_MAX, RECORDS_MAX).scan(stream, scratch))
}

fn copied(verdict: Verdict<'_>) -> Scanned {
    match verdict {
        Verdict::NeedMore => Scanned::NeedMore,
        Verdict::Refused(fault) => Scanned::Refused(fault),
        Verdict::Whole(hello) => Scanned::Whole {
            server_name: hello.server_name.map(<[u8]>::to_vec),
            alpn: hello.alpn.map(|protocols| protocols.iter().map(<[u8]>::to_vec).collect()),
            length: hello.length,
        },
    }
}

pub(crate) fn judged(scanned: &Scanned) -> Judged {
    let (server_name, alpn, length) = match scanned {
        Scanned::NeedMore => return Judged::Incomplete,
        Scanned::Refused(fault) => return Judged::Refuse { word: word(*fault) },
        Scanned::Whole { server_name, alpn, length } => (server_name, alpn, *length),
    };
    let Some(raw) = server_name.as_deref().filter(|raw| !is_ip_literal(raw)) else {
        return Judged::Refuse { word: "no_sni" };
    };
    match canonical(raw, &mut NameBuffer::new()) {
        Ok(name) => Judged::Admit { name: name.to_owned(), alpn: alpn.clone().unwrap_or_default(), length },
        Err(_) => Judged::Refuse { word: "sni_invalid" },
    }
}

fn word(fault: HelloFault) -> &'static str {
    match fault {
        HelloFault::NotTls => "not_tls",
        HelloFault::TooLarge => "hello_too_large",
        HelloFault::Fragments => "hello_fragments",
        HelloFault::Malformed(_) => "bad_hello",
    }
}
