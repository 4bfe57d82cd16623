//! Runs one conversation: its waits, requests, retries, session calls and subagents.
//!
//! The module `pace` makes all decisions about time, and `dialog` all decisions about contents.

use crate::replay::client::{Client, Failure, Mark};
use crate::replay::dialog::{Dialog, Request, Style};
use crate::replay::options::{Options, SessionHeaders};
use crate::replay::pace;
use crate::replay::report::{Event, Live};
use crate::replay::synth::Salt;
use crate::replay::trace::{Child, Conversation};
use bytes::Bytes;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// The delay of a subagent's first request after the turn that started the subagent.
const CHILD_START: Duration = Duration::from_millis(500);
/// The shortest pause after a failure, whatever the think time, so that a server that refuses
/// everything is not flooded.
const FAILURE_PAUSE: Duration = Duration::from_millis(500);
/// The delay from which on a turn counts as late; timers and the scheduler cause shorter delays.
const LATE: Duration = Duration::from_millis(100);

/// The state that all conversations of a replay share.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) options: Options,
    pub(crate) style: Arc<Style>,
    pub(crate) client: Client,
    pub(crate) live: Arc<Live>,
    pub(crate) started: Instant,
    /// Cancelled when no new turn may start.
    pub(crate) stop: CancellationToken,
    /// Cancelled when retries may no longer be awaited, because the grace time runs. `stop` is
    /// cancelled with it.
    pub(crate) hurry: CancellationToken,
    /// Cancelled when running turns must be given up.
    pub(crate) kill: CancellationToken,
    /// The number of turns that may still start.
    pub(crate) turns_left: AtomicU64,
}

/// What determines when a conversation's turns are sent.
#[derive(Debug, Clone)]
pub(crate) enum Schedule {
    Closed { time_scale: f64, think_max: Duration },
    Open { start: Instant, rate: f64, outstanding: Arc<Semaphore> },
}

/// A conversation to run.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) conversation: Arc<Conversation>,
    pub(crate) salt: Salt,
    pub(crate) session: String,
    pub(crate) parent: Option<String>,
}

impl Context {
    /// Takes the right to start a turn. Taking the last right stops the replay.
    fn take_turn(&self) -> bool {
        if self.stop.is_cancelled() {
            return false;
        }
        let less = |left: u64| left.checked_sub(1);
        let before = self.turns_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        if before.unwrap_or(0) <= 1 {
            self.stop.cancel();
        }
        before.is_ok()
    }

    /// Sleeps until `deadline`; returns false if the replay stops first.
    pub(crate) async fn sleep_until(&self, deadline: Instant) -> bool {
        sleep_unless(&self.stop, deadline).await
    }
}

async fn sleep_unless(stop: &CancellationToken, deadline: Instant) -> bool {
    tokio::select! {
        biased;
        () = stop.cancelled() => false,
        () = tokio::time::sleep_until(deadline) => true,
    }
}

/// Runs a conversation until its end or the replay's end. The future is boxed because subagents use
/// this function recursively.
pub(crate) fn run(
    context: Arc<Context>,
    task: Task,
    schedule: Schedule,
) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    Box::pin(async move {
        let mut awaited = JoinSet::new();
        let mut beside = JoinSet::new();
        context.live.event(Event::Begun);
        let mut line = Line::new(Arc::clone(&context), &task);
        let mut pause = Duration::ZERO;
        let mut whole = true;
        for index in 0..task.conversation.turns.len() {
            let ready = line.wait(index, &schedule, pause).await;
            join(&mut awaited).await;
            if !ready {
                whole = false;
                break;
            }
            pause = match line.paced_turn(index, &schedule).await {
                Passed::Answered => Duration::ZERO,
                Passed::Failed => FAILURE_PAUSE,
                Passed::Skipped => continue,
                Passed::Stopped => {
                    whole = false;
                    break;
                }
            };
            for (number, child) in task.conversation.children.iter().enumerate() {
                if child.beside_turn == index {
                    let set = if child.awaited { &mut awaited } else { &mut beside };
                    set.spawn(child_run(Arc::clone(&context), &task, number, child, &schedule));
                }
            }
        }
        join(&mut awaited).await;
        join(&mut beside).await;
        context.live.context(line.context_tokens);
        line.close().await;
        if whole {
            context.live.event(Event::Finished);
        }
        if !pause.is_zero() {
            context.sleep_until(Instant::now() + pause).await;
        }
    })
}

