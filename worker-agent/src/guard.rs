//! The guards: named rules that keep sessions from wedging, leaking or corrupting the engine.
//!
//! The simulation switches off one guard at a time and must notice. Only builds with the feature
//! `guard-switch` can switch guards off, and no released binary has it. In all other builds
//! [`Guards::hold`] returns `true`.

/// A rule that keeps one of Berth's promises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Guard {
    /// A second turn of an exclusive session stays outside the engine.
    OneTurn,
    /// A turn counts as inside until the engine has acknowledged its end.
    EndAcknowledged,
    /// Pinned sessions leave the reserved rows free.
    RowsReserve,
    /// The tokens that pinned sessions hold or have reserved stay within the pin budget.
    PinBudget,
    /// The tokens by which a turn may grow are reserved before it starts.
    GrowthReserved,
    /// If a session's KV is gone (demoted, aborted), its next turn reserves room for the whole
    /// history.
    HistoryReserved,
    /// A plain turn that needs room held by pinned sessions waits outside the engine.
    LargeTurnWaits,
    /// The rows and tokens of a closed incarnation stay counted until the engine confirms the
    /// close.
    CountedUntilClosed,
    /// A close is repeated until the engine confirms it.
    CloseRepeated,
    /// A turn whose end the agent did not see is aborted before its session is closed.
    AbortBeforeClose,
    /// Each incarnation has an id that was never used before.
    FreshIncarnation,
    /// If the answer to an open is lost, the incarnation is closed, because it may have been
    /// opened.
    UnknownOpenClosed,
    /// A session that was opened for a turn is closed if that turn is refused.
    UnusedClosed,
    /// Nothing is appended after a turn whose end the agent did not see, until the history is
    /// verified.
    LostEndSuspect,
    /// Nothing is appended after an answer that its client did not receive.
    UnheardSuspect,
    /// Nothing is appended after a retracted turn (taken out of the batch) until the history is
    /// verified.
    RetractionSuspect,
    /// A session's history becomes uncertain if the engine's prompt isn't that history plus what
    /// was sent.
    HistoryChecked,
    /// A session becomes suspect after a full history for which the shim reported no plan.
    PlanReported,
    /// A session whose history may lack turns that its client knows takes no delta.
    ClientAheadRefused,
    /// Neither a full history nor a delta that opens the session is appended to an existing
    /// history.
    DeltaOnly,
    /// A session that has taken a delta runs a full history only if it continues the session's own.
    FullHistoryContinues,
    /// A session takes deltas only if a client opened it and no full history replaced its own.
    DeltaNeedsOpen,
    /// A session that was lost with its engine takes no delta.
    LostRefused,
    /// Idle sessions are closed when their idle limit has passed.
    Expiry,
    /// Only idle sessions are reclaimed.
    ReclaimIdleOnly,
    /// Foreign sessions inside the engine are counted as pinned.
    ForeignCounted,
    /// An incarnation is written to the journal before the engine is asked to open it.
    JournalFirst,
    /// Incarnations that an earlier agent process left open are closed.
    TakeoverCloses,
    /// A turn runs on the rank that holds its session's KV.
    RankOfSession,
    /// The queue has a maximum length.
    QueueBound,
    /// A turn waits in the queue for a limited time only.
    QueueTime,
}

impl Guard {
    /// All guards.
    pub const ALL: [Self; 31] = [
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
        Self::RankOfSession,
        Self::QueueBound,
        Self::QueueTime,
    ];
}

/// The guards that are switched on: all, except one that a test may switch off.
#[derive(Debug, Clone, Copy, Default)]
pub struct Guards {
    #[cfg(feature = "guard-switch")]
    off: Option<Guard>,
}

impl Guards {
    /// Returns all guards except one.
    #[cfg(feature = "guard-switch")]
    #[must_use]
    pub fn without(guard: Guard) -> Self {
        Self { off: Some(guard) }
    }

    /// Returns whether a guard is switched on.
    #[must_use]
    pub fn hold(self, guard: Guard) -> bool {
        #[cfg(feature = "guard-switch")]
        return self.off != Some(guard);
        #[cfg(not(feature = "guard-switch"))]
        {
            let _ = guard;
            true
        }
    }
}
