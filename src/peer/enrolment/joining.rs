//! The joining side of an enrolment: redeems a token at the addresses of the gateway that made it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use http::Uri;
use rustls::pki_types::CertificateDer;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tonic::{Code, Request};

use super::{ENROL, Enrolment, Failed, JOIN_WITHIN, MESSAGE_BYTES_MAX, STEP_WITHIN, Settings, owned};
use crate::enrolled::{Dialling, EnrolledLink, GatewayAddress};
use crate::party::Shown;
use crate::token::Token;
use isthmus_net::channel::{CallFault, Channel, Limits};
use isthmus_net::dial::dial;
use isthmus_proto::isthmus::peer::v1 as proto;
use isthmus_settings::peer::ENROL_PROTOCOL;
use isthmus_tls::client;
use isthmus_tls::pinned::{self, is_other_key};
use isthmus_tls::proof::tls_error_of;
use isthmus_tls::trust::{Shower, describe};

/// The pause before the next address is tried, whether or not the addresses before it have answered.
const NEXT_AFTER: Duration = Duration::from_millis(250);

/// One address at which a token may be redeemed, in two steps, of which each takes the time of a call.
pub(super) trait Redeemer: Sync {
    /// A connection over which the token can be redeemed.
    type Opened: Send;
    /// The result of the redemption.
    type Link;
    /// Returns the address as errors name it.
    fn name(&self) -> String;
    /// Opens a connection.
    fn open(&self) -> impl Future<Output = Result<Self::Opened, Failed>> + Send;
    /// Redeems the token over an opened connection.
    fn finish(&self, opened: Self::Opened) -> impl Future<Output = Result<Self::Link, Failed>> + Send;
}

/// Redeems a token at the first of these addresses where the gateway that made the token answers. The attempts begin one after
/// another, a moment apart, and run at the same time. An error names what happened at each address.
pub(super) async fn redeem_at<R: Redeemer>(places: &[R]) -> Result<R::Link, Failed> {
    let mut problems = BTreeMap::new();
    let redeeming = async {
        let mut opening: FuturesUnordered<_> = (0..)
            .zip(places)
            .map(|(number, place)| async move {
                sleep(NEXT_AFTER * number).await;
                (place, number, Box::pin(place.open()).await)
            })
            .collect();
        while let Some((place, number, opened)) = opening.next().await {
            let redeemed = match opened {
                // Meanwhile the other attempts wait: a token is redeemed at one address at a time.
                Ok(opened) => place.finish(opened).await,
                Err(failed) => Err(failed),
            };
            match redeemed {
                Ok(link) => return Some(Ok(link)),
                Err(Failed::Unreachable(problem)) => drop(problems.insert(number, problem)),
                Err(failed) => return Some(Err(failed)),
            }
        }
        None
    };
    if let Ok(Some(redeemed)) = timeout(JOIN_WITHIN, redeeming).await {
        return redeemed;
    }
    let late = |place: &R| format!("{}: no answer within {} s", place.name(), JOIN_WITHIN.as_secs());
    let texts =
        (0..).zip(places).map(|(number, place)| problems.remove(&number).unwrap_or_else(|| late(place)));
    Err(Failed::Unreachable(texts.collect::<Vec<_>>().join("; ")))
}

/// The redemption of a token at one address of the peer.
pub(super) struct At<'a> {
    pub(super) enrolment: &'a Enrolment,
    pub(super) settings: &'a Settings,
    pub(super) peer: &'a str,
    pub(super) address: &'a GatewayAddress,
    pub(super) token: &'a Token,
    pub(super) own: &'a proto::Party,
}

/// A connection over which both sides have checked each other.
pub(super) struct Opened {
    channel: Channel,
    /// The certificates that the other gateway has presented, leaf first.
    chain: Vec<CertificateDer<'static>>,
}

impl Redeemer for At<'_> {
    type Opened = Opened;
    type Link = EnrolledLink;

    fn name(&self) -> String {
        self.address.to_string()
    }

    /// Connects, and asks the peer for a trial, in which both gateways check each other.
    async fn open(&self) -> Result<Opened, Failed> {
        let shared = &self.enrolment.0;
        let socket =
            timeout(STEP_WITHIN, dial(&self.address.host, self.address.port, &self.settings.name_servers))
                .await;
        let socket = socket
            .map_err(|_| self.unreachable("the gateway does not accept the connection"))?
            .map_err(|error| self.unreachable(error))?;
        let config = pinned::client(shared.context.certificate.clone(), self.token.pin, ENROL_PROTOCOL)
            .map_err(|error| Failed::Refused(error.to_string()))?;
        let tls = TlsConnector::from(Arc::new(config)).connect(client::no_name(), socket);
        let tls = timeout(STEP_WITHIN, tls)
            .await
            .map_err(|_| self.unreachable("the gateway does not answer the TLS handshake"))?;
        let tls = tls.map_err(|error| match tls_error_of(&error) {
            Some(fault) if is_other_key(fault) => self.unreachable(
                "the key of the gateway does not match the token: it is another gateway, or its certificate was renewed after \
                 the token was made; make another token with `isthmus peer invite`",
            ),
            Some(fault) => self.unreachable(describe(fault)),
            None => self.unreachable(format!("{error}; {CLOSED}")),
        })?;
        let chain = owned(tls.get_ref().1.peer_certificates());
        let limits = Limits { message_bytes_max: MESSAGE_BYTES_MAX, ..Limits::default() };
        let opening = Channel::open_with(tls, Uri::from_static("https://peer"), &shared.scope, limits);
        let opened = timeout(STEP_WITHIN, opening)
            .await
            .map_err(|_| self.unreachable("the gateway does not answer"))?;
        let mut channel = opened.map_err(|fault| self.unreachable(format!("{fault}; {CLOSED}")))?;
        let theirs = self.ask(&mut channel, Attempt::Trial).await?;
        self.check(&theirs, &chain)?;
        Ok(Opened { channel, chain })
    }

    /// Redeems the token over an opened connection; returns the link to store.
    async fn finish(&self, opened: Opened) -> Result<EnrolledLink, Failed> {
        let Opened { mut channel, chain } = opened;
        let theirs = self.ask(&mut channel, Attempt::Final).await.map_err(|failed| match failed {
            Failed::Unreachable(problem) => Failed::Unreachable(format!(
                "{problem}; the other gateway may have used the token already; if so, make another token there with `isthmus \
                 peer invite --replace`"
            )),
            refused => refused,
        })?;
        // Checked again, because the peer's roots may have changed since the trial.
        self.check(&theirs, &chain)
    }
}

