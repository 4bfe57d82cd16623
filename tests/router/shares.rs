//! Tests of what each client may take: turns, bodies, rates and priority, with several keys.

use std::sync::{Arc, atomic::Ordering};

use harness::{
    keys::{KeyFixture, TestKey},
    web::Headers,
};
use http::{Method, StatusCode};
use router::config::Config;
use service::auth::MetricsAuth;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
    task::JoinSet,
};

use crate::{
    agent::Agent,
    harness::{Answer, Router, collect, config, wait_until},
};

const KEYS: [TestKey<'_>; 7] = [
    ("hog", "hog", ""),
    ("user", "user", ""),
    ("single", "single", "limits = { turns_in_flight_max = 1 }"),
    ("pair", "pair", "limits = { sessions_max = 2 }"),
    ("slow", "slow", "limits = { requests_per_minute = 2 }"),
    ("frugal", "frugal", "limits = { tokens_per_minute = 120 }"),
    ("low", "low", "limits = { priority = { class = \"low\", bound = \"normal\" } }"),
];
const HOG: (&str, &str) = ("authorization", "Bearer hog");
const USER: (&str, &str) = ("authorization", "Bearer user");
const SINGLE: (&str, &str) = ("authorization", "Bearer single");
const PAIR: (&str, &str) = ("authorization", "Bearer pair");
const SLOW: (&str, &str) = ("authorization", "Bearer slow");
const FRUGAL: (&str, &str) = ("authorization", "Bearer frugal");
const LOW: (&str, &str) = ("authorization", "Bearer low");
const WAIT_HEAD: (&str, &str) = ("x-test-wait", "head");
const WAIT_TAIL: (&str, &str) = ("x-test-wait", "tail");

/// Starts a router with the keys.
async fn start(agent: &Agent, change: impl FnOnce(&mut Config)) -> (Arc<Router>, KeyFixture) {
    let keys = KeyFixture::new(&KEYS).unwrap();
    let mut settings = config(&[agent]);
    settings.auth.keys_file = keys.path();
    settings.auth.metrics_auth = MetricsAuth::None;
    change(&mut settings);
    let router = Router::start_with(settings).await;
    wait_until("the router is ready", async || router.is_ready().await).await;
    (Arc::new(router), keys)
}

/// Sends turns that wait for the agent. Returns them when each is at the agent or refused.
async fn hold_turns(
    router: &Arc<Router>,
    agent: &Agent,
    headers: &[(&'static str, &'static str)],
    count: usize,
    body: &str,
) -> (JoinSet<Answer>, Vec<Answer>) {
    let (before, mut turns) = (agent.turns().len(), JoinSet::new());
    for _ in 0..count {
        let (router, headers, body) = (Arc::clone(router), headers.to_vec(), body.to_owned());
        turns.spawn(async move {
            let headers: Vec<_> = [headers, vec![WAIT_HEAD]].concat();
            router.call(Method::POST, "/v1/messages", &headers, body).await
        });
    }
    let refused = wait_for_turns(&mut turns, agent, before + count).await;
    (turns, refused)
}

/// Waits until each turn is refused or at the agent, which then has got `count` turns but for the
/// refused ones. Returns these.
async fn wait_for_turns(turns: &mut JoinSet<Answer>, agent: &Agent, count: usize) -> Vec<Answer> {
    let mut refused = vec![];
    while agent.turns().len() + refused.len() < count {
        tokio::select! {
            Some(answer) = turns.join_next() => refused.push(answer.unwrap()),
            () = tokio::time::sleep(std::time::Duration::from_millis(5)) => {}
        }
    }
    refused
}

async fn complete(router: &Router, body: &str) -> Answer {
    router.call(Method::POST, "/v1/completions", &[USER], body.to_owned()).await
}

fn refusal(answer: &Answer) -> (u16, String) {
    (answer.status.as_u16(), answer.code())
}

fn limit(code: &str) -> (u16, String) {
    (429, code.to_owned())
}

/// Sends the head of a turn whose body never comes, and waits until the router has it.
async fn send_head(router: &Router) -> TcpStream {
    let mut stream = TcpStream::connect(router.data()).await.unwrap();
    let head = "POST /generate HTTP/1.1\r\nhost: x\r\nauthorization: Bearer hog\r\n\
        content-length: 10\r\nexpect: 100-continue\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 100", "the router reads the body");
    stream
}

