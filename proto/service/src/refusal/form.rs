//! Gives a refusal the form in which an API's clients read errors: OpenAI's or Anthropic's. Pure.

use bytes::Bytes;
use http::StatusCode;
use serde_json::json;

use super::Refusal;

/// The API that a client uses, as the path of its request says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// OpenAI's. SGLang's own routes have their errors in the same place.
    OpenAi,
    /// Anthropic's.
    Anthropic,
}

impl Api {
    /// Returns the API to which a path belongs.
    #[must_use]
    pub fn for_path(path: &str) -> Self {
        let rest = path.strip_prefix("/v1/messages");
        let is_anthropic = rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        if is_anthropic { Self::Anthropic } else { Self::OpenAi }
    }

    /// Returns the body of a refusal. `request_id` names the request that was refused.
    #[must_use]
    pub fn body(self, refusal: &Refusal, request_id: &str) -> Bytes {
        let (message, code) = (&refusal.message, refusal.code.as_str());
        let error_type = self.error_type(refusal.code.status());
        let body = match self {
            Self::OpenAi => json!({
                "error": { "message": message, "type": error_type, "param": null, "code": code },
            }),
            Self::Anthropic => json!({
                "type": "error",
                "error": { "type": error_type, "message": message },
                "request_id": request_id,
            }),
        };
        body.to_string().into()
    }

    /// Returns the type of the errors with this status.
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
    use http::header;
    use serde_json::Value;

    use super::*;
    use crate::refusal::{Code, Repeat, SHOULD_RETRY};

    #[test]
    fn the_path_tells_the_api() {
        for (path, api) in [
            ("/v1/messages", Api::Anthropic),
            ("/v1/messages/count_tokens", Api::Anthropic),
            ("/v1/messages2", Api::OpenAi),
            ("/v1/chat/completions", Api::OpenAi),
            ("/generate", Api::OpenAi),
        ] {
            assert_eq!(Api::for_path(path), api, "{path}");
        }
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
