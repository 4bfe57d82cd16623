//! Runs `berth devices`: the GPUs of the workers, with their memory, load and health.

use contract::{
    api::{Worker, Workers},
    load::{Device, Figure},
};
use serde_json::{Value, json};

use super::{
    Outcome,
    listing::{self, Listing},
};
use crate::{
    args::{ListArgs, TargetArgs},
    connect::router::RouterClient,
    error::Error,
    text::{
        bytes, clean, known, percent,
        style::Tone,
        table::{Cell, Column},
    },
};

const COLUMNS: &[Column] = &[
    Column::text("WORKER"),
    Column::text("DEVICE"),
    Column::word("STATE"),
    Column::number("HBM"),
    Column::number("USED"),
    Column::number("ENGINE"),
    Column::number("KV POOL"),
    Column::number("KV USED"),
    Column::number("SM"),
    Column::number("W"),
    Column::number("C"),
];

pub async fn run(target: &TargetArgs, args: &ListArgs) -> Result<Outcome, Error> {
    let router = RouterClient::new(target)?;
    listing::show(args, async || {
        let (fleet, json) = router.get_as::<Workers>("/v1/workers").await?;
        let rows = devices(&fleet).map(|(worker, device)| row(worker, device)).collect();
        let faults = devices(&fleet).filter_map(|(_, device)| {
            Some(format!("{}: {}", clean(&device.uuid), clean(device.unhealthy.as_ref()?)))
        });
        let notes = faults.collect();
        Ok(Listing { json: to_json(&json), columns: COLUMNS, rows, notes })
    })
    .await
}

fn devices(fleet: &Workers) -> impl Iterator<Item = (&Worker, &Device)> {
    let loads = fleet.workers.iter().filter_map(|worker| Some((worker, worker.load.as_ref()?)));
    loads.flat_map(|(worker, load)| load.devices.iter().map(move |device| (worker, device)))
}

fn to_json(workers: &Value) -> Value {
    let mut devices = vec![];
    for worker in workers["workers"].as_array().into_iter().flatten() {
        for device in worker["load"]["devices"].as_array().into_iter().flatten() {
            let mut device = device.clone();
            device["worker"] = worker["worker"].clone();
            devices.push(device);
        }
    }
    json!({ "devices": devices })
}

fn row(worker: &Worker, device: &Device) -> Vec<Cell> {
    let (state, tone) = match device.unhealthy {
        Some(_) => ("unhealthy", Tone::Bad),
        None if device.index.is_none() => ("no NVML", Tone::Faint),
        None => ("healthy", Tone::Good),
    };
    let slice = if device.parent_uuid.is_some() { " (MIG)" } else { "" };
    let name = if device.name.is_empty() { &device.uuid } else { &device.name };
    let used = device.memory_used_bytes.zip(device.memory_total_bytes);
    let figure_bytes = |figure: Option<Figure>| known(figure, |figure| bytes(figure.value));
    vec![
        clean(&worker.worker).into(),
        format!("{}{slice}", clean(name)).into(),
        Cell::toned(state, tone),
        known(device.memory_total_bytes, bytes).into(),
        known(used, |(used, total)| percent(used, total)).into(),
        figure_bytes(device.engine_bytes).into(),
        figure_bytes(device.kv_pool_bytes).into(),
        known(device.kv_physical_usage(), |usage| format!("{:.0}%", usage.value * 100.0)).into(),
        known(device.utilization_percent, |percent| format!("{percent}%")).into(),
        known(device.power_milliwatts, |power| (power / 1000).to_string()).into(),
        known(device.temperature_celsius, |degrees| degrees.to_string()).into(),
    ]
}
