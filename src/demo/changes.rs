//! The steps that change something at run time: endpoints that stop and return, config reloads, the end of a gateway.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use super::DemoError;
use super::calls::{answered_by, describe};
use super::gateway::PATIENCE;
use super::report::Outcome;
use super::stage::{CHECKOUT, CallSpec, Network, Stage};
use isthmus_api::requests;
use isthmus_console::output::cell;

/// The endpoint that is stopped.
const VICTIM: &str = "checkout-3";
/// The number of calls while the endpoint is stopped, which is enough for its ejection.
const CALLS: usize = 80;
/// The route that a reload adds.
const NEW_ROUTE: &str = "new.shop.example";

pub(super) async fn dead_endpoint(stage: &mut Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    if let Some(victim) = stage.west.endpoint_mut(VICTIM) {
        victim.stop().await;
    }
    let caller = stage.caller_in_east(&CallSpec::plain(CHECKOUT, CHECKOUT))?;
    let shares = answered_by(stage, &stage.west, &caller, CHECKOUT, CALLS, outcome).await?;
    outcome.check(!shares.contains_key(VICTIM), || format!("{VICTIM} answered a call, although it is dead"));
    let health = health(&stage.west).await?;
    outcome.check(health == "ejected", || {
        format!("isthmus explain shows {VICTIM} as {health} instead of ejected")
    });
    let label = format!("service=\"{CHECKOUT}\"");
    let ejected = stage.west.gateway.metric("isthmus_endpoint_ejected", &[&label]).await?;
    outcome.check(ejected == 1.0, || format!("isthmus_endpoint_ejected is {ejected} instead of 1"));
    outcome.note(format!("no call was lost; isthmus explain shows {VICTIM} as {health}"));
    outcome.proof(format!("isthmus_endpoint_ejected {ejected}"));
    Ok(())
}

pub(super) async fn recovery(stage: &mut Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    if let Some(victim) = stage.west.endpoint_mut(VICTIM) {
        victim.resume().await?;
    }
    let address = victim_address(&stage.west);
    let let_back = stage.west.gateway.until("still ejects the endpoint", async |gateway| {
        let explanation = gateway.explain(&[("sni", CHECKOUT), ("listener", "plain")]).await?;
        Ok((health_of(&explanation, &address) == "healthy").then_some(()))
    });
    let_back.await?;
    let caller = stage.caller_in_east(&CallSpec::plain(CHECKOUT, CHECKOUT))?;
    let shares = answered_by(stage, &stage.west, &caller, CHECKOUT, CALLS, outcome).await?;
    outcome.check(shares.contains_key(VICTIM), || format!("{VICTIM} answers again, but gets no calls"));
    Ok(())
}

fn victim_address(network: &Network) -> String {
    let victim = network.endpoints.iter().find(|endpoint| endpoint.name == VICTIM);
    victim.map(|victim| victim.address.to_string()).unwrap_or_default()
}

/// Returns the health of the endpoint [`VICTIM`] as the gateway sees it.
async fn health(network: &Network) -> Result<String, DemoError> {
    let explanation = network.gateway.explain(&[("sni", CHECKOUT), ("listener", "plain")]).await?;
    Ok(health_of(&explanation, &victim_address(network)))
}

fn health_of(explanation: &serde_json::Value, address: &str) -> String {
    let mut candidates = explanation["candidates"].as_array().into_iter().flatten();
    let found = candidates.find(|candidate| candidate["address"] == address);
    found.map_or_else(|| "unknown".to_owned(), |candidate| cell(&candidate["health"]))
}

