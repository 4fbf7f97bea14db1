//! Kinds of objects of which this program writes its own (`own_objects`).

use std::fmt::Debug;

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Kind;
use crate::objects::Meta;
use crate::table::ObjectKey;

/// The label and its value by which a ServiceImport or Service is one that this program writes.
pub(crate) const MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "isthmus");

/// An object as the API server has it.
pub(crate) trait OwnObject: DeserializeOwned {
    /// The part of an object that this program writes.
    type Content: Clone + Debug + PartialEq;

    const KIND: Kind;
    /// The `kind` of the objects.
    const NAME: &'static str;

    fn metadata(&self) -> &Meta;

    /// Returns the content; `None` for an object of another program.
    fn content(&self) -> Option<Self::Content>;

    /// Returns a new object with this content, without its status.
    fn new_object(key: &ObjectKey, content: &Self::Content) -> Value;

    /// Returns the merge patch that gives the object this content, without its status; `None` if the object has it.
    fn patch(&self, wanted: &Self::Content) -> Option<Value>;

    /// Returns the merge patch of the status at a time (RFC 3339); `None` if the object has it.
    fn status_patch(&self, _wanted: &Self::Content, _now: &str) -> Option<Value> {
        None
    }

    /// Returns the object with which a new object is removed.
    fn owner(_key: &ObjectKey, _content: &Self::Content) -> Option<(Kind, ObjectKey)> {
        None
    }
}

/// The `kind` of ServiceImports.
pub(super) const IMPORT_KIND: &str = "ServiceImport";

/// Returns true if the ServiceImport of this name owns an object of its namespace.
pub(super) fn is_owned_by(object: &Meta, import: &str) -> bool {
    object.owner_references.iter().any(|owner| owner.kind == IMPORT_KIND && owner.name == import)
}

/// Returns the ServiceImport of this name that owns an object of its namespace.
pub(crate) fn owner_of(object: &ObjectKey, import: &str) -> (Kind, ObjectKey) {
    (Kind::ServiceImport, ObjectKey { namespace: object.namespace.clone(), name: import.into() })
}
