//! Reviews of ztunnels' tokens by the API servers of the clusters that they claim.

use std::sync::PoisonError;

use super::{KnownClusters, TokenReviewer};
use isthmus_aggregator::spec::kubernetes::KubernetesSpec;
use isthmus_aggregator::token_review::{ReviewFault, ReviewedToken};
use isthmus_model::identity::Identity;
use isthmus_model::place::ClusterId;
use isthmus_wds::tokens::{Owner, Review, Reviewer, TokenFault};

/// The API servers of the clusters in use.
pub(crate) struct ClusterReviewer {
    pub(super) clusters: KnownClusters,
    pub(super) reviewer: TokenReviewer,
}

impl Reviewer for ClusterReviewer {
    fn review<'a>(&'a self, cluster: &'a ClusterId, token: &'a str, audience: &'a str) -> Review<'a> {
        Box::pin(async move {
            let known = self.clusters.lock().unwrap_or_else(PoisonError::into_inner).get(cluster).cloned();
            let Some(spec) = known else {
                return Err(TokenFault::NoReviewer(format!(
                    "no registry in Kubernetes has the cluster {cluster:?}"
                )));
            };
            match self.reviewer.review(cluster, &spec, (token, audience)).await {
                Ok(reviewed) => owner(&reviewed, &spec),
                Err(ReviewFault::Refused(why)) => Err(TokenFault::Refused(why)),
                Err(ReviewFault::Doubted(why)) => Err(TokenFault::Doubted(why)),
                Err(ReviewFault::Failed(why)) => Err(TokenFault::Unknown(why)),
            }
        })
    }
}

/// Returns the identity of the service account that a token is of.
fn owner(reviewed: &ReviewedToken, spec: &KubernetesSpec) -> Result<Owner, TokenFault> {
    let account = reviewed.user.strip_prefix("system:serviceaccount:").and_then(|name| name.split_once(':'));
    let identity = account.and_then(|(namespace, account)| {
        Identity::parse(&format!("spiffe://{}/ns/{namespace}/sa/{account}", spec.trust_domain)).ok()
    });
    let fault = || TokenFault::Refused(format!("its user {:?} is not a service account", reviewed.user));
    Ok(Owner { identity: identity.ok_or_else(fault)?, node: reviewed.node.clone() })
}
