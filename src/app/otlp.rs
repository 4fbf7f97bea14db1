//! Exports spans to a collector by OTLP over gRPC. The exporter takes spans from the queue as connections end, collects them
//! into batches, and sends each batch with a deadline and a limited number of attempts. It counts and drops spans that the
//! collector does not accept. While the collector is unreachable only the bounded queue fills, and no connection waits.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::time::Duration;

use http::Uri;
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTracePartialSuccess, ExportTraceServiceRequest,
};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tonic::{Code, Request};

use isthmus_model::address::Host;
use isthmus_net::channel::{CallFault, Channel};
use isthmus_net::dial::dial;
use isthmus_settings::policy::Node;
use isthmus_tasks::backoff::Backoff;
use isthmus_tasks::scope::Scope;
use isthmus_telemetry::spans::{Ended, Spans, TracingOptions};
use isthmus_wire::outline::{Outlined, Shape};

mod span;

/// The largest number of spans in one request.
const BATCH_MAX: usize = 512;
/// The time for which a batch that is not full collects spans.
const GATHER: Duration = Duration::from_secs(1);
/// The pause between two reads of the queue. The exporter polls the queue, so that data-plane threads need not wake it.
const REST: Duration = Duration::from_millis(50);
/// The deadline of one attempt, from the name look-up to the response.
const ATTEMPT: Duration = Duration::from_secs(5);
/// The number of attempts to send a batch, and the deadline for all of them together.
const ATTEMPTS: usize = 3;
const BATCH_TIMEOUT: Duration = Duration::from_secs(10);
/// The time that sending the last spans may take when the program stops.
const FINISH: Duration = Duration::from_secs(2);

const METHOD: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";

/// A handle to the task that sends spans.
pub(super) struct Exporter {
    spans: Spans,
    settings: watch::Sender<Settings>,
    task: Option<JoinHandle<()>>,
}

/// The settings of the task that sends spans.
#[derive(Clone, Default)]
struct Settings {
    /// The destination of the spans; `None`: spans are dropped.
    target: Option<Target>,
    /// True if the task should send the queued spans and end.
    finish: bool,
}

/// The collector, and the node that the spans describe.
#[derive(Clone)]
struct Target {
    collector: String,
    node: Node,
}

/// The response of a collector (`ExportTraceServiceResponse`).
#[derive(Clone, PartialEq, prost::Message)]
struct Answer {
    #[prost(message, optional, tag = "1")]
    partial_success: Option<ExportTracePartialSuccess>,
}

impl Outlined for Answer {
    fn shape() -> &'static Shape {
        &Shape(&[])
    }
}

