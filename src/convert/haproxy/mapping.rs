//! Maps of HAProxy: files of names and values, and the converters that look a name up there.

use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The lines of a map: names and values.
pub(super) type Lines = BTreeMap<String, String>;

/// A map by the server name.
pub(super) struct Mapping<'m> {
    pub(super) path: &'m str,
    /// The method by which names are compared, as after `-m`.
    pub(super) method: &'static str,
    /// The value of all other names.
    pub(super) default: Option<&'m str>,
}

impl<'m> Mapping<'m> {
    /// Reads a converter such as `map_end(hosts.map,web)`.
    pub(super) fn of(converter: &'m str) -> Option<Self> {
        let (name, arguments) = converter.strip_suffix(')')?.split_once('(')?;
        let method = match name {
            "map" | "map_str" => "str",
            "map_beg" => "beg",
            "map_sub" => "sub",
            "map_end" => "end",
            "map_dom" => "dom",
            "map_reg" => "reg",
            _ => return None,
        };
        let (path, default) =
            arguments.split_once(',').map_or((arguments, None), |(path, default)| (path, Some(default)));
        // Further converters follow; [`Self::chain`] reads them.
        if arguments.contains(['(', ')']) {
            return None;
        }
        Some(Self { path, method, default })
    }

    /// Reads converters such as `map(hosts.map,web),map(backends.map)`: each looks up the value of the one before, without its letter
    /// case changed, and as a whole.
    pub(super) fn chain(converters: &'m str) -> Option<Vec<Self>> {
        let each = converters.split_inclusive(')').enumerate();
        let maps = each.map(|(at, one)| Self::of(if at == 0 { one } else { one.strip_prefix(',')? }));
        let maps: Vec<Self> = maps.collect::<Option<_>>()?;
        maps.iter().skip(1).all(|map| map.method == "str").then_some(maps)
    }

    /// Returns the value of a whole text in the lines of this map; `None` if there is none.
    pub(super) fn value(&self, lines: &Lines, text: &str) -> Option<String> {
        lines.get(text).map(String::as_str).or(self.default).map(str::to_owned)
    }

    /// Returns all lines of a map; `None` if one of them is not a name and a value.
    pub(super) fn lines(text: &str) -> Option<Lines> {
        let mut lines = Lines::new();
        for entry in entries(text) {
            let (name, value) = entry.ok()?;
            // HAProxy takes the first of several lines with one name.
            lines.entry(name.to_owned()).or_insert_with(|| value.to_owned());
        }
        Some(lines)
    }

    /// Returns the lines of the map, in the order in which HAProxy looks at them: of several beginnings, the longest decides.
    pub(super) fn in_order<'t>(&self, text: &'t str) -> Vec<Result<(&'t str, &'t str), usize>> {
        let mut all: Vec<_> = entries(text).collect();
        if self.method == "beg" {
            all.sort_by_key(|entry| Reverse(entry.map_or(0, |(name, _)| name.len())));
        }
        all
    }
}

/// Returns the lines of a map with their numbers: a name and its value. A line that has another form is an error with its number.
fn entries(text: &str) -> impl Iterator<Item = Result<(&str, &str), usize>> {
    text.lines().enumerate().filter_map(|(number, entry)| {
        let entry = entry.trim();
        if entry.is_empty() || entry.starts_with('#') {
            return None;
        }
        // A value may have blanks, but a backend has none.
        let halves = entry.split_once(char::is_whitespace).map(|(name, value)| (name, value.trim()));
        Some(halves.filter(|(_, value)| !value.contains(char::is_whitespace)).ok_or(number + 1))
    })
}

/// Returns true if the first of these converters makes a name lower, and the others.
pub(super) fn without_lower(converters: &str) -> (bool, &str) {
    match converters.strip_prefix("lower") {
        Some("") => (true, ""),
        Some(rest) => rest.strip_prefix(',').map_or((false, converters), |rest| (true, rest)),
        None => (false, converters),
    }
}
