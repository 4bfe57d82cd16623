//! Turns of other conversations in a session, and turns that meet another one of their own.

use contract::load::PromptRole;

use super::{
    trim::{auto, full_history, tokens_max, trim_plan, trimming},
    *,
};

/// Bytes of the first prompt of the main conversation, and what each of its turns adds.
const MAIN_BYTES: u64 = 2_000;
const ADDED_BYTES: u64 = 60;
/// The same in tokens, and the tokens of an answer.
const MAIN_TOKENS: u64 = 200;
const ADDED_TOKENS: u64 = 3;
const ANSWER_TOKENS: u64 = 2;

/// Returns how a prompt with this system text begins, if the client has sent so many messages.
fn start_of(system: &str, first: &str, messages: usize) -> PromptStart {
    let mut start = PromptStart::default();
    start.push(PromptRole::System, 0, 0, &[system.as_bytes()]);
    start.push(PromptRole::User, 0, 0, &[first.as_bytes()]);
    for number in 1..messages {
        let role = if number % 2 == 0 { PromptRole::User } else { PromptRole::Assistant };
        start.push(role, number, 0, &[format!("{first} {number}").as_bytes()]);
    }
    start
}

/// A coding agent that asks for titles in the session of its main conversation.
struct Coder {
    rig: Rig,
    /// The turns of the main conversation so far, and the tokens after the last one.
    turns: u64,
    tokens: u64,
    titles: u64,
}

impl Coder {
    fn new() -> Self {
        Self { rig: trimming(), turns: 0, tokens: 0, titles: 0 }
    }

    /// Asks for a title of the newest message. That is in no turn of the conversation yet.
    fn title(&mut self) -> Inside {
        self.titles += 1;
        let text = format!("A title for message {}, please", self.titles);
        self.rig.start = start_of("You write titles.", &text, 1);
        full_history(&mut self.rig, &auto("s"), 800).inside()
    }

    fn title_ends(&mut self, title: &Inside) {
        self.rig.end(title, finished(150, 8));
    }

    /// Sends the next turn of the main conversation.
    fn main(&mut self) -> Answer {
        let messages = 1 + 2 * usize::try_from(self.turns).unwrap();
        self.rig.start = start_of("You write code.", "Mend it.", messages);
        let bytes = MAIN_BYTES + self.turns * ADDED_BYTES;
        full_history(&mut self.rig, &auto("s"), bytes)
    }

    /// Ends that turn. Returns whether it ran in its session, with all that this has.
    fn main_ends(&mut self, turn: &Inside) -> bool {
        let prompt = if self.turns == 0 { MAIN_TOKENS } else { self.tokens + ADDED_TOKENS };
        let was_pinned = tokens_max(turn).is_some();
        if was_pinned {
            let has = self.rig.table.sessions().get(&key("s")).unwrap().history_tokens();
            let planned = self.rig.plan(turn, Plan::Trimmed, has, prompt - has);
            assert!(has == 0 || planned == (TrimOutcome::Trimmed, self.tokens), "{planned:?}");
        }
        self.rig.end(turn, finished(prompt, ANSWER_TOKENS));
        self.turns += 1;
        self.tokens = prompt + ANSWER_TOKENS;
        was_pinned
    }
}

#[test]
fn titles_before_during_and_after_the_turns_of_a_conversation_cost_it_nothing() {
    for title_first in [true, false] {
        let mut coder = Coder::new();
        let mut pinned = vec![];
        for message in 0..10 {
            let before = (title_first || message > 0).then(|| coder.title());
            let main = coder.main().inside();
            let during = coder.title();
            coder.title_ends(&during);
            pinned.push(coder.main_ends(&main));
            let tool = coder.main().inside();
            if let Some(before) = before {
                coder.title_ends(&before);
            }
            pinned.push(coder.main_ends(&tool));
            let after = coder.title();
            coder.title_ends(&after);
            let other = coder.main().inside();
            pinned.push(coder.main_ends(&other));
        }
        // The session is pinned once it has come back without another turn beside, at the latest by
        // the third turn. It then keeps its pin.
        let first = pinned.iter().position(|was_pinned| *was_pinned).expect("it is pinned");
        assert!(first <= 2, "{pinned:?}");
        assert!(pinned[first..].iter().all(|was_pinned| *was_pinned), "{pinned:?}");
        assert_eq!(coder.rig.demotes, Vec::<String>::new());
        assert_eq!(coder.rig.answers, [], "no title gets as far as the shim");
    }
}

#[test]
fn a_title_pins_nothing_and_its_size_says_nothing_about_the_conversation() {
    let mut coder = Coder::new();
    let main = coder.main().inside();
    coder.main_ends(&main);
    let title = coder.title();
    assert_eq!((title.turn.run_mode, tokens_max(&title)), (Some(RunMode::Tagged), None));
    coder.title_ends(&title);
    assert_eq!(coder.rig.table.sessions().get(&key("s")).unwrap().history_tokens(), coder.tokens);
    let main = coder.main().inside();
    let tokens_max = tokens_max(&main).expect("it is pinned");
    assert!((MAIN_TOKENS..MAIN_TOKENS + 32 + ADDED_BYTES).contains(&tokens_max));
}

