//! End-to-end tests of volatile preambles, which the router removes from a turn's body.
//!
//! Without its preamble, a turn shares its prefix with the session's earlier turns.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use contract::body::{OWNED_KEYS, Object, assemble};
use harness::cluster::Cluster;
use http::{Method, StatusCode};
use router::config::tables::PreamblePolicy;
use serde_json::json;

async fn start(preamble: PreamblePolicy) -> Cluster {
    let started = Cluster::start(1, |settings| {
        settings.router.as_mut().unwrap().placement.preamble = preamble;
    });
    started.await.unwrap()
}

/// Sends `body` byte for byte. Returns the cached tokens that the answer's usage reports.
async fn send(cluster: &Cluster, path: &str, body: &str) -> u64 {
    let headers = [("content-type", "application/json")];
    let answer = cluster.request(Method::POST, path, &headers, body.to_owned()).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    answer.json()["usage"]["cache_read_input_tokens"].as_u64().unwrap_or_default()
}

/// Returns the last body that the engine got at `path`, without the members that Berth sets.
fn seen(cluster: &Cluster, path: &str) -> String {
    let body = cluster.engine().bodies_seen(path).pop().unwrap();
    let owned = [&OWNED_KEYS[..], &["request_id"]].concat();
    let parts = Object::parse(&body).unwrap().rewrite(&owned);
    String::from_utf8(assemble(&body, &parts, "")).unwrap()
}

/// Returns a preamble as Claude Code writes it, different for each request.
fn preamble(request: u32) -> String {
    let cch = 0x36ee5 + request * 0x1357;
    format!("x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={cch:05x};")
}

/// Returns routes, bodies with a preamble, and the same bodies without it. Text that a user wrote
/// stays.
fn cases() -> Vec<(&'static str, String, String)> {
    let bodies = [
        (
            "/v1/messages",
            r#"{ "system":[{"type":"text","text":"PRE"} , {"type":"text","text":"Be."}],REST }"#,
            r#"{ "system":[ {"type":"text","text":"Be."}],REST }"#,
        ),
        (
            "/v1/messages",
            r#"{"system":"no", REST,"\u0073ystem":"PRE\n\nBe \u0062rief."}"#,
            r#"{"system":"no", REST,"\u0073ystem":"Be \u0062rief."}"#,
        ),
        (
            "/v1/chat/completions",
            r#"{"messages":[ {"role":"developer","content":"PRE\n"}, USER],"max_tokens":4}"#,
            r#"{"messages":[  USER],"max_tokens":4}"#,
        ),
        (
            "/v1/responses",
            r#"{"instructions":"PRE\nBe.","input":[USER],"temperature":0.0e0}"#,
            r#"{"instructions":"Be.","input":[USER],"temperature":0.0e0}"#,
        ),
    ];
    let filled = |body: &str| {
        body.replace("REST", r#""messages":[USER],"max_tokens":4,"temperature":0.0e0"#)
            .replace("USER", r#"{"role":"user","content":"PRE"}"#)
            .replace("PRE", &preamble(1))
    };
    bodies.map(|(path, body, left)| (path, filled(body), filled(left))).to_vec()
}

#[tokio::test]
async fn an_engine_gets_the_body_without_the_preamble_or_every_byte_if_it_is_kept() {
    let (strips, keeps) = (start(PreamblePolicy::Strip).await, start(PreamblePolicy::Keep).await);
    for (path, body, left) in cases() {
        send(&strips, path, &body).await;
        assert_eq!(seen(&strips, path), left, "{path}");
        // Without a preamble, no byte changes.
        send(&strips, path, &left).await;
        assert_eq!(seen(&strips, path), left, "{path}");
        send(&keeps, path, &body).await;
        assert_eq!(seen(&keeps, path), body, "{path}");
    }
}

#[tokio::test]
async fn a_system_prompt_behind_a_changing_preamble_is_found_in_the_cache() {
    let prompt = "You are the harbour master. ".repeat(20);
    let body = |request: u32| {
        let block = |text: &str| json!({"type": "text", "text": text});
        json!({
            "max_tokens": 4, "temperature": 0,
            "system": [block(&preamble(request)), block(&prompt)],
            "messages": [{"role": "user", "content": format!("Request {request}?")}],
        })
        .to_string()
    };
    for (setting, finds) in [(PreamblePolicy::Strip, true), (PreamblePolicy::Keep, false)] {
        let cluster = start(setting).await;
        send(&cluster, "/v1/messages", &body(1)).await;
        let cached = send(&cluster, "/v1/messages", &body(2)).await;
        let all = u64::try_from(prompt.len()).unwrap();
        assert_eq!(cached > all * 9 / 10, finds, "{cached} cached of {all}, {setting:?}");
    }
}
