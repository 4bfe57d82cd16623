//! Serves the placements: `GET /v1/placements/{turn}` says why a turn went to its worker.

use axum::{
    Json,
    extract::State,
    response::{IntoResponse as _, Response},
};
use contract::api::{
    Placement, Placements, PrefillPlacement, RecentPlacement, RecentPlacements, WorkerFigures,
};
use http::Uri;
use service::clock::{now, whole_millis};

use super::{
    IdPath, SharedState, errors, id,
    page::{self, PageRange},
    respond,
};
use crate::{fleet::snapshot::Snapshot, placement::recent::PlacementRecord};

pub(super) async fn list(State(shared): SharedState, uri: Uri) -> Response {
    let range = match PageRange::read(&uri, shared.process_id) {
        Ok(range) => range,
        Err(refusal) => return respond(&shared, Err(refusal)),
    };
    let view = shared.directory.view();
    let page = shared.placer.placements_page(range.after, range.limit, &view);
    let place = page.last().map_or(range.after.unwrap_or_default(), |(place, _)| *place);
    let placements = page.iter().map(|(_, record)| {
        let PlacementRecord { turn, placed_at, session, placement } = record;
        let prefill = placement.prefill.as_ref();
        RecentPlacement {
            turn: format!("{turn:016x}"),
            session: session.map(|session| session.to_string()),
            worker: view.name(placement.worker),
            prefill_worker: prefill.map(|prefill| view.name(prefill.worker)),
            reason: placement.reason.as_str().to_owned(),
            uncached_tokens: placement.uncached_tokens,
            age_ms: whole_millis(now().saturating_duration_since(*placed_at)),
        }
    });
    let placements = placements.collect();
    let next = page::cursor(place, shared.process_id);
    Json(RecentPlacements { placements, next }).into_response()
}

/// The answer has one placement for each worker that the turn was sent to.
pub(super) async fn show(State(shared): SharedState, path: IdPath) -> Response {
    let turn_id = match id(path) {
        Ok(turn_id) => turn_id,
        Err(refusal) => return respond(&shared, Err(refusal)),
    };
    let view = shared.directory.view();
    let records = u64::from_str_radix(&turn_id, 16)
        .map(|turn_id| shared.placer.placements(turn_id, &view))
        .unwrap_or_default();
    if records.is_empty() {
        return respond(&shared, Err(errors::placement_unknown_refusal()));
    }
    let placements = records.iter().map(|record| describe(record, &view)).collect();
    Json(Placements { turn: turn_id, placements }).into_response()
}

fn describe(record: &PlacementRecord, view: &Snapshot) -> Placement {
    let PlacementRecord { placed_at, session, placement, .. } = record;
    let prefill = placement.prefill.map(|prefill| PrefillPlacement {
        worker: view.name(prefill.worker),
        uncached_tokens: prefill.uncached_tokens,
        figures: WorkerFigures { worker: view.name(prefill.worker), figures: prefill.figures },
    });
    Placement {
        worker: view.name(placement.worker),
        reason: placement.reason.as_str().to_owned(),
        session: session.map(|session| session.to_string()),
        uncached_tokens: placement.uncached_tokens,
        prefill,
        age_ms: whole_millis(now().saturating_duration_since(*placed_at)),
        compared: placement
            .figures
            .iter()
            .map(|&(worker, figures)| WorkerFigures { worker: view.name(worker), figures })
            .collect(),
    }
}
