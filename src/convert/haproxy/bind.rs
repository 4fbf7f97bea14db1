//! The `bind` lines of frontends, which become listeners.

use std::collections::BTreeSet;
use std::net::Ipv6Addr;

use super::Conversion;
use crate::draft::{Claim, Fate, Listener, Place, merge};
use crate::values::bind_address;
use crate::words::{Line, Section};
use isthmus_api::text::clean;
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
            let Some(bind) = bind_of(address, only_v6) else {
                self.not_converted(
                    line.number,
                    format!("the address {address:?} is not `:port`, `1.2.3.4:port` or `[::1]:port`"),
                );
                continue;
            };
            if let Some(both) = merge(bind, proxy, listeners) {
                let text = format!("the address {address:?} is covered by the listener at {both}");
                self.draft.remark(line.number, Fate::NotNeeded, text);
            } else {
                let name = self.free_name(section, listeners);
                let lines = (section.head.number, line.number);
                listeners.push(Listener::new(lines, name, bind, proxy));
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
                "tfo" => {}
                // These parameters have a value, but refuse no client.
                "name" | "id" | "backlog" | "mss" | "process" | "thread" | "level" | "user" | "group"
                | "mode" | "uid" | "gid" | "nice" | "tcp-ut" => {
                    let value = rest.first().copied().unwrap_or_default();
                    rest = rest.get(1..).unwrap_or_default();
                    let text = format!(
                        "the parameter `{word} {value}` of `bind` has no effect on where connections go"
                    );
                    self.draft.remark(line.number, Fate::NotNeeded, text);
                }
                "maxconn" => {
                    rest = rest.get(1..).unwrap_or_default();
                    let text = "`maxconn` of `bind` delays connections; isthmus has `limits.connections`, which refuses them";
                    self.not_converted(line.number, text);
                }
                word => {
                    let text = format!(
                        "the parameter `{word}` of `bind` has no counterpart, and could refuse clients, so the config has no listener \
                         for this address"
                    );
                    self.draft.leave_out(Place::Listeners, line.number, text);
                    return None;
                }
            }
        }
        if parameters.proxy {
            let text = "HAProxy accepts a PROXY header from every address, and so does this config; replace \
                        `proxyProtocol.from` by the addresses of your load balancers";
            self.draft.remark(line.number, Fate::Differs, text);
        }
        Some(parameters)
    }

    /// Returns a name for a listener of a section that no other listener has.
    fn free_name(&self, section: &Section, listeners: &[Listener]) -> String {
        let known: BTreeSet<&str> =
            self.draft.listeners.iter().chain(listeners).map(|listener| listener.name.as_str()).collect();
        // A name of the config has at most 253 bytes and no control characters.
        let base: String = clean(section.name()).chars().take(60).collect();
        let (mut name, mut count) = (base.clone(), 1);
        while known.contains(name.as_str()) {
            count += 1;
            name = format!("{base}-{count}");
        }
        name
    }
}

/// Returns the address of a `bind` line; `only_v6`: that of all interfaces is only of IPv6.
fn bind_of(text: &str, only_v6: bool) -> Option<Bind> {
    Some(match (bind_address(text)?, only_v6) {
        (Bind::Any { port }, true) => Bind::Address((Ipv6Addr::UNSPECIFIED, port).into()),
        (bind, _) => bind,
    })
}

/// Returns the addresses on which a section accepts connections.
pub(super) fn claims(section: &Section) -> impl Iterator<Item = Claim> {
    let lines = section.lines.iter().filter(|line| line.words[0] == "bind");
    lines.flat_map(move |line| {
        let has = |word: &str| line.words.iter().any(|one| one == word);
        let (proxy, only_v6) = (has("accept-proxy"), has("v6only"));
        let all = line.words.get(1).into_iter().flat_map(|all| all.split(','));
        let binds: Vec<Bind> = all.filter_map(|text| bind_of(text, only_v6)).collect();
        binds.into_iter().map(move |bind| Claim { owner: section.head.number, bind, proxy })
    })
}
