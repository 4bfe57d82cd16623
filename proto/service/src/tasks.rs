//! Starts the tasks of a process, and stops them together.
//!
//! An *essential* task must run until the process stops. If it ends earlier, the process stops. The
//! end of any other task has no further effect. All tasks share one cancellation token.

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

/// Spawns and tracks the tasks of one process.
#[derive(Debug, Clone, Default)]
pub struct Tasks {
    tracker: TaskTracker,
    cancel: CancellationToken,
    /// Whether an essential task ended before it was told to stop.
    has_failed: Arc<AtomicBool>,
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

    /// Starts a task that isn't essential, for example for one peer or one turn. The task must end
    /// on its own or on [`Self::cancelled`].
    #[expect(clippy::disallowed_methods, reason = "this is the place that names tasks")]
    pub fn spawn<F>(&self, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        tokio::spawn(self.tracker.track_future(task));
    }

    /// Returns a token that is cancelled when the process is told to stop.
    #[must_use]
    pub fn token(&self) -> CancellationToken {
        self.cancel.clone()
    }

    /// Waits until the process is told to stop.
    pub async fn cancelled(&self) {
        self.cancel.cancelled().await;
    }

    /// Tells all tasks to stop.
    pub fn cancel(&self) {
        self.cancel.cancel();
    }

    /// Stops all tasks and waits for their ends, but no longer than `limit`.
    ///
    /// Returns whether every essential task ran until it was told to stop.
    pub async fn stop(&self, limit: Duration) -> bool {
        self.cancel.cancel();
        self.tracker.close();
        if tokio::time::timeout(limit, self.tracker.wait()).await.is_err() {
            warn!(left = self.tracker.len(), "tasks left running at the end");
        }
        !self.has_failed.load(Ordering::Relaxed)
    }
}

/// Stops the process when it is dropped, unless the process is already stopping. An essential task
/// holds it, so that it is dropped at the task's end, also by a panic.
struct StopProcessOnDrop {
    tasks: Tasks,
    name: &'static str,
}

impl Drop for StopProcessOnDrop {
    fn drop(&mut self) {
        if !self.tasks.cancel.is_cancelled() {
            error!(task = self.name, "essential task ended, stopping");
            self.tasks.has_failed.store(true, Ordering::Relaxed);
            self.tasks.cancel.cancel();
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
