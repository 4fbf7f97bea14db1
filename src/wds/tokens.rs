//! The identities of clients, by their bearer tokens: reviewed by an API server of Kubernetes, or listed in a file.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;

use isthmus_files::file;
use isthmus_files::reading::Readings;
use isthmus_model::identity::Identity;
use isthmus_model::place::ClusterId;

use super::options::TokenSource;

/// The time limit of learning an identity.
const WITHIN: Duration = Duration::from_secs(10);
/// The largest number of tokens that are reviewed at the same time; further clients wait.
const REVIEWS_MAX: usize = 32;
/// The largest size of a file of tokens, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// The shortest token that a file may have, in bytes: a shorter one can be guessed.
const TOKEN_BYTES_MIN: usize = 16;
/// The longest token that is reviewed, in bytes.
const TOKEN_BYTES_MAX: usize = 16 << 10;

/// The owner of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The identity of the owner.
    pub identity: Identity,
    /// The node on which the owner runs, if the token names one.
    pub node: Option<String>,
}

/// The reason why the owner of a token is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenFault {
    /// The token is not valid.
    #[error("the token is not accepted: {0}")]
    Refused(String),
    /// The token could not be checked, so that the client should try again.
    #[error("the token cannot be checked: {0}")]
    Unknown(String),
}

/// A review of a token.
pub type Review<'a> = Pin<Box<dyn Future<Output = Result<Owner, TokenFault>> + Send + 'a>>;

/// Has tokens reviewed by the API servers of clusters.
pub trait Reviewer: Send + Sync {
    /// Returns the owner of a token with this audience, by the API server of the cluster.
    fn review<'a>(&'a self, cluster: &'a ClusterId, token: &'a str, audience: &'a str) -> Review<'a>;
}

/// Finds the owners of tokens.
pub struct Tokens {
    source: TokenSource,
    reviewer: Arc<dyn Reviewer>,
    reviews: Semaphore,
    readings: Readings,
}

impl Tokens {
    /// Makes a finder that uses this source.
    pub fn new(source: TokenSource, reviewer: Arc<dyn Reviewer>) -> Self {
        let (reviews, readings) = (Semaphore::new(REVIEWS_MAX), Readings::new(REVIEWS_MAX));
        Self { source, reviewer, reviews, readings }
    }

    /// Returns the owner of the token of a client that claims this cluster.
    pub async fn owner(&self, cluster: &ClusterId, token: &str) -> Result<Owner, TokenFault> {
        if token.len() > TOKEN_BYTES_MAX {
            return Err(TokenFault::Refused(format!("it has more than {TOKEN_BYTES_MAX} bytes")));
        }
        let found = async {
            match &self.source {
                TokenSource::Kubernetes { audience } => {
                    // The semaphore is never closed.
                    let _permit = self.reviews.acquire().await;
                    self.reviewer.review(cluster, token, audience).await
                }
                TokenSource::File(path) => self.listed(path.clone(), token.to_owned()).await,
            }
        };
        let late = |_| Err(TokenFault::Unknown(format!("there was no answer within {} s", WITHIN.as_secs())));
        timeout(WITHIN, found).await.unwrap_or_else(late)
    }

    async fn listed(&self, path: PathBuf, token: String) -> Result<Owner, TokenFault> {
        let read = self.readings.read(WITHIN, move || in_file(&path, &token)).await;
        read.unwrap_or_else(|unread| Err(TokenFault::Unknown(unread.to_string())))
    }
}

fn in_file(path: &Path, token: &str) -> Result<Owner, TokenFault> {
    let named = |fault: &dyn std::fmt::Display| TokenFault::Unknown(format!("{}: {fault}", path.display()));
    let bytes = file::read(path, FILE_BYTES_MAX).map_err(|fault| named(&fault))?;
    let text = String::from_utf8(bytes).map_err(|_| named(&"the file is not UTF-8"))?;
    let owners = owners(&text).map_err(|fault| named(&fault))?;
    // All are compared, so that the time does not tell which one is similar.
    let mut found = None;
    for (known, owner) in owners {
        if is_equal(known.as_bytes(), token.as_bytes()) {
            found = Some(owner);
        }
    }
    found.ok_or_else(|| TokenFault::Refused("it is not in the file of tokens".to_owned()))
}

/// Parses the text of a file of tokens: on each line a token, an identity, and a node if the token is of one.
fn owners(text: &str) -> Result<Vec<(&str, Owner)>, String> {
    let mut owners = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let fault = |fault: String| format!("line {}: {fault}", at + 1);
        let mut words = line.split_whitespace();
        let (Some(token), Some(identity), node, None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(fault("expected a token, a SPIFFE ID, and perhaps a node".to_owned()));
        };
        if token.len() < TOKEN_BYTES_MIN {
            return Err(fault(format!("the token has fewer than {TOKEN_BYTES_MIN} characters")));
        }
        let identity =
            Identity::parse(identity).map_err(|error| fault(format!("the identity is wrong: {error}")))?;
        owners.push((token, Owner { identity, node: node.map(str::to_owned) }));
    }
    Ok(owners)
}

/// Compares two secrets in a time that depends only on their lengths.
fn is_equal(one: &[u8], other: &[u8]) -> bool {
    one.len() == other.len() && one.iter().zip(other).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    struct Silent;

    impl Reviewer for Silent {
        fn review<'a>(&'a self, _: &'a ClusterId, _: &'a str, _: &'a str) -> Review<'a> {
            Box::pin(std::future::pending())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_that_nobody_reviews_is_unknown_after_10_s() {
        let source = TokenSource::Kubernetes { audience: "a".into() };
        let (tokens, begun) = (Tokens::new(source, Arc::new(Silent)), Instant::now());
        let fault = tokens.owner(&ClusterId::new("c"), "token").await.expect_err("no answer");
        assert_eq!(fault, TokenFault::Unknown("there was no answer within 10 s".to_owned()));
        assert_eq!(begun.elapsed().as_secs(), 10);
    }

    #[test]
    fn a_file_has_a_token_an_identity_and_perhaps_a_node_on_each_line() {
        let text = "# ztunnels\n\n0123456789abcdef spiffe://td/ns/istio-system/sa/ztunnel node-1\n\
                    fedcba9876543210 spiffe://td/ns/a/sa/b\n";
        let owners = owners(text).expect("good");
        let of = |at: usize| (owners[at].0, owners[at].1.identity.as_str(), owners[at].1.node.as_deref());
        assert_eq!(of(0), ("0123456789abcdef", "spiffe://td/ns/istio-system/sa/ztunnel", Some("node-1")));
        assert_eq!(of(1), ("fedcba9876543210", "spiffe://td/ns/a/sa/b", None));
        for (bad, expected) in [
            ("0123456789abcdef", "line 1: expected a token"),
            ("0123456789abcdef spiffe://td/ns/a/sa/b n more", "line 1: expected a token"),
            ("\nshort spiffe://td/ns/a/sa/b", "line 2: the token has fewer than 16"),
            ("0123456789abcdef name", "line 1: the identity is wrong: it does not begin"),
        ] {
            let fault = super::owners(bad).expect_err("bad");
            assert!(fault.starts_with(expected), "{fault}");
        }
    }

    #[test]
    fn only_equal_secrets_are_equal() {
        assert!(is_equal(b"abc", b"abc"));
        assert!(!is_equal(b"abc", b"abd") && !is_equal(b"abc", b"ab") && !is_equal(b"", b"a"));
    }
}
