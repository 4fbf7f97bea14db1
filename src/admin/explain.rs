//! `explain`: the decision on a name, by the functions of the data path, with every step in words.

use std::net::{IpAddr, SocketAddr};

use serde_json::{Value, json};

use crate::balance::{Ask, Load, choose, health_text, odds};
use crate::model::alpn::Protocols;
use crate::model::reason::Reason;
use crate::snapshot::Snapshot;
use crate::snapshot::admit::{Admission, Question, Trace, admit, admit_source};
use crate::snapshot::near::near;
use crate::snapshot::policy::Listener;
use crate::wire::alert::Alert;

/// What is asked.
#[derive(Clone, Debug, Default)]
pub struct Inquiry {
    /// As a client would send it; absent: none.
    pub name: Option<String>,
    /// Absent: the first listener.
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
    let listener = find_listener(snapshot, inquiry.listener.as_deref())?;
    let entries =
        inquiry.alpn.as_ref().map(|names| Protocols::entries_of(names.iter().map(String::as_bytes)));
    let question = Question {
        listener,
        server_name: inquiry.name.as_deref().map(str::as_bytes),
        source: inquiry.source,
        alpn: entries.as_deref().map(Protocols::from_entries),
        identity: None,
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
    explanation.reason = decide(snapshot, &question, load, &mut steps, &mut explanation);
    if let Some(alert) = Alert::of(explanation.reason) {
        steps.step(|| format!("the client reads the TLS alert {} ({})", alert.text(), alert as u8));
    }
    let looked_for = steps.canonical.as_deref().unwrap_or(&explanation.name);
    if matches!(explanation.reason, Reason::SniUnknown | Reason::NotExported) {
        explanation.near = near(snapshot, looked_for);
    }
    explanation.canonical = steps.canonical;
    explanation.steps = steps.steps;
    Ok(explanation)
}

fn find_listener<'a>(snapshot: &'a Snapshot, name: Option<&str>) -> Result<&'a Listener, String> {
    let listeners = &snapshot.policy.listeners;
    let found = match name {
        Some(name) => listeners.iter().find(|listener| &*listener.name == name),
        None => listeners.first(),
    };
    found.map(|listener| &**listener).ok_or_else(|| {
        let names: Vec<&str> = listeners.iter().map(|listener| &*listener.name).collect();
        format!("there is no listener {:?}; there are: {}", name.unwrap_or_default(), names.join(", "))
    })
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
