//! Services that lose endpoints while time passes.

use std::time::SystemTime;

use super::super::simulation::process;
use super::super::{Message, Owner, Sources};
use super::*;
use crate::options::Options;
use crate::spec::RegistrySpec;
use isthmus_model::demand::OwnersDemand;
use isthmus_model::endpoint::{Endpoint, Health};
use isthmus_model::service::PortProtocol;
use isthmus_registry::change::{Change, Item};
use isthmus_registry::listing::Listing;
use isthmus_settings::scope::{RegistryScope, Unlisted};
use isthmus_settings::steering::{ServiceSteering, SteeringMode};
use isthmus_settings::tuning::Tuning;
use isthmus_snapshot::demand::Listed;
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
        self.put_with(seconds, (ready, leaving), None);
    }

    /// Gives the service endpoints as [`Self::put`] does, whose owner says this number.
    fn put_with(&mut self, seconds: u64, (ready, leaving): (usize, usize), said: Option<u32>) {
        let healths = std::iter::repeat_n(Health::Healthy, ready);
        let healths = healths.chain(std::iter::repeat_n(Health::Draining, leaving));
        let one = |(at, health)| Endpoint { health, ..endpoint(&format!("10.0.0.{at}"), 1) };
        let endpoints = healths.enumerate().map(one).collect();
        let mut service = service(NAME, vec![port(80, PortProtocol::Tcp)], endpoints);
        service.demand = said.into_iter().map(|weight| OwnersDemand { network: None, weight }).collect();
        let changes = vec![Change::Begin, Change::Put(Item::Service(service.into())), Change::Complete];
        let epoch = self.0.registries[0].life.epoch;
        self.take(seconds, Message::Changes(epoch, changes));
    }

    fn take(&mut self, seconds: u64, message: Message) {
        self.0.take(vec![message], self.2 + Duration::from_secs(seconds));
    }

    /// Returns another process that starts with what this one hands over after some seconds.
    fn restarted(&self, seconds: u64) -> Self {
        let (after, clock) = (Duration::from_secs(seconds), SystemTime::now());
        let present = Present { instant: self.2 + after, moment: (clock + after).into() };
        let beliefs = self.0.demands.beliefs(present);
        let lines = beliefs.iter().map(|belief| serde_json::to_string(belief).expect("JSON"));
        let read = lines.map(|line| serde_json::from_str(&line).expect("a belief")).collect();
        let mut later = Self::steered();
        (later.0.demands, later.2) = (Demands::recalled(read, present), self.2);
        later
    }

    fn is_nothing_known(&self) -> bool {
        let Demands { known, places, remembered, looked: _ } = &self.0.demands;
        assert_eq!(known.is_empty(), remembered.0.is_empty());
        assert_eq!(known.is_empty(), places.0.is_empty());
        known.is_empty()
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
    assert!(run.is_nothing_known());
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
    run.put(360, 9, 0);
    assert_eq!(run.demand(360), 30, "30 stood before they were lost for the first time");
    run.put(400, 30, 0);
    assert_eq!(run.demand(580), 30);
    assert!(run.is_nothing_known());
}

#[tokio::test(start_paused = true)]
async fn nothing_is_remembered_of_lists_of_operators_and_of_services_that_are_not_steered() {
    for (mode, unlisted) in [(SteeringMode::Nearest, Unlisted::Removed), (SteeringMode::Off, Unlisted::Lost)]
    {
        let mut run = Run::new(mode, unlisted);
        run.put(0, 30, 0);
        run.put(100, 9, 0);
        assert_eq!(run.demand(100), 9, "{mode:?}, {unlisted:?}");
        assert!(run.is_nothing_known());
    }
}

/// A Deployment of one pod: while the new pod starts, there are two.
#[tokio::test(start_paused = true)]
async fn the_surge_of_a_rollout_is_not_remembered() {
    for surge in [1, 60, 179] {
        let mut run = Run::steered();
        run.put(0, 1, 0);
        run.put(1_000, 2, 0);
        assert_eq!(run.demand(1_000 + surge), 2, "both are there");
        run.put(1_000 + surge, 1, 1);
        assert_eq!(run.demand(1_000 + surge), 1);
        run.put(1_030 + surge, 1, 0);
        assert_eq!([1_030, 1_200].map(|at| run.demand(at + surge)), [1, 1]);
        assert!(run.is_nothing_known());
    }
    // One rollout after another.
    let mut run = Run::steered();
    run.put(0, 10, 0);
    for rollout in 0..20 {
        run.put(100 + 100 * rollout, 20, 0);
        run.put(150 + 100 * rollout, 10, 10);
        assert_eq!(run.demand(150 + 100 * rollout), 10);
    }
}

#[tokio::test(start_paused = true)]
async fn a_number_is_remembered_once_it_has_stood() {
    let mut run = Run::steered();
    run.put(0, 10, 0);
    run.put(1_000, 30, 0);
    run.put(1_180, 9, 0);
    assert_eq!(run.demand(1_180), 30, "an autoscaler's");
    // Endpoints beyond those that are replaced: 20 stand since 100, 30 since 250.
    let mut run = Run::steered();
    run.put(0, 10, 0);
    run.put(100, 20, 0);
    run.put(250, 30, 0);
    run.put(260, 25, 0);
    run.put(300, 5, 0);
    assert_eq!(run.demand(300), 20);
    // A service that the gateway has seen for a moment, and one that has come from none.
    let mut run = Run::steered();
    run.put(0, 30, 0);
    run.put(1, 9, 0);
    assert_eq!(run.demand(1), 30);
    let mut run = Run::steered();
    run.put(0, 0, 0);
    run.put(100, 30, 0);
    run.put(110, 9, 0);
    assert_eq!(run.demand(110), 30);
}

