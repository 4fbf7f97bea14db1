//! The steps, and those of them whose calls are answered: what the callers saw is compared with what the gateway
//! says. `horizon` has what each side is told of
//! the other, `tunnels` the calls by HBONE, `refusals` the calls that are refused, `changes` what changes something while it runs.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rustls::AlertDescription;

use super::DemoError;
use super::certificates::Certificates;
use super::client::{Answer, CallError, Caller};
use super::report::Outcome;
use super::stage::{CHECKOUT, Call, MESH_ALPN, Network, PAYMENTS, REVIEWS, Stage, WEB, mesh_name};
use super::{changes, horizon, refusals, tunnels};
use crate::cli::output::cell;

/// Calls of the step that compares shares.
pub(super) const SHARED_CALLS: usize = 300;
/// Calls of other steps.
const CALLS: usize = 40;
/// How far a measured share may be from what `explain` says.
pub(super) const SHARE_TOLERANCE: f64 = 0.05;
/// Bytes of the bulk transfer.
const BULK: u64 = 256 << 20;
/// The share of bulk that has to stay in the kernel. Where the endpoint encrypts no faster than the gateway passes
/// on, some of it comes in pieces that are too small for that.
const SPLICE_SHARE_MIN: f64 = 0.75;
/// How long the gateway may take to hear of a connection's end after the caller, and to write it down.
const SETTLED_WITHIN: Duration = Duration::from_secs(3);

/// One thing that is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    MeshName,
    HostName,
    Alias,
    Zones,
    OtherWay,
    MutualTls,
    Hbone,
    DoubleHbone,
    SplitHorizon,
    DeadEndpoint,
    Recovery,
    NotExported,
    UnknownName,
    WrongProtocol,
    NoName,
    NotTls,
    IdentityDenied,
    Bulk,
    Reload,
    BadReload,
    Drain,
}

impl Step {
    pub(super) const ALL: [Self; 21] = [
        Self::MeshName,
        Self::HostName,
        Self::Alias,
        Self::Zones,
        Self::OtherWay,
        Self::MutualTls,
        Self::Hbone,
        Self::DoubleHbone,
        Self::SplitHorizon,
        Self::DeadEndpoint,
        Self::Recovery,
        Self::NotExported,
        Self::UnknownName,
        Self::WrongProtocol,
        Self::NoName,
        Self::NotTls,
        Self::IdentityDenied,
        Self::Bulk,
        Self::Reload,
        Self::BadReload,
        Self::Drain,
    ];

