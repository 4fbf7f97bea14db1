//! Calls of a step: made, counted, and compared with what the gateway counts.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::DemoError;
use super::certificates::Certificates;
use super::client::{Answer, CallError, Caller};
use super::report::Outcome;
use super::stage::{Network, Stage};

/// Calls of the step that compares shares.
pub(super) const SHARED_CALLS: usize = 300;
/// How far a measured share may be from what `explain` says.
pub(super) const SHARE_TOLERANCE: f64 = 0.05;
/// How long the gateway may take to hear of a connection's end after the caller, and to write it down.
const SETTLED_WITHIN: Duration = Duration::from_secs(3);

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

/// A result in words.
pub(super) fn told(result: &Result<Answer, CallError>) -> String {
    match result {
        Ok(answer) => format!("an answer of {}", answer.endpoint),
        Err(error) => error.to_string(),
    }
}
