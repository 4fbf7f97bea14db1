//! `isthmus peer plan`: the services that a changed config makes reachable or unreachable for each peer, before the config is
//! applied. The command applies the rules of the gateway: it builds a snapshot of the changed config with the known services.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use serde::Serialize;

use super::arguments::Reading;
use super::config_file::{self, config_path};
use super::offline::{Names, offline};
use super::peers::proposal;
use isthmus_admin::peers;
use isthmus_aggregator::spec::RegistrySpec;
use isthmus_api as api;
use isthmus_api::peer::{Exchanged, Peer, PeerDetail};
use isthmus_api::requests;
use isthmus_api::service::Service as Listed;
use isthmus_api::table::text;
use isthmus_api::text::texts;
use isthmus_console::client;
use isthmus_console::failure::Failure;
use isthmus_console::output::{Colour, Format, paint, structured};
use isthmus_model::endpoint::Endpoint;
use isthmus_model::load_balancing::ServiceFamilies;
use isthmus_model::name::HostName;
use isthmus_model::service::{PortProtocol, Service, ServiceKey, ServicePort};
use isthmus_registry::listing::Listing;
use isthmus_registry::shard::Shard;
use isthmus_settings::export_tls::{ExportTls, TlsSource};
use isthmus_settings::peer as policy;
use isthmus_settings::policy::Policy;
use isthmus_settings::scope::RegistryScope;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::build::all;
use isthmus_snapshot::inputs::Inputs;
use isthmus_snapshot::routes::Resolved;
use isthmus_snapshot::service_view::ServiceView;

/// The text below the options.
pub(super) const EXAMPLES: &str = "Examples:
  isthmus peer plan -c new.yaml                             what this file would change for the peers of the running gateway
  isthmus peer plan -c new.yaml --against isthmus.yaml      two files, without a gateway

Write the change into a copy: the gateway applies its own file as soon as it changes.
The services are those of the running gateway; with --against, those of each file and its file registries.";

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The changed config file, or a directory of them [default: isthmus.yaml, then /etc/isthmus/isthmus.yaml]
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Compare with this config file instead of the running gateway
    #[arg(long, value_name = "OLD")]
    against: Option<PathBuf>,
    #[command(flatten)]
    reading: Reading,
}

/// The effects of the changed config on one peer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
struct PeerPlan {
    peer: String,
    change: Change,
    /// Services of this mesh that the peer can reach only after the change.
    reachable: Vec<Exchanged>,
    /// Services of this mesh that the peer can reach only before the change.
    unreachable: Vec<Exchanged>,
    /// Services of this mesh whose name or ports for the peer change.
    changed: Vec<Changed>,
    /// Names that this mesh requests from the peer only after the change; whether the peer has them is unknown.
    asked: Vec<String>,
    /// Names that this mesh requests from the peer only before the change.
    not_asked: Vec<String>,
    /// Services of the peer that are imported now, but not after the change.
    dropped: Vec<Exchanged>,
    /// Imported services whose names in this mesh change.
    renamed: Vec<Changed>,
    /// Services of the peer that are joined with equal names only after the change.
    joined: Vec<Exchanged>,
    /// Source addresses whose SNI callers are recognised as callers of the peer after the change, but not before it.
    from: Vec<String>,
    /// Source addresses whose SNI callers are recognised as callers of the peer before the change, but not after it.
    not_from: Vec<String>,
    /// The directions in which calls may cross on carriers after the change, but not before it.
    carried: Vec<String>,
    /// The directions in which calls may cross on carriers before the change, but not after it.
    not_carried: Vec<String>,
    /// What to do about a peer whose gateways have never answered the running one.
    #[serde(skip_serializing_if = "Option::is_none")]
    proposal: Option<String>,
    /// The identity of the peer's gateways before and after the change, if it changes.
    identity: Option<[Option<String>; 2]>,
    /// Names under which the change offers services without TLS. SNI callers cannot reach them, HBONE callers can.
    hbone_only: Vec<String>,
    /// Services that the changed rules offer or request without effect, one sentence each.
    conflicts: Vec<String>,
}

