//! `listen` and `listeners`: the addresses on which clients connect, and their names, by which routes and
//! exports refer to them.

use std::collections::HashMap;
use std::sync::Arc;

use isthmus_document::form;
use isthmus_document::key::Key;
use isthmus_document::nearest::nearest;
use isthmus_document::problem::{InvalidValue, Path, Problems};
use isthmus_document::reader::Fields;
use isthmus_document::table::AnyKey;
use isthmus_document::tree::Node;
use isthmus_model::address::Bind;
use isthmus_settings::listener::{
    HelloLimits, Listener, ListenerProtocol, ProxyMode, ProxyProtocol, RefusalMode,
};
use isthmus_settings::scope::SourceRule;

use super::addresses::Opened;
use super::registries::GatewayPort;
use super::table as keys;

/// The name of the listener that `listen` defines.
pub(super) const DEFAULT_NAME: &str = "default";

/// The listeners of a config.
#[derive(Default)]
pub(super) struct Listeners {
    pub(super) list: Vec<Arc<Listener>>,
    /// The names of all listeners, also of listeners with mistakes, so that a reference to one of these is not a second
    /// problem.
    names: Vec<Arc<str>>,
    /// True if all files were read: then a name that was not found exists in none of them.
    complete: bool,
}

impl Listeners {
    pub(super) fn read(
        root: &Fields<'_>,
        complete: bool,
        opened: &mut Vec<Opened>,
        problems: &mut Problems,
    ) -> Self {
        let mut listeners = Self { complete, ..Self::default() };
        let mut places = HashMap::new();
        if let Some(node) = root.at(&keys::Root::LISTEN) {
            let name: Arc<str> = DEFAULT_NAME.into();
            places.insert(name.clone(), node.position);
            listeners.names.push(name.clone());
            if let Some(bind) = root.get(&keys::Root::LISTEN) {
                let path = keys::Root::LISTEN.name().to_owned();
                opened.push(Opened { path, bind, position: Some(node.position) });
                listeners.list.push(Arc::new(Listener::sni(name, bind)));
            }
        }
        for (index, fields, node) in root.maps(&keys::Root::LISTENERS) {
            let path = Path::Root.key(keys::Root::LISTENERS.name());
            let path = path.index(index);
            let bind = fields.found(&keys::Listener::BIND);
            if let Some((bind, node)) = bind {
                let path = path.key(keys::Listener::BIND.name()).to_string();
                opened.push(Opened { path, bind, position: Some(node.position) });
            }
            let Some((name, named)) = fields.found(&keys::Listener::NAME) else {
                continue;
            };
            if let Some(first) = places.get(&name) {
                let first = problems.place(*first);
                let fault = format!("two listeners have the name {name:?}; first at {first}");
                problems.error(named.position, &path.key(keys::Listener::NAME.name()), fault);
                continue;
            }
            places.insert(name.clone(), named.position);
            listeners.names.push(name.clone());
            let Some((bind, _)) = bind else { continue };
            let protocol = fields.get(&keys::Listener::PROTOCOL);
            if let (false, Some(node)) = (protocol.takes_sni(), fields.at(&keys::Listener::ALPN)) {
                let fault = match protocol {
                    ListenerProtocol::Tcp => {
                        "found alpn on a listener of protocol tcp; remove alpn, because no hello is read there"
                    }
                    _ => {
                        "found alpn on a listener of protocol hbone; remove alpn, because HBONE always requires h2"
                    }
                };
                problems.error(node.position, &path.key(keys::Listener::ALPN.name()), fault);
            }
            fits_protocol(protocol, &fields, node, &path, problems);
            listeners.list.push(Arc::new(Listener {
                name,
                bind,
                protocol,
                alpn: fields.get(&keys::Listener::ALPN).unwrap_or_default(),
                sources: SourceRule {
                    from: fields.get(&keys::Listener::FROM).unwrap_or_default(),
                    except: fields.get(&keys::Listener::EXCEPT_FROM).unwrap_or_default(),
                },
                proxy_protocol: proxy_protocol(&fields, &path, problems),
                hello: hello(&fields.map(&keys::Listener::HELLO)),
                refusal: fields.get(&keys::Listener::REFUSAL),
                is_of_gateways: false,
            }));
        }
        listeners
    }

    /// Adds a listener for each port that belongs to Gateways of the Gateway API.
    pub(super) fn add_gateway_ports(
        &mut self,
        ports: Vec<GatewayPort>,
        opened: &mut Vec<Opened>,
        problems: &mut Problems,
    ) {
        for GatewayPort { port, refusal, path, position } in ports {
            let (name, bind): (Arc<str>, _) = (format!("gateway-{port}").into(), Bind::Any { port });
            if self.names.contains(&name) {
                let fault =
                    format!("the listener of this port has the name {name:?}, which another listener has");
                problems.error(position, &path, fault);
            }
            opened.push(Opened { path, bind, position: Some(position) });
            self.names.push(name.clone());
            let listener = Listener { refusal, is_of_gateways: true, ..Listener::sni(name, bind) };
            self.list.push(listener.into());
        }
    }

