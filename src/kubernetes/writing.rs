//! The result of writing to the API server, for the report on a registry.

use http::StatusCode;

use super::client::Fault;
use isthmus_snapshot::change::Report;

/// What a task writes.
#[derive(Debug)]
pub(super) struct Duty {
    /// The subject, such as `conditions of ServiceExports`.
    pub(super) subject: &'static str,
    /// The value of the chart that grants the right.
    pub(super) grant: &'static str,
}

/// The result of the last attempt to write.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Writing {
    /// Everything was written, or nothing had to be.
    #[default]
    Works,
    /// The API server forbids it. What is written is a service to the owners of the objects, and nothing else depends on it, so an
    /// operator may choose not to grant this right.
    Forbidden(String),
    /// The attempt failed for another reason, which is a problem of the registry.
    Fails(String),
}

impl Writing {
    pub(super) fn of(fault: &Fault, duty: &Duty) -> Self {
        let Duty { subject, grant } = duty;
        match fault.status() {
            Some(StatusCode::FORBIDDEN) => {
                Self::Forbidden(format!("not written: {fault}; the chart grants the right with {grant}"))
            }
            _ => Self::Fails(format!("cannot write the {subject}: {fault}")),
        }
    }

    /// Adds this to the report on how a registry is read. Only a failure is a problem.
    pub(super) fn describe(&self, duty: &Duty, report: &mut Report) {
        match self {
            Self::Works => {}
            Self::Forbidden(why) => report.facts.push((duty.subject, why.clone())),
            Self::Fails(why) => report.problems.push(why.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_right_to_write_that_was_not_granted_is_a_fact_and_every_other_failure_a_problem() {
        let duty = Duty { subject: "status", grant: "a.value" };
        let reported = |status| {
            let mut report = Report::default();
            let fault = Fault::Refused { status, message: "no".into(), retry_after: None };
            Writing::of(&fault, &duty).describe(&duty, &mut report);
            (report.facts.len(), report.problems.len())
        };
        assert_eq!(reported(StatusCode::FORBIDDEN), (1, 0));
        assert_eq!(reported(StatusCode::INTERNAL_SERVER_ERROR), (0, 1));
    }
}
