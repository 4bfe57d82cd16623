//! Starts the tasks of a process, and stops them together.
//!
//! An *essential* task must run until the process stops; if it ends earlier, the process stops. A
//! cancelled task is not aborted: it sees the token and ends itself. No task is restarted.
//!
//! A process may *leave* before it stops: it serves on, and says that it soon won't, so that nobody
//! is turned away.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{error, warn};

#[derive(Debug, Clone, Default)]
pub struct Tasks {
    tracker: TaskTracker,
    stop_token: CancellationToken,
    leave_token: CancellationToken,
    has_essential_ended_early: Arc<AtomicBool>,
}

impl Tasks {
    /// Starts an essential task. If it returns or panics before shutdown, all tasks are cancelled.
    /// `name` is for the log.
    #[expect(clippy::disallowed_methods, reason = "this is the place that names tasks")]
    pub fn spawn_essential<F>(&self, name: &'static str, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let guard = StopProcessOnDrop { tasks: self.clone(), name };
        let tracked = self.tracker.track_future(async move {
            task.await;
            drop(guard);
        });
        tokio::spawn(tracked);
    }

    /// The task must end on its own or on [`Self::cancelled`].
    #[expect(clippy::disallowed_methods, reason = "this is the place that names tasks")]
    pub fn spawn<F>(&self, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        tokio::spawn(self.tracker.track_future(task));
    }

    #[must_use]
    pub fn token(&self) -> CancellationToken {
        self.stop_token.clone()
    }

    pub async fn cancelled(&self) {
        self.stop_token.cancelled().await;
    }

    /// Returns a token that is cancelled when the process leaves, or is told to stop.
    #[must_use]
    pub fn leave_token(&self) -> CancellationToken {
        self.leave_token.clone()
    }

    /// Says that the process leaves. It serves on until it is told to stop.
    pub fn leave(&self) {
        self.leave_token.cancel();
    }

    pub fn cancel(&self) {
        self.leave_token.cancel();
        self.stop_token.cancel();
    }

    /// Waits at most `wait_max`. Returns whether essential tasks ran until they were told to stop.
    pub async fn stop(&self, wait_max: Duration) -> bool {
        self.cancel();
        self.tracker.close();
        if tokio::time::timeout(wait_max, self.tracker.wait()).await.is_err() {
            warn!(left = self.tracker.len(), "tasks left running at the end");
        }
        !self.has_essential_ended_early.load(Ordering::Relaxed)
    }
}

/// An essential task holds this guard, so the drop comes at the task's end, also if it panics.
struct StopProcessOnDrop {
    tasks: Tasks,
    name: &'static str,
}

impl Drop for StopProcessOnDrop {
    fn drop(&mut self) {
        if !self.tasks.stop_token.is_cancelled() {
            error!(task = self.name, "essential task ended, stopping");
            self.tasks.has_essential_ended_early.store(true, Ordering::Relaxed);
            self.tasks.cancel();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_end_of_an_essential_task_stops_the_process() {
        let tasks = Tasks::default();
        tasks.spawn_essential("returns", async {});
        tasks.cancelled().await;
        assert!(!tasks.stop(Duration::from_secs(5)).await);
    }

    #[tokio::test]
    async fn a_panic_of_an_essential_task_stops_the_process() {
        let tasks = Tasks::default();
        tasks.spawn_essential("panics", async { panic!("on purpose") });
        tasks.cancelled().await;
        assert!(!tasks.stop(Duration::from_secs(5)).await);
    }

    #[tokio::test]
    async fn a_requested_stop_is_clean_and_other_tasks_may_end() {
        let tasks = Tasks::default();
        let token = tasks.token();
        tasks.spawn_essential("waits", async move { token.cancelled().await });
        tasks.spawn(async {});
        assert!(tasks.stop(Duration::from_secs(5)).await);
    }
}
