//! Has tokens of clients reviewed by the API server of their cluster (`authentication.k8s.io/v1`, TokenReview).

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use http::{Method, StatusCode};
use serde_json::json;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use super::access::{Found, find};
use super::client::Client;
use super::objects::objects;
use isthmus_aggregator::spec::kubernetes::{AccessSpec, KubernetesSpec};
use isthmus_aggregator::token_review::{ReviewFault, ReviewedToken};
use isthmus_files::reading::Readings;
use isthmus_model::place::ClusterId;
use isthmus_net::channel::cut;
use isthmus_tasks::scope::Scope;

/// The path of reviews.
const PATH: &str = "/apis/authentication.k8s.io/v1/tokenreviews";
/// The error of a token that no authenticator of an API server knows. Others may be of a fault within the server.
const INVALID: &str = "invalid bearer token";
/// The key of the name of a token's node, since Kubernetes 1.30.
const NODE: &str = "authentication.kubernetes.io/node-name";
/// How long credentials that were read are in use before they are read again, as a registry does.
const TICK: Duration = Duration::from_secs(1);
/// The largest number of reads of the credentials for one cluster that may hang at the same time.
const READINGS: usize = 3;

objects! {
    TokenReview { status: ReviewStatus, }
    ReviewStatus { authenticated: bool, user: User, audiences: Vec<String>, error: String, }
    User { username: String, extra: BTreeMap<String, Vec<String>>, }
}

/// Has tokens reviewed, with the credentials of the clusters' registries.
pub struct TokenReviewer {
    scope: Scope,
    servers: std::sync::Mutex<BTreeMap<ClusterId, Arc<Server>>>,
}

/// The API server of a cluster.
struct Server {
    readings: Readings,
    /// The newest reading of the credentials; reviews that need a newer one wait for it together.
    newest: Mutex<Option<Reading>>,
}

/// The result of reading the credentials of a cluster.
#[derive(Clone)]
struct Reading {
    at: Instant,
    of: AccessSpec,
    /// A client with the credentials, and their digest; or the problems.
    result: Result<(Arc<Client>, u64), String>,
}

impl TokenReviewer {
    /// Makes a reviewer; tasks of its connections run in `scope`.
    pub fn new(scope: Scope) -> Self {
        Self { scope, servers: Default::default() }
    }

    /// Returns the owner of a token with an audience, by the API server of a cluster.
    pub async fn review(
        &self,
        cluster: &ClusterId,
        spec: &KubernetesSpec,
        (token, audience): (&str, &str),
    ) -> Result<ReviewedToken, ReviewFault> {
        let client = self.client(cluster, spec).await?;
        let review = json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [audience]},
        });
        let written =
            client.write(Method::POST, PATH, "application/json", review.to_string().into_bytes()).await;
        let answer = written.map_err(|fault| {
            let hint = match fault.status() {
                Some(StatusCode::FORBIDDEN) => {
                    "; the credentials of the registry need the right to create tokenreviews"
                }
                _ => "",
            };
            ReviewFault::Failed(format!("{}: {fault}{hint}", client.server()))
        })?;
        let review: TokenReview = serde_json::from_slice(&answer).map_err(|error| {
            ReviewFault::Failed(format!("{}: the answer is invalid: {error}", client.server()))
        })?;
        read(review.status, audience)
    }

    async fn client(&self, cluster: &ClusterId, spec: &KubernetesSpec) -> Result<Arc<Client>, ReviewFault> {
        let server = {
            let mut servers = self.servers.lock().unwrap_or_else(PoisonError::into_inner);
            servers.entry(cluster.clone()).or_insert_with(|| Arc::new(Server::new())).clone()
        };
        // In a task of its own, a reading ends even if the client of the review leaves. Otherwise clients that leave could have
        // many of them in progress.
        let (access, scope) = (spec.access.clone(), self.scope.clone());
        let reading = self.scope.spawn(async move { server.client(access, scope).await });
        let panicked = |_| Err("internal error: reading the credentials panicked".to_owned());
        reading.await.unwrap_or_else(panicked).map_err(ReviewFault::Failed)
    }
}

impl Server {
    fn new() -> Self {
        Self { readings: Readings::new(READINGS), newest: Mutex::default() }
    }

    /// Returns a client with the credentials that were read last, or reads them again if that was longer ago than [`TICK`].
    /// Credentials that cannot be read again stay in use.
    async fn client(&self, access: AccessSpec, scope: Scope) -> Result<Arc<Client>, String> {
        let mut newest = self.newest.lock().await;
        let known = newest.take().filter(|known| known.of == access);
        let reading = match known {
            Some(known) if known.at.elapsed() < TICK => known,
            Some(Reading { result: Ok((client, digest)), .. }) => {
                let result = match timeout(TICK, find(&access, &self.readings)).await {
                    Ok(Ok(found)) if found.digest != digest => made(found, scope),
                    _ => Ok((client, digest)),
                };
                Reading { at: Instant::now(), of: access, result }
            }
            _ => {
                let found = find(&access, &self.readings).await.map_err(|problems| problems.join("; "));
                let result = found.and_then(|found| made(found, scope));
                Reading { at: Instant::now(), of: access, result }
            }
        };
        newest.insert(reading).result.clone().map(|(client, _)| client)
    }
}

fn made(Found { access, digest }: Found, scope: Scope) -> Result<(Arc<Client>, u64), String> {
    let client = Client::new(access, scope).map_err(|fault| fault.to_string())?;
    Ok((Arc::new(client), digest))
}

