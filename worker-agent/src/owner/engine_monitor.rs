//! Polls the engine's state over HTTP and reports it to the owner task, which admits turns.
//!
//! The receivers of the news decide what follows.

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

const RETRY_PAUSE: Duration = Duration::from_millis(500);
/// So many in a row mean that the engine is down: a single slow answer isn't a crash.
const FAILED_SAMPLES_MAX: u32 = 3;

/// Others may change the label of the weights.
const WEIGHTS_INTERVAL: Duration = Duration::from_secs(2);

/// If a rank's snapshot is older, the monitor asks whether the engine is paused. An idle engine
/// takes one at least once a second.
const SNAPSHOT_AGE_MAX: Duration = Duration::from_millis(1_500);

#[derive(Debug, Clone)]
pub struct EngineMonitor {
    pub engine: EngineClient,
    pub owner: AgentHandle,
    pub kv_events: KvHandle,
    pub sample_interval: Duration,
    /// Notified when a turn's connection to the engine failed.
    pub wake: Arc<Notify>,
    /// `None` if the settings don't state it.
    pub bootstrap_host: Option<String>,
    pub configured_vocabulary_size: Option<u32>,
    pub found_files_sender: watch::Sender<Option<Arc<model_files::FoundFiles>>>,
}

struct EngineWatch {
    adapters: AdapterWatch,
    bootstrap: BootstrapProbe,
    role: RoleWatch,
}

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

/// An engine counts as up only if its load and its description can be read. Otherwise one whose
/// load can't be read would go up and down again and again, and receive turns in between. The load
/// is read first, so that the description doesn't come from an older process.
async fn read_engine(
    monitor: &EngineMonitor,
) -> Result<(Box<EngineInfo>, LoadSample), engine::Error> {
    let first_sample = monitor.engine.read_load(now).await?;
    let (info, tokenizer_source, publishers) = monitor.engine.read_info().await?;
    monitor.kv_events.set_publishers(publishers);
    let info = add_model_facts(info, tokenizer_source, monitor).await;
    Ok((Box::new(info), first_sample))
}

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

/// `None` when the description must be read again: another process may answer now.
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
            // The caller reads the description again, which shows why the turn's connection failed.
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
                    // Perhaps its process has ended. The description shows which one answers now.
                    return None;
                }
            }
        }
    }
}

/// At `/ready`, a paused engine says that it is not ready. One whose scheduler hangs does so too,
/// but only after a health check of some 20 s, so the first answer counts.
struct PauseWatch {
    snapshots_us: Vec<Option<u64>>,
    changed_at: Instant,
    /// `None` before the engine was asked about its newest snapshot.
    is_paused: Option<bool>,
}

impl PauseWatch {
    fn new(sample: &LoadSample) -> Self {
        let snapshots_us = sample.ranks.iter().map(RankSample::snapshot_us).collect();
        Self { snapshots_us, changed_at: sample.at, is_paused: None }
    }

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

/// A counter has decreased, or the connection is new, as after a quick restart.
fn may_be_another_process(before: &LoadSample, after: &LoadSample) -> bool {
    let prefilled_tokens = |sample: &LoadSample| -> u64 {
        let counters = sample.ranks.iter().map(|rank| rank.total_prefill_uncached_tokens);
        counters.fold(0, u64::saturating_add)
    };
    prefilled_tokens(after) < prefilled_tokens(before) || after.connection != before.connection
}

async fn add_model_facts(
    mut info: EngineInfo,
    source: Option<model_files::TokenizerSource>,
    monitor: &EngineMonitor,
) -> EngineInfo {
    // The model's files may be large or on a slow disk.
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

/// The engine reports little of the config.
fn read_config(source: &model_files::TokenizerSource, hub_cache: Option<&Path>) -> Option<Value> {
    let folder = source.model_folder(hub_cache)?;
    let text = std::fs::read_to_string(folder.join("config.json")).ok()?;
    serde_json::from_str(&text).ok()
}

fn vocabulary_size(config: &Value) -> Option<u32> {
    // A multimodal model has the value in the object `text_config`.
    let size = config.get("vocab_size").or_else(|| config.get("text_config")?.get("vocab_size"));
    size.and_then(Value::as_u64).and_then(|size| u32::try_from(size).ok())
}
