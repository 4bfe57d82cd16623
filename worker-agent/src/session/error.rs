//! Names why the session table refuses a turn, an open, a close or a demotion, for the client.

use std::time::Duration;

use contract::load::Retention;
use service::refusal::Code;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("no such session")]
    UnknownSession,
    #[error("the session is closing; wait until its last turn has ended, then open it again")]
    Closing,
    #[error("a turn of this session is running; send the next one when its answer has ended")]
    Busy,
    #[error(
        "a turn of this session runs or waits, or the engine has not settled the last one; demote \
         the session when it is idle"
    )]
    NotAtRest,
    #[error(
        "this session is {}, so it has no KV of its own to give up: the engine may evict its KV \
         already",
        .0.as_str()
    )]
    NotPinned(Retention),
    #[error(
        "this engine can't demote sessions: its shim is not connected, or doesn't demote with the \
         engine's flags, as the agent's log says; close the session to free its KV"
    )]
    DemotionUnavailable,
    #[error(
        "the engine's shim did not demote this session, and the agent's log says why; the session \
         stays pinned, so close it to free its KV"
    )]
    DemotionRefused,
    #[error(
        "{sessions} sessions of yours were loaded ahead of their turns at this worker and have not \
         returned; send their turns, or wait: the next turn loads its KV itself"
    )]
    PrefetchShare { sessions: usize },
    #[error(
        "the engine doesn't load this session's KV now ({0}); try again, or send the turn: it \
         loads its KV itself"
    )]
    PrefetchNoRoom(String),
    #[error(
        "this engine can't load KV from the host's memory ahead of a turn: {0}; send the turn, \
         which loads or computes what it needs"
    )]
    PrefetchUnavailable(String),
    #[error(
        "this worker doesn't offer {} sessions: {reason}; ask for one of these: {offered}",
        .wanted.as_str()
    )]
    RetentionUnavailable {
        wanted: Retention,
        offered: String,
        /// Why the engine doesn't offer it.
        reason: String,
    },
    #[error(
        "this session is already open as {}; close it first, or open it with that retention",
        .0.as_str()
    )]
    OpenWithOtherRetention(Retention),
    #[error(
        "only a pinned session takes turns that hold just the new tokens, and this session is {}; \
         send the full history",
        .0.as_str()
    )]
    DeltaNeedsPinned(Retention),
    /// The engine would append a full history to the session's, or the route can't carry a delta.
    #[error(
        "this session is pinned, so the engine appends what a turn sends; send only the new \
         tokens, to /generate with `session_params` or `x-berth-delta: 1`, or a full history where \
         the engine's shim trims full histories, or open the session tagged"
    )]
    PinnedRouteRefused,
    #[error(
        "this session takes turns that hold just the new tokens, and this full history {detail}, \
         so it was not run; send only what is new, or let this history replace the session's with \
         `nvext.session_control.action: \"open\"`, or close the session and open it again"
    )]
    NotContinued {
        /// Where the two histories differ, or why they can't be compared.
        detail: String,
    },
    /// A full history began or replaced the session's, so the delta's client may not know it.
    #[error(
        "this turn holds just the new tokens, but another turn's full history began or replaced \
         the session's history; close the session, open it and send the full history"
    )]
    DeltaNeedsOpen,
    /// A delta opens a session that already has a history.
    #[error(
        "this session is open and has a history, so this turn can't open it; send what is new \
         without opening the session, or close it first"
    )]
    HasHistory,
    #[error("the engine restarted and lost this session; open it again and send the full history")]
    Lost,
    #[error(
        "the agent restarted and could not prove that the engine still has this session's history; \
         open the session again and send the full history"
    )]
    NotTakenOver,
    #[error(
        "the agent did not see the end of an earlier turn, so the engine's history is unknown; \
         close the session, open it again and send the full history"
    )]
    HistoryUnknown,
    #[error(
        "an audit found this session's KV corrupt in the engine, so it was closed; open it again \
         and send the full history"
    )]
    KvCorrupt,
    #[error(
        "this session was idle and was closed to make room for others, or by a flush of the \
         engine's cache; open it again and send the full history"
    )]
    Reclaimed,
    #[error(
        "the engine's weights changed, so this session's KV was computed with older ones and it \
         was closed; open it again and send the full history"
    )]
    WeightsChanged,
    #[error(
        "the adapter of this session was loaded or unloaded, so the session's KV may be of another \
         one of that name and it was closed; open it again and send the full history"
    )]
    AdapterChanged,
    #[error(
        "this session's KV was computed with another adapter, `cache_salt` or `extra_key` than \
         this turn names, or that isn't known, so the turn was not run; name the session's, or \
         open another session and send the full history"
    )]
    OtherKv,
    #[error(
        "the engine's weights changed without a flush, so its cache holds KV of older weights, and \
         no session is pinned: call /flush_cache, or open the session tagged"
    )]
    CacheOutdated,
    #[error("the engine takes no turns: {0}; try again later")]
    EngineHeld(String),
    #[error("the engine did not open the session: {0}")]
    OpenFailed(String),
    #[error(
        "this agent can't keep its journal of open sessions, so it pins none: {0}; use another \
         worker, or open the session tagged"
    )]
    JournalFailed(String),
    #[error(
        "this turn may need {tokens_needed} tokens of KV, but all pinned sessions together may \
         hold {tokens_max}; lower max_new_tokens, send less, or open the session tagged"
    )]
    TooLarge {
        /// After the turn, history included.
        tokens_needed: u64,
        tokens_max: u64,
    },
    #[error(
        "this turn has {sequences} sequences (prompts times answers), and this client may have \
         {sequences_max} of them at this worker at once; send batches of at most so many"
    )]
    BatchOverShare {
        sequences: u32,
        /// Less while another client is active.
        sequences_max: u32,
    },
    /// The engine's process runs, but has said nothing for too long.
    #[error("the engine is silent: {0}; try another worker, or again later")]
    EngineSilent(String),
    #[error("the engine was lost while the turn waited; try again")]
    EngineLost,
    #[error("this agent is shutting down; use another worker")]
    Stopping,
    #[error(
        "this turn waited for an earlier turn, which did not become history, so the history that \
         it continues doesn't exist; send the earlier turn again first"
    )]
    PredecessorFailed,
    #[error("{resource} are short: {detail}")]
    OutOfRoom {
        resource: Code,
        /// The figures, for people.
        detail: String,
        /// When there may be room, if the queue tells.
        wait: Option<Duration>,
    },
    #[error("there is no DP rank {0}; use a rank that the engine has")]
    NoRank(u32),
}
