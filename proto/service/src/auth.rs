//! Checks credentials of requests against a file of API keys, and guards the admin ports.
//!
//! No credential and no digest of one is written to logs, metrics or answers.

pub mod announce;
pub mod credential;
pub mod gate;
pub mod key_file;
pub mod keys;
pub mod origin;

use crate::refusal::{Code, Refusal};

crate::settings! {
    /// Who may read `/metrics` on an admin port.
    pub enum MetricsAuth {
        /// Requests with a scrape key or an admin key, if there is a key file.
        Key = "key",
        /// Everybody who reaches the port.
        None = "none",
    }
}

/// `reason` says what is wrong with the credential.
#[must_use]
pub fn unauthorized_refusal(reason: &str) -> Refusal {
    let message = format!("{reason}; send a valid key as `Authorization: Bearer KEY` or x-api-key");
    Refusal::new(Code::Unauthorized, message)
}

/// Returns the refusal of a request whose sender lacks a right. `message` names the right.
#[must_use]
pub fn admin_only_refusal(message: &str) -> Refusal {
    Refusal::new(Code::AdminOnly, message)
}
