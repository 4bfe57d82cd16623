//! What the table promises, case by case. Under random use, and against an engine that misbehaves,
//! it is driven by the simulation in the `tests` crate.

use std::time::Duration;

use proto::load::Retention;

use super::*;
use crate::guard::Guards;

const IDLE: Duration = Duration::from_secs(60);
const DEMOTE: Duration = Duration::from_secs(20);
const QUEUE: Duration = Duration::from_secs(10);
const STUCK: Duration = Duration::from_secs(30);

fn engine(ranks: usize) -> Engine {
    let capacity = Capacity {
        rows: 4,
        rows_reserve: 1,
        pool_tokens: 1440,
        pin_tokens_max: 1008,
        turns_max: 6,
    };
    let retentions = vec![Retention::Pinned, Retention::Tagged, Retention::None];
    Engine { ranks: vec![capacity; ranks], page_tokens: 16, context_tokens: 1200, retentions }
}

fn rules() -> Rules {
    Rules {
        prefix: "berth-a-1".into(),
        idle_max: IDLE,
        demote_idle: DEMOTE,
        turns_queued_per_session_max: 0,
        turns_queued_max: 4,
        queue_wait_max: QUEUE,
        stuck_after: STUCK,
        guards: Guards::default(),
    }
}

fn key(id: &str) -> SessionKey {
    SessionKey::new("p", id).unwrap()
}

fn usage(prompt_tokens: u64, completion_tokens: u64) -> Usage {
    Usage { prompt_tokens, completion_tokens, ..Usage::default() }
}

fn finished(prompt_tokens: u64, completion_tokens: u64) -> Outcome {
    Outcome::Finished(Some(usage(prompt_tokens, completion_tokens)))
}

fn pinned(id: &str) -> Claim {
    Claim { retention: Some(Retention::Pinned), ..Claim::of(&key(id)) }
}

fn delta(id: &str) -> Claim {
    Claim { delta: true, ..Claim::of(&key(id)) }
}

/// A turn that was let in.
#[derive(Debug, Clone, PartialEq)]
struct Inside {
    rid: String,
    turn: Turn,
}

impl Inside {
    fn incarnation(&self) -> &str {
        &self.turn.session.as_ref().unwrap().incarnation
    }
}

/// What became of a turn that asked to go in.
#[derive(Debug, PartialEq)]
enum Answer {
    In(Inside),
    Waits(String),
    No(Error),
}

impl Answer {
    fn inside(self) -> Inside {
        match self {
            Self::In(inside) => inside,
            other => panic!("the turn is not inside: {other:?}"),
        }
    }

    fn waits(self) -> String {
        match self {
            Self::Waits(rid) => rid,
            other => panic!("the turn doesn't wait: {other:?}"),
        }
    }

    fn error(self) -> Error {
        match self {
            Self::No(error) => error,
            other => panic!("the turn was not refused: {other:?}"),
        }
    }
}

/// A table, and an engine that opens what it is asked to and closes when the test says so.
struct Rig {
    table: Table,
    now: Instant,
    rids: u32,
    /// Closes that the engine was asked for.
    closes: Vec<Close>,
    demotes: Vec<String>,
    looks: Vec<Option<String>>,
    journal: Vec<Record>,
    /// Turns and opens that came out of the queue.
    admitted: HashMap<String, Turn>,
    refused: HashMap<String, Error>,
    /// Opens that wait for the test's word; none: each is a yes.
    opens: Option<Vec<String>>,
}

impl Rig {
    fn new() -> Self {
        Self::with(rules(), engine(1))
    }

    fn with(rules: Rules, engine: Engine) -> Self {
        Self {
            table: Table::new(rules, engine),
            now: tokio::time::Instant::now().into_std(),
            rids: 0,
            closes: vec![],
            demotes: vec![],
            looks: vec![],
            journal: vec![],
            admitted: HashMap::new(),
            refused: HashMap::new(),
            opens: None,
        }
    }

    fn carry_out(&mut self) {
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
                    Effect::Demote { incarnation, .. } => self.demotes.push(incarnation),
                    Effect::Look { rid, .. } => self.looks.push(rid),
                    Effect::Touched(_) | Effect::Happened(..) | Effect::Freed(_) => {}
                    Effect::Open { incarnation, .. } => match &mut self.opens {
                        Some(opens) => opens.push(incarnation),
                        None => self.table.opened(self.now, &incarnation, &Opened::Yes),
                    },
                }
            }
        }
    }

    fn rid(&mut self) -> String {
        self.rids += 1;
        format!("r{}", self.rids)
    }

    fn turn(&mut self, claim: &Claim) -> Answer {
        self.turn_that_needs(
            claim,
            Need { prompt_tokens: 8, answer_tokens: Some(8), exact: false, endless: false },
        )
    }

    fn turn_that_needs(&mut self, claim: &Claim, need: Need) -> Answer {
        let key = claim.key().unwrap();
        self.ask(Some((claim, &key)), None, Appends::Possible, need)
    }

    fn plain(&mut self, tokens: u64) -> Answer {
        let need =
            Need { prompt_tokens: tokens, answer_tokens: Some(0), exact: true, endless: false };
        self.ask(None, None, Appends::Never, need)
    }

    fn ask(
        &mut self,
        claim: Option<(&Claim, &SessionKey)>,
        rank: Option<u32>,
        appends: Appends,
        need: Need,
    ) -> Answer {
        let rid = self.rid();
        if let Err(error) = self.table.claim(self.now, &rid, claim, rank, appends) {
            return Answer::No(error);
        }
        self.table.admit(self.now, &rid, need);
        self.carry_out();
        self.answer(rid)
    }

    fn answer(&mut self, rid: String) -> Answer {
        match (self.admitted.remove(&rid), self.refused.remove(&rid)) {
            (Some(turn), None) => Answer::In(Inside { rid, turn }),
            (None, Some(error)) => Answer::No(error),
            (None, None) => Answer::Waits(rid),
            both => panic!("two answers: {both:?}"),
        }
    }

    fn end(&mut self, turn: &Inside, outcome: Outcome) {
        self.table.end(self.now, &turn.rid, outcome);
        self.carry_out();
    }

    fn open(&mut self, id: &str, retention: Option<Retention>) -> Result<(), Error> {
        self.open_for(id, retention, None)
    }

    fn open_for(
        &mut self,
        id: &str,
        retention: Option<Retention>,
        idle_max: Option<Duration>,
    ) -> Result<(), Error> {
        let rid = self.rid();
        self.table.open(self.now, &rid, &key(id), retention, idle_max, None)?;
        self.carry_out();
        self.refused.remove(&rid).map_or(Ok(()), Err)
    }

    fn pin(&mut self, id: &str) -> String {
        self.open(id, Some(Retention::Pinned)).unwrap();
        self.table.get(&key(id)).unwrap().incarnation.clone()
    }

    /// A pinned session that holds so many tokens.
    fn pin_holding(&mut self, id: &str, tokens: u64) -> String {
        let incarnation = self.pin(id);
        let need =
            Need { prompt_tokens: tokens, answer_tokens: Some(1), exact: true, endless: false };
        let turn = self.turn_that_needs(&delta(id), need).inside();
        self.end(&turn, finished(tokens, 1));
        incarnation
    }

    fn close(&mut self, id: &str) -> Result<bool, Error> {
        let closed = self.table.close(self.now, &key(id));
        self.carry_out();
        closed
    }

    /// The engine confirms every close it was asked for.
    fn engine_closes(&mut self) {
        for close in std::mem::take(&mut self.closes) {
            self.table.closed(self.now, &close.incarnation, Closed::Confirmed);
        }
        self.carry_out();
    }

    fn wait(&mut self, time: Duration) {
        self.now += time;
        self.table.on_time(self.now);
        self.carry_out();
    }

    fn engine_restarts(&mut self, engine: Engine) {
        self.table.engine_lost(self.now, engine);
        self.carry_out();
    }

    fn is_open(&self, id: &str) -> bool {
        self.table.get(&key(id)).is_some()
    }
}

