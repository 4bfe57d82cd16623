//! End-to-end tests of refusals that depend on the moment at which a turn or a watcher comes.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::net::SocketAddr;

use contract::v1;
use harness::{
    cluster::{Cluster, ClusterSettings, eventually, text_turn},
    envelope::{ENVELOPE, envelope_of},
    keys::KeyFixture,
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
};

async fn start(change: impl FnOnce(&mut ClusterSettings)) -> Cluster {
    Cluster::start_worker(change).await.unwrap()
}

/// A client that has sent the head of a turn, and sends the body later.
struct SlowClient {
    stream: BufReader<TcpStream>,
    body: String,
}

impl SlowClient {
    /// Sends the head of a turn. Returns when the agent asks for the body, which it does once the
    /// turn's session is claimed, or else with the refusal.
    async fn claim_turn(cluster: &Cluster, claim: Option<&Value>) -> Result<Self, String> {
        let body = text_turn(" you", 1).to_string();
        let session = claim.map(|claim| format!("{ENVELOPE}: {}\r\n", envelope_of(claim)));
        let head = format!(
            "POST /generate HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\
             content-type: application/json\r\nexpect: 100-continue\r\n{}\r\n",
            body.len(),
            session.unwrap_or_default()
        );
        let mut stream = TcpStream::connect(cluster.agent().data).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut client = Self { stream: BufReader::new(stream), body };
        let mut status = String::new();
        client.stream.read_line(&mut status).await.unwrap();
        if status != "HTTP/1.1 100 Continue\r\n" {
            return Err(status + &client.rest().await);
        }
        client.stream.read_line(&mut status).await.unwrap();
        Ok(client)
    }

    /// Sends the body, and returns the answer with its head.
    async fn send_body(mut self) -> String {
        self.stream.write_all(self.body.as_bytes()).await.unwrap();
        self.rest().await
    }

    async fn rest(&mut self) -> String {
        let mut rest = String::new();
        self.stream.read_to_string(&mut rest).await.unwrap();
        rest
    }
}

/// Starts a worker on which one turn may wait for another turn of its session, and opens `s`.
async fn start_with_session() -> Cluster {
    let cluster = start(|settings| settings.agent.sessions.turns_queued_per_session_max = 1).await;
    let opens = json!({"principal": "p", "id": "s", "retention": "pinned", "open": true});
    let headers = [(ENVELOPE, &*envelope_of(&opens))];
    cluster.turn("/generate", &headers, &text_turn("hello there", 1)).await;
    cluster
}

fn delta() -> Value {
    json!({"principal": "p", "id": "s", "delta": true})
}

fn assert_refused(answer: &str, status: &str, code: &str) {
    let code = format!("x-berth-refusal: {code}\r\n");
    assert!(answer.starts_with(status) && answer.contains(&code), "{answer}");
}

#[tokio::test]
async fn an_agent_claims_so_many_turns_and_refuses_the_next_before_its_body() {
    service::descriptors::raise_limit();
    let cluster = start(|settings| {
        settings.agent.limits.turns_in_flight_max = 1;
        settings.agent.limits.turns_queued_max = 1;
    })
    .await;
    let mut clients = vec![];
    let refused = loop {
        let claim = json!({"principal": "p", "id": format!("s{}", clients.len())});
        match SlowClient::claim_turn(&cluster, Some(&claim)).await {
            Ok(client) => clients.push(client),
            Err(refused) => break refused,
        }
    };
    assert_refused(&refused, "HTTP/1.1 429", "turns");
    let refused = SlowClient::claim_turn(&cluster, None).await.err().unwrap();
    assert_refused(&refused, "HTTP/1.1 429", "turns");
    let answer = clients.pop().unwrap().send_body().await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    eventually("a place", || async { SlowClient::claim_turn(&cluster, None).await.ok() }).await;
}

