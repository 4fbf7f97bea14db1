//! The commands of `isthmus`: the command line, and a file for each command that is more than one request.
//!
//! - `read`, `tables`, `traces`, `horizon`, `peers`: what is shown of a gateway. `check`, `watch`, `top`: what is followed.
//! - `registry`, `kubeconfig`, `certs`, `enrol`, `plan`: what is prepared.
//! - `examples`: the examples in the help. `documents` (tests): the generated parts of docs/.
//!
//! The commands `demo` and `convert` are crates of their own.

pub mod certs;
mod check;
#[cfg(test)]
mod documents;
mod enrol;
mod examples;
mod horizon;
#[cfg(feature = "kubernetes")]
mod kubeconfig;
mod peers;
mod plan;
mod read;
mod registry;
mod tables;
mod top;
mod traces;
mod watch;

use std::io::{self, Write};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Args, CommandFactory, Parser, Subcommand};

use isthmus_app as app;
use isthmus_config as config;
use isthmus_console::client;
use isthmus_console::failure::Failure;
use isthmus_console::output::{self, Format};
use isthmus_convert as convert;
use isthmus_dataplane::withdrawals::Which;
use isthmus_demo as demo;
use isthmus_document::scalar;
use isthmus_model::identity::Identity;
use isthmus_model::reason::Reason;
use isthmus_model::trace::TraceId;

/// The exit code if a check has a negative result: an invalid config, a refused name, a failed demo.
const WRONG: u8 = 1;
/// The exit code if the command line is wrong, as clap has it.
const USAGE: u8 = 2;
/// The exit code if the admin API or etcd cannot be reached.
const UNREACHABLE: u8 = 3;
/// The time after which a command says that it waits for a pipe.
const SLOW: Duration = Duration::from_secs(2);
/// The default paths of the config, in the order in which they are tried.
const CONFIG_PATHS: [&str; 2] = ["isthmus.yaml", "/etc/isthmus/isthmus.yaml"];

