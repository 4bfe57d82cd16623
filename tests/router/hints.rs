//! Tests of what clients hint at: sessions that they name on their own, priorities, times, models.

use std::{collections::BTreeSet, sync::atomic::Ordering};

use contract::{hints::TurnHints, load::Retention};
use harness::{envelope::ENVELOPE, web::Headers};
use http::{Method, StatusCode};

use crate::{
    agent::{Agent, ReceivedTurn},
    harness::{Router, collect, config, wait_until},
};

fn left_out(reason: &str, count: u32) -> String {
    format!("berth_router_sessions_left_out_total{{reason=\"{reason}\"}} {count}\n")
}

fn session_of(turn: &ReceivedTurn) -> Option<&str> {
    turn.envelope.session.as_ref().map(|claim| claim.key.id())
}

#[tokio::test]
async fn a_turn_that_a_hinted_session_cannot_take_runs_without_it() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let long = "i".repeat(300);
    let several = r#"{"n":2}"#;
    let cases: [(&str, &str, &str, &str); 5] = [
        ("/v1/chat/completions", "thread-id", "t", several),
        ("/v1/completions", "x-session-id", "t", r#"{"prompt":["a","b"]}"#),
        ("/v1/responses", "x-session-affinity", "t", r#"{"background":true}"#),
        ("/v1/chat/completions", "x-claude-code-session-id", "", "{}"),
        ("/v1/messages", "x-dynamo-session-id", &long, "{}"),
    ];
    for (path, header, id, body) in cases {
        let answer = router.call(Method::POST, path, &[(header, id)], body.to_owned()).await;
        assert_eq!(answer.status, StatusCode::OK, "{header}: {answer:?}");
        let turn = a.turns().pop().unwrap();
        assert_eq!((session_of(&turn), turn.body.as_ref()), (None, body.as_bytes()), "{header}");
    }
    let metrics = router.metrics().await;
    for (reason, count) in [("several_answers", 2), ("background", 1), ("unusable", 2)] {
        assert!(metrics.contains(&left_out(reason, count)), "{reason}: {metrics}");
    }
    // A turn of the session, and a session that is named on purpose, are the agent's to decide.
    router.chat(&[("thread-id", "t")], "{}").await;
    assert_eq!(session_of(&a.turns().pop().unwrap()), Some("t"));
    router.chat(&[("x-berth-session-id", "t")], several).await;
    assert_eq!(session_of(&a.turns().pop().unwrap()), Some("t"));
    let named = router.chat(&[("x-berth-session-id", &long)], "{}").await;
    assert_eq!(named.refusal(), (400, "invalid_session_id".to_owned()));
}

#[tokio::test]
async fn a_session_that_a_client_opened_is_never_left_out() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let opened = router.call(Method::POST, "/v1/sessions", &[], r#"{"session_id":"t"}"#).await;
    assert_eq!(opened.status, StatusCode::CREATED);
    router.chat(&[("thread-id", "t")], r#"{"n":2}"#).await;
    assert_eq!(session_of(&a.turns().pop().unwrap()), Some("t"), "the agent refuses it");
    let waiting: Headers<'_> = &[("thread-id", "t"), ("x-test-wait", "tail")];
    let owner = router.begin(Method::POST, "/v1/completions", waiting, "{\"a\":1}").await;
    let second = router.chat(&[("thread-id", "t")], "{}").await;
    assert_eq!(second.refusal(), (409, "session_busy".to_owned()));
    // Its close is asked for while a turn runs. Hints then run without it, names are told.
    router.call(Method::DELETE, "/v1/sessions/t", &[], "").await;
    let hinted = router.chat(&[("thread-id", "t")], "{}").await;
    assert_eq!(hinted.status, StatusCode::OK, "{hinted:?}");
    let named = router.chat(&[("x-berth-session-id", "t")], "{}").await;
    assert_eq!(named.refusal(), (409, "session_closing".to_owned()));
    assert!(router.metrics().await.contains(&left_out("closing", 1)));
    a.inner.release.add_permits(1);
    collect(owner).await;
}

#[tokio::test]
async fn a_name_that_may_be_the_request_s_begins_a_session_when_it_comes_again() {
    let agents = [Agent::start("a"), Agent::start("b"), Agent::start("c")];
    let router = Router::start(&agents.each_ref()).await;
    for request in 0..100 {
        let id = format!("request-{request}");
        let answer = router.chat(&[("x-correlation-id", &id)], "{}").await;
        assert_eq!(answer.status, StatusCode::OK);
    }
    assert!(agents.iter().all(|agent| agent.session_count() == 0), "no session for a request");
    assert!(router.metrics().await.contains(&left_out("seen_once", 100)));
    let mut workers = BTreeSet::new();
    for header in ["x-correlation-id", "x-smg-routing-key", "x-client-request-id"] {
        for conversation in 0..6 {
            let id = format!("{header}-{conversation}");
            let first = router.chat(&[(header, &id)], "{}").await;
            let worker = first.header("x-berth-worker");
            workers.insert(worker.to_owned());
            for turn in 0..3 {
                let next = router.chat(&[(header, &id)], "{}").await;
                let placed = (next.header("x-berth-worker"), next.header("x-berth-placement"));
                assert_eq!(placed, (worker, "sticky"), "turn {turn} of {id}");
            }
        }
    }
    assert!(workers.len() > 1, "or staying says nothing");
    let sessions: usize = agents.iter().map(Agent::session_count).sum();
    assert_eq!(sessions, 18, "the conversations are sessions");
}

#[tokio::test]
async fn sessions_are_known_by_what_each_program_sends() {
    let a = Agent::start("a");
    let mut settings = config(&[&a]);
    settings.placement.session_headers = vec!["X-Chat".to_owned()];
    let router = Router::start_with(settings).await;
    wait_until("the router is ready", async || router.is_ready().await).await;
    let user_id = r#"{"metadata":{"user_id":"{\"session_id\":\"from claude\"}"}}"#;
    let metadata = r#"{"thread_id":"from codex"}"#;
    let cases: [(Headers<'_>, &str, Option<&str>); 9] = [
        (&[("session-id", "from pi")], "{}", Some("from pi")),
        (&[("session_id", "from old pi")], "{}", Some("from old pi")),
        (&[("session-id", "root"), ("thread-id", "own")], "{}", Some("own")),
        (&[("x-litellm-session-id", "from litellm")], "{}", Some("from litellm")),
        (&[("x-codex-turn-metadata", metadata)], "{}", Some("from codex")),
        (&[("x-client-request-id", "r")], user_id, Some("from claude")),
        (&[("x-chat", "added"), ("thread-id", "t")], "{}", Some("added")),
        (&[("x-codex-turn-metadata", "{")], "{}", None),
        (&[], r#"{"metadata":{"user_id":"{\"session_id\":1}"}}"#, None),
    ];
    for (headers, body, session) in cases {
        let answer = router.call(Method::POST, "/v1/messages", headers, body).await;
        assert_eq!(answer.status, StatusCode::OK, "{headers:?} {body}: {answer:?}");
        assert_eq!(session_of(&a.turns().pop().unwrap()), session, "{headers:?} {body}");
    }
    assert!(router.metrics().await.contains(&left_out("unusable", 2)));
}

#[tokio::test]
async fn a_constant_name_keeps_no_crowd_of_turns_on_one_worker() {
    let agents = [Agent::start("a"), Agent::start("b"), Agent::start("c"), Agent::start("d")];
    let router = Router::start(&agents.each_ref()).await;
    let waiting: Headers<'_> = &[("x-session-id", "constant"), ("x-test-wait", "tail")];
    let mut answers = vec![];
    for turn in 0..16 {
        let body = format!("{{\"a\":{turn}}}");
        answers.push(router.begin(Method::POST, "/v1/completions", waiting, body).await);
    }
    let turns = agents.each_ref().map(|agent| agent.turns().len());
    assert_eq!(turns.iter().sum::<usize>(), 16);
    assert!(turns.iter().all(|count| (3..=5).contains(count)), "{turns:?}");
    let in_session = |agent: &Agent| {
        agent.turns().iter().filter(|turn| session_of(turn) == Some("constant")).count()
    };
    let in_session = agents.each_ref().map(in_session);
    assert_eq!(in_session.iter().max(), Some(&4), "as many as a conversation has: {in_session:?}");
    assert_eq!(in_session.iter().sum::<usize>(), 4);
    assert!(router.metrics().await.contains(&left_out("crowded", 12)));
    agents.iter().for_each(|agent| agent.inner.release.add_permits(16));
    for answer in answers {
        collect(answer).await;
    }
    let next = router.chat(&[("x-session-id", "constant")], "{}").await;
    assert_eq!(next.header("x-berth-placement"), "sticky", "one after the other, it is a session");
}

#[tokio::test]
async fn a_full_table_of_sessions_refuses_no_hinted_turn() {
    let a = Agent::start("a");
    let mut settings = config(&[&a]);
    settings.limits.sessions_max = 1;
    let router = Router::start_with(settings).await;
    let waiting: Headers<'_> = &[("thread-id", "t"), ("x-test-wait", "tail")];
    let owner = router.begin(Method::POST, "/v1/completions", waiting, "{\"a\":1}").await;
    let hinted = router.chat(&[("thread-id", "u")], "{}").await;
    assert_eq!(hinted.status, StatusCode::OK, "{hinted:?}");
    let turn = a.turns().pop().unwrap();
    assert_eq!((session_of(&turn), turn.envelope.hints.session), (None, false));
    let named = router.chat(&[("x-berth-session-id", "u")], "{}").await;
    assert_eq!(named.status, StatusCode::TOO_MANY_REQUESTS);
    assert!(router.metrics().await.contains(&left_out("table_full", 1)));
    a.inner.release.add_permits(1);
    collect(owner).await;
}

#[tokio::test]
async fn hints_reach_the_agent_within_the_caller_s_bound_and_no_byte_changes() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let body = r#"{"nvext":{"agent_hints":{"priority":-3,"osl":77,"speculative_prefill":true},
        "later":1},"messages":[
        {"content":[{"type":"text","text":"a","cache_control":{"type":"ephemeral","ttl":"1h"}}]}
    ]}"#;
    let forged = (ENVELOPE, r#"{"hints":{"priority":99}}"#);
    router.chat(&[("thread-id", "t"), forged], body).await;
    let turn = a.turns().pop().unwrap();
    let hints = turn.envelope.hints;
    let expected = TurnHints {
        session: true,
        priority: Some(-3),
        answer_tokens: Some(77),
        returns_soon: true,
    };
    assert_eq!((hints, turn.body.as_ref()), (expected, body.as_bytes()));
    assert_eq!(turn.envelope.session.unwrap().idle_ms_max, Some(3_600_000));
    // Nobody is above `normal` without a key that says so.
    let urgent = r#"{"nvext":{"agent_hints":{"priority":9}},"prompt_cache_retention":"24h"}"#;
    router.chat(&[("x-berth-session-id", "s")], urgent).await;
    let turn = a.turns().pop().unwrap();
    let hints = turn.envelope.hints;
    assert_eq!((hints.session, hints.priority), (false, Some(0)));
    assert_eq!(turn.envelope.session.unwrap().idle_ms_max, Some(86_400_000));
    router.chat(&[forged], "{}").await;
    assert_eq!(a.turns().pop().unwrap().envelope.hints, TurnHints::default());
}

#[tokio::test]
async fn required_session_control_fails_with_the_flag_where_no_engine_keeps_sessions() {
    let required = |id: &str| {
        format!(r#"{{"nvext":{{"session_control":{{"session_id":"{id}","required":true}}}}}}"#)
    };
    let (a, b) = (Agent::start_with("a", vec![Retention::None]), Agent::start("b"));
    let plain = Router::start(&[&a]).await;
    let refused = plain.chat(&[], &required("s")).await;
    assert_eq!(refused.refusal(), (409, "retention_unavailable".to_owned()));
    assert!(refused.text().contains("--enable-streaming-session"), "{}", refused.text());
    let asked = plain.chat(&[("x-berth-retention", "tagged")], r#"{"session_id":"s"}"#).await;
    assert!(asked.text().contains("--enable-session-radix-cache"), "{}", asked.text());
    let mixed = Router::start(&[&a, &b]).await;
    for id in ["s", "t", "u"] {
        let answer = mixed.chat(&[], &required(id)).await;
        assert_eq!((answer.status, answer.header("x-berth-worker")), (StatusCode::OK, "b/0"));
    }
}

#[tokio::test]
async fn a_model_that_no_worker_has_is_answered_with_the_list() {
    let (a, b) = (Agent::serving("a", "small"), Agent::serving("b", "small"));
    let router = Router::start(&[&a, &b]).await;
    for model in ["small", "default", ""] {
        let answer = router.chat(&[], &format!(r#"{{"model":"{model}"}}"#)).await;
        assert_eq!(answer.status, StatusCode::OK, "{model:?}");
    }
    for (headers, model) in
        [(&[][..], "large"), (&[("thread-id", "t")], "large"), (&[], "large:adapter")]
    {
        router.chat(headers, "{}").await;
        let answer = router.chat(headers, &format!(r#"{{"model":"{model}"}}"#)).await;
        assert_eq!(answer.refusal(), (404, "model_not_found".to_owned()), "{model}");
        assert!(answer.text().contains("served are: small"), "{}", answer.text());
    }
    // Other workers' models are served where they are.
    let c = Agent::serving("c", "large");
    let mixed = Router::start(&[&a, &c]).await;
    let answer = mixed.chat(&[], r#"{"model":"large"}"#).await;
    assert_eq!(answer.header("x-berth-worker"), "c/0");
    let none = mixed.chat(&[], r#"{"model":"medium"}"#).await;
    assert!(none.text().contains("served are: large, small"), "{}", none.text());
}

#[tokio::test]
async fn a_turn_goes_where_its_adapter_is_loaded() {
    let (a, b) = (Agent::serving("a", "m"), Agent::serving("b", "m"));
    a.inner.set_adapters(&[]);
    b.inner.set_adapters(&["sql"]);
    a.inner.used_tokens.store(100, Ordering::Relaxed);
    b.inner.used_tokens.store(9_000, Ordering::Relaxed);
    let router = Router::start(&[&a, &b]).await;
    let at = async |body: &str| {
        let answer = router.chat(&[], body).await;
        answer.header("x-berth-worker").to_owned()
    };
    assert_eq!(at(r#"{"model":"m"}"#).await, "a/0", "the one with more room");
    for body in [r#"{"model":"m:sql"}"#, r#"{"model":"sql"}"#, r#"{"lora_path":"sql"}"#] {
        assert_eq!(at(body).await, "b/0", "{body}");
    }
    // A session goes on where its turn's adapter is.
    let session: Headers<'_> = &[("thread-id", "t")];
    let first = router.chat(session, r#"{"model":"m"}"#).await;
    assert_eq!(first.header("x-berth-worker"), "a/0");
    let next = router.chat(session, r#"{"model":"m:sql"}"#).await;
    assert_eq!(next.header("x-berth-worker"), "b/0");
    let none = router.chat(&[], r#"{"model":"m:chess"}"#).await;
    assert_eq!(none.refusal(), (404, "model_not_found".to_owned()));
    assert!(none.text().contains("served are: m, sql"), "{}", none.text());
    let listed = router.call(Method::GET, "/v1/models", &[], "").await.json();
    let names: Vec<&str> =
        listed["data"].as_array().unwrap().iter().map(|it| it["id"].as_str().unwrap()).collect();
    assert_eq!(names, ["m", "sql"]);
    // An adapter that is loaded later is found without a restart.
    a.inner.set_adapters(&["chess"]);
    wait_until("the new adapter is known", async || at(r#"{"model":"m:chess"}"#).await == "a/0")
        .await;
}
