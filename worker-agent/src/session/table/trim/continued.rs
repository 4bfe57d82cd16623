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
    /// A full history becomes the session's. Its client may go on with deltas if it opens the
    /// session with this turn, unless the history replaced one that others append to: they must
    /// hear of it. A client that only opened the session doesn't know what another client's full
    /// history began.
    pub(in super::super) fn history_begins_with(&mut self, rid: &str, key: &SessionKey) {
        let ticket = &self.tickets[rid];
        let (opens, marked) = (ticket.is_opening(), ticket.marked.as_ref());
        let replaced_deltas = marked.is_some_and(|marked| marked.replaced_deltas);
        let session = self.sessions.get_mut(key).expect("the caller has seen it");
        let empty = session.history_tokens == 0;
        session.deltas = match session.deltas {
            Deltas::Refused if opens && !replaced_deltas => Deltas::Allowed,
            Deltas::Allowed if empty && !opens => Deltas::Refused,
            deltas => deltas,
        };
    }

    /// The shim refuses the turn, so nothing of it runs, and its session stays as it is.
    pub(super) fn not_continued(
        &mut self,
        key: &SessionKey,
        rid: &str,
        planned: &Planned,
    ) -> (Became, u64) {
        let marked = self.marked(rid);
        marked.unfit = true;
        let unasked = planned.plan == Plan::Refused && planned.prompt > marked.tokens_max;
        let error = if marked.too_large || unasked {
            let sent = self.tickets[rid].need.prompt_tokens;
            let session = self.sessions.get_mut(key).expect("the caller has seen it");
            // The next try asks for as much room, or hears that there is never so much.
            session.whole.measured = Some((sent, planned.prompt));
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
