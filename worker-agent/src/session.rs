//! Keeps the sessions of one engine: their state, and how turns change it.
//!
//! Only `journal` does I/O. Nothing here reads a clock. The shim can *trim* a full history (remove
//! the tokens that the session already has) and *demote* a session (give its KV to the radix tree).

mod deltas;
mod error;
pub mod handover;
pub mod journal;
mod kv_identity;
mod lifecycle;
mod prefetches;
mod prefix_tracker;
mod requests;
mod returns;
mod state;
mod table;
mod turn;

use std::time::Duration;

use contract::{
    id::SessionKey,
    load::{Retention, VolatilePrefix},
};

use self::journal::Record;
pub use self::{
    error::Error,
    kv_identity::KvIdentity,
    prefetches::{PrefetchCounts, Prefetches},
    prefix_tracker::{BLOCKS_MAX, PrefixTracker, PromptStart},
    requests::{ClaimRequest, OpenRequest},
    returns::{ExpectedReturns, Presence},
    state::Session,
    table::{
        EngineLoad, KvChange, Legacy, PrincipalView, SessionReport, ShareFigures, ShimReport,
        Table, TablePart, TrimOutcome, TrimPlan, Unfinished, UnseenBy, WeightsReport,
    },
    turn::{Need, Outcome, PlannedTurn, RouteTurns, RunMode, TrimRequest, TurnSession, Usage},
};
use crate::guard::{Guard, Guards};

/// The least that is reserved for an answer in a session that the agent pinned on its own, unless
/// the answer's limit is lower. Most answers of coding agents are shorter. A longer one grows into
/// the part of the pool that the pin budget leaves free, and is counted when the turn has ended.
pub const ANSWER_TOKENS_MIN: u64 = 2048;

/// The most that are with one rank's shim at a time. A shim does about this many in one step of an
/// idle engine, and keeps thousands in its queue.
pub const SHIM_REQUESTS_MAX: usize = 256;

#[derive(Debug, Clone, Copy)]
pub struct RankCapacity {
    pub rows: u32,
    /// Rows that pinned sessions leave free. With no row free, the engine could never run anything.
    pub rows_reserve: u32,
    /// The most rows that pinned sessions may hold. The others are for plain turns.
    pub pin_rows_max: u32,
    pub pool_tokens: u64,
    /// The pin budget: the most tokens that all pinned sessions may hold together.
    pub pin_tokens_max: u64,
    pub turns_max: u32,
}

#[derive(Debug, Clone)]
pub struct EngineCapacity {
    pub ranks: Vec<RankCapacity>,
    /// At least 1.
    pub page_tokens: u64,
    /// The most tokens that a prompt and its answer may have together.
    pub context_tokens: u64,
    /// Best first.
    pub retentions: Vec<Retention>,
}

#[derive(Debug, Clone)]
pub struct TableSettings {
    /// Differs for every agent process that uses the engine; see
    /// [`prefix`](crate::incarnation::prefix).
    pub incarnation_prefix: String,
    /// The idle limit of a session whose client asked for none.
    pub idle_max: Duration,
    /// Time without a turn after which a pinned session gives its KV up to one that needs the room.
    pub demote_idle: Duration,
    /// Behind the running turn of one exclusive session.
    pub turns_queued_per_session_max: u32,
    /// On all ranks together.
    pub turns_queued_max: usize,
    pub queue_wait_max: Duration,
    /// A turn's end or a close that is unconfirmed for this long is stuck: restart the engine.
    pub stuck_after: Duration,
    /// Whether the agent pins sessions whose clients asked for no retention. It pins those that
    /// come back soon, where the shim trims full histories.
    pub auto_pin: bool,
    /// Of sessions that the agent pinned on its own; see [`ANSWER_TOKENS_MIN`].
    pub answer_tokens_min: u64,
    pub shim_requests_max: usize,
    pub shares: ShareSettings,
    /// Only simulations switch any off.
    pub guards: Guards,
}

impl TableSettings {
    fn shim_requests_max(&self) -> usize {
        if self.guards.is_on(Guard::RequestsPaced) { self.shim_requests_max } else { usize::MAX }
    }
}

#[derive(Debug, Clone, Copy)]
pub struct ShareSettings {
    pub sessions_max: usize,
    pub principal_sessions_max: usize,
    /// The most that a client may ask for; at least [`TableSettings::idle_max`].
    pub idle_cap: Duration,
    /// While another principal is active: one principal's part, in thousandths, of the turns that
    /// may be inside the engine, and of the rows that plain turns run in.
    pub turns_milli: u32,
}

