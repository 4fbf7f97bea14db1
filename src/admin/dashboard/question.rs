//! The box in which a visitor asks how a name is routed, with the answer.

use super::Explained;
use super::html::Html;
use super::table::Th::{Number, Text, Wide, WideNumber};
use super::table::{more, or_dash, table, td};
use isthmus_api::explanation::Explanation;
use isthmus_api::overview::Overview;
use isthmus_api::text::encoded;

/// Writes the box that explains a name, with the answer if there was a question.
pub(super) fn explain(html: &mut Html, overview: &Overview, explained: &Explained) {
    html.raw("<form class=\"explain\" method=\"get\" action=\"/\" id=\"explain\">\n");
    html.raw("<label class=\"grow\">Explain how a name is routed, and why");
    html.raw(
        "<input type=\"text\" name=\"explain\" placeholder=\"checkout.shop.mesh\" autocomplete=\"off\" \
         spellcheck=\"false\" maxlength=\"300\"",
    );
    html.attribute("value", asked(overview, explained)).raw("></label>\n");
    html.raw("<label>from (IP)<input type=\"text\" name=\"from\" size=\"16\" maxlength=\"45\" autocomplete=\"off\"");
    html.attribute("value", &explained.from).raw("></label>\n");
    html.raw("<label class=\"check\"><input type=\"checkbox\" name=\"authority\" value=\"1\"");
    if explained.authority {
        html.raw(" checked");
    }
    html.raw("> HBONE authority</label>\n");
    keep(html, "q", &overview.services.query);
    if let Some(selection) = &overview.selection {
        let opened = [
            ("network", &selection.network),
            ("service", &selection.service),
            ("endpoint", &selection.endpoint),
        ];
        opened.into_iter().for_each(|(name, value)| keep(html, name, value.as_deref().unwrap_or_default()));
    }
    html.raw("<button type=\"submit\">Explain</button>\n");
    match &explained.answer {
        None => {}
        Some(Err(fault)) => {
            html.raw("<div class=\"answer bad\" id=\"answer\" role=\"status\">").text(fault).raw("</div>\n");
        }
        Some(Ok(answer)) => explanation(html, answer),
    }
    html.raw("</form>\n");
}

/// Returns the name in the box: the one that was explained, else the service that is opened, if clients can ask for its name.
fn asked<'a>(overview: &'a Overview, explained: &'a Explained) -> &'a str {
    let opened = overview.selection.as_ref().and_then(|selection| selection.service.as_deref());
    let opened = opened.filter(|name| !name.contains(['*', '/', '#']) && *name != "-").unwrap_or_default();
    if explained.name.is_empty() { opened } else { &explained.name }
}

/// Adds a parameter of the page to a form as a hidden field.
pub(super) fn keep(html: &mut Html, name: &'static str, value: &str) {
    if !value.is_empty() {
        html.raw("<input type=\"hidden\"").attribute("name", name).attribute("value", value).raw(">\n");
    }
}

fn explanation(html: &mut Html, answer: &Explanation) {
    html.raw("<div class=\"answer\" id=\"answer\" role=\"status\">\n<strong");
    html.attribute("class", if answer.is_reachable() { "good" } else { "bad" }).raw(">");
    html.text(answer.verdict_line()).raw("</strong>\n<ol>\n");
    for step in &answer.steps {
        html.raw("<li>").text(step).raw("</li>\n");
    }
    html.raw("</ol>\n");
    if !answer.candidates.is_empty() {
        let columns = [
            Text("endpoint"),
            Text("state"),
            Number("odds"),
            WideNumber("weight"),
            Wide("cluster"),
            Wide("locality"),
            Text("last failure"),
        ];
        let shown = &answer.candidates[..answer.candidates.len().min(20)];
        table(html, &columns, shown, |html, candidate| {
            td(html, "name", &candidate.address);
            td(
                html,
                if candidate.state == "healthy" { "state-of" } else { "state-of bad" },
                &candidate.state,
            );
            td(html, "number", format!("{:.1} %", candidate.odds * 100.0));
            td(html, "number wide-only", candidate.weight.to_string());
            td(html, "wide-only", or_dash(&candidate.cluster));
            td(html, "wide-only", or_dash(&candidate.locality));
            let last = candidate.last_failure.as_ref();
            td(
                html,
                "detail",
                last.map_or_else(String::new, |last| format!("{}, {} in a row", last.reason, last.in_a_row)),
            );
        });
        more(html, answer.candidates.len() - shown.len(), "isthmus explain NAME");
    }
    for warning in &answer.warnings {
        html.raw("<p class=\"warn\">").text(warning).raw("</p>\n");
    }
    for failure in &answer.recent {
        html.raw("<p class=\"dim\">failed recently: <code>").text(&failure.reason).raw("</code>, ");
        html.text(failure.text()).raw("</p>\n");
    }
    if !answer.near.is_empty() {
        html.raw("<p>Did you mean ");
        for (index, name) in answer.near.iter().enumerate() {
            html.raw(if index == 0 { "<a" } else { ", or <a" });
            html.attribute("href", format!("/?explain={}", encoded(name))).raw(">").text(name).raw("</a>");
        }
        html.raw("?</p>\n");
    }
    html.raw("</div>\n");
}
