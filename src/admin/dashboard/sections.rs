//! The sections of the page, from current problems to configuration.

use super::Explained;
use super::html::Html;
use super::map;
use super::past;
use super::question::keep;
use super::table::Th::{Number, Text, Wide, WideNumber};
use super::table::{begin, end, more, or_dash, table, td};
use isthmus_api::certificate::Certificate;
use isthmus_api::client::Client;
use isthmus_api::connection::Connection;
use isthmus_api::listed::{Service, states};
use isthmus_api::network::Gateway;
use isthmus_api::overview::{Overview, Refusal};
use isthmus_api::peer::Peer;
use isthmus_api::registry::Registry;
use isthmus_api::status::Problem;
use isthmus_api::text::{bytes, counted, encoded, lasting};

/// The largest number of problems that the page shows unfolded; further ones are folded.
const PROBLEMS_OPEN: usize = 8;
/// The largest number of failures on the page, so that they fit beside the reasons.
const FAILURES_MAX: usize = 12;
/// The largest number of idle services that the page shows unfolded.
const IDLE_OPEN: usize = 8;
/// The largest number of problems on the page.
const PROBLEMS_MAX: usize = 100;

/// Returns the state for the window title: a mark, and the number of problems if there are any.
pub(super) fn mark(overview: &Overview) -> String {
    match (overview.status.ready, overview.status.problems.len()) {
        (true, 0) => "\u{2713}".to_owned(),
        (false, 0) => "\u{2717}".to_owned(),
        (_, count) => format!("\u{2717} {count}"),
    }
}

/// Writes the head of the page, which identifies the gateway.
pub(super) fn header(html: &mut Html, overview: &Overview, name: &str) {
    let status = &overview.status;
    html.raw("<header id=\"top\">\n<h1>").text(name).raw("</h1>\n<dl>\n");
    let facts = [
        ("network", or_dash(&status.node.network).to_owned()),
        ("cluster", or_dash(&status.node.cluster).to_owned()),
        ("up", lasting(status.uptime_seconds)),
        ("connections", format!("{} of {}", overview.traffic.active, status.limits.connections)),
        ("opened", overview.traffic.opened.to_string()),
        (
            "up / down",
            format!(
                "{} / {}",
                bytes(overview.traffic.bytes_up as f64),
                bytes(overview.traffic.bytes_down as f64)
            ),
        ),
        ("version", status.version.clone()),
        (
            "at",
            overview
                .time
                .get(..19)
                .map_or_else(|| overview.time.clone(), |time| format!("{} UTC", time.replace('T', " "))),
        ),
    ];
    for (term, value) in facts {
        html.raw("<div><dt>").raw(term).raw("</dt><dd>").text(value).raw("</dd></div>\n");
    }
    html.raw("</dl>\n</header>\n");
}

/// Writes the state of the gateway: healthy, or a list of its problems.
pub(super) fn state(html: &mut Html, overview: &Overview) {
    let status = &overview.status;
    let problems = &status.problems;
    let is_well = status.ready && problems.is_empty();
    let class = if is_well { "state" } else { "state wrong" };
    html.raw("<div").attribute("class", class).raw(" id=\"state\" role=\"status\">\n<strong>");
    html.raw(match (status.ready, status.draining) {
        (_, true) => "Draining",
        (true, false) => "Ready",
        (false, false) => "Not ready",
    });
    match problems.len() {
        0 => html.raw(", no problems"),
        1 => html.raw(", 1 problem"),
        count => html.raw(", ").show(count).raw(" problems"),
    };
    html.raw("</strong>\n");
    for why in &status.not_ready {
        html.raw("<p class=\"bad\">").text(why).raw("</p>\n");
    }
    if problems.is_empty() {
        html.raw("</div>\n");
        return;
    }
    let shown = &problems[..problems.len().min(PROBLEMS_MAX)];
    let (open, closed) = shown.split_at(shown.len().min(PROBLEMS_OPEN));
    html.raw("<ul>\n");
    open.iter().for_each(|one| problem(html, one, &overview.time));
    html.raw("</ul>\n");
    if !closed.is_empty() {
        html.raw("<details id=\"more-problems\"><summary>").show(problems.len() - open.len());
        html.raw(" more problems</summary>\n<ul>\n");
        closed.iter().for_each(|one| problem(html, one, &overview.time));
        html.raw("</ul></details>\n");
    }
    more(html, problems.len() - shown.len(), "isthmus status");
    html.raw("</div>\n");
}

