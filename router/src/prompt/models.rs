//! Holds the models (tokenizer and chat template) that make engines' tokens from text.
//!
//! Tokenizing takes from milliseconds to a second, so it runs on blocking threads. Without the
//! model of the turn's engine, the blocks of a text are made from its bytes.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use arc_swap::ArcSwap;
use bytes::Bytes;
use contract::load::{Description, EngineFacts, ModelFiles};
use service::{
    clock::now,
    log::describe_error,
    places::{INLINE_BYTES_MAX, Places},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{Blocks, EngineBlockFacts, Prompt, PromptForm, memory::TokenizerMemory, model::Model};
#[cfg(test)]
use crate::shares::PoolSizes;
use crate::{
    fleet::{
        control::ControlClients, snapshot::Snapshot, tokenizer_files::TokenizerFiles, view::View,
        worker::AgentKey,
    },
    metrics::Metrics,
    shares::{Share, SharedPool, Sharer, Shares},
};

/// A model with 150,000 tokens takes about 100 MiB. Prompts for further models aren't tokenized:
/// their blocks are made from bytes.
const MODELS_MAX: usize = 8;
/// From this size of its body on, a prompt is long: it keeps a processor for 20 ms and more.
const LONG_BODY_BYTES_MIN: usize = 128 << 10;
/// Long prompts have permits of their own, for half of the processors, so that a short prompt of
/// one client never waits for another's long ones.
const SHORT_PROMPTS_AT_ONCE_MAX: usize = 8;
/// Longest time that a turn waits for a permit. After that, its blocks are made from bytes.
const PERMIT_WAIT_MAX: Duration = Duration::from_millis(50);
/// 100,000 new tokens take a fifth of this time.
const TOKENIZE_MAX: Duration = Duration::from_secs(1);
/// A transcript of 1M tokens is about 5 MiB of JSON.
const BODY_BYTES_MAX: usize = 16 << 20;
/// Of a body, per token of the context. The prompt of a larger body doesn't fit into the context.
const BYTES_PER_TOKEN: usize = 16;
/// Allows for 64 MiB over a slow link.
const FETCH_MAX: Duration = Duration::from_secs(120);
/// Before a failed fetch is tried again. The pause doubles with each failure.
const RETRY_PAUSE_MIN: Duration = Duration::from_secs(1);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(60);

type FilesHash = [u8; 32];
type LoadedModels = HashMap<FilesHash, Arc<Model>>;
/// With the indexes of the connected agents that have the files.
type ReportedFiles = BTreeMap<FilesHash, (ModelFiles, Vec<AgentKey>)>;

#[derive(Debug)]
pub(crate) struct Models {
    loaded: ArcSwap<LoadedModels>,
    short_permits: Arc<Semaphore>,
    long_permits: Arc<Semaphore>,
    /// For counting prompts that look too long. They are of `long_permits`.
    places: Places,
    reading: Arc<Places>,
    pool: Arc<SharedPool>,
    metrics: Arc<Metrics>,
}

impl Models {
    pub(crate) fn new(shares: &Shares, metrics: Arc<Metrics>) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let long_permits = Arc::new(Semaphore::new((processors / 2).max(1)));
        Self {
            loaded: ArcSwap::default(),
            short_permits: Arc::new(Semaphore::new(SHORT_PROMPTS_AT_ONCE_MAX)),
            places: Places::new(Arc::clone(&long_permits)),
            long_permits,
            reading: Arc::clone(&shares.reading),
            pool: Arc::clone(&shares.tokenizer_bytes),
            metrics,
        }
    }

    #[cfg(test)]
    pub(crate) fn with_memory(bytes: usize) -> Self {
        let sizes = PoolSizes { requests: 1, turns: 1, body_bytes: 1, tokenizer_bytes: bytes };
        Self::new(&Shares::new(sizes), Arc::default())
    }

    /// Makes the blocks of a text with the engine's model, if that is loaded. If the body is too
    /// large, or no memory or permit is free soon enough, the prompt is counted, and its bytes make
    /// the blocks.
    pub(crate) async fn blocks(
        &self,
        prompt: &Prompt,
        form: PromptForm,
        body: &Bytes,
        description: &Description,
        sharer: &Sharer,
    ) -> Option<Blocks> {
        let engine = &description.engine;
        let model = self.loaded_model(description).filter(|_| prompt.is_text(form, body));
        let memory = TokenizerMemory::new(&self.pool, sharer, &self.metrics);
        let bytes_max = BODY_BYTES_MAX.min(BYTES_PER_TOKEN * engine.context_tokens as usize);
        let permitted_model = match model {
            None => None,
            Some(_) if body.len() > bytes_max => {
                memory.count_untokenized("size");
                None
            }
            Some(model) => self.permit(&memory, body.len()).await.map(|permit| (model, permit)),
        };
        let Some((model, permit)) = permitted_model else {
            return self.untokenized_blocks(prompt, form, body, engine, sharer).await;
        };
        let (prompt, body, engine) = (prompt.clone(), body.clone(), engine.clone());
        // If tokenizing takes too long, the turn is placed without blocks. The thread goes on and
        // keeps its permit.
        run_blocking(permit, move || {
            prompt.blocks(
                form,
                &body,
                &EngineBlockFacts::from_facts(&engine)?
                    .with_model(&model, unix_s())
                    .with_memory(&memory),
            )
        })
        .await
    }

    async fn untokenized_blocks(
        &self,
        prompt: &Prompt,
        form: PromptForm,
        body: &Bytes,
        engine: &EngineFacts,
        sharer: &Sharer,
    ) -> Option<Blocks> {
        if body.len() <= INLINE_BYTES_MAX {
            return prompt.blocks(form, body, &EngineBlockFacts::from_facts(engine)?);
        }
        let (prompt, body, engine) = (prompt.clone(), body.clone(), engine.clone());
        let make = move || prompt.blocks(form, &body, &EngineBlockFacts::from_facts(&engine)?);
        self.reading.run(&sharer.name, make).await
    }

    /// Also takes the memory to read the body. Counts the prompt if it gets none.
    async fn permit(&self, memory: &TokenizerMemory, body_bytes: usize) -> Option<Permit> {
        let is_long = body_bytes >= LONG_BODY_BYTES_MIN;
        let permits = if is_long { &self.long_permits } else { &self.short_permits };
        let permit = Arc::clone(permits).acquire_owned();
        let Ok(Ok(permit)) = tokio::time::timeout(PERMIT_WAIT_MAX, permit).await else {
            memory.count_untokenized("busy");
            return None;
        };
        Some(Permit { _prompt: permit, _memory: memory.take_to_read(body_bytes)? })
    }

    /// Whether a prompt certainly has more tokens than the engine takes. `false` if the engine's
    /// model isn't loaded. Each client has one prompt counted at a time.
    ///
    /// At most half of the processors count at once, and each needs the memory of a body's text, or
    /// 8 times that for a chat.
    pub(crate) async fn is_over_context(
        &self,
        prompt: &Prompt,
        form: PromptForm,
        body: &Bytes,
        description: &Description,
        sharer: &Sharer,
    ) -> bool {
        if form == PromptForm::Chat && body.len() > BODY_BYTES_MAX {
            return false;
        }
        let model = self.loaded_model(description);
        if model.is_none() && prompt.is_text(form, body) {
            return false;
        }
        let (prompt, body, engine) = (prompt.clone(), body.clone(), description.engine.clone());
        let count = move || {
            let Some(mut engine) = EngineBlockFacts::from_facts(&engine) else { return false };
            if let Some(model) = &model {
                engine = engine.with_model(model, unix_s());
            }
            prompt.is_over_context(form, &body, &engine)
        };
        self.places.run(&sharer.name, count).await
    }

    pub(crate) async fn token_ids(
        &self,
        prompt: &Prompt,
        form: PromptForm,
        body: &Bytes,
        description: &Description,
        sharer: &Sharer,
    ) -> Option<Vec<u32>> {
        let model = self.loaded_model(description);
        let memory = TokenizerMemory::new(&self.pool, sharer, &self.metrics);
        let permit = self.permit(&memory, body.len()).await?;
        let (prompt, body, engine) = (prompt.clone(), body.clone(), description.engine.clone());
        run_blocking(permit, move || {
            let engine = EngineBlockFacts::from_facts(&engine)?.with_memory(&memory);
            match &model {
                Some(model) => prompt.token_ids(form, &body, &engine.with_model(model, unix_s())),
                None => prompt.token_ids(form, &body, &engine),
            }
        })
        .await
    }

    fn loaded_model(&self, description: &Description) -> Option<Arc<Model>> {
        self.loaded.load().get(&description.model_files?.hash).cloned()
    }

    fn has_loaded(&self, hash: &FilesHash) -> bool {
        self.loaded.load().contains_key(hash)
    }

    fn retain_reported(&self, reported_files: &ReportedFiles) {
        let loaded = self.loaded.load();
        if !loaded.keys().all(|hash| reported_files.contains_key(hash)) {
            let still_reported =
                loaded.iter().filter(|(hash, _)| reported_files.contains_key(*hash));
            self.loaded.store(Arc::new(
                still_reported.map(|(hash, model)| (*hash, Arc::clone(model))).collect(),
            ));
        }
    }

    fn insert(&self, hash: FilesHash, model: Model) {
        let mut loaded = LoadedModels::clone(&self.loaded.load());
        loaded.insert(hash, Arc::new(model));
        self.loaded.store(Arc::new(loaded));
    }
}

