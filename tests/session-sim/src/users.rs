//! The clients of the simulation.
//!
//! Each client has a conversation, its own transcript, and two routers, so that its turns may
//! overlap. Clients make mistakes and leave at any moment.

use std::time::Duration;

use contract::{claim::Claim, id::SessionKey, load::Retention};
use fastrand::Rng;
use worker_agent::session::{Error, OpenRequest};

use super::{
    engine::TurnId,
    plan::Plan,
    shell::AgentProcess,
    turns::{Reply, Stage, Turn},
    world::{Event, World},
};
use engine_sim::tokenizer::BOS;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Habit {
    /// Sends deltas to a pinned session.
    Pinned,
    /// Sends full histories, in a session that a turn begins without an open.
    Tagged,
    /// Sends full histories, one turn at a time.
    Alone,
    /// Sends full histories to a pinned session.
    FullHistory,
    /// Sends deltas and full histories to a pinned session. A second client does so too, by itself.
    Mixed,
    /// Sends turns without a session.
    Plain,
    /// Takes as much as it can get: floods of turns, and pinned sessions kept as long as it may.
    Hostile,
}

#[derive(Debug)]
pub(super) struct User {
    number: usize,
    habit: Habit,
    /// The number of conversations so far, each with its own session id.
    conversation: u32,
    /// The conversation: prompts, and answers that the client received.
    transcript: Vec<u32>,
    /// The part of the transcript that the agent's session is known to hold.
    pub(super) session: Vec<u32>,
    /// Whether the session isn't open, as far as the client knows.
    must_open: bool,
    /// Whether the client was told to close the session before it opens the session again.
    must_close: bool,
    /// The number of turns whose end the client waits for.
    waits: usize,
    /// The id of an open that the client waits for.
    pub(super) opening: Option<String>,
    /// Whether the client lost an answer that the agent had given. Then only a new session is safe.
    lost_answer: bool,
}

impl User {
    pub(super) fn new(number: usize, plan: &Plan, rng: &mut Rng) -> User {
        // Every run has turns without a session beside pinned sessions.
        let habits = [
            Habit::Pinned,
            Habit::Pinned,
            Habit::Pinned,
            Habit::Tagged,
            Habit::Alone,
            Habit::Plain,
            Habit::FullHistory,
            Habit::Mixed,
        ];
        User {
            number,
            habit: match number {
                0 => Habit::Pinned,
                1 => Habit::Plain,
                2 if plan.hostile => Habit::Hostile,
                _ if plan.mixes && rng.u32(..4) > 0 => Habit::Mixed,
                _ => match *rng.choice(&habits).expect("some") {
                    // If the shim doesn't trim, full histories are refused from the second turn on.
                    Habit::FullHistory | Habit::Mixed if !plan.trims => Habit::Tagged,
                    habit => habit,
                },
            },
            conversation: 0,
            transcript: Vec::new(),
            session: Vec::new(),
            must_open: true,
            must_close: false,
            waits: 0,
            opening: None,
            lost_answer: false,
        }
    }

    /// Returns the client's principal. Several clients share one, except for the hostile one.
    pub(super) fn principal(&self) -> &'static str {
        match (self.habit, self.number % 3) {
            (Habit::Hostile, _) => "hostile",
            (_, 0) => "p0",
            (_, 1) => "p1",
            _ => "p2",
        }
    }

    fn key(&self) -> SessionKey {
        let id = format!("u{}-{}", self.number, self.conversation);
        SessionKey::new(self.principal(), id).expect("short")
    }

    /// Starts a conversation with a new id. The old session is left to expire.
    fn start_over(&mut self, keep_transcript: bool) {
        self.conversation += 1;
        self.session.clear();
        (self.must_open, self.must_close) = (true, false);
        self.lost_answer = false;
        if !keep_transcript {
            self.transcript.clear();
        }
    }

    /// Notes that the session is gone. The transcript stays.
    fn session_gone(&mut self) {
        self.session.clear();
        self.must_open = true;
    }

    /// Notes a finished answer that the agent has passed on.
    pub(super) fn answered(&mut self, turn: &Turn, tokens: &[u32]) {
        let Some((claim, key)) = &turn.claim else { return };
        // Each session of the hostile client has only one turn.
        if *key != self.key() || turn.foreign || self.habit == Habit::Hostile {
            return;
        }
        let mut whole = turn.context.clone();
        whole.extend_from_slice(tokens);
        // The client can't know whether its turn ran in the session or concurrently with it.
        if turn.is_pinned() || matches!(self.habit, Habit::Pinned | Habit::Mixed) {
            self.session.clone_from(&whole);
            self.must_open = claim.close;
        }
        self.transcript = whole;
        if claim.close {
            self.session_gone();
        }
    }
}

