//! The certificate of this gateway's own workload and the roots that it trusts: [`NodeContext`] for readers, and
//! [`CertificateRotation`], which renews both.

use std::sync::Arc;
use std::time::SystemTime;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::certificate::Certificate;
use super::roots::RootStore;
use super::source::{Options, Sink, Source};
use super::status::SourceStatus;
use super::trust::TrustBundles;
use super::{announced, files, istio_ca, workload_api};
use isthmus_files::watch::FileWatch;
use isthmus_tasks::latest::{Latest, LatestWriter};
use isthmus_tasks::scope::Scope;
use isthmus_telemetry::Telemetry;
use isthmus_telemetry::control::CertificateKind;

/// Handles to this gateway's certificate and to the trusted roots.
#[derive(Clone, Debug)]
pub struct NodeContext {
    /// The certificate in use.
    pub certificate: Latest<Certificate>,
    /// The trusted roots of each trust domain.
    pub trust: Latest<TrustBundles>,
}

impl NodeContext {
    /// Updates the metrics of the time until certificates and roots expire.
    pub fn report_expiry(&self, telemetry: &Telemetry) {
        if let Some(certificate) = self.certificate.newest() {
            let left = seconds_until(certificate.validity.not_after);
            telemetry.control.certificate_expires(
                &telemetry.recorder,
                CertificateKind::Workload,
                certificate.identity.trust_domain(),
                left,
            );
        }
        let trust: Option<Arc<TrustBundles>> = self.trust.newest();
        for (domain, bundle) in trust.iter().flat_map(|trust| trust.domains()) {
            if let Some(not_after) = bundle.not_after {
                let left = seconds_until(not_after);
                let (recorder, domain) = (&telemetry.recorder, domain.as_str());
                telemetry.control.certificate_expires(recorder, CertificateKind::Roots, domain, left);
            }
        }
    }
}

/// Renews the certificate and the roots from the configured sources.
pub struct CertificateRotation {
    certificate: LatestWriter<Certificate>,
    store: RootStore,
    scope: Scope,
    options: Option<Options>,
    tasks: Vec<JoinHandle<()>>,
}

impl CertificateRotation {
    /// Starts without sources; tasks run in `scope`.
    pub fn start(scope: &Scope) -> Self {
        Self {
            certificate: LatestWriter::default(),
            store: RootStore::default(),
            scope: scope.clone(),
            options: None,
            tasks: Vec::new(),
        }
    }

    /// Returns handles to the certificate and the roots.
    pub fn context(&self) -> NodeContext {
        NodeContext { certificate: self.certificate.reader(), trust: self.store.reader() }
    }

    /// Returns a receiver of the sources' status.
    pub fn status(&self) -> watch::Receiver<SourceStatus> {
        self.store.status.subscribe()
    }

    /// Returns the store of all roots. Links add the roots that peers announce.
    pub fn roots(&self) -> RootStore {
        self.store.clone()
    }

    /// Replaces the sources. Files are read before the call returns. The certificate and roots of the old
    /// sources stay in use until the new ones provide some.
    pub async fn configure(&mut self, options: Options) {
        if self.options.as_ref() == Some(&options) {
            return;
        }
        for task in self.tasks.drain(..) {
            task.abort();
            // Waits for the task's end, so that the old source does not report after the new one.
            let _ = task.await;
        }
        let mut sink = self.sink(&options);
        sink.configuration += 1;
        self.store.status.send_modify(|status| {
            status.source = options.source.as_ref().map_or("", Source::text);
            status.next = None;
            status.problems.clear();
        });
        let brings_trust = options.source.as_ref().is_some_and(Source::brings_trust);
        let withdrawn = self.store.roots.send_if_modified(|roots| {
            let before = roots.supplied.len();
            roots.supplied.retain(|domain, _| brings_trust && !sink.configured.contains(domain));
            let peers_differ = roots.peers != options.peers;
            roots.set_peers(&options.peers);
            roots.configurations = sink.configuration;
            roots.supplied.len() != before || peers_differ
        });
        // The watch records the state of the files before they are read, so that it notices a change during the read.
        let mut watch = FileWatch::new(files::paths(&options));
        watch.refresh().await;
        let files = files::Reader::new(options.clone(), sink.clone());
        files.read().await;
        if withdrawn {
            sink.store.publish();
        }
        if let Some(state) = &options.state {
            announced::restore(&self.store, state).await;
            self.begin(announced::keep(self.store.clone(), state.clone()));
        }
        self.begin(files.run(watch));
        self.begin(sink.clone().apply_waiting());
        match (&options.source, &options.expected) {
            (Some(Source::IstioCa(authority)), Some(identity)) => {
                self.begin(istio_ca::run(authority.clone(), identity.clone(), sink, self.scope.clone()));
            }
            (Some(Source::WorkloadApi { socket }), _) => {
                self.begin(workload_api::run(socket.clone(), sink, self.scope.clone()));
            }
            // Files were read above. Without an expected identity, no certificate can be requested from the authority.
            (Some(Source::Files { .. } | Source::IstioCa(_)) | None, _) => {}
        }
        self.options = Some(options);
    }

