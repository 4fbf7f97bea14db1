//! Runs the steps of the demo. This module has the steps whose calls are answered; they compare the results of the callers with
//! the gateway's counters and logs. `horizon` compares the views of both networks, `tunnels` makes calls by HBONE, `refusals`
//! makes calls that are refused, and `changes` changes the networks at run time.

use rustls::AlertDescription;

use super::DemoError;
use super::calls::{SHARE_TOLERANCE, SHARED_CALLS, answered_by, describe, settled};
use super::client::CallError;
use super::report::Outcome;
use super::stage::{CHECKOUT, CallSpec, MESH_ALPN, Network, PAYMENTS, REVIEWS, Stage, WEB, mesh_name};
use super::step::Step;
use super::{changes, federation, horizon, refusals, tunnels};
use isthmus_console::output::cell;

/// The number of calls in each step of this module, except those that compare shares.
const CALLS: usize = 40;
/// The number of bytes of the bulk transfer.
const BULK: u64 = 256 << 20;
/// The smallest share of the bulk bytes that must stay in the kernel. If the endpoint encrypts no faster than the gateway
/// relays, some bytes arrive in pieces that are too small for splicing.
const SPLICE_SHARE_MIN: f64 = 0.75;

/// Runs a step.
pub(super) async fn play(step: Step, stage: &mut Stage) -> Result<Outcome, DemoError> {
    let mut outcome = Outcome::new(step);
    match step {
        Step::MeshName => by_weight(stage, &mut outcome).await?,
        Step::HostName => {
            let caller = stage.caller_in_east(&CallSpec::plain(CHECKOUT, CHECKOUT))?;
            answered_by(stage, &stage.west, &caller, CHECKOUT, CALLS, &mut outcome).await?;
        }
        Step::Alias => {
            let caller = stage.caller_in_east(&CallSpec::plain("checkout.global", "checkout.global"))?;
            answered_by(stage, &stage.west, &caller, CHECKOUT, CALLS, &mut outcome).await?;
            routed(&stage.west, "checkout.global", &mut outcome).await?;
        }
        Step::Zones => nearest_zone(stage, &mut outcome).await?,
        Step::OtherWay => other_way(stage, &mut outcome).await?,
        Step::MutualTls => mutual_tls(stage, &mut outcome).await?,
        Step::Hbone => tunnels::beside(stage, &mut outcome).await?,
        Step::DoubleHbone => tunnels::double(stage, &mut outcome).await?,
        Step::SplitHorizon => horizon::split(stage, &mut outcome).await?,
        Step::Federation => Box::pin(federation::two_organisations(stage, &mut outcome)).await?,
        #[cfg(feature = "kubernetes")]
        Step::Kubernetes => super::kubernetes::two_clusters(stage, &mut outcome).await?,
        #[cfg(not(feature = "kubernetes"))]
        Step::Kubernetes => outcome.left_out("left out, because this build has no feature kubernetes"),
        Step::DeadEndpoint => changes::dead_endpoint(stage, &mut outcome).await?,
        Step::Recovery => changes::recovery(stage, &mut outcome).await?,
        Step::NotExported => refusals::not_exported(stage, &mut outcome).await?,
        Step::UnknownName => refusals::unknown_name(stage, &mut outcome).await?,
        Step::WrongProtocol => refusals::wrong_protocol(stage, &mut outcome).await?,
        Step::NoName => refusals::no_name(stage, &mut outcome).await?,
        Step::NotTls => refusals::not_tls(stage, &mut outcome).await?,
        Step::IdentityDenied => tunnels::denied(stage, &mut outcome).await?,
        Step::Bulk => bulk(stage, &mut outcome).await?,
        Step::Reload => changes::reload(stage, &mut outcome).await?,
        Step::BadReload => changes::bad_reload(stage, &mut outcome).await?,
        Step::Drain => changes::drain(stage, &mut outcome).await?,
    }
    Ok(outcome)
}

async fn by_weight(stage: &Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let name = mesh_name(CHECKOUT);
    let caller = stage.caller_in_east(&CallSpec::mesh(&name, CHECKOUT))?;
    let explanation =
        stage.west.gateway.explain(&[("sni", &name), ("listener", "mesh"), ("alpn", MESH_ALPN)]).await?;
    let shares = answered_by(stage, &stage.west, &caller, CHECKOUT, SHARED_CALLS, outcome).await?;
    let mut expected = Vec::new();
    for candidate in explanation["candidates"].as_array().into_iter().flatten() {
        let odds = candidate["odds"].as_f64().unwrap_or_default();
        let Some(endpoint) = stage.west.endpoint_at(&cell(&candidate["address"])) else {
            outcome.check(false, || {
                format!("isthmus explain names an endpoint that the demo did not start: {candidate}")
            });
            continue;
        };
        let share = shares.get(endpoint.name).copied().unwrap_or_default() as f64 / SHARED_CALLS as f64;
        outcome.check((share - odds).abs() <= SHARE_TOLERANCE, || {
            format!(
                "{} had {:.1} % of the calls instead of {:.1} %",
                endpoint.name,
                share * 100.0,
                odds * 100.0
            )
        });
        expected.push(format!("{} {:.0} %", endpoint.name, odds * 100.0));
    }
    outcome.check(expected.len() == 3, || format!("explain lists {} endpoints instead of 3", expected.len()));
    outcome.note(format!("isthmus explain predicted: {}", expected.join(", ")));
    let written = async || Ok(stage.west.gateway.access(|line| line["source_network"] == "net-east").len());
    let remote = settled(SHARED_CALLS, written).await?;
    outcome.proof("access log: source_network net-east");
    outcome.check(remote >= SHARED_CALLS, || {
        "the access log does not say that the callers are in net-east".to_owned()
    });
    Ok(())
}

