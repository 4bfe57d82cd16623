//! Tests of who is an agent and who is a router, where they share a token and no certificates.

use std::{net::SocketAddr, sync::Arc};

use axum::{body::Body, extract::Request};
use contract::{
    proof,
    v1::{ListSessionsRequest, ProveRequest},
};
use harness::{
    certificates::{Authority, Files, token},
    cluster::{Cluster, Router, eventually, router_config, text_turn},
    envelope::ENVELOPE,
    keys::KeyFixture,
    web::Web,
};
use http::{HeaderMap, Method, Uri};
use parking_lot::Mutex;
use serde_json::json;
use service::{
    proof::{
        announcement,
        router::{SignedChannel, Signer},
    },
    reload::Reloaded,
    router_token::Tokens,
    tasks::Tasks,
};
use tonic::{Status, transport::Endpoint};

/// A process in the place of an agent, with no token. It writes down what it is sent.
struct Impostor {
    addr: SocketAddr,
    seen: Arc<Mutex<Vec<(String, HeaderMap)>>>,
    _tasks: Tasks,
}

impl Impostor {
    async fn start() -> Self {
        let socket = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (addr, seen) = (socket.local_addr().unwrap(), Arc::<Mutex<Vec<_>>>::default());
        let record = Arc::clone(&seen);
        let answer = move |request: Request| {
            let path = request.uri().path().to_owned();
            record.lock().push((path, request.headers().clone()));
            std::future::ready(Status::unimplemented("no").into_http::<Body>())
        };
        let routes = tonic::service::Routes::from(axum::Router::new().fallback(answer));
        let incoming = tokio_stream::wrappers::TcpListenerStream::new(socket);
        let server = tonic::transport::Server::builder().accept_http1(true).add_routes(routes);
        let tasks = Tasks::default();
        tasks.spawn(async move { server.serve_with_incoming(incoming).await.unwrap() });
        Self { addr, seen, _tasks: tasks }
    }

    fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Panics if it was asked for anything but a proof, or was told anything of the token.
    fn learned_nothing(&self, path: &str) {
        let seen = self.seen.lock().clone();
        assert!(!seen.is_empty());
        for (seen_path, headers) in seen {
            assert_eq!(seen_path, path);
            assert!(!headers.contains_key(proof::REQUEST), "{headers:?}");
            assert!(!format!("{headers:?}").contains(&token('a')), "{headers:?}");
        }
    }
}

/// Starts a fleet in which a token is all that routers and agents recognize each other by.
async fn start_with_token(files: &Files) -> Cluster {
    let path = files.path("tokens");
    let start = Cluster::start(1, |settings| {
        settings.agent.auth.token_file.clone_from(&path);
        settings.router.as_mut().unwrap().agents.token_file = path;
    });
    start.await.unwrap()
}

fn signer(files: &Files) -> Arc<Signer> {
    Arc::new(Signer::new(Reloaded::fixed(Tokens::source(files.path("tokens")).read().unwrap())))
}

#[tokio::test]
async fn who_stands_in_an_agents_place_is_sent_no_token_and_no_prompt() {
    let files = Files::of_fleet(&Authority::new("fleet"));
    let impostor = Impostor::start().await;
    let mut config = router_config(&[]);
    config.workers = vec![impostor.url()];
    config.agents.token_file = files.path("tokens");
    let (router, web) = (Router::start(config).await.unwrap(), Web::default());
    let reason = eventually("the reason", || async {
        let workers = web.get(&router.url("/v1/workers")).await.unwrap().json();
        let reason = workers["unheard"][0]["reason"].as_str()?.to_owned();
        (reason != "not heard yet").then_some(reason)
    })
    .await;
    assert!(reason.contains("can't prove itself"), "{reason}");
    let refused = web.post(&router.url("/generate"), &[], &text_turn("secret", 4)).await.unwrap();
    assert_eq!(refused.status, 503);
    impostor.learned_nothing("/berth.agent.v1.WorkerAgent/Prove");
}

