//! The metrics of the times of endpoints (`docs/api.md, "Admin API"`), computed at each scrape from the state that `get
//! endpoints` shows too.

use std::cmp::Reverse;
use std::time::Duration;

use super::scraped::Scraped;
use isthmus_dataplane::endpoint_state::{EndpointState, Percentiles};
use isthmus_dataplane::upstreams::Upstreams;
use isthmus_snapshot::candidates::EndpointKey;
use isthmus_telemetry::exposition::{Exposition, Kind};

/// The largest number of endpoints with series. An endpoint has four: the median and the 99th percentile of two times.
const ENDPOINTS_MAX: usize = 100;

/// A metric, its `# HELP` text, and the times that it has.
type Metric = (&'static str, &'static str, fn(&EndpointState) -> Option<Percentiles>);

const TIMES: [Metric; 2] = [
    (DESCRIPTIONS[0].0, DESCRIPTIONS[0].1, |state| state.answer),
    (DESCRIPTIONS[1].0, DESCRIPTIONS[1].1, |state| state.connect),
];

/// The names and `# HELP` texts of the metrics.
const DESCRIPTIONS: [(&str, &str); 2] = [
    (
        "isthmus_endpoint_answer_seconds",
        "Longest waits of recent connections for a byte of the endpoint, by service port or route, endpoint and quantile (0.5 and \
         0.99), of the 100 endpoints with the longest ones.",
    ),
    (
        "isthmus_endpoint_connect_seconds",
        "Recent times until an endpoint accepted a connection, by service port or route, endpoint and quantile (0.5 and 0.99), of the \
         same endpoints as isthmus_endpoint_answer_seconds.",
    ),
];

/// The times of the slowest endpoints.
pub(super) const METRICS: Scraped = Scraped {
    descriptions: &DESCRIPTIONS,
    expose: |sources, exposition| expose(sources.dataplane.upstreams(), exposition),
};

fn expose(upstreams: &Upstreams, exposition: &mut Exposition) {
    let mut keys = Vec::new();
    upstreams.visit(|key, _| keys.push(key.clone()));
    let states = keys.into_iter().filter_map(|key| upstreams.state(&key).map(|state| (key, state)));
    for (key, state) in slowest(states.collect(), ENDPOINTS_MAX) {
        let address = key.address.to_string();
        for (metric, help, times) in TIMES {
            let Some(times) = times(&state) else { continue };
            let family = exposition.family(metric, Kind::Gauge, help);
            for (quantile, time) in [("0.5", times.p50), ("0.99", times.p99)] {
                let labels = [("service", &*key.group), ("endpoint", &address), ("quantile", quantile)];
                family.add(labels, time.as_secs_f64());
            }
        }
    }
}

/// Returns the endpoints that have times, at most `most`: those with the longest 99th percentile of an answer come first, then those
/// with the longest one of a connect.
fn slowest(mut states: Vec<(EndpointKey, EndpointState)>, most: usize) -> Vec<(EndpointKey, EndpointState)> {
    let p99 = |times: Option<Percentiles>| times.map_or(Duration::ZERO, |times| times.p99);
    states.retain(|(_, state)| state.connect.is_some() || state.answer.is_some());
    states.sort_by_cached_key(|(key, state)| (Reverse((p99(state.answer), p99(state.connect))), key.clone()));
    states.truncate(most);
    states
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_endpoints_have_times() {
        let times = |milliseconds| {
            let time = Duration::from_millis(milliseconds);
            Some(Percentiles { p50: time / 2, p99: time })
        };
        let endpoint = |port: u16, answer, connect| {
            let key = EndpointKey { group: "a.mesh:443".into(), address: ([10, 0, 0, 1], port).into() };
            (key, EndpointState { answer, connect, ..EndpointState::default() })
        };
        let states = vec![
            endpoint(1, times(5), times(1)),
            endpoint(2, None, None),
            endpoint(3, None, times(9)),
            endpoint(4, times(7), times(1)),
            endpoint(5, times(5), times(2)),
        ];
        let ports = |most| {
            let found = slowest(states.clone(), most);
            found.iter().map(|(key, _)| key.address.port()).collect::<Vec<_>>()
        };
        assert_eq!(ports(10), [4, 5, 1, 3]);
        assert_eq!(ports(2), [4, 5]);
    }
}
