//! Policies that keep a session on its worker.

use super::{Policy, PolicyChoice, least, plain::LeastLoaded, ttft_ms};
use crate::fleet::{Fleet, TurnToPlace};

/// Never moves a session; starts it on the least loaded worker.
#[derive(Debug)]
pub(super) struct Sticky(LeastLoaded);

impl Sticky {
    pub(super) fn new(seed: u64) -> Self {
        Self(LeastLoaded::new(seed))
    }
}

impl Policy for Sticky {
    fn place(&mut self, request: &TurnToPlace<'_>, fleet: &Fleet) -> PolicyChoice {
        match request.previous_worker {
            Some(last) if fleet.usable().contains(&last) => last.into(),
            _ => self.0.place(request, fleet),
        }
    }
}

/// A session moves only if its time to first token is better elsewhere by more than this.
const ESCAPE_MS: f64 = 500.0;

/// Moves a session only if its first token comes much sooner elsewhere.
#[derive(Debug)]
pub(super) struct StickyTtft;

impl Policy for StickyTtft {
    fn place(&mut self, request: &TurnToPlace<'_>, fleet: &Fleet) -> PolicyChoice {
        let ttft = |worker: usize| ttft_ms(worker, request, fleet);
        let best = least(fleet, ttft);
        match request.previous_worker {
            Some(last) if fleet.usable().contains(&last) => {
                if ttft(last) <= ttft(best) + ESCAPE_MS { last.into() } else { best.into() }
            }
            _ => best.into(),
        }
    }
}
