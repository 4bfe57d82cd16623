//! What the table promises, case by case and under random use.

use std::collections::HashSet;

use super::*;
use crate::session::Usage;

const IDLE: Duration = Duration::from_secs(60);

fn engine(ranks: usize) -> Engine {
    let capacity = Capacity { rows: 4, rows_reserve: 1, pin_tokens_max: 1000, turns_max: 6 };
    let retentions = vec![Retention::Pinned, Retention::Tagged, Retention::None];
    Engine { ranks: vec![capacity; ranks], page_tokens: 16, retentions }
}

fn table() -> (Table, Instant) {
    let now = tokio::time::Instant::now().into_std();
    (Table::new("berth-a-1".into(), IDLE, engine(1)), now)
}

fn key(id: &str) -> SessionKey {
    SessionKey::new("p", id).unwrap()
}

fn finished(prompt_tokens: u64, completion_tokens: u64) -> Outcome {
    Outcome::Finished(Some(Usage { prompt_tokens, completion_tokens, ..Usage::default() }))
}

/// A turn with this claim on `/generate`.
fn begin(table: &mut Table, now: Instant, claim: &Claim) -> Result<Turn, Error> {
    table.begin(now, Some((claim, &claim.key().unwrap())), None, Appends::Possible)
}

fn pinned(id: &str) -> Claim {
    Claim { retention: Some(Retention::Pinned), ..Claim::of(&key(id)) }
}

fn delta(id: &str) -> Claim {
    Claim { delta: true, ..Claim::of(&key(id)) }
}

fn opened_pin(table: &mut Table, now: Instant, id: &str) -> String {
    let opened = table.open(now, &key(id), Some(Retention::Pinned), None, None);
    let incarnation = opened.unwrap().expect("a pinned session is opened at the engine");
    table.opened(&key(id), &incarnation, true);
    incarnation
}

#[test]
fn a_pinned_session_runs_one_turn_and_counts_its_tokens() {
    let (mut table, now) = table();
    opened_pin(&mut table, now, "s");
    let turn = begin(&mut table, now, &delta("s")).unwrap();
    assert_eq!(begin(&mut table, now, &delta("s")), Err(Error::Busy));
    table.end(now, &turn, finished(25, 6));
    let session = table.get(&key("s")).unwrap();
    assert_eq!(session.resident_tokens, 30, "the last token's KV isn't computed yet");
    assert_eq!(table.totals(0).pinned_tokens, 32, "a page is held whole");
    assert_eq!(table.totals(0).rows_held, 1);
    assert!(begin(&mut table, now, &delta("s")).is_ok());
}

#[test]
fn a_close_waits_for_the_turn_and_shuts_the_door_meanwhile() {
    let (mut table, now) = table();
    let incarnation = opened_pin(&mut table, now, "s");
    let turn = begin(&mut table, now, &delta("s")).unwrap();
    assert_eq!(table.close(&key("s")), Ok(true), "it waits");
    assert_eq!(table.close(&key("s")), Err(Error::Unknown), "two closes: one is too late");
    assert_eq!(begin(&mut table, now, &delta("s")), Err(Error::Unknown), "closing beats busy");
    let reopened = table.open(now, &key("s"), None, None, None);
    assert_eq!(reopened, Err(Error::Closing));
    assert_eq!(table.take_closes(), [], "the turn still runs");
    table.end(now, &turn, finished(10, 1));
    assert_eq!(table.take_closes(), [Close { incarnation: incarnation.clone() }]);
    assert_eq!(table.totals(0).rows_held, 1, "held until the engine has confirmed");
    table.closed(&incarnation);
    assert_eq!(table.totals(0), Totals::default());
    assert_ne!(opened_pin(&mut table, now, "s"), incarnation, "a new life has a new id");
}

