//! Acts when time has passed: sessions expire, unanswered requests end, and no turn waits too long.

use std::time::Instant;

use service::refusal::Code;

use crate::session::table::{Error, Guard, Queue, SessionEvent, Step};

impl Queue {
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let oldest_since = self.tickets.oldest_since();
        let deadlines = [
            self.sessions().next_deadline(),
            self.pins().closes.next_repeat(),
            self.histories.shim_requests.next_place(),
            oldest_since.map(|since| since + self.settings.queue_wait_max),
            self.history_awaited_until,
        ];
        deadlines.into_iter().flatten().min()
    }

    pub(crate) fn run_deadlines(&mut self, step: &mut Step) {
        if self.sessions().next_deadline().is_some_and(|deadline| deadline <= step.now) {
            run_session_deadlines(self, step);
        }
        if self.history_awaited_until.is_some_and(|until| until <= step.now) {
            self.admit_waiting(step);
        }
        let pins = &mut self.histories.pins;
        self.histories.shim_requests.replace_unanswered(step, &mut pins.sessions);
        pins.closes.repeat_due(step);
        refuse_overdue(self, step);
    }
}

fn run_session_deadlines(queue: &mut Queue, step: &mut Step) {
    let now = step.now;
    for key in queue.sessions().due(now) {
        // What was done about another session may have changed this one.
        let sessions = queue.sessions();
        let Some(session) = sessions.get(&key) else { continue };
        let is_unanswered = |until| until <= now;
        if let Some(request) = session.state.shim_request() {
            if request.until.is_some_and(is_unanswered) {
                queue.histories.close_without_answer(step, &key);
            }
        } else if sessions.may_expire(session) && session.expires_at() <= now {
            step.report_event(&key, SessionEvent::Expired);
            let _ = queue.close_session(step, &key);
        } else if sessions.is_idle_auto_pin(session) && sessions.demotes_at(session) <= now {
            queue.histories.release_kv(step, &key);
        }
    }
    queue.admit_waiting(step);
}

fn refuse_overdue(queue: &mut Queue, step: &mut Step) {
    let (wait_max, mut has_refused) = (queue.settings.queue_wait_max, false);
    while let Some(rid) = queue.tickets.queue().front().cloned() {
        let may_wait = queue.tickets[&rid].since + wait_max > step.now;
        if may_wait || !queue.settings.guards.is_on(Guard::QueueTime) {
            break;
        }
        has_refused = true;
        let error = match queue.hold_reason.clone() {
            Some(reason) => Error::EngineHeld(reason),
            None => {
                let detail = format!("it waited {} ms for room", wait_max.as_millis());
                let wait = queue.pace.estimate_wait(queue.tickets.queue().len());
                Error::OutOfRoom { resource: Code::QueueTime, detail, wait }
            }
        };
        queue.refuse_ticket(step, &rid, error);
    }
    if has_refused {
        queue.admit_waiting(step);
    }
}
