//! Runs `berth workers`: the workers with their turns, request rows and KV pools.

use contract::{
    api::{Worker, Workers},
    load::Figure,
};

use super::{
    Outcome,
    listing::{self, Listing},
};
use crate::{
    args::{ListArgs, TargetArgs},
    connect::router::RouterClient,
    error::Error,
    pool_parts::PoolParts,
    text::{
        clean, count, known, millis, percent,
        style::state_tone,
        table::{Cell, Column},
    },
};

const COLUMNS: &[Column] = &[
    Column::text("WORKER"),
    Column::word("STATE"),
    Column::number("RUN"),
    Column::number("WAIT"),
    Column::number("ROWS"),
    Column::number("POOL"),
    Column::number("IN USE"),
    Column::number("PINNED"),
    Column::number("CACHED"),
    Column::number("HOST"),
    Column::number("SESS"),
    Column::number("HEARD"),
];

pub async fn run(target: &TargetArgs, args: &ListArgs) -> Result<Outcome, Error> {
    let router = RouterClient::new(target)?;
    listing::show(args, async || {
        let (fleet, json) = router.get_as::<Workers>("/v1/workers").await?;
        let rows = fleet.workers.iter().map(row).collect();
        Ok(Listing { json, columns: COLUMNS, rows, notes: notes(&fleet) })
    })
    .await
}

fn row(worker: &Worker) -> Vec<Cell> {
    let load = worker.load.clone().unwrap_or_default();
    let value = |figure: Option<Figure>| figure.map(|figure| figure.value);
    let rows = value(load.rows_held).zip(value(load.rows_total));
    let parts = PoolParts::read(worker);
    let share =
        |tokens: u64| parts.map_or_else(|| "-".to_owned(), |it| percent(tokens, it.total()));
    let pool = parts.unwrap_or_default();
    let host = load.host.unwrap_or_default();
    let host = value(host.used_tokens).zip(value(host.total_tokens));
    vec![
        clean(&worker.worker).into(),
        Cell::toned(clean(&worker.state), state_tone(&worker.state)),
        load.turns_running.to_string().into(),
        load.turns_queued.to_string().into(),
        known(rows, |(held, total)| format!("{held}/{total}")).into(),
        known(parts, |parts| count(parts.total())).into(),
        share(pool.locked + pool.running).into(),
        share(pool.pinned).into(),
        share(pool.evictable).into(),
        known(host, |(used, total)| format!("{}/{}", count(used), count(total))).into(),
        load.sessions.to_string().into(),
        known(worker.heartbeat_age_ms, millis).into(),
    ]
}

fn notes(fleet: &Workers) -> Vec<String> {
    let not_fresh = fleet.workers.iter().filter(|worker| !worker.reason.is_empty());
    let reasons = not_fresh.map(|worker| (&worker.worker, &worker.reason));
    let restarts = fleet.workers.iter().filter_map(|worker| {
        Some((&worker.worker, worker.restart_required.as_ref().filter(|why| !why.is_empty())?))
    });
    let unheard = fleet.unheard.iter().map(|agent| (&agent.control, &agent.reason));
    let all = reasons.chain(restarts).chain(unheard);
    all.map(|(name, why)| format!("{}: {}", clean(name), clean(why))).collect()
}
