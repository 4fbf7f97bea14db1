//! The parsers of texts in a document, and the messages for misspelt ones. A text is parsed into the model's own
//! types.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use ipnet::IpNet;

use isthmus_model::address::{AdminBind, Bind, Host, Scheme, Url, canonical_ip};
use isthmus_model::identity::{Identity, IdentityError, IdentityPattern, TrustDomain};
use isthmus_model::limits::MemoryLimit;
use isthmus_model::name::{HostName, NameError, NamePattern, PatternError};
use isthmus_model::place::Locality;
use isthmus_model::time::parse_rfc3339;
use isthmus_settings::route::RouteName;

use super::problem::InvalidValue;

/// The longest duration, one year, so that a sum of a clock and a duration cannot overflow.
const DURATION_MAX: Duration = Duration::from_secs(8760 * 3600);
/// The default port of name servers.
const NAME_SERVER_PORT: u16 = 53;
/// The default port of OTLP collectors over gRPC.
const OTLP_PORT: u16 = 4317;
/// The default port of etcd for clients.
const ETCD_PORT: u16 = 2379;
/// The largest length of a free text, in bytes; longer texts are refused.
const TEXT_BYTES_MAX: usize = 253;
/// The smallest memory budget in bytes; an idle gateway needs most of it.
const MEMORY_MIN: u64 = 32 << 20;

fn checked(text: &str) -> Result<&str, InvalidValue> {
    if text.is_empty() {
        Err("it is empty".into())
    } else if text.len() > TEXT_BYTES_MAX {
        Err(InvalidValue::new(format!("it is longer than {TEXT_BYTES_MAX} bytes")))
    } else if text.chars().any(char::is_control) {
        Err("it has a control character".into())
    } else {
        Ok(text)
    }
}

/// Checks a text that is not empty and has no control characters, as names shown to operators must be.
pub fn text(text: &str) -> Result<&str, InvalidValue> {
    checked(text)
}

/// Checks the namespace of a service. A slash stands between the name of a peer and the namespace of its service, so that no
/// service of this mesh can be merged with that of a peer.
pub fn namespace(text: &str) -> Result<&str, InvalidValue> {
    let text = checked(text)?;
    if text.contains('/') { Err("it has a '/'".into()) } else { Ok(text) }
}

/// Checks the value of a label, which may be empty.
pub fn label_value(text: &str) -> Result<&str, InvalidValue> {
    if text.is_empty() { Ok(text) } else { checked(text) }
}

/// Parses a path, as written.
pub fn path(text: &str) -> Result<&std::path::Path, InvalidValue> {
    if text.is_empty() {
        Err("it is empty".into())
    } else if text.chars().any(char::is_control) {
        Err("it has a control character".into())
    } else {
        Ok(std::path::Path::new(text))
    }
}

/// Splits a text into a whole number and the rest.
fn quantity(text: &str) -> Result<(u64, &str), InvalidValue> {
    let end = text.bytes().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    if digits.is_empty() {
        return Err("it does not begin with a number".into());
    }
    Ok((digits.parse().map_err(|_| InvalidValue::new("its number is too large"))?, unit))
}

/// Parses `250ms`, `10s`, `5m` or `1h`.
pub fn duration(text: &str) -> Result<Duration, InvalidValue> {
    let (number, unit) = quantity(text)?;
    let milliseconds = match unit {
        "ms" => Some(number),
        "s" => number.checked_mul(1000),
        "m" => number.checked_mul(60_000),
        "h" => number.checked_mul(3_600_000),
        "" => {
            // A number of thousands probably means milliseconds.
            let unit = if number >= 1000 { "ms" } else { "s" };
            return Err(InvalidValue::new("it has no unit").hint(Some(format!("{text}{unit}"))));
        }
        _ => {
            let meant = match unit.trim().to_ascii_lowercase().as_str() {
                "ms" | "msec" | "millis" | "milliseconds" => Some("ms"),
                "s" | "sec" | "secs" | "second" | "seconds" => Some("s"),
                "m" | "min" | "mins" | "minute" | "minutes" => Some("m"),
                "h" | "hour" | "hours" => Some("h"),
                _ => None,
            };
            let fault = InvalidValue::new(format!("unknown unit {unit:?}"));
            return Err(fault.hint(meant.map(|unit| format!("{number}{unit}"))));
        }
    };
    match milliseconds.map(Duration::from_millis) {
        Some(duration) if duration <= DURATION_MAX => Ok(duration),
        _ => Err("it is longer than a year (8760h)".into()),
    }
}