/// An east-west mesh gateway: routes TLS by server name between networks, passes the bytes through, and explains every refusal.
#[derive(Debug, Parser)]
#[command(name = "isthmus", version, arg_required_else_help = true, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// The examples below the list of commands.
const EXAMPLES: &str = "Examples:
  isthmus validate isthmus.yaml                  check a config
  isthmus run -c isthmus.yaml                    run the gateway
  isthmus status                                 current problems, and the gateway's state
  isthmus top                                    the same live, with services, failures and networks
  isthmus explain checkout.shop.mesh --probe     how a name is routed, and whether its endpoints answer
  isthmus failures --reason sni_unknown --watch  refused connections, as they happen";

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the gateway
    #[command(after_help = examples::RUN)]
    Run {
        /// The config file, or a directory of them [default: isthmus.yaml, then /etc/isthmus/isthmus.yaml]
        #[arg(short, long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Check config files as `run` does, without running the gateway
    #[command(after_help = examples::VALIDATE)]
    Validate {
        /// Config files, or directories of them; `-` for the standard input; also pipes, which `run` refuses
        #[arg(required_unless_present = "config", value_name = "FILE")]
        files: Vec<PathBuf>,
        /// A config file, as with the other commands
        #[arg(short, long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Treat warnings as errors
        #[arg(long)]
        strict: bool,
    },
    /// Make a config from the configuration of HAProxy, and list what cannot be carried over
    #[command(after_help = convert::EXAMPLES)]
    Convert(convert::Arguments),
    /// Print the JSON Schema of the config, or its reference
    #[command(after_help = examples::SCHEMA)]
    Schema {
        /// Print the reference (Markdown) instead
        #[arg(long)]
        reference: bool,
    },
    /// Explain how a name is routed, and why
    #[command(after_help = examples::EXPLAIN)]
    Explain(Explain),
    /// Show the endpoints that a client on a network gets for a service, and why others are left out
    #[command(after_help = examples::HORIZON)]
    Horizon(horizon::Horizon),
    /// Show current problems, and the state of the gateway, its listeners and registries
    #[command(after_help = examples::STATUS)]
    Status(Reading),
    /// Show problems, services with traffic and health, failures and networks, live in the terminal
    #[command(after_help = examples::TOP)]
    Top(Admin),
    /// Show every reachable name, who may use it, and the rule or route that allows it
    #[command(after_help = examples::EXPOSED)]
    Exposed(Reading),
    /// Show the last 1,000 connections that were refused or failed
    #[command(after_help = examples::FAILURES)]
    Failures {
        #[command(flatten)]
        filter: Filter,
        #[command(flatten)]
        reading: Reading,
    },
    /// List services, endpoints, routes, registries, connections, …
    #[command(after_help = examples::GET)]
    Get {
        #[arg(value_enum)]
        what: What,
        #[command(flatten)]
        reading: Reading,
    },
    /// Check the running gateway or a config file for problems, and show the next step for each failure
    #[command(after_help = check::EXAMPLES)]
    Check(check::Arguments),
    /// Follow failures, connections or endpoints, with one line for each change
    #[command(after_help = watch::EXAMPLES)]
    Watch {
        #[arg(value_enum)]
        what: watch::Followed,
        #[command(flatten)]
        reading: Reading,
    },
    /// Tell the running gateway to read its config again
    #[command(after_help = examples::RELOAD)]
    Reload(Admin),
    /// Stop the running gateway gracefully, as SIGTERM does: open connections may finish
    #[command(after_help = examples::DRAIN)]
    Drain(Admin),
    /// Take an endpoint of the running gateway out of service, or back into service; a restart undoes this
    #[command(subcommand, after_help = examples::ENDPOINT)]
    Endpoint(EndpointOrder),
    /// Close a connection of the running gateway
    #[command(after_help = examples::CLOSE)]
    Close {
        /// The id that `isthmus get connections` shows
        id: u64,
        #[command(flatten)]
        admin: Admin,
    },
    /// Change the log level until the next restart: error, warn, info, debug, trace, or a filter
    #[command(after_help = examples::LOG_LEVEL)]
    LogLevel {
        #[arg(value_parser = app::log::checked)]
        level: String,
        #[command(flatten)]
        admin: Admin,
    },
    /// Show other organisations: their links, the services exchanged with them, and the services left out and why
    #[command(after_help = examples::PEERS)]
    Peers(Reading),
    /// Link this gateway with the gateway of another organisation, and preview changes of the exchanged services
    #[command(subcommand, after_help = examples::PEER)]
    Peer(PeerAction),
    /// Write, delete and list the services of a registry in etcd
    #[command(subcommand, after_help = examples::REGISTRY)]
    Registry(registry::Action),
    /// Print the kubeconfig by which gateways in other clusters read this Kubernetes cluster
    #[cfg(feature = "kubernetes")]
    #[command(after_help = kubeconfig::EXAMPLES)]
    Kubeconfig(kubeconfig::Arguments),
    /// Make a development CA and workload certificates
    #[command(after_help = examples::CERTS)]
    Certs(certs::Args),
    /// Run a demo on loopback: two networks with a gateway each, services and clients; cleans up afterwards
    #[command(after_help = examples::DEMO)]
    Demo(demo::Args),
    /// Check whether the gateway is ready; for container health checks
    #[command(after_help = examples::HEALTHCHECK)]
    Healthcheck(Admin),
    /// Print a completion script
    #[command(after_help = examples::COMPLETION)]
    Completion {
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, Subcommand)]
enum PeerAction {
    /// Print a token with which another organisation can link its gateway with this one; it can be used once
    #[command(after_help = enrol::INVITE_EXAMPLES)]
    Invite(enrol::Invite),
    /// Link this gateway with the gateway of another organisation that printed the token
    #[command(after_help = enrol::JOIN_EXAMPLES)]
    Join(enrol::Join),
    /// Show which services a changed config makes reachable or unreachable, for each peer, before it is applied
    #[command(after_help = plan::EXAMPLES)]
    Plan(plan::Arguments),
}

#[derive(Debug, Subcommand)]
enum EndpointOrder {
    /// Send no new connections to an endpoint; open connections continue
    #[command(after_help = examples::ENDPOINT_DRAIN)]
    Drain(EndpointArguments),
    /// Send no new connections to an endpoint, and close its open connections
    #[command(after_help = examples::ENDPOINT_DISABLE)]
    Disable(EndpointArguments),
    /// Send new connections to a drained or disabled endpoint again
    #[command(after_help = examples::ENDPOINT_ENABLE)]
    Enable(EndpointArguments),
}

