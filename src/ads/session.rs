//! One client's stream, as a state machine without sockets: the versions that were sent and acknowledged. The client's names, and the
//! resources that they select, are [`Resources`], which each server brings.
//!
//! ```text
//!              request              change to send
//!   (unknown) ────────▶ idle ────────────────────▶ in flight
//!                        ▲                            │
//!                        └─────── ACK or NACK ────────┘
//! ```
//!
//! Each type is independent, but for [`ResourceKind::GATE`]. While a response is in flight, changed names of the type are collected;
//! after the acknowledgement the newest state of these names is sent. There is no timer: a client that never acknowledges costs a
//! set of names. A client that refuses a response gets a resource of it again only after the
//! resource has changed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use tonic::Status;

use super::budget::{Account, Exhausted};
use super::kind::ResourceKind;
use super::node::beginning_of;
use super::protocol::{Acknowledgement, NAME_BYTES_MAX, Overview, Protocol, Request, Response};
use super::resource::{Resource, Version};

/// The largest number of names that a client may subscribe to, per type.
pub const NAMES_MAX: usize = 1 << 17;
/// The longest text of a NACK that is kept, in bytes. A client may quote whole resources.
const ERROR_BYTES_MAX: usize = 4096;

/// The names that one client subscribes to, and the resources that they select.
pub trait Resources: Send + 'static {
    /// The types of the resources.
    type Kind: ResourceKind;
    /// One [`Flight`] for each type: an array.
    type Flights: Default + AsRef<[Flight]> + AsMut<[Flight]> + Send;

    /// Applies the names of a request. The bytes of the names are taken from the account.
    fn request(&mut self, kind: Self::Kind, asked: Asked, account: &mut Account) -> Result<(), Refusal>;

    /// Takes the changes since the last call, before a response is made.
    fn refresh(&mut self);

    /// Returns the content of the next response of a type, and assumes that it is sent. The bytes of names that are not kept any more
    /// are released.
    fn next(&mut self, kind: Self::Kind, account: &mut Account) -> Next;

    /// Ends the use of what [`Self::refresh`] took, after a response was made, or there was none to make.
    fn settle(&mut self) {}

    /// Waits until there may be a change to send; an error ends the stream. Cancel safe.
    fn changed(&mut self) -> impl Future<Output = Result<(), Status>> + Send;

    /// Returns the status with which the stream must end, because the resources will not become ready.
    fn fault(&self) -> Option<Status> {
        None
    }

    /// Returns true if a client that sends no further requests still gets a response of a type of which it got `sent` responses.
    fn waits(&self, kind: Self::Kind, sent: u64) -> bool;

    /// Returns the number of bytes that the names may add to a later request.
    fn names_bytes(&self, _kind: Self::Kind) -> usize {
        0
    }

    /// Returns the subscription to a type, for operators; the session adds its requests and responses.
    fn overview(&self, kind: Self::Kind) -> Overview;
}

/// The names of a request.
#[derive(Debug, Default)]
pub struct Asked {
    /// True if the request is the first one of its type.
    pub is_first: bool,
    /// True if the request has the nonce of the last response.
    pub is_answer: bool,
    /// Delta: names to subscribe to. State of the world: all names.
    pub names: Vec<String>,
    /// Delta: names to unsubscribe from.
    pub unsubscribe: Vec<String>,
    /// First request: the resources of an earlier stream.
    pub has: Earlier,
    /// First request: true if the client has resources of an earlier stream.
    pub returns: bool,
}

/// The resources of an earlier stream, each with its version; `None`: the version is not one of ours.
pub type Earlier = BTreeMap<Arc<str>, Option<Version>>;

/// The next response of a type.
pub enum Next {
    /// There is nothing to send.
    Nothing,
    /// The response takes further calls to make.
    Unfinished,
    /// A response with this content.
    Content(Content),
}

/// The content of a response.
#[derive(Default)]
pub struct Content {
    /// The resources.
    pub resources: Vec<Arc<Resource>>,
    /// The names of resources that do not exist, for a stream in the delta variant.
    pub removed: Vec<Arc<str>>,
    /// The names of requested resources that do not exist, for a stream in the state-of-the-world variant.
    pub missing: Vec<Arc<str>>,
    /// The time of the first change in the response.
    pub since: Option<Instant>,
}

