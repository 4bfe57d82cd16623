//! One turn's decision: standing, placement, binding and lease in one step under the affinity lock,
//! so that concurrent first turns of a session get one worker. It sends nothing.

use std::sync::Arc;

use bytes::Bytes;
use http::StatusCode;
use parking_lot::MutexGuard;
use proto::{
    claim::Claim,
    id::{Digest, SessionKey},
    load::Retention,
    process::refusal::Refusal,
};
use tracing::debug;

use crate::{
    affinity::{Affinity, Closing},
    api::errors,
    blocks::TurnBlocks,
    known::{self, Standing},
    lease::Lease,
    placement::{self, Figures, Placement, Question, Reason, Sticky},
    recent::Record,
    request::{Ask, Turn},
    shared::{Shared, now},
    view::{ClusterView, WorkerRef},
};

/// A placed turn with all that it holds.
#[derive(Debug)]
pub(crate) struct Decided {
    pub(crate) worker: WorkerRef,
    pub(crate) name: String,
    pub(crate) authority: Arc<str>,
    pub(crate) reason: Reason,
    /// The header for the agent.
    pub(crate) claim: Option<Claim>,
    /// The session may go elsewhere if this worker refuses.
    pub(crate) movable: bool,
    pub(crate) lease: Lease,
    pub(crate) hold: Option<Hold>,
    /// What its worker will have when it has taken the turn.
    pub(crate) blocks: Option<TurnBlocks>,
    /// Leading tokens of its prompt that the worker has, where that is known.
    pub(crate) resident_tokens: Option<u64>,
}

/// A session's binding, held while a turn runs.
#[derive(Debug)]
pub(crate) struct Hold {
    shared: Arc<Shared>,
    key: SessionKey,
    /// The agent closes the session when this turn has ended.
    closes: bool,
    /// The affinity table knows that the answer has begun.
    answered: bool,
    /// The worker that the session has left of its own will.
    left: Option<WorkerRef>,
    /// Of the turn.
    body_bytes: u64,
}

impl Hold {
    /// The agent took a last turn: from its end on the session is unknown, whatever the table says
    /// until it has caught up.
    pub(crate) fn close_at_end(&mut self) {
        self.closes = true;
    }

    /// Whether the session was closed since its turn was placed: nobody there knew of the turn.
    pub(crate) fn is_closing(&self) -> bool {
        let affinity = self.shared.affinity.lock();
        affinity.get(&self.key, now()).is_some_and(|binding| binding.closing != Closing::No)
    }

    /// The head of the answer is here, of a turn that was taken or refused.
    pub(crate) fn answered(&mut self, taken: bool) {
        self.count_answer();
        if taken {
            self.shared.affinity.lock().note_body(&self.key, self.body_bytes);
        }
        let Some(left) = self.left.take().filter(|_| taken) else { return };
        // Another turn of the session may still be there, or have gone back.
        let is_away = self
            .shared
            .affinity
            .lock()
            .get(&self.key, now())
            .is_some_and(|binding| binding.turns == 1 && binding.worker.agent != left.agent);
        if is_away {
            // The KV that it has there is nobody's now: closed, it is the first to go.
            self.shared.close_detached(self.key.clone(), left);
        }
    }

    fn count_answer(&mut self) {
        if !std::mem::replace(&mut self.answered, true) {
            self.shared.affinity.lock().answered(&self.key);
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.count_answer();
        let mut affinity = self.shared.affinity.lock();
        affinity.end(&self.key, now());
        if self.closes {
            affinity.closed(&self.key, false, now());
        }
    }
}

/// What the session's standing means for placing its turn.
struct Place {
    sticky: Option<Sticky>,
    /// Pinned, or one turn at a time: another worker can't take it.
    fixed: bool,
    /// The client opened it: on another worker it has to be opened again, as it was.
    open_as: Option<Retention>,
}

/// What is known of a turn's prompt when it is placed.
#[derive(Debug, Clone, Copy)]
enum Prompt<'a> {
    /// It costs time to know it, and perhaps nobody has to.
    NotAsked,
    /// As far as it can be known.
    Asked(Option<&'a TurnBlocks>),
}

/// Bytes of a body for each token: of JSON with prose and code, roughly.
const TOKEN_BYTES: u64 = 4;

/// How far a decision got.
enum Step {
    Decided(Box<Decided>),
    /// What the prompt costs on each worker decides.
    WantsPrompt,
}

impl Shared {
    /// Places a turn. Its prompt is looked at only if the session's place doesn't settle it.
    pub(crate) async fn decide(
        self: &Arc<Self>,
        turn: &Turn,
        turn_id: u64,
        path: &str,
        body: &Bytes,
    ) -> Result<Decided, Refusal> {
        if let Step::Decided(decided) = self.try_decide(turn, turn_id, Prompt::NotAsked)? {
            return Ok(*decided);
        }
        // Without the lock: a long prompt takes milliseconds, and other sessions go on.
        let blocks = self.whereabouts.of(turn, path, body, &self.view.load()).await;
        match self.try_decide(turn, turn_id, Prompt::Asked(blocks.as_ref()))? {
            Step::Decided(decided) => {
                let told = |blocks| self.whereabouts.told_tokens(blocks, decided.worker);
                let resident_tokens = blocks.as_ref().and_then(told);
                Ok(Decided { blocks, resident_tokens, ..*decided })
            }
            Step::WantsPrompt => unreachable!("it was asked for"),
        }
    }

