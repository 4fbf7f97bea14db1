//! The one model of what the original does with a connection: rules in order, whose first match decides. The parsers of all programs
//! write it, and `site` makes listeners and routes of it.
//!
//! A condition that is not understood is true for some clients and false for others, so a rule with it may refuse more clients
//! than those that the other conditions match. [`Walk`] keeps the sources that are admitted in both cases.

use std::collections::BTreeMap;

use super::draft::Target;
use super::names::{Key, Pattern, Share};
use super::sources::Sources;

/// The largest number of rules of one conversion, and of conditions that it copies for a map.
pub(super) const RULES_MAX: usize = 50_000;

/// A condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum When {
    Always,
    /// Not understood, or about something that no listener and no route can ask.
    Unknown,
    /// The name matches one of these.
    Names(Vec<Pattern>),
    /// The source is surely in the first set, or perhaps in the second one, which is larger.
    Sources(Sources, Sources),
    /// The client offers this protocol, or protocols that the text is a part of.
    Protocol(String),
    /// The highest version of TLS that the client offers; `""`: it does not speak TLS.
    Version(String),
    /// The client speaks TLS.
    Tls,
    /// More connections of the source than the limit.
    Limit(SourceLimit),
    All(Vec<Self>),
    Any(Vec<Self>),
    Not(Box<Self>),
}

/// A limit of the connections of one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SourceLimit {
    /// At most this number at a time.
    Connections(u64),
    /// At most this number in the period of the table.
    Rate(u64),
}

/// The act of a rule on the connections that it matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Then {
    /// The rules of the same phase that follow are passed over.
    Accept,
    Refuse,
    /// The connection goes to the lead with this number.
    To(usize),
}

/// A rule, with its line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) line: usize,
    pub(super) when: When,
    pub(super) then: Then,
}

impl Rule {
    pub(super) fn new(line: usize, when: When, then: Then) -> Self {
        Self { line, when, then }
    }

    /// Makes the rule that stands for a line that is not understood: it could refuse every client.
    pub(super) fn could_refuse(line: usize) -> Self {
        Self::new(line, When::Unknown, Then::Refuse)
    }
}

/// A destination of connections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Lead {
    pub(super) name: String,
    /// The settings of the route; `None` if no endpoint can be converted.
    pub(super) target: Option<Target>,
    /// True if the original refuses all its connections.
    pub(super) refuses: bool,
    /// Its own rules, which accept or refuse.
    pub(super) rules: Vec<Rule>,
}

/// The clients that a walk is about: all those of a key, with the same version of TLS.
#[derive(Clone, Copy, Debug)]
pub(super) struct Class<'a> {
    /// The key; `None` for connections whose name is not read.
    pub(super) key: Option<&'a Key>,
    /// The highest version of TLS that they offer; `""`: they do not speak TLS.
    pub(super) version: &'a str,
    /// The only protocol that they offer; `None`: any protocols.
    pub(super) protocol: Option<&'a str>,
}

/// The sources for which a condition is surely true, and those for which it may be.
struct Extent {
    surely: Sources,
    maybe: Sources,
}

impl From<Share> for Extent {
    fn from(share: Share) -> Self {
        let of = |is_all: bool| if is_all { Sources::all() } else { Sources::default() };
        Self { surely: of(share == Share::All), maybe: of(share != Share::None) }
    }
}

impl When {
    pub(super) fn never() -> Self {
        Self::Any(Vec::new())
    }

    /// Returns the condition that this one and another one are true.
    pub(super) fn and(&self, other: Self) -> Self {
        match (self, other) {
            (Self::Always, other) => other,
            (one, Self::Always) => one.clone(),
            (one, other) => Self::All(vec![one.clone(), other]),
        }
    }

    pub(super) fn not(self) -> Self {
        Self::Not(Box::new(self))
    }

    /// Calls a function with this condition and each condition in it.
    pub(super) fn each<'a>(&'a self, see: &mut impl FnMut(&'a Self)) {
        see(self);
        match self {
            Self::All(parts) | Self::Any(parts) => parts.iter().for_each(|part| part.each(see)),
            Self::Not(part) => part.each(see),
            _ => {}
        }
    }

    /// Returns true if the condition is surely false by the name alone, which is quick to find out: a file of names has a rule for each.
    fn is_for_other_names(&self, class: &Class<'_>) -> bool {
        match self {
            Self::Names(patterns) => share_of(patterns, class.key) == Share::None,
            Self::All(parts) => parts.iter().any(|part| part.is_for_other_names(class)),
            Self::Any(parts) => parts.iter().all(|part| part.is_for_other_names(class)),
            _ => false,
        }
    }

    /// Returns the name, if the condition is that the client sends this name.
    fn name(&self) -> Option<&str> {
        match self {
            Self::Names(patterns) => match &patterns[..] {
                [only] => only.name(),
                _ => None,
            },
            _ => None,
        }
    }

