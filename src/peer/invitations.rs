//! Invitations of peers. Each can be redeemed once, with its secret, before it expires. Only the hash of a secret is kept. This
//! module does no I/O: its results depend on the calls and the time alone.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::time::Instant;

use super::enrolled::EnrolledLink;
use isthmus_tls::pinned::Hash;

/// The largest number of invitations. Redeemed and expired invitations make room for new ones.
const INVITATIONS_MAX: usize = 256;

/// The place where the link that an enrolment creates is kept: the state folder or the config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeping {
    /// The link is stored in `state.dir`, and takes effect.
    Store,
    /// The link is returned, so that the operator can write it into the config.
    Return,
}

/// The treatment of the link that a peer already has when it is enrolled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// The existing link stays, and the enrolment is refused.
    Keep,
    /// The new link replaces the existing one.
    Replace,
}

/// The operator's permissions for an enrolment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The use of the link: it is stored, or returned to be printed.
    pub keeping: Keeping,
    /// The treatment of an existing link with the same peer.
    pub existing: Existing,
}

/// One invitation.
#[derive(Clone, Debug)]
struct Invitation {
    /// The hash of the secret.
    hash: Hash,
    until: Instant,
    is_redeemed: bool,
    terms: Terms,
    /// The link from the redemption of the invitation; set only with [`Keeping::Return`].
    link: Option<EnrolledLink>,
}

/// The state of an invitation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The invitation can be redeemed.
    Open,
    /// The invitation was redeemed.
    Redeemed,
    /// The invitation was not redeemed in time.
    Expired,
}

impl State {
    /// Returns the value as the API shows it.
    pub fn text(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Redeemed => "redeemed",
            Self::Expired => "expired",
        }
    }
}

/// The reason why a secret does not redeem an invitation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    /// No invitation of this process has the secret.
    #[error(
        "this gateway does not know the token: another gateway made it, a later token for the same peer replaced it, or the \
         gateway was restarted"
    )]
    Unknown,
    /// The invitation was redeemed.
    #[error("the token was already used")]
    Used,
    /// The invitation has expired.
    #[error("the token has expired")]
    Expired,
}

/// The last invitation of each peer.
#[derive(Debug, Default)]
pub(super) struct Invitations(BTreeMap<Arc<str>, Invitation>);

impl Invitations {
    /// Invites a peer; an earlier invitation of the peer becomes void. Returns an error if too many invitations are open.
    pub(super) fn open(
        &mut self,
        peer: &Arc<str>,
        hash: Hash,
        times: (Instant, Instant),
        terms: Terms,
    ) -> Result<(), String> {
        let (now, until) = times;
        if self.0.len() >= INVITATIONS_MAX && !self.0.contains_key(peer) {
            self.0.retain(|_, one| one.state_at(now) == State::Open);
            if self.0.len() >= INVITATIONS_MAX {
                return Err(format!(
                    "there are already {INVITATIONS_MAX} invitations that were not used yet; wait until one of \
                     them has expired"
                ));
            }
        }
        let invitation = Invitation { hash, until, is_redeemed: false, terms, link: None };
        self.0.insert(peer.clone(), invitation);
        Ok(())
    }

    /// Returns true if no peer was invited.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Removes the invitations of peers for which `has` is false, because the config does not name them.
    pub(super) fn retain(&mut self, has: impl Fn(&str) -> bool) {
        self.0.retain(|peer, _| has(peer));
    }

    /// Returns the state of the peer's last invitation. With [`Keeping::Return`], also returns the link if the invitation was
    /// redeemed.
    pub(super) fn state(&self, peer: &str, now: Instant) -> Option<(State, Option<EnrolledLink>)> {
        let one = self.0.get(peer)?;
        Some((one.state_at(now), one.link.clone()))
    }

    /// Returns the peer whose invitation has the secret with this hash, and what the invitation allows.
    pub(super) fn find(&self, hash: &Hash, now: Instant) -> Result<(Arc<str>, Terms), Refusal> {
        // Every invitation is compared, so that the time taken does not reveal which one matches.
        let mut found = None;
        for (peer, one) in &self.0 {
            if is_same(&one.hash, hash) {
                found = Some((peer, one));
            }
        }
        let (peer, one) = found.ok_or(Refusal::Unknown)?;
        match one.state_at(now) {
            State::Open => Ok((peer.clone(), one.terms)),
            State::Redeemed => Err(Refusal::Used),
            State::Expired => Err(Refusal::Expired),
        }
    }

