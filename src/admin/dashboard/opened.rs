//! The network, service or endpoint that the reader has opened, with the way back to all networks.

use super::html::Html;
use super::map::{link_to, named};
use super::past;
use super::sections::{self, failed, health};
use super::table::Th::{Number, Text, Wide, WideNumber};
use super::table::{begin, end, facts, more, or_dash, table, td};
use isthmus_api::connection::Connection;
use isthmus_api::endpoint::Endpoint;
use isthmus_api::overview::Overview;
use isthmus_api::selection::{Placed, Selection};
use isthmus_api::text::{bytes, encoded, rate};

/// Writes what the reader has opened.
pub(super) fn opened(html: &mut Html, overview: &Overview, selection: &Selection) {
    way_back(html, selection);
    if !selection.exists {
        html.raw("<section><p class=\"bad\">The gateway knows no such network, service or endpoint. ");
        html.raw("It may have gone since the page before.</p></section>\n");
        return;
    }
    match (&selection.service, &selection.endpoint) {
        (None, _) => network(html, overview, selection),
        (Some(service), None) => {
            about_service(html, selection);
            endpoints(html, selection, service);
            connections(html, overview, selection);
        }
        (Some(_), Some(_)) => {
            about_endpoint(html, overview, selection);
            connections(html, overview, selection);
        }
    }
    if selection.failures.total > 0 {
        begin(html, "failures", "Last failures", "newest first, of the last 1,000 of the gateway");
        failed(html, &selection.failures.shown, &overview.time);
        more(html, selection.failures.hidden(), "isthmus failures");
        end(html);
    }
    commands(html, overview, selection);
}

/// Returns the address of the page of a service, or of an endpoint of it.
fn link(selection: &Selection, service: &str, endpoint: Option<&str>) -> String {
    let network = selection.network.as_ref().map(|network| format!("network={}&", encoded(network)));
    let endpoint = endpoint.map(|endpoint| format!("&endpoint={}", encoded(endpoint)));
    let (network, endpoint) = (network.unwrap_or_default(), endpoint.unwrap_or_default());
    format!("/?{network}service={}{endpoint}", encoded(service))
}

/// Writes the links to what holds the selection.
fn way_back(html: &mut Html, selection: &Selection) {
    html.raw("<nav class=\"way-back\" aria-label=\"Opened\"><a href=\"/\">all</a>");
    let mut steps = Vec::new();
    if let Some(network) = &selection.network {
        steps.push((link_to(network), named(network)));
    }
    if let Some(service) = &selection.service {
        steps.push((link(selection, service, None), service.clone()));
        if let Some(endpoint) = &selection.endpoint {
            steps.push((String::new(), endpoint.clone()));
        }
    }
    let last = steps.len().saturating_sub(1);
    for (index, (to, name)) in steps.iter().enumerate() {
        html.raw(" <span class=\"dim\">\u{203a}</span> ");
        match index == last {
            true => html.raw("<strong>").text(name).raw("</strong>"),
            false => html.link(to, name),
        };
    }
    html.raw("</nav>\n");
}

fn network(html: &mut Html, overview: &Overview, selection: &Selection) {
    begin(html, "network", "Network", &named(selection.network.as_deref().unwrap_or_default()));
    let own = selection.network.as_deref() == Some(&overview.status.node.network);
    if let Some(network) = &selection.about_network {
        let mut all = vec![
            ("endpoints", network.size()),
            ("gateways up", format!("{} of {}", network.gateways_up, network.gateways)),
        ];
        if !own {
            let access = if network.access == "direct" { "by address" } else { "through gateways" };
            all.push(("reached", access.to_owned()));
        }
        all.extend(network.distance.as_ref().map(|distance| ("distance", distance.text())));
        all.extend(network.share.map(|_| ("share of calls", network.percent())));
        if let Some(calls) = network.calls {
            all.push(("calls from it", rate(calls.per_second)));
            all.push(("at most", rate(calls.per_second_max)));
            all.push(("in 15 min", format!("{}, {} failed", calls.ended, calls.failed)));
        }
        facts(html, &all);
    }
    if !selection.gateways.shown.is_empty() {
        sections::gateways(html, &selection.gateways.shown);
        more(html, selection.gateways.hidden(), "isthmus get gateways");
    }
    end(html);
    let services = &selection.services;
    begin(html, "services", "Services with endpoints there", &services.total.to_string());
    html.raw("<form class=\"find\" method=\"get\" action=\"/\">\n<label>Name contains");
    html.raw("<input type=\"search\" name=\"q\" maxlength=\"253\" autocomplete=\"off\"")
        .attribute("value", &overview.services.query);
    html.raw("></label>\n<input type=\"hidden\" name=\"network\"")
        .attribute("value", selection.network.as_deref().unwrap_or_default());
    html.raw(">\n<button type=\"submit\">Find</button>\n</form>\n");
    if services.shown.is_empty() {
        html.raw("<p class=\"dim\">none</p>\n");
    } else {
        let columns = [Text("service"), Number("ready there"), Number("endpoints there")];
        table(html, &columns, &services.shown, |html, service: &Placed| {
            html.raw("<td class=\"name\">");
            html.link(&link(selection, &service.name, None), &service.name).raw("</td>");
            let class = if service.ready < service.endpoints { "number warn" } else { "number" };
            td(html, class, service.ready.to_string());
            td(html, "number", service.endpoints.to_string());
        });
    }
    if services.hidden() > 0 {
        html.raw("<p class=\"dim\">and ")
            .show(services.hidden())
            .raw(" more; find one by a part of its name</p>\n");
    }
    end(html);
}