#[tokio::test]
async fn slow_uploads_without_a_session_hold_no_place() {
    let cluster = start(|settings| {
        settings.agent.limits.turns_in_flight_max = 1;
        settings.agent.limits.turns_queued_max = 1;
    })
    .await;
    let mut clients = vec![];
    for _ in 0..16 {
        clients.push(SlowClient::claim_turn(&cluster, None).await.unwrap());
    }
    let headers = [(ENVELOPE, &*envelope_of(&json!({"principal": "p", "id": "s"})))];
    cluster.turn("/generate", &headers, &text_turn("hello there", 1)).await;
    for client in clients {
        let answer = client.send_body().await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
}

/// More streams than the agent takes of any kind, and fewer than a connection carries.
const STREAMS: usize = 150;

/// Opens streams until the agent refuses one. Returns the open ones and the refusal.
async fn fill<S>(
    mut open: impl AsyncFnMut() -> Result<S, tonic::Status>,
) -> (Vec<S>, tonic::Status) {
    let mut streams = vec![];
    for _ in 0..STREAMS {
        match open().await {
            Ok(stream) => streams.push(stream),
            Err(refused) => return (streams, refused),
        }
    }
    panic!("the agent refuses no stream");
}

#[tokio::test]
async fn an_agent_has_places_for_so_many_watchers_and_counts_those_that_it_refuses() {
    let cluster = start(|_| {}).await;
    let client = cluster.agent().control_client().await.unwrap();
    let watch_kv = async || client.clone().watch_kv(v1::WatchKvRequest {}).await;
    let watch_load = async || client.clone().watch_load(v1::WatchLoadRequest {}).await;
    let ((mut kv, kv_refused), (_load, load_refused)) =
        (fill(watch_kv).await, fill(watch_load).await);
    for refused in [kv_refused, load_refused] {
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted, "{refused}");
    }
    let metrics = cluster.agent_metrics().await;
    for stream in ["kv", "load"] {
        let line = format!("berth_agent_control_streams_refused_total{{stream=\"{stream}\"}} 1\n");
        assert!(metrics.contains(&line), "{metrics}");
    }
    kv.pop();
    eventually("a place", || async { watch_kv().await.ok() }).await;
}

#[tokio::test]
async fn a_turn_that_waits_while_its_engine_ends_is_refused_and_may_be_sent_again() {
    let cluster = start_with_session().await;
    // The agent must have this turn's body before the next turn may run.
    let _first = SlowClient::claim_turn(&cluster, Some(&delta())).await.unwrap();
    let (session, body) = (envelope_of(&delta()), text_turn(" me", 1));
    let headers = [(ENVELOPE, session.as_str())];
    let mut second = std::pin::pin!(cluster.post("/generate", &headers, &body));
    let waiting = eventually("a waiting turn", || async {
        let line = "berth_agent_turns_queued{dp_rank=\"0\"} 1\n";
        cluster.agent_metrics().await.contains(line).then_some(())
    });
    tokio::select! {
        answer = &mut second => panic!("it did not wait: {}", answer.text()),
        () = waiting => cluster.engine().kill(),
    }
    let answer = second.await;
    assert_eq!(answer.refusal(), (503, "engine_lost".to_owned()));
    assert_eq!(answer.header("retry-after"), "2", "it did not run");
}

#[tokio::test]
async fn a_turn_whose_body_comes_when_its_agent_stops_may_be_sent_elsewhere() {
    let slow = |settings: &mut ClusterSettings| settings.engine.core.decode_ms_per_step = 10.0;
    let mut cluster = start(slow).await;
    let claim = json!({"principal": "p", "id": "s"});
    let client = SlowClient::claim_turn(&cluster, Some(&claim)).await.unwrap();
    let agent = cluster.agents.pop().unwrap();
    let (url, ready_url) = (format!("http://{}/generate", agent.data), agent.admin_url("/readyz"));
    let (web, long) = (&cluster.web, text_turn("a long turn", 300));
    // The agent doesn't end before this turn has, which ends when the late body was answered.
    cluster.slow_down(0.3).await;
    let run_long = async { web.post(&url, &[], &long).await.unwrap() };
    let metrics_url = agent.admin_url("/metrics");
    let stop = async {
        eventually("a running turn", || async {
            let metrics = web.get(&metrics_url).await.unwrap().text();
            metrics.contains("berth_agent_turns_running{dp_rank=\"0\"} 1\n").then_some(())
        })
        .await;
        agent.stop().await.unwrap();
    };
    let send_late = async {
        eventually("the agent to stop", || async {
            (web.get(&ready_url).await.unwrap().status == 503).then_some(())
        })
        .await;
        // The session is closed by now.
        assert_refused(&client.send_body().await, "HTTP/1.1 503", "stopping");
        cluster.slow_down(0.0).await;
    };
    let (answer, (), ()) = tokio::join!(run_long, stop, send_late);
    assert_eq!(answer.status, 200, "{}", answer.text());
}

