//! Fuzzes the agent's reader of what its shim sends, in pieces of any size.
#![no_main]

use libfuzzer_sys::fuzz_target;
use worker_agent::shim::codec::fuzzing::decode_stream;

fuzz_target!(|input: &[u8]| {
    let [step, stream @ ..] = input else { return };
    let step = usize::from(*step).max(1);
    assert_eq!(decode_stream(stream, step), decode_stream(stream, stream.len().max(1)));
});
