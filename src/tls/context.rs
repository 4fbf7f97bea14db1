//! This gateway's own workload as a context: narrow handles to its certificate and to the roots it trusts, and the one
//! owner that keeps both fresh.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::certificate::Certificate;
use super::files;
use super::server::provider;
use super::source::{Options, Roots, Sink, Source, SourceStatus};
use super::trust::TrustBundles;
use crate::net::fetch::{Fetch, Slot};
use crate::net::scope::Scope;
use crate::telemetry::Telemetry;
use crate::telemetry::control::CertificateKind;

/// How often the metrics are told how long certificates are still valid.
const TELL_EVERY: Duration = Duration::from_secs(5);

/// Handles to who we are and whom we trust.
#[derive(Clone, Debug)]
pub struct NodeContext {
    pub certificate: Fetch<Certificate>,
    pub trust: Fetch<TrustBundles>,
}

/// Keeps certificate and roots fresh, from wherever they come.
pub struct Keeper {
    certificate: Slot<Certificate>,
    trust: Slot<TrustBundles>,
    status: watch::Sender<SourceStatus>,
    roots: watch::Sender<Roots>,
    scope: Scope,
    options: Option<Options>,
    tasks: Vec<AbortHandle>,
}

impl Keeper {
    pub fn start(telemetry: &Telemetry, scope: &Scope) -> Self {
        let keeper = Self {
            certificate: Slot::default(),
            trust: Slot::default(),
            status: watch::Sender::new(SourceStatus::default()),
            roots: watch::Sender::new(Roots::default()),
            scope: scope.clone(),
            options: None,
            tasks: Vec::new(),
        };
        scope.spawn(tell(keeper.context(), telemetry.clone()));
        keeper
    }

    pub fn context(&self) -> NodeContext {
        NodeContext { certificate: self.certificate.fetch(), trust: self.trust.fetch() }
    }

    pub fn status(&self) -> watch::Receiver<SourceStatus> {
        self.status.subscribe()
    }

    /// Goes over to other sources. Files are read before it returns; what the sources before gave stays in use until
    /// the new ones have given something.
    pub async fn configure(&mut self, options: Options) {
        if self.options.as_ref() == Some(&options) {
            return;
        }
        for task in self.tasks.drain(..) {
            task.abort();
        }
        let sink = Sink {
            certificate: self.certificate.clone(),
            trust: self.trust.clone(),
            status: self.status.clone(),
            expected: options.expected.clone(),
            roots: self.roots.clone(),
            provider: provider(),
        };
        self.status.send_modify(|status| {
            status.source = options.source.as_ref().map_or("", Source::text);
            status.next = None;
            status.problems.clear();
        });
        if !matches!(options.source, Some(Source::WorkloadApi { .. })) {
            self.roots.send_modify(|roots| roots.supplied.clear());
        }
        let (first, at) = (options.clone(), sink.clone());
        // Only a panic ends it early; the files are read again when they change.
        let _ = tokio::task::spawn_blocking(move || files::take_all(&first, &at)).await;
        self.tasks.push(self.scope.spawn(files::run(options.clone(), sink.clone())).abort_handle());
        self.options = Some(options);
    }
}

impl Source {
    pub fn text(&self) -> &'static str {
        match self {
            Self::Files { .. } => "files",
            Self::IstioCa(_) => "istioCa",
            Self::WorkloadApi { .. } => "workloadApi",
        }
    }
}

/// Tells the metrics how long certificates are still valid.
async fn tell(mut context: NodeContext, telemetry: Telemetry) {
    let mut every = tokio::time::interval(TELL_EVERY);
    loop {
        // Either is a reason to look.
        tokio::select! {
            _ = every.tick() => {}
            _ = context.certificate.changed() => {}
        }
        if let Some(certificate) = context.certificate.newest() {
            let left = seconds_until(certificate.validity.not_after);
            telemetry.control.certificate_expires(
                &telemetry.recorder,
                CertificateKind::Workload,
                certificate.identity.trust_domain(),
                left,
            );
        }
        let trust: Option<Arc<TrustBundles>> = context.trust.newest();
        for (domain, bundle) in trust.iter().flat_map(|trust| trust.domains()) {
            if let Some(not_after) = bundle.not_after {
                let left = seconds_until(not_after);
                let (recorder, domain) = (&telemetry.recorder, domain.as_str());
                telemetry.control.certificate_expires(recorder, CertificateKind::Roots, domain, left);
            }
        }
    }
}

/// Negative once the time has passed.
fn seconds_until(time: SystemTime) -> f64 {
    match time.duration_since(SystemTime::now()) {
        Ok(left) => left.as_secs_f64(),
        Err(passed) => -passed.duration().as_secs_f64(),
    }
}