fn is_short(error: &Error, of: &str) -> bool {
    matches!(error, Error::Short { what, .. } if *what == of)
}

#[test]
fn a_pinned_session_runs_one_turn_and_counts_its_tokens() {
    let mut rig = Rig::new();
    rig.pin("s");
    let turn = rig.turn(&delta("s")).inside();
    assert_eq!(rig.turn(&delta("s")).error(), Error::Busy);
    rig.end(&turn, finished(25, 6));
    let session = rig.table.get(&key("s")).unwrap();
    assert_eq!(session.resident_tokens, 30, "the last token's KV isn't computed yet");
    assert_eq!(rig.table.totals(0).pinned_tokens, 32, "a page is held whole");
    assert_eq!(rig.table.totals(0).rows_held, 1);
    rig.turn(&delta("s")).inside();
}

#[test]
fn a_second_turn_may_wait_where_the_settings_allow_it() {
    let mut rig = Rig::with(Rules { turns_queued_per_session_max: 1, ..rules() }, engine(1));
    rig.pin("s");
    let first = rig.turn(&delta("s")).inside();
    let second = rig.turn(&delta("s")).waits();
    assert_eq!(rig.turn(&delta("s")).error(), Error::Busy, "one may wait, not two");
    rig.end(&first, finished(20, 5));
    let second = rig.answer(second).inside();
    rig.end(&second, finished(40, 5));
    assert_eq!(rig.table.get(&key("s")).unwrap().turns, 2);
}

#[test]
fn a_turn_that_waited_is_not_appended_to_a_history_in_doubt() {
    let mut rig = Rig::with(Rules { turns_queued_per_session_max: 1, ..rules() }, engine(1));
    rig.pin("s");
    let first = rig.turn(&delta("s")).inside();
    let second = rig.turn(&delta("s")).waits();
    rig.end(&first, Outcome::Lost);
    assert_eq!(rig.answer(second).error(), Error::HistoryUnknown);
}

#[test]
fn a_close_waits_for_the_turn_and_shuts_the_door_meanwhile() {
    let mut rig = Rig::new();
    let incarnation = rig.pin("s");
    let turn = rig.turn(&delta("s")).inside();
    assert_eq!(rig.close("s"), Ok(true), "it waits");
    assert_eq!(rig.close("s"), Err(Error::Unknown), "two closes: one is too late");
    assert_eq!(rig.turn(&delta("s")).error(), Error::Unknown, "closing beats busy");
    assert_eq!(rig.open("s", None), Err(Error::Closing));
    assert_eq!(rig.closes, [], "the turn still runs");
    rig.end(&turn, finished(10, 1));
    let close = Close { incarnation: incarnation.clone(), rid: None, pinned: true, again: false };
    assert_eq!(rig.closes, [close]);
    assert_eq!(rig.table.totals(0).rows_held, 1, "held until the engine has confirmed");
    rig.engine_closes();
    assert_eq!(rig.table.totals(0), Totals::default());
    assert_ne!(rig.pin("s"), incarnation, "a new life has a new id");
}

#[test]
fn a_close_is_repeated_until_it_is_confirmed_and_then_the_engine_is_to_blame() {
    let mut rig = Rig::new();
    let incarnation = rig.pin("s");
    rig.close("s").unwrap();
    let first = rig.closes.pop().unwrap();
    rig.wait(IDLE);
    assert_eq!(rig.closes, [], "an answer is awaited");
    rig.table.closed(rig.now, &incarnation, Closed::NotYet);
    assert_eq!(rig.table.restart_required(rig.now), None, "its answer was only lost");
    rig.table.closed(rig.now, &incarnation, Closed::Kept);
    let due = rig.table.next_due().unwrap();
    rig.wait(due - rig.now);
    assert_eq!(rig.closes, [Close { again: true, ..first }]);
    assert_eq!(rig.table.totals(0).rows_held, 1);
    let reason = rig.table.restart_required(rig.now).expect("it took longer than it may");
    assert!(reason.contains("half closed"), "{reason}");
    rig.engine_closes();
    assert_eq!(rig.table.restart_required(rig.now), None);
}

#[test]
fn a_final_turn_closes_its_session_on_every_path() {
    let last = Claim { close: true, ..delta("s") };
    for refused in [false, true] {
        let mut rig = Rig::new();
        rig.pin("s");
        let prompt_tokens = if refused { 5000 } else { 8 };
        let need = Need { prompt_tokens, answer_tokens: Some(8), exact: true, endless: false };
        match rig.turn_that_needs(&last, need) {
            Answer::In(turn) => {
                assert_eq!(rig.turn(&delta("s")).error(), Error::Unknown, "the door is shut");
                rig.end(&turn, finished(8, 8));
            }
            other => drop(other.error()),
        }
        assert!(!rig.is_open("s"));
        assert_eq!(rig.closes.len(), 1);
    }
}