    fn try_decide(
        self: &Arc<Self>,
        turn: &Turn,
        turn_id: u64,
        prompt: Prompt<'_>,
    ) -> Result<Step, Refusal> {
        let view = self.view.load();
        let prefer = self.preferred(turn, &view);
        let blocks = match prompt {
            Prompt::NotAsked => None,
            Prompt::Asked(blocks) => blocks,
        };
        let base = Question {
            digest: Digest(turn_id),
            returns: turn.session.as_ref().is_some_and(|ask| !ask.close),
            sticky: None,
            prefer,
            prompt: blocks.map(TurnBlocks::prompt),
            retention: None,
            model: turn.model.as_deref(),
            exclude: None,
        };
        let step = match &turn.session {
            None => match prompt {
                Prompt::NotAsked => Step::WantsPrompt,
                Prompt::Asked(_) => {
                    let placement = self.place(&base, &view)?;
                    let decided = self.decided(turn, turn_id, &view, placement, None, true);
                    Step::Decided(Box::new(decided))
                }
            },
            Some(ask) => self.decide_session(turn, turn_id, ask, base, prompt, &view)?,
        };
        if let Step::Decided(decided) = &step {
            self.remember_cache_key(turn, decided.worker);
        }
        Ok(step)
    }

    /// Places a turn that its worker could not take on one other. None: there is none, or the
    /// session can't move.
    pub(crate) fn decide_again(
        self: &Arc<Self>,
        turn: &Turn,
        turn_id: u64,
        first: &mut Decided,
    ) -> Option<Decided> {
        if !first.movable {
            return None;
        }
        let view = self.view.load();
        let ask = turn.session.as_ref();
        let mut affinity = self.affinity.lock();
        // Another turn of the session may have moved it already: then this one follows.
        let bound = ask
            .and_then(|ask| affinity.get(&ask.key, now()))
            .map(|binding| binding.worker)
            .filter(|worker| *worker != first.worker);
        let question = Question {
            digest: ask.map_or(Digest(turn_id), |ask| ask.key.digest()),
            returns: ask.is_some_and(|ask| !ask.close),
            sticky: Some(bound.unwrap_or(first.worker)).filter(|_| ask.is_some()).map(Sticky::at),
            prefer: None,
            prompt: None,
            retention: ask.and_then(|ask| ask.retention),
            model: turn.model.as_deref(),
            exclude: Some(first.worker),
        };
        let placement = placement::place(&question, &view, now()).ok()?;
        if placement.worker == first.worker {
            return None;
        }
        if let Some(ask) = ask {
            affinity.rebind(&ask.key, placement.worker);
        }
        if let Some(hold) = &mut first.hold {
            // Where it wanted to go it can't; what it has elsewhere may still be of use.
            hold.left = None;
        }
        drop(affinity);
        // The hold moves along; the lease is per worker.
        let second = self.decided(turn, turn_id, &view, placement, first.hold.take(), true);
        Some(Decided { blocks: first.blocks.take(), ..second })
    }

