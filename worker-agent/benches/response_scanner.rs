//! Benchmark of the response scanner, on two streams and one value as SGLang sends them.

use std::hint::black_box;

use criterion::{Criterion, Throughput};
use worker_agent::data_port::response_scanner::Scanner;

const EVENT_STREAM: Option<&[u8]> = Some(b"text/event-stream");
/// The bytes of each chunk in which a response comes.
const CHUNK_BYTES: usize = 16 << 10;

/// Returns a stream of `/v1/chat/completions`, with one short text in each event.
fn short_deltas() -> String {
    let event = |token: usize| {
        format!(
            "data: {{\"id\":\"0123456789abcdef\",\"object\":\"chat.completion.chunk\",\
             \"created\":1795219199,\"model\":\"model\",\"choices\":[{{\"index\":0,\"delta\":\
             {{\"role\":null,\"content\":\" {token}\",\"tool_calls\":null}},\
             \"logprobs\":null,\"finish_reason\":null}}],\"usage\":null}}\n\n"
        )
    };
    (0..4000).map(event).collect()
}

/// Returns a stream of `/generate`, which repeats the text so far in each event.
fn repeated_text() -> String {
    let event = |words: usize| {
        let text = " word".repeat(words);
        format!(
            "data: {{\"text\":\"{text}\",\"output_ids\":[1,2,3],\"meta_info\":{{\
             \"finish_reason\":null,\"prompt_tokens\":51,\"completion_tokens\":{words},\
             \"cached_tokens\":45}}}}\n\n"
        )
    };
    (0..1000).map(event).collect()
}

/// Returns an answer of `/generate` with 100,000 tokens.
fn single_value() -> String {
    let (text, ids) = ("some words\\n ".repeat(50_000), "317,".repeat(100_000));
    let meta_info = "{\"prompt_tokens\":25,\"completion_tokens\":100001,\"cached_tokens\":4}";
    format!("{{\"text\":\"{text}\",\"output_ids\":[{ids}1],\"meta_info\":{meta_info}}}")
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let mut group = criterion.benchmark_group("scan");
    for (name, content_type, response) in [
        ("short_deltas", EVENT_STREAM, short_deltas()),
        ("repeated_text", EVENT_STREAM, repeated_text()),
        ("single_value", None, single_value()),
    ] {
        group.throughput(Throughput::Bytes(response.len() as u64));
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let mut scanner = Scanner::new(content_type);
                for chunk in response.as_bytes().chunks(CHUNK_BYTES) {
                    black_box(scanner.push(chunk));
                }
            });
        });
    }
    group.finish();
    criterion.final_summary();
}
