//! The identities of clients, by their bearer tokens: reviewed by an API server of Kubernetes, or listed in a file.
//!
//! Few tokens are reviewed at the same time, and the sources of clients take turns, so that invalid tokens of one source delay no
//! other. Clients with an equal token share its review, and a token that an API server has refused is not reviewed again for a
//! minute, or for 5 s if a fault of the server may be the cause.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, timeout};

use isthmus_files::file;
use isthmus_files::reading::Readings;
use isthmus_model::identity::Identity;
use isthmus_model::place::ClusterId;
use isthmus_net::turns::Turns;
use isthmus_tasks::shared::Shared;
use isthmus_tls::pinned::{Hash, sha256};

use super::options::TokenSource;

/// The time limit of a review.
const WITHIN: Duration = Duration::from_secs(10);
/// The time limit of the wait for a review: thousands of clients may connect at once from one address.
const TURN_WITHIN: Duration = Duration::from_secs(60);
/// The largest number of tokens that are reviewed at the same time; further clients wait.
const REVIEWS_MAX: usize = 32;
/// The largest number of clients that wait for a review.
const WAITING_MAX: usize = 8_192;
/// The time for which a refused token is not reviewed again.
const REFUSED_FOR: Duration = Duration::from_secs(60);
/// The same if the refusal may be due to a fault of the API server.
const DOUBTED_FOR: Duration = Duration::from_secs(5);
/// The largest number of refused tokens that are remembered.
const REFUSED_MAX: usize = 4_096;
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
    /// The API server does not accept the token, perhaps because of a passing fault of its own.
    #[error("the token is not accepted: {0}")]
    Doubted(String),
    /// There is no API server that could review the token.
    #[error("the token is not accepted: {0}")]
    NoReviewer(String),
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
    turns: Turns,
    /// The reviews in progress, by the digest of cluster and token.
    reviews: Shared<Hash, Result<Owner, TokenFault>>,
    refused: Mutex<Refused>,
    readings: Readings,
}

/// The tokens that API servers have refused within [`REFUSED_FOR`]. If there are too many, the oldest is forgotten.
#[derive(Default)]
struct Refused {
    /// The fault of each, and the time until which it counts.
    faults: BTreeMap<Hash, (TokenFault, Instant)>,
    /// The time of each refusal, oldest first.
    order: VecDeque<(Instant, Hash)>,
}

impl Tokens {
    /// Makes a finder that uses this source.
    pub fn new(source: TokenSource, reviewer: Arc<dyn Reviewer>) -> Self {
        let (turns, readings) = (Turns::new(REVIEWS_MAX, WAITING_MAX), Readings::new(REVIEWS_MAX));
        let (reviews, refused) = (Shared::default(), Mutex::default());
        Self { source, reviewer, turns, reviews, refused, readings }
    }

    /// Returns the owner of the token of a client at this address that claims this cluster.
    pub async fn owner(&self, cluster: &ClusterId, token: &str, client: IpAddr) -> Result<Owner, TokenFault> {
        if token.len() > TOKEN_BYTES_MAX {
            return Err(TokenFault::Refused(format!("it has more than {TOKEN_BYTES_MAX} bytes")));
        }
        // No header has a zero byte, so the digest is of one cluster and one token.
        let digest = sha256(format!("{}\0{token}", cluster.as_str()).as_bytes());
        if let Some(fault) = self.refused(|refused| refused.fault(&digest, Instant::now())) {
            return Err(fault);
        }
        let review = self.reviews.share(digest);
        let found = review.result.get_or_try_init(|| async {
            let turn = timeout(TURN_WITHIN, self.turns.turn(client)).await;
            let _turn = turn.map_err(|_| late(TURN_WITHIN))?.map_err(unknown)?;
            let found = timeout(WITHIN, self.find(cluster, token, digest)).await;
            Ok::<_, TokenFault>(found.unwrap_or_else(|_| Err(late(WITHIN))))
        });
        // Clients that share a review may wait for a turn one after another.
        let found = timeout(TURN_WITHIN + WITHIN, found).await;
        found.map_err(|_| late(TURN_WITHIN + WITHIN))??.clone()
    }

    async fn find(&self, cluster: &ClusterId, token: &str, digest: Hash) -> Result<Owner, TokenFault> {
        let audience = match &self.source {
            TokenSource::Kubernetes { audience } => audience,
            // The file is read each time, so that a new line in it counts at once.
            TokenSource::File(path) => return self.listed(path.clone(), token.to_owned()).await,
        };
        let found = self.reviewer.review(cluster, token, audience).await;
        if let Err(fault) = &found {
            self.refused(|refused| refused.remember(digest, fault, Instant::now()));
        }
        found
    }

    fn refused<T>(&self, act: impl FnOnce(&mut Refused) -> T) -> T {
        act(&mut self.refused.lock().unwrap_or_else(PoisonError::into_inner))
    }

