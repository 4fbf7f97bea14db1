//! Carriers: HTTP/2 connections between gateways of two organisations on which the gateway that has dialled serves the requests, so that
//! a network without an open port can be called (`docs/federation.md, "Call a network without an open port"`).
//!
//! ```text
//!  caller ─▶ [`call`] ─▶ [`bridge`] ══ carrier ══▶ hbone::stream ─▶ endpoint
//!            own gateway: [`accepted`]             peer's gateway: [`dialled`]
//! ```
//!
//! `pool` lists the carriers of this process. On the side that dials, a stream is served as one of HBONE; on the other side a call is
//! relayed as to an endpoint, whose socket is one end of a `pair` that `bridge` joins with the stream.

pub(crate) mod accepted;
pub(crate) mod bridge;
pub(crate) mod call;
pub(crate) mod dialled;
pub(crate) mod listener;
pub(crate) mod pair;
pub mod pool;
