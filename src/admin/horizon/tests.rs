//! The JSON of `docs/api.md, "Admin API"`, and the errors for wrong parameters.

use serde_json::{Value, json};

use super::*;
use crate::networks::{gateways, networks as networks_list};
use isthmus_model::endpoint::{Endpoint, Labels};
use isthmus_model::service::PortProtocol;
use isthmus_settings::network::Gateway;
use isthmus_snapshot::testing::{Mesh, endpoint, gateway, network, place, port, service, shard};

fn snapshot() -> Snapshot {
    let entrance = |host, weight| Gateway {
        cluster: ClusterId::new("west"),
        locality: place("us/w"),
        ..gateway(host, weight)
    };
    let tunnel = Gateway { sni_port: None, hbone_port: Some(15008), ..gateway("192.0.2.3", 1) };
    let west = network(
        "net-west",
        vec![entrance("192.0.2.1", 1), entrance("192.0.2.2", 2), entrance("gone.test", 1), tunnel],
    );
    let far = vec![endpoint("10.2.0.1", 1), Endpoint { health: Health::Draining, ..endpoint("10.2.0.2", 5) }];
    let near = Endpoint { locality: place("us/e"), health: Health::Unhealthy, ..endpoint("10.1.0.1", 1) };
    let ports = || vec![port(443, PortProtocol::Tls)];
    let two = vec![port(80, PortProtocol::Http), port(81, PortProtocol::Http)];
    let mut with_subset = service("cart.shop.mesh", ports(), far);
    let labels = Labels::from_iter([("version".into(), "1".into())]);
    with_subset.subsets = [("v1".into(), labels)].into();
    Mesh::new(
        vec![west],
        vec![
            shard("west", "net-west", vec![with_subset]),
            shard(
                "east",
                "net-east",
                vec![service("cart.shop.mesh", ports(), vec![near]), service("two.shop.mesh", two, vec![])],
            ),
        ],
    )
    .snapshot()
}

fn ask(parameters: &[(&str, &str)]) -> Result<Value, HorizonError> {
    let parameters = parameters.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    let inquiry = HorizonRequest::from_parameters(parameters).map_err(HorizonError::Invalid)?;
    let answer = horizon(&snapshot(), &Distances::default(), &inquiry)?;
    let value = match &answer {
        Answer::One(one) => serde_json::to_value(one),
        Answer::All(all) => serde_json::to_value(all),
    };
    Ok(value.expect("JSON"))
}

#[test]
fn an_answer_has_the_shape_of_the_specification() {
    let asked = [
        ("network", "net-east"),
        ("cluster", "east"),
        ("service", "Cart.shop.mesh."),
        ("tunnel", "sni"),
        ("families", "4,6"),
    ];
    let gateway = |address: &str, weight: u32, stands_for: f64| {
        json!({
            "address": address, "kind": "gateway", "network": "net-west", "cluster": "west", "locality": "us/w",
            "weight": weight, "standsFor": stands_for
        })
    };
    assert_eq!(
        ask(&asked),
        Ok(json!({
            "viewer": {"network": "net-east", "cluster": "east", "tunnel": "sni", "families": [4, 6]},
            "service": "cart.shop.mesh",
            "port": 443,
            "subset": "",
            "entries": [
                {
                    "address": "10.1.0.1:8080", "kind": "endpoint", "network": "net-east", "cluster": "east",
                    "locality": "us/e", "weight": 3, "standsFor": 1, "health": "unhealthy"
                },
                gateway("192.0.2.1:15443", 1, 0.333_333_333),
                gateway("192.0.2.2:15443", 2, 0.666_666_667),
            ],
            "missing": [{"network": "net-west", "cluster": "west", "weight": 5, "why": "unready"}],
        }))
    );
}

#[test]
fn other_viewers_are_told_apart() {
    let asked = [
        ("network", "net-east"),
        ("service", "cart.shop.mesh"),
        ("client", "grpc"),
        ("families", "6"),
        ("sees", "b,a"),
    ];
    let value = ask(&asked).expect("an answer");
    assert_eq!(
        value["viewer"],
        json!({
            "network": "net-east", "cluster": "", "tunnel": "sni", "families": [6], "client": "grpc", "sees": ["a", "b"]
        })
    );
    assert_eq!(value["entries"], json!([]));
    let whys: Vec<&Value> =
        value["missing"].as_array().expect("a list").iter().map(|one| &one["why"]).collect();
    assert_eq!(whys, ["not visible", "not visible"]);
}