    fn decide_session(
        self: &Arc<Self>,
        turn: &Turn,
        turn_id: u64,
        ask: &Ask,
        base: Question<'_>,
        prompt: Prompt<'_>,
        view: &ClusterView,
    ) -> Result<Step, Refusal> {
        let mut affinity = self.affinity.lock();
        let standing = known::standing(&ask.key, view, affinity.get(&ask.key, now()), now());
        let Place { mut sticky, fixed, open_as } = admit(ask, &standing, view)?;
        if let (Some(sticky), Some(binding)) = (&mut sticky, affinity.get(&ask.key, now())) {
            sticky.moved = binding.moved;
            let ended = if binding.turns > 0 { Some(now()) } else { binding.ended };
            sticky.ended = ended.filter(|_| self.whereabouts.is_told(sticky.worker));
            // A binding without a turn yet has none to compare with.
            let before = Some(binding.body_bytes).filter(|&bytes| bytes > 0);
            let new_bytes = before.and_then(|before| turn.body_bytes.checked_sub(before));
            sticky.new_tokens = new_bytes.map(|bytes| bytes / TOKEN_BYTES);
            // What a running turn brings is resident nowhere yet, and it is the queue there.
            sticky.fixed |= binding.turns > 0 || binding.exclusive || ask.delta;
        }
        // Where nobody can tell what a session has at home, home would look empty: it stays.
        let is_counted = |blocks: &TurnBlocks| {
            sticky.is_none_or(|sticky| self.whereabouts.counts(blocks, sticky.worker))
        };
        let base = match prompt {
            Prompt::Asked(Some(blocks)) if !is_counted(blocks) => Question { prompt: None, ..base },
            _ => base,
        };
        let question = Question {
            digest: ask.key.digest(),
            sticky,
            retention: if sticky.is_none() { ask.retention } else { None },
            ..base
        };
        let placement = match prompt {
            Prompt::NotAsked => match placement::settled(&question, view, now()) {
                Some(settled) => settled,
                None => return Ok(Step::WantsPrompt),
            },
            Prompt::Asked(_) => self.place(&question, view)?,
        };
        if let Some(Sticky { worker, fixed: true, .. }) = sticky
            && worker != placement.worker
            && ask.delta
        {
            // Elsewhere there is no history that this could be appended to.
            return Err(lost(&view.name(worker), false));
        }
        let exclusive = ask.open || ask.retention == Some(Retention::Pinned);
        let mut hold = self.hold(&mut affinity, ask, placement.worker, exclusive)?;
        hold.body_bytes = turn.body_bytes;
        if placement.reason == Reason::Moved {
            hold.left = sticky.map(|sticky| sticky.worker);
        }
        drop(affinity);
        let moved = sticky.is_some_and(|sticky| sticky.worker != placement.worker);
        let mut decided = self.decided(turn, turn_id, view, placement, Some(hold), !fixed);
        if let (true, Some(retention), Some(claim)) = (moved, open_as, &mut decided.claim) {
            claim.open = true;
            claim.retention = claim.retention.or(Some(retention));
        }
        Ok(Step::Decided(Box::new(decided)))
    }

    fn hold(
        self: &Arc<Self>,
        affinity: &mut MutexGuard<'_, Affinity>,
        ask: &Ask,
        worker: WorkerRef,
        exclusive: bool,
    ) -> Result<Hold, Refusal> {
        affinity.begin(&ask.key, worker, exclusive, now()).map_err(errors::full)?;
        affinity.set_placement_only(&ask.key, ask.bind);
        Ok(Hold {
            shared: Arc::clone(self),
            key: ask.key.clone(),
            closes: false,
            answered: false,
            left: None,
            body_bytes: 0,
        })
    }

    fn place(&self, question: &Question<'_>, view: &ClusterView) -> Result<Placement, Refusal> {
        placement::place(question, view, now()).map_err(|none| errors::no_worker(&none))
    }

    fn decided(
        &self,
        turn: &Turn,
        turn_id: u64,
        view: &ClusterView,
        placement: Placement,
        hold: Option<Hold>,
        movable: bool,
    ) -> Decided {
        let tokens = placement.tokens_expected();
        let Placement { worker, reason, ref figures, .. } = placement;
        let agent = view.agent(worker);
        let facts = agent.facts.as_ref().expect("a placed worker was described");
        let ask = turn.session.as_ref();
        let claim = ask.filter(|ask| !ask.bind).map(|ask| Claim {
            retention: ask.retention,
            delta: ask.delta,
            open: ask.open,
            close: ask.close,
            idle_ms_max: ask.idle_ms_max,
            ..Claim::of(&ask.key)
        });
        self.metrics.placed(reason);
        let name = view.name(worker);
        debug!(
            worker = name,
            reason = reason.as_str(),
            session = ask.map(|ask| tracing::field::display(ask.key.digest())),
            figures = ?named(figures, view),
            "turn placed"
        );
        let session = ask.map(|ask| ask.key.digest());
        self.recent.lock().note(turn_id, Record { at: now(), session, placement });
        Decided {
            worker,
            name,
            authority: Arc::clone(&facts.data_authority),
            reason,
            claim,
            movable: movable && !ask.is_some_and(|ask| ask.delta),
            lease: Lease::acquire(&agent.in_flight[worker.dp_rank as usize], tokens),
            hold,
            blocks: None,
            resident_tokens: None,
        }
    }

