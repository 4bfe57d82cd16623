//! Measures what a turn costs on its way through router and agent, in this build and another one.
//!
//! Three fleets run side by side: two of the other build, which differ by the run's noise alone,
//! and one of this build. A client sends turns to one after the other, on one connection each. The
//! engines are this build's in all of them.

use std::{fmt, path::PathBuf};

use anyhow::{Context as _, ensure};
use axum::body::Body;
use harness::cluster::text_turn;
use http::Method;
use http_body_util::BodyExt as _;
use serde::Serialize;
use serde_json::{Value, json};
use service::clock::now;

use crate::{
    fleet::{Fleet, Plan, own_programs},
    latency::median,
};

/// The tokens of a streamed answer. Each comes as a chunk of its own.
const STREAM_TOKENS: u32 = 50;
/// The time between two tokens in milliseconds, so that each chunk passes alone.
const STREAM_STEP_MS: u32 = 1;
/// A round has this many times fewer streams than small turns.
const STREAMS_FEWER: u32 = 10;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The folder with the other build's `berth-agent` and `berth-router`. Not given: this build's
    #[arg(long)]
    against_programs: Option<PathBuf>,
    /// The number of rounds. In each, every fleet gets turns.
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// The number of small turns that a fleet gets in a round, and ten times the number of streams.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(10..))]
    turns: u32,
}

/// A way to send a turn.
#[derive(Debug, Clone, Copy)]
struct Kind {
    name: &'static str,
    is_stream: bool,
    /// Whether turns are deltas of a pinned session; each round has a session of its own.
    has_session: bool,
}

const KINDS: [Kind; 4] = [
    Kind { name: "small POST", is_stream: false, has_session: false },
    Kind { name: "small POST in a session", is_stream: false, has_session: true },
    Kind { name: "stream of 50 chunks", is_stream: true, has_session: false },
    Kind { name: "stream in a session", is_stream: true, has_session: true },
];

/// What the turns of a round took. Times are in microseconds.
#[derive(Debug, Clone, Copy, Serialize)]
struct Costs {
    /// The median of the whole turns, as their client sees them.
    turn_p50: f64,
    turn_p99: f64,
    /// The median time to the first byte of an answer's body.
    first_byte_p50: f64,
    /// The processor time of the router for a turn.
    router_processor: f64,
    /// The processor time of the agent for a turn.
    agent_processor: f64,
}

impl Costs {
    const HEADS: [&str; 5] = ["turn p50", "turn p99", "first byte", "router CPU", "agent CPU"];

    fn figures(&self) -> [f64; 5] {
        let Self { turn_p50, turn_p99, first_byte_p50, router_processor, agent_processor } = *self;
        [turn_p50, turn_p99, first_byte_p50, router_processor, agent_processor]
    }

    fn from_figures(figures: [f64; 5]) -> Self {
        let [turn_p50, turn_p99, first_byte_p50, router_processor, agent_processor] = figures;
        Self { turn_p50, turn_p99, first_byte_p50, router_processor, agent_processor }
    }

    /// Returns the median of each figure of several rounds.
    fn medians(rounds: &[[f64; 5]]) -> Self {
        let figure = |index: usize| median(rounds.iter().map(|figures| figures[index]));
        Self::from_figures(std::array::from_fn(figure))
    }

    /// Returns the median of the ratios of two fleets' figures, round by round.
    fn ratios(rounds: &[Self], to: &[Self]) -> Self {
        let pairs = rounds.iter().zip(to);
        let ratios: Vec<[f64; 5]> = pairs
            .map(|(it, other)| {
                let (its, others) = (it.figures(), other.figures());
                std::array::from_fn(|index| its[index] / others[index])
            })
            .collect();
        Self::medians(&ratios)
    }
}

/// What was measured for one kind of turn.
#[derive(Debug, Serialize)]
struct KindFigures {
    kind: &'static str,
    /// The other build's medians over the rounds, in microseconds.
    other_build_us: Costs,
    /// The figures of a second fleet of the other build, divided by those of the first: the noise.
    same_again: Costs,
    /// This build's figures, divided by the other's in the same rounds.
    this_build: Costs,
}

/// All that was measured.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    rounds: u32,
    turns: u32,
    kinds: Vec<KindFigures>,
}

impl fmt::Display for Figures {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rounds, turns) = (self.rounds, self.turns);
        let streams = turns / STREAMS_FEWER;
        writeln!(out, "{rounds} rounds of {turns} small turns or {streams} streams; medians")?;
        write!(out, "{:<26}", "")?;
        Costs::HEADS.iter().try_for_each(|head| write!(out, "{head:>12}"))?;
        for KindFigures { kind, other_build_us, same_again, this_build } in &self.kinds {
            write!(out, "\n{kind}\n{:<26}", "  the other build, µs")?;
            other_build_us.figures().iter().try_for_each(|it| write!(out, "{it:>12.1}"))?;
            for (name, ratios) in [("  the same again", same_again), ("  this build", this_build)] {
                write!(out, "\n{name:<26}")?;
                ratios.figures().iter().try_for_each(|it| write!(out, "{it:>11.3}×"))?;
            }
        }
        writeln!(out)
    }
}

