//! `berth-replay`: replays conversations against an OpenAI- or SGLang-compatible URL.
//!
//! The conversations come from a trace or are synthetic agent conversations. At the end the program
//! reports the results.
//!
//! Exit status: 0 if all turns were answered, 1 if some were not or the trace can't be read, 64 if
//! the flags are invalid.

use anyhow::Context as _;
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use tests::replay::options::Pace;
use tests::replay::shape::Shape;
use tests::replay::trace::Form;
use tests::replay::{
    Api, ReplayControl, ReplayOptions, Report, SessionHeaders, SessionOpen, Workload, drive, load,
};

/// BSD's exit status for an invalid command line.
const EX_USAGE: u8 = 64;
/// The seconds between status lines on an output without a progress bar.
const STATUS_EVERY_S: f64 = 10.0;

/// Replays a trace of conversations against a model server and measures the server.
#[derive(Debug, Parser)]
#[command(name = "berth-replay", version, allow_negative_numbers = true)]
struct Flags {
    /// The server's URL: http://host:port[/path]
    #[arg(long)]
    url: String,
    /// A trace: a .json, .jsonl or .jsonl.gz file, or a folder of such files; without a trace,
    /// conversations are made from published statistics
    #[arg(long)]
    trace: Option<PathBuf>,
    /// The number of conversations without a trace [default: the number of users, or unlimited with
    /// a limit on time or turns]
    #[arg(long)]
    conversations: Option<u64>,
    /// The API of the requests
    #[arg(long, value_enum, default_value = "chat")]
    api: Api,
    /// The model's name (chat)
    #[arg(long, default_value = "default")]
    model: String,
    /// The vocabulary size; token ids are below this (generate)
    #[arg(long, default_value_t = 256)]
    vocab: u32,
    /// The bytes of text that stand for a token (chat): 1 for byte tokenizers, about 4 for others
    #[arg(long, default_value_t = 1)]
    bytes_per_token: usize,
    /// The factor on prompt and answer tokens
    #[arg(long, default_value_t = 1.0)]
    scale_tokens: f64,
    /// Cut conversations where prompt and answer exceed this many tokens
    #[arg(long)]
    max_context: Option<u64>,
    /// The most tokens of an answer
    #[arg(long)]
    max_output: Option<u64>,
    /// Keep the trace's answers in later prompts, instead of the engine's answers
    #[arg(long)]
    no_echo: bool,
    /// Let answers end before their length, at the model's end-of-sequence token
    #[arg(long)]
    stop_at_eos: bool,
    /// Request answers without streaming
    #[arg(long)]
    no_stream: bool,
    /// The session headers on turns
    #[arg(long, value_enum, default_value = "none")]
    sessions: SessionHeaders,
    /// Open and close each session explicitly
    #[arg(long, value_enum)]
    session_open: Option<SessionOpen>,
    /// The prefix of session ids [default: a random name]
    #[arg(long)]
    run_id: Option<String>,
    /// A bearer token for each request
    #[arg(long, env = "BERTH_REPLAY_BEARER", hide_env_values = true)]
    bearer: Option<String>,
    /// Closed loop: the number of concurrent conversations [default: 8]
    #[arg(long)]
    users: Option<usize>,
    /// Closed loop: the factor on think times [default: 1]
    #[arg(long)]
    time_scale: Option<f64>,
    /// Closed loop: the longest think time, in seconds [default: 60]
    #[arg(long)]
    think_cap_s: Option<f64>,
    /// Closed loop: the seconds over which the users' starts are spread [default: 0]
    #[arg(long)]
    ramp_s: Option<f64>,
    /// Open loop, at this many times the trace's speed
    #[arg(long)]
    rate: Option<f64>,
    /// Open loop: the seconds between conversations, if the trace has no times [default: 10]
    #[arg(long)]
    arrival_gap_s: Option<f64>,
    /// Open loop: the most requests in flight; requests beyond this are dropped [default: 256]
    #[arg(long)]
    outstanding_max: Option<usize>,
    /// The seed of the order and the contents of conversations
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Stop after this many seconds
    #[arg(long)]
    seconds: Option<f64>,
    /// Stop after this many turns
    #[arg(long)]
    turns: Option<u64>,
    /// Start the trace again at its end, with other contents
    #[arg(long)]
    recycle: bool,
    /// The seconds that running turns may continue after a stop
    #[arg(long, default_value_t = 10.0)]
    grace_s: f64,
    /// The longest time of a request, in seconds
    #[arg(long, default_value_t = 600.0)]
    timeout_s: f64,
    /// The most retries of a turn after a 429 with Retry-After
    #[arg(long, default_value_t = 5)]
    retries_max: u32,
    /// Print the report as one JSON object, on the last line of stdout
    #[arg(long)]
    json: bool,
    /// Exit with 0 even if turns failed
    #[arg(long)]
    allow_errors: bool,
}

