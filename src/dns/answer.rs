//! The answer to a query: a function from the bytes of the query to the bytes of the answer.

use std::net::IpAddr;

use hickory_proto::op::{Edns, Message, MessageType, Metadata, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::{A, AAAA, HINFO, NS, SOA, SRV};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};

use super::names::{Found, Names, SERVER};

/// The lifetime of records in seconds. A virtual address does not change, but a service and its name may be removed.
const TTL: u32 = 30;
/// The lifetime of a negative answer in seconds. It is short, so that clients soon find a service that is exported after they
/// asked for it.
const NEGATIVE_TTL: u32 = 5;
/// The largest answer over UDP in bytes: datagrams of this size are not fragmented on any usual path (DNS flag day 2020).
pub const UDP_BYTES_MAX: u16 = 1_232;
/// The largest answer over UDP to a query without EDNS (RFC 1035 §4.2.1).
const PLAIN_BYTES_MAX: u16 = 512;
/// The length of a message header in bytes.
pub const HEADER_BYTES: usize = 12;
/// The largest number of addresses in an answer.
const ADDRESSES_MAX: usize = 256;
/// The largest number of aliases that are followed in the answer of another server.
const ALIASES_MAX: usize = 16;

/// The transport of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Transport {
    /// Datagrams: an answer above the size limit is truncated.
    Udp,
    /// A stream: an answer has at most 65,535 bytes.
    Tcp,
}

/// The part of an answer that is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// The whole answer.
    Full,
    /// An answer without records and with the TC flag. The client is to ask over TCP, which proves its address.
    Truncated,
}

/// The result of examining a query.
#[derive(Debug)]
pub enum Verdict {
    /// The server answers with these bytes.
    Reply(Reply),
    /// The question must be forwarded to another server.
    Forward(Box<Question>),
    /// There is no answer, because the bytes are not a query.
    Drop,
}

/// An answer.
#[derive(Debug)]
pub struct Reply {
    /// The bytes of the answer.
    pub bytes: Vec<u8>,
    /// The response code of the answer.
    pub code: ResponseCode,
}

/// A question for another server.
#[derive(Debug)]
pub struct Question {
    /// The query as it was received.
    query: Message,
    transport: Transport,
}

impl Question {
    /// Returns the transport of the client.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// Encodes the question as a query to another server, with a new id.
    pub fn query(&self, id: u16) -> Option<Vec<u8>> {
        let mut metadata = Metadata::new(id, MessageType::Query, OpCode::Query);
        metadata.recursion_desired = true;
        metadata.checking_disabled = self.query.metadata.checking_disabled;
        let mut query = Message::new(id, MessageType::Query, OpCode::Query);
        query.metadata = metadata;
        query.queries.clone_from(&self.query.queries);
        query.edns = self.query.edns.as_ref().map(|_| {
            let limit = udp_limit(&self.query);
            let mut edns = edns_of(&self.query);
            edns.set_max_payload(limit);
            edns
        });
        query.to_vec().ok()
    }

    /// Returns true if `bytes` are an answer to `query`, which [`Self::query`] made: the id and the question are the same,
    /// including the case of letters (0x20). An attacker off the path has to guess all of them.
    pub fn is_answered_by(&self, query: &[u8], bytes: &[u8]) -> bool {
        let Some(question) = query.get(HEADER_BYTES..).and_then(|rest| rest.get(..self.question_bytes()))
        else {
            return false;
        };
        let is_response = bytes.get(2).is_some_and(|flags| flags & 0xf8 == 0x80);
        is_response
            && bytes.get(..2) == query.get(..2)
            && bytes.get(4..6) == Some(&[0, 1])
            && bytes.get(HEADER_BYTES..).is_some_and(|rest| rest.starts_with(question))
    }

    /// Returns the length of the question section.
    fn question_bytes(&self) -> usize {
        // Each label takes one byte more than its text. The empty label of the root (1 byte), type and class (4 bytes) follow.
        let name = self
            .query
            .queries
            .first()
            .map_or(0, |query| query.name().iter().map(|label| label.len() + 1).sum());
        name + 1 + 4
    }

