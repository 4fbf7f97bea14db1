//! HTML as text, in which only this file's callers write markup and every value is escaped.

use std::fmt::{Display, Write as _};

/// The longest value in characters; longer ones are cut, as a peer or a registry chooses their length.
const TEXT_MAX: usize = 1000;

/// A page in the making.
#[derive(Default)]
pub(super) struct Html(String);

impl Html {
    /// Adds markup, which no value is part of.
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
                other if is_deceptive(other) => {
                    let _ = write!(self.0, "\\u{{{:x}}}", u32::from(other));
                }
                other => self.0.push(other),
            }
        }
        self
    }

    /// Adds a value that is shown as it displays itself.
    pub(super) fn show(&mut self, value: impl Display) -> &mut Self {
        self.text(value.to_string())
    }

    /// Adds ` name="value"`.
    pub(super) fn attribute(&mut self, name: &'static str, value: impl AsRef<str>) -> &mut Self {
        self.raw(" ").raw(name).raw("=\"").text(value).raw("\"")
    }

    /// Returns the text.
    pub(super) fn finish(self) -> String {
        self.0
    }
}

/// Returns true for characters that are not seen, or that change the order in which others are seen (Unicode UAX #9).
fn is_deceptive(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// Percent-encodes a value for a query.
pub(super) fn encoded(value: &str) -> String {
    value.bytes().fold(String::new(), |mut out, byte| {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => out.push(char::from(byte)),
            _ => {
                let _ = write!(out, "%{byte:02X}");
            }
        }
        out
    })
}

/// Returns a number of bytes in three or four figures.
pub(super) fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let (mut value, mut unit) = (count as f64, 0);
    while value >= 1023.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if unit == 0 || value >= 99.95 { 0 } else { 1 };
    format!("{value:.digits$} {}", UNITS[unit])
}

/// Returns a duration in its two largest units.
pub(super) fn lasting(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, minutes) => format!("{minutes} min"),
        (0, hours, minutes) => format!("{hours} h {minutes} min"),
        (days, hours, _) => format!("{days} d {hours} h"),
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
        assert_eq!(encoded("a b&\"é"), "a%20b%26%22%C3%A9");
    }

    #[test]
    fn quantities_are_short() {
        let shown = [0, 1023, 1024, 1536, 102_400, 1 << 20, u64::MAX].map(bytes);
        assert_eq!(shown, ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "100 KiB", "1.0 MiB", "16384 PiB"]);
        assert_eq!([5, 65, 3700, 90_061].map(lasting), ["5 s", "1 min", "1 h 1 min", "1 d 1 h"]);
    }
}
