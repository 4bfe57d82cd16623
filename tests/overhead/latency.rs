//! Measures the time that certificates, keys and tokens add to a turn.
//!
//! All fleets run side by side, and a client sends turns to one after the other, on one connection
//! each. Two fleets are alike and have none of it: what differs between them is the run's noise.

use std::fmt;

use anyhow::ensure;
use harness::cluster::text_turn;
use serde::Serialize;
use service::clock::now;

use crate::fleet::{Fleet, Plan, Security};

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The number of rounds. In each, every fleet gets turns.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// The number of turns that a fleet gets in a round.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    turns: u32,
    /// Also measure TLS before the router, TLS behind it, and keys and tokens alone
    #[arg(long)]
    parts: bool,
}

/// What was measured. Times are in microseconds, and medians over the rounds.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    rounds: u32,
    turns: u32,
    fleets: Vec<FleetFigures>,
    /// The difference between the turns of the two fleets that are alike, either way.
    noise_us: f64,
}

/// The figures of one fleet. What is added, is added to those of the first fleet.
#[derive(Debug, Serialize)]
struct FleetFigures {
    name: &'static str,
    turn_us: f64,
    added_us: f64,
    /// Processor time of router and agent for a turn. It depends less on what else runs.
    processor_us: f64,
    added_processor_us: f64,
}

impl fmt::Display for Figures {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rounds, turns, fleets, noise_us } = self;
        writeln!(out, "{rounds} rounds of {turns} turns on one connection; microseconds")?;
        let heads = ["turn, p50", "added", "processor", "added"];
        write!(out, "{:<26}", "")?;
        heads.iter().try_for_each(|head| write!(out, "{head:>12}"))?;
        for fleet in fleets {
            let FleetFigures { name, turn_us, added_us, processor_us, added_processor_us } = fleet;
            write!(out, "\n{name:<26}{turn_us:>12.1}{added_us:>12.1}")?;
            write!(out, "{processor_us:>12.1}{added_processor_us:>12.1}")?;
        }
        writeln!(out, "\n{:<26}{:>12}{noise_us:>12.1}", "noise", "")
    }
}

/// What a client saw in a round, and what it cost. Times are in microseconds.
#[derive(Debug)]
struct Round {
    turn_us: f64,
    processor_us: f64,
}

const PLAIN: Security = Security { client_tls: false, agent_tls: false, keys: false };
const ALL: Security = Security { client_tls: true, agent_tls: true, keys: true };

/// Measures all variants.
pub(crate) async fn measure(options: &Options) -> anyhow::Result<Figures> {
    let mut variants =
        vec![("plain", PLAIN), ("plain, again", PLAIN), ("TLS, mutual TLS, keys", ALL)];
    if options.parts {
        variants.push(("TLS before the router", Security { client_tls: true, ..PLAIN }));
        variants.push(("mutual TLS behind it", Security { agent_tls: true, ..PLAIN }));
        variants.push(("keys and a token", Security { keys: true, ..PLAIN }));
    }
    let mut fleets = vec![];
    for (_, security) in &variants {
        let fleet = Fleet::start(&Plan { security: *security, ..Plan::own()? }).await?;
        round(&fleet, options.turns).await?;
        fleets.push(fleet);
    }
    let mut rounds: Vec<Vec<Round>> = fleets.iter().map(|_| vec![]).collect();
    for number in 0..options.rounds as usize {
        for step in 0..fleets.len() {
            // Each round begins with another fleet.
            let index = (number + step) % fleets.len();
            rounds[index].push(round(&fleets[index], options.turns).await?);
        }
    }
    let names = variants.iter().map(|(name, _)| *name);
    Ok(Figures {
        rounds: options.rounds,
        turns: options.turns,
        fleets: names.zip(&rounds).map(|(name, seen)| figures(name, seen, &rounds[0])).collect(),
        noise_us: median(
            rounds[1].iter().zip(&rounds[0]).map(|(a, b)| (a.turn_us - b.turn_us).abs()),
        ),
    })
}

/// Returns the figures of a fleet, compared with the plain fleet's in the same rounds.
fn figures(name: &'static str, rounds: &[Round], plain: &[Round]) -> FleetFigures {
    let pairs = || rounds.iter().zip(plain);
    FleetFigures {
        name,
        turn_us: median(rounds.iter().map(|round| round.turn_us)),
        added_us: median(pairs().map(|(with, none)| with.turn_us - none.turn_us)),
        processor_us: median(rounds.iter().map(|round| round.processor_us)),
        added_processor_us: median(
            pairs().map(|(with, none)| with.processor_us - none.processor_us),
        ),
    }
}

/// Sends turns one after the other.
async fn round(fleet: &Fleet, turns: u32) -> anyhow::Result<Round> {
    let body = text_turn("How long does it take?", 1);
    let authorization = fleet.authorization.as_deref().map(|value| ("authorization", value));
    let headers: Vec<_> = authorization.into_iter().collect();
    let mut times = vec![];
    let before = fleet.processor_seconds()?;
    for _ in 0..turns {
        let began = now();
        let answer = fleet.web.post(&fleet.url, &headers, &body).await?;
        times.push(began.elapsed().as_secs_f64() * 1e6);
        ensure!(answer.status == 200, "{}: {}", answer.status, answer.text());
    }
    let processor_us = (fleet.processor_seconds()? - before) / f64::from(turns) * 1e6;
    Ok(Round { turn_us: median(times), processor_us })
}

pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
