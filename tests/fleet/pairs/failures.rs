//! What ends the halves of a turn, and what clients hear of it.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use engine_sim::hand_off::HandOffFault;
use harness::{
    cluster::{Cluster, eventually},
    fleet::Place,
    web::Answer,
};
use http::StatusCode;
use serde_json::json;
use service::clock::now;

use super::{Engines, nothing_held, set_fault, start, start_plain, turn, workers};

/// The longest time between the failure of one half and the end of the other.
const COUPLED_MAX: Duration = Duration::from_millis(100);
/// How much longer it may take on a loaded machine, in which a timer may come late.
const LOADED_MAX: Duration = Duration::from_secs(20);

const TEXT: &str = "A prompt whose KV is handed over, or not.";

/// Sends a turn, streamed or not, and returns its answer and how long it took.
async fn timed(cluster: &Cluster, path: &str, stream: bool) -> (Answer, Duration) {
    let mut body = turn(TEXT, 8);
    body["stream"] = stream.into();
    body["prompt"] = TEXT.into();
    body["messages"] = json!([{"role": "user", "content": TEXT}]);
    if path == "/v1/chat/completions" || path == "/v1/completions" {
        body.as_object_mut().expect("an object").remove("text");
    }
    let began: Instant = now();
    let answer = cluster.post(path, &[], &body).await;
    (answer, began.elapsed())
}

/// Waits until no engine hands anything over, and returns how long that took.
async fn time_to_end(cluster: &Cluster) -> Duration {
    let began: Instant = now();
    eventually("the end of all hand-offs", || async {
        cluster.engines.iter().all(|engine| engine.hand_offs_running() == 0).then_some(())
    })
    .await;
    began.elapsed()
}

/// A prefill engine that fails ends the decode half, and the client gets the reason.
pub(super) async fn prefill_fails(_: Place) -> anyhow::Result<String> {
    let cluster = start_plain(1, 1, 0).await?;
    let mut slowest = Duration::ZERO;
    for (fault, reason) in [
        (HandOffFault::Rank, "follow_bootstrap_room conflict"),
        (HandOffFault::Transfer, "KVTransferError"),
    ] {
        set_fault(&cluster, fault);
        for path in ["/generate", "/v1/chat/completions"] {
            for stream in [false, true] {
                let (answer, _) = timed(&cluster, path, stream).await;
                let ended_after = time_to_end(&cluster).await;
                slowest = slowest.max(ended_after);
                ensure!(answer.text().contains(reason), "{path} {stream}: {}", answer.text());
                ensure!(answer.status != StatusCode::OK || stream, "{}", answer.text());
                ensure!(ended_after < LOADED_MAX, "the other half ended after {ended_after:?}");
            }
        }
        nothing_held(&cluster).await;
    }
    set_fault(&cluster, HandOffFault::None);
    cluster.turn("/generate", &[], &turn(TEXT, 8)).await;
    let is_late = if slowest > COUPLED_MAX { ", over its limit of 100 ms" } else { "" };
    Ok(format!("other half ended within {} ms{is_late}", slowest.as_millis()))
}

/// A decode engine that fails ends the prefill half.
pub(super) async fn decode_fails(_: Place) -> anyhow::Result<String> {
    let slow = |_: usize, config: &mut engine_sim::Config| {
        config.core.prefill_tokens_per_s = 1_000.0;
    };
    let engines = Engines { prefill: 1, decode: 1, whole: 0 };
    let cluster = start(engines, slow, |_| {}).await?;
    set_fault(&cluster, HandOffFault::Memory);
    for stream in [false, true] {
        let (answer, _) = timed(&cluster, "/generate", stream).await;
        ensure!(answer.text().contains("Out of memory"), "{}", answer.text());
        nothing_held(&cluster).await;
    }
    // The decode half is aborted while the prefill engine waits for it.
    set_fault(&cluster, HandOffFault::Bootstrap);
    let aborted = async {
        eventually("both halves", || async {
            cluster.engines.iter().all(|engine| engine.hand_offs_running() == 1).then_some(())
        })
        .await;
        let url = format!("{}/abort_request", cluster.engines[1].url());
        cluster.web.post(&url, &[], &json!({"abort_all": true})).await
    };
    let ((answer, _), aborted) = tokio::join!(timed(&cluster, "/generate", false), aborted);
    aborted?;
    ensure!(answer.status == 500, "{}", answer.text());
    ensure!(answer.text().contains("Aborted by AbortReq."), "{}", answer.text());
    let ended_after = time_to_end(&cluster).await;
    ensure!(ended_after < LOADED_MAX, "the prefill half ended after {ended_after:?}");
    nothing_held(&cluster).await;
    Ok(format!("prefill half ended within {} ms", ended_after.as_millis()))
}

/// A client that leaves ends both halves, before and after the first bytes of its answer.
pub(super) async fn client_leaves(_: Place) -> anyhow::Result<String> {
    let cluster = start_plain(1, 1, 0).await?;
    let mut slowest = Duration::ZERO;
    for stream in [false, true] {
        set_fault(&cluster, HandOffFault::Bootstrap);
        let both_run = eventually("both halves", || async {
            cluster.engines.iter().all(|engine| engine.hand_offs_running() == 1).then_some(())
        });
        tokio::select! {
            (answer, _) = timed(&cluster, "/generate", stream) => {
                anyhow::bail!("answered: {}", answer.text())
            }
            () = both_run => {}
        }
        slowest = slowest.max(time_to_end(&cluster).await);
        nothing_held(&cluster).await;
    }
    set_fault(&cluster, HandOffFault::None);
    cluster.slow_down(0.05).await;
    let mut long = turn(TEXT, 500);
    long["sampling_params"]["max_new_tokens"] = json!(500);
    drop(cluster.stream("/generate", &[], long).await);
    cluster.slow_down(0.0).await;
    nothing_held(&cluster).await;
    ensure!(slowest < LOADED_MAX, "both halves ended after {slowest:?}");
    Ok(format!("both halves ended within {} ms", slowest.as_millis()))
}