#[test]
fn rows_in_reserve_are_never_pinned() {
    let mut rig = Rig::new();
    for id in ["a", "b", "c"] {
        rig.pin(id);
    }
    let refused = rig.open("d", Some(Retention::Pinned)).unwrap_err();
    assert!(is_short(&refused, "rows"), "{refused}");
    rig.turn(&Claim::of(&key("d"))).inside();
    assert_eq!(rig.close("a"), Ok(false));
    let waiting = rig.turn(&Claim { open: true, ..delta("e") }).waits();
    rig.engine_closes();
    rig.answer(waiting).inside();
}

#[test]
fn each_session_holds_pages_of_its_own() {
    let mut rig = Rig::new();
    for (id, prompt) in [("a", 42), ("b", 49), ("c", 56)] {
        rig.pin_holding(id, prompt);
    }
    assert_eq!(rig.table.totals(0).pinned_tokens, 48 + 64 + 64, "42, 49 and 56 tokens");
}

#[test]
fn growth_is_reserved_before_the_turn_and_given_back_after_it() {
    let mut rig = Rig::new();
    rig.pin("a");
    rig.pin("b");
    let large = Need { prompt_tokens: 500, answer_tokens: Some(300), exact: true, endless: false };
    let turn = rig.turn_that_needs(&delta("a"), large).inside();
    assert_eq!(turn.turn.growth_tokens, Some(800));
    assert_eq!(rig.table.totals(0).pinned_tokens, 800);
    let refused = rig.turn_that_needs(&delta("b"), large).error();
    assert!(is_short(&refused, "pin_tokens"), "{refused}");
    rig.end(&turn, finished(500, 3));
    assert_eq!(rig.table.totals(0).pinned_tokens, 512);
    let small = Need { prompt_tokens: 400, answer_tokens: Some(90), exact: true, endless: false };
    rig.turn_that_needs(&delta("b"), small).inside();
}

#[test]
fn what_no_budget_holds_is_refused_for_good() {
    let mut rig = Rig::new();
    rig.pin("s");
    let endless = Need { prompt_tokens: 8, answer_tokens: None, exact: true, endless: false };
    let refused = rig.turn_that_needs(&delta("s"), endless).error();
    assert_eq!(refused, Error::TooLarge { need: 1200, max: 1008 }, "as far as the context");
}

#[test]
fn an_aborted_turn_leaves_its_history_to_be_computed_again() {
    let mut rig = Rig::new();
    rig.pin_holding("s", 600);
    let turn = rig.turn(&delta("s")).inside();
    rig.end(&turn, Outcome::Aborted);
    assert_eq!(rig.table.totals(0).pinned_tokens, 0, "the KV went to the tree");
    assert_eq!(rig.table.totals(0).rows_held, 0);
    let session = rig.table.get(&key("s")).unwrap();
    assert_eq!((session.history_tokens, session.turns), (601, 1));
    assert_eq!(session.state(), proto::load::SessionState::Demoted);
    rig.pin_holding("other", 400);
    let refused = rig.turn(&delta("s")).error();
    assert!(is_short(&refused, "pin_tokens"), "its 601 tokens come back with it: {refused}");
    rig.close("other").unwrap();
    let waiting = rig.turn(&delta("s")).waits();
    rig.engine_closes();
    rig.answer(waiting).inside();
}

#[test]
fn a_session_without_kv_takes_no_row_with_its_close() {
    let mut rig = Rig::new();
    rig.pin_holding("aborted", 20);
    let turn = rig.turn(&delta("aborted")).inside();
    rig.end(&turn, Outcome::Aborted);
    for id in ["a", "b", "c"] {
        rig.pin(id);
    }
    assert_eq!(rig.close("aborted"), Ok(false));
    assert_eq!(rig.table.totals(0).rows_held, 3);
    assert_eq!(rig.closes.len(), 1, "its history leaves the engine all the same");
}

#[test]
fn idle_sessions_give_way_the_least_worth_keeping_first() {
    let mut rig = Rig::new();
    rig.pin_holding("old", 300);
    rig.wait(DEMOTE);
    rig.pin_holding("older than nothing", 300);
    rig.wait(DEMOTE);
    let need = Need { prompt_tokens: 500, answer_tokens: Some(1), exact: true, endless: false };
    rig.pin("new");
    let waiting = rig.turn_that_needs(&delta("new"), need).waits();
    assert_eq!(rig.closes.len(), 1, "one is enough");
    rig.engine_closes();
    rig.answer(waiting).inside();
    assert_eq!(rig.turn(&delta("old")).error(), Error::Reclaimed);
    rig.turn(&delta("older than nothing")).inside();
}

#[test]
fn with_the_shim_a_session_gives_up_its_kv_and_keeps_its_history() {
    let mut rig = Rig::new();
    rig.table.shim_up(0, true);
    let idle = rig.pin_holding("idle", 600);
    rig.wait(DEMOTE);
    rig.pin("new");
    let need = Need { prompt_tokens: 500, answer_tokens: Some(1), exact: true, endless: false };
    let waiting = rig.turn_that_needs(&delta("new"), need).waits();
    assert_eq!((&rig.demotes, &rig.closes), (&vec![idle.clone()], &vec![]));
    rig.table.demoted(rig.now, &idle, true);
    rig.carry_out();
    let turn = rig.answer(waiting).inside();
    rig.end(&turn, finished(500, 1));
    assert_eq!(rig.table.get(&key("idle")).unwrap().history_tokens, 601);
    assert!(is_short(&rig.turn(&delta("idle")).error(), "pin_tokens"), "its KV comes back too");
    rig.wait(DEMOTE);
    let waiting = rig.turn(&delta("idle")).waits();
    let newer = rig.demotes.pop().unwrap();
    rig.table.demoted(rig.now, &newer, true);
    rig.carry_out();
    rig.answer(waiting).inside();
}

#[test]
fn a_session_in_use_never_gives_way() {
    let mut rig = Rig::new();
    rig.pin("busy");
    let need = Need { prompt_tokens: 800, answer_tokens: Some(1), exact: true, endless: false };
    let busy = rig.turn_that_needs(&delta("busy"), need).inside();
    rig.wait(2 * DEMOTE);
    rig.pin("new");
    let refused = rig.turn_that_needs(&delta("new"), need).error();
    assert!(is_short(&refused, "pin_tokens"), "{refused}");
    rig.end(&busy, finished(800, 1));
    let refused = rig.turn_that_needs(&delta("new"), need).error();
    assert!(is_short(&refused, "pin_tokens"), "it has only just ended: {refused}");
}