    /// Converts the answer of another server into the answer for the client. Only this server answers for names in its zones, so
    /// records of these names are removed; if an alias (CNAME) leads to such a name, its own records are added.
    pub fn relay(&self, mut bytes: Vec<u8>, names: &Names) -> Reply {
        let code = ResponseCode::from(0, bytes.get(3).map_or(0, |flags| flags & 0x0f));
        let too_long = bytes.len() > limit(&self.query, self.transport);
        if too_long {
            let mut truncated = response(&self.query, code);
            truncated.metadata.recursion_available = true;
            truncated.metadata.truncation = true;
            return encode(&truncated, limit(&self.query, self.transport));
        }
        // The id comes first: a name may be a pointer to its bytes, so that it is another name with another id.
        if let Some(id) = bytes.get_mut(..2) {
            id.copy_from_slice(&self.query.metadata.id.to_be_bytes());
        }
        let Ok(mut answer) = Message::from_vec(&bytes) else { return self.failed() };
        if strip(&mut answer, names) | follow(&mut answer, names) {
            answer.metadata.authentic_data = false;
            return encode(&answer, limit(&self.query, self.transport));
        }
        Reply { bytes, code }
    }

    /// Returns the answer for the client if no other server answers.
    pub fn failed(&self) -> Reply {
        let mut reply = response(&self.query, ResponseCode::ServFail);
        reply.metadata.recursion_available = true;
        encode(&reply, limit(&self.query, self.transport))
    }

    /// Returns the answer for a client that may not ask for names of other zones.
    pub fn refused(&self) -> Reply {
        encode(&response(&self.query, ResponseCode::Refused), limit(&self.query, self.transport))
    }
}

/// Removes the records of names in our zones from another server's answer. Returns true if there were any.
fn strip(answer: &mut Message, names: &Names) -> bool {
    let mut has_changed = false;
    for section in [&mut answer.answers, &mut answer.authorities, &mut answer.additionals] {
        let before = section.len();
        section.retain(|record| names.zone_of(&lower(&record.name)).is_none());
        has_changed |= section.len() < before;
    }
    has_changed
}

/// If the aliases of another server's answer lead to a name in our zones, adds the records of this name. Returns true if they do.
fn follow(answer: &mut Message, names: &Names) -> bool {
    let [question] = &*answer.queries else { return false };
    let (mut target, kind) = (question.name().clone(), question.query_type());
    if kind == RecordType::CNAME {
        return false;
    }
    for _ in 0..ALIASES_MAX {
        let alias = answer.answers.iter().find_map(|record| match &record.data {
            RData::CNAME(alias) if record.name == target => Some(alias.0.clone()),
            _ => None,
        });
        let Some(next) = alias else { break };
        target = next;
    }
    let name = lower(&target);
    let found = names.find(&name);
    if matches!(found, Found::Foreign) {
        return false;
    }
    // The other server may say that the target does not exist.
    answer.metadata.response_code = ResponseCode::NoError;
    answer.authorities.clear();
    records(answer, &Query::query(target, kind), &name, &found, names);
    true
}

/// Examines a query and makes its answer.
pub fn answer(bytes: &[u8], names: &Names, transport: Transport, extent: Extent) -> Verdict {
    // Answers get no answer: otherwise two servers could answer each other without end.
    let Some([high, low, flags, ..]) = bytes.get(..HEADER_BYTES).filter(|head| head[2] & 0x80 == 0) else {
        return Verdict::Drop;
    };
    let Ok(query) = Message::from_vec(bytes) else {
        let id = u16::from_be_bytes([*high, *low]);
        let code = OpCode::from_u8((flags & 0x78) >> 3);
        let mut reply = Message::response(id, code);
        reply.metadata.recursion_desired = flags & 1 == 1;
        reply.metadata.response_code =
            if code == OpCode::Query { ResponseCode::FormErr } else { refusal(code) };
        return Verdict::Reply(encode(&reply, usize::from(PLAIN_BYTES_MAX)));
    };
    match examine(&query) {
        Err(code) => Verdict::Reply(encode(&response(&query, code), limit(&query, transport))),
        Ok(question) => {
            let name = lower(question.name());
            let found = names.find(&name);
            if matches!(found, Found::Foreign) {
                return Verdict::Forward(Box::new(Question { query, transport }));
            }
            let mut reply = response(&query, ResponseCode::NoError);
            reply.metadata.authoritative = true;
            if extent == Extent::Truncated {
                reply.metadata.truncation = true;
            } else {
                records(&mut reply, question, &name, &found, names);
            }
            Verdict::Reply(encode(&reply, limit(&query, transport)))
        }
    }
}

