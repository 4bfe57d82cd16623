//! What one client may have while others want some: rows, pins, queue places and sessions.

use super::*;

fn key_of(principal: &str, id: &str) -> SessionKey {
    SessionKey::new(principal, id).unwrap()
}

fn claim_of(principal: &str, id: &str) -> Claim {
    Claim::for_session(&key_of(principal, id))
}

impl Rig {
    fn open_of(&mut self, principal: &str, id: &str, retention: Retention) -> Result<(), Error> {
        let (rid, key) = (self.rid(), key_of(principal, id));
        self.table.open_session(self.now, &rid, &opens(key, retention))?;
        self.carry_out();
        self.refused.remove(&rid).map_or(Ok(()), Err)
    }

    /// Opens a pinned session of a principal and runs one turn in it.
    fn pin_of(&mut self, principal: &str, id: &str, tokens: u64) {
        self.open_of(principal, id, Retention::Pinned).unwrap();
        let need = Need { prompt_tokens: tokens, answer_tokens: Some(1), ..SMALL };
        let turn = self.turn_that_needs(&Claim { delta: true, ..claim_of(principal, id) }, need);
        self.end(&turn.inside(), finished(tokens, 1));
    }

    fn plain_of(&mut self, principal: &str) -> Answer {
        principal.clone_into(&mut self.principal);
        self.plain(8)
    }

    fn batch_of(&mut self, principal: &str, sequences: u32) -> Answer {
        principal.clone_into(&mut self.principal);
        self.ask(None, None, RouteTurns::Nothing, Need { sequences, ..SMALL })
    }
}

const SMALL: Need = Need {
    sequences: 1,
    is_clamped_batch: false,
    likely_answer_tokens: None,
    prompt_tokens: 8,
    answer_tokens: Some(1),
    is_exact: true,
    ignores_eos: false,
    resident_tokens: 0,
    kv: KvIdentity::NONE,
};

/// An engine of 32 rows with room for many small sessions.
fn wide_engine() -> EngineCapacity {
    let mut wide = engine(1);
    wide.ranks[0] = RankCapacity {
        rows: 32,
        rows_reserve: 1,
        pin_rows_max: 16,
        pool_tokens: 1 << 20,
        pin_tokens_max: 1 << 19,
        turns_max: 64,
    };
    wide
}

fn wide_rig() -> Rig {
    wide_rig_with(QUEUE, wide_engine())
}

fn wide_rig_with(queue_wait_max: Duration, engine: EngineCapacity) -> Rig {
    let settings = TableSettings { turns_queued_max: 64, queue_wait_max, ..settings() };
    let mut rig = Rig::with(settings, engine);
    rig.shim_up(true);
    rig
}

/// Lets the shim demote every session that it was asked to demote.
fn demote_all(rig: &mut Rig) {
    for incarnation in std::mem::take(&mut rig.demotes) {
        rig.answer_demotion(&incarnation, true);
    }
    rig.carry_out();
}

#[test]
fn pinned_sessions_leave_half_of_the_rows_to_plain_turns() {
    let mut rig = wide_rig();
    let pinned =
        (0..31).filter(|id| rig.open_of("h", &id.to_string(), Retention::Pinned).is_ok()).count();
    assert_eq!(pinned, 16, "of 32 rows");
    let error = rig.open_of("h", "more", Retention::Pinned).unwrap_err();
    assert!(is_short(&error, Code::Rows), "{error}");
    let inside = (0..16).filter(|_| matches!(rig.plain_of("v"), Answer::In(_))).count();
    assert_eq!(inside, 16, "of another client's turns");
}

#[test]
fn plain_turns_without_a_row_take_those_of_idle_pinned_sessions() {
    let mut rig = wide_rig();
    (0..16).for_each(|id| rig.pin_of("h", &id.to_string(), 20));
    rig.wait(Duration::from_secs(1));
    let turns: Vec<Answer> = (0..24).map(|_| rig.plain_of("h")).collect();
    assert!(turns.iter().all(|turn| matches!(turn, Answer::In(_))), "16 rows, 8 ahead");
    rig.plain_of("h").waits();
    assert_eq!(rig.demotes, Vec::<String>::new(), "the pins are in use");
    rig.wait(DEMOTE - Duration::from_secs(2));
    assert_eq!(rig.demotes, Vec::<String>::new(), "a pin may rest this long");
    rig.rids += 100;
    rig.wait(Duration::from_secs(2));
    let waiting = rig.plain_of("h").waits();
    assert_eq!(rig.demotes.len(), 9, "for eight turns that wait in the engine, and the next one");
    demote_all(&mut rig);
    rig.answer(waiting).inside();
}

