//! The dashboard: `GET /` as one HTML page, made from the [`Overview`] and complete without scripts. The style and the script
//! come from the same listener, and nothing comes from elsewhere; the script only reloads the page. Names come from the
//! network, so every text passes through `html`, which escapes it.

mod html;
mod map;
mod opened;
mod past;
mod question;
mod sections;
mod table;

use html::Html;
use isthmus_api::explanation::Explanation;
use isthmus_api::overview::Overview;

/// The style sheet.
pub const STYLE: &str = include_str!("dashboard/style.css");
/// The script of the page.
pub const SCRIPT: &str = include_str!("dashboard/script.js");
/// The Content-Security-Policy of the page: the browser may load styles and scripts from this listener, and send forms to it.
pub const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; \
                          img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

/// The content of the explain box: the question and the answer.
#[derive(Clone, Debug, Default)]
pub struct Explained {
    /// The name to explain; empty if the form was not submitted.
    pub name: String,
    /// True if the name is an authority.
    pub authority: bool,
    /// The source address, as typed.
    pub from: String,
    /// The explanation of the name, or the reason why there is none; `None` if the form was not submitted.
    pub answer: Option<Result<Explanation, String>>,
}

/// Returns the page.
pub fn page(overview: &Overview, explained: &Explained) -> String {
    let mut html = Html::default();
    let node = &overview.status.node;
    let name = if node.name.is_empty() { "isthmus" } else { &node.name };
    html.raw("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    html.raw("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n");
    html.raw("<meta name=\"color-scheme\" content=\"light dark\">\n<title>");
    html.text(sections::mark(overview)).text(" ").text(name).text(" \u{2013} isthmus");
    html.raw("</title>\n<link rel=\"stylesheet\" href=\"/dashboard.css\">\n");
    html.raw("<link rel=\"icon\" href=\"data:,\">\n<script src=\"/dashboard.js\" defer></script>\n</head>\n<body>\n");
    html.raw("<a class=\"skip\" href=\"#main\">Skip to the state</a>\n");
    sections::header(&mut html, overview, name);
    question::explain(&mut html, overview, explained);
    html.raw("<main id=\"main\" tabindex=\"-1\">\n");
    if let Some(selection) = &overview.selection {
        opened::opened(&mut html, overview, selection);
    } else {
        all(&mut html, overview, explained);
    }
    html.raw("</main>\n<footer>");
    html.text("The same in a terminal: ").raw("<code>isthmus top</code>, <code>isthmus status</code>. ");
    html.text("For programs: ").raw("<a href=\"/api/v1/overview\">/api/v1/overview</a>, ");
    html.raw("<a href=\"/metrics\">/metrics</a>. <span id=\"fresh\"></span></footer>\n</body>\n</html>\n");
    html.finish()
}

/// Writes the state of the whole gateway.
fn all(html: &mut Html, overview: &Overview, explained: &Explained) {
    sections::state(html, overview);
    past::all(html, overview);
    sections::networks(html, overview);
    html.raw("<div class=\"columns\">\n");
    sections::refusals(html, overview);
    sections::failures(html, overview);
    html.raw("</div>\n");
    sections::services(html, overview, explained);
    html.raw("<div class=\"columns\">\n");
    sections::registries(html, overview);
    sections::peers(html, overview);
    sections::clients(html, overview);
    sections::certificates(html, overview);
    sections::config(html, overview);
    html.raw("</div>\n");
}

#[cfg(test)]
mod tests;
