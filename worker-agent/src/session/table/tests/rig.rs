//! A test rig: a session table, an obedient engine, and short methods for what clients do.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use contract::load::{Retention, VolatilePrefix};

use super::*;
use crate::session::{ClaimRequest, OpenRequest, journal::OpenIncarnation};

/// An admitted turn.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Inside {
    pub(super) rid: String,
    pub(super) turn: PlannedTurn,
}

impl Inside {
    pub(super) fn incarnation(&self) -> &str {
        &self.turn.session.as_ref().unwrap().incarnation
    }
}

/// The table's answer to a turn that asked for admission.
#[derive(Debug, PartialEq)]
pub(super) enum Answer {
    In(Inside),
    Waits(String),
    No(Error),
}

impl Answer {
    pub(super) fn inside(self) -> Inside {
        match self {
            Self::In(inside) => inside,
            other => panic!("the turn is not inside: {other:?}"),
        }
    }

    pub(super) fn waits(self) -> String {
        match self {
            Self::Waits(rid) => rid,
            other => panic!("the turn doesn't wait: {other:?}"),
        }
    }

    pub(super) fn error(self) -> Error {
        match self {
            Self::No(error) => error,
            other => panic!("the turn was not refused: {other:?}"),
        }
    }
}

/// A session table, and an engine that opens what it is asked to open and closes when the test says
/// so.
pub(super) struct Rig {
    pub(super) table: Table,
    pub(super) now: Instant,
    pub(super) rids: u32,
    /// Closes that the table requested from the engine.
    pub(super) closes: Vec<CloseRequest>,
    pub(super) demotes: Vec<String>,
    /// For each session that the shim was asked to inspect: the turn to abort first.
    pub(super) inspections: Vec<Option<String>>,
    /// All requests to the shim: the number of each, and its incarnation.
    pub(super) shim_requests: Vec<(u64, String)>,
    pub(super) journal: Vec<Record>,
    /// Turns and opens that left the queue for the engine.
    pub(super) admitted: HashMap<String, PlannedTurn>,
    pub(super) refused: HashMap<String, Error>,
    /// Opens that wait until the test answers them. `None`: each open succeeds at once.
    pub(super) opens: Option<Vec<String>>,
    /// Answers to the shim's questions: question number, incarnation, and the most prompt tokens.
    pub(super) answers: Vec<(u64, Option<String>, u64)>,
    /// How turns ran, if that was reported after their admission.
    pub(super) run_modes: HashMap<String, RunMode>,
    /// The tokens reserved for each turn that got a plan, as its client is told.
    pub(super) growths: HashMap<String, Option<u64>>,
    /// Turns that the shim refused, and why.
    pub(super) refused_by_shim: HashMap<String, Error>,
    /// The client that sends turns without a session.
    pub(super) principal: String,
    /// The beginning of the prompts of later turns.
    pub(super) start: PromptStart,
    /// Volatile prefixes that the table reported.
    pub(super) volatile: Vec<VolatilePrefix>,
}

impl Rig {
    pub(super) fn new() -> Self {
        Self::with(settings(), engine(1))
    }

    /// With settings that differ from those of most tests.
    pub(super) fn with_settings(change: impl FnOnce(&mut TableSettings)) -> Self {
        let mut settings = settings();
        change(&mut settings);
        Self::with(settings, engine(1))
    }

    pub(super) fn with(settings: TableSettings, engine: EngineCapacity) -> Self {
        Self {
            table: Table::new(settings, engine),
            now: service::clock::now(),
            rids: 0,
            closes: vec![],
            demotes: vec![],
            inspections: vec![],
            shim_requests: vec![],
            journal: vec![],
            admitted: HashMap::new(),
            refused: HashMap::new(),
            opens: None,
            answers: vec![],
            run_modes: HashMap::new(),
            growths: HashMap::new(),
            refused_by_shim: HashMap::new(),
            principal: "p".to_owned(),
            start: PromptStart::default(),
            volatile: vec![],
        }
    }

