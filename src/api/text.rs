//! Times in milliseconds, the text of quantities in the dashboard, in `isthmus top` and in tables, and the escaping of deceptive characters.

use std::fmt::Write as _;
use std::time::Duration;

/// Returns a number of bytes with three or four digits and its unit.
pub fn bytes(count: f64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let (mut value, mut unit) = (count, 0);
    while value >= 1023.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if unit == 0 || value >= 99.95 { 0 } else { 1 };
    format!("{value:.digits$} {}", UNITS[unit])
}

/// Returns a time in milliseconds, to the microsecond.
pub fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

/// Returns a duration in its two largest units.
pub fn lasting(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, minutes) => format!("{minutes} min"),
        (0, hours, minutes) => format!("{hours} h {minutes} min"),
        (days, hours, _) => format!("{days} d {hours} h"),
    }
}

/// Returns a number with its noun: `1 endpoint` or `2 endpoints`.
pub fn counted(count: usize, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}

/// Returns each value as text.
pub fn texts<T: ToString>(all: &[T]) -> Vec<String> {
    all.iter().map(ToString::to_string).collect()
}

/// Returns true for characters that are invisible, control a terminal, or change the display order of others (Unicode UAX #9).
/// Names come from the network and may have such characters.
pub fn is_deceptive(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// Escapes deceptive characters in a text: `\u{1b}`.
pub fn clean(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    for character in text.chars() {
        match is_deceptive(character) {
            true => clean.extend(character.escape_unicode()),
            false => clean.push(character),
        }
    }
    clean
}

/// Percent-encodes a value for a query.
pub fn encoded(value: &str) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_short_and_texts_command_nothing() {
        let shown = [0, 1023, 1024, 1536, 102_400, 1 << 20, u64::MAX].map(|count| bytes(count as f64));
        assert_eq!(shown, ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "100 KiB", "1.0 MiB", "16384 PiB"]);
        assert_eq!(encoded("a b&\"é"), "a%20b%26%22%C3%A9");
        assert_eq!(clean("a\u{1b}[31m\nb"), "a\\u{1b}[31m\\u{a}b");
        assert_eq!([5, 65, 3700, 90_061].map(lasting), ["5 s", "1 min", "1 h 1 min", "1 d 1 h"]);
    }
}
