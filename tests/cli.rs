//! End-to-end tests of the command `berth`, against routers, agents and simulated engines.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::net::SocketAddr;

use axum::{Json, Router, extract::Query, http::StatusCode, routing::get};
use engine_sim::{kv::KvEventsConfig, loopback::own_addr};
use harness::{
    berth::BerthCommand,
    cluster::{Cluster, eventually, text_turn},
    keys::KeyFixture,
};
use serde_json::{Value, json};

fn berth(flags: &[String]) -> BerthCommand {
    BerthCommand::new(env!("CARGO_BIN_EXE_cli-process"), flags)
}

/// Returns the command that asks the cluster's router and its first agent.
fn berth_at(cluster: &Cluster) -> BerthCommand {
    let router = format!("--router={}", cluster.routers[0].url(""));
    berth(&[router, format!("--agent={}", cluster.agent().control_url())])
}

#[tokio::test]
async fn a_person_sees_workers_devices_and_sessions() {
    let cluster = Cluster::start(2, |_| {}).await.unwrap();
    cluster.open_pinned("chat-1").await;
    let in_session = [("x-berth-session-id", "chat-2")];
    cluster.turn("/generate", &in_session, &text_turn("hi", 4)).await;
    let berth = berth_at(&cluster);
    let workers = berth.run(&["workers"]).await.unwrap();
    assert_eq!(workers.status, 0, "{workers:?}");
    for shown in ["WORKER", "w0/0", "w1/0", "fresh"] {
        assert!(workers.out.contains(shown), "{shown}: {}", workers.out);
    }
    assert!(workers.out.lines().all(|line| line.chars().count() <= 80), "{}", workers.out);
    assert!(!workers.out.contains('\x1b'), "colours only on a terminal: {:?}", workers.out);
    let json = berth.run(&["workers", "--json"]).await.unwrap().json();
    assert_eq!(json["workers"].as_array().unwrap().len(), 2);

    let admin_port = format!("--router={}", cluster.routers[0].admin_url(""));
    let lost = self::berth(&[admin_port]).run(&["workers"]).await.unwrap();
    assert!(lost.err.contains("an admin port answers at"), "{lost:?}");
    assert!(lost.status != 0 && !lost.err.contains("install"), "{lost:?}");

    let devices = berth.run(&["devices", "--json"]).await.unwrap().json();
    assert_eq!(devices["devices"][0]["worker"], "w0/0");
    assert!(berth.run(&["devices"]).await.unwrap().out.contains("no NVML"));

    let sessions = eventually("both sessions", || async {
        let sessions = berth.run(&["sessions", "--json"]).await.unwrap().json();
        (sessions["sessions"].as_array()?.len() == 2).then_some(sessions)
    })
    .await;
    assert_eq!(sessions["sessions"][0]["session_id"], "chat-1");
    let first = berth.run(&["sessions", "--limit", "1"]).await.unwrap().out;
    assert!(first.contains("chat-1") && !first.contains("chat-2"), "{first}");
}

#[tokio::test]
async fn a_session_is_shown_and_closed_and_then_unknown() {
    let cluster = Cluster::start(1, |_| {}).await.unwrap();
    let id = "a/b c?\u{1b}[2J";
    cluster.open_pinned(id).await;
    let berth = berth_at(&cluster);
    let shown = berth.run(&["session", "show", id]).await.unwrap();
    assert_eq!(shown.status, 0, "{shown:?}");
    assert!(shown.out.contains("pinned") && shown.out.contains("w0/0"), "{shown:?}");
    assert!(!shown.out.contains('\x1b'), "an id can't steer the terminal: {:?}", shown.out);
    let listed = berth.run(&["sessions", "--at-agent"]).await.unwrap().out;
    assert!(listed.contains("anonymous") && listed.contains("a/b c?\\u{1b}"), "{listed}");

    let refused = berth.run(&["session", "demote", id]).await.unwrap();
    assert_eq!(refused.status, 1, "{refused:?}");
    assert!(refused.err.contains("shim is not connected"), "this engine has none: {refused:?}");
    let prefetched = berth.run(&["session", "prefetch", id]).await.unwrap();
    assert_eq!(prefetched.status, 0, "{prefetched:?}");
    assert!(prefetched.out.contains("nothing to load"), "it is pinned: {prefetched:?}");
    let closed = berth.run(&["session", "close", id]).await.unwrap();
    assert_eq!(closed.status, 0, "{closed:?}");
    cluster.nothing_held().await;
    eventually("the router's forgetting", || async {
        let shown = berth.run(&["session", "show", id]).await.unwrap();
        (shown.status == 1 && shown.err.contains("berth: the router can't")).then_some(())
    })
    .await;
}