#[tokio::test(start_paused = true)]
async fn a_restart_within_a_rollout_raises_no_demand() {
    let mut run = Run::steered();
    run.put(0, 1, 0);
    run.put(1_000, 2, 0);
    let mut surging = run.restarted(1_010);
    surging.put(1_011, 2, 0);
    surging.put(1_020, 1, 1);
    assert_eq!(surging.demand(1_020), 1);
    run.put(1_020, 1, 1);
    let mut leaving = run.restarted(1_021);
    leaving.put(1_022, 1, 1);
    assert_eq!(leaving.demand(1_022), 1);
    leaving.put(1_030, 1, 0);
    assert_eq!(leaving.demand(1_030), 1);
    // A service that is gone is forgotten.
    let mut later = run.restarted(1_021);
    assert!(!later.is_nothing_known());
    later.take(1_621, Message::Sweep);
    assert!(later.is_nothing_known());
}

#[tokio::test(start_paused = true)]
async fn replicas_that_are_raised_count_as_their_pods_come() {
    let mut run = Run::steered();
    run.put_with(0, (10, 0), Some(10));
    run.put_with(100, (10, 0), Some(30));
    assert_eq!(run.demand(100), 10, "there are no pods yet");
    run.put_with(110, (16, 0), Some(30));
    assert_eq!(run.demand(110), 16);
    run.put_with(111, (4, 0), Some(30));
    assert_eq!(run.demand(111), 16);
    let mut later = run.restarted(112);
    later.put_with(113, (4, 0), Some(30));
    assert_eq!(later.demand(113), 16);
    run.put_with(120, (30, 0), Some(30));
    assert_eq!(run.demand(120), 30);
    assert!(run.is_nothing_known());
    run.put_with(130, (9, 0), Some(30));
    assert_eq!(run.demand(130), 30, "lost");
    run.put_with(140, (9, 0), Some(5));
    run.put_with(150, (0, 0), Some(0));
    run.put_with(160, (0, 0), Some(30));
    assert_eq!(run.demand(160), 30, "from zero, no number was served before");
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
    let mut later = run.restarted(200);
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
    let known = |run: &Run| {
        let known = run.0.demands.known.get(NAME).expect("something").get(&east()).cloned();
        known.expect("something")
    };
    let most = known(&run).seen.len();
    assert!((2..=11).contains(&most), "a slow decline: {most}");
    let mut run = Run::steered();
    run.put(0, 1, 0);
    for at in 1..100_usize {
        run.put(2 * at as u64, 1 + at, 0);
    }
    let most = known(&run).rises.len();
    assert!((2..=9).contains(&most), "a slow growth: {most}");
}

/// Each side has places of its own, and a full one takes nothing more.
#[tokio::test(start_paused = true)]
async fn a_peer_takes_no_places_of_others() {
    let now = Instant::now();
    let belief = |service: usize, network: &str| DemandBelief {
        service: format!("s{service}.other"),
        network: network.to_owned(),
        seen: vec![NumberBelief { weight: 5, at: Present::now().moment_of(now) }],
        stands: 0,
        rises: Vec::new(),
        is_leaving: false,
        said_before: None,
    };
    let places = |network: &str, count: usize| {
        let beliefs = (0..count).map(|at| belief(at, network)).collect();
        Demands::recalled(beliefs, Present::now())
    };
    for (network, most, counts) in [("peer/west/n", PLACES_OF_PEER, 30), ("n", PLACES, 9)] {
        let mut run = Run::steered();
        run.0.demands = places(network, most + 5);
        assert_eq!(run.0.demands.known.len(), most);
        run.put(1, 30, 0);
        run.put(2, 9, 0);
        assert_eq!(run.demand(2), counts, "{network}");
        // A service with more networks than places.
        let mut places = run.0.demands.places.clone();
        assert!(!places.take(&Network::new(network)));
        places.free(&Network::new(network));
        assert!(places.take(&Network::new(network)) && !places.take(&Network::new(network)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_change_copies_little_of_what_is_remembered() {
    let mut run = Run::steered();
    let belief = |at: usize| DemandBelief {
        service: format!("s{at}.other"),
        network: "n".to_owned(),
        seen: vec![NumberBelief { weight: 5, at: Present::now().moment }],
        stands: 0,
        rises: Vec::new(),
        is_leaving: false,
        said_before: None,
    };
    run.0.demands = Demands::recalled((0..5_000).map(belief).collect(), Present::now());
    run.put(1, 30, 0);
    let before = run.0.demands.clone();
    run.put(2, 9, 0);
    let after = &run.0.demands;
    let kept = before
        .known
        .iter()
        .filter(|(name, known)| after.known.get(*name).is_some_and(|other| Arc::ptr_eq(known, other)));
    assert_eq!((kept.count(), after.known.len()), (5_000, 5_001), "shared");
    let changed = after.remembered.0.changed_since(&before.remembered.0, PartialEq::eq);
    assert_eq!(changed.len(), 1);
}
