//! The commands of `isthmus`: the command line, and the choice of the command that runs. The commands are in files of their own:
//!
//! - `call`: a call as a client would make it. `read`, `traces`, `horizon`, `watch`, `top`, `peers`: the state of a gateway.
//! - `orders`, `drains`: changes of the running gateway. `enrol`, `plan`: links with other organisations.
//! - `check`, `validate`: problems of a gateway and of a config file. `config_file`: where that file is, and how it is loaded.
//!   `offline`: a config with its registries, read without a gateway.
//! - `registry`, `kubeconfig`, `certs`: services in etcd, access to Kubernetes, development certificates.
//! - `arguments`: what several commands share. `examples`: the examples below each help text.
//!
//! The commands `demo` and `convert` are crates of their own, and features that images leave out.
//!
//! `documents` (tests only): the generated parts of docs/.

mod arguments;
mod call;
pub mod certs;
mod check;
mod config_file;
#[cfg(test)]
mod documents;
mod drains;
mod enrol;
mod examples;
mod horizon;
#[cfg(feature = "kubernetes")]
mod kubeconfig;
mod offline;
mod orders;
mod peers;
mod plan;
mod read;
mod registry;
mod top;
mod traces;
mod validate;
mod watch;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use arguments::{Admin, Explain, Filter, Reading};
use config_file::config_path;
use isthmus_app as app;
use isthmus_config as config;
use isthmus_console::client::ClientError;
use isthmus_console::failure::Failure;
#[cfg(feature = "convert")]
use isthmus_convert as convert;
#[cfg(feature = "demo")]
use isthmus_demo as demo;
use orders::EndpointOrder;

/// The exit code if a check has a negative result: an invalid config, a refused name, a failed demo.
const WRONG: u8 = 1;
/// The exit code if the command line is wrong, as clap has it.
const USAGE: u8 = 2;
/// The exit code if the admin API or etcd cannot be reached.
const UNREACHABLE: u8 = 3;
/// The exit code if a config can be used, but something that it names is missing or expired.
const IMPAIRED: u8 = 4;
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

/// Completes the names of services that the running gateway knows, after the completion of commands and options. A gateway that does
/// not answer delays a key by a second at most.
const NAMES_IN_BASH: &str = r#"
_isthmus_names() {
    _isthmus "$@"
    local word=${COMP_WORDS[COMP_CWORD]}
    case "${COMP_WORDS[1]} ${COMP_WORDS[2]}" in
        "explain "* | "horizon "* | "test call") ;;
        *) return ;;
    esac
    if [[ $word != -* && ${COMP_WORDS[COMP_CWORD - 1]} != -* ]]; then
        local names
        names=$(timeout 1 isthmus get services 2>/dev/null | awk 'NR > 1 { print $1 }')
        COMPREPLY+=($(compgen -W "$names" -- "$word"))
    fi
}
complete -F _isthmus_names -o bashdefault -o default isthmus
"#;

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the gateway
    #[command(after_help = examples::RUN)]
    Run {
        /// The config file, or a directory of them [default: isthmus.yaml, then /etc/isthmus/isthmus.yaml]
        #[arg(short, long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Take over from the running gateway with this upgrade socket: its listening sockets, and its connections by SNI
        #[arg(long, value_name = "SOCKET")]
        take_over: Option<PathBuf>,
    },
    /// Print the version, as `--version` does
    #[command(after_help = examples::VERSION)]
    Version,
    /// Check config files as `run` does, without running the gateway
    #[command(after_help = validate::EXAMPLES)]
    Validate(validate::Arguments),
    /// Make a config from the configuration of HAProxy, nginx or sniproxy, and list what cannot be carried over
    #[cfg(feature = "convert")]
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
    /// Call a name as a client would, and show each hop
    #[command(subcommand, after_help = call::EXAMPLES)]
    Test(call::Test),
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
        #[arg(value_parser = arguments::shown())]
        what: String,
        #[command(flatten)]
        reading: Reading,
    },
    /// Check the running gateway or a config file for problems, and show the next step for each failure
    #[command(after_help = check::EXAMPLES)]
    Check(check::Arguments),
    /// Follow failures, connections, endpoints or problems, with one line for each change
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
    /// Stop the running gateway gracefully, as SIGTERM does
    #[command(after_help = examples::STOP)]
    Stop(Admin),
    /// Move calls away from a part of the mesh step by step
    #[command(after_help = drains::DRAIN_EXAMPLES)]
    Drain(drains::Order),
    /// Show the drains in force, with their progress
    #[command(after_help = drains::DRAINS_EXAMPLES)]
    Drains(Reading),
    /// End a drain
    #[command(after_help = drains::UNDRAIN_EXAMPLES)]
    Undrain(drains::Undrain),
    /// Replace the running gateway by a new process of its program file, which takes over its sockets and live connections
    #[command(after_help = examples::UPGRADE)]
    Upgrade {
        /// If the earlier process of the last upgrade still has connections, or an upgrade is in progress, begin when it has ended
        #[arg(long)]
        wait: bool,
        #[command(flatten)]
        admin: Admin,
    },
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
    #[cfg(feature = "demo")]
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
    /// Write the manual pages to a folder
    #[command(after_help = examples::MAN)]
    Man {
        /// Folder of the pages; it is made if it is missing
        #[arg(value_name = "FOLDER")]
        folder: PathBuf,
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
    /// Print the roots by which the gateway verifies a peer, with those that the peer has announced, as PEM
    #[command(after_help = peers::ROOTS_EXAMPLES)]
    Roots(peers::Roots),
}

