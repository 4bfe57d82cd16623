//! Prefill and decode mode: the hand-off of KV between two simulators, and its faults.
//!
//! A prefill engine has a bootstrap server on a port of its own. Both engines get the same request
//! with the same room. The decode engine asks the bootstrap server for the room's KV, and waits;
//! the prefill engine computes the prompt only then, generates one token, and hands the KV over.
//! Here the KV is the prompt's token ids, so a wrong hand-off gives a wrong answer. Texts of errors
//! and aborts are SGLang's. In the real engine the KV takes a way of its own, not HTTP.

mod config;
mod server;

pub use self::config::{EngineMode, HandOffConfig, HandOffFault};
use super::{
    owner::{EngineHandle, EngineTurn, Progress},
    request::{Bootstrap, Finish, Submit},
};
use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tokio::sync::{oneshot, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// The host that the engine's own health requests name; they hand nothing over.
const FAKE_HOST: &str = "2.2.2.2";

/// What each engine waits for: the name of the failure, and of the state in which it waits. A
/// decode engine that knows the prefill engine has nothing more to agree on with it.
const PREFILL_WAITS: (&str, &str) = ("Prefill bootstrap", "Bootstrapping");
const DECODE_WAITS: (&str, &str) = ("Decode transfer", "WaitingForInput");

/// The KV of a prompt on its way.
#[derive(Debug, Serialize, Deserialize)]
struct Kv {
    input_ids: Vec<u32>,
    cached_tokens: usize,
}

/// What a decode engine gets for its room.
type Delivery = Result<Kv, String>;

/// A room of which one engine has come.
#[derive(Debug)]
enum Room {
    PrefillWaits(oneshot::Sender<oneshot::Sender<Delivery>>),
    DecodeWaits(oneshot::Sender<Delivery>),
}

/// The hand-offs of one engine.
#[derive(Debug)]
pub(super) struct HandOffs {
    config: HandOffConfig,
    /// The port on which the bootstrap server listens; 0 without one.
    bootstrap_port: u16,
    /// Ends the bootstrap server.
    server_stopped: CancellationToken,
    dp_size: usize,
    rooms: Mutex<HashMap<u64, Room>>,
    /// The requests that wait for the other engine, by their ids.
    waiting: Mutex<HashMap<String, CancellationToken>>,
    fault: Mutex<(HandOffFault, u32, fastrand::Rng)>,
    /// How many hand-offs have begun and not ended.
    running: AtomicU64,
    client: Client<HttpConnector, Empty<Bytes>>,
    tasks: TaskTracker,
    killed: CancellationToken,
}

/// A request while it is handed over.
struct HandOff {
    owner: Arc<HandOffs>,
    handle: EngineHandle,
    ticket: u64,
    rank: usize,
    submit: Submit,
    bootstrap: Bootstrap,
    room: u64,
    /// The progress that the client sees.
    progress: watch::Sender<Progress>,
    /// Ends when the client has gone.
    gone: CancellationToken,
    /// Ends when the client aborts the request.
    aborted: CancellationToken,
}

impl Drop for HandOff {
    fn drop(&mut self) {
        self.owner.waiting.lock().remove(&self.submit.rid);
        self.owner.rooms.lock().remove(&self.room);
        self.owner.running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Why a hand-off ended early.
enum End {
    Gone,
    Finish(Finish),
}

impl HandOffs {
    /// Starts the bootstrap server, if the engine has one.
    pub(super) fn start(
        config: &HandOffConfig,
        dp_size: usize,
        host: std::net::IpAddr,
        tasks: &TaskTracker,
        killed: &CancellationToken,
    ) -> std::io::Result<Arc<Self>> {
        let listener = (config.mode == EngineMode::Prefill)
            .then(|| std::net::TcpListener::bind((host, config.bootstrap_port)))
            .transpose()?;
        let bootstrap_port = match &listener {
            Some(listener) => listener.local_addr()?.port(),
            None => config.bootstrap_port,
        };
        let random = fastrand::Rng::with_seed(u64::from(bootstrap_port));
        let this = Arc::new(Self {
            config: config.clone(),
            bootstrap_port,
            server_stopped: killed.child_token(),
            dp_size,
            rooms: Mutex::default(),
            waiting: Mutex::default(),
            fault: Mutex::new((config.fault, config.fault_per_mille, random)),
            running: AtomicU64::new(0),
            client: Client::builder(TokioExecutor::new()).build_http(),
            tasks: tasks.clone(),
            killed: killed.clone(),
        });
        if let Some(listener) = listener {
            listener.set_nonblocking(true)?;
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let routes = server::routes(Arc::clone(&this));
            let stopped = this.server_stopped.clone();
            tasks.spawn(async move {
                tokio::select! {
                    biased;
                    () = stopped.cancelled() => {}
                    _ = axum::serve(listener, routes) => {}
                }
            });
        }
        Ok(this)
    }

    /// Ends the bootstrap server, as if its thread had died.
    pub(super) fn stop_bootstrap(&self) {
        self.server_stopped.cancel();
    }

    pub(super) fn bootstrap_port(&self) -> u16 {
        self.bootstrap_port
    }

    /// Returns how many hand-offs have begun and not ended.
    pub(super) fn running(&self) -> u64 {
        self.running.load(Ordering::Relaxed)
    }

    /// Sets the fault of hand-offs, and the share that has it, in thousandths.
    pub(super) fn set_fault(&self, fault: HandOffFault, per_mille: u32) {
        let mut current = self.fault.lock();
        (current.0, current.1) = (fault, per_mille);
    }

    /// Whether the next hand-off has this fault.
    fn has_fault(&self, fault: HandOffFault) -> bool {
        let (current, per_mille, random) = &mut *self.fault.lock();
        *current == fault && random.u32(..1000) < *per_mille
    }

    /// Aborts the requests that wait for the other engine.
    pub(super) fn abort(&self, rid: &str, all: bool) {
        for (waiting, token) in self.waiting.lock().iter() {
            if all || waiting.starts_with(rid) {
                token.cancel();
            }
        }
    }

    /// Begins the hand-off of a request. `rank` is the DP rank that the request names.
    pub(super) fn submit(
        self: &Arc<Self>,
        handle: EngineHandle,
        ticket: u64,
        rank: Option<usize>,
        submit: Submit,
    ) -> EngineTurn {
        let (sender, progress) = watch::channel(Progress::default());
        let bootstrap = submit.bootstrap.clone().unwrap_or_default();
        let Some(room) = bootstrap.room else {
            let rid = &submit.rid;
            let finish = Finish::bad_request(format!(
                "Invalid request: Disaggregated request received without bootstrap room id. \
                 req.rid='{rid}'"
            ));
            sender.send_modify(|progress| progress.finish = Some(finish));
            return EngineTurn::handed_over(progress, CancellationToken::new());
        };
        let ranks = self.dp_size as u64;
        let implied = usize::try_from(room % ranks).expect("below the number of ranks");
        let rank = match self.config.mode {
            EngineMode::Prefill => rank.unwrap_or(implied),
            EngineMode::Null | EngineMode::Decode => rank.unwrap_or(0),
        };
        let (gone, aborted) = (CancellationToken::new(), CancellationToken::new());
        self.running.fetch_add(1, Ordering::Relaxed);
        self.waiting.lock().insert(submit.rid.clone(), aborted.clone());
        let (owner, killed) = (Arc::clone(self), self.killed.clone());
        let gone_token = gone.clone();
        let hand_off = HandOff {
            owner,
            handle,
            ticket,
            rank,
            submit,
            bootstrap,
            room,
            progress: sender,
            gone,
            aborted,
        };
        let mode = self.config.mode;
        self.tasks.spawn(async move {
            let run = async {
                match mode {
                    EngineMode::Prefill => hand_off.prefill(implied).await,
                    EngineMode::Null | EngineMode::Decode => hand_off.decode().await,
                }
            };
            tokio::select! {
                biased;
                () = killed.cancelled() => {}
                () = run => {}
            }
        });
        EngineTurn::handed_over(progress, gone_token)
    }

    /// Waits until the decode engine of a room has come.
    async fn wait_for_decode(&self, room: u64) -> oneshot::Sender<Delivery> {
        let waits = {
            let mut rooms = self.rooms.lock();
            match rooms.remove(&room) {
                Some(Room::DecodeWaits(decode)) => return decode,
                Some(Room::PrefillWaits(_)) | None => {
                    let (sender, waits) = oneshot::channel();
                    rooms.insert(room, Room::PrefillWaits(sender));
                    waits
                }
            }
        };
        match waits.await {
            Ok(decode) => decode,
            Err(_) => std::future::pending().await,
        }
    }
}

impl HandOff {
    /// Waits for something, at most as long as for the other engine, while the client is there.
    /// `stage` is what fails if it doesn't come, and the engine's name for that state.
    async fn wait<T>(
        &self,
        what: impl Future<Output = T>,
        (stage, state): (&str, &str),
    ) -> Result<T, End> {
        tokio::select! {
            biased;
            () = self.gone.cancelled() => Err(End::Gone),
            () = self.aborted.cancelled() => Err(self.fail(stage, "Aborted by AbortReq.")),
            done = what => Ok(done),
            () = tokio::time::sleep(self.owner.config.bootstrap_timeout) => {
                let room = self.room;
                let elapsed = self.owner.config.bootstrap_timeout.as_secs_f64();
                let reason =
                    format!("Request {room} timed out after {elapsed:.1}s in KVPoll.{state}");
                Err(self.fail(stage, &reason))
            }
        }
    }

    /// Returns the end of a failed hand-off, in the engine's words.
    fn fail(&self, what: &str, reason: &str) -> End {
        let (room, rid) = (self.room, &self.submit.rid);
        let name = if what.starts_with("Decode") { "decode_req.req" } else { "req" };
        let message = format!(
            "{what} failed for request rank=0 {name}.rid='{rid}' {name}.bootstrap_room={room} with \
             exception KVTransferError(bootstrap_room={room}): {reason}"
        );
        End::Finish(Finish::Abort { message, status: Some(500), queued: false })
    }

    fn end(&self, end: End) {
        if let End::Finish(finish) = end {
            self.progress.send_modify(|progress| {
                progress.prompt_tokens = self.submit.input_ids.len();
                progress.finish = Some(finish);
            });
        }
    }

    async fn prefill(self, implied_rank: usize) {
        if let Err(end) = self.try_prefill(implied_rank).await {
            self.end(end);
        }
    }

    async fn try_prefill(&self, implied_rank: usize) -> Result<(), End> {
        let is_named = self.bootstrap.prefill_rank.is_some();
        if (!is_named && self.rank != implied_rank) || self.owner.has_fault(HandOffFault::Rank) {
            let reason = format!(
                "follow_bootstrap_room conflict: dispatched to dp_rank {} but bootstrap_room {} \
                 implies dp_rank {implied_rank}. Set \
                 SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1 to allow mixed routing.",
                self.rank, self.room
            );
            return Err(self.fail("Prefill bootstrap", &reason));
        }
        let is_fake = self.bootstrap.host == FAKE_HOST;
        let mut decode = if is_fake {
            None
        } else if self.owner.has_fault(HandOffFault::Bootstrap) {
            self.wait(std::future::pending::<()>(), PREFILL_WAITS).await?;
            None
        } else {
            let waits = self.owner.wait_for_decode(self.room);
            Some(self.wait(waits, PREFILL_WAITS).await?)
        };
        let mut submit = self.submit.clone();
        submit.sampling.max_new_tokens = Some(1);
        let (inner, mut computed) = watch::channel(Progress::default());
        let guard = self.handle.turn_into(self.ticket, Some(self.rank), true, submit, inner).await;
        let done = async {
            computed.wait_for(|progress| progress.finish.is_some()).await.map(|it| it.clone())
        };
        let decode_gone = async {
            match &mut decode {
                Some(decode) => decode.closed().await,
                None => std::future::pending().await,
            }
        };
        let progress = tokio::select! {
            biased;
            () = self.gone.cancelled() => return Err(End::Gone),
            () = decode_gone => {
                return Err(self.fail("Prefill transfer", "Decode instance could be dead"));
            }
            progress = done => progress.map_err(|_| End::Gone)?,
        };
        drop(guard);
        let is_aborted = matches!(progress.finish, Some(Finish::Abort { .. }));
        if let Some(decode) = decode.filter(|_| !is_aborted) {
            let lost = || self.fail("Prefill transfer", "Failed to send kv chunk");
            if self.owner.has_fault(HandOffFault::Transfer) {
                let _ = decode.send(Err("Failed to get kvcache from prefill instance".to_owned()));
                return Err(lost());
            }
            let input_ids = self.submit.input_ids.clone();
            let kv = Kv { input_ids, cached_tokens: progress.cached_tokens };
            decode.send(Ok(kv)).map_err(|_| lost())?;
        }
        self.progress.send_replace(progress);
        Ok(())
    }

    async fn decode(self) {
        if let Err(end) = self.try_decode().await {
            self.end(end);
        }
    }

    async fn try_decode(&self) -> Result<(), End> {
        let mut submit = self.submit.clone();
        if self.bootstrap.host != FAKE_HOST {
            let kv = self.wait(self.fetch(), DECODE_WAITS).await??;
            if self.owner.has_fault(HandOffFault::Memory) {
                let message = "Out of memory even after retracting all other requests in the \
                               decode batch. Aborting the last request."
                    .to_owned();
                return Err(End::Finish(Finish::Abort {
                    message,
                    status: Some(500),
                    queued: false,
                }));
            }
            submit.input_ids = kv.input_ids;
            submit.given = Some(kv.cached_tokens);
        }
        let mut ended = self.progress.subscribe();
        let progress = self.progress.clone();
        let rank = Some(self.rank);
        let _guard = self.handle.turn_into(self.ticket, rank, true, submit, progress).await;
        tokio::select! {
            biased;
            () = self.gone.cancelled() => {}
            _ = ended.wait_for(|progress| progress.finish.is_some()) => {}
        }
        Ok(())
    }

    /// Asks the prefill engine for the room's KV.
    async fn fetch(&self) -> Result<Kv, End> {
        let Bootstrap { host, port, .. } = &self.bootstrap;
        let url = format!("http://{host}:{port}/hand_off/{}", self.room);
        let request = Request::post(url).body(Empty::new()).expect("a valid URL");
        let answer = async {
            let answer = self.owner.client.request(request).await.ok()?;
            let status = answer.status();
            Some((status, answer.into_body().collect().await.ok()?.to_bytes()))
        };
        match answer.await {
            Some((StatusCode::OK, kv)) => serde_json::from_slice(&kv).map_err(|_| End::Gone),
            Some((_, why)) => Err(self.fail("Decode transfer", &String::from_utf8_lossy(&why))),
            // The engine first tries for about 14 s, and then aborts the request itself.
            None => Err(self.fail("Decode handshake", "Aborted by AbortReq.")),
        }
    }
}