impl World {
    pub(super) fn user_acts(&mut self, number: usize) {
        if self.calm {
            return;
        }
        let think = if self.rng.u32(..8) == 0 {
            self.between(2_000, 12_000)
        } else {
            self.between(20, 1_500)
        };
        self.schedule(think, Event::UserActs(number));
        let user = &self.users[number];
        let (habit, waits, opening) = (user.habit, user.waits, user.opening.is_some());
        if habit == Habit::Hostile {
            (0..self.rng.usize(1..24)).for_each(|_| self.plain_turn(number));
            (0..self.rng.usize(0..3)).for_each(|_| self.hoard(number));
            return;
        }
        if habit == Habit::Plain {
            let often = if self.plan.overlong_answers { 2 } else { 5 };
            let burst = if self.rng.u32(..often) == 0 { self.rng.usize(4..16) } else { 1 };
            (0..burst).for_each(|_| self.plain_turn(number));
            return;
        }
        if waits == 0 && !opening {
            self.may_start_over(number);
        }
        let idle = waits == 0 && !opening;
        let opens = matches!(habit, Habit::Pinned | Habit::Mixed);
        let must_close = self.users[number].must_close;
        let hears_closes = self.agent.as_ref().is_some_and(|agent| agent.hands_over_by.is_none());
        match self.rng.u32(..100) {
            draw if idle && hears_closes && (must_close || draw < 4) => self.user_closes(number),
            4..12 if opens && idle => self.user_opens(number),
            12..24 if habit == Habit::Mixed => self.foreign_turn(number),
            _ => self.session_turn(number),
        }
    }

    fn may_start_over(&mut self, number: usize) {
        let room = self.plan.core.context_len * 3 / 4;
        let bored = self.rng.u32(..40) == 0;
        let user = &mut self.users[number];
        let full = user.transcript.len() > room;
        if user.lost_answer || full || bored {
            user.start_over(!full && user.lost_answer);
        }
    }

    fn user_closes(&mut self, number: usize) {
        let key = self.users[number].key();
        self.users[number].session_gone();
        self.users[number].must_close = false;
        self.note(|| format!("user {number} closes {}", key.id()));
        if self.agent.as_ref().is_some_and(|agent| !agent.down) {
            self.call_table(|table, now| table.close_session(now, &key));
        }
    }

    fn user_opens(&mut self, number: usize) {
        let user = &self.users[number];
        let takes_none = |agent: &AgentProcess| agent.down || agent.hands_over_by.is_some();
        if !user.must_open || self.agent.as_ref().is_none_or(takes_none) {
            return;
        }
        let (key, rid) = (user.key(), self.rid());
        self.note(|| format!("user {number} opens {} as {rid}", key.id()));
        let requested_rank = self.asked_rank();
        if let Some(agent) = &mut self.agent {
            agent.waiters.insert(rid.clone());
        }
        self.users[number].opening = Some(rid.clone());
        let retention = Some(Retention::Pinned);
        let request = OpenRequest { key, retention, idle_max: None, requested_rank };
        let opened = self.call_table(|table, now| table.open_session(now, &rid, &request));
        if let Some(Err(error)) = opened {
            self.note(|| format!("{rid} refused: {error}"));
            self.waited(&rid);
            self.open_refused(&rid);
        }
    }

    pub(super) fn user_opened(&mut self, rid: &str) {
        let found = self.users.iter_mut().find(|user| user.opening.as_deref() == Some(rid));
        if let Some(user) = found {
            user.opening = None;
            user.session.clear();
            user.must_open = false;
        }
    }

    pub(super) fn open_refused(&mut self, rid: &str) {
        let found = self.users.iter_mut().find(|user| user.opening.as_deref() == Some(rid));
        if let Some(user) = found {
            user.opening = None;
        }
    }

    fn asked_rank(&mut self) -> Option<u32> {
        let ranks = self.plan.ranks;
        (self.rng.u32(..3) == 0).then(|| self.rng.u32(..ranks))
    }

    fn rid(&mut self) -> String {
        // All ids have the same length, so none is the beginning of another.
        format!("r{:08}", self.number())
    }

    fn words(&mut self, max: usize) -> Vec<u32> {
        let count = self.rng.usize(1..=max);
        (0..count).map(|_| self.rng.u32(..200)).collect()
    }

