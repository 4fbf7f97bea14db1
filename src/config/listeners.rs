//! `listen` and `listeners`: the addresses on which clients connect, and their names, by which routes and
//! exports refer to them.

use std::collections::HashMap;
use std::sync::Arc;

use crate::document::nearest::nearest;
use crate::document::problem::{InvalidValue, Path, Problems};
use crate::document::reader::Fields;
use crate::document::scalar;
use crate::snapshot::policy::{HelloLimits, Listener, ListenerProtocol};

use super::addresses::Opened;
use super::table::{HELLO, LISTENER};

/// The name of the listener of `listen`.
pub(super) const DEFAULT_NAME: &str = "default";

/// The listeners of a config.
#[derive(Default)]
pub(super) struct Listeners {
    pub(super) list: Vec<Arc<Listener>>,
    /// The names of all listeners, also of those with other mistakes, so that a reference to one is not a
    /// second problem.
    names: Vec<Arc<str>>,
    /// True if all files were read, so that an unknown name is in none of them.
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
        if let Some(node) = root.node("listen") {
            let name: Arc<str> = DEFAULT_NAME.into();
            places.insert(name.clone(), node.position);
            listeners.names.push(name.clone());
            if let Some(bind) = root.read("listen", scalar::bind) {
                opened.push(Opened { path: "listen".to_owned(), bind, position: Some(node.position) });
                listeners.list.push(Arc::new(Listener::sni(name, bind)));
            }
        }
        for (index, node) in root.items("listeners").iter().enumerate() {
            let fields = Fields::new(Some(node), &LISTENER);
            let path = Path::Root.key("listeners");
            let path = path.index(index);
            let bind = fields.read("bind", scalar::bind);
            if let (Some(bind), Some(node)) = (bind, fields.node("bind")) {
                let path = path.key("bind").to_string();
                opened.push(Opened { path, bind, position: Some(node.position) });
            }
            let Some((name, named)) = fields.read("name", scalar::text).zip(fields.node("name")) else {
                continue;
            };
            let name: Arc<str> = name.into();
            if let Some(first) = places.get(&name) {
                let first = problems.place(*first);
                let fault = format!("there are two listeners {name:?}; first at {first}");
                problems.error(named.position, &path.key("name"), fault);
                continue;
            }
            places.insert(name.clone(), named.position);
            listeners.names.push(name.clone());
            let Some(bind) = bind else { continue };
            let protocol = fields.choice("protocol", &ListenerProtocol::ALL, ListenerProtocol::text);
            let protocol = protocol.unwrap_or_default();
            if let (ListenerProtocol::Hbone, Some(node)) = (protocol, fields.node("alpn")) {
                let fault =
                    "found alpn on a listener of protocol hbone, which always requires h2; remove alpn";
                problems.error(node.position, &path.key("alpn"), fault);
            }
            listeners.list.push(Arc::new(Listener {
                name,
                bind,
                protocol,
                alpn: fields.read_all("alpn", scalar::alpn),
                from: fields.read_all("from", scalar::cidr),
                hello: hello(&fields.fields("hello", &HELLO)),
            }));
        }
        listeners
    }

    /// Returns the names under `listeners` of a route or export.
    pub(super) fn references(
        &self,
        fields: &Fields<'_>,
        path: &Path<'_>,
        problems: &mut Problems,
    ) -> Vec<Arc<str>> {
        let list = path.key("listeners");
        let mut found = Vec::new();
        for (index, node) in fields.items("listeners").iter().enumerate() {
            let Some(Ok(text)) = node.text().map(scalar::text) else { continue };
            match self.names.iter().find(|name| &***name == text) {
                Some(name) => found.push(name.clone()),
                None if !self.complete => {}
                None => {
                    let names = || self.names.iter().map(|name| &**name);
                    let known = names().collect::<Vec<_>>().join(", ");
                    let fault =
                        InvalidValue::new(format!("found {node}, expected the name of a listener: {known}"));
                    problems.error(node.position, &list.index(index), fault.hint(nearest(text, names())));
                }
            }
        }
        found
    }
}

fn hello(fields: &Fields<'_>) -> HelloLimits {
    let default = HelloLimits::default();
    let bytes = fields.read("maxBytes", scalar::size).and_then(|bytes| usize::try_from(bytes).ok());
    HelloLimits {
        timeout: fields.read("timeout", scalar::duration).unwrap_or(default.timeout),
        bytes_max: bytes.unwrap_or(default.bytes_max),
        records_max: fields.number("maxRecords").unwrap_or(default.records_max),
    }
}
