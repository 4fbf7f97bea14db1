//! `isthmus peer invite` and `isthmus peer join`: two gateways are linked by a token.

use std::io::{self, Read as _, Write};
use std::time::{Duration, Instant};

use clap::Args;

use super::{Admin, Failure, client};
use crate::api::peer::{Invitation, Peer, Token, WrittenLink};
use crate::api::text::{clean, encoded, lasting};

/// How often a state is asked for again.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How long the exchange with the other side may take, at all addresses of a token.
const JOIN_WITHIN: Duration = Duration::from_secs(120);
/// How long `join` waits for the link.
const LIVE_WITHIN: Duration = Duration::from_secs(10);

/// Shown behind the options of `invite`.
pub(super) const INVITE_EXAMPLES: &str = "Examples:
  isthmus peer invite --name west --address gw.east.example:15443
  isthmus peer invite --name west --address gw.east.example:15443 --print > west.txt   print the link instead of storing it

Give the token to the operator of the other side over a channel that nobody else reads. It can be used once.";

/// Shown behind the options of `join`.
pub(super) const JOIN_EXAMPLES: &str = "Examples:
  isthmus peer join TOKEN --name east
  isthmus peer join - --name east < token        read the token from the standard input";

#[derive(Debug, Args)]
pub(super) struct Invite {
    /// Our name for the other side, as under `peers` of the config
    #[arg(long, value_name = "NAME")]
    name: String,
    /// Where the other side reaches this gateway [default: its listeners of protocol auto and hbone]
    #[arg(long = "address", value_name = "HOST:PORT")]
    addresses: Vec<String>,
    /// How long the token can be used
    #[arg(long, value_name = "TIME", default_value = "15m")]
    valid: String,
    /// Wait until the token is used, and print the link as configuration and roots instead of storing it
    #[arg(long)]
    print: bool,
    #[command(flatten)]
    admin: Admin,
}

#[derive(Debug, Args)]
pub(super) struct Join {
    /// The token of `isthmus peer invite`; `-` for the standard input
    #[arg(value_name = "TOKEN")]
    token: String,
    /// Our name for the other side, as under `peers` of the config
    #[arg(long, value_name = "NAME")]
    name: String,
    /// Print the link as configuration and roots instead of storing it
    #[arg(long)]
    print: bool,
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
    if arguments.print {
        parameters.push(("print", "1"));
    }
    let path = format!("/api/v1/peers/{}/invite", encoded(&arguments.name));
    let value = client::post(&admin, &format!("{path}?{}", client::query(&parameters)))?.json()?;
    let token: Token = client::typed(value)?;
    if !arguments.print {
        writeln!(out, "{}", token.token)?;
        return note(&format!(
            "valid for {}, once, at {}; on the other side: isthmus peer join TOKEN --name NAME",
            lasting(token.valid_seconds),
            token.addresses.join(", ")
        ));
    }
    note(&format!(
        "token: {}\nwaiting for {} until it is used …",
        token.token,
        lasting(token.valid_seconds)
    ))?;
    let until = Instant::now() + Duration::from_secs(token.valid_seconds + 1);
    loop {
        let invitation: Invitation = client::typed(client::get(&admin, &path)?.json()?)?;
        match (invitation.link, invitation.state.as_str()) {
            (Some(link), _) => return print(&link, out),
            (None, "open" | "redeemed") if Instant::now() < until => std::thread::sleep(LOOK_EVERY),
            (None, state) => {
                return Err(Failure::Wrong(format!(
                    "the invitation of {} is {}",
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
        "-" => io::read_to_string(io::stdin().take(64 << 10))
            .map_err(|error| Failure::Wrong(format!("cannot read the token: {error}")))?,
        token => token.to_owned(),
    };
    let how = if arguments.print { "?print=1" } else { "" };
    let path = format!("/api/v1/peers/{}/join{how}", encoded(&arguments.name));
    let value = client::post_text(&admin, &path, token.trim(), JOIN_WITHIN)?.json()?;
    let link: WrittenLink = client::typed(value)?;
    if arguments.print {
        return print(&link, out);
    }
    writeln!(out, "{} is enrolled as {}", clean(&link.peer), clean(&link.identity))?;
    let begun = Instant::now();
    loop {
        let peers: Vec<Peer> = client::typed(client::get(&admin, "/api/v1/peers")?.json()?)?;
        let peer = peers.into_iter().find(|peer| peer.name == arguments.name).unwrap_or_default();
        if peer.state == "live" {
            return Ok(writeln!(out, "the link is live")?);
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

/// Prints a link as configuration, and its roots.
fn print(link: &WrittenLink, out: &mut impl Write) -> Result<(), Failure> {
    writeln!(out, "# Add these keys to the entry of the peer in the config.")?;
    lines(&link.config, out)?;
    writeln!(out, "# Save this as {} beside the config.", clean(&link.file))?;
    lines(&link.roots, out)
}

/// Prints lines without characters that a terminal would act on.
fn lines(text: &str, out: &mut impl Write) -> Result<(), Failure> {
    text.lines().try_for_each(|line| Ok(writeln!(out, "{}", clean(line))?))
}

/// Writes a line beside the result, which may be piped.
fn note(text: &str) -> Result<(), Failure> {
    Ok(writeln!(io::stderr(), "{text}")?)
}
