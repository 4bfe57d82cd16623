//! Runs `berth turns`: the last turns, with what was cached, how long they took, how they ended.

use contract::api::Turn;
use serde::Deserialize as _;
use serde_json::{Value, json};

use super::{
    Outcome,
    listing::{self, Listing},
    pages::PagedList,
};
use crate::{
    args::{TargetArgs, TurnsArgs},
    connect::router::{RouterClient, encode},
    error::Error,
    text::{
        clean, count, known, millis,
        style::Tone,
        table::{Cell, Column},
    },
};

const COLUMNS: &[Column] = &[
    Column::word("TURN"),
    Column::text("WORKER"),
    Column::word("KEPT"),
    Column::number("PROMPT"),
    Column::number("CACHED"),
    Column::number("OUT"),
    Column::number("TTFT"),
    Column::number("TOOK"),
    Column::text("OUTCOME"),
    Column::number("AGO"),
];

pub async fn run(target: &TargetArgs, args: &TurnsArgs) -> Result<Outcome, Error> {
    let router = RouterClient::new(target)?;
    let session = args.session.as_deref().map(|session| format!("&session={}", encode(session)));
    let filter = session.unwrap_or_default();
    let path = "/v1/turns";
    let mut list = PagedList::new(&router, path, "turns");
    list.filter = filter;
    listing::follow(&args.list, async || {
        let entries = list.read_newest(args.limit).await?;
        let rows: Result<_, _> = entries.iter().map(row).collect();
        let rows = rows.map_err(|error| router.answer_error(path, error.to_string()))?;
        Ok(Listing { json: json!({ "turns": entries }), columns: COLUMNS, rows, notes: vec![] })
    })
    .await
}

fn row(entry: &Value) -> serde_json::Result<Vec<Cell>> {
    let turn = Turn::deserialize(entry)?;
    let is_well = turn.status.is_none_or(|status| status < 400);
    let outcome = turn.outcome.unwrap_or_else(|| "running".to_owned());
    let status = turn.status.map(|status| format!(" {status}")).unwrap_or_default();
    let tone = if is_well { Tone::Plain } else { Tone::Bad };
    Ok(vec![
        clean(&turn.turn).into(),
        known(turn.worker, |worker| clean(&worker)).into(),
        known(turn.retention, |retention| clean(&retention)).into(),
        known(turn.prompt_tokens, count).into(),
        known(turn.cached_tokens, count).into(),
        known(turn.output_tokens, count).into(),
        known(turn.ttft_ms, millis).into(),
        known(turn.duration_ms, millis).into(),
        Cell::toned(format!("{}{status}", clean(&outcome)), tone),
        millis(turn.age_ms).into(),
    ])
}
