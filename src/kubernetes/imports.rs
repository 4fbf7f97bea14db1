//! Writes a ServiceImport for each service of the cluster set (KEP-1645), in the namespace of its name. Only one replica writes at a
//! time: the holder of a Lease. Only imports with the label of this program (`kinds::own_object`) are changed or removed; an import
//! of another program stays as it is, and none is written beside it. The same replica writes the EndpointSlices of the imports (`import_slices`) and the
//! Services that are derived from them (`import_services`), if its config asks for them; otherwise it leaves them as they are, because
//! another writer may want them.

use std::sync::Arc;
use std::time::Duration;

use super::client::{Client, Fault};
use super::import_objects::{ImportObjects, Imports, PEER, Source};
use super::index::items::alias;
use super::kinds::derived_service::{DerivedContent, DerivedService};
use super::kinds::imported_slice::{ImportedSlice, SliceContent, SliceOf};
use super::kinds::own_object::owner_of;
use super::kinds::service_import::{ImportContent, ServiceImport};
use super::lease::{Lease, RENEW_EVERY};
use super::own_objects::OwnObjects;
use super::table::ObjectKey;
use super::writer::Turns;
use super::writing::{Duty, Lack, Writing};
use isthmus_aggregator::spec::kubernetes::{ImportExtras, Knows};
use isthmus_model::place::ClusterId;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::clusterset_service::ClusterSetService;
use isthmus_world::LaterReader;

/// The writes of EndpointSlices, and their right.
const SLICES: Duty = Duty {
    subject: "EndpointSlices of ServiceImports",
    grant: "kubernetes.serviceImports.slices or derivedServices",
    lack: Lack::Problem,
};
/// The writes of derived Services, and their right.
const SERVICES: Duty = Duty {
    subject: "Services derived from ServiceImports",
    grant: "kubernetes.serviceImports.derivedServices",
    lack: Lack::Problem,
};

/// The kinds of objects that are written.
#[derive(Clone, Copy)]
enum Part {
    Services,
    Slices,
    Imports,
}

/// Writes ServiceImports, their slices, and the Services that are derived from them.
pub(super) struct ImportWriter {
    knows: Knows,
    /// The objects that are written beside imports.
    extras: ImportExtras,
    cluster: ClusterId,
    world: LaterReader,
    imports: OwnObjects<ServiceImport>,
    services: OwnObjects<DerivedService>,
    slices: OwnObjects<ImportedSlice>,
    /// The objects that the cluster should have, while this replica writes them.
    objects: ImportObjects,
    /// The kinds in the order of the next turn. At first, the imports come last, because their condition says what the Services and
    /// slices lead to. A kind for which the time of a turn does not suffice comes last in the next turn, so that it does not hold up the
    /// others.
    order: [Part; 3],
}

impl ImportWriter {
    pub(super) fn new(
        client: Arc<Client>,
        (knows, extras): (Knows, ImportExtras),
        (cluster, world): (ClusterId, LaterReader),
    ) -> Self {
        Self {
            knows,
            extras,
            cluster,
            world,
            imports: OwnObjects::new(client.clone(), Self::DUTY),
            services: OwnObjects::new(client.clone(), &SERVICES),
            slices: OwnObjects::new(client, &SLICES),
            objects: ImportObjects::default(),
            order: [Part::Services, Part::Slices, Part::Imports],
        }
    }
}

impl Turns for ImportWriter {
    type Objects = Imports;
    const DUTY: &'static Duty =
        &Duty { subject: "ServiceImports", grant: "kubernetes.serviceImports.write", lack: Lack::Problem };

    fn lease(&self) -> String {
        "isthmus-service-imports".to_owned()
    }