async fn nearest_zone(stage: &Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let caller = stage.caller_in_east(&CallSpec::plain("cart.shop.example", "cart.shop.example"))?;
    let shares = answered_by(stage, &stage.west, &caller, "*.shop.example", CALLS, outcome).await?;
    let near = shares.get("checkout-1").copied().unwrap_or_default();
    outcome.check(near == CALLS, || format!("only {near} of {CALLS} calls stayed in the gateway's zone"));
    routed(&stage.west, "*.shop.example", outcome).await
}

async fn other_way(stage: &Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let caller = stage.caller_in_west(&CallSpec::mesh(&mesh_name(REVIEWS), REVIEWS))?;
    answered_by(stage, &stage.east, &caller, REVIEWS, CALLS / 2, outcome).await?;
    let caller = stage.caller_in_west(&CallSpec::plain(REVIEWS, REVIEWS))?;
    answered_by(stage, &stage.east, &caller, REVIEWS, CALLS / 2, outcome).await?;
    Ok(())
}

async fn mutual_tls(stage: &Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let name = mesh_name(PAYMENTS);
    let call = CallSpec { certificate: Some(WEB), ..CallSpec::mesh(&name, PAYMENTS) };
    let caller = stage.caller_in_east(&call)?;
    match caller.call("/").await {
        Ok(answer) => {
            outcome.answered(&answer);
            outcome.check(answer.client_verified, || {
                "payments did not receive the certificate of the client".to_owned()
            });
            let held = stage.certificates.holder(&answer.certificate);
            let server = held.map_or("an unknown server", |held| &*held.identity);
            let client = &stage.certificates.held_by(WEB)?.identity;
            outcome.note(format!("{client} and {server} have verified each other"));
        }
        Err(error) => outcome.lost(&error),
    }
    match stage.caller_in_east(&CallSpec { certificate: None, ..call })?.call("/").await {
        Err(CallError::Alert(AlertDescription::CertificateRequired)) => {
            outcome.refused();
            outcome.note(
                "a client without a certificate is refused by payments itself, with the alert \
                 certificate_required",
            );
            outcome.proof("the alert is the endpoint's own");
        }
        other => outcome.check(false, || {
            format!(
                "a call without a certificate was not refused by payments, but led to {}",
                describe(&other)
            )
        }),
    }
    Ok(())
}

async fn bulk(stage: &Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let gateway = &stage.west.gateway;
    let moved = async |path| gateway.metric("isthmus_relay_bytes_total", &[path]).await;
    let (splice, copy) = ("path=\"splice\"", "path=\"copy\"");
    let before = (moved(splice).await?, moved(copy).await?);
    let caller = stage.caller_in_east(&CallSpec::plain(CHECKOUT, CHECKOUT))?;
    match caller.call(&format!("/bytes/{BULK}")).await {
        Ok(answer) => {
            outcome.answered(&answer);
            outcome
                .check(answer.bytes == BULK, || format!("{} bytes arrived instead of {BULK}", answer.bytes));
            let rate = answer.bytes as f64 / answer.took.as_secs_f64() / f64::from(1 << 20);
            outcome.note(format!("{rate:.0} MiB/s, with the encryption at both ends on the same machine"));
        }
        Err(error) => outcome.lost(&error),
    }
    // The gateway counts the bytes of a connection once a second, and at its end.
    settled(before.0 + before.1 + BULK as f64, async || Ok(moved(splice).await? + moved(copy).await?))
        .await?;
    let (spliced, copied) = (moved(splice).await? - before.0, moved(copy).await? - before.1);
    let share = spliced / (spliced + copied);
    outcome.proof(format!("isthmus_relay_bytes_total: {:.2} % over splice", share * 100.0));
    outcome.check(spliced >= BULK as f64 * SPLICE_SHARE_MIN && share >= SPLICE_SHARE_MIN, || {
        format!("only {spliced:.0} bytes went over splice, {copied:.0} were copied")
    });
    Ok(())
}

/// Checks that the access log names a route in [`CALLS`] lines.
async fn routed(network: &Network, route: &str, outcome: &mut Outcome) -> Result<(), DemoError> {
    let written = async || Ok(network.gateway.access(|line| line["route"] == route).len());
    let lines = settled(CALLS, written).await?;
    outcome.check(lines == CALLS, || {
        format!("{lines} lines of the access log name the route {route}, not {CALLS}")
    });
    outcome.proof(format!("access log: route {route}"));
    Ok(())
}
