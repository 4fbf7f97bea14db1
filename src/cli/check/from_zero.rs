//! `isthmus check --from-zero`: the steps of a first installation in their order, from the config file to the first call. The first
//! step that is not done ends the list, with the command that does it.

use std::path::Path;

use super::{Check, State, away, gateway, of_config, of_overview, overview};
use crate::arguments::Admin;
use crate::config_file::config_path;
use crate::offline::{Names, Offline, offline};
use isthmus_api::listener::Exposed;
use isthmus_api::overview::Overview;
use isthmus_api::requests;
use isthmus_api::text::counted;
use isthmus_console::client;
use isthmus_console::failure::Failure;
use isthmus_model::address::AdminBind;
use isthmus_model::endpoint::TlsMode;

/// Returns the steps that are done, and the first one that is not.
pub(super) fn run(config: Option<&Path>, admin: &Admin) -> (Vec<Check>, Result<(), Failure>) {
    let path = match config_path(config) {
        Ok(path) => path,
        Err(failure) => {
            let next = "write a file with `listen` and `routes`; the README begins with the smallest one";
            let check = Check::new("config", State::Failed, failure.to_string(), next);
            return (vec![check], Err(Failure::Reported));
        }
    };
    let read = offline(&path, Names::LookUp);
    let admin = Admin { admin: admin.admin.clone().or_else(|| admin_of(read.as_ref().ok()?)) };
    let mut checks = of_config(&path, read);
    if has_failed(&checks) {
        return (checks, Err(Failure::Reported));
    }
    let found = overview(&admin).and_then(|overview| Ok((overview, exposed(&admin)?)));
    let (overview, exposed) = match found {
        Ok(found) => found,
        Err(failure) => {
            let (mut found, result) = away(&failure);
            if failure.is_unreachable() {
                let start = format!("`isthmus run -c {}`", path.display());
                found.iter_mut().for_each(|check| check.next = format!("{start}, or start its service"));
            }
            checks.append(&mut found);
            return (checks, result);
        }
    };
    checks.extend(of_steps(&path, &overview, &exposed));
    let result = if has_failed(&checks) { Err(Failure::Reported) } else { Ok(()) };
    if result.is_ok() {
        // A step may be done while something else is wrong.
        checks.extend(of_overview(&overview).into_iter().filter(|check| check.state != State::Ok));
    }
    (checks, result)
}

fn has_failed(checks: &[Check]) -> bool {
    checks.iter().any(|check| check.state == State::Failed)
}

/// Returns the address of the admin API of a config, in the form of `--admin`; `None`: it has none.
fn admin_of(read: &Offline) -> Option<String> {
    Some(match read.admin.as_ref()? {
        AdminBind::Address(address) => format!("http://{address}"),
        socket @ AdminBind::Unix(_) => socket.to_string(),
    })
}

fn exposed(admin: &Admin) -> Result<Vec<Exposed>, Failure> {
    Ok(client::read(&admin.url(), &requests::EXPOSED)?)
}

/// Returns the steps of a gateway that runs, up to the first that is not done.
fn of_steps(path: &Path, overview: &Overview, exposed: &[Exposed]) -> Vec<Check> {
    let steps = [
        of_file(path, overview),
        gateway(&overview.status),
        of_listeners(overview),
        of_names(exposed),
        of_endpoints(overview),
        of_calls(overview, exposed),
    ];
    let done = steps.iter().take_while(|check| check.state != State::Failed).count();
    steps.into_iter().take(done + 1).collect()
}

fn of_file(path: &Path, overview: &Overview) -> Check {
    let config = &overview.status.config;
    let is_same = Path::new(&config.path).canonicalize().ok() == path.canonicalize().ok();
    let text = format!("the gateway that answers runs with {}", config.path);
    match is_same && !config.file_is_running {
        true => {
            Check::new("file", State::Warning, format!("{text}, which has changed since"), "`isthmus reload`")
        }
        false if is_same => Check::new("file", State::Ok, text, ""),
        false => {
            let next = format!("check that file with `-c`, or start a gateway with {}", path.display());
            Check::new("file", State::Warning, text, next)
        }
    }
}

