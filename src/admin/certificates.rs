//! The certificate of this gateway and the trusted roots, with their validity.

use std::sync::Arc;
use std::time::SystemTime;

use tokio::sync::watch;

use super::problems::Problem;
use super::problems::code::Code;
use super::readiness::Gate;
use super::routes::Routes;
use isthmus_api::certificate::Certificate;
use isthmus_api::requests;
use isthmus_api::status::IdentitySource;
use isthmus_config::Config;
use isthmus_model::identity::TrustDomain;
use isthmus_telemetry::clock::rfc3339;
use isthmus_tls::certificate::pem;
use isthmus_tls::context::NodeContext;
use isthmus_tls::files;
use isthmus_tls::status::{CERTIFICATE, SourceStatus, crl_of, domain_of, trust_of};
use isthmus_tls::trust::{Bundle, Owner};

pub(crate) fn answers(routes: Routes) -> Routes {
    routes.value(&requests::CERTIFICATES, |sources| sources.identities.certificates())
}

/// Reads the files of the certificate and the roots, and returns what is wrong with them, each with its position in the config.
/// Blocks.
pub fn file_problems(config: &Config) -> Vec<String> {
    let places = &config.identity_places;
    let place = |of: String| {
        let trust = places.trust.iter().find(|(domain, _)| trust_of(domain) == of).map(|(_, place)| place);
        let crl = places.crl.iter().find(|(domain, _)| crl_of(domain) == of).map(|(_, place)| place);
        let own = places.certificate.as_ref().filter(|_| of == CERTIFICATE);
        own.or(trust).or(crl).cloned().unwrap_or(of)
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

    /// Returns the readiness gate of the trusted roots. It is closed while the roots of a trust domain of the config cannot be used
    /// and no earlier ones are in use, and while an HBONE listener, if there is one, has no roots that are valid. Roots that a peer
    /// has not announced yet do not close it. `None`: no roots are needed.
    pub fn trust_gate(&self, takes_hbone: bool, now: SystemTime) -> Option<Gate> {
        let trust = self.context.trust.newest();
        let bundles: Vec<(_, &Arc<Bundle>)> = trust.iter().flat_map(|trust| trust.domains()).collect();
        let status = self.status.borrow();
        if !takes_hbone && bundles.is_empty() && status.problems.is_empty() {
            return None;
        }
        let is_out_of_use =
            |of: &str| domain_of(of).is_some_and(|domain| bundles.iter().all(|(known, _)| **known != domain));
        let problems = status.problems.iter().filter(|(of, _)| is_out_of_use(of));
        let mut closed: Vec<String> = problems.map(|(of, why)| format!("{of}: {why}")).collect();
        // The roots of peers alone are enough only where this mesh has none.
        let has_own = bundles.iter().any(|(_, bundle)| bundle.owner == Owner::Ours);
        let verify_callers = bundles.iter().filter(|(_, bundle)| !has_own || bundle.owner == Owner::Ours);
        let expired: Vec<_> =
            verify_callers.map(|(_, bundle)| bundle.not_after.filter(|until| *until <= now)).collect();
        if takes_hbone && closed.is_empty() && expired.iter().all(Option::is_some) {
            closed.push(match expired.into_iter().flatten().max() {
                Some(until) => format!(
                    "HBONE callers cannot be verified: the last root certificate expired at {}",
                    rfc3339(until)
                ),
                None => {
                    "HBONE callers cannot be verified: no root certificates have been read or received yet"
                        .to_owned()
                }
            });
        }
        Some(Gate { name: "trust".to_owned(), closed: (!closed.is_empty()).then(|| closed.join("; ")) })
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
                format!("{} gave no certificate yet", status.source),
            ),
            Some(own) => {
                let (identity, until) = (own.identity.as_str(), rfc3339(own.validity.not_after));
                if let Some(fault) = own.validity.fault(now) {
                    let text = format!("the certificate of {identity} {fault}");
                    let code = match own.validity.is_early(now) {
                        true => Code::CertificateNotYetValid,
                        false => Code::CertificateExpired,
                    };
                    problem(code, identity, text);
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
        for (peer, file) in &status.unfiled {
            let text = format!(
                "the peer {peer} announced a root that {} does not have, so a replica that starts without this one's state refuses \
                 the peer: write what `isthmus peer roots {peer}` prints into the file",
                file.display()
            );
            problem(Code::PeerRootNotInFile, peer, text);
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

    /// Returns the roots in use of a trust domain as PEM; empty without any.
    pub(super) fn roots_of(&self, domain: &TrustDomain) -> String {
        let trust = self.context.trust.newest();
        trust.and_then(|trust| trust.roots_of(domain).map(pem)).unwrap_or_default()
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
    use std::collections::BTreeMap;
    use std::time::Duration;

    use super::*;
    use isthmus_model::identity::TrustDomain;
    use isthmus_tasks::latest::LatestWriter;
    use isthmus_tls::certificate::{Certificate as Own, certificates};
    use isthmus_tls::development::Authority;
    use isthmus_tls::roots::RootStore;
    use isthmus_tls::server::provider;

    #[test]
    fn a_gateway_without_usable_roots_is_not_ready() {
        let domain = TrustDomain::parse("td").expect("legal");
        let problem = ("trust of td".to_owned(), "roots.pem: no such file".to_owned());
        let gate = |store: &RootStore, problems: &[(String, String)], takes_hbone, now| {
            let status =
                SourceStatus { problems: problems.iter().cloned().collect(), ..SourceStatus::default() };
            let certificate = LatestWriter::default().reader();
            let context = NodeContext { certificate, trust: store.reader() };
            let identities = Identities { context, status: watch::Sender::new(status).subscribe() };
            identities.trust_gate(takes_hbone, now).map(|gate| gate.closed)
        };
        let (none, now) = (RootStore::default(), SystemTime::now());
        assert_eq!(gate(&none, &[], false, now), None);
        let why = "trust of td: roots.pem: no such file".to_owned();
        assert_eq!(gate(&none, std::slice::from_ref(&problem), false, now), Some(Some(why)));
        let closed = gate(&none, &[], true, now).flatten().expect("closed");
        assert!(closed.contains("no root certificates have been read"), "{closed}");
        // The last good roots stay in use when their file becomes unreadable.
        let authority = Authority::new(domain.clone()).expect("a CA");
        let roots = certificates(authority.certificate_pem().as_bytes()).expect("roots");
        let store = RootStore::of(BTreeMap::from([(domain, roots)]));
        assert_eq!(gate(&store, &[problem], true, now), Some(None));
        let late = now + Duration::from_secs(100 * 366 * 86_400);
        let closed = gate(&store, &[], true, late).flatten().expect("closed");
        assert!(closed.contains("the last root certificate expired"), "{closed}");
    }

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
        assert_eq!(problem.code, Code::CertificateNotYetValid);
        assert_eq!(problem.text, format!("the certificate of {identity} is not valid before {from}"));
        assert_eq!(identities.certificates()[0].state, "not valid yet");
    }
}
