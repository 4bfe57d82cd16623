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

use super::agent_request::{self, Told, request_for_turn};
use crate::{
    fleet::lease::LoadLease,
    metrics::StagedPrefillEnd,
    turn::{
        admit::OutboundTurn, holdings::Holdings, placer::assignment::Assignment, shared::Shared,
        upstream::SendError,
    },
};

/// After this time the turn is sent anyway, so that a long queue or a stuck engine doesn't use up
/// the turn's own time limit.
const STAGED_PREFILL_MAX: Duration = Duration::from_secs(60);

/// Returns when the turn may be sent.
pub(super) async fn run(
    shared: &Shared,
    outbound: &OutboundTurn,
    assignment: &mut Assignment,
    holdings: &mut Holdings,
) {
    let Some(LongPrompt { resident_tokens, stage_tokens }) =
        find_long_prompt(shared, assignment, &holdings.lease)
    else {
        return;
    };
    let span = outbound.arrival.observers.trace.child("staged_prefill", SpanKind::Client);
    holdings.lease.begin_staged_prefill();
    let began_at = now();
    // The number of tokens that the turn itself has to compute, or why staged prefill failed.
    let remaining_result = match prompt_token_ids(shared, outbound, assignment).await {
        None => Err(StagedPrefillEnd::NoIds),
        Some(StagedPrompt { token_ids, mut headers }) => {
            headers.extend(context_headers(&outbound.arrival.head.headers));
            span.inject(&mut headers);
            let body = staged_prefill::encode(&token_ids);
            compute_in_stages(shared, outbound, assignment, headers, body, resident_tokens).await
        }
    };
    // After a failure, the turn still has to compute all of its tokens.
    holdings.lease.end_staged_prefill(remaining_result.unwrap_or(u64::MAX));
    if let (Ok(remaining_tokens), Some(blocks)) = (remaining_result, &assignment.blocks) {
        assignment.resident_tokens =
            Some(blocks.prompt_overlap().tokens.saturating_sub(remaining_tokens));
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
fn find_long_prompt(
    shared: &Shared,
    assignment: &Assignment,
    lease: &LoadLease,
) -> Option<LongPrompt> {
    if assignment.prefill.is_some() {
        // Another engine computes the prompt.
        return None;
    }
    let view = shared.directory.view();
    let stage_tokens = view.worker_table().get(assignment.to.worker)?.stage_tokens()?;
    // If this turn opens its session, the session's next turns queue behind it at the agent. They
    // must not reach the agent before this turn, so this turn must be sent at once.
    let facts = view.agent(assignment.to.worker).facts.as_ref()?;
    let opens_session = assignment.claim.as_ref().is_some_and(|claim| claim.open);
    if opens_session && facts.description.turns_queued_per_session_max > 0 {
        return None;
    }
    let blocks = assignment.blocks.as_ref()?;
    let resident_tokens = assignment.resident_tokens?;
    let uncached_tokens = blocks.prompt_overlap().tokens - resident_tokens;
    // A session may have KV of its own, which is in no reported block. Placement then counts fewer
    // tokens to compute than the reported blocks leave. Staged prefill would compute that KV again.
    let has_no_private_kv = lease.tokens() == uncached_tokens;
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
    outbound: &OutboundTurn,
    assignment: &Assignment,
) -> Option<StagedPrompt> {
    let view = shared.directory.view();
    let facts = view.agent(assignment.to.worker).facts.as_ref()?;
    let (path, body) = (outbound.arrival.path(), &outbound.body.bytes()?);
    let blocks = assignment.blocks.as_ref()?;
    let mut headers = HeaderMap::new();
    if let Some(salt) = outbound.turn.prompt.cache_salt(body) {
        headers.insert(staged_prefill::CACHE_SALT, staged_prefill::salt_header(&salt)?);
    }
    let (locator, sharer) = (&shared.block_locator, &outbound.arrival.sharer);
    let token_ids = locator
        .token_ids(&outbound.turn.prompt, path, body, blocks, &facts.description, sharer)
        .await?;
    Some(StagedPrompt { token_ids, headers })
}

/// Waits until the agent has computed all stages but the last. Returns the tokens that the turn
/// itself still has to compute.
async fn compute_in_stages(
    shared: &Shared,
    outbound: &OutboundTurn,
    assignment: &Assignment,
    headers: HeaderMap,
    encoded_token_ids: Bytes,
    resident_tokens: u64,
) -> Result<u64, StagedPrefillEnd> {
    let path_and_query = PathAndQuery::from_static(staged_prefill::PATH);
    let envelope = agent_request::envelope_of_any(outbound, Told::new(assignment));
    let (to, body) = (&assignment.to, encoded_token_ids);
    let request = request_for_turn(outbound, to, path_and_query, headers, &envelope, body);
    let started_at = now();
    let give_up_at = outbound.arrival.deadline.min(started_at + STAGED_PREFILL_MAX);
    let result = match shared.upstream.send(assignment.to.worker.agent, request, give_up_at).await {
        Ok(response) => {
            staged_prefill::uncached_tokens(response.headers()).ok_or(StagedPrefillEnd::Refused)
        }
        Err(SendError::Http(error) | SendError::NoDescriptors(error)) => {
            debug!(
                worker = assignment.to.name,
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
        worker = assignment.to.name,
        resident_tokens,
        left = ?result,
        took_ms = whole_millis(now().saturating_duration_since(started_at)),
        "staged prefill ended"
    );
    result
}
