//! The telemetry of the gateway: metrics, the access log, the program's log, the latest failures, and spans.
//!
//! Other modules report typed events ([`local::Local`], [`control`]); only this module knows metric names and labels. Each
//! connection has one [`isthmus_model::record::ConnectionRecord`], which is finished once; all outputs are written from it.

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
