//! Fuzzes what the router reads of a request, and the envelope between router and agent.
//!
//! The input is lines of headers, `name: value`, then an empty line and the body.
#![no_main]

use contract::{
    claim::Claim,
    envelope::{TRUSTED, TurnEnvelope},
};
use http::{HeaderMap, HeaderName, HeaderValue};
use libfuzzer_sys::fuzz_target;
use router::turn::{request, session_names::SessionHeaders};
use service::headers::strip_request;

fuzz_target!(|input: &[u8]| {
    let (mut headers, body) = split(input);
    if let Ok(envelope) = TurnEnvelope::read(&headers) {
        assert_eq!(through_header(&envelope), envelope, "an envelope doesn't survive its header");
    }
    let names = SessionHeaders::default();
    if let Ok(turn) = request::read(&names, &headers, body, "p")
        && let Some(session) = turn.session
    {
        assert_eq!(session.key.principal(), "p", "a client chose its principal");
        assert!((1..=256).contains(&session.key.id().len()));
        // Every session that a router takes can be claimed at an agent.
        through_header(&TurnEnvelope {
            principal: "p".into(),
            session: Some(Claim::for_session(&session.key)),
            ..TurnEnvelope::default()
        });
    }
    strip_request(&mut headers);
    for name in TRUSTED {
        assert!(!headers.contains_key(name), "a client may not say what a router says");
    }
});

fn through_header(envelope: &TurnEnvelope) -> TurnEnvelope {
    let mut headers = HeaderMap::new();
    envelope.write(&mut headers);
    TurnEnvelope::read(&headers).expect("it is valid and fits")
}

fn split(mut input: &[u8]) -> (HeaderMap, &[u8]) {
    let mut headers = HeaderMap::new();
    while let Some(end) = input.iter().position(|&byte| byte == b'\n') {
        let (line, rest) = (&input[..end], &input[end + 1..]);
        input = rest;
        let Some(colon) = line.iter().position(|&byte| byte == b':') else { break };
        let name = HeaderName::from_bytes(&line[..colon]);
        let value = HeaderValue::from_bytes(line[colon + 1..].trim_ascii());
        if let (Ok(name), Ok(value)) = (name, value) {
            headers.append(name, value);
        }
    }
    (headers, input)
}
