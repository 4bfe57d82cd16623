//! Keeps the sessions of one engine: their state, and how turns change it.
//!
//! The owner task (`crate::owner`) tells [`Table`] what happened, and carries out the [`Effect`]s
//! that it returns. This file holds the shared types. The child `table` decides which turns run,
//! `deltas` which turns a session takes. `turn` and `error` describe turns and refusals,
//! `prefix_tracker` compares prompts, and `journal` lists the open incarnations in a file. Only
//! `journal` does I/O. None reads a clock.
//!
//! A session is a conversation of ordered turns. A turn is one request and its answer. It sends a
//! full history (the whole conversation) or a delta (only new tokens, which the engine appends). An
//! incarnation is one life of a session inside the engine. A pinned session keeps its KV and a
//! request row to itself. A tagged session's KV is in the radix tree, marked with the incarnation
//! id. The shim is Berth's part inside the engine's process. It can trim a full history (remove the
//! tokens that the session already holds) and demote a session (give its KV to the radix tree).

mod deltas;
mod error;
pub mod journal;
mod prefix_tracker;
mod table;
mod turn;

use std::time::{Duration, Instant};

use proto::{
    id::SessionKey,
    load::{Retention, SessionState, VolatilePrefix},
};

use self::{
    deltas::{Deltas, check_route, check_turn},
    journal::Record,
};
pub use self::{
    error::Error,
    prefix_tracker::{BLOCKS_MAX, PrefixTracker, PromptStart},
    table::{EngineLoad, SessionReport, Table, TrimOutcome, TrimPlan},
    turn::{Need, Outcome, RouteTurns, RunMode, TrimRequest, Turn, TurnSession, Usage},
};
use crate::guard::{Guard, Guards};

/// The capacity of one rank.
#[derive(Debug, Clone, Copy)]
pub struct RankCapacity {
    /// The number of request rows.
    pub rows: u32,
    /// Rows that pinned sessions must leave free. If sessions held all rows, the engine could run
    /// nothing more, ever.
    pub rows_reserve: u32,
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
    /// The guards (protective rules) that are on. Only simulations switch any off.
    pub guards: Guards,
}

/// One session: its state, its figures, and what the agent knows of its client's prompts.
#[derive(Debug, Clone)]
pub struct Session {
    /// How the engine keeps the session's KV.
    pub retention: Retention,
    /// The retention that the client asked for. `None`: the agent decides.
    requested_retention: Option<Retention>,
    /// The rank that holds the session's KV.
    pub dp_rank: u32,
    /// Id of the session's present incarnation inside the engine.
    pub incarnation: String,
    /// Whether the session runs one turn at a time.
    pub is_exclusive: bool,
    /// The number of finished turns.
    pub turns_finished: u64,
    /// The number of turns inside the engine.
    pub turns_running: u32,
    /// The number of turns that have claimed the session and are not inside the engine yet.
    pub turns_waiting: u32,
    /// Tokens of the history that the engine has committed: prompts and answers of finished turns.
    pub history_tokens: u64,
    /// For a pinned session: KV tokens that it holds. For any other session: an estimate of the KV
    /// tokens that it still has in the radix tree.
    pub resident_tokens: u64,
    /// KV tokens that the session may hold when its running turn ends, history included.
    reserved_tokens: u64,
    /// Whether a client opened the session. Such a session becomes exclusive as soon as a turn
    /// claims it while no other turn of it runs or waits.
    is_opened_by_client: bool,
    /// Whether the session was created by a turn, but no turn has reached the engine and no client
    /// has opened the session.
    is_unused: bool,
    /// Whether the session holds a request row and KV. Only a close or a demotion frees them.
    holds_row: bool,
    /// Id of a turn whose end the agent did not see. That turn may still be inside the engine.
    lost_rid: Option<String>,
    /// Whether an audit found the session's KV corrupt.
    is_corrupt: bool,
    /// A number that tells this session from earlier sessions with the same key.
    generation: u64,
    /// What the agent knows of the full histories that the client sends.
    full_history: FullHistory,
    /// Whether the session takes delta turns.
    deltas: Deltas,
    /// Compares the beginnings of the session's prompts from turn to turn.
    prefix_tracker: PrefixTracker,
    phase: Phase,
    last_turn_end: Instant,
    idle_max: Duration,
}

