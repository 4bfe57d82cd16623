//! Processes that are stopped and replaced under load.

use anyhow::ensure;
use rustix::process::Signal;
use serde_json::json;
use tests::{
    case,
    cases::Case,
    fleet::{FleetPlan, Place, Processes, credential},
};

/// The cases, in the order in which they run.
pub(crate) const CASES: &[Case] = &[case!("router killed", true, router_killed)];

/// A router that is killed and started again serves a turn at once.
async fn router_killed(place: Place) -> anyhow::Result<String> {
    let mut fleet =
        Processes::start(place, &FleetPlan { routers: 2, ..FleetPlan::default() }).await?;
    let key = credential("alice");
    let headers = [("authorization", key.as_str())];
    let body = json!({ "model": "tiny", "prompt": "hello", "max_tokens": 2 });
    for router in 0..2 {
        let answer = fleet.web.post(&fleet.url(router, "/v1/completions"), &headers, &body).await?;
        ensure!(answer.status == 200, "router {router} answered {}", answer.status);
    }
    fleet.routers[0].end(Signal::KILL).await?;
    fleet.routers[0].start()?;
    let web = fleet.web.clone();
    fleet.routers[0].ready(&web).await?;
    let answer = fleet.web.post(&fleet.url(0, "/v1/completions"), &headers, &body).await?;
    ensure!(answer.status == 200, "the router answered {} after its start", answer.status);
    Ok("both routers serve".to_owned())
}
