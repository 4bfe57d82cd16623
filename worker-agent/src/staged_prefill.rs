//! Staged prefill: computes a long prompt before its turn, in stages. Short prompts run in between.
//!
//! See [`proto::staged_prefill`] for the reasons and for what is sent. At most one stage per rank
//! is in the engine; [`Queues`] decides which prompt is next. A stage is a turn of its own that
//! generates one token without a session. Like any other turn it is admitted, waits for room, is
//! counted and can be aborted. It leaves its KV in the engine's cache. The caller may disconnect at
//! any time; what is computed stays cached.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Router,
    extract::Request,
    response::{IntoResponse, Response},
    routing::post,
};
use http::{HeaderValue, StatusCode};
use http_body_util::{BodyExt, Limited};
use proto::{
    claim,
    load::{Description, LoadReport},
    process::{budget::HeldBody, refusal::Refusal},
    staged_prefill::{LEFT, PATH, decode},
};
use serde::Deserialize;
use tokio::sync::watch;
use tracing::debug;

use crate::{
    data_port::{self, TurnContext},
    metrics::StageOutcome,
    staged_prefill_queue::{Place, Queues, prefill_tokens_per_s},
};

/// The maximum bytes of the engine's answer to a stage: one token and its metadata.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// The time limit of a stage, including its waits for room and in the engine's queue. Without the
/// limit, a prompt that has no room would block prompts that have. After it the caller sends the
/// turn itself.
const STAGE_MAX: Duration = Duration::from_secs(10);

/// Computes prompts ahead of their turns.
#[derive(Debug, Clone)]
pub struct Runner {
    /// The queues, shared with the reporter of loads.
    pub queues: Arc<Queues>,
    /// The path of a stage through the agent.
    pub context: TurnContext,
    /// The engine's load.
    pub report: watch::Receiver<Arc<LoadReport>>,
    /// The engine's description; `None` until the engine was reached.
    pub description: watch::Receiver<Option<Arc<Description>>>,
    /// The origin of the clock that measures how long prompts wait.
    pub start: Instant,
}

/// A prompt to compute.
#[derive(Debug)]
struct Prompt {
    /// The token ids as received.
    body: HeldBody,
    tokens: usize,
    dp_rank: u32,
    page_tokens: usize,
    /// The number of leading tokens that are in the engine's cache.
    resident: usize,
}

impl Prompt {
    fn left(&self) -> u64 {
        (self.tokens - self.resident) as u64
    }

    /// Returns the first `end` ids as JSON.
    fn json(&self, end: usize) -> String {
        let ids = decode(&self.body.bytes).expect("it was decoded before");
        let ids: Vec<u32> = ids.take(end).collect();
        serde_json::to_string(&ids).expect("numbers serialise")
    }

    /// Returns where a stage of `stage_tokens` ends, or `None` if the rest is left to the turn
    /// itself.
    fn end(&self, stage_tokens: u64) -> Option<usize> {
        if self.left() <= stage_tokens {
            return None;
        }
        // This fits in a usize: more tokens than this are left.
        let end = self.resident + usize::try_from(stage_tokens).ok()?;
        // Only full pages are cached.
        let end = (end / self.page_tokens * self.page_tokens).max(self.resident + self.page_tokens);
        (end < self.tokens).then_some(end)
    }
}

impl Runner {
    /// Returns the route of the data port on which routers request staged prefill.
    #[must_use]
    pub fn routes(self) -> Router<TurnContext> {
        let serve = move |request: Request| async move { self.answer(request).await };
        Router::new().route(PATH, post(serve))
    }

    /// Computes a prompt until less than a stage is left. The answer says how many tokens are left.
    async fn answer(&self, request: Request) -> Response {
        match self.serve(request).await {
            Ok(left_tokens) => {
                let mut answer = StatusCode::NO_CONTENT.into_response();
                answer.headers_mut().insert(LEFT, HeaderValue::from(left_tokens));
                answer
            }
            Err(refusal) => {
                debug!(%refusal, "refused staged prefill of a prompt");
                self.context.metrics.count_refusal(refusal.code);
                refusal.into_response()
            }
        }
    }

    async fn serve(&self, request: Request) -> Result<u64, Refusal> {
        let mut prompt = self.read(request).await?;
        let (stage, tokens_per_s) = self.stage(prompt.dp_rank)?;
        if prompt.end(stage).is_some() {
            let place = self.enter(&prompt, tokens_per_s)?;
            self.compute(&mut prompt, &place).await?;
        }
        Ok(prompt.left())
    }

