//! Sets the attributes of a turn's spans: its route, its placement and its end.
//!
//! No attribute has a part of a prompt or an answer, a client's id or a key: a session appears as
//! its digest.

use contract::route::Route;
use http::{Response, request::Parts};
use service::{
    clock::whole_millis,
    traces::{
        Traces,
        span::{Span, Trace},
    },
};

use super::{ended::TurnRecord, error::NoAnswer};
use crate::metrics::TurnOutcome;

/// The name of a status in OpenTelemetry's conventions.
const STATUS: &str = "http.response.status_code";
pub(super) const WORKER: &str = "berth.worker";

/// Begins a turn's first span, and leaves it in the request's extensions. Routes that aren't turns
/// get none.
pub(crate) fn begin(traces: &Traces, parts: &mut Parts, route: Route) -> Trace {
    if !route.kind.is_turn() {
        return Trace::default();
    }
    let trace = traces.begin(&mut parts.headers, "turn");
    if trace.is_on() {
        trace.change(|span| span.set("http.route", route.path));
        parts.extensions.insert(trace.clone());
    }
    trace
}

pub(crate) fn refuse(trace: &Trace, code: &'static str, status: u16) {
    trace.change(|span| {
        span.set("error.type", code);
        set_status(span, status);
    });
}

pub(super) fn end(trace: &Trace, record: &TurnRecord) {
    trace.change(|span| {
        let digest = |key: &contract::id::SessionKey| key.digest().to_string();
        span.set("berth.turn", format!("{:016x}", record.turn));
        span.set_known("berth.session", record.session.as_ref().map(digest));
        span.set_known("berth.parent_session", record.parent.as_ref().map(digest));
        span.set(WORKER, &*record.worker);
        span.set_known("berth.prefill_worker", record.prefill_worker.as_deref());
        span.set("berth.placement.reason", record.reason.as_str());
        span.set("berth.retried", record.is_retried);
        span.set_known("berth.retention", record.retention.map(|retention| retention.as_str()));
        span.set("berth.outcome", record.outcome.as_str());
        span.set_known("berth.ttft_ms", record.ttft.map(whole_millis));
        span.set_known("berth.prompt_tokens", record.usage.prompt_tokens);
        span.set_known("berth.cached_tokens", record.usage.cached_tokens);
        span.set_known("berth.output_tokens", record.usage.output_tokens);
        if let Some(status) = record.status {
            set_status(span, status);
        }
        match record.outcome {
            TurnOutcome::WorkerFailed | TurnOutcome::NotSent | TurnOutcome::TimedOut => {
                span.fail(record.outcome.as_str());
            }
            TurnOutcome::Ok | TurnOutcome::ErrorAnswer | TurnOutcome::ClientGone => {}
        }
    });
}

pub(super) fn record_head<B>(span: &mut Span, answer: &Result<Response<B>, NoAnswer>) {
    match answer {
        Ok(response) => set_status(span, response.status().as_u16()),
        Err(_) => span.fail("no answer"),
    }
}

/// A status is a failure if the client isn't to blame.
fn set_status(span: &mut Span, status: u16) {
    span.set(STATUS, u64::from(status));
    if status >= 500 {
        span.fail("error answer");
    }
}
