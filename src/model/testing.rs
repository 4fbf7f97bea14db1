//! Values for tests.

use std::net::SocketAddr;
use std::time::{Duration, UNIX_EPOCH};

use crate::reason::Reason;
use crate::record::ConnectionRecord;

/// Returns the record of a short SNI connection with this outcome.
pub fn record(reason: Reason, sni: &[u8]) -> ConnectionRecord {
    ConnectionRecord {
        sni: Some(sni.into()),
        reason: Some(reason),
        duration: Duration::from_micros(1_500),
        ..ConnectionRecord::new(7, UNIX_EPOCH, "l".into(), SocketAddr::from(([10, 0, 0, 1], 4000)))
    }
}
