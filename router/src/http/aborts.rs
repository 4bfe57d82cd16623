//! Serves `/abort_request`, by which clients abort their turns.
//!
//! The route is SGLang's, but a client aborts only its own turns, and an admin everybody's.

use axum::{
    extract::{Extension, Request, State},
    response::{IntoResponse as _, Response},
};
use contract::abort::{AbortRequest, NAME_BYTES_MAX};
use http::StatusCode;
use serde::Deserialize;
use service::refusal::{Code, Refusal};

use super::{SharedState, respond, sessions::read_body};
use crate::{auth::Caller, turn::aborts};

const RIDS_MAX: usize = 1024;

/// The body of a request. Other members are ignored, as SGLang does.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct AbortBody {
    rid: Option<Rids>,
    abort_all: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Rids {
    One(String),
    Several(Vec<String>),
}

pub(super) async fn abort(
    State(shared): SharedState,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Response {
    let answer = async {
        let body: AbortBody = read_body(&shared, &caller, request, false).await?;
        if let Some(request) = read_request(body, &caller)? {
            aborts::abort(&shared, &request).await?;
        }
        Ok(StatusCode::OK.into_response())
    };
    let answer: Result<Response, Refusal> = answer.await;
    respond(&shared, answer)
}

/// `None` if the body names no turn, which SGLang ignores.
fn read_request(body: AbortBody, caller: &Caller) -> Result<Option<AbortRequest>, Refusal> {
    let principal = (!caller.is_admin).then(|| caller.principal.to_string());
    if body.abort_all == Some(true) {
        return Ok(Some(AbortRequest { principal, rids: None }));
    }
    let rids = match body.rid {
        None => vec![],
        Some(Rids::One(rid)) => vec![rid],
        Some(Rids::Several(rids)) => rids,
    };
    if rids.len() > RIDS_MAX {
        let message = format!("rid names more than {RIDS_MAX} turns; send several requests");
        return Err(Refusal::new(Code::InvalidField, message));
    }
    // No turn has an empty name or a longer one.
    let is_name = |rid: &String| (1..=NAME_BYTES_MAX).contains(&rid.len());
    let rids: Vec<String> = rids.into_iter().filter(is_name).collect();
    Ok((!rids.is_empty()).then_some(AbortRequest { principal, rids: Some(rids) }))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn read(body: &str, is_admin: bool) -> Option<AbortRequest> {
        let caller = Caller {
            principal: "alice".into(),
            is_admin,
            limits: Arc::default(),
            announce: Arc::default(),
        };
        read_request(serde_json::from_str(body).unwrap(), &caller).unwrap()
    }

    #[test]
    fn only_an_admin_aborts_everybodys_turns() {
        let own = Some("alice".to_owned());
        assert_eq!(
            read(r#"{"abort_all":true,"rid":"a"}"#, false),
            Some(AbortRequest { principal: own.clone(), rids: None })
        );
        assert_eq!(
            read(r#"{"abort_all":true}"#, true),
            Some(AbortRequest { principal: None, rids: None })
        );
        let rids = Some(vec!["a".to_owned(), "b".to_owned()]);
        assert_eq!(
            read(r#"{"rid":["a","","b"]}"#, false),
            Some(AbortRequest { principal: own, rids })
        );
    }

    #[test]
    fn a_request_that_names_no_turn_does_nothing() {
        for body in ["{}", r#"{"rid":""}"#, r#"{"rid":null,"abort_all":false}"#, r#"{"rid":[]}"#] {
            assert_eq!(read(body, true), None, "{body}");
        }
    }
}
