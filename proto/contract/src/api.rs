//! The JSON of the router's own routes: the router writes it, `berth` reads it, OpenAPI shows it.
//!
//! A reader takes absent members for unknown and ignores members that it doesn't know, because the
//! versions of router and reader may differ a little. So texts stay open where a newer router may
//! have another one.

mod models;
mod recent;
mod sessions;
mod workers;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use self::{
    models::{Model, Models},
    recent::{
        Cursor, Figures, Placement, Placements, PrefillPlacement, RecentPlacement,
        RecentPlacements, Turn, Turns, WorkerFigures,
    },
    sessions::{FleetSession, FleetSessions, Prefetch, Session, SessionReport, Sessions},
    workers::{Kv, UnheardAgent, Worker, Workers},
};

/// What an agent says of itself to a router.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Announcement {
    pub agent_id: String,
    /// `http://host:port`
    pub control: String,
    pub ttl_ms: u64,
    /// Whether the agent is about to end.
    #[serde(default)]
    pub leaving: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AnnouncementHeld {
    pub ttl_ms: u64,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::load::{Device, Figure, RankLoad, Source};

    #[test]
    fn a_session_that_no_agent_has_reported_has_three_members() {
        let session = Session {
            session_id: "s".into(),
            worker: "w/0".into(),
            state: "bound".into(),
            report: None,
        };
        let bound = json!({ "session_id": "s", "worker": "w/0", "state": "bound" });
        assert_eq!(serde_json::to_value(&session).unwrap(), bound);
        let report = Some(SessionReport { retention: "none".into(), ..SessionReport::default() });
        let reported = serde_json::to_value(Session { report, ..session.clone() }).unwrap();
        assert_eq!(reported.as_object().unwrap().len(), 12);
        assert_eq!(reported["resident_tokens"], json!(null), "unknown, not absent");
        let read: Session = serde_json::from_value(reported).unwrap();
        assert_eq!(read.report.unwrap().retention, "none");
        let read: Session = serde_json::from_value(bound).unwrap();
        assert_eq!(read.report.unwrap_or_default(), SessionReport::default());
    }

    #[test]
    fn a_worker_s_figures_are_as_old_as_they_are_and_its_devices_say_what_they_know() {
        let figure = |value, age_ms| Some(Figure { value, source: Source::Shim, age_ms });
        let device = Device {
            kv_pool_bytes: figure(400, 1),
            kv_used_bytes: figure(100, u32::MAX),
            ..Device::default()
        };
        let load = RankLoad {
            dp_rank: 3,
            pool_total_tokens: figure(10, 2),
            devices: vec![device],
            ..RankLoad::default()
        };
        let worker = Worker { load: Some(load.aged(5)), ..Worker::default() };
        let worker = serde_json::to_value(worker).unwrap();
        let load = &worker["load"];
        assert_eq!(
            load["pool_total_tokens"],
            json!({ "value": 10, "source": "shim", "age_ms": 7 })
        );
        assert_eq!(load["rows_held"], json!(null));
        let names = load.as_object().unwrap();
        assert!(names.contains_key("kv_physical_usage") && !names.contains_key("dp_rank"));
        let used = json!({ "value": 100, "source": "shim", "age_ms": u32::MAX });
        let usage = json!({ "value": 0.25, "source": "shim", "age_ms": u32::MAX });
        let device = json!({
            "uuid": "", "name": "", "kv_used_bytes": used, "kv_physical_usage": usage,
            "kv_pool_bytes": { "value": 400, "source": "shim", "age_ms": 6 },
        });
        assert_eq!(load["devices"], json!([device]));
    }

    #[test]
    fn an_answer_of_a_newer_router_is_read_as_far_as_it_is_known() {
        let newer = json!({
            "workers": [{
                "worker": "w/0", "new": 1, "retentions": ["new"],
                "load": { "rows_held": { "value": 5, "source": "new" } },
            }],
        });
        let Workers { workers, unheard } = serde_json::from_value(newer).unwrap();
        let held = workers[0].load.as_ref().unwrap().rows_held.unwrap();
        assert_eq!((held.value, held.source, held.age_ms), (5, Source::Unknown, 0));
        assert!(unheard.is_empty() && !workers[0].is_fresh());
    }
}