/// The TLS modes of the endpoints of each service, as the API writes them; `None`: the default.
type Modes = BTreeMap<String, BTreeSet<Option<String>>>;

/// The change of a peer from the config in use to the changed config.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Change {
    #[default]
    Kept,
    Added,
    Removed,
}

/// A service before and after the change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Changed {
    before: Exchanged,
    after: Exchanged,
}

/// Runs `isthmus peer plan`.
pub(super) fn run(arguments: &Arguments, out: &mut impl Write) -> Result<(), Failure> {
    let file = config_path(arguments.config.as_deref())?;
    let (before, after, modes, peers) = match &arguments.against {
        Some(old) => {
            let after = of_file(&file)?;
            let modes = modes_of(&after);
            (details(&of_file(old)?), after, modes, Vec::new())
        }
        None => {
            let wrong = |problems: Vec<_>| Failure::Wrong(texts(&problems).join("\n"));
            let config = config_file::load(&file).map_err(wrong)?;
            let admin = arguments.reading.admin.url();
            note_if_in_use(&file, &admin)?;
            let Running { peers, details: before, services } = of_gateway(&admin)?;
            let scope = RegistryScope { tls: guarded(&config.registries), ..RegistryScope::default() };
            (before, with_services(&config.policy, &scope, services), modes_of_gateway(&admin)?, peers)
        }
    };
    let mut plans = plans(&before, &after);
    for plan in &mut plans {
        plan.note_hbone_only(&modes);
        plan.note_silence(&peers, &after.policy);
    }
    match arguments.reading.output {
        Format::Table => print(&plans, out),
        format => {
            let value = serde_json::to_value(&plans).map_err(|error| Failure::Wrong(error.to_string()))?;
            Ok(structured(out, &value, format)?)
        }
    }
}

/// Writes to stderr that the gateway already uses the file, if it does.
fn note_if_in_use(file: &Path, admin: &str) -> Result<(), Failure> {
    let status = client::read(admin, &requests::STATUS)?;
    let in_use = Path::new(&status.config.path).canonicalize().ok();
    if status.config.file_is_running && in_use.is_some() && in_use == file.canonicalize().ok() {
        let file = text(&file.display().to_string());
        writeln!(
            std::io::stderr(),
            "warning: the gateway already uses {file}, as it applies its file whenever that changes; the plan compares the file with \
             itself. Write the change into a copy, such as new.yaml, and plan that"
        )?;
    }
    Ok(())
}

fn of_file(path: &Path) -> Result<Snapshot, Failure> {
    match offline(path, Names::LookUp) {
        Ok(offline) => Ok(offline.snapshot),
        Err(problems) => Err(Failure::Wrong(problems.join("\n"))),
    }
}

fn details(snapshot: &Snapshot) -> Vec<PeerDetail> {
    snapshot.policy.peers.iter().map(|peer| peers::detail(snapshot, peer)).collect()
}

fn modes_of(snapshot: &Snapshot) -> Modes {
    let mode = |endpoint: &Endpoint| endpoint.template.tls.map(|tls| tls.text().to_owned());
    let modes = |service: &ServiceView| {
        service.parts.iter().flat_map(|part| part.service.endpoints.iter()).map(mode).collect()
    };
    snapshot.services().into_iter().map(|service| (service.name.to_string(), modes(service))).collect()
}

fn modes_of_gateway(admin: &str) -> Result<Modes, Failure> {
    let endpoints = client::read(admin, &requests::ENDPOINTS)?;
    let mut modes = Modes::new();
    for api::endpoint::Endpoint { service, tls, .. } in endpoints {
        if let Some(service) = service {
            modes.entry(service).or_default().insert(tls);
        }
    }
    Ok(modes)
}

/// What the running gateway knows.
struct Running {
    peers: Vec<Peer>,
    details: Vec<PeerDetail>,
    /// The services of this mesh.
    services: Vec<Listed>,
}

