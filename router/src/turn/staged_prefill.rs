//! Has an agent compute a long prompt in stages before the prompt's turn is sent to the engine.
//!
//! A long prompt at once would keep the engine busy. Between two stages, the engine can work on
//! other turns. The agent makes the stages; this module sends it the token ids of the whole prompt,
//! and waits. If staged prefill fails, the turn is sent as usual.
//!
//! Staged prefill is used only if the ids are certainly those that the engine makes, and if the
//! agent reports the worker's resident blocks. Ids made from text are certain once an agent has
//! reported the text's first block: the engine then has the same block hash, so the same ids.

use std::time::Duration;

use bytes::Bytes;
use contract::staged_prefill;
use http::{HeaderMap, uri::PathAndQuery};
use service::{
    clock::{now, whole_millis},
    log::describe_error,
    traces::{context::context_headers, record::SpanKind},
};
use tracing::debug;

use super::{
    placer::PlacedTurn, proxy::OutboundTurn, request::Turn, shared::Shared, upstream::SendError,
};
use crate::metrics::StagedPrefillEnd;

/// After this time the turn is sent anyway, so that a long queue or a stuck engine doesn't use up
/// the turn's own time limit.
const STAGED_PREFILL_MAX: Duration = Duration::from_secs(60);

/// Returns when the turn may be sent.
pub(crate) async fn run(
    shared: &Shared,
    turn: &Turn,
    outbound: &OutboundTurn,
    placed: &mut PlacedTurn,
) {
    let Some(LongPrompt { resident_tokens, stage_tokens }) = find_long_prompt(shared, placed)
    else {
        return;
    };
    let span = outbound.observers.trace.child("staged_prefill", SpanKind::Client);
    placed.lease.begin_staged_prefill();
    let began_at = now();
    // The number of tokens that the turn itself has to compute, or why staged prefill failed.
    let remaining_result = match prompt_token_ids(shared, turn, outbound, placed).await {
        None => Err(StagedPrefillEnd::NoIds),
        Some(StagedPrompt { token_ids, mut headers }) => {
            headers.extend(context_headers(&outbound.headers));
            span.inject(&mut headers);
            let body = staged_prefill::encode(&token_ids);
            compute_in_stages(shared, outbound, placed, headers, body, resident_tokens).await
        }
    };
    // After a failure, the turn still has to compute all of its tokens.
    placed.lease.end_staged_prefill(remaining_result.unwrap_or(u64::MAX));
    if let (Ok(remaining_tokens), Some(blocks)) = (remaining_result, &placed.blocks) {
        placed.resident_tokens =
            Some(blocks.prompt_overlap().tokens.saturating_sub(remaining_tokens));
    }
    // A client may have closed the session meanwhile. The agent didn't know of this turn, so it
    // couldn't defer the close to the turn's end. Then this turn closes the session again.
    if let (Some(hold), Some(claim)) = (&placed.hold, &mut placed.claim) {
        claim.close |= hold.is_closing();
    }
    shared.metrics.turn.observe_staged_prefill(now().saturating_duration_since(began_at));
    shared.metrics.count_staged_prefill_end(match remaining_result {
        Ok(remaining_tokens) if remaining_tokens > stage_tokens => StagedPrefillEnd::Partly,
        Ok(_) => StagedPrefillEnd::Computed,
        Err(failure) => failure,
    });
}

/// The worker has to compute more than one stage of it.
struct LongPrompt {
    /// Leading tokens that are already resident on the worker.
    resident_tokens: u64,
    stage_tokens: u64,
}

/// `None` if staged prefill can't or shouldn't compute the prompt.
fn find_long_prompt(shared: &Shared, placed: &PlacedTurn) -> Option<LongPrompt> {
    if placed.prefill.is_some() {
        // Another engine computes the prompt.
        return None;
    }
    let view = shared.directory.view();
    let stage_tokens = view.worker_table().get(placed.worker)?.stage_tokens()?;
    // If this turn opens its session, the session's next turns queue behind it at the agent. They
    // must not reach the agent before this turn, so this turn must be sent at once.
    let facts = view.agent(placed.worker).facts.as_ref()?;
    let opens_session = placed.claim.as_ref().is_some_and(|claim| claim.open);
    if opens_session && facts.description.turns_queued_per_session_max > 0 {
        return None;
    }
    let blocks = placed.blocks.as_ref()?;
    let resident_tokens = placed.resident_tokens?;
    let uncached_tokens = blocks.prompt_overlap().tokens - resident_tokens;
    // A session may have KV of its own, which is in no reported block. Placement then counts fewer
    // tokens to compute than the reported blocks leave. Staged prefill would compute that KV again.
    let has_no_private_kv = placed.lease.tokens() == uncached_tokens;
    (has_no_private_kv && uncached_tokens > stage_tokens)
        .then_some(LongPrompt { resident_tokens, stage_tokens })
}

struct StagedPrompt {
    token_ids: Vec<u32>,
    /// The headers of the request to the agent.
    headers: HeaderMap,
}

/// `None` unless the token ids are certainly those that the engine makes.
async fn prompt_token_ids(
    shared: &Shared,
    turn: &Turn,
    outbound: &OutboundTurn,
    placed: &PlacedTurn,
) -> Option<StagedPrompt> {
    let view = shared.directory.view();
    let facts = view.agent(placed.worker).facts.as_ref()?;
    let (path, body) = (outbound.path_and_query.path(), &outbound.body.bytes()?);
    let blocks = placed.blocks.as_ref()?;
    let mut headers = HeaderMap::new();
    if let Some(salt) = turn.prompt.cache_salt(body) {
        headers.insert(staged_prefill::CACHE_SALT, staged_prefill::salt_header(&salt)?);
    }
    let (locator, sharer) = (&shared.block_locator, &outbound.sharer);
    let token_ids =
        locator.token_ids(&turn.prompt, path, body, blocks, &facts.description, sharer).await?;
    Some(StagedPrompt { token_ids, headers })
}

/// Waits until the agent has computed all stages but the last. Returns the tokens that the turn
/// itself still has to compute.
async fn compute_in_stages(
    shared: &Shared,
    outbound: &OutboundTurn,
    placed: &PlacedTurn,
    headers: HeaderMap,
    encoded_token_ids: Bytes,
    resident_tokens: u64,
) -> Result<u64, StagedPrefillEnd> {
    let path_and_query = PathAndQuery::from_static(staged_prefill::PATH);
    let request =
        outbound.request_to_agent(&placed.target(), path_and_query, headers, encoded_token_ids);
    let started_at = now();
    let give_up_at = outbound.deadline.min(started_at + STAGED_PREFILL_MAX);
    let result = match shared.upstream.send(placed.worker.agent, request, give_up_at).await {
        Ok(response) => {
            staged_prefill::uncached_tokens(response.headers()).ok_or(StagedPrefillEnd::Refused)
        }
        Err(SendError::Http(error) | SendError::NoDescriptors(error)) => {
            debug!(
                worker = placed.worker_name,
                error = describe_error(&error),
                "staged prefill failed"
            );
            Err(StagedPrefillEnd::Failed)
        }
        Err(SendError::Silent { .. }) => Err(StagedPrefillEnd::Failed),
        Err(SendError::Late) => Err(StagedPrefillEnd::Late),
    };
    debug!(
        turn = format!("{:016x}", outbound.turn_id),
        worker = placed.worker_name,
        resident_tokens,
        left = ?result,
        took_ms = whole_millis(now().saturating_duration_since(started_at)),
        "staged prefill ended"
    );
    result
}
