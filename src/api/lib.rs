//! The values of the admin API: the server serialises them, and the commands, the dashboard and `isthmus top` read them. There
//! is one type for each object of `docs/api.md`, and the names of members are those of the JSON. A member that an answer lacks
//! gets its default, so that commands can read the answers of an older gateway. Values whose set may grow, such as states and
//! reasons, are text.
//!
//! - `connection`: the table of the members of a connection, which the access log and spans use too.
//! - `status`, `listener`, `registry`, `service`, `endpoint`, `network`, `peer`, `client`, `certificate`, `drain`: the lists.
//! - `requests`: the table of the requests. `table`: lists as rows of texts.
//! - `explanation`, `horizon`, `trace`, `overview` with `selection` and `listed`: answers. `text`: quantities, and the escaping of deceptive characters.

pub mod certificate;
pub mod client;
pub mod connection;
pub mod drain;
pub mod endpoint;
pub mod explanation;
pub mod horizon;
pub mod listed;
pub mod listener;
pub mod network;
pub mod overview;
pub mod peer;
pub mod registry;
pub mod requests;
pub mod selection;
pub mod service;
pub mod status;
pub mod table;
pub mod text;
pub mod trace;

#[cfg(test)]
mod tests;
