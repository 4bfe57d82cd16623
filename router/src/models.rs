//! The models whose tokens this router can make: one for each set of files that agents describe,
//! fetched from one of them. One task fetches, one at a time; turns read what is there. Making
//! tokens takes milliseconds to a second, so it has threads of its own, and few.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use arc_swap::ArcSwap;
use bytes::Bytes;
use proto::load::{Description, ModelFiles};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    control::Control,
    prompt::{
        Blocks, Engine, Prompt, Route,
        model::{Files, Model},
    },
    shared::now,
    view::{ClusterView, View},
    worker::chain,
};

/// Models at once: one with 150,000 tokens takes some 100 MiB. Those beyond have their text stand
/// for itself.
const MODELS_MAX: usize = 8;
/// Prompts being tokenised at once.
const PROMPTS_MAX: usize = 8;
/// A turn waits no longer for its turn to be tokenised: a guess at its blocks is at hand.
const WAIT_MAX: Duration = Duration::from_millis(50);
/// What making tokens of a prompt may take: 100,000 new tokens take a fifth of it.
const MADE_MAX: Duration = Duration::from_secs(1);
/// Of larger bodies nobody makes tokens: a transcript of 1M tokens is about 5 MiB of JSON.
const BODY_BYTES_MAX: usize = 16 << 20;
/// A body with more bytes than this for each token of the context can't be a prompt that fits.
const BYTES_PER_TOKEN: usize = 16;
/// 64 MiB over a slow link, from a slow disk.
const FETCH_MAX: Duration = Duration::from_secs(120);
/// First and longest rest after a failure.
const REST_MIN: Duration = Duration::from_secs(1);
const REST_MAX: Duration = Duration::from_secs(60);

type Hash = [u8; 32];
type Held = HashMap<Hash, Arc<Model>>;
/// Files that agents describe, and who has them.
type Wanted = BTreeMap<Hash, (ModelFiles, Vec<usize>)>;

/// What is there now.
#[derive(Debug)]
pub(crate) struct Models {
    held: ArcSwap<Held>,
    prompts: Arc<Semaphore>,
}

impl Models {
    /// None yet.
    pub(crate) fn new() -> Self {
        Self { held: ArcSwap::default(), prompts: Arc::new(Semaphore::new(PROMPTS_MAX)) }
    }

    /// A prompt's blocks for the engine described: by its model where that is here and its turn
    /// comes soon, else without.
    pub(crate) async fn blocks(
        &self,
        prompt: &Prompt,
        route: Route,
        body: &Bytes,
        description: &Description,
    ) -> Option<Blocks> {
        let engine = &description.engine;
        let files = description.model_files.filter(|_| prompt.is_text(route, body));
        // Reading messages takes many times their bytes of memory.
        let bytes_max = BODY_BYTES_MAX.min(BYTES_PER_TOKEN * engine.context_tokens as usize);
        let files = files.filter(|_| body.len() <= bytes_max);
        let model = files.and_then(|files| self.held.load().get(&files.hash).cloned());
        let permit = match model {
            None => None,
            Some(model) => {
                let permit = Arc::clone(&self.prompts).acquire_owned();
                let permit = tokio::time::timeout(WAIT_MAX, permit).await;
                permit.ok().and_then(Result::ok).map(|permit| (model, permit))
            }
        };
        let Some((model, permit)) = permit else {
            return prompt.blocks(route, body, &Engine::of(engine)?);
        };
        let (prompt, body, engine) = (prompt.clone(), body.clone(), engine.clone());
        // Where it takes too long it goes on and keeps its permit; the turn is placed without.
        made(permit, move || {
            prompt.blocks(route, &body, &Engine::of(&engine)?.with(&model, unix_s()))
        })
        .await
    }

    /// A prompt's token ids as the engine described has them, where they can be told soon.
    pub(crate) async fn ids(
        &self,
        prompt: &Prompt,
        route: Route,
        body: &Bytes,
        description: &Description,
    ) -> Option<Vec<u32>> {
        let files = description.model_files;
        let model = files.and_then(|files| self.held.load().get(&files.hash).cloned());
        let permit = Arc::clone(&self.prompts).acquire_owned();
        let permit = tokio::time::timeout(WAIT_MAX, permit).await.ok()?.ok()?;
        let (prompt, body, engine) = (prompt.clone(), body.clone(), description.engine.clone());
        made(permit, move || {
            let engine = Engine::of(&engine)?;
            match &model {
                Some(model) => prompt.ids(route, &body, &engine.with(model, unix_s())),
                None => prompt.ids(route, &body, &engine),
            }
        })
        .await
    }