/// What the owner task does or reports next. Effects keep their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Sends a turn to the engine, or tells a client that the session it opened is open.
    Admitted {
        rid: String,
        turn: PlannedTurn,
    },
    /// Refuses a turn that is not inside the engine, or an open. The table has forgotten it.
    Refused {
        rid: String,
        error: Error,
    },
    /// Journals the incarnation, then opens it. [`Table::handle_open_result`] must follow.
    Open {
        incarnation: String,
        idle_max: Duration,
    },
    /// [`Table::handle_close_result`] must follow.
    Close(CloseRequest),
    /// The record must be written before the next effect is carried out.
    Journal(Record),
    /// Aborts the turn `rid`, if any, then asks the shim for the history of a suspect session.
    /// [`ShimReport::Inspection`] must follow.
    Inspect {
        dp_rank: u32,
        /// The answer repeats it.
        number: u64,
        incarnation: String,
        rid: Option<String>,
        /// Whether the last answer came too early, so that a pause must come first.
        is_repeat: bool,
    },
    /// Asks the shim to demote a session. [`ShimReport::Demotion`] must follow.
    Demote {
        dp_rank: u32,
        /// The answer repeats it.
        number: u64,
        incarnation: String,
    },
    /// Tells the shim where a turn with a full history may run that can't run as planned.
    AnswerQuestion {
        question: u64,
        /// `None`: not in its session.
        incarnation: Option<String>,
        /// The most prompt tokens with which the turn may run there.
        tokens_max: u64,
    },
    RunModeKnown {
        rid: String,
        run_mode: RunMode,
        /// KV tokens reserved beyond the session's history; `None` outside pinned sessions.
        growth_tokens_max: Option<u64>,
    },
    /// The shim refuses an admitted turn, whose full history doesn't continue its session. The
    /// client gets the error; [`Table::end_turn`] follows.
    RefusedByShim {
        rid: String,
        error: Error,
    },
    SessionChanged(SessionKey),
    /// The engine has freed an incarnation, this long after the first request to close it.
    Freed(Duration),
    VolatilePrefix(SessionKey, VolatilePrefix),
    SessionEvent(SessionKey, SessionEvent),
}

/// A change that no turn, open or close of the session's client asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SessionEvent {
    Expired,
    /// Others needed the room, the session was idle, or its owner or an operator asked.
    Demoted,
    /// Closed because other sessions needed the room.
    Reclaimed,
    /// Closed because its history at the engine was uncertain.
    Doubted,
    /// The shim confirmed a suspect session.
    Verified,
    /// The shim confirmed what the last agent process handed over.
    TakenOver,
    NotTakenOver,
    /// An audit found KV pages that other sessions also have, or wrote to.
    Corrupt,
    EngineLost,
    WeightsChanged,
    /// The adapter of the session's KV was loaded or unloaded.
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

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloseRequest {
    pub incarnation: String,
    /// A turn that may still be inside the engine; the owner aborts it first.
    pub rid: Option<String>,
    /// Whether the incarnation may hold a row and KV. Any other is a tag, which is closed when the
    /// engine has answered.
    pub is_pinned: bool,
    /// Whether an earlier close was not confirmed.
    pub is_repeat: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpenResult {
    Opened,
    /// The engine refused, or was not asked, for this reason.
    NotOpened(String),
    /// The journal could not be written, so the engine was not asked.
    NotJournaled(String),
    /// The answer was lost, so the session may be open.
    Unknown(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseResult {
    /// The engine has freed what the session held.
    Confirmed,
    /// The engine reports that the session still exists.
    Kept,
    /// The confirmation is still awaited, or could not be had.
    NotYet,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RankTotals {
    pub sessions: u32,
    pub rows_held: u32,
    /// What pinned sessions hold or have reserved, in whole pages.
    pub pinned_tokens: u64,
    /// Of unpinned sessions, in the radix tree.
    pub tree_tokens_estimate: u64,
    pub turns_running: u32,
    pub turns_queued: u32,
    /// The part of `rows_held` of sessions that other clients of the engine opened.
    pub foreign_rows: u32,
    /// The same part of `pinned_tokens`.
    pub foreign_tokens: u64,
}
