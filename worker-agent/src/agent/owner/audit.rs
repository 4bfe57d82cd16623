//! The owner's dealings with page audits: asks the shims when it is time or when someone wants to
//! know, and acts on what they find.

use std::time::Instant;

use tokio::sync::oneshot;
use tracing::{error, warn};

use super::{Owner, now};
use crate::{
    agent::RankPages,
    audit::{Audit, Error},
    shim::Audited,
};

/// Who may wait for audits at once.
const WAITERS_MAX: usize = 64;

/// Someone who wants to know now.
pub(super) struct Waiter {
    dp_rank: u32,
    number: u64,
    reply: oneshot::Sender<Result<RankPages, Error>>,
}

impl Owner {
    pub(super) fn audit(&mut self, dp_rank: u32, reply: oneshot::Sender<Result<RankPages, Error>>) {
        if self.audit_waiters.len() >= WAITERS_MAX {
            return drop(reply.send(Err(Error::Busy)));
        }
        match self.audits.ask(now(), dp_rank) {
            Ok(number) => {
                self.audit_waiters.push(Waiter { dp_rank, number, reply });
                self.ask_for_audit(dp_rank, number);
            }
            Err(error) => drop(reply.send(Err(error))),
        }
    }

    pub(super) fn audit_on_time(&mut self, now: Instant) {
        for (dp_rank, number) in self.audits.late(now) {
            warn!(dp_rank, error = %Error::Late, "no audit of the engine's pages");
            self.setup.metrics.audited("late");
            self.answer_waiters(dp_rank, number, &Err(Error::Late));
        }
        for (dp_rank, number) in self.audits.due(now) {
            self.ask_for_audit(dp_rank, number);
        }
    }

    /// A shim that can't be asked says so by going, or is late.
    fn ask_for_audit(&self, dp_rank: u32, number: u64) {
        let _ = self.setup.shim.audit(dp_rank, number);
    }

    pub(super) fn audit_down(&mut self, dp_rank: u32) {
        self.audits.down(dp_rank);
        self.setup.metrics.pages(dp_rank, None);
        self.answer_waiters(dp_rank, u64::MAX, &Err(Error::NoShim(dp_rank)));
    }

    pub(super) fn audited(&mut self, dp_rank: u32, audited: &Audited) {
        let before = self.audits.last(dp_rank).map(|audit| audit.pages.findings.clone());
        let answer = self.audits.answered(now(), dp_rank, audited).cloned();
        match &answer {
            Ok(audit) => {
                self.setup.metrics.audited("done");
                self.setup.metrics.audit_step(audited.spent);
                self.setup.metrics.pages(dp_rank, Some(&audit.pages));
                if before.as_ref() != Some(&audit.pages.findings) {
                    complain(dp_rank, audit);
                }
                for incarnation in audit.corrupt_sessions() {
                    self.table.corrupt(now(), incarnation);
                }
            }
            Err(error) => {
                warn!(dp_rank, %error, "no audit of the engine's pages");
                self.setup.metrics.audited("refused");
            }
        }
        self.answer_waiters(dp_rank, audited.number, &answer);
    }

    /// Answers all who asked for it no later than with this number.
    fn answer_waiters(&mut self, dp_rank: u32, number: u64, answer: &Result<Audit, Error>) {
        let waiting = std::mem::take(&mut self.audit_waiters);
        let (mine, others) = waiting
            .into_iter()
            .partition(|waiter| waiter.dp_rank == dp_rank && waiter.number <= number);
        self.audit_waiters = others;
        for waiter in mine {
            let _ = waiter.reply.send(answer.clone().map(|audit| self.named(&audit)));
        }
    }

    fn named(&self, audit: &Audit) -> RankPages {
        let sessions = audit.sessions.iter();
        let key = |incarnation: &str| self.table.key_of(incarnation).cloned();
        RankPages {
            pages: audit.pages(now()),
            sessions: sessions.map(|one| (key(&one.incarnation), one.clone())).collect(),
        }
    }
}

/// One line per kind of fault, whenever they change.
fn complain(dp_rank: u32, audit: &Audit) {
    for finding in &audit.pages.findings {
        let at: Vec<i64> = finding.named.iter().map(|one| one.at).collect();
        let (kind, count) = (&finding.kind, finding.count);
        error!(dp_rank, kind, count, ?at, "the engine's pages are not as they should be");
    }
}
