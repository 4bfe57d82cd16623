//! The guards: every rule without which a session could wedge, leak or corrupt the engine, by name.
//! The simulation switches each one off in turn and must notice. Only builds with the feature
//! `guard-switch`, which no binary has, contain a switch; elsewhere [`Guards::hold`] is `true`.

/// A rule that keeps one of the promises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Guard {
    /// A second turn of an exclusive session stays outside the engine.
    OneTurn,
    /// A turn counts as inside until the engine has said its last word on it.
    EndAcknowledged,
    /// Pinned sessions never take the last rows.
    RowsReserve,
    /// What pinned sessions hold, and may come to hold, stays within the pin budget.
    PinBudget,
    /// A turn's growth is reserved before it starts.
    GrowthReserved,
    /// A turn that loses its KV (demoted, aborted) reserves its whole history again.
    HistoryReserved,
    /// A plain turn that needs room that pinned sessions hold waits outside the engine.
    LargeTurnWaits,
    /// Rows and tokens stay counted until the engine has confirmed the close.
    CountedUntilClosed,
    /// A close is repeated until it is confirmed.
    CloseRepeated,
    /// A turn whose end nobody saw is aborted before its session is closed.
    AbortBeforeClose,
    /// Every incarnation has an id of its own.
    FreshIncarnation,
    /// An open whose answer was lost is closed: it may have been a yes.
    UnknownOpenClosed,
    /// A session that was opened for a turn which then was refused is closed.
    UnusedClosed,
    /// After a turn whose end nobody saw, nothing is appended.
    LostEndSuspect,
    /// After an answer that its client never got, nothing is appended.
    UnheardSuspect,
    /// After a turn that was taken out of the batch, nothing is appended unverified.
    RetractionSuspect,
    /// A prompt that isn't history plus what was sent ends the session.
    HistoryChecked,
    /// A whole history that nobody told the place of leaves doubt.
    PlanTold,
    /// A session that hasn't what its client takes for its history takes no delta.
    BehindRefused,
    /// A whole history is never appended to a history, nor a turn that means to be the first.
    DeltaOnly,
    /// A session that has taken a delta goes on with a full history only if that continues its own.
    FullHistoryContinues,
    /// A session takes deltas only if a client opened it and no full history replaced its own.
    DeltaNeedsOpen,
    /// A session that went with its engine takes no delta.
    LostRefused,
    /// Idle sessions close when their time is up.
    Expiry,
    /// Reclaiming takes idle sessions only.
    ReclaimIdleOnly,
    /// Sessions of others inside the engine are counted as pinned.
    ForeignCounted,
    /// An incarnation is journalled before the engine hears of it.
    JournalFirst,
    /// What an earlier agent left is closed.
    TakeoverCloses,
    /// A turn runs on the rank that holds its session's KV.
    RankOfSession,
    /// The queue is bounded.
    QueueBound,
    /// A turn waits in the queue for a bounded time.
    QueueTime,
}

impl Guard {
    /// All of them.
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
        Self::PlanTold,
        Self::BehindRefused,
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

/// Which guards hold: all of them, except where a test switched one off.
#[derive(Debug, Clone, Copy, Default)]
pub struct Guards {
    #[cfg(feature = "guard-switch")]
    off: Option<Guard>,
}

impl Guards {
    /// All but one.
    #[cfg(feature = "guard-switch")]
    #[must_use]
    pub fn without(guard: Guard) -> Self {
        Self { off: Some(guard) }
    }

    /// Does this guard hold?
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