/// Requests the peers and the services from the running gateway.
fn of_gateway(admin: &str) -> Result<Running, Failure> {
    let peers = client::read(admin, &requests::PEERS)?;
    let mut details = Vec::with_capacity(peers.len());
    for peer in &peers {
        let detail = client::get(admin, &requests::PEER.at(&peer.name))?;
        details.push(client::typed::<PeerDetail>(detail.json()?)?);
    }
    let mut services: Vec<Listed> = client::read(admin, &requests::SERVICES)?;
    let imported = details.iter().flat_map(|peer| &peer.imported);
    // A name that a peer joins is another organisation's, perhaps ours.
    let imported: BTreeSet<&str> =
        imported.filter(|service| !service.joined).map(|service| &*service.service).collect();
    services.retain(|service| !imported.contains(&*service.hostname));
    Ok(Running { peers, details, services })
}

/// Returns the guarded namespaces of all registries. The running gateway does not say of which registry a service is.
fn guarded(registries: &[RegistrySpec]) -> TlsSource {
    let all = registries.iter().filter_map(|registry| match &registry.scope.tls {
        TlsSource::Inferred { system } => Some(system.iter().cloned()),
        TlsSource::Written => None,
    });
    let system: Arc<[Arc<str>]> = all.flatten().collect();
    if system.is_empty() { TlsSource::Written } else { TlsSource::Inferred { system } }
}

/// Returns the snapshot of a policy with these services, as a registry of this scope has them. The services have no endpoints, because
/// exports to peers do not depend on endpoints.
fn with_services(policy: &Arc<Policy>, scope: &RegistryScope, services: Vec<Listed>) -> Snapshot {
    let listing = Listing {
        cluster: policy.node.cluster.clone(),
        network: policy.node.network.clone(),
        services: services.iter().filter_map(service).map(|one| (one.key.clone(), Arc::new(one))).collect(),
    };
    let resolved = Resolved::default();
    all(
        Inputs {
            trust_roots: &Default::default(),
            policy,
            policy_generation: 1,
            shards: &[Arc::new(Shard::of(listing, scope))],
            resolved: &resolved,
            virtual_addresses: None,
            probes: None,
            drains: &Arc::default(),
            recent: None,
            remembered: None,
        },
        1,
    )
}

fn service(listed: &Listed) -> Option<Service> {
    let port = |port: &api::service::Port| {
        let protocol = PortProtocol::ALL.into_iter().find(|protocol| protocol.text() == port.protocol)?;
        Some(ServicePort {
            name: (*port.name).into(),
            port: port.port,
            target_port: port.port,
            is_target_named: false,
            protocol,
        })
    };
    let hostname = HostName::parse(&listed.hostname).ok()?;
    Some(Service {
        key: ServiceKey { namespace: (*listed.namespace).into(), hostname },
        addresses: Vec::new(),
        ports: listed.ports.iter().filter_map(port).collect(),
        subsets: BTreeMap::new(),
        waypoint: None,
        endpoints: Vec::new().into(),
        exported_as: None,
        import: None,
        load_balancing: None,
        families: ServiceFamilies::Automatic,
        identities: Box::default(),
        demand: Box::default(),
        withheld: Box::default(),
    })
}

/// Compares the peers before the change with the peers of a snapshot. Peers without any change are left out.
fn plans(before: &[PeerDetail], after: &Snapshot) -> Vec<PeerPlan> {
    let added = |name: &str| !before.iter().any(|peer| peer.name == name);
    let gone = before.iter().filter(|peer| !after.policy.peers.iter().any(|one| *one.name == *peer.name));
    let gone = gone.map(|peer| PeerPlan { change: Change::Removed, ..compare(peer, &PeerDetail::default()) });
    let none = PeerDetail::default();
    let mut owners = Owners::default();
    let next = after.policy.peers.iter().map(|peer| {
        let before = before.iter().find(|one| one.name == *peer.name).unwrap_or(&none);
        let mut detail = peers::detail(after, peer);
        take_imports(&mut detail, before, peer, (after, &mut owners));
        let change = if added(&peer.name) { Change::Added } else { Change::Kept };
        PeerPlan { change, ..compare(before, &detail) }
    });
    gone.chain(next).filter(|plan| !plan.is_empty()).collect()
}

