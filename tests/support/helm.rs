//! Helm with the chart of this repository.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

use super::{kube, yaml};

/// The release and the namespace that all tests render: those of Istio's own gateway.
pub const RELEASE: &str = "istio-eastwestgateway";
pub const NAMESPACE: &str = "istio-system";

/// The folder of the chart.
pub fn chart() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("charts/isthmus")
}

/// The sets of values of the chart's folder `ci`, by name, in order.
pub fn sets() -> Vec<(String, PathBuf)> {
    let entries = std::fs::read_dir(chart().join("ci")).expect("the sets").flatten();
    let name = |path: &Path| path.file_name()?.to_str()?.strip_suffix("-values.yaml").map(str::to_owned);
    let mut sets: Vec<_> =
        entries.map(|entry| entry.path()).filter_map(|path| Some((name(&path)?, path))).collect();
    sets.sort();
    sets
}

/// Helm, with folders of its own.
pub struct Helm {
    binary: PathBuf,
    home: tempfile::TempDir,
}

impl Helm {
    /// Returns none, and says so, where there is no Helm.
    pub fn installed() -> Option<Self> {
        Some(Self { binary: kube::helm()?, home: tempfile::tempdir().expect("a folder") })
    }

    /// A command that reaches no cluster, unless it is given a kubeconfig.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command.args(arguments).env("KUBECONFIG", "/dev/null");
        for variable in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
            command.env(variable, self.home.path());
        }
        command
    }

    /// Runs a command; the error is what it says.
    pub fn run(&self, arguments: &[&str]) -> Result<String, String> {
        said(self.command(arguments).output().expect("helm runs"))
    }

    /// What the chart becomes with a file of values and more arguments.
    pub fn template(&self, values: Option<&Path>, more: &[&str]) -> Result<String, String> {
        let chart = chart();
        let mut arguments = vec!["template", RELEASE, path(&chart), "--namespace", NAMESPACE];
        arguments.extend(values.into_iter().flat_map(|values| ["--values", path(values)]));
        arguments.extend(more);
        self.run(&arguments)
    }

    /// The objects of it.
    #[track_caller]
    pub fn objects(&self, values: Option<&Path>, more: &[&str]) -> Vec<Value> {
        yaml::documents(&self.template(values, more).unwrap_or_else(|error| panic!("{error}")))
    }
}

/// The objects of a kind.
pub fn of_kind<'a>(objects: &'a [Value], kind: &str) -> Vec<&'a Value> {
    objects.iter().filter(|object| object["kind"] == kind).collect()
}

/// The one object of a kind and name.
#[track_caller]
pub fn object<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let found = of_kind(objects, kind).into_iter().find(|object| object["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("no {kind} {name}"))
}

/// A path as an argument.
pub fn path(path: &Path) -> &str {
    path.to_str().expect("a path of letters")
}

/// What a command that ended well has printed; the error is what it says.
pub fn said(output: Output) -> Result<String, String> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}
