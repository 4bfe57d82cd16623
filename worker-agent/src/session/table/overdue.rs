//! Refuses tickets that wait in the queue: those that have waited too long, or all of them.

use std::time::Instant;

use service::refusal::Code;

use super::{Error, Guard, Table};

impl Table {
    pub(super) fn refuse_waiting(&mut self, now: Instant, error: &Error) {
        while let Some(rid) = self.tickets.queue().front().cloned() {
            self.refuse_ticket(now, &rid, error.clone());
        }
    }

    pub(super) fn refuse_overdue(&mut self, now: Instant) {
        let (wait_max, mut has_refused) = (self.settings.queue_wait_max, false);
        while let Some(rid) = self.tickets.queue().front().cloned() {
            let may_wait = self.tickets[&rid].since + wait_max > now;
            if may_wait || !self.settings.guards.is_on(Guard::QueueTime) {
                break;
            }
            has_refused = true;
            let error = match self.hold_reason().cloned() {
                Some(reason) => Error::EngineHeld(reason),
                None => {
                    let detail = format!("it waited {} ms for room", wait_max.as_millis());
                    let wait = self.queue_pace.estimate_wait(self.tickets.queue().len());
                    Error::OutOfRoom { resource: Code::QueueTime, detail, wait }
                }
            };
            self.refuse_ticket(now, &rid, error);
        }
        if has_refused {
            self.process_queue(now);
        }
    }
}