fn problem(html: &mut Html, problem: &Problem, now: &str) {
    html.raw("<li><code class=\"bad\">").text(&problem.code).raw("</code> ").prose(&problem.text, now);
    html.raw("<p class=\"dim\">see ").prose(&problem.look_at, now);
    html.raw("</p></li>\n");
}

/// Writes the number of refused connections, by reason.
pub(super) fn refusals(html: &mut Html, overview: &Overview) {
    begin(html, "refusals", "Refused and failed", "by reason");
    if overview.refusals.is_empty() {
        html.raw("<p class=\"dim\">none since the start</p>\n");
        return end(html);
    }
    let most = overview.refusals.iter().map(|refusal| refusal.recent).max().unwrap_or_default().max(1);
    let columns = [Text("reason"), Number("last 5 min"), Number("since start")];
    table(html, &columns, &overview.refusals, |html, refusal: &Refusal| {
        html.raw("<td class=\"name\">").text(&refusal.reason).raw("<span class=\"meaning\">");
        html.text(&refusal.meaning);
        if let Some(name) = &refusal.last_name {
            html.raw(" Last: ").text(name);
        }
        html.raw("</span></td><td class=\"number\">");
        if refusal.recent > 0 {
            html.raw("<meter min=\"0\"").attribute("max", most.to_string());
            html.attribute("value", refusal.recent.to_string()).raw("></meter> ");
        }
        html.show(refusal.recent).raw("</td>");
        td(html, "number", refusal.total.to_string());
    });
    end(html);
}

/// Writes the last failures.
pub(super) fn failures(html: &mut Html, overview: &Overview) {
    begin(html, "failures", "Last failures", "newest first");
    if overview.failures.is_empty() {
        html.raw("<p class=\"dim\">none since the start</p>\n");
        return end(html);
    }
    let shown = &overview.failures[..overview.failures.len().min(FAILURES_MAX)];
    failed(html, shown, &overview.time);
    html.raw("<p class=\"dim\">All: ").command("isthmus failures").raw("</p>\n");
    end(html);
}

/// Writes failed connections as a table.
pub(super) fn failed(html: &mut Html, shown: &[Connection], now: &str) {
    let columns = [Text("time"), Text("reason and name"), Wide("source"), Wide("endpoint")];
    table(html, &columns, shown, |html, failure: &Connection| {
        html.raw("<td class=\"time\">").time(&failure.time, now).raw("</td>");
        html.raw("<td class=\"name\">").text(failure.reason.as_deref().unwrap_or_default()).raw(" ");
        if let Some(name) = failure.name() {
            let authority = if failure.sni.is_none() { "&authority=1" } else { "" };
            html.link(&format!("/?explain={}{authority}", encoded(name)), name);
        }
        if let Some(detail) = &failure.detail {
            html.raw("<span class=\"meaning\">").prose(detail, now).raw("</span>");
        }
        html.raw("</td>");
        td(html, "word dim wide-only", &failure.source);
        td(html, "word dim wide-only", failure.endpoint.as_deref().unwrap_or("\u{2013}"));
    });
}

