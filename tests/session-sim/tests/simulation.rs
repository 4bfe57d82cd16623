//! Runs the simulation for many seeds, then without each guard in turn: then a promise must break.
//!
//! `cargo test -p session-sim --test simulation -- --seeds 4096`, or `--seed 17 --trace`.

#![expect(clippy::print_stdout, reason = "a test without the harness reports by itself")]

use std::{collections::BTreeMap, process::ExitCode, time::Instant};

use clap::Parser;
use rayon::prelude::*;
use session_sim::{Broken, Clean, play};
use worker_agent::guard::{Guard, Guards};

/// The seeds that run at once without a guard. Most guards are missed within the first few.
const BLOCK: usize = 8;

#[derive(Debug, Parser)]
struct Options {
    /// How many seeds to run.
    #[arg(long, default_value_t = 256)]
    seeds: u64,
    /// Run only this seed.
    #[arg(long)]
    seed: Option<u64>,
    /// Run without this guard.
    #[arg(long, value_parser = guard)]
    guard: Option<Guard>,
    /// Print every event.
    #[arg(long)]
    trace: bool,
    /// Arguments that `cargo test` may pass: a filter, and flags of the harness that this test
    /// lacks.
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<String>,
}

fn guard(name: &str) -> Result<Guard, String> {
    let named = |guard: &Guard| format!("{guard:?}").eq_ignore_ascii_case(name);
    Guard::ALL.into_iter().find(named).ok_or(format!("no guard is called {name}"))
}

fn main() -> ExitCode {
    let options = Options::parse();
    // A broken promise is a panic; the seed in which it broke is reported instead of the panic's
    // text.
    std::panic::set_hook(Box::new(|_| ()));
    let guards = options.guard.map_or_else(Guards::default, Guards::without);
    if let Some(seed) = options.seed {
        return run_seed(seed, guards, options.trace);
    }
    if let Some(guard) = options.guard {
        return match find_break(guard, options.seeds) {
            Some(broken) => report(&broken),
            None => {
                println!("{guard:?} is not missed in {} seeds", options.seeds);
                ExitCode::FAILURE
            }
        };
    }
    run_all(options.seeds)
}

#[expect(clippy::disallowed_methods, reason = "the world begins at some instant, whichever")]
fn base() -> Instant {
    Instant::now()
}

fn run_seed(seed: u64, guards: Guards, trace: bool) -> ExitCode {
    let echo: fn(&str) = |line| println!("{line}");
    match play(seed, guards, base(), trace.then_some(echo)) {
        Ok(clean) => {
            println!("seed {seed}: {clean:?}");
            ExitCode::SUCCESS
        }
        Err(broken) => report(&broken),
    }
}

fn report(broken: &Broken) -> ExitCode {
    broken.trace.iter().for_each(|line| println!("{line}"));
    println!("seed {} step {}: {}", broken.seed, broken.step, broken.what);
    ExitCode::FAILURE
}

fn run_all(seeds: u64) -> ExitCode {
    let began = base();
    let cleans = match play_seeds(seeds, Guards::default()) {
        Ok(cleans) => cleans,
        Err(broken) => return report(&broken),
    };
    let steps: u64 = cleans.values().map(|clean| clean.steps).sum();
    println!("{seeds} seeds, {steps} events, no promise broken, {:?}", began.elapsed());
    summary(&cleans);
    for (seed, clean) in cleans.iter().take(8) {
        let again = play(*seed, Guards::default(), base(), None);
        if again.as_ref().ok() != Some(clean) {
            println!("seed {seed} plays differently the second time");
            return ExitCode::FAILURE;
        }
    }
    let began = base();
    let mut missed = true;
    for guard in Guard::ALL {
        match find_break(guard, 512) {
            Some(Broken { seed, step, what, .. }) => {
                let what: String =
                    what.lines().next().unwrap_or_default().chars().take(90).collect();
                println!(
                    "without {:<20} seed {seed:>3} step {step:>5}: {what}",
                    format!("{guard:?}")
                );
            }
            None => {
                println!("without {:<20} nothing breaks", format!("{guard:?}"));
                missed = false;
            }
        }
    }
    println!("{} guards in {:?}", Guard::ALL.len(), began.elapsed());
    if missed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn summary(cleans: &BTreeMap<u64, Clean>) {
    let sum = |part: fn(&Clean) -> u64| cleans.values().map(part).sum::<u64>();
    println!(
        "turns answered {}, trimmed {}, left {}, lost {}, retracted {}; sessions opened {}; \
         killed: agents {}, engines {}; handed over {}; restarts needed {}; weights changed {}; \
         tokens prefetched {}",
        sum(|clean| clean.turns.answered),
        sum(|clean| clean.turns.trimmed),
        sum(|clean| clean.turns.left),
        sum(|clean| clean.turns.lost),
        sum(|clean| clean.turns.retracted),
        sum(|clean| clean.turns.opened),
        sum(|clean| clean.turns.agents_killed),
        sum(|clean| clean.turns.engines_killed),
        sum(|clean| clean.turns.taken_up),
        sum(|clean| clean.turns.restarted),
        sum(|clean| clean.turns.weights_changed),
        sum(|clean| clean.turns.prefetched_tokens),
    );
    let mut refused: BTreeMap<&str, u64> = BTreeMap::new();
    for (code, count) in cleans.values().flat_map(|clean| &clean.turns.refused) {
        *refused.entry(code).or_default() += count;
    }
    println!("refused: {refused:?}");
}

/// Runs all seeds from 0 on, on all processors. Of the seeds that break a promise, the lowest is
/// reported.
fn play_seeds(seeds: u64, guards: Guards) -> Result<BTreeMap<u64, Clean>, Box<Broken>> {
    let base = base();
    let seeds: Vec<u64> = (0..seeds).collect();
    let played: Vec<_> = seeds.par_iter().map(|seed| play(*seed, guards, base, None)).collect();
    seeds.into_iter().zip(played).map(|(seed, result)| Ok((seed, result?))).collect()
}

/// Runs seeds without a guard, a few at once, until one breaks a promise; returns the lowest.
fn find_break(guard: Guard, seeds: u64) -> Option<Broken> {
    let (guards, base) = (Guards::without(guard), base());
    let broken = |seed| play(seed, guards, base, None).err();
    let mut blocks = (0..seeds).step_by(BLOCK).map(|first| first..seeds.min(first + BLOCK as u64));
    let broken = blocks.find_map(|block| block.into_par_iter().find_map_first(broken));
    broken.map(|broken| *broken)
}
