//! Serves the session routes: `/v1/sessions`, and SGLang's `/open_session` and `/close_session`.
//!
//! A client sees only the sessions of its principal.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Extension, Query, Request, State},
    response::{IntoResponse as _, Response},
};
use contract::{
    api::{self, SessionReport},
    id::{SESSION_ID_BYTES_MAX, SessionKey},
    load::Retention,
};
use http::{StatusCode, Uri};
use serde::{
    Deserialize,
    de::{self, Unexpected},
};
use serde_json::Value;
use service::{
    clock::{now, whole_millis},
    places::INLINE_BYTES_MAX,
    refusal::{Code, Refusal},
    server::PeerAddress,
};

use utoipa::{
    ToSchema,
    openapi::{Object, ObjectBuilder, Type, schema::SchemaType},
};

use super::{IdPath, SharedState, errors, id, respond};
use crate::{
    auth::Caller,
    fleet::control::OpenRequest,
    sessions::lifecycle::{SESSIONS_LISTED_MAX, SessionView},
    shares::Sharer,
    turn::{arrival, body::Compression, request, session_choice, shared::Shared},
};

/// At most 256 bytes
#[derive(ToSchema)]
#[schema(min_length = 1, max_length = 256)]
pub(super) struct SessionId(#[expect(dead_code, reason = "only its schema counts")] String);

const _: () = assert!(SESSION_ID_BYTES_MAX == 256, "as the schema says");

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
#[schema(as = OpenSession)]
pub(super) struct OpenBody {
    #[schema(value_type = Option<SessionId>)]
    session_id: Option<String>,
    #[schema(schema_with = retentions_asked)]
    retention: Option<String>,
    /// The idle time in seconds after which the session closes
    #[schema(value_type = Option<f64>, exclusive_minimum = 0, maximum = 315_360_000)]
    timeout: Value,
}

/// Other members are ignored, as SGLang does.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
#[schema(as = SglangOpenSession)]
pub(super) struct SglangOpenBody {
    #[schema(value_type = Option<SessionId>)]
    session_id: Option<String>,
    streaming: Option<bool>,
    /// The idle time in seconds after which the session closes
    #[schema(value_type = Option<f64>, exclusive_minimum = 0, maximum = 315_360_000)]
    timeout: Value,
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[schema(as = SglangCloseSession)]
pub(super) struct SglangCloseBody {
    #[schema(value_type = SessionId)]
    session_id: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct ListQuery {
    limit: Option<u32>,
    after: Option<String>,
}

pub(super) async fn open(
    State(shared): SharedState,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Response {
    respond(&shared, Box::pin(try_open(&shared, &caller, request)).await)
}

async fn try_open(
    shared: &Arc<Shared>,
    caller: &Caller,
    request: Request,
) -> Result<Response, Refusal> {
    let request_body: OpenBody = read_body(shared, caller, request, true).await?;
    let open_request = build_open_request(
        caller,
        request_body.session_id,
        match &request_body.retention {
            None => None,
            Some(name) => request::parse_retention(name, "retention")?,
        },
        &request_body.timeout,
    )?;
    session_choice::check_key_sessions(shared, caller, &open_request.key).await?;
    let opened = shared.sessions.open(open_request).await?;
    let status = if opened.is_new { StatusCode::CREATED } else { StatusCode::OK };
    let session_view = SessionView {
        key: opened.session.key.clone(),
        worker: opened.worker,
        session: Some(opened.session),
        is_lost: false,
    };
    Ok((status, Json(describe(shared, &session_view))).into_response())
}

pub(super) async fn list(
    State(shared): SharedState,
    Extension(caller): Extension<Caller>,
    peer: Option<Extension<PeerAddress>>,
    uri: Uri,
) -> Response {
    let answer = async {
        let query = Query::<ListQuery>::try_from_uri(&uri)
            .map_err(|error| errors::query_refusal(&error))?;
        let Query(ListQuery { limit, after }) = query;
        let limit = limit.map_or(SESSIONS_LISTED_MAX, |limit| limit as usize);
        let limit = limit.clamp(1, SESSIONS_LISTED_MAX);
        let view = shared.directory.settled_view().await;
        let (sessions, principal) = (Arc::clone(&shared.sessions), Arc::clone(&caller.principal));
        let list = move || sessions.list(&view, &principal, after, limit);
        let sharer = Sharer::new(&caller, peer.map(|Extension(PeerAddress(peer))| peer));
        let listing = shared.shares.reading.run(&sharer.name, list);
        let (session_views, has_more) = listing.await;
        let sessions = session_views.iter().map(|session_view| describe(&shared, session_view));
        let sessions: Vec<api::Session> = sessions.collect();
        let last = sessions.last().filter(|_| has_more);
        let next = last.map(|last| last.session_id.clone());
        Ok(Json(api::Sessions { sessions, more: has_more, next }).into_response())
    };
    respond(&shared, answer.await)
}

pub(super) async fn show(
    State(shared): SharedState,
    Extension(caller): Extension<Caller>,
    path: IdPath,
) -> Response {
    let answer = async {
        let session_view = shared.sessions.find(session_key(&caller, id(path)?)?).await?;
        Ok(Json(describe(&shared, &session_view)).into_response())
    };
    respond(&shared, answer.await)
}

pub(super) async fn close(
    State(shared): SharedState,
    Extension(caller): Extension<Caller>,
    path: IdPath,
) -> Response {
    let answer = async {
        shared.sessions.close(session_key(&caller, id(path)?)?).await?;
        Ok(StatusCode::NO_CONTENT.into_response())
    };
    respond(&shared, answer.await)
}

pub(super) async fn demote(
    State(shared): SharedState,
    Extension(caller): Extension<Caller>,
    path: IdPath,
) -> Response {
    let answer = async {
        shared.sessions.demote(&session_key(&caller, id(path)?)?).await?;
        Ok(StatusCode::NO_CONTENT.into_response())
    };
    respond(&shared, answer.await)
}

pub(super) async fn prefetch(
    State(shared): SharedState,
    Extension(caller): Extension<Caller>,
    path: IdPath,
) -> Response {
    let answer = async {
        let tokens = shared.sessions.prefetch(&session_key(&caller, id(path)?)?).await?;
        Ok(Json(api::Prefetch { tokens }).into_response())
    };
    respond(&shared, answer.await)
}

pub(super) async fn sglang_open(
    State(shared): SharedState,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Response {
    respond(&shared, Box::pin(try_sglang_open(&shared, &caller, request)).await)
}

async fn try_sglang_open(
    shared: &Arc<Shared>,
    caller: &Caller,
    request: Request,
) -> Result<Response, Refusal> {
    let request_body: SglangOpenBody = read_body(shared, caller, request, true).await?;
    let retention = request_body.streaming.unwrap_or(false).then_some(Retention::Pinned);
    let open_request =
        build_open_request(caller, request_body.session_id, retention, &request_body.timeout)?;
    session_choice::check_key_sessions(shared, caller, &open_request.key).await?;
    let opened = shared.sessions.open(open_request).await?;
    if !opened.is_new {
        // SGLang answers 400 too, with its text in the same place.
        let message = "Failed to open the session: one with this id is still open. Close it first.";
        return Err(Refusal::new(Code::SessionExists, message));
    }
    Ok(Json(Value::from(opened.session.key.id())).into_response())
}

pub(super) async fn sglang_close(
    State(shared): SharedState,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Response {
    respond(&shared, Box::pin(try_sglang_close(&shared, &caller, request)).await)
}

async fn try_sglang_close(
    shared: &Arc<Shared>,
    caller: &Caller,
    request: Request,
) -> Result<Response, Refusal> {
    let request_body: SglangCloseBody = read_body(shared, caller, request, false).await?;
    let key = session_key(caller, request_body.session_id)?;
    match shared.sessions.close(key).await.map_err(Refusal::from) {
        Err(refusal) if refusal.code != Code::SessionUnknown => Err(refusal),
        // SGLang also answers 200 if it doesn't know the session.
        Ok(()) | Err(_) => Ok(StatusCode::OK.into_response()),
    }
}

fn retentions_asked() -> Object {
    let names = ["auto", "pinned", "tagged", "none"].map(Value::from);
    ObjectBuilder::new()
        .schema_type(SchemaType::from_iter([Type::String, Type::Null]))
        .enum_values(Some(names.into_iter().chain([Value::Null])))
        .build()
}

/// Makes a random id if there is none.
fn build_open_request(
    caller: &Caller,
    id: Option<String>,
    retention: Option<Retention>,
    timeout: &Value,
) -> Result<OpenRequest, Refusal> {
    let id = id.unwrap_or_else(new_session_id);
    Ok(OpenRequest {
        key: session_key(caller, id)?,
        retention,
        idle_ms_max: request::parse_idle_ms(timeout, "timeout")?,
    })
}

/// Nobody can guess the id.
fn new_session_id() -> String {
    format!("{:032x}", service::random::number())
}

fn session_key(caller: &Caller, id: String) -> Result<SessionKey, Refusal> {
    Ok(SessionKey::new(&*caller.principal, id).map_err(request::Error::from)?)
}

/// Returns the default for an empty body if `may_be_empty`.
pub(super) async fn read_body<T: for<'de> Deserialize<'de> + Default>(
    shared: &Shared,
    caller: &Caller,
    request: Request,
    may_be_empty: bool,
) -> Result<T, Refusal> {
    let sharer = arrival::sharer(caller, request.extensions());
    let (parts, body) = request.into_parts();
    let compression = Compression::find(&parts.extensions);
    let held_body = shared.bodies.read(body, &sharer, compression, || None).await?;
    if held_body.bytes.len() > INLINE_BYTES_MAX {
        let message = format!("the body of this route has at most {INLINE_BYTES_MAX} bytes");
        return Err(Refusal::new(Code::BodyTooLarge, message));
    }
    if held_body.bytes.is_empty() && may_be_empty {
        return Ok(T::default());
    }
    parse_object(&held_body.bytes).map_err(|error| errors::body_refusal(&error, &held_body.bytes))
}

/// Refuses an array, which Serde would take as the struct's fields in order.
fn parse_object<T: for<'de> Deserialize<'de>>(bytes: &[u8]) -> serde_json::Result<T> {
    if bytes.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[') {
        return Err(de::Error::invalid_type(Unexpected::Seq, &"an object"));
    }
    serde_json::from_slice(bytes)
}

fn describe(shared: &Shared, session_view: &SessionView) -> api::Session {
    let SessionView { key, worker, session, is_lost } = session_view;
    let view = shared.directory.view();
    let report = session.as_ref().map(|session| {
        // A session that was just opened is in no report yet.
        let idle = view.sessions.idle(key, worker.agent, now());
        SessionReport {
            idle_ms: Some(whole_millis(idle.unwrap_or(session.idle))),
            ..SessionReport::from(&**session)
        }
    });
    let state = match session {
        None => "bound",
        Some(_) if *is_lost => "lost",
        Some(session) => session.state.as_str(),
    };
    api::Session {
        session_id: key.id().to_owned(),
        worker: view.name(*worker),
        state: state.to_owned(),
        report,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_an_object_and_never_its_values_in_order() {
        let body: OpenBody = parse_object(br#" {"session_id": "s"}"#).unwrap();
        assert_eq!(body.session_id.as_deref(), Some("s"));
        for wrong in [r#"["s", "pinned", 5]"#, "\n[null, null]", "[]", "null", "7", "\"s\"", "{"] {
            assert!(parse_object::<OpenBody>(wrong.as_bytes()).is_err(), "{wrong}");
            assert!(parse_object::<SglangCloseBody>(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
