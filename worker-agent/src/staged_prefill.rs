//! Serves staged prefill: computes a long prompt in stages, before a router sends its turn.
//!
//! Short prompts run between the stages, so they don't wait for the whole long prompt.
//! [`contract::staged_prefill`] has the protocol.
//!
//! A stage sends a beginning of the prompt to the engine as a turn without a session. The engine
//! generates one token, and keeps the prompt's KV in its radix tree. `data_port` admits, counts and
//! aborts this turn like any other. At most one stage per rank is in the engine. If the router
//! disconnects, the computed stages stay cached.

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
use contract::{
    envelope::{self, TurnEnvelope},
    load::Description,
    staged_prefill::{PATH, UNCACHED_TOKENS, cache_salt, decode},
};
use http::{HeaderMap, HeaderValue, StatusCode};
use http_body_util::{BodyExt, Limited};
use serde::Deserialize;
use service::{
    budget::HeldBody,
    refusal::{Code, Refusal},
    traces::context::context_headers,
};
use tracing::debug;

use crate::{
    data_port::{self, Caller, TurnContext, spans},
    metrics::StageOutcome,
    staged_prefill_queue::{QueuePlace, StagedPrefillQueues, prefill_tokens_per_s},
};

/// One token and its metadata.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Of a stage, with its waits for room and in the engine's queue. Without this limit, a prompt
/// without room would block prompts that have room. After it, the router sends the turn without
/// further stages.
const STAGE_TIME_MAX: Duration = Duration::from_secs(10);

#[derive(Debug, Clone)]
pub struct StagedPrefillRunner {
    /// The owner task reads them for its load reports.
    queues: Arc<StagedPrefillQueues>,
    context: Arc<TurnContext>,
    /// The queues' clock begins here.
    clock_start: Instant,
}

#[derive(Debug)]
struct Prompt {
    /// Encoded token ids: see [`decode`].
    body: HeldBody,
    /// The stages have the caller's rights at the engine.
    caller: Caller,
    /// The client on whose behalf the prompt is computed.
    principal: Arc<str>,
    prompt_tokens: usize,
    dp_rank: u32,
    page_tokens: usize,
    /// Leading tokens that are in the engine's cache.
    resident_tokens: usize,
    /// The engine shares KV only within one salt. JSON escapes none of its characters.
    cache_salt: Option<String>,
    trace_headers: HeaderMap,
}

struct StageSize {
    stage_tokens: u64,
    tokens_per_s: u64,
}

impl Prompt {
    fn left_tokens(&self) -> u64 {
        (self.prompt_tokens - self.resident_tokens) as u64
    }

    fn first_ids_json(&self, count: usize) -> String {
        let ids = decode(&self.body.bytes).expect("it was decoded before");
        let ids: Vec<u32> = ids.take(count).collect();
        serde_json::to_string(&ids).expect("numbers serialise")
    }

    /// `None` if at most one stage is left, which the turn itself computes.
    fn next_stage_end(&self, stage_tokens: u64) -> Option<usize> {
        if self.left_tokens() <= stage_tokens {
            return None;
        }
        // The sum is smaller than `self.prompt_tokens`, so it fits.
        let end = self.resident_tokens + usize::try_from(stage_tokens).ok()?;
        // The engine caches only full pages.
        let page_end = end / self.page_tokens * self.page_tokens;
        let end = page_end.max(self.resident_tokens + self.page_tokens);
        (end < self.prompt_tokens).then_some(end)
    }
}

impl StagedPrefillRunner {
    #[must_use]
    pub fn new(queues: Arc<StagedPrefillQueues>, context: Arc<TurnContext>) -> Self {
        Self { queues, context, clock_start: service::clock::now() }
    }

    pub fn routes(self) -> Router<Arc<TurnContext>> {
        let handler = move |request: Request| async move { self.respond(request).await };
        Router::new().route(PATH, post(handler))
    }