impl At<'_> {
    fn check(&self, party: &proto::Party, chain: &[CertificateDer<'static>]) -> Result<EnrolledLink, Failed> {
        let shown = Shown { shower: Shower::Server, chain };
        let dialling = Dialling::Ours(self.token.addresses.clone());
        self.enrolment.check(self.settings, self.peer, party, &shown, dialling).map_err(Failed::Refused)
    }

    /// Sends the secret, and the identity, roots and clock of this gateway; returns those of the peer.
    async fn ask(&self, channel: &mut Channel, attempt: Attempt) -> Result<proto::Party, Failed> {
        let request = proto::EnrolRequest {
            secret: self.token.secret.to_vec(),
            party: Some(self.own.clone()),
            trial: attempt == Attempt::Trial,
        };
        let asking = channel.unary::<_, proto::EnrolResponse>(ENROL, Request::new(request));
        let answer = timeout(STEP_WITHIN, asking)
            .await
            .map_err(|_| self.unreachable("the gateway does not answer"))?;
        match answer {
            Ok(answer) => Ok(answer.party.unwrap_or_default()),
            Err(CallFault::Refused { code, message }) => {
                let text = format!("the gateway {} refused the enrolment: {message}", self.address);
                Err(if code == Code::NotFound { Failed::Unreachable(text) } else { Failed::Refused(text) })
            }
            Err(fault @ (CallFault::Broken(_) | CallFault::Answer(_))) => {
                Err(self.unreachable(format!("{fault}; {CLOSED}")))
            }
        }
    }

    fn unreachable(&self, problem: impl std::fmt::Display) -> Failed {
        Failed::Unreachable(format!("{}: {problem}", self.address))
    }
}

/// The advice in the error if the peer closed the connection without an answer.
const CLOSED: &str = "a gateway accepts enrolments only on listeners of protocol auto or hbone, and only between `isthmus peer \
                      invite` and its next restart";

/// The two requests of an enrolment.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Attempt {
    /// The peer checks our identity, roots and clock, and answers; the token stays valid.
    Trial,
    /// The peer repeats the checks, redeems the token, and answers.
    Final,
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    /// The behaviour of an address.
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Place {
        Good,
        /// The attempt fails after five seconds.
        Dead,
        /// The attempt never ends.
        Hanging,
    }

    impl Redeemer for (usize, Place) {
        type Opened = ();
        type Link = usize;

        fn name(&self) -> String {
            format!("a{}", self.0)
        }

        async fn open(&self) -> Result<(), Failed> {
            match self.1 {
                Place::Good => Ok(()),
                Place::Dead => {
                    sleep(STEP_WITHIN).await;
                    Err(Failed::Unreachable(format!("{}: dead", self.name())))
                }
                Place::Hanging => std::future::pending().await,
            }
        }

        async fn finish(&self, (): ()) -> Result<usize, Failed> {
            Ok(self.0)
        }
    }

    /// Redeems a token at these places; returns the time and the result.
    async fn redeemed(places: &[Place]) -> (Duration, Result<usize, String>) {
        let places: Vec<(usize, Place)> = (0..).zip(places.iter().copied()).collect();
        let begun = Instant::now();
        let result = redeem_at(&places).await;
        (begun.elapsed(), result.map_err(|failed| failed.text()))
    }

    #[tokio::test(start_paused = true)]
    async fn a_further_address_is_tried_each_quarter_of_a_second_and_a_join_has_a_minute() {
        let fifteen = [Place::Dead; 15];
        let last = [&fifteen[..], &[Place::Good]].concat();
        assert_eq!(redeemed(&last).await, (Duration::from_millis(3_750), Ok(15)));
        let all = [&fifteen[..], &[Place::Dead]].concat();
        let (took, refused) = redeemed(&all).await;
        assert_eq!(took, Duration::from_millis(3_750 + 5_000));
        assert!(refused.is_err_and(|text| text.starts_with("a0: dead; a1: dead; ")));
        let (took, refused) = redeemed(&[Place::Hanging, Place::Dead]).await;
        let expected = "a0: no answer within 60 s; a1: dead".to_owned();
        assert_eq!((took, refused), (Duration::from_secs(60), Err(expected)));
    }
}
