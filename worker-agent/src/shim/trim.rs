//! Receives the trimmer's plans for turns, and sends the agent's answers to its questions.
//!
//! Some clients send the full history with each turn. The agent marks such a turn with a header,
//! and the trimmer removes the tokens that its session already holds. It reports its *plan* before
//! the engine gets the turn. If another session or more room in this one could help, it first asks
//! a *question*: a plan with a number, whose answer the turn waits for.
//!
//! If the receiver is slow, this module stops reading, and the trimmer drops its oldest plans.
//! Plans that were read are neither lost nor reordered.

mod protocol;

use std::path::Path;

use serde::Deserialize;
use service::tasks::Tasks;
use tokio::sync::mpsc;

use self::protocol::TrimmerConnection;
use super::{Error, codec::ShimCommand, connections::Connections};

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Trimmer {
    /// The pid of the engine's first process, in its own pid namespace.
    pub pid: u32,
    /// The same process, as the kernel reports it; `None` if the agent's namespace lacks it.
    #[serde(skip)]
    pub pid_in_agent_namespace: Option<u32>,
    /// Random bytes that tell this engine process from every other.
    #[serde(with = "serde_bytes")]
    pub instance: [u8; 16],
    pub sglang: String,
    pub shim: String,
    /// If set, the trimmer sends no plans.
    pub inert_reason: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Plan {
    /// The prompt continues the session's history, token id for token id.
    Trimmed,
    /// The prompt continues the session's history with the same text, but with other token ids.
    Retokenized,
    /// The prompt's text differs from the session's history, or nothing follows the history.
    Diverged,
    /// The turn can't run in the session for the reason that [`PlanReport::why`] names.
    #[serde(rename = "refused")]
    NotTrimmed,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PlanReport {
    /// The turn waits until [`TrimHandle::answer`] gets this number. `None` if the plan is final
    /// and the engine gets the turn now. Each marked turn has exactly one final plan, if the engine
    /// tokenizes the turn and its client doesn't disconnect before that.
    pub question: Option<u64>,
    pub plan: Plan,
    /// Leading tokens that the prompt and the session share.
    pub shared_tokens: u32,
    /// The session's tokens before the turn, as the engine counts them.
    pub committed_tokens: u32,
    /// 0 unless the plan is `Trimmed` or `Retokenized`. The engine will count this many prompt
    /// tokens beyond `committed_tokens`.
    pub appended_tokens: u32,
    /// Of the whole prompt; 0 if the trimmer didn't examine it. For a prompt that is too long for
    /// the session, the engine's own count if that would be more.
    pub prompt_tokens: u32,
    pub session: String,
    pub rid: String,
    /// Explains a refusal, or why the answer to a question didn't help, to an operator. Else empty.
    pub why: String,
}

/// Each connection begins with `Up` and ends with `Down`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TrimmerEvent {
    Up(Trimmer),
    Planned(PlanReport),
    /// Plans that the agent hasn't read are lost. Unanswered questions need no answer any more.
    Down {
        /// The text is for an operator.
        reason: String,
    },
}

#[derive(Debug, Clone)]
pub struct TrimHandle {
    connections: Connections,
}

impl TrimHandle {
    /// The trimmer plans the turn again, in `session`, where the prompt may have at most
    /// `tokens_max` tokens; with `None`, the turn runs unchanged. Waits for room in the queue of
    /// commands: each waiting turn has one question, so few wait.
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

/// `path` is the shim's socket; the trimmer's has `.trim` appended. A newly connected trimmer
/// replaces an earlier one.
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
