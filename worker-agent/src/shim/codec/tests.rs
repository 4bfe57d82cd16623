//! Tests of the protocol: the examples of both ends, bounds, cut streams and random bytes.

use std::{
    fmt::Debug,
    time::{Duration, Instant},
};

use contract::count::COUNT_MAX;
use proptest::prelude::*;
use serde_bytes::Bytes;

use super::*;
use crate::{
    config::WORKER_ID_BYTES_MAX,
    incarnation::prefix,
    shim::{HostFacts, PinSafety},
};

/// Frames in hex, by name. The shim's `tests/sglang/trimming/test_wire.py` has the same messages.
const EXAMPLES: &str = include_str!("frames.txt");

/// Returns an example frame.
pub(in crate::shim) fn example(name: &str) -> Vec<u8> {
    let mut lines = EXAMPLES.lines().filter_map(|line| line.split_once(' '));
    let (_, hex) = lines.find(|(found, _)| *found == name).expect("there is such an example");
    let digits: Vec<u32> = hex.chars().filter_map(|digit| digit.to_digit(16)).collect();
    digits.chunks(2).map(|pair| u8::try_from(pair[0] * 16 + pair[1]).unwrap()).collect()
}

/// Encodes a message, which is a tuple of its name and its fields, as a frame.
pub(in crate::shim) fn framed(message: &impl Serialize) -> Vec<u8> {
    framed_bytes(&rmp_serde::to_vec(message).unwrap())
}

/// Returns a frame with an encoded message.
pub(in crate::shim) fn framed_bytes(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(1 + message.len()).unwrap();
    [&length.to_le_bytes(), &[VERSION][..], message].concat()
}

/// Decodes the only frame of these bytes.
pub(in crate::shim) fn decoded<M: DeserializeOwned>(bytes: &[u8]) -> Result<M, Error> {
    let mut frames = Frames::default();
    frames.push(bytes);
    let message = frames.take_message()?.expect("the frame is complete");
    assert!(frames.buffer.is_empty());
    Ok(message)
}

pub(in crate::shim) fn assert_invalid<M: DeserializeOwned + Debug + PartialEq>(
    message: &impl Serialize,
) {
    assert_eq!(decoded::<M>(&framed(message)), Err(Error::InvalidMessage));
}

#[test]
fn a_hello_is_what_the_shim_means() {
    let hello = Hello {
        pid: 7,
        pid_in_agent_namespace: None,
        dp_rank: 3,
        page_size_tokens: 16,
        pool_tokens: 1 << 40,
        rows_total: 4096,
        instance: std::array::from_fn(|place| u8::try_from(place).unwrap()),
        sglang: "0.5.23".into(),
        shim: "0.1.0".into(),
        inert_reason: None,
        undemotable_reason: Some("no".into()),
        unauditable_reason: None,
        unpublishable_reason: None,
        device: "cpu".into(),
        page_bytes: Some(1 << 33),
        pin_safety: PinSafety {
            unguarded_reason: Some("why".into()),
            second_pool: Some("more".into()),
        },
    };
    assert_eq!(decoded(&example("hello")), Ok(ShimMessage::Hello(Box::new(hello))));
}

/// Returns the figures of the example `update`, which differ in each field.
fn example_facts(read_at: Instant) -> RankFacts {
    RankFacts {
        dp_rank: 0,
        read_at,
        pool_tokens: 2,
        available_tokens: 3,
        evictable_tokens: 4,
        protected_tokens: 5,
        held_tokens: 6,
        uncached_tokens: 7,
        rows_total: 8,
        rows_free: 9,
        running: 10,
        waiting: 11,
        events_lost: 12,
        recounts: 13,
        samples: 14,
        samples_ns: 15,
        weight_changes: 16,
        has_old_kv: true,
        host: Some(HostFacts {
            total_tokens: 17,
            used_tokens: 18,
            evictable_tokens: 19,
            loading_tokens: 20,
            writing_tokens: 21,
            loaded_tokens: 22,
            loads_us: 23,
        }),
    }
}