#[test]
fn a_large_plain_turn_waits_outside_for_room_that_sessions_hold() {
    let mut rig = Rig::new();
    rig.pin_holding("s", 600);
    rig.plain(400).inside();
    let large = rig.plain(1000).waits();
    rig.close("s").unwrap();
    rig.engine_closes();
    rig.answer(large).inside();
    rig.pin("t");
    let need = Need { prompt_tokens: 500, answer_tokens: Some(1), exact: true, endless: false };
    let refused = rig.turn_that_needs(&delta("t"), need).error();
    assert!(is_short(&refused, "pin_tokens"), "the large turn has the room: {refused}");
}

#[test]
fn the_queue_is_in_order_bounded_and_takes_no_longer_than_it_may() {
    let mut rig = Rig::new();
    let inside: Vec<Inside> = (0..6).map(|_| rig.plain(1).inside()).collect();
    let first = rig.plain(1).waits();
    rig.wait(QUEUE / 2);
    let others: Vec<String> = (0..3).map(|_| rig.plain(1).waits()).collect();
    let refused = rig.plain(1).error();
    assert!(is_short(&refused, "queue_places"), "{refused}");
    assert_eq!(rig.table.totals(0).turns_queued, 4);
    rig.end(&inside[0], Outcome::Finished(None));
    rig.answer(first).inside();
    rig.wait(QUEUE - Duration::from_millis(1));
    assert!(rig.refused.is_empty());
    rig.wait(Duration::from_millis(1));
    assert_eq!(rig.refused.len(), 3);
    assert!(rig.refused.values().all(|error| is_short(error, "queue_time")));
    assert!(others.iter().all(|rid| rig.refused.contains_key(rid)));
    assert_eq!(rig.table.totals(0).turns_queued, 0);
}

#[test]
fn prompts_that_the_engine_has_not_shown_are_counted() {
    let mut rig = Rig::new();
    let before = rig.now;
    rig.wait(Duration::from_millis(1));
    let inside: Vec<Inside> = (0..6).map(|_| rig.plain(20).inside()).collect();
    let waiting = rig.plain(40).waits();
    assert_eq!(rig.table.unseen_tokens(0, before), 160);
    assert_eq!(rig.table.unseen_tokens(0, rig.now), 40, "the engine was looked at since");
    rig.end(&inside[0], Outcome::Finished(None));
    rig.answer(waiting).inside();
    assert_eq!(rig.table.unseen_tokens(0, rig.now), 0);
}

#[test]
fn of_a_session_only_what_is_not_there_has_to_be_computed() {
    let mut rig = Rig::new();
    let before = rig.now;
    rig.pin_holding("s", 200);
    rig.wait(Duration::from_millis(1));
    // The text's length is a bound in bytes; a history's last token never had KV.
    let need = Need { prompt_tokens: 80, answer_tokens: Some(1), exact: false, endless: false };
    rig.turn_that_needs(&delta("s"), need).inside();
    assert_eq!(rig.table.unseen_tokens(0, before), 21);
}

#[test]
fn a_turn_given_up_while_it_waits_leaves_nothing() {
    let mut rig = Rig::new();
    let inside: Vec<Inside> = (0..6).map(|_| rig.plain(1).inside()).collect();
    let waits = rig.turn(&Claim::of(&key("s"))).waits();
    rig.table.end(rig.now, &waits, Outcome::Refused);
    inside.iter().for_each(|turn| rig.end(turn, Outcome::Finished(None)));
    assert_eq!(rig.table.totals(0), Totals { sessions: 1, ..Totals::default() });
    assert_eq!(rig.table.get(&key("s")).unwrap().waiting, 0);
}

#[test]
fn nothing_is_appended_to_a_history_in_doubt() {
    let retracted = Usage { retractions: 1, ..usage(33, 5) };
    let ends = [
        ("nobody saw the end", Outcome::Lost),
        ("the client did not hear it", Outcome::Unheard(Some(usage(33, 5)))),
        ("the history shrank", finished(5, 1)),
        ("something else was appended", finished(50, 1)),
        ("retracted", Outcome::Finished(Some(retracted))),
    ];
    for (why, end) in ends {
        let mut rig = Rig::new();
        let incarnation = rig.pin_holding("s", 24);
        let need = Need { prompt_tokens: 8, answer_tokens: Some(8), exact: true, endless: false };
        let turn = rig.turn_that_needs(&delta("s"), need).inside();
        rig.end(&turn, end);
        assert_eq!(rig.turn(&delta("s")).error(), Error::HistoryUnknown, "{why}");
        let close = rig.closes.pop().expect("what it held is given back");
        assert_eq!(close.incarnation, incarnation, "{why}");
        let inside = (end == Outcome::Lost).then(|| turn.rid.clone());
        assert_eq!(close.rid, inside, "one that may still run is aborted first: {why}");
        assert_ne!(rig.pin("s"), incarnation, "a new incarnation is the way out: {why}");
    }
}

#[test]
fn the_shim_settles_what_only_the_engine_knows() {
    let seen = |id: &str, history_tokens, in_flight| Seen {
        id: id.into(),
        row: true,
        allocated_tokens: history_tokens,
        history_tokens,
        in_flight,
        full: true,
    };
    for (history_tokens, good) in [(25, true), (38, false)] {
        let mut rig = Rig::new();
        rig.table.shim_up(0, true);
        let incarnation = rig.pin_holding("s", 24);
        let turn = rig.turn(&delta("s")).inside();
        rig.end(&turn, Outcome::Lost);
        let next = rig.turn(&delta("s")).waits();
        rig.table.seen(rig.now, 0, &seen(&incarnation, 25, false));
        rig.carry_out();
        assert!(!rig.admitted.contains_key(&next), "what was true before the doubt proves nothing");
        assert_eq!(rig.looks, [Some(turn.rid.clone())], "the lost turn is aborted first");
        rig.table.looking(0);
        rig.table.seen(rig.now, 0, &seen(&incarnation, 25, true));
        rig.carry_out();
        assert!(rig.refused.is_empty(), "the lost turn may still commit");
        assert_eq!(rig.looks.pop(), Some(None), "the shim is asked again");
        rig.table.looking(0);
        rig.table.seen(rig.now, 0, &seen(&incarnation, history_tokens, false));
        rig.carry_out();
        match good {
            true => drop(rig.answer(next).inside()),
            false => assert_eq!(rig.answer(next).error(), Error::HistoryUnknown),
        }
    }
}