/// Parses a duration above 0.
pub fn timeout(text: &str) -> Result<Duration, InvalidValue> {
    match duration(text)? {
        Duration::ZERO => Err("it must be greater than zero".into()),
        duration => Ok(duration),
    }
}

/// Parses `16KiB`, `1MiB` or a number of bytes.
pub fn size(text: &str) -> Result<u64, InvalidValue> {
    let (number, unit) = quantity(text)?;
    let factor = match unit {
        "" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => {
            let meant = match unit.trim().to_ascii_lowercase().as_str() {
                "k" | "kb" | "ki" | "kib" => Some("KiB"),
                "m" | "mb" | "mi" | "mib" => Some("MiB"),
                "g" | "gb" | "gi" | "gib" => Some("GiB"),
                "b" | "bytes" => Some(""),
                _ => None,
            };
            let fault = InvalidValue::new(format!("unknown unit {unit:?}"));
            return Err(fault.hint(meant.map(|unit| format!("{number}{unit}"))));
        }
    };
    number.checked_mul(factor).ok_or_else(|| "it is too large".into())
}

/// Parses a size in bytes, which must be from `min` to `max`.
pub fn size_within(text: &str, min: u64, max: u64) -> Result<u64, InvalidValue> {
    match size(text)? {
        bytes if (min..=max).contains(&bytes) => Ok(bytes),
        bytes => Err(InvalidValue::new(format!("it is {bytes} bytes"))),
    }
}

/// Checks `https://host:port`, without a path.
pub fn https(text: &str) -> Result<&str, InvalidValue> {
    let rest = text.strip_prefix("https://").ok_or("it does not begin with https://")?;
    target(rest)?;
    Ok(text)
}

/// Parses the URL of an etcd server: `https://host:port`, or `http://host:port` on loopback, without a path.
pub fn etcd(text: &str) -> Result<Url, InvalidValue> {
    let (scheme, rest) = match (text.strip_prefix("https://"), text.strip_prefix("http://")) {
        (Some(rest), _) => (Scheme::Https, rest),
        (None, Some(rest)) => (Scheme::Http, rest),
        (None, None) => {
            let meant = target(text).is_ok().then(|| format!("https://{text}"));
            return Err(InvalidValue::new("it does not begin with https:// or http://").hint(meant));
        }
    };
    let address = rest.strip_suffix('/').unwrap_or(rest);
    let (host, port) = target(address).map_err(|fault| {
        let ported = format!("{address}:{ETCD_PORT}");
        let meant = target(&ported).is_ok().then(|| format!("{}{ported}", scheme.text()));
        InvalidValue { hint: meant.or(fault.hint), ..fault }
    })?;
    let url = Url { scheme, host, port };
    if rest != address {
        return Err(InvalidValue::new("it has a slash at its end").hint(Some(url.to_string())));
    }
    if scheme == Scheme::Http && !url.is_loopback() {
        let meant = Url { scheme: Scheme::Https, ..url };
        let fault = "plain TCP to another host would expose the services and the password to the network";
        return Err(InvalidValue::new(fault).hint(Some(meant.to_string())));
    }
    Ok(url)
}

/// Checks the prefix of all keys of a registry in etcd.
pub fn etcd_prefix(text: &str) -> Result<&str, InvalidValue> {
    let text = checked(text)?;
    match text.ends_with('/') {
        true => Ok(text),
        false => Err(InvalidValue::new("it has no slash at its end").hint(Some(format!("{text}/")))),
    }
}

