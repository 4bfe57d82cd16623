//! Reads the figures that routers and agents show on their metrics pages.

use std::time::Duration;

use anyhow::{bail, ensure};
use harness::web::Web;
use service::clock::now;

/// The longest wait for a figure.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// The pause between two readings.
const PAUSE: Duration = Duration::from_millis(20);

/// A metrics page.
#[derive(Debug)]
pub(crate) struct Figures(String);

impl Figures {
    /// Reads the page of an admin port, such as `http://127.0.0.1:8081`.
    pub(crate) async fn read(web: &Web, admin: &str) -> anyhow::Result<Self> {
        let answer = web.get(&format!("{admin}/metrics")).await?;
        if answer.status != 200 {
            bail!("{admin}/metrics got {}", answer.status);
        }
        Ok(Self(answer.text()))
    }

    /// Whether the page has a line of this metric.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.lines().any(|line| line.starts_with(name))
    }

    /// Returns the sum of a metric over its label sets that contain `label`, such as
    /// `port="data"`. An empty `label` is in all of them. A metric without a line is 0.
    pub(crate) fn sum(&self, name: &str, label: &str) -> f64 {
        let value = |line: &str| {
            let rest = line.strip_prefix(name)?;
            let (labels, value) = rest.rsplit_once(' ')?;
            let is_asked = labels.is_empty() || labels.starts_with('{');
            (is_asked && labels.contains(label)).then(|| value.parse::<f64>().ok())?
        };
        self.0.lines().filter_map(value).sum()
    }
}

/// Waits until a metric of an admin port is at least `least`.
pub(crate) async fn reach(
    web: &Web,
    admin: &str,
    (name, label): (&str, &str),
    least: f64,
) -> anyhow::Result<()> {
    let (began, mut most) = (now(), 0.0_f64);
    while began.elapsed() < PATIENCE {
        // While an attack begins, a page may be refused.
        if let Ok(figures) = Figures::read(web, admin).await {
            most = most.max(figures.sum(name, label));
        }
        if most >= least {
            return Ok(());
        }
        tokio::time::sleep(PAUSE).await;
    }
    bail!("the attack isn't in force: {name}{{{label}}} is {most} at most, not {least}")
}

/// Waits until `is_so`, which `what` says in words.
pub(crate) async fn until(what: &str, is_so: impl Fn() -> bool) -> anyhow::Result<()> {
    let began = now();
    while !is_so() {
        ensure!(began.elapsed() < PATIENCE, "the attack isn't in force: not so that {what}");
        tokio::time::sleep(PAUSE).await;
    }
    Ok(())
}