fn of_listeners(overview: &Overview) -> Check {
    let listeners = &overview.status.listeners;
    let open: Vec<&str> = listeners.iter().filter_map(|listener| listener.address.as_deref()).collect();
    let is_loopback = |address: &&str| {
        address.parse().is_ok_and(|address: std::net::SocketAddr| address.ip().is_loopback())
    };
    match (open.len(), open.iter().all(is_loopback)) {
        (0, _) => {
            let next = "give an address with `listen` or `listeners`, then `isthmus reload`";
            Check::new("listeners", State::Failed, "no listener is open", next)
        }
        (_, true) => {
            let text = format!("only this host can connect to {}", open.join(", "));
            Check::new(
                "listeners",
                State::Warning,
                text,
                "for other hosts, give another address with `listen`",
            )
        }
        (_, false) => Check::new("listeners", State::Ok, format!("open: {}", open.join(", ")), ""),
    }
}

fn of_names(exposed: &[Exposed]) -> Check {
    if exposed.is_empty() {
        let next =
            "add `routes`, or `exports` for services; `isthmus get services` lists those that are known";
        return Check::new("names", State::Failed, "no name can be called", next);
    }
    let outside =
        exposed.iter().filter(|one| one.tls.iter().any(|mode| mode != TlsMode::Mesh.text())).count();
    let text = format!("{} can be called", counted(exposed.len(), "name"));
    let text = if outside > 0 {
        format!("{text}; {outside} lead to endpoints without mTLS of the mesh")
    } else {
        text
    };
    Check::new("names", State::Ok, text, "")
}

fn of_endpoints(overview: &Overview) -> Check {
    let services = &overview.services;
    let is_ready = services.shown.iter().any(|service| service.reachable && service.ready > 0);
    // A page has the services with problems first, so it may not have one that is ready.
    match is_ready || services.troubled < services.total {
        true => Check::new("endpoints", State::Ok, "an endpoint is ready", ""),
        false => Check::new(
            "endpoints",
            State::Failed,
            "no name has an endpoint that is ready",
            "`isthmus get endpoints`; `isthmus explain NAME --probe` dials them",
        ),
    }
}

fn of_calls(overview: &Overview, exposed: &[Exposed]) -> Check {
    let opened = overview.traffic.opened;
    if opened > 0 {
        let connections = counted(usize::try_from(opened).unwrap_or(usize::MAX), "connection");
        return Check::new("calls", State::Ok, format!("{connections} to an endpoint since the start"), "");
    }
    let name = exposed.iter().find(|exposed| !exposed.name.contains('*'));
    let name = name.map_or("NAME", |exposed| &*exposed.name);
    let text = "no connection has reached an endpoint yet";
    Check::new("calls", State::Warning, text, format!("`isthmus test call {name}`"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_api::listed::Service;
    use isthmus_api::listener::Listener;
    use isthmus_api::overview::Services;

    fn gateway_with(address: Option<&str>, ready: usize, opened: u64) -> Overview {
        let mut overview = Overview::default();
        overview.status.ready = true;
        overview.status.config.file_is_running = true;
        let listener = Listener { address: address.map(str::to_owned), ..Listener::default() };
        overview.status.listeners = vec![listener];
        let service = Service { reachable: true, ready, ..Service::default() };
        overview.services = Services { total: 1, troubled: 1, shown: vec![service], ..Services::default() };
        overview.traffic.opened = opened;
        overview
    }

    #[test]
    fn the_first_step_that_is_not_done_is_the_last() {
        let exposed = [Exposed { name: "a.test".to_owned(), ..Exposed::default() }];
        let path = Path::new("");
        let last = |overview: &Overview, exposed: &[Exposed]| {
            let checks = of_steps(path, overview, exposed);
            let last = checks.last().expect("a step");
            (checks.len(), last.check, last.state, last.next.clone())
        };
        let begun = gateway_with(None, 0, 0);
        assert_eq!((last(&begun, &[]).0, last(&begun, &[]).1), (3, "listeners"));
        let open = gateway_with(Some("0.0.0.0:15443"), 0, 0);
        assert_eq!((last(&open, &[]).0, last(&open, &[]).1), (4, "names"));
        assert_eq!((last(&open, &exposed).0, last(&open, &exposed).1), (5, "endpoints"));
        let uncalled = last(&gateway_with(Some("0.0.0.0:15443"), 1, 0), &exposed);
        assert_eq!(uncalled, (6, "calls", State::Warning, "`isthmus test call a.test`".to_owned()));
        let called = last(&gateway_with(Some("127.0.0.1:15443"), 1, 3), &exposed);
        assert_eq!((called.0, called.1, called.2), (6, "calls", State::Ok));
    }
}