/// Returns the question of a query that can be answered, or the code of the refusal.
fn examine(query: &Message) -> Result<&Query, ResponseCode> {
    if query.metadata.op_code != OpCode::Query {
        return Err(refusal(query.metadata.op_code));
    }
    let [question] = &*query.queries else { return Err(ResponseCode::FormErr) };
    if query.edns.as_ref().is_some_and(|edns| edns.version() > 0) {
        return Err(ResponseCode::BADVERS);
    }
    if question.query_class() != DNSClass::IN {
        return Err(ResponseCode::Refused);
    }
    match question.query_type() {
        RecordType::AXFR | RecordType::IXFR => Err(ResponseCode::Refused),
        RecordType::OPT | RecordType::TSIG => Err(ResponseCode::FormErr),
        // Meta types hold no data (RFC 6895 §3.1). Only ANY has an answer.
        RecordType::Unknown(number) if (128..=255).contains(&number) => Err(ResponseCode::NotImp),
        _ => Ok(question),
    }
}

/// Returns the response code for an operation other than a query.
fn refusal(code: OpCode) -> ResponseCode {
    if code == OpCode::Update { ResponseCode::Refused } else { ResponseCode::NotImp }
}

/// Returns a name in lower case without the last dot. A byte that is illegal in host names becomes `?`, so that the name
/// matches no service.
fn lower(name: &Name) -> String {
    let mut text = String::with_capacity(name.len());
    for (at, label) in name.iter().enumerate() {
        if at > 0 {
            text.push('.');
        }
        text.extend(label.iter().map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => char::from(byte.to_ascii_lowercase()),
            _ => '?',
        }));
    }
    text
}

/// Adds the records that answer a question. If there are none, adds the SOA record of a negative answer.
fn records(reply: &mut Message, question: &Query, name: &str, found: &Found<'_>, names: &Names) {
    let owner = question.name();
    let kind = question.query_type();
    let record = |data: RData| Record::from_rdata(owner.clone(), TTL, data);
    let before = reply.answers.len();
    match found {
        // RFC 8482 §4.2: the answer to ANY is one small record.
        Found::Zone | Found::Server | Found::Service(_) | Found::Port(..) | Found::Above
            if kind == RecordType::ANY =>
        {
            reply.answers.push(record(RData::HINFO(HINFO::new("RFC8482".to_owned(), String::new()))));
        }
        Found::Zone if kind == RecordType::SOA => reply.answers.extend(soa(owner, name, names, TTL)),
        // A resolver that asks for them and gets none may take the zone for lame.
        Found::Zone if kind == RecordType::NS => {
            if let Some(server) = server_of(owner) {
                reply.answers.push(record(RData::NS(NS(server.clone()))));
                reply.additionals.push(Record::from_rdata(server, TTL, address(names.server())));
            }
        }
        Found::Server if kind == address(names.server()).record_type() => {
            reply.answers.push(record(address(names.server())));
        }
        Found::Service(service) if matches!(kind, RecordType::A | RecordType::AAAA) => {
            let of_kind =
                names.addresses(service).into_iter().filter(|ip| ip.is_ipv4() == (kind == RecordType::A));
            reply.answers.extend(of_kind.take(ADDRESSES_MAX).map(address).map(record));
        }
        Found::Port(service, port) if kind == RecordType::SRV => {
            // The service's name: the question's name after the port and the protocol, in the client's case.
            let target = owner.trim_to(usize::from(owner.num_labels()).saturating_sub(2));
            let mut targets: Vec<(Name, Vec<IpAddr>)> = names
                .pods(service)
                .filter_map(|(pod, addresses)| Some((Name::from_ascii(format!("{pod}.")).ok()?, addresses)))
                .take(ADDRESSES_MAX)
                .collect();
            if targets.is_empty() {
                targets.push((target, names.addresses(service)));
            }
            for (target, addresses) in targets {
                reply.answers.push(record(RData::SRV(SRV::new(0, 0, port.port, target.clone()))));
                let more =
                    addresses.into_iter().map(|ip| Record::from_rdata(target.clone(), TTL, address(ip)));
                let room = ADDRESSES_MAX.saturating_sub(reply.additionals.len());
                reply.additionals.extend(more.take(room));
            }
        }
        Found::Nothing => reply.metadata.response_code = ResponseCode::NXDomain,
        Found::Zone | Found::Server | Found::Service(_) | Found::Port(..) | Found::Above | Found::Foreign => {
        }
    }
    if reply.answers.len() == before {
        reply.authorities.extend(soa(owner, name, names, NEGATIVE_TTL));
    }
}

