//! Metrics of the DNS server.

use metrics::{Counter, Gauge};

use super::recorder::Recorder;

/// The response codes that have their own label, by number.
const CODES: [&str; 6] = ["NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED"];
/// The label of all other response codes.
const OTHER: &str = "other";

/// The reason why a query got no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unanswered {
    /// The message was not a query.
    NoQuery,
    /// The source of the query has exceeded its rate of answers.
    Rate,
    /// The socket's send buffer was full.
    Send,
}

impl Unanswered {
    /// All values.
    const ALL: [Self; 3] = [Self::NoQuery, Self::Rate, Self::Send];

    const fn text(self) -> &'static str {
        match self {
            Self::NoQuery => "no_query",
            Self::Rate => "rate",
            Self::Send => "send",
        }
    }
}

/// The result of forwarding a query to another server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forwarded {
    /// The other server answered.
    Answered,
    /// No server answered in time.
    Failed,
    /// The query gave way, because too many queries wait for answers and its source has the most of them.
    Refused,
}

impl Forwarded {
    /// All values.
    const ALL: [Self; 3] = [Self::Answered, Self::Failed, Self::Refused];

    const fn text(self) -> &'static str {
        match self {
            Self::Answered => "answered",
            Self::Failed => "failed",
            Self::Refused => "refused",
        }
    }
}

/// The handles of the DNS server's metrics.
pub struct NameMetrics {
    queries: Vec<Counter>,
    other: Counter,
    unanswered: Vec<Counter>,
    forwarded: Vec<Counter>,
    services: Gauge,
}

impl NameMetrics {
    /// Creates the handles.
    pub fn new(recorder: &Recorder) -> Self {
        let queries = |code| recorder.counter("isthmus_dns_queries_total", &[("rcode", code)]);
        let unanswered =
            |why: Unanswered| recorder.counter("isthmus_dns_unanswered_total", &[("reason", why.text())]);
        let forwarded =
            |result: Forwarded| recorder.counter("isthmus_dns_forwarded_total", &[("result", result.text())]);
        Self {
            queries: CODES.map(queries).into(),
            other: queries(OTHER),
            unanswered: Unanswered::ALL.map(unanswered).into(),
            forwarded: Forwarded::ALL.map(forwarded).into(),
            services: recorder.gauge("isthmus_dns_services", &[]),
        }
    }

    /// Counts an answer by the number of its response code.
    pub fn answered(&self, code: u16) {
        self.queries.get(usize::from(code)).unwrap_or(&self.other).increment(1);
    }

    /// Counts a query without an answer.
    pub fn unanswered(&self, why: Unanswered) {
        let at = Unanswered::ALL.iter().position(|one| *one == why);
        at.and_then(|at| self.unanswered.get(at)).inspect(|counter| counter.increment(1));
    }

    /// Counts a query forwarded to another server.
    pub fn forwarded(&self, result: Forwarded) {
        let at = Forwarded::ALL.iter().position(|one| *one == result);
        at.and_then(|at| self.forwarded.get(at)).inspect(|counter| counter.increment(1));
    }

    /// Sets the number of services that the DNS server answers for.
    pub fn services(&self, count: usize) {
        self.services.set(count as f64);
    }
}
