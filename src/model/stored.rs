//! The stored form of values: how the copies of registries on disk write them. A value is checked like a value from any other
//! source when it is read back.

use std::convert::Infallible;
use std::num::NonZeroU16;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::endpoint::Labels;
use super::identity::Identity;
use super::name::HostName;
use super::place::{ClusterId, Locality, Network};

/// Stores a type as its text, which its parser reads back.
macro_rules! store_as_text {
    ($($type:ty: $parse:expr),+ $(,)?) => {$(
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.serialize_str(self.as_str())
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let text = String::deserialize(from)?;
                $parse(&text).map_err(D::Error::custom)
            }
        }
    )+};
}

store_as_text! {
    HostName: HostName::parse,
    Identity: Identity::parse,
    Network: |text: &str| Ok::<_, Infallible>(Self::new(text)),
    ClusterId: |text: &str| Ok::<_, Infallible>(Self::new(text)),
    Locality: |text: &str| Self::parse(text).ok_or("a locality has at most three parts"),
}

impl Serialize for Labels {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.iter())
    }
}

pub(super) fn port<'de, D: Deserializer<'de>>(from: D) -> Result<u16, D::Error> {
    NonZeroU16::deserialize(from).map(NonZeroU16::get)
}

/// Endpoints, as runs of neighbours that have the same template. The template of a run is stored once.
pub mod endpoints {
    use std::sync::Arc;

    use super::{Deserialize, Deserializer, Serializer};
    use crate::address::Host;
    use crate::endpoint::{Endpoint, EndpointTemplate, Health, Weight};
    use crate::place::Locality;

    /// A template, and the other fields of each endpoint that has it.
    type Run = (Arc<EndpointTemplate>, Vec<(Host, Locality, Weight, Health)>);

    /// Stores the endpoints.
    pub fn serialize<S: Serializer>(endpoints: &[Endpoint], to: S) -> Result<S::Ok, S::Error> {
        let runs = endpoints.chunk_by(|one, next| Arc::ptr_eq(&one.template, &next.template));
        to.collect_seq(runs.map(|run| {
            let fields = |one: &Endpoint| (one.host.clone(), one.locality.clone(), one.weight, one.health);
            (&run[0].template, run.iter().map(fields).collect::<Vec<_>>())
        }))
    }

    /// Reads stored endpoints back.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Arc<[Endpoint]>, D::Error> {
        let runs = Vec::<Run>::deserialize(from)?.into_iter();
        let endpoints = runs.flat_map(|(template, run)| {
            run.into_iter().map(move |(host, locality, weight, health)| Endpoint {
                host,
                locality,
                weight,
                health,
                template: template.clone(),
            })
        });
        Ok(endpoints.collect())
    }
}