/// The reason why a stream must end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The client subscribes to more than [`NAMES_MAX`] names of a type.
    #[error("the client subscribes to more than {NAMES_MAX} names of one type")]
    TooManyNames,
    /// A name is longer than [`NAME_BYTES_MAX`].
    #[error("the client subscribes to a name of more than {NAME_BYTES_MAX} bytes")]
    TooLongName,
    /// The names of the client, or of all clients, exceed their limit.
    #[error("cannot store the names of the client: {0}")]
    TooManyBytes(#[from] Exhausted),
    /// The client subscribes to some of these resources by name.
    #[error("{0} are served all together, and not by name")]
    Named(&'static str),
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        let text = refusal.to_string();
        match refusal {
            Refusal::TooLongName | Refusal::Named(_) => Self::invalid_argument(text),
            Refusal::TooManyNames | Refusal::TooManyBytes(_) => Self::resource_exhausted(text),
        }
    }
}

/// The requests and responses of one type.
#[derive(Default)]
pub struct Flight {
    /// True if the client has sent a request of the type.
    asked: bool,
    in_flight: Option<InFlight>,
    /// The nonce of the last response.
    last_nonce: Option<String>,
    sent: u64,
}

/// A response that is not acknowledged yet.
struct InFlight {
    /// The time of the first change in the response.
    since: Option<Instant>,
    sent: SystemTime,
}

/// The session of one stream.
pub struct Session<R: Resources> {
    resources: R,
    flights: R::Flights,
    /// Counts the bytes of the names against the limits.
    account: Account,
    protocol: Protocol,
    responses: u64,
    unfinished: bool,
}

impl<R: Resources> Session<R> {
    /// Makes a session without subscriptions.
    pub fn new(resources: R, protocol: Protocol, account: Account) -> Self {
        let flights = R::Flights::default();
        debug_assert_eq!(flights.as_ref().len(), R::Kind::ALL.len(), "one for each type");
        Self { resources, flights, account, protocol, responses: 0, unfinished: false }
    }

    /// Returns the resources.
    pub fn resources(&self) -> &R {
        &self.resources
    }

    /// Returns the variant of the protocol.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Returns the cost of the client's names in bytes.
    pub fn names_cost(&self) -> usize {
        self.account.bytes()
    }

    /// Returns true if the client has sent a request of the type.
    pub fn has_asked(&self, kind: R::Kind) -> bool {
        self.flight(kind).asked
    }

    /// Waits until there may be a change to send; an error ends the stream.
    pub fn changed(&mut self) -> impl Future<Output = Result<(), Status>> + Send {
        self.resources.changed()
    }

    /// Returns the state of a type.
    pub fn overview(&self, kind: R::Kind) -> Overview {
        let Flight { asked, in_flight, sent, .. } = self.flight(kind);
        let in_flight = in_flight.as_ref().map(|flight| flight.sent);
        Overview { asked: *asked, sent: *sent, in_flight, ..self.resources.overview(kind) }
    }

    /// Returns the number of names and complete responses that are held back.
    pub fn held_back(&self) -> usize {
        let asked = R::Kind::ALL.iter().filter(|kind| self.has_asked(**kind));
        asked.map(|kind| self.resources.overview(*kind).held_back).sum()
    }

    /// Returns true if a client that sends no further requests still gets a response.
    pub fn waits(&self) -> bool {
        R::Kind::ALL.iter().any(|&kind| {
            let flight = self.flight(kind);
            flight.asked && self.resources.waits(kind, flight.sent)
        })
    }

