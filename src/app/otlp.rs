//! Spans to a collector, by OTLP over gRPC: taken from the queue as connections end, gathered, and sent with a deadline
//! and a few attempts. What the collector does not take is counted and forgotten: while it is away nothing but the bounded
//! queue fills, and no connection waits.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::time::Duration;

use http::Uri;
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tonic::{Code, Request};

use crate::net::backoff::Backoff;
use crate::net::channel::{CallFault, Channel};
use crate::net::scope::Scope;
use crate::snapshot::policy::Node;
use crate::telemetry::spans::{Ended, Spans, TracingOptions};

mod span;

/// Spans of one request.
const BATCH_MAX: usize = 512;
/// How long spans gather before they are sent, where there are fewer.
const GATHER: Duration = Duration::from_secs(1);
/// How long is rested between looks into the queue: workers then never have to wake anybody.
const REST: Duration = Duration::from_millis(50);
/// From the look-up of the name until the answer.
const ATTEMPT: Duration = Duration::from_secs(5);
/// How often a batch is sent that was not taken, and how long all of it may take.
const ATTEMPTS: usize = 3;
const BATCH_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the last spans may take when the program stops.
const FINISH: Duration = Duration::from_secs(2);

const METHOD: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";

/// The task that sends spans.
pub(super) struct Exporter {
    spans: Spans,
    orders: watch::Sender<Orders>,
    task: Option<JoinHandle<()>>,
}

/// What the task is told.
#[derive(Clone, Default)]
struct Orders {
    /// `None`: what there is still is dropped.
    to: Option<Target>,
    /// Whether it shall send what there is and end.
    finish: bool,
}

/// Where to, and who we are.
#[derive(Clone)]
struct Target {
    collector: String,
    node: Node,
}

/// Why a batch was not taken.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error("it cannot be reached: {0}")]
    Unreachable(io::Error),
    #[error("there was no answer within {} s", ATTEMPT.as_secs())]
    Late,
    #[error("{0}")]
    Call(#[from] CallFault),
}

impl Fault {
    /// Whether the same may be taken the next time (OTLP §Failures).
    fn may_pass(&self) -> bool {
        match self {
            Self::Unreachable(_) | Self::Late | Self::Call(CallFault::Broken(_)) => true,
            Self::Call(CallFault::Refused { code, .. }) => matches!(
                code,
                Code::Cancelled
                    | Code::DeadlineExceeded
                    | Code::ResourceExhausted
                    | Code::Aborted
                    | Code::OutOfRange
                    | Code::Unavailable
                    | Code::DataLoss
            ),
        }
    }
}

impl Exporter {
    /// Sends nothing until it is configured.
    pub(super) fn start(spans: &Spans, scope: &Scope) -> Self {
        let (orders, told) = watch::channel(Orders::default());
        let task = spans.queue().map(|queue| {
            let task =
                Task { spans: spans.clone(), queue, told, open: None, scope: scope.clone(), failing: false };
            scope.spawn(task.run())
        });
        Self { spans: spans.clone(), orders, task }
    }

    pub(super) fn configure(&self, tracing: Option<&TracingOptions>, node: &Node) {
        let to = tracing.map(|tracing| Target { collector: tracing.otlp.clone(), node: node.clone() });
        self.orders.send_modify(|orders| orders.to = to);
        self.spans.choose(tracing.map(|tracing| tracing.sample));
    }

    /// Sends what there is, if the collector takes it in time.
    pub(super) async fn finish(self) {
        self.orders.send_modify(|orders| orders.finish = true);
        if let Some(task) = self.task {
            // What it has not sent by then is lost with it.
            let _ = timeout(FINISH, task).await;
        }
    }
}

struct Task {
    spans: Spans,
    queue: mpsc::Receiver<Ended>,
    told: watch::Receiver<Orders>,
    /// The connection of the last batch, and whom it is to.
    open: Option<(String, Channel)>,
    scope: Scope,
    /// Whether the last batch was lost, so that only changes are logged.
    failing: bool,
}

impl Task {
    async fn run(mut self) {
        loop {
            let batch = self.gather().await;
            if batch.is_empty() {
                return;
            }
            let to = self.told.borrow().to.clone();
            let count = batch.len() as u64;
            match to {
                Some(to) => self.send(&to, &batch).await,
                None => self.spans.dropped(count),
            }
        }
    }

