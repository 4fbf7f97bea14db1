//! Times in milliseconds, the text of quantities in the dashboard, in `isthmus top` and in tables, and the escaping of deceptive characters.

use std::fmt::Write as _;
use std::time::Duration;

use isthmus_model::time::parse_rfc3339;

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

/// Returns a rate of calls: `0.4/s`.
pub fn rate(per_second: f64) -> String {
    let digits = usize::from(per_second < 99.95);
    format!("{per_second:.digits$}/s")
}

/// Returns the time between two RFC 3339 times in words: `12 s ago`. Returns the first as it is if it is not such a time, or is later.
pub fn ago(time: &str, now: &str) -> String {
    let between = parse_rfc3339(time).zip(parse_rfc3339(now)).and_then(|(then, now)| now.checked_sub(then));
    between.map_or_else(|| time.to_owned(), |seconds| format!("{} ago", lasting(seconds)))
}

/// Shortens each RFC 3339 time of milliseconds in a text: to `11:50:32 UTC` if it is of the day of `now`, else to `2026-11-30 11:50 UTC`.
pub fn with_short_times(text: &str, now: &str) -> String {
    let mut short = String::with_capacity(text.len());
    let mut done = 0;
    for (at, _) in text.match_indices('T') {
        let Some(begin) = at.checked_sub(DATE).filter(|begin| *begin >= done) else { continue };
        let time =
            text.get(begin..at + TIME).filter(|time| time.ends_with('Z') && parse_rfc3339(time).is_some());
        let Some(time) = time else { continue };
        let (day, clock) = (&time[..DATE], &time[DATE + 1..DATE + 9]);
        short.push_str(&text[done..begin]);
        match now.starts_with(day) {
            true => short.extend([clock, " UTC"]),
            false => short.extend([day, " ", &clock[..5], " UTC"]),
        }
        done = at + TIME;
    }
    short.push_str(&text[done..]);
    short
}

/// The length of a date, and that of a time of milliseconds with the letters around it.
const DATE: usize = "2026-01-31".len();
const TIME: usize = "T23:59:59.123Z".len();

/// Returns a text as one word of a POSIX shell.
pub fn shell_word(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._:/@%+=,-".contains(&byte);
    if text.is_empty() || !text.bytes().all(is_plain) {
        return format!("'{}'", text.replace('\'', "'\\''"));
    }
    text.to_owned()
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
        assert_eq!(
            [0.0, 0.44, 99.9, 99.96, 2e6].map(rate),
            ["0.0/s", "0.4/s", "99.9/s", "100/s", "2000000/s"]
        );
    }

    #[test]
    fn times_are_short() {
        let now = "2026-01-31T23:59:59.123Z";
        assert_eq!(ago("2026-01-31T23:59:47.000Z", now), "12 s ago");
        assert_eq!(ago("2026-02-01T00:00:00.000Z", now), "2026-02-01T00:00:00.000Z");
        assert_eq!(ago("never", now), "never");
        for (text, short) in [
            ("The TLS since 2026-01-31T23:59:47.012Z: x", "The TLS since 23:59:47 UTC: x"),
            ("2026-01-30T23:59:47.012Z, 2026-01-31T00:00:00.000Z.", "2026-01-30 23:59 UTC, 00:00:00 UTC."),
            ("a 2026-13-31T23:59:47.012Z T", "a 2026-13-31T23:59:47.012Z T"),
            ("until 2026-01-31T23:59:47Z é T", "until 2026-01-31T23:59:47Z é T"),
            ("\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}T\u{e9}", "\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}T\u{e9}"),
        ] {
            assert_eq!(with_short_times(text, now), short);
        }
    }
}
