//! The agent's end of the trimmer's socket: the shim in the engine's first process, which takes off
//! a whole prompt what its session holds. It tells of each plan before the engine gets the turn,
//! and asks where another session, or more room in this one, could help.
//!
//! [`listen`] makes the socket, beside the shim's. No plan is lost or overtaken while the receiver
//! is slow: then nothing more is read, and the trimmer drops its oldest plans. Decides nothing.

mod talk;

use std::path::Path;

use proto::process::tasks::Tasks;
use tokio::sync::mpsc;

use self::talk::Plans;
use super::{Error, codec::Command, peers::Peers};
pub use crate::session::Plan;

/// What the trimmer says first: who it is, and whether it trims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trimmer {
    /// The engine's first process, as it knows itself: by its number in its own pid namespace.
    pub pid: u32,
    /// The same in the agent's, by the kernel's word. None: it isn't seen from there.
    pub seen_pid: Option<u32>,
    /// Random token of the engine's first process: another one is another engine.
    pub instance: u128,
    /// SGLang's version.
    pub sglang: String,
    /// The shim's version.
    pub shim: String,
    /// Why nothing is trimmed, where nothing is. No turn is planned any more then.
    pub inert: Option<String>,
}

/// What the trimmer makes of one marked turn's prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Planned {
    /// The question that [`TrimHandle::run`] answers: the turn waits for it. `None`: this is the
    /// turn's last plan, and the engine gets the turn now. There is one of each turn that the
    /// engine makes tokens of and whose client waits for that.
    pub question: Option<u64>,
    /// See [`Plan`].
    pub plan: Plan,
    /// Tokens that the prompt has in common with the session, from the first on.
    pub at: u32,
    /// Tokens of the session before the turn, as the engine counts them.
    pub committed: u32,
    /// Tokens that are appended to them; 0 unless trimmed or healed. The engine will count
    /// `committed + sent` prompt tokens.
    pub sent: u32,
    /// Tokens of the whole prompt, or what the engine would count of it in the session where that
    /// is too much and more; 0 where it wasn't looked at.
    pub prompt: u32,
    /// The session it was planned for, by its id in the engine.
    pub session: String,
    /// The turn's request.
    pub rid: String,
    /// Why it was refused, and why a question was of no help; for people. Empty where all is well.
    pub why: String,
}

/// What is told. `Up` is the first and `Down` the last of each connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// The trimmer has connected.
    Up(Trimmer),
    /// A turn was planned.
    Planned(Planned),
    /// The trimmer has gone, or was replaced, or said nonsense. Plans may have been lost with it,
    /// and questions without an answer get none.
    Down {
        /// For people.
        reason: String,
    },
}

/// Answers the trimmer's questions.
#[derive(Debug, Clone)]
pub struct TrimHandle {
    peers: Peers,
}

impl TrimHandle {
    /// Answers a question: the turn is planned anew for this session, in which its prompt may have
    /// so many tokens at most; without one it runs as it came.
    ///
    /// # Errors
    /// When there is no trimmer, or it doesn't listen.
    pub fn run(&self, question: u64, session: Option<&str>, tokens_max: u32) -> Result<(), Error> {
        let session = session.unwrap_or_default().to_owned();
        self.peers.command(talk::DP_RANK, &Command::Run { question, tokens_max, session })
    }
}

/// Listens for the trimmer at the shim's path with `.trim` behind it, as [`super::listen`] does for
/// shims. There is one at a time: a newer one replaces the older.
///
/// # Errors
/// See [`Error`].
pub fn listen(path: &Path, news: mpsc::Sender<News>, tasks: &Tasks) -> Result<TrimHandle, Error> {
    let mut path = path.as_os_str().to_owned();
    path.push(".trim");
    Ok(TrimHandle { peers: Peers::listen::<Plans>(Path::new(&path), news, tasks)? })
}

#[cfg(test)]
mod tests;