#[derive(Debug, Args)]
struct EndpointArguments {
    // No doc comment: rustdoc would take the brackets for a link.
    #[arg(
        value_name = "ADDRESS[:PORT]",
        value_parser = endpoint_address,
        help = "IP address of the endpoint, for all its ports, or address and port: 10.0.0.1:8443, [fd00::1]:8443"
    )]
    address: String,
    /// Host name of a service, or key of a route [default: all that use the endpoint]
    #[arg(long, value_name = "NAME")]
    service: Option<String>,
    #[command(flatten)]
    admin: Admin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum What {
    Services,
    Endpoints,
    Routes,
    Registries,
    Config,
    Gateways,
    Clients,
    Networks,
    Connections,
    Listeners,
    Certificates,
}

#[derive(Debug, Args)]
struct Admin {
    /// Admin API of the gateway: a URL, or `unix:/path` [default: unix:/run/isthmus/admin.sock if it exists, then http://127.0.0.1:15000]
    #[arg(long, value_name = "URL", env = "ISTHMUS_ADMIN")]
    admin: Option<String>,
}

impl Admin {
    /// Returns the address of the API: the option, else the environment variable, else the default.
    fn url(&self) -> String {
        let given = self.admin.clone().filter(|admin| !admin.is_empty());
        given.unwrap_or_else(|| client::default_address(Path::new(client::SOCKET)))
    }
}

#[derive(Debug, Args)]
struct Reading {
    #[command(flatten)]
    admin: Admin,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

/// Which connections are shown.
#[derive(Debug, Default, Args)]
struct Filter {
    /// Only connections that ended for this reason
    #[arg(long, value_name = "REASON", value_parser = reasons(), hide_possible_values = true)]
    reason: Option<String>,
    /// Only connections whose server name or authority contains this text
    #[arg(long, value_name = "TEXT")]
    name: Option<String>,
    /// Only connections of the last 30s, 5m, 1h, …
    #[arg(long, value_name = "TIME", value_parser = time)]
    since: Option<Duration>,
    /// Keep running, and show new connections as they fail
    #[arg(long)]
    watch: bool,
}

/// Takes the words of the reasons, and suggests the nearest for any other word.
fn reasons() -> PossibleValuesParser {
    PossibleValuesParser::new(Reason::ALL.iter().map(|reason| reason.text()))
}

/// Checks the address of an endpoint.
fn endpoint_address(text: &str) -> Result<String, String> {
    Which::parse(text, None).map(|_| text.to_owned())
}

/// Parses a duration in the form of the config.
fn time(text: &str) -> Result<Duration, String> {
    scalar::duration(text).map_err(|fault| fault.message)
}

#[derive(Debug, Args)]
struct Explain {
    /// Name as a client sends it; "" for a client that sends no name
    #[arg(required_unless_present = "trace")]
    name: Option<String>,
    /// Show the connections of this trace instead; the id is the `trace_id` in the access log of any gateway on the
    /// path
    #[arg(
        long,
        value_name = "TRACE",
        value_parser = trace_id,
        conflicts_with_all = ["name", "authority", "identity", "from", "alpn", "listener", "config", "probe"]
    )]
    trace: Option<TraceId>,
    /// The name is the authority of an HBONE CONNECT: `hostname:port` or `address:port`
    #[arg(long)]
    authority: bool,
    /// SPIFFE ID of the HBONE caller
    #[arg(long, value_name = "ID", requires = "authority", value_parser = Identity::parse)]
    identity: Option<Identity>,
    /// Address of the client; without it, source rules are shown but not checked
    #[arg(long, value_name = "IP")]
    from: Option<IpAddr>,
    /// ALPN protocols that the client offers; without it, the listener's check is shown but not applied
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    alpn: Option<Vec<String>>,
    /// Name of the listener [default: the first one that accepts such names]
    #[arg(long)]
    listener: Option<String>,
    /// Answer from this config file instead of the running gateway
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Also dial the endpoints: from the gateway, or from this host with `--config`
    #[arg(long)]
    probe: bool,
    #[command(flatten)]
    reading: Reading,
}

fn trace_id(text: &str) -> Result<TraceId, &'static str> {
    TraceId::parse(text).ok_or("a trace id has 32 hexadecimal digits, not all of them zero")
}

/// Parses the command line and runs the command.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Command::Run { config } = &cli.command {
        return match config_path(config.as_deref()) {
            Ok(path) => app::run(&path),
            Err(failure) => exit(Err(failure)),
        };
    }
    exit(dispatch(cli.command, &mut io::stdout().lock()))
}

