//! The pure functions over a snapshot. Each question is answered by one function, which the data path, xDS, DNS, `explain`, `horizon`
//! and the tests call alike.
//!
//! - Admission: [`admit`], which also writes the steps that `explain` prints (its request and answer: [`decision`]); [`dialled`]: the endpoints that can be dialled.
//! - Results for viewers: [`view`] (split horizon: the endpoints and gateways that a viewer gets, and their weights; [`weights`] is
//!   its arithmetic only, [`steering`] the division among networks); [`plain_client`]: a client outside the mesh.
//! - Explanations: [`omitted`], [`near`], [`missing`].
//! - Tests through admission and views: `steps` (built step by step equals built at once), `peers`, `carriers`, `egress`, `gateways`; `random`: meshes.

pub mod admit;
pub mod decision;
pub mod dialled;
pub mod missing;
pub mod near;
pub mod omitted;
pub mod plain_client;
pub mod steering;
pub mod view;
pub mod weights;

#[cfg(test)]
mod carriers;
#[cfg(test)]
mod egress;
#[cfg(test)]
mod gateways;
#[cfg(test)]
mod peers;
#[cfg(test)]
mod random;
#[cfg(test)]
mod steps;
