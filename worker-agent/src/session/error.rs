//! Why the session table refuses a turn or an open, in words for the client.

use proto::load::Retention;

/// Why the session table refuses a turn, an open or a close.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The session doesn't exist, or is closing.
    #[error("no such session")]
    Unknown,
    /// The session is closing, but its last turn still runs.
    #[error("the session is closing; its last turn still runs")]
    Closing,
    /// Another turn of an exclusive session is running.
    #[error("a turn of this session is running; send the next one when its answer has ended")]
    Busy,
    /// The engine's flags don't allow the requested retention.
    #[error("this engine doesn't offer {} sessions; it offers {offered}", .wanted.as_str())]
    NotOffered {
        /// The requested retention.
        wanted: Retention,
        /// Names of the retentions that the engine offers.
        offered: String,
    },
    /// The session is already open with another retention than requested.
    #[error("this session is open and {}; close it first, or open it as it is", .0.as_str())]
    OpenOtherwise(Retention),
    /// A delta was sent to a session that is not pinned.
    #[error(
        "only a pinned session takes turns that hold just the new tokens; this one is {}: send \
         the whole history",
        .0.as_str()
    )]
    DeltaNeedsPinned(Retention),
    /// A full history was sent to a pinned session that would append it.
    #[error(
        "this session is pinned: the engine appends what a turn sends. Only new tokens go to \
         /generate, with `session_params` or `x-berth-delta: 1`; whole histories go anywhere where \
         the engine's shim trims them; else open the session tagged"
    )]
    WholeHistory,
    /// A full history doesn't continue the history of a session that takes deltas.
    #[error(
        "this session takes turns that hold just the new tokens, and this full history {detail}, \
         so it was not run; send only what is new, or let this history replace the session's with \
         `nvext.session_control.action: \"open\"`, or close the session and open it again"
    )]
    NotContinued {
        /// Where the two histories differ, or why they can't be compared.
        detail: String,
    },
    /// A delta was sent to a session whose history the client may not know.
    #[error(
        "this turn holds just the new tokens, but the session's history is a full history that \
         began it or replaced what it had; close the session, open it and send everything"
    )]
    DeltaNeedsOpen,
    /// A delta that opens its session was sent to a session that already has a history.
    #[error(
        "this session is open and has a history, so this turn can't be the one that opens it; send \
         what is new without opening it, or close it first"
    )]
    HasHistory,
    /// The engine restarted and lost the session's history.
    #[error("the engine restarted and lost this session; open it again and send the whole history")]
    Lost,
    /// The agent isn't sure of the engine's history, because it did not see how an earlier turn
    /// ended.
    #[error(
        "the end of an earlier turn was not seen, so the engine's history is unknown; close the \
         session, open it again and send the whole history"
    )]
    HistoryUnknown,
    /// Pages of the session's KV also belong to others, or others wrote to them.
    #[error(
        "an audit found this session's KV corrupt in the engine, so it was closed; open it again \
         and send the whole history"
    )]
    KvCorrupt,
    /// The session was closed because other sessions needed the room.
    #[error(
        "this session was idle and its room was needed; open it again and send the whole history"
    )]
    Reclaimed,
    /// The engine did not open the session; with the reason.
    #[error("the engine did not open the session: {0}")]
    OpenFailed(String),
    /// The turn may need more tokens than the whole pin budget.
    #[error(
        "this turn may need {need} tokens of KV and pinned sessions have {max} together: lower \
         max_new_tokens, send less, or open the session tagged"
    )]
    TooLarge {
        /// The most tokens the session may come to hold, history included.
        need: u64,
        /// The pin budget, in tokens.
        max: u64,
    },
    /// The engine was lost while the turn waited.
    #[error("the engine went away while the turn waited")]
    EngineLost,
    /// The agent is shutting down.
    #[error("this agent is shutting down; use another worker")]
    Stopping,
    /// An earlier turn, which this delta was to follow, did not become history.
    #[error(
        "this turn waited behind one that did not become history, so what it adds to isn't there; \
         send it again when the session is as it should be"
    )]
    NotAfterThat,
    /// A bounded resource has no room for the turn now.
    #[error("{what} are short: {detail}")]
    Short {
        /// The stable name of the resource.
        what: &'static str,
        /// The figures, for people.
        detail: String,
    },
    /// The requested DP rank doesn't exist.
    #[error("there is no DP rank {0}")]
    NoRank(u32),
}
