//! The `bind` lines of frontends, which become listeners.

use std::collections::BTreeSet;
use std::net::Ipv6Addr;

use super::Conversion;
use crate::draft::{Fate, Listener, merge};
use crate::values::{bind_address, covering};
use crate::words::{Line, Section};
use isthmus_model::address::Bind;

/// The parameters of a `bind` line that isthmus has too.
#[derive(Default)]
struct Parameters {
    /// True if clients send a PROXY header.
    proxy: bool,
    /// True if an address of all interfaces is only that of IPv6.
    only_v6: bool,
}

impl Conversion<'_> {
    /// Creates the listeners of a `bind` line.
    pub(super) fn bind(
        &mut self,
        section: &Section,
        line: &Line,
        words: &[&str],
        listeners: &mut Vec<Listener>,
    ) {
        let Some((addresses, parameters)) = words.split_first() else {
            return self.not_converted(line.number, "`bind` has no address");
        };
        let Some(Parameters { proxy, only_v6 }) = self.parameters(line, parameters) else { return };
        for address in addresses.split(',') {
            let Some(mut bind) = bind_address(address) else {
                self.not_converted(
                    line.number,
                    format!("the address {address:?} is not `:port`, `1.2.3.4:port` or `[::1]:port`"),
                );
                continue;
            };
            if let (Bind::Any { port }, true) = (bind, only_v6) {
                bind = Bind::Address((Ipv6Addr::UNSPECIFIED, port).into());
            }
            if let Some(Listener { line: known, bind: other, .. }) = self.overlapping(bind, proxy, listeners)
            {
                let text = format!(
                    "the address {address:?} overlaps with {other} (line {known}), and isthmus cannot listen on both; replace \
                     the wider of the two by single addresses of the host"
                );
                self.not_converted(line.number, text);
            } else if let Some(both) = merge(bind, proxy, listeners) {
                let text = format!("the address {address:?} is covered by the listener at {both}");
                self.draft.remark(line.number, Fate::NotNeeded, text);
            } else {
                let name = self.free_name(section, listeners);
                listeners.push(Listener::new(line.number, name, bind, proxy));
            }
        }
    }

    /// Reads the parameters of a `bind` line; `None` if the line has no counterpart.
    fn parameters(&mut self, line: &Line, mut rest: &[&str]) -> Option<Parameters> {
        let mut parameters = Parameters::default();
        while let Some((word, after)) = rest.split_first() {
            rest = after;
            match *word {
                "accept-proxy" => parameters.proxy = true,
                "v6only" => parameters.only_v6 = true,
                "v4v6" | "defer-accept" => {}
                "ssl" => {
                    let text = "`bind … ssl` terminates TLS, which isthmus does not do, so the config has no listener for this \
                                address";
                    self.not_converted(line.number, text);
                    return None;
                }
                // These parameters have a value, but do not affect which connections go where.
                "name" | "id" | "backlog" | "mss" | "process" | "thread" | "level" | "user" | "group"
                | "mode" | "interface" | "maxconn" | "nice" | "namespace" | "tcp-ut" => {
                    let value = rest.first().copied().unwrap_or_default();
                    rest = rest.get(1..).unwrap_or_default();
                    self.not_converted(
                        line.number,
                        format!("the parameter `{word} {value}` of `bind` has no counterpart"),
                    );
                }
                word => self.not_converted(
                    line.number,
                    format!("the parameter `{word}` of `bind` has no counterpart"),
                ),
            }
        }
        if parameters.proxy {
            let text = "HAProxy accepts a PROXY header from every address, and so does this config; replace \
                        `proxyProtocol.from` by the addresses of your load balancers";
            self.draft.remark(line.number, Fate::Differs, text);
        }
        Some(parameters)
    }

    /// Returns the listener that cannot listen beside one at this address: one of an earlier frontend, or one of `listeners`
    /// whose clients differ in whether they send a PROXY header.
    fn overlapping<'l>(&'l self, bind: Bind, proxy: bool, listeners: &'l [Listener]) -> Option<&'l Listener> {
        let others = listeners.iter().filter(|listener| listener.proxy != proxy);
        self.draft
            .listeners
            .iter()
            .chain(others)
            .find(|known| covering(known.bind, bind).is_some_and(|both| both == known.bind || both == bind))
    }

    /// Returns a name for a listener of a section that no other listener has.
    fn free_name(&self, section: &Section, listeners: &[Listener]) -> String {
        let known: BTreeSet<&str> =
            self.draft.listeners.iter().chain(listeners).map(|listener| listener.name.as_str()).collect();
        let mut name = section.name().to_owned();
        let mut count = 1;
        while known.contains(name.as_str()) {
            count += 1;
            name = format!("{}-{count}", section.name());
        }
        name
    }
}