#[test]
fn an_update_is_what_the_shim_means() {
    let ShimMessage::Update(update) = decoded(&example("update")).unwrap() else {
        panic!("no update")
    };
    let facts = example_facts(update.facts.unwrap().read_at);
    let id = str::to_owned;
    let inspected = SessionFacts {
        id: id("g"),
        holds_row: true,
        in_flight: true,
        closing: false,
        allocated_tokens: 3,
        committed_tokens: 2,
        protected_tokens: 1,
        history_tokens: 4,
    };
    let events = vec![
        WireEvent::Opened { id: id("a"), ok: false },
        WireEvent::Closed { id: id("b") },
        WireEvent::Committed {
            id: id("c"),
            rid: "rid-1".into(),
            history_tokens: 60,
            is_retracted: true,
        },
        WireEvent::Aborted { id: id("d"), was_running: true },
        WireEvent::Demoted { number: 1 << 40, id: id("e"), refusal: Some("busy".into()) },
        WireEvent::Demoted { number: 8, id: id("f"), refusal: None },
        WireEvent::Prefetched { number: 1 << 40, id: id("h"), tokens: 1 << 33, refusal: None },
        WireEvent::Prefetched { number: 8, id: id("i"), tokens: 0, refusal: Some("busy".into()) },
        WireEvent::Inspected { number: 9, session: None },
        WireEvent::Inspected { number: 1 << 40, session: Some(inspected) },
    ];
    let session = SessionFacts {
        id: id("s"),
        holds_row: true,
        in_flight: false,
        closing: true,
        allocated_tokens: 59,
        committed_tokens: 58,
        protected_tokens: 32,
        history_tokens: 60,
    };
    let (gone_ids, sessions) = (vec![id("gone-é")], vec![session]);
    let (facts, begins_table, ends_table) = (Some(facts), true, false);
    let expected = Update { seq: 1, facts, begins_table, ends_table, events, gone_ids, sessions };
    assert_eq!(*update, expected);
    let ShimMessage::Update(update) = decoded(&example("update-without-facts")).unwrap() else {
        panic!("no update")
    };
    assert_eq!((update.facts, update.begins_table, update.ends_table), (None, false, true));
}

#[test]
fn an_audit_is_what_the_shim_means() {
    let (names, report) = (vec!["a".into(), "é".into()], vec![0, 1, 2, 3, 4]);
    let spent = Duration::from_nanos(1_000_001_000);
    let audited = AuditReply { number: 1 << 40, spent, refusal: None, names, report };
    assert_eq!(decoded(&example("audited")), Ok(ShimMessage::Audited(audited)));
    let (spent, refusal) = (Duration::ZERO, Some("no".into()));
    let refused = AuditReply { number: 2, spent, refusal, names: vec![], report: vec![] };
    assert_eq!(decoded(&example("refused")), Ok(ShimMessage::Audited(refused)));
}

#[test]
fn commands_are_what_the_shim_reads() {
    let run = |question, tokens_max, session: Option<&str>| ShimCommand::Run {
        question,
        tokens_max,
        session: session.map(str::to_owned),
    };
    let commands = [
        ("demote", ShimCommand::Demote { number: 1 << 40, session: "sé-1".into() }),
        (
            "prefetch",
            ShimCommand::Prefetch { number: 7, session: "sé-1".into(), tokens_max: 1 << 33 },
        ),
        ("inspect", ShimCommand::Inspect { number: 7, session: "sé-1".into() }),
        ("sample-now", ShimCommand::SampleNow),
        ("audit", ShimCommand::Audit { number: 1 << 40 }),
        ("republish", ShimCommand::Republish),
        ("run", run(7, 51_200, Some("s-2"))),
        ("run-unchanged", run(8, 0, None)),
    ];
    for (name, command) in commands {
        assert_eq!(command.encode(), Some(example(name)), "{name}");
    }
}