/// Lifecycle state of a session, independent of its running turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The engine has not been asked to open the session.
    Planned,
    /// The engine was asked to open the session and has not answered.
    Opening,
    Open,
    /// The shim was asked to demote the session. If it has not answered at `until`, the session is
    /// closed at the engine.
    Demoting {
        until: Instant,
    },
    /// The engine has the session's history, but the KV is in the radix tree, where it can be
    /// evicted. The session holds no row.
    Demoted,
    /// After a turn's end, the agent isn't sure what history the engine has. A session table that
    /// the shim was asked for since then (`is_table_requested`) must report the `expected` history.
    /// If none arrives before `until`, the session is closed at the engine.
    Suspect {
        expected: ExpectedHistory,
        until: Instant,
        is_table_requested: bool,
    },
    /// The session closes when its last running turn has ended.
    Closing,
    /// The engine has nothing of the session any more. The agent keeps it to tell its client why.
    Gone(GoneReason),
}

/// The history, in tokens, that the shim must report to clear a suspect session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpectedHistory {
    Exactly(u64),
    /// The engine ran the right prompt, but the length of its answer is unknown.
    AtLeast(u64),
}

impl ExpectedHistory {
    fn matches(self, history_tokens: u64) -> bool {
        match self {
            Self::Exactly(tokens) => history_tokens == tokens,
            Self::AtLeast(tokens) => history_tokens >= tokens,
        }
    }
}

/// What the agent knows of the full histories that a session's client sends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct FullHistory {
    /// Whether the newest turn held a full history. If so, the client loses nothing when the engine
    /// loses its history.
    is_sent: bool,
    /// The size of the latest full history whose tokens the engine or the shim has counted.
    last_measured: Option<MeasuredHistory>,
    /// Tokens of the longest answer so far.
    longest_answer_tokens: u64,
    /// The divergence streak: how many full histories in a row did not continue the engine's
    /// history.
    divergence_streak: u32,
    /// Token index in the history where the newest answer begins, if its turn ignored the end of
    /// its answer (`ignore_eos`). Such an answer may hold end tokens that its text doesn't show.
    /// The next full history then differs from the engine's after this index, although the client
    /// has changed nothing.
    hidden_end_tokens_from: Option<u64>,
    /// The agent does not pin the session again before this time, because the session lost its pin
    /// or found no room for it.
    no_pin_before: Option<Instant>,
    /// Whether the session's next full history starts an incarnation that replaces an earlier one.
    next_turn_reopens: bool,
    /// Whether the client's history may have turns that the engine's history lacks, because a turn
    /// ran outside the session's KV, or a new incarnation has not had its first turn. If so, the
    /// session refuses deltas.
    client_may_be_ahead: bool,
}

/// The size of one full history, as a bound and as a count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MeasuredHistory {
    /// The upper bound on the prompt's tokens that was taken from the turn's body.
    prompt_tokens_bound: u64,
    /// The counted tokens, with the answer if the turn ran.
    tokens: u64,
}

