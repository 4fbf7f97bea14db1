//! Makes listeners and routes of the rules of one frontend or server. A connection that the original refuses is never admitted: a
//! rule that has no exact counterpart takes away all routes that it could have refused, and the draft says so at its place.

use std::collections::{BTreeMap, BTreeSet};

use super::draft::{Draft, Fate, Listener, Place, Route, Target};
use super::names::Key;
use super::rules::{Class, Doubt, Lead, Rule, Then, Walk, When};
use super::sources::Sources;
use isthmus_model::address::Bind;

/// The versions of TLS among which rules can distinguish, the usual one first.
const VERSIONS: [&str; 4] = ["TLSv1.3", "TLSv1.2", "TLSv1.1", "TLSv1"];
/// The largest numbers of names and of blocks in one message.
const NAMED_MAX: usize = 5;

/// A frontend or server of the original.
#[derive(Clone, Debug, Default)]
pub(super) struct Site {
    pub(super) line: usize,
    pub(super) listeners: Vec<Listener>,
    /// The rules that are applied before a PROXY header is read.
    pub(super) peers: Vec<Rule>,
    /// The rules that accept or refuse, by phase.
    pub(super) phases: Vec<Vec<Rule>>,
    /// The rules that lead somewhere. A connection that none of them matches is refused.
    pub(super) choices: Vec<Rule>,
    pub(super) leads: Vec<Lead>,
    /// True if no hello is read.
    pub(super) is_raw: bool,
}

/// The route of a key, before the routes of other keys are looked at.
struct Way<'s> {
    key: Key,
    /// The lead, and the rule that leads there.
    picked: Option<(usize, &'s Rule)>,
    admitted: Sources,
    by_alpn: Vec<(String, usize)>,
}

impl Way<'_> {
    fn is_route(&self) -> bool {
        self.picked.is_some() && !self.admitted.is_none()
    }
}

/// Why routes are left out.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct LeftOut {
    /// The line of the rule that leads there.
    line: usize,
    /// The lines that could refuse their clients.
    doubted: Vec<usize>,
    /// True if the routes stay for other sources.
    is_part: bool,
}

/// The losses of the routes, with their keys.
#[derive(Default)]
struct Losses {
    /// The keys and sources that are left out.
    left_out: BTreeMap<LeftOut, (Vec<String>, Sources)>,
    /// Clients that could belong elsewhere, by the lines of their route and of the rule that could lead them elsewhere.
    elsewhere: BTreeMap<(usize, usize), Vec<String>>,
    /// Sources that are led elsewhere, by the line of the rule.
    further: BTreeMap<usize, Vec<String>>,
    /// Versions of TLS that are led elsewhere, by the line of the rule.
    versions: BTreeMap<usize, Vec<String>>,
    /// Protocols of which the original prefers the first rule, and a route the client's first one, by the line of that rule.
    preferences: BTreeMap<usize, Vec<String>>,
    /// The lines of rules that have a part in a route, or one of the losses above.
    used: BTreeSet<usize>,
}

impl Losses {
    /// Adds the remarks.
    fn remark(&self, draft: &mut Draft) {
        for (LeftOut { line, doubted, is_part }, (keys, lost)) in &self.left_out {
            let part = if *is_part { format!(" for {}", shown(lost)) } else { String::new() };
            let text = format!(
                "{}: left out{part}, because {} could refuse these clients or lead them elsewhere",
                names_of(keys),
                lines(doubted)
            );
            draft.leave_out(Place::Routes, *line, text);
        }
        for ((line, other), keys) in &self.elsewhere {
            let text = format!(
                "{}: clients that match the rule in line {other}, which has no exact counterpart, take this route",
                names_of(keys)
            );
            draft.remark(*line, Fate::Differs, text);
        }
        for (line, keys) in &self.further {
            let text = format!(
                "{}: left out for the sources that this rule leads elsewhere, because a route has one list of sources",
                names_of(keys)
            );
            draft.leave_out(Place::Routes, *line, text);
        }
        for (line, keys) in &self.versions {
            let text = format!("{}: a route does not depend on the version of TLS", names_of(keys));
            draft.remark(*line, Fate::NotConverted, text);
        }
        for (line, protocols) in &self.preferences {
            let text = format!(
                "of several protocols that a client offers, the original takes the first rule, and `byAlpn` the client's first one of {}",
                names_of(protocols)
            );
            draft.remark(*line, Fate::Differs, text);
        }
    }
}

