//! Sessions as the agent keeps them: what one is, what a turn may do to it, and what a turn's end
//! does. Pure: time comes in as an argument, nothing here waits. The table of all of them is
//! [`Table`].

mod deltas;
mod error;
mod prefix;
mod table;
mod turn;

use std::time::{Duration, Instant};

use proto::{
    id::SessionKey,
    load::{Retention, SessionState, VolatilePrefix},
};

use self::deltas::{Deltas, check_appends, check_turn};
pub use self::{
    error::Error,
    prefix::{BLOCKS_MAX, PrefixTracker, PromptStart},
    table::{Became, Load, Plan, Planned, Seen, Table},
    turn::{Appends, Need, Outcome, Ran, Trim, Turn, TurnSession, Usage},
};
use crate::{
    config::WORKER_ID_BYTES_MAX,
    guard::{Guard, Guards},
    journal::Record,
};

/// Longest id of an incarnation: a [`prefix`], a hyphen, and a number of 20 digits.
pub const INCARNATION_BYTES_MAX: usize = "berth-".len() + WORKER_ID_BYTES_MAX + 17 + 21;

/// What one rank can hold.
#[derive(Debug, Clone, Copy)]
pub struct Capacity {
    /// Request rows.
    pub rows: u32,
    /// Rows kept free of pinned sessions: the engine stops for good when all are held.
    pub rows_reserve: u32,
    /// The whole pool.
    pub pool_tokens: u64,
    /// Tokens that pinned sessions may hold together.
    pub pin_tokens_max: u64,
    /// Turns inside the engine at once.
    pub turns_max: u32,
}

/// What the table needs to know of the engine.
#[derive(Debug, Clone)]
pub struct Engine {
    /// One entry per DP rank.
    pub ranks: Vec<Capacity>,
    /// Page size of the pool; at least 1.
    pub page_tokens: u64,
    /// Longest prompt plus answer.
    pub context_tokens: u64,
    /// The modes its flags allow, best first.
    pub retentions: Vec<Retention>,
}

/// Beginning of incarnation ids, of a worker's id and of the agent process's epoch.
#[must_use]
pub fn prefix(worker_id: &str, epoch: u64) -> String {
    format!("berth-{worker_id}-{epoch:x}")
}

/// How the table behaves; see the settings of the same names.
#[derive(Debug, Clone)]
pub struct Rules {
    /// A [`prefix`], different for every agent process that meets the engine.
    pub prefix: String,
    /// Idle time of a session that asked for none.
    pub idle_max: Duration,
    /// Idle time after which a pinned session's KV is taken when someone needs the room.
    pub demote_idle: Duration,
    /// Turns of one exclusive session that may wait behind the one that runs.
    pub turns_queued_per_session_max: u32,
    /// Turns that wait for room, on all ranks together.
    pub turns_queued_max: usize,
    /// How long one waits at most.
    pub queue_wait_max: Duration,
    /// A turn's or a session's end that the engine has not confirmed for so long is stuck.
    pub stuck_after: Duration,
    /// Sessions that come back soon are pinned where whole histories can be trimmed.
    pub auto_pin: bool,
    /// Which guards hold.
    pub guards: Guards,
}

/// One session.
#[derive(Debug, Clone)]
pub struct Session {
    /// How its KV is kept.
    pub retention: Retention,
    /// What its client asked for; none: the agent decides.
    wanted: Option<Retention>,
    /// The rank that holds its KV.
    pub dp_rank: u32,
    /// Its id inside the engine.
    pub incarnation: String,
    /// One turn at a time.
    pub exclusive: bool,
    /// Finished turns.
    pub turns: u64,
    /// Turns inside the engine.
    pub running: u32,
    /// Turns claimed that are not inside yet.
    pub waiting: u32,
    /// Tokens of the history the engine has committed: prompts and answers of finished turns.
    pub history_tokens: u64,
    /// Tokens of KV it holds (pinned) or may still have in the tree (else).
    pub resident_tokens: u64,
    /// Tokens of KV that its running turn may come to hold, the history's included.
    reserved_tokens: u64,
    /// Its client opened it: as soon as no turn runs, turns are let in one at a time.
    opened: bool,
    /// A turn began it, and neither has one of it been inside nor anyone opened it.
    unused: bool,
    /// It holds a row of the engine, or will with its next turn, and KV that nothing else frees.
    row: bool,
    /// A turn whose end nobody saw: it may still be inside.
    lost_rid: Option<String>,
    /// Its KV was found corrupt while a turn ran.
    corrupt: bool,
    /// Tells this session from one that had its key before.
    born: u64,
    /// What is known of its whole histories.
    whole: Whole,
    /// Whether the session takes delta turns.
    deltas: Deltas,
    /// How its prompts begin.
    prefix: PrefixTracker,
    phase: Phase,
    last_end: Instant,
    idle_max: Duration,
}