/// Waits for subagents; a subagent's panic continues in this task.
async fn join(tasks: &mut JoinSet<()>) {
    while let Some(joined) = tasks.join_next().await {
        if let Err(error) = joined {
            std::panic::resume_unwind(error.into_panic());
        }
    }
}

fn child_run(
    context: Arc<Context>,
    parent: &Task,
    number: usize,
    child: &Child,
    schedule: &Schedule,
) -> impl Future<Output = ()> + Send + 'static {
    let task = Task {
        conversation: Arc::new(child.conversation.clone()),
        salt: parent.salt,
        session: format!("{}-s{number}", parent.session),
        parent: Some(parent.session.clone()),
    };
    let (delay, schedule) = match schedule.clone() {
        Schedule::Closed { time_scale, think_max } => {
            let delay = pace::think(CHILD_START, time_scale, think_max);
            (delay, Schedule::Closed { time_scale, think_max })
        }
        Schedule::Open { rate, outstanding, .. } => {
            let start = Instant::now() + pace::scheduled(CHILD_START, rate);
            (Duration::ZERO, Schedule::Open { start, rate, outstanding })
        }
    };
    async move {
        if context.sleep_until(Instant::now() + delay).await {
            run(context, task, schedule).await;
        }
    }
}

/// The result of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Passed {
    Answered,
    Failed,
    /// Not sent, because too many requests were in flight.
    Skipped,
    /// Not sent, or given up, because the replay ends.
    Stopped,
}

/// A conversation's state, including its session on the server.
struct Line {
    context: Arc<Context>,
    conversation: Arc<Conversation>,
    /// `None` only while a request is being made.
    dialog: Option<Dialog>,
    session: String,
    parent: Option<String>,
    /// The prompt and answer tokens of the last answered turn.
    context_tokens: u64,
    /// How often the session was reopened.
    reopened: u32,
    open: bool,
    /// Whether the server may hold the session. Set before the opening is sent, because the session
    /// may be open even if the reply is lost.
    owed: bool,
}

impl Line {
    fn new(context: Arc<Context>, task: &Task) -> Self {
        let conversation = Arc::clone(&task.conversation);
        let style = Arc::clone(&context.style);
        let dialog = Some(Dialog::new(Arc::clone(&conversation), style, task.salt));
        let (session, parent) = (task.session.clone(), task.parent.clone());
        Self {
            context,
            conversation,
            dialog,
            session,
            parent,
            context_tokens: 0,
            reopened: 0,
            open: false,
            owed: false,
        }
    }

    /// Waits for a turn's time; returns false if the replay stops first.
    async fn wait(&self, index: usize, schedule: &Schedule, pause: Duration) -> bool {
        let turn = &self.conversation.turns[index];
        let now = Instant::now();
        let deadline = match schedule {
            // The pause before a conversation's first turn belongs to the user, not to the
            // conversation.
            Schedule::Closed { .. } if index == 0 => now,
            Schedule::Closed { time_scale, think_max } => {
                now + pace::think(turn.think, *time_scale, *think_max).max(pause)
            }
            Schedule::Open { start, rate, .. } => *start + pace::scheduled(turn.at, *rate),
        };
        if index > 0 && now.saturating_duration_since(deadline) > LATE {
            self.context.live.event(Event::Late);
        }
        self.context.sleep_until(deadline).await
    }

    /// Sends a turn if its schedule permits.
    async fn paced_turn(&mut self, index: usize, schedule: &Schedule) -> Passed {
        let _outstanding = match schedule {
            Schedule::Closed { .. } => None,
            Schedule::Open { outstanding, .. } => {
                let Ok(permit) = Arc::clone(outstanding).try_acquire_owned() else {
                    self.context.live.event(Event::Dropped);
                    return Passed::Skipped;
                };
                Some(permit)
            }
        };
        if !self.context.take_turn() {
            return Passed::Stopped;
        }
        self.turn(index).await
    }

    async fn turn(&mut self, index: usize) -> Passed {
        let context = Arc::clone(&self.context);
        let request = self.request(index).await;
        let begun = context.live.begin_turn();
        if request.reopen {
            self.close().await;
            self.reopened += 1;
        }
        let since = Instant::now();
        let passed = tokio::select! {
            biased;
            () = context.kill.cancelled() => None,
            passed = self.exchange(index, request.body.into(), since) => Some(passed),
        };
        drop(begun);
        passed.unwrap_or_else(|| {
            context.live.event(Event::Unfinished);
            Passed::Stopped
        })
    }

