//! Serves `GET /v1/turns`, for operators: the last turns that have ended, oldest first.
//!
//! The figures of tokens are the engine's own: null if the answer has none.

use axum::{
    Json,
    extract::State,
    response::{IntoResponse as _, Response},
};
use contract::{
    api::{Turn, Turns},
    id::SessionKey,
};
use http::Uri;
use service::clock::{now, whole_millis};

use super::{
    SharedState,
    page::{self, PageRange},
    respond,
};
use crate::turn::ended::TurnRecord;

pub(super) async fn list(State(shared): SharedState, uri: Uri) -> Response {
    let range = match PageRange::read_of_session(&uri, shared.process_id) {
        Ok(range) => range,
        Err(refusal) => return respond(&shared, Err(refusal)),
    };
    let is_wanted = |record: &TurnRecord| {
        let wanted = range.session.as_ref();
        wanted.is_none_or(|name| record.session.as_ref().is_some_and(|key| is_named(key, name)))
    };
    let (records, place) = {
        let recent = shared.recent_turns.lock();
        let (page, place) = recent.page(range.after, range.limit, is_wanted);
        (page.into_iter().cloned().collect::<Vec<_>>(), place)
    };
    let turns = records.iter().map(describe).collect();
    let next = page::cursor(place, shared.process_id);
    Json(Turns { turns, next }).into_response()
}

fn is_named(key: &SessionKey, name: &str) -> bool {
    key.id() == name || key.digest().to_string() == name
}

fn describe(record: &TurnRecord) -> Turn {
    let ended_at = record.arrived_at + record.duration;
    let session = record.session.as_ref();
    Turn {
        turn: format!("{:016x}", record.turn),
        session: session.map(|key| key.digest().to_string()),
        session_id: session.map(|key| key.id().to_owned()),
        principal: session.map(|key| key.principal().to_owned()),
        parent: record.parent.as_ref().map(|key| key.digest().to_string()),
        worker: Some(record.worker.clone()),
        prefill_worker: record.prefill_worker.clone(),
        reason: Some(record.reason.as_str().to_owned()),
        retried: record.is_retried,
        retention: record.retention.map(|retention| retention.as_str().to_owned()),
        status: record.status,
        outcome: Some(record.outcome.as_str().to_owned()),
        age_ms: whole_millis(now().saturating_duration_since(ended_at)),
        ttft_ms: record.ttft.map(whole_millis),
        duration_ms: Some(whole_millis(record.duration)),
        prompt_tokens: record.usage.prompt_tokens,
        cached_tokens: record.usage.cached_tokens,
        output_tokens: record.usage.output_tokens,
        uncached_tokens_expected: record.uncached_tokens_expected,
    }
}
