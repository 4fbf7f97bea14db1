//! Recent failed connections, which the explanation of a name shows below the decision.

use std::sync::Arc;

use super::explain::ExplainRequest;
use isthmus_api::explanation::RecentFailure;
use isthmus_model::record::ConnectionRecord;
use isthmus_telemetry::clock::rfc3339;

/// The largest number of failures that an explanation shows; older failures are omitted.
const SHOWN_MAX: usize = 20;

/// Returns the failures of connections that asked for the name. Connections that ended before they asked for any name may come
/// from the same client, so their failures are returned too. `records` are the last failures, newest first.
pub(super) fn recent(records: &[Arc<ConnectionRecord>], request: &ExplainRequest) -> Vec<RecentFailure> {
    let mut all: Vec<RecentFailure> = Vec::new();
    for record in records.iter().filter(|record| is_asked_for(record, request)) {
        let Some(reason) = record.reason.map(|reason| reason.text()) else { continue };
        let name = name(record);
        let same = |one: &&mut RecentFailure| {
            one.reason == reason && *one.listener == *record.listener && one.name.is_some() == name.is_some()
        };
        if let Some(found) = all.iter_mut().find(same) {
            found.count += 1;
        } else if all.len() < SHOWN_MAX {
            all.push(RecentFailure {
                reason: reason.to_owned(),
                name: name.map(|name| name.escape_ascii().to_string()),
                listener: record.listener.to_string(),
                count: 1,
                last_time: rfc3339(record.time),
                last_source: record.source.ip().to_string(),
                detail: record.detail.as_deref().map(str::to_owned),
            });
        }
    }
    all
}

/// Returns the name that a connection requested, as received.
fn name(record: &ConnectionRecord) -> Option<&[u8]> {
    record.sni.as_deref().or_else(|| record.authority().map(str::as_bytes))
}

/// Returns a name without a trailing dot.
fn plain(name: &[u8]) -> &[u8] {
    name.strip_suffix(b".").unwrap_or(name)
}

fn is_asked_for(record: &ConnectionRecord, request: &ExplainRequest) -> bool {
    let of_listener = request.listener.as_deref().is_none_or(|listener| listener == &*record.listener);
    let of_source = request.source.is_none_or(|source| source == record.source.ip().to_canonical());
    let asked = if request.authority { record.authority().map(str::as_bytes) } else { record.sni.as_deref() };
    let of_name = match (name(record), &request.name) {
        (None, _) => true,
        (Some(_), Some(wanted)) => {
            asked.is_some_and(|asked| plain(asked).eq_ignore_ascii_case(plain(wanted.as_bytes())))
        }
        (Some(_), None) => false,
    };
    of_listener && of_source && of_name
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_model::reason::Reason;
    use isthmus_model::testing::record;

    #[test]
    fn the_failures_of_a_name_and_those_without_a_name_are_counted_by_reason() {
        let nameless = || ConnectionRecord { sni: None, ..record(Reason::NotTls, b"") };
        let records = [
            record(Reason::EndpointRefused, b"A.test."),
            nameless(),
            record(Reason::EndpointRefused, b"a.test"),
            record(Reason::SniUnknown, b"b.test"),
            ConnectionRecord { listener: "other".into(), ..nameless() },
        ];
        let records: Vec<_> = records.into_iter().map(Arc::new).collect();
        let short = |request: &ExplainRequest| -> Vec<(String, usize, Option<String>)> {
            let all = recent(&records, request).into_iter();
            all.map(|one| (one.reason, one.count, one.name)).collect()
        };
        let named = |name: &str| ExplainRequest { name: Some(name.to_owned()), ..ExplainRequest::default() };
        let (refused, not_tls) = ("endpoint_refused".to_owned(), "not_tls".to_owned());
        let both = [
            (refused, 2, Some("A.test.".to_owned())),
            (not_tls.clone(), 1, None),
            (not_tls.clone(), 1, None),
        ];
        assert_eq!(short(&named("a.TEST")), both);
        let request = ExplainRequest { listener: Some("other".to_owned()), ..named("a.test") };
        assert_eq!(short(&request), [(not_tls, 1, None)]);
        assert_eq!(
            short(&ExplainRequest { authority: true, ..named("a.test") }).len(),
            2,
            "names of the other kind"
        );
        let request = ExplainRequest { source: Some([10, 9, 9, 9].into()), ..named("a.test") };
        assert_eq!(short(&request), []);
    }

    #[test]
    fn the_list_is_bounded() {
        let of = |listener: usize| {
            let listener = format!("l{listener}");
            Arc::new(ConnectionRecord { listener: listener.as_str().into(), ..record(Reason::NotTls, b"a") })
        };
        let records: Vec<_> = (0..100).map(of).collect();
        let request = ExplainRequest { name: Some("a".to_owned()), ..ExplainRequest::default() };
        assert_eq!(recent(&records, &request).len(), SHOWN_MAX);
    }
}
