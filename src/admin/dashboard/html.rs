//! HTML as text. Callers write markup as static strings, and every other value is escaped.

use std::fmt::Display;

use isthmus_api::text::{ago, is_deceptive, with_short_times};

/// The longest value in characters. Longer values are cut, because a peer or a registry may choose their length.
const TEXT_MAX: usize = 1000;

/// The HTML of a page, to which elements are added.
#[derive(Default)]
pub(super) struct Html(String);

impl Html {
    /// Adds constant markup, without any value.
    pub(super) fn raw(&mut self, markup: &'static str) -> &mut Self {
        self.0.push_str(markup);
        self
    }

    /// Adds a value as text, in an element or in a quoted attribute.
    pub(super) fn text(&mut self, text: impl AsRef<str>) -> &mut Self {
        for (index, character) in text.as_ref().chars().enumerate() {
            if index == TEXT_MAX {
                self.0.push('\u{2026}');
                break;
            }
            match character {
                '&' => self.0.push_str("&amp;"),
                '<' => self.0.push_str("&lt;"),
                '>' => self.0.push_str("&gt;"),
                '"' => self.0.push_str("&quot;"),
                '\'' => self.0.push_str("&#39;"),
                '\n' => self.0.push('\n'),
                other if is_deceptive(other) => self.0.extend(other.escape_unicode()),
                other => self.0.push(other),
            }
        }
        self
    }

    /// Adds the text of a value's [`Display`] form.
    pub(super) fn show(&mut self, value: impl Display) -> &mut Self {
        self.text(value.to_string())
    }

    /// Adds a time in words, such as `12 s ago`, with the exact time as its title.
    pub(super) fn time(&mut self, time: &str, now: &str) -> &mut Self {
        self.raw("<time").attribute("datetime", time).attribute("title", time).raw(">");
        self.text(ago(time, now)).raw("</time>")
    }

    /// Adds a link.
    pub(super) fn link(&mut self, to: &str, text: &str) -> &mut Self {
        self.raw("<a").attribute("href", to).raw(">").text(text).raw("</a>")
    }

    /// Adds a text of the gateway: its commands, which are in backquotes, can be copied, and its times are short.
    pub(super) fn prose(&mut self, text: &str, now: &str) -> &mut Self {
        for (index, part) in text.split('`').enumerate() {
            match index % 2 {
                0 => self.text(with_short_times(part, now)),
                _ => self.command(part),
            };
        }
        self
    }

    /// Adds a command, which a click selects.
    pub(super) fn command(&mut self, command: &str) -> &mut Self {
        self.raw("<code class=\"copy\">").text(command).raw("</code>")
    }

    /// Adds ` name="value"`.
    pub(super) fn attribute(&mut self, name: &'static str, value: impl AsRef<str>) -> &mut Self {
        self.raw(" ").raw(name).raw("=\"").text(value).raw("\"")
    }

    /// Returns the finished page.
    pub(super) fn finish(self) -> String {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_never_become_markup() {
        let mut html = Html::default();
        html.raw("<p")
            .attribute("title", "\" onclick='x")
            .raw(">")
            .text("<script>&\u{202e}\0</script>")
            .raw("</p>");
        assert_eq!(
            html.finish(),
            "<p title=\"&quot; onclick=&#39;x\">&lt;script&gt;&amp;\\u{202e}\\u{0}&lt;/script&gt;</p>"
        );
        let mut long = Html::default();
        long.text("<".repeat(TEXT_MAX + 7));
        assert_eq!(long.finish(), format!("{}…", "&lt;".repeat(TEXT_MAX)));
    }
}
