//! Names why the session table refuses a turn, an open, a close or a demotion, for the client.
//!
//! A turn is one request and its answer. A delta is a turn that holds only new tokens, which the
//! engine appends to the session's history. A full history is a turn that holds the whole
//! conversation. A pinned session keeps its KV to itself.
//!
//! The table returns these errors. `data_port::refusals` maps them to refusal codes.

use std::time::Duration;

use proto::load::Retention;
use service::refusal::Code;

/// Why the session table refuses a turn, an open, a close or a demotion.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The session doesn't exist.
    #[error("no such session")]
    UnknownSession,
    /// The session is closing, but its last turn still runs.
    #[error("the session is closing; wait until its last turn has ended, then open it again")]
    Closing,
    /// Another turn of a session that runs one turn at a time is running.
    #[error("a turn of this session is running; send the next one when its answer has ended")]
    Busy,
    /// The session to demote isn't at rest.
    #[error(
        "a turn of this session runs or waits, or the engine has not settled the last one; demote \
         the session when it is idle"
    )]
    NotAtRest,
    /// The session to demote is not pinned.
    #[error(
        "this session is {}, so it has no KV of its own to give up: the engine may evict its KV \
         already",
        .0.as_str()
    )]
    NotPinned(Retention),
    /// No shim demotes sessions of the session's rank.
    #[error(
        "this engine can't demote sessions: its shim is not connected, or doesn't demote with the \
         engine's flags, as the agent's log says; close the session to free its KV"
    )]
    DemotionUnavailable,
    /// The shim refused to demote the session.
    #[error(
        "the engine's shim did not demote this session, and the agent's log says why; the session \
         stays pinned, so close it to free its KV"
    )]
    DemotionRefused,
    /// The engine can't keep sessions safely in the requested way.
    #[error(
        "this worker doesn't offer {} sessions: {reason}; ask for one of these: {offered}",
        .wanted.as_str()
    )]
    RetentionUnavailable {
        /// The requested retention.
        wanted: Retention,
        /// Names of the retentions that the engine offers.
        offered: String,
        /// Why the engine doesn't offer the requested one.
        reason: String,
    },
    /// The session is already open with another retention than requested.
    #[error(
        "this session is already open as {}; close it first, or open it with that retention",
        .0.as_str()
    )]
    OpenWithOtherRetention(Retention),
    /// A delta was sent to a session that is not pinned.
    #[error(
        "only a pinned session takes turns that hold just the new tokens, and this session is {}; \
         send the full history",
        .0.as_str()
    )]
    DeltaNeedsPinned(Retention),
    /// A pinned session can't take this turn over its route. The engine would append a full history
    /// to the session's history, or the route can't carry a delta.
    #[error(
        "this session is pinned, so the engine appends what a turn sends; send only the new \
         tokens, to /generate with `session_params` or `x-berth-delta: 1`, or a full history where \
         the engine's shim trims full histories, or open the session tagged"
    )]
    PinnedRouteRefused,
    /// A full history doesn't continue the history of a session whose clients send deltas.
    #[error(
        "this session takes turns that hold just the new tokens, and this full history {detail}, \
         so it was not run; send only what is new, or let this history replace the session's with \
         `nvext.session_control.action: \"open\"`, or close the session and open it again"
    )]
    NotContinued {
        /// Where the two histories differ, or why they can't be compared.
        detail: String,
    },
    /// A delta was sent to a session whose history the client may not know, because a full history
    /// began or replaced it.
    #[error(
        "this turn holds just the new tokens, but another turn's full history began or replaced \
         the session's history; close the session, open it and send the full history"
    )]
    DeltaNeedsOpen,
    /// A delta that opens its session was sent to a session that already has a history.
    #[error(
        "this session is open and has a history, so this turn can't open it; send what is new \
         without opening the session, or close it first"
    )]
    HasHistory,
    /// The engine restarted and lost the session's history.
    #[error("the engine restarted and lost this session; open it again and send the full history")]
    Lost,
    /// The agent restarted, and could not prove that the engine still has the session's history.
    #[error(
        "the agent restarted and could not prove that the engine still has this session's history; \
         open the session again and send the full history"
    )]
    NotTakenOver,
    /// The agent isn't sure of the engine's history, because it did not see how an earlier turn
    /// ended.
    #[error(
        "the agent did not see the end of an earlier turn, so the engine's history is unknown; \
         close the session, open it again and send the full history"
    )]
    HistoryUnknown,
    /// Pages of the session's KV also belong to other sessions, or other sessions wrote to them.
    #[error(
        "an audit found this session's KV corrupt in the engine, so it was closed; open it again \
         and send the full history"
    )]
    KvCorrupt,
    /// The session was closed because other sessions needed the room, or the engine was flushed.
    #[error(
        "this session was idle and was closed to make room for others, or by a flush of the \
         engine's cache; open it again and send the full history"
    )]
    Reclaimed,
    /// The session was closed because its KV is of older weights.
    #[error(
        "the engine's weights changed, so this session's KV was computed with older ones and it \
         was closed; open it again and send the full history"
    )]
    WeightsChanged,
    /// The session was closed because its KV is of an adapter that was loaded or unloaded since.
    #[error(
        "the adapter of this session was loaded or unloaded, so the session's KV may be of another \
         one of that name and it was closed; open it again and send the full history"
    )]
    AdapterChanged,
    /// A delta names another adapter, cache salt or extra key than the session's KV has.
    #[error(
        "this session's KV was computed with another adapter, `cache_salt` or `extra_key` than \
         this turn names, or that isn't known, so the turn was not run; name the session's, or \
         open another session and send the full history"
    )]
    OtherKv,
    /// The engine's cache may hold KV of older weights, with which a pinned session would begin.
    #[error(
        "the engine's weights changed without a flush, so its cache holds KV of older weights, and \
         no session is pinned: call /flush_cache, or open the session tagged"
    )]
    CacheOutdated,
    /// The engine takes no turns by its operator's wish. Carries the reason.
    #[error("the engine takes no turns: {0}; try again later")]
    EngineHeld(String),
    /// The engine did not open the session. Carries the reason.
    #[error("the engine did not open the session: {0}")]
    OpenFailed(String),
    /// The session was not opened, because the journal could not be written. Carries the reason.
    #[error(
        "this agent can't keep its journal of open sessions, so it pins none: {0}; use another \
         worker, or open the session tagged"
    )]
    JournalFailed(String),
    /// The turn may need more tokens than all pinned sessions together may hold (the pin budget).
    #[error(
        "this turn may need {tokens_needed} tokens of KV, but all pinned sessions together may \
         hold {tokens_max}; lower max_new_tokens, send less, or open the session tagged"
    )]
    TooLarge {
        /// The most tokens that the session may hold after the turn, history included.
        tokens_needed: u64,
        /// The pin budget, in tokens.
        tokens_max: u64,
    },
    /// The turn has more sequences than its client may have in the engine at once.
    #[error(
        "this turn has {sequences} sequences (prompts times answers), and this client may have \
         {sequences_max} of them at this worker at once; send batches of at most so many"
    )]
    BatchOverShare {
        /// The turn's sequences.
        sequences: u32,
        /// The most that it may have now, which is less while another client is active.
        sequences_max: u32,
    },
    /// The engine's process runs but has said nothing for too long. Carries the details.
    #[error("the engine is silent: {0}; try another worker, or again later")]
    EngineSilent(String),
    /// The engine was lost while the turn waited.
    #[error("the engine was lost while the turn waited; try again")]
    EngineLost,
    /// The agent is shutting down.
    #[error("this agent is shutting down; use another worker")]
    Stopping,
    /// The turn is a delta that was to follow an earlier turn, and that turn did not become
    /// history.
    #[error(
        "this turn waited for an earlier turn, which did not become history, so the history that \
         it continues doesn't exist; send the earlier turn again first"
    )]
    PredecessorFailed,
    /// A bounded resource has no room for the turn now.
    #[error("{resource} are short: {detail}")]
    OutOfRoom {
        /// The resource, by the code of the refusal.
        resource: Code,
        /// The figures, for people.
        detail: String,
        /// When there may be room, if the queue tells.
        wait: Option<Duration>,
    },
    /// The requested DP rank doesn't exist.
    #[error("there is no DP rank {0}; use a rank that the engine has")]
    NoRank(u32),
}
