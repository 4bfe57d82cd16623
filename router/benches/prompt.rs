//! Benchmarks of making routing blocks from a body, for turns whose placement needs them.

use contract::{body::Object, load::EngineFacts};
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use router::{
    prompt::{EngineBlockFacts, Prompt, PromptForm},
    residency::learned::LearnedPrompts,
};

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
        shortens_prompts: false,
        transfer: None,
        adapters: None,
    }
}

/// A body with ids of realistic length, from a vocabulary of 150,000.
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
    let engine = EngineBlockFacts::from_facts(&facts).expect("pages of one token have blocks");
    let mut group = c.benchmark_group("prompt");
    group.throughput(Throughput::Elements(TOKENS.into()));
    for (name, route, body) in
        [("ids", PromptForm::Generate, ids_body()), ("text", PromptForm::Chat, chat_body())]
    {
        let read = || Prompt::find(&Object::parse(body.as_bytes()).expect("the body is an object"));
        let prompt = read();
        group.bench_function(format!("find/{name}"), |b| b.iter(read));
        group.bench_function(format!("blocks/{name}"), |b| {
            b.iter(|| prompt.blocks(route, body.as_bytes(), &engine));
        });
    }
    let body = ids_body();
    let prompt = Prompt::find(&Object::parse(body.as_bytes()).expect("the body is an object"));
    let blocks = prompt.blocks(PromptForm::Generate, body.as_bytes(), &engine).expect("it has ids");
    let mut learned = LearnedPrompts::new(64 << 20);
    group.bench_function("given_again", |b| b.iter(|| learned.record(0, 1_000_000, &blocks)));
    group.finish();
}

/// Benchmarks turns of a conversation of about 100,000 tokens whose earlier turns were tokenized.
#[cfg(feature = "text")]
fn next_turn(c: &mut Criterion) {
    use std::cell::Cell;

    use router::{fleet::tokenizer_files::TokenizerFiles, prompt::model::Model};

    let model = Model::new(&TokenizerFiles {
        tokenizer: include_bytes!("../../tests/data/model/tokenizer.json").to_vec(),
        config: include_bytes!("../../tests/data/model/tokenizer_config.json").to_vec(),
        template: Some(include_str!("../../tests/data/model/chat_template.jinja").to_owned()),
    })
    .expect("the tests' model can be read");
    let facts = facts();
    let engine = EngineBlockFacts::from_facts(&facts)
        .expect("pages of one token have blocks")
        .with_model(&model, 0);
    let words = "the session keeps its turns on the worker that holds the pages of its prompt. ";
    let message = |at: usize, text: &str| {
        let role = ["user", "assistant"][at % 2];
        serde_json::json!({"role": role, "content": format!("{at} {}", text.repeat(20))})
    };
    let mut messages: Vec<_> = (0..230).map(|at| message(at, words)).collect();
    let body = |messages: &[serde_json::Value]| {
        serde_json::json!({"model": "m", "messages": messages}).to_string()
    };
    let make_blocks = |body: &str| {
        let prompt = Prompt::find(&Object::parse(body.as_bytes()).expect("the body is an object"));
        prompt.blocks(PromptForm::Chat, body.as_bytes(), &engine).expect("a chat has blocks")
    };
    let old = make_blocks(&body(&messages));
    assert!(old.has_agent_hashes, "the conversation was tokenized");
    let mut group = c.benchmark_group(format!("chat of {} tokens", old.tokens));
    let turn = Cell::new(1_000);
    group.bench_function("next turn", |b| {
        let next = || {
            turn.set(turn.get() + 1);
            messages.push(message(turn.get(), words));
            let body = body(&messages);
            messages.pop();
            body
        };
        b.iter_batched(next, |body| make_blocks(&body), BatchSize::LargeInput);
    });
    group.bench_function("same turn", |b| {
        let body = body(&messages);
        b.iter(|| make_blocks(&body));
    });
    group.bench_function("first turn", |b| {
        let next = || {
            turn.set(turn.get() + 1);
            // Another first message, so that nothing of the prompt is cached.
            let first = message(turn.get(), words);
            body(&[&[first], &messages[1..]].concat())
        };
        b.iter_batched(next, |body| make_blocks(&body), BatchSize::LargeInput);
    });
    group.finish();
}

#[cfg(not(feature = "text"))]
fn next_turn(_: &mut Criterion) {}

criterion_group!(benches, blocks, next_turn);
criterion_main!(benches);