#[tokio::test]
async fn a_delta_is_not_appended_without_the_turn_before() {
    let cluster = start_with_session().await;
    let first = SlowClient::claim_turn(&cluster, Some(&delta())).await.unwrap();
    let second = SlowClient::claim_turn(&cluster, Some(&delta())).await.unwrap();
    drop(first);
    assert_refused(&second.send_body().await, "HTTP/1.1 409", "turn_before_failed");
    let third = SlowClient::claim_turn(&cluster, Some(&delta())).await.unwrap();
    let answer = third.send_body().await;
    assert!(answer.starts_with("HTTP/1.1 200"), "the session goes on: {answer}");
}

/// Sends a request with a body of 5 MB in one go, as most clients do, and reads then.
async fn send_5_mb(addr: SocketAddr, path: &str, headers: &str) -> String {
    let mut client = TcpStream::connect(addr).await.unwrap();
    let body = vec![b' '; 5_000_000];
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n{headers}\r\n"
    );
    client.write_all(head.as_bytes()).await.unwrap();
    // The refusal is there before the body.
    client.readable().await.unwrap();
    client.write_all(&body).await.unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test]
async fn a_refusal_before_the_body_reaches_clients_that_send_all_of_it_first() {
    let keys = KeyFixture::new(&[("user", "sk-user", "")]).unwrap();
    let cluster = Cluster::start(1, |settings| {
        let router = settings.router.as_mut().unwrap();
        router.auth.keys_file = keys.path();
        router.limits.body_bytes_max = 1 << 20;
    })
    .await
    .unwrap();
    let (router, agent) = (cluster.routers[0].data, cluster.agent().data);
    let key = "x-api-key: sk-user\r\n";
    for (addr, path, headers, status, code) in [
        (router, "/nothing", key, "404", "route_unknown"),
        (router, "/v1/chat/completions", "", "401", "unauthorized"),
        (router, "/v1/models", key, "405", "method_not_allowed"),
        (router, "/v1/chat/completions", key, "413", "body_too_large"),
        (agent, "/nothing", "", "404", "route_unknown"),
        (agent, "/v1/models", "", "405", "method_not_allowed"),
        (agent, "/generate", "content-encoding: br\r\n", "415", "content_encoding"),
    ] {
        let answer = send_5_mb(addr, path, headers).await;
        assert_refused(&answer, &format!("HTTP/1.1 {status} "), code);
        assert!(answer.contains("connection: close\r\n"), "{answer}");
    }
}

#[tokio::test]
async fn no_refusal_tells_a_client_where_the_engine_is() {
    let cluster = Cluster::start(1, |_| {}).await.unwrap();
    let engine_url = cluster.engine().url();
    let engine_addr = engine_url.strip_prefix("http://").unwrap();
    let opens = json!({ "session_id": "s", "retention": "pinned" });
    let turn = text_turn("hello", 1);
    let own_url = cluster.agent().url("/generate");
    let requests = [
        (&own_url, &turn),
        (&cluster.url("/generate"), &turn),
        (&cluster.url("/v1/sessions"), &opens),
    ];
    cluster.engine().kill();
    for (url, body) in requests {
        let answer = cluster.web.post(url, &[], body).await.unwrap();
        assert!(answer.status.is_server_error(), "{url}: {}", answer.text());
        assert!(!answer.text().contains(engine_addr), "{url}: {}", answer.text());
    }
    // The first refusals say that a connection failed, the later ones what the agent knows.
    let known = eventually("a refusal that gives the agent's reason", || async {
        let text = cluster.web.post(&own_url, &[], &turn).await.unwrap().text();
        text.contains("the engine can't be used: ").then_some(text)
    });
    let text = known.await;
    assert!(!text.contains(engine_addr), "{text}");
}
