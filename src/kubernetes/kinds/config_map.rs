//! The ConfigMap of the mesh, which names its trust domain.

use std::path::Path;

use super::{Facts, Namespaces, Reading, Tables, Watched};
use crate::objects::{Meta, Texts, objects};
use crate::table::{ObjectKey, Table, Touched};
use isthmus_document::problem::Problems;
use isthmus_document::tree::{Source, parse};
use isthmus_model::identity::TrustDomain;

objects! {
    ConfigMap { metadata: Meta, data: Texts, }
}

impl Watched for ConfigMap {
    const FACTS: Facts = Facts {
        plural: "configmaps",
        namespaces: Namespaces::System,
        fields: "metadata.name%3Distio",
        is_wanted: |spec| spec.mesh_config,
        ..Facts::CORE
    };

    /// True if the mesh's own configuration names another trust domain than the one in use.
    type Rows = Table<ObjectKey, bool>;

    fn record(&self, reading: &mut Reading<'_>) -> Option<bool> {
        Some(self.trust_domain().is_some_and(|named| named != *reading.trust_domain))
    }

    /// Marks the session, which has to begin again with the other trust domain. The mark stays if the ConfigMap is deleted.
    fn touch(touched: Touched<ObjectKey, bool>, tables: &mut Tables) {
        if let Some(names_another) = tables.mesh_configs.get(&touched.key) {
            tables.dirty.session = *names_another;
        }
    }
}

impl ConfigMap {
    /// Returns the trust domain of the mesh configuration, if it names one.
    pub(crate) fn trust_domain(&self) -> Option<TrustDomain> {
        let text = self.data.get("mesh")?;
        let mut problems = Problems::new();
        let file = problems.add_file(Path::new("mesh"))?;
        let root = parse(Source { file, text, environment: None }, None, &mut problems)?;
        TrustDomain::parse(root.get("trustDomain")?.text()?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mesh_configuration_names_its_trust_domain() {
        let read = |text: &str| {
            let map = ConfigMap {
                data: Texts::from([("mesh".to_owned(), text.to_owned())]),
                ..ConfigMap::default()
            };
            map.trust_domain().map(|domain| domain.as_str().to_owned())
        };
        assert_eq!(read("rootNamespace: x\ntrustDomain: west.example\n"), Some("west.example".to_owned()));
        assert_eq!(read("trustDomain: \"west.example\" # ours\n"), Some("west.example".to_owned()));
        assert_eq!(read("{\"trustDomain\": \"west.example\"}"), Some("west.example".to_owned()));
        assert_eq!(read("defaultConfig:\n  trustDomain: other\n"), None, "of another section");
        assert_eq!(read("trustDomain: ''\n"), None);
        assert_eq!(read("a: [\n"), None);
        assert_eq!(ConfigMap::default().trust_domain(), None);
    }
}