fn exit(result: Result<(), Failure>) -> ExitCode {
    let Err(failure) = result else {
        return ExitCode::SUCCESS;
    };
    let code = match &failure {
        // If the reader of the output closes it (`| head`), no more output is needed.
        Failure::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => return ExitCode::SUCCESS,
        unreachable if unreachable.is_unreachable() => UNREACHABLE,
        Failure::Client(client::ClientError::Address(_)) => USAGE,
        _ => WRONG,
    };
    let text = failure.to_string();
    if !text.is_empty() {
        // If stderr is closed, the error cannot be reported.
        let _ = writeln!(io::stderr(), "{text}");
    }
    code.into()
}

fn dispatch(command: Command, out: &mut impl Write) -> Result<(), Failure> {
    match command {
        Command::Run { .. } => Ok(()),
        Command::Validate { mut files, config, strict } => {
            files.extend(config);
            validate(&files, if strict { Warnings::Fail } else { Warnings::Pass }, out)
        }
        Command::Convert(arguments) => convert::run(&arguments, out),
        Command::Schema { reference: true } => Ok(write!(out, "{}", config::reference())?),
        Command::Schema { reference: false } => Ok(writeln!(out, "{:#}", config::schema())?),
        Command::Explain(explain) => match explain.trace {
            Some(trace) => traces::explain(trace, &explain.reading, out),
            None => read::explain(&explain, out),
        },
        Command::Horizon(args) => horizon::run(&args, out),
        Command::Status(reading) => read::status(&reading, out),
        Command::Top(admin) => top::run(&admin),
        Command::Exposed(reading) => read::exposed(&reading, out),
        Command::Failures { filter, reading } => read::failures(&reading, &filter, out),
        Command::Get { what, reading } => read::get(what, &reading, out),
        Command::Check(arguments) => check::run(&arguments, out),
        Command::Watch { what, reading } => watch::run(what, &reading, out),
        Command::Reload(admin) => reload(&admin, out),
        Command::Drain(admin) => print_response(client::post(&admin.url(), "/api/v1/drain")?, out),
        Command::Endpoint(order) => endpoint(&order, out),
        Command::Close { id, admin } => {
            let path = format!("/api/v1/connections/close?id={id}");
            print_response(client::post(&admin.url(), &path)?, out)
        }
        Command::LogLevel { level, admin } => {
            let path = format!("/api/v1/log-level?{}", client::query(&[("level", &level)]));
            print_response(client::post(&admin.url(), &path)?, out)
        }
        Command::Peers(reading) => peers::run(&reading, out),
        Command::Peer(PeerAction::Invite(arguments)) => enrol::invite(&arguments, out),
        Command::Peer(PeerAction::Join(arguments)) => enrol::join(&arguments, out),
        Command::Peer(PeerAction::Plan(arguments)) => plan::run(&arguments, out),
        Command::Registry(action) => registry::run(action, out),
        #[cfg(feature = "kubernetes")]
        Command::Kubeconfig(arguments) => kubeconfig::run(arguments, out),
        Command::Certs(args) => certs::run(&args, out).map_err(|error| Failure::Wrong(error.to_string())),
        Command::Demo(args) => demo::run(&args, out),
        Command::Healthcheck(admin) => healthcheck(&admin, out),
        Command::Completion { shell } => {
            // `generate` panics if its output cannot be written.
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "isthmus", &mut script);
            Ok(out.write_all(&script)?)
        }
    }
}

fn config_path(given: Option<&Path>) -> Result<PathBuf, Failure> {
    if let Some(path) = given {
        return Ok(path.to_owned());
    }
    let found = CONFIG_PATHS.iter().map(PathBuf::from).find(|path| path.exists());
    found.ok_or_else(|| {
        Failure::Wrong(format!(
            "no config file found; give one with -c FILE, or put it at {}",
            CONFIG_PATHS.join(" or ")
        ))
    })
}

/// Loads a config as `run` does, but also from a pipe or a terminal, which this waits for.
fn load(path: &Path) -> Result<config::Config, Vec<isthmus_document::problem::Problem>> {
    let path = if path == Path::new("-") { Path::new("/dev/stdin") } else { path };
    let say = move |name: String| {
        // If stderr is closed, the message cannot be shown.
        let _ = writeln!(io::stderr(), "waiting for the end of {name}, which is not a regular file");
    };
    let read = || config::load_named(path, &|name| std::env::var_os(name));
    match std::fs::metadata(path) {
        Ok(found) if !found.is_file() && !found.is_dir() => {
            let name = path.display().to_string();
            or_say_when_slow(read, SLOW, move || say(name))
        }
        _ => read(),
    }
}

