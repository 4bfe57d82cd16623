//! Says what the agent's spans of a turn tell: its route, its wait, its end.
//!
//! A stage of staged prefill is a turn whose first span is named `stage`. No attribute has a part
//! of a prompt or an answer, a client's id or a key.

use contract::claim;
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
) -> Trace {
    let trace = traces.begin(headers, name);
    trace.change(|span| {
        span.set("http.route", path);
        span.set_known("berth.turn", turn_id(headers));
    });
    trace
}

fn turn_id(headers: &HeaderMap) -> Option<String> {
    let text = headers.get(claim::TURN)?.to_str().ok()?;
    let is_number = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_number.then(|| text.to_owned())
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

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn only_a_routers_number_names_a_turn() {
        let of = |text: &'static str| {
            turn_id(&HeaderMap::from_iter([(claim::TURN, HeaderValue::from_static(text))]))
        };
        assert_eq!(of("00c0ffee00c0ffee").as_deref(), Some("00c0ffee00c0ffee"));
        assert_eq!(of("a secret of many"), None);
        assert_eq!(of("00c0ffee00c0ffee0"), None);
    }
}
