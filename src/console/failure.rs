//! The failures of commands, from which the exit code follows.

use std::io;

use crate::client::ClientError;

/// The reason why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The output was printed already.
    #[error("")]
    Reported,
    /// The output, which says that a config can be used, but not all that it names, was printed already.
    #[error("")]
    ReportedImpaired,
    /// The output, which says that the gateway cannot be reached, was printed already.
    #[error("")]
    ReportedUnreachable,
    /// The command has a negative result, or cannot do its work.
    #[error("{0}")]
    Wrong(String),
    /// etcd cannot be reached.
    #[error("{0}")]
    Unreachable(String),
    /// The admin API gave no answer, or a negative one.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The output could not be written.
    #[error("cannot write the output: {0}")]
    Output(#[from] io::Error),
}

impl Failure {
    /// Returns true if the admin API or etcd cannot be reached.
    pub const fn is_unreachable(&self) -> bool {
        matches!(
            self,
            Self::Client(ClientError::Unreachable { .. } | ClientError::Forbidden { .. })
                | Self::Unreachable(_)
                | Self::ReportedUnreachable
        )
    }
}