/// Measures all kinds of turns.
pub(crate) async fn measure(options: &Options) -> anyhow::Result<Figures> {
    let own = own_programs()?;
    let other = options.against_programs.clone().unwrap_or_else(|| own.clone());
    let mut kinds = vec![];
    for is_stream in [false, true] {
        let step_ms = if is_stream { STREAM_STEP_MS } else { 0 };
        let mut fleets = vec![];
        for programs in [&other, &other, &own] {
            let plan = Plan { programs: programs.clone(), step_ms, ..Plan::own()? };
            fleets.push(Fleet::start(&plan).await?);
        }
        for kind in KINDS.iter().filter(|kind| kind.is_stream == is_stream) {
            kinds.push(compare(*kind, &fleets, options).await?);
        }
    }
    Ok(Figures { rounds: options.rounds, turns: options.turns, kinds })
}

/// Measures one kind of turns with fleets of the other build, the other build, and this build.
async fn compare(kind: Kind, fleets: &[Fleet], options: &Options) -> anyhow::Result<KindFigures> {
    let turns = options.turns / if kind.is_stream { STREAMS_FEWER } else { 1 };
    let mut rounds: Vec<Vec<Costs>> = fleets.iter().map(|_| vec![]).collect();
    for fleet in fleets {
        round(fleet, kind, turns).await?;
    }
    for number in 0..options.rounds as usize {
        for step in 0..fleets.len() {
            // Each round begins with another fleet.
            let index = (number + step) % fleets.len();
            rounds[index].push(round(&fleets[index], kind, turns).await?);
        }
    }
    let [other, again, own] = &rounds[..] else { unreachable!("three fleets were started") };
    Ok(KindFigures {
        kind: kind.name,
        other_build_us: Costs::medians(&other.iter().map(Costs::figures).collect::<Vec<_>>()),
        same_again: Costs::ratios(again, other),
        this_build: Costs::ratios(own, other),
    })
}

/// Sends turns one after the other.
async fn round(fleet: &Fleet, kind: Kind, turns: u32) -> anyhow::Result<Costs> {
    let sessions = fleet.url.replace("/generate", "/v1/sessions");
    let mut body =
        text_turn("How long does it take?", if kind.is_stream { STREAM_TOKENS } else { 1 });
    body["stream"] = json!(kind.is_stream);
    if kind.has_session {
        let open = json!({ "session_id": "hops", "retention": "pinned" });
        let opened = fleet.web.post(&sessions, &[], &open).await?;
        ensure!(opened.status == 201, "{}: {}", opened.status, opened.text());
        body["session_params"] = json!({ "id": "hops" });
    }
    let (mut whole, mut first) = (vec![], vec![]);
    let (router, agent) = (fleet.router.processor_seconds()?, fleet.agent().processor_seconds()?);
    for _ in 0..turns {
        let (first_us, whole_us) = turn(fleet, &body).await?;
        first.push(first_us);
        whole.push(whole_us);
    }
    let each = |seconds: f64| seconds / f64::from(turns) * 1e6;
    let costs = Costs {
        turn_p50: median(whole.iter().copied()),
        turn_p99: quantile(whole, 0.99),
        first_byte_p50: median(first),
        router_processor: each(fleet.router.processor_seconds()? - router),
        agent_processor: each(fleet.agent().processor_seconds()? - agent),
    };
    if kind.has_session {
        let url = format!("{sessions}/hops");
        let closed = fleet.web.request(Method::DELETE, &url, &[], Body::empty()).await?;
        ensure!(closed.status.is_success(), "{}: {}", closed.status, closed.text());
    }
    Ok(costs)
}

/// Sends a turn. Returns the microseconds to the first byte of the answer, and to its end.
async fn turn(fleet: &Fleet, body: &Value) -> anyhow::Result<(f64, f64)> {
    let headers = [("content-type", "application/json")];
    let began = now();
    let since_began = || began.elapsed().as_secs_f64() * 1e6;
    let answer = fleet.web.send(Method::POST, &fleet.url, &headers, body.to_string()).await?;
    let status = answer.status();
    let mut answer = answer.into_body();
    let begin = answer.frame().await.context("an answer without a body")??;
    let first_us = since_began();
    let mut chunks = 1;
    while let Some(frame) = answer.frame().await {
        frame?;
        chunks += 1;
    }
    ensure!(status == 200, "{status}: {begin:?}");
    let is_stream = body["stream"] == true;
    ensure!(!is_stream || chunks >= STREAM_TOKENS / 2, "a stream came in {chunks} chunks");
    Ok((first_us, since_began()))
}

/// Returns the value below which this share of the values lies.
fn quantile(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    #[expect(clippy::cast_possible_truncation, reason = "an index into a list in memory")]
    #[expect(clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "far below 2^52")]
    let index = ((values.len() - 1) as f64 * share).round() as usize;
    values[index]
}