pub(super) async fn reload(stage: &Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let before = stage.caller_in_east(&CallSpec::plain(CHECKOUT, CHECKOUT))?.open().await;
    let mut open = match before {
        Ok(session) => session,
        Err(error) => {
            outcome.lost(&error);
            return Ok(());
        }
    };
    let route = format!("routes:\n  {NEW_ROUTE}: {{service: {CHECKOUT}, port: 443}}\n");
    let config = stage.west.config.replacen("routes:\n", &route, 1);
    let answer = stage.west.gateway.reload(&config).await?;
    outcome.check(answer.status == 200, || format!("the reload failed: {}", answer.body.trim()));
    let caller = stage.caller_in_east(&CallSpec::plain(NEW_ROUTE, NEW_ROUTE))?;
    match caller.call("/").await {
        Ok(answer) => outcome.answered(&answer),
        Err(error) => outcome.lost(&error),
    }
    let explained = stage.west.gateway.explain(&[("sni", NEW_ROUTE), ("listener", "plain")]).await?;
    let matched = cell(&explained["match"]);
    outcome.check(matched == "exact route", || {
        format!("isthmus explain says that {NEW_ROUTE} matches {matched}")
    });
    match open.get("/").await {
        Ok(answer) => outcome.answered(&answer),
        Err(error) => outcome.lost(&error),
    }
    open.close().await;
    outcome
        .note(format!("{NEW_ROUTE} is answered, and a connection from before the reload made one more call"));
    let applied = stage.west.gateway.metric("isthmus_config_reloads_total", &["result=\"applied\""]).await?;
    outcome.check(applied >= 1.0, || "isthmus_config_reloads_total did not increase".to_owned());
    outcome.proof(format!("isthmus_config_reloads_total{{result=\"applied\"}} {applied}"));
    Ok(())
}

pub(super) async fn bad_reload(stage: &Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let broken = stage.west.config.replacen("policies:", "polices:", 1);
    let answer = stage.west.gateway.reload(&broken).await?;
    let problems: serde_json::Value = serde_json::from_str(&answer.body).unwrap_or_default();
    let problem = cell(&problems["problems"][0]);
    outcome.check(answer.status == 400, || {
        format!("the reload of the broken config was answered with {}", answer.status)
    });
    outcome.check(problem.contains("west.yaml:") && problem.contains("policies"), || {
        format!("the message of the mistake is {problem:?}")
    });
    outcome.note(problem);
    match stage.caller_in_east(&CallSpec::plain(NEW_ROUTE, NEW_ROUTE))?.call("/").await {
        Ok(answer) => outcome.answered(&answer),
        Err(error) => outcome.lost(&error),
    }
    let status = stage.west.gateway.json(requests::STATUS.path).await?;
    let running = &status["config"]["file_is_running"];
    outcome.check(*running == false, || "isthmus status does not say that the file was rejected".to_owned());
    outcome.proof(format!("status: file_is_running {running}"));
    // Restores the config for an operator who continues from here with `--keep`.
    let answer = stage.west.gateway.reload(&stage.west.config).await?;
    outcome
        .check(answer.status == 200, || format!("reloading the old config failed: {}", answer.body.trim()));
    Ok(())
}

pub(super) async fn drain(stage: &mut Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let caller = stage.caller_in_east(&CallSpec::plain(CHECKOUT, CHECKOUT))?;
    let under_way = async {
        let mut session = caller.open().await?;
        let head = session.ask("/slow").await?;
        Ok((session, head))
    };
    let (mut session, head) = match under_way.await {
        Ok(both) => both,
        Err(error) => {
            outcome.lost(&error);
            return Ok(());
        }
    };
    stage.west.gateway.terminate()?;
    // The signal takes a moment to arrive; afterwards the listeners are closed.
    let deadline = Instant::now() + PATIENCE;
    let mut late = caller.connect().await;
    while late.is_ok() && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(10)).await;
        late = caller.connect().await;
    }
    match late {
        // A connection that the kernel had accepted when the listener closed is reset.
        Err(error) if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset) => {
            outcome.refused();
        }
        Err(error) => {
            outcome.check(false, || format!("a new connection failed, but was not refused: {error}"))
        }
        Ok(_) => outcome.check(false, || "the gateway still accepts new connections".to_owned()),
    }
    match session.rest(head).await {
        Ok(answer) => {
            outcome.answered(&answer);
            outcome.note(format!("the call in progress was answered in full by {}", answer.endpoint));
        }
        failed => outcome.check(false, || format!("the call in progress failed: {}", describe(&failed))),
    }
    session.close().await;
    let status = stage.west.gateway.ended().await?;
    outcome.check(status.success(), || format!("the gateway ended with {status}"));
    outcome.proof(format!("{status}"));
    Ok(())
}