#[derive(Debug)]
struct Permit {
    _prompt: OwnedSemaphorePermit,
    /// To read the body.
    _memory: Share,
}

/// The thread holds the permit. `None` if `tokenize` fails or takes longer than [`TOKENIZE_MAX`].
async fn run_blocking<T: Send + 'static>(
    permit: Permit,
    tokenize: impl FnOnce() -> Option<T> + Send + 'static,
) -> Option<T> {
    let task = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        tokenize()
    });
    tokio::time::timeout(TOKENIZE_MAX, task).await.ok()?.ok().flatten()
}

fn unix_s() -> u64 {
    service::clock::unix_ns() / 1_000_000_000
}

#[derive(Debug)]
struct FetchFailures {
    retry_at: Instant,
    pause: Duration,
    failed_tries: usize,
}

pub(crate) async fn run(
    models: Arc<Models>,
    view: Arc<View>,
    control_clients: Arc<ControlClients>,
    token: CancellationToken,
) {
    tokio::select! {
        biased;
        () = token.cancelled() => {}
        () = fetch_forever(&models, &view, &control_clients) => {}
    }
}

async fn fetch_forever(models: &Models, view: &View, control_clients: &ControlClients) {
    let mut failures: HashMap<FilesHash, FetchFailures> = HashMap::new();
    loop {
        let reported_files = reported_files(&view.load());
        models.retain_reported(&reported_files);
        failures.retain(|hash, _| reported_files.contains_key(hash));
        let is_due =
            |hash: &FilesHash| failures.get(hash).is_none_or(|failure| failure.retry_at <= now());
        let to_fetch = reported_files.iter().find(|(hash, (_, agent_keys))| {
            !agent_keys.is_empty() && !models.has_loaded(hash) && is_due(hash)
        });
        let Some((hash, (files, agent_keys))) = to_fetch else {
            let recheck_at = now() + Duration::from_secs(3600);
            let retry_at =
                failures.values().map(|failure| failure.retry_at).fold(recheck_at, Instant::min);
            view.wait_for(retry_at, |view| self::reported_files(view) != reported_files).await;
            continue;
        };
        let failed_tries = failures.get(hash).map_or(0, |failure| failure.failed_tries);
        let agent = agent_keys[failed_tries % agent_keys.len()];
        match fetch(control_clients, agent, *files).await {
            Ok(model) => {
                info!(bytes = files.bytes, agent = agent.slot(), "tokenizer loaded");
                failures.remove(hash);
                models.insert(*hash, model);
            }
            Err(error) => {
                warn!(
                    agent = agent.slot(),
                    error = describe_error(&error),
                    "loading the tokenizer failed"
                );
                let pause = failures.get(hash).map_or(RETRY_PAUSE_MIN, |failure| failure.pause * 2);
                let pause = pause.min(RETRY_PAUSE_MAX);
                failures.insert(
                    *hash,
                    FetchFailures {
                        retry_at: now() + pause,
                        pause,
                        failed_tries: failed_tries + 1,
                    },
                );
            }
        }
    }
}

