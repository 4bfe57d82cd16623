//! Tests of what the router knows about resident blocks, and how placement uses it.

use std::sync::atomic::Ordering;

use blocks::{
    block::{BlockHash, BlockTokens, Chain, Scheme, Tier},
    kv::Change,
};
use serde_json::{Value, value::RawValue};

use crate::{
    agent::Agent,
    harness::{Answer, Router, wait_until},
    models,
};

fn block_tokens() -> BlockTokens {
    BlockTokens::for_page(1).expect("pages of one token have blocks")
}

fn hashes(tokens: &[u32]) -> Vec<BlockHash> {
    let (mut chain, mut hashes) = (Chain::new(&Scheme::plain(block_tokens())), vec![]);
    chain.push(tokens, &mut hashes);
    hashes
}

fn has(tokens: &[u32]) -> Change {
    Change::Stored { tier: Tier::Device, parent: None, blocks: hashes(tokens) }
}

fn reset() -> Change {
    Change::Reset { block_tokens: block_tokens() }
}

/// Returns what the router knows about one agent's blocks.
async fn kv(router: &Router, name: &str) -> Value {
    let all = router.call(http::Method::GET, "/v1/workers", &[], "").await.json();
    let workers = all["workers"].as_array().expect("a list of workers");
    let its = workers.iter().find(|worker| worker["agent"] == name);
    its.map_or(Value::Null, |worker| worker["kv"].clone())
}

async fn until_kv(router: &Router, name: &str, state: &str, blocks: u64) {
    wait_until(&format!("{name} is {state} with {blocks} blocks"), async || {
        let kv = kv(router, name).await;
        kv["state"] == state && kv["resident_blocks"] == blocks
    })
    .await;
}

#[tokio::test]
async fn blocks_are_known_as_their_agent_says() {
    let (a, b) = (Agent::start("a"), Agent::start("b"));
    let tokens: Vec<u32> = (0..64 * 20).collect();
    a.report_kv([reset(), has(&tokens), Change::Complete]);
    let router = Router::start(&[&a, &b]).await;
    until_kv(&router, "a", "live", 20).await;
    wait_until("b has reported why its blocks are unknown", async || {
        let why = kv(&router, "b").await["reason"].to_string();
        why.contains("publishes no KV events")
    })
    .await;
    until_kv(&router, "b", "unknown", 0).await;
    a.report_kv([Change::Removed { tier: Tier::Device, blocks: hashes(&tokens)[15..].to_vec() }]);
    until_kv(&router, "a", "live", 15).await;
    // A second snapshot replaces the first when it is complete.
    a.report_kv([reset(), has(&tokens[..64 * 3])]);
    until_kv(&router, "a", "snapshot", 15).await;
    a.report_kv([Change::Complete]);
    until_kv(&router, "a", "live", 3).await;
    let metrics = router.metrics().await;
    assert!(metrics.contains("berth_router_overlap_workers{state=\"live\"} 1"), "{metrics}");
    a.report_kv([Change::Unknown { why: "events were lost".to_owned() }]);
    until_kv(&router, "a", "unknown", 0).await;
}

#[tokio::test]
async fn what_an_agent_said_is_forgotten_when_it_can_not_be_asked() {
    let a = Agent::start("a");
    let tokens: Vec<u32> = (0..64 * 4).collect();
    a.report_kv([reset(), has(&tokens), Change::Complete]);
    let router = Router::start(&[&a]).await;
    until_kv(&router, "a", "live", 4).await;
    a.end_kv();
    until_kv(&router, "a", "unknown", 0).await;
    a.report_kv([reset(), has(&tokens[..128]), Change::Complete]);
    until_kv(&router, "a", "live", 2).await;
}

/// Sends a turn whose prompt is these ids.
async fn generate(router: &Router, tokens: &[u32], headers: &[(&str, &str)]) -> Answer {
    let body = serde_json::json!({ "prompt": tokens }).to_string();
    router.call(http::Method::POST, "/v1/completions", headers, body).await
}

fn worker(answer: &Answer) -> &str {
    answer.header("x-berth-worker")
}

async fn placed(router: &Router, answer: &Answer) -> Value {
    let path = format!("/v1/placements/{}", answer.header("x-berth-turn"));
    router.call(http::Method::GET, &path, &[], "").await.json()["placements"][0].clone()
}

fn prompt(of: u32) -> Vec<u32> {
    (0..900).map(|token| token * 7 + of).collect()
}

