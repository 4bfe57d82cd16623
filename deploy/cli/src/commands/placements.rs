//! Runs `berth placements`: where the last turns were placed and why, or all about one of them.

use contract::api::{Figures, Placements, RecentPlacement, WorkerFigures};
use serde::Deserialize as _;
use serde_json::{Value, json};

use super::{
    Outcome,
    listing::{self, Listing},
    pages::PagedList,
};
use crate::{
    args::{PlacementsArgs, TargetArgs},
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
    Column::text("REASON"),
    Column::number("COMPUTES"),
    Column::text("SESSION"),
    Column::number("AGO"),
];

const COMPARED_COLUMNS: &[Column] =
    &[Column::text("WORKER"), Column::word(""), Column::text("FIGURES")];

pub async fn run(target: &TargetArgs, args: &PlacementsArgs) -> Result<Outcome, Error> {
    let router = RouterClient::new(target)?;
    if let Some(turn) = &args.turn {
        let path = format!("/v1/placements/{}", encode(turn));
        return listing::show(&args.list, async || {
            let (page, json) = router.get_as::<Placements>(&path).await?;
            Ok(explain(&page, json))
        })
        .await;
    }
    let path = "/v1/placements";
    let mut list = PagedList::new(&router, path, "placements");
    listing::follow(&args.list, async || {
        let entries = list.read_newest(args.limit).await?;
        let rows: Result<_, _> = entries.iter().map(row).collect();
        let rows = rows.map_err(|error| router.answer_error(path, error.to_string()))?;
        Ok(Listing {
            json: json!({ "placements": entries }),
            columns: COLUMNS,
            rows,
            notes: vec![],
        })
    })
    .await
}

fn row(entry: &Value) -> serde_json::Result<Vec<Cell>> {
    let placement = RecentPlacement::deserialize(entry)?;
    Ok(vec![
        clean(&placement.turn).into(),
        clean(&placement.worker).into(),
        clean(&placement.reason).into(),
        known(placement.uncached_tokens, count).into(),
        known(placement.session, |session| clean(&session)).into(),
        millis(placement.age_ms).into(),
    ])
}

fn explain(page: &Placements, json: Value) -> Listing {
    let mut rows = vec![];
    let mut notes = vec![];
    for placement in &page.placements {
        notes.push(format!(
            "placed on {} {} ago: {}, {} tokens to compute",
            clean(&placement.worker),
            millis(placement.age_ms),
            clean(&placement.reason),
            known(placement.uncached_tokens, count),
        ));
        for figures in &placement.compared {
            let WorkerFigures { worker, figures } = figures;
            let is_chosen = *worker == placement.worker;
            let mark = if is_chosen { Cell::toned("chosen", Tone::Good) } else { "".into() };
            rows.push(vec![clean(worker).into(), mark, figures_text(figures).into()]);
        }
    }
    Listing { json, columns: COMPARED_COLUMNS, rows, notes }
}

/// Their names say all that the API says of them.
fn figures_text(figures: &Figures) -> String {
    let figures = serde_json::to_value(figures).unwrap_or_default();
    let members = figures.as_object().into_iter().flatten();
    let shown = members.filter(|(_, value)| !value.is_null());
    let texts: Vec<String> = shown.map(|(name, value)| clean(&format!("{name} {value}"))).collect();
    texts.join(", ")
}
