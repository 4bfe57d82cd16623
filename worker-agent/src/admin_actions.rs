//! The routes of the admin port that change something: `POST /drain` and `POST /undrain`.

use axum::{
    Json, Router,
    response::{IntoResponse as _, Response},
    routing::post,
};

use crate::{data_port, owner::AgentHandle};

pub(crate) fn routes(agent: AgentHandle) -> Router {
    let undrained = agent.clone();
    Router::new()
        .route("/drain", post(async move || set_drained(&agent, true).await))
        .route("/undrain", post(async move || set_drained(&undrained, false).await))
}

async fn set_drained(agent: &AgentHandle, wanted: bool) -> Response {
    match agent.set_drained(wanted).await {
        Ok(state) => Json(state).into_response(),
        Err(error) => data_port::refusal(&error).into_response(),
    }
}
