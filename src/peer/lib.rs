//! Federation: the link with a peer, another organisation with which services are exchanged (`docs/federation.md, "Federation"`),
//! and the registry of its services. proto/isthmus/peer/README.md describes the protocol.
//!
//! - `options`: the settings of a link. `links`: the owner of all links, which accepts links from a listener. `link`: one link,
//!   and the values that links share. `dialling`: the addresses of a peer to which this gateway connects, and the links that it
//!   opens there. `addresses`: the addresses at which peers can reach this mesh.
//! - `transport`: TLS and gRPC under a link. `codec`: the limits on its messages. `outline`: what is read of a service before it is
//!   decoded. `budget`: the memory of a peer's records. `session`: one link, from Hello to Goodbye.
//! - `carrying`: the carriers that this gateway opens, on which callers of the peer reach a network without an open port.
//! - `instances`: the newest link of each process of a peer.
//! - `offer`: the services and gateways that this gateway offers to a peer, and a record of what was sent. `export_times`: the
//!   time of each service's first export. `distances`: round-trip times between networks of both sides. `taken`: the items that the peer has sent. `record`: a service as the link carries
//!   it.
//! - `status`: the links for operators. `refusals`: the items that an importer has refused.
//! - `enrolment`: two gateways exchange identities and roots by a token. `token`: the token. `invitations`: the secrets that
//!   can be used, each once. `party`: the identity, roots and clock that a gateway sends about itself. `enrolled`: the file of
//!   a link that an enrolment created. `removed`: the stored links of peers that the config does not have.
//!
//! - `importer`: the interface to which a link hands a peer's services. `imports`: the registry behind it: `imports/reading` makes
//!   one service of ours from one record, `imports/items` keeps what one replica has sent.

pub mod addresses;
mod budget;
mod carrying;
mod codec;
mod dialling;
mod distances;
pub mod enrolled;
pub mod enrolment;
mod export_times;
pub mod importer;
pub mod imports;
mod instances;
pub mod invitations;
mod link;
pub mod links;
mod offer;
pub mod options;
mod outline;
pub mod party;
mod record;
pub mod refusals;
mod removed;
mod session;
pub mod status;
mod taken;
pub mod token;
mod transport;