    fn has(&self, hash: &Hash) -> bool {
        self.held.load().contains_key(hash)
    }

    fn keep(&self, wanted: &Wanted) {
        let held = self.held.load();
        if !held.keys().all(|hash| wanted.contains_key(hash)) {
            let kept = held.iter().filter(|(hash, _)| wanted.contains_key(*hash));
            self.held
                .store(Arc::new(kept.map(|(hash, model)| (*hash, Arc::clone(model))).collect()));
        }
    }

    fn add(&self, hash: Hash, model: Model) {
        let mut held = Held::clone(&self.held.load());
        held.insert(hash, Arc::new(model));
        self.held.store(Arc::new(held));
    }
}

/// Makes it on a thread where that may take a while.
async fn made<T: Send + 'static>(
    permit: OwnedSemaphorePermit,
    make: impl FnOnce() -> Option<T> + Send + 'static,
) -> Option<T> {
    let made = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        make()
    });
    tokio::time::timeout(MADE_MAX, made).await.ok()?.ok().flatten()
}

fn unix_s() -> u64 {
    proto::process::epoch() / 1_000_000_000
}

/// What could not be fetched.
#[derive(Debug)]
struct Failure {
    again: Instant,
    rest: Duration,
    tries: usize,
}

/// Fetches what agents describe until told to stop.
pub(crate) async fn run(
    models: Arc<Models>,
    view: Arc<View>,
    controls: Vec<Control>,
    token: CancellationToken,
) {
    tokio::select! {
        biased;
        () = token.cancelled() => {}
        () = follow(&models, &view, &controls) => {}
    }
}

async fn follow(models: &Models, view: &View, controls: &[Control]) {
    let mut failures: HashMap<Hash, Failure> = HashMap::new();
    loop {
        let wanted = wanted(&view.load());
        models.keep(&wanted);
        failures.retain(|hash, _| wanted.contains_key(hash));
        let due = |hash: &Hash| failures.get(hash).is_none_or(|failure| failure.again <= now());
        let next = wanted
            .iter()
            .find(|(hash, (_, agents))| !agents.is_empty() && !models.has(hash) && due(hash));
        let Some((hash, (files, agents))) = next else {
            // Far enough; a change of what is wanted ends the wait.
            let later = now() + Duration::from_secs(3600);
            let again = failures.values().map(|failure| failure.again).fold(later, Instant::min);
            view.wait_for(again, |view| self::wanted(view) != wanted).await;
            continue;
        };
        let tries = failures.get(hash).map_or(0, |failure| failure.tries);
        let agent = agents[tries % agents.len()];
        match fetch(&controls[agent], *files).await {
            Ok(model) => {
                info!(bytes = files.bytes, agent, "tokens can be made of text");
                failures.remove(hash);
                models.add(*hash, model);
            }
            Err(error) => {
                warn!(agent, error = chain(&error), "no tokens can be made of text");
                let rest = failures.get(hash).map_or(REST_MIN, |failure| failure.rest * 2);
                let rest = rest.min(REST_MAX);
                failures.insert(*hash, Failure { again: now() + rest, rest, tries: tries + 1 });
            }
        }
    }
}

fn wanted(view: &ClusterView) -> Wanted {
    let mut wanted = Wanted::new();
    for (at, agent) in view.agents.iter().enumerate() {
        let facts = agent.facts.as_ref();
        if let Some(files) = facts.and_then(|facts| facts.description.model_files) {
            let (_, agents) = wanted.entry(files.hash).or_insert_with(|| (files, vec![]));
            // One that is away for a moment keeps its model, but can't be asked for it.
            if agent.is_up() {
                agents.push(at);
            }
        }
    }
    while wanted.len() > MODELS_MAX {
        wanted.pop_last();
    }
    wanted
}

/// Why a model isn't here.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// No agent gave its files.
    #[error("the agent didn't hand out its model's files: {}", .0.message())]
    Fetch(tonic::Status),
    /// They took too long.
    #[error("the model's files took over {} s", FETCH_MAX.as_secs())]
    Late,
    /// They are of no use.
    #[error(transparent)]
    Model(#[from] crate::prompt::model::Error),
    /// Reading them panicked.
    #[error("the model's files can't be read")]
    Panicked(#[source] tokio::task::JoinError),
}

async fn fetch(control: &Control, files: ModelFiles) -> Result<Model, Error> {
    let fetched = tokio::time::timeout(FETCH_MAX, control.model_files(files)).await;
    let files: Files = fetched.map_err(|_| Error::Late)?.map_err(Error::Fetch)?;
    let made = tokio::task::spawn_blocking(move || Model::new(&files));
    Ok(made.await.map_err(Error::Panicked)??)
}
