//! Tests of the conversion of policies.

use super::*;

fn in_namespace(spec: &str, namespace: &str, annotations: &[(&str, &str)]) -> Option<proto::Authorization> {
    let spec: PolicySpec = serde_json::from_str(spec).expect("legal");
    let annotations = annotations.iter().map(|(key, text)| ((*key).into(), (*text).into())).collect();
    let metadata = Meta { name: "p".into(), namespace: namespace.into(), annotations, ..Meta::default() };
    let message = converted(&spec, &metadata, "istio-system")?;
    Some(proto::Authorization::decode(&*message).expect("a message"))
}

fn of(spec: &str) -> Option<proto::Authorization> {
    in_namespace(spec, "shop", &[])
}

#[test]
fn the_scope_follows_from_the_selector_and_the_namespace() {
    let scope =
        |text: &str, namespace: &str| in_namespace(text, namespace, &[]).expect("for ztunnels").scope();
    assert_eq!(scope("{}", "shop"), proto::Scope::Namespace);
    assert_eq!(scope("{}", "istio-system"), proto::Scope::Global);
    let selected = r#"{"selector":{"matchLabels":{"app":"a"}}}"#;
    assert_eq!(scope(selected, "shop"), proto::Scope::WorkloadSelector);
    assert_eq!(scope(selected, "istio-system"), proto::Scope::WorkloadSelector);
}

#[test]
fn policies_for_waypoints_and_other_actions_are_left_out() {
    for other in [
        r#"{"targetRefs":[{"kind":"Gateway","name":"w"}]}"#,
        r#"{"targetRef":{"kind":"Service","name":"a"}}"#,
        r#"{"action":"AUDIT"}"#,
        r#"{"action":"CUSTOM","provider":{"name":"x"}}"#,
    ] {
        assert_eq!(of(other), None, "{other}");
    }
    let allow = of("{}").expect("for ztunnels");
    assert_eq!((allow.action(), allow.rules.len()), (proto::Action::Allow, 0), "it admits nobody");
}

#[test]
fn a_dry_run_policy_is_marked_as_one() {
    let is_dry_run = |annotations: &[(&str, &str)]| {
        let deny = r#"{"action":"DENY","rules":[{}]}"#;
        let policy = in_namespace(deny, "shop", annotations).expect("for ztunnels");
        assert_eq!((policy.action(), policy.rules.len()), (proto::Action::Deny, 1));
        policy.dry_run
    };
    // Istio reads the value as Go does.
    for (value, expected) in
        [("true", true), ("True", true), ("1", true), ("false", false), ("", false), ("yes", false)]
    {
        assert_eq!(is_dry_run(&[("istio.io/dry-run", value)]), expected, "{value:?}");
    }
    assert!(!is_dry_run(&[]) && !is_dry_run(&[("dry-run", "true")]));
}

#[test]
fn each_part_of_a_rule_is_a_clause() {
    let policy = of(r#"{"action":"DENY","rules":[{
        "from":[{"source":{"principals":["*","td/ns/a/*","*/sa/b","td/ns/a/sa/c"],"notNamespaces":["x"]}},
                {"source":{"ipBlocks":["10.0.0.0/8","2001:db8::1"],"serviceAccounts":["a","other/b"]}}],
        "to":[{"operation":{"ports":["80","443"],"notPorts":["8080"]}}],
        "when":[{"key":"destination.ip","values":["10.1.2.3"]},{"key":"source.principal","notValues":["y"]}]}]}"#)
    .expect("for ztunnels");
    let [rule] = &policy.rules[..] else { panic!("{policy:?}") };
    let [to, from, by_ip, by_principal] = &rule.clauses[..] else { panic!("{rule:?}") };
    assert_eq!(to.matches[0].destination_ports, [80, 443]);
    assert_eq!(to.matches[0].not_destination_ports, [8080]);
    let kinds: Vec<_> =
        from.matches[0].principals.iter().map(|one| one.match_type.clone().expect("one")).collect();
    let expected = [
        MatchType::Presence(()),
        MatchType::Prefix("td/ns/a/".into()),
        MatchType::Suffix("/sa/b".into()),
        MatchType::Exact("td/ns/a/sa/c".into()),
    ];
    assert_eq!(kinds, expected);
    assert_eq!(from.matches[0].not_namespaces.len(), 1);
    let blocks: Vec<_> =
        from.matches[1].source_ips.iter().map(|one| (one.address.len(), one.length)).collect();
    assert_eq!(blocks, [(4, 8), (16, 128)]);
    let accounts = from.matches[1].service_accounts.iter();
    let accounts: Vec<_> = accounts.map(|one| format!("{}/{}", one.namespace, one.service_account)).collect();
    assert_eq!(accounts, ["shop/a", "other/b"]);
    assert_eq!(by_ip.matches[0].destination_ips[0].address, [10, 1, 2, 3]);
    assert_eq!(by_principal.matches[0].not_principals.len(), 1);
}