    /// Applies a client's request to its subscriptions. Returns how the request answers the last response.
    pub fn request(&mut self, kind: R::Kind, request: Request) -> Result<Acknowledgement, Refusal> {
        let Request { names, unsubscribe, has, returns, nonce, error } = request;
        if names.iter().chain(has.iter().map(|(name, _)| name)).any(|name| name.len() > NAME_BYTES_MAX) {
            return Err(Refusal::TooLongName);
        }
        let flight = &mut self.flights.as_mut()[kind.index()];
        let is_answer = flight.last_nonce.as_ref() == Some(&nonce);
        // The client sent a stale request before it saw the last response. Another request will answer that response.
        if self.protocol == Protocol::StateOfTheWorld && flight.last_nonce.is_some() && !is_answer {
            return Ok(Acknowledgement::None);
        }
        let answered = if is_answer { flight.in_flight.take() } else { None };
        let answer = match (answered, error) {
            (None, _) => Acknowledgement::None,
            (Some(flight), None) => Acknowledgement::Ack(flight.since),
            (Some(_), Some(error)) => Acknowledgement::Nack(beginning_of(&error, ERROR_BYTES_MAX)),
        };
        let is_first = !std::mem::replace(&mut flight.asked, true);
        // Only the first request of a type can show that the client has resources from an earlier stream.
        let has = has.into_iter().filter(|_| is_first);
        let has = has.map(|(name, version)| (name.into(), Version::parse(&version))).collect();
        let asked = Asked { is_first, is_answer, names, unsubscribe, has, returns: is_first && returns };
        self.resources.request(kind, asked, &mut self.account)?;
        Ok(answer)
    }

    /// Returns a nonce that no other response of this stream has.
    pub fn next_nonce(&mut self) -> String {
        self.responses += 1;
        format!("{:x}", self.responses)
    }

    /// Returns the next response if there is one to send.
    pub fn response(&mut self) -> Option<Response> {
        self.resources.refresh();
        let response = self.next_response();
        self.resources.settle();
        response
    }

    /// Returns true if [`Self::response`] returned `None` only because making the response takes further calls.
    pub fn is_unfinished(&self) -> bool {
        self.unfinished
    }

    fn next_response(&mut self) -> Option<Response> {
        self.unfinished = false;
        for &kind in R::Kind::ALL {
            let flight = self.flight(kind);
            if flight.in_flight.is_some() && R::Kind::GATE == Some(kind) {
                return None;
            }
            if !flight.asked || flight.in_flight.is_some() {
                continue;
            }
            match self.resources.next(kind, &mut self.account) {
                Next::Nothing => {}
                Next::Unfinished => {
                    self.unfinished = true;
                    return None;
                }
                Next::Content(content) => return Some(self.send(kind, content)),
            }
        }
        None
    }

    /// Makes the response and records that it is in flight.
    fn send(&mut self, kind: R::Kind, content: Content) -> Response {
        let nonce = self.next_nonce();
        let Content { resources, removed, missing, since } = content;
        let flight = &mut self.flights.as_mut()[kind.index()];
        flight.sent += 1;
        flight.in_flight = Some(InFlight { since, sent: SystemTime::now() });
        flight.last_nonce = Some(nonce.clone());
        Response {
            protocol: self.protocol,
            type_url: kind.type_url().into(),
            nonce,
            version: Version::of_all(resources.iter().map(|resource| resource.version)),
            resources,
            removed,
            missing,
            is_served: true,
        }
    }