#[test]
fn every_incarnation_can_be_named_and_what_is_longer_is_refused() {
    let worker_id = "w".repeat(WORKER_ID_BYTES_MAX);
    let longest = format!("{}-{}", prefix(&worker_id, u64::MAX), u64::MAX);
    assert_eq!(longest.len(), INCARNATION_BYTES_MAX);
    let run = |name| ShimCommand::Run { question: 1, tokens_max: 2, session: Some(name) };
    for session in [longest, "n".repeat(NAME_BYTES_MAX)] {
        let (name, number) = (session.clone(), 1);
        assert!(run(session.clone()).encode().unwrap().ends_with(name.as_bytes()));
        let demote = ShimCommand::Demote { number, session: session.clone() };
        let inspect = ShimCommand::Inspect { number, session: session.clone() };
        let prefetch = ShimCommand::Prefetch { number, session: session.clone(), tokens_max: 1 };
        assert!(prefetch.encode().is_some());
        for command in [demote, inspect] {
            assert!(command.encode().unwrap().ends_with(name.as_bytes()));
        }
    }
    for bytes in [NAME_BYTES_MAX + 1, 1 << 16, 1 << 20] {
        assert_eq!(run("n".repeat(bytes)).encode(), None);
        let (number, session) = (1, "n".repeat(bytes));
        assert_eq!(ShimCommand::Demote { number, session: session.clone() }.encode(), None);
        assert_eq!(ShimCommand::Inspect { number, session: session.clone() }.encode(), None);
        let tokens_max = 1;
        assert_eq!(ShimCommand::Prefetch { number, session, tokens_max }.encode(), None);
    }
}

#[test]
fn a_frame_out_of_bounds_is_refused_before_it_is_there() {
    for length in [0, 1, 1 + (1 << 20), u32::MAX] {
        let refused = Err(Error::LengthOutOfBounds(length));
        assert_eq!(decoded::<ShimMessage>(&length.to_le_bytes()), refused);
    }
}

#[test]
fn another_protocol_is_named() {
    // The head of a hello of protocol 4, whose kind was 1.
    let error = decoded::<ShimMessage>(b"\x08\0\0\0\x04\x01\x07\0\0\0\x03\0").unwrap_err();
    assert_eq!(
        error.to_string(),
        "the shim speaks protocol 4, this agent 9: install the same version of both"
    );
}

#[test]
fn absurd_numbers_of_a_shim_can_be_added() {
    let audited = ("Audited", 1, (i64::MAX, 0), (), ["a"], Bytes::new(b"report"));
    let Ok(ShimMessage::Audited(reply)) = decoded(&framed(&audited)) else { panic!("it is valid") };
    assert_eq!(reply.spent, AUDIT_TIME_MAX);
    let (max, rows) = (u64::MAX, u32::MAX);
    let absurd = RankFacts {
        pool_tokens: max,
        protected_tokens: max,
        held_tokens: max,
        uncached_tokens: max,
        rows_free: rows,
        weight_changes: max,
        host: Some(HostFacts { used_tokens: max, loads_us: max, ..no_host_facts() }),
        ..no_facts()
    };
    let facts: RankFacts = rmp_serde::from_slice(&rmp_serde::to_vec(&absurd).unwrap()).unwrap();
    assert_eq!((facts.pool_tokens, facts.used_tokens()), (COUNT_MAX, 3 * COUNT_MAX));
    assert_eq!((facts.rows_free, facts.weight_changes), (u32::MAX, COUNT_MAX));
    let host = facts.host.unwrap();
    assert_eq!((host.used_tokens, host.loads_us), (COUNT_MAX, COUNT_MAX));
}

#[test]
fn unknown_messages_and_impossible_values_are_refused() {
    assert_invalid::<ShimMessage>(&("Goodbye",));
    let audited = |seconds: i64| ("Audited", 1, (seconds, 0), (), ["a"], Bytes::new(b"report"));
    assert!(decoded::<ShimMessage>(&framed(&audited(0))).is_ok());
    assert_invalid::<ShimMessage>(&audited(-1));
    // Before the rank come the array's head, the name and the pid.
    let hello = example("hello");
    let place = 5 + 3 + 6 + 1;
    assert_eq!(hello[place - 1..=place], [7, 3]);
    let with_rank = |rank: &[u8]| [&hello[5..place], rank, &hello[place + 1..]].concat();
    let decode = |rank: &[u8]| decoded::<ShimMessage>(&framed_bytes(&with_rank(rank)));
    assert!(decode(b"\xcd\x0f\xff").is_ok());
    for rank in [&b"\xcd\x10\0"[..], b"\xff", b"\xce\xff\xff\xff\xff", b"\xc0", b"\xc3", b"\xa13"] {
        assert_eq!(decode(rank), Err(Error::InvalidMessage), "{rank:?}");
    }
}

