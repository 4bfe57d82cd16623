//! A rank's load in JSON: figures as old as they are by then, and how full its KV pool is.

use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::{Device, Figure, RankLoad, Ratio};

impl RankLoad {
    /// Adds `by_ms`, such as the time since the report arrived, to the ages of all figures.
    #[must_use]
    pub fn aged(mut self, by_ms: u32) -> Self {
        for figure in [
            &mut self.requests_running,
            &mut self.requests_waiting,
            &mut self.pool_used_tokens,
            &mut self.pool_total_tokens,
            &mut self.pinned_tokens,
            &mut self.resident_tokens_estimate,
            &mut self.rows_held,
            &mut self.rows_total,
            &mut self.pool_available_tokens,
            &mut self.pool_evictable_tokens,
            &mut self.foreign_tokens,
            &mut self.prefill_tokens_per_s,
            &mut self.prefill_backlog_tokens,
        ] {
            age(figure, by_ms);
        }
        if let Some(host) = &mut self.host {
            for figure in [
                &mut host.total_tokens,
                &mut host.used_tokens,
                &mut host.evictable_tokens,
                &mut host.loading_tokens,
                &mut host.writing_tokens,
                &mut host.load_tokens_per_s,
            ] {
                age(figure, by_ms);
            }
        }
        for device in &mut self.devices {
            for figure in [
                &mut device.engine_bytes,
                &mut device.kv_pool_bytes,
                &mut device.kv_used_bytes,
                &mut device.kv_pinned_bytes,
                &mut device.kv_reclaimable_bytes,
            ] {
                age(figure, by_ms);
            }
            device.age_ms = device.age_ms.map(|age_ms| age_ms.saturating_add(by_ms));
        }
        if let Some(pages) = &mut self.pages {
            pages.age_ms = pages.age_ms.saturating_add(by_ms);
        }
        self
    }
}

fn age(figure: &mut Option<Figure>, by_ms: u32) {
    if let Some(figure) = figure {
        figure.age_ms = figure.age_ms.saturating_add(by_ms);
    }
}

/// A rank's load and the part of its pool that is not free.
#[derive(Serialize, ToSchema)]
#[schema(as = WorkerLoad)]
pub(crate) struct ShownLoad<'a> {
    #[serde(flatten)]
    #[schema(value_type = RankLoad)]
    load: &'a RankLoad,
    #[schema(required)]
    kv_physical_usage: Option<Ratio>,
}

/// A device and the part of the rank's pool on it that is not free.
#[derive(Serialize, ToSchema)]
#[schema(as = WorkerDevice)]
pub(super) struct ShownDevice<'a> {
    #[serde(flatten)]
    #[schema(value_type = Device)]
    device: &'a Device,
    kv_physical_usage: Option<Ratio>,
}

pub(crate) fn load<S: Serializer>(
    load: &Option<RankLoad>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let shown = load.as_ref();
    let shown = shown.map(|load| ShownLoad { load, kv_physical_usage: load.kv_physical_usage() });
    shown.serialize(serializer)
}

/// Unknown values are absent.
pub(super) fn devices<S: Serializer>(devices: &[Device], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(devices.iter().map(|device| {
        let kv_physical_usage = device.kv_physical_usage();
        let mut shown = json!(ShownDevice { device, kv_physical_usage });
        if let Value::Object(members) = &mut shown {
            members.retain(|_, value| !value.is_null());
        }
        shown
    }))
}
