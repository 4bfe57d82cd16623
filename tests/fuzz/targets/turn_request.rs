//! Fuzzes what the router reads of a request, and the headers between router and agent.
//!
//! The input is lines of headers, `name: value`, then an empty line and the body.
#![no_main]

use contract::claim::{self, Claim};
use http::{HeaderMap, HeaderName, HeaderValue};
use libfuzzer_sys::fuzz_target;
use router::turn::{request, session_names::SessionHeaders};
use service::headers::strip_request;

fuzz_target!(|input: &[u8]| {
    let (mut headers, body) = split(input);
    if let Ok(Some((claim, key))) = Claim::from_headers(&headers) {
        let mut again = HeaderMap::new();
        claim.write_to(&mut again);
        let (same, same_key) = Claim::from_headers(&again).expect("valid").expect("present");
        assert_eq!((same, same_key), (claim, key), "a claim doesn't survive its header");
    }
    drop((claim::rank(&headers), claim::resident_tokens(&headers)));
    let names = SessionHeaders::default();
    if let Ok(turn) = request::read(&names, &headers, body, "p")
        && let Some(session) = turn.session
    {
        assert_eq!(session.key.principal(), "p", "a client chose its principal");
        assert!((1..=256).contains(&session.key.id().len()));
        // Every session that a router takes can be claimed at an agent.
        Claim::for_session(&session.key).write_to(&mut HeaderMap::new());
    }
    strip_request(&mut headers);
    for name in claim::TRUSTED {
        assert!(!headers.contains_key(name), "a client may not say what a router says");
    }
});

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
