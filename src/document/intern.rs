//! Shares equal values: a value that 100,000 endpoints have in common is stored once. Readers of text get the shared copy of a
//! value; values that are read whole are replaced by it.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;

use isthmus_model::ambient::WorkloadNames;
use isthmus_model::endpoint::EndpointTemplate;
use isthmus_model::identity::Identity;
use isthmus_model::place::{Locality, Network};

use super::problem::InvalidValue;

/// The shared values of one document; dropped after the document has been read.
#[derive(Debug, Default)]
pub struct Interner {
    texts: HashSet<Arc<str>>,
    templates: HashSet<Arc<EndpointTemplate>>,
    networks: HashMap<Box<str>, Network>,
    localities: HashMap<Box<str>, Locality>,
    identities: HashMap<Box<str>, Identity>,
    names: HashSet<Arc<WorkloadNames>>,
}

impl Interner {
    /// Returns the shared copy of a text.
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

    /// Returns the shared copy of a template.
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

    /// Returns the shared copy of the names of a workload.
    pub fn names(&mut self, names: WorkloadNames) -> Arc<WorkloadNames> {
        let mut names = Arc::new(names);
        share(&mut self.names, &mut names);
        names
    }

    /// Replaces the names of a workload by their shared copy.
    pub fn share_names(&mut self, names: &mut Arc<WorkloadNames>) {
        share(&mut self.names, names);
    }

    /// Replaces a text by its shared copy.
    pub fn share_text(&mut self, text: &mut Arc<str>) {
        share(&mut self.texts, text);
    }

    /// Replaces a template by its shared copy.
    pub fn share_template(&mut self, template: &mut Arc<EndpointTemplate>) {
        share(&mut self.templates, template);
    }

    /// Replaces a locality by its shared copy.
    pub fn share_locality(&mut self, locality: &mut Locality) {
        match self.localities.get(locality.as_str()) {
            Some(known) => locality.clone_from(known),
            None => drop(self.localities.insert(locality.as_str().into(), locality.clone())),
        }
    }

    /// Returns the shared copy of a network.
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

    /// Parses a locality and returns its shared copy.
    pub fn locality(&mut self, text: &str) -> Result<Locality, InvalidValue> {
        parsed(&mut self.localities, text, super::scalar::locality)
    }

    /// Parses an identity and returns its shared copy.
    pub fn identity(&mut self, text: &str) -> Result<Identity, InvalidValue> {
        parsed(&mut self.identities, text, super::scalar::identity)
    }
}

fn share<T: Clone + Eq + Hash>(known: &mut HashSet<T>, value: &mut T) {
    match known.get(value) {
        Some(shared) => value.clone_from(shared),
        None => drop(known.insert(value.clone())),
    }
}

fn parsed<T: Clone, E>(
    known: &mut HashMap<Box<str>, T>,
    text: &str,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> Result<T, E> {
    if let Some(known) = known.get(text) {
        return Ok(known.clone());
    }
    let new = parse(text)?;
    known.insert(text.into(), new.clone());
    Ok(new)
}