/// Writes one page of the services and routes.
pub(super) fn services(html: &mut Html, overview: &Overview, explained: &Explained) {
    let services = &overview.services;
    let small = match services.troubled {
        0 => format!("{}, all healthy", services.total),
        troubled => format!("{}, {troubled} with problems", services.total),
    };
    begin(html, "services", "Services and routes", &small);
    html.raw("<form class=\"find\" method=\"get\" action=\"/\">\n<label>Name contains");
    html.raw("<input type=\"search\" name=\"q\" maxlength=\"253\" autocomplete=\"off\"")
        .attribute("value", &services.query);
    html.raw("></label>\n");
    keep(html, "explain", &explained.name);
    keep(html, "from", &explained.from);
    keep(html, "authority", if explained.authority { "1" } else { "" });
    html.raw("<button type=\"submit\">Find</button>\n</form>\n");
    if services.shown.is_empty() {
        html.raw(if services.query.is_empty() {
            "<p class=\"dim\">none configured: see <code>routes</code>, <code>services</code> and <code>registries</code></p>\n"
        } else {
            "<p class=\"dim\">no name contains that text</p>\n"
        });
        return end(html);
    }
    let columns = [
        Text("name"),
        Text("health"),
        Number("active"),
        Number("failed"),
        WideNumber("opened"),
        WideNumber("up"),
        WideNumber("down"),
        Wide("recent calls"),
    ];
    let (idle, busy): (Vec<&Service>, Vec<&Service>) =
        services.shown.iter().partition(|service| is_idle(service) && services.query.is_empty());
    if idle.len() > IDLE_OPEN {
        table(html, &columns, &busy, |html, one| service(html, one));
        html.raw("<details id=\"idle\"><summary>")
            .show(idle.len())
            .raw(" healthy services without traffic in the last 15 minutes</summary>\n");
        table(html, &columns, &idle, |html, one| service(html, one));
        html.raw("</details>\n");
    } else {
        table(html, &columns, &services.shown, service);
    }
    if services.pages > 1 {
        let link = |html: &mut Html, page: usize, text: &'static str| {
            let query = encoded(&services.query);
            html.raw("<a")
                .attribute("href", format!("/?q={query}&page={page}#services"))
                .raw(">")
                .raw(text)
                .raw("</a>");
        };
        html.raw("<p class=\"pages\">");
        if services.page > 1 {
            link(html, services.page - 1, "previous");
        }
        html.raw("<span class=\"dim\">page ")
            .show(services.page)
            .raw(" of ")
            .show(services.pages)
            .raw("</span>");
        if services.page < services.pages {
            link(html, services.page + 1, "next");
        }
        html.raw("</p>\n");
    }
    end(html);
}

/// Returns true for a service that needs no attention: no endpoint is missing, and it had no traffic in the last 15 minutes.
fn is_idle(service: &Service) -> bool {
    let is_well = ![states::DOWN, states::DEGRADED].contains(&service.state.as_str());
    is_well && service.active == 0 && service.past.opened.is_empty()
}

/// Returns the health of a service in words, with its class.
pub(super) fn health(service: &Service) -> (&'static str, String) {
    let of = format!("{} of {}", service.ready, service.endpoints);
    match service.state.as_str() {
        states::DOWN => ("bad", format!("down, {of} ready")),
        states::DEGRADED => ("warn", format!("{of} ready")),
        states::ELSEWHERE => ("dim", "no endpoint on this network".to_owned()),
        _ => ("good", format!("{of} ready")),
    }
}

fn service(html: &mut Html, service: &Service) {
    let (class, health) = health(service);
    html.raw("<td class=\"name\">").link(&format!("/?service={}", encoded(&service.name)), &service.name);
    if !service.reachable {
        html.raw(" <span class=\"dim\">not exported</span>");
    }
    html.raw("</td>");
    td(html, class, health);
    td(html, "number", service.active.to_string());
    td(html, if service.failed > 0 { "number warn" } else { "number dim" }, service.failed.to_string());
    td(html, "number wide-only", service.opened.to_string());
    td(html, "number wide-only", bytes(service.bytes_up as f64));
    td(html, "number wide-only", bytes(service.bytes_down as f64));
    past::cell(html, &service.past);
}

/// Writes the networks, as a map and as a table.
pub(super) fn networks(html: &mut Html, overview: &Overview) {
    let counts = (overview.networks.total, overview.gateways.total);
    let small = format!("{}, {}", counted(counts.0, "network"), counted(counts.1, "gateway"));
    begin(html, "networks", "Networks", &small);
    if overview.networks.shown.is_empty() && overview.gateways.shown.is_empty() {
        html.raw("<p class=\"dim\">none configured</p>\n");
        return end(html);
    }
    map::draw(html, overview);
    html.raw("<details id=\"gateways\"><summary>As tables</summary>\n");
    let columns = [
        Text("network"),
        Wide("access"),
        Text("distance"),
        Number("ring"),
        WideNumber("share of calls"),
        Number("calls from it"),
        Number("gateways up"),
        WideNumber("endpoints"),
        WideNumber("ready weight"),
    ];
    table(html, &columns, &overview.networks.shown, |html, network| {
        html.raw("<td class=\"name\">")
            .link(&map::link_to(&network.name), &map::named(&network.name))
            .raw("</td>");
        td(html, "wide-only", &network.access);
        let distance = network.distance.as_ref().map(|distance| distance.text()).unwrap_or_default();
        td(html, "word", or_dash(&distance));
        td(html, "number", or_dash(&network.ring()));
        td(html, "number wide-only", or_dash(&network.percent()));
        td(html, "number", or_dash(&network.calls.map(|calls| calls.text()).unwrap_or_default()));
        td(html, "number", format!("{} of {}", network.gateways_up, network.gateways));
        td(html, "number wide-only", network.endpoints.to_string());
        td(html, "number wide-only", network.ready_weight.to_string());
    });
    more(html, overview.networks.hidden(), "isthmus get networks");
    if !overview.gateways.shown.is_empty() {
        gateways(html, &overview.gateways.shown);
        more(html, overview.gateways.hidden(), "isthmus get gateways");
    }
    html.raw("</details>\n");
    end(html);
}

