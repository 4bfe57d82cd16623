//! The commands that query a running agent: `berth-agent audit` and `berth-agent kv`.

pub mod audit;
pub mod kv;

use std::net::SocketAddr;

/// Why there is no result to print.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No agent answers at the address.
    #[error("no agent answers at {0}; give its control address with --control-addr")]
    Unreachable(SocketAddr, #[source] tonic::transport::Error),
    /// The agent refused, for this reason.
    #[error("the agent refused: {0}")]
    Refused(String),
    /// The agent's audit is invalid.
    #[error("the agent's answer is invalid; install the same version of both")]
    Senseless(#[from] proto::load::Error),
    /// The agent's resident blocks are invalid.
    #[error("the agent's answer is invalid; install the same version of both")]
    SenselessKv(#[from] proto::kv::Error),
}

/// The output of a command, and whether everything is in order: no rank refused and no fault was
/// found.
#[derive(Debug)]
pub struct CommandOutput {
    /// The text to print, in complete lines.
    pub text: String,
    /// Whether everything is in order.
    pub is_sound: bool,
}
