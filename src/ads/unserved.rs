//! Requests for types of resources that this server does not serve.
//!
//! A client that waits for such resources is told so, because it would wait in silence otherwise. Requests by name are answered
//! with an error for each name, in `resource_errors`, and to delta clients also with the names as removed. A request for all
//! resources of a type has nothing that the protocol could remove, and a client could take an empty response for the whole truth:
//! a ztunnel would pass connections on in plain text. Therefore such a request ends the stream, unless the client has asked for
//! types that are served: it keeps those, and gets the error alone.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use tonic::Status;

use super::kind::ResourceKind;
use super::node::beginning_of;
use super::protocol::{NAME_BYTES_MAX, Protocol, Request, Response};
use super::resource::Version;

/// The largest number of types that a stream may ask for and that are not served.
const TYPES_MAX: usize = 16;
/// The name that stands for all resources of a type.
const ALL: &str = "*";

/// The requests of one stream for types that are not served.
#[derive(Default)]
pub(super) struct Unserved {
    /// The hash of the names in the last answered request of each type.
    answered: HashMap<String, u64>,
    hasher: RandomState,
    /// The response that is to be sent.
    pub(super) response: Option<Response>,
}

impl Unserved {
    /// Returns true if no request was answered yet.
    pub(super) fn is_empty(&self) -> bool {
        self.answered.is_empty()
    }

    /// Returns the names to report in a response; `None` if the request needs no response: it is an acknowledgement.
    ///
    /// `serves` is true if the client has asked for a type that is served.
    pub(super) fn request<K: ResourceKind>(
        &mut self,
        type_url: &str,
        request: &Request,
        serves: bool,
    ) -> Result<Option<Vec<Arc<str>>>, Status> {
        let hash = self.hasher.hash_one(&request.names);
        // An acknowledgement has no names, or those of the question; a client that unsubscribes may have no names either.
        let acknowledges = !request.nonce.is_empty()
            && (request.names.is_empty() || self.answered.get(type_url) == Some(&hash));
        if acknowledges || (request.names.is_empty() && !request.unsubscribe.is_empty()) {
            return Ok(None);
        }
        let names = match request.names.as_slice() {
            [] => vec![ALL.into()],
            names => names.iter().map(|name| Arc::from(name.as_str())).collect::<Vec<Arc<str>>>(),
        };
        if !serves && names.iter().all(|name| **name == *ALL) {
            return Err(refusal::<K>(type_url));
        }
        if !self.answered.contains_key(type_url) && self.answered.len() == TYPES_MAX {
            return Err(Status::resource_exhausted(format!(
                "the client asks for more than {TYPES_MAX} types that are not served"
            )));
        }
        self.answered.insert(type_url.to_owned(), hash);
        Ok(Some(names))
    }
}

/// Returns the status for a client that asks for a type which is not served.
pub(super) fn refusal<K: ResourceKind>(type_url: &str) -> Status {
    let type_url = beginning_of(type_url, NAME_BYTES_MAX);
    Status::unimplemented(format!(
        "resources of the type {type_url:?} are not served; served are {}",
        K::served()
    ))
}

/// Makes the answer to a request for these names of a type that is not served.
pub(super) fn response(
    protocol: Protocol,
    type_url: String,
    nonce: String,
    names: Vec<Arc<str>>,
) -> Response {
    let removed = match protocol {
        Protocol::Delta => names.iter().filter(|name| &***name != ALL).cloned().collect(),
        Protocol::StateOfTheWorld => Vec::new(),
    };
    Response {
        protocol,
        type_url: type_url.into(),
        nonce,
        version: Version::of_all(std::iter::empty()),
        resources: Vec::new(),
        removed,
        missing: names,
        is_served: false,
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;
    use crate::ztunnel::Kind;

    fn asked(names: &[&str], nonce: &str) -> Request {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        Request { names, nonce: nonce.to_owned(), ..Request::default() }
    }

    #[test]
    fn each_question_is_answered_once() {
        let mut unserved = Unserved::default();
        let mut answer = |names: &[&str], nonce: &str| {
            let names = unserved.request::<Kind>("type", &asked(names, nonce), true).expect("an answer");
            names.map(|names| names.join(" "))
        };
        assert_eq!(answer(&["a"], "").as_deref(), Some("a"));
        assert_eq!(answer(&["a"], "1"), None, "an ACK or NACK in the state-of-the-world variant");
        assert_eq!(answer(&["a", "b"], "1").as_deref(), Some("a b"));
        assert_eq!(answer(&[], "2"), None, "an ACK in the delta variant");
        assert_eq!(answer(&[], "").as_deref(), Some("*"));
        let unsubscribes = Request { unsubscribe: vec!["a".to_owned()], ..Request::default() };
        assert_eq!(unserved.request::<Kind>("type", &unsubscribes, true).expect("an answer"), None);
    }

    #[test]
    fn a_client_that_wants_nothing_else_is_refused() {
        let refused = |names: &[&str]| {
            let refused = Unserved::default().request::<Kind>("type", &asked(names, ""), false);
            refused.err().map(|status| status.code())
        };
        assert_eq!(refused(&[]), Some(Code::Unimplemented));
        assert_eq!(refused(&["*"]), Some(Code::Unimplemented));
        assert_eq!(refused(&["a"]), None);
    }

    #[test]
    fn the_number_of_types_is_limited() {
        let mut unserved = Unserved::default();
        let mut code = |of: usize| {
            let refused = unserved.request::<Kind>(&of.to_string(), &asked(&["a"], ""), true);
            refused.err().map(|status| status.code())
        };
        assert!((0..TYPES_MAX).all(|of| code(of).is_none()));
        assert_eq!(code(TYPES_MAX), Some(Code::ResourceExhausted));
        assert_eq!(code(0), None);
    }
}