    /// The response's header [`UNCACHED_TOKENS`] says how many tokens are left.
    async fn respond(&self, mut request: Request) -> Response {
        let (traces, headers) = (&self.context.traces, request.headers_mut());
        let envelope = TurnEnvelope::read(headers);
        let trace = spans::begin(traces, headers, PATH, "staged_prefill", &envelope);
        match self.compute_prompt(request, envelope).await {
            Ok(left_tokens) => {
                let mut response = StatusCode::NO_CONTENT.into_response();
                response.headers_mut().insert(UNCACHED_TOKENS, HeaderValue::from(left_tokens));
                response
            }
            Err(refusal) => {
                debug!(%refusal, "refused staged prefill of a prompt");
                self.context.metrics.count_refusal(refusal.code);
                spans::refuse(&trace, &refusal);
                refusal.into_response()
            }
        }
    }

    /// Returns how many tokens are left: at most one stage.
    async fn compute_prompt(
        &self,
        request: Request,
        envelope: Result<TurnEnvelope, envelope::Error>,
    ) -> Result<u64, Refusal> {
        let bad_request =
            |error: envelope::Error| Refusal::new(Code::StagedPrefill, error.to_string());
        let mut prompt = self.read_prompt(request, envelope.map_err(bad_request)?).await?;
        let StageSize { stage_tokens, tokens_per_s } = self.stage_size(prompt.dp_rank)?;
        if prompt.next_stage_end(stage_tokens).is_some() {
            let place = self.enter_queue(&prompt, tokens_per_s)?;
            self.compute_stages(&mut prompt, &place).await?;
        }
        Ok(prompt.left_tokens())
    }

    async fn read_prompt(
        &self,
        request: Request,
        envelope: TurnEnvelope,
    ) -> Result<Prompt, Refusal> {
        let (parts, body) = request.into_parts();
        let caller = parts.extensions.get().copied().unwrap_or(Caller::Local);
        let bad_request = |text: String| Refusal::new(Code::StagedPrefill, text);
        let TurnEnvelope { principal, rank, resident_tokens, .. } = envelope;
        let cache_salt =
            cache_salt(&parts.headers).map_err(|error| bad_request(error.to_string()))?;
        let body = self.context.body_budget.read(body).await?;
        let prompt_tokens = decode(&body.bytes).map(|ids| ids.len()).ok_or_else(|| {
            bad_request(
                "the body holds no token ids; send four little-endian bytes each".to_owned(),
            )
        })?;
        let (page_tokens, context_tokens) = match self.context.agent.description.borrow().as_deref()
        {
            Some(Description { engine, .. }) => (engine.page_tokens.max(1), engine.context_tokens),
            None => return Err(down_refusal("it has not answered yet")),
        };
        if prompt_tokens > context_tokens as usize {
            let text = "the prompt is longer than the model's context; send the turn itself";
            return Err(bad_request(text.to_owned()));
        }
        Ok(Prompt {
            caller,
            principal,
            prompt_tokens,
            dp_rank: rank.unwrap_or(0),
            page_tokens: page_tokens as usize,
            resident_tokens: usize::try_from(resident_tokens)
                .unwrap_or(usize::MAX)
                .min(prompt_tokens),
            cache_salt,
            trace_headers: context_headers(&parts.headers),
            body,
        })
    }

    /// Ends early if the engine has evicted the KV of earlier stages.
    async fn compute_stages(
        &self,
        prompt: &mut Prompt,
        place: &QueuePlace<'_>,
    ) -> Result<(), Refusal> {
        let mut is_first_stage = true;
        loop {
            // While other prompts were computed, the rate may have changed or the engine ended.
            let StageSize { tokens_per_s, .. } = self.stage_size(prompt.dp_rank)?;
            self.queues.set_prefill_rate(prompt.dp_rank, tokens_per_s);
            let choose_stage = || {
                let StageSize { stage_tokens, .. } = self.stage_size(prompt.dp_rank).ok()?;
                let end = prompt.next_stage_end(stage_tokens)?;
                Some(((end - prompt.resident_tokens) as u64, end))
            };
            let Some(end) = place.begin_stage(choose_stage).await else { return Ok(()) };
            let stage_result =
                tokio::time::timeout(STAGE_TIME_MAX, self.compute_stage(prompt, end)).await;
            let cached_tokens = stage_result.unwrap_or_else(|_| Err(late_refusal()));
            let cached_tokens = cached_tokens
                .inspect_err(|_| self.context.metrics.count_stage(StageOutcome::Failed, 0))?;
            // No session pins the KV of a stage, so the engine may evict it when the pool is full.
            // Before the first stage, missing KV has another cause: the router overestimated the
            // resident tokens.
            let lacks_resident_tokens =
                cached_tokens.saturating_add(prompt.page_tokens) < prompt.resident_tokens;
            let was_evicted = lacks_resident_tokens && !is_first_stage;
            let outcome = if was_evicted { StageOutcome::Evicted } else { StageOutcome::Computed };
            self.context.metrics.count_stage(outcome, end.saturating_sub(cached_tokens) as u64);
            (prompt.resident_tokens, is_first_stage) = (end, false);
            place.end_stage(prompt.left_tokens());
            if was_evicted {
                return Ok(());
            }
        }
    }

