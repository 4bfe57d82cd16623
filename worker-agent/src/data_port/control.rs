//! Serves the engine's control routes on the data port, for routers whose caller is an admin.
//!
//! A trainer pauses the engine, replaces its weights or flushes its cache with these routes
//! ([`CONTROL_ROUTES`](contract::control::CONTROL_ROUTES)). The owner task hears of each call
//! before the engine does, and of the engine's answer. The client gets that answer unchanged.

use std::sync::Arc;

use axum::{body::Body, extract::Request, response::Response};
use bytes::Bytes;
use contract::control::{ADMIN, ControlRoute, Effect};
use http::{HeaderValue, Uri, header, request::Parts};
use service::{
    auth::admin_only_refusal,
    refusal::{Code, Refusal},
};
use tokio::sync::oneshot;

use super::{TurnContext, refusals::refusal, router_auth::Caller};
use crate::{
    engine::{
        self, ControlCall,
        control::{ControlAnswer, ControlOutcome, ControlRequest},
    },
    owner::{BegunCall, adapters},
};

pub(super) async fn serve(
    context: &Arc<TurnContext>,
    route: ControlRoute,
    request: Request,
) -> Result<Response, Refusal> {
    let (head, body) = request.into_parts();
    if !head.headers.contains_key(ADMIN) {
        return Err(admin_only_refusal("only a router may send this, for a key with admin = true"));
    }
    let held_body = context.body_budget.read(body).await?;
    let call = control_call(context, &head, held_body.bytes.clone());
    let (sender, answer) = oneshot::channel();
    let context = Arc::clone(context);
    let tasks = context.tasks.clone();
    // The engine carries the call out even if the client leaves, so its end must be seen. And what
    // has begun must end, or turns are held back for ever.
    tasks.spawn(async move {
        let answer = match context.agent.begin_control(route.effect).await {
            Ok(begun) => run(&context, begun, call).await.map_err(|error| engine_refusal(&error)),
            Err(error) => Err(refusal(&error)),
        };
        let _ = sender.send(answer);
        drop(held_body);
    });
    let stopping = || Refusal::new(Code::Stopping, "this agent is shutting down");
    answer.await.map_err(|_| stopping())?.map(respond)
}

async fn run(
    context: &TurnContext,
    begun: BegunCall,
    call: ControlCall,
) -> Result<ControlAnswer, engine::Error> {
    let effect = begun.effect();
    let request = ControlRequest::read(&call.body);
    let result = context.engine.control(call, context.turn_time_max).await;
    let outcome = match &result {
        Err(error) if !error.is_ambiguous() => ControlOutcome::NotDone,
        result => ControlOutcome::read(effect, &request, result.as_ref().ok()),
    };
    let may_change_label =
        matches!(effect, Effect::Update | Effect::Label | Effect::EndUpdate | Effect::BeginUpdate);
    let label = if may_change_label { context.engine.read_weights().await.ok() } else { None };
    context.agent.end_control(begun, request, outcome, label).await;
    if effect == Effect::Adapters {
        // When the caller has its answer, turns find the adapter. If the engine doesn't tell, the
        // monitor asks again soon.
        let _ = adapters::refresh(&context.engine, &context.agent).await;
    }
    result
}

fn control_call(context: &TurnContext, head: &Parts, body: Bytes) -> ControlCall {
    // A router has checked its caller, so the engine gets the agent's key. Anyone else is for the
    // engine itself to check.
    let credential = match head.extensions.get() {
        Some(Caller::Router) => context.engine.admin_key().cloned(),
        Some(Caller::Local) | None => head.headers.get(header::AUTHORIZATION).cloned(),
    };
    let content_type = head.headers.get(header::CONTENT_TYPE).cloned();
    let json = || HeaderValue::from_static("application/json");
    ControlCall {
        method: head.method.clone(),
        path_and_query: Uri::path_and_query(&head.uri).cloned(),
        content_type: content_type.unwrap_or_else(json),
        credential,
        body,
    }
}

fn respond(answer: ControlAnswer) -> Response {
    let mut response = Response::new(Body::from(answer.body));
    *response.status_mut() = answer.status;
    if let Some(content_type) = answer.content_type {
        response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    }
    response
}

fn engine_refusal(error: &engine::Error) -> Refusal {
    let code = if error.is_ambiguous() { Code::EngineBrokeOff } else { Code::EngineDown };
    Refusal::new(code, error.to_string())
}