/// The names that earlier peers own after the change, each with whether their rules let others join it.
type Owners = BTreeMap<String, bool>;

/// Adds the known services of the peer to `detail`, under the names that the changed rules give them.
fn take_imports(
    detail: &mut PeerDetail,
    before: &PeerDetail,
    peer: &policy::Peer,
    (after, owners): (&Snapshot, &mut Owners),
) {
    let mut taken: BTreeMap<&str, usize> = BTreeMap::new();
    let reached = before.imported.iter().map(|service| (service, true));
    let left_out = before.left_out.iter().map(|service| (service, false));
    let mut known: Vec<(&Exchanged, bool)> = reached.chain(left_out).collect();
    known.sort_by(|(one, _), (other, _)| one.exported_name.cmp(&other.exported_name));
    for (service, is_reached) in known {
        let Ok(exported) = HostName::parse(&service.exported_name) else { continue };
        let Some(rule) = peer.import_of(exported.as_str()) else { continue };
        let count = taken.entry(&rule.rule).or_default();
        if rule.limit.is_some_and(|limit| *count >= limit) || detail.imported.len() >= peer.limits.services {
            let limit = rule.limit.unwrap_or(peer.limits.services).min(peer.limits.services);
            detail.conflicts.push(format!(
                "{exported} is left out: {} has reached its limit of {limit} services",
                rule.rule
            ));
            continue;
        }
        let named = match rule.imported_name(&exported, &service.namespace) {
            Ok(named) => named,
            Err(error) => {
                detail.conflicts.push(format!(
                    "{exported} is left out: the name that {} gives the service is not legal: {error}",
                    rule.rule
                ));
                continue;
            }
        };
        let is_ours = after.service(named.as_str()).is_some_and(|ours| ours.import.is_none());
        let is_open = if is_ours { Some(true) } else { owners.get(named.as_str()).copied() };
        *count += 1;
        let joined = match is_open {
            None => {
                owners.insert(named.to_string(), rule.merge);
                false
            }
            Some(is_open) if is_open && rule.merge => true,
            Some(_) if !is_reached => continue,
            Some(_) => {
                let whose = if is_ours { "a service of ours" } else { "a service of an earlier peer" };
                detail.conflicts.push(format!(
                    "{exported} gets the name {named}, which is the name of {whose}, so clients cannot reach it; `merge: true` in {} \
                     joins them",
                    rule.rule
                ));
                if service.joined {
                    continue;
                }
                false
            }
        };
        detail.imported.push(Exchanged { service: named.to_string(), joined, ..service.clone() });
    }
}

fn compare(before: &PeerDetail, after: &PeerDetail) -> PeerPlan {
    // The two lists are matched by a name that the rules do not change: a service of this mesh by its host name, a service of
    // the peer by the name under which the peer exports it.
    let exports = Difference::of(&before.exported, &after.exported, |service| &service.service);
    let imports = Difference::of(&before.imported, &after.imported, |service| &service.exported_name);
    let less = |these: &[String], those: &[String]| -> Vec<String> {
        these.iter().filter(|one| !those.contains(one)).cloned().collect()
    };
    let name = if before.name.is_empty() { &after.name } else { &before.name };
    let identity = !before.name.is_empty() && !after.name.is_empty() && before.identity != after.identity;
    PeerPlan {
        peer: name.clone(),
        change: Change::Kept,
        reachable: exports.added,
        unreachable: exports.removed,
        changed: exports.changed,
        asked: less(&after.asked, &before.asked),
        not_asked: less(&before.asked, &after.asked),
        dropped: imports.removed,
        joined: imports.added.into_iter().filter(|service| service.joined).collect(),
        renamed: imports.changed,
        from: less(&after.from, &before.from),
        not_from: less(&before.from, &after.from),
        carried: less(&after.carry, &before.carry),
        not_carried: less(&before.carry, &after.carry),
        proposal: None,
        identity: identity.then(|| [before.identity.clone(), after.identity.clone()]),
        hbone_only: Vec::new(),
        conflicts: less(&after.conflicts, &before.conflicts),
    }
}

