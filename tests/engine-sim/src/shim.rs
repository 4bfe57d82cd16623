//! The shim of a simulated engine: reports the simulator's sessions to the agent.
//!
//! It speaks the shim's protocol on the agent's socket, and connects again like the real one. Each
//! report is a full table, cut into frames as the real shim cuts it. It can't audit pages, and
//! demotes sessions only if told to.

use std::{collections::VecDeque, io, path::PathBuf, sync::Arc, time::Duration};

use serde::Serialize;
use serde_json::{Value, json};
use service::tasks::Tasks;
use tokio::net::UnixStream;
use worker_agent::shim::{HostFacts, RankFacts, codec::VERSION};

use crate::{
    EngineSim,
    core::{PoolFacts, SessionFacts},
};

/// The pause between two reports, and between two attempts to connect, in tests.
const PAUSE: Duration = Duration::from_millis(20);
/// The time limit for the shim's end.
const END_MAX: Duration = Duration::from_secs(5);
/// The most sessions in a frame.
const FRAME_SESSIONS_MAX: usize = 512;
/// The most requests that are carried out between two reports: each has an answer, and a frame has
/// at most 256 of them.
const REQUESTS_MAX: usize = 128;

/// A running shim of rank 0. Ends when it is dropped.
#[derive(Debug)]
pub struct SimShim(Tasks);

impl SimShim {
    /// Starts the shim of `engine`, which connects to the agent's `socket` whenever one listens.
    #[must_use]
    pub fn start(engine: Arc<EngineSim>, socket: PathBuf) -> Self {
        Self::start_as(engine, socket, false, PAUSE)
    }

    /// Starts a shim that demotes sessions.
    #[must_use]
    pub fn start_demoting(engine: Arc<EngineSim>, socket: PathBuf) -> Self {
        Self::start_as(engine, socket, true, PAUSE)
    }

    /// Starts a shim that demotes sessions and pauses for so long between two reports.
    #[must_use]
    pub fn start_paced(engine: Arc<EngineSim>, socket: PathBuf, pause: Duration) -> Self {
        Self::start_as(engine, socket, true, pause)
    }

    fn start_as(engine: Arc<EngineSim>, socket: PathBuf, demotes: bool, pause: Duration) -> Self {
        let tasks = Tasks::default();
        let token = tasks.token();
        tasks.spawn(async move {
            let report = async {
                loop {
                    // There is no agent, or it has ended.
                    let _ = serve(&engine, &socket, demotes, pause).await;
                    tokio::time::sleep(pause).await;
                }
            };
            token.run_until_cancelled(report).await;
        });
        Self(tasks)
    }

    /// Ends the shim. It holds its engine no longer when this returns.
    pub async fn stop(self) {
        self.0.stop(END_MAX).await;
    }
}

impl Drop for SimShim {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Serves one connection to its end.
async fn serve(
    engine: &EngineSim,
    socket: &PathBuf,
    demotes: bool,
    pause: Duration,
) -> io::Result<()> {
    let stream = UnixStream::connect(socket).await?;
    let gone = || io::Error::from(io::ErrorKind::NotConnected);
    let mut facts = engine.pool(0).await.ok_or_else(gone)?;
    send(&stream, &hello(&facts, demotes)).await?;
    let (mut piece, mut commands) = (vec![0; 4096], vec![]);
    let (mut events, mut requests) = (vec![], VecDeque::new());
    let mut seq = 0;
    loop {
        let weight_changes = engine.weight_changes();
        for frame in updates(&mut seq, &facts, weight_changes, &std::mem::take(&mut events)) {
            send(&stream, &frame).await?;
        }
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
            () = tokio::time::sleep(if requests.is_empty() { pause } else { Duration::ZERO }) => {}
        }
        // Any other command asks for a report, and the next one comes at once.
        let read = std::iter::from_fn(|| take_command(&mut commands));
        requests.extend(read.filter_map(|command| read_request(&command)));
        facts = engine.pool(0).await.ok_or_else(gone)?;
        for request in requests.drain(..requests.len().min(REQUESTS_MAX)) {
            let Request { name, number, id, tokens_max } = request;
            events.push(if name == "Prefetch" {
                let loaded = engine.prefetch(0, &id, tokens_max).await.ok_or_else(gone)?;
                facts = engine.pool(0).await.ok_or_else(gone)?;
                json!(["Prefetched", number, id, loaded.unwrap_or(0), loaded.err()])
            } else if name == "Demote" {
                let is_demoted = engine.demote(0, &id).await.ok_or_else(gone)?;
                facts = engine.pool(0).await.ok_or_else(gone)?;
                let refusal = (!is_demoted).then_some("busy");
                json!(["Demoted", number, id, refusal])
            } else {
                let found = facts.session(&id).map(session_facts);
                json!(["Inspected", number, found])
            });
        }
    }
}