fn main() -> ExitCode {
    let flags = match Flags::try_parse() {
        Ok(flags) => flags,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(EX_USAGE) } else { ExitCode::SUCCESS };
        }
    };
    let options = match options(&flags) {
        Ok(options) => options,
        Err(problems) => {
            for problem in problems {
                print_status(&format!("berth-replay: {problem}"));
            }
            return ExitCode::from(EX_USAGE);
        }
    };
    match replay(&flags, options) {
        Ok(good) if good || flags.allow_errors => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            print_status(&format!("berth-replay: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Converts flags to options, or returns all problems of the flags.
fn options(flags: &Flags) -> Result<ReplayOptions, Vec<String>> {
    let mut problems = Vec::new();
    let mut seconds = |name: &str, value: f64| {
        Duration::try_from_secs_f64(value)
            .ok()
            .filter(|time| time.as_secs() < 1 << 31)
            .unwrap_or_else(|| {
                problems.push(format!("--{name} must be a time in seconds, not {value}"));
                Duration::from_secs(1)
            })
    };
    let pace = match flags.rate {
        Some(rate) => Pace::Open {
            rate,
            arrival_gap: seconds("arrival-gap-s", flags.arrival_gap_s.unwrap_or(10.0)),
            outstanding_max: flags.outstanding_max.unwrap_or(256),
        },
        None => Pace::Closed {
            users: flags.users.unwrap_or(8),
            time_scale: flags.time_scale.unwrap_or(1.0),
            think_max: seconds("think-cap-s", flags.think_cap_s.unwrap_or(60.0)),
            ramp: seconds("ramp-s", flags.ramp_s.unwrap_or(0.0)),
        },
    };
    let defaults = ReplayOptions::default();
    let options = ReplayOptions {
        url: flags.url.clone(),
        api: flags.api,
        model: flags.model.clone(),
        shape: Shape {
            scale: flags.scale_tokens,
            context_tokens_max: flags.max_context,
            output_tokens_max: flags.max_output,
        },
        vocab: flags.vocab,
        bytes_per_token: flags.bytes_per_token,
        echo: !flags.no_echo,
        stop_at_eos: flags.stop_at_eos,
        stream: !flags.no_stream,
        sessions: flags.sessions,
        session_open: flags.session_open,
        run_id: flags.run_id.clone().unwrap_or(defaults.run_id),
        bearer: flags.bearer.clone(),
        pace,
        seed: flags.seed,
        duration_max: flags.seconds.map(|value| seconds("seconds", value)),
        turns_max: flags.turns,
        recycle: flags.recycle,
        grace: seconds("grace-s", flags.grace_s),
        timeout: seconds("timeout-s", flags.timeout_s),
        retries_max: flags.retries_max,
    };
    problems.extend(contradictions(flags));
    problems.extend(options.problems());
    if problems.is_empty() { Ok(options) } else { Err(problems) }
}

/// Returns problems for flags of the loop type that isn't selected.
fn contradictions(flags: &Flags) -> Vec<String> {
    let open = flags.rate.is_some();
    let closed_only = [
        ("users", flags.users.is_some()),
        ("time-scale", flags.time_scale.is_some()),
        ("think-cap-s", flags.think_cap_s.is_some()),
        ("ramp-s", flags.ramp_s.is_some()),
    ];
    let open_only = [
        ("arrival-gap-s", flags.arrival_gap_s.is_some()),
        ("outstanding-max", flags.outstanding_max.is_some()),
    ];
    let (wrong, why) = if open {
        (&closed_only[..], "is for the closed loop, without --rate")
    } else {
        (&open_only[..], "is for the open loop: it needs --rate")
    };
    let given = wrong.iter().filter(|(_, given)| *given);
    let mut problems: Vec<String> = given.map(|(name, _)| format!("--{name} {why}")).collect();
    if flags.conversations.is_some() && flags.trace.is_some() {
        problems.push("--conversations can't be used with --trace".to_owned());
    }
    problems
}

fn workload(flags: &Flags, options: &ReplayOptions) -> anyhow::Result<Workload> {
    let Some(path) = &flags.trace else {
        let bounded = options.duration_max.is_some() || options.turns_max.is_some();
        let few = match options.pace {
            Pace::Closed { users, .. } => users as u64,
            Pace::Open { .. } => 8,
        };
        let conversations = flags.conversations.unwrap_or(if bounded { u64::MAX } else { few });
        return Ok(Workload::Synthetic { conversations });
    };
    let trace = load::read_trace(path).context("the trace can't be replayed")?;
    print_status(&format!(
        "{}: {} conversations, {} turns, {} duplicates left out",
        path.display(),
        trace.conversations.len(),
        trace.turns(),
        trace.duplicates,
    ));
    if trace.form == Form::Prompts {
        let edits = trace.edits();
        print_status(&format!("{edits} of the turns edit their history and send all of it again"));
    }
    Ok(Workload::Trace(trace))
}

/// Runs the replay; returns true if nothing failed.
fn replay(flags: &Flags, options: ReplayOptions) -> anyhow::Result<bool> {
    let workload = workload(flags, &options)?;
    let progress = Progress::new(flags, &options);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("the runtime can't start")?;
    let report = runtime.block_on(run(options, workload, &progress))?;
    progress.bar.finish_and_clear();
    let mut out = std::io::stdout().lock();
    if flags.json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    } else {
        write!(out, "{}", report.table())?;
    }
    out.flush()?;
    if report.turns == 0 {
        print_status("berth-replay: no turn was answered");
    }
    Ok(report.errors == 0 && report.turns > 0)
}

async fn run(
    options: ReplayOptions,
    workload: Workload,
    progress: &Progress,
) -> anyhow::Result<Report> {
    let control = ReplayControl::default();
    let stop = control.stop.clone();
    let driven = drive(options, workload, control, |report| progress.show(report));
    let mut driven = std::pin::pin!(driven);
    let interrupted = async {
        // If the signal can't be caught, the replay continues without it.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        report = &mut driven => return Ok(report?),
        () = interrupted => stop.cancel(),
    }
    Ok(driven.await?)
}

/// The progress bar, or status lines on an output without one.
struct Progress {
    bar: ProgressBar,
    by_time: bool,
    lines: bool,
}

impl Progress {
    fn new(flags: &Flags, options: &ReplayOptions) -> Self {
        let lines = flags.json || !std::io::stderr().is_terminal();
        let template = |text: &str| {
            ProgressStyle::with_template(text).unwrap_or_else(|_| ProgressStyle::default_bar())
        };
        let (bar, by_time) = match (options.duration_max, options.turns_max) {
            _ if lines => (ProgressBar::hidden(), false),
            (_, Some(turns)) => (ProgressBar::new(turns), false),
            (Some(time), None) => (ProgressBar::new(time.as_secs().max(1)), true),
            (None, None) => (ProgressBar::new_spinner(), false),
        };
        bar.set_style(match bar.length() {
            Some(_) => template("{elapsed} [{bar:24}] {msg}"),
            None => template("{elapsed} {spinner} {msg}"),
        });
        Self { bar, by_time, lines }
    }

    fn show(&self, report: &Report) {
        if !self.lines {
            let done = Duration::try_from_secs_f64(report.seconds).unwrap_or_default().as_secs();
            self.bar.set_position(if self.by_time { done } else { report.turns });
            self.bar.set_message(report.line());
        } else if report.seconds % STATUS_EVERY_S < 1.0 {
            print_status(&report.line());
        }
    }
}

/// Prints a line on stderr and ignores a failure.
fn print_status(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
