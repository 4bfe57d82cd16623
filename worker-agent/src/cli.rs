//! Holds the command that asks a running agent from inside its own container: `berth-agent drain`.
//!
//! It calls the agent's control port over gRPC, and returns a text for `main` to print. [`drain`]
//! makes routers place no new sessions at the agent. A service manager or Kubernetes runs it before
//! it stops the agent, where nothing but the agent's binary may be installed. All other commands
//! for people are in `berth` (`deploy/cli`).

mod connect;
pub mod drain;

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
}

/// The output of a command.
#[derive(Debug)]
pub struct CommandOutput {
    /// The text to print, in complete lines.
    pub text: String,
    /// Whether no turn is left that the command waited for. If false, the command's exit status
    /// is 1.
    pub is_fault_free: bool,
}
