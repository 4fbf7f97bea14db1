//! Calls that this gateway passes on to gateways of other networks, as their callers are on its own network
//! (`docs/federation.md, "Call other networks through the own gateway"`).
//!
//! By SNI, the far gateway is dialled like an endpoint, and the hello goes on as it came. By HBONE, [`tunnel`] opens a CONNECT to the
//! far gateway for the caller's stream, which carries the caller's own tunnel, so the TLS of workloads stays end to end. [`kept`] holds
//! the far gateways of services, and [`returning`] finds hellos that come back.

pub(crate) mod kept;
pub(crate) mod returning;
pub(crate) mod tunnel;
