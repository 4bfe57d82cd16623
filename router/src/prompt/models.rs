//! Holds the models that make tokens from text, one for each set of files that agents describe.
//!
//! One task fetches the files from the agents, one set at a time; turns use the models that are
//! there. Making tokens takes milliseconds to a second, so it runs on a few threads of its own.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use arc_swap::ArcSwap;
use bytes::Bytes;
use proto::load::{Description, ModelFiles};
use service::clock::now;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{Blocks, Engine, Prompt, PromptForm, model::Model};
use crate::fleet::{
    connect::describe_error, control::Control, snapshot::Snapshot, tokenizer_files::TokenizerFiles,
    view::View,
};

/// Maximum number of models. One with 150,000 tokens takes about 100 MiB. The text of further
/// models is hashed instead of tokenized.
const MODELS_MAX: usize = 8;
/// Maximum number of prompts tokenized at once.
const PROMPTS_AT_ONCE_MAX: usize = 8;
/// Longest time that a turn waits before its prompt is tokenized. After that, its blocks are made
/// from the text itself.
const PERMIT_WAIT_MAX: Duration = Duration::from_millis(50);
/// Longest time for tokenizing a prompt. 100,000 new tokens take a fifth of it.
const TOKENIZE_MAX: Duration = Duration::from_secs(1);
/// Largest body that is tokenized, in bytes. A transcript of 1M tokens is about 5 MiB of JSON.
const BODY_BYTES_MAX: usize = 16 << 20;
/// Most bytes per token of the context: a larger body can't be a prompt that fits.
const BYTES_PER_TOKEN: usize = 16;
/// Longest time for fetching a model: 64 MiB over a slow link from a slow disk.
const FETCH_MAX: Duration = Duration::from_secs(120);
/// Shortest and longest wait before a failed fetch is tried again.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

type Hash = [u8; 32];
type LoadedModels = HashMap<Hash, Arc<Model>>;
/// The files that agents describe, and the connected agents that have them.
type Described = BTreeMap<Hash, (ModelFiles, Vec<usize>)>;

/// The models that are loaded now.
#[derive(Debug)]
pub(crate) struct Models {
    loaded: ArcSwap<LoadedModels>,
    permits: Arc<Semaphore>,
}

impl Models {
    /// Creates an empty set of models.
    pub(crate) fn new() -> Self {
        Self { loaded: ArcSwap::default(), permits: Arc::new(Semaphore::new(PROMPTS_AT_ONCE_MAX)) }
    }

    /// Makes a prompt's blocks for the engine described. Uses the engine's model if it is loaded
    /// and free soon enough.
    pub(crate) async fn blocks(
        &self,
        prompt: &Prompt,
        form: PromptForm,
        body: &Bytes,
        description: &Description,
    ) -> Option<Blocks> {
        let engine = &description.engine;
        let files = description.model_files.filter(|_| prompt.is_text(form, body));
        // Reading messages takes many times their size in memory.
        let bytes_max = BODY_BYTES_MAX.min(BYTES_PER_TOKEN * engine.context_tokens as usize);
        let files = files.filter(|_| body.len() <= bytes_max);
        let model = files.and_then(|files| self.loaded.load().get(&files.hash).cloned());
        let permit = match model {
            None => None,
            Some(model) => {
                let permit = Arc::clone(&self.permits).acquire_owned();
                let permit = tokio::time::timeout(PERMIT_WAIT_MAX, permit).await;
                permit.ok().and_then(Result::ok).map(|permit| (model, permit))
            }
        };
        let Some((model, permit)) = permit else {
            return prompt.blocks(form, body, &Engine::from_facts(engine)?);
        };
        let (prompt, body, engine) = (prompt.clone(), body.clone(), engine.clone());
        // If it takes too long, the thread runs on and keeps its permit; the turn is placed without
        // blocks.
        run_blocking(permit, move || {
            prompt.blocks(form, &body, &Engine::from_facts(&engine)?.with_model(&model, unix_s()))
        })
        .await
    }

    /// Returns a prompt's token ids as the engine described makes them, if that is possible soon
    /// enough.
    pub(crate) async fn token_ids(
        &self,
        prompt: &Prompt,
        form: PromptForm,
        body: &Bytes,
        description: &Description,
    ) -> Option<Vec<u32>> {
        let files = description.model_files;
        let model = files.and_then(|files| self.loaded.load().get(&files.hash).cloned());
        let permit = Arc::clone(&self.permits).acquire_owned();
        let permit = tokio::time::timeout(PERMIT_WAIT_MAX, permit).await.ok()?.ok()?;
        let (prompt, body, engine) = (prompt.clone(), body.clone(), description.engine.clone());
        run_blocking(permit, move || {
            let engine = Engine::from_facts(&engine)?;
            match &model {
                Some(model) => prompt.token_ids(form, &body, &engine.with_model(model, unix_s())),
                None => prompt.token_ids(form, &body, &engine),
            }
        })
        .await
    }

