//! Runs the commands: asks a router or an agent, and prints the answer.

pub mod audit;
pub mod devices;
pub mod doctor;
pub mod drain;
pub mod init;
pub mod kv;
pub mod listing;
pub mod pages;
pub mod placements;
pub mod serve;
pub mod session;
pub mod sessions;
pub mod top;
pub mod turns;
pub mod workers;

use std::io::{self, Write as _};

use serde::Serialize;

use crate::{
    args::{Args, Command},
    error::Error,
};

/// How a command ended that had a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Well,
    /// The command found a fault, or could not bring about what was asked.
    NotWell,
}

impl Outcome {
    #[must_use]
    pub fn from_is_well(is_well: bool) -> Self {
        if is_well { Self::Well } else { Self::NotWell }
    }
}

pub async fn run(args: Args) -> Result<Outcome, Error> {
    let target = &args.target;
    match args.command {
        Command::Serve(args) => serve::run(&args.arguments),
        Command::Top(args) => top::run(target, &args).await,
        Command::Workers(list) => workers::run(target, &list).await,
        Command::Devices(list) => devices::run(target, &list).await,
        Command::Sessions(args) => sessions::run(target, &args).await,
        Command::Placements(args) => placements::run(target, &args).await,
        Command::Turns(args) => turns::run(target, &args).await,
        Command::Session { command } => session::run(target, &command).await,
        Command::Drain(args) => drain::run(target, &args).await,
        Command::Init(args) => init::run(target, &args).await,
        Command::Doctor(args) => doctor::run(target, &args).await,
        Command::Audit(args) => audit::run(target, &args).await,
        Command::Kv(args) => kv::run(target, &args).await,
    }
}

/// Returns the line that a program reads.
fn json_line(answer: &impl Serialize) -> String {
    let text = serde_json::to_string(answer).expect("plain members always serialise");
    format!("{text}\n")
}

fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}