fn about_service(html: &mut Html, selection: &Selection) {
    let Some(service) = &selection.about_service else { return };
    let heading = if service.kind == "route" { "Route" } else { "Service" };
    begin(html, "service", heading, &service.name);
    let (class, health) = health(service);
    html.raw("<p").attribute("class", class).raw(">").text(health);
    html.raw(if service.reachable {
        "</p>\n"
    } else {
        " \u{2013} not exported: no listener leads to it</p>\n"
    });
    facts(
        html,
        &[
            ("open", service.active.to_string()),
            ("opened", service.opened.to_string()),
            ("failed", service.failed.to_string()),
            ("up", bytes(service.bytes_up as f64)),
            ("down", bytes(service.bytes_down as f64)),
        ],
    );
    past::lines(html, &service.past);
    end(html);
}

fn state_class(state: &str) -> &'static str {
    match state {
        "healthy" => "good",
        "draining" | "disabled" | "slow" => "warn",
        _ => "bad",
    }
}

fn endpoints(html: &mut Html, selection: &Selection, service: &str) {
    let endpoints = &selection.endpoints;
    begin(html, "endpoints", "Endpoints", &endpoints.total.to_string());
    if endpoints.shown.is_empty() {
        html.raw("<p class=\"dim\">none");
        html.raw(if selection.network.is_some() { " on this network</p>\n" } else { "</p>\n" });
        return end(html);
    }
    let columns = [
        Text("endpoint"),
        Wide("network"),
        Wide("locality"),
        Text("state"),
        Number("open"),
        Number("new"),
        Number("failed"),
        WideNumber("weight"),
        WideNumber("connect"),
        WideNumber("answer"),
    ];
    table(html, &columns, &endpoints.shown, |html, endpoint: &Endpoint| {
        html.raw("<td class=\"name\">");
        html.link(&link(selection, service, Some(&endpoint.address)), &endpoint.address);
        if let Some(last) = endpoint.last_failure.as_ref().filter(|last| last.in_a_row > 0) {
            html.raw("<span class=\"meaning\">").text(&last.reason).raw("</span>");
        }
        html.raw("</td>");
        td(html, "wide-only", named(&endpoint.network));
        td(html, "wide-only", or_dash(&endpoint.locality));
        td(html, state_class(&endpoint.state), &endpoint.state);
        numbers(html, endpoint.calls.map(|calls| (calls.active.to_string(), calls.active_max.to_string())));
        numbers(html, endpoint.calls.map(|calls| (rate(calls.per_second), rate(calls.per_second_max))));
        let failed = endpoint.calls.map_or(0, |calls| calls.failed);
        td(html, if failed > 0 { "number warn" } else { "number dim" }, failed.to_string());
        td(html, "number wide-only", endpoint.weight.to_string());
        let times = [endpoint.connect, endpoint.answer];
        for times in times {
            td(html, "number wide-only", or_dash(&times.map(|times| times.text()).unwrap_or_default()));
        }
    });
    more(html, endpoints.hidden(), "isthmus get endpoints");
    html.raw(
        "<p class=\"dim\">Below a number: its maximum. Times: the median and the 99th percentile.</p>\n",
    );
    end(html);
}

