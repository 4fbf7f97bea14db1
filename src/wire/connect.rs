//! The head of an HBONE CONNECT request (RFC 9113 §8.5), and the responses to it.

use http::header::{HeaderName, HeaderValue};
use http::request::Parts;
use http::{HeaderMap, Method, Response, StatusCode};

use isthmus_model::authority::{Authority, AuthorityFault};
use isthmus_model::reason::Reason;
use isthmus_model::service::CallerKind;
use isthmus_model::trace::TraceParent;

/// The response header that contains the reason, one word of a closed list.
pub const REASON_HEADER: HeaderName = HeaderName::from_static("isthmus-reason");

/// The request header with the kind of a call that a gateway of a peer passes on.
pub const CALL_HEADER: HeaderName = HeaderName::from_static(CALL);

/// The request header with [`HOST`], if the caller of a call by SNI has sent the host name, and no mesh name.
pub const NAME_HEADER: HeaderName = HeaderName::from_static(NAME);

/// The value of [`NAME_HEADER`].
pub const HOST: &str = "host";

/// The request header with the trust domains of the gateways that have passed a call on, in their order.
pub const PATH_HEADER: HeaderName = HeaderName::from_static(PATH);
const CALL: &str = "isthmus-kind";
const NAME: &str = "isthmus-name";
const PATH: &str = "isthmus-path";

/// The largest number of trust domains in a path.
pub const PATH_MAX: usize = 8;

/// The size of the largest accepted header list, in bytes (RFC 9113 §6.5.2).
pub const HEADER_BYTES_MAX: usize = 16 * 1024;

/// The unverified claims of a caller about itself; only telemetry uses them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claims {
    /// The caller's trace context.
    pub trace: Option<TraceParent>,
    /// The `tracestate` that belongs to `trace`.
    pub trace_state: Option<Box<str>>,
    /// `cluster/namespace/workload` from the `baggage` header; absent parts are empty.
    pub workload: Option<Box<str>>,
}

/// The head of a valid CONNECT request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectHead {
    /// The destination.
    pub authority: Authority,
    /// The unverified claims of the caller, for telemetry.
    pub claims: Claims,
    /// The kind of proxy that the caller says it is.
    pub kind: CallerKind,
    /// The kind of the call.
    pub call: Call,
    /// The trust domains of the gateways that have passed the call on; empty for a call of a workload.
    pub path: Box<[Box<str>]>,
}

/// The kind of a call that a gateway of a peer passes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Call {
    /// The stream carries what a CONNECT stream of the caller carries.
    #[default]
    Hbone,
    /// The stream carries the caller's TLS, from its ClientHello on, which has the mesh name of the authority.
    Sni,
    /// The stream carries the caller's TLS, from its ClientHello on, which has the host name of the authority.
    Host,
}

impl Call {
    /// Returns the kind as [`CALL_HEADER`] has it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Hbone => "hbone",
            Self::Sni | Self::Host => "sni",
        }
    }
}

/// An error of a request that is not a valid CONNECT.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeadFault {
    /// The header list is larger than [`HEADER_BYTES_MAX`].
    #[error("the headers of the request have more than {} bytes", HEADER_BYTES_MAX)]
    TooLarge,
    /// The method is not CONNECT.
    #[error("the method is not CONNECT")]
    Method,
    /// The request has no authority.
    #[error("the request has no authority")]
    NoAuthority,
    /// The authority is malformed.
    #[error("the authority of the request is malformed: {0}")]
    Authority(AuthorityFault),
    /// The named header occurs more than once.
    #[error("the request has the header {0} more than once")]
    Repeated(&'static str),
    /// The kind of the call is unknown.
    #[error("the header isthmus-kind is neither sni nor hbone")]
    Call,
    /// The path is malformed or too long.
    #[error("the header isthmus-path is not a list of at most {} trust domains", PATH_MAX)]
    Path,
}

