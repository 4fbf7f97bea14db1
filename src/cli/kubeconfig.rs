//! `isthmus kubeconfig`: prints the kubeconfig, or the remote Secret, with which Isthmus in other clusters reads this cluster.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;

use isthmus_console::failure::Failure;
use isthmus_console::output::{Format, structured};
use isthmus_document::problem::Problems;
use isthmus_document::scalar;
use isthmus_document::tree::{Node, Source, parse};
use isthmus_files::file;
use isthmus_kubernetes::remote::{ReaderAccount, kubeconfig_of, remote_secret};

/// The text below the options.
pub(super) const EXAMPLES: &str = "Examples:
  isthmus kubeconfig --context west --cluster west > clusters/west.yaml
  isthmus kubeconfig --context west --cluster west --server https://api.west.example:6443 --secret | kubectl --context east apply -f -

With reader.create=true, the chart creates the service account and its token.";

/// The account whose kubeconfig is printed.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Name under which other gateways know the cluster
    #[arg(long, value_name = "NAME")]
    cluster: String,
    /// Kubeconfig of a user who may read Secrets; default: KUBECONFIG, then the service account of this pod. Of several files
    /// (`a:b`), the first one that has the context is read
    #[arg(long, value_name = "FILE", env = "KUBECONFIG")]
    kubeconfig: Option<std::ffi::OsString>,
    /// Context of that kubeconfig, of the cluster that is to be read; default: the current one
    #[arg(long)]
    context: Option<String>,
    /// Namespace of the service account
    #[arg(long, default_value = "istio-system")]
    namespace: String,
    /// Name of the service account
    #[arg(long, default_value = "isthmus-reader")]
    account: String,
    /// URL of the API server as other clusters reach it; default: the one of the kubeconfig
    #[arg(long, value_name = "URL", value_parser = server_url)]
    server: Option<String>,
    /// Print a Secret as `istioctl create-remote-secret` makes it
    #[arg(long)]
    secret: bool,
}

/// Prints the requested kubeconfig or Secret as YAML.
pub(super) fn run(arguments: Arguments, out: &mut impl Write) -> Result<(), Failure> {
    let Arguments { cluster, kubeconfig, context, namespace, account, server, secret } = arguments;
    let kubeconfig = match kubeconfig.filter(|paths| !paths.is_empty()) {
        Some(paths) => Some(chosen(&paths, context.as_deref()).map_err(Failure::Wrong)?),
        None => None,
    };
    let reader = ReaderAccount { kubeconfig, context, namespace, account, cluster, server };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let found = runtime.block_on(kubeconfig_of(&reader));
    let found = found.map_err(|problems| Failure::Wrong(problems.join("\n")))?;
    if !secret {
        return Ok(structured(out, &found, Format::Yaml)?);
    }
    let mut text = Vec::new();
    structured(&mut text, &found, Format::Yaml)?;
    let secret = remote_secret(&reader.cluster, &reader.namespace, &String::from_utf8_lossy(&text));
    Ok(structured(out, &secret, Format::Yaml)?)
}

/// The largest size of a kubeconfig, in bytes.
const BYTES_MAX: u64 = 1 << 20;

/// Parses the URL of an API server: `https://host` or `https://host:port`.
fn server_url(text: &str) -> Result<String, String> {
    let Some(rest) = text.strip_prefix("https://") else {
        return Err("expected a URL that begins with https://".to_owned());
    };
    let address = rest.strip_suffix('/').unwrap_or(rest);
    match scalar::target(address)
        .or_else(|fault| scalar::target(&format!("{address}:443")).map_err(|_| fault))
    {
        Ok(_) => Ok(text.to_owned()),
        Err(fault) => Err(format!("expected https://host:port; {}", fault.message)),
    }
}

