//! A property: after any sequence of changes, the statuses are those that the objects as they are now give, whatever was written before,
//! with two releases in one cluster.

use std::collections::BTreeMap;

use super::*;

/// A generator of random numbers (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) >> 1).expect("63 bits") % most
    }
}

const CLASSES: [&str; 3] = ["isthmus", "internal", "foreign"];
const PARENTS: [&str; 6] = ["g0", "g1", "g2", "g3", "s0", "nowhere"];

/// A cluster with two releases, of the classes `isthmus` and `internal`, and a third class of another controller.
struct Cluster {
    objects: BTreeMap<String, Value>,
    releases: Vec<World>,
    version: u64,
}

fn key_of(object: &Value) -> String {
    let metadata = &object["metadata"];
    format!("{} {}/{}", object["kind"], metadata["namespace"], metadata["name"])
}

fn class(name: &str) -> Value {
    let controller = if name == "foreign" { "other/controller" } else { GATEWAY_CONTROLLER };
    json!({"kind": "GatewayClass", "metadata": {"name": name}, "spec": {"controllerName": controller}})
}

impl Cluster {
    fn new() -> Self {
        let releases = ["isthmus", "internal"].map(World::of_class).into_iter().collect();
        let mut cluster = Self { objects: BTreeMap::new(), releases, version: 0 };
        CLASSES.iter().for_each(|name| cluster.apply(class(name)));
        cluster
    }

    /// Stores an object as the API server does: its status stays, and a new object has none.
    fn apply(&mut self, mut object: Value) {
        self.version += 1;
        let known = self.objects.get(&key_of(&object));
        object["metadata"]["generation"] = self.version.into();
        let uid = known
            .map_or_else(|| json!(format!("uid-{}", self.version)), |known| known["metadata"]["uid"].clone());
        object["metadata"]["uid"] = uid;
        if let Some(known) = known {
            object["status"] = known["status"].clone();
        }
        self.store(object);
    }

    fn store(&mut self, object: Value) {
        self.releases.iter_mut().for_each(|release| release.put(&object));
        self.objects.insert(key_of(&object), object);
    }

    fn delete(&mut self, key: &str) {
        if let Some(object) = self.objects.remove(key) {
            let text = object.to_string();
            self.releases.iter_mut().for_each(|release| drop(release.delete(&text)));
        }
    }

    fn restart(&mut self, at: usize) {
        let name = self.releases[at].spec.class.clone();
        self.releases[at] = World::of_class(&name);
        if !self.objects.contains_key(&key_of(&class("isthmus"))) {
            let gone = class("isthmus").to_string();
            drop(self.releases[at].delete(&gone));
        }
        for object in self.objects.values() {
            self.releases[at].put(object);
        }
    }