/// Checks `http://host:port`, without a path.
pub fn collector(text: &str) -> Result<&str, InvalidValue> {
    let meant = |host: &str| {
        let host = host.split('/').next().unwrap_or_default();
        let ported = if split_port(host).is_ok() { host.to_owned() } else { format!("{host}:{OTLP_PORT}") };
        target(&ported).is_ok().then(|| format!("http://{ported}"))
    };
    if let Some(rest) = text.strip_prefix("https://") {
        return Err(InvalidValue::new("it asks for TLS, but spans are sent without TLS").hint(meant(rest)));
    }
    let Some(rest) = text.strip_prefix("http://") else {
        return Err(InvalidValue::new("it does not begin with http://").hint(meant(text)));
    };
    if rest.contains('/') {
        return Err(InvalidValue::new("it has a path, but OTLP over gRPC has none").hint(meant(rest)));
    }
    target(rest).map_err(|fault| match meant(rest) {
        Some(meant) => fault.hint(Some(meant)),
        None => fault,
    })?;
    Ok(text)
}

/// Parses a share from 0 to 1.
pub fn share(text: &str) -> Result<f64, InvalidValue> {
    if let Some(number) = text.strip_suffix('%') {
        let meant = number.parse::<f64>().ok().filter(|percent| (0.0..=100.0).contains(percent));
        let fault = InvalidValue::new("it is in percent");
        return Err(fault.hint(meant.map(|percent| (percent / 100.0).to_string())));
    }
    let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    match text.parse::<f64>().ok().filter(|_| plain) {
        Some(share) if share <= 1.0 => Ok(share),
        Some(_) => Err("it is more than 1".into()),
        None => Err("".into()),
    }
}

/// Parses the path of a unix socket: `unix:///path` or `unix:/path`.
pub fn unix_socket(text: &str) -> Result<&std::path::Path, InvalidValue> {
    let path = after_unix(text).ok_or("it does not begin with unix:")?;
    match path.starts_with('/') {
        true => Ok(std::path::Path::new(path)),
        false => Err("the path of the socket does not begin with /".into()),
    }
}

/// Returns what follows `unix:` or `unix://`.
fn after_unix(text: &str) -> Option<&str> {
    let rest = text.strip_prefix("unix:")?;
    Some(rest.strip_prefix("//").unwrap_or(rest))
}

/// The longest path of a unix socket in bytes: `sun_path` of unix(7) has 108 bytes, of which the last is zero.
pub const UNIX_PATH_MAX: usize = 107;

/// Parses the address of the admin API: an address with a port, or `unix:` and a path, which may be relative.
pub fn admin_bind(text: &str) -> Result<AdminBind, InvalidValue> {
    let Some(path) = after_unix(text) else {
        return bind_address(text).map(AdminBind::Address);
    };
    if path.is_empty() || path.ends_with('/') {
        return Err("the path of the socket is missing".into());
    }
    if path.starts_with('@') {
        let fault =
            "an abstract socket has no mode that keeps other users out, so the admin API cannot use one";
        return Err(InvalidValue::new(fault).hint(Some(format!("unix:./{path}"))));
    }
    if path.contains('\0') {
        return Err("the path of the socket has a zero byte".into());
    }
    Ok(AdminBind::Unix(path.into()))
}

/// Parses a percentage such as `50%`.
pub fn percent(text: &str) -> Result<u8, InvalidValue> {
    match quantity(text)? {
        (number, "%") => match u8::try_from(number) {
            Ok(percent) if percent <= 100 => Ok(percent),
            _ => Err("it is more than 100%".into()),
        },
        (number, "") => Err(InvalidValue::new("it has no '%'").hint(Some(format!("{number}%")))),
        _ => Err("it is not a whole number followed by '%'".into()),
    }
}

/// Parses a share of the memory such as `60%`, or a size with its unit.
pub fn memory(text: &str) -> Result<MemoryLimit, InvalidValue> {
    if text.ends_with('%') {
        return match percent(text)? {
            0 => Err("it is 0%".into()),
            percent => Ok(MemoryLimit::Percent(percent)),
        };
    }
    if text.ends_with(|end: char| end.is_ascii_digit()) {
        return Err("it has no unit".into());
    }
    size_within(text, MEMORY_MIN, u64::MAX).map(MemoryLimit::Bytes)
}

