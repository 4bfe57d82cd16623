//! What the shim makes of a full history, and what becomes of the turn.

/// What the shim makes of a marked turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plan {
    /// It goes on from what the session has, id for id.
    Trimmed,
    /// It goes on from it as text, with other ids.
    Healed,
    /// It is another history.
    Diverged,
    /// It can't run in the session.
    Refused,
}

/// A plan, with its figures in tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Planned {
    /// The turn.
    pub rid: String,
    /// The engine-side id that it was made for.
    pub incarnation: String,
    /// What it is.
    pub plan: Plan,
    /// Up to here the prompt is the session's.
    pub at: u64,
    /// What the session has.
    pub committed: u64,
    /// What is appended to it.
    pub sent: u64,
    /// The whole prompt.
    pub prompt: u64,
}

/// What became of a marked turn, once of each whose plan was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Became {
    /// It went on from what its session has, id for id.
    Trimmed,
    /// It went on from it as text, with other ids.
    Healed,
    /// It began a new incarnation: what its session had was another history, or is lost.
    Reopened,
    /// It ran beside its session, being another history.
    Diverged,
    /// It ran beside its session, where it couldn't run.
    Refused,
    /// The shim refused it, because it doesn't continue a session that takes deltas.
    NotContinued,
    /// Its session is closed or lost meanwhile, or its client has left: how it ran isn't known.
    Gone,
}

impl Became {
    /// The name used in metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Trimmed => "trimmed",
            Self::Healed => "healed",
            Self::Reopened => "reopened",
            Self::Diverged => "diverged",
            Self::Refused => "refused",
            Self::NotContinued => "not_continued",
            Self::Gone => "gone",
        }
    }
}