#[tokio::test]
async fn requests_without_their_bodies_keep_nobody_out() {
    let a = Agent::start("a");
    let (router, _keys) = start(&a, |settings| settings.limits.turns_in_flight_max = 2).await;
    let mut streams = vec![];
    for _ in 0..20 {
        streams.push(send_head(&router).await);
    }
    let turn = router.chat(&[USER], "{}").await;
    assert_eq!(turn.status, StatusCode::OK, "{turn:?}");
    drop(streams);
}

#[tokio::test]
async fn a_client_with_many_turns_leaves_some_to_others() {
    let a = Agent::start("a");
    let (router, _keys) = start(&a, |settings| settings.limits.turns_in_flight_max = 64).await;
    let (mut turns, refused) = hold_turns(&router, &a, &[HOG], 64, "{\"a\":1}").await;
    assert_eq!(refused.len(), 64 - 57, "16/17 of the 60 turns that aren't in reserve");
    for refused in &refused {
        assert_eq!(refusal(refused), limit("turns_in_flight_share"));
        assert_eq!(refused.header("retry-after"), "1");
    }
    let turn = router.chat(&[USER], "{}").await;
    assert_eq!(turn.status, StatusCode::OK, "{turn:?}");
    let text = router.metrics().await;
    assert!(text.contains("berth_router_share_limit_turns{pool=\"turns\"} 64"), "{text}");
    assert!(text.contains("berth_router_share_largest_turns{pool=\"turns\"} 57"), "{text}");
    a.inner.release.add_permits(64);
    while let Some(turn) = turns.join_next().await {
        assert_eq!(turn.unwrap().status, StatusCode::OK);
    }
    wait_until("all turns are given back", async || {
        router.metrics().await.contains("berth_router_share_used_turns{pool=\"turns\"} 0")
    })
    .await;
}

#[tokio::test]
async fn a_client_with_turns_in_many_sessions_leaves_sessions_to_others() {
    let a = Agent::start("a");
    let (router, _keys) = start(&a, |settings| settings.limits.sessions_max = 64).await;
    let mut turns = JoinSet::new();
    for number in 0..64 {
        let (router, id) = (Arc::clone(&router), format!("s{number}"));
        turns.spawn(async move {
            let headers = [HOG, WAIT_HEAD, ("x-berth-session-id", id.as_str())];
            router.chat(&headers, "{\"a\":1}").await
        });
    }
    let refused = wait_for_turns(&mut turns, &a, 64).await;
    assert_eq!(refused.len(), 64 - 57, "16/17 of the 60 sessions that aren't in reserve");
    for refused in &refused {
        assert_eq!(refusal(refused), limit("sessions_share"));
    }
    let turn = router.chat(&[USER, ("x-berth-session-id", "s0")], "{}").await;
    assert_eq!(turn.status, StatusCode::OK, "{turn:?}");
}

#[tokio::test]
async fn a_key_has_its_own_open_sessions() {
    let a = Agent::start("a");
    let (router, _keys) = start(&a, |_| {}).await;
    let open = async |key, id: &str| {
        let body = format!("{{\"session_id\":\"{id}\"}}");
        router.call(Method::POST, "/v1/sessions", &[key], body).await
    };
    let reported = async |count: usize| {
        let line = format!("berth_router_sessions {count}\n");
        wait_until("the agent's report", async || router.metrics().await.contains(&line)).await;
    };
    for id in ["one", "two"] {
        assert_eq!(open(PAIR, id).await.status, StatusCode::CREATED);
    }
    reported(2).await;
    assert_eq!(refusal(&open(PAIR, "three").await), limit("key_sessions"));
    let session = |id| [PAIR, ("x-berth-session-id", id)];
    assert_eq!(refusal(&router.chat(&session("three"), "{}").await), limit("key_sessions"));
    assert_eq!(router.chat(&session("two"), "{}").await.status, StatusCode::OK, "an open one");
    assert_eq!(open(USER, "three").await.status, StatusCode::CREATED, "others have their own");
    reported(3).await;
    let closed = router.call(Method::DELETE, "/v1/sessions/one", &[PAIR], "").await;
    assert_eq!(closed.status, StatusCode::NO_CONTENT);
    reported(2).await;
    assert_eq!(open(PAIR, "three").await.status, StatusCode::CREATED);
}

