//! Tests of the trimmer's messages: the examples of both ends, and invalid ones.

use proptest::prelude::*;

use super::{
    super::{
        super::codec::{
            ShimMessage,
            tests::{assert_invalid, decoded, example, framed, framed_bytes},
        },
        Plan,
    },
    *,
};

#[test]
fn what_the_trimmer_writes_is_what_it_means() {
    let works = Trimmer {
        pid: 7,
        pid_in_agent_namespace: None,
        instance: std::array::from_fn(|place| u8::try_from(place).unwrap()),
        sglang: "0.5.23".into(),
        shim: "0.1.0".into(),
        inert_reason: None,
    };
    let inert_reason = Some("it is not known".into());
    let inert =
        Trimmer { instance: [0; 16], sglang: "0.6.0".into(), inert_reason, ..works.clone() };
    let planned = |plan, question| {
        TrimmerMessage::Planned(PlanReport {
            question,
            plan,
            shared_tokens: 1,
            committed_tokens: 2,
            appended_tokens: 3,
            prompt_tokens: 4,
            session: "s-é".into(),
            rid: "rid-1".into(),
            why: "why".into(),
        })
    };
    let messages = [
        ("trimmer", TrimmerMessage::Trimmer(works)),
        ("inert", TrimmerMessage::Trimmer(inert)),
        ("trimmed", planned(Plan::Trimmed, None)),
        ("retokenized", planned(Plan::Retokenized, None)),
        ("diverged", planned(Plan::Diverged, Some(1 << 40))),
        ("planned-refused", planned(Plan::NotTrimmed, Some(1 << 40))),
    ];
    for (name, message) in messages {
        assert_eq!(decoded(&example(name)), Ok(message), "{name}");
    }
}

#[test]
fn no_socket_reads_what_belongs_to_the_other() {
    for (name, is_the_shims, is_the_trimmers) in [
        ("hello", true, false),
        ("update", true, false),
        ("audited", true, false),
        ("trimmer", false, true),
        ("trimmed", false, true),
        ("demote", false, false),
        ("sample-now", false, false),
        ("audit", false, false),
        ("republish", false, false),
        ("run", false, false),
    ] {
        let frame = example(name);
        assert_eq!(decoded::<ShimMessage>(&frame).is_ok(), is_the_shims, "{name}");
        assert_eq!(decoded::<TrimmerMessage>(&frame).is_ok(), is_the_trimmers, "{name}");
    }
    let planned = |plan| ("Planned", 1, plan, 0, 0, 0, 0, "s", "rid", "");
    assert!(decoded::<TrimmerMessage>(&framed(&planned("trimmed"))).is_ok());
    assert_invalid::<TrimmerMessage>(&planned("shortened"));
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        for name in [&b"\x96\xa7Trimmer"[..], b"\x9a\xa7Planned"] {
            let _ = decoded::<TrimmerMessage>(&framed_bytes(&[name, &bytes].concat()));
        }
    }
}