/// Writes a cell of a number with its maximum.
fn numbers(html: &mut Html, numbers: Option<(String, String)>) {
    html.raw("<td class=\"number\">");
    match numbers {
        None => html.raw("\u{2013}"),
        Some((now, max)) => html.text(now).raw("<span class=\"meaning\">").text(max).raw("</span>"),
    };
    html.raw("</td>");
}

fn about_endpoint(html: &mut Html, overview: &Overview, selection: &Selection) {
    begin(html, "endpoint", "Endpoint", selection.endpoint.as_deref().unwrap_or_default());
    // Several entries with one address differ by cluster.
    for endpoint in &selection.endpoints.shown {
        html.raw("<p")
            .attribute("class", state_class(&endpoint.state))
            .raw(">")
            .text(&endpoint.state)
            .raw("</p>\n");
        let ports = endpoint.ports.iter().flatten();
        let ports: Vec<String> = ports.map(|(name, port)| format!("{name} {port}")).collect();
        let mut all = vec![
            ("network", named(&endpoint.network)),
            ("cluster", or_dash(&endpoint.cluster).to_owned()),
            ("locality", or_dash(&endpoint.locality).to_owned()),
            ("weight", endpoint.weight.to_string()),
        ];
        all.extend((!ports.is_empty()).then(|| ("ports", ports.join(", "))));
        all.extend(endpoint.identity.as_ref().map(|identity| ("identity", identity.clone())));
        if let Some(calls) = &endpoint.calls {
            all.push(("open", calls.open()));
            all.push(("new", calls.rates()));
            all.push(("dialled", calls.dialled.to_string()));
            all.push(("failed", calls.failed.to_string()));
        }
        all.extend(endpoint.connect.map(|times| ("connect", times.text())));
        all.extend(endpoint.answer.map(|times| ("answer", times.text())));
        facts(html, &all);
        if let Some(last) = &endpoint.last_failure {
            html.raw("<p class=\"dim\">last failure ").time(&last.time, &overview.time).raw(": <code>");
            html.text(&last.reason).raw("</code>");
            if let Some(detail) = &last.detail {
                html.raw(", ").text(detail);
            }
            html.raw(", ").show(last.in_a_row).raw(" in a row</p>\n");
        }
    }
    end(html);
}

fn connections(html: &mut Html, overview: &Overview, selection: &Selection) {
    let connections = &selection.connections;
    begin(html, "connections", "Open connections", &connections.total.to_string());
    if connections.shown.is_empty() {
        html.raw("<p class=\"dim\">none at this moment</p>\n");
        return end(html);
    }
    let columns = [
        Text("source"),
        Text("since"),
        Wide("name"),
        Wide("endpoint"),
        Number("up"),
        Number("down"),
        Text("to close it"),
    ];
    table(html, &columns, &connections.shown, |html, connection: &Connection| {
        html.raw("<td class=\"name\">").text(&connection.source);
        if let Some(caller) = &connection.source_identity {
            html.raw("<span class=\"meaning\">").text(caller).raw("</span>");
        }
        html.raw("</td><td class=\"time\">").time(&connection.time, &overview.time).raw("</td>");
        td(html, "name wide-only", connection.name().unwrap_or("\u{2013}"));
        td(html, "word wide-only", connection.endpoint.as_deref().unwrap_or("\u{2013}"));
        td(html, "number", bytes(connection.bytes_up as f64));
        td(html, "number", bytes(connection.bytes_down as f64));
        html.raw("<td>").command(&format!("isthmus close {}", connection.id)).raw("</td>");
    });
    more(html, connections.hidden(), "isthmus get connections");
    end(html);
}

fn commands(html: &mut Html, overview: &Overview, selection: &Selection) {
    let hints = selection.hints(&overview.status.node.network);
    if hints.is_empty() {
        return;
    }
    begin(html, "commands", "Commands", "a click selects one");
    html.raw("<dl class=\"commands\">\n");
    for hint in hints {
        html.raw("<div><dt>").text(hint.does).raw("</dt><dd>").command(&hint.command).raw("</dd></div>\n");
    }
    html.raw("</dl>\n<p class=\"dim\">The page changes nothing. On another host, or with another <code>admin.bind</code>, add <code>--admin ");
    html.raw("URL</code> or set <code>ISTHMUS_ADMIN</code>.</p>\n");
    end(html);
}
