//! Tests of agents that join and leave a running router: by a file, and by announcing themselves.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::{fs, path::Path};

use engine_sim::EngineSim;
use harness::{
    cluster::{Agent, Router, agent_config, eventually, router_config, text_turn as turn},
    keys::{KeyFixture, TestKey},
    web::Web,
};
use serde_json::{Value, json};

const OPS: (&str, &str) = ("authorization", "Bearer sk-ops");

/// Engines, each with an agent.
struct Workers {
    engines: Vec<EngineSim>,
    agents: Vec<Agent>,
}

impl Workers {
    async fn start(count: usize) -> Self {
        let (mut engines, mut agents) = (vec![], vec![]);
        for number in 0..count {
            let engine = EngineSim::start_local(engine_sim::Config::default()).await.unwrap();
            agents.push(Agent::start(agent_config(&engine.url(), &format!("w{number}"))).unwrap());
            engines.push(engine);
        }
        Self { engines, agents }
    }

    /// Writes the file that lists these agents.
    fn list(&self, path: &Path, numbers: &[usize]) {
        let urls: Vec<String> =
            numbers.iter().map(|number| self.agents[*number].control_url()).collect();
        let new = path.with_extension("new");
        fs::write(&new, format!("workers = {}\n", json!(urls))).unwrap();
        fs::rename(new, path).unwrap();
    }

    /// Returns how many turns each engine has got.
    fn turns(&self) -> Vec<usize> {
        let seen = |engine: &EngineSim| engine.bodies_seen("/generate").len();
        self.engines.iter().map(seen).collect()
    }
}

/// Returns the workers that the router shows: their agents' ids, states and sources.
async fn shown(web: &Web, router: &Router) -> Vec<(String, String, Value)> {
    let url = router.url("/v1/workers");
    let answer = web.request("GET".parse().unwrap(), &url, &[OPS], String::new()).await.unwrap();
    let text = |worker: &Value, key: &str| worker[key].as_str().unwrap().to_owned();
    let workers = answer.json()["workers"].as_array().unwrap().clone();
    let shown = workers
        .iter()
        .map(|worker| (text(worker, "agent"), text(worker, "state"), worker["sources"].clone()));
    shown.collect()
}

/// Waits until the router shows exactly these agents, all fresh.
async fn wait_for(web: &Web, router: &Router, agents: &[&str]) {
    let mut wanted: Vec<&str> = agents.to_vec();
    wanted.sort_unstable();
    eventually("the workers", async || {
        let mut shown = shown(web, router).await;
        shown.sort_by(|a, b| a.0.cmp(&b.0));
        let fresh = shown.iter().filter(|(_, state, _)| state == "fresh");
        let fresh: Vec<&str> = fresh.map(|(agent, ..)| agent.as_str()).collect();
        (fresh == wanted && shown.len() == wanted.len()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn agents_of_a_file_join_and_leave_and_no_turn_fails() {
    let workers = Workers::start(3).await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("workers.toml");
    workers.list(&path, &[0, 1]);
    let mut config = router_config(&[]);
    config.discovery.file.clone_from(&path);
    let (router, web) = (Router::start(config).await.unwrap(), Web::default());
    wait_for(&web, &router, &["w0", "w1"]).await;
    let say = async |session: usize| {
        let id = format!("s{session}");
        let headers = [("x-berth-session-id", id.as_str())];
        let answer = web.post(&router.url("/generate"), &headers, &turn("hello", 2)).await;
        assert_eq!(answer.unwrap().status, 200, "session {session}");
    };
    for session in 0..8 {
        say(session).await;
    }
    let before = workers.turns();
    assert!(before[0] > 0 && before[1] > 0 && before[2] == 0, "{before:?}");
    workers.list(&path, &[2, 1]);
    eventually("an agent that leaves", async || {
        let shown = shown(&web, &router).await;
        shown.iter().any(|(agent, state, _)| agent == "w0" && state == "draining").then_some(())
    })
    .await;
    // The sessions move as their next turns come. Then nothing is left there.
    for session in 0..8 {
        say(session).await;
    }
    wait_for(&web, &router, &["w1", "w2"]).await;
    let after = workers.turns();
    assert_eq!(after[0], before[0], "an agent that leaves gets nothing new");
    // A file that can't be read leaves the list as it is.
    fs::write(&path, "workers = [\"nonsense\"]").unwrap();
    eventually("the failure", async || {
        let metrics = web.get(&router.admin_url("/metrics")).await.unwrap().text();
        metrics.contains("berth_router_source_failing{source=\"file\"} 1").then_some(())
    })
    .await;
    wait_for(&web, &router, &["w1", "w2"]).await;
    workers.list(&path, &[0, 1, 2]);
    wait_for(&web, &router, &["w0", "w1", "w2"]).await;
    let sources = shown(&web, &router).await;
    assert!(sources.iter().all(|(.., sources)| *sources == json!(["file"])), "{sources:?}");
}

#[tokio::test]
async fn an_agent_announces_itself_and_a_rogue_gets_no_turn() {
    let workers = Workers::start(2).await;
    let [honest, rogue] = [0, 1].map(|number| workers.agents[number].control);
    let right = format!("announce = {{ agents = [\"w*\"], addresses = [\"{honest}\"] }}");
    let keys: [TestKey<'_>; 3] = [
        ("ops", "sk-ops", "admin = true"),
        ("agents", "sk-agents", &right),
        ("alice", "sk-alice", ""),
    ];
    let keys = KeyFixture::new(&keys).unwrap();
    let mut config = router_config(&[]);
    (config.discovery.announce, config.auth.keys_file) = (true, keys.path());
    let (router, web) = (Router::start(config).await.unwrap(), Web::default());
    let announce = async |key: &str, id: &str, control: String, leaving: bool| {
        let key = format!("Bearer {key}");
        let body =
            json!({ "agent_id": id, "control": control, "ttl_ms": 60_000, "leaving": leaving });
        let headers = [("authorization", key.as_str())];
        web.post(&router.url("/v1/agents"), &headers, &body).await.unwrap()
    };
    for (key, id, address) in [
        ("sk-agents", "w1", format!("http://{rogue}")),
        ("sk-agents", "rogue", format!("http://{honest}")),
        ("sk-alice", "w1", format!("http://{rogue}")),
        ("sk-ops", "w1", format!("http://{rogue}")),
        ("sk-agents", "w1", format!("http://{honest}@{rogue}")),
    ] {
        let answer = announce(key, id, address, false).await;
        assert_eq!(answer.refusal(), (403, "announce_forbidden".to_owned()), "{key} {id}");
    }
    let answer = announce("sk-agents", "w0", format!("http://{honest}"), false).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    wait_for(&web, &router, &["w0"]).await;
    let alice = [("authorization", "Bearer sk-alice")];
    for _ in 0..4 {
        let answer = web.post(&router.url("/generate"), &alice, &turn("hello", 2)).await.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    assert_eq!(workers.turns(), [4, 0], "the rogue has got turns");
    assert_eq!(announce("sk-agents", "w0", format!("http://{honest}"), true).await.status, 200);
    wait_for(&web, &router, &[]).await;
}
