//! The arguments that several commands share, and those of the commands that read the state of a gateway.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser};

use isthmus_api::requests;
use isthmus_console::client;
use isthmus_console::output::Format;
use isthmus_document::scalar;
use isthmus_model::identity::Identity;
use isthmus_model::reason::Reason;
use isthmus_model::trace::TraceId;

#[derive(Debug, Args)]
pub(super) struct Admin {
    /// Admin API of the gateway: a URL, or `unix:/path` [default: unix:/run/isthmus/admin.sock if it exists, then http://127.0.0.1:15000]
    #[arg(long, value_name = "URL", env = "ISTHMUS_ADMIN")]
    pub(super) admin: Option<String>,
}

impl Admin {
    /// Returns the address of the API: the option, else the environment variable, else the default.
    pub(super) fn url(&self) -> String {
        let given = self.admin.clone().filter(|admin| !admin.is_empty());
        given.unwrap_or_else(|| client::default_address(Path::new(client::SOCKET)))
    }
}

#[derive(Debug, Args)]
pub(super) struct Reading {
    #[command(flatten)]
    pub(super) admin: Admin,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    pub(super) output: Format,
}

/// The connections that are shown.
#[derive(Debug, Default, Args)]
pub(super) struct Filter {
    /// Only connections that ended for this reason
    #[arg(long, value_name = "REASON", value_parser = reasons(), hide_possible_values = true)]
    pub(super) reason: Option<String>,
    /// Only connections whose server name or authority contains this text
    #[arg(long, value_name = "TEXT")]
    pub(super) name: Option<String>,
    /// Only connections of the last 30s, 5m, 1h, …
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub(super) since: Option<Duration>,
    /// Keep running, and show new connections as they fail
    #[arg(long)]
    pub(super) watch: bool,
}

/// Takes the words of the reasons, and suggests the nearest for any other word.
fn reasons() -> PossibleValuesParser {
    PossibleValuesParser::new(Reason::ALL.iter().map(|reason| reason.text()))
}

/// Takes the words of the answers that `isthmus get` shows.
pub(super) fn shown() -> PossibleValuesParser {
    let words = requests::ALL.iter().filter_map(|row| row.shown?.words.split_first());
    PossibleValuesParser::new(
        words.map(|(word, others)| PossibleValue::new(*word).aliases(others.iter().copied())),
    )
}

/// Parses a duration in the form of the config.
pub(super) fn time(text: &str) -> Result<Duration, String> {
    scalar::duration(text).map_err(|fault| fault.message)
}

#[derive(Debug, Args)]
pub(super) struct Explain {
    /// Name as a client sends it; "" for a client that sends no name
    #[arg(required_unless_present_any = ["trace", "no_tls"])]
    pub(super) name: Option<String>,
    /// Show the connections of this trace instead; the id is the `trace_id` in the access log of any gateway on the
    /// path
    #[arg(
        long,
        value_name = "TRACE",
        value_parser = trace_id,
        conflicts_with_all = [
            "name", "authority", "no_tls", "identity", "from", "to", "alpn", "listener", "config", "probe"
        ]
    )]
    pub(super) trace: Option<TraceId>,
    /// The name is the authority of an HBONE CONNECT: `hostname:port` or `address:port`
    #[arg(long)]
    pub(super) authority: bool,
    /// The first bytes of the client are not TLS: where `fallback` of the listener leads
    #[arg(long, conflicts_with_all = ["name", "authority", "alpn"])]
    pub(super) no_tls: bool,
    /// SPIFFE ID of the HBONE caller
    #[arg(long, value_name = "ID", requires = "authority", value_parser = Identity::parse)]
    pub(super) identity: Option<Identity>,
    /// Address of the client; without it, source rules are shown but not checked
    #[arg(long, value_name = "IP")]
    pub(super) from: Option<IpAddr>,
    /// Address of the gateway to which the client connects, which tells Gateways on the same port apart
    #[arg(long, value_name = "IP")]
    pub(super) to: Option<IpAddr>,
    /// ALPN protocols that the client offers; without it, the listener's check is shown but not applied
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    pub(super) alpn: Option<Vec<String>>,
    /// Name of the listener [default: the first one that accepts such names]
    #[arg(long)]
    pub(super) listener: Option<String>,
    /// Answer from this config file instead of the running gateway
    #[arg(short, long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// Also dial the endpoints: from the gateway, or from this host with `--config`
    #[arg(long)]
    pub(super) probe: bool,
    #[command(flatten)]
    pub(super) reading: Reading,
}

fn trace_id(text: &str) -> Result<TraceId, &'static str> {
    TraceId::parse(text).ok_or("a trace id has 32 hexadecimal digits, not all of them zero")
}
