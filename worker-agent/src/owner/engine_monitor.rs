//! Polls the engine's state over HTTP and reports it to the owner task, which admits turns.
//!
//! When the engine answers, the monitor reads its description, finds the model's tokenizer files,
//! and then samples the engine's load at a fixed interval. It notices when the engine no longer
//! answers, and when the engine has restarted as another process. It sends [`EngineNews`] to the
//! owner task, the KV events' addresses to `kv_events`, and the files to `control_port`. The
//! receivers decide what follows from the news.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use serde_json::Value;
use service::{clock::now, tasks::Tasks};
use tokio::sync::{Notify, watch};
use tracing::{debug, info, warn};

use super::{
    AgentHandle, EngineNews,
    adapters::{self, AdapterWatch},
    bootstrap_probe::BootstrapProbe,
    role_watch::RoleWatch,
};
use crate::{
    engine::{self, EngineClient, EngineInfo, LoadSample, RankSample, model_files, retentions},
    kv_events::KvHandle,
};

/// The pause between attempts to reach an engine that is down.
const RETRY_PAUSE: Duration = Duration::from_millis(500);
/// The number of failed samples in a row after which the engine counts as down. A single slow
/// answer isn't a crash.
const FAILED_SAMPLES_MAX: u32 = 3;

/// The time between two looks at the engine's label of its weights, which others may change.
const WEIGHTS_INTERVAL: Duration = Duration::from_secs(2);

/// How old the newest snapshot of a rank is when the monitor asks whether the engine is paused. An
/// idle engine takes a snapshot at least once a second.
const SNAPSHOT_AGE_MAX: Duration = Duration::from_millis(1_500);

/// What the monitor needs.
#[derive(Debug, Clone)]
pub struct EngineMonitor {
    /// The client of the engine.
    pub engine: EngineClient,
    /// Receives the engine's news.
    pub owner: AgentHandle,
    /// Receives the addresses at which the engine publishes its KV events.
    pub kv_events: KvHandle,
    /// The time between samples.
    pub sample_interval: Duration,
    /// Notified when a turn could not be sent because the connection to the engine failed.
    pub wake: Arc<Notify>,
    /// The host of the engine's bootstrap server for decode engines, if the settings state it.
    pub bootstrap_host: Option<String>,
    /// The size of the vocabulary, if the settings state it.
    pub configured_vocabulary_size: Option<u32>,
    /// Receives the model's tokenizer files.
    pub found_files_sender: watch::Sender<Option<Arc<model_files::FoundFiles>>>,
}

/// What is looked at beside the load of an engine process.
struct EngineWatch {
    adapters: AdapterWatch,
    bootstrap: BootstrapProbe,
    role: RoleWatch,
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
            Ok((info, first_sample)) => {
                let mut watch = EngineWatch {
                    adapters: AdapterWatch::new(info.has_lora, now()),
                    bootstrap: BootstrapProbe::new(&info, monitor.engine.host()),
                    role: RoleWatch::new(&info, now()),
                };
                monitor.owner.report_engine(EngineNews::Up(info)).await;
                watch.bootstrap.check(now(), &monitor.owner).await;
                monitor.owner.report_engine(EngineNews::Sample(first_sample.clone())).await;
                report_weights(monitor).await;
                if let Some(down_news) = sample_until_down(monitor, first_sample, watch).await {
                    monitor.owner.report_engine(down_news).await;
                }
            }
            Err(error) if error.is_own_shortage() => {
                warn!(%error, "no file descriptor left to ask the engine");
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            Err(error) => {
                debug!(%error, "can't reach the engine");
                monitor.owner.report_engine(to_down_news(&error)).await;
                let _ = tokio::time::timeout(RETRY_PAUSE, monitor.wake.notified()).await;
            }
        }
    }
}