#[tokio::test]
async fn who_listens_in_place_of_a_data_port_is_sent_no_prompt() {
    let files = Files::of_fleet(&Authority::new("fleet"));
    let (impostor, path) = (Impostor::start().await, files.path("tokens"));
    let start = Cluster::start(1, |settings| {
        settings.agent.auth.token_file.clone_from(&path);
        settings.agent.advertise.host = impostor.addr.ip().to_string();
        settings.agent.advertise.data_port = impostor.addr.port();
        settings.router.as_mut().unwrap().agents.token_file = path;
    });
    let cluster = start.await.unwrap();
    let refused = cluster.post("/generate", &[], &text_turn("secret", 4)).await;
    assert_eq!(refused.refusal(), (503, "worker_unreachable".to_owned()));
    impostor.learned_nothing(proof::PATH);
    eventually("the reason", || async {
        let reason = cluster.worker(0).await["reason"].as_str()?.to_owned();
        reason.contains("no agent of this fleet").then_some(())
    })
    .await;
}

#[tokio::test]
async fn only_an_agent_with_the_token_announces_itself() {
    let files = Files::of_fleet(&Authority::new("fleet"));
    let right = "announce = { agents = [\"*\"], addresses = [\"127.0.0.0/8\"] }";
    let keys = [("users", "sk-users", "admin = true"), ("agents", "sk-agents", right)];
    let keys = KeyFixture::new(&keys).unwrap();
    std::fs::write(keys.folder().join("announce-key"), "sk-agents\n").unwrap();
    let mut config = router_config(&[]);
    (config.discovery.announce, config.auth.keys_file) = (true, keys.path());
    config.agents.token_file = files.path("tokens");
    (config.tls.cert, config.tls.key) = (files.path("front.pem"), files.path("front.key"));
    let (router, web) = (Router::start(config).await.unwrap(), files.web(None, None));
    let mut cluster = Cluster::start_worker(|settings| {
        let agent = &mut settings.agent;
        agent.auth.token_file = files.path("tokens");
        agent.announce.routers = vec![router.url("")];
        agent.announce.key_file = keys.folder().join("announce-key");
        agent.announce.ca = files.path("ca.pem");
    })
    .await
    .unwrap();
    let impostor = Impostor::start().await;
    let tokens = Tokens::source(files.path("tokens")).read().unwrap();
    let id = "w0";
    // Nothing, and what the agent itself sends, which a listener on the network may have seen.
    let proofs = [None, Some(announcement::sign(&tokens, id, &cluster.agent().control_url()))];
    for proof in proofs {
        let mut headers = vec![("authorization", "Bearer sk-agents")];
        headers.extend(proof.iter().map(|proof| ("x-berth-agent-proof", proof.to_str().unwrap())));
        let body = json!({ "agent_id": id, "control": impostor.url(), "ttl_ms": 60_000 });
        let refused = web.post(&router.url("/v1/agents"), &headers, &body).await.unwrap();
        assert_eq!(refused.refusal(), (403, "announce_forbidden".to_owned()), "{proof:?}");
        assert!(refused.text().contains("agents.token_file"), "{}", refused.text());
    }
    let user = [("authorization", "Bearer sk-users")];
    eventually("a turn at the announced agent", || async {
        let url = router.url("/generate");
        let answer = web.post(&url, &user, &text_turn("hello", 4)).await.unwrap();
        (answer.status == 200).then_some(())
    })
    .await;
    assert!(impostor.seen.lock().is_empty());
    cluster.routers.push(router);
}

