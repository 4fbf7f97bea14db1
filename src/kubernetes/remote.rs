//! Makes the kubeconfig with which Isthmus in other clusters reads this cluster, from the token of a service account.

use std::path::PathBuf;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use serde::Deserialize;
use serde_json::{Value, json};

use super::access::find;
use super::client::Client;
use super::kinds::Secret;
use super::kubeconfig::decoded;
use isthmus_aggregator::spec::kubernetes::AccessSpec;
use isthmus_files::reading::Readings;
use isthmus_tasks::scope::Scope;

/// The service account that a kubeconfig is made for, and the access to its token.
#[derive(Clone, Debug)]
pub struct ReaderAccount {
    /// The kubeconfig of a user who may read Secrets; `None`: the service account of the pod that this process runs in.
    pub kubeconfig: Option<PathBuf>,
    /// The context in the kubeconfig; `None`: the current context of the kubeconfig.
    pub context: Option<String>,
    /// The namespace of the service account.
    pub namespace: String,
    /// The name of the service account.
    pub account: String,
    /// The name that the cluster has in the kubeconfig.
    pub cluster: String,
    /// The URL at which other clusters reach the API server; `None`: the URL that this process uses.
    pub server: Option<String>,
}

/// A list of Secrets.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Secrets {
    items: Vec<Secret>,
}

/// Returns the kubeconfig of the account as JSON, which is YAML too. The error is the list of reasons why there is none, a line
/// each.
pub async fn kubeconfig_of(reader: &ReaderAccount) -> Result<Value, Vec<String>> {
    let access = match &reader.kubeconfig {
        Some(path) => {
            AccessSpec::Kubeconfig { path: path.clone(), context: reader.context.clone(), token_file: None }
        }
        None => AccessSpec::ServiceAccount,
    };
    let found = find(&access, &Readings::new(1)).await?;
    let one = |fault: &dyn std::fmt::Display| vec![fault.to_string()];
    let client = Client::new(found.access, Scope::default()).map_err(|fault| one(&fault))?;
    let path = format!(
        "/api/v1/namespaces/{}/secrets?fieldSelector=type%3Dkubernetes.io%2Fservice-account-token",
        reader.namespace
    );
    let answer = client.object(&path).await.map_err(|fault| one(&format!("{}: {fault}", client.server())))?;
    let list: Secrets = serde_json::from_slice(&answer).map_err(|error| one(&error))?;
    let is_of_account = |secret: &&Secret| {
        let annotation = secret.metadata.annotations.get("kubernetes.io/service-account.name");
        annotation == Some(&reader.account) && secret.data.contains_key("token")
    };
    let Some(secret) = list.items.iter().find(is_of_account) else {
        return Err(vec![format!(
            "the service account {}/{} has no Secret with a token; the chart makes one with reader.create=true",
            reader.namespace, reader.account
        )]);
    };
    let field = |key: &str| secret.data.get(key).and_then(|text| decoded(text));
    let token = field("token").and_then(|bytes| String::from_utf8(bytes).ok());
    let (Some(token), Some(ca)) = (token, field("ca.crt")) else {
        return Err(vec![format!("the Secret {} has no token, or no ca.crt", secret.metadata.name)]);
    };
    let server = reader.server.clone().unwrap_or_else(|| client.server().to_string());
    let cluster = reader.cluster.as_str();
    Ok(json!({
        "apiVersion": "v1", "kind": "Config", "current-context": cluster,
        "clusters": [{"name": cluster, "cluster": {
            "server": server, "certificate-authority-data": BASE64_STANDARD.encode(ca),
        }}],
        "users": [{"name": cluster, "user": {"token": token}}],
        "contexts": [{"name": cluster, "context": {"cluster": cluster, "user": cluster}}],
    }))
}

/// Returns the Secret in which Istio and `kubernetesClusters.secrets` find a kubeconfig.
pub fn remote_secret(cluster: &str, namespace: &str, kubeconfig: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": {
            "name": format!("istio-remote-secret-{cluster}"), "namespace": namespace,
            "labels": {"istio/multiCluster": "true"}, "annotations": {"networking.istio.io/cluster": cluster},
        },
        "stringData": {cluster: kubeconfig},
    })
}