/// Reads the engine's first load sample, then its description.
///
/// An engine counts as up only if both can be read. Otherwise an engine whose load can't be read
/// would go up and down again and again, and receive turns in between. The sample is read first, so
/// that the description doesn't come from an older process than the sample.
async fn read_engine(
    monitor: &EngineMonitor,
) -> Result<(Box<EngineInfo>, LoadSample), engine::Error> {
    let first_sample = monitor.engine.read_load(now).await?;
    let (info, tokenizer_source, publishers) = monitor.engine.read_info().await?;
    monitor.kv_events.set_publishers(publishers);
    let info = add_model_facts(info, tokenizer_source, monitor).await;
    Ok((Box::new(info), first_sample))
}

/// Reads the engine's label of its weights, and reports it. An engine without one reports none.
async fn report_weights(monitor: &EngineMonitor) {
    let asked_at = now();
    match monitor.engine.read_weights().await {
        Ok(label) => {
            monitor.owner.report_engine(EngineNews::Weights { label, asked_at }).await;
        }
        Err(error) => debug!(%error, "can't read the label of the engine's weights"),
    }
}

fn to_down_news(error: &engine::Error) -> EngineNews {
    EngineNews::Down { reason: error.to_string(), has_process_ended: error.is_process_gone() }
}

/// Samples the load until the engine counts as down, and returns the news of that. Returns `None`
/// when the description must be read again, because the engine may be another process now.
async fn sample_until_down(
    monitor: &EngineMonitor,
    first_sample: LoadSample,
    mut watch: EngineWatch,
) -> Option<EngineNews> {
    let mut ticks = tokio::time::interval(monitor.sample_interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut failed_samples = 0;
    let mut pauses = PauseWatch::new(&first_sample);
    let mut last_sample = first_sample;
    let mut weights_due = now() + WEIGHTS_INTERVAL;
    loop {
        tokio::select! {
            biased;
            // A turn's connection failed. The caller reads the description again, which shows why.
            () = monitor.wake.notified() => return None,
            _ = ticks.tick() => {}
        }
        if watch.adapters.is_due(now())
            && let Err(error) = adapters::refresh(&monitor.engine, &monitor.owner).await
        {
            warn!(%error, "can't read the engine's adapters");
        }
        watch.bootstrap.check(now(), &monitor.owner).await;
        if watch.role.was_switched(now(), &monitor.engine).await {
            return None;
        }
        match monitor.engine.read_load(now).await {
            Ok(sample) => {
                failed_samples = 0;
                if may_be_another_process(&last_sample, &sample) {
                    return None;
                }
                last_sample = sample.clone();
                if sample.at >= weights_due {
                    weights_due = sample.at + WEIGHTS_INTERVAL;
                    report_weights(monitor).await;
                }
                let is_paused = pauses.is_paused(&monitor.engine, &sample).await;
                monitor
                    .owner
                    .report_engine(EngineNews::Sample(LoadSample { is_paused, ..sample }))
                    .await;
            }
            // The agent's own lack of descriptors says nothing about the engine.
            Err(error) if error.is_own_shortage() => {
                warn!(%error, "no file descriptor left to sample the engine's load");
            }
            Err(error) => {
                failed_samples += 1;
                warn!(%error, failures = failed_samples, "can't sample the engine's load");
                if failed_samples >= FAILED_SAMPLES_MAX || error.is_process_gone() {
                    return Some(to_down_news(&error));
                }
                if error.is_broken() {
                    // The connection broke, perhaps because its process has ended. The description
                    // shows which process answers now.
                    return None;
                }
            }
        }
    }
}

/// Finds out whether an engine that takes no snapshots is paused. A paused engine says at
/// `/ready` that it is not ready. An engine whose scheduler hangs does so too, but only after a
/// health check of some 20 s, so the first answer counts.
struct PauseWatch {
    snapshots_us: Vec<Option<u64>>,
    changed_at: Instant,
    /// What the engine answered since the newest snapshot; `None` before it was asked.
    is_paused: Option<bool>,
}

impl PauseWatch {
    fn new(sample: &LoadSample) -> Self {
        let snapshots_us = sample.ranks.iter().map(RankSample::snapshot_us).collect();
        Self { snapshots_us, changed_at: sample.at, is_paused: None }
    }

    /// Takes a load sample, and asks the engine if its snapshots are old.
    async fn is_paused(&mut self, engine: &EngineClient, sample: &LoadSample) -> bool {
        let snapshots_us: Vec<_> = sample.ranks.iter().map(RankSample::snapshot_us).collect();
        if snapshots_us != self.snapshots_us {
            *self = Self { snapshots_us, changed_at: sample.at, is_paused: None };
        }
        let is_old = sample.at.saturating_duration_since(self.changed_at) >= SNAPSHOT_AGE_MAX;
        if is_old && self.is_paused != Some(false) {
            // A failed call says nothing of a pause. The next sample fails too, if it lasts.
            let is_ready = engine.is_ready().await.unwrap_or(true);
            self.is_paused = Some(!is_ready);
            if is_ready {
                // Continuing after a pause, the engine needs a moment for its next snapshot.
                self.changed_at = sample.at;
            }
        }
        self.is_paused == Some(true)
    }
}

/// Whether two samples in a row may come from different processes: a counter that only grows has
/// decreased, or the connection is a new one, as it is after a quick restart.
fn may_be_another_process(before: &LoadSample, after: &LoadSample) -> bool {
    let prefilled_tokens = |sample: &LoadSample| -> u64 {
        let counters = sample.ranks.iter().map(|rank| rank.total_prefill_uncached_tokens);
        counters.fold(0, u64::saturating_add)
    };
    prefilled_tokens(after) < prefilled_tokens(before) || after.connection != before.connection
}

/// Completes the engine's description with facts from its model's files.
async fn add_model_facts(
    mut info: EngineInfo,
    source: Option<model_files::TokenizerSource>,
    monitor: &EngineMonitor,
) -> EngineInfo {
    // The files may be large or on a slow disk, so they are read on a blocking thread.
    let file_facts = tokio::task::spawn_blocking(move || {
        let (source, hub_cache) = (source?, model_files::hub_cache_folder());
        Some((
            read_config(&source, hub_cache.as_deref()),
            model_files::FoundFiles::find(&source, hub_cache.as_deref()),
        ))
    });
    let (config, found_files) = file_facts.await.ok().flatten().unzip();
    let config = config.flatten();
    info.cache.second_pool =
        info.cache.second_pool.or_else(|| retentions::second_pool_of(config.as_ref()?));
    let vocabulary_size = config.as_ref().and_then(vocabulary_size);
    if let Some(transfer) = &mut info.facts.transfer {
        transfer.bootstrap_host.clone_from(&monitor.bootstrap_host);
    }
    info.facts.vocabulary = monitor.configured_vocabulary_size.or(vocabulary_size);
    if info.facts.vocabulary.is_none() {
        warn!("the model's vocabulary is unknown: set `vocabulary`, or token ids are not checked");
    }
    let files = match found_files {
        Some(Ok(files)) => Some(Arc::new(files)),
        Some(Err(error)) => {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            info!(%error, source = cause, "no tokenizer files for routers");
            None
        }
        None => None,
    };
    info.model_files = files.as_ref().map(|files| files.identity());
    monitor.found_files_sender.send_replace(files);
    info
}

/// Reads the model's config, because the engine reports little of it.
fn read_config(source: &model_files::TokenizerSource, hub_cache: Option<&Path>) -> Option<Value> {
    let folder = source.model_folder(hub_cache)?;
    let text = std::fs::read_to_string(folder.join("config.json")).ok()?;
    serde_json::from_str(&text).ok()
}

/// Returns the vocabulary's size.
fn vocabulary_size(config: &Value) -> Option<u32> {
    // The config of a multimodal model has these values in the object `text_config`.
    let size = config.get("vocab_size").or_else(|| config.get("text_config")?.get("vocab_size"));
    size.and_then(Value::as_u64).and_then(|size| u32::try_from(size).ok())
}