impl HeadFault {
    /// Returns the HTTP status with which the request is refused.
    pub fn status(self) -> StatusCode {
        match self {
            Self::TooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::NoAuthority | Self::Authority(_) | Self::Repeated(_) | Self::Call | Self::Path => {
                StatusCode::BAD_REQUEST
            }
        }
    }
}

/// The header with the kind of proxy that the caller is.
const SOURCE: &str = "x-istio-source";
/// The headers that may occur only once, because two readers could disagree on which of two is valid. `baggage` may come in
/// parts (W3C Baggage §3.2).
const SINGLE: [&str; 7] = ["traceparent", "forwarded", SOURCE, "x-forwarded-network", CALL, NAME, PATH];
/// The largest length of a claim in bytes; a longer claim is cut.
const CLAIM_BYTES_MAX: usize = 253;
/// The longest `tracestate` that is kept, in bytes; a longer one may be dropped (W3C Trace Context §3.3.1.5).
const TRACE_STATE_BYTES_MAX: usize = 512;

/// Parses the head of a request.
pub fn read_head(head: &Parts) -> Result<ConnectHead, HeadFault> {
    if list_size(head) > HEADER_BYTES_MAX {
        return Err(HeadFault::TooLarge);
    }
    if head.method != Method::CONNECT {
        return Err(HeadFault::Method);
    }
    let authority = head.uri.authority().ok_or(HeadFault::NoAuthority)?;
    let authority = Authority::parse(authority.as_str()).map_err(HeadFault::Authority)?;
    let repeated = |name: &&&str| head.headers.get_all(**name).iter().nth(1).is_some();
    if let Some(name) = SINGLE.iter().find(repeated) {
        return Err(HeadFault::Repeated(name));
    }
    let kind = head.headers.get(SOURCE).map(|value| CallerKind::read(value.as_bytes())).unwrap_or_default();
    let (call, path) = (call(&head.headers)?, path(&head.headers)?);
    Ok(ConnectHead { authority, claims: claims(&head.headers), kind, call, path })
}

fn call(headers: &HeaderMap) -> Result<Call, HeadFault> {
    let Some(text) = headers.get(CALL_HEADER) else { return Ok(Call::default()) };
    let known = [Call::Sni, Call::Hbone].into_iter().find(|call| call.text().as_bytes() == text.as_bytes());
    let has_host = headers.get(NAME_HEADER).is_some_and(|name| name.as_bytes() == HOST.as_bytes());
    match known.ok_or(HeadFault::Call)? {
        Call::Sni if has_host => Ok(Call::Host),
        call => Ok(call),
    }
}

/// Returns the trust domains of a path. That they are legal names is not checked, because they are only counted and shown.
fn path(headers: &HeaderMap) -> Result<Box<[Box<str>]>, HeadFault> {
    let Some(text) = headers.get(PATH_HEADER) else { return Ok(Box::default()) };
    let text = text.to_str().map_err(|_| HeadFault::Path)?;
    let is_domain = |hop: &str| {
        (1..=CLAIM_BYTES_MAX).contains(&hop.len()) && hop.bytes().all(|byte| byte.is_ascii_graphic())
    };
    let hops: Vec<&str> = text.split(',').map(str::trim).take(PATH_MAX + 1).collect();
    if hops.len() > PATH_MAX || !hops.iter().all(|hop| is_domain(hop)) {
        return Err(HeadFault::Path);
    }
    Ok(hops.into_iter().map(Box::from).collect())
}

/// Returns the size of the header list of a CONNECT request, as RFC 9113 §6.5.2 counts it.
fn list_size(head: &Parts) -> usize {
    let of = |name: &str, bytes: usize| name.len() + bytes + 32;
    let authority = head.uri.authority().map_or(0, |authority| of(":authority", authority.as_str().len()));
    let headers = head.headers.iter().map(|(name, value)| of(name.as_str(), value.len()));
    of(":method", head.method.as_str().len()) + authority + headers.sum::<usize>()
}

