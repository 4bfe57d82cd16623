//! Full histories on sessions that take deltas: what such a session has is never replaced unless a
//! client opens the session again.

use proto::id::SessionKey;

use super::{Became, Plan, Planned};
use crate::session::table::{Deltas, Effect, Error, Table, Ticket};

impl Ticket {
    /// The shim has refused it: nothing of it runs.
    pub(in super::super) fn is_unfit(&self) -> bool {
        self.marked.as_ref().is_some_and(|marked| marked.unfit)
    }

    /// Its client opens the session with it.
    pub(super) fn is_opening(&self) -> bool {
        self.claim.as_ref().is_some_and(|claim| claim.open)
    }
}

impl Table {
    /// The session's history becomes what this turn holds, and what comes of it: who opens a session
    /// with its full history knows that history, and may go on with deltas.
    pub(in super::super) fn history_begins_with(&mut self, rid: &str, key: &SessionKey) {
        if !self.tickets[rid].is_delta() && self.tickets[rid].is_opening() {
            let session = self.sessions.get_mut(key).expect("the caller has seen it");
            session.deltas = Deltas::Allowed;
        }
    }

    /// The shim refuses the turn, so nothing of it runs, and its session stays as it is.
    pub(super) fn not_continued(&mut self, rid: &str, planned: &Planned) -> (Became, u64) {
        let marked = self.marked(rid);
        marked.unfit = true;
        let too_large = planned.plan == Plan::Refused && planned.prompt > marked.tokens_max;
        let error = if marked.no_room || too_large {
            let detail = format!("this full history has {} tokens", planned.prompt);
            Error::Short { what: "pin_tokens", detail }
        } else {
            let (at, committed) = (planned.at, planned.committed);
            let detail = match planned.plan {
                Plan::Diverged if at < committed => {
                    format!("differs from the session's {committed} tokens at token {at}")
                }
                Plan::Diverged => format!("adds nothing to the session's {committed} tokens"),
                _ => "can't be compared with what the session has".to_owned(),
            };
            Error::NotContinued { detail }
        };
        self.effects.push(Effect::Unfit { rid: rid.to_owned(), error });
        (Became::NotContinued, 0)
    }
}
