//! `berth-manuals`: writes the manual pages and shell completions of Berth's programs.
//!
//! They are made from the command lines that the programs themselves parse. Their folders `man` and
//! `completions` lie in the folder that is the only argument.

mod manual;

use std::{fs, path::PathBuf};

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser};
use clap_complete::Shell;

/// Writes the manual pages and completions of Berth's programs
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Folder for `man` and `completions`; made if it is missing
    folder: PathBuf,
}

const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Fish, Shell::Zsh];

fn main() -> anyhow::Result<()> {
    let folder = Args::parse().folder;
    let (man, completions) = (folder.join("man"), folder.join("completions"));
    for each in [&man, &completions] {
        fs::create_dir_all(each).with_context(|| format!("can't make {}", each.display()))?;
    }
    let programs = [
        (cli::args::Args::command(), ""),
        (worker_agent::config::Args::command(), manual::AGENT),
        (router::config::Args::command(), manual::ROUTER),
        (serve::args::Args::command(), manual::SERVE),
    ];
    for (mut command, more) in programs {
        let name = command.get_name().to_owned();
        for shell in SHELLS {
            clap_complete::generate_to(shell, &mut command, &name, &completions)
                .with_context(|| format!("can't write the completions of {name} for {shell}"))?;
        }
        manual::write(command, more, &man)
            .with_context(|| format!("can't write the manual pages of {name}"))?;
    }
    Ok(())
}