    fn change(&mut self, random: &mut Random) -> String {
        let route = ["r0", "r1"][random.below(2)];
        let route_key = key_of(&object("TLSRoute", &format!("shop/{route}"), 1, Value::Null));
        let gateway = PARENTS[random.below(4)];
        let pick = random.below(12);
        match pick {
            0..=2 => {
                let parents: Vec<Value> = PARENTS
                    .iter()
                    .filter(|_| random.below(3) == 0)
                    .map(|name| {
                        let kind = if *name == "s0" { "ListenerSet" } else { "Gateway" };
                        json!({"group": "gateway.networking.k8s.io", "kind": kind, "namespace": "infra", "name": name})
                    })
                    .collect();
                let what = format!("route {route} to {parents:?}");
                let spec = json!({"parentRefs": parents, "hostnames": [format!("{route}.test")],
                    "rules": [{"backendRefs": web()}]});
                self.apply(object("TLSRoute", &format!("shop/{route}"), 1, spec));
                what
            }
            3 => {
                self.delete(&route_key);
                format!("no route {route}")
            }
            4 | 5 => {
                let class = CLASSES[random.below(3)];
                let spec = json!({"gatewayClassName": class, "listeners": [listener("tls", json!({}))],
                    "allowedListeners": {"namespaces": {"from": "All"}}});
                let mut new = object("Gateway", &format!("infra/{gateway}"), 1, spec);
                self.apply(new.clone());
                if class == "foreign" && random.below(2) == 0 {
                    new["metadata"] = self.objects[&key_of(&new)]["metadata"].clone();
                    new["status"] = json!({"conditions": [
                        {"type": "Accepted", "status": "True", "reason": "Accepted", "message": THEIRS}]});
                    self.store(new);
                }
                format!("{gateway} of {class}")
            }
            6 => {
                self.delete(&key_of(&object("Gateway", &format!("infra/{gateway}"), 1, Value::Null)));
                format!("no {gateway}")
            }
            7 => {
                let spec = json!({"parentRef": {"name": gateway}, "listeners": [listener("more", json!({"port": 8443}))]});
                self.apply(object("ListenerSet", "infra/s0", 1, spec));
                format!("s0 of {gateway}")
            }
            8 => {
                self.delete(&key_of(&object("ListenerSet", "infra/s0", 1, Value::Null)));
                "no s0".to_owned()
            }
            9 => {
                let name = CLASSES[random.below(3)];
                match self.objects.contains_key(&key_of(&class(name))) {
                    true => self.delete(&key_of(&class(name))),
                    false => self.apply(class(name)),
                }
                format!("class {name}")
            }
            10 => {
                let at = random.below(2);
                self.restart(at);
                format!("restart of {at}")
            }
            _ => {
                // Another controller writes an entry, or somebody clears the status.
                if let Some(mut route) = self.objects.get(&route_key).cloned() {
                    let mut parents = route["status"]["parents"].as_array().cloned().unwrap_or_default();
                    let theirs = json!({"parentRef": {"name": "theirs"}, "controllerName": "other/controller",
                        "conditions": [{"type": "Accepted", "status": "True"}]});
                    match parents.contains(&theirs) {
                        true => parents.clear(),
                        false => parents.push(theirs),
                    }
                    route["status"] = json!({"parents": parents});
                    self.store(route);
                }
                format!("the status of {route}")
            }
        }
    }

    /// Writes statuses until both releases are at rest.
    fn settle(&mut self) {
        for _ in 0..40 {
            let due = self.releases.iter_mut().find_map(|release| {
                release.renew();
                let due = release.api.due.iter();
                due.filter(|(target, _)| !matches!(target, Target::Class(_)))
                    .find(|(_, wanted)| wanted.status.digest() != wanted.stamp.digest)
                    .map(|(target, wanted)| (target.clone(), wanted.clone()))
            });
            let Some((target, Wanted { status, stamp, .. })) = due.map(|(of, due)| (of, (*due).clone()))
            else {
                return;
            };
            let (kind, key) = match &target {
                Target::Route((_, key)) => ("TLSRoute", key),
                Target::Parent((kind, key)) => (kind.text(), key),
                Target::Class(_) => unreachable!("filtered"),
            };
            let mut object = self.objects[&key_of(&object(kind, &key.to_string(), 1, Value::Null))].clone();
            assert_eq!(object["metadata"]["uid"], *stamp.uid, "the object that was read");
            let before = &object["status"];
            object["status"] = match target {
                Target::Route(_) => status.of_route(GATEWAY_CONTROLLER, before, "now"),
                Target::Parent((ParentKind::Gateway, _)) => status.of_gateway(before, "now"),
                Target::Parent(_) | Target::Class(_) => status.of_listeners(before, "now"),
            };
            self.store(object);
        }
        panic!("the releases do not come to rest")
    }

