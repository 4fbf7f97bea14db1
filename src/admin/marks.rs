//! The objects that mark a service for export, or hide it from the gateway, as texts for the API.

use isthmus_registry::change::{Mark, MarkKind};
use isthmus_settings::export::MarkCondition;
use isthmus_snapshot::exports::is_met_by;
use isthmus_snapshot::service_view::ServiceView;

/// Returns the objects that set the mark that a rule requires, each with its cluster.
pub(super) fn marked_by(condition: &MarkCondition, service: &ServiceView) -> Vec<String> {
    objects(service, |mark| is_met_by(condition, std::slice::from_ref(mark)))
}

/// Returns the objects that hide a service from the gateway, each with its cluster.
pub(super) fn hidden_by(service: &ServiceView) -> Vec<String> {
    objects(service, |mark| mark.kind == MarkKind::Hidden)
}

/// Returns the objects of those marks of a service for which the condition is true, each with its cluster.
fn objects(service: &ServiceView, condition: impl Fn(&Mark) -> bool) -> Vec<String> {
    let marks = service.parts.iter().flat_map(|part| part.marks.iter().map(move |mark| (part, mark)));
    let marks = marks.filter(|(_, mark)| condition(mark));
    marks.map(|(part, mark)| format!("{} ({})", mark.key.object, part.origin.cluster)).collect()
}