#[tokio::test]
async fn the_placement_of_a_turn_is_explained() {
    let cluster = Cluster::start(2, |_| {}).await.unwrap();
    let turn = cluster.turn("/generate", &[], &text_turn("hello", 4)).await;
    let berth = berth_at(&cluster);
    let id = turn.header("x-berth-turn").to_owned();
    let shown = berth.run(&["placements", &id]).await.unwrap();
    assert_eq!(shown.status, 0, "{shown:?}");
    assert!(shown.out.contains("w0/0") && shown.out.contains("placed on w"), "{}", shown.out);
    let json = berth.run(&["placements", &id, "--json"]).await.unwrap().json();
    assert_eq!(json["turn"], *id);
    assert_eq!(berth.run(&["placements", "0123456789abcdef"]).await.unwrap().status, 1);
}

#[tokio::test]
async fn an_agent_drains_and_serves_again() {
    let cluster = Cluster::start(1, |_| {}).await.unwrap();
    let berth = berth_at(&cluster);
    let drained = berth.run(&["drain"]).await.unwrap();
    assert_eq!(drained.status, 0, "{drained:?}");
    assert!(drained.out.contains("the agent drains: 0 turns run"), "{}", drained.out);
    cluster.wait_for_worker(0, "the drain", |worker| worker["state"] == "draining").await;
    let workers = berth.run(&["workers"]).await.unwrap().out;
    assert!(workers.contains("w0/0: draining"), "the reason is below the table: {workers}");
    let undone = berth.run(&["drain", "--undo", "--json"]).await.unwrap();
    assert_eq!(undone.json()["draining"], false);
    cluster.wait_for_worker(0, "its end", |worker| worker["state"] == "fresh").await;
}

#[tokio::test]
async fn resident_blocks_are_counted_and_an_engine_without_them_is_not_well() {
    let cluster = Cluster::start(1, |settings| {
        settings.engine.kv_events = Some(KvEventsConfig::local());
    })
    .await
    .unwrap();
    cluster.turn("/generate", &[], &text_turn(&"word ".repeat(200), 4)).await;
    let berth = berth_at(&cluster);
    eventually("resident blocks", || async {
        let kv = berth.run(&["kv", "--json"]).await.unwrap();
        let is_known = kv.status == 0 && !kv.json()["ranks"][0]["device"].as_array()?.is_empty();
        is_known.then_some(())
    })
    .await;
    let text = berth.run(&["kv"]).await.unwrap().out;
    assert!(text.contains("rank 0:") && text.contains("on the device"), "{text}");

    let silent = Cluster::start_worker(|_| {}).await.unwrap();
    let berth = self::berth(&[format!("--agent={}", silent.agent().control_url())]);
    let kv = berth.run(&["kv"]).await.unwrap();
    assert_eq!(kv.status, 1, "{kv:?}");
    assert!(kv.out.contains("--kv-events-config"), "it says what to set: {kv:?}");
}

#[tokio::test]
async fn an_audit_without_a_shim_is_not_well() {
    let cluster = Cluster::start_worker(|_| {}).await.unwrap();
    let berth = berth(&[format!("--agent={}", cluster.agent().control_url())]);
    let audit = berth.run(&["audit"]).await.unwrap();
    assert_eq!(audit.status, 1, "{audit:?}");
    assert!(audit.out.contains("rank 0: no audit"), "{audit:?}");
    let json = berth.run(&["audit", "--json"]).await.unwrap().json();
    assert_eq!(json["ranks"][0]["dp_rank"], 0);
}

#[tokio::test]
async fn the_exit_status_says_what_went_wrong() {
    let keys =
        KeyFixture::new(&[("ops", "ops-secret", "admin = true"), ("team", "team-secret", "")])
            .unwrap();
    let cluster = Cluster::start(1, |settings| {
        if let Some(router) = &mut settings.router {
            router.auth.keys_file = keys.path();
        }
    })
    .await
    .unwrap();
    let router = format!("--router={}", cluster.routers[0].url(""));
    let key_file = keys.folder().join("key");
    let with_key = |key: &str| {
        std::fs::write(&key_file, format!("{key}\n")).unwrap();
        berth(&[router.clone(), format!("--key-file={}", key_file.display())])
    };
    assert_eq!(with_key("ops-secret").run(&["workers"]).await.unwrap().status, 0);
    let refused = with_key("team-secret").run(&["workers"]).await.unwrap();
    assert_eq!(refused.status, 77, "{refused:?}");
    assert!(refused.err.contains("admin"), "{refused:?}");
    let unknown = with_key("nobody").run(&["sessions"]).await.unwrap();
    assert_eq!(unknown.status, 77, "{unknown:?}");
    assert!(!unknown.err.contains("nobody"), "a key is never shown: {unknown:?}");
    assert_eq!(with_key("").run(&["workers"]).await.unwrap().status, 66);

    // Nobody else has this address.
    let nothing = SocketAddr::new(own_addr().ip(), 9);
    for (flag, command) in [("--router", "workers"), ("--agent", "audit")] {
        let unreachable = berth(&[format!("{flag}={nothing}")]).run(&[command]).await.unwrap();
        assert_eq!(unreachable.status, 69, "{unreachable:?}");
        assert!(unreachable.err.contains(&nothing.to_string()), "{unreachable:?}");
        assert!(unreachable.err.contains(flag), "it says what to give: {unreachable:?}");
    }
    let berth = berth(&[]);
    for wrong in [&["nothing"][..], &["workers", "--watch=0"], &["--router=ftp://a", "workers"]] {
        assert_eq!(berth.run(wrong).await.unwrap().status, 64, "{wrong:?}");
    }
    assert_eq!(berth.run(&["--version"]).await.unwrap().status, 0);
}

