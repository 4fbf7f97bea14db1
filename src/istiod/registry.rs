//! Follows an istiod: lists what it has, takes its changes, and connects again after a fault.
//!
//! A stream that ends is opened again. As long as this process has what the istiod sent, the new stream begins with what has
//! changed since; otherwise, and if the versions of all resources do not fit into a request, with all resources.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use super::reading::{Applied, Reading, Wanted};
use super::stream::{Stream, StreamFault};
use isthmus_ads::ztunnel::Kind;
use isthmus_aggregator::registry::{Changes, Registry};
use isthmus_aggregator::reopening::{Ended, Reopening, Reported, Source, follow};
use isthmus_aggregator::spec::RegistrySpec;
use isthmus_aggregator::spec::istiod::IstiodSpec;
use isthmus_files::reading::Readings;
use isthmus_proto::envoy::service::discovery::v3::DeltaDiscoveryResponse;
use isthmus_registry::change::{Change, Report};
use isthmus_tasks::background::{self, Failed};
use isthmus_tasks::scope::Scope;

/// The longest wait between attempts, before jitter of a fifth.
const WAIT_MAX: Duration = Duration::from_secs(10);
/// A stream that has lasted this long is opened again in silence when it ends: istiod ends streams when it is restarted, and after
/// their largest age.
const STEADY: Duration = Duration::from_secs(5);
/// How long the gateway tries to open the stream again before it reports the fault.
const GRACE: Duration = Duration::from_secs(5);
/// The largest number of reads of tokens and roots that may hang at the same time.
const READINGS: usize = 3;
/// A response with up to this number of resources is read on the registry's task; a larger one would delay other tasks.
const READ_HERE_MAX: usize = 100;

/// Returns the attempts to open a stream of a registry that has not been read yet.
const fn streams() -> Reopening {
    Reopening::new(STEADY, GRACE, WAIT_MAX)
}

/// A registry that is read from an istiod.
pub struct IstiodRegistry {
    spec: RegistrySpec,
    istiod: IstiodSpec,
    scope: Scope,
}

impl IstiodRegistry {
    /// Makes the registry; tasks of its connections run in `scope`.
    pub fn new(spec: RegistrySpec, istiod: IstiodSpec, scope: Scope) -> Self {
        Self { spec, istiod, scope }
    }
}

impl Registry for IstiodRegistry {
    fn spec(&self) -> &RegistrySpec {
        &self.spec
    }

    fn run(self: Box<Self>, changes: Changes) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(follow(self.spec.name.clone(), IstiodSource::new(*self), changes, streams()))
    }
}

struct IstiodSource {
    name: Arc<str>,
    istiod: IstiodSpec,
    wanted: Wanted,
    scope: Scope,
    readings: Readings,
    reading: Reading,
    /// True once all resources were listed, so that a stream can be resumed.
    is_listed: bool,
    listings: usize,
    resumes: usize,
    reported: Option<Report>,
}

impl Source for IstiodSource {
    async fn follow(&mut self, changes: &Changes, streams: &mut Reopening) -> Result<Infallible, Ended> {
        let Err(mut ended) = self.stream(changes, streams).await;
        if let Ended::Fault(problems) = &mut ended {
            let istiod = format!("istiod at {}: ", self.istiod.istiod.address);
            problems.iter_mut().for_each(|problem| problem.insert_str(0, &istiod));
        }
        Err(ended)
    }

    /// After a fault, the next stream begins with what has changed since; after a panic, with all resources.
    fn forget(&mut self, why: Reported) {
        if why == Reported::Panic {
            self.reading = Reading::new(self.wanted.clone());
            self.is_listed = false;
        }
    }
}

impl From<StreamFault> for Ended {
    fn from(fault: StreamFault) -> Self {
        Self::Fault(vec![fault.to_string()])
    }
}

impl IstiodSource {
    fn new(registry: IstiodRegistry) -> Self {
        let IstiodRegistry { spec, istiod, scope } = registry;
        let wanted = Wanted {
            network: spec.network.clone(),
            cluster: spec.cluster.clone(),
            elsewhere: istiod.elsewhere.clone(),
            ambient: istiod.ambient,
        };
        Self {
            name: spec.name,
            istiod,
            reading: Reading::new(wanted.clone()),
            wanted,
            scope,
            readings: Readings::new(READINGS),
            is_listed: false,
            listings: 0,
            resumes: 0,
            reported: None,
        }
    }

