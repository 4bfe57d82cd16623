//! Tests of requests whose ends two readers could see at different places (smuggling).
//!
//! The router reads a request's body to its end and sends it on with a length of its own. So what
//! an agent reads can't depend on how a client has framed its request; these tests see that.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use harness::cluster::{Cluster, PATIENCE, text_turn};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

/// A turn that a client would hide in the body of another request.
const HIDDEN: &str = "POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
                      content-length: 62\r\n\r\n\
                      {\"text\": \"hidden\", \"sampling_params\": {\"max_new_tokens\": 1}}  ";

/// What a router may do with a request that is framed in an odd way.
#[derive(Clone, Copy)]
enum Want {
    /// Refuse it, and close the connection: nothing of it runs.
    Refused,
    /// Run it as one turn with the body `BODY`, and nothing else.
    OneTurn,
    /// Run it, and what follows as a request of its own: the client may send two.
    TwoTurns,
}

const BODY: &str = r#"{"text": "open", "sampling_params": {"max_new_tokens": 1}}"#;

/// Sends bytes to the router, and returns all that it answers until it closes the connection.
async fn exchange(cluster: &Cluster, bytes: &[u8]) -> String {
    let mut client = TcpStream::connect(cluster.routers[0].data).await.unwrap();
    client.write_all(bytes).await.unwrap();
    // One more request ends the connection, if it is still open and in step.
    let last = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    let _ = client.write_all(last).await;
    let mut answers = vec![];
    let read = client.read_to_end(&mut answers);
    let _ = tokio::time::timeout(PATIENCE, read).await.expect("the connection ends");
    String::from_utf8_lossy(&answers).into_owned()
}

/// Returns the requests, each with what it is.
fn requests() -> Vec<(&'static str, String, Want)> {
    let chunked = format!("{:x}\r\n{BODY}\r\n0\r\n\r\n", BODY.len());
    let length = BODY.len();
    let post = |headers: &str, body: &str| {
        let head =
            "POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
        format!("{head}{headers}\r\n{body}")
    };
    let plain = format!("content-length: {length}\r\n");
    vec![
        ("a length", post(&plain, BODY), Want::OneTurn),
        ("chunks", post("transfer-encoding: chunked\r\n", &chunked), Want::OneTurn),
        ("two requests", format!("{}{HIDDEN}", post(&plain, BODY)), Want::TwoTurns),
        (
            "a length beyond the chunks",
            post("transfer-encoding: chunked\r\ncontent-length: 500\r\n", &chunked),
            Want::OneTurn,
        ),
        (
            "chunks that end before a hidden request",
            post(
                &format!("content-length: {}\r\ntransfer-encoding: chunked\r\n", HIDDEN.len() + 5),
                &format!("0\r\n\r\n{HIDDEN}"),
            ),
            Want::Refused,
        ),
        ("two lengths", post(&format!("{plain}content-length: 3\r\n"), BODY), Want::Refused),
        ("a signed length", post(&format!("content-length: +{length}\r\n"), BODY), Want::Refused),
        ("a list of lengths", post("content-length: 3, 58\r\n", BODY), Want::Refused),
        ("another encoding", post("transfer-encoding: xchunked\r\n", &chunked), Want::Refused),
        ("chunked twice", post("transfer-encoding: chunked, chunked\r\n", &chunked), Want::OneTurn),
        (
            "an encoding around",
            post("transfer-encoding: chunked, gzip\r\n", &chunked),
            Want::Refused,
        ),
        (
            "a name with a space",
            post(&format!("transfer-encoding : chunked\r\n{plain}"), BODY),
            Want::Refused,
        ),
        (
            "a folded line",
            post(&format!("x: y\r\n transfer-encoding: chunked\r\n{plain}"), BODY),
            Want::Refused,
        ),
        (
            "a chunk with a wrong size",
            post("transfer-encoding: chunked\r\n", &format!("3\r\n{BODY}\r\n0\r\n\r\n")),
            Want::Refused,
        ),
        (
            "a chunk whose size overflows",
            post("transfer-encoding: chunked\r\n", "fffffffffffffffff\r\n"),
            Want::Refused,
        ),
        (
            "a body of a GET",
            format!("GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n{HIDDEN}"),
            Want::OneTurn,
        ),
    ]
}

#[tokio::test]
async fn no_framing_hides_a_request_in_another_one() {
    let cluster = Cluster::start(1, |_| {}).await.unwrap();
    for (what, bytes, want) in requests() {
        let before = cluster.engine().bodies_seen("/generate").len();
        let answers = exchange(&cluster, bytes.as_bytes()).await;
        let seen = cluster.engine().bodies_seen("/generate");
        let turns = &seen[before..];
        let wanted = match want {
            Want::Refused => 0,
            Want::OneTurn => 1,
            Want::TwoTurns => 2,
        };
        assert_eq!(turns.len(), wanted, "{what}: {answers}");
        let ran = answers.matches("\"meta_info\"").count();
        assert_eq!(ran, wanted, "{what}: {answers}");
        if wanted == 0 {
            assert!(answers.starts_with("HTTP/1.1 4"), "{what}: {answers}");
        }
        // The connections to the agent are in step.
        cluster.turn("/generate", &[], &text_turn("after", 1)).await;
    }
    assert_eq!(cluster.post("/generate", &[], &json!({})).await.status, 400);
}

#[tokio::test]
async fn the_most_headers_that_a_router_takes_reach_the_engine() {
    let cluster = Cluster::start(1, |_| {}).await.unwrap();
    let long = "x".repeat(400);
    let headers: String = (0..74).map(|number| format!("x-{number}: {long}\r\n")).collect();
    let request = format!(
        "POST /generate HTTP/1.1\r\nhost: localhost\r\nx-session-id: long\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n{headers}\r\n{BODY}",
        BODY.len(),
    );
    let answers = exchange(&cluster, request.as_bytes()).await;
    assert!(answers.starts_with("HTTP/1.1 200 "), "{answers}");
    let too_many: String = (0..10).map(|number| format!("y-{number}: 1\r\n")).collect();
    let request = request.replacen("x-0: ", &format!("{too_many}x-0: "), 1);
    let answers = exchange(&cluster, request.as_bytes()).await;
    assert!(answers.starts_with("HTTP/1.1 431 "), "{answers}");
}