#[test]
fn rows_in_reserve_are_never_pinned() {
    let (mut table, now) = table();
    for id in ["a", "b", "c"] {
        opened_pin(&mut table, now, id);
    }
    let refused = table.open(now, &key("d"), Some(Retention::Pinned), None, None);
    assert!(matches!(refused, Err(Error::Short { what: "rows", .. })), "{refused:?}");
    assert!(begin(&mut table, now, &Claim::of(&key("d"))).is_ok(), "tagged ones hold no row");
    assert_eq!(table.close(&key("a")), Ok(false));
    let close = table.take_closes().pop().unwrap();
    let refused = table.open(now, &key("e"), Some(Retention::Pinned), None, None);
    assert!(refused.is_err(), "the row is free only when the engine says so");
    table.closed(&close.incarnation);
    opened_pin(&mut table, now, "e");
}

#[test]
fn each_session_holds_pages_of_its_own() {
    let (mut table, now) = table();
    for (id, prompt) in [("a", 42), ("b", 49), ("c", 56)] {
        opened_pin(&mut table, now, id);
        let turn = begin(&mut table, now, &delta(id)).unwrap();
        table.end(now, &turn, finished(prompt, 2));
    }
    assert_eq!(table.totals(0).pinned_tokens, 48 + 64 + 64, "43, 50 and 57 tokens");
}

#[test]
fn the_pin_budget_bounds_growth() {
    let (mut table, now) = table();
    opened_pin(&mut table, now, "s");
    let turn = begin(&mut table, now, &delta("s")).unwrap();
    table.end(now, &turn, finished(1000, 1));
    let refused = begin(&mut table, now, &delta("s"));
    assert!(matches!(refused, Err(Error::Short { what: "pin_tokens", .. })), "{refused:?}");
    assert_eq!(table.totals(0).turns_running, 0, "a refused turn isn't counted");
}

#[test]
fn nothing_is_appended_to_a_history_in_doubt() {
    let ends = [
        ("nobody saw the end", Outcome::Lost),
        ("the client did not hear it", Outcome::Unheard(None)),
        ("the history shrank", finished(5, 1)),
        (
            "retracted",
            Outcome::Finished(Some(Usage {
                prompt_tokens: 40,
                completion_tokens: 5,
                cached_tokens: None,
                retractions: 1,
            })),
        ),
    ];
    for (why, end) in ends {
        let (mut table, now) = table();
        opened_pin(&mut table, now, "s");
        let turn = begin(&mut table, now, &delta("s")).unwrap();
        table.end(now, &turn, finished(20, 5));
        let turn = begin(&mut table, now, &delta("s")).unwrap();
        table.end(now, &turn, end);
        assert_eq!(begin(&mut table, now, &delta("s")), Err(Error::HistoryUnknown), "{why}");
        let reopened = table.open(now, &key("s"), Some(Retention::Pinned), None, None).unwrap();
        assert!(reopened.is_some(), "a new incarnation is the way out: {why}");
        assert_eq!(table.take_closes().len(), 1, "the old one leaves the engine: {why}");
    }
}

#[test]
fn an_abort_rolls_back_and_a_refusal_changes_nothing() {
    let (mut table, now) = table();
    opened_pin(&mut table, now, "s");
    let turn = begin(&mut table, now, &delta("s")).unwrap();
    table.end(now, &turn, finished(20, 5));
    let turn = begin(&mut table, now, &delta("s")).unwrap();
    table.end(now, &turn, Outcome::Refused);
    assert_eq!(table.get(&key("s")).unwrap().resident_tokens, 24);
    let turn = begin(&mut table, now, &delta("s")).unwrap();
    table.end(now, &turn, Outcome::Aborted);
    assert_eq!(table.totals(0).pinned_tokens, 0, "the KV went to the tree");
    let session = table.get(&key("s")).unwrap();
    assert_eq!((session.history_tokens, session.turns), (25, 1));
    assert!(begin(&mut table, now, &delta("s")).is_ok());
}

#[test]
fn a_whole_history_never_reaches_a_pinned_session() {
    let (mut table, now) = table();
    let first = begin(&mut table, now, &pinned("s")).unwrap();
    let session = first.session.clone().unwrap();
    assert!(session.must_open, "the first turn opens it");
    table.opened(&session.key, &session.incarnation, true);
    table.end(now, &first, finished(20, 5));
    assert_eq!(begin(&mut table, now, &pinned("s")), Err(Error::WholeHistory));
    let claim = delta("s");
    let on_chat = table.begin(now, Some((&claim, &key("s"))), None, Appends::Never);
    assert_eq!(on_chat, Err(Error::WholeHistory), "chat would drop the session silently");
    let claim = pinned("new");
    let on_chat = table.begin(now, Some((&claim, &key("new"))), None, Appends::Never);
    assert_eq!(on_chat, Err(Error::WholeHistory));
    assert!(table.get(&key("new")).is_none(), "a refused turn opens nothing");
}

