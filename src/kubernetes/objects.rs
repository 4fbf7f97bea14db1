//! The fields that the objects of all kinds have in common, and the lists and watch lines that carry them. Each kind (`kinds`) reads a few
//! fields more. Everything may be absent or null, and unknown fields are skipped: an API server of another version, or a
//! controller with a fault, must not make a whole list unreadable.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use isthmus_model::address::canonical_ip;

/// The largest number of items of one page. A page with more is refused.
const ITEMS_MAX: usize = 250_000;

/// The largest number of values of one object. An empty value takes up to a hundred times its bytes in memory. An object of
/// 1.5 MiB, the most that an API server stores by default, has more only if its values have less than 8 bytes each.
pub(super) const VALUES_MAX: usize = 200_000;

/// Labels or annotations.
pub(super) type Texts = BTreeMap<String, String>;

/// Deserializes null as the default value.
pub(super) fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    from: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// Defines structs of which every field may be absent or null.
macro_rules! objects {
    ($($(#[$attribute:meta])* $name:ident { $($(#[$of_field:meta])* $field:ident: $kind:ty,)* })*) => {
        $($(#[$attribute])*
        #[derive(Debug, Default, serde::Deserialize)]
        #[serde(default, rename_all = "camelCase")]
        pub(crate) struct $name {
            $($(#[$of_field])*
            #[serde(deserialize_with = "crate::objects::or_default")]
            pub(crate) $field: $kind,)*
        })*
    };
}
pub(super) use objects;

objects! {
    /// `ObjectMeta`.
    Meta {
        name: String,
        namespace: String,
        uid: String,
        generation: i64,
        resource_version: String,
        labels: Texts,
        annotations: Texts,
        creation_timestamp: String,
        deletion_timestamp: String,
        generate_name: String,
        owner_references: Vec<OwnerReference>,
    }
    OwnerReference { kind: String, name: String, controller: bool, }
    /// An object whose other fields are not read.
    Bare { metadata: Meta, }
    /// A port of a Service or EndpointSlice.
    Port {
        name: String,
        port: i64,
        protocol: String,
        app_protocol: String,
        target_port: IntOrText,
        node_port: i64,
    }
    /// An address of a Node or Gateway.
    TypedAddress {
        #[serde(rename = "type")]
        kind: String,
        address: String,
        value: String,
    }
    /// `Status`: the response of an API server in place of an object.
    Status { code: i64, reason: String, message: String, details: StatusDetails, }
    StatusDetails { retry_after_seconds: i64, }
    /// The metadata of a list.
    ListMeta {
        resource_version: String,
        #[serde(rename = "continue")]
        token: String,
    }
}

/// Parses an IP address.
pub(super) fn ip(text: &str) -> Option<IpAddr> {
    text.parse().ok().map(canonical_ip)
}

/// Returns a port number; `None` if no port can have it.
pub(super) fn port(number: i64) -> Option<u16> {
    u16::try_from(number).ok().filter(|number| *number > 0)
}

/// Returns true if the text of a label or annotation is true for Istio, which reads the forms that Go's `strconv.ParseBool` does.
pub(super) fn is_true(text: &str) -> bool {
    matches!(text, "1" | "t" | "T" | "true" | "True" | "TRUE")
}

/// `IntOrString`.
#[derive(Debug, Default, Deserialize)]
#[serde(untagged)]
pub(super) enum IntOrText {
    Number(i64),
    /// The name of a pod's port.
    Text(String),
    #[default]
    Absent,
}

/// One page of a list. Its items are read one by one, so that an item with mistakes does not affect the others.
#[derive(Deserialize)]
pub(super) struct List<'a> {
    #[serde(default)]
    pub(super) metadata: ListMeta,
    #[serde(borrow, default)]
    pub(super) items: Items<'a>,
}

/// The items of a page, at most [`ITEMS_MAX`]; null: none.
#[derive(Default)]
pub(super) struct Items<'a>(pub(super) Vec<&'a RawValue>);

impl<'de: 'a, 'a> Deserialize<'de> for Items<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct All;

        impl<'de> Visitor<'de> for All {
            type Value = Items<'de>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a list of items")
            }

            fn visit_unit<E>(self) -> Result<Items<'de>, E> {
                Ok(Items::default())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Items<'de>, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = from.next_element()? {
                    if items.len() == ITEMS_MAX {
                        return Err(A::Error::custom(format!("more than {ITEMS_MAX} items")));
                    }
                    items.push(item);
                }
                Ok(Items(items))
            }
        }

        from.deserialize_any(All)
    }
}

/// Returns true if a JSON text has more than [`VALUES_MAX`] values: entries of lists and maps, beginnings of lists and maps.
pub(super) fn has_too_many_values(text: &str) -> bool {
    // Each value has a byte of its own, so most texts need not be read.
    if text.len() <= VALUES_MAX {
        return false;
    }
    let (mut values, mut is_text, mut is_escaped) = (1, false, false);
    for byte in text.bytes() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b'"' => is_text = !is_text,
            b',' | b'[' | b'{' if !is_text => values += 1,
            _ => {}
        }
    }
    values > VALUES_MAX
}

/// A text; empty if the value has another type.
#[derive(Default)]
struct Loose(String);

impl<'de> Deserialize<'de> for Loose {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        // An untagged enum would hold all values of a list to try its variants.
        let raw = <&RawValue>::deserialize(from)?;
        Ok(Self(serde_json::from_str(raw.get()).unwrap_or_default()))
    }
}

