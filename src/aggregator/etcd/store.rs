//! Writes orders to drain into a registry in etcd.

use super::client::{Connector, EtcdFault};
use super::keys::Keys;
use crate::spec::etcd::EtcdSpec;
use isthmus_model::drain::DrainTarget;
use isthmus_proto::etcdserverpb::request_op::Request;
use isthmus_proto::etcdserverpb::{DeleteRangeRequest, PutRequest, RequestOp, TxnRequest};
use isthmus_tasks::scope::Scope;

/// Puts the order to drain a target, or deletes it if there is no value. The error names the fault of each member.
pub(crate) async fn drain(
    etcd: &EtcdSpec,
    scope: &Scope,
    target: &DrainTarget,
    value: Option<String>,
) -> Result<(), String> {
    let key = Keys::new(etcd.prefix.clone()).drain(target).into_bytes();
    let request = match value {
        Some(value) => Request::RequestPut(PutRequest { key, value: value.into_bytes() }),
        None => Request::RequestDeleteRange(DeleteRangeRequest { key }),
    };
    let request = TxnRequest { success: vec![RequestOp { request: Some(request) }] };
    let mut connector = Connector::new(etcd.clone(), scope.clone());
    let faults = |all: Vec<_>| all.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    let mut client = connector.connect().await.map_err(faults)?;
    client.transaction(request).await.map(drop).map_err(|fault: EtcdFault| fault.to_string())
}
