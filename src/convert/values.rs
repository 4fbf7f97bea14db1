//! Times, numbers and addresses of HAProxy in the form of the config.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use isthmus_document::scalar;
use isthmus_model::address::{Bind, Host};

/// Returns a time of HAProxy (milliseconds, or with a unit) in the form of the config; `None` also for more than a year, which
/// neither HAProxy nor isthmus accepts.
pub(super) fn time(text: &str) -> Option<String> {
    let digits = text.len() - text.trim_start_matches(|sign: char| sign.is_ascii_digit()).len();
    let number: u64 = text[..digits].parse().ok()?;
    let milliseconds = match &text[digits..] {
        "us" => number.div_ceil(1000),
        "ms" | "" => number,
        "s" => number.checked_mul(1000)?,
        "m" => number.checked_mul(60_000)?,
        "h" => number.checked_mul(3_600_000)?,
        "d" => number.checked_mul(86_400_000)?,
        _ => return None,
    };
    if milliseconds > 365 * 86_400_000 {
        return None;
    }
    Some(if milliseconds % 1000 == 0 {
        format!("{}s", milliseconds / 1000)
    } else {
        format!("{milliseconds}ms")
    })
}

/// Returns a time of HAProxy as [`time`] does, but `None` for 0, which HAProxy reads as "no limit" in most places.
pub(super) fn positive(text: &str) -> Option<String> {
    time(text).filter(|time| milliseconds(time) > 0)
}

/// Returns the milliseconds of a time in the form of the config, so that two times can be compared.
pub(super) fn milliseconds(time: &str) -> u64 {
    let number = |text: &str| text.parse().unwrap_or(0);
    time.strip_suffix("ms").map_or_else(|| number(time.trim_end_matches('s')) * 1000, number)
}

/// Returns a number of connections that the config accepts.
pub(super) fn connections(text: &str) -> Option<u64> {
    text.parse().ok().filter(|count| (1..=10_000_000).contains(count))
}

/// Returns the address of a `bind` line. `*` and an empty host are the addresses of IPv4 only, `::` those of both families.
pub(super) fn bind_address(text: &str) -> Option<Bind> {
    let (text, is_v6) = text.strip_prefix("ipv6@").map_or((text, false), |text| (text, true));
    let text = text.strip_prefix("ipv4@").unwrap_or(text);
    let (host, port) = text.rsplit_once(':')?;
    let port = port.parse::<u16>().ok().filter(|port| *port > 0)?;
    Some(match host.trim_start_matches('[').trim_end_matches(']') {
        "::" => Bind::Any { port },
        "" | "*" if is_v6 => Bind::Any { port },
        "" | "*" => Bind::Address((Ipv4Addr::UNSPECIFIED, port).into()),
        bare => Bind::Address(SocketAddr::new(bare.parse().ok()?, port)),
    })
}

pub(super) fn port_of(bind: Bind) -> u16 {
    match bind {
        Bind::Any { port } => port,
        Bind::Address(address) => address.port(),
    }
}

/// Returns the address of one listener that accepts the connections to both addresses and no others, if there is one.
pub(super) fn covering(one: Bind, other: Bind) -> Option<Bind> {
    if port_of(one) != port_of(other) {
        return None;
    }
    let (Bind::Address(left), Bind::Address(right)) = (one, other) else {
        return Some(Bind::Any { port: port_of(one) });
    };
    let (left, right) = (left.ip(), right.ip());
    match (left.is_unspecified(), right.is_unspecified()) {
        (true, true) if left != right => Some(Bind::Any { port: port_of(one) }),
        (true, _) if left.is_ipv4() == right.is_ipv4() => Some(one),
        (_, true) if left.is_ipv4() == right.is_ipv4() => Some(other),
        _ => (left == right).then_some(one),
    }
}

/// Returns the address of a server in the form of the config. A server without a port has the port of the frontend.
pub(super) fn server_address(text: &str, frontend: Option<&str>) -> Option<String> {
    let text = text.strip_prefix("ipv4@").or_else(|| text.strip_prefix("ipv6@")).unwrap_or(text);
    if text.contains(['/', '@']) {
        return None;
    }
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.is_empty() => (host, port),
        Some((host, _)) => (host, frontend?),
        None => (text, frontend?),
    };
    port.parse::<u16>().ok().filter(|port| *port > 0 && !text.contains(":+"))?;
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let address = match bare.parse() {
        Ok(IpAddr::V6(ip)) => format!("[{ip}]:{port}"),
        _ => format!("{bare}:{port}"),
    };
    match scalar::target(&address).ok()?.0 {
        Host::Ip(ip) if ip.is_unspecified() || ip.is_multicast() => None,
        Host::Ip(_) | Host::Ips(_) | Host::Name(_) => Some(address),
    }
}

/// Returns true if the address of a server has its own port.
pub(super) fn has_port(text: &str) -> bool {
    text.rsplit_once(':').is_some_and(|(_, port)| !port.is_empty() && !port.ends_with(']'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_addresses_are_those_of_the_config() {
        for (text, wanted) in [
            ("500", "500ms"),
            ("5s", "5s"),
            ("1m", "60s"),
            ("2h", "7200s"),
            ("1d", "86400s"),
            ("3us", "1ms"),
            ("1500ms", "1500ms"),
        ] {
            assert_eq!(time(text).as_deref(), Some(wanted), "{text}");
        }
        assert_eq!((time("x"), time("5w"), time("")), (None, None, None));
        for (text, wanted) in [
            ("*:443", Some("0.0.0.0:443")),
            (":443", Some("0.0.0.0:443")),
            (":::443", Some(":443")),
            ("[::]:443", Some(":443")),
            ("10.0.0.1:443", Some("10.0.0.1:443")),
            ("ipv6@::1:443", Some("[::1]:443")),
            ("unix@/x.sock", None),
            (":443-445", None),
            ("443", None),
        ] {
            assert_eq!(bind_address(text).map(|bind| bind.to_string()).as_deref(), wanted, "{text}");
        }
        for (text, wanted) in [
            ("10.0.0.1:443", Some("10.0.0.1:443")),
            ("10.0.0.1", Some("10.0.0.1:8443")),
            ("10.0.0.1:", Some("10.0.0.1:8443")),
            ("10.0.0.1:+1", None),
            ("::1:443", Some("[::1]:443")),
            ("[::1]:443", Some("[::1]:443")),
            ("db.test:5432", Some("db.test:5432")),
            ("/run/x.sock", None),
            ("abns@x", None),
            ("*:9443", None),
            ("0.0.0.0:9444", None),
            ("224.0.0.1:443", None),
            ("10.0.0.999:443", None),
        ] {
            assert_eq!(server_address(text, Some("8443")).as_deref(), wanted, "{text}");
        }
    }
}
