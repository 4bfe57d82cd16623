//! Pauses before a process tries again to reach a peer, longer after each failure.

use std::time::Duration;

/// A peer's restart takes about a second: it is found soon after it is back.
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// Longest pause. It is long enough that the attempts of a thousand processes cost their peer
/// little, and short enough that a restarted peer gets its connections within seconds.
const PAUSE_MAX: Duration = Duration::from_secs(3);

#[derive(Debug)]
pub struct Backoff {
    next_pause: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { next_pause: PAUSE_MIN }
    }
}

impl Backoff {
    /// Makes the next pause the shortest again. For use after a success.
    pub fn reset(&mut self) {
        self.next_pause = PAUSE_MIN;
    }

    /// Waits a random time of half to the whole pause, so that processes don't all connect at once.
    pub async fn pause(&mut self) {
        tokio::time::sleep(self.next_pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
        self.next_pause = (self.next_pause * 2).min(PAUSE_MAX);
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    async fn measure_pause(backoff: &mut Backoff) -> Duration {
        let begin = Instant::now();
        backoff.pause().await;
        begin.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_to_their_bound_and_are_short_again_when_it_went_well() {
        let mut backoff = Backoff::default();
        for due_ms in [100, 200, 400, 800, 1600, 3000, 3000] {
            let (pause, due) = (measure_pause(&mut backoff).await, Duration::from_millis(due_ms));
            let tick = Duration::from_millis(1);
            assert!(pause >= due / 2 && pause <= due + tick, "{pause:?}, expected up to {due:?}");
        }
        backoff.reset();
        assert!(measure_pause(&mut backoff).await <= Duration::from_millis(101));
    }
}
