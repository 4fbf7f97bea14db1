//! The frame of a section, and tables.

use super::html::Html;

/// Begins a section whose accessible name is its heading.
pub(super) fn begin(html: &mut Html, id: &'static str, heading: &'static str, small: &str) {
    html.raw("<section").attribute("aria-labelledby", id).raw(">\n<h2").attribute("id", id).raw(">");
    html.raw(heading);
    if !small.is_empty() {
        html.raw("<small>").text(small).raw("</small>");
    }
    html.raw("</h2>\n");
}

pub(super) fn end(html: &mut Html) {
    html.raw("</section>\n");
}

/// Writes names with their values.
pub(super) fn facts(html: &mut Html, facts: &[(&'static str, String)]) {
    html.raw("<dl class=\"facts\">\n");
    for (term, value) in facts {
        html.raw("<div><dt>").raw(term).raw("</dt><dd>").text(value).raw("</dd></div>\n");
    }
    html.raw("</dl>\n");
}

/// A heading of a table. The variant says whether the column has numbers, or is left out on small screens.
#[derive(Clone, Copy)]
pub(super) enum Th {
    Text(&'static str),
    Number(&'static str),
    Wide(&'static str),
    WideNumber(&'static str),
}

/// Writes a table; `row` writes the cells of each row.
pub(super) fn table<T>(html: &mut Html, columns: &[Th], items: &[T], mut row: impl FnMut(&mut Html, &T)) {
    html.raw("<div class=\"scroll\"><table>\n<thead><tr>");
    for column in columns {
        let (class, heading) = match column {
            Th::Text(heading) => ("", heading),
            Th::Number(heading) => ("number", heading),
            Th::Wide(heading) => ("wide-only", heading),
            Th::WideNumber(heading) => ("number wide-only", heading),
        };
        html.raw("<th scope=\"col\"");
        classed(html, class);
        html.raw(">").text(heading).raw("</th>");
    }
    html.raw("</tr></thead>\n<tbody>\n");
    for item in items {
        html.raw("<tr>");
        row(html, item);
        html.raw("</tr>\n");
    }
    html.raw("</tbody>\n</table></div>\n");
}

pub(super) fn td(html: &mut Html, class: &'static str, value: impl AsRef<str>) {
    html.raw("<td");
    classed(html, class);
    html.raw(">").text(value).raw("</td>");
}

fn classed(html: &mut Html, class: &'static str) {
    if !class.is_empty() {
        html.attribute("class", class);
    }
}

pub(super) fn or_dash(text: &str) -> &str {
    if text.is_empty() { "\u{2013}" } else { text }
}

/// Writes the number of items of a list that are not shown.
pub(super) fn more(html: &mut Html, hidden: usize, command: &'static str) {
    if hidden > 0 {
        html.raw("<p class=\"dim\">and ").show(hidden).raw(" more: ").command(command).raw("</p>\n");
    }
}