#[test]
fn a_doubt_that_nobody_settles_is_a_no() {
    let mut rig = Rig::new();
    rig.table.shim_up(0, true);
    rig.pin_holding("s", 24);
    let turn = rig.turn(&delta("s")).inside();
    rig.end(&turn, Outcome::Lost);
    let next = rig.turn(&delta("s")).waits();
    rig.wait(Duration::from_secs(5));
    assert_eq!(rig.answer(next).error(), Error::HistoryUnknown);
}

#[test]
fn a_refused_turn_changes_nothing() {
    let mut rig = Rig::new();
    rig.pin_holding("s", 24);
    let turn = rig.turn(&delta("s")).inside();
    rig.end(&turn, Outcome::Refused);
    assert_eq!(rig.table.get(&key("s")).unwrap().resident_tokens, 24);
    assert_eq!(rig.table.totals(0).pinned_tokens, 32);
    rig.turn(&delta("s")).inside();
}

#[test]
fn a_whole_history_never_reaches_a_pinned_session() {
    let mut rig = Rig::new();
    let need = Need::default();
    let first = rig.turn(&pinned("s")).inside();
    rig.end(&first, finished(20, 5));
    assert_eq!(rig.turn(&pinned("s")).error(), Error::WholeHistory);
    let on_chat = rig.ask(Some((&delta("s"), &key("s"))), None, Appends::Never, need);
    assert_eq!(on_chat.error(), Error::WholeHistory, "chat would drop the session silently");
    let on_chat = rig.ask(Some((&pinned("new"), &key("new"))), None, Appends::Never, need);
    assert_eq!(on_chat.error(), Error::WholeHistory);
    assert!(!rig.is_open("new"), "a refused turn opens nothing");
}

#[test]
fn a_delta_may_open_its_session() {
    let mut rig = Rig::new();
    let turn = rig.turn(&Claim { open: true, ..delta("s") }).inside();
    assert_eq!(turn.turn.session.unwrap().retention, Retention::Pinned);
    let tagged = Claim { retention: Some(Retention::Tagged), ..delta("t") };
    let refused = rig.turn(&Claim { open: true, ..tagged }).error();
    assert_eq!(refused, Error::DeltaNeedsPinned(Retention::Tagged));
    let need = Need { prompt_tokens: 5000, answer_tokens: None, exact: true, endless: false };
    let refused = rig.turn_that_needs(&Claim { open: true, ..delta("u") }, need).error();
    assert!(matches!(refused, Error::TooLarge { .. }), "{refused}");
    assert!(!rig.is_open("t"), "a refused turn opens nothing");
}

#[test]
fn a_delta_needs_a_pinned_history() {
    let mut rig = Rig::new();
    assert_eq!(rig.turn(&delta("s")).error(), Error::Unknown);
    let turn = rig.turn(&Claim::of(&key("s"))).inside();
    rig.end(&turn, finished(20, 5));
    assert_eq!(rig.turn(&delta("s")).error(), Error::DeltaNeedsPinned(Retention::Tagged));
}

#[test]
fn inferred_sessions_overlap_and_opened_ones_do_not() {
    let mut rig = Rig::new();
    let inferred = Claim::of(&key("s"));
    let turns = [(); 2].map(|()| rig.turn(&inferred).inside());
    turns.iter().for_each(|turn| rig.end(turn, finished(20, 5)));
    rig.open("o", None).unwrap();
    let _running = rig.turn(&Claim::of(&key("o"))).inside();
    assert_eq!(rig.turn(&Claim::of(&key("o"))).error(), Error::Busy);
}

#[test]
fn a_full_table_forgets_the_longest_idle_inferred_session() {
    let mut rig = Rig::new();
    rig.table.sessions_max = 8;
    rig.open("opened", None).unwrap();
    for number in 1..rig.table.sessions_max {
        rig.wait(Duration::from_millis(1));
        let turn = rig.turn(&Claim::of(&key(&number.to_string()))).inside();
        rig.end(&turn, Outcome::Finished(None));
    }
    rig.wait(IDLE / 2);
    rig.turn(&Claim::of(&key("new"))).inside();
    assert!(!rig.is_open("1"), "it was idle longest");
    assert!(rig.is_open("opened"), "its client asked for it");
    assert_eq!(rig.closes.len(), 1);
}

#[test]
fn an_explicit_open_takes_an_inferred_session_over() {
    let mut rig = Rig::new();
    let turn = rig.turn(&Claim::of(&key("s"))).inside();
    rig.end(&turn, finished(20, 5));
    rig.open_for("s", None, Some(IDLE / 2)).unwrap();
    let _running = rig.turn(&Claim::of(&key("s"))).inside();
    assert_eq!(rig.turn(&Claim::of(&key("s"))).error(), Error::Busy);
    let other = rig.open("s", Some(Retention::Pinned));
    assert_eq!(other, Err(Error::OpenOtherwise(Retention::Tagged)));
    let mut rig = Rig::new();
    rig.open_for("s", None, Some(IDLE / 2)).unwrap();
    rig.wait(IDLE / 2);
    assert!(!rig.is_open("s"), "its own idle time counts");
}

#[test]
fn a_session_closed_while_it_opens_waits_for_the_engine_alone() {
    let mut rig = Rig::new();
    rig.opens = Some(vec![]);
    rig.open("s", Some(Retention::Pinned)).unwrap();
    assert_eq!(rig.close("s"), Ok(true));
    let incarnation = rig.opens.as_mut().unwrap().pop().unwrap();
    assert_eq!(rig.table.next_due().map(|due| due > rig.now), Some(true), "no busy waiting");
    rig.table.opened(rig.now, &incarnation, &Opened::Yes);
    rig.carry_out();
    assert_eq!(rig.closes, [Close { incarnation, rid: None, pinned: true, again: false }]);
}

#[test]
fn an_open_that_may_have_happened_is_closed() {
    for (opened, closes) in
        [(Opened::Unknown("lost".into()), 1), (Opened::No("the engine says no".into()), 0)]
    {
        let mut rig = Rig::new();
        rig.opens = Some(vec![]);
        let waiting = rig.turn(&Claim { open: true, ..delta("s") }).waits();
        let incarnation = rig.opens.as_mut().unwrap().pop().unwrap();
        rig.table.opened(rig.now, &incarnation, &opened);
        rig.carry_out();
        assert!(matches!(rig.answer(waiting).error(), Error::OpenFailed(_)));
        assert_eq!(rig.closes.len(), closes, "{opened:?}");
        rig.engine_closes();
        let last = rig.journal.last().unwrap();
        assert_eq!(last, &Record::Closed { incarnation }, "the next agent has nothing to do");
    }
}

