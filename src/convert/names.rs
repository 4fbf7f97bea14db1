//! The names of clients: the patterns of the original, and the keys of routes, each with the clients that no more specific key takes.

use isthmus_document::scalar::host_name;

/// The key of a route, and the clients whose most specific key it is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    /// `*`: clients that send a name.
    Named,
    /// `-`: clients that send no name.
    Nameless,
    /// `*.NAME`: names below this one.
    Below(String),
    /// One host name.
    Exact(String),
}

impl Key {
    /// Returns the key as the config has it.
    pub(super) fn text(&self) -> String {
        match self {
            Self::Named => "*".to_owned(),
            Self::Nameless => "-".to_owned(),
            Self::Below(name) => format!("*.{name}"),
            Self::Exact(name) => name.clone(),
        }
    }

    /// Returns the wider keys that take this key's clients if it has no route, the most specific one first.
    pub(super) fn wider(&self) -> Vec<Self> {
        let (Self::Below(name) | Self::Exact(name)) = self else { return Vec::new() };
        let above = name.match_indices('.').map(|(at, _)| Self::Below(name[at + 1..].to_owned()));
        above.chain([Self::Named]).collect()
    }
}

/// The part of some clients that a condition is true for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Share {
    None,
    /// Not known, or some of them.
    Some,
    All,
}

/// How a pattern is compared with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    /// The client sends no name.
    Nameless,
    /// The client sends a name.
    Any,
    /// The name is the text.
    Name,
    /// The name ends with the text; one that begins with a dot means the names below another one.
    End,
    /// The text is one or more labels of the name.
    Labels,
    Start,
    Part,
    /// In another way: such a pattern may match any name.
    Other,
}

/// A pattern of names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pattern {
    how: How,
    text: String,
    /// True if the keys of the pattern are among those of its site, so that they take its names from all wider keys.
    has_keys: bool,
}

impl Pattern {
    /// Makes a pattern; its text has no letter case.
    pub(super) fn new(how: How, text: &str) -> Self {
        let text = text.to_ascii_lowercase();
        let text = if how == How::Labels { text.trim_matches('.').to_owned() } else { text };
        let bare = text.strip_prefix('.').filter(|_| [How::End, How::Part].contains(&how)).unwrap_or(&text);
        // The beginning or a part of names is a name only if it looks like one.
        let is_whole = ![How::Start, How::Part].contains(&how) || bare.contains('.');
        let has_keys = is_whole && host_name(bare).is_ok_and(|name| name.as_str() == bare);
        Self { how, text, has_keys }
    }

    /// Returns true if the pattern may match any name.
    pub(super) fn is_unknown(&self) -> bool {
        self.how == How::Other
    }

    /// Returns true if the pattern matches the names of its keys and no others.
    pub(super) fn is_exact(&self) -> bool {
        match self.how {
            How::Nameless | How::Any | How::Name => true,
            How::End => self.text.starts_with('.'),
            How::Labels | How::Start | How::Part | How::Other => false,
        }
    }

    /// Returns the name, if the pattern matches one name alone.
    pub(super) fn name(&self) -> Option<&str> {
        (self.how == How::Name).then_some(self.text.as_str())
    }

    /// Returns true if a name may match this pattern and another one.
    pub(super) fn may_meet(&self, other: &Self) -> bool {
        let (one, two) = (self.text.as_str(), other.text.as_str());
        match (self.how, other.how) {
            (How::Name, How::Name) => one == two,
            (How::Name, How::End) => one.ends_with(two),
            (How::End, How::Name) => two.ends_with(one),
            (How::End, How::End) => one.ends_with(two) || two.ends_with(one),
            _ => true,
        }
    }

    /// Makes the pattern of the names below this one.
    pub(super) fn below(name: &str) -> Self {
        Self::new(How::End, &format!(".{name}"))
    }

    /// Returns the keys that take names of the pattern.
    pub(super) fn keys(&self) -> Vec<Key> {
        let text = || self.text.clone();
        match self.how {
            How::Nameless => vec![Key::Nameless],
            How::Any => vec![Key::Named],
            _ if !self.has_keys => Vec::new(),
            How::Name | How::Start => vec![Key::Exact(text())],
            How::End | How::Part => match self.text.strip_prefix('.') {
                Some(name) => vec![Key::Below(name.to_owned())],
                None => vec![Key::Exact(text()), Key::Below(text())],
            },
            How::Labels => vec![Key::Exact(text()), Key::Below(text())],
            How::Other => Vec::new(),
        }
    }

