//! Keeps the sessions of one engine: their state, and how turns change it.
//!
//! The owner task (`crate::owner`) tells [`Table`] what happened, and carries out the [`Effect`]s
//! that it returns. This file holds the types of settings, calls and effects. The child `state`
//! holds one session, and `lifecycle` its life at the engine. The child `table` decides which turns
//! run, `deltas` which turns a session takes. `turn` and `error` describe turns and refusals,
//! `kv_identity` names what KV depends on besides tokens and weights, `prefix_tracker` compares
//! prompts, and `journal` lists the open incarnations in a file. Only `journal` does I/O. None
//! reads a clock.
//!
//! A session is a conversation of ordered turns. A turn is one request and its answer. It sends a
//! full history (the whole conversation) or a delta (only new tokens, which the engine appends). An
//! incarnation is one life of a session inside the engine. A pinned session keeps its KV and a
//! request row to itself. A tagged session's KV is in the radix tree, marked with the incarnation
//! id. The shim is Berth's part inside the engine's process. It can trim a full history (remove the
//! tokens that the session already holds) and demote a session (give its KV to the radix tree).

mod deltas;
mod error;
pub mod handover;
pub mod journal;
mod kv_identity;
mod lifecycle;
mod prefix_tracker;
mod state;
mod table;
mod turn;

use std::time::Duration;

use proto::{
    id::SessionKey,
    load::{Retention, VolatilePrefix},
};

pub use self::{
    error::Error,
    kv_identity::KvIdentity,
    prefix_tracker::{BLOCKS_MAX, PrefixTracker, PromptStart},
    state::Session,
    table::{
        EngineLoad, Legacy, PrincipalView, SessionReport, ShareFigures, Table, TablePart,
        TrimOutcome, TrimPlan, WeightsReport,
    },
    turn::{Need, Outcome, RouteTurns, RunMode, TrimRequest, Turn, TurnSession, Usage},
};
use self::{journal::Record, state::EngineHistory};
use crate::guard::{Guard, Guards};

/// The least tokens that the agent reserves for an answer in a session that it pinned on its own,
/// unless the answer's limit is lower. Most answers of coding agents are shorter. A longer answer
/// grows into the part of the pool that the pin budget leaves free, and is counted when the turn
/// has ended.
pub const ANSWER_TOKENS_MIN: u64 = 2048;

/// The most requests about sessions that are with one rank's shim at a time. The shim carries out
/// about this many in one step of an idle engine, and keeps thousands in its queue.
pub const SHIM_REQUESTS_MAX: usize = 256;

/// The capacity of one rank.
#[derive(Debug, Clone, Copy)]
pub struct RankCapacity {
    /// The number of request rows.
    pub rows: u32,
    /// Rows that pinned sessions must leave free. If sessions held all rows, the engine could run
    /// nothing more, ever.
    pub rows_reserve: u32,
    /// The most rows that pinned sessions may hold. The other rows are for plain turns.
    pub pin_rows_max: u32,
    /// Size of the whole KV pool, in tokens.
    pub pool_tokens: u64,
    /// The most tokens that all pinned sessions may hold together (the pin budget).
    pub pin_tokens_max: u64,
    /// The most turns inside the engine at once.
    pub turns_max: u32,
}

/// Facts about the engine that the table needs.
#[derive(Debug, Clone)]
pub struct EngineCapacity {
    /// The capacity of each DP rank, by rank number.
    pub ranks: Vec<RankCapacity>,
    /// Page size of the KV pool in tokens; at least 1.
    pub page_tokens: u64,
    /// The most tokens that a prompt and its answer may have together.
    pub context_tokens: u64,
    /// The retentions that the engine's flags allow, best first.
    pub retentions: Vec<Retention>,
}

