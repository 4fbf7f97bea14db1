//! Helm, applied to the chart of this repository.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

use super::{kube, yaml};

/// The release that all tests render: the one of Istio's own gateway.
pub const RELEASE: &str = "istio-eastwestgateway";
/// The namespace that all tests render: the one of Istio's own gateway.
pub const NAMESPACE: &str = "istio-system";

/// The folder of the chart.
pub fn chart() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("charts/isthmus")
}

/// Returns the sets of values in the chart's folder `ci`: each one's name and path, ordered by name.
pub fn sets() -> Vec<(String, PathBuf)> {
    let entries = std::fs::read_dir(chart().join("ci")).expect("the sets").flatten();
    let name = |path: &Path| path.file_name()?.to_str()?.strip_suffix("-values.yaml").map(str::to_owned);
    let mut sets: Vec<_> =
        entries.map(|entry| entry.path()).filter_map(|path| Some((name(&path)?, path))).collect();
    sets.sort();
    sets
}

/// The Helm program, with its own folders for cache, config and data.
pub struct Helm {
    binary: PathBuf,
    home: tempfile::TempDir,
}

impl Helm {
    /// Finds Helm. Returns `None`, after reporting a skip, if it is not installed.
    pub fn installed() -> Option<Self> {
        Some(Self { binary: kube::helm()?, home: tempfile::tempdir().expect("a folder") })
    }

    /// Returns a Helm command with these arguments, which reaches no cluster unless the caller sets another `KUBECONFIG`.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command.args(arguments).env("KUBECONFIG", "/dev/null");
        for variable in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
            command.env(variable, self.home.path());
        }
        command
    }

    /// Runs a Helm command and returns its output; the error is its error output.
    pub fn run(&self, arguments: &[&str]) -> Result<String, String> {
        said(self.command(arguments).output().expect("helm runs"))
    }

    /// Renders the chart with a values file and further arguments.
    pub fn template(&self, values: Option<&Path>, more: &[&str]) -> Result<String, String> {
        let chart = chart();
        let mut arguments = vec!["template", RELEASE, path(&chart), "--namespace", NAMESPACE];
        arguments.extend(values.into_iter().flat_map(|values| ["--values", path(values)]));
        arguments.extend(more);
        self.run(&arguments)
    }

    /// Renders the chart and returns its objects.
    #[track_caller]
    pub fn objects(&self, values: Option<&Path>, more: &[&str]) -> Vec<Value> {
        yaml::documents(&self.template(values, more).unwrap_or_else(|error| panic!("{error}")))
    }
}

/// Returns the objects of a kind.
pub fn of_kind<'a>(objects: &'a [Value], kind: &str) -> Vec<&'a Value> {
    objects.iter().filter(|object| object["kind"] == kind).collect()
}

/// Returns the object of a kind and name.
#[track_caller]
pub fn object<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let found = of_kind(objects, kind).into_iter().find(|object| object["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("no {kind} {name}"))
}

/// Returns a path as a command-line argument.
pub fn path(path: &Path) -> &str {
    path.to_str().expect("a path of letters")
}

/// Returns the standard output of a command that succeeded; the error is its standard error.
pub fn said(output: Output) -> Result<String, String> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}