    fn flight(&self, kind: R::Kind) -> &Flight {
        &self.flights.as_ref()[kind.index()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Budget;
    use crate::ztunnel::Kind;

    /// Resources of which each response has none, due after each request that is no answer.
    #[derive(Default)]
    struct Empty {
        due: [bool; 2],
        earlier: Earlier,
    }

    impl Resources for Empty {
        type Kind = Kind;
        type Flights = [Flight; 2];

        fn request(&mut self, kind: Kind, asked: Asked, _: &mut Account) -> Result<(), Refusal> {
            self.due[kind.index()] = !asked.is_answer;
            self.earlier.extend(asked.has);
            Ok(())
        }

        fn refresh(&mut self) {}

        fn next(&mut self, kind: Kind, _: &mut Account) -> Next {
            match std::mem::take(&mut self.due[kind.index()]) {
                true => Next::Content(Content::default()),
                false => Next::Nothing,
            }
        }

        async fn changed(&mut self) -> Result<(), Status> {
            std::future::pending().await
        }

        fn waits(&self, _: Kind, sent: u64) -> bool {
            sent == 0
        }

        fn overview(&self, _: Kind) -> Overview {
            Overview::default()
        }
    }

    fn session(protocol: Protocol) -> Session<Empty> {
        let account = Budget::new(1 << 20).account([127, 0, 0, 1].into(), 1 << 20);
        Session::new(Empty::default(), protocol, account)
    }

    fn answer(nonce: &str) -> Request {
        Request { nonce: nonce.to_owned(), ..Request::default() }
    }

    /// Returns the nonce of the next response.
    fn next(session: &mut Session<Empty>) -> Option<String> {
        session.response().map(|response| response.nonce)
    }

    #[test]
    fn a_response_of_a_type_waits_for_the_answer_to_the_one_before() {
        for protocol in [Protocol::Delta, Protocol::StateOfTheWorld] {
            let mut session = session(protocol);
            session.request(Kind::Address, Request::default()).expect("taken");
            let first = next(&mut session).expect("a response");
            assert!(session.overview(Kind::Address).in_flight.is_some());
            // An answer to another response is none. In state of the world, the request has no effect either.
            assert_eq!(session.request(Kind::Address, answer("x")), Ok(Acknowledgement::None));
            assert_eq!(next(&mut session), None, "{protocol:?}");
            assert_eq!(session.request(Kind::Address, answer(&first)), Ok(Acknowledgement::Ack(None)));
            assert_eq!(session.request(Kind::Address, answer(&first)), Ok(Acknowledgement::None), "twice");
            assert_eq!(session.overview(Kind::Address).in_flight, None);
        }
    }

    #[test]
    fn a_stale_request_in_state_of_the_world_has_no_effect() {
        let mut world = session(Protocol::StateOfTheWorld);
        let mut delta = session(Protocol::Delta);
        for session in [&mut world, &mut delta] {
            session.request(Kind::Address, Request::default()).expect("taken");
            let nonce = next(session).expect("a response");
            session.request(Kind::Address, answer(&nonce)).expect("taken");
            session.request(Kind::Address, answer("")).expect("taken");
        }
        assert_eq!(next(&mut world), None);
        assert!(next(&mut delta).is_some());
    }

    #[test]
    fn no_other_type_is_sent_while_a_response_of_the_gate_is_in_flight() {
        let mut session = session(Protocol::Delta);
        for &kind in Kind::ALL {
            session.request(kind, Request::default()).expect("taken");
        }
        let gate = session.response().expect("a response");
        assert_eq!(gate.type_url, Kind::Authorization.type_url());
        assert_eq!(next(&mut session), None);
        assert!(session.waits());
        session.request(Kind::Authorization, answer(&gate.nonce)).expect("taken");
        assert!(next(&mut session).is_some() && !session.waits());
    }

    #[test]
    fn texts_and_names_of_a_client_are_bounded() {
        let mut session = session(Protocol::Delta);
        let has = |name: &str| vec![(name.to_owned(), "1".to_owned())];
        session.request(Kind::Address, Request { has: has("a"), ..Request::default() }).expect("taken");
        session.request(Kind::Address, Request { has: has("b"), ..Request::default() }).expect("taken");
        assert_eq!(session.resources().earlier.len(), 1, "only the first request has an earlier stream");
        let nonce = next(&mut session).expect("a response");
        let error = Some("x".repeat(ERROR_BYTES_MAX + 1));
        let kept = Ok(Acknowledgement::Nack("x".repeat(ERROR_BYTES_MAX)));
        assert_eq!(session.request(Kind::Address, Request { error, ..answer(&nonce) }), kept);
        let long = "x".repeat(NAME_BYTES_MAX + 1);
        let refused = [
            Request { names: vec![long.clone()], ..Request::default() },
            Request { has: has(&long), ..Request::default() },
        ];
        for request in refused {
            assert_eq!(session.request(Kind::Address, request), Err(Refusal::TooLongName));
        }
    }
}
