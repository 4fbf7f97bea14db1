//! The lines of an HAProxy configuration that need no counterpart in isthmus, and those that have none but refuse no client. These
//! lists are closed: any other line that is not converted could refuse clients.

use crate::words::Line;

/// Returns the reason why a line needs no counterpart; `None` if it may need one.
pub(super) fn why_not_needed(line: &Line) -> Option<&'static str> {
    let words = line.texts();
    let second = words.get(1).copied().unwrap_or_default();
    Some(match words[0] {
        "mode" => "every route passes the bytes through, as `mode tcp` does",
        "daemon" | "user" | "group" | "chroot" | "pidfile" | "master-worker" | "nbproc" | "nbthread"
        | "cpu-map" | "ulimit-n" | "uid" | "gid" | "setenv" | "presetenv" => {
            "the unit in examples/systemd sets user and limits; `workers` sets the number of threads"
        }
        "log" | "log-format" | "log-tag" | "log-send-hostname" | "log-format-sd" => {
            "`telemetry.accessLog` writes a line for each connection"
        }
        "stats" | "server-state-file" | "server-state-base" | "load-server-state-from-file" => {
            "`isthmus status`, `isthmus top` and the dashboard show the state"
        }
        "description" | "node" | "id" | "enabled" | "disabled" => "the line has no effect on connections",
        "retries" => "the gateway tries another endpoint, with at most three attempts",
        "option" => match second {
            "tcplog"
            | "dontlognull"
            | "httplog"
            | "logasap"
            | "log-health-checks"
            | "dontlog-normal"
            | "log-separate-errors"
            | "contstats"
            | "socket-stats" => "`telemetry.accessLog` and the metrics have this information",
            "tcpka" | "clitcpka" | "srvtcpka" => "TCP keep-alive is always on",
            "splice-auto" | "splice-request" | "splice-response" => {
                "the gateway always splices large transfers"
            }
            "tcp-check" => "checks connect; a `tcp-check` line that does more is listed by itself",
            "redispatch" => "the gateway tries another endpoint, with at most three attempts",
            "tcp-smart-accept" | "tcp-smart-connect" | "nolinger" | "http-keep-alive" | "httpclose"
            | "http-server-close" | "forwardfor" | "abortonclose" => {
                "the option has no effect on connections that are passed through"
            }
            _ => return None,
        },
        "timeout" => match second {
            "http-request" | "http-keep-alive" | "tarpit" => "the line applies only to HTTP",
            "queue" => "the gateway has no queue: it refuses a connection above a limit at once",
            _ => return None,
        },
        "tcp-response" if second == "inspect-delay" || words.get(2) == Some(&"accept") => {
            "the answer of an endpoint is passed on"
        }
        "tcp-check" if words.len() == 2 && second == "connect" => "checks connect",
        "monitor-uri" => "`isthmus healthcheck` and `/readyz` answer such checks",
        "errorfile" | "errorloc" | "http-reuse" | "compression" => "the line applies only to HTTP",
        word if word.starts_with("tune.")
            || word.starts_with("ssl-")
            || word == "maxpipes"
            || word == "spread-checks" =>
        {
            "the gateway chooses the value"
        }
        "ca-base" | "crt-base" => "an SNI listener needs no certificate",
        _ => return None,
    })
}

/// Returns true if a line surely refuses no connection of `mode tcp`, although it has no counterpart.
pub(super) fn never_refuses(line: &Line) -> bool {
    let words = line.texts();
    let first = if words[0] == "no" { words.get(1).copied().unwrap_or_default() } else { words[0] };
    match first {
        // Settings of HTTP, which these sections do not speak.
        word if word.starts_with("http-") || word.starts_with("errorf") => true,
        "filter" => words.get(1).is_some_and(|filter| filter.starts_with("bwlim-")),
        // Settings of servers and of their choice.
        "balance"
        | "cookie"
        | "default-server"
        | "dispatch"
        | "email-alert"
        | "external-check"
        | "force-persist"
        | "fullconn"
        | "hash-type"
        | "ignore-persist"
        | "persist"
        | "server"
        | "server-template"
        | "source"
        | "stick"
        | "stick-table"
        | "tcp-check"
        | "use-server"
        | "max-keep-alive-queue"
        | "retry-on" => true,
        // Limits of the whole section, which delay connections.
        "acl" | "backlog" | "bind-process" | "capture" | "declare" | "grace" | "maxconn" | "option"
        | "rate-limit" | "timeout" | "unique-id-format" | "unique-id-header" => true,
        _ => false,
    }
}
