//! What a peer has proven in a TLS handshake, and for how long that holds.

use std::io;

use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::{Error, ServerConnection};

use super::certificate::identity_of;
use super::trust::TrustBundles;
use crate::model::identity::Identity;
use crate::net::latest::Latest;

/// Who a peer has proven to be, and by what.
#[derive(Debug)]
pub struct Proof {
    pub identity: Identity,
    /// The certificates that say so, leaf first.
    chain: Vec<CertificateDer<'static>>,
    /// When they were verified.
    verified: UnixTime,
}

impl Proof {
    /// Of a handshake that is done; or, in words, why it proves nothing.
    pub fn of(session: &ServerConnection) -> Result<Self, String> {
        let chain = session.peer_certificates().unwrap_or_default();
        let leaf = chain.first().ok_or("it showed no certificate")?;
        let identity = identity_of(leaf).map_err(|fault| fault.to_string())?;
        let chain = chain.iter().map(|certificate| certificate.clone().into_owned()).collect();
        Ok(Self { identity, chain, verified: UnixTime::now() })
    }

    /// Whether these roots vouch for it, as of when it was shown: that a certificate has expired since ends nothing.
    pub fn vouched_by(&self, trust: &TrustBundles) -> Result<(), Error> {
        let (leaf, intermediates) = self.chain.split_first().ok_or(Error::NoCertificatesPresented)?;
        trust.verify(leaf, intermediates, self.verified).map(drop)
    }

    /// Waits until the roots that are trusted do not vouch for it any more. What the handle has seen when the handshake
    /// began is what it was verified against.
    pub async fn doubted(&self, mut trust: Latest<TrustBundles>) -> Error {
        loop {
            if let Err(error) = self.vouched_by(&*trust.changed().await) {
                return error;
            }
        }
    }
}

/// What was wrong with the TLS of a failed handshake; `None` where the connection broke.
pub fn fault_of(error: &io::Error) -> Option<&Error> {
    error.get_ref().and_then(|inner| inner.downcast_ref())
}
