//! Tests of the replay against a small server of both APIs, and against real traces if available.
//!
//! The server records its requests and fails on demand.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do, by panicking")]

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, post};
use bytes::Bytes;
use harness::trace_path;
use parking_lot::Mutex;
use replay::shape::Shape;
use replay::synth::{self, Salt};
use replay::trace::{Blocks, Conversation, Form, Shared, Subagent, Trace, TraceTurn};
use replay::{
    Api, ReplayControl, ReplayOptions, Report, SessionHeaders, SessionOpen, Workload, drive, load,
};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

/// How the server fails on the n-th turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Truncate,
    Abort,
    ErrorEvent,
    Busy,
    Hopeless,
    Hang,
}

#[derive(Debug, Clone)]
struct RecordedTurn {
    session: Option<String>,
    parent: Option<String>,
    last: bool,
    delta: bool,
    body: Value,
}

#[derive(Debug, Default)]
struct Recorded {
    turns: Vec<RecordedTurn>,
    opened: Vec<(String, String)>,
    closed: Vec<String>,
    /// The tokens committed per session that sends deltas.
    committed: BTreeMap<String, u64>,
}

#[derive(Debug, Default)]
struct Server {
    faults: BTreeMap<usize, Fault>,
    seen: Mutex<Recorded>,
    /// Notified when a turn hangs.
    hung: Notify,
}

async fn serve(faults: &[(usize, Fault)]) -> (Arc<Server>, String) {
    let faults = faults.iter().copied().collect();
    let server = Arc::new(Server { faults, ..Server::default() });
    let app = Router::new()
        .route("/generate", post(generate))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/sessions", post(open_session))
        .route("/v1/sessions/{id}", delete(close))
        .with_state(Arc::clone(&server));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(async move { axum::serve(listener, app).await });
    // The server runs as long as the test's runtime.
    tasks.detach_all();
    (server, url)
}

async fn open_session(State(server): State<Arc<Server>>, body: Bytes) -> StatusCode {
    let body: Value = serde_json::from_slice(&body).unwrap();
    let text = |key: &str| body[key].as_str().unwrap().to_owned();
    server.seen.lock().opened.push((text("session_id"), text("retention")));
    StatusCode::OK
}

async fn close(State(server): State<Arc<Server>>, Path(id): Path<String>) -> StatusCode {
    server.seen.lock().closed.push(id);
    StatusCode::NO_CONTENT
}

async fn generate(State(server): State<Arc<Server>>, headers: HeaderMap, body: Bytes) -> Response {
    let (asked, fault) = record_turn(&server, &headers, &body);
    let count = asked.body["sampling_params"]["max_new_tokens"].as_u64().unwrap();
    let sent = asked.body["input_ids"].as_array().unwrap().len() as u64;
    let mut prompt = sent;
    let mut cached = 0;
    if asked.delta {
        let mut seen = server.seen.lock();
        let committed = seen.committed.entry(asked.session.unwrap()).or_default();
        cached = *committed;
        prompt += cached;
        *committed = prompt + count;
    }
    let event = |so_far: u64| {
        let ids: Vec<u64> = (0..so_far).collect();
        let kind = if so_far == count { json!({"type": "length"}) } else { Value::Null };
        let meta = json!({"prompt_tokens": prompt, "completion_tokens": so_far,
            "cached_tokens": cached, "finish_reason": kind});
        json!({"text": "", "output_ids": ids, "meta_info": meta})
    };
    if asked.body["stream"] != true {
        return axum::Json(event(count)).into_response();
    }
    stream(&server, (1..=count).map(event).collect(), fault).await
}

async fn chat(State(server): State<Arc<Server>>, headers: HeaderMap, body: Bytes) -> Response {
    let (asked, fault) = record_turn(&server, &headers, &body);
    let count = asked.body["max_tokens"].as_u64().unwrap();
    let messages = asked.body["messages"].as_array().unwrap();
    let prompt: usize = messages.iter().map(|one| one["content"].as_str().unwrap().len()).sum();
    let delta = json!({"choices": [{"delta": {"content": "x"}, "finish_reason": null}]});
    let mut events = vec![delta; usize::try_from(count).unwrap()];
    events.push(json!({"choices": [], "usage":
        {"prompt_tokens": prompt, "completion_tokens": count}}));
    stream(&server, events, fault).await
}

