//! Staged prefill, the router's side: has long prompts computed in stages before their turns.
//!
//! A long prompt would keep its worker busy for long, so the agent computes it in stages first
//! (see [`proto::staged_prefill`]). This is for the benefit of other turns: if it fails, the turn
//! is sent as usual.
//!
//! It is used only if the token ids are certainly the engine's own and the worker reports its
//! blocks. Ids made from text are certain once an agent has reported a block of that text.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Uri};
use http_body_util::Full;
use proto::{claim, staged_prefill};
use service::clock::now;
use tracing::debug;

use super::{
    decide::PlacedTurn,
    proxy::{self, OutboundTurn},
    request::Turn,
    shared::Shared,
};
use crate::{fleet::connect, metrics::StagedPrefillEnd};

/// Longest time that a prompt is in staged prefill before its turn is sent anyway. Too many such
/// prompts are queued then, or the engine is stuck, and the turn needs a queue that bounds its
/// wait.
const STAGED_PREFILL_MAX: Duration = Duration::from_secs(60);

/// Has a long prompt computed in stages. Returns when the turn may be sent.
pub(crate) async fn run(
    shared: &Arc<Shared>,
    turn: &Turn,
    outbound: &OutboundTurn,
    placed: &mut PlacedTurn,
) {
    let Some(LongPrompt { resident_tokens, stage_tokens }) = find_long_prompt(shared, placed)
    else {
        return;
    };
    placed.lease.begin_staged_prefill();
    let end = match token_ids(shared, turn, outbound, placed).await {
        None => Err(StagedPrefillEnd::NoIds),
        Some(token_ids) => {
            compute(shared, outbound, placed, staged_prefill::encode(&token_ids), resident_tokens)
                .await
        }
    };
    placed.lease.end_staged_prefill(end.unwrap_or(u64::MAX));
    if let (Ok(left_tokens), Some(blocks)) = (end, &placed.blocks) {
        placed.resident_tokens = Some(blocks.prompt().tokens.saturating_sub(left_tokens));
    }
    // While staged, the turn was unknown to its worker, where the session may have been closed.
    if let (Some(hold), Some(claim)) = (&placed.hold, &mut placed.claim) {
        claim.close |= hold.is_closing();
    }
    shared.metrics.staged_prefill_ended(match end {
        Ok(left_tokens) if left_tokens > stage_tokens => StagedPrefillEnd::Partly,
        Ok(_) => StagedPrefillEnd::Computed,
        Err(end) => end,
    });
}

/// A prompt of which the worker has to compute more than one stage.
struct LongPrompt {
    /// Tokens that are already resident on the worker.
    resident_tokens: u64,
    stage_tokens: u64,
}

fn find_long_prompt(shared: &Shared, placed: &PlacedTurn) -> Option<LongPrompt> {
    let view = shared.view.load();
    let stage_tokens = view.worker_table().get(placed.worker)?.stage_tokens()?;
    // Turns behind a turn that opens its session wait at the agent. They must not reach the agent
    // before it.
    let facts = view.agent(placed.worker).facts.as_ref()?;
    let opens = placed.claim.as_ref().is_some_and(|claim| claim.open);
    if opens && facts.description.turns_queued_per_session_max > 0 {
        return None;
    }
    let blocks = placed.blocks.as_ref()?;
    let resident_tokens = placed.resident_tokens?;
    let uncached_tokens = blocks.prompt().tokens - resident_tokens;
    // KV that is private to a session is in no reported block and needn't be computed.
    let matches_placement = placed.lease.tokens() == uncached_tokens;
    (matches_placement && uncached_tokens > stage_tokens)
        .then_some(LongPrompt { resident_tokens, stage_tokens })
}

async fn token_ids(
    shared: &Shared,
    turn: &Turn,
    outbound: &OutboundTurn,
    placed: &PlacedTurn,
) -> Option<Vec<u32>> {
    let view = shared.view.load();
    let facts = view.agent(placed.worker).facts.as_ref()?;
    let (path, body) = (outbound.path.path(), &outbound.body);
    let blocks = placed.blocks.as_ref()?;
    shared.block_locator.token_ids(&turn.prompt, path, body, blocks, &facts.description).await
}

/// Sends the ids to the agent. Returns how many tokens the turn itself still has to compute.
async fn compute(
    shared: &Shared,
    outbound: &OutboundTurn,
    placed: &PlacedTurn,
    token_ids: Bytes,
    resident_tokens: u64,
) -> Result<u64, StagedPrefillEnd> {
    let uri = Uri::builder()
        .scheme("http")
        .authority(&*placed.authority)
        .path_and_query(staged_prefill::PATH)
        .build()
        .expect("authority and path were parsed before");
    let mut request = Request::new(Full::new(token_ids));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = uri;
    let headers = request.headers_mut();
    headers.insert(claim::TURN, proxy::turn_header(outbound.turn_id));
    headers.insert(claim::RANK, HeaderValue::from(placed.worker.dp_rank));
    headers.insert(claim::RESIDENT, HeaderValue::from(resident_tokens));
    let asked = now();
    let answer = shared.client.request(request);
    let limit = outbound.deadline.min(asked + STAGED_PREFILL_MAX);
    let end = match tokio::time::timeout_at(limit.into(), answer).await {
        Ok(Ok(response)) => {
            staged_prefill::left_tokens(response.headers()).ok_or(StagedPrefillEnd::Refused)
        }
        Ok(Err(error)) => {
            debug!(
                worker = placed.name,
                error = connect::describe_error(&error),
                "staged prefill failed"
            );
            Err(StagedPrefillEnd::Failed)
        }
        Err(_) => Err(StagedPrefillEnd::Late),
    };
    debug!(
        turn = format!("{:016x}", outbound.turn_id),
        worker = placed.name,
        resident_tokens,
        left = ?end,
        took_ms = millis_since(asked),
        "staged prefill ended"
    );
    end
}

fn millis_since(at: Instant) -> u64 {
    u64::try_from(now().saturating_duration_since(at).as_millis()).unwrap_or(u64::MAX)
}
