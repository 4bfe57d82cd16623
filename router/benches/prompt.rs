//! From a body to its routing blocks: what a turn costs whose placement asks for them.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use proto::{body::Object, load::EngineFacts};
use router::prompt::{Engine, Prompt, Route, learned::Learned};

const TOKENS: u32 = 131_072;

fn facts() -> EngineFacts {
    EngineFacts {
        version: String::new(),
        models: vec!["m".to_owned()],
        page_tokens: 1,
        context_tokens: 2 * TOKENS,
        vocabulary: None,
        streaming_sessions: false,
        radix_sessions: false,
        instance: String::new(),
        disaggregation: "null".to_owned(),
    }
}

/// As long as real ones: ids of a vocabulary of 150,000.
fn ids_body() -> String {
    let ids = (0..TOKENS).map(|at| (at.wrapping_mul(2_654_435_761) >> 8) % 150_000);
    format!("{{\"input_ids\":{:?}}}", ids.collect::<Vec<u32>>())
}

fn chat_body() -> String {
    let message = |at: u32| {
        let text = format!("Line {at} of what they talk about, \"quoted\" here and there.\n");
        serde_json::json!({"role": "user", "content": text.repeat(8)})
    };
    let messages: Vec<_> = (0..TOKENS / 128).map(message).collect();
    serde_json::json!({"model": "m", "messages": messages}).to_string()
}

fn blocks(c: &mut Criterion) {
    let facts = facts();
    let engine = Engine::of(&facts).expect("pages of one token have blocks");
    let mut group = c.benchmark_group("prompt");
    group.throughput(Throughput::Elements(TOKENS.into()));
    for (name, route, body) in
        [("ids", Route::Generate, ids_body()), ("text", Route::Chat, chat_body())]
    {
        let read = || Prompt::find(&Object::parse(body.as_bytes()).expect("it is an object"));
        let prompt = read();
        group.bench_function(format!("find/{name}"), |b| b.iter(read));
        group.bench_function(format!("blocks/{name}"), |b| {
            b.iter(|| prompt.blocks(route, body.as_bytes(), &engine));
        });
    }
    let body = ids_body();
    let prompt = Prompt::find(&Object::parse(body.as_bytes()).expect("it is an object"));
    let blocks = prompt.blocks(Route::Generate, body.as_bytes(), &engine).expect("it has ids");
    let mut learned = Learned::new(64 << 20);
    group.bench_function("given_again", |b| b.iter(|| learned.given(0, 1_000_000, &blocks)));
    group.finish();
}

criterion_group!(benches, blocks);
criterion_main!(benches);
