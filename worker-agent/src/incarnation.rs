//! Incarnation ids: the names by which the engine knows the agent's sessions.

use crate::config::WORKER_ID_BYTES_MAX;

/// The most bytes in an incarnation id: a [`prefix`], a hyphen, and a number of 20 digits.
pub const INCARNATION_BYTES_MAX: usize = "berth-".len() + WORKER_ID_BYTES_MAX + 17 + 21;

/// Returns the beginning of all incarnation ids of one agent process, from the worker's id and the
/// process's epoch.
#[must_use]
pub fn prefix(worker_id: &str, epoch: u64) -> String {
    format!("berth-{worker_id}-{epoch:x}")
}