#[test]
fn a_delta_may_open_its_session() {
    let (mut table, now) = table();
    let turn = begin(&mut table, now, &Claim { open: true, ..delta("s") }).unwrap();
    let session = turn.session.unwrap();
    assert_eq!((session.retention, session.must_open), (Retention::Pinned, true));
    let tagged = Claim { retention: Some(Retention::Tagged), ..delta("t") };
    let refused = begin(&mut table, now, &Claim { open: true, ..tagged });
    assert_eq!(refused, Err(Error::DeltaNeedsPinned(Retention::Tagged)));
    assert!(table.get(&key("t")).is_none(), "a refused turn opens nothing");
}

#[test]
fn a_delta_needs_a_pinned_history() {
    let (mut table, now) = table();
    assert_eq!(begin(&mut table, now, &delta("s")), Err(Error::Unknown));
    let turn = begin(&mut table, now, &Claim::of(&key("s"))).unwrap();
    table.end(now, &turn, finished(20, 5));
    let refused = begin(&mut table, now, &delta("s"));
    assert_eq!(refused, Err(Error::DeltaNeedsPinned(Retention::Tagged)));
}

#[test]
fn inferred_sessions_overlap_and_opened_ones_do_not() {
    let (mut table, now) = table();
    let inferred = Claim::of(&key("s"));
    let turns = [(); 2].map(|()| begin(&mut table, now, &inferred).unwrap());
    turns.iter().for_each(|turn| table.end(now, turn, finished(20, 5)));
    table.open(now, &key("o"), None, None, None).unwrap();
    let _running = begin(&mut table, now, &Claim::of(&key("o"))).unwrap();
    assert_eq!(begin(&mut table, now, &Claim::of(&key("o"))), Err(Error::Busy));
}

#[test]
fn a_full_table_forgets_the_longest_idle_inferred_session() {
    let (mut table, now) = table();
    table.sessions_max = 8;
    table.open(now, &key("opened"), None, None, None).unwrap();
    for number in 1..table.sessions_max {
        let at = now + Duration::from_millis(number as u64);
        let turn = begin(&mut table, at, &Claim::of(&key(&number.to_string()))).unwrap();
        table.end(at, &turn, Outcome::Finished(None));
    }
    let late = now + IDLE / 2;
    assert!(begin(&mut table, late, &Claim::of(&key("new"))).is_ok());
    assert_eq!(table.take_displaced(), [key("1")]);
    assert!(table.get(&key("opened")).is_some(), "its client asked for it");
    assert_eq!(table.take_closes().len(), 1);
}

#[test]
fn an_explicit_open_takes_an_inferred_session_over() {
    let (mut table, now) = table();
    let turn = begin(&mut table, now, &Claim::of(&key("s"))).unwrap();
    table.end(now, &turn, finished(20, 5));
    let short = Some(IDLE / 2);
    assert_eq!(table.open(now, &key("s"), None, short, None), Ok(None));
    assert_eq!(table.next_expiry(), Some(now + IDLE / 2));
    let _running = begin(&mut table, now, &Claim::of(&key("s"))).unwrap();
    assert_eq!(begin(&mut table, now, &Claim::of(&key("s"))), Err(Error::Busy));
    let other = table.open(now, &key("s"), Some(Retention::Pinned), None, None);
    assert_eq!(other, Err(Error::OpenOtherwise(Retention::Tagged)));
}

#[test]
fn a_session_closed_while_it_opens_waits_for_the_engine_alone() {
    let (mut table, now) = table();
    let pin = Some(Retention::Pinned);
    let incarnation = table.open(now, &key("s"), pin, None, None).unwrap().unwrap();
    assert_eq!(table.close(&key("s")), Ok(true));
    assert_eq!(table.next_expiry(), None, "its time doesn't run out again and again");
    table.opened(&key("s"), &incarnation, true);
    assert_eq!(table.take_closes(), [Close { incarnation }]);
}