/// What the state of a session is besides its running turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Nothing of it is at the engine yet.
    Planned,
    /// The engine was asked to open it.
    Opening,
    Open,
    /// The shim was asked to give its KV to the radix tree, and answers until then or never.
    Demoting {
        until: Instant,
    },
    /// The engine has its history; its KV is in the radix tree, evictable; it holds no row.
    Demoted,
    /// A turn's end left doubt; the engine's own account, asked for since, decides until then.
    Suspect {
        expected: Expected,
        until: Instant,
        asked: bool,
    },
    /// It closes when the last running turn has ended.
    Closing,
    /// Nothing of it is at the engine any more; it is remembered so that its client hears why.
    Gone(Why),
}

/// The history that ends a doubt, tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expected {
    Exactly(u64),
    /// The engine ran the right prompt, and nobody told how long its answer was.
    AtLeast(u64),
}

impl Expected {
    fn is(self, history_tokens: u64) -> bool {
        match self {
            Self::Exactly(tokens) => history_tokens == tokens,
            Self::AtLeast(tokens) => history_tokens >= tokens,
        }
    }
}

/// What is known of the whole histories that a client sends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Whole {
    /// The last turn held everything: nothing is lost with what the engine has.
    sends: bool,
    /// The bound that the last turn's body was taken for, and the tokens it was with its answer.
    measured: Option<(u64, u64)>,
    /// Of its longest answer.
    answer_tokens_max: u64,
    /// Turns in a row that could not go on from what the engine had.
    astray: u32,
    /// Where the last answer begins in the history, if its turn ignored the end of its answer
    /// (`ignore_eos`). Such an answer may hold end tokens that its text doesn't show, so the next
    /// history differs from there on though its client has changed nothing.
    hides_ends_from: Option<u64>,
    /// It gave its pin up, or could not have it: not before then again.
    pin_after: Option<Instant>,
    /// Its next turn begins an incarnation that takes another's place.
    anew: bool,
    /// Its client takes for history what the engine hasn't: a turn ran beside the session, or a new
    /// incarnation hasn't had its first one.
    behind: bool,
}

/// Why a session can't go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    EngineRestarted,
    HistoryUnknown,
    /// Its pages are others' too, or were written by others.
    KvCorrupt,
    Reclaimed,
}

/// What whoever holds the table must do or tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// A claimed turn may go to the engine.
    Admitted {
        /// The turn.
        rid: String,
        /// What it needs on its way.
        turn: Turn,
    },
    /// A claimed turn may not; it is forgotten.
    Refused {
        /// The turn.
        rid: String,
        /// Why.
        error: Error,
    },
    /// Journal the incarnation, then open it at the engine; [`Table::opened`] follows.
    Open {
        /// The engine-side id.
        incarnation: String,
        /// The session's idle limit.
        idle_max: Duration,
    },
    /// Close at the engine; [`Table::closed`] follows.
    Close(Close),
    /// Write this down, before what follows is done.
    Journal(Record),
    /// Ask the shim for its whole table, after this turn was aborted; [`Table::looking`] and then
    /// [`Table::seen`] follow.
    Look {
        /// The rank that holds the doubtful session.
        dp_rank: u32,
        /// A turn that may still be inside.
        rid: Option<String>,
    },
    /// Ask the shim to give a session's KV to the radix tree; [`Table::demoted`] follows.
    Demote {
        /// The rank that holds it.
        dp_rank: u32,
        /// The engine-side id.
        incarnation: String,
    },
    /// Answer the shim's question after a whole history that can't run where it was meant to.
    Run {
        /// The question's number.
        question: u64,
        /// The session that is to have it; none: it runs as it came.
        incarnation: Option<String>,
        /// The most tokens it may have.
        tokens_max: u64,
    },
    /// It is known how a turn runs.
    Ran {
        /// The turn.
        rid: String,
        /// How.
        ran: Ran,
    },
    /// The engine's shim refuses a turn that was let in, because its full history doesn't continue
    /// its session. The turn's client gets the error; [`Table::end`] follows.
    Unfit {
        /// The turn.
        rid: String,
        /// Why.
        error: Error,
    },
    /// Something about the session differs, or it is forgotten.
    Touched(SessionKey),
    /// The engine has freed what a session held, so long after it was first asked to.
    Freed(Duration),
    /// The session's prompts have a text early on that differs from turn to turn.
    VolatilePrefix(SessionKey, VolatilePrefix),
    /// Something that an operator may want to know or count.
    Happened(SessionKey, Event),
}