#[tokio::test]
async fn a_request_that_was_heard_on_the_network_opens_nothing() {
    let files = Files::of_fleet(&Authority::new("fleet"));
    let cluster = start_with_token(&files).await;
    let signer = signer(&files);
    let channel = Endpoint::from_shared(cluster.agent().control_url()).unwrap().connect_lazy();
    let client = SignedChannel::proven_client(channel, Some(Arc::clone(&signer))).await;
    let (mut client, proven_id) = client.unwrap();
    assert_eq!(proven_id.as_deref(), Some("w0"));
    client.list_sessions(ListSessionsRequest::default()).await.unwrap();
    let url = cluster.agent().url("/v1/models");
    let mut signed = HeaderMap::new();
    signer.sign(&Method::GET, &Uri::try_from(&url).unwrap(), &mut signed);
    let proof = signed[proof::REQUEST].to_str().unwrap();
    let get = async |url: &str, headers: &[(&str, &str)]| {
        cluster.web.request(Method::GET, url, headers, Body::empty()).await.unwrap()
    };
    let (headers, refused) = ([("x-berth-router-proof", proof)], (401, "not_a_router".to_owned()));
    // Not for another request, nor with a claim; for this one once.
    let other = cluster.agent().url("/health");
    let claimed = [headers[0], (ENVELOPE, r#"{"principal":"x","session":{"id":"s"}}"#)];
    assert_eq!(get(&other, &headers).await.refusal(), refused);
    assert_eq!(get(&url, &claimed).await.refusal(), refused);
    assert_eq!(get(&url, &headers).await.status, 200);
    let again = get(&url, &headers).await;
    assert_eq!(again.refusal(), refused);
    assert!(again.text().contains("used before"), "{}", again.text());
    // A hello alone, which needs no proof, is no way past the check.
    let mut control = cluster.agent().control_client().await.unwrap();
    let hello = ProveRequest { token_id: vec![0; 8], nonce: vec![0; 32] };
    assert_eq!(control.prove(hello).await.unwrap_err().code(), tonic::Code::Unauthenticated);
    let hello = ProveRequest { token_id: vec![], nonce: vec![] };
    assert_eq!(control.prove(hello).await.unwrap_err().code(), tonic::Code::InvalidArgument);
    assert_eq!(get(&cluster.agent().url(proof::PATH), &[]).await.refusal(), refused);
}

/// Has the agent forget its routers, as it does when there are too many or when it starts again.
async fn have_routers_forgotten(cluster: &Cluster, files: &Files) {
    let url = cluster.agent().url("/health");
    let mut control = cluster.agent().control_client().await.unwrap();
    for _ in 0..257 {
        let (signer, mut headers) = (signer(files), HeaderMap::new());
        let hello = signer.hello();
        let answer = control.prove(hello.message()).await.unwrap().into_inner();
        signer.accept(&hello, answer).unwrap();
        signer.sign(&Method::GET, &Uri::try_from(&url).unwrap(), &mut headers);
        let headers = [("x-berth-router-proof", headers[proof::REQUEST].to_str().unwrap())];
        let answer = cluster.web.request(Method::GET, &url, &headers, Body::empty()).await;
        assert_eq!(answer.unwrap().status, 200);
    }
}

#[tokio::test]
async fn a_router_that_its_agent_has_forgotten_loses_no_turn_and_no_call() {
    let files = Files::of_fleet(&Authority::new("fleet"));
    let cluster = start_with_token(&files).await;
    cluster.turn("/generate", &[], &text_turn("hello", 4)).await;
    have_routers_forgotten(&cluster, &files).await;
    cluster.open_pinned("s").await;
    have_routers_forgotten(&cluster, &files).await;
    let mut turns = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (web, url) = (cluster.web.clone(), cluster.url("/generate"));
        turns.spawn(async move { web.post(&url, &[], &text_turn("hello", 4)).await.unwrap() });
    }
    for answer in turns.join_all().await {
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    have_routers_forgotten(&cluster, &files).await;
    assert_eq!(cluster.delete("/v1/sessions/s").await.status, 204);
    let metrics = cluster.agent_metrics().await;
    let refused = "berth_agent_refusals_total{code=\"not_a_router\"}";
    assert!(metrics.contains(refused), "the agent has forgotten nobody: {metrics}");
    assert_eq!(cluster.worker(0).await["state"], "fresh");
}
