//! The traffic of the last 15 minutes as small lines: one value per step, with its largest value at the top.

use super::html::Html;
use super::table::{begin, end};
use crate::past::STEP;
use isthmus_api::listed::Past;
use isthmus_api::overview::Overview;
use isthmus_api::text::{bytes, lasting, rate};

/// The height of a line, in SVG units.
const HEIGHT: f64 = 16.0;

/// Writes the lines of all traffic.
pub(super) fn all(html: &mut Html, overview: &Overview) {
    let past = &overview.past;
    if past.opened.is_empty() {
        return;
    }
    let minutes = (past.opened.len() as u64 * STEP.as_secs()).div_ceil(60);
    begin(html, "past", "Traffic", &format!("the last {} in steps of 15 s", lasting(minutes * 60)));
    lines(html, past);
    end(html);
}

/// Writes the lines of some traffic.
pub(super) fn lines(html: &mut Html, past: &Past) {
    if past.opened.is_empty() {
        return;
    }
    html.raw("<dl class=\"past\">\n");
    let per_second = |most: u64| rate(most as f64 / STEP.as_secs_f64());
    let lines: [(&'static str, &[u64], String); 4] = [
        ("calls", &past.opened, per_second(most(&past.opened))),
        ("failed", &past.failed, most(&past.failed).to_string()),
        ("bytes", &past.bytes, format!("{}/s", bytes(most(&past.bytes) as f64 / STEP.as_secs_f64()))),
        ("slowest answer", &past.answer_us, format!("{:.1} ms", most(&past.answer_us) as f64 / 1e3)),
    ];
    for (term, values, most) in lines {
        html.raw("<div><dt>").raw(term).raw("</dt><dd>");
        line(html, values, if term == "failed" { "past bad" } else { "past" });
        html.raw(" <span class=\"dim\">at most ").text(most).raw("</span></dd></div>\n");
    }
    html.raw("</dl>\n");
}

/// Writes the cell of a service: its calls, and its failed calls below them.
pub(super) fn cell(html: &mut Html, past: &Past) {
    html.raw("<td class=\"wide-only\">");
    if !past.opened.is_empty() {
        line(html, &past.opened, "past");
        if most(&past.failed) > 0 {
            line(html, &past.failed, "past bad");
        }
    }
    html.raw("</td>");
}

fn most(values: &[u64]) -> u64 {
    values.iter().copied().max().unwrap_or(0)
}

/// Draws a line over the whole width; the newest value is at the right edge.
fn line(html: &mut Html, values: &[u64], class: &'static str) {
    let most = most(values).max(1) as f64;
    let point = |(index, value): (usize, &u64)| {
        let y = HEIGHT - 1.0 - (*value as f64 / most) * (HEIGHT - 2.0);
        format!("{index},{y:.0}")
    };
    let points: Vec<String> = values.iter().enumerate().map(point).collect();
    html.raw("<svg").attribute("class", class);
    let width = values.len().saturating_sub(1).max(1);
    html.attribute("viewBox", format!("0 0 {width} 16"));
    html.raw(" preserveAspectRatio=\"none\" aria-hidden=\"true\"><polyline")
        .attribute("points", points.join(" "));
    html.raw("/></svg>");
}