    pub(super) fn carry_out(&mut self) {
        loop {
            let effects = self.table.take_effects();
            if effects.is_empty() {
                return;
            }
            for effect in effects {
                match effect {
                    Effect::Admitted { rid, turn } => drop(self.admitted.insert(rid, turn)),
                    Effect::Refused { rid, error } => drop(self.refused.insert(rid, error)),
                    Effect::Journal(record) => self.journal.push(record),
                    Effect::Close(close) => self.closes.push(close),
                    Effect::Demote { number, incarnation, .. } => {
                        self.shim_requests.push((number, incarnation.clone()));
                        self.demotes.push(incarnation);
                    }
                    Effect::Inspect { number, incarnation, rid, .. } => {
                        self.shim_requests.push((number, incarnation));
                        self.inspections.push(rid);
                    }
                    Effect::AnswerQuestion { question, incarnation, tokens_max } => {
                        self.answers.push((question, incarnation, tokens_max));
                    }
                    Effect::RunModeKnown { rid, run_mode, growth_tokens_max } => {
                        self.growths.insert(rid.clone(), growth_tokens_max);
                        self.run_modes.insert(rid, run_mode);
                    }
                    Effect::RefusedByShim { rid, error } => {
                        drop(self.refused_by_shim.insert(rid, error))
                    }
                    Effect::VolatilePrefix(_, found) => self.volatile.push(found),
                    Effect::SessionChanged(_) | Effect::SessionEvent(..) | Effect::Freed(_) => {}
                    Effect::Open { incarnation, .. } => match &mut self.opens {
                        Some(opens) => opens.push(incarnation),
                        None => self.table.handle_open_result(
                            self.now,
                            &incarnation,
                            &OpenResult::Opened,
                        ),
                    },
                }
            }
        }
    }

    /// Lets the table find an incarnation that an earlier agent process left open.
    pub(super) fn inherit(&mut self, incarnation: &str, rid: Option<&str>) {
        let left = OpenIncarnation { dp_rank: 0, rid: rid.map(str::to_owned) };
        let open_incarnations = BTreeMap::from([(incarnation.to_owned(), left)]);
        self.table.take_over(self.now, Legacy { open_incarnations, ..Legacy::default() });
    }

    /// Connects the shim of rank 0.
    pub(super) fn shim_up(&mut self, can_demote: bool) {
        self.table.handle_shim_report(self.now, 0, ShimReport::Up { can_demote });
    }

    /// Returns the number of the newest request about an incarnation; 0, which no request has,
    /// without one.
    fn request_about(&self, incarnation: &str) -> u64 {
        let mut newest_first = self.shim_requests.iter().rev();
        newest_first.find(|(_, id)| id == incarnation).map_or(0, |(number, _)| *number)
    }

    /// Lets the shim answer the newest request to demote an incarnation.
    pub(super) fn answer_demotion(&mut self, incarnation: &str, is_demoted: bool) {
        let number = self.request_about(incarnation);
        self.table.handle_shim_report(self.now, 0, ShimReport::Demotion { number, is_demoted });
    }

    /// Lets the shim answer the newest request to inspect the session of this report.
    pub(super) fn answer_inspection(&mut self, report: &SessionReport) {
        let number = self.request_about(&report.id);
        self.table.handle_shim_report(
            self.now,
            0,
            ShimReport::Inspection { number, report: Some(report) },
        );
    }

    /// Lets the shim report a session without being asked, as a change or as all of a full table.
    pub(super) fn report(&mut self, report: &SessionReport, is_full_table: bool) {
        let part = TablePart { begins_table: is_full_table, ends_table: is_full_table };
        self.table.handle_shim_report(
            self.now,
            0,
            ShimReport::Sessions { part, reports: std::slice::from_ref(report) },
        );
    }

    pub(super) fn rid(&mut self) -> String {
        self.rids += 1;
        format!("r{}", self.rids)
    }

    pub(super) fn turn(&mut self, claim: &Claim) -> Answer {
        self.turn_that_needs(
            claim,
            Need { prompt_tokens: 8, answer_tokens: Some(8), ..Need::default() },
        )
    }

    pub(super) fn turn_that_needs(&mut self, claim: &Claim, need: Need) -> Answer {
        self.ask(Some(claim), None, RouteTurns::DeltasAndHistories, need)
    }

    pub(super) fn plain(&mut self, tokens: u64) -> Answer {
        let need = Need {
            prompt_tokens: tokens,
            answer_tokens: Some(0),
            is_exact: true,
            ..Need::default()
        };
        self.ask(None, None, RouteTurns::Nothing, need)
    }

