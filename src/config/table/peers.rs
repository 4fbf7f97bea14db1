//! The keys of `peers`: other organisations, the services that each of them may reach, and the services that it offers.

use std::sync::Arc;
use std::time::Duration;

use isthmus_document::form::{self, Form, text_forms};
use isthmus_document::key::keys;
use isthmus_document::problem::InvalidValue;
use isthmus_document::table::{Kind, Union};
use isthmus_document::tree::Node;
use isthmus_model::name::is_dns_label;
use isthmus_peer::enrolled::GatewayAddress;
use isthmus_settings::export_tls::ExportTls;
use isthmus_settings::peer::{Carry, NameTemplate, PeerLimits};

keys! {
    /// Another organisation that runs isthmus. Each side sends the other the services in its `export`, and takes those in its
    /// `import`: without both, nothing is exchanged. Neither side needs access to the other's clusters.
    pub(crate) Peer "peer" {
        /// Your name for the other side, unique in the file.
        NAME "name": PeerName => required;
        /// `true`: the other side connects to a listener of protocol `auto` or `hbone`.
        ACCEPT "accept": form::Boolean = false;
        /// Addresses and ports of the other side's gateways, at most 16. Each replica of this gateway connects to each address, to
        /// each address of a host name, and to those that the other side announces, and looks for further replicas behind each.
        DIAL "dial": DialForms => "the other side connects";
        /// SPIFFE ID of the gateways that speak for the other side.
        IDENTITY "identity": form::Identity => "stored by the enrolment";
        /// The only trust domain that the other side's certificates may name.
        TRUST_DOMAIN "trustDomain": form::TrustDomain => "the trust domain of `identity`";
        /// Your name for that trust domain in rules, logs and metrics. This key is required if the trust domain has the
        /// same name as yours or as that of another peer.
        TRUST_ALIAS "trustAlias": form::TrustDomain => "`trustDomain`";
        /// PEM file of the other side's root certificates, read again when it changes. The other side announces further roots
        /// over the link.
        TRUST "trust": form::Path => "stored by the enrolment";
        /// Source addresses of the other side's clients that call by SNI.
        FROM "from": form::NonEmpty<form::Cidr> => "no SNI clients: only HBONE callers with an identity of the other side may \
                                                    connect";
        /// Address blocks of the other side's gateways, including addresses that host names resolve to. A loopback or link-local
        /// address is allowed only by a block within the loopback or link-local range.
        ADDRESSES "addresses": form::NonEmpty<form::Cidr> => "all but loopback and link-local";
        /// Services that the other side may reach. This is the permission; no rule in `exports` is needed.
        EXPORT "export": form::List<PeerExport> => "nothing";
        /// Services that this gateway takes from the other side.
        IMPORT "import": form::List<PeerImport> => "nothing";
        /// Directions in which calls cross on carriers: connections over which the other side's gateways call this one although it
        /// has no open port, or the reverse. `fromPeer`: this gateway dials the addresses of `dial`, and holds carriers open for the
        /// other side's calls. `toPeer`: this gateway accepts carriers, and callers on its own network, as `networks[].cidrs` and
        /// their identities show, reach the other side's services through it. Both sides must agree.
        CARRY "carry": form::NonEmpty<form::Choice<Carry>> => "no calls on carriers";
        /// After the link has been lost for this time, the other side's services are used only where no other registry has a
        /// ready endpoint.
        STALE_AFTER "staleAfter": form::Timeout = Duration::from_secs(30);
        /// After the link has been lost for this time, and while none of the other side's gateways answers, its services have no
        /// endpoints. Roots that the other side has announced do not verify its HBONE callers from then on until a link is open.
        EXPIRE_AFTER "expireAfter": form::Timeout = Duration::from_secs(15 * 60);
        /// Limits of what the other side may use.
        LIMITS "limits": PeerUse => "defaults";
    }

    /// Services that a peer may reach. The first rule that matches a service applies.
    pub(crate) PeerExport "peerExport" {
        /// Host names of your services.
        SERVICES "services": form::NonEmpty<form::Pattern> => required;
        /// Host names to leave out.
        EXCEPT "except": form::List<form::Pattern> => "none";
        /// Name under which the other side knows the service. `{service}` is the first label of its host name, `{namespace}` its
        /// namespace.
        AS "as": Template => "the host name of the service";
        /// Endpoints that the other side may reach, as `tls` of `exports` has it.
        TLS "tls": form::Choice<ExportTls> => "`mesh`";
    }

    /// Services that are taken from a peer. The first rule that matches a service applies.
    pub(crate) PeerImport "peerImport" {
        /// Host names, as the other side exports them.
        SERVICES "services": form::NonEmpty<form::Pattern> => required;
        /// Name of the service here. `{service}` is the first label of the exported name, `{namespace}` the namespace on the
        /// other side.
        AS "as": Template => "the exported name";
        /// Largest number of services that the rule takes. Further ones are left out, in order of name.
        LIMIT "limit": form::Integer<usize, 1, 1_000_000> => "none";
        /// `true`: the service is joined with your own service of the same name, and with those of other peers whose rules say the
        /// same. Your endpoints come first, and Envoys verify each endpoint by the roots and identities of its own organisation.
        /// `false`: a name has one owner, and the service is left out if the name is taken. Not for peers with `carry: [toPeer]`.
        MERGE "merge": form::Boolean = false;
    }

    /// Limits of what a peer may use.
    pub(crate) PeerUse "peerLimits" {
        /// Largest number of services that this gateway takes from the peer.
        SERVICES "services": form::Integer<usize, 1, 1_000_000> = PeerLimits::default().services;
        /// Memory for the services and gateways that the peer sends over all its links. What exceeds it is left out, and named in
        /// LEFT OUT of `isthmus peers`.
        MEMORY "memory": form::HeldSize = PeerLimits::default().memory;
        /// Simultaneous connections and CONNECT streams of the peer's callers.
        CONNECTIONS "connections": form::Integer<usize, 1, 10_000_000> = PeerLimits::default().connections;
        /// New connections and CONNECT streams of the peer's callers per second.
        NEW_PER_SECOND "newPerSecond": form::Integer<u32, 1, 1_000_000> = PeerLimits::default().new_per_second;
        /// Bytes per second that the peer's callers send, and that they receive, through one replica of the gateway, divided as
        /// `limits.perService.bytesPerSecond` is.
        BYTES_PER_SECOND "bytesPerSecond": form::Bandwidth => "no limit";
    }
}

