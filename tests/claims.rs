//! Placement claims over the wire, and what several routers rely on at an agent.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use contract::v1::{self, worker_agent_client::WorkerAgentClient};
use harness::{
    cluster::{Cluster, ClusterSettings, eventually, text_turn},
    envelope::{ENVELOPE, envelope_of},
};
use tonic::{Code, transport::Channel};

type Client = WorkerAgentClient<Channel>;

async fn worker() -> (Cluster, Client) {
    // Slow decode steps, so that a test can act while a turn runs.
    let slow = |settings: &mut ClusterSettings| settings.engine.core.decode_ms_per_step = 20.0;
    let cluster = Cluster::start_worker(slow).await.unwrap();
    let client = cluster.agent().control_client().await.unwrap();
    (cluster, client)
}

fn key(id: &str) -> Option<v1::SessionKey> {
    Some(v1::SessionKey { principal: "anonymous".into(), id: id.into() })
}

fn wants(agent: &str, generation: u64) -> v1::ClaimPlacementRequest {
    let agent_id = agent.to_owned();
    v1::ClaimPlacementRequest { key: vec![1; 16], agent_id, dp_rank: 0, generation, ttl_ms: 30_000 }
}

#[tokio::test]
async fn the_first_claim_holds_and_only_its_generation_replaces_it() {
    let (_cluster, mut client) = worker().await;
    let mut claim = async |request| client.claim_placement(request).await.unwrap().into_inner();
    let first = claim(wants("w0", 0)).await;
    assert!(first.granted && first.agent_id == "w0");
    let second = claim(wants("w1", 0)).await;
    assert_eq!(second, v1::PlacementClaim { granted: false, ..first.clone() });
    let moved = claim(wants("w1", first.generation)).await;
    assert!(moved.granted && moved.agent_id == "w1" && moved.generation > first.generation);
    let late = claim(wants("w2", first.generation)).await;
    assert_eq!(late, v1::PlacementClaim { granted: false, ..moved });
    let bad = v1::ClaimPlacementRequest { key: vec![1; 3], ..wants("w0", 0) };
    assert_eq!(client.claim_placement(bad).await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test]
async fn an_agent_says_which_of_two_opens_began_the_session_and_when() {
    let (_cluster, client) = worker().await;
    let open = async |id: &str| {
        let retention = v1::Retention::Pinned as i32;
        let request = v1::OpenSessionRequest { key: key(id), retention, ..Default::default() };
        client.clone().open_session(request).await.unwrap().into_inner()
    };
    let (one, other) = tokio::join!(open("s"), open("s"));
    assert_ne!(one.was_open, other.was_open, "one began it");
    assert_eq!(one.began_unix_ms, other.began_unix_ms);
    let now_ms = service::clock::unix_ns() / 1_000_000;
    assert!(now_ms.abs_diff(one.began_unix_ms) < 60_000, "{} at {now_ms}", one.began_unix_ms);
}

#[tokio::test]
async fn a_session_with_a_turn_is_not_closed_by_a_close_for_idle_ones() {
    let (cluster, mut client) = worker().await;
    let claim = serde_json::json!({"principal": "anonymous", "id": "s"});
    let headers = [(ENVELOPE, &*envelope_of(&claim))];
    let stream = cluster.stream("/generate", &headers, text_turn("hello", 500)).await;
    let request = v1::CloseSessionRequest { key: key("s"), only_if_idle: true };
    let refused = client.close_session(request.clone()).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    drop(stream);
    let closes = async || client.clone().close_session(request.clone()).await.is_ok();
    eventually("the close of the idle session", || async { closes().await.then_some(()) }).await;
}
