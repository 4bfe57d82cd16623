//! Tests of the protocol: the shim's own encoder and decoder, cut streams and random bytes.

use std::{path::Path, process::Command as Process};

use proptest::prelude::*;

use super::*;
use crate::{config::WORKER_ID_BYTES_MAX, incarnation::prefix};

/// Prints the frames of [`frames_of_the_shim`] in hex, encoded by the shim's own code.
const ENCODE: &str = r#"
from berth_shim import wire
facts = wire.SessionFacts(wire.HOLDS_ROW | wire.CLOSING, 59, 58, 32, 60)
head = wire.Figures(*range(1, 16), True)
events = [
    wire.encode_opened("a", False), wire.encode_closed("b"),
    wire.encode_committed("c", "rid-1", 60, True), wire.encode_aborted("d", True),
    wire.encode_demoted("e", "busy"), wire.encode_demoted("f", ""),
]
print(wire.encode_hello(wire.Hello(
    7, 3, 16, 1 << 40, 4096, bytes(range(16)), "0.5.23", "0.1.0", "", "no", "", "", "cpu", 1 << 33,
)).hex())
print(wire.encode_update(head, events, ["gone-é"], [("é" * 300, facts)]).hex())
print(wire.encode_audit(1 << 40, 1000, "", ["a", "é"], bytes(range(5))).hex())
print(wire.encode_audit(2, 0, "no", [], b"").hex())
"#;

/// Decodes, with the shim's own code, what the agent's encoder wrote.
const DECODE: &str = r#"
import sys
from berth_shim import wire
print(*wire.take_commands(bytearray.fromhex(sys.argv[1])))
"#;

/// Runs Python code and returns its output, or `None` if there is no Python.
pub(in crate::shim) fn python(code: &str, args: &[&str]) -> Option<String> {
    let shim = Path::new(env!("CARGO_MANIFEST_DIR")).join("shim");
    let mut process = Process::new("python3");
    process.args(["-B", "-c", code]).args(args).env("PYTHONPATH", shim);
    let Ok(output) = process.output() else {
        report_skip();
        return None;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).expect("what Python prints is ASCII"))
}

#[expect(clippy::print_stderr, reason = "the tests' output must show what was skipped")]
fn report_skip() {
    eprintln!("skipped: no python3 to run the shim's encoder");
}

fn all(bytes: &[u8]) -> Result<Vec<ShimMessage>, Error> {
    all_of(decode_message, bytes)
}

pub(in crate::shim) fn all_of<M>(decode: DecodeFn<M>, bytes: &[u8]) -> Result<Vec<M>, Error> {
    let mut frames = Frames::default();
    frames.push(bytes);
    let mut messages = vec![];
    while let Some(message) = frames.take_message(decode)? {
        messages.push(message);
    }
    Ok(messages)
}

pub(in crate::shim) fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text.trim().chars().filter_map(|digit| digit.to_digit(16)).collect();
    digits.chunks(2).map(|pair| u8::try_from(pair[0] * 16 + pair[1]).unwrap()).collect()
}