    /// Makes the request on a blocking thread, because a long prompt takes milliseconds.
    async fn request(&mut self, index: usize) -> Request {
        let mut dialog = self.dialog.take().expect("put back below");
        let made = tokio::task::spawn_blocking(move || {
            let request = dialog.request(index);
            (dialog, request)
        });
        let (dialog, request) = match made.await {
            Ok(made) => made,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
        self.dialog = Some(dialog);
        request
    }

    /// Sends one turn with its retries, and opens the session first if needed.
    async fn exchange(&mut self, index: usize, body: Bytes, since: Instant) -> Passed {
        let context = Arc::clone(&self.context);
        let mut tried = 0;
        loop {
            let failure = match self.open().await {
                Ok(()) => match self.try_turn(index, body.clone(), since).await {
                    Ok(()) => return Passed::Answered,
                    Err(failure) => ("", failure),
                },
                Err(failure) => ("open_", failure),
            };
            let (call, failure) = failure;
            let Some(wait) = retry_in(&failure, tried, context.options.retries_max) else {
                context.live.failure(call, &failure, context.started.elapsed());
                return Passed::Failed;
            };
            context.live.event(Event::Retry);
            tried += 1;
            if !sleep_unless(&context.hurry, Instant::now() + wait).await {
                context.live.event(Event::Unfinished);
                return Passed::Stopped;
            }
        }
    }

    async fn try_turn(&mut self, index: usize, body: Bytes, since: Instant) -> Result<(), Failure> {
        let context = &self.context;
        let options = &context.options;
        let last = index + 1 == self.conversation.turns.len();
        let closing = last && options.sessions == SessionHeaders::Final;
        let id = self.session_id();
        let mark = (options.sessions != SessionHeaders::None).then_some(Mark {
            id: &id,
            parent: self.parent.as_deref(),
            last: closing,
            delta: context.style.delta,
        });
        let measured = context.client.turn(body, mark, since).await?;
        let sent = context.style.shape.prompt_tokens(&self.conversation.turns[index]);
        context.live.turn(&measured, sent, context.started.elapsed());
        let reply = &measured.finished.reply;
        self.context_tokens = reply.prompt_tokens + reply.output_tokens;
        if let Some(dialog) = &mut self.dialog {
            dialog.answered(measured.finished.reply);
        }
        if closing && std::mem::take(&mut self.open) {
            self.owed = false;
            context.live.event(Event::Closed);
        }
        Ok(())
    }

    /// Opens the session if the options ask for it and it isn't open.
    async fn open(&mut self) -> Result<(), Failure> {
        let Some(kind) = self.context.options.session_open.filter(|_| !self.open) else {
            return Ok(());
        };
        self.owed = true;
        let opened = self.context.client.open(&self.session_id(), kind.retention()).await;
        if matches!(opened, Err(Failure::Status { .. })) {
            self.owed = false;
        }
        opened?;
        self.open = true;
        self.context.live.event(Event::Opened);
        Ok(())
    }

    /// Closes the session if it may be open; the call completes even if the replay stops.
    async fn close(&mut self) {
        let counted = std::mem::take(&mut self.open);
        if !std::mem::take(&mut self.owed) {
            return;
        }
        match self.context.client.close(&self.session_id()).await {
            // A 404 means that the session is gone already, for example by expiry; this counts as
            // closed.
            Ok(()) | Err(Failure::Status { status: 404, .. }) => {
                if counted {
                    self.context.live.event(Event::Closed);
                }
            }
            Err(failure) => {
                let now = self.context.started.elapsed();
                self.context.live.failure("close_", &failure, now);
            }
        }
    }

    /// Returns the id of the session's current incarnation.
    fn session_id(&self) -> String {
        match self.reopened {
            0 => self.session.clone(),
            count => format!("{}-r{count}", self.session),
        }
    }
}

fn retry_in(failure: &Failure, tried: u32, max: u32) -> Option<Duration> {
    match failure {
        Failure::Status { status, retry_after } => {
            pace::retry_in(*status, retry_after.as_deref(), tried, max)
        }
        Failure::Connect | Failure::Transport | Failure::Timeout | Failure::Answer(_) => None,
    }
}
