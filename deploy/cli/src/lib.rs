//! The command `berth`: shows a fleet and operates it, for people and for their programs.
//!
//! It uses what every operator may use: the router's HTTP API, and the control ports of agents
//! (gRPC). It shares no code with them but `contract`, `blocks` and `service`.

pub mod args;
pub mod commands;
pub mod connect;
pub mod doctor;
pub mod error;
pub mod flags;
pub mod init;
pub mod pool_parts;
pub mod text;
pub mod top;

use std::{ffi::OsString, io::Write as _, process::ExitCode};

use clap::Parser as _;

use self::{
    args::Args,
    commands::{Outcome, serve},
    error::exit,
};

/// `args` begin with the program's name. Returns the exit status.
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let words = Vec::from_iter(args);
    if let [_, command, arguments @ ..] = &*words
        && command == "serve"
    {
        // The parser would take the first `--` out.
        return ended(serve::run(arguments));
    }
    let args = match Args::try_parse_from(words) {
        Ok(args) => args,
        Err(error) => {
            // The parser reports help and version as errors, but they are not usage errors.
            let _ = error.print();
            let is_error = error.use_stderr();
            return ExitCode::from(if is_error { exit::USAGE } else { exit::WELL });
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    ended(match runtime {
        Ok(runtime) => runtime.block_on(commands::run(args)),
        Err(error) => Err(error::Error::Output(error)),
    })
}

fn ended(result: Result<Outcome, error::Error>) -> ExitCode {
    match result {
        Ok(Outcome::Well) => ExitCode::from(exit::WELL),
        Ok(Outcome::NotWell) => ExitCode::from(exit::NOT_WELL),
        Err(error) if error.is_broken_pipe() => ExitCode::from(exit::WELL),
        Err(error) => {
            // If standard error is gone too, nothing can be reported.
            let _ = writeln!(std::io::stderr(), "berth: {}", error::chain(&error));
            ExitCode::from(error.exit_status())
        }
    }
}
