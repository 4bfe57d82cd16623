//! The engine's answers as the agent's data port reads them, by its own scanner.

use http::StatusCode;
use worker_agent::{answer::Scanner, session::Outcome};

use crate::engine_sim::request::{Finish, Output};

/// Reads the engine's last word as the data port does.
pub(super) fn read(streams: bool, output: &Output, completion: usize) -> Outcome {
    let (reason, status) = match &output.finish {
        Some(Finish::Abort { message, queued: true, .. }) => {
            (serde_json::json!({ "type": "abort", "message": message }), None)
        }
        Some(Finish::Abort { message, status, .. }) => {
            let reason = serde_json::json!({
                "type": "abort", "message": message, "status_code": status,
            });
            (reason, *status)
        }
        _ => (serde_json::json!({ "type": "length" }), None),
    };
    let answer = serde_json::json!({ "meta_info": {
        "finish_reason": reason,
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": completion,
        "cached_tokens": output.cached_tokens,
        "num_retractions": output.retractions,
    }});
    let mut scanner = Scanner::new(None);
    let whole = scanner.push(answer.to_string().as_bytes());
    assert!(whole, "the answer is whole JSON");
    // Without a stream an error is an HTTP status; in a stream the status has gone out before.
    let status = status.filter(|_| !streams).and_then(|code| StatusCode::from_u16(code).ok());
    scanner.outcome(status.unwrap_or(StatusCode::OK))
}
