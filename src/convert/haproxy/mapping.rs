//! Maps of HAProxy: files of names and values, and the converters that look a name up there.

use std::cmp::Reverse;

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
        // Further converters follow.
        if arguments.contains(['(', ')']) {
            return None;
        }
        Some(Self { path, method, default })
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
