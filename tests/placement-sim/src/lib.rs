//! The library behind `berth-sim`: placement policies over modelled engines, in virtual time.
//!
//! Workloads: `corpus` (a trace with numbered blocks), `synthetic`, `azure`. Schedule:
//! `schedule`. Engines: `engine` with its `pool`. Policies: `policy`, which see only the facts in
//! `fleet`. `run` joins all of these, `stats` counts, `compare` runs many policies and seeds, and
//! `report` shows the results. Everything except `compare` and the trace readers is pure,
//! and deterministic for a given seed.

pub mod azure;
pub mod compare;
pub mod corpus;
pub mod engine;
pub mod fleet;
pub mod options;
pub mod policy;
pub mod pool;
pub mod report;
pub mod run;
pub mod schedule;
pub mod stats;
pub mod synthetic;
