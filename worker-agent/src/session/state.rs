//! Holds one session: its state, its turns, its history, and what is known of its clients.

use std::time::{Duration, Instant};

use contract::{
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

#[derive(Debug, Clone)]
pub struct Session {
    pub dp_rank: u32,
    pub incarnation: String,
    /// Tells this session from earlier ones with the same key.
    pub(super) generation: u64,
    pub(super) state: State,
    /// The weights epoch in which the session's KV began.
    pub(super) kv_epoch: u64,
    pub(super) chooser: Chooser,
    pub(super) sharing: Sharing,
    pub(super) turns: TurnCounts,
    pub(super) history: EngineHistory,
    pub(super) client: ClientHistory,
    pub(super) prefix_tracker: PrefixTracker,
    pub(super) idle_max: Duration,
    /// The session that started this one, by the newest turn that names one.
    pub(super) parent: Option<Digest>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Chooser {
    Client,
    /// The client asked for no retention. The agent may pin and unpin the session.
    Agent,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Sharing {
    Shared,
    /// Opened while its turns ran at the same time. It becomes exclusive when claimed at rest.
    ExclusiveAtRest,
    Exclusive,
}

#[derive(Debug, Clone)]
pub(super) struct TurnCounts {
    pub(super) finished: u64,
    pub(super) running: u32,
    /// Claimed, and not inside the engine yet.
    pub(super) waiting: u32,
    /// For a session that was handed over: when its last turn ended, as the handover says no more.
    pub(super) began: Instant,
    /// When the last turn ended, or the session began.
    pub(super) last_end: Instant,
    /// Whether the engine answered the pinned session's newest turn as one that it refused.
    pub(super) was_last_refused: bool,
    /// Whether a turn made the session, and none has reached the engine and no client opened it.
    pub(super) is_unused: bool,
    /// Whether a turn ran beside the pinned session, as another of its conversation was inside.
    pub(super) has_forked: bool,
    /// Turns of other conversations since the last one of the session's.
    pub(super) asides_in_a_row: u32,
}

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct EngineHistory {
    pub(super) tokens: u64,
    /// Which KV a pinned session has; `None` if that isn't known, or before its first turn.
    pub(super) kv: Option<KvIdentity>,
    /// Whether that KV's adapter was loaded or unloaded while a turn of the session ran.
    pub(super) is_adapter_gone: bool,
    /// Whether an audit found the KV corrupt while a turn of the session ran.
    pub(super) is_corrupt: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ClientHistory {
    pub(super) deltas: Deltas,
    /// Whether the newest turn held a full history: its client loses nothing with the engine's.
    pub(super) sends_full: bool,
    /// Whether the client's history may have turns that the engine's lacks: one ran outside the
    /// session's KV, or a new incarnation has had no turn. Deltas are refused then.
    pub(super) may_be_ahead: bool,
    /// The latest full history whose tokens the engine or the shim has counted.
    pub(super) last_measured: Option<MeasuredHistory>,
    #[serde(deserialize_with = "count::read")]
    pub(super) longest_answer_tokens: u64,
    pub(super) divergence_streak: u32,
    /// Token index where the newest answer begins, if its turn ignored the end of its answer
    /// (`ignore_eos`). It may hold end tokens that its text doesn't show, so the next full history
    /// differs from the engine's after this index although the client has changed nothing.
    pub(super) hidden_end_tokens_from: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MeasuredHistory {
    /// From the turn's body.
    #[serde(deserialize_with = "count::read")]
    pub(super) prompt_tokens_bound: u64,
    /// With the answer if the turn ran.
    #[serde(deserialize_with = "count::read")]
    pub(super) tokens: u64,
}

impl Sharing {
    /// `is_opened`: a client opens the session. `is_at_rest`: no other turn runs or waits.
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

    pub(super) fn in_progress(&self) -> u32 {
        self.running + self.waiting
    }
}

impl Session {
    #[must_use]
    pub fn retention(&self) -> Retention {
        match self.state.tree() {
            None => Retention::Pinned,
            Some(tree) if tree.is_tagged => Retention::Tagged,
            Some(_) => Retention::None,
        }
    }

    #[must_use]
    pub fn is_exclusive(&self) -> bool {
        self.sharing == Sharing::Exclusive
    }

    #[must_use]
    pub fn turns_finished(&self) -> u64 {
        self.turns.finished
    }

    #[must_use]
    pub fn parent(&self) -> Option<Digest> {
        self.parent
    }

    #[must_use]
    pub fn began(&self) -> Instant {
        self.turns.began
    }

    #[must_use]
    pub fn has_turns(&self) -> bool {
        self.turns.in_progress() > 0
    }

    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.state.is_gone()
    }

    #[must_use]
    pub fn turns_running(&self) -> u32 {
        self.turns.running
    }

    #[must_use]
    pub fn history_tokens(&self) -> u64 {
        self.history.tokens
    }

    /// What a pinned session holds; for any other, an estimate of what the radix tree still has.
    #[must_use]
    pub fn resident_tokens(&self) -> u64 {
        let tree_tokens = self.state.tree().map_or(0, |tree| tree.resident_tokens);
        self.state.row().map_or(tree_tokens, |row| row.resident_tokens)
    }

    /// Whether the session can continue at any engine. After a delta, only its own has the history.
    #[must_use]
    pub fn sends_full_histories(&self) -> bool {
        self.client.sends_full && self.client.deltas != Deltas::Taken
    }

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

    /// Zero while a turn runs.
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

    /// Whether the client asked for no retention, so that the agent chooses.
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

    pub(super) fn expires_at(&self) -> Instant {
        self.turns.last_end + self.idle_max
    }

    /// Whether the session is open although each turn that wanted it was refused or given up.
    pub(super) fn is_open_for_nothing(&self) -> bool {
        self.turns.is_unused && self.state.is_open() && self.turns.waiting == 0
    }

    pub(super) fn lose(&mut self, reason: GoneReason) {
        self.history = EngineHistory::default();
        self.state.lose(reason);
    }

    /// Whether a turn with this identity continues the session's KV. It does if there is none yet.
    pub(super) fn has_kv_of(&self, turn: KvIdentity) -> bool {
        self.history.tokens == 0 || self.history.kv.is_some_and(|own| own.matches(turn))
    }

    pub(super) fn has_other_kv(&self, turn: KvIdentity) -> bool {
        let is_certain = turn.is_known() && self.history.kv.is_some();
        is_certain && !self.has_kv_of(turn)
    }

    /// `turn` begins the session's history, or the shim found that it continues it.
    pub(super) fn record_kv(&mut self, turn: KvIdentity) {
        self.history.kv = Some(turn).filter(|turn| turn.is_known()).or(self.history.kv);
    }

    pub(super) fn begin_anew(&mut self, state: State) {
        self.history = EngineHistory::default();
        self.state = state;
    }

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
