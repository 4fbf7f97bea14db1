//! The check of handshake signatures that all certificate verifiers of this crate share.

/// Implements the signature methods of a rustls verifier, for a type with the field `algorithms`: for TLS 1.3 alone, or with
/// `tls12`, also for TLS 1.2.
macro_rules! verify_signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &rustls::pki_types::CertificateDer<'_>,
            _: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            // rustls never calls this: the config allows version 1.3 only.
            Err(rustls::PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme.into())
        }

        verify_signatures!(tls13);
    };
    (tls12) => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            certificate: &rustls::pki_types::CertificateDer<'_>,
            signed: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            rustls::crypto::verify_tls12_signature(message, certificate, signed, &self.algorithms)
        }

        verify_signatures!(tls13);
    };
    (tls13) => {
        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &rustls::pki_types::CertificateDer<'_>,
            signed: &rustls::DigitallySignedStruct,
        ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
            rustls::crypto::verify_tls13_signature(message, certificate, signed, &self.algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
            self.algorithms.supported_schemes()
        }
    };
}

pub(super) use verify_signatures;
