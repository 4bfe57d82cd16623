//! What clients get from pairs, and where their sessions go.

use std::collections::BTreeSet;

use anyhow::{Context as _, ensure};
use blocks::block::{BlockTokens, Chain, Scheme};
use engine_sim::kv::KvEventsConfig;
use harness::{
    cluster::{Cluster, ids_turn},
    fleet::{FleetPlan, Place, Processes, credential},
    web::Answer,
};
use serde_json::{Value, json};

use super::{Engines, nothing_held, start, start_plain, start_unready, turn, workers};

/// The page size of the simulated engines.
const PAGE_TOKENS: u32 = 1;
/// A prompt that fills several pages.
const TEXT: &str = "The quick brown fox jumps over the lazy dog, again and again, until it rests.";

/// Pairs answer with the bytes of a single engine, but for ids and times.
pub(super) async fn as_one_engine(_: Place) -> anyhow::Result<String> {
    let (pairs, whole) = (start_plain(1, 1, 0).await?, start_plain(0, 0, 1).await?);
    let chat = json!([{"role": "user", "content": TEXT}]);
    let cases = [
        ("/generate", turn(TEXT, 20)),
        (
            "/v1/completions",
            json!({"model": "tiny", "prompt": TEXT, "max_tokens": 9,
            "temperature": 0, "ignore_eos": true}),
        ),
        (
            "/v1/chat/completions",
            json!({"model": "tiny", "messages": chat, "max_tokens": 9,
            "temperature": 0, "ignore_eos": true}),
        ),
        (
            "/v1/responses",
            json!({"model": "tiny", "input": TEXT, "max_output_tokens": 9,
            "temperature": 0}),
        ),
        (
            "/v1/messages",
            json!({"model": "tiny", "messages": chat, "max_tokens": 9,
            "temperature": 0}),
        ),
    ];
    let mut compared = 0;
    for (path, mut body) in cases {
        for stream in [false, true] {
            body["stream"] = stream.into();
            // A client's own values go to no engine.
            body["bootstrap_host"] = json!("192.0.2.1");
            body["bootstrap_room"] = json!(7);
            let answer = pairs.turn(path, &[], &body).await;
            let expected = whole.turn(path, &[], &body).await;
            let is_pair = workers(&answer) == ("w0/0", "w1/0");
            ensure!(is_pair, "{path}: {:?}", workers(&answer));
            ensure!(
                normal(&answer, stream) == normal(&expected, stream),
                "{path}: {}\n{}",
                answer.text(),
                expected.text()
            );
            compared += 1;
        }
    }
    let bodies: Vec<_> = pairs.engines.iter().flat_map(|it| it.bodies_seen("/generate")).collect();
    for body in &bodies {
        let text = String::from_utf8_lossy(body);
        ensure!(!text.contains("192.0.2.1"), "{text}");
        ensure!(text.matches("bootstrap_room").count() == 1, "{text}");
    }
    nothing_held(&pairs).await;
    Ok(format!("{compared} answers are alike"))
}

/// Returns the JSON values of an answer without what differs between two runs.
fn normal(answer: &Answer, stream: bool) -> Vec<Value> {
    let text = answer.text();
    let lines = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let mut values: Vec<Value> = if stream {
        lines.filter_map(|line| serde_json::from_str(line).ok()).collect()
    } else {
        vec![answer.json()]
    };
    values.iter_mut().for_each(remove_variable);
    // A stream may have several tokens in one event. The last events have the whole answer.
    if stream { values.split_off(values.len().saturating_sub(1)) } else { values }
}

fn remove_variable(value: &mut Value) {
    match value {
        Value::Object(members) => {
            members.retain(|key, _| {
                let varies = ["id", "created", "created_at", "completed_at", "dp_rank", "item_id"];
                // An event's number in a stream counts those before, which may have several tokens.
                let is_number = key == "sequence_number";
                let is_time = ["_ts", "latency", "throughput", "time"];
                let is_time = is_time.iter().any(|it| key.contains(it));
                !varies.contains(&key.as_str()) && !is_time && !is_number
            });
            members.values_mut().for_each(remove_variable);
        }
        Value::Array(values) => values.iter_mut().for_each(remove_variable),
        _ => {}
    }
}