/// The reason why a batch was not delivered.
#[derive(Debug, thiserror::Error)]
enum ExportFault {
    #[error("cannot connect: {0}")]
    Unreachable(io::Error),
    #[error("there was no answer within {} s", ATTEMPT.as_secs())]
    Late,
    #[error("{0}")]
    Call(#[from] CallFault),
}

impl ExportFault {
    /// Returns true if another attempt may succeed (OTLP §Failures).
    fn may_pass(&self) -> bool {
        match self {
            Self::Unreachable(_) | Self::Late | Self::Call(CallFault::Broken(_)) => true,
            Self::Call(CallFault::Answer(_)) => false,
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
    /// Starts the task; it sends nothing until it is configured.
    pub(super) fn start(spans: &Spans, scope: &Scope) -> Self {
        let (sender, settings) = watch::channel(Settings::default());
        let task = spans.queue().map(|queue| {
            let task = Task {
                spans: spans.clone(),
                queue,
                settings,
                open: None,
                scope: scope.clone(),
                failing: false,
            };
            scope.spawn(task.run())
        });
        Self { spans: spans.clone(), settings: sender, task }
    }

    pub(super) fn configure(&self, tracing: Option<&TracingOptions>, node: &Node) {
        let target = tracing.map(|tracing| Target { collector: tracing.otlp.clone(), node: node.clone() });
        self.settings.send_modify(|settings| settings.target = target);
        self.spans.choose(tracing.map(|tracing| tracing.sample));
    }

    /// Sends the queued spans within [`FINISH`], and ends the task.
    pub(super) async fn finish(self) {
        self.settings.send_modify(|settings| settings.finish = true);
        if let Some(task) = self.task {
            // Spans that have not been sent within this time are lost.
            let _ = timeout(FINISH, task).await;
        }
    }
}

struct Task {
    spans: Spans,
    queue: mpsc::Receiver<Ended>,
    settings: watch::Receiver<Settings>,
    /// The connection of the last batch, and the collector that it leads to.
    open: Option<(String, Channel)>,
    scope: Scope,
    /// True if the last batch was lost; only changes of this state are logged.
    failing: bool,
}

impl Task {
    async fn run(mut self) {
        loop {
            let batch = self.gather().await;
            if batch.is_empty() {
                return;
            }
            let target = self.settings.borrow().target.clone();
            let count = batch.len() as u64;
            match target {
                Some(target) => self.send(&target, &batch).await,
                None => self.spans.dropped(count),
            }
        }
    }

    /// Returns the next batch, or an empty one if the task should end.
    async fn gather(&mut self) -> Vec<Ended> {
        let mut batch = Vec::new();
        // Spans have priority, so the request to end is handled only when the queue is empty. Cancel safe: there is no `await`
        // after a span is received and before it is in the batch.
        tokio::select! {
            biased;
            first = self.queue.recv() => batch.extend(first),
            () = finish(&mut self.settings) => return batch,
        }
        let deadline = Instant::now() + GATHER;
        loop {
            while batch.len() < BATCH_MAX
                && let Ok(next) = self.queue.try_recv()
            {
                batch.push(next);
            }
            if batch.len() == BATCH_MAX || Instant::now() >= deadline || self.settings.borrow().finish {
                return batch;
            }
            // The order of the branches does not matter.
            tokio::select! {
                () = finish(&mut self.settings) => {}
                () = sleep(REST) => {}
            }
        }
    }

    async fn send(&mut self, target: &Target, batch: &[Ended]) {
        let request = span::request(&target.node, batch.iter().map(|ended| &ended.record));
        let count = batch.len() as u64;
        let delivered = timeout(BATCH_TIMEOUT, self.deliver(target, &request)).await;
        match delivered.unwrap_or(Err(ExportFault::Late)) {
            Ok(answer) => {
                let partial = answer.partial_success.unwrap_or_default();
                let refused = u64::try_from(partial.rejected_spans).unwrap_or_default().min(count);
                self.spans.sent(count - refused);
                self.spans.dropped(refused);
                if refused > 0 {
                    let why = partial.error_message.escape_debug().take(300).collect::<String>();
                    tracing::warn!(collector = target.collector, refused, why, "the collector refused spans");
                }
                if std::mem::replace(&mut self.failing, false) {
                    tracing::info!(collector = target.collector, "the collector accepts spans again");
                }
            }
            Err(fault) => {
                self.spans.dropped(count);
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::warn!(
                        collector = target.collector,
                        "spans are lost because the collector does not accept them: {fault}"
                    );
                }
            }
        }
    }

    async fn deliver(
        &mut self,
        target: &Target,
        request: &ExportTraceServiceRequest,
    ) -> Result<Answer, ExportFault> {
        let mut backoff = Backoff::default();
        let mut left = ATTEMPTS;
        loop {
            left -= 1;
            let result =
                timeout(ATTEMPT, self.attempt(target, request)).await.unwrap_or(Err(ExportFault::Late));
            let Err(fault) = result else { return result };
            if left == 0 || !fault.may_pass() {
                return Err(fault);
            }
            tracing::debug!(
                collector = target.collector,
                left,
                "the collector did not accept spans: {fault}"
            );
            sleep(backoff.wait(RandomState::new().hash_one(left))).await;
        }
    }

    async fn attempt(
        &mut self,
        target: &Target,
        request: &ExportTraceServiceRequest,
    ) -> Result<Answer, ExportFault> {
        // The connection is taken out while it is in use, so that a connection that fails or times out is not used again.
        let mut channel = match self.open.take() {
            Some((collector, channel)) if collector == target.collector => channel,
            _ => connect(&target.collector, &self.scope).await?,
        };
        let answer = channel.unary(METHOD, Request::new(request.clone())).await?;
        self.open = Some((target.collector.clone(), channel));
        Ok(answer)
    }
}

async fn connect(collector: &str, scope: &Scope) -> Result<Channel, ExportFault> {
    // The URL was checked when the config was read.
    let origin: Uri = collector.parse().unwrap_or_default();
    let host = Host::parse(origin.host().unwrap_or_default());
    let host = host.map_err(|error| ExportFault::Unreachable(io::Error::other(error)))?;
    let port = origin.port_u16().unwrap_or_default();
    let stream = dial(&host, port, &[]).await.map_err(ExportFault::Unreachable)?;
    Ok(Channel::open(stream, origin, scope).await?)
}

/// Waits until the task is requested to end.
async fn finish(settings: &mut watch::Receiver<Settings>) {
    // The sender is dropped only when the program ends.
    let _ = settings.wait_for(|settings| settings.finish).await;
}

#[cfg(test)]
mod tests;
