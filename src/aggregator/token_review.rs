//! The result of the review of a token by an API server of Kubernetes.

/// The owner of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReviewedToken {
    /// The name of the user, such as `system:serviceaccount:NAMESPACE:ACCOUNT`.
    pub user: String,
    /// The node of the pod that the token is bound to; `None`: the server names none.
    pub node: Option<String>,
}

/// The reason why a token has no known owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReviewFault {
    /// The server does not accept the token, or it is not for the audience.
    Refused(String),
    /// The server does not accept the token, perhaps because of a passing fault of its own.
    Doubted(String),
    /// The server could not be asked, or has refused the question.
    Failed(String),
}