/// Does the work, and calls `say` if that takes longer than `slow`.
fn or_say_when_slow<T>(work: impl FnOnce() -> T, slow: Duration, say: impl FnOnce() + Send + 'static) -> T {
    let (working, ended) = mpsc::channel::<()>();
    std::thread::spawn(move || {
        if ended.recv_timeout(slow) == Err(mpsc::RecvTimeoutError::Timeout) {
            say();
        }
    });
    let done = work();
    drop(working);
    done
}

/// The effect of warnings on the exit code of `validate`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Warnings {
    Pass,
    Fail,
}

fn validate(files: &[PathBuf], warnings: Warnings, out: &mut impl Write) -> Result<(), Failure> {
    let mut failed = false;
    for file in files {
        match read::offline(file) {
            Ok(world) => {
                for note in &world.notes {
                    writeln!(out, "note: {note}")?;
                }
                for warning in &world.warnings {
                    writeln!(out, "warning: {warning}")?;
                }
                for error in &world.errors {
                    writeln!(out, "{error}")?;
                }
                failed |=
                    warnings == Warnings::Fail && !world.warnings.is_empty() || !world.errors.is_empty();
                let verdict = match (world.errors.is_empty(), world.warnings.is_empty()) {
                    (true, true) => "fine",
                    (true, false) if warnings == Warnings::Fail => {
                        "`isthmus run` would start, but --strict fails on warnings"
                    }
                    (true, false) => "fine, with warnings",
                    (false, _) => {
                        "`isthmus run` would start, but the certificate or the roots cannot be used"
                    }
                };
                writeln!(out, "{}: {verdict}", file.display())?;
            }
            Err(problems) => {
                failed = true;
                for problem in problems {
                    writeln!(out, "{problem}")?;
                }
            }
        }
    }
    if failed { Err(Failure::Reported) } else { Ok(()) }
}

fn reload(admin: &Admin, out: &mut impl Write) -> Result<(), Failure> {
    let value = client::post(&admin.url(), "/api/v1/reload")?.json()?;
    if let Some(problems) = value["problems"].as_array() {
        for problem in problems {
            writeln!(out, "{}", output::cell(problem))?;
        }
        return Err(Failure::Reported);
    }
    Ok(writeln!(out, "{}", output::cell(&value["result"]))?)
}

fn endpoint(order: &EndpointOrder, out: &mut impl Write) -> Result<(), Failure> {
    let (word, arguments) = match order {
        EndpointOrder::Drain(arguments) => ("drain", arguments),
        EndpointOrder::Disable(arguments) => ("disable", arguments),
        EndpointOrder::Enable(arguments) => ("enable", arguments),
    };
    let service = arguments.service.as_deref().map(|service| ("service", service));
    let parameters: Vec<_> = [("address", &*arguments.address)].into_iter().chain(service).collect();
    let path = format!("/api/v1/endpoints/{word}?{}", client::query(&parameters));
    print_response(client::post(&arguments.admin.url(), &path)?, out)
}

/// Prints the response to a command that changes something.
fn print_response(answer: client::ApiResponse, out: &mut impl Write) -> Result<(), Failure> {
    Ok(writeln!(out, "{}", output::cell(&answer.json()?["result"]))?)
}

fn healthcheck(admin: &Admin, out: &mut impl Write) -> Result<(), Failure> {
    let answer = client::get(&admin.url(), "/readyz?verbose")?;
    write!(out, "{}", answer.body)?;
    if answer.status == 200 { Ok(()) } else { Err(Failure::Reported) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An output that cannot be written, like `/dev/full` or a closed pipe.
    struct Full;

    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_command_says_what_it_waits_for() {
        let (said, heard) = mpsc::channel();
        let work = move || heard.recv_timeout(Duration::from_secs(10)).is_ok();
        assert!(or_say_when_slow(work, Duration::ZERO, move || said.send(()).expect("heard")));
        or_say_when_slow(|| (), Duration::from_secs(10), || panic!("it was fast"));
    }

    #[test]
    fn a_completion_script_that_cannot_be_written_is_an_error_and_no_panic() {
        let failed = dispatch(Command::Completion { shell: clap_complete::Shell::Bash }, &mut Full);
        assert!(matches!(failed, Err(Failure::Output(_))), "{failed:?}");
    }
}
