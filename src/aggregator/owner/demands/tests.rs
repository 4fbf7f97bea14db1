//! Services that lose endpoints while time passes.

use std::time::SystemTime;

use super::super::simulation::process;
use super::super::{Message, Owner, Sources};
use super::*;
use crate::options::Options;
use crate::spec::RegistrySpec;
use isthmus_model::endpoint::{Endpoint, Health};
use isthmus_model::service::PortProtocol;
use isthmus_registry::change::{Change, Item};
use isthmus_registry::listing::Listing;
use isthmus_settings::scope::{RegistryScope, Unlisted};
use isthmus_settings::steering::{ServiceSteering, SteeringMode};
use isthmus_settings::tuning::Tuning;
use isthmus_snapshot::testing::{endpoint, port, service, tuning};
use isthmus_tasks::scope::Scope;
use isthmus_world::Reader;

const NAME: &str = "s0.mesh";

fn east() -> Network {
    Network::new("east")
}

/// An owner, and the time at which it started.
struct Run(Owner, Reader, Instant);

impl Run {
    /// Starts an owner whose services are steered by this mode, with registries of this kind.
    fn new(mode: SteeringMode, unlisted: Unlisted) -> Self {
        let (mut owner, reader) = process(&Scope::default());
        let now = Instant::now();
        let mut policy = (*owner.policy).clone();
        let steering = ServiceSteering { mode, ..tuning().steering };
        policy.tuning.default = Tuning { steering, ..tuning() }.into();
        let registry = |spec: &RegistrySpec| RegistrySpec {
            scope: RegistryScope { unlisted, ..spec.scope.clone() },
            ..spec.clone()
        };
        let registries = owner.registries.iter().map(|followed| registry(&followed.life.spec)).collect();
        let sources = Sources {
            policy: policy.into(),
            services: Listing::default(),
            registries,
            options: Options::default(),
        };
        owner.configure(sources, now).expect("applied");
        Self(owner, reader, now)
    }

    fn steered() -> Self {
        Self::new(SteeringMode::Nearest, Unlisted::Lost)
    }

    /// Gives the service these endpoints, some seconds after the start: those that are ready, and those that are terminating.
    fn put(&mut self, seconds: u64, ready: usize, leaving: usize) {
        let healths = std::iter::repeat_n(Health::Healthy, ready);
        let healths = healths.chain(std::iter::repeat_n(Health::Draining, leaving));
        let one = |(at, health)| Endpoint { health, ..endpoint(&format!("10.0.0.{at}"), 1) };
        let endpoints = healths.enumerate().map(one).collect();
        let service = service(NAME, vec![port(80, PortProtocol::Tcp)], endpoints);
        let changes = vec![Change::Begin, Change::Put(Item::Service(service.into())), Change::Complete];
        let epoch = self.0.registries[0].life.epoch;
        self.take(seconds, Message::Changes(epoch, changes));
    }

    fn take(&mut self, seconds: u64, message: Message) {
        self.0.take(vec![message], self.2 + Duration::from_secs(seconds));
    }

    /// Returns the demand after a look at the time.
    fn demand(&mut self, seconds: u64) -> u64 {
        self.take(seconds, Message::Sweep);
        let snapshot = self.1.latest();
        let view = snapshot.service(NAME).expect("the service");
        let mut listed = Listed::default();
        for endpoint in view.parts.iter().flat_map(|part| part.service.endpoints.iter()) {
            listed.add(endpoint.health, endpoint.weight.value().into());
        }
        view.demand(&east(), listed).map_or_else(|| listed.present(), |demand| demand.weight)
    }
}

#[tokio::test(start_paused = true)]
async fn lost_endpoints_count_whole_for_five_minutes_and_less_for_five_more() {
    let mut run = Run::steered();
    run.put(0, 30, 0);
    assert_eq!(run.demand(0), 30);
    run.put(100, 9, 0);
    assert_eq!([100, 399, 429].map(|at| run.demand(at)), [30; 3]);
    assert_eq!([430, 460, 550].map(|at| run.demand(at)), [27, 24, 15]);
    assert_eq!([610, 700].map(|at| run.demand(at)), [9, 9], "9 are there");
    assert!(run.0.demands.known.is_empty() && run.0.demands.remembered.0.is_empty(), "nothing is left");
}

#[tokio::test(start_paused = true)]
async fn the_time_counts_from_when_endpoints_were_last_seen() {
    let mut run = Run::steered();
    run.put(0, 30, 0);
    run.put(100, 9, 0);
    run.put(300, 30, 0);
    assert_eq!(run.demand(300), 30);
    run.put(700, 9, 0);
    assert_eq!([700, 999].map(|at| run.demand(at)), [30; 2]);
    // The memory of a loss in steps falls in these steps.
    let mut run = Run::steered();
    run.put(0, 30, 0);
    run.put(100, 20, 0);
    run.put(500, 5, 0);
    assert_eq!([500, 600, 799].map(|at| run.demand(at)), [21, 20, 20], "seven tenths of 30, then 20");
    assert_eq!(run.demand(1_100), 5);
}