/// The difference between two lists of services.
struct Difference {
    added: Vec<Exchanged>,
    removed: Vec<Exchanged>,
    changed: Vec<Changed>,
}

impl Difference {
    fn of(before: &[Exchanged], after: &[Exchanged], key: fn(&Exchanged) -> &String) -> Self {
        let by_key = |all: &[Exchanged]| -> BTreeMap<String, Exchanged> {
            all.iter().map(|service| (key(service).clone(), service.clone())).collect()
        };
        let (before, mut after) = (by_key(before), by_key(after));
        let mut difference = Self { added: Vec::new(), removed: Vec::new(), changed: Vec::new() };
        for (key, before) in before {
            match after.remove(&key) {
                None => difference.removed.push(before),
                Some(after) if after == before => {}
                Some(after) => difference.changed.push(Changed { before, after }),
            }
        }
        difference.added.extend(after.into_values());
        difference
    }
}

impl PeerPlan {
    /// Notes the services that become reachable, or change, and whose endpoints have no TLS.
    fn note_hbone_only(&mut self, modes: &Modes) {
        let offered = self.reachable.iter().chain(self.changed.iter().map(|changed| &changed.after));
        let is_plain = |service: &&Exchanged| {
            let has_tls = service.ports.iter().any(|port| port.ends_with("/TLS") || port.ends_with("/HTTPS"));
            modes.get(&service.service).is_some_and(|modes| {
                let is_plain = |mode: &Option<String>| match mode.as_deref() {
                    Some("none") => true,
                    Some("application") => !has_tls,
                    _ => false,
                };
                !modes.is_empty() && modes.iter().all(is_plain)
            })
        };
        self.hbone_only = offered.filter(is_plain).map(|service| service.exported_name.clone()).collect();
    }

    /// Notes that no gateway of the peer has ever answered the running one, unless the changed config lets calls cross on carriers.
    fn note_silence(&mut self, peers: &[Peer], after: &Policy) {
        let known = after.peers.iter().find(|peer| *peer.name == *self.peer);
        let Some(known) = known.filter(|peer| !peer.imports.is_empty()) else { return };
        let carry: Vec<String> = known.carry.iter().map(|direction| direction.text().to_owned()).collect();
        let peer = peers.iter().find(|peer| peer.name == self.peer);
        self.proposal = peer.and_then(|peer| proposal(peer, &carry));
    }

    fn is_empty(&self) -> bool {
        let nothing = Self { peer: self.peer.clone(), change: Change::Kept, ..Self::default() };
        *self == nothing
    }
}

fn print(plans: &[PeerPlan], out: &mut impl Write) -> Result<(), Failure> {
    if plans.is_empty() {
        return Ok(writeln!(out, "nothing changes for any peer")?);
    }
    for (at, plan) in plans.iter().enumerate() {
        if at > 0 {
            writeln!(out)?;
        }
        print_peer(plan, out)?;
    }
    Ok(())
}

