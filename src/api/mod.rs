//! The values of the admin API: what the server serialises, and what the commands, the dashboard and `isthmus top`
//! read. One type per object of `docs/api.md`; the names of members are those of the JSON. A member that an answer lacks
//! has its default, so that commands can read the answers of an older gateway. Words that may grow in number, such as
//! states and reasons, are text.

pub mod certificate;
pub mod client;
pub mod connection;
pub mod endpoint;
pub mod explanation;
pub mod horizon;
pub mod listener;
pub mod network;
pub mod overview;
pub mod peer;
pub mod registry;
pub mod service;
pub mod status;
pub mod text;
pub mod trace;

#[cfg(test)]
mod tests;
