//! Backends whose names HAProxy computes of the server name: `use_backend %[req.ssl_sni,lower,map_end(hosts.map,web)]-https`. Further maps
//! may look up what the first one has.

use super::Conversion;
use super::conditions::{Acls, of_map};
use super::frontend::Front;
use super::mapping::{Lines, Mapping, without_lower};
use crate::names::{How, Pattern};
use crate::rules::{Earlier, Rule, Then, When};
use crate::words::Line;
use isthmus_document::scalar::host_name;

/// The name of a backend that is made of the server name, or of what a map has for it.
struct Computed<'m> {
    /// The texts before and after the value.
    around: (&'m str, &'m str),
    is_lower: bool,
    map: Option<Mapping<'m>>,
    /// The maps in which the value of the one before is looked up.
    further: Vec<Mapping<'m>>,
}

impl<'m> Computed<'m> {
    fn of(target: &'m str) -> Option<Self> {
        let (before, rest) = target.split_once("%[")?;
        let (inner, after) = rest.split_once(']')?;
        let (sample, converters) = inner.split_once(',').unwrap_or((inner, ""));
        if !["req.ssl_sni", "req_ssl_sni"].contains(&sample) || after.contains("%[") {
            return None;
        }
        let (is_lower, rest) = without_lower(converters);
        let mut maps = if rest.is_empty() { Vec::new() } else { Mapping::chain(rest)? }.into_iter();
        Some(Self { around: (before, after), is_lower, map: maps.next(), further: maps.collect() })
    }

    /// Returns the backend for a value of the first map; `None` if a further map lacks it. `tables` are the lines of the further maps.
    fn backend(&self, value: &str, tables: &[Lines]) -> Option<String> {
        let mut maps = self.further.iter().zip(tables);
        let value = maps.try_fold(value.to_owned(), |value, (map, lines)| map.value(lines, &value));
        Some(format!("{}{}{}", self.around.0, value?, self.around.1))
    }
}

impl Conversion<'_> {
    /// Adds the rules of a line that computes the name of the backend. `default`: the backend of clients for whom no such backend is.
    pub(super) fn computed(
        &mut self,
        (line, when): (&Line, When),
        acls: &Acls<'_>,
        default: Option<&str>,
        front: &mut Front<'_>,
    ) {
        let number = line.number;
        let Some(computed) = Computed::of(&line.words[1]) else {
            let text = format!(
                "the backend {} is computed for each connection; write a route for each name",
                line.words[1]
            );
            return self.any_backend((number, text), when, default, front);
        };
        match &computed.map {
            None => self.by_name(number, &computed, &when, front),
            Some(map) => {
                let Some(text) = acls.file(map.path) else {
                    let text =
                        format!("the file {} cannot be read; write a route for each of its names", map.path);
                    return self.any_backend((number, text), when, default, front);
                };
                let tables = computed.further.iter().map(|map| (map.path, acls.file(map.path)));
                let tables =
                    tables.map(|(path, text)| text.and_then(|text| Mapping::lines(&text)).ok_or(path));
                match tables.collect::<Result<Vec<_>, _>>() {
                    Ok(tables) => self.map(line, &computed, (&text, &tables), &when, front),
                    Err(path) => {
                        let text = format!(
                            "the file {path} cannot be read as names and values; write a route for each name"
                        );
                        return self.any_backend((number, text), when, default, front);
                    }
                }
            }
        }
        // HAProxy looks at no further rule.
        match default {
            Some(default) => self.lead_on(number, when, default, front),
            None => front.choices.push(Rule::new(number, when, Then::Refuse)),
        }
    }

    /// Adds the rules of a line whose clients may go to any backend, and one that is not among these may refuse them.
    fn any_backend(
        &mut self,
        (line, text): (usize, String),
        when: When,
        default: Option<&str>,
        front: &mut Front<'_>,
    ) {
        self.not_converted(line, text);
        let when = When::All(vec![when, When::Unknown]);
        if !self.closed_backends.is_empty() || default.is_none() {
            front.choices.push(Rule::new(line, when.clone(), Then::Refuse));
        }
        let names: Vec<String> = self.backends.keys().cloned().collect();
        names.iter().for_each(|name| self.lead_on(line, when.clone(), name, front));
    }

    /// Adds a rule for each backend that is named for a server name.
    fn by_name(&mut self, line: usize, computed: &Computed<'_>, when: &When, front: &mut Front<'_>) {
        let (before, after) = computed.around;
        let all: Vec<String> = self.backends.keys().chain(&self.closed_backends).cloned().collect();
        for backend in all {
            let name = backend.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
            if let Some(name) = name.filter(|name| host_name(name).is_ok()) {
                let named = When::Names(vec![Pattern::new(How::Name, name)]);
                self.lead_on(line, when.and(named), &backend, front);
            }
        }
    }

    /// Adds the rules of a file of names and values; `tables` are the lines of the further maps.
    fn map(
        &mut self,
        line: &Line,
        computed: &Computed<'_>,
        (text, tables): (&str, &[Lines]),
        when: &When,
        front: &mut Front<'_>,
    ) {
        let Some(map) = &computed.map else { return };
        let number = line.number;
        // A value for which there is no backend is as one that is missing.
        let mut missing = Earlier::default();
        let lines = map.in_order(text);
        let names: Vec<&str> = lines.iter().flatten().map(|(name, _)| *name).collect();
        let whole = of_map(map.method, &names, computed.is_lower);
        self.told(line, &whole, "these lines of the map lead no client");
        for entry in lines {
            match entry {
                Ok((pattern, value)) => {
                    let condition = of_map(map.method, &[pattern], computed.is_lower);
                    let backend = computed.backend(value, tables).filter(|name| self.has_backend(name));
                    if let Some(backend) = backend {
                        let when = when.and(missing.decides(condition.when));
                        self.lead_on(number, when, &backend, front);
                    } else {
                        missing.add(condition.when);
                    }
                }
                Err(of_file) => {
                    let text = format!("line {of_file} of {} is not a name and a backend", map.path);
                    self.not_converted(number, text);
                    front.choices.push(Rule::could_refuse(number));
                }
            }
        }
        let default = map.default.and_then(|default| computed.backend(default, tables));
        let default = default.filter(|name| self.has_backend(name));
        if let Some(default) = default {
            // Without a server name there is nothing to look up.
            let named = missing.decides(When::Names(vec![Pattern::new(How::Any, "")]));
            self.lead_on(number, when.and(named), &default, front);
        }
    }

    /// Returns true if the file has a section of this name to which a rule can lead.
    fn has_backend(&self, name: &str) -> bool {
        self.backends.contains_key(name) || self.closed_backends.contains(name)
    }
}