/// Parses a time of RFC 3339, to seconds since 1970-01-01 UTC.
pub fn time(text: &str) -> Result<u64, InvalidValue> {
    parse_rfc3339(text).ok_or_else(|| "it is no time from 1970 to 9999 with a zone".into())
}

fn name_fault(text: &str, error: NameError) -> InvalidValue {
    let bare = text.split_once("://").map_or(text, |(_, rest)| rest).split(['/', ':']).next().unwrap_or("");
    let meant = (bare != text).then(|| HostName::parse(bare).ok()).flatten();
    InvalidValue::new(error.to_string()).hint(meant.map(|name| name.to_string()))
}

/// Parses a host name that is not an IP address.
pub fn host_name(text: &str) -> Result<HostName, InvalidValue> {
    let name = HostName::parse(text).map_err(|error| name_fault(text, error))?;
    let last = name.as_str().rsplit('.').next().unwrap_or("");
    if last.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("its last label is a number, as in an IP address".into());
    }
    Ok(name)
}

/// Parses a host name, `*.suffix` or `*`.
pub fn pattern(text: &str) -> Result<NamePattern, InvalidValue> {
    // nginx and HAProxy write a suffix and a regular expression so.
    if let Some(suffix) = text.strip_prefix('.') {
        let meant = format!("*.{suffix}");
        let meant = Some(meant).filter(|meant| NamePattern::parse(meant).is_ok());
        return Err(InvalidValue::new("it begins with a dot").hint(meant));
    }
    if text.starts_with(['~', '^']) {
        return Err("there are no regular expressions; use \"*.suffix\" or several names".into());
    }
    match NamePattern::parse(text) {
        Ok(NamePattern::Exact(_)) => host_name(text).map(NamePattern::Exact),
        Ok(pattern) => Ok(pattern),
        Err(PatternError::Name(error)) => Err(name_fault(text, error)),
        Err(error @ PatternError::Star) => Err(InvalidValue::new(error.to_string())),
    }
}

/// Parses the key of a route: a name that [`pattern`] accepts, or `-`.
pub fn route_name(text: &str) -> Result<RouteName, InvalidValue> {
    match text {
        "-" => Ok(RouteName::NoSni),
        _ => pattern(text).map(RouteName::Name),
    }
}

/// Parses an IP address; an IPv4-mapped IPv6 address becomes IPv4.
pub fn ip(text: &str) -> Result<IpAddr, InvalidValue> {
    text.parse().map(canonical_ip).map_err(|_| "it is not an IP address".into())
}

/// Parses a CIDR without host bits; an IPv4-mapped CIDR becomes IPv4.
pub fn cidr(text: &str) -> Result<IpNet, InvalidValue> {
    let Some((address, prefix)) = text.split_once('/') else {
        return Err(match text.parse::<IpAddr>() {
            Ok(address) => {
                let own = IpNet::from(address);
                InvalidValue::new("it has no prefix length").hint(Some(own.to_string()))
            }
            Err(_) => "it has no prefix length".into(),
        });
    };
    let address: IpAddr =
        address.parse().map_err(|_| InvalidValue::new("its address is not an IP address"))?;
    let digits = !prefix.is_empty() && prefix.bytes().all(|byte| byte.is_ascii_digit());
    let length = prefix.parse::<u8>().ok().filter(|_| digits);
    let net = length.and_then(|length| IpNet::new(address, length).ok()).ok_or_else(|| {
        let max = if address.is_ipv4() { 32 } else { 128 };
        InvalidValue::new(format!("its prefix length is not a number from 0 to {max}"))
    })?;
    if net.trunc() != net {
        let fault = InvalidValue::new("it has bits set after its prefix");
        return Err(fault.hint(Some(net.trunc().to_string())));
    }
    match (canonical_ip(address), net.prefix_len().checked_sub(96)) {
        (IpAddr::V4(mapped), Some(length)) if address.is_ipv6() => {
            IpNet::new(mapped.into(), length).map_err(|_| "its prefix length is too long".into())
        }
        _ => Ok(net),
    }
}

