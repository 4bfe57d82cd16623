//! Tests of each rule alone, of the order of reasons, and of versions.

use super::*;

/// What the shims of an engine with one pool say if their functions are on.
fn good_word() -> ShimWord {
    ShimWord { unguarded_reason: None, second_pool: Some(None) }
}

fn refused(offer: &Offer, retention: Retention) -> Option<&str> {
    let off = offer.refused.iter().find(|off| off.retention == retention)?;
    Some(&off.reason)
}

type Change = fn(&mut EngineInfo);

fn halve(info: &mut EngineInfo, mode: &str, decode_cache: bool) {
    info.facts.disaggregation = mode.into();
    info.facts.transfer = Some(KvTransfer {
        bootstrap_host: None,
        bootstrap_port: 8998,
        backend: "mooncake".into(),
        kv_dtype: "auto".into(),
        tp_size: 1,
        decode_cache,
        kv_bytes_per_token: None,
    });
}

/// A combination of flags, with the shim's word and a part of the reason for which `pinned` and
/// `tagged` are refused; `None`: offered.
type Case = (Change, fn() -> ShimWord, Option<&'static str>, Option<&'static str>);

/// Each combination.
const CASES: &[Case] = &[
    (|_| {}, ShimWord::none_yet, None, None),
    (|_| {}, good_word, None, None),
    (
        |info| info.facts.streaming_sessions = false,
        good_word,
        Some("without --enable-streaming-session"),
        None,
    ),
    (
        |info| info.facts.radix_sessions = false,
        good_word,
        None,
        Some("without --enable-session-radix-cache"),
    ),
    (
        |info| halve(info, "prefill", false),
        good_word,
        Some("--disaggregation-mode prefill"),
        Some("a prefill engine keeps no sessions"),
    ),
    (
        |info| halve(info, "decode", false),
        good_word,
        Some("--disaggregation-mode decode"),
        Some("--disaggregation-decode-enable-radix-cache"),
    ),
    (|info| halve(info, "decode", true), good_word, Some("--disaggregation-mode decode"), None),
    (
        |info| info.cache.is_radix_cache_off = true,
        good_word,
        None,
        Some("with --disable-radix-cache"),
    ),
    (
        |info| info.cache.storage = Storage::Present,
        ShimWord::none_yet,
        Some("has a --hicache-storage-backend: with one, a pinned session's second turn ends"),
        None,
    ),
    (
        |info| info.cache.storage = Storage::Attachable,
        ShimWord::none_yet,
        Some("may be attached while it runs"),
        None,
    ),
    (
        |info| info.cache.storage = Storage::Present,
        || ShimWord { unguarded_reason: Some("its guard is off".into()), ..good_word() },
        Some("Berth's shim prevents that, but its guard is off"),
        None,
    ),
    (|info| info.cache.storage = Storage::Present, good_word, None, None),
    (|info| info.cache.storage = Storage::Attachable, good_word, None, None),
    (
        |info| info.cache.second_pool = Some(SecondPool::SlidingWindow),
        ShimWord::none_yet,
        Some("a second pool, for the KV of sliding-window layers"),
        None,
    ),
    (
        |info| info.cache.second_pool = Some(SecondPool::Recurrent),
        ShimWord::none_yet,
        Some("a second pool, for the state of recurrent layers"),
        None,
    ),
    // The shim looks at the engine itself, so its word counts more than flags and files.
    (|info| info.cache.second_pool = Some(SecondPool::Recurrent), good_word, None, None),
    (
        |_| {},
        || ShimWord { second_pool: Some(Some("what the shim saw".into())), ..good_word() },
        Some("a second pool, for what the shim saw"),
        None,
    ),
];

#[test]
fn an_unsafe_combination_is_not_offered_and_the_reason_is_said() {
    for (number, (change, word, pinned, tagged)) in CASES.iter().enumerate() {
        let mut info = EngineInfo::example("i");
        change(&mut info);
        let offer = offer(&info, &word());
        for (retention, expected) in [(Retention::Pinned, pinned), (Retention::Tagged, tagged)] {
            let reason = refused(&offer, retention);
            assert_eq!(offer.offered.contains(&retention), expected.is_none(), "case {number}");
            match (reason, expected) {
                (Some(reason), Some(part)) => assert!(reason.contains(part), "{reason}"),
                _ => assert_eq!(reason, None, "case {number}"),
            }
        }
        assert_eq!(offer.offered.last(), Some(&Retention::None));
        assert_eq!(offer.offered.len() + offer.refused.len(), 3);
    }
}

#[test]
fn the_best_retention_comes_first_and_a_missing_flag_is_the_first_reason() {
    let mut info = EngineInfo::example("i");
    let all = [Retention::Pinned, Retention::Tagged, Retention::None];
    assert_eq!(offer(&info, &ShimWord::none_yet()).offered, all);
    info.facts.streaming_sessions = false;
    info.cache.storage = Storage::Present;
    let offer = offer(&info, &ShimWord::none_yet());
    assert_eq!(
        refused(&offer, Retention::Pinned),
        Some("the engine runs without --enable-streaming-session")
    );
}

#[test]
fn a_model_s_config_shows_recurrent_layers() {
    let pool = |config: &str| second_pool_of(&serde_json::from_str(config).unwrap());
    for config in [
        r#"{"model_type": "falcon_mamba"}"#,
        r#"{"model_type": "m", "text_config": {"model_type": "qwen3_5_text"}}"#,
        r#"{"llm_config": {"model_type": "nemotron_h"}}"#,
        r#"{"model_type": "m", "layer_types": ["full_attention", "linear_attention"]}"#,
    ] {
        assert_eq!(pool(config), Some(SecondPool::Recurrent), "{config}");
    }
    for config in [
        r#"{"model_type": "llama"}"#,
        r#"{"model_type": "granitemoehybrid", "layer_types": ["attention"]}"#,
        r#"{"layer_types": "full_attention", "text_config": null}"#,
        "[]",
    ] {
        assert_eq!(pool(config), None, "{config}");
    }
}

#[test]
fn every_rule_is_the_reason_of_a_case() {
    let applies = |rule: &Rule| {
        CASES.iter().any(|(change, word, ..)| {
            let mut info = EngineInfo::example("i");
            change(&mut info);
            let reason = (rule.reason)(&info, &word());
            reason.is_some() && reason.as_deref() == refused(&offer(&info, &word()), rule.retention)
        })
    };
    for (number, rule) in RULES.iter().enumerate() {
        assert!(applies(rule), "rule {number} has no case");
    }
}

#[test]
fn a_rule_ends_with_the_version_that_mends_the_fault() {
    let rule = Rule {
        retention: Retention::Pinned,
        mended_in: Some([0, 6, 1]),
        reason: |_, _| Some("a fault".to_owned()),
    };
    let mut info = EngineInfo::example("i");
    for (version, is_safe) in [
        ("0.5.23", false),
        ("0.6.0.post1", false),
        ("0.6.1", true),
        ("0.6.1.post2", true),
        ("0.10.0", true),
        ("1.0.0", true),
        // These may be older than they look.
        ("0.6.1rc1", false),
        ("unknown", false),
        ("", false),
    ] {
        info.facts.version = version.to_owned();
        let reason =
            find_reason(std::slice::from_ref(&rule), Retention::Pinned, &info, &good_word());
        assert_eq!(reason.is_none(), is_safe, "{version}");
    }
}
