//! Gives a refusal the form in which an API's clients read errors: OpenAI's or Anthropic's. Pure.

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use serde_json::{Value, json};

use super::{Code, Refusal};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// SGLang's own routes have their errors in the same place.
    OpenAi,
    Anthropic,
}

impl Api {
    #[must_use]
    pub fn for_request(path: &str, headers: &HeaderMap) -> Self {
        let is_below = |root: &str| {
            let rest = path.strip_prefix(root);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        // Both APIs list models at the same path; Anthropic's clients always send the header.
        let lists_models = is_below("/v1/models") && headers.contains_key("anthropic-version");
        if is_below("/v1/messages") || lists_models { Self::Anthropic } else { Self::OpenAi }
    }

    #[must_use]
    pub fn body(self, refusal: &Refusal, request_id: &str) -> Bytes {
        let (message, code) = (&refusal.message, refusal.code.as_str());
        let error_type = self.error_type(refusal.code.status());
        let body = match self {
            Self::OpenAi => json!({
                "error": { "message": message, "type": error_type, "param": null, "code": code },
            }),
            Self::Anthropic => {
                let mut error = json!({ "type": error_type, "message": message });
                // By these a client that has begun a thread knows to send all messages.
                match refusal.code {
                    Code::ThreadUnsupported => {
                        error["details"] = json!({ "error_code": code, "unsupported": ["thread"] });
                    }
                    Code::ThreadNotFound => error["details"] = json!({ "error_code": code }),
                    _ => {}
                }
                json!({ "type": "error", "error": error, "request_id": request_id })
            }
        };
        body.to_string().into()
    }

    /// The last events of a stream that ends with an error after its head was sent. `body` is the
    /// body that an answer with `status` would have had: a refusal, or the engine's error.
    #[must_use]
    pub fn error_events(self, status: StatusCode, body: &[u8]) -> Bytes {
        let event = match (self, serde_json::from_slice(body)) {
            (Self::Anthropic, Ok(Value::Object(error))) => Value::Object(error),
            (Self::OpenAi, Ok(Value::Object(error))) if error.contains_key("error") => {
                Value::Object(error)
            }
            // The engine has the error itself as the body, and in streams under this key.
            (Self::OpenAi, Ok(Value::Object(error))) => json!({ "error": error }),
            (_, Ok(_) | Err(_)) => {
                let (message, error_type) =
                    (String::from_utf8_lossy(body), self.error_type(status));
                json!({ "type": "error", "error": { "message": message, "type": error_type } })
            }
        };
        let events = match self {
            Self::OpenAi => format!("data: {event}\n\ndata: [DONE]\n\n"),
            Self::Anthropic => format!("event: error\ndata: {event}\n\n"),
        };
        events.into()
    }

    fn error_type(self, status: StatusCode) -> &'static str {
        match (status.as_u16(), self) {
            (401, _) => "authentication_error",
            (403, _) => "permission_error",
            (429, _) => "rate_limit_error",
            (404, Self::Anthropic) => "not_found_error",
            (413, Self::Anthropic) => "request_too_large",
            (503, Self::Anthropic) => "overloaded_error",
            (500.., Self::Anthropic) => "api_error",
            (500.., Self::OpenAi) => "server_error",
            _ => "invalid_request_error",
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::response::IntoResponse as _;
    use http::{HeaderName, HeaderValue, header};
    use serde_json::Value;

    use super::*;
    use crate::refusal::{Repeat, SHOULD_RETRY};

    #[test]
    fn the_request_tells_the_api() {
        let anthropics = HeaderMap::from_iter([(
            HeaderName::from_static("anthropic-version"),
            HeaderValue::from_static("2023-06-01"),
        )]);
        let others = HeaderMap::new();
        for (path, headers, api) in [
            ("/v1/messages", &others, Api::Anthropic),
            ("/v1/messages/count_tokens", &others, Api::Anthropic),
            ("/v1/messages2", &others, Api::OpenAi),
            ("/v1/models", &others, Api::OpenAi),
            ("/v1/models/a", &anthropics, Api::Anthropic),
            ("/v1/chat/completions", &anthropics, Api::OpenAi),
            ("/generate", &others, Api::OpenAi),
        ] {
            assert_eq!(Api::for_request(path, headers), api, "{path}");
        }
    }

    #[test]
    fn a_stream_that_fails_late_ends_with_the_error_in_its_api_s_form() {
        let refusal = Refusal::new(Code::QueueTime, "it waited");
        let events = |api: Api, body: &[u8]| {
            String::from_utf8(api.error_events(StatusCode::BAD_REQUEST, body).to_vec()).unwrap()
        };
        let openai = events(Api::OpenAi, &Api::OpenAi.body(&refusal, ""));
        let (first, last) = openai.split_once("\n\n").unwrap();
        let error: Value = serde_json::from_str(first.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!((&error["error"]["code"], last), (&"queue_time".into(), "data: [DONE]\n\n"));
        let anthropic = events(Api::Anthropic, &Api::Anthropic.body(&refusal, "req_1"));
        assert!(anthropic.starts_with("event: error\ndata: {"), "{anthropic}");
        assert!(anthropic.contains("\"request_id\":\"req_1\"") && !anthropic.contains("DONE"));
        let of_engine = events(Api::OpenAi, br#"{"object":"error","message":"too long"}"#);
        assert!(of_engine.starts_with("data: {\"error\":{\"message\":\"too long\""), "{of_engine}");
        assert!(events(Api::OpenAi, b"Internal\nError").contains(r#""message":"Internal\nError""#));
    }

    #[test]
    fn anthropic_s_clients_learn_that_there_are_no_threads() {
        let details = |code| {
            let body = Api::Anthropic.body(&Refusal::new(code, "why"), "req_1");
            serde_json::from_slice::<Value>(&body).unwrap()["error"]["details"].clone()
        };
        let unsupported =
            json!({ "error_code": "thread_unsupported_request", "unsupported": ["thread"] });
        assert_eq!(details(Code::ThreadUnsupported), unsupported);
        assert_eq!(details(Code::ThreadNotFound), json!({ "error_code": "thread_not_found" }));
        assert_eq!(details(Code::InvalidField), Value::Null);
    }

    #[test]
    fn each_code_has_the_form_of_each_api_and_says_whether_to_retry() {
        for code in Code::all() {
            let refusal = Refusal::new(code, "what is wrong");
            let status = code.status().as_u16();
            for api in [Api::OpenAi, Api::Anthropic] {
                let body: Value = serde_json::from_slice(&api.body(&refusal, "req_1")).unwrap();
                let error = &body["error"];
                assert_eq!(error["message"], "what is wrong", "{code}");
                let error_type = error["type"].as_str().unwrap();
                assert_eq!(error_type == "rate_limit_error", status == 429, "{code}");
                if api == Api::OpenAi {
                    assert_eq!(error["code"], code.as_str());
                    assert_eq!(error_type == "server_error", status >= 500, "{code}");
                } else {
                    assert_eq!(
                        (&body["type"], &body["request_id"]),
                        (&"error".into(), &"req_1".into())
                    );
                    let is_server = ["api_error", "overloaded_error"].contains(&error_type);
                    assert_eq!(is_server, status >= 500, "{code}");
                }
            }
            let headers = refusal.into_response().headers().clone();
            let is_useful = matches!(code.repeat(), Repeat::AfterSeconds(_));
            assert_eq!(headers[SHOULD_RETRY], if is_useful { "true" } else { "false" }, "{code}");
            assert_eq!(headers.contains_key(header::RETRY_AFTER), is_useful, "{code}");
        }
    }
}