#[test]
fn a_client_that_holds_all_pins_gives_way_to_one_that_has_none() {
    let mut rig = wide_rig();
    (0..16).for_each(|id| rig.pin_of("h", &id.to_string(), 20));
    rig.wait(Duration::from_millis(5));
    for id in 0..8 {
        let key = key_of("v", &id.to_string());
        let rid = rig.rid();
        rig.table.open_session(rig.now, &rid, &opens(key, Retention::Pinned)).unwrap();
        rig.carry_out();
        assert_eq!(rig.demotes.len(), 1, "one row is missing");
        demote_all(&mut rig);
        rig.answer(rid).inside();
    }
    let held = |rig: &Rig, principal| rig.table.sessions().principals().held(principal, 0).rows;
    assert_eq!((held(&rig, "h"), held(&rig, "v")), (8, 8));
    let error = rig.open_of("v", "ninth", Retention::Pinned).unwrap_err();
    assert!(is_short(&error, Code::Rows), "as many as the other has: {error}");
}

#[test]
fn pinned_tokens_are_shared_too() {
    let mut rig = Rig::new();
    rig.shim_up(true);
    rig.pin_of("h", "1", 480);
    rig.pin_of("h", "2", 480);
    rig.open_of("v", "1", Retention::Pinned).unwrap();
    let need = Need { prompt_tokens: 300, ..SMALL };
    let delta = Claim { delta: true, ..claim_of("v", "1") };
    let waiting = rig.turn_that_needs(&delta, need).waits();
    assert_eq!(rig.demotes.len(), 1);
    demote_all(&mut rig);
    let turn = rig.answer(waiting).inside();
    rig.end(&turn, finished(300, 1));
    // Now the first client holds 496 tokens and the second 304.
    let delta = Claim { delta: true, ..claim_of("h", "1") };
    let both = rig.turn_that_needs(&delta, need);
    let error = both.error();
    assert!(
        is_short(&error, Code::PinTokens),
        "its own pins are in use, the other has less: {error}"
    );
}

#[test]
fn a_client_uses_half_of_the_rows_while_another_is_active() {
    let mut rig = wide_rig();
    let alone = (0..40).filter(|_| matches!(rig.plain_of("h"), Answer::In(_))).count();
    assert_eq!(alone, 40, "rows, and eight ahead");
    let mut rig = wide_rig();
    let first = rig.plain_of("v").inside();
    let inside = (0..40).filter(|_| matches!(rig.plain_of("h"), Answer::In(_))).count();
    assert_eq!(inside, 16);
    let others = (0..15).filter(|_| matches!(rig.plain_of("v"), Answer::In(_))).count();
    assert_eq!(others, 15, "the flood doesn't delay them");
    rig.end(&first, Outcome::Finished(None));
}

#[test]
fn a_batch_counts_as_the_turns_that_it_is() {
    let over = |answer: Answer| match answer {
        Answer::No(Error::BatchOverShare { sequences, sequences_max }) => {
            (sequences, sequences_max)
        }
        other => panic!("{other:?}"),
    };
    let mut rig = wide_rig();
    assert_eq!(over(rig.batch_of("h", 41)), (41, 40), "more than rows, and eight ahead");
    let all = rig.batch_of("h", 32).inside();
    let ahead = (0..40).filter(|_| matches!(rig.plain_of("h"), Answer::In(_))).count();
    assert_eq!(ahead, 8, "the batch has all rows");
    rig.end(&all, Outcome::Finished(None));

    let mut rig = wide_rig();
    rig.plain_of("v").inside();
    assert_eq!(over(rig.batch_of("h", 21)), (21, 20), "more than a half");
    let first = rig.batch_of("h", 10).inside();
    let second = rig.batch_of("h", 10).waits();
    let others = (0..15).filter(|_| matches!(rig.plain_of("v"), Answer::In(_))).count();
    assert_eq!(others, 15, "the batches don't delay them");
    rig.end(&first, Outcome::Finished(None));
    rig.answer(second).inside();
}

