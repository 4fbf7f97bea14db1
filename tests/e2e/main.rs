//! End-to-end tests: the real binary, real sockets, real peers.

#![allow(clippy::print_stderr, reason = "figures of a test are for who reads its output")]

#[path = "../support/mod.rs"]
mod support;

mod access_log;
mod admin_socket;
mod admission;
mod boundary;
mod checks;
mod commands;
mod contained;
mod cost;
mod dashboard;
mod distance;
mod dns;
mod documents;
mod endings;
mod endpoints;
mod etcd;
mod explain;
mod faults;
mod files;
mod hbone;
mod hbone_hostile;
mod hbone_life;
mod hello;
mod horizon;
mod horizon_envoy;
mod hostile;
mod identity;
mod interop;
mod kernel_memory;
mod kube_fake;
mod kube_records;
mod kube_rig;
mod kubernetes;
mod kubernetes_envoy;
mod kubernetes_exports;
mod kubernetes_gateways;
mod kubernetes_hostile;
mod lifecycle;
mod limits;
mod maintenance;
mod names;
mod orders;
mod own;
mod problems;
mod proto;
mod proxy_in;
mod proxy_out;
mod proxy_peers;
mod registries;
mod relay;
mod restarts;
mod standalone;
mod storms;
mod systemd;
mod top;
mod tracing;
mod transfers;
mod trust;
mod vanished;
mod windows;
mod xds;
mod xds_tls;