/// Returns the kubeconfig to read of a list of paths as in `KUBECONFIG`. Files that do not exist are skipped, as kubectl does; if
/// several are left, the first one that has the context is chosen. Unlike kubectl, this does not merge the files: the cluster and
/// the user of the context must be in the same file.
fn chosen(paths: &OsStr, context: Option<&str>) -> Result<PathBuf, String> {
    let all: Vec<PathBuf> =
        std::env::split_paths(paths).filter(|path| !path.as_os_str().is_empty()).collect();
    // The name of a single file may have a colon.
    if all.len() < 2 || Path::new(paths).exists() {
        return Ok(paths.into());
    }
    let shown = paths.display();
    let mut files: Vec<PathBuf> = all.into_iter().filter(|path| path.exists()).collect();
    if files.len() < 2 {
        return files.pop().ok_or_else(|| format!("none of the files {shown} exists"));
    }
    let mut nodes = Vec::new();
    for path in files {
        nodes.push((tree(&path)?, path));
    }
    let current = nodes.iter().find_map(|(node, _)| {
        node.get("current-context").and_then(Node::text).filter(|name| !name.is_empty())
    });
    let Some(wanted) = context.or(current) else {
        return Err(format!("none of the files {shown} has a current-context; choose one with --context"));
    };
    let has_wanted = |node: &Node| {
        let contexts = node.get("contexts").map_or(&[][..], Node::items);
        contexts.iter().any(|context| context.get("name").and_then(Node::text) == Some(wanted))
    };
    let found = nodes.iter().find(|(node, _)| has_wanted(node)).map(|(_, path)| path.clone());
    found.ok_or_else(|| format!("none of the files {shown} has the context {wanted:?}"))
}

fn tree(path: &Path) -> Result<Node, String> {
    let cannot = |why: &dyn std::fmt::Display| format!("cannot read {}: {why}", path.display());
    let bytes = file::read(path, BYTES_MAX).map_err(|fault| cannot(&fault))?;
    let text = String::from_utf8(bytes).map_err(|error| cannot(&error))?;
    let mut problems = Problems::new();
    let file = problems.add_file(path);
    let node =
        file.and_then(|file| parse(Source { file, text: &text, environment: None }, None, &mut problems));
    node.ok_or_else(|| {
        let (errors, _) = problems.finish();
        errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_is_an_https_url() {
        for good in
            ["https://api.west.example:6443", "https://10.0.0.1:6443", "https://api.west", "https://[::1]:1/"]
        {
            assert_eq!(server_url(good).as_deref(), Ok(good));
        }
        for bad in [
            "api.west.example:6443",
            "http://api.west:6443",
            "https://",
            "https://a b:1",
            "https://a:x",
            "https://a/b",
        ] {
            assert!(server_url(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn of_several_kubeconfigs_the_first_with_the_context_is_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).expect("written");
            path
        };
        let config = |name: &str, context: &str| {
            write(
                name,
                &format!("current-context: {context}\ncontexts: [{{name: {context}, context: {{}}}}]\n"),
            )
        };
        let (east, west) = (config("east", "east"), config("west", "west"));
        let absent = folder.path().join("absent");
        let list = |paths: &[&PathBuf]| std::env::join_paths(paths).expect("legal");
        let both = list(&[&absent, &east, &west]);
        assert_eq!(chosen(&both, None).as_ref(), Ok(&east));
        assert_eq!(chosen(&both, Some("west")).as_ref(), Ok(&west));
        let none = chosen(&both, Some("south")).expect_err("no file has it");
        assert!(none.ends_with("has the context \"south\""), "{none}");
        assert_eq!(
            chosen(&list(&[&absent, &west]), Some("south")).as_ref(),
            Ok(&west),
            "its own message is better"
        );
        assert_eq!(chosen(absent.as_os_str(), None).as_ref(), Ok(&absent), "its own message is better");
        assert!(chosen(&list(&[&absent, &absent]), None).is_err());
        let colon = config("a:b", "c");
        assert_eq!(chosen(colon.as_os_str(), None).as_ref(), Ok(&colon));
        let open = write("open", "contexts: [");
        assert!(chosen(&list(&[&east, &open]), None).is_err());
    }
}