fn frames_of_the_shim() -> Vec<ShimMessage> {
    let hello = Hello {
        pid: 7,
        pid_in_agent_namespace: None,
        dp_rank: 3,
        page_size_tokens: 16,
        pool_tokens: 1 << 40,
        rows_total: 4096,
        instance: u128::from_le_bytes(std::array::from_fn(|place| u8::try_from(place).unwrap())),
        sglang: "0.5.23".into(),
        shim: "0.1.0".into(),
        inert_reason: None,
        undemotable_reason: Some("no".into()),
        unauditable_reason: None,
        unpublishable_reason: None,
        device: "cpu".into(),
        page_bytes: Some(1 << 33),
    };
    let rid = "rid-1".into();
    let committed = WireEventKind::Committed { rid, history_tokens: 60, is_retracted: true };
    let event = |id: &str, kind| WireEvent { id: id.into(), kind };
    let update = Update {
        seq: 1,
        events_lost: 2,
        samples: 3,
        samples_ns: 4,
        recounts: 5,
        pool_tokens: 6,
        available_tokens: 7,
        evictable_tokens: 8,
        protected_tokens: 9,
        held_tokens: 10,
        uncached_tokens: 11,
        rows_total: 12,
        rows_free: 13,
        running: 14,
        waiting: 15,
        is_full_table: true,
        events: vec![
            event("a", WireEventKind::Opened { ok: false }),
            event("b", WireEventKind::Closed),
            event("c", committed),
            event("d", WireEventKind::Aborted { was_running: true }),
            event("e", WireEventKind::Demoted { refusal: "busy".into() }),
            event("f", WireEventKind::Demoted { refusal: String::new() }),
        ],
        gone_ids: vec!["gone-é".into()],
        sessions: vec![SessionFacts {
            // The shim truncates names of more than 512 bytes between characters; this one had 600.
            id: "é".repeat(256),
            holds_row: true,
            in_flight: false,
            closing: true,
            allocated_tokens: 59,
            committed_tokens: 58,
            protected_tokens: 32,
            history_tokens: 60,
        }],
    };
    let [audited, refused] = audit_replies();
    vec![
        ShimMessage::Hello(Box::new(hello)),
        ShimMessage::Update(Box::new(update)),
        ShimMessage::Audited(audited),
        ShimMessage::Audited(refused),
    ]
}

fn audit_replies() -> [AuditReply; 2] {
    let (names, report) = (vec!["a".into(), "é".into()], vec![0, 1, 2, 3, 4]);
    let spent = Duration::from_micros(1);
    let audited = AuditReply { number: 1 << 40, spent, refusal: None, names, report };
    let (spent, refusal) = (Duration::ZERO, Some("no".into()));
    [audited, AuditReply { number: 2, spent, refusal, names: vec![], report: vec![] }]
}

#[test]
fn what_the_shim_writes_is_what_it_means() {
    let Some(printed) = python(ENCODE, &[]) else { return };
    assert_eq!(all(&unhex(&printed)).unwrap(), frames_of_the_shim());
}

#[test]
fn every_incarnation_can_be_named_and_what_is_longer_is_refused() {
    let worker_id = "w".repeat(WORKER_ID_BYTES_MAX);
    let longest = format!("{}-{}", prefix(&worker_id, u64::MAX), u64::MAX);
    assert_eq!(longest.len(), INCARNATION_BYTES_MAX);
    let run = |session| ShimCommand::Run { question: 1, tokens_max: 2, session };
    for name in [&longest, &"n".repeat(NAME_BYTES_MAX)] {
        assert!(run(name.clone()).encode().unwrap().ends_with(name.as_bytes()));
        assert!(ShimCommand::Demote(name.clone()).encode().unwrap().ends_with(name.as_bytes()));
    }
    for bytes in [NAME_BYTES_MAX + 1, 1 << 16, 1 << 20] {
        assert_eq!(run("n".repeat(bytes)).encode(), None);
        assert_eq!(ShimCommand::Demote("n".repeat(bytes)).encode(), None);
    }
}

