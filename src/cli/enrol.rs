//! `isthmus peer invite` and `isthmus peer join`, which link two gateways by a token.

use std::io::{self, BufRead as _, IsTerminal as _, Read as _, Write};
use std::time::{Duration, Instant};

use clap::Args;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

use super::arguments::Admin;
use super::peers::proposal;
use isthmus_api::peer::{Invitation, Token, WrittenLink};
use isthmus_api::requests;
use isthmus_api::text::{clean, lasting};
use isthmus_console::client;
use isthmus_console::failure::Failure;
use isthmus_peer::enrolment::JOIN_WITHIN;

/// The interval at which commands request the state of an enrolment or link while they wait for a change.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// The time that `join` waits for the response of its own gateway. The gateway tries each address of the token, and responds
/// within [`JOIN_WITHIN`].
const ANSWERED_WITHIN: Duration = JOIN_WITHIN.saturating_add(Duration::from_secs(30));
/// The time that `join` waits until the link is live.
const LIVE_WITHIN: Duration = Duration::from_secs(10);

/// The time that `join` waits for the first probes of the peer's gateways, which it announces over the link.
const PROBED_WITHIN: Duration = Duration::from_secs(3);

/// The text below the options of `invite`.
pub(super) const INVITE_EXAMPLES: &str = "Examples:
  isthmus peer invite --name west --address gw.east.example:15443
  isthmus peer invite --name west --address gw.east.example:15443 --print > west.txt   print the link instead of storing it

Give the token to the operator of the other gateway over a channel that nobody else can read. A token can be used once.";

/// The text below the options of `join`.
pub(super) const JOIN_EXAMPLES: &str = "Examples:
  isthmus peer join - --name east                ask for the token
  isthmus peer join - --name east < token        read the token from a file
  isthmus peer join - --name east --replace      in place of the link that the peer has";

/// The largest size of a token that is read, in bytes.
const TOKEN_BYTES_MAX: u64 = 64 << 10;

#[derive(Debug, Args)]
pub(super) struct Invite {
    /// Name of the other organisation, as under `peers` of the config
    #[arg(long, value_name = "NAME")]
    name: String,
    /// Address at which the other gateway reaches this gateway [default: the listeners of protocol auto and hbone]
    #[arg(long = "address", value_name = "HOST:PORT")]
    addresses: Vec<String>,
    /// Time for which the token is valid
    #[arg(long, value_name = "TIME", default_value = "15m")]
    valid: String,
    /// Wait until the token is used, and print the link as configuration and roots instead of storing it
    #[arg(long)]
    print: bool,
    /// Let the new link take the place of the one that the peer has
    #[arg(long)]
    replace: bool,
    #[command(flatten)]
    admin: Admin,
}

#[derive(Debug, Args)]
pub(super) struct Join {
    /// `-`: the token of `isthmus peer invite` is read from the standard input. The token itself is accepted too, with a warning,
    /// since other users of the host can read the arguments of a command
    #[arg(value_name = "TOKEN")]
    token: String,
    /// Name of the other organisation, as under `peers` of the config
    #[arg(long, value_name = "NAME")]
    name: String,
    /// Print the link as configuration and roots instead of storing it
    #[arg(long)]
    print: bool,
    /// Let the new link take the place of the one that the peer has
    #[arg(long)]
    replace: bool,
    #[command(flatten)]
    admin: Admin,
}

/// Runs `isthmus peer invite`.
pub(super) fn invite(arguments: &Invite, out: &mut impl Write) -> Result<(), Failure> {
    let admin = arguments.admin.url();
    let addresses = arguments.addresses.join(",");
    let mut parameters = vec![("valid", &*arguments.valid)];
    if !addresses.is_empty() {
        parameters.push(("address", &addresses));
    }
    parameters.extend(switches([("print", arguments.print), ("replace", arguments.replace)]));
    let path = requests::INVITE_PEER.at(&arguments.name);
    let value = client::post(&admin, &format!("{path}?{}", requests::query(&parameters)))?.json()?;
    let token: Token = client::typed(value)?;
    if !arguments.print {
        writeln!(out, "{}", token.token)?;
        return note(&format!(
            "the token can be used once within {}, at {}; the operator of the other gateway runs: isthmus peer join - \
             --name NAME",
            lasting(token.valid_seconds),
            token.addresses.join(", ")
        ));
    }
    note(&format!(
        "token: {}\nwaiting up to {} until the token is used …",
        token.token,
        lasting(token.valid_seconds)
    ))?;
    let until = Instant::now() + Duration::from_secs(token.valid_seconds + 1);
    loop {
        let invitation: Invitation =
            client::typed(client::get(&admin, &requests::INVITATION.at(&arguments.name))?.json()?)?;
        match (invitation.link, invitation.state.as_str()) {
            (Some(link), _) => return print(&link, out),
            (None, "open" | "redeemed") if Instant::now() < until => std::thread::sleep(LOOK_EVERY),
            (None, state) => {
                return Err(Failure::Wrong(format!(
                    "there is no link with {}, because the invitation is {}",
                    arguments.name,
                    clean(state)
                )));
            }
        }
    }
}

