//! Tasks with names and policies.
//!
//! The end of an *essential* task ends the process. The end of any other task has no further
//! effect. All tasks share one cancellation token.

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
    failed: Arc<AtomicBool>,
}

impl Tasks {
    /// Runs a task that must not end before shutdown. Its end, also by panic, cancels all tasks.
    #[expect(clippy::disallowed_methods, reason = "this is the place that names tasks")]
    pub fn spawn_essential<F>(&self, name: &'static str, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let guard = StopsProcess { tasks: self.clone(), name };
        let tracked = self.tracker.track_future(async move {
            task.await;
            drop(guard);
        });
        tokio::spawn(tracked);
    }

    /// Runs a task of one peer or one turn. The task must end on its own or on [`Self::cancelled`].
    #[expect(clippy::disallowed_methods, reason = "this is the place that names tasks")]
    pub fn spawn<F>(&self, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        tokio::spawn(self.tracker.track_future(task));
    }

    /// Returns a token that is cancelled when the process stops.
    #[must_use]
    pub fn token(&self) -> CancellationToken {
        self.cancel.clone()
    }

    /// Waits until the process stops.
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
        !self.failed.load(Ordering::Relaxed)
    }
}

/// Stops the process when dropped at a task's end, whether the task returned or panicked.
struct StopsProcess {
    tasks: Tasks,
    name: &'static str,
}

impl Drop for StopsProcess {
    fn drop(&mut self) {
        if !self.tasks.cancel.is_cancelled() {
            error!(task = self.name, "essential task ended, stopping");
            self.tasks.failed.store(true, Ordering::Relaxed);
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