    /// Returns a sink for the sources of these options.
    fn sink(&self, options: &Options) -> Sink {
        Sink {
            certificate: self.certificate.clone(),
            waiting: watch::Sender::default(),
            status: self.store.status.clone(),
            expected: options.expected.clone(),
            configured: files::files_of(options).map(|(domain, _)| domain.clone()).collect(),
            store: self.store.clone(),
            configuration: self.store.roots.borrow().configurations,
        }
    }

    /// Starts a task that ends when the options change.
    fn begin(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.push(self.scope.spawn(task));
    }
}

impl Source {
    /// Returns the source's name in status and logs.
    pub fn text(&self) -> &'static str {
        match self {
            Self::Files { .. } => "files",
            Self::IstioCa(_) => "istioCa",
            Self::WorkloadApi { .. } => "workloadApi",
        }
    }

    /// Returns true if the source provides roots too, so that the config need not name any.
    pub fn brings_trust(&self) -> bool {
        match self {
            Self::Files { .. } => false,
            Self::IstioCa(_) | Self::WorkloadApi { .. } => true,
        }
    }
}

/// Returns the seconds until a time; negative if it has passed.
fn seconds_until(time: SystemTime) -> f64 {
    match time.duration_since(SystemTime::now()) {
        Ok(left) => left.as_secs_f64(),
        Err(passed) => -passed.duration().as_secs_f64(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use super::*;
    use crate::development::Authority;
    use crate::source::TrustFile;
    use isthmus_model::identity::TrustDomain;

    #[tokio::test]
    async fn files_that_change_just_after_they_were_read_are_read_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let roots = folder.path().join("roots.pem");
        let domain = || TrustDomain::parse("mesh").expect("legal");
        let write = |path: &Path, many: usize| {
            let all = (0..many).map(|_| Authority::new(domain()).expect("made").certificate_pem().to_owned());
            std::fs::write(path, all.collect::<String>()).expect("written");
        };
        write(&roots, 1);
        let trust = vec![TrustFile { trust_domain: domain(), roots: Some(roots.clone()), crl: None }];
        let scope = Scope::default();
        let mut keeper = CertificateRotation::start(&scope);
        keeper.configure(Options { trust, ..Options::default() }).await;
        // The runtime has one thread, so the task that watches the files has not run since they were read.
        write(&roots, 2);
        let mut changed = keeper.context().trust;
        changed.see();
        tokio::time::timeout(Duration::from_secs(10), changed.changed()).await.expect("read again");
    }

    #[tokio::test]
    async fn files_of_a_former_config_that_are_read_late_are_not_applied() {
        let folder = tempfile::tempdir().expect("a folder");
        let options = |name: &str| {
            let domain = TrustDomain::parse(name).expect("legal");
            let authority = Authority::new(domain.clone()).expect("made");
            let roots = folder.path().join(name);
            std::fs::write(&roots, authority.certificate_pem()).expect("written");
            let trust = vec![TrustFile { trust_domain: domain, roots: Some(roots), crl: None }];
            Options { trust, ..Options::default() }
        };
        let (former, next) = (options("former.mesh"), options("next.mesh"));
        let mut rotation = CertificateRotation::start(&Scope::default());
        rotation.configure(former.clone()).await;
        let late = rotation.sink(&former);
        rotation.configure(next.clone()).await;
        files::take_all(&former, &late);
        let trust = rotation.context().trust.newest().expect("published");
        let domains: Vec<&str> = trust.domains().map(|(domain, _)| domain.as_str()).collect();
        assert_eq!(domains, ["next.mesh"]);
    }
}
