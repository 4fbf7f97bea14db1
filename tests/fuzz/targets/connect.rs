//! Heads of CONNECT requests: the first line is the method, the second the authority, each further line a header.

use http::{HeaderName, HeaderValue, Method, Request, Uri};
use isthmus::model::authority::Authority;
use isthmus::wire::connect::{PATH_MAX, read_head};

pub(super) fn run(data: &[u8]) {
    let mut lines = data.split(|byte| *byte == b'\n');
    let mut line = || lines.next().unwrap_or_default();
    let mut head = Request::new(()).into_parts().0;
    let (method, authority) = (line(), line());
    head.method = Method::from_bytes(method).unwrap_or(Method::CONNECT);
    // The HTTP/2 library makes the URI of a CONNECT from `:authority` alone.
    let authority = http::uri::Authority::try_from(authority).ok();
    let uri = authority.map(|authority| Uri::builder().authority(authority).build());
    head.uri = uri.and_then(Result::ok).unwrap_or_default();
    for line in lines {
        let Some(colon) = line.iter().position(|byte| *byte == b':') else { continue };
        let (name, value) =
            (HeaderName::from_bytes(&line[..colon]), HeaderValue::from_bytes(&line[colon + 1..]));
        if let (Ok(name), Ok(value)) = (name, value) {
            let _ = head.headers.try_append(name, value);
        }
    }
    match read_head(&head) {
        Ok(found) => {
            let text = match found.authority.host.to_string() {
                address if address.contains(':') && !address.starts_with('[') => {
                    format!("[{address}]:{}", found.authority.port)
                }
                host => format!("{host}:{}", found.authority.port),
            };
            assert_eq!(Authority::parse(&text).as_ref(), Ok(&found.authority), "{text}");
            assert!(found.authority.port > 0);
            assert!(found.claims.workload.is_none_or(|workload| workload.len() <= 3 * 253 + 2));
            assert!(found.claims.trace_state.is_none_or(|state| state.len() <= 512));
            assert!(
                found.path.len() <= PATH_MAX
                    && found.path.iter().all(|hop| !hop.is_empty() && hop.len() <= 253)
            );
        }
        Err(fault) => assert!(fault.status().is_client_error(), "{fault}"),
    }
}
