//! The Services that are derived from ServiceImports (KEP-1645): in a cluster that does not export a service, they give the import a
//! virtual address, by which pods outside the mesh reach the service. Their EndpointSlices lead to the gateways of the networks that
//! have the endpoints. A gateway reads the server name of the client's own TLS, so only ports of TLS can be reached through it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::import_slices::{ENDPOINTS_MAX, cut};
use super::kinds::derived_service::{DerivedContent, derived_key};
use super::kinds::imported_slice::{ImportedEndpoint, SliceContent, SliceOf};
use super::kinds::service_import::{ImportContent, Ready};
use super::own_objects::There;
use super::table::ObjectKey;
use isthmus_decisions::plain_client::plain_addresses;
use isthmus_model::endpoint::Health;
use isthmus_model::name::is_dns_label;
use isthmus_model::place::{ClusterId, Network};
use isthmus_registry::change::ExportedPort;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::clusterset_service::ClusterSetService;

/// The largest number of ports that the condition of an import names; further ports are only counted.
const PORTS_SHOWN: usize = 10;

/// A Service that is derived from an import, and its slices.
pub(super) struct Derived {
    pub(super) key: ObjectKey,
    pub(super) content: DerivedContent,
    pub(super) slices: Vec<(ObjectKey, Arc<SliceContent>)>,
    /// The ports, each with the families of the addresses to which it leads.
    ports: Vec<(String, Led)>,
    server_name: String,
}

/// The families of addresses to which a port leads, or the reason why it leads nowhere.
type Led = Result<BTreeSet<&'static str>, &'static str>;

impl Derived {
    /// Returns the Service of an import in a cluster on a network; `None` if the import needs none, because it is headless or its
    /// cluster gives it an address otherwise.
    pub(super) fn of(
        snapshot: &Snapshot,
        service: &ClusterSetService<'_>,
        (import, content): (&ObjectKey, &ImportContent),
        place: (&Network, &ClusterId),
    ) -> Option<Self> {
        let has_own = !content.ips.is_empty() || service.clusters.contains(place.1);
        if has_own || content.is_headless || content.ports.is_empty() {
            return None;
        }
        let key = derived_key(import);
        let names = names_of(&content.ports);
        let port =
            |(port, name): (&ExportedPort, &String)| (name.clone(), port.port, port.protocol.to_string());
        let derived = DerivedContent {
            import: import.name.to_string(),
            ports: content.ports.iter().zip(&names).map(port).collect(),
        };
        let (mut slices, mut ports) = (Vec::new(), Vec::new());
        for (port, port_name) in content.ports.iter().zip(&names) {
            let led = plain_addresses(snapshot, service, port, place).map(|addresses| {
                let of = SliceOf::Derived(key.name.to_string());
                slices.extend(to(import, &of, port_name, &addresses));
                addresses.iter().map(|address| family(address.ip())).collect()
            });
            ports.push((format!("{}/{}", port.port, port.protocol), led));
        }
        let server_name = service.hostname().to_owned();
        Some(Self { key, content: derived, slices, ports, server_name })
    }

    /// Completes the content of an import beside which another program has a Service of this name. It stays as it is, and its slices
    /// would lead its clients to other endpoints, so that the import has neither.
    pub(super) fn complete_without(&self, import: &mut ImportContent) {
        let ObjectKey { namespace, name } = &self.key;
        let message = format!(
            "the Service {namespace}/{name} is not one that Isthmus wrote, so this import has no cluster IP; rename or delete the Service"
        );
        import.ready =
            Some(Ready { status: "False".to_owned(), reason: Ready::NAME_TAKEN.to_owned(), message });
    }

    /// Completes the content of the import, to whose Service the cluster has given these addresses. `there` are the slices in the
    /// cluster: the API server may refuse those of the Service.
    pub(super) fn complete(
        &self,
        addresses: &[IpAddr],
        there: &There<SliceContent>,
        import: &mut ImportContent,
    ) {
        import.ips = addresses.iter().map(ToString::to_string).collect();
        if !addresses.is_empty() {
            import.ip_families = addresses.iter().map(|ip| family(*ip).to_owned()).collect();
        }
        let is_led = addresses.is_empty()
            || self.slices.is_empty()
            || self.slices.iter().any(|(slice, _)| there.contains_key(slice));
        import.ready = Some(if is_led {
            self.ready(&addresses.iter().map(|ip| family(*ip)).collect())
        } else {
            let message = format!("no EndpointSlice of the Service {} is written yet", self.key.name);
            Ready { status: "False".to_owned(), reason: Ready::NONE.to_owned(), message }
        });
    }

