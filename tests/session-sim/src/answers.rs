//! Reads the engine's answers as the agent's data port does, with the agent's own scanner.

use http::StatusCode;
use serde_json::json;
use worker_agent::{data_port::response_scanner::Scanner, session::Outcome};

use engine_sim::request::{Finish, Output};

/// Returns the outcome that the data port reads from the end of the engine's answer. The answer is
/// one of `/generate`, or of a chat route. A chat answer says less: neither where a turn was
/// aborted nor whether it was retracted.
pub(super) fn read(chat: bool, streams: bool, output: &Output, completion: usize) -> Outcome {
    let (kind, message, status) = match &output.finish {
        Some(Finish::Abort { message, queued: true, .. }) => ("abort", Some(message), None),
        Some(Finish::Abort { message, status, .. }) => ("abort", Some(message), *status),
        _ => ("length", None, None),
    };
    let answer = match status {
        Some(status) if chat => json!({ "error": { "message": message, "code": status } }),
        _ if chat => json!({
            "choices": [{ "finish_reason": kind }],
            "usage": {
                "prompt_tokens": output.prompt_tokens,
                "completion_tokens": completion,
                "prompt_tokens_details": { "cached_tokens": output.cached_tokens },
            },
        }),
        _ => json!({ "meta_info": {
            "finish_reason": { "type": kind, "message": message, "status_code": status },
            "prompt_tokens": output.prompt_tokens,
            "completion_tokens": completion,
            "cached_tokens": output.cached_tokens,
            "num_retractions": output.retractions,
        }}),
    };
    let mut scanner = Scanner::new(None);
    let whole = scanner.push(answer.to_string().as_bytes());
    assert!(whole, "the answer is whole JSON");
    // Without streaming, an error is an HTTP status. In a stream, the status was sent before the
    // error.
    let status = status.filter(|_| !streams).and_then(|code| StatusCode::from_u16(code).ok());
    scanner.outcome(status.unwrap_or(StatusCode::OK))
}