/// What can happen to a session without its client's doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// Its idle time ran out.
    Expired,
    /// Its KV was given to the radix tree because others needed the room.
    Demoted,
    /// It was closed because others needed the room.
    Reclaimed,
    /// What the engine has of it isn't known for sure, so it was closed there.
    Doubted,
    /// The engine's own account settled a doubt.
    Verified,
    /// Its pages were found to be others' too, or written by others.
    Corrupt,
    /// It went with its engine.
    EngineLost,
}

impl Event {
    /// The name used in metrics and logs.
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

/// A close that the engine must now get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Close {
    /// The engine-side id.
    pub incarnation: String,
    /// A turn of it that may still be inside, to be aborted first.
    pub rid: Option<String>,
    /// Whether it holds anything: a tag's close is done when it was said.
    pub pinned: bool,
    /// It was asked for before and not confirmed.
    pub again: bool,
}

/// What became of an open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Opened {
    /// The engine said yes.
    Yes,
    /// It said no, or was not asked.
    No(String),
    /// Its answer was lost: it may have said yes.
    Unknown(String),
}

/// What became of a close.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closed {
    /// What it held is free.
    Confirmed,
    /// The engine says that it is still there.
    Kept,
    /// Its word is awaited, or could not be had.
    NotYet,
}

/// Totals of one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Open sessions.
    pub sessions: u32,
    /// Rows held by pinned sessions.
    pub rows_held: u32,
    /// Tokens held by pinned sessions, in whole pages.
    pub pinned_tokens: u64,
    /// Tokens that other sessions may have in the tree.
    pub estimate_tokens: u64,
    /// Turns inside the engine.
    pub turns_running: u32,
    /// Turns that wait for room.
    pub turns_queued: u32,
    /// Of `rows_held`: held by sessions that aren't the agent's.
    pub foreign_rows: u32,
    /// Of `pinned_tokens`: held by sessions that aren't the agent's.
    pub foreign_tokens: u64,
}

impl Session {
    /// The agent decides how it is kept: nobody has asked for anything.
    fn is_auto(&self) -> bool {
        self.wanted.is_none()
    }

    /// Whether the session can go on at any engine, because its clients send their full history
    /// with each turn. A session that has taken a delta can't: only its engine has its history.
    #[must_use]
    pub fn sends_whole(&self) -> bool {
        self.whole.sends && self.deltas != Deltas::Taken
    }

    /// A text early in its prompts that differs from turn to turn, if one was found.
    #[must_use]
    pub fn volatile_prefix(&self) -> Option<VolatilePrefix> {
        self.prefix.found()
    }

    /// The state shown outside.
    #[must_use]
    pub fn state(&self) -> SessionState {
        match self.phase {
            Phase::Planned | Phase::Opening => SessionState::Opening,
            Phase::Closing => SessionState::Closing,
            Phase::Gone(Why::EngineRestarted) => SessionState::Lost,
            _ if self.running > 0 => SessionState::Running,
            Phase::Demoted => SessionState::Demoted,
            // The agent itself tells the client why it can't go on.
            Phase::Open | Phase::Demoting { .. } | Phase::Suspect { .. } | Phase::Gone(_) => {
                SessionState::Idle
            }
        }
    }

    /// Does its idle time run?
    fn can_expire(&self) -> bool {
        let at_rest = matches!(self.phase, Phase::Open | Phase::Demoted | Phase::Gone(_));
        self.running == 0 && self.waiting == 0 && at_rest
    }

    /// The engine has opened it for turns that were all refused or given up.
    fn is_left_unused(&self) -> bool {
        self.unused && self.row && self.phase == Phase::Open && self.waiting == 0
    }

    /// Nothing of it is at the engine any more, or another incarnation is to come.
    fn emptied(&mut self) {
        self.history_tokens = 0;
        self.resident_tokens = 0;
        self.reserved_tokens = 0;
        self.row = false;
        self.corrupt = false;
        self.lost_rid = None;
    }

    /// What a finished turn has brought it to.
    fn grown(&mut self, usage: Usage) {
        let total = usage.prompt_tokens.saturating_add(usage.completion_tokens);
        self.history_tokens = total;
        // The KV of an answer's last token is computed only with the next turn.
        self.resident_tokens = total.saturating_sub(1);
    }

    /// Time since the last turn's end; zero while one runs.
    #[must_use]
    pub fn idle(&self, now: Instant) -> Duration {
        if self.running > 0 { Duration::ZERO } else { now.saturating_duration_since(self.last_end) }
    }
}
