//! Makes what the unit tests of the single owners need: sessions in some state, and steps.

use super::*;

/// A table with one rank of the engine, of which a test asks one owner.
pub(crate) struct Owners {
    pub(crate) table: Table,
    pub(crate) now: Instant,
}

impl Owners {
    pub(crate) fn new() -> Self {
        Self::with(|_| ())
    }

    pub(crate) fn with(change: impl FnOnce(&mut TableSettings)) -> Self {
        let mut settings = settings();
        change(&mut settings);
        Self { table: Table::new(settings, engine(1)), now: service::clock::now() }
    }

    /// Checks all invariants afterwards.
    pub(crate) fn step<T>(&mut self, act: impl FnOnce(&mut Queue, &mut Step) -> T) -> T {
        self.table.step(self.now, act)
    }

    pub(crate) fn sessions(&self) -> &Sessions {
        self.table.sessions()
    }

    pub(crate) fn pins(&self) -> &Pins {
        self.table.queue.pins()
    }

    /// Adds a session that a client pinned, or one of which the agent chooses the retention.
    pub(crate) fn insert(&mut self, id: &str, state: State, history_tokens: u64) {
        let is_pinned = state.tree().is_none();
        let last_end = self.now;
        let make = |incarnation, generation| Session {
            dp_rank: 0,
            incarnation,
            generation,
            state,
            kv_epoch: 0,
            chooser: if is_pinned { Chooser::Client } else { Chooser::Agent },
            sharing: if is_pinned { Sharing::Exclusive } else { Sharing::Shared },
            turns: TurnCounts::new(last_end),
            history: EngineHistory { tokens: history_tokens, ..EngineHistory::default() },
            client: ClientHistory::new(Deltas::Refused),
            prefix_tracker: PrefixTracker::default(),
            idle_max: IDLE,
            parent: None,
        };
        self.step(|queue, step| queue.histories.pins.sessions.insert(step, &key(id), make));
        drop(self.table.take_effects());
    }

    pub(crate) fn insert_open(&mut self, id: &str, tokens: u64) {
        let row = Row { resident_tokens: tokens, ..Row::default() };
        self.insert(id, State::Open(row), tokens);
    }
}
