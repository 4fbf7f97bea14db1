//! The checked settings of the config file, as values without behaviour of their own.
//!
//! - [`policy`]: all of them; [`network`], [`listener`], [`route`] ([`backend`]: those of the Gateway API), [`export`]
//!   ([`export_tls`]: the TLS modes that a rule opens), [`peer`]: other organisations.
//! - [`tuning`]: how endpoints are chosen and dialled; [`steering`]: how calls are divided among networks; [`limits`]: limits and timeouts.
//! - [`scope`]: what a registry may give.

pub mod backend;
pub mod export;
pub mod export_tls;
pub mod limits;
pub mod listener;
pub mod network;
pub mod peer;
pub mod policy;
pub mod route;
pub mod scope;
pub mod steering;
pub mod tuning;
