//! Says what the agent's spans of a turn tell: its route, its wait, its end.
//!
//! A stage of staged prefill is a turn whose first span is named `stage`. No attribute has a part
//! of a prompt or an answer, a client's id or a key.

use contract::envelope::{self, TurnEnvelope};
use http::HeaderMap;
use service::{
    refusal::Refusal,
    traces::{
        Traces,
        span::{Span, Trace},
    },
};

use crate::session::Outcome;

pub(crate) fn begin(
    traces: &Traces,
    headers: &mut HeaderMap,
    path: &'static str,
    name: &'static str,
    envelope: &Result<TurnEnvelope, envelope::Error>,
) -> Trace {
    let turn_id = envelope.as_ref().ok().and_then(|envelope| envelope.turn);
    let trace = traces.begin(headers, name);
    trace.change(|span| {
        span.set("http.route", path);
        span.set_known("berth.turn", turn_id.map(String::from));
    });
    trace
}

pub(crate) fn refuse(trace: &Trace, refusal: &Refusal) {
    trace.change(|span| {
        span.set("error.type", refusal.code.as_str());
        set_status(span, refusal.code.status().as_u16());
    });
}

/// An answer is a failure if the client isn't to blame.
pub(super) fn set_status(span: &mut Span, status: u16) {
    span.set("http.response.status_code", u64::from(status));
    if status >= 500 {
        span.fail("error answer");
    }
}

pub(super) fn end(trace: &Trace, outcome: Outcome) {
    trace.change(|span| {
        span.set("berth.outcome", outcome.as_str());
        match outcome {
            Outcome::Finished(Some(usage)) | Outcome::Unheard(Some(usage)) => {
                span.set("berth.prompt_tokens", usage.prompt_tokens);
                span.set_known("berth.cached_tokens", usage.cached_tokens);
                span.set("berth.output_tokens", usage.completion_tokens);
            }
            Outcome::Lost | Outcome::Partial => span.fail(outcome.as_str()),
            Outcome::Finished(None)
            | Outcome::Unheard(None)
            | Outcome::Aborted
            | Outcome::Refused => {}
        }
    });
}
