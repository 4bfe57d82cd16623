//! The pause before an agent is connected to again.

use std::time::Duration;

/// First pause after a failure: an agent's restart takes about a second.
const REST_MIN: Duration = Duration::from_millis(100);
/// Longest pause. The connection attempts of a thousand routers stay cheap, and an agent that is
/// back soon gets a connection.
const REST_MAX: Duration = Duration::from_secs(3);

/// Pauses that double until [`Self::reset`].
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { next: REST_MIN }
    }
}

impl Backoff {
    /// Makes the next pause the shortest again, after a success.
    pub(crate) fn reset(&mut self) {
        self.next = REST_MIN;
    }

    /// Waits for half to all of the pause, at random, so that routers don't connect in step.
    pub(crate) async fn rest(&mut self) {
        tokio::time::sleep(self.next.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
        self.next = (self.next * 2).min(REST_MAX);
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    async fn rested(backoff: &mut Backoff) -> Duration {
        let begin = Instant::now();
        backoff.rest().await;
        begin.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn rests_grow_to_their_bound_and_are_short_again_when_it_went_well() {
        let mut backoff = Backoff::default();
        for due_ms in [100, 200, 400, 800, 1600, 3000, 3000] {
            let (rest, due) = (rested(&mut backoff).await, Duration::from_millis(due_ms));
            let tick = Duration::from_millis(1);
            assert!(rest >= due / 2 && rest <= due + tick, "{rest:?}, expected up to {due:?}");
        }
        backoff.reset();
        assert!(rested(&mut backoff).await <= Duration::from_millis(101));
    }
}