    /// The worker of the parent session, else the one this cache key went to.
    fn preferred(&self, turn: &Turn, view: &ClusterView) -> Option<(WorkerRef, Reason)> {
        if let Some(parent) = &turn.parent
            && let Standing::Open { worker, .. } | Standing::Bound { worker, .. } =
                self.standing(parent, view)
        {
            return Some((worker, Reason::Parent));
        }
        let cache_key = turn.cache_key.as_ref()?;
        let cache_keys = self.cache_keys.lock();
        Some((cache_keys.get(cache_key, now())?.worker, Reason::CacheKey))
    }

    fn remember_cache_key(&self, turn: &Turn, worker: WorkerRef) {
        let Some(key) = &turn.cache_key else { return };
        let mut cache_keys = self.cache_keys.lock();
        // A turn of no length: it only renews the binding. A full table forgets, it never refuses.
        if cache_keys.begin(key, worker, false, now()).is_ok() {
            cache_keys.end(key, now());
        }
    }
}

/// For people: what was compared, by the workers' names.
fn named(figures: &[Figures], view: &ClusterView) -> Vec<(String, Figures)> {
    figures.iter().map(|one| (view.name(one.worker), *one)).collect()
}

/// Whether the session's standing allows the turn, and what it means for its place.
fn admit(ask: &Ask, standing: &Standing, view: &ClusterView) -> Result<Place, Refusal> {
    let delta_on_nothing = ask.delta && !ask.open;
    match standing {
        Standing::Closing => Err(closing()),
        Standing::Lost { worker, agent_up } => Err(lost(&view.name(*worker), *agent_up)),
        busy if is_busy(busy, view) => Err(self::busy()),
        Standing::Unknown | Standing::Bound { recent: false, .. } if delta_on_nothing => {
            Err(Refusal::new(
                StatusCode::NOT_FOUND,
                "session_unknown",
                "this turn holds only what is new, but no session is open under its id; open it \
                 first with POST /v1/sessions, or send the whole history without delta meaning",
            ))
        }
        Standing::Unknown => Ok(Place {
            sticky: None,
            // Nothing of it is anywhere yet.
            fixed: false,
            open_as: None,
        }),
        Standing::Bound { worker, busy, .. } => {
            // Behind a turn that runs there, and nowhere else.
            let sticky = Some(Sticky { fixed: *busy, ..Sticky::at(*worker) });
            Ok(Place { sticky, fixed: *busy, open_as: None })
        }
        Standing::Open { worker, session, .. } => {
            let pinned = session.retention == Retention::Pinned;
            let fixed = session.exclusive || (pinned && !session.whole_history);
            let told_tokens = session.resident_tokens.map_or(0, |figure| figure.value);
            let held_tokens = if pinned { told_tokens } else { 0 };
            let sticky = Sticky { fixed, told_tokens, held_tokens, ..Sticky::at(*worker) };
            let sticky = Some(sticky);
            Ok(Place { sticky, fixed, open_as: session.exclusive.then_some(session.retention) })
        }
    }
}

/// Does a turn run that another one can't wait behind? Where turns may wait, their agent decides.
pub(crate) fn is_busy(standing: &Standing, view: &ClusterView) -> bool {
    let (Standing::Open { busy: true, worker, .. } | Standing::Bound { busy: true, worker, .. }) =
        standing
    else {
        return false;
    };
    let facts = view.agent(*worker).facts.as_ref();
    facts.is_none_or(|facts| facts.description.turns_queued_per_session_max == 0)
}

pub(crate) fn busy() -> Refusal {
    Refusal::new(
        StatusCode::CONFLICT,
        "session_busy",
        "a turn of this session is running and it takes one at a time; send this one when that \
         one has ended",
    )
}

pub(crate) fn closing() -> Refusal {
    Refusal::new(
        StatusCode::NOT_FOUND,
        "session_closing",
        "this session is closing; wait until its last turn has ended, then open it again",
    )
}

fn lost(worker: &str, agent_up: bool) -> Refusal {
    let whats_gone = if agent_up { "whose engine restarted" } else { "which is gone" };
    Refusal::new(
        StatusCode::CONFLICT,
        "session_lost",
        format!(
            "its KV and history were on worker {worker}, {whats_gone}; open the session again and \
             send the whole history"
        ),
    )
}