#[test]
fn a_batch_that_waits_is_refused_when_another_client_comes() {
    let mut rig = wide_rig();
    let first = rig.batch_of("h", 32).inside();
    let second = rig.batch_of("h", 32).waits();
    rig.plain_of("v").inside();
    rig.end(&first, Outcome::Finished(None));
    assert_eq!(code_of(rig.answer(second).error()), Code::BatchOverShare);
}

#[test]
fn batches_at_random_leave_nothing_behind() {
    for seed in 0..40 {
        let (mut random, mut rig) = (fastrand::Rng::with_seed(seed), wide_rig());
        let mut inside: Vec<Inside> = vec![];
        for _ in 0..150 {
            match random.u32(..10) {
                0..=5 => {
                    let client = ["a", "b", "c"][random.usize(..3)];
                    if let Answer::In(turn) = rig.batch_of(client, random.u32(1..24)) {
                        inside.push(turn);
                    }
                }
                6..=8 if !inside.is_empty() => {
                    let turn = inside.swap_remove(random.usize(..inside.len()));
                    rig.end(&turn, Outcome::Finished(None));
                }
                _ => rig.wait(Duration::from_millis(random.u64(..500))),
            }
            let admitted = std::mem::take(&mut rig.admitted).into_iter();
            inside.extend(admitted.map(|(rid, turn)| Inside { rid, turn }));
            rig.table.check_invariants();
        }
        while let Some(turn) = inside.pop() {
            rig.end(&turn, Outcome::Finished(None));
            let admitted = std::mem::take(&mut rig.admitted).into_iter();
            inside.extend(admitted.map(|(rid, turn)| Inside { rid, turn }));
        }
        assert_eq!(rig.table.totals(0).turns_running, 0, "seed {seed}");
        assert_eq!(rig.table.totals(0).turns_queued, 0, "seed {seed}: all could run");
    }
}

#[test]
fn a_batch_that_generates_nothing_runs_as_its_clients_share() {
    let mut rig = wide_rig();
    rig.plain_of("v").inside();
    let need = Need { sequences: 2_000, is_clamped_batch: true, ..SMALL };
    "h".clone_into(&mut rig.principal);
    let batch = rig.ask(None, None, RouteTurns::Nothing, need).inside();
    rig.plain_of("h").waits();
    rig.plain_of("v").inside();
    rig.end(&batch, Outcome::Finished(None));
}

#[test]
fn a_client_is_alone_again_when_the_other_has_gone() {
    let mut rig = wide_rig_with(10 * QUEUE, wide_engine());
    let last = rig.plain_of("v").inside();
    rig.end(&last, Outcome::Finished(None));
    let inside = (0..40).filter(|_| matches!(rig.plain_of("h"), Answer::In(_))).count();
    assert_eq!(inside, 16, "the other may come again soon");
    rig.wait(Duration::from_secs(31));
    rig.table.handle_load(rig.now, 0, EngineLoad { waiting_requests: 0, used_tokens: 0 });
    rig.carry_out();
    assert_eq!(rig.table.totals(0).turns_running, 40);
}

#[test]
fn the_client_with_the_fewest_turns_inside_comes_first() {
    let mut engine = wide_engine();
    engine.ranks[0].turns_max = 4;
    let mut rig = wide_rig_with(QUEUE, engine);
    let running: Vec<Inside> = (0..4).map(|_| rig.plain_of("h").inside()).collect();
    let flood: Vec<String> = (0..10).map(|_| rig.plain_of("h").waits()).collect();
    let victims: Vec<String> = (0..2).map(|_| rig.plain_of("v").waits()).collect();
    for (turn, victim) in running.iter().zip(&victims) {
        rig.end(turn, Outcome::Finished(None));
        assert!(rig.admitted.contains_key(victim), "it came last, but its client has least");
    }
    rig.end(&running[2], Outcome::Finished(None));
    assert!(rig.admitted.contains_key(&flood[0]), "then the two take turns, the oldest first");
}

