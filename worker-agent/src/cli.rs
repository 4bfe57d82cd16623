//! Holds the commands that ask a running agent: `berth-agent audit`, `drain` and `kv`.
//!
//! They call the agent's control port over gRPC, and return a text for `main` to print. [`audit`]
//! shows which session holds each page of the engine's KV pool. A session is a chain of turns: one
//! request and its answer each. [`drain`] makes routers place no new sessions at the agent. [`kv`]
//! shows which blocks of KV are resident. The running agent's own code is in the other modules.

pub mod audit;
mod connect;
pub mod drain;
pub mod kv;

use std::net::SocketAddr;

/// Why a command has no result to print.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No agent answers at the address.
    #[error("no agent answers at {0}; give its control address with --control-addr")]
    Unreachable(SocketAddr, #[source] tonic::transport::Error),
    /// A certificate or token can't be used.
    #[error("can't use a file that an argument names")]
    File(#[from] service::reload::Error),
    /// The name for the agent's certificate is none.
    #[error("--server-name is no DNS name or IP address")]
    ServerName,
    /// The agent refused the request. The text is the reason.
    #[error("the agent refused: {0}")]
    Refused(String),
    /// The agent's audit can't be read.
    #[error("the agent's answer is invalid; install the same version of both")]
    InvalidAudit(#[from] proto::load::Error),
    /// The agent's changes of resident blocks can't be read.
    #[error("the agent's answer is invalid; install the same version of both")]
    InvalidKv(#[from] proto::kv::Error),
}

/// The output of a command.
#[derive(Debug)]
pub struct CommandOutput {
    /// The text to print, in complete lines.
    pub text: String,
    /// Whether every rank gave a result, and none of the results shows a fault. If false, the
    /// command's exit status is 1.
    pub is_fault_free: bool,
}