#[test]
fn a_turn_waits_until_the_shim_has_said_that_the_one_ahead_is_an_aside() {
    // These prompts don't show how they begin.
    let mut rig = trimming();
    rig.pinned_by_itself("s");
    let title = full_history(&mut rig, &auto("s"), 460).inside();
    let main = full_history(&mut rig, &auto("s"), 460).waits();
    let (rid, incarnation) = (title.rid.clone(), title.incarnation().to_owned());
    let diverged = trim_plan(rid, incarnation.clone(), Plan::Diverged, [5, 148, 0, 20]);
    rig.table.handle_question(rig.now, 7, &diverged);
    rig.carry_out();
    rig.plan(&title, Plan::Diverged, 0, 0);
    let main = rig.answer(main).inside();
    assert_eq!((main.incarnation(), tokens_max(&main).is_some()), (&*incarnation, true));
    rig.runs(&main, 148, 160);
    rig.end(&title, finished(20, 8));
}

#[test]
fn a_turn_waits_for_another_of_its_conversation_as_long_as_computing_its_history_takes() {
    let mut rig = trimming();
    rig.pinned_by_itself("s");
    let one = full_history(&mut rig, &auto("s"), 460).inside();
    rig.plan(&one, Plan::Trimmed, 148, 12);
    let other = full_history(&mut rig, &auto("s"), 470).waits();
    let until = rig.table.next_deadline().unwrap();
    assert_eq!(until, rig.now + Duration::from_micros(14_000), "148 tokens at 10,000 a second");
    rig.wait(Duration::from_millis(13));
    assert_eq!(rig.answer(other.clone()), Answer::Waits(other.clone()));
    rig.wait(Duration::from_millis(1));
    let other = rig.answer(other).inside();
    assert_eq!((other.turn.run_mode, tokens_max(&other)), (Some(RunMode::Tagged), None));
    rig.end(&one, finished(160, 8));
    rig.end(&other, finished(162, 8));
    // A conversation that forks keeps its KV where both turns find it.
    let next = full_history(&mut rig, &auto("s"), 480).waits();
    rig.demoted();
    let next = rig.answer(next).inside();
    assert_eq!(next.turn.run_mode, Some(RunMode::Tagged));
    assert_eq!(rig.retention("s"), Retention::Tagged);
}

#[test]
fn a_turn_finds_the_history_free_when_the_one_ahead_ends_in_time() {
    let mut rig = trimming();
    let incarnation = rig.pinned_by_itself("s");
    let one = full_history(&mut rig, &auto("s"), 460).inside();
    let other = full_history(&mut rig, &auto("s"), 500).waits();
    rig.runs(&one, 148, 160);
    let other = rig.answer(other).inside();
    assert_eq!((other.incarnation(), tokens_max(&other).is_some()), (&*incarnation, true));
}

#[test]
fn a_shortened_conversation_is_the_sessions_from_its_second_turn() {
    let mut coder = Coder::new();
    for _ in 0..4 {
        let main = coder.main().inside();
        coder.main_ends(&main);
    }
    let compacted = |coder: &mut Coder, messages| {
        coder.rig.start = start_of("You write code.", "So far: all is mended.", messages);
        full_history(&mut coder.rig, &auto("s"), 700).inside()
    };
    let first = compacted(&mut coder, 1);
    assert_eq!(tokens_max(&first), None, "it may be an aside");
    coder.rig.end(&first, finished(60, 8));
    let title = coder.title();
    coder.title_ends(&title);
    let second = compacted(&mut coder, 3);
    let incarnation = second.incarnation().to_owned();
    let diverged =
        trim_plan(second.rid.clone(), incarnation.clone(), Plan::Diverged, [30, 217, 0, 70]);
    coder.rig.table.handle_question(coder.rig.now, 7, &diverged);
    coder.rig.carry_out();
    coder.rig.demoted();
    let (_, reopened, _) = coder.rig.answers.pop().expect("the question is answered");
    assert!(reopened.is_some_and(|reopened| reopened != incarnation));
}

#[test]
fn a_turn_uses_no_kv_that_is_unfit_while_a_title_runs() {
    type Spoil = fn(&mut Rig, &str);
    let cases: [(&str, Spoil); 2] = [
        ("corrupt", |rig, incarnation| {
            rig.table.handle_kv_change(rig.now, KvChange::Corrupt { incarnation })
        }),
        ("the shim trims no more", |rig, _| rig.table.set_trimming(rig.now, false)),
    ];
    for (what, spoil) in cases {
        let mut coder = Coder::new();
        for _ in 0..3 {
            let main = coder.main().inside();
            coder.main_ends(&main);
        }
        let incarnation = coder.rig.table.sessions().get(&key("s")).unwrap().incarnation.clone();
        let title = coder.title();
        spoil(&mut coder.rig, &incarnation);
        coder.rig.carry_out();
        // Beside the pinned KV it is too large for the pool, so it waits until that is released.
        let main = coder.main().waits();
        coder.title_ends(&title);
        coder.rig.demoted();
        coder.rig.engine_closes();
        let main = coder.rig.answer(main).inside();
        assert_eq!(tokens_max(&main), None, "{what}");
        let session = main.turn.session.as_ref().unwrap();
        assert_ne!(session.retention, Retention::Pinned, "{what}");
    }
}

#[test]
fn a_session_that_gets_asides_alone_lets_the_shim_judge() {
    let mut coder = Coder::new();
    for _ in 0..3 {
        let main = coder.main().inside();
        coder.main_ends(&main);
    }
    let is_marked = |coder: &mut Coder| {
        let title = coder.title();
        let is_marked = tokens_max(&title).is_some();
        coder.rig.end(&title, Outcome::Refused);
        is_marked
    };
    let marked: Vec<bool> = (0..9).map(|_| is_marked(&mut coder)).collect();
    assert_eq!(marked, [vec![false; 8], vec![true]].concat());
}