    /// Returns true if clients may match this condition and another one.
    fn may_meet(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Names(some), Self::Names(others)) => {
                some.iter().any(|one| others.iter().any(|other| one.may_meet(other)))
            }
            _ => true,
        }
    }

    fn of(&self, class: &Class<'_>) -> Extent {
        let share = match self {
            Self::Always => Share::All,
            Self::Unknown | Self::Limit(_) => Share::Some,
            Self::Names(patterns) => share_of(patterns, class.key),
            Self::Sources(surely, maybe) => {
                return Extent { surely: surely.clone(), maybe: maybe.clone() };
            }
            Self::Protocol(text) => match class.protocol {
                None if class.version.is_empty() => Share::None,
                None => Share::Some,
                Some(only) if only == text => Share::All,
                Some(_) => Share::None,
            },
            Self::Version(version) if version == class.version => Share::All,
            Self::Version(_) => Share::None,
            Self::Tls if class.key.is_none() => Share::Some,
            Self::Tls if class.version.is_empty() => Share::None,
            Self::Tls => Share::All,
            Self::Not(part) => {
                let Extent { surely, maybe } = part.of(class);
                let all = Sources::all();
                return Extent { surely: all.minus(&maybe), maybe: all.minus(&surely) };
            }
            Self::All(parts) => {
                let mut whole = Extent::from(Share::All);
                for part in parts.iter().map(|part| part.of(class)) {
                    whole = Extent {
                        surely: whole.surely.and(&part.surely),
                        maybe: whole.maybe.and(&part.maybe),
                    };
                    if whole.maybe.is_none() {
                        break;
                    }
                }
                return whole;
            }
            Self::Any(parts) => {
                let parts = parts.iter().map(|part| part.of(class));
                return parts.fold(Extent::from(Share::None), |whole, part| Extent {
                    surely: whole.surely.union(&part.surely),
                    maybe: whole.maybe.union(&part.maybe),
                });
            }
        };
        share.into()
    }
}

fn share_of(patterns: &[Pattern], key: Option<&Key>) -> Share {
    let Some(key) = key else { return Share::Some };
    let mut share = Share::None;
    for pattern in patterns {
        match pattern.share_of(key) {
            Share::All => return Share::All,
            Share::Some => share = Share::Some,
            Share::None => {}
        }
    }
    share
}

/// The entries of a map that come before another one: of those that match, the first decides.
#[derive(Default)]
pub(super) struct Earlier {
    /// The entries of one name each; most maps have no others.
    names: BTreeMap<String, When>,
    others: Vec<When>,
    /// The number of conditions that were copied.
    copied: usize,
}

impl Earlier {
    pub(super) fn add(&mut self, entry: When) {
        match entry.name().map(str::to_owned) {
            Some(name) => _ = self.names.insert(name, entry),
            None => self.others.push(entry),
        }
    }

    /// Returns the condition that an entry matches and none before it. Beyond [`RULES_MAX`] copies, it is not known.
    pub(super) fn decides(&mut self, entry: When) -> When {
        let mut before: Vec<When> = Vec::new();
        match entry.name() {
            Some(name) if self.names.contains_key(name) => return When::never(),
            Some(_) => {}
            None => before.extend(self.names.values().filter(|one| one.may_meet(&entry)).cloned()),
        }
        before.extend(self.others.iter().filter(|one| one.may_meet(&entry)).cloned());
        self.copied += before.len();
        match before.is_empty() {
            true => entry,
            false if self.copied > RULES_MAX => When::All(vec![entry, When::Unknown]),
            false => When::All(vec![entry, When::Any(before).not()]),
        }
    }
}

/// Returns the condition that the first entry of a map that matches is a wanted one.
pub(super) fn first_match(entries: impl IntoIterator<Item = (When, bool)>) -> When {
    let mut earlier = Earlier::default();
    let (mut names, mut any) = (Vec::new(), Vec::new());
    for (entry, is_wanted) in entries {
        if !is_wanted {
            earlier.add(entry);
            continue;
        }
        match earlier.decides(entry) {
            When::Names(patterns) => names.extend(patterns),
            when => any.push(when),
        }
    }
    if any.is_empty() {
        return When::Names(names);
    }
    any.push(When::Names(names));
    When::Any(any)
}

/// How the walk treats what a rule that refuses does not surely match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doubt {
    /// As refused.
    Refuses,
    /// As admitted: the result is what a wrong conversion would admit.
    Admits,
}

/// The walk of some clients through the rules.
#[derive(Clone, Debug)]
pub(super) struct Walk<'a, 'c> {
    class: Class<'c>,
    leads: &'a [Lead],
    doubt: Doubt,
    /// The sources that go on to the next rule.
    left: Sources,
    /// The lead of the route and its rule, and the sources that it surely admits.
    pub(super) picked: Option<(usize, &'a Rule)>,
    pub(super) admitted: Sources,
    /// The lines of rules that could refuse clients of the walk.
    pub(super) doubted: Vec<usize>,
    /// The rules that could lead some of the clients elsewhere.
    pub(super) elsewhere: Vec<&'a Rule>,
    /// The rules that lead sources elsewhere for which a route has no place.
    pub(super) further: Vec<&'a Rule>,
}

impl<'a, 'c> Walk<'a, 'c> {
    /// Walks through the phases, and then through the rules that lead somewhere.
    pub(super) fn new(
        class: Class<'c>,
        doubt: Doubt,
        sources: &Sources,
        phases: &[&[Rule]],
        (choices, leads): (&'a [Rule], &'a [Lead]),
    ) -> Self {
        let mut walk = Self {
            class,
            leads,
            doubt,
            left: sources.clone(),
            picked: None,
            admitted: Sources::default(),
            doubted: Vec::new(),
            elsewhere: Vec::new(),
            further: Vec::new(),
        };
        for rules in phases {
            walk.left = walk.phase(rules, walk.left.clone());
        }
        for rule in choices {
            if walk.left.is_none() {
                break;
            }
            walk.choice(rule);
        }
        walk
    }

