//! Describes one ticket: a turn between its claim and its end, or a request that waits for an open.

use std::{sync::Arc, time::Instant};

use contract::{claim::Claim, id::SessionKey};

use crate::session::table::{
    Need, PromptStart, RouteTurns, RunMode, Session, Sessions, histories::asides,
};

#[derive(Debug)]
pub(super) struct Ticket {
    pub(super) dp_rank: u32,
    pub(super) principal: Arc<str>,
    /// `None` for a turn without a session.
    pub(super) session: Option<ClaimedSession>,
    /// When the ticket entered its present stage.
    pub(super) since: Instant,
    pub(super) stage: Stage,
}

#[derive(Debug)]
pub(super) struct ClaimedSession {
    pub(super) key: SessionKey,
    /// Differs from the `Session::generation` of a later session with the same key.
    pub(super) generation: u64,
    pub(super) claim: Claim,
    pub(super) route_turns: RouteTurns,
    /// Among all claims. Turns are admitted in this order, however long their bodies take to
    /// arrive.
    pub(super) order: u64,
    /// The order of the session's newest turn that its client gave up before it sent this one. It
    /// counts on no turn up to that. 0: none.
    pub(super) abandoned_up_to: u64,
    /// Whether this is a delta whose earlier turn did not become history.
    pub(super) is_orphaned: bool,
}

#[derive(Debug)]
pub(super) enum Stage {
    /// A client, not a turn, waits until its session is open.
    AwaitsOpen,
    /// The body of the session's turn is being read. The start is empty until it is known.
    Claimed(PromptStart),
    /// The turn waits for room.
    Queued { need: Need, prompt_start: PromptStart },
    /// The turn is inside the engine.
    Inside(Inside),
}

#[derive(Debug)]
pub(super) struct Inside {
    pub(super) need: Need,
    pub(super) tag: Option<String>,
    /// When the client disconnected, if the turn's end at the engine is still awaited.
    pub(super) abandoned_since: Option<Instant>,
    /// Counts the turn's load. Its part in the session's history is in `RunningTurn::pinned`.
    pub(super) run: Run,
}

#[derive(Debug)]
pub(super) enum Run {
    /// On the radix tree. `large_tokens`: what the turn may need, if it is large.
    Plain { large_tokens: Option<u64> },
    /// In its pinned session.
    Pinned,
}

impl Ticket {
    pub(super) fn key(&self) -> Option<&SessionKey> {
        self.session.as_ref().map(|session| &session.key)
    }

    /// Returns `None` if the session that the ticket has claimed is gone, or another has its key.
    pub(super) fn claimed_key(&self, sessions: &Sessions) -> Option<SessionKey> {
        let session = sessions.get(self.key()?)?;
        self.is_of(session.generation).then(|| self.key().cloned())?
    }

    pub(super) fn is_of(&self, generation: u64) -> bool {
        self.session.as_ref().is_some_and(|session| session.generation == generation)
    }

    /// Whether the ticket is a turn that has claimed its session and is not inside the engine.
    pub(super) fn is_waiting_turn(&self) -> bool {
        matches!(self.stage, Stage::Claimed(_) | Stage::Queued { .. })
    }

    pub(super) fn inside(&self) -> Option<&Inside> {
        match &self.stage {
            Stage::Inside(inside) => Some(inside),
            _ => None,
        }
    }

    /// Whether the turn waits and belongs to another conversation than its session's.
    pub(super) fn is_aside(&self, session: &Session) -> bool {
        let (Stage::Queued { need, prompt_start }, Some(claimed)) = (&self.stage, &self.session)
        else {
            return false;
        };
        asides::is_aside(session, &claimed.claim, *need, prompt_start)
    }

    /// What the turn may need, if it is a large one on the radix tree.
    pub(super) fn large_tokens(&self) -> Option<u64> {
        match self.inside()?.run {
            Run::Plain { large_tokens } => large_tokens,
            Run::Pinned => None,
        }
    }

    /// Returns `None` before the body was read.
    pub(super) fn need(&self) -> Option<Need> {
        match &self.stage {
            Stage::Queued { need, .. } | Stage::Inside(Inside { need, .. }) => Some(*need),
            Stage::AwaitsOpen | Stage::Claimed(_) => None,
        }
    }

    pub(super) fn places(&self) -> u32 {
        self.need().map_or(1, |need| need.places())
    }

    pub(super) fn run_mode(&self, planned: RunMode, shim_trims: bool) -> RunMode {
        let session = self.session.as_ref();
        session.map_or(planned, |session| session.route_turns.run_mode(planned, shim_trims))
    }

    pub(super) fn is_delta(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.claim.delta)
    }

    pub(super) fn opens_session(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.claim.open)
    }

    pub(super) fn closes_session(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.claim.close)
    }
}

impl Inside {
    pub(super) fn runs_pinned(&self) -> bool {
        matches!(self.run, Run::Pinned)
    }
}