/// A session's turns go to one decode engine, their prompts to the prefill engine that has them.
pub(super) async fn sessions_stay(_: Place) -> anyhow::Result<String> {
    let engines = Engines { prefill: 2, decode: 2, whole: 0 };
    let change = |_: usize, config: &mut engine_sim::Config| {
        config.kv_events = Some(KvEventsConfig::local());
        config.core.max_total_tokens = 8192;
    };
    let cluster = start(engines, change, |_| {}).await?;
    let mut homes = BTreeSet::new();
    let mut cached = 0;
    for session in 0..8 {
        let id = format!("s{session}");
        let headers = [("x-berth-session-id", id.as_str())];
        let mut history: Vec<u32> =
            (0..200).map(|token| (7 * token + 37 * session) % 320).collect();
        let mut home: Option<(String, String)> = None;
        for _ in 0..4 {
            let answer = cluster.turn("/generate", &headers, &ids_turn(&history, 70)).await;
            let (prefill, decode) = workers(&answer);
            let here = (prefill.to_owned(), decode.to_owned());
            if let Some(home) = &home {
                ensure!(*home == here, "session {id} went from {home:?} to {here:?}");
                let tokens = answer.meta("cached_tokens").context("cached tokens")?;
                ensure!(tokens > 0, "no prefix was on {prefill}: {}", answer.text());
                cached += tokens;
            }
            let ids: Vec<u32> = serde_json::from_value(answer.json()["output_ids"].clone())?;
            history.extend(ids);
            home = Some(here);
            // The next turn's prefill worker is the one that has the history, once that is known.
            nothing_held(&cluster).await;
            for prefill in 0..engines.prefill {
                wait_for_blocks(&cluster, prefill).await?;
            }
        }
        homes.extend(home);
    }
    ensure!(homes.len() > 1, "all sessions are on {homes:?}");
    // The decode engines keep no KV, so nothing is tagged there, and nothing can be pinned.
    let shown = cluster.worker(2).await;
    ensure!(shown["role"] == "decode" && shown["retentions"] == json!(["none"]), "{shown}");
    ensure!(shown["load"]["staged_prefill"].is_null(), "{shown}");
    let pinned = json!({"session_id": "p", "retention": "pinned"});
    let refused = cluster.post("/v1/sessions", &[], &pinned).await;
    ensure!(refused.code() == "retention_unavailable", "{}", refused.text());
    nothing_held(&cluster).await;
    Ok(format!("8 sessions on {} pairs, {cached} cached tokens", homes.len()))
}

/// Waits until the router knows all blocks of an engine's cache.
async fn wait_for_blocks(cluster: &Cluster, number: usize) -> anyhow::Result<()> {
    let chains = cluster.engines[number].cached(0).await.context("the engine runs")?;
    let scheme = Scheme::plain(BlockTokens::for_page(PAGE_TOKENS)?);
    let mut resident = BTreeSet::new();
    for (_, tokens) in chains {
        let mut blocks = vec![];
        Chain::new(&scheme).push(&tokens, &mut blocks);
        resident.extend(blocks);
    }
    let what = format!("{} blocks of worker {number}", resident.len());
    let is_told = |worker: &Value| worker["kv"]["resident_blocks"] == resident.len();
    cluster.wait_for_worker(number, &what, is_told).await;
    Ok(())
}

/// The log probabilities of the prompt come from the prefill engine, the rest from the decode one.
pub(super) async fn logprobs_are_merged(_: Place) -> anyhow::Result<String> {
    let (pairs, whole) = (start_plain(1, 1, 0).await?, start_plain(0, 0, 1).await?);
    let mut count = 0;
    for stream in [false, true] {
        for start in [json!(0), json!(5), json!(-1), Value::Null] {
            let mut body = turn(TEXT, 6);
            body["return_logprob"] = true.into();
            body["logprob_start_len"] = start.clone();
            body["stream"] = stream.into();
            let answer = pairs.turn("/generate", &[], &body).await;
            let expected = whole.turn("/generate", &[], &body).await;
            let (got, want) = (normal(&answer, stream), normal(&expected, stream));
            ensure!(got == want, "{start}: {}\n{}", answer.text(), expected.text());
            let values = |value: &Value| {
                let list = value["meta_info"]["input_token_logprobs"].as_array();
                list.map_or(0, Vec::len)
            };
            // Every event has them.
            let text = answer.text();
            let events = text.lines().filter_map(|line| line.strip_prefix("data: {"));
            for event in events {
                let event: Value = serde_json::from_str(&format!("{{{event}"))?;
                ensure!(values(&event) == values(&want[0]), "{text}");
            }
            ensure!((values(&want[0]) > 0) == (start == 0 || start == 5), "{}", want[0]);
            count += values(&want[0]);
        }
    }
    nothing_held(&pairs).await;
    Ok(format!("{count} values"))
}