/// Without keys, every address is a client.
#[tokio::test]
async fn without_keys_one_address_leaves_turns_to_others() {
    let a = Agent::start("a");
    let mut settings = config(&[&a]);
    settings.limits.turns_in_flight_max = 64;
    let router = Arc::new(Router::start_with(settings).await);
    wait_until("the router is ready", async || router.is_ready().await).await;
    let (_turns, refused) = hold_turns(&router, &a, &[], 64, "{\"a\":1}").await;
    assert_eq!(refused.len(), 64 - 57);
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.99:0".parse().unwrap()).unwrap();
    let mut stream = socket.connect(router.data()).await.unwrap();
    let turn = "POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}";
    stream.write_all(turn.as_bytes()).await.unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 418", "the engine's answer");
}

#[tokio::test]
async fn under_overload_lower_classes_are_refused_first() {
    let a = Agent::start("a");
    let (router, _keys) = start(&a, |settings| settings.limits.turns_in_flight_max = 4).await;
    let low = router.chat(&[LOW], "{}").await;
    assert_eq!(low.status, StatusCode::OK, "{low:?}");
    let (_turns, refused) = hold_turns(&router, &a, &[HOG], 3, "{\"a\":1}").await;
    assert!(refused.is_empty(), "{refused:?}");
    assert_eq!(refusal(&router.chat(&[LOW], "{}").await), limit("priority_shed"));
    assert_eq!(refusal(&router.chat(&[USER], "{\"priority\":-1}").await), limit("priority_shed"));
    assert_eq!(router.chat(&[LOW], "{\"priority\":0}").await.status, StatusCode::OK);
    assert_eq!(router.chat(&[USER], "{}").await.status, StatusCode::OK);
}

