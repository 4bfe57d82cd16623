//! Sessions as the agent keeps them: what one is, what a turn may do to it, and what a turn's end
//! does. Pure: time comes in as an argument, nothing here waits. The table of all of them is
//! [`Table`].

mod table;

use std::time::{Duration, Instant};

use proto::{
    claim::Claim,
    id::SessionKey,
    load::{Retention, SessionState},
};

pub use self::table::Table;

/// What one rank can hold.
#[derive(Debug, Clone, Copy)]
pub struct Capacity {
    /// Request rows.
    pub rows: u32,
    /// Rows kept free of pinned sessions: the engine stops for good when all are held.
    pub rows_reserve: u32,
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
    /// The modes its flags allow, best first.
    pub retentions: Vec<Retention>,
}

/// One session.
#[derive(Debug, Clone)]
pub struct Session {
    /// How its KV is kept.
    pub retention: Retention,
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
    /// Tokens of the history the engine has committed: prompts and answers of finished turns.
    pub history_tokens: u64,
    /// Tokens of KV it holds (pinned) or may still have in the tree (else).
    pub resident_tokens: u64,
    phase: Phase,
    last_end: Instant,
    idle_max: Duration,
}

/// What the state of a session is besides its running turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Opening,
    Open,
    /// It closes when the last running turn has ended.
    Closing,
    /// The engine restarted under it.
    Lost,
    /// A turn's end was not seen: the engine may have committed it or not.
    Suspect,
}

/// A turn let in: what it needs on its way and to be ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// None for a turn without a session.
    pub session: Option<TurnSession>,
    /// The rank to run on.
    pub dp_rank: u32,
}

/// The session part of a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TurnSession {
    /// Whose turn it is.
    pub key: SessionKey,
    /// The engine-side id.
    pub incarnation: String,
    /// How the turn names its session to the engine.
    pub retention: Retention,
    /// The engine must open the incarnation before the turn goes out.
    pub must_open: bool,
}

/// Token counts the engine reported for a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// The whole prompt, history included.
    pub prompt_tokens: u64,
    /// The answer.
    pub completion_tokens: u64,
    /// Prompt tokens whose KV was there, if the engine says.
    pub cached_tokens: Option<u64>,
    /// How often the turn was taken out of the batch and put back.
    pub retractions: u64,
}

/// How a turn ended, as the engine acknowledged it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The engine finished it. Usage is absent where the route doesn't report it.
    Finished(Option<Usage>),
    /// The engine finished it, and nobody was there to hear: the client can't know the history.
    Unheard(Option<Usage>),
    /// The engine aborted it and said so.
    Aborted,
    /// The engine refused it before running it, or it never reached the engine.
    Refused,
    /// Nobody saw its end.
    Lost,
}

/// A call that the engine must now get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Close {
    /// The engine-side id.
    pub incarnation: String,
}

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
        "this session is pinned: the engine appends what a turn sends. Send only the new tokens \
         to /generate, with `session_params` or `x-berth-delta: 1`, or open the session tagged"
    )]
    WholeHistory,
    /// The engine restarted and the history went with it.
    #[error("the engine restarted and lost this session; open it again and send the whole history")]
    Lost,
    /// The end of an earlier turn was not seen.
    #[error(
        "the end of an earlier turn was not seen, so the engine's history is unknown; close the \
         session, open it again and send the whole history"
    )]
    HistoryUnknown,
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
}

/// Whether what a turn sends can be appended to a pinned session's history by its route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Appends {
    /// `/generate` with one prompt.
    Possible,
    /// Every other route: the engine ignores the session there.
    Never,
}

impl Session {
    /// The state shown outside.
    #[must_use]
    pub fn state(&self) -> SessionState {
        match self.phase {
            Phase::Opening => SessionState::Opening,
            Phase::Closing => SessionState::Closing,
            Phase::Lost => SessionState::Lost,
            Phase::Open | Phase::Suspect if self.running > 0 => SessionState::Running,
            Phase::Open | Phase::Suspect => SessionState::Idle,
        }
    }

    /// Does its idle time run?
    fn can_expire(&self) -> bool {
        self.running == 0 && !matches!(self.phase, Phase::Opening | Phase::Closing)
    }

    /// Its idle limit.
    #[must_use]
    pub fn idle_max(&self) -> Duration {
        self.idle_max
    }

    /// Time since the last turn's end; zero while one runs.
    #[must_use]
    pub fn idle(&self, now: Instant) -> Duration {
        if self.running > 0 { Duration::ZERO } else { now.saturating_duration_since(self.last_end) }
    }
}

/// May this session take this turn now?
fn check_turn(session: &Session, claim: &Claim, appends: Appends) -> Result<(), Error> {
    let pinned = session.retention == Retention::Pinned;
    match session.phase {
        // Closing beats busy: the session is gone for everyone but its running turn.
        Phase::Closing => return Err(Error::Unknown),
        Phase::Lost if pinned => return Err(Error::Lost),
        _ => {}
    }
    if session.exclusive && session.running > 0 {
        return Err(Error::Busy);
    }
    if session.phase == Phase::Suspect {
        return Err(Error::HistoryUnknown);
    }
    if claim.delta && !pinned {
        return Err(Error::DeltaNeedsPinned(session.retention));
    }
    if pinned {
        // With an empty history the whole of it and what is new are the same.
        let whole = !claim.delta && session.turns > 0;
        if whole || appends == Appends::Never {
            return Err(Error::WholeHistory);
        }
    }
    Ok(())
}

/// What a turn's end does to its session.
fn settle(session: &mut Session, outcome: Outcome) {
    let pinned = session.retention == Retention::Pinned;
    if session.phase == Phase::Lost {
        return;
    }
    match outcome {
        Outcome::Refused => {}
        Outcome::Finished(usage) | Outcome::Unheard(usage) => {
            session.turns += 1;
            let unheard = matches!(outcome, Outcome::Unheard(_));
            if pinned && unheard && session.phase == Phase::Open {
                session.phase = Phase::Suspect;
            }
            let Some(usage) = usage else { return };
            let total = usage.prompt_tokens.saturating_add(usage.completion_tokens);
            // A history that shrank, or a turn taken out of the batch half-way (the engine then
            // commits its partial answer too): what the engine would append to isn't known.
            let doubtful = usage.retractions > 0 || usage.prompt_tokens < session.history_tokens;
            if pinned && doubtful && session.phase == Phase::Open {
                session.phase = Phase::Suspect;
            }
            session.history_tokens = total;
            // The KV of an answer's last token is computed only with the next turn.
            session.resident_tokens = total.saturating_sub(1);
        }
        // The engine rolls the history back and gives the KV to its tree.
        Outcome::Aborted if pinned => session.resident_tokens = 0,
        Outcome::Aborted => {}
        Outcome::Lost if pinned => {
            if session.phase == Phase::Open {
                session.phase = Phase::Suspect;
            }
        }
        Outcome::Lost => {}
    }
}
