//! `/api/v1/certificates`: the certificate of this gateway and the trusted roots, with their validity.

use std::time::SystemTime;

use tokio::sync::watch;

use super::problems::Problem;
use super::problems::code::Code;
use super::readiness::Gate;
use isthmus_api::certificate::Certificate;
use isthmus_api::status::IdentitySource;
use isthmus_config::Config;
use isthmus_telemetry::clock::rfc3339;
use isthmus_tls::context::NodeContext;
use isthmus_tls::files;
use isthmus_tls::status::{CERTIFICATE, SourceStatus, trust_of};

/// Reads the files of the certificate and the roots, and returns what is wrong with them, each with its position in the config.
/// Blocks.
pub fn file_problems(config: &Config) -> Vec<String> {
    let places = &config.identity_places;
    let place = |of: String| {
        let trust = places.trust.iter().find(|(domain, _)| trust_of(domain) == of).map(|(_, place)| place);
        let own = places.certificate.as_ref().filter(|_| of == CERTIFICATE);
        own.or(trust).cloned().unwrap_or(of)
    };
    let problems = files::problems(&config.identity).into_iter();
    problems.map(|(of, problem)| format!("{}: {problem}", place(of))).collect()
}

/// Handles to the gateway's certificate, the trusted roots, and the state of their source.
#[derive(Clone)]
pub struct Identities {
    /// The gateway's certificate and the trusted roots.
    pub context: NodeContext,
    /// The status of the certificate source.
    pub status: watch::Receiver<SourceStatus>,
}

impl Identities {
    /// Returns the readiness gate, which is closed until there is a valid certificate. `None` if the config names no source.
    pub fn gate(&self) -> Option<Gate> {
        let status = self.status.borrow();
        if status.source.is_empty() {
            return None;
        }
        let first = || status.problems.values().next().cloned();
        let closed = match self.context.certificate.newest() {
            None => Some(first().unwrap_or_else(|| "no certificate has been received yet".to_owned())),
            Some(own) => own.validity.fault(SystemTime::now()).map(|fault| {
                let why = first().map_or(String::new(), |why| format!("; {why}"));
                format!("the certificate {fault}{why}")
            }),
        };
        Some(Gate { name: "identity".to_owned(), closed })
    }

    /// Returns the problems of the gateway's own certificate and of its trust bundles.
    pub(super) fn problems(&self, now: SystemTime) -> Vec<Problem> {
        let status = self.status.borrow();
        let mut all = Vec::new();
        let mut problem =
            |code, about: &str, text: String| all.push(Problem { code, about: about.to_owned(), text });
        match self.context.certificate.newest() {
            None if status.source.is_empty() => {}
            None => problem(
                Code::CertificateMissing,
                status.source,
                format!("{} has not provided a certificate yet", status.source),
            ),
            Some(own) => {
                let (identity, until) = (own.identity.as_str(), rfc3339(own.validity.not_after));
                if let Some(fault) = own.validity.fault(now) {
                    let text = format!("the certificate of {identity} {fault}");
                    problem(Code::CertificateExpired, identity, text);
                } else if own.validity.is_near_its_end(now) {
                    let text = format!(
                        "the certificate of {identity} expires at {until} and has not been renewed yet"
                    );
                    problem(Code::CertificateExpiring, identity, text);
                }
            }
        }
        for (of, why) in &status.problems {
            problem(Code::CertificateSource, of, format!("{of}: {why}"));
        }
        let trust = self.context.trust.newest();
        for (domain, bundle) in trust.iter().flat_map(|trust| trust.domains()) {
            if let Some(until) = bundle.not_after.filter(|until| *until <= now) {
                let text = format!(
                    "the last root certificate of the trust domain {domain} expired at {}",
                    rfc3339(until)
                );
                problem(Code::RootsExpired, domain.as_str(), text);
            }
        }
        all
    }

    /// Returns the status of the certificate source; `None` if there is neither a source nor a problem.
    pub fn source(&self) -> Option<IdentitySource> {
        let status = self.status.borrow();
        if status.source.is_empty() && status.problems.is_empty() {
            return None;
        }
        Some(IdentitySource {
            source: status.source.to_owned(),
            renewed: status.renewed.map(rfc3339),
            next: status.next.map(rfc3339),
            problems: status.problems.clone(),
        })
    }

    /// Returns the gateway's own certificate and the roots of each trust domain.
    pub fn certificates(&self) -> Vec<Certificate> {
        let now = SystemTime::now();
        let own = self.context.certificate.newest();
        let own = own.iter().map(|certificate| {
            let validity = &certificate.validity;
            let state = if validity.is_early(now) {
                "not valid yet"
            } else if validity.is_near_its_end(now) {
                "expiring"
            } else {
                state(validity.not_after, now)
            };
            Certificate {
                kind: "workload".to_owned(),
                trust_domain: certificate.identity.trust_domain().to_string(),
                identity: Some(certificate.identity.to_string()),
                serial: Some(certificate.serial.clone()),
                not_before: Some(rfc3339(validity.not_before)),
                not_after: Some(rfc3339(validity.not_after)),
                state: state.to_owned(),
                count: None,
            }
        });
        let trust = self.context.trust.newest();
        let roots = trust.iter().flat_map(|trust| trust.domains()).map(|(domain, bundle)| Certificate {
            kind: "roots".to_owned(),
            trust_domain: domain.to_string(),
            count: Some(bundle.roots.len()),
            not_after: bundle.not_after.map(rfc3339),
            state: bundle.not_after.map_or("valid", |not_after| state(not_after, now)).to_owned(),
            ..Certificate::default()
        });
        own.chain(roots).collect()
    }
}

fn state(not_after: SystemTime, now: SystemTime) -> &'static str {
    if not_after > now { "valid" } else { "expired" }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use isthmus_model::identity::TrustDomain;
    use isthmus_tasks::latest::LatestWriter;
    use isthmus_tls::certificate::Certificate as Own;
    use isthmus_tls::development::Authority;
    use isthmus_tls::server::provider;

    #[test]
    fn a_certificate_that_is_not_valid_yet_is_a_problem_and_the_gateway_is_not_ready() {
        let authority = Authority::new(TrustDomain::parse("td").expect("legal")).expect("a CA");
        let identity = authority.identity("a", "b").expect("legal");
        let issued = authority.issue(&identity, &[], 1).expect("issued");
        let (chain, key) = (issued.certificate_pem.as_bytes(), issued.key_pem.as_bytes());
        let mut own = Own::from_pem(chain, key, &provider()).expect("usable");
        let now = SystemTime::now();
        own.validity.not_before = now + Duration::from_secs(3_600);
        let from = rfc3339(own.validity.not_before);
        let certificate = LatestWriter::default();
        certificate.set(Arc::new(own));
        let status = SourceStatus { source: "files", ..SourceStatus::default() };
        let identities = Identities {
            context: NodeContext {
                certificate: certificate.reader(),
                trust: LatestWriter::default().reader(),
            },
            status: watch::Sender::new(status).subscribe(),
        };
        let closed = identities.gate().and_then(|gate| gate.closed);
        assert_eq!(closed, Some(format!("the certificate is not valid before {from}")));
        let [problem] = &identities.problems(now)[..] else { panic!("one") };
        assert_eq!(problem.code, Code::CertificateExpired);
        assert_eq!(problem.text, format!("the certificate of {identity} is not valid before {from}"));
        assert_eq!(identities.certificates()[0].state, "not valid yet");
    }
}
