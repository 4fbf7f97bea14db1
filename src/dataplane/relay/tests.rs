//! Tests of relays on a paused clock.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::advance;

use crate::endpoint_state::{EndpointState, State};
use crate::testing::{Relayed, Rig, on_paused_clock};
use isthmus_model::reason::Reason;
use isthmus_model::record::ConnectionProtocol;
use isthmus_snapshot::candidates::EndpointKey;

fn state(rig: &Rig, one: &Relayed) -> EndpointState {
    let address = one.endpoint.local_addr().expect("connected");
    let key = EndpointKey { group: "web.test".into(), address };
    rig.core.shared.upstreams.state(&key).expect("it was dialled")
}

/// Has the endpoint send these bytes, and the client receive them.
async fn send(one: &mut Relayed, bytes: &[u8]) {
    one.endpoint.write_all(bytes).await.expect("sent");
    let mut received = vec![0; bytes.len()];
    one.client.read_exact(&mut received).await.expect("relayed");
    assert_eq!(received, bytes);
}

#[test]
fn an_endpoint_that_stops_in_the_middle_of_its_server_hello_is_silent_until_it_goes_on() {
    on_paused_clock(async |rig| {
        let mut one = rig.relay(ConnectionProtocol::Sni).await;
        send(&mut one, &[22, 3, 3, 0, 100, 2]).await;
        advance(Duration::from_secs(5)).await;
        assert_eq!(state(&rig, &one).state(), State::Silent);
        send(&mut one, &[0; 98]).await;
        assert_eq!(state(&rig, &one).state(), State::Silent, "one byte is missing");
        send(&mut one, &[0; 9]).await;
        assert_eq!(state(&rig, &one).state(), State::Healthy);
    });
}

#[test]
fn an_endpoint_that_ends_in_the_middle_of_its_server_hello_has_failed() {
    for (rest, reason) in [(&[0; 98][..], Reason::EndpointClosed), (&[0; 99], Reason::Ok)] {
        on_paused_clock(async |rig| {
            let mut one = rig.relay(ConnectionProtocol::Sni).await;
            send(&mut one, &[22, 3, 3, 0, 100, 2]).await;
            send(&mut one, rest).await;
            one.endpoint.shutdown().await.expect("shut down");
            assert_eq!(one.client.read(&mut [0]).await.expect("passed on"), 0);
            one.client.shutdown().await.expect("shut down");
            assert_eq!(one.ended.await.expect("it ends"), reason);
        });
    }
}