#[test]
fn a_full_queue_makes_room_for_a_client_with_fewer_turns_in_it() {
    let mut rig = Rig::new();
    let running = [(); 10].map(|()| rig.plain_of("h"));
    let waiting: Vec<&String> = running
        .iter()
        .filter_map(|answer| if let Answer::Waits(rid) = answer { Some(rid) } else { None })
        .collect();
    assert_eq!(waiting.len(), 4, "as many as the queue has places: {running:?}");
    let first = rig.plain_of("v").waits();
    assert!(is_short(&rig.refused[waiting[3]], Code::QueueShare), "the flood's newest turn");
    rig.plain_of("v").waits();
    assert!(is_short(&rig.plain_of("v").error(), Code::QueuePlaces), "two of four are its share");
    assert!(is_short(&rig.plain_of("h").error(), Code::QueuePlaces), "and two the flood's");
    assert!(!rig.refused.contains_key(&first));
}

#[test]
fn a_client_opens_no_more_sessions_than_it_may() {
    let mut rig = Rig::with_settings(|settings| {
        settings.shares.principal_sessions_max = 4;
        settings.shares.sessions_max = 8;
    });
    (0..4).for_each(|id| rig.open_of("h", &id.to_string(), Retention::Tagged).unwrap());
    let error = rig.open_of("h", "more", Retention::Tagged).unwrap_err();
    assert!(is_short(&error, Code::PrincipalSessions), "{error}");
    (0..4).for_each(|id| rig.open_of("v", &id.to_string(), Retention::Tagged).unwrap());
    let error = rig.open_of("w", "1", Retention::Tagged).unwrap_err();
    assert!(is_short(&error, Code::Sessions), "the table is full of sessions in use: {error}");
    rig.wait(DEMOTE);
    rig.open_of("w", "1", Retention::Tagged).unwrap();
    rig.open_of("w", "2", Retention::Tagged).unwrap();
    assert_eq!(rig.table.sessions().share_figures().principals, 3);
}

#[test]
fn a_client_with_as_many_sessions_as_it_may_loses_the_longest_idle_inferred_one() {
    let mut rig = Rig::with_settings(|settings| settings.shares.principal_sessions_max = 3);
    for id in ["a", "b", "c", "d"] {
        rig.wait(Duration::from_millis(1));
        let turn = rig.turn(&claim_of("h", id)).inside();
        rig.end(&turn, Outcome::Finished(None));
    }
    let ids: Vec<&str> = rig.table.sessions().iter().map(|(key, _)| key.id()).collect();
    assert_eq!(ids, ["b", "c", "d"]);
}

#[test]
fn no_client_keeps_an_idle_session_longer_than_the_operator_allows() {
    let mut rig = Rig::new();
    let year = Duration::from_secs(365 * 86_400);
    rig.open_for("opened", Some(Retention::Pinned), Some(year)).unwrap();
    let idle_ms_max = Some(u64::MAX);
    let turn = rig.turn(&Claim { idle_ms_max, ..Claim::for_session(&key("began")) }).inside();
    rig.end(&turn, Outcome::Finished(None));
    rig.wait(10 * IDLE);
    assert_eq!(rig.table.sessions().iter().count(), 0);
}

#[test]
fn while_the_engine_is_silent_nothing_waits_and_nothing_comes() {
    let mut rig = Rig::new();
    rig.pin("s");
    let running = rig.plain_of("v").inside();
    let waiting: Vec<String> = (0..12)
        .filter_map(|_| if let Answer::Waits(rid) = rig.plain_of("v") { Some(rid) } else { None })
        .collect();
    let reading = rig.rid();
    rig.table.claim(rig.now, &reading, &claims_nothing("v", RouteTurns::Nothing)).unwrap();
    let silent = Error::EngineSilent("it hangs".to_owned());
    rig.table.set_engine_silent(rig.now, Some("it hangs".to_owned()));
    rig.carry_out();
    assert!(!waiting.is_empty() && waiting.iter().all(|rid| rig.refused.get(rid) == Some(&silent)));
    assert_eq!(rig.plain_of("v").error(), silent);
    assert_eq!(rig.open("t", None), Err(silent.clone()));
    rig.table.enqueue(rig.now, &reading, SMALL);
    rig.carry_out();
    assert_eq!(rig.answer(reading).error(), silent, "its body was being read");
    assert!(rig.table.queue().rids_inside().any(|rid| rid == running.rid), "running turns go on");
    rig.table.set_engine_silent(rig.now, None);
    rig.end(&running, Outcome::Finished(None));
    rig.turn(&delta("s")).inside();
}
