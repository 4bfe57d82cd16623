//! Holds one session: its state, its turns, its history, and what is known of its clients.
//!
//! A session is a conversation of ordered turns. Its life at the engine is in `super::lifecycle`.
//! The session table (`super::table`) changes sessions, and counts what they hold. This module does
//! no I/O and reads no clock.

use std::time::{Duration, Instant};

use proto::{
    count,
    id::Digest,
    load::{Retention, SessionState, VolatilePrefix},
};
use serde::{Deserialize, Serialize};

use super::{
    KvIdentity, PrefixTracker, Usage,
    deltas::Deltas,
    lifecycle::{GoneReason, Kv, State},
};

/// One session: its state, its figures, and what the agent knows of its client's prompts.
///
/// Its many fields: one for each concern of the table's modules.
#[derive(Debug, Clone)]
pub struct Session {
    /// The rank that holds the session's KV.
    pub dp_rank: u32,
    /// Id of the session's present incarnation inside the engine.
    pub incarnation: String,
    /// A number that tells this session from earlier sessions with the same key.
    pub(super) generation: u64,
    pub(super) state: State,
    /// The weights epoch in which the session's KV began.
    pub(super) kv_epoch: u64,
    /// Who chooses the session's retention.
    pub(super) chooser: Chooser,
    pub(super) sharing: Sharing,
    pub(super) turns: TurnCounts,
    /// The history that the engine has committed.
    pub(super) history: EngineHistory,
    /// What the agent knows of the turns that the session's clients send.
    pub(super) client: ClientHistory,
    /// Compares the beginnings of the session's prompts from turn to turn.
    pub(super) prefix_tracker: PrefixTracker,
    pub(super) idle_max: Duration,
    /// The session that started this one, by the newest turn that names one.
    pub(super) parent: Option<Digest>,
}

/// Who chooses how the engine keeps a session's KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Chooser {
    /// The client asked for a retention.
    Client,
    /// The client asked for none. The agent may pin and unpin the session.
    Agent,
}

/// Whether turns of a session run at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Sharing {
    /// Turns may run at the same time.
    Shared,
    /// A client opened the session while its turns ran at the same time. It becomes exclusive when
    /// a turn claims it while no other turn of it runs or waits.
    ExclusiveAtRest,
    /// One turn runs at a time.
    Exclusive,
}

/// Counts of a session's turns.
#[derive(Debug, Clone)]
pub(super) struct TurnCounts {
    /// The number of finished turns.
    pub(super) finished: u64,
    /// The number of turns inside the engine.
    pub(super) running: u32,
    /// The number of turns that have claimed the session and are not inside the engine yet.
    pub(super) waiting: u32,
    /// When the session began. For a session of an earlier agent process: when its last turn ended,
    /// because the handover doesn't say more.
    pub(super) began: Instant,
    /// When the last turn ended, or the session began.
    pub(super) last_end: Instant,
    /// Whether the engine answered the newest turn of the pinned session as one that it refused.
    pub(super) was_last_refused: bool,
    /// Whether the session was created by a turn, but no turn has reached the engine and no client
    /// has opened the session.
    pub(super) is_unused: bool,
    /// Whether a turn ran beside the pinned session because another turn of its conversation was
    /// inside.
    pub(super) has_forked: bool,
    /// The number of turns of other conversations since the last one of the session's.
    pub(super) asides_in_a_row: u32,
}

/// The history of a session that the engine has committed: prompts and answers of finished turns.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct EngineHistory {
    pub(super) tokens: u64,
    /// Which KV the session has, if it is pinned; `None` if that isn't known, or before its first
    /// turn.
    pub(super) kv: Option<KvIdentity>,
    /// Whether the adapter of that KV was loaded or unloaded while a turn of the session ran.
    pub(super) is_adapter_gone: bool,
    /// Whether an audit found the KV corrupt while a turn of the session ran.
    pub(super) is_corrupt: bool,
}