#[test]
fn an_engine_without_the_mode_says_what_it_offers() {
    let now = tokio::time::Instant::now().into_std();
    let retentions = vec![Retention::None];
    let mut table = Table::new("b".into(), IDLE, Engine { retentions, ..engine(1) });
    let refused = table.open(now, &key("s"), Some(Retention::Pinned), None, None).unwrap_err();
    assert!(refused.to_string().contains("offers none"), "{refused}");
    let turn = begin(&mut table, now, &Claim::of(&key("s"))).unwrap();
    assert_eq!(turn.session.unwrap().retention, Retention::None, "auto falls back");
}

#[test]
fn idle_time_counts_from_the_end_of_a_turn() {
    let (mut table, now) = table();
    let turn = begin(&mut table, now, &Claim::of(&key("s"))).unwrap();
    let late = now + 10 * IDLE;
    assert_eq!(table.next_expiry(), None, "a running session never expires");
    assert!(table.expire(late).is_empty());
    table.end(late, &turn, finished(20, 5));
    assert_eq!(table.next_expiry(), Some(late + IDLE));
    assert!(table.expire(late + IDLE / 2).is_empty());
    assert_eq!(table.expire(late + IDLE).len(), 1);
    assert!(table.get(&key("s")).is_none());
}

#[test]
fn no_idle_time_is_too_long() {
    let (mut table, now) = table();
    let claim = Claim { idle_ms_max: Some(u64::MAX), ..Claim::of(&key("s")) };
    let turn = begin(&mut table, now, &claim).unwrap();
    table.end(now, &turn, finished(20, 5));
    assert!(table.next_expiry().unwrap() > now + 1000 * IDLE);
    let opened = table.open(now, &key("o"), None, Some(Duration::MAX), None);
    assert_eq!(opened, Ok(None));
    assert!(table.expire(now).is_empty());
}

#[test]
fn an_engine_that_comes_back_smaller_keeps_no_session_on_a_rank_it_lost() {
    let now = tokio::time::Instant::now().into_std();
    let mut table = Table::new("b".into(), IDLE, engine(2));
    let claim = Claim::of(&key("s"));
    let on_second = Some((&claim, &key("s")));
    let turn = table.begin(now, on_second, Some(1), Appends::Possible).unwrap();
    table.engine_lost(engine(1));
    table.end(now, &turn, Outcome::Lost);
    let next = table.begin(now, on_second, None, Appends::Possible);
    assert_eq!(next.map(|turn| turn.dp_rank), Ok(0), "it starts anew where there is a rank");
}

#[test]
fn an_engine_restart_loses_pinned_sessions_and_forgives_others() {
    let (mut table, now) = table();
    opened_pin(&mut table, now, "p");
    let turn = begin(&mut table, now, &delta("p")).unwrap();
    table.end(now, &turn, finished(20, 5));
    let turn = begin(&mut table, now, &Claim::of(&key("t"))).unwrap();
    table.end(now, &turn, finished(20, 5));
    let before = table.get(&key("t")).unwrap().incarnation.clone();
    table.engine_lost(engine(1));
    let totals = table.totals(0);
    let held = (totals.rows_held, totals.pinned_tokens, totals.estimate_tokens);
    assert_eq!(held, (0, 0, 0), "no ghost is left in the ledger");
    assert_eq!(begin(&mut table, now, &delta("p")), Err(Error::Lost));
    let turn = begin(&mut table, now, &Claim::of(&key("t"))).unwrap();
    assert_ne!(turn.session.unwrap().incarnation, before);
    assert_eq!(table.close(&key("p")), Ok(false));
    assert_eq!(table.take_closes(), [], "the engine has nothing to close");
    assert!(table.get(&key("p")).is_none());
}

/// Random use by many clients of an engine with two ranks.
struct World {
    random: fastrand::Rng,
    at: Instant,
    table: Table,
    running: Vec<Turn>,
    opening: Vec<(SessionKey, String)>,
    /// Sessions open inside the engine.
    inside: HashSet<String>,
}