text_forms! {
    /// A name that can be part of other names.
    pub(crate) PeerName: Arc<str> = peer_name, "peerName", "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
        "1 to 63 lower-case letters, digits and '-', beginning and ending with a letter or digit";
    /// A host name with placeholders.
    pub(crate) Template: NameTemplate =
        |text| NameTemplate::parse(text).map_err(|error| InvalidValue::new(error.to_string())),
        "nameTemplate", "^[A-Za-z0-9_.{}-]+$",
        "a host name in which {service} and {namespace} stand for those of the service";
}

fn peer_name(text: &str) -> Result<Arc<str>, InvalidValue> {
    if is_dns_label(text) {
        return Ok(text.into());
    }
    Err(InvalidValue::new("it is not a DNS label".to_owned()))
}

/// The forms of `dial`: an address, or a list of addresses.
#[derive(Debug)]
pub(crate) struct DialForms;

impl Form for DialForms {
    type Value = Vec<GatewayAddress>;
    const KIND: Kind = Kind::Union(&Union {
        name: "dialForms",
        expects: "an address with its port (\"gw.west.example:15443\"), or a list of them",
        kinds: &[form::Target::KIND, form::NonEmpty::<form::Target>::KIND],
    });

    fn read(node: &Node) -> Option<Vec<GatewayAddress>> {
        let all = match form::Target::read(node) {
            Some(one) => vec![one],
            None => form::NonEmpty::<form::Target>::read(node)?,
        };
        Some(all.into_iter().map(|(host, port)| GatewayAddress { host, port }).collect())
    }
}
