//! `isthmus kubeconfig`: prints the kubeconfig, or the remote Secret, with which Isthmus in other clusters reads this cluster.

use std::io::Write;
use std::path::PathBuf;

use super::Failure;
use super::output::{Format, structured};
use crate::aggregator::kubernetes::remote::{ReaderAccount, kubeconfig_of, remote_secret};
use clap::Args;

/// The text below the options.
pub(super) const EXAMPLES: &str = "Examples:
  isthmus kubeconfig --context west --cluster west > clusters/west.yaml
  isthmus kubeconfig --context west --cluster west --server https://api.west.example:6443 --secret | kubectl --context east apply -f -

With reader.create=true, the chart creates the service account and its token.";

/// Which account's kubeconfig is printed.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Name under which other gateways know the cluster
    #[arg(long, value_name = "NAME")]
    cluster: String,
    /// Kubeconfig of a user who may read Secrets; default: KUBECONFIG, then the service account of this pod
    #[arg(long, value_name = "FILE", env = "KUBECONFIG")]
    kubeconfig: Option<PathBuf>,
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
    #[arg(long, value_name = "URL")]
    server: Option<String>,
    /// Print a Secret as `istioctl create-remote-secret` makes it
    #[arg(long)]
    secret: bool,
}

/// Prints the requested kubeconfig or Secret as YAML.
pub(super) fn run(arguments: Arguments, out: &mut impl Write) -> Result<(), Failure> {
    let Arguments { cluster, kubeconfig, context, namespace, account, server, secret } = arguments;
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
