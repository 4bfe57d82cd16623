//! Serves `GET /v1/placements/{turn}`: why the router sent a turn to its worker.
//!
//! A turn is one request and its answer. Its id is in the answer's header `x-berth-turn`. The
//! router remembers only the last placements.

use axum::{
    Json,
    extract::{Path, State},
    response::{IntoResponse as _, Response},
};
use serde_json::{Value, json};
use service::clock::now;

use super::{SharedState, conclude, errors};
use crate::{
    fleet::snapshot::Snapshot,
    placement::{Figures, recent::PlacementRecord},
};

pub(super) async fn show(State(shared): SharedState, Path(turn): Path<String>) -> Response {
    let records = u64::from_str_radix(&turn, 16)
        .map(|turn| shared.recent_placements.lock().placements(turn).to_vec())
        .unwrap_or_default();
    if records.is_empty() {
        return conclude(&shared, Err(errors::placement_unknown()));
    }
    let view = shared.view.load();
    let placements: Vec<Value> = records.iter().map(|record| to_json(record, &view)).collect();
    Json(json!({ "turn": turn, "placements": placements })).into_response()
}

fn to_json(record: &PlacementRecord, view: &Snapshot) -> Value {
    let PlacementRecord { at: placed_at, session, placement } = record;
    let compared: Vec<Value> =
        placement.figures.iter().map(|figures| figures_to_json(figures, view)).collect();
    let age = now().saturating_duration_since(*placed_at).as_millis();
    json!({
        "worker": view.name(placement.worker),
        "reason": placement.reason,
        "session": session.map(|session| session.to_string()),
        "uncached_tokens": placement.uncached_tokens,
        "age_ms": u64::try_from(age).unwrap_or(u64::MAX),
        "compared": compared,
    })
}

fn figures_to_json(figures: &Figures, view: &Snapshot) -> Value {
    let mut value = serde_json::to_value(figures).expect("plain fields always serialise");
    value["worker"] = json!(view.name(figures.worker));
    value
}