#[test]
fn a_condition_that_ztunnels_cannot_judge_never_admits_more() {
    let rule = |condition: &str, action: &str| {
        let policy =
            of(&format!(r#"{{"action":"{action}","rules":[{{{condition}}}]}}"#)).expect("for ztunnels");
        policy.rules.first().map(|rule| rule.clauses.len())
    };
    for (condition, clauses) in [
        (r#""to":[{"operation":{"methods":["GET"],"ports":["80"]}}]"#, 1),
        (r#""to":[{"operation":{"somethingNew":["x"]}}]"#, 1),
        (r#""from":[{"source":{"requestPrincipals":["*"]}}]"#, 1),
        (r#""when":[{"key":"request.headers[x]","values":["y"]}]"#, 1),
        (r#""when":[{"key":"request.headers[x]","notValues":["y"]}]"#, 1),
        (r#""to":[{"operation":{"ports":["80","http"]}}]"#, 1),
        (r#""from":[{"source":{"ipBlocks":["10.0.0"]}}]"#, 1),
    ] {
        assert_eq!(rule(condition, "ALLOW"), None, "{condition}");
        assert_eq!(rule(condition, "DENY"), Some(clauses), "{condition}");
    }
    assert_eq!(rule("", "ALLOW"), Some(0), "a rule without conditions admits everyone");
    assert_eq!(
        rule(r#""to":[{"operation":{"methods":[]}}]"#, "ALLOW"),
        Some(1),
        "an empty list is no condition"
    );
}

#[test]
fn ports_that_differ_from_the_mode_get_a_policy() {
    use MutualTls::{Disable, Permissive, Strict, Unset};
    let of = |mode, ports: &[(u16, MutualTls)]| {
        let ports = ports.iter().copied().collect();
        let message = of_ports("p", "shop", mode, &ports)?;
        let policy = proto::Authorization::decode(&*message).expect("a message");
        assert_eq!(
            (policy.name.as_str(), policy.action()),
            ("converted_peer_authentication_p", proto::Action::Deny)
        );
        let one = policy.rules[0].clauses[0].matches[0].clone();
        assert_eq!(one.not_principals[0].match_type, Some(MatchType::Presence(())));
        Some((one.destination_ports, one.not_destination_ports))
    };
    assert_eq!(of(Strict, &[(80, Permissive), (81, Strict), (82, Unset)]), Some((vec![], vec![80])));
    assert_eq!(of(Permissive, &[(80, Permissive), (81, Strict), (82, Unset)]), Some((vec![81], vec![])));
    assert_eq!(of(Unset, &[(80, Unset)]), None);
    assert_eq!(of(Strict, &[(80, Strict)]), None);
    assert_eq!(of(Strict, &[(80, Disable)]), Some((vec![], vec![80])));
    assert_eq!(MutualTls::read("DISABLE"), Disable);
    assert_eq!(MutualTls::read("SOMETHING_NEW"), Strict);
}
