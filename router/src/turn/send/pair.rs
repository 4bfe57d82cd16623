//! Runs a turn on a pair of engines: sends both halves at once, and couples their failures.
//!
//! Prefill and decode engine get the client's request through their agents, with the same
//! [`Bootstrap`], by which they find each other. The decode engine's answer is the client's. It
//! can't begin before the KV is handed over, so its head is held back until its first bytes: until
//! then, a failure of either half becomes a status.
//!
//! - The prefill half fails: the decode half is dropped, so that its agent aborts it, and the
//!   client gets the prefill engine's error.
//! - The decode half fails, or the client leaves: the prefill half is dropped.
//! - Neither answers: both are dropped after the setting `timeouts.bootstrap_ms_max`.

use std::{pin::Pin, sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use contract::{
    bootstrap::{Bootstrap, Half},
    claim,
};
use http::{Response, response::Parts};
use http_body_util::BodyExt as _;
use service::{clock::now, traces::record::SpanKind};
use tracing::debug;

use super::{
    Try,
    agent_request::{self, Told},
};
use crate::{
    fleet::{lease::LoadLease, worker::WorkerRef},
    metrics::HandOffEnd,
    turn::{
        admit::OutboundTurn,
        agent_body::{
            AgentBody, Incoming, is_event_stream,
            logprobs::{self, LogprobMerger, PromptLogprobs},
        },
        error::NoAnswer,
        placer::assignment::{Assignment, Destination, PrefillHalf},
        shared::Shared,
        spans,
    },
};

/// One token's log probabilities have about 40 bytes, so a prompt of 800,000 tokens fits.
const LOGPROB_BYTES_MAX: usize = 32 << 20;
/// Kept for a prefill engine's error.
const ERROR_BYTES_MAX: usize = 64 << 10;
/// What sends more than this is no prefill engine.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Limits the wait for the prefill engine's error after the decode engine has failed.
const CAUSE_MAX: Duration = Duration::from_millis(50);
/// After the decode engine's first bytes, the prefill engine has only to notice that the KV was
/// taken.
const REST_MAX: Duration = Duration::from_secs(10);

enum PrefillEnd {
    /// Carries the kept part of the answer.
    Done(Bytes),
    Failed(Response<Bytes>),
}

type PrefillRun = Pin<Box<dyn Future<Output = Result<PrefillEnd, NoAnswer>> + Send>>;

struct Begun {
    head: Parts,
    first: Option<Bytes>,
    rest: Incoming,
}

/// Both halves while they run, except the decode half's future.
pub(super) struct Halves {
    prefill: PrefillRun,
    prefill_worker: WorkerRef,
    decode_worker: WorkerRef,
    /// Whether the prefill engine's log probabilities go into the answer.
    merges: bool,
    late: NoAnswer,
}

impl Halves {
    /// The decode half goes to `decode`.
    pub(super) fn new(
        shared: &Shared,
        outbound: &OutboundTurn,
        half: &mut PrefillHalf,
        decode: &Destination,
        body: Bytes,
    ) -> Self {
        Self {
            prefill: run_prefill(shared, outbound, half, body),
            prefill_worker: half.to.worker,
            decode_worker: decode.worker,
            merges: outbound.turn.merges_logprobs,
            late: NoAnswer::HandOffLate {
                prefill: half.to.name.clone(),
                decode: decode.name.clone(),
            },
        }
    }

    /// Sends both halves, within the turn's time.
    pub(super) async fn send(
        self,
        shared: &Shared,
        outbound: &OutboundTurn,
        assignment: &Assignment,
        body: Bytes,
    ) -> Try {
        let worker = self.decode_worker;
        let decode = begin_decode(shared, outbound, assignment, body);
        let running = self.run(shared, decode);
        match tokio::time::timeout_at(outbound.arrival.deadline.into(), running).await {
            Ok(tried) => tried,
            Err(_) => Try { answer: Err(NoAnswer::TimedOut), worker },
        }
    }

    /// Waits until the client's answer has begun, or until one half has failed, and the other is
    /// dropped.
    async fn run(
        mut self,
        shared: &Shared,
        decode: impl Future<Output = Result<Begun, NoAnswer>>,
    ) -> Try {
        let late = tokio::time::sleep_until((now() + shared.bootstrap_max).into());
        tokio::pin!(decode, late);
        let (mut prefilled, mut begun) = (None, None);
        let (prefill_worker, decode_worker) = (self.prefill_worker, self.decode_worker);
        let fail = |answer, worker, end| {
            shared.metrics.count_hand_off(end);
            Try { answer, worker }
        };
        while begun.is_none() || (self.merges && prefilled.is_none()) {
            let is_open = prefilled.is_none();
            tokio::select! {
                biased;
                end = &mut self.prefill, if prefilled.is_none() => match end {
                    Ok(PrefillEnd::Done(answer)) => prefilled = Some(answer),
                    Ok(PrefillEnd::Failed(response)) => {
                        let answer = Ok(response.map(AgentBody::whole));
                        return fail(answer, prefill_worker, HandOffEnd::PrefillFailed);
                    }
                    Err(error) => {
                        return fail(Err(error), prefill_worker, HandOffEnd::PrefillFailed);
                    }
                },
                answer = &mut decode, if begun.is_none() => match answer {
                    Ok(answer) if answer.has_failed() => {
                        if is_open
                            && answer.may_fail_by_prefill()
                            && let Some(cause) = self.find_cause().await
                        {
                            return fail(Ok(cause), prefill_worker, HandOffEnd::PrefillFailed);
                        }
                        let answer = Ok(answer.into_response(None));
                        return fail(answer, decode_worker, HandOffEnd::DecodeFailed);
                    }
                    Ok(answer) => begun = Some(answer),
                    Err(error) => {
                        return fail(Err(error), decode_worker, HandOffEnd::DecodeFailed);
                    }
                },
                () = &mut late, if is_open => {
                    return fail(Err(self.late), prefill_worker, HandOffEnd::Late);
                }
            }
        }
        shared.metrics.count_hand_off(HandOffEnd::Done);
        let begun = begun.expect("the loop ends when the answer has begun");
        if prefilled.is_none() {
            // The rest is read so that the connection stays usable.
            let rest = tokio::time::timeout(REST_MAX, self.prefill);
            shared.tasks.spawn(async move { drop(rest.await) });
        }
        let prefilled = prefilled.filter(|_| self.merges);
        Try { answer: Ok(begun.into_response(prefilled)), worker: decode_worker }
    }
}

impl Halves {
    /// Returns the prefill engine's error, if it caused the decode engine's. A failed prefill
    /// engine tells the decode engine, whose error may come a moment earlier.
    async fn find_cause(&mut self) -> Option<Response<AgentBody>> {
        match tokio::time::timeout(CAUSE_MAX, &mut self.prefill).await {
            Ok(Ok(PrefillEnd::Failed(response))) => Some(response.map(AgentBody::whole)),
            Ok(Ok(PrefillEnd::Done(_)) | Err(_)) | Err(_) => None,
        }
    }
}

impl Begun {
    fn has_failed(&self) -> bool {
        let has_error = |first: &Bytes| logprobs::has_error(first);
        !self.head.status.is_success() || self.first.as_ref().is_some_and(has_error)
    }

    /// Whether the failure may be a consequence of the prefill half's.
    fn may_fail_by_prefill(&self) -> bool {
        let is_agents = self.head.headers.contains_key(claim::REFUSAL);
        !is_agents && !self.head.status.is_client_error()
    }

    /// `prefilled` is there if its log probabilities of the prompt are to be merged.
    fn into_response(self, prefilled: Option<Bytes>) -> Response<AgentBody> {
        let Self { head, first, rest } = self;
        let is_stream = is_event_stream(&head.headers);
        let logprobs = prefilled.and_then(|answer| PromptLogprobs::find(&answer));
        let merger = logprobs.map(|logprobs| LogprobMerger::new(logprobs, is_stream));
        Response::from_parts(head, AgentBody::begun(first, rest, merger))
    }
}

async fn begin_decode(
    shared: &Shared,
    outbound: &OutboundTurn,
    assignment: &Assignment,
    body: Bytes,
) -> Result<Begun, NoAnswer> {
    let response = agent_request::send(shared, outbound, assignment, body).await?;
    let (head, mut rest) = response.into_parts();
    let silent = shared.upstream.pulses().wait_until_silent(assignment.to.worker.agent);
    let worker = || assignment.to.name.clone();
    let first = tokio::select! {
        biased;
        frame = rest.frame() => frame,
        () = silent => return Err(NoAnswer::Silent { worker: worker(), was_sent: true }),
    };
    match first {
        Some(Ok(frame)) => Ok(Begun { head, first: frame.into_data().ok(), rest }),
        Some(Err(source)) => Err(NoAnswer::AnswerBrokenOff { worker: worker(), source }),
        None => Ok(Begun { head, first: None, rest }),
    }
}

/// The future holds the half's lease, so every end gives the half's place back by its drop.
fn run_prefill(
    shared: &Shared,
    outbound: &OutboundTurn,
    half: &mut PrefillHalf,
    body: Bytes,
) -> PrefillRun {
    let bootstrap = Bootstrap { half: Half::Prefill, ..half.bootstrap.clone() };
    let (to, resident_tokens) = (half.to.clone(), half.resident_tokens);
    let told = Told { to: &to, resident_tokens, bootstrap: Some(&bootstrap) };
    let mut span = outbound.arrival.observers.trace.child("prefill", SpanKind::Client);
    span.set(spans::WORKER, &*to.name);
    let mut request = agent_request::turn_request(outbound, told, None, body);
    span.inject(request.headers_mut());
    let (upstream, deadline) = (Arc::clone(&shared.upstream), outbound.arrival.deadline);
    let lease = half.lease.take();
    let merges = outbound.turn.merges_logprobs;
    let kept_max = if merges { LOGPROB_BYTES_MAX } else { ERROR_BYTES_MAX };
    Box::pin(async move {
        // The span ends with the prefill engine's answer.
        let mut span = span;
        let sent = agent_request::send_request(&upstream, &to, request, deadline).await;
        spans::record_head(&mut span, &sent);
        let response = sent?;
        let silent = upstream.pulses().wait_until_silent(to.worker.agent);
        tokio::select! {
            biased;
            end = read_prefill(response, lease, kept_max, &to.name) => end,
            () = silent => Err(NoAnswer::Silent { worker: to.name.clone(), was_sent: true }),
        }
    })
}

async fn read_prefill(
    response: Response<Incoming>,
    mut lease: Option<LoadLease>,
    kept_max: usize,
    worker_name: &str,
) -> Result<PrefillEnd, NoAnswer> {
    let (head, mut body) = response.into_parts();
    let (mut kept, mut read_bytes) = (BytesMut::new(), 0_usize);
    while let Some(frame) = body.frame().await {
        let broken_off =
            |source| NoAnswer::AnswerBrokenOff { worker: worker_name.to_owned(), source };
        let Ok(data) = frame.map_err(broken_off)?.into_data() else { continue };
        if let Some(lease) = &mut lease {
            lease.record_first_part();
        }
        read_bytes = read_bytes.saturating_add(data.len());
        if read_bytes > ANSWER_BYTES_MAX {
            return Err(NoAnswer::AnswerTooLong { worker: worker_name.to_owned() });
        }
        let room = kept_max.saturating_sub(kept.len());
        kept.extend_from_slice(&data[..data.len().min(room)]);
    }
    drop(lease);
    let answer = kept.freeze();
    let has_failed = !head.status.is_success() || logprobs::has_error(&answer);
    if has_failed {
        debug!(worker = worker_name, status = head.status.as_u16(), "prefill failed");
        return Ok(PrefillEnd::Failed(Response::from_parts(head, answer)));
    }
    Ok(PrefillEnd::Done(answer))
}
