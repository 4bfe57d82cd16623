//! Derives the agent's readiness and its load metrics from the load reports.

use std::sync::Arc;

use contract::load::LoadReport;
use service::tasks::Tasks;
use tokio::sync::watch;

use super::Metrics;

/// Starts a task that derives the agent's readiness and the load metrics from each load report. The
/// agent is ready while it can take turns. Returns the readiness; an error is the reason.
pub(crate) fn track(
    mut reports: watch::Receiver<Arc<LoadReport>>,
    metrics: &Metrics,
    tasks: &Tasks,
) -> watch::Receiver<Result<(), String>> {
    let (sender, readiness) = watch::channel(Err("starting".to_owned()));
    let (metrics, token) = (metrics.clone(), tasks.token());
    tasks.spawn_essential("readiness", async move {
        loop {
            let report = reports.borrow_and_update().clone();
            metrics.set_load(&report);
            let new_readiness = match (&report.unhealthy, report.draining) {
                (Some(reason), _) => Err(reason.clone()),
                (None, true) => Err("draining".to_owned()),
                (None, false) => Ok(()),
            };
            sender.send_if_modified(|readiness| {
                let has_changed = *readiness != new_readiness;
                *readiness = new_readiness;
                has_changed
            });
            tokio::select! {
                () = token.cancelled() => return,
                changed = reports.changed() => if changed.is_err() { return },
            }
        }
    });
    readiness
}
