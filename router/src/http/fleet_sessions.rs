//! Serves `/v1/fleet/sessions`, for operators: the sessions of all clients, as agents report them.
//!
//! A session is an ordered list of turns that share a growing prefix. Its digest names it here,
//! because equal ids of two clients are two sessions. A list of 100,000 sessions helps nobody, so a
//! request says by which figure the first ones are chosen, and which text they must have.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Query, State},
    response::{IntoResponse as _, Response},
};
use http::{StatusCode, Uri};
use proto::{id::SessionKey, load::Session};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use service::{clock::whole_millis, refusal::Refusal};

use super::{IdPath, SharedState, errors, id, page::ENTRIES_MAX, respond};
use crate::{
    fleet::{sessions::ReportedSession, snapshot::Snapshot},
    turn::{sessions, shared::Shared},
};

/// Sessions of an answer if the request names no limit.
const SESSIONS_DEFAULT: usize = 100;

/// The figure by which the first sessions of a list are chosen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum SessionOrder {
    /// Most resident tokens first.
    #[default]
    Resident,
    /// Most turns first.
    Turns,
    /// Those whose last turn ended last.
    Recent,
    /// By id.
    Id,
}

impl SessionOrder {
    pub(super) const ALL: [Self; 4] = [Self::Resident, Self::Turns, Self::Recent, Self::Id];

    /// Compares two sessions in this order.
    fn compare(self, one: &Session, other: &Session) -> std::cmp::Ordering {
        let resident = |session: &Session| session.resident_tokens.map(|figure| figure.value);
        let order = match self {
            Self::Resident => resident(other).cmp(&resident(one)),
            Self::Turns => other.turns.cmp(&one.turns),
            Self::Recent => one.idle.cmp(&other.idle),
            Self::Id => one.key.id().cmp(other.key.id()),
        };
        order.then_with(|| one.key.cmp(&other.key))
    }
}

/// The query of a list.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct ListQuery {
    sort: SessionOrder,
    /// A text that a session's id, digest, principal, worker, state or retention has.
    find: String,
    /// The most sessions in the answer.
    limit: Option<u32>,
}

/// Answers with the first sessions by the query's order.
pub(super) async fn list(State(shared): SharedState, uri: Uri) -> Response {
    let query = match Query::<ListQuery>::try_from_uri(&uri) {
        Ok(Query(query)) => query,
        Err(error) => return respond(&shared, Err(errors::query_refusal(&error))),
    };
    // With 100,000 sessions this takes tens of milliseconds.
    let listing = tokio::task::spawn_blocking(move || build_list(&shared, &query)).await;
    Json(listing.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic())))
        .into_response()
}

fn build_list(shared: &Shared, query: &ListQuery) -> Value {
    let view = shared.directory.view();
    let limit = query.limit.map_or(SESSIONS_DEFAULT, |limit| limit as usize);
    let mut found: Vec<&ReportedSession> =
        view.sessions.iter().filter(|entry| is_found(entry, &query.find, &view)).collect();
    found.sort_unstable_by(|one, other| query.sort.compare(&one.session, &other.session));
    let parents = shared.recent_turns.lock().parents();
    let first = found.iter().take(limit.clamp(1, ENTRIES_MAX));
    let sessions: Vec<Value> = first
        .map(|ReportedSession { worker, session }| {
            let digest = session.key.digest();
            json!({
                "digest": digest.to_string(),
                "session_id": session.key.id(),
                "principal": session.key.principal(),
                "parent": parents.get(&digest).map(ToString::to_string),
                "worker": view.name(*worker),
                "retention": session.retention.as_str(),
                "state": session.state,
                "turns": session.turns,
                "turns_running": session.turns_running,
                "resident_tokens": session.resident_tokens.map(|figure| figure.value),
                "idle_ms_at_report": whole_millis(session.idle),
                "began_unix_ms": session.began_unix_ms,
            })
        })
        .collect();
    json!({ "sessions": sessions, "total": found.len() })
}

/// Whether the session has the text that the list is filtered by.
fn is_found(entry: &ReportedSession, text: &str, view: &Snapshot) -> bool {
    let session = &entry.session;
    text.is_empty()
        || session.key.id().contains(text)
        || session.key.principal().contains(text)
        || session.retention.as_str() == text
        || json!(session.state) == *text
        || view.name(entry.worker).contains(text)
        || session.key.digest().to_string() == text
}

/// Closes the session whose digest the path names.
pub(super) async fn close(State(shared): SharedState, path: IdPath) -> Response {
    let closed = async {
        let digest = id(path)?;
        let key = find_key(&shared, digest).await.ok_or(sessions::Error::Unknown)?;
        shared.sessions.close(key).await?;
        Ok::<_, Refusal>(StatusCode::NO_CONTENT.into_response())
    };
    respond(&shared, closed.await)
}

/// Returns the key of the reported session with this digest.
async fn find_key(shared: &Arc<Shared>, digest: String) -> Option<SessionKey> {
    let view = shared.directory.settled_view().await;
    let search = move || {
        let mut keys = view.sessions.iter().map(|entry| &entry.session.key);
        keys.find(|key| key.digest().to_string() == digest).cloned()
    };
    let found = tokio::task::spawn_blocking(search).await;
    found.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}