#[test]
fn nothing_reaches_the_engine_before_the_journal() {
    let mut rig = Rig::new();
    rig.table.open(rig.now, "r", &key("s"), Some(Retention::Pinned), None, None).unwrap();
    let effects = rig.table.take_effects();
    let at = |find: fn(&Effect) -> bool| effects.iter().position(find).unwrap();
    let journal = at(|effect| matches!(effect, Effect::Journal(Record::Opening { .. })));
    assert!(journal < at(|effect| matches!(effect, Effect::Open { .. })), "{effects:?}");
}

#[test]
fn an_engine_that_seems_gone_leaves_its_closes_in_the_journal() {
    let mut rig = Rig::new();
    rig.open("s", Some(Retention::Pinned)).unwrap();
    assert_eq!(rig.close("s"), Ok(false));
    rig.engine_restarts(engine(1));
    let closed = |record: &&Record| matches!(record, Record::Closed { .. });
    assert_eq!(rig.journal.iter().find(closed), None, "it may come back as the same process");
}

#[test]
fn what_an_earlier_agent_left_is_closed_before_anything_is_pinned() {
    let mut rig = Rig::new();
    rig.table.inherit(rig.now, "berth-a-0-7".into(), 0, Some("r".into()));
    rig.carry_out();
    let close = Close {
        incarnation: "berth-a-0-7".into(),
        rid: Some("r".into()),
        pinned: true,
        again: false,
    };
    assert_eq!(rig.closes, [close]);
    let waiting = rig.turn(&Claim { open: true, ..delta("s") }).waits();
    rig.plain(8).inside();
    rig.engine_closes();
    rig.answer(waiting).inside();
}

#[test]
fn sessions_of_others_count_as_pinned() {
    let mut rig = Rig::new();
    let load = Load { waiting: 0, used_tokens: 800 };
    rig.table.sampled(rig.now, 0, load);
    rig.wait(Duration::from_secs(1));
    rig.table.sampled(rig.now, 0, load);
    assert_eq!(rig.table.totals(0).foreign_tokens, 800);
    rig.pin("s");
    let need = Need { prompt_tokens: 300, answer_tokens: Some(1), exact: true, endless: false };
    let refused = rig.turn_that_needs(&delta("s"), need).error();
    assert!(is_short(&refused, "pin_tokens"), "{refused}");
    rig.table.sampled(rig.now, 0, Load { waiting: 0, used_tokens: 0 });
    rig.turn_that_needs(&delta("s"), need).inside();
}

#[test]
fn the_shim_names_sessions_of_others() {
    let mut rig = Rig::new();
    rig.table.shim_up(0, false);
    let foreign = Seen {
        id: "someone".into(),
        row: true,
        allocated_tokens: 90,
        history_tokens: 91,
        in_flight: false,
        full: false,
    };
    rig.table.seen(rig.now, 0, &foreign);
    let totals = rig.table.totals(0);
    assert_eq!((totals.foreign_rows, totals.foreign_tokens, totals.rows_held), (1, 96, 1));
    rig.pin("a");
    rig.pin("b");
    assert!(is_short(&rig.open("c", Some(Retention::Pinned)).unwrap_err(), "rows"));
    rig.table.vanished(rig.now, 0, "someone");
    rig.pin("c");
}

#[test]
fn an_engine_without_the_mode_says_what_it_offers() {
    let retentions = vec![Retention::None];
    let mut rig = Rig::with(rules(), Engine { retentions, ..engine(1) });
    let refused = rig.open("s", Some(Retention::Pinned)).unwrap_err();
    assert!(refused.to_string().contains("offers none"), "{refused}");
    let turn = rig.turn(&Claim::of(&key("s"))).inside();
    assert_eq!(turn.turn.session.unwrap().retention, Retention::None, "auto falls back");
}

#[test]
fn idle_time_counts_from_the_end_of_a_turn() {
    let mut rig = Rig::new();
    let turn = rig.turn(&Claim::of(&key("s"))).inside();
    rig.wait(10 * IDLE);
    assert!(rig.is_open("s"), "a running session never expires");
    rig.end(&turn, finished(20, 5));
    rig.wait(IDLE - Duration::from_millis(1));
    assert!(rig.is_open("s"));
    rig.wait(Duration::from_millis(1));
    assert!(!rig.is_open("s"));
}

#[test]
fn no_idle_time_is_too_long() {
    let mut rig = Rig::new();
    let claim = Claim { idle_ms_max: Some(u64::MAX), ..Claim::of(&key("s")) };
    let turn = rig.turn(&claim).inside();
    rig.end(&turn, finished(20, 5));
    rig.open_for("o", None, Some(Duration::MAX)).unwrap();
    rig.wait(1000 * IDLE);
    assert!(rig.is_open("s") && rig.is_open("o"));
}

#[test]
fn an_engine_that_comes_back_smaller_keeps_no_session_on_a_rank_it_lost() {
    let mut rig = Rig::with(rules(), engine(2));
    let claim = Claim::of(&key("s"));
    let on_second = Some((&claim, &key("s")));
    let need = Need::default();
    let turn = rig.ask(on_second, Some(1), Appends::Possible, need).inside();
    rig.engine_restarts(engine(1));
    rig.end(&turn, Outcome::Lost);
    let next = rig.ask(on_second, None, Appends::Possible, need).inside();
    assert_eq!(next.turn.dp_rank, 0, "it starts anew where there is a rank");
}

#[test]
fn an_engine_restart_loses_pinned_sessions_and_forgives_others() {
    let mut rig = Rig::new();
    rig.pin_holding("p", 20);
    rig.pin_holding("closing", 20);
    let turn = rig.turn(&Claim::of(&key("t"))).inside();
    let before = turn.incarnation().to_owned();
    rig.end(&turn, finished(20, 5));
    rig.close("closing").unwrap();
    rig.closes.clear();
    rig.engine_restarts(engine(1));
    let totals = rig.table.totals(0);
    let held = (totals.rows_held, totals.pinned_tokens, totals.estimate_tokens);
    assert_eq!(held, (0, 0, 0), "no ghost is left in the ledger");
    assert_eq!(rig.turn(&delta("p")).error(), Error::Lost);
    assert_ne!(rig.turn(&Claim::of(&key("t"))).inside().incarnation(), before);
    assert_eq!(rig.close("p"), Ok(false));
    assert_eq!(rig.closes, [], "the engine has nothing to close");
    assert!(!rig.is_open("p"));
}