/// Settings of the table. The agent's settings describe the fields of the same names in more
/// detail.
#[derive(Debug, Clone)]
pub struct TableSettings {
    /// The [`prefix`](crate::incarnation::prefix) of incarnation ids; different for every agent
    /// process that uses the engine.
    pub incarnation_prefix: String,
    /// Idle limit of a session whose client asked for none.
    pub idle_max: Duration,
    /// Time without a turn after which a pinned session loses its KV if another session needs the
    /// room.
    pub demote_idle: Duration,
    /// The most turns of one exclusive session that may wait behind the running turn.
    pub turns_queued_per_session_max: u32,
    /// The most turns that wait for room, on all ranks together.
    pub turns_queued_max: usize,
    /// The longest time that a turn waits for room.
    pub queue_wait_max: Duration,
    /// A turn's end or a session's close counts as stuck if the engine has not confirmed it for
    /// this long. A stuck engine must be restarted.
    pub stuck_after: Duration,
    /// Whether the agent pins sessions whose clients asked for no retention. It pins those that
    /// come back soon, where the shim trims full histories.
    pub auto_pin: bool,
    /// The least tokens reserved for an answer in a session that the agent pinned on its own; see
    /// [`ANSWER_TOKENS_MIN`].
    pub answer_tokens_min: u64,
    /// The most requests about sessions that are with one rank's shim at a time; see
    /// [`SHIM_REQUESTS_MAX`].
    pub shim_requests_max: usize,
    /// What one client may have of what all need.
    pub shares: ShareSettings,
    /// The guards (protective rules) that are on. Only simulations switch any off.
    pub guards: Guards,
}

impl TableSettings {
    /// Returns the most requests that the table has with one shim at a time.
    fn shim_requests_max(&self) -> usize {
        if self.guards.is_on(Guard::RequestsPaced) { self.shim_requests_max } else { usize::MAX }
    }
}

/// Bounds on what one principal (the client that a router has authenticated) may have.
#[derive(Debug, Clone, Copy)]
pub struct ShareSettings {
    /// The most sessions in the table.
    pub sessions_max: usize,
    /// The most sessions of one principal.
    pub principal_sessions_max: usize,
    /// The longest idle limit that a client may ask for. At least [`TableSettings::idle_max`].
    pub idle_cap: Duration,
    /// While another principal is active: the most turns of one principal inside the engine, in
    /// thousandths of the turns that may be there, and of the rows that plain turns run in.
    pub turns_milli: u32,
}

/// One thing that the table asks the owner task to do or to report. Effects keep their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Sends a turn to the engine, or tells a client that the session it opened is open.
    Admitted {
        /// The id of the turn or of the open request.
        rid: String,
        /// How the turn is sent to the engine.
        turn: Turn,
    },
    /// Refuses a turn that is not inside the engine, or a client's open request. The table has
    /// already forgotten it.
    Refused {
        /// The id of the turn or of the open request.
        rid: String,
        /// Why it was refused.
        error: Error,
    },
    /// Journals the incarnation, then opens it at the engine. The owner reports the result with
    /// [`Table::handle_open_result`].
    Open {
        /// The incarnation id.
        incarnation: String,
        /// The session's idle limit.
        idle_max: Duration,
    },
    /// Closes an incarnation at the engine. The owner reports the result with
    /// [`Table::handle_close_result`].
    Close(CloseRequest),
    /// Writes a record to the journal before the next effect is carried out.
    Journal(Record),
    /// Aborts the turn `rid`, if any, then asks the shim for the history of a suspect session. The
    /// owner reports the answer with [`Table::handle_inspection`].
    Inspect {
        /// The rank that holds the session.
        dp_rank: u32,
        /// The number of the request, which its answer repeats.
        number: u64,
        /// The incarnation id.
        incarnation: String,
        /// Id of a turn that may still be inside the engine.
        rid: Option<String>,
        /// Whether the last answer came too early, so that a pause must come first.
        is_repeat: bool,
    },
    /// Asks the shim to give a session's KV to the radix tree. The owner reports the result with
    /// [`Table::handle_demotion`].
    Demote {
        /// The rank that holds the session.
        dp_rank: u32,
        /// The number of the request, which its answer repeats.
        number: u64,
        /// The incarnation id.
        incarnation: String,
    },
    /// Answers a question of the shim: where may a turn with a full history run? The shim asks if
    /// the turn can't run in its session as planned.
    AnswerQuestion {
        /// The number of the question.
        question: u64,
        /// The incarnation to run the turn in. `None`: the turn does not run in its session.
        incarnation: Option<String>,
        /// The most prompt tokens with which the turn may run in that incarnation.
        tokens_max: u64,
    },
    /// Reports how a turn runs, once that is known.
    RunModeKnown {
        /// The turn's id.
        rid: String,
        /// How the turn runs.
        run_mode: RunMode,
        /// KV tokens reserved for the turn beyond its session's history. `None` if it doesn't run
        /// in a pinned session.
        growth_tokens_max: Option<u64>,
    },
    /// Reports that the shim refuses an admitted turn, because its full history doesn't continue
    /// its session. The turn's client gets the error; [`Table::end_turn`] follows.
    RefusedByShim {
        /// The turn's id.
        rid: String,
        /// Why the shim refuses the turn.
        error: Error,
    },
    /// Reports that a session has changed or was forgotten.
    SessionChanged(SessionKey),
    /// Reports that the engine has freed what an incarnation held, and how long after the first
    /// request to close it.
    Freed(Duration),
    /// Reports a volatile prefix: a text early in the session's prompts that differs from turn to
    /// turn.
    VolatilePrefix(SessionKey, VolatilePrefix),
    /// Reports an event of a session, for logs and metrics.
    SessionEvent(SessionKey, SessionEvent),
}

