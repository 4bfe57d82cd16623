//! Stops an engine, as a debugger or a frozen host does.

use std::time::Duration;

use anyhow::ensure;
use harness::fleet::{FleetPlan, Place, Processes, credential};
use rustix::process::Signal;
use serde_json::json;
use service::clock::now;

use crate::users::Users;

/// The longest time until a turn that can't be served is answered.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// How much longer it may take on a machine that stops for a moment.
const LOADED_MAX: Duration = Duration::from_secs(20);

/// An engine that is stopped, as a debugger or a frozen host does it: new turns are refused within
/// [`ANSWER_MAX`] with the reason, and served again when the engine goes on.
pub(crate) async fn engine_stopped(place: Place) -> anyhow::Result<String> {
    let fleet = Processes::start(place, &FleetPlan::default()).await?;
    let users = Users::new(&fleet, 4);
    users.work(Duration::from_secs(2)).await?;
    fleet.engines[0].signal(Signal::STOP)?;
    let stopped = now();
    let (key, url) = (credential("alice"), fleet.url(0, "/v1/completions"));
    let body = json!({ "model": "tiny", "prompt": "hello", "max_tokens": 2 });
    let headers = [("authorization", key.as_str())];
    // Turns that were sent before the silence is noticed may hang; those after it may not.
    let refused = loop {
        let answer =
            tokio::time::timeout(Duration::from_secs(1), fleet.web.post(&url, &headers, &body))
                .await;
        if let Ok(Ok(answer)) = answer
            && answer.status == 503
        {
            break answer.code();
        }
        ensure!(stopped.elapsed() < ANSWER_MAX + LOADED_MAX, "no turn was refused");
    };
    let noticed = stopped.elapsed().as_secs_f64();
    fleet.engines[0].signal(Signal::CONT)?;
    let went_on = now();
    while fleet.web.post(&url, &headers, &body).await?.status != 200 {
        ensure!(
            went_on.elapsed() < ANSWER_MAX + LOADED_MAX,
            "no turn is served after the engine went on"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let served = went_on.elapsed().as_secs_f64();
    Ok(format!(
        "refused with {refused} after {noticed:.1} s, served {served:.1} s after it went on"
    ))
}