/// Engines that don't find each other are given up after the router's limit.
pub(super) async fn neither_connects(_: Place) -> anyhow::Result<String> {
    let engines = Engines { prefill: 1, decode: 1, whole: 0 };
    let limit = Duration::from_millis(300);
    let cluster = start(
        engines,
        |_, _| {},
        |config| {
            config.timeouts.bootstrap_ms_max = 300;
        },
    )
    .await?;
    set_fault(&cluster, HandOffFault::Bootstrap);
    for stream in [false, true] {
        let (answer, took) = timed(&cluster, "/generate", stream).await;
        ensure!(answer.refusal() == (504, "hand_off_late".to_owned()), "{}", answer.text());
        ensure!(took >= limit, "given up after {took:?}");
        nothing_held(&cluster).await;
    }
    let metrics = cluster.web.get(&cluster.routers[0].admin_url("/metrics")).await?.text();
    let counted = metrics.lines().find(|line| line.contains("hand_offs_total{outcome=\"late\"}"));
    ensure!(counted.is_some_and(|line| line.ends_with(" 2")), "{counted:?}");
    Ok("2 turns given up".to_owned())
}

/// An engine that dies ends the turns on its partner, and the next turns go to others.
pub(super) async fn engine_dies(_: Place) -> anyhow::Result<String> {
    for (victim, survivor) in [(0, 2), (2, 0)] {
        let cluster = start_plain(2, 2, 0).await?;
        set_fault(&cluster, HandOffFault::Bootstrap);
        let killed = async {
            eventually("a hand-off", || async {
                let runs = |engine: usize| cluster.engines[engine].hand_offs_running() > 0;
                (runs(0) || runs(1)).then_some(())
            })
            .await;
            // Whichever of the two has the turn.
            for engine in [victim, victim + 1] {
                cluster.engines[engine].kill();
            }
        };
        let ((answer, _), ()) = tokio::join!(timed(&cluster, "/generate", false), killed);
        ensure!(!answer.status.is_success(), "{}", answer.text());
        eventually("the partner's end", || async {
            let runs = |engine: usize| cluster.engines[engine].hand_offs_running() > 0;
            (!runs(survivor) && !runs(survivor + 1)).then_some(())
        })
        .await;
    }
    Ok("the partner's half ended each time".to_owned())
}

/// A prefill engine whose bootstrap port takes no connections is not ready.
pub(super) async fn bootstrap_server_gone(_: Place) -> anyhow::Result<String> {
    let cluster = start_plain(1, 1, 0).await?;
    cluster.turn("/generate", &[], &turn(TEXT, 2)).await;
    cluster.engines[0].stop_bootstrap();
    let shown = cluster
        .wait_for_worker(0, "an unhealthy engine", |shown| shown["state"] == "unhealthy")
        .await;
    let reason = shown["reason"].as_str().context("a reason")?;
    let server = format!("bootstrap server at {}:", cluster.engines[0].addr().ip());
    ensure!(reason.contains(&server), "{reason}");
    let refused = cluster.post("/generate", &[], &turn(TEXT, 2)).await;
    ensure!(refused.refusal() == (503, "no_pair".to_owned()), "{}", refused.text());
    ensure!(cluster.turns_seen("/generate") == [1, 1], "a turn reached an engine");
    let health = cluster.web.get(&format!("{}/health", cluster.engines[0].url())).await?;
    ensure!(health.status == StatusCode::OK, "the engine itself is healthy");
    Ok(reason.to_owned())
}

/// A half that its agent refuses is tried on another pair, and nothing of the first is left.
pub(super) async fn tried_elsewhere(_: Place) -> anyhow::Result<String> {
    let headers = [("x-berth-session-id", "s")];
    let mut retried = 0;
    for is_prefill in [true, false] {
        let cluster = start_plain(2, 2, 0).await?;
        let first = cluster.turn("/generate", &headers, &turn(TEXT, 4)).await;
        let (prefill, decode) = workers(&first);
        let victim = if is_prefill { prefill } else { decode };
        let number: usize = victim.trim_matches(['w', '/', '0']).parse().unwrap_or(0);
        // The router doesn't know yet, and sends the next turn there. The agent refuses it. An
        // engine that could still take the turn might have run it: then no other gets it.
        cluster.engines[number].kill();
        cluster.engines[number].gone().await;
        let second = cluster.turn("/generate", &headers, &turn(TEXT, 4)).await;
        let (prefill, decode) = workers(&second);
        ensure!(prefill != victim && decode != victim, "{prefill} {decode}");
        let metrics = cluster.web.get(&cluster.routers[0].admin_url("/metrics")).await?.text();
        let counts = metrics.lines().filter(|line| line.contains("retries_total{"));
        let count = |line: &str| line.rsplit(' ').next()?.parse::<u32>().ok();
        retried += counts.filter_map(count).sum::<u32>();
        time_to_end(&cluster).await;
    }
    Ok(format!("both served, {retried} tried twice"))
}