    async fn turn(&mut self, there: &Arc<Imports>, lease: &mut Lease) -> Result<Duration, Fault> {
        let Some(reader) = self.world.get().filter(|_| there.is_known) else {
            lease.let_go();
            return Ok(RENEW_EVERY);
        };
        let snapshot = reader.latest();
        let is_wanted = |service: ClusterSetService<'_>| there.namespaces.contains(service.namespace);
        if !there.has_own() && !snapshot.cluster_set().any(is_wanted) {
            lease.let_go();
            return Ok(RENEW_EVERY);
        }
        lease.renew().await?;
        if !lease.is_held() {
            self.imports.clear();
            self.services.clear();
            self.slices.clear();
            self.objects = ImportObjects::default();
            return Ok(RENEW_EVERY);
        }
        let (knows, cluster, extras) = (self.knows, &self.cluster, self.extras);
        self.objects.renew(Source { snapshot: &snapshot, cluster, extras, there }, reader);
        let Some(term) = lease.term() else { return Ok(RENEW_EVERY) };
        let held = HeldBack { there, snapshot: &snapshot, extras, knows, cluster };
        let wanted = &self.objects;
        for at in 0..self.order.len() {
            let result = match self.order[at] {
                Part::Services => {
                    let is_held = |key: &ObjectKey, has: &DerivedContent, _: Option<&DerivedContent>| {
                        held.derived(&owner_of(key, &has.import).1)
                    };
                    self.services.write(&wanted.services, &there.services, is_held, term).await
                }
                Part::Slices => {
                    let is_held = |key: &ObjectKey, has: &SliceContent, _: Option<&SliceContent>| {
                        held.slice(&owner_of(key, &has.import).1, has)
                    };
                    self.slices.write(&wanted.slices, &there.slices, is_held, term).await
                }
                Part::Imports => {
                    let is_held = |key: &ObjectKey, has: &ImportContent, wanted: Option<&ImportContent>| {
                        held.import(key, has, wanted)
                    };
                    self.imports.write(&wanted.imports, &there.objects, is_held, term).await
                }
            };
            if result.is_err() || term.is_over() {
                self.order.rotate_left(at + 1);
                result?;
                break;
            }
        }
        Ok(term.pause())
    }

    fn result(&self) -> Writing {
        self.imports.result().or(self.services.result()).or(self.slices.result())
    }
}

/// Decides which objects are not changed or removed, because this replica may know too little of the clusters or of other writers.
struct HeldBack<'a> {
    there: &'a Imports,
    snapshot: &'a Snapshot,
    extras: ImportExtras,
    knows: Knows,
    cluster: &'a ClusterId,
}

impl HeldBack<'_> {
    fn import(&self, key: &ObjectKey, has: &ImportContent, wanted: Option<&ImportContent>) -> bool {
        loses(has, wanted, self.may_be_unread(key), (self.knows, self.cluster))
    }

    /// Returns true if the derived Service of an import and its slices are held back: with their import, and always if the config does
    /// not ask for them.
    fn derived(&self, import: &ObjectKey) -> bool {
        let has = self.there.objects.get(import).and_then(Option::as_deref);
        let is_import_held =
            || has.map_or_else(|| self.may_be_unread(import), |has| self.import(import, has, None));
        !self.extras.derived_services || is_import_held()
    }

    fn slice(&self, import: &ObjectKey, has: &SliceContent) -> bool {
        match &has.of {
            SliceOf::Cluster(name) => {
                let is_of_others = self.knows == Knows::OwnCluster && name != self.cluster.as_str();
                !self.extras.slices || is_of_others || self.may_be_unread(import)
            }
            SliceOf::Derived(_) => self.derived(import),
        }
    }

    /// Returns true if a registry that is not read yet may have the service of an import.
    fn may_be_unread(&self, import: &ObjectKey) -> bool {
        alias(import).is_some_and(|name| self.snapshot.unread.may_have(name.as_str()))
    }
}

