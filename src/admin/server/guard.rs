//! The requests that the admin listener accepts: none from web pages, and requests about enrolments only from the own host.

use std::net::{IpAddr, SocketAddr};

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;

use super::Hosts;
use crate::response::error;

/// The header by which browsers say which site makes a request (Fetch Metadata).
const FETCH_SITE: &str = "sec-fetch-site";

/// The address that a request comes from.
#[derive(Clone, Copy)]
pub(super) struct Caller(pub(super) IpAddr);

/// Refuses requests that come neither over loopback nor over a unix socket.
pub(super) async fn own_host_only(hosts: Hosts, request: Request, next: Next) -> Response {
    let is_loopback = request.extensions().get().is_some_and(|Caller(address)| address.is_loopback());
    if hosts == Hosts::Own && !is_loopback {
        return error(
            StatusCode::FORBIDDEN,
            "the gateway accepts invitations and joins only from its own host: run the command there, and give a loopback \
             address or unix socket of admin.bind with --admin",
        );
    }
    next.run(request).await
}

/// Refuses requests that come from web pages: requests with a foreign host name (DNS rebinding), and POST requests from another
/// origin.
pub(super) async fn guard(hosts: Hosts, request: Request, next: Next) -> Response {
    let headers = request.headers();
    if hosts == Hosts::Own && !is_own_host(headers) {
        return error(StatusCode::FORBIDDEN, "the Host header must be an address or localhost");
    }
    if request.method() != Method::GET && headers.contains_key(header::ORIGIN) {
        return error(
            StatusCode::FORBIDDEN,
            "a POST request with an Origin header, as web pages send it, is refused",
        );
    }
    if request.method() != Method::GET && headers.get_all(FETCH_SITE).iter().any(is_foreign) {
        return error(
            StatusCode::FORBIDDEN,
            "a POST request from a web page of another site (Sec-Fetch-Site) is refused",
        );
    }
    next.run(request).await
}

/// Returns true if a browser sends the request for another site than the one of this listener.
fn is_foreign(site: &HeaderValue) -> bool {
    site != "same-origin" && site != "none"
}

/// Returns true if `Host` is an address or `localhost`, with or without a port.
fn is_own_host(headers: &HeaderMap) -> bool {
    let mut hosts = headers.get_all(header::HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        return false;
    };
    let Ok(host) = host.to_str() else {
        return false;
    };
    if host.parse::<SocketAddr>().is_ok() || host.parse::<IpAddr>().is_ok() {
        return true;
    }
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_and_localhost_are_hosts_of_ours() {
        let own = |host: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, host.parse().expect("a value"));
            is_own_host(&headers)
        };
        for host in ["127.0.0.1:15000", "localhost", "LOCALHOST:1", "[::1]:15000", "[::1]", "10.0.0.1"] {
            assert!(own(host), "{host}");
        }
        for host in
            ["evil.example", "evil.example:15000", "localhost.evil.example", "127.0.0.1.evil.example", ""]
        {
            assert!(!own(host), "{host}");
        }
        assert!(!is_own_host(&HeaderMap::new()));
    }
}