/// Batches and several answers are refused, unless an engine runs whole turns.
pub(super) async fn unpaired_is_refused(_: Place) -> anyhow::Result<String> {
    let (pairs, mixed) = (start_plain(1, 1, 0).await?, start_plain(1, 1, 1).await?);
    let several = turn(TEXT, 4)["sampling_params"].clone();
    let mut two_answers = several.clone();
    two_answers["n"] = json!(2);
    let cases = [
        ("/generate", json!({"text": ["a", "b"], "sampling_params": several})),
        ("/generate", json!({"input_ids": [[1, 2], [3]], "sampling_params": several})),
        ("/generate", json!({"text": "a", "sampling_params": two_answers})),
        ("/v1/completions", json!({"prompt": ["a", "b"], "model": "tiny"})),
        ("/v1/completions", json!({"prompt": "a", "model": "tiny", "n": 2})),
        ("/v1/completions", json!({"prompt": "a", "model": "tiny", "echo": true, "logprobs": 1})),
        ("/v1/embeddings", json!({"input": "a", "model": "tiny"})),
    ];
    for (path, body) in &cases {
        let refused = pairs.post(path, &[], body).await;
        ensure!(refused.refusal() == (400, "pair_unsupported".to_owned()), "{}", refused.text());
        let answer = mixed.post(path, &[], body).await;
        ensure!(workers(&answer) == ("", "w2/0"), "{path}: {}", answer.text());
    }
    let turns: usize = pairs.turns_seen("/generate").into_iter().sum();
    ensure!(turns == 0, "{turns} of them reached an engine");
    // A turn that a pair can run doesn't go to the engine that runs whole turns.
    let paired = mixed.turn("/generate", &[], &turn(TEXT, 2)).await;
    ensure!(workers(&paired) == ("w0/0", "w1/0"), "{:?}", workers(&paired));
    Ok(format!("{} kinds", cases.len()))
}

/// Engines that don't fit form no pair; without one, an engine that runs whole turns serves.
pub(super) async fn only_engines_that_fit(_: Place) -> anyhow::Result<String> {
    let engines = Engines { prefill: 1, decode: 1, whole: 0 };
    type Change = fn(&mut engine_sim::Config);
    let changes: [Change; 4] = [
        |config| config.hand_off.kv_cache_dtype = "fp8_e5m2".to_owned(),
        |config| config.hand_off.transfer_backend = "nixl".to_owned(),
        |config| config.core.page_size = 32,
        |config| config.served_model_name = Some("other".to_owned()),
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let change = |engine: usize, config: &mut engine_sim::Config| {
            if engine == 1 {
                change(config);
            }
        };
        let add_whole = Engines { whole: number % 2, ..engines };
        // A router of engines that form no pair isn't ready.
        let cluster = start_unready(add_whole, change).await?;
        let mut body = turn(TEXT, 2);
        body.as_object_mut().context("an object")?.remove("model");
        let answer = cluster.post("/generate", &[], &body).await;
        if add_whole.whole == 1 {
            ensure!(workers(&answer) == ("", "w2/0"), "{number}: {}", answer.text());
        } else {
            ensure!(answer.refusal() == (503, "no_pair".to_owned()), "{number}: {}", answer.text());
        }
    }
    Ok(format!("{} kinds", changes.len()))
}

/// Processes of their own, with a prefill engine of two DP ranks.
pub(super) async fn processes(place: Place) -> anyhow::Result<String> {
    let flags = |flags: &[&str]| flags.iter().map(|flag| (*flag).to_owned()).collect();
    let plan = FleetPlan {
        engines: 2,
        flags_by_engine: vec![
            flags(&["--disaggregation-mode", "prefill", "--dp-size", "2"]),
            flags(&["--disaggregation-mode", "decode"]),
        ],
        ..FleetPlan::default()
    };
    let fleet = Processes::start(place, &plan).await?;
    let key = credential("alice");
    let headers = [("authorization", key.as_str())];
    let mut ranks = BTreeSet::new();
    for number in 0..16 {
        let body = turn(&format!("{number} {TEXT}"), 8);
        let answer = fleet.web.post(&fleet.url(0, "/generate"), &headers, &body).await?;
        ensure!(answer.status == 200, "{}", answer.text());
        ranks.insert(workers(&answer).0.to_owned());
    }
    ensure!(ranks.len() == 2, "all prompts were computed on {ranks:?}");
    Ok(format!("16 turns over {} prefill ranks", ranks.len()))
}