impl Meta {
    /// Reads the fields that identify an object, whatever mistakes its other fields have.
    pub(super) fn lenient(raw: &RawValue) -> Self {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct LooseObject {
            metadata: LooseMeta,
        }

        #[derive(Default, Deserialize)]
        #[serde(default, rename_all = "camelCase")]
        struct LooseMeta {
            name: Loose,
            namespace: Loose,
            uid: Loose,
            resource_version: Loose,
        }

        // The labels may be the values of which an object has too many.
        if !has_too_many_values(raw.get())
            && let Ok(Bare { metadata }) = serde_json::from_str(raw.get())
        {
            return metadata;
        }
        let LooseObject { metadata } = serde_json::from_str(raw.get()).unwrap_or_default();
        Self {
            name: metadata.name.0,
            namespace: metadata.namespace.0,
            uid: metadata.uid.0,
            resource_version: metadata.resource_version.0,
            ..Self::default()
        }
    }

    /// Returns the time of creation as API servers write it, `2026-01-31T23:59:59Z`; empty for any other text.
    pub(super) fn created(&self) -> &str {
        let text = self.creation_timestamp.as_str();
        let is_so = text.len() == 20
            && text.bytes().zip(b"0000-00-00T00:00:00Z").all(|(found, form)| match form {
                b'0' => found.is_ascii_digit(),
                _ => found == *form,
            });
        if is_so { text } else { "" }
    }

    /// Returns the first field that is missing here although every object of an API server has it.
    pub(super) fn lack(&self) -> Option<&'static str> {
        let fields = [("metadata.name", &self.name), ("metadata.resourceVersion", &self.resource_version)];
        fields.iter().find(|(_, text)| text.is_empty()).map(|(name, _)| *name)
    }
}

/// One line of a watch.
#[derive(Deserialize)]
pub(super) struct WatchLine<'a> {
    #[serde(rename = "type")]
    pub(super) kind: &'a str,
    #[serde(borrow)]
    pub(super) object: &'a RawValue,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_of_a_list_are_not_read_with_it() {
        let page = r#"{"metadata":{"resourceVersion":"7","continue":"x"},"items":[{"metadata":7},{"metadata":{"name":"a"}}]}"#;
        let list: List<'_> = serde_json::from_str(page).expect("a list");
        assert_eq!((list.metadata.resource_version.as_str(), list.metadata.token.as_str()), ("7", "x"));
        let Items(items) = list.items;
        assert!(serde_json::from_str::<Bare>(items[0].get()).is_err());
        assert_eq!(serde_json::from_str::<Bare>(items[1].get()).expect("legal").metadata.name, "a");
        for none in [r#"{"items":null}"#, "{}"] {
            assert!(serde_json::from_str::<List<'_>>(none).expect("a list").items.0.is_empty());
        }
        let many = format!(r#"{{"items":[{}0]}}"#, "0,".repeat(ITEMS_MAX));
        assert!(serde_json::from_str::<List<'_>>(&many).is_err());
    }

    #[test]
    fn values_are_counted_outside_of_texts_and_deep_ones_are_skipped() {
        let text = r#"\",[{"#.repeat(VALUES_MAX);
        assert!(!has_too_many_values(&format!(r#"{{"a":"{text}"}}"#)));
        let list =
            |count: usize| format!(r#"{{"metadata":{{"ownerReferences":[{}{{}}]}}}}"#, "{},".repeat(count));
        // Two objects with three beginnings, and a list whose entries are two values each but the last one.
        assert!(!has_too_many_values(&list(VALUES_MAX / 2 - 3)));
        assert!(has_too_many_values(&list(VALUES_MAX / 2 - 2)));
        let deep = |before: &str| format!(r#"{{{before}{}{}}}"#, "[".repeat(1 << 20), "]".repeat(1 << 20));
        assert!(serde_json::from_str::<Bare>(&deep(r#""x":"#)).is_ok());
        assert!(serde_json::from_str::<Bare>(&deep(r#""metadata":{"name":"#)).is_err());
    }

    #[test]
    fn times_are_taken_in_the_form_of_the_api_alone() {
        let created =
            |text: &str| Meta { creation_timestamp: text.into(), ..Meta::default() }.created().to_owned();
        assert_eq!(created("2026-01-31T23:59:59Z"), "2026-01-31T23:59:59Z");
        let long = "1".repeat(1 << 20);
        for bad in ["", "0", "2026-01-31T23:59:59.1Z", "2026-01-31 23:59:59Z", "-026-01-31T23:59:59Z", &long]
        {
            assert_eq!(created(bad), "", "{bad:.30}");
        }
    }

    #[test]
    fn an_object_with_mistakes_is_known_by_what_is_right_of_its_metadata() {
        let raw = |text: &str| RawValue::from_string(text.to_owned()).expect("JSON");
        let read = |text: &str| Meta::lenient(&raw(text));
        let labels = read(
            r#"{"metadata":{"name":"a","namespace":"b","uid":7,"labels":{"x":[]},"resourceVersion":"3"}}"#,
        );
        assert_eq!((&*labels.name, &*labels.namespace, &*labels.uid), ("a", "b", ""));
        assert_eq!((&*labels.resource_version, labels.lack()), ("3", None));
        assert_eq!(read(r#"{"metadata":{"name":"a"},"spec":[]}"#).lack(), Some("metadata.resourceVersion"));
        for nothing in ["7", "[]", "{}", r#"{"metadata":7}"#, r#"{"metadata":{"name":[{}],"labels":7}}"#] {
            assert_eq!(read(nothing).lack(), Some("metadata.name"), "{nothing}");
        }
        let many = "{},".repeat(VALUES_MAX);
        let large = read(&format!(
            r#"{{"metadata":{{"name":"a","namespace":"b","labels":[{many}7],"uid":[{many}7],"resourceVersion":"3"}}}}"#
        ));
        assert_eq!((&*large.name, &*large.namespace, &*large.uid, large.lack()), ("a", "b", "", None));
    }
}