    pub(super) fn title(self) -> &'static str {
        match self {
            Self::MeshName => "mesh name, by weight",
            Self::HostName => "host name",
            Self::Alias => "route to a service",
            Self::Zones => "wildcard, nearest zone",
            Self::OtherWay => "west to east",
            Self::MutualTls => "mutual TLS",
            Self::Hbone => "HBONE beside SNI",
            Self::DoubleHbone => "double HBONE",
            Self::SplitHorizon => "split horizon",
            Self::DeadEndpoint => "dead endpoint",
            Self::Recovery => "endpoint is back",
            Self::NotExported => "not exported",
            Self::UnknownName => "unknown name",
            Self::WrongProtocol => "wrong protocol",
            Self::NoName => "no name",
            Self::NotTls => "not TLS",
            Self::IdentityDenied => "identity denied",
            Self::Bulk => "bulk",
            Self::Reload => "reload",
            Self::BadReload => "broken config",
            Self::Drain => "drain",
        }
    }

    /// What is shown, and why it matters.
    pub(super) fn story(self) -> &'static str {
        match self {
            Self::MeshName => {
                "By mesh name, as Istio's sidecars ask: east calls checkout in the west, whose endpoints weigh 1, 1 and 2."
            }
            Self::HostName => {
                "By host name, as any TLS client asks: the same service, with no mesh software at all."
            }
            Self::Alias => "By a name of your own: the route checkout.global leads to the same service.",
            Self::Zones => {
                "By a wildcard: *.shop.example has an endpoint in the gateway's own zone, which gets the calls, and one elsewhere."
            }
            Self::OtherWay => "The other way: west calls reviews in the east, by mesh name and by host name.",
            Self::MutualTls => {
                "Mutual TLS from end to end: payments asks for a certificate; the gateway holds no key and is not part of it."
            }
            Self::Hbone => {
                "HBONE calls beside SNI calls: on the mesh's port, one connection of web carries streams to echo, while others come by server name."
            }
            Self::DoubleHbone => {
                "A tunnel in the tunnel: ledger takes HBONE itself, so its caller's mutual TLS ends there, and the gateway passes on what it cannot read."
            }
            Self::SplitHorizon => {
                "catalog runs in three clusters, one of them in three zones: each side is given its own endpoints, and the rest as one gateway."
            }
            Self::DeadEndpoint => {
                "checkout-3 dies. Its calls go to the others, and soon nobody tries it any more."
            }
            Self::Recovery => "checkout-3 is back, and after a while gets its share again.",
            Self::NotExported => {
                "A service that no export rule names cannot be reached; a refused client reads a TLS alert, you read why."
            }
            Self::UnknownName => {
                "A name with a typing error: the client reads the same alert; you read what may have been meant."
            }
            Self::WrongProtocol => {
                "The mesh's listener takes clients of the mesh alone: one without its protocol (ALPN) is refused."
            }
            Self::NoName => "A client that sends no server name has no route here.",
            Self::NotTls => "What is not TLS is closed at once.",
            Self::IdentityDenied => {
                "vault is for callers of the namespace bank: web is told 403 over HBONE, and explain says why, as the gateway itself decides."
            }
            Self::Bulk => {
                "256 MiB down one connection: bulk stays in the kernel (splice), whatever its size."
            }
            Self::Reload => "The config gets one more route. Connections that are open go on.",
            Self::BadReload => {
                "A broken config changes nothing, and the gateway says what is wrong with it, and where."
            }
            Self::Drain => {
                "SIGTERM in the middle of a call: the call is finished, new ones are not taken, the exit code is 0."
            }
        }
    }

    pub(super) async fn play(self, stage: &mut Stage) -> Result<Outcome, DemoError> {
        let mut outcome = Outcome::new(self);
        match self {
            Self::MeshName => by_weight(stage, &mut outcome).await?,
            Self::HostName => {
                let caller = stage.caller_in_east(&Call::plain(CHECKOUT, CHECKOUT))?;
                answered_by(stage, &stage.west, &caller, CHECKOUT, CALLS, &mut outcome).await?;
            }
            Self::Alias => {
                let caller = stage.caller_in_east(&Call::plain("checkout.global", "checkout.global"))?;
                answered_by(stage, &stage.west, &caller, CHECKOUT, CALLS, &mut outcome).await?;
                routed(&stage.west, "checkout.global", &mut outcome).await?;
            }
            Self::Zones => nearest_zone(stage, &mut outcome).await?,
            Self::OtherWay => other_way(stage, &mut outcome).await?,
            Self::MutualTls => mutual_tls(stage, &mut outcome).await?,
            Self::Hbone => tunnels::beside(stage, &mut outcome).await?,
            Self::DoubleHbone => tunnels::double(stage, &mut outcome).await?,
            Self::SplitHorizon => horizon::split(stage, &mut outcome).await?,
            Self::DeadEndpoint => changes::dead_endpoint(stage, &mut outcome).await?,
            Self::Recovery => changes::recovery(stage, &mut outcome).await?,
            Self::NotExported => refusals::not_exported(stage, &mut outcome).await?,
            Self::UnknownName => refusals::unknown_name(stage, &mut outcome).await?,
            Self::WrongProtocol => refusals::wrong_protocol(stage, &mut outcome).await?,
            Self::NoName => refusals::no_name(stage, &mut outcome).await?,
            Self::NotTls => refusals::not_tls(stage, &mut outcome).await?,
            Self::IdentityDenied => tunnels::denied(stage, &mut outcome).await?,
            Self::Bulk => bulk(stage, &mut outcome).await?,
            Self::Reload => changes::reload(stage, &mut outcome).await?,
            Self::BadReload => changes::bad_reload(stage, &mut outcome).await?,
            Self::Drain => changes::drain(stage, &mut outcome).await?,
        }
        Ok(outcome)
    }
}