    /// Returns the number of ports that clients reach by addresses of these families, and the ways that lead nowhere.
    fn reached(&self, families: &BTreeSet<&'static str>) -> (usize, Vec<String>) {
        let (mut reached, mut unreached) = (0, Vec::new());
        for (port, led) in &self.ports {
            let led = match led {
                Ok(led) => led,
                Err(why) => {
                    unreached.push(format!("{port} ({why})"));
                    continue;
                }
            };
            if families.is_disjoint(led) {
                let only: Vec<&str> = led.iter().copied().collect();
                unreached.push(format!(
                    "{port} (leads only to {}, of which the Service has no address)",
                    only.join(", ")
                ));
                continue;
            }
            reached += 1;
            let lacking = families.difference(led);
            unreached
                .extend(lacking.map(|family| format!("{port} by {family} (no {family} address behind it)")));
        }
        (reached, unreached)
    }

    /// Returns the condition of the import, whose Service has addresses of these families.
    fn ready(&self, families: &BTreeSet<&'static str>) -> Ready {
        let (reached, unreached) = self.reached(families);
        let mut shown: Vec<String> = unreached.iter().take(PORTS_SHOWN).cloned().collect();
        let more = unreached.len().saturating_sub(PORTS_SHOWN);
        if more > 0 {
            shown.push(format!("{more} more"));
        }
        let shown = shown.join(", ");
        // A family that leads nowhere is told, but a cluster of two families with gateways of one is as good as it can be.
        let (status, reason, message) = match (families.is_empty(), reached, self.ports.len() - reached) {
            (true, ..) => {
                ("False", Ready::NONE, format!("the Service {} has no cluster IP yet", self.key.name))
            }
            (false, 0, _) => ("False", Ready::NONE, format!("pods outside the mesh reach no port: {shown}")),
            (false, _, 0) => (
                "True",
                Ready::ALL,
                format!(
                    "pods outside the mesh reach all ports by the TLS server name {}{}{shown}",
                    self.server_name,
                    if shown.is_empty() { "" } else { ", but not " }
                ),
            ),
            (false, ..) => (
                "True",
                Ready::SOME,
                format!(
                    "pods outside the mesh reach this service by the TLS server name {}, but not these ports: {shown}",
                    self.server_name
                ),
            ),
        };
        Ready { status: status.to_owned(), reason: reason.to_owned(), message }
    }
}

/// Returns the family of an address, as Kubernetes writes it.
fn family(ip: IpAddr) -> &'static str {
    if ip.is_ipv6() { "IPv6" } else { "IPv4" }
}

/// Returns a name for each port: its own, or one that is made of its number, where an API server would refuse its own, because it is
/// no DNS label (RFC 1123 §2.1), or where another port has it.
fn names_of(ports: &[ExportedPort]) -> Vec<String> {
    let mut taken = BTreeSet::new();
    let name = |port: &ExportedPort| {
        let made = format!("{}-{}", port.protocol.to_ascii_lowercase(), port.port);
        let own =
            is_dns_label(&port.name).then(|| port.name.to_string()).filter(|own| taken.insert(own.clone()));
        own.unwrap_or(made)
    };
    ports.iter().map(name).collect()
}

