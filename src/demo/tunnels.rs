//! The steps with HBONE callers: together with SNI callers on the same port, with one HBONE connection inside another, and with
//! a caller that is refused because of its identity.

use std::time::Instant;

use serde_json::Value;

use super::DemoError;
use super::calls::settled;
use super::client::{CallError, Caller};
use super::hbone::{HboneConnection, Stream};
use super::report::Outcome;
use super::stage::{CHECKOUT, CallSpec, ECHO, LEDGER, Stage, VAULT, WEB, gateway_name, mesh_name};
use isthmus_console::output::cell;
use isthmus_model::endpoint::HBONE_PORT;
use isthmus_tasks::scope::Scope;

/// The number of streams of one connection, and of the concurrent calls by SNI.
const STREAMS: usize = 40;
/// The number of bytes that each stream sends.
const MESSAGE_BYTES: usize = 4_096;
/// The identity that may reach the vault.
const TELLER: &str = "spiffe://cluster.local/ns/bank/sa/teller";

pub(super) async fn beside(stage: &Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let scope = Scope::default();
    let tunnel = match HboneConnection::open(&by_hbone(stage)?, &scope).await {
        Ok(tunnel) => tunnel,
        Err(error) => return broken(outcome, &error),
    };
    let held = stage.certificates.holder(&tunnel.certificate);
    let holder = held.map_or("an unknown identity", |held| held.holder);
    outcome.check(holder == gateway_name(stage.west.name), || {
        format!("the certificate of the gateway has the identity {holder}")
    });
    let name = mesh_name(CHECKOUT);
    let by_name = stage.caller_in_east(&CallSpec::mesh(&name, CHECKOUT))?;
    // Streams and calls use the same port at the same time.
    let (streams, calls) = tokio::join!(Box::pin(echoes(&tunnel, outcome)), by_name.calls(STREAMS));
    streams?;
    for call in calls {
        match call {
            Ok(answer) => outcome.answered(&answer),
            Err(error) => outcome.lost(&error),
        }
    }
    let port = stage.west.gateway.listener("mesh")?;
    outcome.note(format!(
        "{STREAMS} streams in one connection and {STREAMS} calls by server name, both at {port}"
    ));
    logged(stage, ECHO, STREAMS, &["ok"], outcome).await
}

/// Opens all streams, then sends a different message on each stream and reads it back.
async fn echoes(tunnel: &HboneConnection, outcome: &mut Outcome) -> Result<(), DemoError> {
    let mut streams = Vec::new();
    for number in 0..STREAMS {
        let began = Instant::now();
        match tunnel.connect(&authority(ECHO)).await {
            Ok(answer) if answer.describe() == "200 ok" => {
                streams.push((number, began, answer.into_stream()))
            }
            Ok(answer) => {
                outcome.check(false, || format!("a stream was answered with {}", answer.describe()))
            }
            Err(error) => outcome.lost(&error),
        }
    }
    for (number, began, stream) in streams {
        let message = [u8::try_from(number).unwrap_or_default()].repeat(MESSAGE_BYTES);
        echo(stream, &message, began, outcome).await;
    }
    outcome.proof("200, isthmus-reason: ok");
    Ok(())
}

/// Sends a message on a stream and reads it back.
async fn echo(stream: Stream, message: &[u8], began: Instant, outcome: &mut Outcome) {
    match stream.echo(message).await {
        Ok(back) => {
            outcome.check(back == message, || format!("{} other bytes came back", back.len()));
            outcome.answered_in(began.elapsed(), back.len() as u64);
        }
        Err(error) => outcome.lost(&error),
    }
}

pub(super) async fn double(stage: &Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let Some(node) = stage.node else {
        outcome.left_out(format!(
            "port {HBONE_PORT} is in use on every address of net-west, so this step is left out"
        ));
        return Ok(());
    };
    let (scope, began) = (Scope::default(), Instant::now());
    let web = &stage.certificates.held_by(WEB)?.identity;
    let tls = stage.certificates.client(LEDGER, &["h2"], Some(WEB))?;
    let inner = async {
        let outer = HboneConnection::open(&by_hbone(stage)?, &scope).await?;
        let answer = outer.connect(&authority(LEDGER)).await?;
        if answer.describe() != "200 ok" {
            return Ok(Err(format!("the gateway answered {}", answer.describe())));
        }
        let inner = HboneConnection::over(answer.into_stream(), LEDGER, &tls, &scope).await?;
        let answer = inner.connect(&authority(LEDGER)).await?;
        Ok::<_, Broken>(Ok((outer, inner, answer)))
    };
    let (outer, inner, answer) = match Box::pin(inner).await {
        Ok(Ok(all)) => all,
        Ok(Err(why)) => {
            outcome.check(false, || why);
            return Ok(());
        }
        Err(Broken::CallSpec(error)) => return broken(outcome, &error),
        Err(Broken::Demo(error)) => return Err(error),
    };
    let caller = answer.caller().to_owned();
    outcome.check(answer.status.is_success(), || format!("the workload answered {}", answer.status));
    outcome.check(caller == *web, || format!("the workload identified its caller as {caller}, not as {web}"));
    let holder = stage.certificates.holder(&inner.certificate).map(|held| held.holder);
    outcome.check(holder == Some("ledger-1"), || {
        "the inner tunnel ends at another workload than ledger-1".to_owned()
    });
    outcome.note(format!("within the tunnel, {web} and {} have verified each other", cell(&holder.into())));
    echo(answer.into_stream(), b"text that the gateway cannot read", began, outcome).await;
    drop((inner, outer));
    // The inner connection is dropped without a clean end, so either end may be logged first.
    logged(stage, LEDGER, 1, &["ok", "client_reset"], outcome).await?;
    let lines = stage.west.gateway.access(|line| line["service"] == LEDGER);
    let endpoint = lines.first().map(|line| cell(&line["endpoint"])).unwrap_or_default();
    outcome.check(endpoint == format!("{node}:{HBONE_PORT}"), || {
        format!("the access log names the endpoint {endpoint}")
    });
    outcome.proof(format!("endpoint {endpoint}"));
    Ok(())
}

