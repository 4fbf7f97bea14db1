//! `isthmus explain --trace`: the connections of a trace, in the terms of the access log, each with the decision on it.

use std::io::Write;

use super::arguments::Reading;
use super::read::print_explanation;
use isthmus_api::connection::FIELDS;
use isthmus_api::requests;
use isthmus_api::table::text;
use isthmus_api::trace::{Trace, TracedConnection};
use isthmus_console::client;
use isthmus_console::failure::Failure;
use isthmus_console::output::{Colour, Format, cell, paint, structured};
use isthmus_model::reason::Reason;
use isthmus_model::trace::TraceId;

/// Shows the connections of a trace. Fails if there is none, or if one of them was refused or failed.
pub(super) fn explain(trace: TraceId, reading: &Reading, out: &mut impl Write) -> Result<(), Failure> {
    let value = client::get(&reading.admin.url(), &requests::TRACE.at(&trace.to_string()))?.json()?;
    let found: Trace = client::typed(value.clone())?;
    if found.connections.is_empty() {
        return Err(Failure::Wrong(format!(
            "no connection of the trace {trace} is open, and none is among the last that this gateway has logged; ask the \
             other gateways on the path, or search the access log for this trace_id"
        )));
    }
    match reading.output {
        Format::Table => {
            for (number, one) in found.connections.iter().enumerate() {
                if number > 0 {
                    writeln!(out)?;
                }
                print_traced(one, out)?;
            }
        }
        format => structured(out, &value, format)?,
    }
    let is_fine = |one: &TracedConnection| {
        one.connection.reason.as_deref().is_none_or(|reason| reason == Reason::Ok.text())
    };
    if found.connections.iter().all(is_fine) { Ok(()) } else { Err(Failure::Reported) }
}

/// Prints the access log fields of a connection, and the decision on it.
fn print_traced(traced: &TracedConnection, out: &mut impl Write) -> Result<(), Failure> {
    let members =
        serde_json::to_value(&traced.connection).map_err(|error| Failure::Wrong(error.to_string()))?;
    let reason = traced.connection.reason.as_deref();
    let colour =
        if reason.is_none_or(|reason| reason == Reason::Ok.text()) { Colour::Green } else { Colour::Red };
    writeln!(out, "connection {}: {}", traced.connection.id, paint(reason.unwrap_or("open"), colour))?;
    for (name, _) in FIELDS {
        if let Some(member) = members.get(*name).filter(|_| *name != "id") {
            writeln!(out, "  {name:<17} {}", text(&cell(member)))?;
        }
    }
    let Some(decision) = &traced.decision else { return Ok(()) };
    writeln!(out, "\nthe decision of the config in use for this connection:")?;
    print_explanation(decision, out)
}