    /// Returns the sources of `left` that a phase lets on.
    fn phase(&mut self, rules: &[Rule], mut left: Sources) -> Sources {
        let mut accepted = Sources::default();
        for rule in rules {
            if left.is_none() {
                break;
            }
            let Extent { surely, maybe } = rule.when.of(&self.class);
            match rule.then {
                Then::Accept => {
                    accepted = accepted.union(&left.and(&surely));
                    left = left.minus(&surely);
                }
                Then::Refuse | Then::To(_) => left = self.refused(rule, &left, &surely, &maybe),
            }
        }
        accepted.union(&left)
    }

    /// Returns what a rule that refuses leaves of some sources.
    fn refused(&mut self, rule: &Rule, left: &Sources, surely: &Sources, maybe: &Sources) -> Sources {
        let rest = left.minus(surely);
        if !rest.and(maybe).without_kin().is_none() {
            self.doubted.push(rule.line);
        }
        if self.doubt == Doubt::Refuses { rest.minus(maybe) } else { rest }
    }

    fn choice(&mut self, rule: &'a Rule) {
        if rule.when.is_for_other_names(&self.class) {
            return;
        }
        let Extent { surely, maybe } = rule.when.of(&self.class);
        let (surely, maybe) = (self.left.and(&surely), self.left.and(&maybe));
        if maybe.is_none() {
            return;
        }
        let leads = self.leads;
        let lead = match rule.then {
            Then::To(number) => leads.get(number).filter(|lead| !lead.refuses).map(|lead| (number, lead)),
            Then::Accept | Then::Refuse => None,
        };
        let Some((number, lead)) = lead else {
            self.left = self.refused(rule, &self.left.clone(), &surely, &maybe);
            return;
        };
        if lead.target.is_none() {
            // Clients must not reach another lead than the one that the original has for them.
            self.doubted.push(rule.line);
            self.left = self.left.minus(if self.doubt == Doubt::Refuses { &maybe } else { &surely });
            return;
        }
        if !surely.is_none() {
            let admitted = self.phase(&lead.rules, surely.clone());
            match self.picked {
                _ if admitted.is_none() => {}
                None => (self.picked, self.admitted) = (Some((number, rule)), admitted),
                Some((picked, _)) if picked == number => self.admitted = self.admitted.union(&admitted),
                Some(_) => self.further.push(rule),
            }
            self.left = self.left.minus(&surely);
        }
        let unsure = maybe.minus(&surely);
        if !unsure.is_none() {
            let admitted = self.phase(&lead.rules, unsure.clone());
            self.left = self.left.minus(&unsure.minus(&admitted));
            if !admitted.is_none() && self.picked.is_none_or(|(picked, _)| picked != number) {
                self.elsewhere.push(rule);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::names::How;
    use super::*;

    #[test]
    fn the_first_entry_that_matches_decides() {
        let of = |how, text: &str| When::Names(vec![Pattern::new(how, text)]);
        let (a, b) = (of(How::Name, "a.x.test"), of(How::Name, "b.test"));
        let (below, any) = (of(How::End, ".x.test"), of(How::Any, ""));
        let but = |entry: &When, before: &When| {
            When::All(vec![entry.clone(), When::Any(vec![before.clone()]).not()])
        };
        for (entries, wanted) in [
            (vec![(&a, true), (&b, true)], {
                When::Names(vec![Pattern::new(How::Name, "a.x.test"), Pattern::new(How::Name, "b.test")])
            }),
            (vec![(&a, false), (&b, true)], b.clone()),
            // The first entry of a name decides.
            (vec![(&a, false), (&a, true)], When::Any(vec![When::never(), When::Names(Vec::new())])),
            (vec![(&below, false), (&b, true)], b.clone()),
            (vec![(&below, false), (&a, true)], {
                When::Any(vec![but(&a, &below), When::Names(Vec::new())])
            }),
            (vec![(&a, false), (&b, false), (&below, true)], {
                When::Any(vec![but(&below, &a), When::Names(Vec::new())])
            }),
            (vec![(&a, false), (&any, true)], When::Any(vec![but(&any, &a), When::Names(Vec::new())])),
        ] {
            let entries = entries.into_iter().map(|(when, is_wanted)| (when.clone(), is_wanted));
            assert_eq!(first_match(entries), wanted);
        }
    }
}