    fn answer_len(&mut self) -> usize {
        match self.rng.u32(..12) {
            0 | 11 => self.rng.usize(100..400),
            1..9 if self.plan.overlong_answers => self.rng.usize(80..160),
            1..4 => self.rng.usize(1..4),
            _ => self.rng.usize(4..60),
        }
    }

    /// Begins one more pinned session with a short turn, and keeps it for as long as it may.
    fn hoard(&mut self, number: usize) {
        self.users[number].start_over(false);
        let key = self.users[number].key();
        let claim = Claim {
            delta: true,
            open: true,
            retention: Some(Retention::Pinned),
            idle_ms_max: Some(u64::MAX),
            ..Claim::for_session(&key)
        };
        let ids = self.words(4);
        self.send(number, Some((claim, key)), ids);
    }

    fn plain_turn(&mut self, number: usize) {
        let large = self.rng.u32(..6) == 0;
        let context = self.plan.core.context_len;
        let ids = self.words(if large { context * 3 / 4 } else { 60 });
        self.send(number, None, ids);
    }

    fn session_turn(&mut self, number: usize) {
        let user = &self.users[number];
        let (habit, waits, key, opens) = (user.habit, user.waits, user.key(), user.must_open);
        let first = opens && user.transcript.is_empty();
        // A second turn while another is running, as another router would send it.
        let overlaps = waits > 0 || user.opening.is_some();
        let over = opens && !first && matches!(habit, Habit::Pinned | Habit::Mixed);
        if overlaps && (over || user.lost_answer || self.rng.u32(..5) > 0) {
            return;
        }
        let mut claim = Claim::for_session(&key);
        claim.close = self.rng.u32(..25) == 0;
        let new = self.words(40);
        // If the shim trims, a full history on a pinned session is allowed.
        let wrong = self.rng.u32(..if self.plan.trims { 6 } else { 30 }) == 0;
        self.may_edit(number);
        // A client that mixes knows which turn holds what.
        let whole = habit == Habit::Mixed && self.rng.u32(..3) > 0;
        let edits = whole && self.rng.u32(..3) == 0;
        let user = &self.users[number];
        let mut ids = match habit {
            Habit::Pinned if !wrong => user.transcript[user.session.len()..].to_vec(),
            Habit::Mixed if !whole => user.transcript[user.session.len()..].to_vec(),
            Habit::Pinned => edited(user.transcript.clone(), &mut self.rng),
            Habit::Mixed if edits => edited(user.transcript.clone(), &mut self.rng),
            _ => user.transcript.clone(),
        };
        ids.extend(new);
        match habit {
            Habit::Pinned => {
                // A wrong turn sends its full history, or a delta to a session that was never
                // opened.
                claim.delta = !wrong || opens;
                claim.open = opens && !wrong;
                claim.retention = claim.open.then_some(Retention::Pinned);
                if claim.delta && !wrong && self.rng.u32(..20) == 0 && !user.session.is_empty() {
                    // A tokenizer's leading BOS token, which the engine drops if the session has a
                    // history.
                    ids.insert(0, BOS);
                }
            }
            Habit::Mixed => {
                claim.delta = !whole;
                claim.open = opens;
                claim.retention = opens.then_some(Retention::Pinned);
            }
            Habit::Alone => claim.open = true,
            Habit::Tagged => claim.delta = wrong,
            Habit::FullHistory => claim.retention = Some(Retention::Pinned),
            Habit::Plain | Habit::Hostile => {}
        }
        self.send(number, Some((claim, key)), ids);
    }

    /// Sends a turn of the second client. Its copy of the conversation differs from the session's
    /// at some token, so it can't continue the session.
    fn foreign_turn(&mut self, number: usize) {
        let user = &self.users[number];
        if user.must_open || user.opening.is_some() {
            return;
        }
        let (key, mut ids) = (user.key(), user.session.clone());
        if !ids.is_empty() {
            let at = self.rng.usize(..ids.len());
            ids[at] = (ids[at] + 1) % 200;
            ids.truncate(self.rng.usize(at + 1..=ids.len()));
        }
        ids.extend(self.words(40));
        let id = self.send(number, Some((Claim::for_session(&key), key)), ids);
        self.turn(id).foreign = true;
    }

