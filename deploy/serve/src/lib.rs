//! `berth serve`: SGLang engines of one host, with their agents and a router in one process.
//!
//! It starts engines or joins those that run. Each module uses only those after it in this list:
//!
//! [`serve`], [`engine`], [`plan`], [`fleet`], [`process`], [`policy`], [`engine_command`],
//! [`cause`], [`last_lines`], [`args`].

pub mod args;
pub mod cause;
pub mod engine;
pub mod engine_command;
pub mod fleet;
pub mod last_lines;
pub mod plan;
pub mod policy;
pub mod process;
pub mod serve;

use std::{fmt::Display, process::ExitCode};

use service::{
    command_line::{parse, print_error},
    log, memory,
    settings::EXIT_USAGE,
};

use self::args::Args;

/// Tells the user something, beside the log.
pub(crate) fn say(text: &dyn Display) {
    print_error(&format_args!("berth: {text}"));
}

/// Runs the process from its command line to its exit status.
#[must_use]
pub fn main() -> ExitCode {
    if let Some(status) = process::become_engine(std::env::args_os()) {
        return status;
    }
    memory::use_small_pages();
    let args = match parse::<Args>() {
        Ok(args) => args,
        Err(status) => return status,
    };
    log::init();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            say(&format_args!("can't start: {error}"));
            return ExitCode::FAILURE;
        }
    };
    // Engines end with the thread that starts them, which is this one.
    let served = runtime.block_on(serve::serve(&args));
    // Abandons what didn't end within its time.
    runtime.shutdown_background();
    match served {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            say(&format_args!("{error:#}"));
            let is_usage = matches!(
                error.downcast_ref(),
                Some(plan::Error::Usage(_) | plan::Error::Settings(_))
            );
            ExitCode::from(if is_usage { EXIT_USAGE } else { 1 })
        }
    }
}