    async fn listed(&self, path: PathBuf, token: String) -> Result<Owner, TokenFault> {
        let read = self.readings.read(WITHIN, move || in_file(&path, &token)).await;
        read.unwrap_or_else(|unread| Err(TokenFault::Unknown(unread.to_string())))
    }
}

impl Refused {
    /// Returns the fault of a token that was refused, if it is remembered.
    fn fault(&mut self, digest: &Hash, now: Instant) -> Option<TokenFault> {
        self.forget(|(at, _), _| now >= at + REFUSED_FOR);
        self.faults.get(digest).filter(|(_, until)| now < *until).map(|(fault, _)| fault.clone())
    }

    /// Remembers a fault if it is a refusal.
    fn remember(&mut self, digest: Hash, fault: &TokenFault, now: Instant) {
        let until = now
            + match fault {
                TokenFault::Refused(_) => REFUSED_FOR,
                TokenFault::Doubted(_) => DOUBTED_FOR,
                TokenFault::NoReviewer(_) | TokenFault::Unknown(_) => return,
            };
        if self.faults.insert(digest, (fault.clone(), until)).is_none() {
            self.order.push_back((now, digest));
        }
        self.forget(|_, len| len > REFUSED_MAX);
    }

    /// Forgets the oldest refusals while `is_over` is true for the oldest and the number of all.
    fn forget(&mut self, is_over: impl Fn((Instant, Hash), usize) -> bool) {
        while let Some(oldest) =
            self.order.front().copied().filter(|oldest| is_over(*oldest, self.order.len()))
        {
            self.order.pop_front();
            self.faults.remove(&oldest.1);
        }
    }
}

fn unknown(why: impl std::fmt::Display) -> TokenFault {
    TokenFault::Unknown(why.to_string())
}

