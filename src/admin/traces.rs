//! The connections of a trace, each with the decision that the gateway would make on it at present.

use super::explain::ExplainRequest;
use isthmus_model::identity::Identity;
use isthmus_model::record::ConnectionRecord;

/// The largest number of connections of a trace that are shown, because a client may send the same id with all connections.
pub(super) const SHOWN_MAX: usize = 32;

/// Returns the request that the gateway decided on; `None` if the connection ended before that, or if its name is not text.
pub(super) fn question(record: &ConnectionRecord) -> Option<ExplainRequest> {
    let authority = record.authority();
    if authority.is_none() && record.hello_trace.is_none() {
        return None;
    }
    let server_name = record.sni.as_deref().map(std::str::from_utf8).transpose().ok()?;
    let offered = record.alpn.as_deref().map(|names| String::from_utf8_lossy(names).into_owned());
    // A hello without ALPN offers no protocol, so the listener's check may refuse it.
    let offered =
        offered.unwrap_or_default().split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect();
    Some(ExplainRequest {
        name: authority.or(server_name).map(str::to_owned),
        authority: authority.is_some(),
        is_not_tls: false,
        identity: record.source_identity.as_deref().and_then(|identity| Identity::parse(identity).ok()),
        listener: Some(record.listener.to_string()),
        source: Some(record.source.ip()),
        alpn: authority.is_none().then_some(offered),
        local: record.local.map(|local| local.ip()),
    })
}
