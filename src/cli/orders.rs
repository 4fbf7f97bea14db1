//! The commands that change the running gateway, and `healthcheck`.

use std::io::Write;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::arguments::Admin;
use super::examples;
use isthmus_api::requests;
use isthmus_console::client;
use isthmus_console::failure::Failure;
use isthmus_console::output;
use isthmus_dataplane::withdrawals::Which;

/// The time that an upgrade may take: the new process has a minute to get ready.
const UPGRADED_WITHIN: Duration = Duration::from_secs(90);
/// The status of an answer that says that the process stops, and the time after which the next process is asked.
const STOPPING: u16 = 503;
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// The time for which `--wait` waits. The earlier process of the last upgrade ends after `drain.timeout` at the latest.
const WAITED_WITHIN: Duration = Duration::from_secs(24 * 3_600);

#[derive(Debug, Subcommand)]
pub(super) enum EndpointOrder {
    /// Send no new connections to an endpoint; open connections continue
    #[command(after_help = examples::ENDPOINT_DRAIN)]
    Drain(EndpointArguments),
    /// Send no new connections to an endpoint, and close its open connections
    #[command(after_help = examples::ENDPOINT_DISABLE)]
    Disable(EndpointArguments),
    /// Send new connections to a drained or disabled endpoint again
    #[command(after_help = examples::ENDPOINT_ENABLE)]
    Enable(EndpointArguments),
}

#[derive(Debug, Args)]
pub(super) struct EndpointArguments {
    // No doc comment: rustdoc would take the brackets for a link.
    #[arg(
        value_name = "ADDRESS[:PORT]",
        value_parser = endpoint_address,
        help = "IP address of the endpoint, for all its ports, or address and port: 10.0.0.1:8443, [fd00::1]:8443"
    )]
    address: String,
    /// Host name of a service, or key of a route [default: all that use the endpoint]
    #[arg(long, value_name = "NAME")]
    service: Option<String>,
    #[command(flatten)]
    admin: Admin,
}

/// Checks the address of an endpoint.
fn endpoint_address(text: &str) -> Result<String, String> {
    Which::parse(text, None).map(|_| text.to_owned())
}

pub(super) fn stop(admin: &Admin, out: &mut impl Write) -> Result<(), Failure> {
    print_response(client::post(&admin.url(), requests::STOP.path)?, out)
}

pub(super) fn upgrade(admin: &Admin, waits: bool, out: &mut impl Write) -> Result<(), Failure> {
    let path = requests::UPGRADE.path;
    let (path, patience) = match waits {
        true => (&*format!("{path}?wait"), WAITED_WITHIN),
        false => (path, UPGRADED_WITHIN),
    };
    loop {
        let answer = client::post_text(&admin.url(), path, "", patience)?;
        // The process that was asked has handed over itself, so the new one is asked.
        if !waits || answer.status != STOPPING {
            return print_response(answer, out);
        }
        std::thread::sleep(ASK_AGAIN);
    }
}

pub(super) fn close(id: u64, admin: &Admin, out: &mut impl Write) -> Result<(), Failure> {
    let path = requests::CLOSE_CONNECTION.with(&[("id", &id.to_string())]);
    print_response(client::post(&admin.url(), &path)?, out)
}

pub(super) fn accept_registry(name: &str, admin: &Admin, out: &mut impl Write) -> Result<(), Failure> {
    let path = requests::ACCEPT_REGISTRY.with(&[("name", name)]);
    print_response(client::post(&admin.url(), &path)?, out)
}

pub(super) fn log_level(level: &str, admin: &Admin, out: &mut impl Write) -> Result<(), Failure> {
    let path = requests::LOG_LEVEL.with(&[("level", level)]);
    print_response(client::post(&admin.url(), &path)?, out)
}

pub(super) fn reload(admin: &Admin, out: &mut impl Write) -> Result<(), Failure> {
    let value = client::post(&admin.url(), requests::RELOAD.path)?.json()?;
    if let Some(problems) = value["problems"].as_array() {
        for problem in problems {
            writeln!(out, "{}", output::cell(problem))?;
        }
        return Err(Failure::Reported);
    }
    Ok(writeln!(out, "{}", output::cell(&value["result"]))?)
}

pub(super) fn endpoint(order: &EndpointOrder, out: &mut impl Write) -> Result<(), Failure> {
    let (request, arguments) = match order {
        EndpointOrder::Drain(arguments) => (requests::DRAIN_ENDPOINT, arguments),
        EndpointOrder::Disable(arguments) => (requests::DISABLE_ENDPOINT, arguments),
        EndpointOrder::Enable(arguments) => (requests::ENABLE_ENDPOINT, arguments),
    };
    let service = arguments.service.as_deref().map(|service| ("service", service));
    let parameters: Vec<_> = [("address", &*arguments.address)].into_iter().chain(service).collect();
    print_response(client::post(&arguments.admin.url(), &request.with(&parameters))?, out)
}

/// Prints the response to a command that changes something.
pub(super) fn print_response(answer: client::ApiResponse, out: &mut impl Write) -> Result<(), Failure> {
    Ok(writeln!(out, "{}", output::cell(&answer.json()?["result"]))?)
}

pub(super) fn healthcheck(admin: &Admin, out: &mut impl Write) -> Result<(), Failure> {
    let answer = client::get(&admin.url(), &format!("{}?verbose", requests::READYZ.path))?;
    write!(out, "{}", answer.body)?;
    if answer.status == 200 { Ok(()) } else { Err(Failure::Reported) }
}