/// Returns the figures of a rank that has nothing.
pub(in crate::shim) fn no_facts() -> RankFacts {
    RankFacts {
        dp_rank: 0,
        read_at: service::clock::now(),
        pool_tokens: 0,
        available_tokens: 0,
        evictable_tokens: 0,
        protected_tokens: 0,
        held_tokens: 0,
        uncached_tokens: 0,
        rows_total: 0,
        rows_free: 0,
        running: 0,
        waiting: 0,
        events_lost: 0,
        recounts: 0,
        samples: 0,
        samples_ns: 0,
        weight_changes: 0,
        has_old_kv: false,
        host: None,
    }
}

fn no_host_facts() -> HostFacts {
    HostFacts {
        total_tokens: 0,
        used_tokens: 0,
        evictable_tokens: 0,
        loading_tokens: 0,
        writing_tokens: 0,
        loaded_tokens: 0,
        loads_us: 0,
    }
}

#[test]
fn lists_have_bounds() {
    let update = |events, gone, sessions| {
        let ids = |count| vec!["a"; count];
        let events = vec![("Closed", "a"); events];
        let sessions = vec![("a", true, true, true, 1, 2, 3, 4); sessions];
        framed(&("Update", 0, no_facts(), false, false, events, ids(gone), sessions))
    };
    let audited = |names| framed(&("Audited", 0, (0, 0), (), vec!["a"; names], Bytes::new(&[])));
    for allowed in [update(256, 512, 512), audited(1000)] {
        assert!(decoded::<ShimMessage>(&allowed).is_ok());
    }
    for frame in [update(257, 0, 0), update(0, 513, 0), update(0, 0, 513), audited(1001)] {
        assert_eq!(decoded::<ShimMessage>(&frame), Err(Error::InvalidMessage));
    }
}

#[test]
fn lengths_that_are_not_there_and_deep_values_cost_nothing() {
    let string = b"\x92\xa5Hello\xdb\xff\xff\xff\xff";
    let list = b"\x92\xa5Hello\xdd\xff\xff\xff\xff";
    for message in [&string[..], list, &[0x91; 100_000]] {
        assert_eq!(decoded::<ShimMessage>(&framed_bytes(message)), Err(Error::InvalidMessage));
    }
}

#[test]
fn a_hello_is_read_however_it_is_cut() {
    let bytes = example("hello");
    for cut in 0..bytes.len() {
        let mut frames = Frames::default();
        frames.push(&bytes[..cut]);
        assert_eq!(frames.take_message::<ShimMessage>(), Ok(None), "cut at {cut}");
        frames.push(&bytes[cut..]);
        assert!(matches!(frames.take_message(), Ok(Some(ShimMessage::Hello(_)))), "cut at {cut}");
        // The message alone, cut or extended, must be rejected.
        if (6..bytes.len()).contains(&cut) {
            let ended = framed_bytes(&bytes[5..cut]);
            assert_eq!(decoded::<ShimMessage>(&ended), Err(Error::InvalidMessage), "at {cut}");
        }
    }
    let extended = framed_bytes(&[&bytes[5..], &[0]].concat());
    assert_eq!(decoded::<ShimMessage>(&extended), Err(Error::InvalidMessage));
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        let mut frames = Frames::default();
        frames.push(&bytes);
        let _ = frames.take_message::<ShimMessage>();
        // With a valid frame and name the decoder gets further.
        for name in [&b"\x9f\xa5Hello"[..], b"\x98\xa6Update", b"\x96\xa7Audited"] {
            let _ = decoded::<ShimMessage>(&framed_bytes(&[name, &bytes].concat()));
        }
    }

    #[test]
    fn a_flipped_byte_never_panics(place in any::<prop::sample::Index>(), byte in any::<u8>()) {
        for name in ["hello", "update", "audited"] {
            let mut bytes = example(name);
            let place = place.index(bytes.len());
            bytes[place] = byte;
            let mut frames = Frames::default();
            frames.push(&bytes);
            let _ = frames.take_message::<ShimMessage>();
        }
    }
}
