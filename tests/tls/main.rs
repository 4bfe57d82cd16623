//! Tests of certificates and tokens: clients → router → agents → simulated engines.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

mod engine_key;
mod proof;
mod rotation;

use std::path::Path;

use axum::body::Body;
use contract::{
    proof::REQUEST,
    v1::{ListSessionsRequest, worker_agent_client::WorkerAgentClient},
};
use harness::{
    berth::BerthCommand,
    certificates::{AGENT, Authority, Files, ROUTER, token},
    cluster::{Cluster, Router, eventually, router_config, text_turn},
    envelope::{ENVELOPE, envelope_of},
    web::Web,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use serde_json::{Value, json};
use service::{proof::router::Signer, reload::Reloaded, router_token::Tokens};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tonic::transport::Channel;

/// The name of the header with a request's proof.
const PROOF: &str = "x-berth-router-proof";

/// Starts a fleet with certificates and tokens on every port.
async fn start_secure(workers: usize, files: &Files) -> Cluster {
    let mut cluster = Cluster::start(workers, |settings| files.secure(settings)).await.unwrap();
    cluster.web = files.web(None, None);
    cluster
}

/// Returns a client that an agent takes for a router, if the token is right.
fn router_web(files: &Files) -> Web {
    files.web(Some("router"), Some(AGENT))
}

/// Has the agent prove itself. Returns what a router with this file of tokens then signs with.
async fn signer(tokens: &Path, control: &mut WorkerAgentClient<Channel>) -> Signer {
    let tokens = Tokens::source(tokens.to_owned()).read().unwrap();
    let signer = Signer::new(Reloaded::fixed(tokens));
    let hello = signer.hello();
    let answer = control.prove(hello.message()).await.unwrap().into_inner();
    signer.accept(&hello, answer).unwrap();
    signer
}

/// Returns a router's proof of one request with these headers.
fn sign(signer: &Signer, method: &Method, url: &str, headers: &[(&str, &str)]) -> String {
    let pairs = headers.iter().map(|(name, value)| {
        (name.parse::<HeaderName>().unwrap(), HeaderValue::from_str(value).unwrap())
    });
    let mut headers: HeaderMap = pairs.collect();
    signer.sign(method, &url.parse().unwrap(), &mut headers);
    headers[REQUEST].to_str().unwrap().to_owned()
}

#[tokio::test]
async fn turns_and_sessions_work_with_certificates_and_tokens_on_every_port() {
    let files = Files::of_fleet(&Authority::new("fleet"));
    let cluster = start_secure(2, &files).await;
    assert!(cluster.url("/").starts_with("https://"), "{}", cluster.url("/"));
    cluster.open_pinned("s").await;
    let headers = [("x-berth-session-id", "s"), ("x-berth-delta", "1")];
    for _ in 0..3 {
        cluster.turn("/generate", &headers, &text_turn("hello", 4)).await;
    }
    drop(cluster.stream("/generate", &[], text_turn("hello", 400)).await);
    assert_eq!(cluster.delete("/v1/sessions/s").await.status, StatusCode::NO_CONTENT);
    for number in 0..2 {
        let worker = cluster.worker(number).await;
        assert_eq!(worker["state"], "fresh", "{worker}");
    }
    cluster.nothing_held().await;
}

#[tokio::test]
async fn a_router_without_the_right_proof_gets_no_worker_and_learns_why() {
    let (fleet, stranger) = (Authority::new("fleet"), Authority::new("stranger"));
    let files = Files::of_fleet(&fleet);
    files.issue("forged", &stranger, ROUTER);
    files.issue("other", &fleet, "batch.test");
    files.issue_expired("expired", &fleet, ROUTER);
    files.write("wrong", &token('w'));
    let mut cluster = Cluster::start_worker(|settings| files.secure(settings)).await.unwrap();
    let table = [
        // What the router learns of a refused certificate depends on who is faster: the agent's
        // alert is lost if the router writes to the closed connection first.
        (None, Some("tokens"), "transport error"),
        (Some("forged"), Some("tokens"), "transport error"),
        (Some("expired"), Some("tokens"), "transport error"),
        (Some("other"), Some("tokens"), "transport error"),
        (Some("router"), None, "agents.token_file"),
        (Some("router"), Some("wrong"), "agents.token_file"),
    ];
    for (certificate, tokens, want) in table {
        let mut config = router_config(&[cluster.agent()]);
        files.secure_router(&mut config, certificate, tokens);
        cluster.routers = vec![Router::start(config).await.unwrap()];
        let reason = eventually("the loss of the agent", || async {
            let unheard = cluster.get("/v1/workers").await.json()["unheard"][0].clone();
            let reason = unheard["reason"].as_str()?.to_owned();
            (unheard["state"] == "lost" && reason != "not heard yet").then_some(reason)
        })
        .await;
        let case = format!("{certificate:?} {tokens:?}: {reason}");
        assert!(reason.contains(want), "{case}");
        let refused = cluster.post("/generate", &[], &text_turn("hello", 4)).await;
        assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE, "{case}");
    }
}

