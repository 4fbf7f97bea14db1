//! Has tokens of clients reviewed by the API server of their cluster (`authentication.k8s.io/v1`, TokenReview).

use std::collections::BTreeMap;
use std::sync::Arc;

use http::{Method, StatusCode};
use serde_json::json;
use tokio::sync::Mutex;

use super::access::{Found, find};
use super::client::Client;
use super::objects::objects;
use isthmus_aggregator::spec::kubernetes::KubernetesSpec;
use isthmus_aggregator::token_review::{ReviewFault, ReviewedToken};
use isthmus_files::reading::Readings;
use isthmus_model::place::ClusterId;
use isthmus_net::channel::cut;
use isthmus_tasks::scope::Scope;

/// The path of reviews.
const PATH: &str = "/apis/authentication.k8s.io/v1/tokenreviews";
/// The key of the name of a token's node, since Kubernetes 1.30.
const NODE: &str = "authentication.kubernetes.io/node-name";
/// The largest number of reads of credentials that may hang at the same time.
const READINGS: usize = 3;

objects! {
    TokenReview { status: ReviewStatus, }
    ReviewStatus { authenticated: bool, user: User, audiences: Vec<String>, error: String, }
    User { username: String, extra: BTreeMap<String, Vec<String>>, }
}

/// Has tokens reviewed, with the credentials of the clusters' registries.
pub struct TokenReviewer {
    scope: Scope,
    readings: Readings,
    /// The client of each cluster, with the digest of its credentials.
    clients: Mutex<BTreeMap<ClusterId, (u64, Arc<Client>)>>,
}

impl TokenReviewer {
    /// Makes a reviewer; tasks of its connections run in `scope`.
    pub fn new(scope: Scope) -> Self {
        Self { scope, readings: Readings::new(READINGS), clients: Mutex::default() }
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
        let found = find(&spec.access, &self.readings).await;
        let Found { access, digest } = found.map_err(|problems| ReviewFault::Failed(problems.join("; ")))?;
        let mut clients = self.clients.lock().await;
        if let Some((_, client)) = clients.get(cluster).filter(|(known, _)| *known == digest) {
            return Ok(client.clone());
        }
        let client = Client::new(access, self.scope.clone());
        let client = Arc::new(client.map_err(|fault| ReviewFault::Failed(fault.to_string()))?);
        clients.insert(cluster.clone(), (digest, client.clone()));
        Ok(client)
    }
}

/// Reads the status of a review. A server that does not know audiences names none; its tokens are not accepted.
fn read(status: ReviewStatus, audience: &str) -> Result<ReviewedToken, ReviewFault> {
    if !status.authenticated {
        let why = if status.error.is_empty() { "the API server does not know it" } else { &status.error };
        return Err(ReviewFault::Refused(cut(why)));
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
    use super::*;

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
        assert_eq!(refused(r#"{"error":"it is expired","audiences":["istio-ca"]}"#), "it is expired");
        assert_eq!(refused("{}"), "the API server does not know it");
    }
}