/// At most [`MODELS_MAX`] sets: those with the smallest hashes, so that all routers choose the
/// same.
fn reported_files(view: &Snapshot) -> ReportedFiles {
    let mut reported_files = ReportedFiles::new();
    for agent in &view.agents {
        let facts = agent.facts.as_ref();
        if let Some(files) = facts.and_then(|facts| facts.description.model_files) {
            let (_, agent_keys) =
                reported_files.entry(files.hash).or_insert_with(|| (files, vec![]));
            // A disconnected agent keeps its model loaded, but files can't be fetched from it.
            if agent.is_up() {
                agent_keys.push(agent.key);
            }
        }
    }
    while reported_files.len() > MODELS_MAX {
        reported_files.pop_last();
    }
    reported_files
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("the agent didn't send its model's files: {}", .0.message())]
    Fetch(tonic::Status),
    #[error("fetching the model's files took longer than {} s", FETCH_MAX.as_secs())]
    FetchTimedOut,
    #[error(transparent)]
    Model(#[from] super::model::Error),
    #[error("reading the model's files panicked")]
    Panicked(#[source] tokio::task::JoinError),
}

async fn fetch(
    control_clients: &ControlClients,
    agent: AgentKey,
    files: ModelFiles,
) -> Result<Model, Error> {
    let control = control_clients.get(agent).map_err(Error::Fetch)?;
    let fetched = tokio::time::timeout(FETCH_MAX, control.model_files(files)).await;
    let files: TokenizerFiles = fetched.map_err(|_| Error::FetchTimedOut)?.map_err(Error::Fetch)?;
    let task = tokio::task::spawn_blocking(move || Model::new(&files));
    Ok(task.await.map_err(Error::Panicked)??)
}
