//! Values for tests.

use std::net::SocketAddr;
use std::time::{Duration, UNIX_EPOCH};

use crate::reason::Reason;
use crate::record::{ConnectionProtocol, ConnectionRecord};

/// Returns the record of a short SNI connection with this outcome.
pub fn record(reason: Reason, sni: &[u8]) -> ConnectionRecord {
    ConnectionRecord {
        id: 7,
        time: UNIX_EPOCH,
        listener: "l".into(),
        protocol: ConnectionProtocol::Sni,
        authority: None,
        peer: None,
        source_claimed: None,
        trace: None,
        trace_state: None,
        hello_trace: None,
        span: None,
        unique_id: None,
        detail: None,
        cancelled: false,
        source: SocketAddr::from(([10, 0, 0, 1], 4000)),
        proxy: None,
        local: None,
        attempts: 0,
        ended_by: None,
        first_byte: None,
        source_network: "".into(),
        sni: Some(sni.into()),
        alpn: None,
        route: None,
        service: None,
        service_namespace: None,
        port: None,
        subset: None,
        endpoint: None,
        endpoint_cluster: "".into(),
        endpoint_locality: "".into(),
        source_identity: None,
        reason: Some(reason),
        duration: Duration::from_micros(1_500),
        hello: None,
        connect: None,
        bytes_up: 0,
        bytes_down: 0,
    }
}
