//! Names the rules that keep sessions from blocking the engine, leaking its KV or corrupting it.
//!
//! A simulation switches off one guard at a time, and its checks must then fail: this proves that
//! the checks test every guard. Only builds with the feature `guard-switch` can switch one off, and
//! no released binary has this feature.
//!
//! An *exclusive* session runs one turn at a time. A *plain* turn runs without a pinned session. To
//! *demote* a session is to free its KV but keep it open, to *reclaim* it is to demote or close it
//! because others need its room. A *suspect* session may have another history than the agent knows.

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Guard {
    /// A second turn of an exclusive session stays outside the engine.
    OneTurn,
    /// A turn counts as inside the engine until the engine has acknowledged the turn's end.
    EndAcknowledged,
    /// Pinned sessions leave the reserved rows free.
    RowsReserve,
    /// The tokens that pinned sessions hold or have reserved stay within the pin budget.
    PinBudget,
    /// The tokens by which a turn may grow its session are reserved before the turn starts.
    GrowthReserved,
    /// The next turn of a session whose KV is gone reserves room for the whole history.
    HistoryReserved,
    /// A plain turn that needs room held by pinned sessions waits outside the engine.
    LargeTurnWaits,
    /// A closed incarnation's rows and tokens stay counted until the engine confirms the close.
    CountedUntilClosed,
    /// A close is repeated until the engine confirms it.
    CloseRepeated,
    /// A turn whose end the agent did not see is aborted before its session is closed.
    AbortBeforeClose,
    /// Each incarnation has an id that was never used before.
    FreshIncarnation,
    /// If the answer to an open is lost, the incarnation is closed: it may have been opened.
    UnknownOpenClosed,
    /// A session that was opened for a turn is closed if that turn is refused.
    UnusedClosed,
    /// Nothing is appended after a turn with an unseen end until the history is verified.
    LostEndSuspect,
    /// Nothing is appended after an answer that its client did not receive.
    UnheardSuspect,
    /// Nothing is appended after a retracted turn (the engine put it back into its queue) until the
    /// history is verified.
    RetractionSuspect,
    /// A doubt, or a demotion, is settled only by the shim's answer to the request about it.
    AnswerMatched,
    /// Few requests are with a shim at a time.
    RequestsPaced,
    /// A foreign session is forgotten only if a complete session table lacks it.
    TableComplete,
    /// A history is uncertain if the engine counts another prompt than history plus turn.
    HistoryChecked,
    /// A session becomes suspect after a full history for which the shim reported no plan.
    PlanReported,
    /// A session takes no delta if its history may lack turns that its client knows.
    ClientAheadRefused,
    /// Only a delta that doesn't open the session is appended to an existing history.
    DeltaOnly,
    /// After a delta, a session takes a full history only if it continues the session's history.
    FullHistoryContinues,
    /// A session takes deltas only if a client opened it, and no full history replaced its own.
    DeltaNeedsOpen,
    /// A session that was lost when the engine restarted takes no delta.
    LostRefused,
    /// Idle sessions are closed when their idle limit has passed.
    Expiry,
    /// Only idle sessions are reclaimed, or demoted because somebody asks.
    ReclaimIdleOnly,
    /// Foreign sessions (those that the agent did not open) count as pinned.
    ForeignCounted,
    /// The journal has an incarnation before its open, and a tag before its first turn.
    JournalFirst,
    /// Incarnations and tags that an earlier agent process left open are closed.
    TakeoverCloses,
    /// A pinned session that was handed over takes no turn before the shim confirms its history.
    HandoverVerified,
    /// A turn runs on the rank that holds its session's KV.
    RankOfSession,
    /// The queue has a maximum length.
    QueueBound,
    /// A turn waits in the queue for a limited time only.
    QueueTime,
    /// Pinned sessions leave a part of the rows to plain turns.
    PinRowsRatio,
    /// A plain turn that finds no row takes one from a pinned session that may give way.
    PlainTakesRows,
    /// A principal that holds more pinned rows or tokens gives way to one that holds less.
    PinShare,
    /// A principal has a limited number of sessions.
    SessionShare,
    /// A principal has a limited number of turns inside the engine while another is active.
    TurnShare,
    /// Waiting turns of the principal with the fewest turns inside the engine come first.
    FairOrder,
    /// In a full queue, the principal with the most waiting turns makes room for others.
    QueueShare,
    /// A client can't ask for a longer idle limit than the operator allows.
    IdleCapped,
    /// No turn of a pinned session continues KV that the engine computed with older weights.
    WeightsFence,
    /// No delta continues KV of another adapter, cache salt or extra key, and no turn KV of an
    /// adapter that was loaded or unloaded since.
    KvIdentity,
}

impl Guard {
    pub const ALL: [Self; 45] = [
        Self::OneTurn,
        Self::EndAcknowledged,
        Self::RowsReserve,
        Self::PinBudget,
        Self::GrowthReserved,
        Self::HistoryReserved,
        Self::LargeTurnWaits,
        Self::CountedUntilClosed,
        Self::CloseRepeated,
        Self::AbortBeforeClose,
        Self::FreshIncarnation,
        Self::UnknownOpenClosed,
        Self::UnusedClosed,
        Self::LostEndSuspect,
        Self::UnheardSuspect,
        Self::RetractionSuspect,
        Self::AnswerMatched,
        Self::RequestsPaced,
        Self::TableComplete,
        Self::HistoryChecked,
        Self::PlanReported,
        Self::ClientAheadRefused,
        Self::DeltaOnly,
        Self::FullHistoryContinues,
        Self::DeltaNeedsOpen,
        Self::LostRefused,
        Self::Expiry,
        Self::ReclaimIdleOnly,
        Self::ForeignCounted,
        Self::JournalFirst,
        Self::TakeoverCloses,
        Self::HandoverVerified,
        Self::RankOfSession,
        Self::QueueBound,
        Self::QueueTime,
        Self::PinRowsRatio,
        Self::PlainTakesRows,
        Self::PinShare,
        Self::SessionShare,
        Self::TurnShare,
        Self::FairOrder,
        Self::QueueShare,
        Self::IdleCapped,
        Self::WeightsFence,
        Self::KvIdentity,
    ];
}

#[derive(Debug, Clone, Copy, Default)]
pub struct Guards {
    #[cfg(feature = "guard-switch")]
    switched_off: Option<Guard>,
}

impl Guards {
    #[cfg(feature = "guard-switch")]
    #[must_use]
    pub fn without(guard: Guard) -> Self {
        Self { switched_off: Some(guard) }
    }

    #[must_use]
    pub fn is_on(self, guard: Guard) -> bool {
        #[cfg(feature = "guard-switch")]
        return self.switched_off != Some(guard);
        #[cfg(not(feature = "guard-switch"))]
        {
            let _ = guard;
            true
        }
    }
}