/// Starts a server that answers as a router of another version. Returns its URL.
async fn start_other_router(routes: Router) -> String {
    let document = json!({ "info": { "version": "9.9.9" } });
    let unknown = json!({ "error": { "code": "route_unknown", "message": "no such route" } });
    let routes = routes
        .route("/openapi.json", get(async || Json(document)))
        .fallback(async || (StatusCode::NOT_FOUND, Json(unknown)));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    service::tasks::Tasks::default().spawn(async {
        axum::serve(listener, routes).await.unwrap();
    });
    url
}

#[tokio::test]
async fn a_router_without_a_route_is_named_with_its_version() {
    let url = start_other_router(Router::new()).await;
    let berth = berth(&[format!("--router={url}")]);
    for command in [&["turns"][..], &["placements"]] {
        let absent = berth.run(command).await.unwrap();
        assert_eq!(absent.status, 70, "{absent:?}");
        assert!(absent.err.contains("9.9.9") && absent.err.contains("/v1/"), "{absent:?}");
    }
    let routes = Router::new().route("/v1/workers", get(async || "not JSON"));
    let url = start_other_router(routes).await;
    let garbled = self::berth(&[format!("--router={url}")]).run(&["workers"]).await.unwrap();
    assert_eq!(garbled.status, 70, "{garbled:?}");
}

#[derive(serde::Deserialize)]
struct PageQuery {
    after: Option<usize>,
}

/// Answers with turns in pages of two, as a router with a small bound does: eleven, and one more for
/// each page that was asked for at their end.
async fn answer_turns(Query(query): Query<PageQuery>) -> Json<Value> {
    static ASKED: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(11);
    let begin = query.after.unwrap_or(0);
    let end = ASKED.load(std::sync::atomic::Ordering::Relaxed);
    if begin == end {
        ASKED.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
    let last = end.min(begin + 2);
    let turns: Vec<Value> = (begin..last)
        .map(|number| json!({ "turn": format!("{number:016x}"), "worker": "w0/0", "age_ms": 5 }))
        .collect();
    Json(json!({ "turns": turns, "next": last.to_string() }))
}

#[tokio::test]
async fn turns_are_read_in_pages_and_followed_without_a_gap() {
    let url = start_other_router(Router::new().route("/v1/turns", get(answer_turns))).await;
    let berth = berth(&[format!("--router={url}")]);
    let mut watch = berth.start(&["turns", "--limit=3", "--watch=0.1"]).unwrap();
    let mut lines = vec![];
    for _ in 0..6 {
        lines.push(watch.next_line().await.unwrap());
    }
    assert!(lines[0].starts_with("TURN"), "{lines:?}");
    for (number, line) in (8..).zip(&lines[1..]) {
        assert!(line.starts_with(&format!("{number:016x}")), "{number}: {lines:?}");
    }
}

#[tokio::test]
async fn a_watch_prints_again_and_outlives_a_router_s_restart() {
    let mut cluster = Cluster::start(1, |settings| {
        if let Some(router) = &mut settings.router {
            router.listen.data_addr = own_addr();
        }
    })
    .await
    .unwrap();
    let router = cluster.routers.remove(0);
    let data = router.data;
    let berth = berth(&[format!("--router={}", router.url(""))]);
    let mut watch = berth.start(&["workers", "--json", "--watch=0.1"]).unwrap();
    let mut next = async || {
        let line = watch.next_line().await.unwrap();
        serde_json::from_str::<Value>(&line).unwrap()["workers"][0].clone()
    };
    assert_eq!(next().await["worker"], "w0/0");
    router.stop().await.unwrap();
    let mut config = harness::cluster::router_config(&[]);
    config.listen.data_addr = data;
    cluster.start_router(config).await.unwrap();
    // Only a line of after the restart can show this.
    assert_eq!(berth_at(&cluster).run(&["drain"]).await.unwrap().status, 0);
    while next().await["state"] != "draining" {}
}
