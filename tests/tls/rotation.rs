//! Tests that certificates and tokens are replaced under load without a failed turn.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use axum::body::Body;
use harness::{
    certificates::{AGENT, Authority, Files, ROUTER, token},
    cluster::{Cluster, eventually, text_turn},
    web::Web,
};
use http::{Method, StatusCode};

use crate::{PROOF, router_web, sign, signer};

/// Clients that send turns until they are stopped, each over new connections.
struct Load {
    is_over: Arc<AtomicBool>,
    turns: Arc<AtomicUsize>,
    clients: tokio::task::JoinSet<()>,
}

impl Load {
    fn start(cluster: &Cluster, web: impl Fn() -> Web) -> Self {
        let (is_over, turns) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let mut clients = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let (is_over, turns) = (Arc::clone(&is_over), Arc::clone(&turns));
            let (web, url) = (web(), cluster.url("/generate"));
            clients.spawn(async move {
                while !is_over.load(Ordering::Relaxed) {
                    let answer = web.post(&url, &[], &text_turn("hello", 4)).await.unwrap();
                    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
                    turns.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        Self { is_over, turns, clients }
    }

    /// Ends the load. Panics if a turn failed.
    async fn end(mut self) -> usize {
        self.is_over.store(true, Ordering::Relaxed);
        while let Some(ended) = self.clients.join_next().await {
            ended.unwrap();
        }
        self.turns.load(Ordering::Relaxed)
    }
}

/// How often the files of a purpose were reloaded, at the agent or the router.
async fn reloads(cluster: &Cluster, process: &str, purpose: &str) -> u64 {
    let url = match process {
        "agent" => cluster.agent().admin_url("/metrics"),
        _ => cluster.routers[0].admin_url("/metrics"),
    };
    let page = cluster.web.get(&url).await.unwrap().text();
    let labels = format!("purpose=\"{purpose}\",result=\"ok\"");
    let name = format!("berth_{process}_file_reloads_total{{{labels}}} ");
    let count = page.lines().find_map(|line| line.strip_prefix(&name)).expect("it is shown");
    count.parse().unwrap()
}

/// Changes files, and waits until the process uses them.
async fn change(cluster: &Cluster, process: &str, purpose: &str, write: impl FnOnce()) {
    let before = reloads(cluster, process, purpose).await;
    write();
    eventually("the reload", || async {
        (reloads(cluster, process, purpose).await > before).then_some(())
    })
    .await;
}

#[tokio::test]
async fn certificates_and_their_authority_rotate_under_load() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let files = Files::of_fleet(&old);
    files.write_authorities("agents-ca.pem", &[&old]);
    let mut cluster = Cluster::start(1, |settings| {
        files.secure(settings);
        settings.router.as_mut().unwrap().agents.ca = files.path("agents-ca.pem");
    })
    .await
    .unwrap();
    files.write_authorities("clients-ca.pem", &[&old, &new]);
    cluster.web = files.web(None, None);
    files.issue("old-router", &old, ROUTER);
    let old_web = files.web(Some("old-router"), Some(AGENT));
    // Clients trust both authorities from the start.
    let clients = || {
        let tls = service::tls::client::ClientFiles {
            ca: files.path("clients-ca.pem"),
            identity: None,
            server_name: None,
        };
        let metrics = service::reload::Metrics::default();
        Web::with_tls(tls.start(&metrics, &service::tasks::Tasks::default()).unwrap())
    };
    let load = Load::start(&cluster, clients);
    // Both sides trust the new authority, then show its certificates, then forget the old one.
    change(&cluster, "router", "client_tls", || {
        files.write_authorities("agents-ca.pem", &[&old, &new]);
    })
    .await;
    change(&cluster, "agent", "server_tls", || files.write_authorities("ca.pem", &[&old, &new]))
        .await;
    change(&cluster, "agent", "server_tls", || files.issue("agent", &new, AGENT)).await;
    change(&cluster, "router", "client_tls", || files.issue("router", &new, ROUTER)).await;
    change(&cluster, "router", "server_tls", || files.issue("front", &new, "127.0.0.1")).await;
    change(&cluster, "router", "client_tls", || files.write_authorities("agents-ca.pem", &[&new]))
        .await;
    change(&cluster, "agent", "server_tls", || files.write_authorities("ca.pem", &[&new])).await;
    let before = load.turns.load(Ordering::Relaxed);
    eventually("more turns", || async {
        (load.turns.load(Ordering::Relaxed) > before + 20).then_some(())
    })
    .await;
    assert!(load.end().await > 40);
    // The old certificate opens nothing any more, and the new ones are shown.
    let url = cluster.agent().url("/v1/models");
    let mut control = files.control_client(cluster.agent().control_url()).await;
    let signer = signer(&files.path("tokens"), &mut control).await;
    let get = async |web: Web| {
        let proof = sign(&signer, &Method::GET, &url, &[]);
        web.request(Method::GET, &url, &[(PROOF, &proof)], Body::empty()).await
    };
    get(old_web).await.unwrap_err();
    assert_eq!(get(router_web(&files)).await.unwrap().status, StatusCode::OK);
    assert_eq!(files.web(None, None).get(&cluster.url("/health")).await.unwrap().status, 200);
    assert_eq!(cluster.worker(0).await["state"], "fresh");
}

#[tokio::test]
async fn tokens_rotate_under_load_and_a_broken_file_changes_nothing() {
    let files = Files::of_fleet(&Authority::new("fleet"));
    files.write("router-tokens", &token('a'));
    let mut cluster = Cluster::start(1, |settings| {
        files.secure(settings);
        settings.router.as_mut().unwrap().agents.token_file = files.path("router-tokens");
    })
    .await
    .unwrap();
    cluster.web = files.web(None, None);
    let mut control = files.control_client(cluster.agent().control_url()).await;
    let old = signer(&files.path("tokens"), &mut control).await;
    let load = Load::start(&cluster, || files.web(None, None));
    let both = format!("{}\n{}\n", token('a'), token('b'));
    change(&cluster, "agent", "router_token", || files.write("tokens", &both)).await;
    change(&cluster, "router", "router_token", || files.write("router-tokens", &token('b'))).await;
    change(&cluster, "agent", "router_token", || files.write("tokens", &token('b'))).await;
    files.write("tokens", "too short");
    let outdated = "berth_agent_file_outdated{purpose=\"router_token\"} 1";
    eventually("the warning", || async {
        cluster.agent_metrics().await.contains(outdated).then_some(())
    })
    .await;
    assert!(load.end().await > 20);
    let url = cluster.agent().url("/generate");
    let proof = sign(&old, &Method::POST, &url, &[]);
    let headers = [(PROOF, proof.as_str())];
    let refused = router_web(&files).post(&url, &headers, &text_turn("hello", 4)).await.unwrap();
    assert_eq!(refused.refusal(), (401, "not_a_router".to_owned()));
    cluster.turn("/generate", &[], &text_turn("hello", 4)).await;
}