/// Parses the command line and runs the command.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Command::Run { config, take_over } = &cli.command {
        return match config_path(config.as_deref()) {
            Ok(path) => app::run(&path, take_over.as_deref()),
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
        Failure::Client(ClientError::Address(_)) => USAGE,
        Failure::ReportedImpaired => IMPAIRED,
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
        Command::Version => Ok(write!(out, "{}", Cli::command().render_version())?),
        Command::Validate(arguments) => validate::run(&arguments, out),
        #[cfg(feature = "convert")]
        Command::Convert(arguments) => convert::run(&arguments, out),
        Command::Schema { reference: true } => Ok(write!(out, "{}", config::reference())?),
        Command::Schema { reference: false } => Ok(writeln!(out, "{:#}", config::schema())?),
        Command::Explain(explain) => match explain.trace {
            Some(trace) => traces::explain(trace, &explain.reading, out),
            None => read::explain(&explain, out),
        },
        Command::Horizon(args) => horizon::run(&args, out),
        Command::Test(call::Test::Call(call)) => call::run(&call, out),
        Command::Status(reading) => read::status(&reading, out),
        Command::Top(admin) => top::run(&admin),
        Command::Exposed(reading) => read::exposed(&reading, out),
        Command::Failures { filter, reading } => read::failures(&reading, &filter, out),
        Command::Get { what, reading } => read::get(&what, &reading, out),
        Command::Check(arguments) => check::run(&arguments, out),
        Command::Watch { what, reading } => watch::run(what, &reading, out),
        Command::Reload(admin) => orders::reload(&admin, out),
        Command::Stop(admin) => orders::stop(&admin, out),
        Command::Drain(order) => drains::order(&order, out),
        Command::Drains(reading) => drains::list(&reading, out),
        Command::Undrain(undrain) => drains::undrain(&undrain, out),
        Command::Upgrade { wait, admin } => orders::upgrade(&admin, wait, out),
        Command::Endpoint(order) => orders::endpoint(&order, out),
        Command::Close { id, admin } => orders::close(id, &admin, out),
        Command::LogLevel { level, admin } => orders::log_level(&level, &admin, out),
        Command::Peers(reading) => peers::run(&reading, out),
        Command::Peer(PeerAction::Invite(arguments)) => enrol::invite(&arguments, out),
        Command::Peer(PeerAction::Join(arguments)) => enrol::join(&arguments, out),
        Command::Peer(PeerAction::Plan(arguments)) => plan::run(&arguments, out),
        Command::Peer(PeerAction::Roots(arguments)) => peers::roots(&arguments, out),
        Command::Registry(action) => registry::run(action, out),
        #[cfg(feature = "kubernetes")]
        Command::Kubeconfig(arguments) => kubeconfig::run(arguments, out),
        Command::Certs(args) => certs::run(&args, out).map_err(|error| Failure::Wrong(error.to_string())),
        #[cfg(feature = "demo")]
        Command::Demo(args) => demo::run(&args, out),
        Command::Healthcheck(admin) => orders::healthcheck(&admin, out),
        Command::Completion { shell } => {
            // `generate` panics if its output cannot be written.
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "isthmus", &mut script);
            if shell == clap_complete::Shell::Bash {
                script.extend_from_slice(NAMES_IN_BASH.as_bytes());
            }
            Ok(out.write_all(&script)?)
        }
        Command::Man { folder } => {
            let written = std::fs::create_dir_all(&folder)
                .and_then(|()| clap_mangen::generate_to(Cli::command(), &folder));
            written.map_err(|error| {
                Failure::Wrong(format!("cannot write the manual pages to {}: {error}", folder.display()))
            })
        }
    }
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
    fn a_completion_script_that_cannot_be_written_is_an_error_and_no_panic() {
        let failed = dispatch(Command::Completion { shell: clap_complete::Shell::Bash }, &mut Full);
        assert!(matches!(failed, Err(Failure::Output(_))), "{failed:?}");
    }
}