/// Parses an IP address or host name without a port.
pub fn host(text: &str) -> Result<Host, InvalidValue> {
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return Ok(Host::Ip(canonical_ip(ip)));
    }
    if let Ok((host, _)) = target(text) {
        return Err(InvalidValue::new("it has a port, but only an address is allowed here")
            .hint(Some(host.to_string())));
    }
    host_name(text).map(Host::Name)
}

fn port(text: &str) -> Result<u16, InvalidValue> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let port = text.parse().ok().filter(|_| digits);
    port.ok_or_else(|| InvalidValue::new("its port is not a number from 1 to 65535"))
}

fn split_port(text: &str) -> Result<(&str, &str), InvalidValue> {
    if text.parse::<IpAddr>().is_ok_and(|ip| ip.is_ipv6()) {
        // The operator may have meant the last group as the port.
        let meant = text.rsplit_once(':').and_then(|(host, port)| {
            let port: u16 = port.parse().ok().filter(|port| *port > 0)?;
            let ip = host.parse::<IpAddr>().ok()?;
            Some(format!("[{ip}]:{port}"))
        });
        let meant = meant.unwrap_or_else(|| format!("[{text}]:443"));
        return Err(needs_brackets(meant));
    }
    let bare_v6 = text.starts_with('[') && text.ends_with(']');
    match text.rsplit_once(':').filter(|_| !bare_v6) {
        Some((host, port)) if !host.ends_with(':') => Ok((host, port)),
        _ => Err("it has no port".into()),
    }
}

fn needs_brackets(meant: String) -> InvalidValue {
    InvalidValue::new("an IPv6 address with a port needs brackets").hint(Some(meant))
}

/// Parses an address or host name with its port.
pub fn target(text: &str) -> Result<(Host, u16), InvalidValue> {
    if let Some(list) = text.contains(',').then(|| text.split(',').map(str::trim)) {
        let meant = format!("[{}]", list.collect::<Vec<_>>().join(", "));
        return Err(InvalidValue::new("it has a comma; several addresses are a list").hint(Some(meant)));
    }
    if text.contains("://") || text.contains('/') {
        let without_scheme = text.split_once("://").map_or(text, |(_, rest)| rest);
        let meant = without_scheme.split('/').next().filter(|meant| target(meant).is_ok());
        return Err(InvalidValue::new("it is not an address or host name").hint(meant.map(str::to_owned)));
    }
    let (host, digits) = split_port(text)?;
    let port = port(digits)?;
    if port == 0 {
        return Err("its port is 0".into());
    }
    if host.is_empty() {
        return Err("it has no address before the port".into());
    }
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    match bare {
        Some(inside) => match inside.parse::<IpAddr>() {
            Ok(ip @ IpAddr::V6(_)) => Ok((Host::Ip(canonical_ip(ip)), port)),
            _ => Err("the text in its brackets is not an IPv6 address".into()),
        },
        None => match host.parse::<IpAddr>() {
            Ok(ip @ IpAddr::V4(_)) => Ok((Host::Ip(ip), port)),
            Ok(ip @ IpAddr::V6(_)) => Err(needs_brackets(format!("[{ip}]:{port}"))),
            Err(_) => host_name(host).map(|name| (Host::Name(name), port)),
        },
    }
}

/// Parses `:port`, or an IP address and port. Port 0 (a free port) is allowed only on loopback, where no
/// other host depends on it.
pub fn bind(text: &str) -> Result<Bind, InvalidValue> {
    match text.strip_prefix(':').filter(|rest| !rest.contains(':')) {
        Some(digits) => match port(digits)? {
            0 => Err("port 0 is allowed only on a loopback address".into()),
            port => Ok(Bind::Any { port }),
        },
        None => bind_address(text).map(Bind::Address),
    }
}

/// Parses an IP address and port to listen on.
pub fn bind_address(text: &str) -> Result<SocketAddr, InvalidValue> {
    let address = match text.parse::<SocketAddr>() {
        Ok(SocketAddr::V6(v6)) if v6.ip().to_ipv4_mapped().is_some() => {
            SocketAddr::new(canonical_ip(IpAddr::V6(*v6.ip())), v6.port())
        }
        Ok(address) => address,
        Err(_) => return Err(bind_fault(text)),
    };
    if address.port() == 0 && !address.ip().is_loopback() {
        return Err("port 0 is allowed only on a loopback address".into());
    }
    Ok(address)
}

