//! The agent's end of the trimmer's socket.
//!
//! The trimmer is the part of the shim that runs in the engine's first process. It removes from a
//! full history the tokens that the turn's session already holds. It reports the plan of each turn
//! before the engine gets the turn. If another session, or more room in this one, could help, it
//! asks a question first.
//!
//! [`listen`] creates the socket, beside the shim's. No plan that was read is lost or reordered: if
//! the receiver is slow, reading stops, and the trimmer drops its oldest plans. This module decides
//! nothing.

mod protocol;

use std::path::Path;

use service::tasks::Tasks;
use tokio::sync::mpsc;

use self::protocol::Plans;
use super::{Error, codec::ShimCommand, connections::Connections};

/// The trimmer's first message: its identity, and whether it trims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trimmer {
    /// The process id of the engine's first process, in that process's own pid namespace.
    pub pid: u32,
    /// The same process in the agent's pid namespace, as reported by the kernel. `None` if the
    /// process isn't visible there.
    pub seen_pid: Option<u32>,
    /// A random token of the engine's first process. It differs between engine processes.
    pub instance: u128,
    /// The version of SGLang.
    pub sglang: String,
    /// The version of the shim.
    pub shim: String,
    /// Why the trimmer trims nothing; `None` while it works. Once it is set, no more turns are
    /// planned.
    pub inert: Option<String>,
}

/// How the shim plans to run a marked turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plan {
    /// The prompt continues the session's history, token id for token id.
    Trimmed,
    /// Retokenized: the prompt continues the session's history as text, but with other token ids.
    Retokenized,
    /// The prompt is another history than the session's.
    Diverged,
    /// The turn can't run in the session.
    Refused,
}

/// The trimmer's plan for a marked turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Planned {
    /// The number of the question that [`TrimHandle::answer`] answers, while the turn waits. `None`:
    /// this plan is final, and the engine gets the turn now. There is exactly one final plan for
    /// each marked turn, if the engine tokenizes it and its client doesn't disconnect before that.
    pub question: Option<u64>,
    /// See [`Plan`].
    pub plan: Plan,
    /// The number of leading tokens that the prompt and the session share.
    pub at: u32,
    /// The number of tokens of the session before the turn, as the engine counts them.
    pub committed: u32,
    /// The number of tokens to append to the session; 0 unless the plan is `Trimmed` or
    /// `Retokenized`. The engine will count `committed + sent` prompt tokens.
    pub sent: u32,
    /// The number of tokens of the whole prompt. If the engine would count more in the session and
    /// that is too many, it is that larger number. 0 if the prompt was not examined.
    pub prompt: u32,
    /// The id in the engine of the session that the plan is for.
    pub session: String,
    /// The id of the turn's request.
    pub rid: String,
    /// Why the plan is a refusal, or why a question didn't help, as a text for operators. Empty if
    /// neither applies.
    pub why: String,
}

/// A message about the trimmer. On each connection `Up` is the first and `Down` the last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TrimmerEvent {
    /// The trimmer has connected.
    Up(Trimmer),
    /// The trimmer has made a plan for a turn.
    Planned(Planned),
    /// The trimmer disconnected, was replaced, or violated the protocol. Plans may be lost with the
    /// connection, and open questions need no answer any more.
    Down {
        /// The reason, as a text for operators.
        reason: String,
    },
}

/// Sends answers to the trimmer's questions.
#[derive(Debug, Clone)]
pub struct TrimHandle {
    connections: Connections,
}

impl TrimHandle {
    /// Answers a question. The trimmer plans the turn again for `session`, where its prompt may
    /// have at most `tokens_max` tokens. Without a session, the turn runs unchanged.
    ///
    /// # Errors
    /// If no trimmer is connected, its queue is full, or the session's id is too long.
    pub fn answer(
        &self,
        question: u64,
        session: Option<&str>,
        tokens_max: u32,
    ) -> Result<(), Error> {
        let session = session.unwrap_or_default().to_owned();
        self.connections
            .send_command(protocol::DP_RANK, &ShimCommand::Run { question, tokens_max, session })
    }
}

/// Listens for the trimmer at the path of the shim's socket plus `.trim`, as [`super::listen`] does
/// for shims. Only one trimmer is connected at a time: a newer one replaces the older.
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
    Ok(TrimHandle { connections: Connections::listen::<Plans>(Path::new(&path), reports, tasks)? })
}

#[cfg(test)]
mod tests;
