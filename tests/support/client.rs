//! Test clients: TLS connections by rustls, and the raw bytes of hellos.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};

use super::pki::PKI;

/// A TLS connection through a gateway.
pub type Tls = StreamOwned<ClientConnection, TcpStream>;

/// Connects to `address`; a read fails after 30 s.
pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&address, Duration::from_secs(10)).expect("the gateway");
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
    stream.set_nodelay(true).expect("set");
    stream
}

/// Performs a TLS handshake with this SNI; the error is the one that the client observes.
pub fn tls_with(config: Arc<ClientConfig>, address: SocketAddr, name: &str) -> io::Result<Tls> {
    let name = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
    let mut connection = ClientConnection::new(config, name).map_err(io::Error::other)?;
    let mut stream = connect(address);
    while connection.is_handshaking() {
        connection.complete_io(&mut stream)?;
    }
    Ok(StreamOwned::new(connection, stream))
}

/// Performs a TLS handshake, but keeps back the client's last byte, and returns that byte for the test to send later. The
/// server can read the client's certificate meanwhile.
pub fn tls_almost(config: &ClientConfig, address: SocketAddr) -> (TcpStream, Vec<u8>) {
    let mut config = config.clone();
    // The handshake is cut into many records. The last byte belongs to the last record, so the server can process all other
    // records without this byte.
    config.max_fragment_size = Some(64);
    let mut connection = ClientConnection::new(Arc::new(config), address.ip().into()).expect("a client");
    let mut stream = connect(address);
    while connection.is_handshaking() {
        while connection.wants_write() && connection.is_handshaking() {
            connection.write_tls(&mut stream).expect("sent");
        }
        connection.read_tls(&mut stream).expect("read");
        connection.process_new_packets().expect("a server's handshake");
    }
    let mut flight = Vec::new();
    while connection.wants_write() {
        connection.write_tls(&mut flight).expect("in memory");
    }
    let rest = flight.split_off(flight.len() - 1);
    stream.write_all(&flight).expect("sent");
    (stream, rest)
}

/// Performs a TLS handshake with the tests' own CA and without ALPN.
pub fn tls(address: SocketAddr, name: &str) -> io::Result<Tls> {
    tls_with(PKI.client(&[]), address, name)
}

/// Sends a line, and reads a line.
pub fn call(stream: &mut (impl Read + Write), text: &str) -> io::Result<String> {
    // The text and the newline are one TLS record, so that the server reads them at once.
    stream.write_all(format!("{text}\n").as_bytes())?;
    stream.flush()?;
    let mut answer = Vec::new();
    let mut byte = [0];
    while stream.read(&mut byte)? == 1 && byte[0] != b'\n' {
        answer.push(byte[0]);
    }
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// Returns the ClientHello that rustls writes for this name.
pub fn hello(name: &str) -> Vec<u8> {
    let name = ServerName::try_from(name.to_owned()).expect("a name");
    let mut connection = ClientConnection::new(PKI.client(&[]), name).expect("a client");
    let mut bytes = Vec::new();
    connection.write_tls(&mut bytes).expect("memory takes it");
    bytes
}

/// Reads to the end. Returns the description of the fatal TLS alert, if that is all that was received, and true if the stream
/// ended with a FIN (not a reset).
pub fn read_alert(stream: &mut TcpStream) -> (Option<u8>, bool) {
    let mut bytes = Vec::new();
    let fin = stream.read_to_end(&mut bytes).is_ok();
    let alert = match bytes.as_slice() {
        [21, 3, _, 0, 2, 2, description] => Some(*description),
        _ => None,
    };
    (alert, fin)
}

/// Accepts any certificate, but checks that the server has the certificate's key.
#[derive(Debug)]
pub struct AnyCertificate;

impl rustls::client::danger::ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &[rustls::pki_types::CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: rustls::pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &rustls::pki_types::CertificateDer<'_>,
        signature: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        let algorithms = provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, &algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &rustls::pki_types::CertificateDer<'_>,
        signature: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        let algorithms = provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, &algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        rustls::crypto::aws_lc_rs::default_provider().signature_verification_algorithms.supported_schemes()
    }
}