    /// Asserts that the conditions of every Gateway and ListenerSet are those of the release that serves it, if one does, and that no
    /// object that none serves has conditions of a release.
    fn check_parents(&self, context: &dyn Fn() -> String) {
        for object in self.objects.values() {
            let Some(kind) = [ParentKind::Gateway, ParentKind::ListenerSet]
                .into_iter()
                .find(|kind| object["kind"] == kind.text())
            else {
                continue;
            };
            let text = |field: &str| object["metadata"][field].as_str().expect("a text").into();
            let id = (kind, ObjectKey { namespace: text("namespace"), name: text("name") });
            for release in &self.releases {
                let mark = mark_of_class(&release.spec.class);
                let is_served = release.api.parents.contains_key(&id);
                assert_eq!(accepted(object).starts_with(&mark), is_served, "{object:#}, {}", context());
            }
        }
    }

    /// Returns the entries of Isthmus that each route has, and those of others.
    fn entries(&self) -> (Vec<String>, Vec<String>) {
        let mut all = (Vec::new(), Vec::new());
        for route in self.objects.values().filter(|object| object["kind"] == "TLSRoute") {
            for entry in route["status"]["parents"].as_array().into_iter().flatten() {
                let text = format!("{} {entry}", route["metadata"]["name"]);
                if entry["controllerName"] == GATEWAY_CONTROLLER {
                    all.0.push(text)
                } else {
                    all.1.push(text)
                }
            }
        }
        all.0.sort();
        all
    }

    /// Returns the cluster with the same objects, without any status of routes, in which both releases have just started.
    fn anew(&self) -> Self {
        let mut anew = Self { objects: self.objects.clone(), releases: Vec::new(), version: self.version };
        anew.releases = ["isthmus", "internal"].map(World::of_class).into_iter().collect();
        for route in anew.objects.values_mut().filter(|object| object["kind"] == "TLSRoute") {
            route.as_object_mut().expect("an object").remove("status");
        }
        (0..2).for_each(|at| anew.restart(at));
        anew
    }
}

/// The message of a condition of another controller.
const THEIRS: &str = "theirs";

/// Returns the message of the condition `Accepted` of a Gateway or ListenerSet.
fn accepted(object: &Value) -> &str {
    let mut conditions = object["status"]["conditions"].as_array().into_iter().flatten();
    let found = conditions.find(|condition| condition["type"] == "Accepted");
    found.and_then(|condition| condition["message"].as_str()).unwrap_or_default()
}

#[test]
fn the_statuses_are_those_of_the_objects_as_they_are_now_in_every_sequence() {
    let (mut withdrawn, mut left, mut theirs) = (0, 0, 0);
    for seed in 0..60 {
        let (mut random, mut cluster) = (Random(seed), Cluster::new());
        let mut changes = Vec::new();
        for _ in 0..40 {
            let before = cluster.entries();
            changes.push(cluster.change(&mut random));
            let others = cluster.entries().1;
            let count = |cluster: &Cluster, text: &str| {
                cluster.objects.values().filter(|object| accepted(object).contains(text)).count()
            };
            let gone = count(&cluster, "no GatewayClass of");
            let is_theirs = |object: &&Value| accepted(object) == THEIRS;
            let foreign: Vec<String> = cluster.objects.values().filter(is_theirs).map(key_of).collect();
            cluster.settle();
            cluster.check_parents(&|| format!("seed {seed} after {changes:#?}"));
            left += count(&cluster, "no GatewayClass of").saturating_sub(gone);
            theirs += foreign.len();
            for key in foreign {
                let after = accepted(&cluster.objects[&key]);
                assert!(after == THEIRS || after.starts_with("GatewayClass "), "{after}: {key}, seed {seed}");
            }
            let mut anew = cluster.anew();
            anew.settle();
            let found = cluster.entries();
            assert_eq!(found.0, anew.entries().0, "seed {seed} after {changes:#?}");
            assert_eq!(found.1, others, "seed {seed}: entries of others after {changes:#?}");
            withdrawn += usize::from(found.0.len() < before.0.len());
        }
    }
    assert!(withdrawn > 50 && left > 50 && theirs > 50, "{withdrawn} {left} {theirs}");
}
