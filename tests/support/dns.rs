//! A name server whose answers a test sets, and which counts the questions. It speaks UDP (RFC 1035) and expects one question
//! per packet.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex};
use std::thread;

/// The answer to questions about one name.
#[derive(Clone, Debug)]
pub enum Answer {
    /// The addresses of the name; a question gets the addresses of its type (A or AAAA).
    Addresses { addresses: Vec<IpAddr>, ttl: u32 },
    /// The name exists and has no address.
    Empty,
    /// NXDOMAIN, which is also the answer for names without an entry.
    Unknown,
    /// SERVFAIL.
    Failure,
    /// REFUSED.
    Refusal,
    /// No answer.
    Silence,
    /// An answer that is cut off, from a server that does not answer over TCP either.
    Truncated,
    /// An alias (CNAME), and for a question for A records this address as that of its target.
    Alias { target: &'static str, address: [u8; 4] },
    /// SRV records (priority, weight, port, target), with a TTL of one second.
    Services(Vec<(u16, u16, u16, &'static str)>),
    /// One answer to questions for A records, another to those for AAAA records.
    ByFamily(Box<[Self; 2]>),
}

#[derive(Default)]
struct State {
    answers: HashMap<String, Answer>,
    asked: HashMap<String, usize>,
}

/// A running name server.
pub struct NameServer {
    pub address: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl NameServer {
    pub fn start() -> Self {
        Self::start_at("127.0.0.1:0")
    }

    pub fn start_at(address: &str) -> Self {
        let socket = UdpSocket::bind(address).expect("a port");
        let address = socket.local_addr().expect("bound");
        let state = Arc::new(Mutex::new(State::default()));
        let own = state.clone();
        thread::spawn(move || {
            let mut packet = [0; 1500];
            while let Ok((length, client)) = socket.recv_from(&mut packet) {
                if let Some(response) = respond(&packet[..length], &own) {
                    let _ = socket.send_to(&response, client);
                }
            }
        });
        Self { address, state }
    }

    /// Sets the answer for a name; `*.example` stands for all names one label longer that have no answer of their own.
    pub fn answer(&self, name: &str, answer: Answer) {
        self.state.lock().expect("not poisoned").answers.insert(name.to_owned(), answer);
    }

    /// Sets the answer for a name: one address, with a TTL of one second.
    pub fn points(&self, name: &str, address: IpAddr) {
        self.answer(name, Answer::Addresses { addresses: vec![address], ttl: 1 });
    }

    /// Returns the number of questions about a name so far.
    pub fn asked(&self, name: &str) -> usize {
        self.state.lock().expect("not poisoned").asked.get(name).copied().unwrap_or(0)
    }
}

const HEADER: usize = 12;
/// Record types.
const A: u16 = 1;
const AAAA: u16 = 28;
const SRV: u16 = 33;

fn respond(query: &[u8], state: &Mutex<State>) -> Option<Vec<u8>> {
    let (name, end) = name(query)?;
    let kind = u16::from_be_bytes([*query.get(end)?, *query.get(end + 1)?]);
    let answer = {
        let mut state = state.lock().expect("not poisoned");
        *state.asked.entry(name.clone()).or_default() += 1;
        let above = || Some(format!("*.{}", name.split_once('.')?.1));
        let found = state.answers.get(&name).or_else(|| state.answers.get(&above()?));
        found.cloned().unwrap_or(Answer::Unknown)
    };
    let answer = match answer {
        Answer::ByFamily(answers) => answers[usize::from(kind == AAAA)].clone(),
        answer => answer,
    };
    let truncated = if matches!(answer, Answer::Truncated) { 2 } else { 0 };
    if let Answer::Alias { target, address } = answer {
        return Some(respond_alias(query, end, target, (kind == A).then_some(address)));
    }
    if let Answer::Services(records) = answer {
        return Some(respond_services(query, end, if kind == SRV { &records } else { &[] }));
    }
    let (code, records, ttl) = match answer {
        Answer::ByFamily(_) | Answer::Alias { .. } | Answer::Services(_) => unreachable!("answered above"),
        Answer::Silence => return None,
        Answer::Failure => (2, Vec::new(), 0),
        Answer::Refusal => (5, Vec::new(), 0),
        Answer::Unknown => (3, Vec::new(), 0),
        Answer::Empty | Answer::Truncated => (0, Vec::new(), 0),
        Answer::Addresses { addresses, ttl } => (0, addresses, ttl),
    };
    let records = records.into_iter().filter_map(|address| match (address, kind) {
        (IpAddr::V4(v4), A) => Some(v4.octets().to_vec()),
        (IpAddr::V6(v6), AAAA) => Some(v6.octets().to_vec()),
        _ => None,
    });
    let records: Vec<Vec<u8>> = records.collect();
    let count = u8::try_from(records.len()).expect("few");
    // The query's ID; the flags (response, truncated, recursion desired, recursion available); one question, the answers, no other
    // section.
    let mut response = vec![query[0], query[1], 0x81 | truncated, 0x80 | code, 0, 1, 0, count, 0, 0, 0, 0];
    response.extend_from_slice(&query[HEADER..end + 4]);
    for record in records {
        // A pointer to the question's name, then the record's type, and class IN.
        response.extend_from_slice(&[0xc0, 12]);
        response.extend_from_slice(&kind.to_be_bytes());
        response.extend_from_slice(&[0, 1]);
        response.extend_from_slice(&ttl.to_be_bytes());
        response.extend_from_slice(&u16::try_from(record.len()).expect("short").to_be_bytes());
        response.extend_from_slice(&record);
    }
    Some(response)
}

/// Makes the answer with SRV records (RFC 2782).
fn respond_services(query: &[u8], end: usize, records: &[(u16, u16, u16, &str)]) -> Vec<u8> {
    let count = u8::try_from(records.len()).expect("few");
    let mut response = vec![query[0], query[1], 0x81, 0x80, 0, 1, 0, count, 0, 0, 0, 0];
    response.extend_from_slice(&query[HEADER..end + 4]);
    for (priority, weight, port, target) in records {
        let mut data: Vec<u8> =
            [priority, weight, port].into_iter().flat_map(|part| part.to_be_bytes()).collect();
        for label in target.split('.') {
            data.push(u8::try_from(label.len()).expect("short"));
            data.extend_from_slice(label.as_bytes());
        }
        data.push(0);
        response.extend_from_slice(&[0xc0, 12]);
        response.extend_from_slice(&SRV.to_be_bytes());
        response.extend_from_slice(&[0, 1, 0, 0, 0, 1]);
        response.extend_from_slice(&u16::try_from(data.len()).expect("short").to_be_bytes());
        response.extend_from_slice(&data);
    }
    response
}

/// Makes the answer with an alias, and with an address of its target.
fn respond_alias(query: &[u8], end: usize, target: &str, address: Option<[u8; 4]>) -> Vec<u8> {
    let mut encoded: Vec<u8> = target
        .split('.')
        .flat_map(|label| [&[u8::try_from(label.len()).expect("short")][..], label.as_bytes()].concat())
        .collect();
    encoded.push(0);
    let length = u8::try_from(encoded.len()).expect("short");
    let mut response =
        vec![query[0], query[1], 0x81, 0x80, 0, 1, 0, 1 + u8::from(address.is_some()), 0, 0, 0, 0];
    response.extend_from_slice(&query[HEADER..end + 4]);
    // Type CNAME, class IN, a TTL of 9 s.
    response.extend_from_slice(&[0xc0, 12, 0, 5, 0, 1, 0, 0, 0, 9, 0, length]);
    response.extend_from_slice(&encoded);
    if let Some(address) = address {
        response.extend_from_slice(&encoded);
        response.extend_from_slice(&[0, 1, 0, 1, 0, 0, 0, 9, 0, 4]);
        response.extend_from_slice(&address);
    }
    response
}

/// Parses the name in the question, and returns it with the offset of the first byte after the name.
fn name(query: &[u8]) -> Option<(String, usize)> {
    let (mut at, mut labels) = (HEADER, Vec::new());
    loop {
        let length = usize::from(*query.get(at)?);
        at += 1;
        if length == 0 {
            return Some((labels.join("."), at));
        }
        labels.push(String::from_utf8_lossy(query.get(at..at + length)?).to_ascii_lowercase());
        at += length;
    }
}
