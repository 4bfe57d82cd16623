//! Defines the ids by which the engine knows the agent's sessions.
//!
//! A session (ordered turns that share a growing prefix) may be opened at the engine several times,
//! for example again after its history diverged. Each such life in the engine is an *incarnation*,
//! and each incarnation has an id of its own.
//!
//! An id is no secret: a client can't name an incarnation, because the agent replaces the members
//! of the body that could. Whoever reaches the engine itself could also end it.
//!
//! The crate root calls [`prefix`] once. The session table adds a hyphen and a number for each
//! incarnation. The shim's protocol relies on the ids' longest length. No state is kept here.

use crate::config::WORKER_ID_BYTES_MAX;

/// The most bytes in an incarnation id: a [`prefix`], a hyphen, and a number of 20 digits. The
/// prefix ends in a hyphen and the epoch, which takes at most 16 hexadecimal digits.
pub const INCARNATION_BYTES_MAX: usize = "berth-".len() + WORKER_ID_BYTES_MAX + 17 + 21;

/// Returns the beginning of all incarnation ids of one agent process.
///
/// `worker_id` is the agent's name. `epoch` is the time at which the process started, so two
/// processes of one agent have different prefixes.
#[must_use]
pub fn prefix(worker_id: &str, epoch: u64) -> String {
    format!("berth-{worker_id}-{epoch:x}")
}
