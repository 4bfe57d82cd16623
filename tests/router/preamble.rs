//! Volatile preambles: the bodies that agents get, also when a turn is sent again, and the metric.

use std::sync::atomic::Ordering;

use http::{Method, StatusCode};
use router::config::{
    Config,
    tables::{PlacementTable, PreamblePolicy},
};

use crate::{
    agent::Agent,
    harness::{Router, config, wait_until},
};

const BODY: &str = "{ \"system\":[{\"type\":\"text\",\"text\":\"x-anthropic-billing-header: \
                    cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;\"}, 7],\n\"n\":1.50e0}\n";
const LEFT: &str = "{ \"system\":[ 7],\n\"n\":1.50e0}\n";

async fn send(router: &Router, session: &str) {
    let headers = [("x-claude-code-session-id", session)];
    let answer = router.call(Method::POST, "/v1/messages", &headers, BODY).await;
    assert_eq!(answer.status, StatusCode::OK);
}

#[tokio::test]
async fn an_agent_is_sent_the_body_without_its_preamble_and_so_is_the_next_one() {
    let (a, b) = (Agent::start("a"), Agent::start("b"));
    let router = Router::start(&[&a, &b]).await;
    a.inner.full.store(true, Ordering::Relaxed);
    for turn in 0..8 {
        send(&router, &format!("s{turn}")).await;
    }
    let received = b.turns();
    assert_eq!(received.len(), 8);
    for turn in received {
        assert_eq!(turn.body, LEFT);
        assert_eq!(turn.headers["content-length"], LEFT.len().to_string().as_str());
    }
    let metrics = router.metrics().await;
    assert!(metrics.contains("berth_router_preambles_removed_total{client=\"claude_code\"} 8\n"));
    assert!(metrics.contains("berth_router_retries_total{reason=\"refused\"}"), "none sent again");
}

#[tokio::test]
async fn a_router_that_keeps_preambles_sends_every_byte() {
    let a = Agent::start("a");
    let settings = Config {
        placement: PlacementTable { preamble: PreamblePolicy::Keep, ..PlacementTable::default() },
        ..config(&[&a])
    };
    let router = Router::start_with(settings).await;
    wait_until("the router is ready", async || router.is_ready().await).await;
    send(&router, "s").await;
    assert_eq!(a.turns().pop().unwrap().body, BODY);
    assert!(!router.metrics().await.contains("preambles_removed_total{"));
}
