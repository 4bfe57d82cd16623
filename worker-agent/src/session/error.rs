//! Why the table says no, in words for the client.

use proto::load::Retention;

/// Why the table said no.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// No such session, or it is closing.
    #[error("no such session")]
    Unknown,
    /// The session is closing and its last turn still runs.
    #[error("the session is closing; its last turn still runs")]
    Closing,
    /// Another turn of an exclusive session is inside the engine.
    #[error("a turn of this session is running; send the next one when its answer has ended")]
    Busy,
    /// The engine's flags don't allow what was asked for.
    #[error("this engine doesn't offer {} sessions; it offers {offered}", .wanted.as_str())]
    NotOffered {
        /// What was asked for.
        wanted: Retention,
        /// What there is.
        offered: String,
    },
    /// It is open already, in another way than asked for.
    #[error("this session is open and {}; close it first, or open it as it is", .0.as_str())]
    OpenOtherwise(Retention),
    /// A delta turn on a session that keeps no history in the engine.
    #[error(
        "only a pinned session takes turns that hold just the new tokens; this one is {}: send \
         the whole history",
        .0.as_str()
    )]
    DeltaNeedsPinned(Retention),
    /// A whole history for a session that would append it.
    #[error(
        "this session is pinned: the engine appends what a turn sends. Only new tokens go to \
         /generate, with `session_params` or `x-berth-delta: 1`; whole histories go anywhere where \
         the engine's shim trims them; else open the session tagged"
    )]
    WholeHistory,
    /// A full history that doesn't continue what a session that takes deltas has.
    #[error(
        "this session takes turns that hold just the new tokens, and this full history {detail}, \
         so it was not run; send only what is new, or let this history replace the session's with \
         `nvext.session_control.action: \"open\"`, or close the session and open it again"
    )]
    NotContinued {
        /// Where the two differ, or why they can't be compared.
        detail: String,
    },
    /// A delta for a session whose history its client may not know.
    #[error(
        "this turn holds just the new tokens, but the session's history is a full history that \
         began it or replaced what it had; close the session, open it and send everything"
    )]
    DeltaNeedsOpen,
    /// Opened by a turn that means to be the first.
    #[error(
        "this session is open and has a history, so this turn can't be the one that opens it; send \
         what is new without opening it, or close it first"
    )]
    HasHistory,
    /// The engine restarted and the history went with it.
    #[error("the engine restarted and lost this session; open it again and send the whole history")]
    Lost,
    /// The end of an earlier turn was not seen.
    #[error(
        "the end of an earlier turn was not seen, so the engine's history is unknown; close the \
         session, open it again and send the whole history"
    )]
    HistoryUnknown,
    /// Its pages are others' too, or were written by others.
    #[error(
        "an audit found this session's KV corrupt in the engine, so it was closed; open it again \
         and send the whole history"
    )]
    KvCorrupt,
    /// Its KV was taken for others.
    #[error(
        "this session was idle and its room was needed; open it again and send the whole history"
    )]
    Reclaimed,
    /// The engine did not open it.
    #[error("the engine did not open the session: {0}")]
    OpenFailed(String),
    /// More than the pin budget holds at all.
    #[error(
        "this turn may need {need} tokens of KV and pinned sessions have {max} together: lower \
         max_new_tokens, send less, or open the session tagged"
    )]
    TooLarge {
        /// Tokens, history included.
        need: u64,
        /// The budget.
        max: u64,
    },
    /// The engine went away while the turn waited.
    #[error("the engine went away while the turn waited")]
    EngineLost,
    /// The agent is shutting down.
    #[error("this agent is shutting down; use another worker")]
    Stopping,
    /// The turn before it did not become history.
    #[error(
        "this turn waited behind one that did not become history, so what it adds to isn't there; \
         send it again when the session is as it should be"
    )]
    NotAfterThat,
    /// A resource is short now.
    #[error("{what} are short: {detail}")]
    Short {
        /// Which resource, stable.
        what: &'static str,
        /// The numbers.
        detail: String,
    },
    /// The rank doesn't exist.
    #[error("there is no DP rank {0}")]
    NoRank(u32),
}
