//! The answer of a turn that its client aborted before the engine had it.

use axum::response::{IntoResponse as _, Response};
use contract::route::Kind;
use http::{HeaderValue, header};
use serde_json::json;

use super::{Code, Refusal};

#[derive(Debug, Clone, Copy)]
pub struct AbortedTurn<'a> {
    pub kind: Kind,
    /// The client's name of the turn.
    pub rid: &'a str,
    pub wants_stream: bool,
    /// Has one prompt and one answer.
    pub is_single: bool,
}

impl AbortedTurn<'_> {
    /// On `/generate` it is what SGLang answers to a turn that it aborts in its queue: trainers
    /// read it there. On other routes an answer needs counts that only the engine makes, so the
    /// turn is refused.
    pub fn answer(self) -> Result<Response, Refusal> {
        if self.kind != Kind::Generate || !self.is_single {
            return Err(Refusal::new(Code::TurnAborted, "the turn was aborted before it ran"));
        }
        let body = json!({
            "text": "",
            "output_ids": [],
            "meta_info": {
                "id": self.rid,
                "finish_reason": { "type": "abort", "message": "Abort in waiting queue" },
                "completion_tokens": 0,
            },
        });
        let (content_type, text) = if self.wants_stream {
            ("text/event-stream", format!("data: {body}\n\ndata: [DONE]\n\n"))
        } else {
            ("application/json", body.to_string())
        };
        let mut response = text.into_response();
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        Ok(response)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trainers_read_an_abort_where_the_engine_says_it_and_others_are_refused() {
        let turn =
            AbortedTurn { kind: Kind::Generate, rid: "r", wants_stream: true, is_single: true };
        let response = turn.answer().unwrap();
        assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
        for turn in
            [AbortedTurn { kind: Kind::Chat, ..turn }, AbortedTurn { is_single: false, ..turn }]
        {
            assert_eq!(turn.answer().unwrap_err().code, Code::TurnAborted);
        }
    }
}
