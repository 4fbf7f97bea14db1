//! One copy of equal values: what 100,000 endpoints have in common is held once.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;

use crate::model::endpoint::Labels;
use crate::model::identity::Identity;
use crate::model::place::{Locality, Network};

use super::problem::Fault;

/// The values met so far in one document; dropped with the reading of it.
#[derive(Debug, Default)]
pub struct Interner {
    texts: HashSet<Arc<str>>,
    labels: HashSet<Arc<Labels>>,
    ports: HashSet<Arc<BTreeMap<Arc<str>, u16>>>,
    networks: HashMap<Box<str>, Network>,
    localities: HashMap<Box<str>, Locality>,
    identities: HashMap<Box<str>, Identity>,
}

impl Interner {
    pub fn text(&mut self, text: &str) -> Arc<str> {
        match self.texts.get(text) {
            Some(known) => known.clone(),
            None => {
                let new: Arc<str> = text.into();
                self.texts.insert(new.clone());
                new
            }
        }
    }

    pub fn labels(&mut self, labels: Labels) -> Arc<Labels> {
        shared(&mut self.labels, labels)
    }

    pub fn ports(&mut self, ports: BTreeMap<Arc<str>, u16>) -> Arc<BTreeMap<Arc<str>, u16>> {
        shared(&mut self.ports, ports)
    }

    pub fn network(&mut self, text: &str) -> Network {
        match self.networks.get(text) {
            Some(known) => known.clone(),
            None => {
                let new = Network::new(text);
                self.networks.insert(text.into(), new.clone());
                new
            }
        }
    }

    pub fn locality(&mut self, text: &str) -> Result<Locality, Fault> {
        parsed(&mut self.localities, text, super::scalar::locality)
    }

    pub fn identity(&mut self, text: &str) -> Result<Identity, Fault> {
        parsed(&mut self.identities, text, super::scalar::identity)
    }
}

fn shared<T: Eq + Hash>(known: &mut HashSet<Arc<T>>, value: T) -> Arc<T> {
    match known.get(&value) {
        Some(known) => known.clone(),
        None => {
            let new = Arc::new(value);
            known.insert(new.clone());
            new
        }
    }
}

fn parsed<T: Clone>(
    known: &mut HashMap<Box<str>, T>,
    text: &str,
    parse: impl FnOnce(&str) -> Result<T, Fault>,
) -> Result<T, Fault> {
    if let Some(known) = known.get(text) {
        return Ok(known.clone());
    }
    let new = parse(text)?;
    known.insert(text.into(), new.clone());
    Ok(new)
}