/// Parses the address of a name server.
pub fn name_server(text: &str) -> Result<SocketAddr, InvalidValue> {
    if let Ok(ip) = text.parse::<IpAddr>() {
        return Ok(SocketAddr::new(canonical_ip(ip), NAME_SERVER_PORT));
    }
    let by_name = || InvalidValue::new("a name server cannot be given by name");
    match target(text) {
        Ok((Host::Ip(ip), port)) => Ok(SocketAddr::new(ip, port)),
        Ok((Host::Ips(_) | Host::Name(_), _)) => Err(by_name()),
        Err(_) if host_name(text).is_ok() => Err(by_name()),
        Err(fault) => Err(fault),
    }
}

fn bind_fault(text: &str) -> InvalidValue {
    if text.starts_with("unix:") {
        return "only the admin API (admin.bind) can be on a unix socket".into();
    }
    let (host, digits) = match split_port(text) {
        Ok(parts) => parts,
        Err(_) if port(text).is_ok() => {
            return InvalidValue::new("it has no ':'").hint(Some(format!(":{text}")));
        }
        Err(fault) => return fault,
    };
    if let Err(fault) = port(digits) {
        return fault;
    }
    let meant = match host {
        "" => {
            return InvalidValue::new("it has no address before the port")
                .hint(Some(format!("127.0.0.1:{digits}")));
        }
        "localhost" => Some(format!("127.0.0.1:{digits}")),
        "*" => Some(format!(":{digits}")),
        _ => None,
    };
    InvalidValue::new("the part before the port is not an IP address").hint(meant)
}

fn identity_fault(text: &str, error: IdentityError) -> InvalidValue {
    let meant = format!("spiffe://{text}");
    let bare =
        error == IdentityError::Scheme && !text.contains("://") && IdentityPattern::parse(&meant).is_ok();
    InvalidValue::new(error.to_string()).hint(bare.then_some(meant))
}

/// Parses a SPIFFE ID.
pub fn identity(text: &str) -> Result<Identity, InvalidValue> {
    Identity::parse(text).map_err(|error| identity_fault(text, error))
}

/// Parses a SPIFFE ID, or one that ends with `/*`.
pub fn identity_pattern(text: &str) -> Result<IdentityPattern, InvalidValue> {
    IdentityPattern::parse(text).map_err(|error| identity_fault(text, error))
}

/// Parses a SPIFFE trust domain.
pub fn trust_domain(text: &str) -> Result<TrustDomain, InvalidValue> {
    TrustDomain::parse(text).map_err(|_| {
        let lower = text.to_ascii_lowercase();
        let meant = TrustDomain::parse(lower.strip_prefix("spiffe://").unwrap_or(&lower)).ok();
        InvalidValue::new("it is empty or has a character that is not allowed")
            .hint(meant.map(|domain| domain.to_string()))
    })
}

/// Parses `region/zone/subzone`, of which zone and subzone are optional.
pub fn locality(text: &str) -> Result<Locality, InvalidValue> {
    checked(text)?;
    if text.starts_with('/') {
        return Err("its region is empty".into());
    }
    Locality::parse(text).ok_or_else(|| "it has more than three parts".into())
}

/// Checks the name of a subset.
pub fn subset(text: &str) -> Result<&str, InvalidValue> {
    let legal = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_');
    if (1..=63).contains(&text.len()) && text.bytes().all(legal) {
        return Ok(text);
    }
    let lower = text.to_ascii_lowercase();
    let meant = (1..=63).contains(&lower.len()) && lower.bytes().all(legal);
    let fault = InvalidValue::new("it is empty, too long, or has a character that is not allowed");
    Err(fault.hint(meant.then_some(lower)))
}

/// Parses the name of an application protocol (RFC 7301).
pub fn alpn(text: &str) -> Result<Box<[u8]>, InvalidValue> {
    match text.len() {
        1..=255 => Ok(text.as_bytes().into()),
        _ => Err("it is empty or too long".into()),
    }
}
