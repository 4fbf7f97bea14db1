//! The keys of steering: how the calls of xDS clients are divided among networks.

use isthmus_document::form::{self, Form, text_forms};
use isthmus_document::key::keys;
use isthmus_document::problem::InvalidValue;
use isthmus_document::table::Kind;
use isthmus_document::tree::Node;
use isthmus_settings::steering::{self, Cost, SteeringMode};

text_forms! {
    /// The method by which calls are divided.
    pub(crate) Mode: SteeringMode = mode, "steeringMode", "^(off|nearest)$", "off or nearest",
        written by |mode: &SteeringMode| mode.text().to_owned();
}

fn mode(text: &str) -> Result<SteeringMode, InvalidValue> {
    match SteeringMode::ALL.into_iter().find(|mode| mode.text() == text) {
        Some(mode) => Ok(mode),
        None if text == "adaptive" => {
            Err(InvalidValue::new("this version cannot divide calls by load").hint(Some("nearest")))
        }
        None => Err("".into()),
    }
}

/// A cost per GiB: a number from 0 with up to six decimal places.
#[derive(Debug)]
pub(crate) struct CostPerGib;

impl form::TextForm for CostPerGib {
    const TEXT: &'static isthmus_document::table::Text = &isthmus_document::table::Text {
        name: "cost",
        expects: "a number from 0 with up to six decimal places, such as 0.02",
        pattern: "^[0-9]+(\\.[0-9]{1,6})?$",
        number: true,
        check: |text| Self::parse(text).map(drop),
        write: |text| Some(Self::parse(text).ok()?.to_string()),
    };

    fn parse(text: &str) -> Result<Cost, InvalidValue> {
        Cost::parse(text).ok_or_else(|| "".into())
    }
}

impl Form for CostPerGib {
    type Value = Cost;
    const KIND: Kind = Kind::Text(<Self as form::TextForm>::TEXT);

    fn read(node: &Node) -> Option<Cost> {
        Cost::parse(node.text()?)
    }
}

keys! {
    /// How the calls of xDS clients are divided among the networks that have a service.
    pub(crate) Steering "steering" {
        /// `off`: in proportion to the ready endpoints of each network. `nearest`: the client's own network first; what its ready
        /// endpoints do not suffice for goes to the other networks, one ring of distances after another.
        MODE "mode": Mode = SteeringMode::default();
        /// Upper bounds of the rings, by round-trip time: each larger than the one before. Networks farther than the last bound
        /// make one more ring.
        RINGS "rings": form::NonEmpty<form::Timeout> => "2ms, 20ms, 80ms";
        /// Largest share of a client's calls that leaves its network while that has a ready endpoint of the service.
        MAX_REMOTE "maxRemote": form::Percent = steering::Steering::default().max_remote_percent;
        /// Distance that a cost of 0.01 per GiB (`networks.*.cost`) adds.
        COST_WEIGHT "costWeight": form::Period = steering::Steering::default().cost_weight;
    }

    /// How the calls to some services are divided among networks.
    pub(crate) PolicySteering "policySteering" {
        /// `off` or `nearest`.
        MODE "mode": Mode => "`steering.mode`";
        /// Shares that networks get, at most 100% together, and each at most 1.4 × ready ÷ all of the network's endpoints. The
        /// rest is divided by the mode, which must not be `off`; so a network may get more than its share.
        SHARES "shares": form::MapOf<form::NetworkName, form::Percent> => "none";
        /// Networks that calls go to first when they leave their own network, in this order, before all others.
        FAILOVER "failover": form::NonEmpty<form::NetworkName> => "by distance alone";
        /// Networks that calls may go to when they leave their own network. Clients do not get endpoints of others.
        ONLY "only": form::NonEmpty<form::NetworkName> => "all";
    }
}
