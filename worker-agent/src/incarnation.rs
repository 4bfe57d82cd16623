//! Defines the ids by which the engine knows the agent's sessions.
//!
//! An id is no secret: a client can't name an incarnation, because the agent replaces the members
//! of the body that could. Whoever reaches the engine itself could also end it.

use crate::config::WORKER_ID_BYTES_MAX;

/// The prefix ends in a hyphen and 16 hexadecimal digits; a hyphen and 20 digits follow.
pub const INCARNATION_BYTES_MAX: usize = "berth-".len() + WORKER_ID_BYTES_MAX + 17 + 21;

/// `epoch` is the process's start time, so two processes of one agent have different prefixes.
#[must_use]
pub fn prefix(worker_id: &str, epoch: u64) -> String {
    format!("berth-{worker_id}-{epoch:x}")
}
