//! A service that the user has opened, with its endpoints, or an endpoint with its connections, and the commands about either.

use super::{Line, Style, Top, table};
use isthmus_api::connection::Connection;
use isthmus_api::endpoint::Endpoint;
use isthmus_api::overview::Overview;
use isthmus_api::selection::Selection;
use isthmus_api::text::{ago, bytes, counted, rate};

impl Top {
    /// Returns the endpoints of the service that is opened, or the connections to the endpoint.
    pub(super) fn opened(&self, selection: Option<&Selection>, now: &str, width: usize) -> Vec<Line> {
        let name = self.service.as_deref().unwrap_or_default();
        match (selection, &self.endpoint) {
            (None, _) => table(&[&format!("{name}: asking the gateway")], Vec::new(), width),
            (Some(selection), _) if !selection.exists => {
                table(&[&format!("{name}: is not there any more; esc leads back")], Vec::new(), width)
            }
            (Some(selection), None) => endpoints(selection, name, now, width),
            (Some(selection), Some(address)) => connections(selection, address, now, width),
        }
    }
}

/// Returns the commands about what is opened, each with what it does.
pub(super) fn hints(selection: &Selection, overview: &Overview) -> Vec<Line> {
    let most = if selection.endpoint.is_some() { 4 } else { 1 };
    let hints = selection.hints(&overview.status.node.network).into_iter().take(most);
    hints.map(|hint| vec![(Style::Plain, hint.command), (Style::Dim, format!("  {}", hint.does))]).collect()
}

fn endpoints(selection: &Selection, service: &str, now: &str, width: usize) -> Vec<Line> {
    let row = |endpoint: &Endpoint| {
        let style = match endpoint.state.as_str() {
            "healthy" => Style::Good,
            "draining" | "disabled" | "slow" => Style::Warn,
            _ => Style::Bad,
        };
        let of = |value: Option<String>| (Style::Plain, value.unwrap_or_else(|| "-".to_owned()));
        let failed = endpoint.calls.map_or(0, |calls| calls.failed);
        let last = endpoint.last_failure.as_ref();
        vec![
            (Style::Plain, endpoint.address.clone()),
            (Style::Dim, endpoint.network.clone()),
            (style, endpoint.state.clone()),
            of(endpoint.calls.map(|calls| format!("{}/{}", calls.active, calls.active_max))),
            of(endpoint
                .calls
                .map(|calls| format!("{} {}", rate(calls.per_second), rate(calls.per_second_max)))),
            (if failed > 0 { Style::Warn } else { Style::Dim }, failed.to_string()),
            of(endpoint.answer.map(|times| times.text())),
            (
                Style::Dim,
                last.map(|last| format!("{} {}", last.reason, ago(&last.time, now))).unwrap_or_default(),
            ),
        ]
    };
    let title = match selection.endpoints.hidden() {
        0 => format!("endpoints of {service}"),
        hidden => format!("endpoints of {service}, {hidden} more"),
    };
    let headings =
        [title.as_str(), "NETWORK", "STATE", "OPEN/MAX", "NEW MAX", "FAILED", "ANSWER", "LAST FAILURE"];
    table(&headings, selection.endpoints.shown.iter().map(row).collect(), width)
}

fn connections(selection: &Selection, address: &str, now: &str, width: usize) -> Vec<Line> {
    let row = |connection: &Connection| {
        vec![
            (Style::Plain, connection.source.clone()),
            (Style::Dim, ago(&connection.time, now)),
            (Style::Plain, connection.name().unwrap_or("-").to_owned()),
            (Style::Plain, bytes(connection.bytes_up as f64)),
            (Style::Plain, bytes(connection.bytes_down as f64)),
            (Style::Dim, format!("isthmus close {}", connection.id)),
        ]
    };
    let title = format!("{} to {address}", counted(selection.connections.total, "open connection"));
    let rows = selection.connections.shown.iter().map(row).collect();
    table(&[&title, "SINCE", "NAME", "UP", "DOWN", "TO CLOSE IT"], rows, width)
}