fn claims(headers: &HeaderMap) -> Claims {
    let trace = headers.get("traceparent").and_then(|value| value.to_str().ok());
    let trace = trace.and_then(TraceParent::parse);
    Claims { trace, trace_state: trace.and_then(|_| trace_state(headers)), workload: workload(headers) }
}

/// Returns `tracestate`, which may be spread over several headers. Returns all of it, or `None` if it is too long or not
/// text.
fn trace_state(headers: &HeaderMap) -> Option<Box<str>> {
    let mut whole = String::new();
    for part in headers.get_all("tracestate") {
        let part = part.to_str().ok()?.trim();
        if !whole.is_empty() && !part.is_empty() {
            whole.push(',');
        }
        whole.push_str(part);
        if whole.len() > TRACE_STATE_BYTES_MAX {
            return None;
        }
    }
    (!whole.is_empty()).then(|| whole.into())
}

/// Returns `cluster/namespace/workload` from the `baggage` that ztunnel and waypoints send; absent parts are
/// empty.
fn workload(headers: &HeaderMap) -> Option<Box<str>> {
    let (mut cluster, mut namespace, mut name) = ("", "", "");
    let values = headers.get_all("baggage").iter().filter_map(|value| value.to_str().ok());
    for (key, value) in values.flat_map(|value| value.split(',')).filter_map(|entry| entry.split_once('=')) {
        match key.trim() {
            "k8s.cluster.name" => cluster = value.trim(),
            "k8s.namespace.name" => namespace = value.trim(),
            "k8s.deployment.name" | "k8s.cronjob.name" | "k8s.job.name" | "k8s.pod.name" => {
                name = value.trim()
            }
            _ => {}
        }
    }
    if cluster.is_empty() && namespace.is_empty() && name.is_empty() {
        return None;
    }
    // A header value that is text is ASCII, so it can be cut at any byte.
    let mut text = format!("{cluster}/{namespace}/{name}");
    text.truncate(CLAIM_BYTES_MAX);
    Some(text.into())
}

/// Returns the status and the reason that a caller reads. A service that is not exported, or that a peer asks for and another peer
/// offers, gets the same response as one that does not exist.
pub fn status_of(reason: Reason) -> (StatusCode, Reason) {
    let status = reason.status().and_then(|status| StatusCode::from_u16(status).ok());
    let told = match reason {
        Reason::NotExported | Reason::HopLimit => Reason::AuthorityUnknown,
        reason => reason,
    };
    (status.unwrap_or(StatusCode::SERVICE_UNAVAILABLE), told)
}

