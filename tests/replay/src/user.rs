//! Runs one conversation: its waits, requests, retries, session calls and subagents.
//!
//! The module `pace` makes all decisions about time, and `dialog` all decisions about contents.

use crate::client::{CallFailure, Client, TurnHeaders};
use crate::dialog::{Dialog, Request};
use crate::options::{ReplayOptions, SessionHeaders};
use crate::pace;
use crate::report::LiveCounters;
use crate::synth::Salt;
use crate::trace::{Conversation, Subagent};
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
    pub(crate) options: Arc<ReplayOptions>,
    pub(crate) client: Client,
    pub(crate) live: Arc<LiveCounters>,
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
pub(crate) enum TurnSchedule {
    Closed { time_scale: f64, think_max: Duration },
    Open { start: Instant, rate: f64, outstanding: Arc<Semaphore> },
}

/// A conversation to run.
#[derive(Debug)]
pub(crate) struct ConversationTask {
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
    task: ConversationTask,
    schedule: TurnSchedule,
) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    Box::pin(async move {
        let mut awaited = JoinSet::new();
        let mut unawaited = JoinSet::new();
        context.live.count(|report| report.conversations += 1);
        let mut conversation_run = ConversationRun::new(Arc::clone(&context), &task);
        let mut pause = Duration::ZERO;
        let mut complete = true;
        for index in 0..task.conversation.turns.len() {
            let ready = conversation_run.wait_for_turn(index, &schedule, pause).await;
            join(&mut awaited).await;
            if !ready {
                complete = false;
                break;
            }
            pause = match conversation_run.send_paced_turn(index, &schedule).await {
                TurnOutcome::Answered => Duration::ZERO,
                TurnOutcome::Failed => FAILURE_PAUSE,
                TurnOutcome::Skipped => continue,
                TurnOutcome::Stopped => {
                    complete = false;
                    break;
                }
            };
            for (number, child) in task.conversation.children.iter().enumerate() {
                if child.beside_turn == index {
                    let set = if child.awaited { &mut awaited } else { &mut unawaited };
                    set.spawn(run_child(Arc::clone(&context), &task, number, child, &schedule));
                }
            }
        }
        join(&mut awaited).await;
        join(&mut unawaited).await;
        context.live.count(|report| report.context_tokens += conversation_run.context_tokens);
        conversation_run.close().await;
        if complete {
            context.live.count(|report| report.conversations_finished += 1);
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

fn run_child(
    context: Arc<Context>,
    parent: &ConversationTask,
    number: usize,
    child: &Subagent,
    schedule: &TurnSchedule,
) -> impl Future<Output = ()> + Send + 'static {
    let task = ConversationTask {
        conversation: Arc::new(child.conversation.clone()),
        salt: parent.salt,
        session: format!("{}-s{number}", parent.session),
        parent: Some(parent.session.clone()),
    };
    let (delay, schedule) = match schedule.clone() {
        TurnSchedule::Closed { time_scale, think_max } => {
            let delay = pace::think_time(CHILD_START, time_scale, think_max);
            (delay, TurnSchedule::Closed { time_scale, think_max })
        }
        TurnSchedule::Open { rate, outstanding, .. } => {
            let start = Instant::now() + pace::scheduled_time(CHILD_START, rate);
            (Duration::ZERO, TurnSchedule::Open { start, rate, outstanding })
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
enum TurnOutcome {
    Answered,
    Failed,
    /// Not sent, because too many requests were in flight.
    Skipped,
    /// Not sent, or given up, because the replay ends.
    Stopped,
}

/// A conversation's state, including its session on the server.
struct ConversationRun {
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
    may_be_open: bool,
}

impl ConversationRun {
    fn new(context: Arc<Context>, task: &ConversationTask) -> Self {
        let conversation = Arc::clone(&task.conversation);
        let style = Arc::clone(&context.options);
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
            may_be_open: false,
        }
    }

    /// Waits for a turn's time; returns false if the replay stops first.
    async fn wait_for_turn(&self, index: usize, schedule: &TurnSchedule, pause: Duration) -> bool {
        let turn = &self.conversation.turns[index];
        let now = Instant::now();
        let deadline = match schedule {
            // The pause before a conversation's first turn belongs to the user, not to the
            // conversation.
            TurnSchedule::Closed { .. } if index == 0 => now,
            TurnSchedule::Closed { time_scale, think_max } => {
                now + pace::think_time(turn.think, *time_scale, *think_max).max(pause)
            }
            TurnSchedule::Open { start, rate, .. } => *start + pace::scheduled_time(turn.at, *rate),
        };
        if index > 0 && now.saturating_duration_since(deadline) > LATE {
            self.context.live.count(|report| report.late += 1);
        }
        self.context.sleep_until(deadline).await
    }

    /// Sends a turn if its schedule permits.
    async fn send_paced_turn(&mut self, index: usize, schedule: &TurnSchedule) -> TurnOutcome {
        let _outstanding = match schedule {
            TurnSchedule::Closed { .. } => None,
            TurnSchedule::Open { outstanding, .. } => {
                let Ok(permit) = Arc::clone(outstanding).try_acquire_owned() else {
                    self.context.live.count(|report| report.dropped += 1);
                    return TurnOutcome::Skipped;
                };
                Some(permit)
            }
        };
        if !self.context.take_turn() {
            return TurnOutcome::Stopped;
        }
        self.send_turn(index).await
    }

    async fn send_turn(&mut self, index: usize) -> TurnOutcome {
        let context = Arc::clone(&self.context);
        let request = self.make_request(index).await;
        let begun = context.live.begin_turn();
        if request.reopen {
            self.close().await;
            self.reopened += 1;
        }
        let since = Instant::now();
        let passed = tokio::select! {
            biased;
            () = context.kill.cancelled() => None,
            passed = self.send_with_retries(index, request.body.into(), since) => Some(passed),
        };
        drop(begun);
        passed.unwrap_or_else(|| {
            context.live.count(|report| report.unfinished += 1);
            TurnOutcome::Stopped
        })
    }

    /// Makes the request on a blocking thread, because a long prompt takes milliseconds.
    async fn make_request(&mut self, index: usize) -> Request {
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
    async fn send_with_retries(
        &mut self,
        index: usize,
        body: Bytes,
        since: Instant,
    ) -> TurnOutcome {
        let context = Arc::clone(&self.context);
        let mut tried = 0;
        loop {
            let failure = match self.open().await {
                Ok(()) => match self.try_turn(index, body.clone(), since).await {
                    Ok(()) => return TurnOutcome::Answered,
                    Err(failure) => ("", failure),
                },
                Err(failure) => ("open_", failure),
            };
            let (call, failure) = failure;
            let Some(wait) = retry_in(&failure, tried, context.options.retries_max) else {
                context.live.count_failure(call, &failure, context.started.elapsed());
                return TurnOutcome::Failed;
            };
            context.live.count(|report| report.retries += 1);
            tried += 1;
            if !sleep_unless(&context.hurry, Instant::now() + wait).await {
                context.live.count(|report| report.unfinished += 1);
                return TurnOutcome::Stopped;
            }
        }
    }

    async fn try_turn(
        &mut self,
        index: usize,
        body: Bytes,
        since: Instant,
    ) -> Result<(), CallFailure> {
        let context = &self.context;
        let options = &context.options;
        let last = index + 1 == self.conversation.turns.len();
        let closing = last && options.sessions == SessionHeaders::Final;
        let id = self.session_id();
        let session_headers = (options.sessions != SessionHeaders::None).then_some(TurnHeaders {
            id: &id,
            parent: self.parent.as_deref(),
            last: closing,
            delta: options.delta(),
        });
        let measured = context.client.send_turn(body, session_headers, since).await?;
        let sent = options.shape.prompt_tokens(&self.conversation.turns[index]);
        context.live.count_turn(&measured, sent, context.started.elapsed());
        let reply = &measured.finished.reply;
        self.context_tokens = reply.prompt_tokens + reply.output_tokens;
        if let Some(dialog) = &mut self.dialog {
            dialog.record_answer(measured.finished.reply);
        }
        if closing && std::mem::take(&mut self.open) {
            self.may_be_open = false;
            context.live.count(|report| report.sessions_closed += 1);
        }
        Ok(())
    }

    /// Opens the session if the options ask for it and it isn't open.
    async fn open(&mut self) -> Result<(), CallFailure> {
        let Some(kind) = self.context.options.session_open.filter(|_| !self.open) else {
            return Ok(());
        };
        self.may_be_open = true;
        let opened = self.context.client.open_session(&self.session_id(), kind.retention()).await;
        if matches!(opened, Err(CallFailure::Status { .. })) {
            self.may_be_open = false;
        }
        opened?;
        self.open = true;
        self.context.live.count(|report| report.sessions_opened += 1);
        Ok(())
    }

    /// Closes the session if it may be open; the call completes even if the replay stops.
    async fn close(&mut self) {
        let counted = std::mem::take(&mut self.open);
        if !std::mem::take(&mut self.may_be_open) {
            return;
        }
        match self.context.client.close_session(&self.session_id()).await {
            // A 404 means that the session is gone already, for example by expiry; this counts as
            // closed.
            Ok(()) | Err(CallFailure::Status { status: 404, .. }) => {
                if counted {
                    self.context.live.count(|report| report.sessions_closed += 1);
                }
            }
            Err(failure) => {
                let now = self.context.started.elapsed();
                self.context.live.count_failure("close_", &failure, now);
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

fn retry_in(failure: &CallFailure, tried: u32, max: u32) -> Option<Duration> {
    match failure {
        CallFailure::Status { status, retry_after } => {
            pace::retry_in(*status, retry_after.as_deref(), tried, max)
        }
        CallFailure::Connect
        | CallFailure::Transport
        | CallFailure::Timeout
        | CallFailure::Answer(_) => None,
    }
}
