//! Fuzzes the decoder of the engine's KV events.
#![no_main]

use libfuzzer_sys::fuzz_target;
use worker_agent::kv_events::decode::{CacheEvent, decode};

fuzz_target!(|message: &[u8]| {
    let Ok(batch) = decode(message) else { return };
    // Whatever was decoded came from the message, so a short message can't fill the memory.
    let mut items = batch.events.len();
    for event in &batch.events {
        if let CacheEvent::Stored(stored) = event {
            items += stored.pages.len() + stored.tokens.len();
        }
    }
    assert!(items <= message.len(), "{items} items in {} bytes", message.len());
});
