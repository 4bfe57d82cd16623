//! Serves `/v1/fleet/sessions`, for operators: the sessions of all clients, as agents report them.
//!
//! Digests name the sessions, because equal ids of two clients are two sessions. A list of 100,000
//! helps nobody, so requests filter and limit it. Parents of the listed sessions come along, so
//! that a reader can show each below its parent.

use std::{
    cmp::Ordering,
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Instant,
};

use axum::{
    Json,
    extract::{Query, State},
    response::{IntoResponse as _, Response},
};
use contract::{
    api::{FleetSession, FleetSessions},
    id::{Digest, SessionKey},
    load::Session,
};
use http::{StatusCode, Uri};
use serde::Deserialize;
use service::{
    clock::{now, whole_millis},
    refusal::Refusal,
};
use utoipa::ToSchema;

use super::{IdPath, SharedState, errors, id, page::ENTRIES_MAX, respond};
use crate::{
    fleet::{
        sessions::{ReportedSession, Sessions},
        snapshot::Snapshot,
    },
    sessions::{lifecycle, status},
    turn::shared::Shared,
};

const SESSIONS_DEFAULT: usize = 100;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum SessionOrder {
    /// Most resident tokens first.
    #[default]
    Resident,
    /// Most turns first.
    Turns,
    /// The session whose last turn ended last comes first.
    Recent,
    Id,
}