impl Site {
    /// Adds the listeners and routes to a draft.
    pub(super) fn place(mut self, draft: &mut Draft) {
        let (proxied, direct): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.listeners).into_iter().partition(|listener| listener.proxy);
        for listeners in [direct, proxied] {
            if !listeners.is_empty() {
                self.group(listeners, draft);
            }
        }
    }

    /// Adds listeners that all read a PROXY header, or none.
    fn group(&self, mut listeners: Vec<Listener>, draft: &mut Draft) {
        let is_proxied = listeners[0].proxy;
        let mut phases: Vec<&[Rule]> = self.phases.iter().map(Vec::as_slice).collect();
        let mut sources = sources_of(&listeners);
        if is_proxied {
            // The rules before the header judge the load balancer.
            let everyone = [Rule::new(self.line, When::Always, Then::To(0))];
            let lead = [Lead { target: Some(<_>::default()), ..Lead::default() }];
            let class = Class { key: None, version: VERSIONS[0], protocol: None };
            let walk = |doubt| Walk::new(class, doubt, &Sources::all(), &[&self.peers], (&everyone, &lead));
            let (is, could) = (walk(Doubt::Refuses), walk(Doubt::Admits));
            if !could.admitted.minus(&is.admitted).without_kin().is_none() {
                let text = format!(
                    "the PROXY headers of some load balancers are refused, because {} could refuse these",
                    lines(&is.doubted)
                );
                draft.leave_out(Place::Listeners, self.line, text);
            }
            if is.admitted.is_none() {
                sources = Sources::default();
            } else if is.admitted != Sources::all() {
                for listener in &mut listeners {
                    listener.proxy_from = is.admitted.blocks();
                }
            }
        } else {
            phases.insert(0, &self.peers);
        }
        match self.is_raw {
            true => self.raw(listeners, &phases, &sources, draft),
            false => self.by_name(listeners, &phases, &sources, draft),
        }
    }

    /// Adds listeners whose bytes all go to one lead.
    fn raw(&self, mut listeners: Vec<Listener>, phases: &[&[Rule]], sources: &Sources, draft: &mut Draft) {
        let class = Class { key: None, version: VERSIONS[0], protocol: None };
        let walk = |doubt| Walk::new(class, doubt, sources, phases, (&self.choices, &self.leads));
        let (is, could) = (walk(Doubt::Refuses), walk(Doubt::Admits));
        let lost = could.admitted.minus(&is.admitted).without_kin();
        if !lost.is_none() {
            let part = if is.admitted.is_none() { String::new() } else { format!(" for {}", shown(&lost)) };
            let text = format!(
                "the listener is left out{part}, because {} could refuse its clients",
                lines(&is.doubted)
            );
            draft.leave_out(Place::Listeners, self.line, text);
        }
        let Some((number, rule)) = is.picked else { return self.unused(&[], &BTreeSet::new(), draft) };
        for other in is.elsewhere.iter().filter(|other| other.then != Then::To(number)) {
            let text = format!(
                "clients that match the rule in line {}, which has no exact counterpart, go where this rule leads",
                other.line
            );
            draft.remark(rule.line, Fate::Differs, text);
        }
        for other in &is.further {
            let text =
                "the sources that this rule leads elsewhere are left out, because a listener has one target";
            draft.leave_out(Place::Listeners, other.line, text.to_owned());
        }
        let target = self.target(number, None, draft);
        for listener in &mut listeners {
            listener.target.clone_from(&target);
            listener.sources = is.admitted.written(sources);
        }
        if is.admitted == *sources {
            let text = "every source may use this port, as in the original; set `from` of the listener";
            draft.remark(rule.line, Fate::Differs, text);
        }
        draft.listeners.append(&mut listeners);
    }

    /// Adds listeners that route by name.
    fn by_name(
        &self,
        mut listeners: Vec<Listener>,
        phases: &[&[Rule]],
        sources: &Sources,
        draft: &mut Draft,
    ) {
        let lines_of = self.keys();
        let protocols = self.protocols();
        let by = (if self.has_versions() { &VERSIONS[1..] } else { &[] }, &protocols[..]);
        let mut losses = Losses::default();
        let ways: Vec<Way<'_>> =
            lines_of.keys().map(|key| self.way(key, phases, sources, by, &mut losses)).collect();
        losses.remark(draft);
        let closed = self.closed(&ways, &lines_of, draft);
        self.unused(&ways, &losses.used, draft);
        let at: BTreeMap<&Key, &Way<'_>> = ways.iter().map(|way| (&way.key, way)).collect();
        // A key that no rule for its clients names is needed only where the next wider key would lead them elsewhere.
        let is_needed = |way: &&Way<'_>| {
            let is_named = way.picked.is_some_and(|(_, rule)| keys_of(&rule.when).contains(&way.key));
            // One without a route is a route that admits nobody.
            let wider = way.key.wider().iter().find_map(|key| at.get(key)).filter(|wider| wider.is_route());
            let lead = |way: &Way<'_>| way.picked.map(|(number, _)| number);
            let is_same = wider.is_some_and(|wider| {
                (lead(wider), &wider.admitted, &wider.by_alpn) == (lead(way), &way.admitted, &way.by_alpn)
            });
            let is_plain = matches!(way.key, Key::Named | Key::Nameless);
            way.is_route() && (is_named || is_plain || !is_same)
        };
        let mut routes: Vec<&Way<'_>> = ways.iter().filter(is_needed).collect();
        routes.sort_by_key(|way| {
            let is_plain = matches!(way.key, Key::Named | Key::Nameless);
            (is_plain, way.picked.map_or(0, |(_, rule)| rule.line), matches!(way.key, Key::Below(_)))
        });
        let mut admitted = routes.iter().fold(Sources::default(), |all, way| all.union(&way.admitted));
        let fallback = self.fallback(phases, sources, &mut admitted, draft);
        for listener in &mut listeners {
            listener.sources = if admitted.is_none() { <_>::default() } else { admitted.written(sources) };
            listener.fallback.clone_from(&fallback);
        }
        let names: Vec<String> = listeners.iter().map(|listener| listener.name.clone()).collect();
        draft.listeners.append(&mut listeners);
        for way in routes {
            let Some((number, rule)) = way.picked else { continue };
            let Some(target) = self.target(number, Some(&way.key), draft) else { continue };
            let by_alpn: Vec<_> = way
                .by_alpn
                .iter()
                .filter_map(|(protocol, number)| Some((protocol.clone(), self.target(*number, None, draft)?)))
                .collect();
            draft.place(Route {
                line: rule.line,
                key: way.key.text(),
                listeners: names.clone(),
                target,
                sources: way.admitted.written(&admitted),
                by_alpn,
                is_own: false,
                is_closed: false,
            });
        }
        for (line, key, wider) in closed {
            let target = ways[wider].picked.and_then(|(number, _)| self.leads.get(number)?.target.as_ref());
            let Some(endpoint) = target.and_then(|target| target.endpoints.first()) else { continue };
            draft.place(Route {
                line,
                key: key.text(),
                listeners: names.clone(),
                target: Target { endpoints: vec![endpoint.clone()], ..Target::default() },
                sources: Sources::default().written(&admitted),
                by_alpn: Vec::new(),
                is_own: false,
                is_closed: true,
            });
        }
    }

    /// Returns the settings of a lead, for a route with this key, or for a listener.
    fn target(&self, number: usize, key: Option<&Key>, draft: &mut Draft) -> Option<Target> {
        let lead = self.leads.get(number)?;
        draft.reached.insert(lead.name.clone());
        let mut target = lead.target.clone()?;
        let line = target.endpoints.first().map_or(self.line, |endpoint| endpoint.line);
        if let Some(health) = target.health.as_mut().filter(|health| health.is_nameless) {
            health.is_nameless = false;
            match key {
                Some(Key::Exact(name)) => health.tls = Some(name.clone()),
                Some(Key::Below(_) | Key::Named | Key::Nameless) | None => {
                    let text = format!(
                        "the checks of {} send a ClientHello without a server name; those of {} only connect, unless you add `tls: NAME` to \
                         `health`",
                        target.backend,
                        key.map_or_else(
                            || "the listener".to_owned(),
                            |key| format!("the route {}", key.text())
                        ),
                    );
                    draft.remark(line, Fate::Differs, text);
                }
            }
        }
        Some(target)
    }

    /// Returns the keys that the rules name, and those of all clients, each with the line of the first rule that names it.
    fn keys(&self) -> BTreeMap<Key, usize> {
        let mut lines: BTreeMap<Key, usize> = BTreeMap::new();
        for rule in self.rules() {
            for key in keys_of(&rule.when) {
                lines.entry(key).or_insert(rule.line);
            }
        }
        for key in [Key::Named, Key::Nameless] {
            lines.entry(key).or_insert(self.line);
        }
        lines
    }

    fn rules(&self) -> impl Iterator<Item = &Rule> {
        let of_leads = self.leads.iter().flat_map(|lead| &lead.rules);
        self.choices.iter().chain(&self.peers).chain(self.phases.iter().flatten()).chain(of_leads)
    }

    /// Returns the way of a key; `others` are further versions of TLS that rules distinguish, `protocols` the protocols.
    fn way<'s>(
        &'s self,
        key: &Key,
        phases: &[&[Rule]],
        sources: &Sources,
        (others, protocols): (&[&'s str], &[&'s str]),
        losses: &mut Losses,
    ) -> Way<'s> {
        let walk = |version, doubt, protocol| {
            let class = Class { key: Some(key), version, protocol };
            Walk::new(class, doubt, sources, phases, (&self.choices, &self.leads))
        };
        let Walk { mut picked, mut admitted, mut doubted, mut elsewhere, further, .. } =
            walk(VERSIONS[0], Doubt::Refuses, None);
        let text = key.text();
        // The route itself is for clients that offer none of the protocols, if it may be: all sources that are admitted whatever they
        // offer must be admitted there.
        if !protocols.is_empty() {
            let none = walk(VERSIONS[0], Doubt::Refuses, Some(""));
            if none.picked.is_some() && none.admitted.contains_all(&admitted) && !admitted.is_none() {
                (picked, elsewhere) = (none.picked, none.elsewhere);
            }
        }
        for version in others {
            let other = walk(version, Doubt::Refuses, None);
            if let (Some((to, rule)), Some((number, _))) = (other.picked, picked)
                && to != number
            {
                losses.versions.entry(rule.line).or_default().push(text.clone());
            }
            admitted = admitted.and(&other.admitted);
        }
        if !doubted.is_empty() || !others.is_empty() {
            let could = walk(VERSIONS[0], Doubt::Admits, None);
            let lost = could.admitted.minus(&admitted).without_kin();
            if let Some((_, rule)) = could.picked.filter(|_| !lost.is_none()) {
                doubted.sort_unstable();
                doubted.dedup();
                losses.used.insert(rule.line);
                let why = LeftOut { line: rule.line, doubted, is_part: !admitted.is_none() };
                let (keys, sources) = losses.left_out.entry(why).or_default();
                keys.push(text.clone());
                *sources = sources.union(&lost);
            }
        }
        let mut by_alpn = Vec::new();
        if let Some((number, rule)) = picked.filter(|_| !admitted.is_none()) {
            losses.used.insert(rule.line);
            for protocol in protocols {
                let walk = walk(VERSIONS[0], Doubt::Refuses, Some(protocol));
                let covers = walk.admitted.contains_all(&admitted);
                if let Some((to, rule)) = walk.picked.filter(|(to, _)| *to != number && covers) {
                    by_alpn.push(((*protocol).to_owned(), to));
                    losses.used.insert(rule.line);
                }
            }
            let distinct: BTreeSet<usize> = by_alpn.iter().map(|(_, to)| *to).collect();
            if distinct.len() > 1
                && let Some(first) = self.choices.iter().find(|rule| names_protocol(&rule.when))
            {
                let names = by_alpn.iter().map(|(protocol, _)| protocol.clone()).collect();
                losses.preferences.insert(first.line, names);
            }
            let is_led = |other: &Rule| {
                let leads_to = |number| other.then == Then::To(number);
                leads_to(number) || by_alpn.iter().any(|(_, to)| leads_to(*to))
            };
            for other in elsewhere.into_iter().filter(|other| !is_led(other)) {
                losses.used.insert(other.line);
                let keys = losses.elsewhere.entry((rule.line, other.line)).or_default();
                keys.push(text.clone());
                keys.dedup();
            }
            for other in further {
                losses.used.insert(other.line);
                losses.further.entry(other.line).or_default().push(text.clone());
            }
        }
        Way { key: key.clone(), picked, admitted, by_alpn }
    }

    /// Returns the keys without a route whose clients a wider route would take, each with the number of that route's way.
    fn closed(
        &self,
        ways: &[Way<'_>],
        lines_of: &BTreeMap<Key, usize>,
        draft: &mut Draft,
    ) -> Vec<(usize, Key, usize)> {
        let at: BTreeMap<&Key, usize> =
            ways.iter().enumerate().map(|(index, way)| (&way.key, index)).collect();
        let mut closed = Vec::new();
        for way in ways.iter().filter(|way| !way.is_route()) {
            // The next wider key has the same answer if it has no route either.
            let Some(wider) = way.key.wider().iter().find_map(|key| at.get(key).copied()) else { continue };
            let Some((number, _)) = ways[wider].picked.filter(|_| ways[wider].is_route()) else { continue };
            let line = lines_of.get(&way.key).copied().unwrap_or(self.line);
            let text = format!(
                "{}: the route admits nobody, because the original does not send these clients to {}",
                way.key.text(),
                self.leads.get(number).map_or("", |lead| &lead.name)
            );
            draft.remark(line, Fate::NotNeeded, text);
            closed.push((line, way.key.clone(), wider));
        }
        closed
    }

    /// Adds a remark on each rule that has no part in a route.
    fn unused(&self, ways: &[Way<'_>], used: &BTreeSet<usize>, draft: &mut Draft) {
        for rule in &self.choices {
            let Then::To(number) = rule.then else { continue };
            let Some(lead) = self.leads.get(number) else { continue };
            let keys: Vec<String> = keys_of(&rule.when).iter().map(Key::text).collect();
            let which = if keys.is_empty() { "other clients".to_owned() } else { names_of(&keys) };
            let is_by_alpn = names_protocol(&rule.when);
            let (fate, why) = if lead.refuses {
                let why =
                    format!("{} refuses all connections; isthmus refuses names without a route", lead.name);
                (Fate::NotNeeded, why)
            } else if lead.target.is_none() {
                (Fate::NotConverted, format!("{} has no endpoint that can be converted", lead.name))
            } else if used.contains(&rule.line) && is_by_alpn {
                let why =
                    "the protocols apply to the names that have a route, and in the original to all names";
                (Fate::Differs, why.to_owned())
            } else if used.contains(&rule.line) || self.is_raw {
                continue;
            } else if is_by_alpn {
                let why = "a rule by ALPN protocol, for names that no later rule routes";
                (Fate::NotConverted, why.to_owned())
            } else if ways.iter().all(|way| !way.is_route()) {
                continue;
            } else {
                (Fate::NotNeeded, "an earlier rule matches all of these names".to_owned())
            };
            draft.remark(rule.line, fate, format!("{which}: {why}"));
        }
    }

    /// Returns the target of clients that do not speak TLS, if all clients that the listener admits may go there.
    fn fallback(
        &self,
        phases: &[&[Rule]],
        sources: &Sources,
        admitted: &mut Sources,
        draft: &mut Draft,
    ) -> Option<Target> {
        let class = Class { key: Some(&Key::Nameless), version: "", protocol: Some("") };
        let walk = Walk::new(class, Doubt::Refuses, sources, phases, (&self.choices, &self.leads));
        let (number, rule) = walk.picked?;
        if admitted.is_none() {
            *admitted = walk.admitted.clone();
        }
        if !walk.admitted.contains_all(admitted) {
            let text = "the listener has no `fallback`, because the original refuses some sources that do not speak TLS";
            draft.leave_out(Place::Listeners, rule.line, text.to_owned());
            return None;
        }
        for other in walk.elsewhere {
            let text = format!(
                "clients that do not speak TLS and match the rule in line {}, which has no exact counterpart, go where this rule leads",
                other.line
            );
            draft.remark(rule.line, Fate::Differs, text);
        }
        self.target(number, None, draft)
    }

    fn has_versions(&self) -> bool {
        let mut found = false;
        for rule in self.rules() {
            rule.when.each(&mut |part| found |= matches!(part, When::Version(_)));
        }
        found
    }

    /// Returns the protocols that rules name, in order.
    fn protocols(&self) -> Vec<&str> {
        let mut all: Vec<&str> = Vec::new();
        for rule in &self.choices {
            rule.when.each(&mut |part| {
                if let When::Protocol(protocol) = part
                    && !protocol.is_empty()
                    && !all.contains(&protocol.as_str())
                {
                    all.push(protocol);
                }
            });
        }
        all
    }
}

/// Returns true if a condition is about a protocol.
fn names_protocol(when: &When) -> bool {
    let mut found = false;
    when.each(&mut |part| found |= matches!(part, When::Protocol(_)));
    found
}

/// Returns the keys that a condition names.
fn keys_of(when: &When) -> Vec<Key> {
    let mut keys = Vec::new();
    when.each(&mut |part| {
        if let When::Names(patterns) = part {
            keys.extend(patterns.iter().flat_map(|pattern| pattern.keys()));
        }
    });
    keys
}

/// Returns the sources of the families in which listeners accept connections.
fn sources_of(listeners: &[Listener]) -> Sources {
    let has = |is_v4: bool| {
        listeners.iter().any(|listener| match listener.bind {
            _ if listener.proxy => true,
            Bind::Any { .. } => true,
            Bind::Address(address) => address.is_ipv4() == is_v4,
        })
    };
    Sources::of_families(has(true), has(false))
}

fn shown(sources: &Sources) -> String {
    names_of(&sources.blocks())
}

/// Returns texts for a message, at most [`NAMED_MAX`] of them.
pub(super) fn names_of(all: &[String]) -> String {
    match all.len().checked_sub(NAMED_MAX) {
        Some(more @ 1..) => format!("{} and {more} more", all[..NAMED_MAX].join(", ")),
        _ => all.join(", "),
    }
}

/// Returns line numbers for a message.
fn lines(all: &[usize]) -> String {
    let all: BTreeSet<usize> = all.iter().copied().collect();
    if all.is_empty() {
        return "a rule for other versions of TLS".to_owned();
    }
    let texts: Vec<String> = all.iter().map(ToString::to_string).collect();
    format!("line{} {}", if all.len() == 1 { "" } else { "s" }, names_of(&texts))
}