/// Writes gateways as a table.
pub(super) fn gateways(html: &mut Html, shown: &[Gateway]) {
    let columns = [Text("gateway"), Text("network"), Text("state"), WideNumber("weight"), Wide("locality")];
    table(html, &columns, shown, |html, gateway: &Gateway| {
        td(html, "name", gateway.place());
        td(html, "name", map::named(&gateway.network));
        match &gateway.why {
            Some(why) => td(html, "bad", why),
            None if gateway.state == "unreachable" => td(html, "bad", "unreachable"),
            None => td(html, "good", "usable"),
        }
        td(html, "number wide-only", gateway.weight.to_string());
        td(html, "wide-only", or_dash(&gateway.locality));
    });
}

/// Writes the registries.
pub(super) fn registries(html: &mut Html, overview: &Overview) {
    let registries = &overview.status.registries;
    begin(html, "registries", "Registries", "");
    if registries.is_empty() {
        html.raw("<p class=\"dim\">none: services come from the config file alone</p>\n");
        return end(html);
    }
    let columns = [Text("registry"), Text("state"), Wide("cluster"), Number("services"), Number("endpoints")];
    table(html, &columns, registries, |html, registry: &Registry| {
        html.raw("<td class=\"name\">").text(&registry.name);
        for problem in registry.problems.iter().take(3) {
            html.raw("<br><span class=\"bad\">").text(problem).raw("</span>");
        }
        html.raw("</td><td").attribute("class", if registry.state == "live" { "good" } else { "bad" });
        html.attribute("title", format!("since {}", registry.since))
            .raw(">")
            .text(&registry.state)
            .raw("</td>");
        td(html, "wide-only", or_dash(&registry.cluster));
        td(html, "number", registry.services.to_string());
        td(html, "number", registry.endpoints.to_string());
    });
    end(html);
}

/// Writes the peers, if there are any.
pub(super) fn peers(html: &mut Html, overview: &Overview) {
    let peers = &overview.peers;
    if peers.shown.is_empty() {
        return;
    }
    begin(html, "peers", "Peers", &peers.total.to_string());
    let columns = [
        Text("peer"),
        Text("state"),
        WideNumber("round trip"),
        WideNumber("carriers"),
        Number("out"),
        Number("in"),
        WideNumber("left out"),
    ];
    table(html, &columns, &peers.shown, |html, peer: &Peer| {
        html.raw("<td class=\"name\"")
            .attribute("title", peer.identity.as_deref().unwrap_or_default())
            .raw(">")
            .text(&peer.name);
        if let Some(problem) = &peer.problem {
            html.raw("<br><span class=\"bad\">").text(problem).raw("</span>");
        }
        html.raw("</td><td").attribute("class", if peer.state == "live" { "good" } else { "bad" });
        html.attribute("title", format!("since {}", peer.since.as_deref().unwrap_or("the start")))
            .raw(">")
            .text(&peer.state)
            .raw("</td>");
        let round_trip =
            peer.round_trip_ms().map_or_else(|| "\u{2013}".to_owned(), |time| format!("{time} ms"));
        td(html, "number wide-only", round_trip);
        let (open, calls) =
            peer.carriers.iter().fold((0, 0), |(open, calls), of| (open + of.open, calls + of.calls));
        let class =
            if peer.carriers.is_empty() || open > 0 { "number wide-only" } else { "number warn wide-only" };
        let carriers = match peer.carriers.is_empty() {
            true => "\u{2013}".to_owned(),
            false => format!("{open}, {calls} calls"),
        };
        td(html, class, carriers);
        td(html, "number", peer.exported.to_string());
        td(html, "number", peer.imported.to_string());
        td(
            html,
            if peer.left_out_count == 0 { "number wide-only" } else { "number warn wide-only" },
            peer.left_out_count.to_string(),
        );
    });
    more(html, peers.hidden(), "isthmus peers");
    end(html);
}