    pub(super) fn ask(
        &mut self,
        claim: Option<&Claim>,
        requested_rank: Option<u32>,
        route_turns: RouteTurns,
        need: Need,
    ) -> Answer {
        let rid = self.rid();
        let request = match claim {
            Some(claim) => claims(claim, route_turns),
            None => claims_nothing(&self.principal, route_turns),
        };
        let request = ClaimRequest { requested_rank, ..request };
        if let Err(error) = self.table.claim(self.now, &rid, &request) {
            return Answer::No(error);
        }
        self.table.set_prompt_start(&rid, self.start.clone());
        self.table.enqueue(self.now, &rid, need);
        self.carry_out();
        self.answer(rid)
    }

    pub(super) fn answer(&mut self, rid: String) -> Answer {
        match (self.admitted.remove(&rid), self.refused.remove(&rid)) {
            (Some(turn), None) => Answer::In(Inside { rid, turn }),
            (None, Some(error)) => Answer::No(error),
            (None, None) => Answer::Waits(rid),
            both => panic!("two answers: {both:?}"),
        }
    }

    pub(super) fn end(&mut self, turn: &Inside, outcome: Outcome) {
        self.table.end_turn(self.now, &turn.rid, outcome);
        self.carry_out();
    }

    pub(super) fn open(&mut self, id: &str, retention: Option<Retention>) -> Result<(), Error> {
        self.open_for(id, retention, None)
    }

    pub(super) fn open_for(
        &mut self,
        id: &str,
        retention: Option<Retention>,
        idle_max: Option<Duration>,
    ) -> Result<(), Error> {
        let rid = self.rid();
        let request = OpenRequest { idle_max, ..opens(key(id), retention) };
        self.table.open_session(self.now, &rid, &request)?;
        self.carry_out();
        self.refused.remove(&rid).map_or(Ok(()), Err)
    }

    pub(super) fn pin(&mut self, id: &str) -> String {
        self.open(id, Some(Retention::Pinned)).unwrap();
        self.table.sessions().get(&key(id)).unwrap().incarnation.clone()
    }

    /// Opens a pinned session and runs one turn of `tokens` prompt tokens in it.
    pub(super) fn pin_holding(&mut self, id: &str, tokens: u64) -> String {
        let incarnation = self.pin(id);
        let need = Need {
            prompt_tokens: tokens,
            answer_tokens: Some(1),
            is_exact: true,
            ..Need::default()
        };
        let turn = self.turn_that_needs(&delta(id), need).inside();
        self.end(&turn, finished(tokens, 1));
        incarnation
    }

    pub(super) fn close(&mut self, id: &str) -> Result<bool, Error> {
        let closed = self.table.close_session(self.now, &key(id));
        self.carry_out();
        closed
    }

    /// Lets the engine confirm every close that it was asked for.
    pub(super) fn engine_closes(&mut self) {
        for close in std::mem::take(&mut self.closes) {
            self.table.handle_close_result(self.now, &close.incarnation, CloseResult::Confirmed);
        }
        self.carry_out();
    }

    pub(super) fn wait(&mut self, time: Duration) {
        self.now += time;
        self.table.run_deadlines(self.now);
        self.carry_out();
    }

    pub(super) fn engine_restarts(&mut self, engine: EngineCapacity) {
        self.table.handle_engine_lost(self.now, engine);
        self.carry_out();
    }

    pub(super) fn is_open(&self, id: &str) -> bool {
        self.table.sessions().get(&key(id)).is_some()
    }
}

pub(super) fn claims(claim: &Claim, route_turns: RouteTurns) -> ClaimRequest {
    let request = claims_nothing(claim.key.principal(), route_turns);
    ClaimRequest { claim: Some(claim.clone()), ..request }
}

pub(super) fn claims_nothing(principal: &str, route_turns: RouteTurns) -> ClaimRequest {
    let principal = principal.into();
    let (is_hint, returns_soon) = (false, false);
    ClaimRequest {
        principal,
        claim: None,
        is_hint,
        returns_soon,
        requested_rank: None,
        route_turns,
    }
}

pub(super) fn opens(key: SessionKey, retention: impl Into<Option<Retention>>) -> OpenRequest {
    OpenRequest { key, retention: retention.into(), idle_max: None, requested_rank: None }
}