    /// Returns the names under `key` of a route or export.
    pub(super) fn references(
        &self,
        fields: &Fields<'_>,
        key: &Key<form::NonEmpty<form::Text>>,
        path: &Path<'_>,
        problems: &mut Problems,
    ) -> Vec<Arc<str>> {
        let list = path.key(key.name());
        let mut found = Vec::new();
        for (index, text, node) in fields.values(key) {
            match self.names.iter().find(|name| **name == text) {
                Some(name) => found.push(name.clone()),
                None if !self.complete => {}
                None => {
                    let names = || self.names.iter().map(|name| &**name);
                    let known = names().collect::<Vec<_>>().join(", ");
                    let fault =
                        InvalidValue::new(format!("found {node}, expected the name of a listener: {known}"));
                    problems.error(node.position, &list.index(index), fault.hint(nearest(&text, names())));
                }
            }
        }
        found
    }
}

/// Reports keys that do not fit the protocol of the listener.
fn fits_protocol(
    protocol: ListenerProtocol,
    fields: &Fields<'_>,
    listener: &Node,
    path: &Path<'_>,
    problems: &mut Problems,
) {
    let of_sni: [&dyn AnyKey; 3] =
        [&keys::Listener::ROUTES, &keys::Listener::FALLBACK, &keys::Listener::REFUSAL];
    // The config that a gateway shows has the defaults of all listeners.
    let is_default = |key: &dyn AnyKey| {
        key.name() == keys::Listener::REFUSAL.name()
            && fields.get(&keys::Listener::REFUSAL) == RefusalMode::Alert
    };
    for key in of_sni.into_iter().filter(|key| !protocol.takes_sni() && !is_default(*key)) {
        if let Some(node) = fields.at(key) {
            let fault = format!(
                "found {} on a listener of protocol {}; it is allowed only with protocol sni or auto",
                key.name(),
                protocol.text()
            );
            problems.error(node.position, &path.key(key.name()), fault);
        }
    }
    let target = fields.at(&keys::Listener::TARGET);
    match (protocol, target) {
        (ListenerProtocol::Tcp, None) => {
            problems.error(
                listener.position,
                path,
                "protocol: tcp needs the key target, where all connections lead",
            );
        }
        (ListenerProtocol::Tcp, Some(_)) if fields.at(&keys::Listener::FROM).is_none() => {
            let fault = "a listener of protocol tcp without from lets everyone reach its target; set from, or from: [0.0.0.0/0, \"::/0\"] \
                         if that is meant";
            problems.warn(listener.position, path, fault);
        }
        (ListenerProtocol::Sni | ListenerProtocol::Hbone | ListenerProtocol::Auto, Some(node)) => {
            let fault = "target is allowed only with protocol: tcp; other listeners lead by name, with routes or exports";
            problems.error(node.position, &path.key(keys::Listener::TARGET.name()), fault);
        }
        (_, Some(_) | None) => {}
    }
}

/// Reads whether a PROXY header is required. With a required header, `from` must be present, because otherwise everybody could
/// announce any address.
fn proxy_protocol(fields: &Fields<'_>, path: &Path<'_>, problems: &mut Problems) -> ProxyProtocol {
    let path = path.key(keys::Listener::PROXY_PROTOCOL.name());
    let of = fields.map(&keys::Listener::PROXY_PROTOCOL);
    let from = of.at(&keys::ProxyProtocol::FROM);
    match (of.get(&keys::ProxyProtocol::MODE), fields.at(&keys::Listener::PROXY_PROTOCOL)) {
        (ProxyMode::Require, Some(node)) => {
            if from.is_none() {
                let fault = "mode: require needs the key from, with the addresses of the load balancers that send the headers";
                problems.error(node.position, &path, fault);
            }
            ProxyProtocol::Require { from: of.get(&keys::ProxyProtocol::FROM).unwrap_or_default() }
        }
        (ProxyMode::Forbid | ProxyMode::Require, _) => {
            if let Some(node) = from {
                let fault = "this key is allowed only with mode: require; in mode: forbid the gateway reads no header";
                problems.error(node.position, &path.key(keys::ProxyProtocol::FROM.name()), fault);
            }
            ProxyProtocol::Forbid
        }
    }
}

fn hello(fields: &Fields<'_>) -> HelloLimits {
    HelloLimits {
        timeout: fields.get(&keys::Hello::TIMEOUT),
        bytes_max: fields.get(&keys::Hello::MAX_BYTES),
        records_max: fields.get(&keys::Hello::MAX_RECORDS),
    }
}
