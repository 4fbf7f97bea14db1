//! `explain`: the decision on a name, by the functions of the data path, with every step in words.

use std::net::{IpAddr, SocketAddr};

use serde_json::{Value, json};

use crate::balance::{Ask, Load, choose, health_text, odds};
use crate::model::alpn::Protocols;
use crate::model::authority::Authority;
use crate::model::identity::Identity;
use crate::model::reason::Reason;
use crate::snapshot::Snapshot;
use crate::snapshot::admit::{Admission, Asked, Question, Trace, admit, admit_source};
use crate::snapshot::near::near;
use crate::snapshot::policy::{Listener, ListenerProtocol};
use crate::wire::alert::Alert;
use crate::wire::connect::status_of;

/// What is asked.
#[derive(Clone, Debug, Default)]
pub struct Inquiry {
    /// As a client would send it; absent: none.
    pub name: Option<String>,
    /// Whether `name` is the authority of a CONNECT, not a server name.
    pub authority: bool,
    /// Who calls, by HBONE; absent: somebody without an identity.
    pub identity: Option<Identity>,
    /// Absent: the first listener that takes such names.
    pub listener: Option<String>,
    /// Absent: rules about sources are shown, not applied.
    pub source: Option<IpAddr>,
    /// Absent: the listener's check is shown, not applied.
    pub alpn: Option<Vec<String>>,
}

/// The answer.
#[derive(Clone, Debug)]
pub struct Explanation {
    pub name: String,
    pub listener: String,
    pub canonical: Option<String>,
    pub matched: Option<&'static str>,
    pub rule: Option<String>,
    pub reason: Reason,
    pub steps: Vec<String>,
    pub candidates: Vec<CandidateView>,
    pub near: Vec<String>,
}

/// One endpoint that could be chosen.
#[derive(Clone, Debug)]
pub struct CandidateView {
    pub address: SocketAddr,
    pub cluster: String,
    pub locality: String,
    pub weight: u32,
    pub health: &'static str,
    /// From 0 to 1.
    pub odds: f64,
}

#[derive(Default)]
struct Steps {
    steps: Vec<String>,
    canonical: Option<String>,
}

impl Trace for Steps {
    fn step(&mut self, text: impl FnOnce() -> String) {
        self.steps.push(text());
    }

    fn canonical(&mut self, name: &str) {
        self.canonical = Some(name.to_owned());
        self.steps.push(format!("the name is looked up as {name:?}"));
    }
}

/// Explains, or says what is wrong with the question.
pub fn explain(snapshot: &Snapshot, inquiry: &Inquiry, load: &impl Load) -> Result<Explanation, String> {
    let listener = find_listener(snapshot, inquiry)?;
    let authority = match (inquiry.authority, &inquiry.name) {
        (false, _) => None,
        (true, Some(name)) => Some(Authority::parse(name).map_err(|fault| fault.to_string())),
        (true, None) => return Err("an authority is hostname:port or address:port".to_owned()),
    };
    let entries =
        inquiry.alpn.as_ref().map(|names| Protocols::entries_of(names.iter().map(String::as_bytes)));
    let question = Question {
        listener,
        asked: match &authority {
            Some(Ok(authority)) => Asked::Authority(authority),
            Some(Err(_)) | None => Asked::ServerName(inquiry.name.as_deref().map(str::as_bytes)),
        },
        source: inquiry.source,
        alpn: entries.as_deref().map(Protocols::from_entries),
        identity: inquiry.identity.as_ref(),
    };
    let mut steps = Steps::default();
    steps.step(|| format!("listener {:?} on {}", &*listener.name, listener.bind));
    let mut explanation = Explanation {
        name: inquiry.name.clone().unwrap_or_default(),
        listener: listener.name.to_string(),
        canonical: None,
        matched: None,
        rule: None,
        reason: Reason::Ok,
        steps: Vec::new(),
        candidates: Vec::new(),
        near: Vec::new(),
    };
    explanation.reason = match &authority {
        Some(Err(fault)) => {
            steps.step(|| format!("the authority cannot be read: {fault}"));
            Reason::BadRequest
        }
        Some(Ok(_)) | None => decide(snapshot, &question, load, &mut steps, &mut explanation),
    };
    if authority.is_some() {
        let (status, told) = status_of(explanation.reason);
        steps.step(|| format!("the caller reads the status {} and isthmus-reason {told}", status.as_u16()));
    } else if let Some(alert) = Alert::of(explanation.reason) {
        steps.step(|| format!("the client reads the TLS alert {} ({})", alert.text(), alert as u8));
    }
    let looked_for = steps.canonical.as_deref().unwrap_or(&explanation.name);
    if matches!(explanation.reason, Reason::SniUnknown | Reason::AuthorityUnknown | Reason::NotExported) {
        explanation.near = near(snapshot, looked_for);
    }
    explanation.canonical = steps.canonical;
    explanation.steps = steps.steps;
    Ok(explanation)
}

