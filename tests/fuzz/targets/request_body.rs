//! Fuzzes the agent's check and rewriting of request bodies, for every route.
#![no_main]

use bytes::Bytes;
use contract::{
    body::{OWNED_KEYS, Object},
    load::Retention,
    route::ROUTES,
};
use libfuzzer_sys::fuzz_target;
use worker_agent::{
    data_port::request::{BodyContext, parse},
    session::{PlannedTurn, TurnSession},
};

fuzz_target!(|input: &[u8]| {
    let Some((&choice, body)) = input.split_first() else { return };
    let kind = ROUTES[usize::from(choice >> 2) % ROUTES.len()].kind;
    let in_session = choice & 1 == 1;
    let retention = if choice & 2 == 2 { Retention::Pinned } else { Retention::Tagged };
    let context = BodyContext {
        kind,
        in_session,
        vocabulary_size: Some(320),
        resident_tokens: 7,
        served_model: Some("m".into()),
    };
    let body = Bytes::copy_from_slice(body);
    let Ok(request) = parse(&context, &body) else { return };
    if !kind.has_json_body() {
        let turn = PlannedTurn {
            session: None,
            dp_rank: 3,
            growth_tokens_max: None,
            weights_epoch: 0,
            run_mode: None,
        };
        assert_eq!(request.engine_body(&body, &turn, "R").concat(), body);
        return;
    }
    let session = in_session.then(|| TurnSession {
        key: contract::id::SessionKey::new("p", "s").expect("short names"),
        incarnation: "berth-1".into(),
        retention,
        trim: None,
    });
    let turn = PlannedTurn {
        session,
        dp_rank: 3,
        growth_tokens_max: None,
        weights_epoch: 0,
        run_mode: None,
    };
    let rewritten = request.engine_body(&body, &turn, "R").concat();
    let object = Object::parse(&rewritten).expect("a rewritten body is a JSON object");
    let client = Object::parse(&body).expect("it was taken");
    let is_owned =
        |key: &str| OWNED_KEYS.contains(&key) || kind.rid_key().is_some_and(|rid| rid == key);
    // Berth's own members are there once each, with Berth's values, and of the client's only the
    // others.
    for key in OWNED_KEYS.into_iter().chain(kind.rid_key()) {
        let values = object.members().iter().filter(|member| member.key == key);
        let values: Vec<&str> = values.map(|member| member.value.get()).collect();
        let own: &[&str] = match key {
            "routed_dp_rank" => &["3"],
            "session_params" if in_session && retention == Retention::Pinned => {
                &[r#"{"id":"berth-1"}"#]
            }
            "session_id" if in_session && retention == Retention::Tagged && kind.is_taggable() => {
                &[r#""berth-1""#]
            }
            // An engine can't give one id to several texts to embed.
            _ if kind.rid_key() == Some(key) && !values.is_empty() => {
                assert!(values == [r#""R""#] || values == [r#""resp_R""#], "{key}: {values:?}");
                continue;
            }
            _ => &[],
        };
        assert_eq!(values, own, "{key}");
    }
    let kept = |object: &Object<'_>| -> Vec<(String, String)> {
        let members = object.members().iter().filter(|member| !is_owned(&member.key));
        members.map(|member| (member.key.clone(), member.value.get().to_owned())).collect()
    };
    assert_eq!(kept(&object), kept(&client), "a member of the client changed");
});