    /// The next spans; none when it shall end.
    async fn gather(&mut self) -> Vec<Ended> {
        let mut batch = Vec::new();
        // Spans first: the order to end holds once there are none. Nothing is lost where it is dropped: what was
        // received is in the batch.
        tokio::select! {
            biased;
            first = self.queue.recv() => batch.extend(first),
            () = finish(&mut self.told) => return batch,
        }
        let deadline = Instant::now() + GATHER;
        loop {
            while batch.len() < BATCH_MAX
                && let Ok(next) = self.queue.try_recv()
            {
                batch.push(next);
            }
            if batch.len() == BATCH_MAX || Instant::now() >= deadline || self.told.borrow().finish {
                return batch;
            }
            // Whichever is sooner.
            tokio::select! {
                () = finish(&mut self.told) => {}
                () = sleep(REST) => {}
            }
        }
    }

    async fn send(&mut self, to: &Target, batch: &[Ended]) {
        let request = span::request(&to.node, batch.iter().map(|ended| &ended.record));
        let count = batch.len() as u64;
        let delivered = timeout(BATCH_TIMEOUT, self.deliver(to, &request)).await;
        match delivered.unwrap_or(Err(Fault::Late)) {
            Ok(answer) => {
                let partial = answer.partial_success.unwrap_or_default();
                let refused = u64::try_from(partial.rejected_spans).unwrap_or_default().min(count);
                self.spans.sent(count - refused);
                self.spans.dropped(refused);
                if refused > 0 {
                    let why = partial.error_message.escape_debug().take(300).collect::<String>();
                    tracing::warn!(collector = to.collector, refused, why, "the collector refused spans");
                }
                if std::mem::replace(&mut self.failing, false) {
                    tracing::info!(collector = to.collector, "the collector takes spans again");
                }
            }
            Err(fault) => {
                self.spans.dropped(count);
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::warn!(
                        collector = to.collector,
                        "spans are lost, as the collector does not take them: {fault}"
                    );
                }
            }
        }
    }

    async fn deliver(
        &mut self,
        to: &Target,
        request: &ExportTraceServiceRequest,
    ) -> Result<ExportTraceServiceResponse, Fault> {
        let mut backoff = Backoff::default();
        let mut left = ATTEMPTS;
        loop {
            left -= 1;
            let result = timeout(ATTEMPT, self.attempt(to, request)).await.unwrap_or(Err(Fault::Late));
            let Err(fault) = result else { return result };
            if left == 0 || !fault.may_pass() {
                return Err(fault);
            }
            tracing::debug!(collector = to.collector, left, "spans were not taken: {fault}");
            sleep(backoff.wait(RandomState::new().hash_one(left))).await;
        }
    }

    async fn attempt(
        &mut self,
        to: &Target,
        request: &ExportTraceServiceRequest,
    ) -> Result<ExportTraceServiceResponse, Fault> {
        // Taken out while it is used: one that fails, or is not waited for, is not used again.
        let mut channel = match self.open.take() {
            Some((collector, channel)) if collector == to.collector => channel,
            _ => connect(&to.collector, &self.scope).await?,
        };
        let answer = channel.unary(METHOD, Request::new(request.clone())).await?;
        self.open = Some((to.collector.clone(), channel));
        Ok(answer)
    }
}

async fn connect(collector: &str, scope: &Scope) -> Result<Channel, Fault> {
    // It was checked when the config was read.
    let origin: Uri = collector.parse().unwrap_or_default();
    let host = origin.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
    let port = origin.port_u16().unwrap_or_default();
    let stream = TcpStream::connect((host, port)).await.map_err(Fault::Unreachable)?;
    stream.set_nodelay(true).map_err(Fault::Unreachable)?;
    Ok(Channel::open(stream, origin, scope).await?)
}

/// Waits for the order to end.
async fn finish(told: &mut watch::Receiver<Orders>) {
    // The other side is gone only when all is.
    let _ = told.wait_for(|orders| orders.finish).await;
}

#[cfg(test)]
mod tests;
