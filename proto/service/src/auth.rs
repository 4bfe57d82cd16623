//! Checks credentials of requests against a file of API keys, and guards the admin ports.
//!
//! The router checks its clients with [`credential`] and [`key_file`], in its own module `auth`.
//! Router and agent both guard their admin ports with a [`gate::Gate`]. Which route needs which
//! right on the router's data port is decided in the router's `http`.
//!
//! - [`credential`]: finds the credential in a request's headers. Pure.
//! - [`keys`]: the keys of a key file, and which of them a credential is. Pure.
//! - [`key_file`]: reads the key file.
//! - [`gate`]: what an admin port lets pass. [`origin`]: which pages may use it. Pure.
//!
//! No credential and no digest of one is written to logs, metrics or answers.

pub mod announce;
pub mod credential;
pub mod gate;
pub mod key_file;
pub mod keys;
pub mod origin;

use serde::{Deserialize, Serialize};

use crate::refusal::{Code, Refusal};

/// Who may read `/metrics` on an admin port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MetricsAuth {
    /// Requests with a scrape key or an admin key, if there is a key file.
    #[default]
    Key,
    /// Everybody who reaches the port.
    None,
}

/// Returns the refusal of a request without a valid credential. `reason` says what is wrong with
/// its credential.
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