/// Returns the slices that lead from a port to these addresses, as many of each family as a slice's source may have. The addresses of
/// a slice have one port number.
fn to(
    import: &ObjectKey,
    of: &SliceOf,
    port: &str,
    addresses: &BTreeSet<SocketAddr>,
) -> Vec<(ObjectKey, Arc<SliceContent>)> {
    let mut groups: BTreeMap<(bool, u16), Vec<ImportedEndpoint>> = BTreeMap::new();
    let (v4, v6): (Vec<&SocketAddr>, Vec<&SocketAddr>) =
        addresses.iter().partition(|address| address.is_ipv4());
    for address in [v4, v6].into_iter().flat_map(|family| family.into_iter().take(ENDPOINTS_MAX)) {
        let endpoint =
            ImportedEndpoint { address: address.ip(), health: Health::Healthy, zone: String::new() };
        groups.entry((address.is_ipv6(), address.port())).or_default().push(endpoint);
    }
    let slices = groups.into_iter().flat_map(|((is_ipv6, number), endpoints)| {
        let (import_name, ports) = (import.name.to_string(), vec![(port.to_owned(), number)]);
        let content = SliceContent { import: import_name, of: of.clone(), is_ipv6, ports, endpoints };
        cut(&import.namespace, content)
    });
    slices.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_port_of_a_derived_service_has_a_name_that_an_api_server_takes() {
        let port = |name: &str, port: u16| ExportedPort {
            name: name.into(),
            port,
            protocol: "TCP".into(),
            app_protocol: "".into(),
        };
        let ports = ["https", "https", "HTTPS", "tls_1", "", "-a", "443"];
        let ports: Vec<_> = ports.iter().zip(441..).map(|(name, number)| port(name, number)).collect();
        let expected = ["https", "tcp-442", "tcp-443", "tcp-444", "tcp-445", "tcp-446", "443"];
        assert_eq!(names_of(&ports), expected);
    }

    #[test]
    fn the_largest_number_of_addresses_holds_for_each_family() {
        let v4 =
            (0..1_200_u16).map(|host| ([10, 0, host.to_be_bytes()[0], host.to_be_bytes()[1]], 443).into());
        let v6 = (0..3_u16).map(|host| ([0xfd00, 0, 0, 0, 0, 0, 0, host], 443).into());
        let import = ObjectKey { namespace: "shop".into(), name: "web".into() };
        let slices = to(&import, &SliceOf::Derived("s".into()), "https", &v4.chain(v6).collect());
        let of = |is_ipv6: bool| -> usize {
            let slices = slices.iter().filter(|(_, slice)| slice.is_ipv6 == is_ipv6);
            slices.map(|(_, slice)| slice.endpoints.len()).sum()
        };
        assert_eq!((of(false), of(true)), (ENDPOINTS_MAX, 3));
    }

    #[test]
    fn the_condition_names_the_families_by_which_a_port_is_not_reached() {
        let ready = |families: &[&'static str], led: &[Led]| {
            let port = |(led, number): (&Led, u16)| (format!("{number}/TCP"), led.clone());
            let derived = Derived {
                key: ObjectKey { namespace: "shop".into(), name: "isthmus-1".into() },
                content: DerivedContent { import: "web".into(), ports: Vec::new() },
                slices: Vec::new(),
                ports: led.iter().zip(443..).map(port).collect(),
                server_name: "web.shop.svc.clusterset.local".into(),
            };
            let Ready { status, reason, message } = derived.ready(&families.iter().copied().collect());
            (status, reason, message.rsplit("port").next().expect("a part").to_owned())
        };
        let (v4, v6, both) = (Ok(["IPv4"].into()), Ok(["IPv6"].into()), Ok(["IPv4", "IPv6"].into()));
        let told =
            |status: &str, reason: &str, end: &str| (status.to_owned(), reason.to_owned(), end.to_owned());
        let only_v6 = ": 443/TCP (leads only to IPv6, of which the Service has no address)";
        assert_eq!(ready(&["IPv4"], std::slice::from_ref(&v6)), told("False", Ready::NONE, only_v6));
        assert_eq!(ready(&["IPv4"], &[v6, both.clone()]), told("True", Ready::SOME, &format!("s{only_v6}")));
        assert_eq!(
            ready(&["IPv4", "IPv6"], &[v4, both.clone(), Err("no endpoint")]),
            told(
                "True",
                Ready::SOME,
                "s: 443/TCP by IPv6 (no IPv6 address behind it), 445/TCP (no endpoint)"
            )
        );
        let lacking = "s by the TLS server name web.shop.svc.clusterset.local, but not 443/TCP by IPv6 (no IPv6 address behind it)";
        assert_eq!(ready(&["IPv4", "IPv6"], &[Ok(["IPv4"].into())]), told("True", Ready::ALL, lacking));
        let (status, reason, _) = ready(&["IPv4", "IPv6"], &[both]);
        assert_eq!((&*status, &*reason), ("True", Ready::ALL));
    }
}