#[tokio::test(start_paused = true)]
async fn a_rollout_raises_no_demand_and_terminating_endpoints_lower_none() {
    let mut run = Run::steered();
    run.put(0, 30, 0);
    for (at, ready, leaving) in [(10, 30, 10), (20, 28, 20), (30, 30, 30), (40, 30, 5), (50, 30, 0)] {
        run.put(at, ready, leaving);
        assert_eq!(run.demand(at), 30, "{ready} and {leaving}");
    }
    run.put(1_000, 10, 20);
    assert_eq!(run.demand(1_000), 30);
    run.put(1_030, 10, 0);
    assert_eq!(run.demand(1_030), 30);
    // A service that was terminating when it was first seen.
    let mut run = Run::steered();
    run.put(0, 10, 20);
    assert_eq!(run.demand(0), 30);
    run.put(30, 10, 0);
    assert_eq!(run.demand(30), 30);
}

#[tokio::test(start_paused = true)]
async fn a_service_without_endpoints_keeps_its_demand() {
    let mut run = Run::steered();
    run.put(0, 30, 0);
    run.put(100, 0, 0);
    assert_eq!(run.demand(100), 30);
    assert!(run.1.latest().service(NAME).expect("the service").is_lost(&east()));
    run.put(200, 1, 0);
    assert_eq!(run.demand(200), 30, "the first endpoint of thirty");
    run.put(300, 30, 0);
    assert_eq!(run.demand(300), 30);
    assert!(run.0.demands.known.is_empty());
}

#[tokio::test(start_paused = true)]
async fn nothing_is_remembered_of_lists_of_operators_and_of_services_that_are_not_steered() {
    for (mode, unlisted) in [(SteeringMode::Nearest, Unlisted::Removed), (SteeringMode::Off, Unlisted::Lost)]
    {
        let mut run = Run::new(mode, unlisted);
        run.put(0, 30, 0);
        run.put(100, 9, 0);
        assert_eq!(run.demand(100), 9, "{mode:?}, {unlisted:?}");
        assert!(run.0.demands.known.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn a_later_process_remembers_what_an_earlier_one_has_seen() {
    let mut run = Run::steered();
    run.put(0, 30, 0);
    run.put(100, 9, 0);
    let (start, clock) = (run.2, SystemTime::now());
    let at = |seconds| {
        let after = Duration::from_secs(seconds);
        Present { instant: start + after, moment: (clock + after).into() }
    };
    let beliefs = run.0.demands.beliefs(at(200));
    assert_eq!(beliefs.len(), 1);
    let lines = beliefs.iter().map(|belief| serde_json::to_string(belief).expect("JSON"));
    let read: Vec<DemandBelief> = lines.map(|line| serde_json::from_str(&line).expect("a belief")).collect();
    let mut later = Run::steered();
    later.0.demands = Demands::recalled(read, at(200));
    later.put(210, 9, 0);
    assert_eq!([210, 399].map(|at| later.demand(at)), [30; 2]);
    assert_eq!(later.demand(700), 9);
    let damaged = DemandBelief { service: "not a name".to_owned(), ..beliefs[0].clone() };
    assert!(Demands::recalled(vec![damaged], at(200)).known.is_empty());
    assert!(Demands::recalled(beliefs, at(701)).remembered.0.is_empty(), "too old");
}

#[tokio::test(start_paused = true)]
async fn what_is_remembered_is_bounded() {
    let mut run = Run::steered();
    run.put(0, 100, 0);
    for at in 1..100_usize {
        run.put(10 * at as u64, 100 - at, 0);
    }
    let known = run.0.demands.known.values().flat_map(BTreeMap::values);
    let most = known.map(|known| known.seen.len()).max();
    assert!(most <= Some(11), "a slow decline: {most:?}");
    // A full memory takes nothing more.
    let one =
        Known { seen: vec![Seen { weight: 5, at: run.2 + Duration::from_secs(2_000) }], is_leaving: false };
    let full = (0..REMEMBERED_MAX).map(|at| (Network::new(&format!("n{at}")), one.clone()));
    let mut run = Run::steered();
    let other = HostName::parse("other.mesh").expect("legal");
    run.0.demands.known = Arc::new([(other, full.collect())].into());
    run.put(2_000, 30, 0);
    run.put(2_001, 9, 0);
    assert_eq!(run.demand(2_001), 9, "the present number counts");
    assert_eq!(run.0.demands.known.values().map(BTreeMap::len).sum::<usize>(), REMEMBERED_MAX);
}