#[tokio::test]
async fn an_agent_that_is_not_the_router_s_own_gets_no_turn() {
    let (fleet, stranger) = (Authority::new("fleet"), Authority::new("stranger"));
    let files = Files::of_fleet(&fleet);
    files.issue("forged", &stranger, AGENT);
    files.issue_expired("expired", &fleet, AGENT);
    files.issue("other", &fleet, "batch.test");
    for (certificate, want) in
        [("forged", "UnknownIssuer"), ("expired", "expired"), ("other", "batch.test")]
    {
        let mut cluster = Cluster::start_worker(|settings| {
            files.secure(settings);
            let path = |ending| files.path(&format!("{certificate}.{ending}"));
            (settings.agent.tls.cert, settings.agent.tls.key) = (path("pem"), path("key"));
        })
        .await
        .unwrap();
        let mut config = router_config(&[cluster.agent()]);
        files.secure_router(&mut config, Some("router"), Some("tokens"));
        cluster.routers = vec![Router::start(config).await.unwrap()];
        eventually("the reason", || async {
            let shown = cluster.get("/v1/workers").await.json();
            let reason = shown["unheard"][0]["reason"].as_str()?.to_owned();
            reason.contains(want).then_some(())
        })
        .await;
    }
}

/// A claim names the session's principal and id, which the control port lists.
#[tokio::test]
async fn who_is_no_router_can_not_act_for_a_session_whose_names_it_knows() {
    let files = Files::of_fleet(&Authority::new("fleet"));
    let cluster = start_secure(1, &files).await;
    cluster.open_pinned("s").await;
    let web = router_web(&files);
    let mut control = files.control_client(cluster.agent().control_url()).await;
    let signer = signer(&files.path("tokens"), &mut control).await;
    let call = "/berth.agent.v1.WorkerAgent/ListSessions";
    let mut request = tonic::Request::new(ListSessionsRequest::default());
    request.metadata_mut().insert(PROOF, sign(&signer, &Method::POST, call, &[]).parse().unwrap());
    let listed = control.list_sessions(request).await.unwrap().into_inner();
    let principal = &listed.sessions[0].key.as_ref().unwrap().principal;
    let claim = json!({"principal": principal, "id": "s", "close": true});
    let claim = envelope_of(&claim);
    let url = cluster.agent().url("/generate");
    let claims = [(ENVELOPE, claim.as_str())];
    let unclaimed = sign(&signer, &Method::POST, &url, &[]);
    for headers in [&claims[..], &[claims[0], (PROOF, &unclaimed)]] {
        let refused = web.post(&url, headers, &text_turn("hello", 4)).await.unwrap();
        assert_eq!(refused.refusal(), (401, "not_a_router".to_owned()));
    }
    for path in ["/v1/models", "/nothing", contract::staged_prefill::PATH] {
        let refused = web.get(&cluster.agent().url(path)).await.unwrap();
        assert_eq!(refused.refusal(), (401, "not_a_router".to_owned()), "{path}");
    }
    // Without a certificate there is no connection at all, even with the proof.
    let proof = sign(&signer, &Method::POST, &url, &claims);
    let with_proof = [claims[0], (PROOF, &proof)];
    let stranger = files.web(None, Some(AGENT));
    stranger.post(&url, &with_proof, &text_turn("hello", 4)).await.unwrap_err();
    // A client can't send a proof or a claim through the router: this turn has no session.
    cluster.turn("/generate", &with_proof, &text_turn("hello", 4)).await;
    assert_eq!(cluster.get("/v1/sessions/s").await.json()["turns"], 0);
    // With both proofs, the claim counts, and closes the session.
    let body = json!({"text": "hello", "sampling_params": {"max_new_tokens": 4}});
    let claim = json!({"principal": principal, "id": "s", "delta": true, "close": true});
    let claim = (ENVELOPE, &*envelope_of(&claim));
    let proof = sign(&signer, &Method::POST, &url, &[claim]);
    let answer = web.post(&url, &[claim, (PROOF, &proof)], &body).await.unwrap();
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    eventually("the end of the session", || async {
        (cluster.get("/v1/sessions/s").await.status == StatusCode::NOT_FOUND).then_some(())
    })
    .await;
}