async fn by_weight(stage: &Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let name = mesh_name(CHECKOUT);
    let caller = stage.caller_in_east(&Call::mesh(&name, CHECKOUT))?;
    let explanation =
        stage.west.gateway.explain(&[("sni", &name), ("listener", "mesh"), ("alpn", MESH_ALPN)]).await?;
    let shares = answered_by(stage, &stage.west, &caller, CHECKOUT, SHARED_CALLS, outcome).await?;
    let mut expected = Vec::new();
    for candidate in explanation["candidates"].as_array().into_iter().flatten() {
        let odds = candidate["odds"].as_f64().unwrap_or_default();
        let Some(endpoint) = stage.west.endpoint_at(&cell(&candidate["address"])) else {
            outcome.check(false, || format!("explain names an endpoint that nobody started: {candidate}"));
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
    outcome.note(format!("isthmus explain had said: {}", expected.join(", ")));
    let written = async || Ok(stage.west.gateway.access(|line| line["source_network"] == "net-east").len());
    let remote = settled(SHARED_CALLS, written).await?;
    outcome.proof("access log: source_network net-east");
    outcome.check(remote >= SHARED_CALLS, || {
        "the access log does not say that the callers are in net-east".to_owned()
    });
    Ok(())
}

async fn nearest_zone(stage: &Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let caller = stage.caller_in_east(&Call::plain("cart.shop.example", "cart.shop.example"))?;
    let shares = answered_by(stage, &stage.west, &caller, "*.shop.example", CALLS, outcome).await?;
    let near = shares.get("checkout-1").copied().unwrap_or_default();
    outcome.check(near == CALLS, || format!("only {near} of {CALLS} calls stayed in the gateway's zone"));
    routed(&stage.west, "*.shop.example", outcome).await
}

async fn other_way(stage: &Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let caller = stage.caller_in_west(&Call::mesh(&mesh_name(REVIEWS), REVIEWS))?;
    answered_by(stage, &stage.east, &caller, REVIEWS, CALLS / 2, outcome).await?;
    let caller = stage.caller_in_west(&Call::plain(REVIEWS, REVIEWS))?;
    answered_by(stage, &stage.east, &caller, REVIEWS, CALLS / 2, outcome).await?;
    Ok(())
}

async fn mutual_tls(stage: &Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let name = mesh_name(PAYMENTS);
    let call = Call { certificate: Some(WEB), ..Call::mesh(&name, PAYMENTS) };
    let caller = stage.caller_in_east(&call)?;
    match caller.call("/").await {
        Ok(answer) => {
            outcome.answered(&answer);
            outcome.check(answer.client_verified, || {
                "payments has not seen the client's certificate".to_owned()
            });
            let held = stage.certificates.holder(&answer.certificate);
            let server = held.map_or("an unknown server", |held| &*held.identity);
            let client = &stage.certificates.held_by(WEB)?.identity;
            outcome.note(format!("{client} and {server} have verified each other"));
        }
        Err(error) => outcome.lost(&error),
    }
    match stage.caller_in_east(&Call { certificate: None, ..call })?.call("/").await {
        Err(CallError::Alert(AlertDescription::CertificateRequired)) => {
            outcome.refused();
            outcome.note("without a certificate, it is payments that refuses, through the gateway: certificate_required");
            outcome.proof("the alert is the endpoint's own");
        }
        other => outcome.check(false, || format!("without a certificate, the call led to {}", told(&other))),
    }
    Ok(())
}

async fn bulk(stage: &Stage, outcome: &mut Outcome) -> Result<(), DemoError> {
    let gateway = &stage.west.gateway;
    let moved = async |path| gateway.metric("isthmus_relay_bytes_total", &[path]).await;
    let (splice, copy) = ("path=\"splice\"", "path=\"copy\"");
    let before = (moved(splice).await?, moved(copy).await?);
    let caller = stage.caller_in_east(&Call::plain(CHECKOUT, CHECKOUT))?;
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
    let (spliced, copied) = (moved(splice).await? - before.0, moved(copy).await? - before.1);
    let share = spliced / (spliced + copied);
    outcome.proof(format!("isthmus_relay_bytes_total: {:.2} % over splice", share * 100.0));
    outcome.check(spliced >= BULK as f64 * SPLICE_SHARE_MIN && share >= SPLICE_SHARE_MIN, || {
        format!("only {spliced:.0} bytes went over splice, {copied:.0} were copied")
    });
    Ok(())
}

/// Makes calls of which every one has to be answered by an endpoint that proves to be the one it says, over a
/// post-quantum key exchange; compares their number with the gateway's counter for `service` (or a route).
/// How many calls each endpoint had.
pub(super) async fn answered_by(
    stage: &Stage,
    network: &Network,
    caller: &Caller,
    service: &str,
    count: usize,
    outcome: &mut Outcome,
) -> Result<BTreeMap<String, usize>, DemoError> {
    let before = network.gateway.ended_well(service).await?;
    let mut shares = BTreeMap::new();
    for result in caller.calls(count).await {
        match result {
            Ok(answer) => {
                verify(&stage.certificates, &answer, outcome);
                outcome.answered(&answer);
                *shares.entry(answer.endpoint).or_default() += 1;
            }
            Err(error) => outcome.lost(&error),
        }
    }
    let counts: Vec<String> = shares.iter().map(|(endpoint, count)| format!("{endpoint} {count}")).collect();
    outcome.note(format!("{count} calls for {}: {}", caller.name, counts.join(", ")));
    // Counters are whole numbers, and small ones here: as floats they are exact.
    let ended = async || Ok(network.gateway.ended_well(service).await? - before);
    let counted = settled(count as f64, ended).await?;
    outcome.check(counted == count as f64, || {
        format!("isthmus_connections_total{{service={service}, reason=ok}} went up by {counted} instead of {count}")
    });
    outcome.proof(format!("isthmus_connections_total +{counted} ok"));
    Ok(shares)
}

/// Asks again until there are `enough`, or for [`SETTLED_WITHIN`]: how many there are.
pub(super) async fn settled<N: PartialOrd>(
    enough: N,
    count: impl AsyncFn() -> Result<N, DemoError>,
) -> Result<N, DemoError> {
    let deadline = Instant::now() + SETTLED_WITHIN;
    loop {
        let counted = count().await?;
        if counted >= enough || Instant::now() > deadline {
            return Ok(counted);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn verify(certificates: &Certificates, answer: &Answer, outcome: &mut Outcome) {
    let holder = certificates.holder(&answer.certificate).map(|held| held.holder);
    outcome.check(holder == Some(&answer.endpoint), || {
        format!("{} answered with the certificate of {}", answer.endpoint, holder.unwrap_or("nobody"))
    });
    outcome.check(answer.post_quantum, || "the key exchange was not post-quantum".to_owned());
}

/// Checks that the access log names a route.
async fn routed(network: &Network, route: &str, outcome: &mut Outcome) -> Result<(), DemoError> {
    let written = async || Ok(network.gateway.access(|line| line["route"] == route).len());
    let lines = settled(CALLS, written).await?;
    outcome.check(lines == CALLS, || {
        format!("{lines} lines of the access log name the route {route}, not {CALLS}")
    });
    outcome.proof(format!("access log: route {route}"));
    Ok(())
}

/// A result in words.
pub(super) fn told(result: &Result<Answer, CallError>) -> String {
    match result {
        Ok(answer) => format!("an answer of {}", answer.endpoint),
        Err(error) => error.to_string(),
    }
}