#[test]
fn a_lost_session_opens_anew_with_a_whole_history() {
    let mut rig = Rig::new();
    let before = rig.pin_holding("p", 20);
    rig.engine_restarts(engine(1));
    let turn = rig.turn(&Claim { open: true, ..pinned("p") }).inside();
    assert_ne!(turn.incarnation(), before);
}

#[test]
fn a_turn_that_means_to_be_the_first_never_follows_another() {
    let mut rig = Rig::new();
    let opening = Claim { open: true, ..delta("s") };
    let first = rig.turn(&opening).inside();
    rig.end(&first, Outcome::Aborted);
    let first = rig.turn(&opening).inside();
    rig.end(&first, finished(8, 8));
    assert_eq!(rig.turn(&opening).error(), Error::HasHistory, "a retry would be appended twice");
    rig.engine_restarts(engine(1));
    assert_eq!(rig.turn(&opening).error(), Error::Lost, "its history is gone, and it may mean it");
}

#[test]
fn a_drain_refuses_what_waits_and_closes_what_is_open() {
    let mut rig = Rig::new();
    rig.pin_holding("idle", 20);
    let inside: Vec<Inside> = (0..6).map(|_| rig.plain(1).inside()).collect();
    let waits = rig.plain(1).waits();
    rig.table.drain(rig.now);
    rig.carry_out();
    assert_eq!(rig.answer(waits).error(), Error::Stopping);
    inside.iter().for_each(|turn| rig.end(turn, Outcome::Finished(None)));
    rig.engine_closes();
    assert_eq!(rig.table.totals(0), Totals::default());
    assert_eq!(rig.table.pending(), 0);
}

#[test]
fn the_longer_a_session_is_idle_the_less_likely_it_resumes_soon() {
    use super::reclaim::resumes_soon;
    let chances: Vec<u64> =
        [0, 10, 60, 300, 600, 3600, 86_400].map(|s| resumes_soon(Duration::from_secs(s))).into();
    assert!(chances.is_sorted_by(|before, after| before > after), "{chances:?}");
    assert_eq!(chances[0], 870, "13 % of the gaps are longer than two minutes");
}

const SMALL: Need = Need { prompt_tokens: 8, answer_tokens: Some(8), exact: true, endless: false };

fn claim(rig: &mut Rig, claim: &Claim) -> String {
    let rid = rig.rid();
    let key = claim.key().unwrap();
    rig.table.claim(rig.now, &rid, Some((claim, &key)), None, Appends::Possible).unwrap();
    rid
}

#[test]
fn turns_of_one_session_run_in_the_order_they_were_claimed() {
    let mut rig = Rig::with(Rules { turns_queued_per_session_max: 1, ..rules() }, engine(1));
    rig.pin("s");
    let first = claim(&mut rig, &delta("s"));
    let second = claim(&mut rig, &delta("s"));
    // The first one's body is still being read.
    rig.table.admit(rig.now, &second, SMALL);
    rig.carry_out();
    rig.table.admit(rig.now, &first, SMALL);
    rig.carry_out();
    assert!(rig.admitted.contains_key(&first), "the later delta overtook the earlier one");
}

#[test]
fn a_delta_that_waited_is_not_appended_where_the_one_before_left_nothing() {
    let mut bad = vec![];
    for outcome in [Outcome::Refused, Outcome::Aborted] {
        let mut rig = Rig::with(Rules { turns_queued_per_session_max: 1, ..rules() }, engine(1));
        rig.pin("s");
        let first = rig.turn(&delta("s")).inside();
        let second = rig.turn(&delta("s")).waits();
        rig.end(&first, outcome);
        if matches!(rig.answer(second), Answer::In(_)) {
            bad.push(outcome);
        }
    }
    assert_eq!(bad, [], "it was written for a history with the turn before in it");
}

#[test]
fn a_burst_is_not_held_back_while_the_engine_has_rows() {
    let mut wide = engine(1);
    wide.ranks[0] = Capacity { rows: 256, turns_max: 512, pool_tokens: 100_000, ..wide.ranks[0] };
    let mut rig = Rig::with(Rules { turns_queued_max: 1024, ..rules() }, wide);
    rig.table.sampled(rig.now, 0, Load { waiting: 0, used_tokens: 0 });
    let held = (0..64).filter(|_| matches!(rig.plain(16), Answer::Waits(_))).count();
    assert_eq!(held, 0, "of 64 turns for an idle engine of 256 rows");
}

#[test]
fn what_was_estimated_of_others_is_over_when_a_shim_names_them() {
    let mut rig = Rig::new();
    rig.table.sampled(rig.now, 0, Load { waiting: 0, used_tokens: 500 });
    rig.now += Duration::from_secs(1);
    rig.table.sampled(rig.now, 0, Load { waiting: 0, used_tokens: 500 });
    assert_eq!(rig.table.totals(0).foreign_tokens, 500);
    rig.table.shim_up(0, true);
    rig.table.seen_all(rig.now, 0, &[]);
    rig.now += Duration::from_secs(1);
    rig.table.sampled(rig.now, 0, Load { waiting: 0, used_tokens: 0 });
    assert_eq!(rig.table.totals(0).foreign_tokens, 0);
}

#[test]
fn a_demotion_whose_answer_was_lost_is_settled() {
    let mut rig = Rig::new();
    rig.table.shim_up(0, true);
    let id = rig.pin_holding("a", 20);
    rig.pin("b");
    rig.pin("c");
    rig.wait(DEMOTE);
    rig.now += Duration::from_millis(1);
    let _ = rig.table.open(rig.now, "o", &key("d"), Some(Retention::Pinned), None, None);
    rig.carry_out();

    let id = rig.demotes.first().cloned().unwrap_or(id);
    let who = rig.table.by_incarnation[&id].clone();
    // Its event was lost; a full table follows.
    let seen = Seen {
        id,
        row: false,
        allocated_tokens: 0,
        history_tokens: 21,
        in_flight: false,
        full: true,
    };
    rig.table.seen(rig.now, 0, &seen);
    assert_eq!(rig.table.get(&who).unwrap().phase, Phase::Demoted);
}

#[test]
fn opens_are_bounded_too() {
    let mut rig = Rig::new();
    rig.opens = Some(vec![]);
    let refused = (0..100).filter(|_| rig.open("s", Some(Retention::Pinned)).is_err()).count();
    assert!(refused > 0, "{} wait, 4 may", rig.table.queue.len());
}

