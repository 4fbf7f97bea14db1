//! The replicas that count when the condition `Programmed` is judged: those that serve, or will serve, connections.

use futures_util::future::join_all;
use serde_json::Value;

use super::super::client::Client;
use super::super::notes::{Note, Served};

/// The largest number of pods that are read in one turn.
const READ_MAX: usize = 8;

/// The name of a replica, and what it serves.
pub(super) type Replica = (String, Served);

/// Returns the replicas of these notes, which should serve these generations of objects, without those whose pod is known not to be ready: a replica that has died renews its note no
/// more, but the note counts for a while. Pods are read only of replicas that lag behind.
pub(super) async fn counting(
    client: &Client,
    namespace: &str,
    notes: Vec<Note>,
    wanted: &[(&str, i64)],
) -> Vec<Replica> {
    let lags = |note: &Note| {
        wanted
            .iter()
            .any(|(object, generation)| note.serves.get(*object).is_none_or(|serves| serves < generation))
    };
    let (lagging, mut counting): (Vec<Note>, Vec<Note>) = notes.into_iter().partition(lags);
    let are_down = lagging.iter().take(READ_MAX).map(|note| is_down(client, namespace, &note.name));
    let are_down = join_all(are_down).await;
    let others = lagging.into_iter().zip(are_down.into_iter().chain(std::iter::repeat(false)));
    counting.extend(others.filter(|(_, is_down)| !is_down).map(|(note, _)| note));
    counting.into_iter().map(|note| (note.name, note.serves)).collect()
}

/// Returns true if there is a pod of this name and it takes no connections. A replica outside the cluster has no pod.
async fn is_down(client: &Client, namespace: &str, name: &str) -> bool {
    let is_name = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    if name.is_empty() || !name.bytes().all(is_name) {
        return false;
    }
    // The chart grants the right to list pods, not to get one.
    let path = format!("/api/v1/namespaces/{namespace}/pods?fieldSelector=metadata.name%3D{name}");
    let Ok(found) = client.object(&path).await else { return false };
    let Ok(found) = serde_json::from_slice::<Value>(&found) else { return false };
    let Some(pod) = found["items"].get(0) else { return false };
    let mut conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    let is_ready = conditions.any(|found| found["type"] == "Ready" && found["status"] == "True");
    !is_ready || !pod["metadata"]["deletionTimestamp"].is_null()
}

#[cfg(test)]
mod tests {
    use super::super::super::scripted;
    use super::*;
    use http::StatusCode;
    use isthmus_tasks::scope::Scope;
    use serde_json::json;

    #[tokio::test]
    async fn a_replica_that_lags_behind_counts_unless_its_pod_is_not_ready() {
        let scope = Scope::default();
        let (client, mut requests) = scripted::server(&scope).await;
        scope.spawn(async move {
            loop {
                let asked = requests.next().await;
                let ready = |is: &str| json!({"status": {"conditions": [{"type": "Ready", "status": is}]}});
                let deleted = || {
                    let mut pod = ready("True");
                    pod["metadata"] = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
                    pod
                };
                let pods = match asked.path.rsplit("%3D").next().unwrap_or_default() {
                    "starting" => vec![ready("True")],
                    "dead" => vec![ready("False")],
                    "deleted" => vec![deleted()],
                    "outside" => Vec::new(),
                    other => unreachable!("{other}"),
                };
                asked.with(StatusCode::OK, json!({"items": pods}).to_string());
            }
        });
        let note = |name: &str, generation| Note::new(name, [("Gateway a/b".to_owned(), generation)].into());
        let notes = vec![
            note("serves", 2),
            note("starting", 1),
            note("dead", 1),
            note("deleted", 1),
            note("outside", 1),
            note("../secrets/x", 1),
        ];
        let counting = counting(&client, "n", notes, &[("Gateway a/b", 2)]).await;
        let names: Vec<&str> = counting.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["serves", "starting", "outside", "../secrets/x"]);
    }
}