/// Why a session can't continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GoneReason {
    EngineRestarted,
    /// The agent isn't sure of the engine's history.
    HistoryUnknown,
    /// Pages of the session's KV also belong to other sessions, or other sessions wrote to them.
    KvCorrupt,
    Reclaimed,
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
    /// Aborts the turn `rid`, if any, then requests the shim's full session table. The owner calls
    /// [`Table::mark_table_requested`] at the request and [`Table::handle_session_report`] with the
    /// answer.
    RequestShimTable {
        /// The rank that holds the suspect session.
        dp_rank: u32,
        /// Id of a turn that may still be inside the engine.
        rid: Option<String>,
    },
    /// Asks the shim to give a session's KV to the radix tree. The owner reports the result with
    /// [`Table::handle_demote_result`].
    Demote {
        /// The rank that holds the session.
        dp_rank: u32,
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

/// A change of a session that its client did not ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SessionEvent {
    /// The session's idle limit has passed.
    Expired,
    /// The session was demoted, because other sessions needed the room or the session was idle.
    Demoted,
    /// The session was closed because other sessions needed the room.
    Reclaimed,
    /// The session was closed at the engine because its history there was uncertain.
    Doubted,
    /// The shim's session table confirmed the history of a suspect session.
    Verified,
    /// An audit found that pages of the session's KV also belong to other sessions, or that other
    /// sessions wrote to them.
    Corrupt,
    /// The session was lost with its engine process.
    EngineLost,
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
            Self::Corrupt => "corrupt",
            Self::EngineLost => "engine_lost",
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
    /// Whether the incarnation is pinned and may hold a row and KV. The close of any other
    /// incarnation needs no confirmation.
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

impl Session {
    /// Whether the agent chooses the session's retention, because the client asked for none.
    fn has_auto_retention(&self) -> bool {
        self.requested_retention.is_none()
    }

    /// Whether the session can continue at any engine, because its clients send their full history
    /// with each turn. After a delta that is impossible: only the session's engine has its history.
    #[must_use]
    pub fn sends_full_histories(&self) -> bool {
        self.full_history.is_sent && self.deltas != Deltas::Taken
    }

    /// Returns the volatile prefix of the session's prompts, if one was found: a text early in them
    /// that differs from turn to turn.
    #[must_use]
    pub fn volatile_prefix(&self) -> Option<VolatilePrefix> {
        self.prefix_tracker.volatile_prefix()
    }

    /// Returns the state that the agent reports to routers and clients.
    #[must_use]
    pub fn state(&self) -> SessionState {
        match self.phase {
            Phase::Planned | Phase::Opening => SessionState::Opening,
            Phase::Closing => SessionState::Closing,
            Phase::Gone(GoneReason::EngineRestarted) => SessionState::Lost,
            _ if self.turns_running > 0 => SessionState::Running,
            Phase::Demoted => SessionState::Demoted,
            // The client learns with its next turn if the session can't continue.
            Phase::Open | Phase::Demoting { .. } | Phase::Suspect { .. } | Phase::Gone(_) => {
                SessionState::Idle
            }
        }
    }

    /// Whether the session's idle time counts towards its idle limit.
    fn can_expire(&self) -> bool {
        let is_at_rest = matches!(self.phase, Phase::Open | Phase::Demoted | Phase::Gone(_));
        self.turns_running == 0 && self.turns_waiting == 0 && is_at_rest
    }

    /// Whether the session is open at the engine although every turn that it was opened for was
    /// refused or given up.
    fn is_open_for_nothing(&self) -> bool {
        self.is_unused && self.holds_row && self.phase == Phase::Open && self.turns_waiting == 0
    }

    /// Resets what belongs to the row and the KV that the session no longer holds.
    fn drop_row(&mut self) {
        self.holds_row = false;
        self.resident_tokens = 0;
        self.reserved_tokens = 0;
        self.lost_rid = None;
    }

    /// Resets the figures of a session that has nothing at the engine, or gets a new incarnation.
    fn clear_figures(&mut self) {
        self.history_tokens = 0;
        self.is_corrupt = false;
        self.drop_row();
    }

    /// Updates the session's figures after a finished turn.
    fn record_usage(&mut self, usage: Usage) {
        let tokens = usage.prompt_tokens.saturating_add(usage.completion_tokens);
        self.history_tokens = tokens;
        // The engine computes the KV of an answer's last token only in the following turn.
        self.resident_tokens = tokens.saturating_sub(1);
    }

    /// Returns the time since the end of the last turn; zero while a turn runs.
    #[must_use]
    pub fn idle(&self, now: Instant) -> Duration {
        if self.turns_running > 0 {
            Duration::ZERO
        } else {
            now.saturating_duration_since(self.last_turn_end)
        }
    }
}
