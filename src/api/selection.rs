//! The part of the overview about one network, service or endpoint, which the dashboard and `isthmus top` show when a reader opens it:
//! from a network to its services, to the endpoints of one, to the connections of one endpoint.

use serde::{Deserialize, Serialize};

use super::connection::Connection;
use super::endpoint::Endpoint;
use super::listed::{Part, Service};
use super::network::{Gateway, Network};
use super::text::shell_word;

/// A network, service or endpoint, with what belongs to it. Every list has a limit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Selection {
    /// The chosen network; empty: the unknown network. `null`: all networks.
    pub network: Option<String>,
    /// The chosen service or route: its host name or key.
    pub service: Option<String>,
    /// The address of the chosen endpoint, as in `endpoints`.
    pub endpoint: Option<String>,
    /// False if the gateway knows no such network, service or endpoint.
    pub exists: bool,
    /// The chosen network as in the list of networks.
    pub about_network: Option<Network>,
    /// The chosen service as in the list of services.
    pub about_service: Option<Service>,
    /// Without `service`: the gateways of the network.
    pub gateways: Part<Gateway>,
    /// Without `service`: the services with endpoints on the network, first those with endpoints that are not ready.
    pub services: Part<Placed>,
    /// The endpoints of the service, on the network if one is chosen: first those that are not healthy, then the busiest.
    pub endpoints: Part<Endpoint>,
    /// The open connections to the service or endpoint, oldest first.
    pub connections: Part<Connection>,
    /// The last failed connections to the service or endpoint, newest first.
    pub failures: Part<Connection>,
}

/// A service on one network.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Placed {
    /// The host name of the service.
    pub name: String,
    /// The number of its endpoints on the network.
    pub endpoints: usize,
    /// The number of these that their registry reports as healthy.
    pub ready: usize,
}

/// A command for a shell, and what it does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hint {
    /// The effect of the command, in words.
    pub does: &'static str,
    /// The command.
    pub command: String,
}

impl Selection {
    /// Returns the commands about the selection. `own` is the network of the gateway: only its endpoints get connections of this gateway.
    pub fn hints(&self, own: &str) -> Vec<Hint> {
        let hint = |does: &'static str, command: &[&str]| {
            let words: Vec<String> = command.iter().map(|word| shell_word(word)).collect();
            Hint { does, command: format!("isthmus {}", words.join(" ")) }
        };
        match (&self.network, &self.service, &self.endpoint) {
            (_, Some(service), Some(address)) => {
                let endpoint = self.endpoints.shown.iter().find(|endpoint| endpoint.address == *address);
                let is_drainable = is_ip(address) && endpoint.is_some_and(|endpoint| endpoint.network == own);
                if !is_drainable {
                    return vec![hint(
                        "dials it, and shows its certificate",
                        &["explain", service, "--probe"],
                    )];
                }
                let order = |order| ["endpoint", order, address.as_str(), "--service", service.as_str()];
                vec![
                    hint("dials it, and shows its certificate", &["explain", service, "--probe"]),
                    hint("no new connections; open ones continue", &order("drain")),
                    hint("no new connections; open ones are closed", &order("disable")),
                    hint("ends both, and an ejection", &order("enable")),
                ]
            }
            (_, Some(service), None) if service.contains('*') || service.contains('/') || service == "-" => {
                vec![hint("all endpoints", &["get", "endpoints"])]
            }
            (_, Some(service), None) => vec![
                hint("the decision, step by step", &["explain", service]),
                hint("dials the endpoints, and shows their certificates", &["explain", service, "--probe"]),
                hint("calls it as a client would", &["test", "call", service]),
                hint("its failures as they happen", &["failures", "--name", service, "--watch"]),
            ],
            (Some(network), None, _) if !network.is_empty() => {
                let mut hints = vec![
                    hint("the endpoints that clients there get", &["horizon", "--network", network]),
                    hint("all gateways", &["get", "gateways"]),
                ];
                if network != own {
                    hints.push(hint("where its calls would go", &["drain", "network", network, "--plan"]));
                    hints.push(hint("sends no calls there, by and by", &["drain", "network", network]));
                    hints.push(hint("sends calls there again", &["undrain", "network", network]));
                }
                hints
            }
            _ => Vec::new(),
        }
    }
}

/// Returns true for an IP address with or without a port.
fn is_ip(address: &str) -> bool {
    address.parse::<std::net::IpAddr>().is_ok() || address.parse::<std::net::SocketAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commands(selection: &Selection) -> Vec<String> {
        selection.hints("here").into_iter().map(|hint| hint.command).collect()
    }

    #[test]
    fn names_are_single_words_of_the_commands() {
        let hostile = "x; rm -rf ~ $(id) 'a'\n".to_owned();
        let quoted = "'x; rm -rf ~ $(id) '\\''a'\\''\n'";
        let network = Selection { network: Some(hostile.clone()), ..Selection::default() };
        let service = Selection { service: Some(hostile), ..Selection::default() };
        for command in [commands(&network), commands(&service)].concat() {
            assert!(command.ends_with("get gateways") || command.contains(quoted), "{command}");
        }
    }

    #[test]
    fn only_an_own_endpoint_with_an_address_is_drained() {
        let of = |address: &str, network: &str| {
            let endpoint =
                Endpoint { address: address.to_owned(), network: network.to_owned(), ..Endpoint::default() };
            commands(&Selection {
                service: Some("a.mesh".to_owned()),
                endpoint: Some(address.to_owned()),
                endpoints: Part { total: 1, shown: vec![endpoint] },
                ..Selection::default()
            })
        };
        assert_eq!(of("10.0.0.1", "here")[1], "isthmus endpoint drain 10.0.0.1 --service a.mesh");
        assert_eq!(of("[fd00::1]:443", "here")[1], "isthmus endpoint drain '[fd00::1]:443' --service a.mesh");
        assert_eq!([of("10.0.0.1", "there").len(), of("db.example.com", "here").len()], [1, 1]);
    }
}