fn record_turn(server: &Server, headers: &HeaderMap, body: &[u8]) -> (RecordedTurn, Option<Fault>) {
    let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap().to_owned());
    let asked = RecordedTurn {
        session: text("x-berth-session-id"),
        parent: text("x-parent-session-id"),
        last: text("x-berth-session-final").is_some_and(|value| value == "true"),
        delta: text("x-berth-delta").is_some_and(|value| value == "1"),
        body: serde_json::from_slice(body).unwrap(),
    };
    let mut seen = server.seen.lock();
    let fault = server.faults.get(&seen.turns.len()).copied();
    seen.turns.push(asked.clone());
    (asked, fault)
}

async fn stream(server: &Server, events: Vec<Value>, fault: Option<Fault>) -> Response {
    let mut text: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
    let abort = json!({"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}});
    match fault {
        None => text.push_str("data: [DONE]\n\n"),
        Some(Fault::Truncate) => {}
        Some(Fault::Abort) => text = format!("data: {abort}\n\ndata: [DONE]\n\n"),
        Some(Fault::ErrorEvent) => text = "data: {\"error\":{\"message\":\"no\"}}\n\n".to_owned(),
        Some(Fault::Busy) => {
            return (StatusCode::TOO_MANY_REQUESTS, [("retry-after", "0")]).into_response();
        }
        Some(Fault::Hopeless) => return StatusCode::SERVICE_UNAVAILABLE.into_response(),
        Some(Fault::Hang) => {
            server.hung.notify_one();
            std::future::pending().await
        }
    }
    ([("content-type", "text/event-stream")], Body::from(text)).into_response()
}

/// Returns a conversation of `turns` turns; each adds a block of 64 tokens.
fn conversation(scope: u64, turns: u64) -> Conversation {
    let turn = |index: u64| TraceTurn {
        at: Duration::from_millis(10 * index),
        think: Duration::from_millis(1),
        prompt_tokens: 64 * (index + 2),
        output_tokens: 4,
        blocks: Blocks::from_ids(&(0..index + 2).collect::<Vec<_>>()),
    };
    Conversation {
        id: format!("c{scope}"),
        block_tokens: 64,
        scope: Some(scope),
        shared: Shared { stream: 0, tokens: 32 },
        turns: (0..turns).map(turn).collect(),
        ..Conversation::default()
    }
}

fn workload(conversations: Vec<Conversation>) -> Workload {
    Workload::Trace(Trace { form: Form::Conversations, conversations, duplicates: 0 })
}

fn options(url: &str, api: Api) -> ReplayOptions {
    ReplayOptions {
        url: url.to_owned(),
        api,
        users: Some(2),
        time_scale: Some(0.0),
        run_id: "t".to_owned(),
        ..ReplayOptions::default()
    }
}

/// Returns the options of an open loop.
fn open(rate: f64, options: ReplayOptions) -> ReplayOptions {
    ReplayOptions { rate: Some(rate), users: None, time_scale: None, ..options }
}

async fn run(options: ReplayOptions, conversations: Vec<Conversation>) -> Report {
    drive(options, workload(conversations), ReplayControl::default(), |_| {}).await.unwrap()
}

fn kinds(report: &Report) -> Vec<(&str, u64)> {
    report.errors_by_kind.iter().map(|(kind, count)| (kind.as_str(), *count)).collect()
}

#[tokio::test]
async fn every_turn_is_sent_once_and_counted() {
    for (api, stream) in [(Api::Chat, true), (Api::Generate, true), (Api::Generate, false)] {
        let (server, url) = serve(&[]).await;
        let options = ReplayOptions { stream, ..options(&url, api) };
        let report = run(options, (0..5).map(|scope| conversation(scope, 3)).collect()).await;
        assert_eq!((report.turns, report.errors), (15, 0), "{:?}", report.errors_by_kind);
        assert_eq!((report.conversations, report.conversations_finished), (5, 5));
        assert_eq!(report.output_tokens, 60);
        if api == Api::Generate {
            assert_eq!(report.input_tokens, 5 * (128 + 192 + 256));
            assert_eq!(report.cached_ratio, Some(0.0));
        } else {
            assert_eq!(report.cached_ratio, None);
        }
        assert_eq!(report.ttft_ms_p50 > 0.0, stream);
        assert_eq!(server.seen.lock().turns.len(), 15);
        assert!(server.seen.lock().turns.iter().all(|turn| turn.session.is_none()));
    }
}

#[tokio::test]
async fn the_last_turn_of_a_session_says_so() {
    let (server, url) = serve(&[]).await;
    let options = ReplayOptions {
        sessions: SessionHeaders::Final,
        session_open: Some(SessionOpen::Tagged),
        ..options(&url, Api::Chat)
    };
    let report = run(options, vec![conversation(0, 3), conversation(1, 2)]).await;
    assert_eq!((report.turns, report.sessions_opened, report.sessions_closed), (5, 2, 2));
    let seen = server.seen.lock();
    let lasts: HashSet<_> =
        seen.turns.iter().filter(|turn| turn.last).map(|turn| turn.session.clone()).collect();
    assert_eq!((lasts.len(), seen.turns.iter().filter(|turn| turn.last).count()), (2, 2));
    assert!(seen.opened.iter().all(|(id, kind)| id.starts_with("t-") && kind == "tagged"));
    assert!(seen.closed.is_empty(), "the last turn closed them");
}

#[tokio::test]
async fn pinned_sessions_get_only_new_tokens() {
    let (server, url) = serve(&[]).await;
    let options = ReplayOptions {
        sessions: SessionHeaders::Header,
        session_open: Some(SessionOpen::Pinned),
        ..options(&url, Api::Generate)
    };
    let report = run(options, vec![conversation(0, 4)]).await;
    assert_eq!((report.turns, report.errors), (4, 0));
    let seen = server.seen.lock();
    let sent: Vec<usize> =
        seen.turns.iter().map(|turn| turn.body["input_ids"].as_array().unwrap().len()).collect();
    // Each turn adds a block of 64 tokens, of which the previous answer has already filled 4.
    assert_eq!(sent, [128, 60, 60, 60]);
    assert!(seen.turns.iter().all(|turn| turn.delta));
    assert_eq!(seen.committed["t-0"], 128 + 3 * 64 + 4);
    assert_eq!(seen.closed, ["t-0"]);
    assert_eq!(report.input_tokens, 128 + 192 + 256 + 320);
}

#[tokio::test]
async fn a_lost_pinned_turn_reopens_the_session() {
    let (server, url) = serve(&[(1, Fault::Truncate)]).await;
    let options = ReplayOptions {
        sessions: SessionHeaders::Header,
        session_open: Some(SessionOpen::Pinned),
        ..options(&url, Api::Generate)
    };
    let report = run(options, vec![conversation(0, 3)]).await;
    assert_eq!((report.turns, kinds(&report)), (2, vec![("truncated", 1)]));
    let seen = server.seen.lock();
    assert_eq!(seen.turns[2].body["input_ids"].as_array().unwrap().len(), 256);
    assert_eq!(seen.turns[2].session.as_deref(), Some("t-0-r1"));
    assert_eq!(seen.closed, ["t-0", "t-0-r1"]);
}

#[tokio::test]
async fn failures_are_told_apart() {
    let faults =
        [(0, Fault::Truncate), (1, Fault::Abort), (2, Fault::ErrorEvent), (3, Fault::Hopeless)];
    let (_server, url) = serve(&faults).await;
    let report = run(options(&url, Api::Generate), vec![conversation(0, 5)]).await;
    assert_eq!((report.turns, report.errors), (1, 4));
    let expected = [("aborted", 1), ("error_event", 1), ("status_503", 1), ("truncated", 1)];
    assert_eq!(kinds(&report), expected);
}

#[tokio::test]
async fn an_unreachable_server_is_an_error_for_each_turn() {
    // A bound port that no other process can get and that never listens.
    let held = tokio::net::TcpSocket::new_v4().unwrap();
    held.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let url = format!("http://{}", held.local_addr().unwrap());
    let report = run(options(&url, Api::Chat), vec![conversation(0, 2)]).await;
    assert_eq!((report.turns, kinds(&report)), (0, vec![("connect", 2)]));
}

#[tokio::test]
async fn busy_servers_are_retried_up_to_the_limit() {
    let (server, url) = serve(&[(0, Fault::Busy), (1, Fault::Busy)]).await;
    let report = run(options(&url, Api::Chat), vec![conversation(0, 2)]).await;
    assert_eq!((report.turns, report.errors, report.retries), (2, 0, 2));
    let bodies: Vec<Value> = server.seen.lock().turns.iter().map(|t| t.body.clone()).collect();
    assert_eq!((&bodies[0], &bodies[1]), (&bodies[2], &bodies[2]));
    let (_server, url) = serve(&[(0, Fault::Busy), (1, Fault::Busy)]).await;
    let impatient = ReplayOptions { retries_max: 1, ..options(&url, Api::Chat) };
    let report = run(impatient, vec![conversation(0, 1)]).await;
    assert_eq!((report.retries, kinds(&report)), (1, vec![("status_429", 1)]));
}

#[tokio::test]
async fn a_turn_budget_is_kept_and_sessions_are_closed() {
    let (server, url) = serve(&[]).await;
    let options = ReplayOptions {
        turns_max: Some(7),
        recycle: true,
        sessions: SessionHeaders::Final,
        session_open: Some(SessionOpen::Auto),
        ..options(&url, Api::Chat)
    };
    let report = run(options, vec![conversation(0, 5), conversation(1, 5)]).await;
    assert_eq!((report.turns, report.errors, report.unfinished), (7, 0, 0));
    assert_eq!(report.sessions_opened, report.sessions_closed);
    assert_eq!(server.seen.lock().turns.len(), 7);
}

#[tokio::test]
async fn a_stop_abandons_a_hanging_turn_and_closes_its_session() {
    let (server, url) = serve(&[(1, Fault::Hang)]).await;
    let options = ReplayOptions {
        grace_s: 0.05,
        sessions: SessionHeaders::Header,
        session_open: Some(SessionOpen::Auto),
        ..options(&url, Api::Chat)
    };
    let control = ReplayControl::default();
    let stop = async {
        server.hung.notified().await;
        assert_eq!(control.live.report(Duration::ZERO).in_flight, 1);
        control.stop.cancel();
    };
    let driven = drive(options, workload(vec![conversation(0, 3)]), control.clone(), |_| {});
    let report = tokio::join!(driven, stop).0.unwrap();
    assert_eq!((report.turns, report.errors, report.unfinished), (1, 0, 1));
    assert_eq!(server.seen.lock().closed, ["t-0"]);
}

#[tokio::test]
async fn a_replay_ends_at_its_time() {
    let (_server, url) = serve(&[]).await;
    let options = ReplayOptions { seconds: Some(0.1), recycle: true, ..options(&url, Api::Chat) };
    let report = run(options, vec![conversation(0, 2)]).await;
    assert_eq!((report.errors, report.unfinished), (0, 0));
}

#[tokio::test]
async fn a_request_that_takes_too_long_is_a_timeout() {
    let (_server, url) = serve(&[(0, Fault::Hang)]).await;
    // Long enough for the second turn, which must be answered in time.
    let options = ReplayOptions { timeout_s: 4.0, ..options(&url, Api::Chat) };
    let report = run(options, vec![conversation(0, 2)]).await;
    assert_eq!((report.turns, kinds(&report)), (1, vec![("timeout", 1)]));
}

#[tokio::test]
async fn subagents_have_sessions_of_their_own_and_their_parents_wait() {
    let (server, url) = serve(&[]).await;
    let mut parent = conversation(0, 2);
    let conversation = conversation(0, 3);
    parent.children.push(Subagent { beside_turn: 0, awaited: true, conversation });
    let options = ReplayOptions { sessions: SessionHeaders::Header, ..options(&url, Api::Chat) };
    let report = run(options, vec![parent]).await;
    assert_eq!((report.turns, report.conversations_finished), (5, 2));
    let seen = server.seen.lock();
    let sessions: Vec<_> = seen.turns.iter().map(|turn| turn.session.clone().unwrap()).collect();
    assert_eq!(sessions, ["t-0", "t-0-s0", "t-0-s0", "t-0-s0", "t-0"]);
    assert_eq!(seen.turns[1].parent.as_deref(), Some("t-0"));
    assert_eq!(seen.turns[0].parent, None);
}

#[tokio::test]
async fn an_open_loop_drops_what_exceeds_its_bound() {
    let (server, url) = serve(&[(0, Fault::Hang)]).await;
    let options = ReplayOptions {
        arrival_gap_s: Some(0.0),
        outstanding_max: Some(1),
        grace_s: 0.05,
        ..open(1.0, options(&url, Api::Chat))
    };
    let conversations = (0..4).map(|scope| conversation(scope, 1)).collect();
    let control = ReplayControl::default();
    let stop = control.stop.clone();
    let stop_when_dropped = |report: &Report| {
        if report.dropped == 3 {
            stop.cancel();
        }
    };
    let driven = drive(options, workload(conversations), control, stop_when_dropped);
    let report = driven.await.unwrap();
    assert_eq!((report.turns, report.dropped, report.unfinished), (0, 3, 1));
    assert_eq!(server.seen.lock().turns.len(), 1);
}

#[tokio::test]
async fn an_open_loop_keeps_the_order_of_a_conversation() {
    let (server, url) = serve(&[]).await;
    let options = ReplayOptions {
        arrival_gap_s: Some(0.01),
        outstanding_max: Some(64),
        sessions: SessionHeaders::Final,
        ..open(10.0, options(&url, Api::Generate))
    };
    let report = run(options, (0..4).map(|scope| conversation(scope, 4)).collect()).await;
    assert_eq!((report.turns, report.dropped, report.errors), (16, 0, 0));
    let mut lengths: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for turn in &server.seen.lock().turns {
        let length = turn.body["input_ids"].as_array().unwrap().len();
        lengths.entry(turn.session.clone().unwrap()).or_default().push(length);
    }
    assert_eq!(lengths.len(), 4);
    assert!(lengths.values().all(|session| *session == [128, 192, 256, 320]));
}

#[tokio::test]
async fn contradicting_options_are_refused() {
    let options = ReplayOptions { vocab: 0, ..options("ftp://x", Api::Chat) };
    let refused = drive(options, workload(Vec::new()), ReplayControl::default(), |_| {}).await;
    assert_eq!(refused.unwrap_err().to_string().split("; ").count(), 2);
}

fn binary(args: &[&str]) -> std::process::Output {
    std::process::Command::new(env!("CARGO_BIN_EXE_replay-process")).args(args).output().unwrap()
}

#[test]
fn the_binary_reports_all_problems_of_its_flags() {
    let args = ["--url=ftp://x", "--rate=1", "--users=3", "--vocab=0", "--grace-s=-1"];
    let output = binary(&args);
    assert_eq!(output.status.code(), Some(64));
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said.lines().count(), 4, "{said}");
    assert_eq!(binary(&["--bogus"]).status.code(), Some(64));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_binary_reports_json_on_its_last_line() {
    let (_server, url) = serve(&[(2, Fault::Hopeless)]).await;
    let run = move |more: &[&str]| {
        let url = format!("--url={url}");
        let sizes = ["--scale-tokens=0.01", "--max-output=2", "--time-scale=0"];
        let args = [&[url.as_str(), "--turns=4", "--users=1", "--json"], &sizes[..], more];
        let output = binary(&args.concat());
        let text = String::from_utf8(output.stdout).unwrap();
        let report: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        (output.status.code(), report)
    };
    let runs = tokio::task::spawn_blocking(move || (run(&[]), run(&["--api=generate"])));
    let ((failed, first), (good, second)) = runs.await.unwrap();
    assert_eq!((failed, good), (Some(1), Some(0)));
    assert_eq!((&first["turns"], &first["errors"]), (&json!(3), &json!(1)));
    assert_eq!(first["errors_by_kind"], json!({"status_503": 1}));
    assert_eq!((&second["turns"], &second["cached_ratio"]), (&json!(4), &json!(0.0)));
}

#[test]
fn prompts_of_real_traces_share_the_prefixes_that_their_ids_share() {
    let Some(path) = trace_path("claude_code.jsonl.gz") else { return };
    let folder = path.parent().unwrap();
    let agents = load::read_trace(&path).unwrap();
    assert_eq!(agents.form, Form::Conversations);
    assert_eq!(agents.conversations.len() as u64 + agents.duplicates, 337);
    assert!(agents.conversations.iter().map(|one| one.children.len()).sum::<usize>() > 0);
    let shape = Shape { scale: 0.25, ..Shape::default() };
    for one in agents.conversations.iter().take(12) {
        for pair in one.turns.windows(2) {
            let of = |turn| synth::symbols(one, turn, &shape, Salt::default());
            let (before, after) = (of(&pair[0]), of(&pair[1]));
            let common = before.iter().zip(&after).take_while(|(a, b)| a == b).count() as u64;
            assert_eq!(common, synth::shared_prefix(one, &pair[0], &pair[1], &shape));
        }
    }
    let chats = load::read_trace(&folder.join("mooncake_conversation.jsonl.gz")).unwrap();
    assert_eq!((chats.form, chats.conversations.len()), (Form::Requests, 12_031));
    // As published, all requests start with block 0.
    let first = |one: &Conversation| one.turns[0].blocks.get(0) == Some(0);
    assert!(chats.conversations.iter().all(first));
    let agents = load::read_trace(&folder.join("lmcache_miniswe")).unwrap();
    assert_eq!((agents.form, agents.conversations.len()), (Form::Prompts, 10));
    // In the files, every third line is out of order.
    assert_eq!((agents.turns(), agents.edits()), (266, 0));
}