    /// Opens a stream, and takes what it sends.
    async fn stream(&mut self, changes: &Changes, streams: &mut Reopening) -> Result<Infallible, Ended> {
        let versions = if self.is_listed { self.reading.versions() } else { Default::default() };
        let mut stream = Stream::open(&self.istiod, versions, &self.readings, &self.scope).await?;
        streams.note_opened();
        let (mut has_addresses, mut has_policies) = (false, false);
        loop {
            let (kind, response) = stream.next().await?;
            let nonce = response.nonce.clone();
            let Applied { changes: mut batch, refused } = match kind {
                Kind::Authorization => {
                    let is_first = !std::mem::replace(&mut has_policies, true);
                    let applied = self
                        .apply(response, move |reading, response| reading.authorizations(response, is_first));
                    let Applied { changes, refused } = applied.await?;
                    // Before the listing there is nothing to change; the listing has the policies.
                    Applied { changes: if self.is_listed { changes } else { Vec::new() }, refused }
                }
                Kind::Address => {
                    let is_first = !std::mem::replace(&mut has_addresses, true);
                    let is_listing = is_first && !stream.is_resumed;
                    let resources = response.resources.len();
                    let applied = self
                        .apply(response, move |reading, response| reading.addresses(response, is_listing));
                    let mut applied = applied.await?;
                    if is_listing {
                        self.is_listed = true;
                        self.listings += 1;
                        tracing::debug!(registry = &*self.name, resources, "istiod listed");
                    } else if is_first {
                        self.resumes += 1;
                        applied.changes.push(Change::Readable);
                    }
                    applied
                }
            };
            batch.extend(self.report());
            if !batch.is_empty() {
                changes.send(batch).await?;
            }
            stream.answer(kind, nonce, &refused).await?;
        }
    }

    /// Applies a response, a large one on a background thread.
    async fn apply(
        &mut self,
        response: DeltaDiscoveryResponse,
        apply: impl FnOnce(&mut Reading, DeltaDiscoveryResponse) -> Applied + Send + 'static,
    ) -> Result<Applied, Failed> {
        if response.resources.len() <= READ_HERE_MAX {
            return Ok(apply(&mut self.reading, response));
        }
        let work = move |reading: &mut Reading| apply(reading, response);
        background::run_on(&mut self.reading, Reading::default(), work).await
    }

    /// Returns the report for operators, if it has changed.
    fn report(&mut self) -> Option<Change> {
        let mut problems = self.reading.problems();
        problems.extend(self.reading.other_network().map(|network| {
            format!("no endpoint is on the network of the registry, but some are on {:?}; `network` must be the network that \
                     istiod gives its workloads", network.as_str())
        }));
        let report = Report {
            server: self.istiod.istiod.address.clone(),
            facts: vec![
                ("listings", self.listings.to_string()),
                ("resumed streams", self.resumes.to_string()),
            ],
            objects: self.reading.objects(),
            left_out: self.reading.left_out(),
            problems,
            policies_unknown: self.reading.policies_unknown(),
            waypoints_ignored: self.reading.waypoints_ignored(),
            ..Report::default()
        };
        if self.reported.as_ref() == Some(&report) {
            return None;
        }
        self.reported = Some(report.clone());
        Some(Change::Report(report.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_aggregator::reopening::testing::outage;

    #[tokio::test(start_paused = true)]
    async fn an_istiod_that_stays_away_is_reported_after_five_seconds_and_asked_each_ten() {
        let (reported, longest) = outage(streams(), Duration::from_secs(5)).await;
        assert_eq!(reported, Duration::from_secs(5));
        assert!((8..=12).contains(&longest.as_secs()), "{longest:?}");
        let (reported, _) = outage(streams(), Duration::from_millis(4_999)).await;
        assert_eq!(reported, Duration::ZERO, "the stream was not steady");
    }
}
