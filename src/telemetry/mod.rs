//! What the gateway says of itself: metrics, the access log, the program's log, the last failures, spans.
//!
//! Code elsewhere tells of typed events ([`local::Local`], [`control`]); only this module knows metric names and labels.
//! One [`crate::model::record::ConnectionRecord`] per connection is finished once, and every output is written from it.

pub mod access_log;
pub mod clock;
pub mod control;
pub mod discovery;
pub mod exposition;
pub mod failures;
pub mod local;
pub mod outlet;
pub mod process;
pub mod recorder;
pub mod spans;
pub mod writer;

use std::sync::Arc;

use access_log::GatewayName;
use arc_swap::ArcSwap;
use control::Control;
use failures::Failures;
use outlet::OpenLog;
use recorder::Recorder;
use spans::Spans;
use writer::Writer;

/// Everything that tells; shared by all threads.
#[derive(Clone)]
pub struct Telemetry {
    pub recorder: Arc<Recorder>,
    pub control: Arc<Control>,
    pub failures: Failures,
    pub writer: Writer,
    pub spans: Spans,
    /// This gateway as its access log names it; replaced by a reload.
    pub gateway: Arc<ArcSwap<GatewayName>>,
}

impl Telemetry {
    /// With its writer threads started.
    pub fn start(access_log: OpenLog) -> std::io::Result<Self> {
        let recorder = Arc::new(Recorder::default());
        let control = Arc::new(Control::new(&recorder));
        let failures = Failures::default();
        let gateway = Arc::new(ArcSwap::<GatewayName>::default());
        let writer = Writer::start(access_log, failures.clone(), gateway.clone(), &recorder)?;
        let spans = Spans::new(&recorder);
        Ok(Self { recorder, control, failures, writer, spans, gateway })
    }
}
