//! Wall-clock times as text (RFC 3339). Times are written in UTC with milliseconds, or in seconds since 1970.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Returns a time such as `2026-01-31T23:59:59.123Z`; a time before 1970 counts as the beginning of 1970.
pub fn rfc3339(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (year, month, day) = civil(days);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:03}Z",
        second / 3600,
        second / 60 % 60,
        second % 60,
        since.subsec_millis()
    )
}

/// Returns the seconds since 1970-01-01 UTC; 0 before.
pub fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Writes a time in seconds since 1970-01-01 UTC, such as `2026-01-31T23:59:59Z`.
pub fn rfc3339_seconds(time: u64) -> String {
    let text = rfc3339(UNIX_EPOCH + Duration::from_secs(time.min(LATEST)));
    format!("{}Z", text.split('.').next().unwrap_or_default())
}

/// The end of the year 9999, in seconds since 1970-01-01 UTC.
const LATEST: u64 = 253_402_300_799;

/// Parses an RFC 3339 time from 1970 to 9999, such as `2026-01-31T23:59:59Z` or `2026-01-31T23:59:59.5+02:00`, to seconds since
/// 1970-01-01 UTC; fractions of a second are cut off. A leap second counts as the first second of the next minute.
pub fn parse_rfc3339(text: &str) -> Option<u64> {
    let number = |from: usize, to: usize| -> Option<u64> {
        let digits = text.get(from..to)?;
        digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
    };
    let is =
        |at: usize, chars: &str| text.as_bytes().get(at).is_some_and(|byte| chars.as_bytes().contains(byte));
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    let (hour, minute, second) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
    let separated = is(4, "-") && is(7, "-") && is(10, "Tt ") && is(13, ":") && is(16, ":");
    if !separated || !(1970..=9999).contains(&year) || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    let days = days_of(year, month, day)?;
    let local = days * 86_400 + hour * 3_600 + minute * 60 + second;
    let zone = text.get(19..)?;
    let zone = match zone.strip_prefix('.') {
        None => zone,
        Some(fraction) => {
            let zone = fraction.trim_start_matches(|digit: char| digit.is_ascii_digit());
            (zone.len() < fraction.len()).then_some(zone)?
        }
    };
    if zone.eq_ignore_ascii_case("z") {
        return Some(local);
    }
    let (sign, offset) = (zone.get(..1)?, zone.get(1..)?);
    let (hours, minutes) = offset.split_once(':')?;
    let two = |text: &str| {
        (text.len() == 2 && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok())?
    };
    let (hours, minutes): (u64, u64) =
        (two(hours).filter(|hours| *hours < 24)?, two(minutes).filter(|minutes| *minutes < 60)?);
    let offset = hours * 3_600 + minutes * 60;
    match sign {
        "+" => local.checked_sub(offset),
        "-" => Some(local + offset),
        _ => None,
    }
}

/// Returns the day since 1970-01-01 of a Gregorian date; `None` if there is no such date.
fn days_of(year: u64, month: u64, day: u64) -> Option<u64> {
    let is_leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let length = match month {
        2 => 28 + u64::from(is_leap),
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return None,
    };
    if !(1..=length).contains(&day) {
        return None;
    }
    let (year, month_from_march) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let (era, year_of_era) = (year / 400, year % 400);
    let day_of_year = (153 * month_from_march + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    (era * 146_097 + day_of_era).checked_sub(719_468)
}

/// Returns the Gregorian date (year, month, day) of a day since 1970-01-01, computed in 400-year eras that begin on 1
/// March.
fn civil(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_gregorian() {
        let at = |seconds| rfc3339(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00.000Z");
        assert_eq!(at(1_795_305_599), "2026-11-21T23:59:59.000Z");
        assert_eq!(at(4_107_542_400), "2100-03-01T00:00:00.000Z");
    }

    #[test]
    fn times_are_read_as_they_are_written() {
        for seconds in [0, 951_782_399, 951_782_400, 1_795_305_599, 4_107_542_400, LATEST] {
            assert_eq!(
                parse_rfc3339(&rfc3339_seconds(seconds)),
                Some(seconds),
                "{}",
                rfc3339_seconds(seconds)
            );
        }
        let all = [
            ("1970-01-02T00:00:00Z", 86_400),
            ("2026-11-27 10:00:00z", 1_795_773_600),
            ("2026-11-27T12:00:00.999+02:00", 1_795_773_600),
            ("2026-11-27T04:30:00-05:30", 1_795_773_600),
        ];
        all.into_iter().for_each(|(text, seconds)| assert_eq!(parse_rfc3339(text), Some(seconds), "{text}"));
        for wrong in [
            "",
            "2026",
            "2026-11-27",
            "2026-11-27T10:00:00",
            "2026-11-27T10:00:00.Z",
            "2026-02-29T10:00:00Z",
            "2026-13-01T10:00:00Z",
            "2026-11-27T24:00:00Z",
            "2026-11-27T10:00:00+2:00",
            "1969-12-31T23:59:59Z",
            "1970-01-01T00:00:00+01:00",
            "2026-11-27T10:00:00Z ",
            "2026-11-27T10:0é:00Z",
        ] {
            assert_eq!(parse_rfc3339(wrong), None, "{wrong}");
        }
    }
}