/// Runs `isthmus peer join`.
pub(super) fn join(arguments: &Join, out: &mut impl Write) -> Result<(), Failure> {
    let admin = arguments.admin.url();
    let token = match arguments.token.as_str() {
        "-" => read_token().map_err(|error| Failure::Wrong(format!("cannot read the token: {error}")))?,
        token => {
            note(
                "warning: other users of this host can read the token in the list of processes, and the shell keeps it in its \
                 history; a later release accepts only `isthmus peer join -`, which reads it from the standard input",
            )?;
            token.to_owned()
        }
    };
    let parameters: Vec<_> = switches([("print", arguments.print), ("replace", arguments.replace)]).collect();
    let path = format!("{}?{}", requests::JOIN_PEER.at(&arguments.name), requests::query(&parameters));
    let value = client::post_text(&admin, &path, token.trim(), ANSWERED_WITHIN)?.json()?;
    let link: WrittenLink = client::typed(value)?;
    if arguments.print {
        return print(&link, out);
    }
    writeln!(out, "{} is enrolled as {}", clean(&link.peer), clean(&link.identity))?;
    let begun = Instant::now();
    loop {
        let peers = client::read(&admin, &requests::PEERS)?;
        let peer = peers.into_iter().find(|peer| peer.name == arguments.name).unwrap_or_default();
        if peer.state == "live" {
            writeln!(out, "the link is live")?;
            return propose(&admin, &arguments.name);
        }
        if begun.elapsed() > LIVE_WITHIN {
            let problem = peer.problem.unwrap_or(peer.state);
            return Err(Failure::Wrong(format!(
                "the peer is enrolled, but there is no link yet: {}; see `isthmus peers` and `isthmus status`",
                clean(&problem)
            )));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Waits until the gateways of a peer are probed, and writes a note if none of them answers.
fn propose(admin: &str, name: &str) -> Result<(), Failure> {
    let begun = Instant::now();
    loop {
        let peers = client::read(admin, &requests::PEERS)?;
        let Some(peer) = peers.into_iter().find(|peer| peer.name == name) else { return Ok(()) };
        let carry: Vec<String> = peer.carriers.iter().map(|of| of.direction.clone()).collect();
        if let Some(proposal) = proposal(&peer, &carry) {
            return note(&proposal);
        }
        let is_probed = peer.gateways.iter().any(|gateway| !gateway.state.is_empty());
        if is_probed || begun.elapsed() > PROBED_WITHIN {
            return Ok(());
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Reads the first line that is not blank, a token, from the standard input. If that is a terminal, asks for the token, which is not shown.
fn read_token() -> io::Result<String> {
    let input = io::stdin();
    let hidden = input.is_terminal().then(Hidden::begin).transpose()?;
    let mut line = String::new();
    let mut lines = input.lock().take(TOKEN_BYTES_MAX);
    let read = loop {
        match lines.read_line(&mut line) {
            Ok(1..) if line.trim().is_empty() => line.clear(),
            read => break read,
        }
    };
    if hidden.is_some() {
        writeln!(io::stderr())?;
    }
    read.map(|_| line)
}

/// Keeps the terminal from showing what is typed; holds its former settings.
struct Hidden(Termios);

impl Hidden {
    fn begin() -> io::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut quiet = before.clone();
        quiet.local_modes.remove(LocalModes::ECHO);
        tcsetattr(io::stdin(), OptionalActions::Flush, &quiet)?;
        write!(io::stderr(), "token: ")?;
        Ok(Self(before))
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        // The terminal may be gone.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
    }
}

/// Returns the parameters of the API for the switches that are on.
fn switches(all: [(&str, bool); 2]) -> impl Iterator<Item = (&str, &str)> {
    all.into_iter().filter(|(_, is_on)| *is_on).map(|(name, _)| (name, "1"))
}

/// Prints a link as configuration, followed by its roots.
fn print(link: &WrittenLink, out: &mut impl Write) -> Result<(), Failure> {
    writeln!(out, "# Add these keys to the entry of the peer in the config.")?;
    lines(&link.config, out)?;
    writeln!(out, "# Save this as {} beside the config.", clean(&link.file))?;
    lines(&link.roots, out)
}

/// Prints lines without characters that could control the terminal.
fn lines(text: &str, out: &mut impl Write) -> Result<(), Failure> {
    text.lines().try_for_each(|line| Ok(writeln!(out, "{}", clean(line))?))
}

/// Writes a line to stderr, because stdout may be piped.
fn note(text: &str) -> Result<(), Failure> {
    Ok(writeln!(io::stderr(), "{text}")?)
}
