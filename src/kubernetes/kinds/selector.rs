//! Label selectors: the labels that objects must have to be listed, and that this program gives its own objects.

use std::fmt::Write as _;

use crate::objects::Texts;

/// A label selector: all of its requirements must be met.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Selector(pub(crate) &'static [Label]);

/// A requirement of a selector.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Label {
    /// The label has this value.
    Is(&'static str, &'static str),
    Present(&'static str),
    Absent(&'static str),
}

impl Selector {
    pub(super) fn matches(self, labels: &Texts) -> bool {
        self.0.iter().all(|label| match label {
            Label::Is(name, value) => labels.get(*name).is_some_and(|found| found == value),
            Label::Present(name) => labels.contains_key(*name),
            Label::Absent(name) => !labels.contains_key(*name),
        })
    }

    /// Returns the labels of a new object: these, and those whose value the selector has.
    pub(super) fn labels<'a>(self, others: impl IntoIterator<Item = (&'a str, &'a str)>) -> Texts {
        let own = self.0.iter().filter_map(|label| match *label {
            Label::Is(name, value) => Some((name, value)),
            Label::Present(_) | Label::Absent(_) => None,
        });
        others.into_iter().chain(own).map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    /// Returns the selector as a query has it, before it is encoded.
    pub(super) fn text(self) -> String {
        let labels = self.0.iter().map(|label| match *label {
            Label::Is(name, value) => format!("{name}={value}"),
            Label::Present(name) => name.to_owned(),
            Label::Absent(name) => format!("!{name}"),
        });
        labels.collect::<Vec<_>>().join(",")
    }
}

/// Adds a parameter to a query, percent-encoded (RFC 3986 §2.1); an empty one is left out.
pub(super) fn add_to_query(query: &mut String, name: &str, value: &str) {
    if value.is_empty() {
        return;
    }
    let _ = write!(query, "&{name}=");
    for byte in value.bytes() {
        let _ = match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                write!(query, "{}", char::from(byte))
            }
            _ => write!(query, "%{byte:02X}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SELECTOR: Selector = Selector(&[Label::Is("a/b", "1"), Label::Present("c"), Label::Absent("d")]);

    #[test]
    fn the_labels_that_a_selector_gives_are_selected_by_it_and_by_its_text() {
        let labels = SELECTOR.labels([("a/b", "theirs"), ("c", "x")]);
        let expected = [("a/b", "1"), ("c", "x")].map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(labels, expected.into());
        assert!(SELECTOR.matches(&labels));
        for (name, value) in [("a/b", Some("2")), ("a/b", None), ("c", None), ("d", Some(""))] {
            let mut other = labels.clone();
            match value {
                Some(value) => drop(other.insert(name.to_owned(), value.to_owned())),
                None => drop(other.remove(name)),
            }
            assert!(!SELECTOR.matches(&other), "{name}: {value:?}");
        }
        let mut query = "limit=1".to_owned();
        add_to_query(&mut query, "labelSelector", &SELECTOR.text());
        add_to_query(&mut query, "fieldSelector", "");
        assert_eq!(query, "limit=1&labelSelector=a%2Fb%3D1%2Cc%2C%21d");
    }
}
