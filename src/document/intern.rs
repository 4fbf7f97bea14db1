//! One copy of equal values: what 100,000 endpoints have in common is held once.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::model::endpoint::EndpointTemplate;
use crate::model::identity::Identity;
use crate::model::place::{Locality, Network};

use super::problem::Fault;

/// The values met so far in one document; dropped with the reading of it.
#[derive(Debug, Default)]
pub struct Interner {
    texts: HashSet<Arc<str>>,
    templates: HashSet<Arc<EndpointTemplate>>,
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

    pub fn template(&mut self, template: EndpointTemplate) -> Arc<EndpointTemplate> {
        match self.templates.get(&template) {
            Some(known) => known.clone(),
            None => {
                let new = Arc::new(template);
                self.templates.insert(new.clone());
                new
            }
        }
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