    /// Sometimes changes the transcript of a client that sends full histories: such clients
    /// regenerate a last answer, leave out reasoning, or shorten the history.
    fn may_edit(&mut self, number: usize) {
        let whole =
            matches!(self.users[number].habit, Habit::Tagged | Habit::Alone | Habit::FullHistory);
        if !whole || self.rng.u32(..10) > 0 {
            return;
        }
        let transcript = std::mem::take(&mut self.users[number].transcript);
        self.users[number].transcript = edited(transcript, &mut self.rng);
    }

    fn send(&mut self, number: usize, claim: Option<(Claim, SessionKey)>, ids: Vec<u32>) -> TurnId {
        let (id, rid, rank) = (self.number(), self.rid(), self.asked_rank());
        let turn = Turn {
            rid,
            user: number,
            claim,
            ids,
            max_new: self.answer_len(),
            ignore_eos: !self.plan.overlong_answers && self.rng.bool(),
            streams: self.rng.bool(),
            exact: self.plan.faults.meddler || self.rng.bool(),
            rank,
            foreign: false,
            plan_lost: false,
            awaited_plan: false,
            unfit: None,
            begun: self.now,
            queued: self.now,
            stage: Stage::Coming,
            client: true,
            reply: None,
            admitted: None,
            context: Vec::new(),
            connected: false,
            arrived: false,
            entered: None,
            inside: false,
            kv: self.choose_kv(number),
            runs_in: None,
            sent: Vec::new(),
        };
        self.users[number].waits += 1;
        self.turns.insert(id, turn);
        let latency = self.latency();
        self.schedule(latency, Event::TurnArrives(id));
        let leaves = self.plan.faults.client_leaves;
        if self.odds(leaves) {
            let far = self.plan.overlong_answers || self.rng.bool();
            let after = if far { self.between(0, 5_000) } else { self.between(0, 300) };
            self.schedule(after, Event::ClientLeaves(id));
        }
        id
    }

    /// Notes that the client has left while the agent still had its turn, so for the client the
    /// turn never happened. If the agent had already answered, only a new session is safe.
    pub(super) fn user_left(&mut self, id: TurnId) {
        let turn = &self.turns[&id];
        let (number, answered) = (turn.user, matches!(turn.reply, Some(Reply::Answer)));
        let foreign = turn.foreign;
        let user = &mut self.users[number];
        user.waits -= 1;
        user.lost_answer |= answered && !foreign;
    }

    pub(super) fn reply_arrives(&mut self, id: TurnId) {
        let lost = self.plan.faults.reply_lost;
        if !self.turns[&id].client {
            return;
        }
        if self.odds(lost) {
            self.note(|| format!("reply {id} is lost"));
            self.turn(id).client = false;
            return self.user_left(id);
        }
        let turn = &self.turns[&id];
        let (number, rid) = (turn.user, turn.rid.clone());
        let reply = turn.reply.clone().expect("a reply arrives");
        let current = turn.claim.as_ref().is_some_and(|(_, key)| *key == self.users[number].key());
        let current = current && !turn.foreign;
        self.note(|| format!("client of {rid} hears {reply:?}"));
        self.turn(id).client = false;
        self.check_reply(id, &reply);
        let user = &mut self.users[number];
        user.waits -= 1;
        if !current {
            return;
        }
        match reply {
            Reply::Refused(error) => match error {
                Error::UnknownSession
                | Error::Closing
                | Error::Lost
                | Error::NotTakenOver
                | Error::HistoryUnknown
                | Error::WeightsChanged
                | Error::Reclaimed => {
                    user.session_gone();
                    user.must_close |= error == Error::HistoryUnknown && user.habit == Habit::Mixed;
                }
                Error::DeltaNeedsOpen => {
                    user.session_gone();
                    user.must_close = true;
                }
                Error::DeltaNeedsPinned(_)
                | Error::OpenWithOtherRetention(_)
                | Error::HasHistory => {
                    user.start_over(true);
                }
                _ => {}
            },
            // The agent may have died, and with it what it knew of the session.
            Reply::Broken if matches!(user.habit, Habit::Pinned | Habit::Mixed) => {
                user.lost_answer = true;
            }
            Reply::Answer | Reply::Engine(_) | Reply::Broken | Reply::Unusable => {}
        }
    }

    /// Returns how long a client has waited for this turn.
    pub(super) fn waited_for(&self, turn: &Turn) -> Duration {
        self.now - turn.begun
    }
}

/// Returns a history without a random part, which may be empty.
fn edited(mut ids: Vec<u32>, rng: &mut Rng) -> Vec<u32> {
    let from = rng.usize(..=ids.len());
    let until = rng.usize(from..=ids.len());
    ids.drain(from..until);
    ids
}
