//! The shim of a simulated engine: reports the simulator's sessions to the agent.
//!
//! It speaks the shim's protocol on the agent's socket, and connects again like the real one. Each
//! report is a full table. It can't audit pages, and demotes sessions only if told to.

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use serde::Serialize;
use service::tasks::Tasks;
use tokio::net::UnixStream;
use worker_agent::shim::codec::VERSION;

use crate::engine_sim::{EngineSim, core::PoolFacts};

/// The pause between two reports, and between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(20);

/// A running shim of rank 0. Ends when it is dropped.
#[derive(Debug)]
pub struct SimShim(Tasks);

impl SimShim {
    /// Starts the shim of `engine`, which connects to the agent's `socket` whenever one listens.
    #[must_use]
    pub fn start(engine: Arc<EngineSim>, socket: PathBuf) -> Self {
        Self::start_as(engine, socket, false)
    }

    /// Starts a shim that demotes sessions.
    #[must_use]
    pub fn start_demoting(engine: Arc<EngineSim>, socket: PathBuf) -> Self {
        Self::start_as(engine, socket, true)
    }

    fn start_as(engine: Arc<EngineSim>, socket: PathBuf, demotes: bool) -> Self {
        let tasks = Tasks::default();
        let token = tasks.token();
        tasks.spawn(async move {
            let report = async {
                loop {
                    // There is no agent, or it has ended.
                    let _ = serve(&engine, &socket, demotes).await;
                    tokio::time::sleep(PAUSE).await;
                }
            };
            token.run_until_cancelled(report).await;
        });
        Self(tasks)
    }
}

impl Drop for SimShim {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Serves one connection to its end.
async fn serve(engine: &EngineSim, socket: &PathBuf, demotes: bool) -> io::Result<()> {
    let stream = UnixStream::connect(socket).await?;
    let gone = || io::Error::from(io::ErrorKind::NotConnected);
    let mut facts = engine.pool(0).await.ok_or_else(gone)?;
    send(&stream, &hello(&facts, demotes)).await?;
    let (mut piece, mut commands) = (vec![0; 4096], vec![]);
    let mut events = vec![];
    for seq in 0.. {
        send(&stream, &update(seq, &facts, engine.weight_changes(), &events)).await?;
        events.clear();
        tokio::select! {
            ready = stream.readable() => {
                ready?;
                match stream.try_read(&mut piece) {
                    Ok(0) => return Err(gone()),
                    Ok(read) => commands.extend_from_slice(&piece[..read]),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error),
                }
            }
            () = tokio::time::sleep(PAUSE) => {}
        }
        // Any other command asks for a report, and the next one comes at once.
        while let Some(command) = take_command(&mut commands) {
            if let Some(id) = session_to_demote(&command) {
                let is_demoted = engine.demote(0, &id).await.ok_or_else(gone)?;
                events.push(("Demoted", id, (!is_demoted).then_some("busy")));
            }
        }
        facts = engine.pool(0).await.ok_or_else(gone)?;
    }
    Ok(())
}

/// Takes the next complete command from what was read, without its length and version.
fn take_command(read: &mut Vec<u8>) -> Option<Vec<u8>> {
    let length = u32::from_le_bytes(*read.first_chunk::<4>()?) as usize;
    let end = 4 + length;
    (read.len() >= end).then(|| read.drain(..end).skip(5).collect())
}

/// Returns the session that a command asks to demote.
fn session_to_demote(command: &[u8]) -> Option<String> {
    let (name, session): (String, String) = rmp_serde::from_slice(command).ok()?;
    (name == "Demote").then_some(session)
}

async fn send(stream: &UnixStream, mut frame: &[u8]) -> io::Result<()> {
    while !frame.is_empty() {
        stream.writable().await?;
        match stream.try_write(frame) {
            Ok(written) => frame = &frame[written..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns the shim's hello.
fn hello(facts: &PoolFacts, demotes: bool) -> Vec<u8> {
    let (pid, dp_rank, page_size_tokens, instance) = (std::process::id(), 0, 16, [0_u8; 16]);
    let (inert, none) = (None::<&str>, Some("a simulator"));
    let undemotable = none.filter(|_| !demotes);
    let (sglang, shim, device, page_bytes) = ("0.5.23", "", "cpu", None::<u64>);
    let (pool_tokens, rows_total) = (facts.total as u64, facts.rows as u64);
    frame(&(
        "Hello",
        pid,
        dp_rank,
        page_size_tokens,
        pool_tokens,
        rows_total,
        instance,
        sglang,
        shim,
        inert,
        undemotable,
        none,
        none,
        device,
        page_bytes,
    ))
}

/// An event of a session: its name, the session's id, and why the shim refused.
type DemotedEvent = (&'static str, String, Option<&'static str>);

/// Returns an update with a full table of the sessions.
fn update(seq: u64, facts: &PoolFacts, weight_changes: u64, events: &[DemotedEvent]) -> Vec<u8> {
    let figures = (
        facts.total,
        facts.available,
        facts.evictable,
        facts.protected,
        facts.session_held,
        facts.uncached,
        facts.rows,
        facts.free_rows,
        facts.running,
        facts.waiting,
        0,
        0,
        0,
        0,
        weight_changes,
        false,
    );
    let streaming = facts.sessions.iter().filter(|session| session.streaming);
    let sessions: Vec<_> = streaming
        .map(|session| {
            let holds_row = session.row.is_some();
            let held = |tokens| if holds_row { tokens } else { 0 };
            (
                &session.id,
                holds_row,
                session.inflight,
                session.closing,
                held(session.alloc_tokens),
                held(session.committed_tokens),
                held(session.protected_tokens),
                session.history_tokens,
            )
        })
        .collect();
    let (is_full_table, empty) = (true, [0; 0]);
    frame(&("Update", seq, figures, is_full_table, events, empty, sessions))
}

/// Encodes a message of the shim as a frame.
fn frame(message: &impl Serialize) -> Vec<u8> {
    let message = rmp_serde::to_vec(message).expect("it has numbers and texts");
    let length = u32::try_from(1 + message.len()).expect("it is short").to_le_bytes();
    [&length, &[VERSION][..], &message].concat()
}