#[tokio::test]
async fn commands_reach_an_agent_only_with_a_router_s_proof() {
    let files = Files::of_fleet(&Authority::new("fleet"));
    let cluster = Cluster::start_worker(|settings| files.secure(settings)).await.unwrap();
    let path = |name: &str| files.path(name).display().to_string();
    let berth = |certificate: bool, with_token: bool| {
        let agent = format!("--agent={}", cluster.agent().control_url());
        let mut flags =
            vec![agent, format!("--ca={}", path("ca.pem")), format!("--server-name={AGENT}")];
        if certificate {
            flags.push(format!("--cert={}", path("router.pem")));
            flags.push(format!("--cert-key={}", path("router.key")));
        }
        if with_token {
            flags.push(format!("--token-file={}", path("tokens")));
        }
        BerthCommand::new(env!("CARGO_BIN_EXE_cli-process"), &flags)
    };
    let audit = ["audit", "--json"];
    let shown = berth(true, true).run(&audit).await.unwrap();
    assert!(shown.out.contains("dp_rank"), "{shown:?}");
    let refused = berth(true, false).run(&audit).await.unwrap();
    assert_eq!(refused.status, 77, "{refused:?}");
    assert!(refused.err.contains("serves routers only"), "{refused:?}");
    assert_ne!(berth(false, true).run(&audit).await.unwrap().status, 0);
}

#[tokio::test]
async fn plain_http_on_a_port_with_tls_is_closed() {
    let files = Files::of_fleet(&Authority::new("fleet"));
    let cluster = start_secure(1, &files).await;
    let agent = cluster.agent();
    for addr in [cluster.routers[0].data, agent.data, agent.control] {
        let mut stream = tokio::net::TcpStream::connect(addr).await.unwrap();
        stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut answer = vec![];
        let ended = stream.read_to_end(&mut answer);
        let _ =
            tokio::time::timeout(harness::cluster::PATIENCE, ended).await.expect("it is closed");
        assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    }
    // The port still serves those who speak TLS.
    assert_eq!(cluster.get("/health").await.status, StatusCode::OK);
}

#[tokio::test]
async fn an_operator_sees_why_handshakes_fail() {
    let files = Files::of_fleet(&Authority::new("fleet"));
    files.issue("other", &Authority::new("stranger"), ROUTER);
    let fleet = start_secure(1, &files).await;
    let agent = fleet.agent();
    let post = async |web: Web| {
        let url = agent.url("/generate");
        web.post(&url, &[], &text_turn("hello", 4)).await.unwrap_err();
    };
    post(files.web(None, Some(AGENT))).await;
    post(files.web(Some("other"), Some(AGENT))).await;
    post(files.web(Some("front"), Some(AGENT))).await;
    post(files.web(Some("router"), Some("elsewhere.test"))).await;
    drop(tokio::net::TcpStream::connect(agent.data).await.unwrap());
    for addr in [fleet.routers[0].data, agent.control] {
        let mut stream = tokio::net::TcpStream::connect(addr).await.unwrap();
        stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let _ = stream.read_to_end(&mut vec![]).await;
    }
    let agent_failures = [
        ("data", "client_certificate", 2),
        ("data", "client_name", 1),
        ("data", "refused_by_client", 1),
        ("data", "disconnected", 1),
        ("control", "not_tls", 1),
    ];
    let router_url = fleet.routers[0].admin_url("/metrics");
    for (port, reason, count) in agent_failures {
        eventually(reason, || async {
            let name = "berth_agent_tls_handshakes_failed_total";
            let line = format!("{name}{{port=\"{port}\",reason=\"{reason}\"}} {count}\n");
            fleet.agent_metrics().await.contains(&line).then_some(())
        })
        .await;
    }
    eventually("the router's count", || async {
        let page = fleet.web.get(&router_url).await.unwrap().text();
        let name = "berth_router_tls_handshakes_failed_total";
        page.contains(&format!("{name}{{port=\"data\",reason=\"not_tls\"}} 1\n")).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_token_alone_is_enough_where_tls_is_elsewhere() {
    let files = Files::of_fleet(&Authority::new("fleet"));
    let token_file = files.path("tokens");
    let cluster = Cluster::start(1, |settings| {
        settings.agent.auth.token_file.clone_from(&token_file);
        settings.router.as_mut().unwrap().agents.token_file.clone_from(&token_file);
    })
    .await
    .unwrap();
    cluster.turn("/generate", &[], &text_turn("hello", 4)).await;
    let url = cluster.agent().url("/generate");
    let refused = cluster.web.post(&url, &[], &text_turn("hello", 4)).await.unwrap();
    assert_eq!(refused.refusal(), (401, "not_a_router".to_owned()));
    let list = cluster.web.request(Method::GET, &url, &[], Body::empty()).await.unwrap();
    assert_eq!(list.status, StatusCode::UNAUTHORIZED);
    let mut control = cluster.agent().control_client().await.unwrap();
    let listed = control.list_sessions(ListSessionsRequest::default()).await;
    assert_eq!(listed.unwrap_err().code(), tonic::Code::Unauthenticated);
    let metrics: Value = cluster.agent_metrics().await.into();
    let counted = "berth_agent_refusals_total{code=\"not_a_router\"} 2";
    assert!(metrics.as_str().unwrap().contains(counted), "{metrics}");
}