    /// Returns how many of the `end` tokens were cached before.
    async fn compute_stage(&self, prompt: &Prompt, end: usize) -> Result<usize, Refusal> {
        #[derive(Deserialize)]
        struct StageAnswer {
            meta_info: StageMeta,
        }
        #[derive(Deserialize)]
        struct StageMeta {
            cached_tokens: usize,
        }
        let ids = prompt.first_ids_json(end);
        // Some modes of the engine refuse `max_new_tokens: 0`.
        let sampling = r#"{"max_new_tokens":1,"temperature":0}"#;
        let salt = prompt.cache_salt.as_ref();
        let salt = salt.map_or_else(String::new, |salt| format!(r#","cache_salt":"{salt}""#));
        let body = format!(r#"{{"input_ids":{ids},"sampling_params":{sampling}{salt}}}"#);
        let envelope = TurnEnvelope {
            principal: Arc::clone(&prompt.principal),
            rank: Some(prompt.dp_rank),
            resident_tokens: prompt.resident_tokens as u64,
            ..TurnEnvelope::default()
        };
        let (caller, trace_headers) = (prompt.caller, &prompt.trace_headers);
        let response =
            data_port::send_own_turn(&self.context, caller, envelope, trace_headers, body).await?;
        let status = response.status();
        let answer_body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
        let bytes = answer_body.map(http_body_util::Collected::to_bytes).unwrap_or_default();
        let answer =
            serde_json::from_slice::<StageAnswer>(&bytes).ok().filter(|_| status.is_success());
        answer.map(|answer| answer.meta_info.cached_tokens).ok_or_else(|| {
            let text = format!("a prefill stage failed with {status}; send the turn itself");
            Refusal::new(Code::StagedPrefillFailed, text)
        })
    }

    fn enter_queue(&self, prompt: &Prompt, tokens_per_s: u64) -> Result<QueuePlace<'_>, Refusal> {
        let now = service::clock::now().saturating_duration_since(self.clock_start);
        let place = self.queues.enter(prompt.dp_rank, prompt.left_tokens(), tokens_per_s, now);
        place.ok_or_else(|| {
            let text = "too many prompts wait on this worker; send the turn itself";
            Refusal::new(Code::StagedPrefillFull, text)
        })
    }

    fn stage_size(&self, dp_rank: u32) -> Result<StageSize, Refusal> {
        let report = self.context.agent.report.borrow();
        if let Some(reason) = &report.unhealthy {
            return Err(down_refusal(reason));
        }
        let rank = report.ranks.iter().find(|rank| rank.dp_rank == dp_rank).ok_or_else(|| {
            let text = format!("there is no DP rank {dp_rank}; ask for one of /v1/workers");
            Refusal::new(Code::NoRank, text)
        })?;
        let tokens_per_s = prefill_tokens_per_s(rank);
        Ok(StageSize { stage_tokens: self.queues.stage_tokens(tokens_per_s), tokens_per_s })
    }
}

fn late_refusal() -> Refusal {
    let text = "a prefill stage took over 10 s: no room, or a long queue; send the turn itself";
    Refusal::new(Code::StagedPrefillLate, text)
}

fn down_refusal(reason: &str) -> Refusal {
    let text = format!("the engine can't be used: {reason}; try again when it answers");
    Refusal::new(Code::EngineDown, text)
}