#[tokio::test]
async fn a_turn_goes_where_its_blocks_are_told_to_be() {
    let (a, b, c) = (Agent::start("a"), Agent::start("b"), Agent::start("c"));
    for (of, agent) in (0..).zip([&a, &b, &c]) {
        agent.report_kv([reset(), has(&prompt(of)), Change::Complete]);
    }
    let router = Router::start(&[&a, &b, &c]).await;
    for name in ["a", "b", "c"] {
        until_kv(&router, name, "live", 14).await;
    }
    for (of, name) in (0..).zip(["a/0", "b/0", "c/0"]) {
        let id = format!("s{of}");
        let turn = generate(&router, &prompt(of), &[("x-berth-session-id", &id)]).await;
        assert_eq!((worker(&turn), turn.header("x-berth-placement")), (name, "least_cost"));
        let why = placed(&router, &turn).await;
        assert_eq!(why["uncached_tokens"], 900 - 14 * 64, "{why}");
        let compared = why["compared"].as_array().expect("workers were compared");
        let resident =
            |one: &Value| (one["worker"] == name, one["resident_tokens"].as_u64().unwrap_or(0));
        let resident: Vec<_> = compared.iter().map(resident).collect();
        assert_eq!(resident, [(true, 896), (false, 0), (false, 0)], "{why}");
    }
}

#[tokio::test]
async fn a_prompt_s_blocks_are_known_under_each_name_of_its_model() {
    let (a, b) = (Agent::start("a"), Agent::start("b"));
    for (of, agent) in (0..).zip([&a, &b]) {
        agent.report_kv([reset(), has(&prompt(of)), Change::Complete]);
    }
    let router = models::router(&[&a, &b], &[("claude-*", "m"), ("tag:1", "m")], "m").await;
    for name in ["a", "b"] {
        until_kv(&router, name, "live", 14).await;
    }
    for model in ["m", "claude-x", "tag:1", "unknown", "un:known"] {
        for (of, name) in (0..).zip(["a/0", "b/0"]) {
            let body = serde_json::json!({ "model": model, "prompt": prompt(of) }).to_string();
            let turn = router.call(http::Method::POST, "/v1/completions", &[], body).await;
            let why = placed(&router, &turn).await;
            assert_eq!(why["uncached_tokens"], 900 - 14 * 64, "{model}: {why}");
            assert_eq!(worker(&turn), name, "{model}: {why}");
        }
    }
}

#[tokio::test]
async fn where_agents_say_nothing_a_turn_goes_where_its_prompt_went_before() {
    let (a, b) = (Agent::start("a"), Agent::start("b"));
    let router = Router::start(&[&a, &b]).await;
    let mut homes = vec![];
    for of in 0..4 {
        homes.push(worker(&generate(&router, &prompt(of), &[]).await).to_owned());
    }
    // Prompts given as ids are learned by their ids, and messages by their text.
    let chat = |system: &str| {
        let text = system.repeat(200);
        format!(r#"{{"messages":[{{"role":"system","content":"{text}"}}]}}"#)
    };
    let (one, two) =
        (router.chat(&[], &chat("Pilot. ")).await, router.chat(&[], &chat("Tug. ")).await);
    for _ in 0..3 {
        for (of, home) in (0..).zip(&homes) {
            assert_eq!(worker(&generate(&router, &prompt(of), &[]).await), home);
        }
        assert_eq!(worker(&router.chat(&[], &chat("Pilot. ")).await), worker(&one));
        assert_eq!(worker(&router.chat(&[], &chat("Tug. ")).await), worker(&two));
    }
}

/// A request, and the token ids that SGLang makes of it.
#[derive(serde::Deserialize)]
struct Case<'a> {
    case: String,
    #[serde(borrow)]
    body: &'a RawValue,
    ids: Vec<u32>,
}

/// Returns a recorded chat for the model that the agents have. The body is kept byte for byte:
/// sorting its members would change the prompt.
fn sglang_case(name: &str) -> (String, Vec<u32>) {
    #[derive(serde::Deserialize)]
    struct Truth<'a> {
        #[serde(borrow)]
        cases: Vec<Case<'a>>,
    }
    let truth = include_str!("../data/prompts.json");
    let truth: Truth<'_> = serde_json::from_str(truth).expect("the recorded cases are JSON");
    let case = truth.cases.into_iter().find(|case| case.case == name);
    let case = case.expect("there is a case of that name");
    (case.body.get().to_owned(), case.ids)
}

#[tokio::test]
async fn a_chat_goes_where_its_tokens_are_told_to_be() {
    let (body, ids) = sglang_case("chatml/calls");
    let (a, b) = (Agent::start("a"), Agent::start("b"));
    for agent in [&a, &b] {
        agent.inner.has_model.store(true, Ordering::Relaxed);
    }
    a.report_kv([reset(), Change::Complete]);
    b.report_kv([reset(), has(&ids), Change::Complete]);
    let router = Router::start(&[&a, &b]).await;
    until_kv(&router, "b", "live", 8).await;
    // The model is loaded after the agents are connected, and only at the second try.
    wait_until("the chat is known by its tokens", async || {
        let turn = router.chat(&[], &body).await;
        let why = placed(&router, &turn).await;
        worker(&turn) == "b/0" && why["uncached_tokens"] == ids.len() - 8 * 64
    })
    .await;
}
