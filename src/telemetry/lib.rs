//! The telemetry of the gateway: metrics, the access log, the program's log, the latest failures, and spans.
//!
//! Other crates report typed events. Each connection has one [`isthmus_model::record::ConnectionRecord`], which is finished once; all
//! outputs are written from it. The names of metrics that are counted as they happen are here; those of metrics that are computed at a
//! scrape are in the files `*_metrics` of `isthmus-admin`.
//!
//! - `access_log`: the line of a connection; the list of its members is [`isthmus_api::connection::FIELDS`]. `failures`, `recent`,
//!   `spans`: other outputs of a record.
//! - `local`: metrics of a data-plane thread. `control`, `discovery`, `names`, `process`: metrics of the control plane, the xDS
//!   server, the DNS server, and the process. `recorder`: the store. `exposition`: the text format.
//! - `writer`, `outlet`: threads that write logs. `clock`: the order of events.

pub mod access_log;
pub mod clock;
pub mod control;
pub mod discovery;
pub mod exposition;
pub mod failures;
pub mod local;
pub mod names;
pub mod outlet;
pub mod process;
pub mod recent;
pub mod recorder;
pub mod spans;
pub mod writer;

use std::sync::Arc;

use arc_swap::ArcSwap;
use control::Control;
use failures::Failures;
use isthmus_model::record::GatewayName;
use outlet::OpenLog;
use recent::Recent;
use recorder::Recorder;
use spans::Spans;
use writer::Writer;

/// All parts of the telemetry; shared by all threads.
#[derive(Clone)]
pub struct Telemetry {
    /// The store of metrics.
    pub recorder: Arc<Recorder>,
    /// The metrics of the control plane.
    pub control: Arc<Control>,
    /// The latest failures.
    pub failures: Failures,
    /// The latest connections, by trace.
    pub recent: Recent,
    /// The queues of the logs.
    pub writer: Writer,
    /// The queue of connections that become spans.
    pub spans: Spans,
    /// The names of this gateway in its access log; a reload replaces them.
    pub gateway: Arc<ArcSwap<GatewayName>>,
}

impl Telemetry {
    /// Starts the writer threads. Returns an error if a thread cannot be started.
    pub fn start(access_log: OpenLog) -> std::io::Result<Self> {
        let recorder = Arc::new(Recorder::default());
        let control = Arc::new(Control::new(&recorder));
        let (failures, recent) = (Failures::default(), Recent::default());
        let gateway = Arc::new(ArcSwap::<GatewayName>::default());
        let writer =
            Writer::start(access_log, (failures.clone(), recent.clone()), gateway.clone(), &recorder)?;
        let spans = Spans::new(&recorder);
        Ok(Self { recorder, control, failures, recent, writer, spans, gateway })
    }
}