/// Returns true if an import would lose a cluster that may still export the service: this replica has not read the cluster yet, or
/// never reads it, and another replica does.
fn loses(
    has: &ImportContent,
    wanted: Option<&ImportContent>,
    may_be_unread: bool,
    (knows, own): (Knows, &ClusterId),
) -> bool {
    let mut lost =
        has.clusters.iter().filter(|name| wanted.is_none_or(|wanted| !wanted.clusters.contains(*name)));
    if may_be_unread {
        return wanted.is_none() || lost.next().is_some();
    }
    knows == Knows::OwnCluster && lost.any(|name| name != own.as_str() && !name.starts_with(PEER.1))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use http::{Method, StatusCode};
    use serde_json::json;
    use tokio::time::{Instant, sleep};

    use super::super::kinds::own_object::OwnObject as _;
    use super::super::scripted;
    use super::*;
    use isthmus_aggregator::spec::kubernetes::LeaseSpec;
    use isthmus_snapshot::testing::Mesh;
    use isthmus_tasks::scope::Scope;
    use isthmus_world::Publisher;

    fn of(clusters: &[&str]) -> ImportContent {
        let clusters = clusters.iter().map(|name| (*name).to_owned()).collect();
        ImportContent { clusters, ..ImportContent::default() }
    }

    #[test]
    fn a_cluster_that_this_replica_does_not_know_is_not_taken_from_an_import() {
        let own = ClusterId::new("east");
        let several = |has: &[&str], wanted: Option<&[&str]>, may_be_unread| {
            let wanted = wanted.map(of);
            loses(&of(has), wanted.as_ref(), may_be_unread, (Knows::OtherClusters, &own))
        };
        assert!(!several(&["east", "west"], Some(&["east"]), false));
        assert!(!several(&["west"], None, false));
        assert!(several(&["east", "west"], Some(&["east"]), true));
        assert!(several(&[], None, true));
        assert!(!several(&["east"], Some(&["east", "west"]), true), "a further cluster takes nothing away");
        let alone = |has: &[&str], wanted: Option<&[&str]>| {
            let wanted = wanted.map(of);
            loses(&of(has), wanted.as_ref(), false, (Knows::OwnCluster, &own))
        };
        assert!(alone(&["east", "west"], Some(&["east"])) && alone(&["west"], None));
        assert!(!alone(&["east"], None) && !alone(&["east", "peer-west"], None));
    }

    const OF_EACH_KIND: usize = 200;
    const ALL: ImportExtras = ImportExtras { slices: true, derived_services: true };

    /// Returns the objects of a cluster from which all of this program's are to be removed, as many of each kind.
    fn to_be_removed() -> Imports {
        let key = |at: usize| ObjectKey { namespace: "shop".into(), name: format!("n{at}").into() };
        let keys = || (0..OF_EACH_KIND).map(key);
        let service = Arc::new(DerivedContent { import: "n0".into(), ports: Vec::new() });
        Imports {
            is_known: true,
            objects: keys().map(|key| (key, Some(Arc::default()))).collect(),
            slices: keys().map(|key| (key, Some(Arc::new(slice())))).collect(),
            services: keys().map(|key| (key, Some(service.clone()))).collect(),
            ..Imports::default()
        }
    }

    fn slice() -> SliceContent {
        SliceContent {
            import: "n0".into(),
            of: SliceOf::Derived("s".into()),
            is_ipv6: false,
            ports: Vec::new(),
            endpoints: Vec::new(),
        }
    }

    /// Returns the object of a path, as a server has it.
    fn object(path: &str) -> String {
        let key =
            ObjectKey { namespace: "shop".into(), name: path.rsplit('/').next().unwrap_or_default().into() };
        if path.contains("/endpointslices/") {
            return ImportedSlice::new_object(&key, &slice()).to_string();
        }
        if path.contains("/services/") {
            let content = DerivedContent { import: "n0".into(), ports: Vec::new() };
            let mut object = DerivedService::new_object(&key, &content);
            object["metadata"]["ownerReferences"] = json!([{"kind": ServiceImport::NAME, "name": "n0"}]);
            return object.to_string();
        }
        ServiceImport::new_object(&key, &ImportContent::default()).to_string()
    }

    /// The requests that a server got.
    #[derive(Default)]
    struct Noted {
        /// The times of the renewals of the Lease.
        renewals: Vec<Instant>,
        /// The paths of the objects that were removed.
        removed: Vec<String>,
    }

    impl Noted {
        /// Returns the number of removals of objects of a kind.
        fn removed(&self, plural: &str) -> usize {
            self.removed.iter().filter(|path| path.contains(&format!("/{plural}/"))).count()
        }
    }

    /// Answers each request after a time.
    async fn serve(scope: &Scope, after: Duration) -> (Arc<Client>, Arc<Mutex<Noted>>) {
        let (client, mut requests) = scripted::server(scope).await;
        let noted = Arc::new(Mutex::new(Noted::default()));
        let (notes, tasks) = (noted.clone(), scope.clone());
        scope.spawn(async move {
            loop {
                let asked = requests.next().await;
                let mut noted = notes.lock().expect("no panic");
                match asked.method {
                    Method::PUT | Method::POST => noted.renewals.push(Instant::now()),
                    Method::DELETE => noted.removed.push(asked.path.clone()),
                    _ => {}
                }
                tasks.spawn(async move {
                    sleep(after).await;
                    let body = asked.body.clone();
                    match asked.method {
                        Method::GET if asked.path.contains("/leases/") => {
                            asked.with(StatusCode::NOT_FOUND, "{}")
                        }
                        Method::GET => {
                            let object = object(&asked.path);
                            asked.with(StatusCode::OK, object);
                        }
                        _ => asked.with(StatusCode::OK, body),
                    }
                });
            }
        });
        (client, noted)
    }

    fn writer(client: &Arc<Client>, extras: ImportExtras) -> (ImportWriter, Lease) {
        let (_, reader) = Publisher::new(Mesh::new(Vec::new(), Vec::new()).snapshot());
        let world = LaterReader::default();
        assert!(world.set(reader).is_ok());
        let knows = (Knows::OtherClusters, extras);
        let turns = ImportWriter::new(client.clone(), knows, (ClusterId::new("east"), world));
        let spec = LeaseSpec { namespace: "n".into(), holder: "a".into(), knows: Knows::OtherClusters };
        let lease = Lease::new(client.clone(), spec, turns.lease());
        (turns, lease)
    }

    #[tokio::test(start_paused = true)]
    async fn the_lease_is_renewed_in_time_however_many_objects_of_all_kinds_are_written() {
        let scope = Scope::default();
        let (client, noted) = serve(&scope, Duration::from_millis(50)).await;
        let (mut turns, mut lease) = writer(&client, ALL);
        let there = Arc::new(to_be_removed());
        let begun = Instant::now();
        while noted.lock().expect("no panic").removed.len() < 3 * OF_EACH_KIND {
            let pause = turns.turn(&there, &mut lease).await.expect("the server answers");
            sleep(pause).await;
            // Each removal takes two requests, and eight are made at the same time.
            assert!(begun.elapsed() < Duration::from_secs(12));
        }
        let renewals = noted.lock().expect("no panic").renewals.clone();
        let longest = renewals.windows(2).map(|pair| pair[1] - pair[0]).max().expect("several");
        assert!(longest < Duration::from_millis(2_500), "{longest:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_kind_that_is_always_due_holds_up_no_other_kind() {
        let scope = Scope::default();
        let (client, noted) = serve(&scope, Duration::from_millis(50)).await;
        let (mut turns, mut lease) = writer(&client, ALL);
        let service = to_be_removed().services.into_values().next().expect("one");
        let key = |at: usize| ObjectKey { namespace: "shop".into(), name: format!("n{at}").into() };
        let services = (0..5_000).map(|at| (key(at), service.clone())).collect();
        let there = Arc::new(Imports { services, ..to_be_removed() });
        let removed = |plural: &str| noted.lock().expect("no panic").removed(plural);
        let begun = Instant::now();
        while removed("endpointslices").min(removed("serviceimports")) < OF_EACH_KIND {
            let pause = turns.turn(&there, &mut lease).await.expect("the server answers");
            sleep(pause).await;
            assert!(begun.elapsed() < Duration::from_secs(20), "Services take all the time");
        }
        assert!(removed("services") < 5_000);
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_config_does_not_ask_for_is_left_to_other_writers() {
        let removed = async |extras: ImportExtras| {
            let scope = Scope::default();
            let (client, noted) = serve(&scope, Duration::ZERO).await;
            let (mut turns, mut lease) = writer(&client, extras);
            let mut there = to_be_removed();
            let of_cluster = SliceContent { of: SliceOf::Cluster("west".into()), ..slice() };
            for slice in there.slices.values_mut().take(10) {
                *slice = Some(Arc::new(of_cluster.clone()));
            }
            turns.turn(&Arc::new(there), &mut lease).await.expect("the server answers");
            let noted = noted.lock().expect("no panic");
            ["services", "endpointslices", "serviceimports"].map(|plural| noted.removed(plural))
        };
        let none = ImportExtras::default();
        assert_eq!(removed(none).await, [0, 0, 200]);
        assert_eq!(removed(ImportExtras { slices: true, ..none }).await, [0, 10, 200]);
        assert_eq!(removed(ImportExtras { derived_services: true, ..none }).await, [200, 190, 200]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_does_not_answer_ends_the_writes_before_the_lease_is_lost() {
        let scope = Scope::default();
        let (client, _) = serve(&scope, Duration::from_secs(4)).await;
        let (mut turns, mut lease) = writer(&client, ALL);
        let there = Arc::new(to_be_removed());
        let begun = Instant::now();
        // The Lease is read and written until the eighth second, and counts from the fourth. A removal would take until the sixteenth.
        let fault = turns.turn(&there, &mut lease).await.expect_err("it is too slow");
        assert_eq!(fault.to_string(), "the server did not answer before the Lease had to be renewed");
        assert_eq!(begun.elapsed(), Duration::from_secs(14));
    }
}
