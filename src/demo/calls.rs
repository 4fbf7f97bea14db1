//! The calls of a step, and how their number compares with the gateway's counters.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::DemoError;
use super::certificates::Certificates;
use super::client::{CallError, CallResult, Caller};
use super::report::Outcome;
use super::stage::{Network, Stage};

/// The number of calls in the step that compares shares.
pub(super) const SHARED_CALLS: usize = 300;
/// The largest difference between a measured share and that of `explain`.
pub(super) const SHARE_TOLERANCE: f64 = 0.05;
/// The time that the gateway may need to count and log the end of a connection after the caller has ended it.
const SETTLED_WITHIN: Duration = Duration::from_secs(3);

/// Makes calls that an endpoint must answer with its own certificate and a post-quantum key exchange, and compares their number
/// with the gateway's counter for `service` (or a route). Returns the number of calls per endpoint.
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
    // Counters are small whole numbers, which are exact as floats.
    let ended = async || Ok(network.gateway.ended_well(service).await? - before);
    let counted = settled(count as f64, ended).await?;
    outcome.check(counted == count as f64, || {
        format!("isthmus_connections_total{{service={service}, reason=ok}} went up by {counted} instead of {count}")
    });
    outcome.proof(format!("isthmus_connections_total +{counted} ok"));
    Ok(shares)
}

/// Calls `count` until it returns at least `enough`, for at most [`SETTLED_WITHIN`]; returns the last value.
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

fn verify(certificates: &Certificates, answer: &CallResult, outcome: &mut Outcome) {
    let holder = certificates.holder(&answer.certificate).map(|held| held.holder);
    outcome.check(holder == Some(&answer.endpoint), || {
        format!("{} answered with the certificate of {}", answer.endpoint, holder.unwrap_or("nobody"))
    });
    outcome.check(answer.post_quantum, || "the key exchange was not post-quantum".to_owned());
}

/// Returns the result of a call as text.
pub(super) fn describe(result: &Result<CallResult, CallError>) -> String {
    match result {
        Ok(answer) => format!("an answer of {}", answer.endpoint),
        Err(error) => error.to_string(),
    }
}