/// Reads the status of a review. A server that does not know audiences names none; its tokens are not accepted.
fn read(status: ReviewStatus, audience: &str) -> Result<ReviewedToken, ReviewFault> {
    if !status.authenticated {
        return Err(match &*status.error {
            "" => ReviewFault::Refused("the API server does not know it".to_owned()),
            INVALID => ReviewFault::Refused(INVALID.to_owned()),
            other => ReviewFault::Doubted(cut(other)),
        });
    }
    if !status.audiences.iter().any(|known| known == audience) {
        return Err(ReviewFault::Refused(format!("it is not for the audience {audience:?}")));
    }
    let User { username, mut extra } = status.user;
    let node = extra.remove(NODE).and_then(|names| names.into_iter().next()).filter(|name| !name.is_empty());
    Ok(ReviewedToken { user: username, node })
}

#[cfg(test)]
mod tests {
    use base64::prelude::{BASE64_STANDARD, Engine as _};

    use super::super::scripted;
    use super::*;
    use isthmus_model::identity::TrustDomain;
    use isthmus_tls::development::Authority;

    /// A reviewer whose credentials for the cluster `c` have just been read.
    async fn reviewer(scope: &Scope, spec: &KubernetesSpec) -> (Arc<TokenReviewer>, scripted::Requests) {
        let (client, requests) = scripted::server(scope).await;
        let server = Server::new();
        let result = Ok((client, 0));
        *server.newest.lock().await = Some(Reading { at: Instant::now(), of: spec.access.clone(), result });
        let reviewer = TokenReviewer::new(scope.clone());
        let servers = BTreeMap::from([(ClusterId::new("c"), Arc::new(server))]);
        *reviewer.servers.lock().expect("not poisoned") = servers;
        (Arc::new(reviewer), requests)
    }

    const KNOWN: &str =
        r#"{"status":{"authenticated":true,"user":{"username":"a"},"audiences":["istio-ca"]}}"#;

    #[tokio::test(start_paused = true)]
    async fn many_reviews_at_once_read_no_credentials_and_are_all_answered() {
        let (scope, spec) = (Scope::default(), KubernetesSpec::plain());
        let (reviewer, mut requests) = reviewer(&scope, &spec).await;
        let reviews: Vec<_> = (0..200)
            .map(|at| {
                let (reviewer, spec) = (reviewer.clone(), spec.clone());
                scope.spawn(async move {
                    reviewer.review(&ClusterId::new("c"), &spec, (&format!("token-{at}"), "istio-ca")).await
                })
            })
            .collect();
        for _ in 0..reviews.len() {
            requests.next().await.with(StatusCode::CREATED, KNOWN);
        }
        for review in reviews {
            assert_eq!(review.await.expect("no panic").map(|token| token.user), Ok("a".to_owned()));
        }
    }

    #[tokio::test]
    async fn credentials_that_change_are_read_and_those_that_cannot_be_read_stay_in_use() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("kubeconfig");
        let authority = Authority::new(TrustDomain::parse("td").expect("legal")).expect("a CA");
        let root = BASE64_STANDARD.encode(authority.certificate_pem());
        let write = |server: &str| {
            let text = format!(
                "{{current-context: a, contexts: [{{name: a, context: {{cluster: a, user: a}}}}], \
                 clusters: [{{name: a, cluster: {{server: 'https://{server}', certificate-authority-data: {root}}}}}], users: [{{name: a, user: {{token: t}}}}]}}"
            );
            std::fs::write(&path, text).expect("written");
        };
        let access = AccessSpec::Kubeconfig { path: path.clone(), context: None, token_file: None };
        let (server, scope) = (Server::new(), Scope::default());
        let of = async || {
            server.client(access.clone(), scope.clone()).await.map(|client| client.server().to_string())
        };
        let expire = async || {
            server.newest.lock().await.as_mut().expect("read").at -= TICK;
        };
        let fault = of().await.expect_err("there is no file");
        write("a.test");
        assert_eq!(of().await, Err(fault), "it is read once a second");
        expire().await;
        assert_eq!(of().await.as_deref(), Ok("https://a.test:443"));
        write("b.test");
        assert_eq!(of().await.as_deref(), Ok("https://a.test:443"));
        expire().await;
        assert_eq!(of().await.as_deref(), Ok("https://b.test:443"));
        std::fs::remove_file(&path).expect("removed");
        expire().await;
        assert_eq!(of().await.as_deref(), Ok("https://b.test:443"));
    }

    fn of(status: &str) -> Result<ReviewedToken, ReviewFault> {
        let review: TokenReview =
            serde_json::from_str(&format!("{{\"status\":{status}}}")).expect("a review");
        read(review.status, "istio-ca")
    }

    #[test]
    fn a_token_counts_only_if_it_is_known_and_of_the_audience() {
        let user = r#""user":{"username":"system:serviceaccount:a:b","extra":{"authentication.kubernetes.io/node-name":["n1"]}}"#;
        let good = of(&format!(r#"{{"authenticated":true,{user},"audiences":["istio-ca"]}}"#));
        let owner = ReviewedToken { user: "system:serviceaccount:a:b".into(), node: Some("n1".into()) };
        assert_eq!(good, Ok(owner));
        let refused = |status: &str| match of(status) {
            Err(ReviewFault::Refused(why)) => why,
            other => panic!("{other:?}"),
        };
        for audiences in ["", r#","audiences":["other"]"#, r#","audiences":null"#] {
            let why = refused(&format!(r#"{{"authenticated":true,{user}{audiences}}}"#));
            assert_eq!(why, r#"it is not for the audience "istio-ca""#);
        }
        assert_eq!(refused(r#"{"error":"invalid bearer token"}"#), INVALID);
        let doubted = of(r#"{"error":"the token couldn't be checked","audiences":["istio-ca"]}"#);
        assert_eq!(doubted, Err(ReviewFault::Doubted("the token couldn't be checked".into())));
        assert_eq!(refused("{}"), "the API server does not know it");
    }
}