/// Takes the next complete command from what was read, without its length and version.
fn take_command(read: &mut Vec<u8>) -> Option<Vec<u8>> {
    let length = u32::from_le_bytes(*read.first_chunk::<4>()?) as usize;
    let end = 4 + length;
    (read.len() >= end).then(|| read.drain(..end).skip(5).collect())
}

/// A command that is a request about a session.
struct Request {
    name: String,
    number: u64,
    id: String,
    tokens_max: usize,
}

fn read_request(command: &[u8]) -> Option<Request> {
    let prefetch = || rmp_serde::from_slice::<(String, u64, String, usize)>(command);
    let other = || rmp_serde::from_slice::<(String, u64, String)>(command);
    let (name, number, id, tokens_max) =
        prefetch().or_else(|_| other().map(|(name, number, id)| (name, number, id, 0))).ok()?;
    Some(Request { name, number, id, tokens_max })
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
    // The engine is guarded, and has one pool.
    let pin_safety = (inert, Some(""));
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
        pin_safety,
    ))
}

/// Returns updates with a full table of the sessions, with the next numbers.
fn updates(
    seq: &mut u64,
    facts: &PoolFacts,
    weight_changes: u64,
    events: &[Value],
) -> Vec<Vec<u8>> {
    let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let figures = RankFacts {
        dp_rank: 0,
        read_at: service::clock::now(),
        pool_tokens: facts.total as u64,
        available_tokens: facts.available as u64,
        evictable_tokens: facts.evictable as u64,
        protected_tokens: facts.protected as u64,
        held_tokens: facts.session_held as u64,
        uncached_tokens: facts.uncached as u64,
        rows_total: count(facts.rows),
        rows_free: count(facts.free_rows),
        running: count(facts.running),
        waiting: count(facts.waiting),
        events_lost: 0,
        recounts: 0,
        samples: 0,
        samples_ns: 0,
        weight_changes,
        has_old_kv: false,
        host: facts.host.map(|host| HostFacts {
            total_tokens: host.total as u64,
            used_tokens: host.used as u64,
            evictable_tokens: host.evictable as u64,
            // Copies end within a step here.
            loading_tokens: 0,
            writing_tokens: 0,
            loaded_tokens: host.loaded as u64,
            loads_us: host.load_us,
        }),
    };
    let streaming = facts.sessions.iter().filter(|session| session.streaming);
    let sessions: Vec<_> = streaming.map(session_facts).collect();
    let mut parts: Vec<&[SessionTuple<'_>]> = sessions.chunks(FRAME_SESSIONS_MAX).collect();
    if parts.is_empty() {
        parts.push(&[]);
    }
    let last = parts.len() - 1;
    let mut frames = vec![];
    for (index, part) in parts.into_iter().enumerate() {
        let (begins_table, ends_table, gone) = (index == 0, index == last, [0; 0]);
        let (events, number) = (if begins_table { events } else { &[] }, *seq);
        let update = ("Update", number, figures, begins_table, ends_table, events, gone, part);
        frames.push(frame(&update));
        *seq += 1;
    }
    frames
}

/// The facts of a session, in the order of the protocol.
type SessionTuple<'a> = (&'a String, bool, bool, bool, usize, usize, usize, usize);

fn session_facts(session: &SessionFacts) -> SessionTuple<'_> {
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
}

/// Encodes a message of the shim as a frame.
fn frame(message: &impl Serialize) -> Vec<u8> {
    let message = rmp_serde::to_vec(message).expect("it has numbers and texts");
    let length = u32::try_from(1 + message.len()).expect("it is short").to_le_bytes();
    [&length, &[VERSION][..], &message].concat()
}