impl World {
    fn new(seed: u64) -> Self {
        Self {
            random: fastrand::Rng::with_seed(seed),
            at: tokio::time::Instant::now().into_std(),
            table: Table::new("b".into(), IDLE, engine(2)),
            running: vec![],
            opening: vec![],
            inside: HashSet::new(),
        }
    }

    fn step(&mut self) {
        self.at += Duration::from_millis(self.random.u64(0..4000));
        let id = key(&self.random.u8(0..8).to_string());
        match self.random.u8(0..100) {
            0..=44 => self.begin(id),
            45..=74 if !self.running.is_empty() => self.end(),
            75..=82 => {
                let opened = self.table.open(self.at, &id, Some(Retention::Pinned), None, None);
                if let Ok(Some(incarnation)) = opened {
                    self.ask_engine(id, incarnation);
                }
            }
            83..=88 => drop(self.table.close(&id)),
            89..=94 if !self.opening.is_empty() => self.engine_opens(),
            95..=97 => self.engine_closes(),
            98 => drop(self.table.expire(self.at)),
            99 => {
                self.table.engine_lost(engine(self.random.usize(1..3)));
                self.inside.clear();
            }
            _ => {}
        }
        self.table.check_invariants();
    }

    fn begin(&mut self, id: SessionKey) {
        let claim = Claim {
            delta: self.random.u8(0..3) > 0,
            open: self.random.u8(0..5) == 0,
            retention: self.random.bool().then_some(Retention::Pinned),
            ..Claim::of(&id)
        };
        let Ok(turn) = begin(&mut self.table, self.at, &claim) else { return };
        let session = turn.session.as_ref().unwrap();
        if session.must_open {
            self.ask_engine(id, session.incarnation.clone());
        }
        self.running.push(turn);
    }

    /// Once per incarnation; whoever comes later waits for the same answer.
    fn ask_engine(&mut self, id: SessionKey, incarnation: String) {
        if !self.opening.iter().any(|(_, asked)| *asked == incarnation) {
            self.opening.push((id, incarnation));
        }
    }

    fn end(&mut self) {
        let turn = self.running.swap_remove(self.random.usize(..self.running.len()));
        let ends = [
            finished(self.random.u64(1..300), self.random.u64(0..50)),
            Outcome::Finished(None),
            Outcome::Aborted,
            Outcome::Refused,
            Outcome::Lost,
        ];
        let end = ends[self.random.usize(..ends.len())];
        self.table.end(self.at, &turn, end);
    }

    fn engine_opens(&mut self) {
        let (id, incarnation) = self.opening.swap_remove(self.random.usize(..self.opening.len()));
        let ok = self.random.u8(0..4) > 0;
        if ok {
            self.inside.insert(incarnation.clone());
        }
        self.table.opened(&id, &incarnation, ok);
        if !ok {
            // Its turns were told that it did not open.
            let of = |turn: &Turn| turn.session.as_ref().unwrap().incarnation.clone();
            self.running.retain(|turn| of(turn) != incarnation);
        }
    }

    fn engine_closes(&mut self) {
        for close in self.table.take_closes() {
            self.inside.remove(&close.incarnation);
            self.table.closed(&close.incarnation);
        }
    }

    /// All clients go home.
    fn finish(&mut self) {
        for (id, incarnation) in std::mem::take(&mut self.opening) {
            self.inside.insert(incarnation.clone());
            self.table.opened(&id, &incarnation, true);
        }
        self.table.close_all();
        while !self.running.is_empty() {
            self.end();
        }
        self.table.close_all();
        self.engine_closes();
    }
}

#[test]
fn any_order_of_events_keeps_the_promises_and_leaves_nothing() {
    for seed in 0..64 {
        let mut world = World::new(seed);
        (0..400).for_each(|_| world.step());
        world.finish();
        assert_eq!(world.table.iter().count(), 0, "a session is left with seed {seed}");
        assert!(world.inside.is_empty(), "{:?} leaked with seed {seed}", world.inside);
        for rank in 0..2 {
            assert_eq!(world.table.totals(rank), Totals::default(), "left with seed {seed}");
        }
    }
}