    fn has(&self, hash: &Hash) -> bool {
        self.loaded.load().contains_key(hash)
    }

    fn retain_described(&self, described: &Described) {
        let loaded = self.loaded.load();
        if !loaded.keys().all(|hash| described.contains_key(hash)) {
            let kept = loaded.iter().filter(|(hash, _)| described.contains_key(*hash));
            self.loaded
                .store(Arc::new(kept.map(|(hash, model)| (*hash, Arc::clone(model))).collect()));
        }
    }

    fn insert(&self, hash: Hash, model: Model) {
        let mut loaded = LoadedModels::clone(&self.loaded.load());
        loaded.insert(hash, Arc::new(model));
        self.loaded.store(Arc::new(loaded));
    }
}

/// Runs `make` on a blocking thread. Returns `None` if that fails or takes longer than
/// [`TOKENIZE_MAX`].
async fn run_blocking<T: Send + 'static>(
    permit: OwnedSemaphorePermit,
    make: impl FnOnce() -> Option<T> + Send + 'static,
) -> Option<T> {
    let task = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        make()
    });
    tokio::time::timeout(TOKENIZE_MAX, task).await.ok()?.ok().flatten()
}

fn unix_s() -> u64 {
    service::clock::unix_ns() / 1_000_000_000
}

/// When a failed fetch is tried again, and after how many tries.
#[derive(Debug)]
struct Failure {
    retry_at: Instant,
    pause: Duration,
    tries: usize,
}

/// Fetches the models that agents describe until it is cancelled.
pub(crate) async fn run(
    models: Arc<Models>,
    view: Arc<View>,
    controls: Vec<Control>,
    token: CancellationToken,
) {
    tokio::select! {
        biased;
        () = token.cancelled() => {}
        () = fetch_forever(&models, &view, &controls) => {}
    }
}

async fn fetch_forever(models: &Models, view: &View, controls: &[Control]) {
    let mut failures: HashMap<Hash, Failure> = HashMap::new();
    loop {
        let described = described(&view.load());
        models.retain_described(&described);
        failures.retain(|hash, _| described.contains_key(hash));
        let due = |hash: &Hash| failures.get(hash).is_none_or(|failure| failure.retry_at <= now());
        let next = described
            .iter()
            .find(|(hash, (_, agents))| !agents.is_empty() && !models.has(hash) && due(hash));
        let Some((hash, (files, agents))) = next else {
            // Nothing to fetch. Waits for a change in the view, or for the next retry.
            let later = now() + Duration::from_secs(3600);
            let retry_at =
                failures.values().map(|failure| failure.retry_at).fold(later, Instant::min);
            view.wait_for(retry_at, |view| self::described(view) != described).await;
            continue;
        };
        let tries = failures.get(hash).map_or(0, |failure| failure.tries);
        let agent = agents[tries % agents.len()];
        match fetch(&controls[agent], *files).await {
            Ok(model) => {
                info!(bytes = files.bytes, agent, "tokenizer loaded");
                failures.remove(hash);
                models.insert(*hash, model);
            }
            Err(error) => {
                warn!(agent, error = describe_error(&error), "loading the tokenizer failed");
                let pause = failures.get(hash).map_or(PAUSE_MIN, |failure| failure.pause * 2);
                let pause = pause.min(PAUSE_MAX);
                failures
                    .insert(*hash, Failure { retry_at: now() + pause, pause, tries: tries + 1 });
            }
        }
    }
}

fn described(view: &Snapshot) -> Described {
    let mut described = Described::new();
    for (at, agent) in view.agents.iter().enumerate() {
        let facts = agent.facts.as_ref();
        if let Some(files) = facts.and_then(|facts| facts.description.model_files) {
            let (_, agents) = described.entry(files.hash).or_insert_with(|| (files, vec![]));
            // A disconnected agent keeps its model loaded, but files can't be fetched from it.
            if agent.is_up() {
                agents.push(at);
            }
        }
    }
    while described.len() > MODELS_MAX {
        described.pop_last();
    }
    described
}

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// The agent refused to send the files.
    #[error("the agent didn't send its model's files: {}", .0.message())]
    Fetch(tonic::Status),
    /// Fetching the files took too long.
    #[error("fetching the model's files took longer than {} s", FETCH_MAX.as_secs())]
    Late,
    /// The files are invalid.
    #[error(transparent)]
    Model(#[from] super::model::Error),
    /// The code that reads the files panicked.
    #[error("reading the model's files panicked")]
    Panicked(#[source] tokio::task::JoinError),
}

async fn fetch(control: &Control, files: ModelFiles) -> Result<Model, Error> {
    let fetched = tokio::time::timeout(FETCH_MAX, control.model_files(files)).await;
    let files: TokenizerFiles = fetched.map_err(|_| Error::Late)?.map_err(Error::Fetch)?;
    let task = tokio::task::spawn_blocking(move || Model::new(&files));
    Ok(task.await.map_err(Error::Panicked)??)
}