/// A change of a session that no turn, open or close of its client asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SessionEvent {
    /// The session's idle limit has passed.
    Expired,
    /// The session was demoted, because other sessions needed the room, the session was idle, or
    /// its owner or an operator asked.
    Demoted,
    /// The session was closed because other sessions needed the room.
    Reclaimed,
    /// The session was closed at the engine because its history there was uncertain.
    Doubted,
    /// The shim confirmed the history of a suspect session.
    Verified,
    /// The agent restarted, and the shim confirmed what the last agent process handed over.
    TakenOver,
    /// The agent restarted, and what the last agent process handed over was not confirmed.
    NotTakenOver,
    /// An audit found that pages of the session's KV also belong to other sessions, or that other
    /// sessions wrote to them.
    Corrupt,
    /// The session was lost with its engine process.
    EngineLost,
    /// The session was closed because the engine's weights changed.
    WeightsChanged,
    /// The session was closed because the adapter of its KV was loaded or unloaded.
    AdapterChanged,
}

impl SessionEvent {
    /// Returns the name used in metrics and logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::Demoted => "demoted",
            Self::Reclaimed => "reclaimed",
            Self::Doubted => "doubted",
            Self::Verified => "verified",
            Self::TakenOver => "taken_over",
            Self::NotTakenOver => "not_taken_over",
            Self::Corrupt => "corrupt",
            Self::EngineLost => "engine_lost",
            Self::WeightsChanged => "weights_changed",
            Self::AdapterChanged => "adapter_changed",
        }
    }
}

/// A request to close an incarnation at the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloseRequest {
    /// The incarnation id.
    pub incarnation: String,
    /// Id of a turn that may still be inside the engine; the owner aborts it first.
    pub rid: Option<String>,
    /// Whether the incarnation is pinned and may hold a row and KV. Any other is a tag, which is
    /// closed when the engine has answered the request.
    pub is_pinned: bool,
    /// Whether this repeats a close that was not confirmed.
    pub is_repeat: bool,
}

/// The result of an open request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpenResult {
    /// The engine opened the session.
    Opened,
    /// The engine refused to open it, or was not asked. Carries the reason.
    NotOpened(String),
    /// The engine was not asked, because the journal could not be written. Carries the reason.
    NotJournaled(String),
    /// The answer was lost, so the session may be open. Carries the reason.
    Unknown(String),
}

/// The result of a close request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseResult {
    /// The engine has freed what the session held.
    Confirmed,
    /// The engine reports that the session still exists.
    Kept,
    /// The engine's confirmation is still awaited, or could not be had.
    NotYet,
}

/// Totals of the sessions and turns of one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RankTotals {
    /// The number of sessions in the table.
    pub sessions: u32,
    /// The number of request rows that pinned sessions hold.
    pub rows_held: u32,
    /// KV tokens that pinned sessions hold or have reserved, in whole pages.
    pub pinned_tokens: u64,
    /// Estimated KV tokens that unpinned sessions have in the radix tree.
    pub tree_tokens_estimate: u64,
    /// The number of turns inside the engine.
    pub turns_running: u32,
    /// The number of turns that wait for room.
    pub turns_queued: u32,
    /// The part of `rows_held` that belongs to foreign sessions, which other clients of the engine
    /// opened.
    pub foreign_rows: u32,
    /// The part of `pinned_tokens` that belongs to foreign sessions.
    pub foreign_tokens: u64,
}
