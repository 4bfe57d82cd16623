//! Says once for each engine process if its shim doesn't come.
//!
//! A shim connects while the engine starts. Without it the agent works, but finds out less.

use std::time::{Duration, Instant};

use tracing::warn;

/// A shim tries to connect once a second.
const SHIM_WAIT_MAX: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(in super::super) struct ShimCheck {
    due: Option<Instant>,
}

impl ShimCheck {
    pub(in super::super) fn begin(&mut self, now: Instant) {
        self.due = Some(now + SHIM_WAIT_MAX);
    }

    pub(in super::super) fn next_deadline(&self) -> Option<Instant> {
        self.due
    }

    /// Returns true once for each engine process, if shims are missing.
    pub(super) fn run_deadline(&mut self, now: Instant, shims: usize, ranks: usize) -> bool {
        if self.due.is_none_or(|due| due > now) {
            return false;
        }
        self.due = None;
        let is_missing = shims < ranks;
        if is_missing {
            warn!(
                shims,
                ranks,
                "the engine has no shim: full histories aren't trimmed, and KV figures are \
                 estimates; install worker-agent/shim where the engine runs, for its user"
            );
        }
        is_missing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_shim_is_reported_once_and_one_that_came_is_not() {
        let start = service::clock::now();
        let late = start + SHIM_WAIT_MAX;
        let mut check = ShimCheck::default();
        assert!(!check.run_deadline(late, 0, 1), "no engine was found");
        check.begin(start);
        assert_eq!(check.next_deadline(), Some(late));
        assert!(!check.run_deadline(start, 0, 1), "it may still come");
        assert!(check.run_deadline(late, 1, 2), "one rank lacks its shim");
        assert!(!check.run_deadline(late, 0, 1), "this was said");
        check.begin(late);
        assert!(!check.run_deadline(late + SHIM_WAIT_MAX, 1, 1));
        assert_eq!(check.next_deadline(), None);
    }
}