    /// Redeems the invitation whose secret has this hash. A second call with the same hash is refused.
    pub(super) fn redeem(&mut self, hash: &Hash, now: Instant) -> Result<(), Refusal> {
        let (peer, _) = self.find(hash, now)?;
        self.0.entry(peer).and_modify(|one| one.is_redeemed = true);
        Ok(())
    }

    /// Stores the link from the redemption of the peer's invitation, so that [`Self::state`] returns it.
    pub(super) fn give(&mut self, peer: &Arc<str>, link: EnrolledLink) {
        self.0.entry(peer.clone()).and_modify(|one| one.link = Some(link));
    }
}

impl Invitation {
    fn state_at(&self, now: Instant) -> State {
        match self.is_redeemed {
            true => State::Redeemed,
            false if now >= self.until => State::Expired,
            false => State::Open,
        }
    }
}

/// Compares two hashes in a time that does not depend on their bytes.
fn is_same(one: &Hash, other: &Hash) -> bool {
    let differing = one.iter().zip(other).fold(0, |differing, (one, other)| differing | (one ^ other));
    std::hint::black_box(differing) == 0
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const LIFE: Duration = Duration::from_secs(900);
    const STORED: Terms = Terms { keeping: Keeping::Store, existing: Existing::Keep };
    const RETURNED: Terms = Terms { keeping: Keeping::Return, existing: Existing::Replace };

    fn opened(now: Instant) -> Invitations {
        let mut all = Invitations::default();
        all.open(&"west".into(), [1; 32], (now, now + LIFE), STORED).expect("room");
        all.open(&"south".into(), [2; 32], (now, now + LIFE / 2), RETURNED).expect("room");
        all
    }

    #[test]
    fn a_secret_redeems_its_invitation_once() {
        let now = Instant::now();
        let mut all = opened(now);
        assert_eq!(all.find(&[1; 32], now), Ok(("west".into(), STORED)), "finding it does not redeem it");
        assert_eq!(all.find(&[2; 32], now), Ok(("south".into(), RETURNED)));
        assert_eq!(all.redeem(&[1; 32], now), Ok(()));
        assert_eq!(
            (all.redeem(&[1; 32], now), all.find(&[1; 32], now)),
            (Err(Refusal::Used), Err(Refusal::Used))
        );
        assert_eq!(all.redeem(&[9; 32], now), Err(Refusal::Unknown));
        let state = |all: &Invitations, peer: &str| all.state(peer, now).map(|(state, _)| state);
        assert_eq!((state(&all, "west"), state(&all, "south")), (Some(State::Redeemed), Some(State::Open)));
        all.open(&"west".into(), [3; 32], (now, now + LIFE), STORED).expect("room");
        assert_eq!(all.redeem(&[1; 32], now), Err(Refusal::Unknown), "the earlier one is void");
        assert_eq!(all.redeem(&[3; 32], now), Ok(()));
        all.retain(|peer| peer == "south");
        assert_eq!((state(&all, "west"), all.is_empty()), (None, false));
    }

    #[test]
    fn an_invitation_ends_with_its_time() {
        let now = Instant::now();
        let mut all = opened(now);
        assert_eq!(all.redeem(&[2; 32], now + LIFE / 2), Err(Refusal::Expired));
        assert_eq!(all.redeem(&[1; 32], now + LIFE - Duration::from_nanos(1)), Ok(()));
    }

    #[test]
    fn invitations_that_are_not_used_are_bounded() {
        let now = Instant::now();
        let mut all = Invitations::default();
        let mut open = |number: usize, now: Instant| {
            all.open(&format!("p{number}").into(), [0; 32], (now, now + LIFE), STORED)
        };
        for number in 0..INVITATIONS_MAX {
            open(number, now).expect("room");
        }
        assert!(open(INVITATIONS_MAX, now).is_err_and(|fault| fault.contains("not used yet")));
        assert!(open(0, now).is_ok(), "another for the same peer takes its place");
        assert!(open(INVITATIONS_MAX, now + LIFE).is_ok(), "those that have expired make room");
    }
}