#[test]
fn without_a_service_all_are_listed() {
    let ports = |asked: &[(&str, &str)]| {
        let value = ask(asked).expect("a list");
        let list = value.as_array().expect("a list").clone();
        list.iter()
            .map(|one| format!("{}:{}", one["service"].as_str().expect("a name"), one["port"]))
            .collect::<Vec<_>>()
    };
    assert_eq!(ports(&[]), ["cart.shop.mesh:443", "two.shop.mesh:80", "two.shop.mesh:81"]);
    assert_eq!(ports(&[("port", "81")]), ["two.shop.mesh:81"]);
    assert_eq!(ports(&[("subset", "V1")]), ["cart.shop.mesh:443"]);
}

#[test]
fn wrong_questions_are_told_from_unknown_things() {
    for (asked, text) in [
        (&[("netwrk", "a")][..], "unknown parameter \"netwrk\"; expected one of network, cluster"),
        (&[("netwrk", "")], "unknown parameter"),
        (&[("tunnel", "gre")], "\"gre\" is neither sni nor hbone"),
        (&[("families", "46")], "is not 4, 6 or 4,6"),
        (&[("client", "curl")], "neither envoy nor grpc"),
        (&[("port", "0")], "not a number from 1 to 65535"),
        (&[("port", "65536")], "not a number from 1 to 65535"),
        (&[("service", "a b")], "service: \"a b\": it has a character"),
        (&[("service", "two.shop.mesh")], "has several ports (80, 81); name one"),
    ] {
        let Err(HorizonError::Invalid(found)) = ask(asked) else { panic!("{asked:?}") };
        assert!(found.contains(text), "{found}");
    }
    for (asked, text) in [
        (&[("service", "card.shop.mesh")][..], "\"card.shop.mesh\" is known; similar names: cart.shop.mesh"),
        (&[("service", "nothing.like.it.test")], "no service"),
        (&[("service", "two.shop.mesh"), ("port", "82")], "no port 82; it has: 80, 81"),
        (&[("service", "cart.shop.mesh"), ("subset", "v2")], "no subset \"v2\"; it has: v1"),
        (&[("service", "two.shop.mesh"), ("port", "80"), ("subset", "v2")], "it has none"),
    ] {
        let Err(HorizonError::Unknown(found)) = ask(asked) else { panic!("{asked:?}") };
        assert!(found.contains(text), "{found}");
    }
}

#[test]
fn gateways_say_whether_they_are_of_use() {
    let value = serde_json::to_value(gateways(&snapshot(), &Default::default())).expect("JSON");
    assert_eq!(
        value[0],
        json!({
            "network": "net-west", "address": "192.0.2.1", "addresses": ["192.0.2.1"], "sni_port": 15443, "hbone_port": null,
            "cluster": "west", "locality": "us/w", "weight": 1, "usable": true, "why": null,
            "state": "", "probes": []
        })
    );
    let whys: Vec<&Value> = value.as_array().expect("a list").iter().map(|one| &one["why"]).collect();
    assert_eq!(
        whys,
        [
            &Value::Null,
            &Value::Null,
            &"the gateway's host name does not resolve".into(),
            // HBONE clients can use a gateway without an SNI port.
            &Value::Null,
        ]
    );
}

#[test]
fn networks_are_counted() {
    assert_eq!(
        serde_json::to_value(networks_list(
            &snapshot(),
            &Default::default(),
            &Default::default(),
            &Default::default()
        ))
        .expect("JSON"),
        json!([
            {"name": "net-east", "access": "gateway", "cidrs": [], "gateways": 0, "endpoints": 1, "ready_weight": 0,
             "gateways_up": 0, "distance": {"ring": 4, "source": "by locality: elsewhere"}},
            {"name": "net-west", "access": "gateway", "cidrs": [], "gateways": 4, "endpoints": 2, "ready_weight": 1,
             "gateways_up": 0, "distance": {"ring": 4, "source": "by locality: elsewhere"}},
        ])
    );
}