/// What the agent knows of the turns that a session's clients send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ClientHistory {
    /// Whether the session takes delta turns.
    pub(super) deltas: Deltas,
    /// Whether the newest turn held a full history. If so, the client loses nothing when the engine
    /// loses its history.
    pub(super) sends_full: bool,
    /// Whether the client's history may have turns that the engine's history lacks, because a turn
    /// ran outside the session's KV, or a new incarnation has not had its first turn. If so, the
    /// session refuses deltas.
    pub(super) may_be_ahead: bool,
    /// The size of the latest full history whose tokens the engine or the shim has counted.
    pub(super) last_measured: Option<MeasuredHistory>,
    /// Tokens of the longest answer so far.
    #[serde(deserialize_with = "count::read")]
    pub(super) longest_answer_tokens: u64,
    /// The divergence streak: how many full histories in a row did not continue the engine's
    /// history.
    pub(super) divergence_streak: u32,
    /// Token index in the history where the newest answer begins, if its turn ignored the end of
    /// its answer (`ignore_eos`). Such an answer may hold end tokens that its text doesn't show.
    /// The next full history then differs from the engine's after this index, although the client
    /// has changed nothing.
    pub(super) hidden_end_tokens_from: Option<u64>,
}

/// The size of one full history, as a bound and as a count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MeasuredHistory {
    /// The upper bound on the prompt's tokens that was taken from the turn's body.
    #[serde(deserialize_with = "count::read")]
    pub(super) prompt_tokens_bound: u64,
    /// The counted tokens, with the answer if the turn ran.
    #[serde(deserialize_with = "count::read")]
    pub(super) tokens: u64,
}

impl Sharing {
    /// Takes note of a turn or an open request. `is_opened`: a client opens the session with it.
    /// `is_at_rest`: no other turn runs or waits.
    pub(super) fn update(&mut self, is_opened: bool, is_at_rest: bool) {
        if is_opened && *self == Self::Shared {
            *self = Self::ExclusiveAtRest;
        }
        if is_at_rest && *self == Self::ExclusiveAtRest {
            *self = Self::Exclusive;
        }
    }
}

impl ClientHistory {
    pub(super) fn new(deltas: Deltas) -> Self {
        Self {
            deltas,
            sends_full: false,
            may_be_ahead: false,
            last_measured: None,
            longest_answer_tokens: 0,
            divergence_streak: 0,
            hidden_end_tokens_from: None,
        }
    }

    /// Counts one more full history that did not continue the engine's history.
    pub(super) fn extend_divergence_streak(&mut self) {
        // The count may be that of an earlier agent process.
        self.divergence_streak = self.divergence_streak.saturating_add(1);
    }
}

impl TurnCounts {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            finished: 0,
            running: 0,
            waiting: 0,
            began: now,
            last_end: now,
            was_last_refused: false,
            is_unused: false,
            has_forked: false,
            asides_in_a_row: 0,
        }
    }

    /// Returns the number of turns that run or wait.
    pub(super) fn in_progress(&self) -> u32 {
        self.running + self.waiting
    }
}

impl Session {
    /// Returns how the engine keeps the session's KV.
    #[must_use]
    pub fn retention(&self) -> Retention {
        match self.state.tree() {
            None => Retention::Pinned,
            Some(tree) if tree.is_tagged => Retention::Tagged,
            Some(_) => Retention::None,
        }
    }

    /// Whether the session runs one turn at a time.
    #[must_use]
    pub fn is_exclusive(&self) -> bool {
        self.sharing == Sharing::Exclusive
    }

    /// Returns the number of finished turns.
    #[must_use]
    pub fn turns_finished(&self) -> u64 {
        self.turns.finished
    }

    /// Returns the session that started this one, as far as a turn has named it.
    #[must_use]
    pub fn parent(&self) -> Option<Digest> {
        self.parent
    }

    /// Returns when the session began.
    #[must_use]
    pub fn began(&self) -> Instant {
        self.turns.began
    }

    /// Whether a turn runs, or has claimed the session and waits.
    #[must_use]
    pub fn has_turns(&self) -> bool {
        self.turns.in_progress() > 0
    }