    async fn read(&self, request: Request) -> Result<Prompt, Refusal> {
        let (parts, body) = request.into_parts();
        let bad = |what: String| Refusal::bad_request("staged_prefill", what);
        let dp_rank = claim::rank(&parts.headers).map_err(|error| bad(error.to_string()))?;
        let resident = claim::resident_tokens(&parts.headers);
        let resident = resident.map_err(|error| bad(error.to_string()))?;
        let body = self.context.body_budget.read(body).await?;
        let tokens = decode(&body.bytes).map(|ids| ids.len()).ok_or_else(|| {
            bad("the body holds no token ids; send four little-endian bytes each".to_owned())
        })?;
        let (page_tokens, context_tokens) = match self.description.borrow().as_deref() {
            Some(Description { engine, .. }) => (engine.page_tokens.max(1), engine.context_tokens),
            None => return Err(down("it has not answered yet")),
        };
        if tokens > context_tokens as usize {
            let text = "the prompt is longer than the model's context; send the turn itself";
            return Err(bad(text.to_owned()));
        }
        Ok(Prompt {
            tokens,
            dp_rank: dp_rank.unwrap_or(0),
            page_tokens: page_tokens as usize,
            resident: usize::try_from(resident).unwrap_or(usize::MAX).min(tokens),
            body,
        })
    }

    async fn compute(&self, prompt: &mut Prompt, place: &Place<'_>) -> Result<(), Refusal> {
        let mut is_first = true;
        loop {
            // While other prompts were computed, the rate may have changed, or the engine may have
            // gone.
            let (_, tokens_per_s) = self.stage(prompt.dp_rank)?;
            self.queues.measured(prompt.dp_rank, tokens_per_s);
            let stage = || {
                let (stage_tokens, _) = self.stage(prompt.dp_rank).ok()?;
                let end = prompt.end(stage_tokens)?;
                Some(((end - prompt.resident) as u64, end))
            };
            let Some(end) = place.next(stage).await else { return Ok(()) };
            let computed = tokio::time::timeout(STAGE_MAX, self.compute_stage(prompt, end)).await;
            let cached = computed.unwrap_or_else(|_| Err(late()));
            let cached = cached
                .inspect_err(|_| self.context.metrics.count_stage(StageOutcome::Failed, 0))?;
            // The pool had no room to keep the earlier stages' KV, which nothing holds. Before the
            // first stage the same means that the router overestimated what is resident.
            let gone = cached.saturating_add(prompt.page_tokens) < prompt.resident;
            let evicted = gone && !is_first;
            let outcome = if evicted { StageOutcome::Evicted } else { StageOutcome::Computed };
            self.context.metrics.count_stage(outcome, end.saturating_sub(cached) as u64);
            (prompt.resident, is_first) = (end, false);
            place.computed(prompt.left());
            if evicted {
                return Ok(());
            }
        }
    }

    /// Sends the prompt's beginning to the engine. Returns how many of its tokens were cached.
    async fn compute_stage(&self, prompt: &Prompt, end: usize) -> Result<usize, Refusal> {
        #[derive(Deserialize)]
        struct Answer {
            meta_info: Meta,
        }
        #[derive(Deserialize)]
        struct Meta {
            cached_tokens: usize,
        }
        let ids = prompt.json(end);
        // One token, because not all modes of the engine accept a request for none.
        let sampling = r#"{"max_new_tokens":1,"temperature":0}"#;
        let body = format!(r#"{{"input_ids":{ids},"sampling_params":{sampling}}}"#);
        let resident = prompt.resident as u64;
        let response =
            data_port::send_own_turn(&self.context, prompt.dp_rank, resident, body).await?;
        let status = response.status();
        let read = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
        let bytes = read.map(http_body_util::Collected::to_bytes).unwrap_or_default();
        let answer = serde_json::from_slice::<Answer>(&bytes).ok().filter(|_| status.is_success());
        answer.map(|answer| answer.meta_info.cached_tokens).ok_or_else(|| {
            let text = format!("a prefill stage failed with {status}; send the turn itself");
            Refusal::new(StatusCode::BAD_GATEWAY, "staged_prefill_failed", text)
        })
    }

    fn enter(&self, prompt: &Prompt, tokens_per_s: u64) -> Result<Place<'_>, Refusal> {
        let now = tokio::time::Instant::now().into_std().saturating_duration_since(self.start);
        let place = self.queues.enter(prompt.dp_rank, prompt.left(), tokens_per_s, now);
        place.ok_or_else(|| {
            let text = "too many prompts wait on this worker; send the turn itself";
            Refusal::new(StatusCode::TOO_MANY_REQUESTS, "staged_prefill_full", text)
                .retry_after(Duration::from_secs(1))
        })
    }

    /// Returns the current size of a stage, and the prefill rate in tokens per second.
    fn stage(&self, dp_rank: u32) -> Result<(u64, u64), Refusal> {
        let report = self.report.borrow();
        if let Some(reason) = &report.unhealthy {
            return Err(down(reason));
        }
        let rank = report.ranks.iter().find(|rank| rank.dp_rank == dp_rank).ok_or_else(|| {
            let text = format!("there is no DP rank {dp_rank}; ask for one of /v1/workers");
            Refusal::bad_request("no_rank", text)
        })?;
        let tokens_per_s = prefill_tokens_per_s(rank);
        Ok((self.queues.stage_tokens(tokens_per_s), tokens_per_s))
    }
}

fn late() -> Refusal {
    let text = "a prefill stage took over 10 s: no room, or a long queue; send the turn itself";
    Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "staged_prefill_late", text)
}

fn down(reason: &str) -> Refusal {
    let text = format!("the engine can't be used: {reason}; try again when it answers");
    Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "engine_down", text)
        .retry_after(Duration::from_secs(2))
}