    /// Returns the part of a key's clients whose name the pattern matches.
    pub(super) fn share_of(&self, key: &Key) -> Share {
        let all_or = |is_all: bool, otherwise: Share| if is_all { Share::All } else { otherwise };
        let text = self.text.as_str();
        match (self.how, key) {
            (How::Nameless, Key::Nameless) => Share::All,
            (How::Nameless, _) | (_, Key::Nameless) => Share::None,
            (How::Any, _) => Share::All,
            (How::Other, _) => Share::Some,
            (How::Name, Key::Exact(name)) => all_or(name == text, Share::None),
            (How::End, Key::Exact(name)) => all_or(name.ends_with(text), Share::None),
            (How::Start, Key::Exact(name)) => all_or(name.starts_with(text), Share::None),
            (How::Part, Key::Exact(name)) => all_or(name.contains(text), Share::None),
            (How::Labels, Key::Exact(name)) => all_or(has_labels(name, text), Share::None),
            (How::Name, _) => all_or(false, if self.has_keys { Share::None } else { Share::Some }),
            (How::End, Key::Below(name)) => {
                let dotted = format!(".{name}");
                let could = text.ends_with(&dotted) && !(self.has_keys && text.starts_with('.'));
                all_or(dotted.ends_with(text), if could { Share::Some } else { Share::None })
            }
            (How::End, Key::Named) => {
                all_or(false, if self.has_keys && text.starts_with('.') { Share::None } else { Share::Some })
            }
            (How::Part, Key::Below(name)) => all_or(format!(".{name}").contains(text), Share::Some),
            (How::Labels, Key::Below(name)) => all_or(has_labels(name, text), Share::Some),
            (How::Start | How::Part | How::Labels, _) => Share::Some,
        }
    }
}

/// Returns true if a text is one or more whole labels of a name.
fn has_labels(name: &str, text: &str) -> bool {
    !text.is_empty() && format!(".{name}.").contains(&format!(".{text}."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_matches_all_some_or_none_of_the_clients_of_a_key() {
        let (exact, below) =
            (|name: &str| Key::Exact(name.to_owned()), |name: &str| Key::Below(name.to_owned()));
        for (how, text, key, wanted) in [
            (How::Name, "A.test", exact("a.test"), Share::All),
            (How::Name, "a.test", below("test"), Share::None),
            (How::Name, "no name", below("test"), Share::Some),
            (How::End, ".a.test", below("a.test"), Share::All),
            (How::End, ".a.test", below("b.a.test"), Share::All),
            (How::End, ".a.test", exact("a.test"), Share::None),
            (How::End, ".a.test", below("test"), Share::None),
            (How::End, ".a.test", Key::Named, Share::None),
            (How::End, "a.test", exact("bada.test"), Share::All),
            (How::End, "a.test", below("test"), Share::Some),
            (How::End, "a.test", Key::Named, Share::Some),
            (How::Labels, "a", exact("x.a.test"), Share::All),
            (How::Labels, "a", exact("xa.test"), Share::None),
            (How::Labels, "a", below("a.test"), Share::All),
            (How::Labels, "a", below("test"), Share::Some),
            (How::Start, "mail.", exact("mail.test"), Share::All),
            (How::Part, "a.test", below("a.test"), Share::All),
            (How::Part, "a.test", below("test"), Share::Some),
            (How::Start, "mail.", below("test"), Share::Some),
            (How::Part, "a", below("b.test"), Share::Some),
            (How::Part, "a", below("a.test"), Share::All),
            (How::Other, "^a", exact("b.test"), Share::Some),
            (How::Other, "^a", Key::Nameless, Share::None),
            (How::Any, "", Key::Named, Share::All),
            (How::Any, "", Key::Nameless, Share::None),
            (How::Nameless, "", Key::Nameless, Share::All),
            (How::Nameless, "", Key::Named, Share::None),
        ] {
            assert_eq!(Pattern::new(how, text).share_of(&key), wanted, "{how:?} {text:?} {key:?}");
        }
    }
}
