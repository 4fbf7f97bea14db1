//! Tests of the tree: positions, the types of the core schema, aliases, and text that is not YAML.

use std::path;

use proptest::prelude::*;

use super::*;

fn tree(text: &str) -> Result<Node, Vec<String>> {
    let mut problems = Problems::new();
    let file = problems.add_file(path::Path::new("t.yaml")).expect("a file");
    let tree = parse(Source { file, text, environment: Some(&|_| None) }, None, &mut problems);
    match tree.filter(|_| problems.is_empty()) {
        Some(tree) => Ok(tree),
        None => Err(problems.finish().0.iter().map(ToString::to_string).collect()),
    }
}

fn place(node: &Node) -> (u32, u32) {
    (node.position.line, node.position.column)
}

#[test]
fn control_characters_of_a_file_are_shown_as_escapes() {
    let problems = tree("{*\0\0\0$\"b_").expect_err("not YAML");
    assert!(problems[0].contains("*\\0\\0\\0$"), "{problems:?}");
    assert!(!problems.concat().contains(char::is_control), "{problems:?}");
}

#[test]
fn every_value_knows_its_place() {
    let tree =
        tree("# head\na: b\nc:\n  - d\n  - {e: \"f\"}\ng:\nh: |\n  text\né: \"ü\"\nlast: 1\n").expect("good");
    assert_eq!(place(&tree), (2, 1));
    assert_eq!(tree.get("a").map(place), Some((2, 4)));
    let items = tree.get("c").expect("a list").items();
    assert_eq!((place(&items[0]), place(&items[1])), ((4, 5), (5, 5)));
    assert_eq!(items[1].get("e").map(place), Some((5, 9)));
    assert_eq!(tree.get("g").map(place), Some((6, 1)), "nothing stands where its key does");
    assert_eq!(tree.get("h").and_then(Node::text), Some("text\n"));
    assert_eq!(tree.get("é").map(place), Some((9, 4)), "columns are characters");
}

#[test]
fn scalars_have_the_types_of_the_core_schema() {
    let type_of =
        |text: &str| match tree(&format!("a: {text}")).expect("good").get("a").map(|node| &node.value) {
            Some(Value::Scalar(scalar)) => Some(scalar.scalar_type()),
            _ => None,
        };
    for number in ["1", "-1", "+1.5", "1e3", ".5", "0x1F", "0o17", ".inf", "-.inf", ".nan", "1."] {
        assert_eq!(type_of(number), Some(ScalarType::Number), "{number}");
    }
    for text in [
        "'1'", "\"true\"", "yes", "off", "1.2.3.4", "10s", "inf", "nan", "!!str 1", "! 1", "0x", "::1",
        "|-\n  1",
    ] {
        assert_eq!(type_of(text), Some(ScalarType::Text), "{text}");
    }
    for truth in ["true", "False"] {
        assert_eq!(type_of(truth), Some(ScalarType::Boolean), "{truth}");
    }
    for nothing in ["", "~", "null", "Null"] {
        assert_eq!(type_of(nothing), None, "{nothing}");
    }
    assert_eq!(type_of("${X:-1}"), Some(ScalarType::Open));
}

#[test]
fn a_key_of_many_is_found_twice_too() {
    let mut text: String = (0..100).map(|number| format!("key{number}: x\n")).collect();
    text.push_str("key3: x\nkey99: y\n");
    let wanted = [
        "t.yaml:101:1: key3: the key \"key3\" is given twice; first at t.yaml:4:1",
        "t.yaml:102:1: key99: the key \"key99\" is given twice; first at t.yaml:100:1",
    ];
    assert_eq!(tree(&text).expect_err("bad"), wanted);
}

#[test]
fn a_byte_order_mark_and_carriage_returns_are_no_fault() {
    let tree = tree("\u{feff}a: b\r\nc: d\r\n").expect("good");
    assert_eq!(tree.get("c").and_then(Node::text), Some("d"));
}

#[test]
fn a_streamed_list_is_given_away() {
    let mut problems = Problems::new();
    let file = problems.add_file(path::Path::new("t.yaml")).expect("a file");
    let mut given = Vec::new();
    let mut item = |index: usize, node: Node, _: &mut Problems| given.push((index, node.to_string()));
    let stream = Stream { key: "list", item: &mut item };
    let text = "a: {list: [x]}\nlist: [b, {c: d}, [e]]\n";
    let tree = parse(Source { file, text, environment: None }, Some(stream), &mut problems).expect("good");
    assert!(tree.get("list").is_some_and(|list| list.items().is_empty()));
    assert_eq!(tree.get("a").and_then(|a| a.get("list")).map(|list| list.items().len()), Some(1));
    let given: Vec<_> = given.iter().map(|(index, text)| (*index, text.as_str())).collect();
    assert_eq!(given, [(0, "\"b\""), (1, "a map"), (2, "a list")]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn no_text_makes_it_panic(text in "[a-c:{}\\[\\]&*!|>'\"?%@,#$ \t\n0.-]{0,60}") {
        let _ = tree(&text);
    }
}
