//! Requests of operators about enrolments: to invite a peer, and to redeem a peer's token.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::Response;

use super::Sources;
use super::response::{Refused, answered, error, json_response};
use super::routes::{Parameters, Routes};
use isthmus_api::peer::{Invitation, Token, WrittenLink};
use isthmus_api::requests;
use isthmus_document::scalar;
use isthmus_peer::addresses::{of_gateways, takes_links};
use isthmus_peer::enrolled::EnrolledLink;
use isthmus_peer::invitations::{Existing, Keeping, Terms};

/// The default validity of an invitation.
const VALID: Duration = Duration::from_secs(15 * 60);

pub(crate) fn answers(routes: Routes) -> Routes {
    routes
        .with(&requests::INVITE_PEER, invited)
        .with(&requests::INVITATION, last)
        .with(&requests::JOIN_PEER, joined)
}

async fn invited(
    State(sources): State<Sources>,
    Path(name): Path<String>,
    Query(query): Parameters,
) -> Response {
    answered(invite(&sources, &name, &query).map_err(Refused::Conflict))
}

async fn last(State(sources): State<Sources>, Path(name): Path<String>) -> Response {
    match invitation(&sources, &name) {
        Some(invitation) => json_response(&invitation),
        None => error(StatusCode::NOT_FOUND, "the peer was not invited since the start of this gateway"),
    }
}

async fn joined(
    State(sources): State<Sources>,
    Path(name): Path<String>,
    Query(query): Parameters,
    token: String,
) -> Response {
    answered(join(&sources, &name, &token, &query).await.map_err(Refused::Conflict))
}

/// Creates the token with which a peer can be enrolled.
fn invite(sources: &Sources, peer: &str, query: &BTreeMap<String, String>) -> Result<Token, String> {
    let valid = match query.get("valid") {
        Some(text) => scalar::duration(text).map_err(|fault| format!("valid: {}", fault.message))?,
        None => VALID,
    };
    let addresses = match query.get("address") {
        Some(all) => all.split(',').map(str::to_owned).collect(),
        None => addresses(sources),
    };
    let token = sources.enrolment.invite(peer, &addresses, valid, terms(query)?)?;
    Ok(Token { token, addresses, valid_seconds: valid.as_secs() })
}

/// Returns the state of the last invitation for a peer; `None` if there is none.
fn invitation(sources: &Sources, peer: &str) -> Option<Invitation> {
    let (state, link) = sources.enrolment.invitation(peer)?;
    Some(Invitation { state: state.text().to_owned(), link: link.map(|link| written(peer, &link)) })
}

/// Redeems a token that a peer has issued.
async fn join(
    sources: &Sources,
    peer: &str,
    token: &str,
    query: &BTreeMap<String, String>,
) -> Result<WrittenLink, String> {
    let link = sources.enrolment.join(peer, token, terms(query)?).await?;
    Ok(written(peer, &link))
}

fn terms(query: &BTreeMap<String, String>) -> Result<Terms, String> {
    let keeping = if query.contains_key("print") { Keeping::Return } else { Keeping::Store };
    let existing = match query.get("replace").map(String::as_str) {
        None => Existing::Keep,
        Some("" | "1" | "true") => Existing::Replace,
        Some(other) => {
            return Err(format!(
                "replace: {other:?} is neither 1 nor true; omit the parameter to keep an existing link"
            ));
        }
    };
    Ok(Terms { keeping, existing })
}

/// Returns the addresses at which other organisations reach this gateway: the addresses of its network's gateways, or if there
/// are none, those of its own listeners that accept links.
fn addresses(sources: &Sources) -> Vec<String> {
    let snapshot = sources.reader.latest();
    let gateways = of_gateways(&snapshot);
    if !gateways.is_empty() {
        return gateways;
    }
    let program = sources.program.load();
    let listening = program.listening.iter().filter(|(name, _)| {
        let mut listeners = snapshot.policy.listeners.iter();
        listeners.any(|listener| *listener.name == **name && takes_links(listener))
    });
    let own = listening.filter(|(_, address)| !address.ip().is_unspecified());
    own.map(|(_, address)| address.to_string()).collect()
}

/// Returns a link in the form in which an operator writes it into the config.
fn written(peer: &str, link: &EnrolledLink) -> WrittenLink {
    let file = format!("{peer}.pem");
    let (identity, dialling) = (&link.identity, link.dialling_key());
    WrittenLink {
        peer: peer.to_owned(),
        identity: identity.to_string(),
        config: format!(
            "peers:\n  - name: {peer}\n    identity: \"{identity}\"\n    trust: {file}\n    {dialling}\n"
        ),
        file,
        roots: link.pem(),
    }
}