/// Returns a response with this status, and with the reason in a header.
pub fn answer(status: StatusCode, reason: Reason) -> Response<()> {
    let mut response = Response::new(());
    *response.status_mut() = status;
    response.headers_mut().insert(REASON_HEADER, HeaderValue::from_static(reason.text()));
    response
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn read(method: &str, authority: &str, headers: &[(&str, &str)]) -> Result<ConnectHead, HeadFault> {
        let mut request = Request::builder().method(method).uri(authority);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        read_head(&request.body(()).expect("a request").into_parts().0)
    }

    #[test]
    fn a_head_is_a_connect_to_an_authority_with_a_port() {
        let head = read("CONNECT", "Echo.default.svc:80", &[]).expect("good");
        assert_eq!((head.authority.host.to_string(), head.authority.port), ("echo.default.svc".into(), 80));
        assert_eq!(read("GET", "http://echo:80/", &[]), Err(HeadFault::Method));
        assert_eq!(read("CONNECT", "/", &[]), Err(HeadFault::NoAuthority));
        assert_eq!(read("CONNECT", "echo", &[]), Err(HeadFault::Authority(AuthorityFault::NoPort)));
        assert_eq!(read("CONNECT", "a@echo:80", &[]), Err(HeadFault::Authority(AuthorityFault::Host)));
        for name in SINGLE {
            assert_eq!(read("CONNECT", "e:80", &[(name, "a"), (name, "b")]), Err(HeadFault::Repeated(name)));
        }
    }

    #[test]
    fn a_call_that_a_gateway_passes_on_has_a_kind_and_a_path() {
        let head = |headers: &[(&str, &str)]| read("CONNECT", "e:80", headers);
        let plain = head(&[]).expect("good");
        assert_eq!((plain.call, plain.path.len()), (Call::Hbone, 0));
        let passed = head(&[("isthmus-kind", "sni"), ("isthmus-path", "east.example, west.example")]);
        let passed = passed.expect("good");
        assert_eq!(
            (passed.call, &*passed.path),
            (Call::Sni, &["east.example".into(), "west.example".into()][..])
        );
        assert_eq!(head(&[("isthmus-kind", "SNI")]), Err(HeadFault::Call));
        let call = |kind: &str, name: &str| {
            head(&[("isthmus-kind", kind), ("isthmus-name", name)]).map(|head| head.call)
        };
        assert_eq!((call("sni", "host"), call("sni", "other")), (Ok(Call::Host), Ok(Call::Sni)));
        assert_eq!(call("hbone", "host"), Ok(Call::Hbone));
        let long = ["a"; PATH_MAX + 1].join(",");
        for wrong in ["", "a,", "a b", &"x".repeat(CLAIM_BYTES_MAX + 1), &long] {
            assert_eq!(head(&[("isthmus-path", wrong)]), Err(HeadFault::Path), "{wrong}");
        }
        assert!(head(&[("isthmus-path", &long[2..])]).is_ok());
    }

    #[test]
    fn a_header_list_has_at_most_16_kib() {
        // The method and the authority count 46 and 46 bytes, and the header 33 without its value.
        let with = |bytes: usize| read("CONNECT", "e:80", &[("a", &"x".repeat(bytes))]).map(drop);
        assert_eq!(with(HEADER_BYTES_MAX - 46 - 46 - 33), Ok(()));
        assert_eq!(with(HEADER_BYTES_MAX - 46 - 46 - 32), Err(HeadFault::TooLarge));
        assert_eq!(HeadFault::TooLarge.status(), 431);
        let long = format!("{}:80", "h".repeat(HEADER_BYTES_MAX));
        assert_eq!(read("CONNECT", &long, &[]), Err(HeadFault::TooLarge));
    }

    #[test]
    fn what_a_caller_claims_is_kept_short() {
        let baggage = "k8s.cluster.name=c1, k8s.namespace.name=shop,k8s.deployment.name=cart,service.name=x";
        let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let claims = |headers: &[(&str, &str)]| read("CONNECT", "e:80", headers).expect("good").claims;
        let of = claims(&[("baggage", baggage), ("traceparent", parent)]);
        assert_eq!((of.workload.as_deref(), of.trace), (Some("c1/shop/cart"), TraceParent::parse(parent)));
        let parts = claims(&[("baggage", "k8s.namespace.name=shop"), ("baggage", "k8s.job.name=j")]);
        assert_eq!(parts.workload.as_deref(), Some("/shop/j"));
        assert_eq!(claims(&[("baggage", "a=b,,=,k8s"), ("traceparent", "x")]), Claims::default());
        let state = |parts: &[&str]| {
            let parts = parts.iter().map(|part| ("tracestate", *part)).chain([("traceparent", parent)]);
            claims(&parts.collect::<Vec<_>>()).trace_state
        };
        assert_eq!(state(&["a=1, b=2", "", "c=3"]).as_deref(), Some("a=1, b=2,c=3"));
        assert_eq!((state(&[]), state(&["a=1", &"b".repeat(509)])), (None, None));
        assert_eq!(state(&["a=1", &"b".repeat(508), ""]).map(|state| state.len()), Some(512));
        assert_eq!(claims(&[("tracestate", "a=1")]), Claims::default(), "of no trace");
        let long = format!("k8s.job.name={}", "j".repeat(500));
        assert_eq!(claims(&[("baggage", &long)]).workload.map(|text| text.len()), Some(CLAIM_BYTES_MAX));
    }
}