#[tokio::test]
async fn no_turn_has_more_priority_than_its_key_allows() {
    let a = Agent::start("a");
    let (router, _keys) = start(&a, |_| {}).await;
    for (key, sent, got) in [
        (USER, r#"{"a":1.0,"priority":9}"#, r#"{"a":1.0,"priority":0}"#),
        (USER, r#"{"priority":-2,"a":1.0}"#, r#"{"priority":-2,"a":1.0}"#),
        (LOW, r#"{"a":1.0}"#, r#"{"a":1.0}"#),
    ] {
        assert_eq!(router.chat(&[key], sent).await.status, StatusCode::OK);
        assert_eq!(a.turns().pop().unwrap().body, got.as_bytes());
    }
}

#[tokio::test]
async fn a_key_has_its_own_turns_and_its_own_rates() {
    let a = Agent::start("a");
    let (router, _keys) = start(&a, |_| {}).await;
    let waiting: Headers<'_> = &[SINGLE, WAIT_TAIL];
    let turn = router.begin(Method::POST, "/v1/messages", waiting, "{\"a\":1}").await;
    let second = router.chat(&[SINGLE], "{}").await;
    assert_eq!(refusal(&second), limit("key_turns_in_flight"));
    a.inner.release.add_permits(1);
    assert_eq!(collect(turn).await.status, StatusCode::OK);
    assert_eq!(router.chat(&[SINGLE], "{}").await.status, StatusCode::OK);

    for _ in 0..2 {
        assert_eq!(router.chat(&[SLOW], "{}").await.status, StatusCode::OK);
    }
    let third = router.call(Method::GET, "/v1/models", &[SLOW], "").await;
    assert_eq!(refusal(&third), limit("requests_per_minute"));
    let wait: u64 = third.header("retry-after").parse().unwrap();
    assert!((20..=30).contains(&wait), "one of two per minute comes after 30 s: {wait}");

    // 100 tokens by bytes; the agent's answer has no usage, and repeats the body.
    let body = format!("{{\"prompt\":\"{}\"}}", "x".repeat(400 - 13));
    assert_eq!(router.chat(&[FRUGAL], &body).await.status, StatusCode::OK);
    let second = router.chat(&[FRUGAL], &body).await;
    assert_eq!(refusal(&second), limit("tokens_per_minute"));
    let wait: u64 = second.header("retry-after").parse().unwrap();
    assert!((30..=42).contains(&wait), "80 of 120 per minute come within 40 s: {wait}");
    assert_eq!(router.chat(&[USER], &body).await.status, StatusCode::OK, "others have their own");
}

#[tokio::test]
async fn bodies_that_the_agent_has_keep_nobody_out_during_a_generation() {
    let a = Agent::start("a");
    let change = |settings: &mut Config| {
        settings.limits.body_bytes_max = 1 << 20;
        settings.limits.body_bytes_in_flight_max = 2 << 20;
    };
    let (router, _keys) = start(&a, change).await;
    let body = format!("{{\"a\":\"{}\"}}", " ".repeat(600_000));
    let mut held = vec![];
    for _ in 0..8 {
        let (turns, refused) = hold_turns(&router, &a, &[HOG], 1, &body).await;
        assert!(refused.is_empty(), "{refused:?}");
        held.push(turns);
    }
    let turn = router.chat(&[USER], &body).await;
    assert_eq!(turn.status, StatusCode::OK, "{:?} {}", turn.status, turn.code());
}

#[tokio::test]
async fn text_that_fits_no_context_is_refused_and_an_image_is_not() {
    let a = Agent::start("a");
    let (router, _keys) = start(&a, |_| {}).await;
    // The agent's engine has a context of 1,000 tokens.
    let padding = format!("{{\"a\":\"{}\"}}", " ".repeat(1_300_000));
    let refused = router.chat(&[USER], &padding).await;
    assert_eq!(refusal(&refused), (400, "context_length_exceeded".to_owned()));
    let engines =
        "The input (1001 tokens) is longer than the model's context length (1000 tokens).";
    assert!(refused.text().contains(engines), "{}", refused.text());
    let image = format!("{{\"image_data\":\"{}\"}}", " ".repeat(1_300_000));
    assert_eq!(router.chat(&[USER], &image).await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_prompt_with_more_tokens_than_any_context_never_reaches_an_engine() {
    let a = Agent::start("a");
    a.inner.has_model.store(true, Ordering::Relaxed);
    let (router, _keys) = start(&a, |_| {}).await;
    // The agent's engine has a context of 1,000 tokens.
    let words = format!("{{\"prompt\":\"{}\"}}", "zebra quilt ".repeat(8_000));
    // Until the model is loaded, nobody knows how many tokens these words are.
    wait_until("the prompt is refused", async || {
        complete(&router, &words).await.status == StatusCode::BAD_REQUEST
    })
    .await;
    let received = a.turns().len();
    let refused = complete(&router, &words).await;
    assert_eq!(refusal(&refused), (400, "context_length_exceeded".to_owned()));
    let engines =
        "The input (1001 tokens) is longer than the model's context length (1000 tokens).";
    assert!(refused.text().contains(engines), "{}", refused.text());
    assert_eq!(a.turns().len(), received, "turns that reached the agent");
    // These many bytes are few tokens, and this list has several prompts.
    let image = format!("{{\"prompt\":\"a\",\"image_data\":\"{}\"}}", "zebra ".repeat(16_000));
    let list = format!("{{\"prompt\":[\"{}\",\"b\"]}}", "zebra quilt ".repeat(8_000));
    for body in [image, list] {
        assert_eq!(complete(&router, &body).await.status, StatusCode::OK);
    }
}

#[tokio::test]
async fn an_engine_that_cuts_long_prompts_gets_them() {
    let a = Agent::start("a");
    a.inner.has_model.store(true, Ordering::Relaxed);
    a.inner.shortens_prompts.store(true, Ordering::Relaxed);
    let (router, _keys) = start(&a, |_| {}).await;
    let ids = format!("{{\"prompt\":{:?}}}", vec![7; 30_000]);
    let padding = format!("{{\"a\":\"{}\"}}", " ".repeat(1_300_000));
    for body in [ids, padding] {
        let turn = complete(&router, &body).await;
        assert_eq!(turn.status, StatusCode::OK, "{}", turn.code());
    }
}