fn late(within: Duration) -> TokenFault {
    unknown(format_args!("there was no answer within {} s", within.as_secs()))
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
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::task::JoinHandle;

    use super::*;
    use isthmus_tasks::scope::Scope;

    /// An API server that knows the tokens that begin with "good", and reviews each token for the same time.
    struct Server {
        takes: Duration,
        reviews: AtomicUsize,
    }

    impl Server {
        fn new(takes: Duration) -> Arc<Self> {
            Arc::new(Self { takes, reviews: AtomicUsize::new(0) })
        }

        fn asked(&self) -> usize {
            self.reviews.load(Ordering::Relaxed)
        }
    }

    impl Reviewer for Server {
        fn review<'a>(&'a self, cluster: &'a ClusterId, token: &'a str, _: &'a str) -> Review<'a> {
            Box::pin(async move {
                if cluster.as_str() != "c" {
                    return Err(TokenFault::NoReviewer("no such cluster".into()));
                }
                self.reviews.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(self.takes).await;
                let identity = Identity::parse("spiffe://td/ns/a/sa/b").expect("legal");
                match token {
                    _ if token.starts_with("good") => Ok(Owner { identity, node: None }),
                    "doubtful" => Err(TokenFault::Doubted("a fault".into())),
                    _ => Err(TokenFault::Refused("junk".into())),
                }
            })
        }
    }

    fn tokens(server: &Arc<Server>) -> Arc<Tokens> {
        Arc::new(Tokens::new(TokenSource::Kubernetes { audience: "a".into() }, server.clone()))
    }

    /// Starts a request for the owner of a token, in a task; returns the result and the time that it took.
    fn start(
        scope: &Scope,
        tokens: &Arc<Tokens>,
        token: String,
        last: u8,
    ) -> JoinHandle<(Result<Owner, TokenFault>, Duration)> {
        let tokens = tokens.clone();
        scope.spawn(async move {
            let begun = Instant::now();
            let owner = tokens.owner(&ClusterId::new("c"), &token, [10, 0, 0, last].into()).await;
            (owner, begun.elapsed())
        })
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_that_nobody_reviews_is_unknown_after_10_s() {
        let (server, scope) = (Server::new(Duration::from_secs(3_600)), Scope::default());
        let (fault, took) = start(&scope, &tokens(&server), "token".into(), 1).await.expect("no panic");
        let late = TokenFault::Unknown("there was no answer within 10 s".to_owned());
        assert_eq!((fault, took.as_secs()), (Err(late), 10));
    }

    #[tokio::test(start_paused = true)]
    async fn three_thousand_clients_of_one_address_wait_a_minute_at_most_for_their_reviews() {
        let scope = Scope::default();
        let crowd = async |takes| {
            let tokens = tokens(&Server::new(Duration::from_millis(takes)));
            let asked: Vec<_> =
                (0..3_000).map(|at| start(&scope, &tokens, format!("good-{at}"), 1)).collect();
            let (mut known, mut longest) = (0, Duration::ZERO);
            for asked in asked {
                let (owner, took) = asked.await.expect("no panic");
                known += usize::from(owner.is_ok());
                longest = longest.max(took);
            }
            (known, longest.as_secs())
        };
        // 26 at a time, 116 times.
        assert_eq!(crowd(200).await, (3_000, 23));
        // The clients whose turn begins within a minute are served; the last turn begins after 59.4 s.
        assert_eq!(crowd(1_100).await, (55 * 26, 60));
    }

    #[tokio::test(start_paused = true)]
    async fn two_hundred_clients_of_one_address_at_once_all_wait_for_their_reviews() {
        let (server, scope) = (Server::new(Duration::from_millis(5)), Scope::default());
        let tokens = tokens(&server);
        let asked: Vec<_> = (0..200).map(|at| start(&scope, &tokens, format!("good-{at}"), 1)).collect();
        for asked in asked {
            let (owner, took) = asked.await.expect("no panic");
            // 26 at a time are reviewed, as the last 6 of 32 are for other sources.
            assert!(owner.is_ok() && took <= Duration::from_millis(8 * 5), "{owner:?} after {took:?}");
        }
        assert_eq!(server.asked(), 200);
    }

    #[tokio::test(start_paused = true)]
    async fn junk_of_one_source_delays_other_sources_by_one_review_at_most() {
        let (server, scope) = (Server::new(Duration::from_millis(500)), Scope::default());
        let tokens = tokens(&server);
        let junk: Vec<_> = (0..480).map(|at| start(&scope, &tokens, format!("junk-{at}"), 1)).collect();
        tokio::time::sleep(Duration::from_millis(100)).await;
        let honest: Vec<_> =
            (2..14).map(|last| start(&scope, &tokens, format!("good-{last}"), last)).collect();
        for asked in honest {
            let (owner, took) = asked.await.expect("no panic");
            assert!(owner.is_ok() && took <= Duration::from_secs(1), "{owner:?} after {took:?}");
        }
        for asked in junk {
            assert!(asked.await.expect("no panic").0.is_err());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn equal_tokens_share_a_review_and_a_refused_one_is_reviewed_again_after_a_minute() {
        let (server, scope) = (Server::new(Duration::from_millis(500)), Scope::default());
        let tokens = tokens(&server);
        let of = |token: &str, last| start(&scope, &tokens, token.to_owned(), last);
        for (token, reviews) in [("good", 1), ("junk", 2)] {
            let both = [of(token, 1), of(token, 2)];
            let [one, other] = both.map(async |asked| asked.await.expect("no panic").0);
            assert_eq!(one.await, other.await);
            assert_eq!(server.asked(), reviews, "{token}");
        }
        tokio::time::advance(Duration::from_millis(59_999)).await;
        let (fault, took) = of("junk", 3).await.expect("no panic");
        assert_eq!((fault, took), (Err(TokenFault::Refused("junk".into())), Duration::ZERO));
        assert_eq!(server.asked(), 2);
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(of("junk", 3).await.expect("no panic").0.is_err());
        assert!(of("good", 3).await.expect("no panic").0.is_ok());
        assert_eq!(server.asked(), 4, "an accepted token is reviewed each time");
        // A cluster may be found later.
        let other = ClusterId::new("d");
        let fault = tokens.owner(&other, "junk", [10, 0, 0, 1].into()).await;
        assert_eq!(fault, Err(TokenFault::NoReviewer("no such cluster".into())));
        assert_eq!(tokens.refused(|refused| refused.order.len()), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_that_may_be_a_fault_of_the_server_counts_for_5_s() {
        let (server, scope) = (Server::new(Duration::ZERO), Scope::default());
        let tokens = tokens(&server);
        for (later, reviews) in [(0, 1), (4_900, 1), (100, 2), (4_900, 2)] {
            tokio::time::advance(Duration::from_millis(later)).await;
            let (fault, _) = start(&scope, &tokens, "doubtful".into(), 1).await.expect("no panic");
            assert_eq!(fault, Err(TokenFault::Doubted("a fault".into())));
            assert_eq!(server.asked(), reviews);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_client_of_a_shared_review_that_leaves_or_gives_way_takes_no_other_with_it() {
        let (server, scope) = (Server::new(Duration::from_millis(500)), Scope::default());
        let tokens = tokens(&server);
        let first = start(&scope, &tokens, "good".into(), 1);
        tokio::time::sleep(Duration::from_millis(400)).await;
        let second = start(&scope, &tokens, "good".into(), 2);
        tokio::time::sleep(Duration::from_millis(50)).await;
        first.abort();
        let (owner, took) = second.await.expect("no panic");
        assert_eq!((owner.is_ok(), took.as_millis(), server.asked()), (true, 550, 2));
    }

    #[test]
    fn the_oldest_of_too_many_refused_tokens_is_forgotten() {
        let (mut refused, now) = (Refused::default(), Instant::now());
        let digest = |number: usize| sha256(&number.to_le_bytes());
        let fault = TokenFault::Refused("why".into());
        (0..=REFUSED_MAX).for_each(|number| refused.remember(digest(number), &fault, now));
        assert_eq!(refused.fault(&digest(0), now), None);
        assert_eq!(refused.fault(&digest(1), now), Some(fault));
        assert_eq!(refused.faults.len(), REFUSED_MAX);
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
