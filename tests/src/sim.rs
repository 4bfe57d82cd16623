//! `berth-sim` as a library: placement policies over a model of engines, in virtual time.
//!
//! What is played: `corpus` (a trace with its blocks numbered), `made`, `azure`; who plays it
//! when: `plays`. What it is played on: `engine` with its `pool`. Who decides: `policy`, from what
//! `fleet` lets it see. `run` joins them, `tally` counts, `compare` runs many, `report` and `plot`
//! show. Everything but `compare` and the readers is pure and the same for the same seed.

pub mod azure;
pub mod compare;
pub mod corpus;
pub mod engine;
pub mod fleet;
pub mod made;
pub mod options;
pub mod plays;
pub mod plot;
pub mod policy;
pub mod pool;
pub mod report;
pub mod run;
pub mod tally;