fn print_peer(plan: &PeerPlan, out: &mut impl Write) -> Result<(), Failure> {
    let (more, less, other) =
        (paint("+", Colour::Green), paint("-", Colour::Red), paint("~", Colour::Yellow));
    let word = match plan.change {
        Change::Kept => "",
        Change::Added => " (added)",
        Change::Removed => " (removed)",
    };
    writeln!(out, "{}{word}", paint(&format!("peer {}", text(&plan.peer)), Colour::Bold))?;
    if let Some([before, after]) = &plan.identity {
        let shown =
            |identity: &Option<String>| identity.as_deref().map_or_else(|| "not enrolled".to_owned(), text);
        writeln!(out, "  {other} identity {} -> {}", shown(before), shown(after))?;
    }
    for (sign, blocks) in [(&more, &plan.from), (&less, &plan.not_from)] {
        for block in blocks {
            writeln!(out, "  {sign} SNI callers from {}", text(block))?;
        }
    }
    for (sign, directions) in [(&more, &plan.carried), (&less, &plan.not_carried)] {
        for direction in directions {
            let way = if direction == policy::Carry::ToPeer.text() { "to" } else { "of" };
            writeln!(out, "  {sign} calls {way} the peer on carriers (carry: {})", text(direction))?;
        }
    }
    for (sign, services) in [(&more, &plan.reachable), (&less, &plan.unreachable)] {
        for service in services {
            writeln!(out, "  {sign} {} ({})", text(&service.exported_name), target(service))?;
        }
    }
    for Changed { before, after } in &plan.changed {
        if before.exported_name != after.exported_name {
            let (before, after_name) = (text(&before.exported_name), text(&after.exported_name));
            writeln!(out, "  {other} {before} -> {after_name} ({})", target(after))?;
        } else {
            writeln!(
                out,
                "  {other} {} ({} -> {})",
                text(&before.exported_name),
                target(before),
                target(after)
            )?;
        }
    }
    for (sign, names) in [(&more, &plan.asked), (&less, &plan.not_asked)] {
        for name in names {
            writeln!(out, "  {sign} import {}", text(name))?;
        }
    }
    for service in &plan.dropped {
        writeln!(out, "  {less} import {} (here {})", text(&service.exported_name), text(&service.service))?;
    }
    for service in &plan.joined {
        let (name, with) = (text(&service.exported_name), text(&service.service));
        writeln!(out, "  {more} import {name} (joined with {with})")?;
    }
    for Changed { before, after } in &plan.renamed {
        let (name, old, new) = (text(&after.exported_name), text(&before.service), text(&after.service));
        match (before.service == after.service, after.joined) {
            (true, true) => writeln!(out, "  {other} import {name} (joined with {new})")?,
            (true, false) => writeln!(out, "  {other} import {name} (no longer joined with {new})")?,
            (false, true) => writeln!(out, "  {other} import {name} (here {old} -> joined with {new})")?,
            (false, false) => writeln!(out, "  {other} import {name} (here {old} -> {new})")?,
        }
    }
    for name in &plan.hbone_only {
        let warning = paint("warning:", Colour::Yellow);
        writeln!(out, "  {warning} {} is reachable by HBONE only, as its endpoints have no TLS", text(name))?;
    }
    if let Some(proposal) = &plan.proposal {
        writeln!(out, "  {} {proposal}", paint("warning:", Colour::Yellow))?;
    }
    for conflict in &plan.conflicts {
        writeln!(out, "  {} {}", paint("warning:", Colour::Yellow), text(conflict))?;
    }
    Ok(())
}

