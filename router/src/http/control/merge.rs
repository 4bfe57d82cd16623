//! Makes one answer of the answers of several agents to a control call. Pure.
//!
//! Trainers check for status 200, so it is 200 only if every agent succeeded. If all failed alike,
//! it is theirs, and else 502. The body has the members on which all answers agree, as a single
//! engine would answer, and under `workers` each agent's status and body. The answer of a single
//! agent passes unchanged.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Map, Value, json};

use crate::turn::{
    answer::WORKER_HEADER,
    control::{AgentAnswer, Answers, CallError},
};

fn answer_instead(error: &CallError) -> AgentAnswer {
    let status = match error {
        CallError::Late => StatusCode::GATEWAY_TIMEOUT,
        CallError::Unreachable(_) => StatusCode::BAD_GATEWAY,
    };
    let body = json!({ "success": false, "message": error.to_string() }).to_string();
    let content_type = Some(HeaderValue::from_static("application/json"));
    AgentAnswer { status, content_type, body: body.into() }
}

/// Text that is no JSON becomes a string.
fn to_value(answer: &AgentAnswer) -> Value {
    if answer.body.is_empty() {
        return Value::Null;
    }
    let text = || Value::String(String::from_utf8_lossy(&answer.body).into_owned());
    serde_json::from_slice(&answer.body).unwrap_or_else(|_| text())
}

pub(super) fn merge(answers: Answers) -> Response<Bytes> {
    let mut answers: Vec<(String, AgentAnswer)> = answers
        .into_iter()
        .map(|(name, answer)| (name, answer.unwrap_or_else(|error| answer_instead(&error))))
        .collect();
    match answers.pop() {
        Some((name, answer)) if answers.is_empty() => pass_on(&name, answer),
        last => {
            answers.extend(last);
            merge_several(answers)
        }
    }
}

fn pass_on(name: &str, answer: AgentAnswer) -> Response<Bytes> {
    let mut response = Response::new(answer.body);
    *response.status_mut() = answer.status;
    if let Some(content_type) = answer.content_type {
        response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    }
    if let Ok(name) = HeaderValue::from_str(name) {
        response.headers_mut().insert(WORKER_HEADER, name);
    }
    response
}

fn merge_several(answers: Vec<(String, AgentAnswer)>) -> Response<Bytes> {
    let status = merged_status(answers.iter().map(|(_, answer)| answer.status));
    let to_parts = |(name, answer): (String, AgentAnswer)| {
        let value = to_value(&answer);
        (name, answer.status, value)
    };
    let values: Vec<(String, StatusCode, Value)> = answers.into_iter().map(to_parts).collect();
    let mut merged = common_members(values.iter().map(|(.., value)| value));
    if values.iter().any(|(.., value)| value.get("success").is_some()) {
        merged.insert("success".to_owned(), status.is_success().into());
    }
    if !status.is_success() {
        let failed = values.iter().filter(|(_, status, _)| !status.is_success());
        let failed: Vec<&str> = failed.map(|(name, ..)| name.as_str()).collect();
        let message = format!(
            "{} of {} workers failed: {}; see `workers` for each answer",
            failed.len(),
            values.len(),
            failed.join(", ")
        );
        merged.insert("message".to_owned(), message.into());
    }
    let to_member = |(name, status, value): (String, StatusCode, Value)| {
        (name, json!({ "status": status.as_u16(), "body": value }))
    };
    let workers: Map<String, Value> = values.into_iter().map(to_member).collect();
    merged.insert("workers".to_owned(), Value::Object(workers));
    let mut response = Response::new(Value::Object(merged).to_string().into());
    *response.status_mut() = status;
    let content_type = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    response
}

/// Returns no members if a value is no object.
fn common_members<'a>(mut values: impl Iterator<Item = &'a Value>) -> Map<String, Value> {
    let Some(Value::Object(first)) = values.next() else { return Map::new() };
    let mut common = first.clone();
    for value in values {
        common.retain(|key, member| value.get(key.as_str()) == Some(member));
    }
    common
}

/// Returns 200 if all succeeded, the common status if all failed alike, and else 502.
fn merged_status(statuses: impl Iterator<Item = StatusCode>) -> StatusCode {
    let statuses: Vec<StatusCode> = statuses.collect();
    if statuses.iter().all(StatusCode::is_success) {
        return StatusCode::OK;
    }
    match statuses.split_first() {
        Some((first, rest)) if rest.iter().all(|status| status == first) => *first,
        _ => StatusCode::BAD_GATEWAY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, body: &str) -> AgentAnswer {
        AgentAnswer {
            status: StatusCode::from_u16(status).unwrap(),
            content_type: Some(HeaderValue::from_static("application/json")),
            body: Bytes::copy_from_slice(body.as_bytes()),
        }
    }

    fn merged(answers: &[(&str, Result<AgentAnswer, CallError>)]) -> (u16, Value) {
        let answers = answers.iter().map(|(name, answer)| ((*name).to_owned(), answer.clone()));
        let response = merge(answers.collect());
        let value = serde_json::from_slice(response.body()).unwrap();
        (response.status().as_u16(), value)
    }

    #[test]
    fn one_agents_answer_is_the_engines_own() {
        let text = answer(400, "Flush cache failed.\n");
        let response = merge(Answers::from([("a".to_owned(), Ok(text.clone()))]));
        assert_eq!((response.status(), response.body()), (text.status, &text.body));
        assert_eq!(response.headers()[WORKER_HEADER], "a");
    }

    #[test]
    fn answers_that_agree_look_like_one() {
        let same = answer(200, r#"{"success":true,"message":"ok","n":1}"#);
        let other = answer(200, r#"{"success":true,"message":"ok","n":2}"#);
        let (status, body) = merged(&[("a", Ok(same)), ("b", Ok(other))]);
        assert_eq!(status, 200);
        assert_eq!((&body["success"], &body["message"]), (&json!(true), &json!("ok")));
        assert_eq!(body.get("n"), None);
        let of_b = json!({"success": true, "message": "ok", "n": 2});
        assert_eq!(body["workers"]["b"], json!({"status": 200, "body": of_b}));
    }

    #[test]
    fn a_partial_failure_is_no_success_and_names_the_workers() {
        let done = answer(200, r#"{"success":true,"message":"ok"}"#);
        let failed = answer(400, r#"{"success":false,"message":"no such model"}"#);
        let gone = Err(CallError::Unreachable("refused".to_owned()));
        let (status, body) = merged(&[("a", Ok(done)), ("b", Ok(failed.clone())), ("c", gone)]);
        assert_eq!((status, &body["success"]), (502, &json!(false)));
        assert!(body["message"].as_str().unwrap().starts_with("2 of 3 workers failed: b, c"));
        assert_eq!(body["workers"]["b"]["body"]["message"], "no such model");
        let (status, _) = merged(&[("a", Ok(failed.clone())), ("b", Ok(failed))]);
        assert_eq!(status, 400, "all failed alike");
    }

    #[test]
    fn answers_without_json_stay_readable() {
        let text = answer(200, "Cache flushed.\n");
        let (status, body) = merged(&[("a", Ok(text)), ("b", Ok(answer(200, "")))]);
        assert_eq!(status, 200);
        assert_eq!(body["workers"]["a"]["body"], "Cache flushed.\n");
        assert_eq!(body["workers"]["b"]["body"], Value::Null);
        assert_eq!(body.get("success"), None, "the engine says none either");
    }
}