    /// Whether the session's KV and history are gone, so that a client that opens it begins anew.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.state.is_gone()
    }

    /// Returns the number of turns inside the engine.
    #[must_use]
    pub fn turns_running(&self) -> u32 {
        self.turns.running
    }

    /// Returns the tokens of the history that the engine has committed.
    #[must_use]
    pub fn history_tokens(&self) -> u64 {
        self.history.tokens
    }

    /// Returns the KV tokens that a pinned session holds. For any other session, estimates the KV
    /// tokens that it still has in the radix tree.
    #[must_use]
    pub fn resident_tokens(&self) -> u64 {
        let tree_tokens = self.state.tree().map_or(0, |tree| tree.resident_tokens);
        self.state.row().map_or(tree_tokens, |row| row.resident_tokens)
    }

    /// Whether the session can continue at any engine, because its clients send their full history
    /// with each turn. After a delta that is impossible: only the session's engine has its history.
    #[must_use]
    pub fn sends_full_histories(&self) -> bool {
        self.client.sends_full && self.client.deltas != Deltas::Taken
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
        match &self.state {
            State::Planned | State::Opening(_) => SessionState::Opening,
            State::Closing(_) => SessionState::Closing,
            State::Gone {
                reason: GoneReason::EngineRestarted | GoneReason::NotTakenOver, ..
            } => SessionState::Lost,
            _ if self.turns.running > 0 => SessionState::Running,
            State::Demoted => SessionState::Demoted,
            // The client learns with its next turn if the session can't continue.
            State::Open(_)
            | State::InTree(_)
            | State::Demoting { .. }
            | State::Suspect { .. }
            | State::Gone { .. } => SessionState::Idle,
        }
    }

    /// Returns the time since the end of the last turn; zero while a turn runs.
    #[must_use]
    pub fn idle(&self, now: Instant) -> Duration {
        if self.turns.running > 0 {
            Duration::ZERO
        } else {
            now.saturating_duration_since(self.turns.last_end)
        }
    }

    pub(super) fn is_pinned(&self) -> bool {
        self.state.tree().is_none()
    }

    /// Whether the agent chooses the session's retention, because the client asked for none.
    pub(super) fn has_auto_retention(&self) -> bool {
        self.chooser == Chooser::Agent
    }

    pub(super) fn is_pinned_by_agent(&self) -> bool {
        self.is_pinned() && self.has_auto_retention()
    }

    /// Whether the session's idle time counts towards its idle limit.
    pub(super) fn can_expire(&self) -> bool {
        let is_at_rest = matches!(
            self.state,
            State::Open(_) | State::InTree(_) | State::Demoted | State::Gone { .. }
        );
        self.turns.in_progress() == 0 && is_at_rest
    }

    /// Returns when the session expires if no turn comes before.
    pub(super) fn expires_at(&self) -> Instant {
        self.turns.last_end + self.idle_max
    }

    /// Whether the session is open at the engine although every turn that it was opened for was
    /// refused or given up.
    pub(super) fn is_open_for_nothing(&self) -> bool {
        self.turns.is_unused && self.state.is_open() && self.turns.waiting == 0
    }

    /// Takes from the session all that it had at the engine. A closing session stays closing. Any
    /// other is gone for `reason`.
    pub(super) fn lose(&mut self, reason: GoneReason) {
        self.history = EngineHistory::default();
        self.state.lose(reason);
    }

    /// Whether a turn with this identity continues the session's KV. It does if there is none yet.
    pub(super) fn has_kv_of(&self, turn: KvIdentity) -> bool {
        self.history.tokens == 0 || self.history.kv.is_some_and(|own| own.matches(turn))
    }

    /// Whether it is certain that a turn with this identity doesn't continue the session's KV.
    pub(super) fn has_other_kv(&self, turn: KvIdentity) -> bool {
        let is_certain = turn.is_known() && self.history.kv.is_some();
        is_certain && !self.has_kv_of(turn)
    }

    /// Notes which KV the session has from now on: that of a turn that begins its history, or that
    /// the shim found to continue it.
    pub(super) fn record_kv(&mut self, turn: KvIdentity) {
        self.history.kv = Some(turn).filter(|turn| turn.is_known()).or(self.history.kv);
    }

    /// Begins the session anew in `state`, without a history.
    pub(super) fn begin_anew(&mut self, state: State) {
        self.history = EngineHistory::default();
        self.state = state;
    }

    /// Records the size of the history after a finished turn.
    pub(super) fn record_usage(&mut self, usage: Usage) {
        let tokens = usage.prompt_tokens.saturating_add(usage.completion_tokens);
        self.history.tokens = tokens;
        // The engine computes the KV of an answer's last token only in the following turn.
        let resident = tokens.saturating_sub(1);
        match &mut self.state {
            State::InTree(tree) | State::Closing(Kv::Tree(tree)) => tree.resident_tokens = resident,
            state => {
                if let Some(row) = state.row_mut() {
                    row.resident_tokens = resident;
                }
            }
        }
    }
}
