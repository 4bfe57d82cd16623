//! The bootstrap server of a prefill engine.

use super::{HandOffs, Room};
use axum::{
    Json, Router,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use std::sync::Arc;
use tokio::sync::oneshot;

/// Returns the server's routes.
pub(super) fn routes(owner: Arc<HandOffs>) -> Router {
    Router::new()
        .route("/health", get(|| async { "OK" }))
        .route("/route", get(topology))
        .route("/hand_off/{room}", post(hand_off))
        .with_state(owner)
}

/// Forgets a decode engine that waits for a room, when its connection has ended.
struct Forget<'a> {
    owner: &'a HandOffs,
    room: u64,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        let mut rooms = self.owner.rooms.lock();
        if matches!(rooms.get(&self.room), Some(Room::DecodeWaits(_))) {
            rooms.remove(&self.room);
        }
    }
}

async fn topology(State(owner): State<Arc<HandOffs>>) -> Json<serde_json::Value> {
    Json(serde_json::json!({
        "attn_tp_size": owner.config.tp_size, "dp_size": owner.dp_size,
        "kv_cache_dtype": owner.config.kv_cache_dtype, "follow_bootstrap_room": true,
    }))
}

/// Answers a decode engine with its room's KV, once the prefill engine has computed it.
async fn hand_off(State(owner): State<Arc<HandOffs>>, Path(room): Path<u64>) -> Response {
    let (sender, delivery) = oneshot::channel();
    {
        let mut rooms = owner.rooms.lock();
        match rooms.remove(&room) {
            Some(Room::PrefillWaits(prefill)) => drop(prefill.send(sender)),
            Some(Room::DecodeWaits(_)) | None => {
                rooms.insert(room, Room::DecodeWaits(sender));
            }
        }
    }
    let _forget = Forget { owner: &owner, room };
    match delivery.await {
        Ok(Ok(kv)) => Json(kv).into_response(),
        Ok(Err(reason)) => (StatusCode::INTERNAL_SERVER_ERROR, reason).into_response(),
        Err(_) => {
            let reason = "Failed to get kvcache from prefill instance, it might be dead";
            (StatusCode::INTERNAL_SERVER_ERROR, reason).into_response()
        }
    }
}
