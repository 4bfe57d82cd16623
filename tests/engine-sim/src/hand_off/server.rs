//! The bootstrap server of a prefill engine.

use super::{HandOffs, Room};
use axum::{
    Json, Router,
    extract::{Path, Query, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use std::{collections::HashMap, sync::Arc};
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

/// Answers what the ranks of the engine have registered. If all places are -1, that is the
/// engine's topology, else the address of one rank; here no rank has an address of its own.
async fn topology(
    State(owner): State<Arc<HandOffs>>,
    Query(asked): Query<HashMap<String, String>>,
) -> Response {
    let place = |name: &str| asked.get(name).and_then(|it| it.parse::<i64>().ok());
    let names = ["prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"];
    let [Some(dp), Some(cp), Some(tp), Some(pp)] = names.map(place) else {
        return (StatusCode::BAD_REQUEST, "Missing inputs for bootstrap server.").into_response();
    };
    if [dp, cp, tp, pp] != [-1; 4] {
        let missing = format!(
            "Bootstrap info not found for dp_rank={dp} cp_rank={cp} tp_rank={tp} pp_rank={pp}"
        );
        return (StatusCode::NOT_FOUND, missing).into_response();
    }
    let topology = serde_json::json!({
        "attn_tp_size": owner.config.tp_size, "attn_cp_size": 1, "dp_size": owner.dp_size,
        "pp_size": 1, "kv_cache_dtype": owner.config.kv_cache_dtype,
        "follow_bootstrap_room": true, "decode_allocation_policy": "early",
    });
    Json(topology).into_response()
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