#[test]
fn what_the_agent_writes_the_shim_reads() {
    let run = |question, tokens_max, session: &str| ShimCommand::Run {
        question,
        tokens_max,
        session: session.into(),
    };
    let commands = [
        ShimCommand::Demote("sé-1".into()),
        ShimCommand::SampleNow,
        ShimCommand::Audit(1 << 40),
        ShimCommand::Republish,
        run(7, 51_200, "s-2"),
        run(8, 0, ""),
    ];
    let bytes: Vec<u8> = commands.iter().flat_map(|c| c.encode().unwrap()).collect();
    // Fixed bytes, so that both ends can't change together unnoticed.
    let fixed = [
        &b"\x09\0\0\0\x04\x10\x05\0s\xc3\xa9-1\x02\0\0\0\x04\x11"[..],
        b"\x0a\0\0\0\x04\x12\0\0\0\0\0\x01\0\0\x02\0\0\0\x04\x13",
        b"\x13\0\0\0\x04\x14\x07\0\0\0\0\0\0\0\0\xc8\0\0\x03\0s-2",
        b"\x10\0\0\0\x04\x14\x08\0\0\0\0\0\0\0\0\0\0\0\0\0",
    ];
    assert_eq!(bytes, fixed.concat());
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let Some(printed) = python(DECODE, &[&hex]) else { return };
    assert_eq!(
        printed.trim(),
        "(16, 'sé-1') (17, '') (18, 1099511627776) (19, '') \
         (20, Run(number=7, tokens_max=51200, session='s-2')) \
         (20, Run(number=8, tokens_max=0, session=''))"
    );
}

#[test]
fn a_frame_out_of_bounds_is_refused_before_it_is_there() {
    for length in [0, 1, 1 + (1 << 20), u32::MAX] {
        assert_eq!(all(&length.to_le_bytes()), Err(Error::LengthOutOfBounds(length)));
    }
}

#[test]
fn another_protocol_and_unknown_kinds_are_named() {
    assert_eq!(all(b"\x02\0\0\0\x01\x01"), Err(Error::OtherVersion(1)));
    assert_eq!(all(b"\x02\0\0\0\x04\x63"), Err(Error::UnknownKind(99)));
}

/// The bytes of a hello, made without Python.
fn hello_bytes() -> Vec<u8> {
    let mut body = vec![VERSION, KIND_HELLO];
    for number in [7_u32, 3, 16] {
        body.extend(number.to_le_bytes());
    }
    body.extend(2048_u64.to_le_bytes());
    body.extend(8_u32.to_le_bytes());
    body.extend([9; 16]);
    for text in ["0.5.23", "0.1.0", "why", "", "", "", "cpu"] {
        body.extend(u16::try_from(text.len()).unwrap().to_le_bytes());
        body.extend(text.as_bytes());
    }
    body.extend(4096_u64.to_le_bytes());
    framed(&body)
}

pub(in crate::shim) fn framed(body: &[u8]) -> Vec<u8> {
    [&u32::try_from(body.len()).unwrap().to_le_bytes(), body].concat()
}

#[test]
fn a_hello_is_read_however_it_is_cut() {
    let bytes = hello_bytes();
    let [ShimMessage::Hello(hello)] = &all(&bytes).unwrap()[..] else { panic!("no hello") };
    assert_eq!((hello.dp_rank, hello.inert_reason.as_deref()), (3, Some("why")));
    for cut in 0..bytes.len() {
        let mut frames = Frames::default();
        frames.push(&bytes[..cut]);
        assert_eq!(frames.take_message(decode_message), Ok(None), "cut at {cut}");
        frames.push(&bytes[cut..]);
        assert!(
            matches!(frames.take_message(decode_message), Ok(Some(ShimMessage::Hello(_)))),
            "cut at {cut}"
        );
        // The body alone, cut or extended, must be rejected.
        if (6..bytes.len()).contains(&cut) {
            assert_eq!(all(&framed(&bytes[4..cut])), Err(Error::WrongBodyLength), "ended at {cut}");
        }
    }
    assert_eq!(all(&framed(&[&bytes[4..], &[0]].concat())), Err(Error::WrongBodyLength));
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        let _ = all(&bytes);
        // With a valid frame header the decoder gets further.
        for kind in [KIND_HELLO, KIND_UPDATE, KIND_AUDITED] {
            let _ = all(&framed(&[&[VERSION, kind], &bytes[..]].concat()));
        }
    }

    #[test]
    fn a_flipped_byte_never_panics(place in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = hello_bytes();
        let place = place.index(bytes.len());
        bytes[place] = byte;
        let _ = all(&bytes);
    }
}