/// Returns a service of this mesh with its ports, such as `cart.shop.mesh:443/TLS,80/HTTP`.
fn target(service: &Exchanged) -> String {
    let tls = if service.tls.as_deref() == Some(ExportTls::Own.text()) { ", tls own" } else { "" };
    text(&format!("{}:{}{tls}", service.service, service.ports.join(",")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the snapshot of a config with a service of each name, and with these peers.
    fn world(services: &[&str], peers: &str) -> Snapshot {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("isthmus.yaml");
        let services: String = services
            .iter()
            .map(|name| format!("- {{hostname: {name}, namespace: shop, ports: [{{name: tls, port: 443, protocol: TLS}}]}}\n"))
            .collect();
        let text = format!(
            "listeners: [{{name: l, bind: ':15443', protocol: auto}}]\nidentity: {{files: {{certificate: c.pem, key: k.pem}}}}\ntrust: [{{trustDomain: cluster.local, roots: r.pem}}]\n\
             services:\n{services}peers:\n{peers}"
        );
        std::fs::write(&path, text).expect("written");
        of_file(&path).unwrap_or_else(|failure| panic!("{failure}"))
    }

    fn printed(plans: &[PeerPlan]) -> String {
        let mut out = Vec::new();
        print(plans, &mut out).expect("memory takes it");
        String::from_utf8(out).expect("text")
    }

    const OLD: &str = "- {name: west, from: [192.0.2.0/24], export: [{services: [cart.shop.mesh, pay.shop.mesh]}], import: [{services: ['*.pay.west']}]}\n\
                       - {name: south, export: [{services: [cart.shop.mesh]}]}\n";

    #[test]
    fn the_plan_has_what_becomes_reachable_unreachable_and_renamed() {
        let services = ["cart.shop.mesh", "pay.shop.mesh", "web.shop.mesh"];
        let new = "- {name: west, from: [198.51.100.0/24], export: [{services: [cart.shop.mesh], as: '{service}.east'}, {services: [web.shop.mesh]}], \
                   import: [{services: ['*.cart.west']}]}\n- {name: north, export: [{services: ['*']}]}\n";
        let text = printed(&plans(&details(&world(&services, OLD)), &world(&services, new)));
        let wanted = "peer south (removed)\n  - cart.shop.mesh (cart.shop.mesh:443/TLS)\n\n\
                      peer west\n  + SNI callers from 198.51.100.0/24\n  - SNI callers from 192.0.2.0/24\n\
                      \x20 + web.shop.mesh (web.shop.mesh:443/TLS)\n  - pay.shop.mesh (pay.shop.mesh:443/TLS)\n\
                      \x20 ~ cart.shop.mesh -> cart.east (cart.shop.mesh:443/TLS)\n  + import *.cart.west\n  - import *.pay.west\n\n\
                      peer north (added)\n  + cart.shop.mesh (cart.shop.mesh:443/TLS)\n  + pay.shop.mesh (pay.shop.mesh:443/TLS)\n\
                      \x20 + web.shop.mesh (web.shop.mesh:443/TLS)\n";
        assert_eq!(text, wanted);
    }

    #[test]
    fn carriers_are_shown_and_proposed_for_a_peer_that_has_never_answered() {
        let silent = api::network::Gateway { state: "never_answered".to_owned(), ..Default::default() };
        let peer = |gateways| [Peer { name: "west".to_owned(), gateways, ..Peer::default() }];
        let with = |peers: &[Peer], new: &str| {
            let after = world(&["cart.shop.mesh", "pay.shop.mesh"], new);
            let mut plans = plans(&details(&world(&["cart.shop.mesh", "pay.shop.mesh"], OLD)), &after);
            plans.iter_mut().for_each(|plan| plan.note_silence(peers, &after.policy));
            printed(&plans)
        };
        let more = OLD.replace("['*.pay.west']", "['*.pay.west', '*.cart.west']");
        let proposed = "warning: no gateway of the peer west has ever answered this one; if the peer takes no connections, let its \
                        gateways open carriers: `carry: [toPeer]` at the peer here, `carry: [fromPeer]` there\n";
        assert_eq!(
            with(&peer(vec![silent.clone()]), &more),
            format!("peer west\n  + import *.cart.west\n  {proposed}")
        );
        let answers = api::network::Gateway { state: "answers".to_owned(), ..Default::default() };
        assert_eq!(with(&peer(vec![silent.clone(), answers]), &more), "peer west\n  + import *.cart.west\n");
        let carried = OLD.replace("name: west,", "name: west, carry: [toPeer],");
        let wanted = "peer west\n  + calls to the peer on carriers (carry: toPeer)\n";
        assert_eq!(with(&peer(vec![silent]), &carried), wanted);
    }

    #[test]
    fn exported_services_without_tls_are_named() {
        let plain = |port: &str, tls: &str| {
            let endpoints = format!("endpoints: [{{address: 10.0.0.1{tls}}}]");
            format!(
                "a.mesh, namespace: shop, ports: [{{name: p, port: 80, protocol: {port}}}], {endpoints}}}\n#"
            )
        };
        let peers = |export: &str| format!("- {{name: west, export: [{{services: [{export}]}}]}}\n");
        let warned = |service: &str| {
            // The rest of the line that `world` writes is a comment.
            let after = world(&[service], &peers("a.mesh"));
            let mut plans = plans(&details(&world(&[service], &peers("b.mesh"))), &after);
            plans.iter_mut().for_each(|plan| plan.note_hbone_only(&modes_of(&after)));
            printed(&plans)
                .contains("warning: a.mesh is reachable by HBONE only, as its endpoints have no TLS")
        };
        assert!(warned(&plain("HTTP", ", tls: none")));
        assert!(!warned(&plain("TLS", "")) && !warned(&plain("TLS", ", tls: own")));
    }

    #[test]
    fn an_unchanged_config_changes_nothing() {
        let services = ["cart.shop.mesh", "pay.shop.mesh"];
        let before = details(&world(&services, OLD));
        assert_eq!(printed(&plans(&before, &world(&services, OLD))), "nothing changes for any peer\n");
        let changed = world(&["cart.shop.mesh", "new.shop.mesh", "pay.shop.mesh"], OLD);
        assert_eq!(plans(&before, &changed), [], "no rule names the new service");
    }

    #[test]
    fn services_of_the_peer_are_dropped_renamed_and_limited() {
        let exchanged = |name: &str| Exchanged {
            exported_name: format!("{name}.pay.west"),
            service: format!("{name}.pay.west"),
            namespace: "pay".to_owned(),
            ports: vec!["443/TLS".to_owned()],
            ..Exchanged::default()
        };
        let mut before = details(&world(&["a.here"], OLD));
        before[0].imported = ["a", "b", "c", "d"].map(exchanged).to_vec();
        let new = OLD.replace(
            "{services: ['*.pay.west']}",
            "{services: [b.pay.west]}, {services: [a.pay.west, c.pay.west], as: '{service}.here', limit: 1}",
        );
        let plans = plans(&before, &world(&["a.here"], &new));
        let [west] = plans.as_slice() else { panic!("{plans:?}") };
        let dropped: Vec<&str> = west.dropped.iter().map(|service| &*service.exported_name).collect();
        assert_eq!(dropped, ["c.pay.west", "d.pay.west"], "beyond the limit, and not named");
        assert_eq!(west.renamed.iter().map(|one| &*one.after.service).collect::<Vec<_>>(), ["a.here"]);
        let conflicts = west.conflicts.join("\n");
        assert!(conflicts.contains("a.here, which is the name of a service of ours"), "{conflicts}");
        assert!(
            conflicts.contains("c.pay.west is left out: peers[0].import[1] has reached its limit of 1"),
            "{conflicts}"
        );
    }

    #[test]
    fn the_plan_has_what_would_be_joined_and_what_would_be_no_longer() {
        let fees = Exchanged {
            exported_name: "fees.west".to_owned(),
            service: "fees.mesh".to_owned(),
            namespace: "pay".to_owned(),
            ports: vec!["443/TLS".to_owned()],
            ..Exchanged::default()
        };
        let peers = |west: &str, north: &str| {
            format!(
                "- {{name: west, import: [{{services: [fees.west], as: fees.mesh{west}}}]}}\n- {{name: north, import: [{{services: \
                 [fees.north], as: fees.mesh{north}}}]}}\n"
            )
        };
        let plan = |before: &[PeerDetail], services: &[&str], west: &str, north: &str| {
            printed(&plans(before, &world(services, &peers(west, north))))
        };
        let merge = ", merge: true";
        let mut before = details(&world(&["fees.mesh"], &peers("", "")));
        before[0].left_out = vec![fees.clone()];
        assert_eq!(
            plan(&before, &["fees.mesh"], merge, ""),
            "peer west\n  + import fees.west (joined with fees.mesh)\n"
        );
        assert_eq!(plan(&before, &["fees.mesh"], "", ""), "nothing changes for any peer\n");
        // Two peers have the name.
        let of_north = Exchanged { exported_name: "fees.north".to_owned(), ..fees.clone() };
        (before[0].left_out, before[0].imported) = (Vec::new(), vec![fees.clone()]);
        before[1].left_out = vec![of_north];
        assert_eq!(
            plan(&before, &["other.mesh"], merge, merge),
            "peer north\n  + import fees.north (joined with fees.mesh)\n"
        );
        assert_eq!(
            plan(&before, &["other.mesh"], "", merge),
            "nothing changes for any peer\n",
            "west does not consent"
        );
        before[0].imported = vec![Exchanged { joined: true, ..fees }];
        let text = plan(&before, &["fees.mesh"], "", "");
        assert!(
            text.starts_with("peer west\n  - import fees.west (here fees.mesh)\n  warning: fees.west gets"),
            "{text}"
        );
    }
}
