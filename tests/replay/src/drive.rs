//! Replays a workload against a server: users or a schedule, stops, progress, the report.

use crate::client::Client;
use crate::options::{Pace, ReplayOptions, seconds};
use crate::pace;
use crate::report::{LiveCounters, Report};
use crate::user::{self, Context, ConversationTask, TurnSchedule};
use crate::workload::{NextConversation, Source, Workload};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

/// The interval of progress reports.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);
/// The most conversations alive at once in the open loop; later ones wait. Each is a task of a few
/// KiB.
const CONVERSATIONS_MAX: usize = 50_000;
/// A user's pause between two conversations, scaled like think times.
const BETWEEN_CONVERSATIONS: Duration = Duration::from_secs(1);

/// The handles of a replay: its counters and its stop signal.
#[derive(Debug, Clone, Default)]
pub struct ReplayControl {
    /// The counters, readable at any time.
    pub live: Arc<LiveCounters>,
    /// Stops the replay; running turns may end within the grace time.
    pub stop: CancellationToken,
}

/// Why a replay did not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The options contradict each other or are invalid.
    #[error("{}", .0.join("; "))]
    Options(Vec<String>),
}

/// Replays `workload` as `options` say, and calls `on_progress` once per second.
///
/// The replay ends with the workload, at the limits in `options`, or when `control.stop` is
/// cancelled, whichever comes first. It returns only after it has tried to close every session it
/// opened.
pub async fn drive(
    options: ReplayOptions,
    workload: Workload,
    control: ReplayControl,
    on_progress: impl FnMut(&Report),
) -> Result<Report, Error> {
    let problems = options.problems();
    if !problems.is_empty() {
        return Err(Error::Options(problems));
    }
    let timed = options.rate.is_some();
    let (seed, recycle) = (options.seed, options.recycle);
    let source = Source::new(workload, options.shape, seed, recycle, timed);
    control.live.set_losses(source.losses());
    let source = Arc::new(Mutex::new(source));
    let hurry = control.stop.child_token();
    let context = Arc::new(Context {
        client: Client::new(&options),
        live: Arc::clone(&control.live),
        started: Instant::now(),
        stop: hurry.child_token(),
        hurry,
        kill: CancellationToken::new(),
        turns_left: AtomicU64::new(options.turns_max.unwrap_or(u64::MAX)),
        options: Arc::new(options),
    });
    let mut tasks = JoinSet::new();
    match context.options.pace() {
        Pace::Closed { users, time_scale, think_max, ramp } => {
            for index in 0..users {
                let start = context.started + pace::user_start(index, users, ramp);
                let schedule = TurnSchedule::Closed { time_scale, think_max };
                tasks.spawn(closed_user(
                    Arc::clone(&context),
                    Arc::clone(&source),
                    start,
                    schedule,
                    pace::think_time(BETWEEN_CONVERSATIONS, time_scale, think_max),
                ));
            }
        }
        Pace::Open { rate, arrival_gap, outstanding_max } => {
            let outstanding = Arc::new(Semaphore::new(outstanding_max));
            let (context, source) = (Arc::clone(&context), Arc::clone(&source));
            tasks.spawn(open_arrivals(context, source, rate, arrival_gap, outstanding));
        }
    }
    supervise(&context, &control, tasks, on_progress).await;
    control.live.set_losses(source.lock().losses());
    Ok(control.live.final_report(context.started.elapsed()))
}

/// Waits for all tasks, stops them when their time is up, and reports progress.
async fn supervise(
    context: &Context,
    control: &ReplayControl,
    mut tasks: JoinSet<()>,
    mut on_progress: impl FnMut(&Report),
) {
    let far = context.started + Duration::from_secs(86_400 * 365);
    let end = context.options.seconds.map_or(far, |max| context.started + seconds(max));
    let (grace, mut grace_end) = (seconds(context.options.grace_s), None);
    let mut progress = tokio::time::interval_at(context.started + PROGRESS_EVERY, PROGRESS_EVERY);
    progress.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        let hurried = grace_end.is_some();
        tokio::select! {
            biased;
            joined = tasks.join_next() => match joined {
                Some(Ok(())) => {}
                Some(Err(error)) => std::panic::resume_unwind(error.into_panic()),
                None => break,
            },
            () = control.stop.cancelled(), if !hurried => {
                grace_end = Some(Instant::now() + grace);
            }
            () = tokio::time::sleep_until(end), if !hurried => {
                context.hurry.cancel();
                grace_end = Some(Instant::now() + grace);
            }
            () = tokio::time::sleep_until(grace_end.unwrap_or(far)),
                if !context.kill.is_cancelled() => context.kill.cancel(),
            _ = progress.tick() => on_progress(&context.live.report(context.started.elapsed())),
        }
    }
}

/// Runs one user: one conversation after another.
async fn closed_user(
    context: Arc<Context>,
    source: Arc<Mutex<Source>>,
    start: Instant,
    schedule: TurnSchedule,
    between: Duration,
) {
    let mut begin = start;
    while context.sleep_until(begin).await {
        let Some(next) = next_conversation(&source) else { return };
        let task = make_task(&context, next);
        user::run(Arc::clone(&context), task, schedule.clone()).await;
        begin = Instant::now() + between;
    }
}

/// Starts conversations at their scheduled times.
async fn open_arrivals(
    context: Arc<Context>,
    source: Arc<Mutex<Source>>,
    rate: f64,
    arrival_gap: Duration,
    outstanding: Arc<Semaphore>,
) {
    let mut running = JoinSet::new();
    let (timed, span) = {
        let source = source.lock();
        (source.is_timed(), source.span())
    };
    while let Some(next) = next_conversation(&source) {
        let times = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        let start = if timed {
            context.started + pace::scheduled_time(span * times(next.salt.pass), rate)
        } else {
            context.started + pace::scheduled_time(arrival_gap * times(next.number), rate)
        };
        let first = start + pace::scheduled_time(next.conversation.turns[0].at, rate);
        if !context.sleep_until(first).await {
            break;
        }
        let schedule = TurnSchedule::Open { start, rate, outstanding: Arc::clone(&outstanding) };
        running.spawn(user::run(Arc::clone(&context), make_task(&context, next), schedule));
        while running.len() >= CONVERSATIONS_MAX {
            if let Some(joined) = running.join_next().await {
                propagate_panic(joined);
            }
        }
        // Removes ended tasks during the run, so that only running conversations use memory.
        while let Some(joined) = running.try_join_next() {
            propagate_panic(joined);
        }
    }
    while let Some(joined) = running.join_next().await {
        propagate_panic(joined);
    }
}

fn propagate_panic(joined: Result<(), tokio::task::JoinError>) {
    if let Err(error) = joined {
        std::panic::resume_unwind(error.into_panic());
    }
}

fn next_conversation(source: &Mutex<Source>) -> Option<NextConversation> {
    source.lock().next_conversation()
}

fn make_task(context: &Context, next: NextConversation) -> ConversationTask {
    ConversationTask {
        conversation: next.conversation,
        salt: next.salt,
        session: format!("{}-{}", context.options.run_id, next.number),
        parent: None,
    }
}