#[test]
fn a_close_asked_twice_is_counted_once() {
    let mut rig = Rig::new();
    rig.table.inherit(rig.now, "berth-a-0-1".into(), 0, None);
    rig.table.opened(rig.now, "berth-a-0-1", &Opened::Unknown("lost".into()));
    rig.carry_out();
    rig.engine_closes();
    assert_eq!(rig.table.totals(0), Totals::default());
}

#[test]
fn an_engine_restart_is_told_once() {
    let mut rig = Rig::new();
    rig.pin("s");
    let mut told = 0;
    for _ in 0..2 {
        rig.table.engine_lost(rig.now, engine(1));
        let lost = |one: &&Effect| matches!(one, Effect::Happened(_, Event::EngineLost));
        told += rig.table.take_effects().iter().filter(lost).count();
    }
    assert_eq!(told, 1);
}

#[test]
fn a_session_that_someone_else_closed_is_not_appended_to() {
    let mut rig = Rig::new();
    rig.table.shim_up(0, true);
    let id = rig.pin_holding("s", 20);
    rig.table.vanished(rig.now, 0, &id);
    rig.carry_out();
    assert_eq!(rig.table.totals(0).rows_held, 0);
    assert!(!matches!(rig.turn(&delta("s")), Answer::In(_)));
}

#[test]
fn a_refused_turn_gives_the_row_back_that_it_would_have_taken() {
    let mut rig = Rig::new();
    rig.pin_holding("s", 20);
    let turn = rig.turn(&delta("s")).inside();
    rig.end(&turn, Outcome::Aborted);
    assert_eq!(rig.table.totals(0).rows_held, 0);
    let turn = rig.turn(&delta("s")).inside();
    rig.end(&turn, Outcome::Refused);
    assert_eq!(rig.table.totals(0).rows_held, 0);
}

#[test]
fn claims_spread_over_ranks_before_their_bodies_are_there() {
    let mut rig = Rig::with(rules(), engine(2));
    for n in 0..10 {
        let claim_ = Claim::of(&key(&format!("s{n}")));
        claim(&mut rig, &claim_);
    }
    let on_0 = rig.table.iter().filter(|(_, one)| one.dp_rank == 0).count();
    assert_eq!(on_0, 5);
}

#[test]
fn a_turn_that_opens_its_session_is_the_last_beside_another() {
    let mut rig = Rig::new();
    rig.turn(&Claim::of(&key("s"))).inside();
    let open = Claim { open: true, ..Claim::of(&key("s")) };
    rig.turn(&open).inside();
    let third = rig.turn(&Claim::of(&key("s")));
    assert!(!matches!(third, Answer::In(_)), "opened, and three turns inside");
}

#[test]
fn a_large_turn_that_waits_is_not_overtaken_by_growing_pins() {
    let mut rig = Rig::new();
    rig.pin_holding("a", 400);
    rig.pin_holding("b", 200);
    let _large = rig.plain(1000).waits();
    let need = Need { prompt_tokens: 300, answer_tokens: Some(1), exact: true, endless: false };
    let newcomer = rig.turn_that_needs(&Claim { open: true, ..delta("c") }, need);
    assert!(!matches!(newcomer, Answer::In(_)), "each newcomer makes the large one wait longer");
}

#[test]
fn a_chat_without_a_limit_goes_where_the_engine_would_run_it() {
    let mut real = engine(1);
    real.context_tokens = 131_072;
    real.ranks[0] = Capacity {
        rows: 256,
        rows_reserve: 1,
        pool_tokens: 400_000,
        pin_tokens_max: 280_000,
        turns_max: 512,
    };
    let mut rig = Rig::with(rules(), real);
    rig.pin("a");
    for id in ["a", "b", "c"] {
        let need = Need { prompt_tokens: 92_000, ..SMALL };
        let turn = rig.turn_that_needs(&Claim { open: id != "a", ..delta(id) }, need).inside();
        rig.end(&turn, finished(92_000, 1));
    }
    // 276,000 pinned, 124,000 free; SGLang wants 1,000 + min(rest, 4,096).
    let chat = Need { prompt_tokens: 1000, answer_tokens: None, exact: false, endless: false };
    let first = rig.ask(None, None, Appends::Never, chat);
    let small = rig.plain(10);
    assert!(matches!((&first, &small), (Answer::In(_), Answer::In(_))), "{first:?} {small:?}");
}

#[test]
fn a_verified_session_has_no_lost_turn() {
    let mut rig = Rig::new();
    rig.table.shim_up(0, true);
    let id = rig.pin_holding("s", 20);
    let turn = rig.turn(&delta("s")).inside();
    rig.end(&turn, Outcome::Lost);
    // It was aborted: the engine has given the row back.
    let seen = Seen {
        id,
        row: false,
        allocated_tokens: 0,
        history_tokens: 21,
        in_flight: false,
        full: true,
    };
    rig.table.looking(0);
    rig.table.seen(rig.now, 0, &seen);
    rig.carry_out();
    assert_eq!(rig.table.get(&key("s")).unwrap().lost_rid, None);
    assert_eq!(rig.table.totals(0).rows_held, 0);
}

#[test]
fn what_fits_passes_a_large_turn_that_waits() {
    let mut rig = Rig::new();
    rig.pin_holding("a", 600);
    rig.plain(1000).waits();
    rig.plain(8).inside();
}

#[test]
fn nothing_runs_on_kv_that_an_audit_found_corrupt() {
    let mut rig = Rig::with(Rules { turns_queued_per_session_max: 1, ..rules() }, engine(1));
    let (idle, busy) = (rig.pin_holding("idle", 20), rig.pin_holding("busy", 20));
    let turn = rig.turn(&delta("busy")).inside();
    let next = rig.turn(&delta("busy")).waits();
    rig.table.corrupt(rig.now, "nobody-1");
    rig.table.corrupt(rig.now, &idle);
    rig.table.corrupt(rig.now, &busy);
    rig.carry_out();
    let closed: Vec<&str> = rig.closes.iter().map(|close| close.incarnation.as_str()).collect();
    assert_eq!(closed, [idle.as_str()], "a turn that runs ends first");
    assert_eq!(rig.turn(&delta("idle")).error(), Error::KvCorrupt);
    rig.end(&turn, finished(29, 8));
    assert_eq!(rig.closes.last().unwrap().incarnation, busy);
    assert_eq!(rig.answer(next).error(), Error::KvCorrupt, "what waited is not appended");
    assert_eq!(rig.turn(&delta("busy")).error(), Error::KvCorrupt);
    assert_ne!(rig.pin("busy"), busy, "a new incarnation is the way out");
    rig.turn(&delta("busy")).inside();
}
