//! Fuzzes the router's path from a chat's body to token ids: template, tokenizer and blocks.
#![no_main]

use std::sync::LazyLock;

use contract::{body::Object, load::EngineFacts};
use libfuzzer_sys::fuzz_target;
use router::{
    fleet::tokenizer_files::TokenizerFiles,
    prompt::{EngineBlockFacts, Prompt, PromptForm, model::Model},
};

/// The longest prompt of the engine, in tokens.
const CONTEXT_TOKENS: u32 = 4096;
/// The longest prompt of an engine that fewer prompts fit into.
const SHORT_CONTEXT_TOKENS: u32 = 64;

static MODEL: LazyLock<Model> = LazyLock::new(|| {
    let files = TokenizerFiles {
        tokenizer: include_bytes!("../../data/model/tokenizer.json").to_vec(),
        config: include_bytes!("../../data/model/tokenizer_config.json").to_vec(),
        template: Some(include_str!("../../data/model/chat_template.jinja").to_owned()),
    };
    Model::new(&files).expect("a valid model")
});

fuzz_target!(|input: &[u8]| {
    let Some((&choice, body)) = input.split_first() else { return };
    let Ok(object) = Object::parse(body) else { return };
    let facts = EngineFacts {
        version: String::new(),
        models: vec!["m".to_owned()],
        page_tokens: 16,
        context_tokens: CONTEXT_TOKENS,
        vocabulary: None,
        streaming_sessions: false,
        radix_sessions: false,
        instance: String::new(),
        disaggregation: "null".to_owned(),
        shortens_prompts: false,
        transfer: None,
        adapters: None,
    };
    let forms =
        [PromptForm::Generate, PromptForm::Completions, PromptForm::Chat, PromptForm::Other];
    let form = forms[usize::from(choice) % forms.len()];
    let short_facts = EngineFacts { context_tokens: SHORT_CONTEXT_TOKENS, ..facts.clone() };
    let [engine, short_engine] = [&facts, &short_facts].map(|facts| {
        let engine = EngineBlockFacts::from_facts(facts).expect("a page of 16 tokens");
        engine.with_model(&MODEL, 1_700_000_000)
    });
    let prompt = Prompt::find(&object);
    if let Some(ids) = prompt.token_ids(form, body, &engine) {
        assert!(ids.len() <= CONTEXT_TOKENS as usize, "longer than the context");
        let is_over = prompt.is_over_context(form, body, &short_engine);
        assert!(!is_over || ids.len() > SHORT_CONTEXT_TOKENS as usize, "refused, and it fits");
    }
    if let Some(blocks) = prompt.blocks(form, body, &engine) {
        assert!(blocks.tokens <= u64::from(CONTEXT_TOKENS));
        assert!(blocks.hashes.len() as u64 * 16 <= blocks.tokens);
    }
});
