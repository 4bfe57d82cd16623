//! Receives the trimmer's plans for turns, and sends the agent's answers to its questions.
//!
//! The trimmer is the part of the shim that runs in the engine's first process. A *session* is a
//! series of turns whose prompts share a growing prefix, and a *turn* is one request with its
//! answer. Some clients send the full history with each turn. The agent marks such a turn with a
//! header. The trimmer then removes from the turn the tokens that its session already holds.
//!
//! The trimmer reports its *plan* for each marked turn before the engine gets the turn. If the turn
//! doesn't fit its session, another session or more room in this one could help. Then the trimmer
//! first asks a *question*: it sends a plan with a number, and lets the turn wait for the answer.
//!
//! [`listen`] creates the socket, beside the shim's socket. `protocol` decodes the messages. If the
//! receiver is slow, this module stops reading, and the trimmer drops its oldest plans. Plans that
//! were read are neither lost nor reordered. The task in `owner` receives the plans and decides on
//! the answers.

mod protocol;

use std::path::Path;

use serde::Deserialize;
use service::tasks::Tasks;
use tokio::sync::mpsc;

use self::protocol::TrimmerConnection;
use super::{Error, codec::ShimCommand, connections::Connections};

/// The trimmer's first message: its process, its versions, and whether it trims.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Trimmer {
    /// The process id of the engine's first process, in that process's own pid namespace.
    pub pid: u32,
    /// The id of the same process in the agent's pid namespace, as the kernel reports it. `None` if
    /// the process isn't visible in that namespace.
    #[serde(skip)]
    pub pid_in_agent_namespace: Option<u32>,
    /// Random bytes that tell this engine process from every other.
    #[serde(with = "serde_bytes")]
    pub instance: [u8; 16],
    /// The version of SGLang.
    pub sglang: String,
    /// The version of the shim.
    pub shim: String,
    /// Why the trimmer trims nothing; `None` while it works. With a reason, it sends no plans.
    pub inert_reason: Option<String>,
}

/// The trimmer's decision about how a marked turn runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Plan {
    /// The prompt continues the session's history, token id for token id.
    Trimmed,
    /// The prompt continues the session's history with the same text, but with other token ids.
    Retokenized,
    /// The prompt's text differs from the session's history, or nothing follows the history.
    Diverged,
    /// The turn can't run in the session for another reason; [`PlanReport::why`] names it.
    Refused,
}

/// The trimmer's plan for a marked turn.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PlanReport {
    /// The number of the trimmer's question. The turn waits until [`TrimHandle::answer`] gets this
    /// number. `None` if the plan is final and the engine gets the turn now.
    ///
    /// Each marked turn has exactly one final plan if the engine tokenizes the turn and its client
    /// doesn't disconnect before that.
    pub question: Option<u64>,
    /// How the turn runs.
    pub plan: Plan,
    /// The number of leading tokens that the prompt and the session share.
    pub shared_tokens: u32,
    /// The session's tokens before the turn, as the engine counts them.
    pub committed_tokens: u32,
    /// The number of tokens that the engine appends to the session; 0 unless the plan is `Trimmed`
    /// or `Retokenized`. The engine will count `committed_tokens + appended_tokens` prompt tokens.
    pub appended_tokens: u32,
    /// The tokens of the whole prompt; 0 if the trimmer didn't examine it. If the prompt is too
    /// long for the session, and the engine would count more tokens than that, this is the number
    /// that the engine would count.
    pub prompt_tokens: u32,
    /// The engine's id of the session that the plan is for.
    pub session: String,
    /// The id of the turn's request.
    pub rid: String,
    /// Why the plan is a refusal, and why the answer to a question didn't help; for an operator.
    /// Empty if neither applies.
    pub why: String,
}

/// News of the trimmer. Each connection begins with `Up` and ends with `Down`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TrimmerEvent {
    /// The trimmer has connected.
    Up(Trimmer),
    /// The trimmer has made a plan for a turn.
    Planned(PlanReport),
    /// The trimmer disconnected, was replaced, or violated the protocol. Plans that the agent
    /// hasn't read are lost. Unanswered questions need no answer any more.
    Down {
        /// The reason, for an operator.
        reason: String,
    },
}

/// Sends answers to the trimmer's questions.
#[derive(Debug, Clone)]
pub struct TrimHandle {
    connections: Connections,
}

impl TrimHandle {
    /// Answers a question. The trimmer makes a new plan for the turn in `session`, where the prompt
    /// may have at most `tokens_max` tokens. If `session` is `None`, the turn runs unchanged. Waits
    /// for room in the queue of commands: each waiting turn has one question, so few wait.
    ///
    /// # Errors
    /// If no trimmer is connected, or the session's id is too long.
    pub async fn answer(
        &self,
        question: u64,
        session: Option<String>,
        tokens_max: u32,
    ) -> Result<(), Error> {
        let command = ShimCommand::Run { question, tokens_max, session };
        self.connections.queue_command(protocol::DP_RANK, &command).await
    }
}

/// Listens for the trimmer, as [`super::listen`] does for shims. `path` is the path of the shim's
/// socket; the trimmer's socket has `.trim` appended. A newly connected trimmer replaces an earlier
/// one.
///
/// # Errors
/// See [`Error`].
pub fn listen(
    path: &Path,
    reports: mpsc::Sender<TrimmerEvent>,
    tasks: &Tasks,
) -> Result<TrimHandle, Error> {
    let mut path = path.as_os_str().to_owned();
    path.push(".trim");
    let path = Path::new(&path);
    let connections = Connections::listen::<TrimmerConnection>(path, reports, tasks)?;
    Ok(TrimHandle { connections })
}

#[cfg(test)]
mod tests;