impl SessionOrder {
    fn compare(self, one: &ReportedSession, other: &ReportedSession, now: Instant) -> Ordering {
        let resident = |session: &Session| session.resident_tokens.map(|figure| figure.value);
        let idle = (one.idle(now), other.idle(now));
        let (one, other) = (&one.session, &other.session);
        let order = match self {
            Self::Resident => resident(other).cmp(&resident(one)),
            Self::Turns => other.turns.cmp(&one.turns),
            Self::Recent => idle.0.cmp(&idle.1),
            Self::Id => one.key.id().cmp(other.key.id()),
        };
        order.then_with(|| one.key.cmp(&other.key))
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct ListQuery {
    sort: SessionOrder,
    /// A text in any letter case: a part of a session's id, principal, worker, state or
    /// retention, or its whole digest.
    find: String,
    limit: Option<u32>,
}

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

fn build_list(shared: &Shared, query: &ListQuery) -> FleetSessions {
    let view = shared.directory.view();
    let limit = query.limit.map_or(SESSIONS_DEFAULT, |limit| limit as usize);
    let text = query.find.to_lowercase();
    let mut found: Vec<&ReportedSession> =
        view.sessions.iter().filter(|entry| is_found(entry, &text, &view)).collect();
    let now = now();
    found.retain(|entry| status::is_shown(entry, &view, now));
    found.sort_unstable_by(|one, other| query.sort.compare(one, other, now));
    let total = found.len() as u64;
    found.truncate(limit.clamp(1, ENTRIES_MAX));
    let parents = find_missing_parents(&found, &view.sessions);
    let describe_all = |entries: &[&ReportedSession]| {
        entries.iter().map(|entry| describe(entry, &view, now)).collect()
    };
    FleetSessions { sessions: describe_all(&found), parents: describe_all(&parents), total }
}

fn describe(entry: &ReportedSession, view: &Snapshot, now: Instant) -> FleetSession {
    let ReportedSession { worker, session, demoted_at, .. } = entry;
    FleetSession {
        digest: session.key.digest().to_string(),
        session_id: session.key.id().to_owned(),
        principal: session.key.principal().to_owned(),
        parent: session.parent.map(|parent| parent.to_string()),
        worker: view.name(*worker),
        retention: session.retention.as_str().to_owned(),
        state: session.state.as_str().to_owned(),
        turns: session.turns,
        turns_running: session.turns_running,
        resident_tokens: session.resident_tokens.map(|figure| figure.value),
        idle_ms: Some(whole_millis(entry.idle(now))),
        idle_ms_at_report: whole_millis(session.idle),
        began_unix_ms: session.began_unix_ms,
        demoted_age_ms: demoted_at.map(|at| whole_millis(now.saturating_duration_since(at))),
    }
}

/// Returns the unlisted sessions that started the listed ones, directly or not, at most
/// [`ENTRIES_MAX`].
fn find_missing_parents<'a>(
    listed: &[&'a ReportedSession],
    all: &'a Sessions,
) -> Vec<&'a ReportedSession> {
    let digest = |entry: &ReportedSession| entry.session.key.digest();
    let mut seen: HashSet<Digest> = listed.iter().map(|entry| digest(entry)).collect();
    let mut wanted: Vec<Digest> = listed.iter().filter_map(|entry| entry.session.parent).collect();
    wanted.retain(|parent| !seen.contains(parent));
    if wanted.is_empty() {
        return vec![];
    }
    let by_digest: HashMap<Digest, &ReportedSession> =
        all.iter().map(|entry| (digest(entry), entry)).collect();
    let mut found = vec![];
    while let Some(parent) = wanted.pop()
        && found.len() < ENTRIES_MAX
    {
        // Sessions may name each other in a circle.
        if let Some(entry) = by_digest.get(&parent).filter(|_| seen.insert(parent)) {
            found.push(*entry);
            wanted.extend(entry.session.parent);
        }
    }
    found
}

/// `text` is in lower case.
fn is_found(entry: &ReportedSession, text: &str, view: &Snapshot) -> bool {
    let session = &entry.session;
    let has_text = |name: &str| name.to_lowercase().contains(text);
    text.is_empty()
        || has_text(session.key.id())
        || has_text(session.key.principal())
        || has_text(session.retention.as_str())
        || has_text(session.state.as_str())
        || has_text(&view.name(entry.worker))
        || session.key.digest().to_string() == text
}

pub(super) async fn close(State(shared): SharedState, path: IdPath) -> Response {
    let closed = async {
        let digest = id(path)?;
        let key = find_key(&shared, digest).await.ok_or(lifecycle::Error::Unknown)?;
        shared.sessions.close(key).await?;
        Ok::<_, Refusal>(StatusCode::NO_CONTENT.into_response())
    };
    respond(&shared, closed.await)
}

pub(super) async fn demote(State(shared): SharedState, path: IdPath) -> Response {
    let demoted = async {
        let digest = id(path)?;
        let key = find_key(&shared, digest).await.ok_or(lifecycle::Error::Unknown)?;
        shared.sessions.demote(&key).await?;
        Ok::<_, Refusal>(StatusCode::NO_CONTENT.into_response())
    };
    respond(&shared, demoted.await)
}

async fn find_key(shared: &Arc<Shared>, digest: String) -> Option<SessionKey> {
    let view = shared.directory.settled_view().await;
    let search = move || {
        let mut keys = view.sessions.iter().map(|entry| &entry.session.key);
        keys.find(|key| key.digest().to_string() == digest).cloned()
    };
    let found = tokio::task::spawn_blocking(search).await;
    found.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use contract::load::{Retention, SessionState};

    use super::*;
    use crate::fleet::worker::AgentKey;

    fn key(id: &str) -> SessionKey {
        SessionKey::new("p", id).unwrap()
    }

    /// Returns a table of sessions, each with the session that started it.
    fn table(sessions: &[(&str, Option<&str>)]) -> Sessions {
        let mut table = Sessions::new(1, 100);
        for (id, parent) in sessions {
            let session = Session {
                key: key(id),
                retention: Retention::Tagged,
                state: SessionState::Idle,
                dp_rank: 0,
                turns: 0,
                turns_running: 0,
                exclusive: false,
                resident_tokens: None,
                idle: Duration::ZERO,
                full_history: false,
                volatile_prefix: None,
                began_unix_ms: 0,
                parent: parent.map(|parent| key(parent).digest()),
            };
            assert!(table.upsert(AgentKey::first(0), session, now()));
        }
        table
    }

    fn missing_parents(table: &Sessions, listed: &[&str]) -> Vec<String> {
        let listed: Vec<&ReportedSession> =
            listed.iter().map(|id| &table.locate(&key(id))[0]).collect();
        let found = find_missing_parents(&listed, table);
        found.iter().map(|entry| entry.session.key.id().to_owned()).collect()
    }

    #[test]
    fn a_found_child_comes_with_all_sessions_above_it() {
        let table = table(&[
            ("root", None),
            ("child", Some("root")),
            ("grandchild", Some("child")),
            ("orphan", Some("gone")),
            ("x", Some("y")),
            ("y", Some("x")),
        ]);
        assert_eq!(missing_parents(&table, &["grandchild"]), ["child", "root"]);
        assert_eq!(missing_parents(&table, &["grandchild", "child"]), ["root"]);
        assert_eq!(missing_parents(&table, &["root", "child"]), [""; 0]);
        assert_eq!(missing_parents(&table, &["orphan"]), [""; 0]);
        assert_eq!(missing_parents(&table, &["x"]), ["y"], "a circle ends");
    }
}
