//! The hand-over to a new process of the same gateway: the messages on the upgrade socket, and the socket itself. The
//! messages are executed in `isthmus-dataplane` (connections) and `isthmus-app` (everything else).
//!
//! - `message`: the messages of both processes, in their order. `record`: the record of one live connection.
//! - `belief`: what a process has learnt, which the state folder keeps as well.
//! - `frame`: the bytes of a message. `channel`: the socket, whose frames carry descriptors.
//! - `place`: where the socket is, and the places that are refused.

pub mod belief;
pub mod channel;
pub mod frame;
pub mod message;
pub mod place;
pub mod record;
