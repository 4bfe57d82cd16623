//! Takes the KV from idle pinned sessions: the shim demotes them, or else they are closed.
//!
//! The history of a demoted session stays.

use contract::id::SessionKey;

use crate::session::table::{
    Error, GoneReason, Guard, Histories, SessionEvent, State, Step,
    histories::shim_requests::ShimTask,
    pins::reclaim::{Requester, Shortage},
};

impl Histories {
    /// Returns false if the sessions that may give way don't hold enough.
    pub(crate) fn reclaim(
        &mut self,
        step: &mut Step,
        dp_rank: u32,
        shortage: &Shortage,
        requester: Requester<'_>,
    ) -> bool {
        let Some(keys) = self.pins.choose_to_reclaim(step.now, dp_rank, shortage, requester) else {
            return false;
        };
        keys.iter().for_each(|key| self.release_kv(step, key));
        true
    }

    pub(crate) fn reclaim_rows_for_plain_turns(
        &mut self,
        step: &mut Step,
        dp_rank: u32,
        sequences: u64,
        free_rows: u64,
    ) {
        let keys = self.pins.choose_for_plain_turns(step.now, dp_rank, sequences, free_rows);
        keys.iter().for_each(|key| self.release_kv(step, key));
    }

    /// Returns true if the session is demoted already.
    pub(crate) fn demote_session(
        &mut self,
        step: &mut Step,
        key: &SessionKey,
    ) -> Result<bool, Error> {
        let sessions = &self.pins.sessions;
        let session = sessions.get(key).ok_or(Error::UnknownSession)?;
        let may_have_turns = !self.settings.guards.is_on(Guard::ReclaimIdleOnly);
        match session.state {
            State::Closing(_) => Err(Error::Closing),
            State::InTree(_) | State::Gone { tree: Some(_), .. } => {
                Err(Error::NotPinned(session.retention()))
            }
            State::Gone { reason, tree: None } => Err(reason.to_error()),
            _ if session.has_turns() && !may_have_turns => Err(Error::NotAtRest),
            State::Planned | State::Opening(_) | State::Suspect { .. } => Err(Error::NotAtRest),
            State::Demoted => Ok(true),
            State::Demoting { .. } => Ok(false),
            State::Open(_) if !sessions.can_demote(session) => Err(Error::DemotionUnavailable),
            State::Open(_) => {
                begin_demotion(self, step, key, true);
                Ok(false)
            }
        }
    }

    pub(crate) fn release_kv(&mut self, step: &mut Step, key: &SessionKey) {
        let sessions = &self.pins.sessions;
        if sessions.can_demote(&sessions[key]) {
            begin_demotion(self, step, key, false);
        } else {
            self.close_as_gone(step, key, GoneReason::Reclaimed);
        }
    }

    /// Returns false if the session is not being demoted.
    pub(crate) fn end_demotion(
        &mut self,
        step: &mut Step,
        key: &SessionKey,
        is_demoted: bool,
    ) -> bool {
        let State::Demoting { is_asked, .. } = self.pins.sessions[key].state else { return false };
        if self.continue_reopen(step, key, is_demoted) {
            // The demotion was the first step of replacing the incarnation, which has continued.
        } else if is_demoted {
            step.report_event(key, SessionEvent::Demoted);
            self.pins.sessions.change(step, key, |session| session.state.drop_row());
        } else if is_asked {
            self.pins.sessions.change(step, key, |session| session.state.move_row(State::Open));
        } else {
            self.close_as_gone(step, key, GoneReason::Reclaimed);
        }
        true
    }
}

fn begin_demotion(histories: &mut Histories, step: &mut Step, key: &SessionKey, is_asked: bool) {
    let sessions = &mut histories.pins.sessions;
    let request = histories.shim_requests.add(sessions, key, ShimTask::Demote);
    let dp_rank = sessions.change(step, key, |session| {
        session.state.move_row(|row| State::Demoting { row, request, is_asked });
        session.dp_rank
    });
    histories.shim_requests.send(step, sessions, dp_rank);
}
