//! Tests of decoding the trimmer's frames: the shim encoder's own, and invalid ones.

use proptest::prelude::*;

use super::{
    super::super::codec::tests::{all_of, framed, python, unhex},
    *,
};

/// A script that prints, as hex, the shim's encoding of the frames that [`frames_of_the_trimmer`]
/// returns.
const ENCODE: &str = r#"
from berth_shim import wire
print(wire.encode_trimmer(7, bytes(range(16)), "0.5.23", "0.1.0", "").hex())
print(wire.encode_trimmer(7, bytes(16), "0.6.0", "0.1.0", "it is not known").hex())
for plan in (wire.TRIMMED, wire.RETOKENIZED, wire.DIVERGED, wire.REFUSED):
    number = (1 << 40) * (plan > wire.RETOKENIZED)
    print(wire.encode_planned(wire.Planned(number, 1, 2, 3, 4, plan, "s-é", "rid-1", "why")).hex())
"#;

fn frames_of_the_trimmer() -> Vec<TrimmerMessage> {
    let works = Trimmer {
        pid: 7,
        pid_in_agent_namespace: None,
        instance: u128::from_le_bytes(std::array::from_fn(|place| u8::try_from(place).unwrap())),
        sglang: "0.5.23".into(),
        shim: "0.1.0".into(),
        inert_reason: None,
    };
    let inert_reason = Some("it is not known".into());
    let inert = Trimmer { instance: 0, sglang: "0.6.0".into(), inert_reason, ..works.clone() };
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
    vec![
        TrimmerMessage::Trimmer(works),
        TrimmerMessage::Trimmer(inert),
        planned(Plan::Trimmed, None),
        planned(Plan::Retokenized, None),
        planned(Plan::Diverged, Some(1 << 40)),
        planned(Plan::Refused, Some(1 << 40)),
    ]
}

#[test]
fn what_the_trimmer_writes_is_what_it_means() {
    let Some(printed) = python(ENCODE, &[]) else { return };
    assert_eq!(
        all_of(TrimmerConnection::decode, &unhex(&printed)).unwrap(),
        frames_of_the_trimmer()
    );
}

#[test]
fn no_socket_reads_what_belongs_to_the_other() {
    for kind in [1, 2, 3, 4, 5, 16, 17, 18, 19, 20] {
        let frame = framed(&[codec::VERSION, kind]);
        let unknown = Some(codec::Error::UnknownKind(kind));
        let shims = all_of(codec::decode_message, &frame).err() != unknown;
        let trimmers = all_of(TrimmerConnection::decode, &frame).err() != unknown;
        assert_eq!((shims, trimmers), ((1..=3).contains(&kind), (4..=5).contains(&kind)));
    }
    // A plan number that the protocol doesn't define.
    let planned = [&[codec::VERSION, 5][..], &[0; 24], &[5], &[0; 6]].concat();
    assert_eq!(
        all_of(TrimmerConnection::decode, &framed(&planned)),
        Err(codec::Error::InvalidValue)
    );
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        for kind in [KIND_TRIMMER_HELLO, KIND_PLAN] {
            let frame = framed(&[&[codec::VERSION, kind], &bytes[..]].concat());
            let _ = all_of(TrimmerConnection::decode, &frame);
        }
    }
}
