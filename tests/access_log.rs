//! Tests of the router's access log: one line for each request, without what is private.

use harness::cluster::{Cluster, ClusterSettings, eventually, text_turn};
use http::Method;
use serde_json::{Value, json};

#[tokio::test]
async fn each_request_has_a_line_that_says_who_where_and_how_long_but_not_what() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.jsonl");
    let log_to_file = |settings: &mut ClusterSettings| {
        settings.router.as_mut().unwrap().log.access.clone_from(&path);
    };
    let cluster = Cluster::start(1, log_to_file).await.unwrap();
    let session = [("x-berth-session-id", "a-private-name")];
    let turn = cluster.turn("/generate", &session, &text_turn("a private prompt", 3)).await;
    let refused = cluster.post("/generate?key=private", &[], &json!("no object")).await;
    let listed = cluster.get("/v1/models").await;
    let shown = cluster.get("/v1/sessions/a-private-name").await;
    assert_eq!(shown.status, 200);
    let unknown = cluster.request(Method::PUT, "/v1/nowhere", &[], String::new()).await;
    let lines = eventually("all lines", || async {
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let is_wanted = |line: &&Value| {
            [turn.status, refused.status, listed.status, unknown.status]
                .iter()
                .any(|status| line["status"] == status.as_u16())
        };
        assert!(!text.contains("private"), "{text}");
        (lines.iter().filter(is_wanted).count() >= 5).then_some(lines)
    })
    .await;
    let of_path = |path: &str, status: u16| {
        let mut found =
            lines.iter().filter(|line| line["path"] == path && line["status"] == status);
        found.next().unwrap_or_else(|| panic!("no line of {path}: {lines:?}"))
    };
    let line = of_path("/generate", 200);
    assert_eq!(line["method"], "POST");
    assert_eq!(line["peer"], "127.0.0.1");
    assert_eq!(line["worker"], turn.header("x-berth-worker"));
    assert_eq!(line["outcome"], "ok");
    assert_eq!(line["output_tokens"], 3);
    assert_eq!(line["response_bytes"].as_u64(), Some(turn.body.len() as u64));
    assert_eq!(line["session"].as_str().map(str::len), Some(16));
    let line = of_path("/generate", 400);
    assert_eq!(line["refusal"], refused.code());
    assert!(line.get("worker").is_none(), "it was not placed: {line}");
    assert_eq!(of_path("/v1/nowhere", unknown.status.as_u16())["refusal"], "route_unknown");
    assert_eq!(of_path("/v1/sessions/{id}", 200)["method"], "GET");
    // The answers are as without a log.
    assert_eq!(listed.header("content-length"), listed.body.len().to_string());
}