/// Writes the clients of the xDS server.
pub(super) fn clients(html: &mut Html, overview: &Overview) {
    let clients = &overview.clients;
    begin(
        html,
        "clients",
        "xDS clients",
        &if clients.total > 0 { clients.total.to_string() } else { String::new() },
    );
    if clients.shown.is_empty() {
        html.raw("<p class=\"dim\">none connected</p>\n");
        return end(html);
    }
    let columns = [Text("node"), Text("network"), Wide("subscriptions"), Number("waits"), Number("NACKs")];
    table(html, &columns, &clients.shown, |html, client: &Client| {
        html.raw("<td class=\"name\"").attribute("title", &client.peer).raw(">").text(or_dash(&client.node));
        if let Some(nack) = &client.last_nack {
            html.raw("<br><span class=\"bad\">").text(nack).raw("</span>");
        }
        html.raw("</td>");
        td(html, "name", map::named(&client.network));
        td(html, "wide-only", client.subscriptions.join(", "));
        let waits =
            client.unacknowledged_seconds.map_or_else(|| "\u{2013}".to_owned(), |waits| format!("{waits} s"));
        td(html, "number", waits);
        td(html, if client.nacks > 0 { "number bad" } else { "number" }, client.nacks.to_string());
    });
    more(html, clients.hidden(), "isthmus get clients");
    end(html);
}

/// Writes the certificates and roots.
pub(super) fn certificates(html: &mut Html, overview: &Overview) {
    begin(html, "certificates", "Certificates", "");
    if overview.certificates.shown.is_empty() {
        html.raw("<p class=\"dim\">none: no <code>identity</code> is configured</p>\n");
        return end(html);
    }
    let columns = [Text("identity or trust domain"), Text("state"), Text("until")];
    table(html, &columns, &overview.certificates.shown, |html, certificate: &Certificate| {
        td(html, "name", certificate.subject());
        let class = match certificate.state.as_str() {
            "valid" => "good",
            "expiring" => "warn",
            _ => "bad",
        };
        td(html, class, &certificate.state);
        let until = certificate.not_after.as_deref().unwrap_or_default();
        html.raw("<td class=\"number\"").attribute("title", until).raw(">");
        html.text(or_dash(until.get(..10).unwrap_or(until))).raw("</td>");
    });
    more(html, overview.certificates.hidden(), "isthmus get certificates");
    end(html);
}

/// Writes the state of the config.
pub(super) fn config(html: &mut Html, overview: &Overview) {
    let config = &overview.status.config;
    begin(html, "config", "Config", "");
    html.raw("<p><code>").text(&config.path).raw("</code>, applied ").time(&config.since, &overview.time);
    html.raw(", generation ").show(config.generation).raw("</p>\n");
    if !config.file_is_running {
        html.raw("<p class=\"bad\">The file on disk was rejected; the config before it stays in use.</p>\n");
    }
    let lists = [("bad", &config.rejected), ("warn", &config.warnings)];
    for (class, lines) in lists {
        for line in lines {
            html.raw("<p").attribute("class", class).raw(">").text(line).raw("</p>\n");
        }
    }
    for key in &config.needs_restart {
        html.raw("<p class=\"warn\">needs a restart: <code>").text(key).raw("</code></p>\n");
    }
    html.raw("<p class=\"dim\">");
    let status = &overview.status;
    let sizes = [(status.routes, "route"), (status.services, "service"), (status.workers, "worker")];
    html.text(sizes.map(|(count, thing)| counted(count, thing)).join(", "));
    html.raw(". The whole: <a href=\"/api/v1/config\">/api/v1/config</a></p>\n");
    end(html);
}
