//! Monitors the engine and reports to the owner task.
//!
//! It reads the engine's description when the engine answers, then samples its load, and detects
//! when the engine is gone or has become another process. It decides nothing.

use std::{sync::Arc, time::Duration};

use serde_json::Value;
use service::{clock::now, tasks::Tasks};
use tokio::sync::{Notify, watch};
use tracing::{debug, info, warn};

use super::{AgentHandle, EngineNews};
use crate::{
    engine::{self, Engine, Info, Sample, model_files},
    kv_events::KvHandle,
};

/// The pause between attempts to reach an engine that is down.
const RETRY: Duration = Duration::from_millis(500);
/// The number of failed samples in a row after which the engine counts as down. A single slow
/// answer isn't a crash.
const FAILURES_MAX: u32 = 3;

/// What the monitor needs.
#[derive(Debug, Clone)]
pub struct EngineMonitor {
    /// The engine.
    pub engine: Engine,
    /// Receives the engine's news.
    pub owner: AgentHandle,
    /// Receives the address of the engine's KV events.
    pub kv: KvHandle,
    /// The time between samples.
    pub interval: Duration,
    /// Notified when a turn found the engine gone.
    pub wake: Arc<Notify>,
    /// The size of the vocabulary, if the settings state it.
    pub vocabulary: Option<u32>,
    /// Receives the model's tokenizer files.
    pub files: watch::Sender<Option<Arc<model_files::FoundFiles>>>,
}

/// Monitors the engine until the tasks are cancelled.
pub async fn run(monitor: EngineMonitor, tasks: Tasks) {
    let token = tasks.token();
    tokio::select! {
        () = token.cancelled() => {}
        () = monitor_engine(&monitor) => {}
    }
}

async fn monitor_engine(monitor: &EngineMonitor) {
    loop {
        match read_engine(monitor).await {
            Ok((info, first)) => {
                monitor.owner.report_engine(EngineNews::Up(info)).await;
                monitor.owner.report_engine(EngineNews::Sample(first.clone())).await;
                if let Some(down) = sample_until_down(monitor, first).await {
                    monitor.owner.report_engine(down).await;
                }
            }
            Err(error) => {
                debug!(%error, "can't reach the engine");
                monitor.owner.report_engine(down_news(&error)).await;
                let _ = tokio::time::timeout(RETRY, monitor.wake.notified()).await;
            }
        }
    }
}

/// Reads the engine's first load sample, then its description. The sample is required: an engine
/// without one would go up and down again and again, and receive turns in between. It is read
/// first, so that the description is not that of an older process than the sample.
async fn read_engine(monitor: &EngineMonitor) -> Result<(Box<Info>, Sample), engine::Error> {
    let first = monitor.engine.read_load(now).await?;
    let (info, source, publishers) = monitor.engine.read_info().await?;
    monitor.kv.set_publishers(publishers);
    Ok((Box::new(add_model_facts(info, source, monitor).await), first))
}

fn down_news(error: &engine::Error) -> EngineNews {
    EngineNews::Down { reason: error.to_string(), gone: error.is_gone() }
}

/// Samples the load until the engine fails to answer, and returns that. Returns `None` when the
/// engine may have become another process.
async fn sample_until_down(monitor: &EngineMonitor, first: Sample) -> Option<EngineNews> {
    let mut ticks = tokio::time::interval(monitor.interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut failures = 0;
    let mut last = first;
    loop {
        tokio::select! {
            biased;
            // Whatever the turn saw, reading the description again shows the current state.
            () = monitor.wake.notified() => return None,
            _ = ticks.tick() => {}
        }
        match monitor.engine.read_load(now).await {
            Ok(sample) => {
                failures = 0;
                if may_be_another_process(&last, &sample) {
                    return None;
                }
                last = sample.clone();
                monitor.owner.report_engine(EngineNews::Sample(sample)).await;
            }
            Err(error) => {
                failures += 1;
                warn!(%error, failures, "can't sample the engine's load");
                if failures >= FAILURES_MAX || error.is_gone() {
                    return Some(down_news(&error));
                }
                if error.is_broken() {
                    // The connection may have led to a process that has ended: check which process
                    // is there now.
                    return None;
                }
            }
        }
    }
}

/// Whether the next sample may come from another process: a counter that only grows has decreased,
/// or the connection is new, as it is after a quick restart.
fn may_be_another_process(last: &Sample, next: &Sample) -> bool {
    let total = |sample: &Sample| -> u64 {
        sample.ranks.iter().map(|rank| rank.total_prefill_uncached_tokens).sum()
    };
    total(next) < total(last) || next.connection != last.connection
}

/// Completes the engine's description with facts from its model's files.
async fn add_model_facts(
    mut info: Info,
    source: Option<model_files::TokenizerSource>,
    monitor: &EngineMonitor,
) -> Info {
    // The files may be large or on a slow disk, so they are read on a blocking thread.
    let read = tokio::task::spawn_blocking(move || {
        let (source, hub) = (source?, model_files::hub_folder());
        Some((read_vocabulary(&source), model_files::FoundFiles::find(&source, hub.as_deref())))
    });
    let (vocabulary, files) = read.await.ok().flatten().unzip();
    info.facts.vocabulary = monitor.vocabulary.or(vocabulary.flatten());
    if info.facts.vocabulary.is_none() {
        warn!("the model's vocabulary is unknown: set `vocabulary`, or token ids are not checked");
    }
    let files = match files {
        Some(Ok(files)) => Some(Arc::new(files)),
        Some(Err(error)) => {
            let source = std::error::Error::source(&error).map(ToString::to_string);
            info!(%error, source, "no tokenizer files for routers");
            None
        }
        None => None,
    };
    info.model_files = files.as_ref().map(|files| files.identity());
    monitor.files.send_replace(files);
    info
}

/// Reads the vocabulary's size from the model's config, because the engine doesn't report it.
fn read_vocabulary(source: &model_files::TokenizerSource) -> Option<u32> {
    let folder = source.folder(model_files::hub_folder().as_deref())?;
    let text = std::fs::read_to_string(folder.join("config.json")).ok()?;
    let config: Value = serde_json::from_str(&text).ok()?;
    // Multimodal models have the text model's values one level down.
    let size = config.get("vocab_size").or_else(|| config.get("text_config")?.get("vocab_size"));
    size.and_then(Value::as_u64).and_then(|size| u32::try_from(size).ok())
}
