//! Follows the engine: reads its facts once it answers, its loads steadily, and notices when it has
//! gone or come back as another process. Tells the owner; decides nothing.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use proto::process::tasks::Tasks;
use serde_json::Value;
use tokio::sync::{Notify, watch};
use tracing::{debug, info, warn};

use crate::{
    agent::{AgentHandle, EngineNews},
    engine::{self, Engine, Info, Sample},
    kv::KvHandle,
    model,
};

/// Pause between attempts to reach an engine that is down.
const RETRY: Duration = Duration::from_millis(500);
/// Samples that may fail in a row before the engine counts as down. One slow answer isn't a crash.
const FAILURES_MAX: u32 = 3;

/// What to follow, and how often.
#[derive(Debug, Clone)]
pub struct Follower {
    /// The engine.
    pub engine: Engine,
    /// Who hears of it.
    pub agent: AgentHandle,
    /// Who follows its KV events.
    pub kv: KvHandle,
    /// Time between samples.
    pub interval: Duration,
    /// Wakes the follower when a turn found the engine gone.
    pub look: Arc<Notify>,
    /// Size of the vocabulary, where the settings say it.
    pub vocabulary: Option<u32>,
    /// Told what makes tokens of text.
    pub files: watch::Sender<Option<Arc<model::Files>>>,
}

/// Follows until the tasks are cancelled.
pub async fn run(follower: Follower, tasks: Tasks) {
    let token = tasks.token();
    tokio::select! {
        () = token.cancelled() => {}
        () = follow(&follower) => {}
    }
}

async fn follow(follower: &Follower) {
    loop {
        match look(follower).await {
            Ok((info, first)) => {
                follower.agent.engine(EngineNews::Up(info)).await;
                follower.agent.engine(EngineNews::Sample(first.clone())).await;
                if let Some(down) = sample(follower, first).await {
                    follower.agent.engine(down).await;
                }
            }
            Err(error) => {
                debug!(%error, "engine not reached");
                follower.agent.engine(down(&error)).await;
                let _ = tokio::time::timeout(RETRY, follower.look.notified()).await;
            }
        }
    }
}

/// The engine's facts, and its loads for the first time: one that doesn't tell them would be up and
/// down again and again, and take turns in between. The loads first, so that the facts are not of a
/// process before theirs.
async fn look(follower: &Follower) -> Result<(Box<Info>, Sample), engine::Error> {
    let first = follower.engine.sample(now).await?;
    let (info, source, feed) = follower.engine.info().await?;
    follower.kv.feed(feed);
    Ok((Box::new(with_model(info, source, follower).await), first))
}

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

fn down(error: &engine::Error) -> EngineNews {
    EngineNews::Down { reason: error.to_string(), gone: error.is_gone() }
}

/// Samples until the engine doesn't answer (and says why), or answers as another process.
async fn sample(follower: &Follower, first: Sample) -> Option<EngineNews> {
    let mut ticks = tokio::time::interval(follower.interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut failures = 0;
    let mut last = first;
    loop {
        tokio::select! {
            biased;
            // Whatever a turn saw, the engine's facts tell what is true now.
            () = follower.look.notified() => return None,
            _ = ticks.tick() => {}
        }
        match follower.engine.sample(now).await {
            Ok(sample) => {
                failures = 0;
                if may_be_another(&last, &sample) {
                    return None;
                }
                last = sample.clone();
                follower.agent.engine(EngineNews::Sample(sample)).await;
            }
            Err(error) => {
                failures += 1;
                warn!(%error, failures, "no load sample");
                if failures >= FAILURES_MAX || error.is_gone() {
                    return Some(down(&error));
                }
                if error.is_broken() {
                    // Its other end may have been a process that is no more: look who is there.
                    return None;
                }
            }
        }
    }
}

/// The engine's counters only grow, so smaller ones are another process's; and one that restarted
/// quickly has ended the connection.
fn may_be_another(last: &Sample, next: &Sample) -> bool {
    let total = |sample: &Sample| -> u64 {
        sample.ranks.iter().map(|rank| rank.total_prefill_uncached_tokens).sum()
    };
    total(next) < total(last) || next.connection != last.connection
}

/// What the engine doesn't say itself, its model's files do.
async fn with_model(mut info: Info, source: Option<model::Source>, follower: &Follower) -> Info {
    // They may be large, or on a slow disk: nobody's thread waits.
    let read = tokio::task::spawn_blocking(move || {
        let (source, hub) = (source?, model::hub());
        Some((vocabulary(&source), model::Files::find(&source, hub.as_deref())))
    });
    let (vocabulary, files) = read.await.ok().flatten().unzip();
    info.facts.vocabulary = follower.vocabulary.or(vocabulary.flatten());
    if info.facts.vocabulary.is_none() {
        warn!("the model's vocabulary is unknown: set `vocabulary`, or token ids are not checked");
    }
    let files = match files {
        Some(Ok(files)) => Some(Arc::new(files)),
        Some(Err(error)) => {
            let source = std::error::Error::source(&error).map(ToString::to_string);
            info!(%error, source, "routers get no tokenizer from here");
            None
        }
        None => None,
    };
    info.model_files = files.as_ref().map(|files| files.named());
    follower.files.send_replace(files);
    info
}

/// The engine doesn't say how large its vocabulary is; the model's own config does.
fn vocabulary(source: &model::Source) -> Option<u32> {
    let folder = source.folder(model::hub().as_deref())?;
    let text = std::fs::read_to_string(folder.join("config.json")).ok()?;
    let config: Value = serde_json::from_str(&text).ok()?;
    // Multimodal models keep their text model's figures one level down.
    let size = config.get("vocab_size").or_else(|| config.get("text_config")?.get("vocab_size"));
    size.and_then(Value::as_u64).and_then(|size| u32::try_from(size).ok())
}