fn address(ip: IpAddr) -> RData {
    match ip {
        IpAddr::V4(ip) => RData::A(A::from(ip)),
        IpAddr::V6(ip) => RData::AAAA(AAAA::from(ip)),
    }
}

/// Returns the SOA record of the zone of a name; its last field is the lifetime of negative answers.
fn soa(owner: &Name, name: &str, names: &Names, ttl: u32) -> Option<Record> {
    let zone = names.zone_of(name)?;
    let labels = zone.as_str().split('.').count();
    let zone = owner.trim_to(labels);
    let (primary, mailbox) = (server_of(&zone)?, zone.prepend_label("hostmaster").ok()?);
    // The serial is compared modulo 2^32 (RFC 1982).
    let serial = u32::try_from(names.snapshot().generation & u64::from(u32::MAX)).unwrap_or(0);
    let data = SOA::new(primary, mailbox, serial, 3_600, 600, 86_400, NEGATIVE_TTL);
    Some(Record::from_rdata(zone, ttl, RData::SOA(data)))
}

/// Returns the name of a zone's name server.
fn server_of(zone: &Name) -> Option<Name> {
    zone.prepend_label(SERVER).ok()
}

/// Returns an answer without records.
fn response(query: &Message, code: ResponseCode) -> Message {
    let mut reply = Message::response(query.metadata.id, query.metadata.op_code);
    reply.metadata = Metadata::response_from_request(&query.metadata);
    reply.metadata.response_code = code;
    if query.metadata.op_code == OpCode::Query && query.queries.len() == 1 {
        reply.queries.clone_from(&query.queries);
    }
    reply.edns = query.edns.as_ref().map(|_| edns_of(query));
    reply
}

/// Returns the EDNS options of this server, for an answer to a query or for a forwarded query.
fn edns_of(query: &Message) -> Edns {
    let mut edns = Edns::new();
    edns.set_max_payload(UDP_BYTES_MAX);
    edns.set_dnssec_ok(query.edns.as_ref().is_some_and(|edns| edns.flags().dnssec_ok));
    edns
}

/// Returns the largest answer over UDP that the client accepts, in bytes.
fn udp_limit(query: &Message) -> u16 {
    let asked = query.edns.as_ref().map_or(PLAIN_BYTES_MAX, Edns::max_payload);
    asked.clamp(PLAIN_BYTES_MAX, UDP_BYTES_MAX)
}

/// Returns the largest answer that the client accepts, in bytes.
fn limit(query: &Message, transport: Transport) -> usize {
    match transport {
        Transport::Udp => usize::from(udp_limit(query)),
        Transport::Tcp => usize::from(u16::MAX),
    }
}

/// Encodes an answer. An answer above the limit loses its records and gets the TC flag.
fn encode(reply: &Message, limit: usize) -> Reply {
    let code = reply.metadata.response_code;
    let whole = reply.to_vec().unwrap_or_default();
    if !whole.is_empty() && whole.len() <= limit {
        return Reply { bytes: whole, code };
    }
    let mut cut = reply.clone();
    cut.answers.clear();
    cut.authorities.clear();
    cut.additionals.clear();
    cut.metadata.truncation = true;
    // A header and one question always fit.
    Reply { bytes: cut.to_vec().unwrap_or_default(), code }
}

#[cfg(test)]
mod tests;
