//! The steps with refused calls: the client gets an alert, and the gateway reports the reason to its operator.

use std::io;
use std::net::IpAddr;

use rustls::AlertDescription;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::DemoError;
use super::calls::describe;
use super::client::CallError;
use super::report::Outcome;
use super::stage::{CHECKOUT, CallSpec, INTERNAL, Network, Stage, mesh_name};
use isthmus_api::requests;
use isthmus_console::output::cell;

/// Alerts with their names in RFC 8446.
const UNRECOGNIZED_NAME: (AlertDescription, &str) = (AlertDescription::UnrecognisedName, "unrecognized_name");
const NO_APPLICATION_PROTOCOL: (AlertDescription, &str) =
    (AlertDescription::NoApplicationProtocol, "no_application_protocol");

pub(super) async fn not_exported(stage: &mut Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let expected = (UNRECOGNIZED_NAME, "not_exported");
    let explanation = refused(stage, &CallSpec::plain(INTERNAL, INTERNAL), expected, outcome).await?;
    for (number, step) in explanation["steps"].as_array().into_iter().flatten().enumerate() {
        outcome.note(format!("{:>2}. {}", number + 1, cell(step)));
    }
    Ok(())
}

pub(super) async fn unknown_name(stage: &mut Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let name = CHECKOUT.replace("checkout", "chekcout");
    let expected = (UNRECOGNIZED_NAME, "sni_unknown");
    let explanation = refused(stage, &CallSpec::plain(&name, CHECKOUT), expected, outcome).await?;
    let near = cell(&explanation["near"]);
    outcome.note(format!("isthmus explain {name} suggests: did you mean {near}?"));
    outcome.check(near.contains(CHECKOUT), || format!("explain does not suggest {CHECKOUT}"));
    Ok(())
}

pub(super) async fn wrong_protocol(stage: &mut Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let name = mesh_name(CHECKOUT);
    let call = CallSpec { alpn: &["http/1.1"], ..CallSpec::mesh(&name, CHECKOUT) };
    refused(stage, &call, (NO_APPLICATION_PROTOCOL, "alpn_refused"), outcome).await?;
    Ok(())
}

pub(super) async fn no_name(stage: &mut Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    // Clients send no IP address as SNI.
    let call = CallSpec::plain("127.2.0.2", CHECKOUT);
    refused(stage, &call, (UNRECOGNIZED_NAME, "no_sni"), outcome).await?;
    Ok(())
}

pub(super) async fn not_tls(stage: &mut Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let caller = stage.caller_in_east(&CallSpec::plain(CHECKOUT, CHECKOUT))?;
    let sent = async {
        let mut stream = caller.connect().await?;
        stream.write_all(b"GET / HTTP/1.1\r\nhost: checkout\r\n\r\n").await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        Ok::<_, io::Error>(answer)
    };
    match sent.await {
        Ok(answer) if answer.is_empty() => outcome.refused(),
        Ok(answer) => outcome.check(false, || format!("plain HTTP was answered with {} bytes", answer.len())),
        // The gateway closed the connection while it had unread bytes, which causes a reset.
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => outcome.refused(),
        Err(error) => {
            outcome.check(false, || format!("plain HTTP was not closed without an answer: {error}"))
        }
    }
    failure_listed(&mut stage.west, "not_tls", outcome).await?;
    outcome.note("the client sent plain HTTP; the gateway closed the connection without a byte");
    Ok(())
}

/// Makes a call that must be refused with this alert, and with this reason in `explain` and in the gateway's list of failures.
/// Returns the answer of `explain`.
async fn refused(
    stage: &mut Stage,
    call: &CallSpec<'_>,
    ((alert, alert_name), reason): ((AlertDescription, &str), &str),
    outcome: &mut Outcome,
) -> Result<Value, DemoError> {
    match stage.caller_in_east(call)?.call("/").await {
        Err(CallError::Alert(read)) if read == alert => outcome.refused(),
        other => outcome.check(false, || {
            format!("the client received {} instead of the alert {alert_name}", describe(&other))
        }),
    }
    let sni = if call.name.parse::<IpAddr>().is_ok() { "" } else { call.name };
    let alpn = call.alpn.join(",");
    let parameters = [("sni", sni), ("listener", call.listener), ("alpn", &alpn)];
    let explanation = stage.west.gateway.explain(&parameters).await?;
    let explained = cell(&explanation["reason"]);
    outcome.check(explained == reason, || format!("explain says {explained} instead of {reason}"));
    failure_listed(&mut stage.west, reason, outcome).await?;
    outcome.note(format!("the client gets the TLS alert {alert_name}; isthmus explain says {explained}"));
    outcome.proof(format!("alert {alert_name}, explain {explained}"));
    Ok(explanation)
}

/// Waits until the gateway's list of failures contains one with this reason.
pub(super) async fn failure_listed(
    network: &mut Network,
    reason: &str,
    outcome: &mut Outcome,
) -> Result<(), DemoError> {
    let listed = network.gateway.until("did not list the refusal", async |gateway| {
        let failures = gateway.json(requests::FAILURES.path).await?;
        let found = failures.as_array().into_iter().flatten().any(|line| line["reason"] == reason);
        Ok(found.then_some(()))
    });
    listed.await?;
    outcome.proof(format!("isthmus failures: {reason}"));
    Ok(())
}