fn find_listener<'a>(snapshot: &'a Snapshot, inquiry: &Inquiry) -> Result<&'a Listener, String> {
    let listeners = &snapshot.policy.listeners;
    let (other, way) = match inquiry.authority {
        true => (ListenerProtocol::Sni, "HBONE"),
        false => (ListenerProtocol::Hbone, "SNI"),
    };
    let Some(name) = inquiry.listener.as_deref() else {
        let found = listeners.iter().find(|listener| listener.protocol != other);
        return found
            .map(|listener| &**listener)
            .ok_or_else(|| format!("there is no listener that takes {way}"));
    };
    let found = listeners.iter().find(|listener| &*listener.name == name).ok_or_else(|| {
        let names: Vec<&str> = listeners.iter().map(|listener| &*listener.name).collect();
        format!("there is no listener {name:?}; there are: {}", names.join(", "))
    })?;
    if found.protocol == other {
        Err(format!("the listener {name:?} does not take {way}"))
    } else {
        Ok(found)
    }
}

/// Decides in the order of the data path: source, ALPN, name, export, endpoints.
fn decide(
    snapshot: &Snapshot,
    question: &Question<'_>,
    load: &impl Load,
    steps: &mut Steps,
    explanation: &mut Explanation,
) -> Reason {
    let from = &question.listener.from;
    if !from.is_empty() {
        let list = from.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let applied =
            if question.source.is_some() { "" } else { " (shown, not applied: no source was given)" };
        steps.step(|| format!("the listener takes connections from {list} only{applied}"));
    }
    if let Some(Err(reason)) = question.source.map(|source| admit_source(question.listener, source)) {
        return reason;
    }
    let met = match admit(snapshot, question, steps) {
        Ok(admission) => {
            let ask = ask(&admission, question.source);
            explanation.candidates = candidates(&ask, load);
            let chosen = choose(&ask, load, &mut || 0, steps);
            explanation.reason = chosen.err().unwrap_or(Reason::Ok);
            admission.met
        }
        Err(refusal) => {
            explanation.reason = refusal.reason;
            refusal.met
        }
    };
    explanation.matched = met.matched.map(|matched| matched.text());
    explanation.rule = met.rule.map(|rule| rule.to_string());
    explanation.reason
}

fn ask<'a>(admission: &'a Admission, source: Option<IpAddr>) -> Ask<'a> {
    Ask { candidates: &admission.candidates, clusters: admission.clusters.as_deref(), tried: &[], source }
}

fn candidates(ask: &Ask<'_>, load: &impl Load) -> Vec<CandidateView> {
    let spoken_of = |cluster| ask.clusters.is_none_or(|clusters| clusters.contains(cluster));
    ask.candidates
        .endpoints()
        .iter()
        .zip(odds(ask, load))
        .filter(|(candidate, _)| spoken_of(&candidate.cluster))
        .map(|(candidate, odds)| CandidateView {
            address: candidate.key.address,
            cluster: candidate.cluster.to_string(),
            locality: candidate.locality.to_string(),
            weight: candidate.weight.value(),
            health: health_text(candidate, load),
            odds,
        })
        .collect()
}

impl Explanation {
    pub fn admitted(&self) -> bool {
        self.reason == Reason::Ok
    }

    /// The shape of SPEC §12.
    pub fn to_json(&self) -> Value {
        let candidates: Vec<Value> = self
            .candidates
            .iter()
            .map(|candidate| {
                json!({
                    "address": candidate.address.to_string(),
                    "cluster": candidate.cluster,
                    "locality": candidate.locality,
                    "weight": candidate.weight,
                    "health": candidate.health,
                    "odds": (candidate.odds * 1e6).round() / 1e6,
                })
            })
            .collect();
        json!({
            "name": self.name,
            "listener": self.listener,
            "canonical": self.canonical,
            "match": self.matched,
            "rule": self.rule,
            "verdict": if self.admitted() { "admitted" } else { "refused" },
            "reason": self.reason.text(),
            "steps": self.steps,
            "candidates": candidates,
            "near": self.near,
        })
    }
}