/// The reason why a step made no call.
enum Broken {
    CallSpec(CallError),
    Demo(DemoError),
}

impl From<CallError> for Broken {
    fn from(error: CallError) -> Self {
        Self::CallSpec(error)
    }
}

impl From<DemoError> for Broken {
    fn from(error: DemoError) -> Self {
        Self::Demo(error)
    }
}

pub(super) async fn denied(stage: &mut Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let scope = Scope::default();
    let asked = async {
        let tunnel = HboneConnection::open(&by_hbone(stage)?, &scope).await?;
        Ok::<_, Broken>((tunnel.connect(&authority(VAULT)).await?, tunnel))
    };
    match Box::pin(asked).await {
        Ok((answer, _)) if answer.describe() == "403 identity_denied" => outcome.refused(),
        Ok((answer, _)) => {
            outcome.check(false, || format!("the call was answered with {}", answer.describe()))
        }
        Err(Broken::CallSpec(error)) => return broken(outcome, &error),
        Err(Broken::Demo(error)) => return Err(error),
    }
    let web = stage.certificates.held_by(WEB)?.identity.clone();
    let explanation = explained(stage, &web).await?;
    let reason = cell(&explanation["reason"]);
    outcome.check(reason == "identity_denied", || format!("isthmus explain says {reason} for {web}"));
    for (number, step) in explanation["steps"].as_array().into_iter().flatten().enumerate() {
        outcome.note(format!("{:>2}. {}", number + 1, cell(step)));
    }
    let verdict = cell(&explained(stage, TELLER).await?["verdict"]);
    outcome.check(verdict == "admitted", || format!("isthmus explain says {verdict} for {TELLER}"));
    outcome.note(format!("isthmus explain --authority {} --identity {TELLER}: {verdict}", authority(VAULT)));
    outcome.proof("403 identity_denied, explain identity_denied");
    super::refusals::failure_listed(&mut stage.west, "identity_denied", outcome).await
}

async fn explained(stage: &Stage, identity: &str) -> Result<Value, DemoError> {
    let authority = authority(VAULT);
    let parameters = [("authority", &*authority), ("identity", identity), ("listener", "mesh")];
    stage.west.gateway.explain(&parameters).await
}

/// Returns a client on net-east that calls the gateway of net-west by HBONE, without SNI.
fn by_hbone(stage: &Stage) -> Result<Caller, DemoError> {
    let address = stage.west.gateway.listener("mesh")?.ip().to_string();
    let server = gateway_name(stage.west.name);
    let call =
        CallSpec { name: &address, alpn: &["h2"], certificate: Some(WEB), ..CallSpec::mesh("", server) };
    stage.caller_in_east(&call)
}

/// Returns the authority of a CONNECT to port 80 of a host name.
fn authority(hostname: &str) -> String {
    format!("{hostname}:80")
}

/// Adds a call that failed because it got no connection to the outcome of a step.
fn broken(outcome: &mut Outcome, error: &CallError) -> Result<(), DemoError> {
    outcome.lost(error);
    Ok(())
}

/// Checks that the access log has this number of streams to a service, with the caller's identity and one of these reasons.
async fn logged(
    stage: &Stage,
    service: &str,
    count: usize,
    reasons: &[&str],
    outcome: &mut Outcome,
) -> Result<(), DemoError> {
    let web = &stage.certificates.held_by(WEB)?.identity;
    let written = async || {
        let ours = |line: &Value| {
            line["protocol"] == "hbone"
                && line["service"] == service
                && line["reason"].as_str().is_some_and(|reason| reasons.contains(&reason))
                && line["source_identity"] == **web
        };
        Ok(stage.west.gateway.access(ours).len())
    };
    let lines = settled(count, written).await?;
    outcome.check(lines == count, || {
        format!("{lines} lines of the access log are of streams to {service}, not {count}")
    });
    outcome.proof(format!("access log: {lines} hbone, {web}"));
    Ok(())
}
