//! Fuzzes the scanner of the engine's answers: how an answer is cut into pieces changes nothing.
#![no_main]

use http::StatusCode;
use libfuzzer_sys::fuzz_target;
use worker_agent::data_port::response_scanner::Scanner;

fuzz_target!(|input: &[u8]| {
    let [choice, step, answer @ ..] = input else { return };
    let content_type: &[u8] =
        if choice & 1 == 1 { b"text/event-stream" } else { b"application/json" };
    let mut whole = Scanner::new(Some(content_type));
    whole.push(answer);
    let mut in_pieces = Scanner::new(Some(content_type));
    for piece in answer.chunks(usize::from(*step).max(1)) {
        in_pieces.push(piece);
    }
    assert_eq!(whole.is_complete(), in_pieces.is_complete());
    for status in [StatusCode::OK, StatusCode::BAD_REQUEST] {
        let (whole, in_pieces) = (whole.outcome(status), in_pieces.outcome(status));
        assert_eq!(format!("{whole:?}"), format!("{in_pieces:?}"));
    }
});
