//! Compares prompts with those that SGLang makes, recorded by `tests/sglang/prompts.py`.

use blocks::block::{BlockTokens, Chain, Scheme};
use contract::{body::Object, load::EngineFacts};
use proptest::prelude::*;
use serde::Deserialize;
use serde_json::{Value, json, value::RawValue};

use super::*;
use crate::{
    auth::Caller,
    metrics::Metrics,
    prompt::{EngineBlockFacts, Prompt, memory::TokenizerMemory},
    shares::{PoolSizes, Sharer, Shares},
};

macro_rules! data {
    ($name:literal) => {
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/", $name))
    };
}

#[derive(Deserialize)]
struct Case<'a> {
    case: String,
    template: Option<String>,
    #[serde(borrow)]
    body: &'a RawValue,
    ids: Option<Vec<u32>>,
}

fn model(template: Option<&str>) -> Model {
    Model::new(&TokenizerFiles {
        tokenizer: data!("model/tokenizer.json").to_vec(),
        config: data!("model/tokenizer_config.json").to_vec(),
        template: template.map(str::to_owned),
    })
    .unwrap()
}

fn facts(context_tokens: u32) -> EngineFacts {
    EngineFacts {
        version: String::new(),
        models: vec!["m".to_owned()],
        page_tokens: 1,
        context_tokens,
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

/// Returns the token ids that a router sends to an agent.
fn ids(model: &Model, form: PromptForm, body: &str) -> Option<Vec<u32>> {
    let facts = facts(100_000);
    let engine = EngineBlockFacts::from_facts(&facts).unwrap().with_model(model, 0);
    let prompt = Prompt::find(&Object::parse(body.as_bytes()).unwrap());
    prompt.token_ids(form, body.as_bytes(), &engine)
}

/// Returns the blocks that a router makes of a body.
fn blocks(model: &Model, form: PromptForm, body: &str) -> Option<Blocks> {
    let facts = facts(100_000);
    let engine = EngineBlockFacts::from_facts(&facts).unwrap().with_model(model, 0);
    let prompt = Prompt::find(&Object::parse(body.as_bytes()).unwrap());
    prompt.blocks(form, body.as_bytes(), &engine)
}

#[test]
fn a_text_that_finds_no_memory_is_estimated_and_one_that_fits_gives_its_memory_back() {
    let sizes = PoolSizes { requests: 1, turns: 1, body_bytes: 1, tokenizer_bytes: 320_000 };
    let shares = Shares::new(sizes);
    let metrics = Metrics::default().into();
    let caller = Caller {
        principal: "a".into(),
        is_admin: false,
        limits: Default::default(),
        announce: Default::default(),
    };
    let memory =
        TokenizerMemory::new(&shares.tokenizer_bytes, &Sharer::new(&caller, None), &metrics);
    let (model, facts) = (model(None), facts(100_000));
    let engine = EngineBlockFacts::from_facts(&facts).unwrap().with_model(&model, 0);
    let blocks = |words: usize| {
        let body = format!(r#"{{"text":"{}"}}"#, "word ".repeat(words));
        let prompt = Prompt::find(&Object::parse(body.as_bytes()).unwrap());
        let engine = engine.with_memory(&memory);
        prompt.blocks(PromptForm::Generate, body.as_bytes(), &engine).unwrap()
    };
    let too_long = blocks(2000);
    assert!(too_long.hashes.is_empty() && too_long.tokens >= 10_000 / BYTES_PER_TOKEN);
    for words in [50, 100, 150] {
        assert!(!blocks(words).hashes.is_empty(), "{words} words fit");
    }
}

#[test]
fn a_text_is_over_the_context_if_its_tokens_are_and_not_its_bytes() {
    let model = model(None);
    let is_over = |text: &str, context_tokens| {
        let facts = facts(context_tokens);
        let engine = EngineBlockFacts::from_facts(&facts).unwrap().with_model(&model, 0);
        let body = json!({ "text": text }).to_string();
        let prompt = Prompt::find(&Object::parse(body.as_bytes()).unwrap());
        prompt.is_over_context(PromptForm::Generate, body.as_bytes(), &engine)
    };
    let text = "the quick brown fox é漢 ".repeat(3_000);
    let tokens = u32::try_from(model.tokenizer.encode(&*text, false).unwrap().len()).unwrap();
    assert!(text.len() > 4 * PIECE_BYTES && tokens > 20_000, "{tokens}");
    assert!(!is_over(&text, tokens), "it fits exactly");
    assert!(!is_over(&text, tokens - tokens / 10), "so near, the engine decides");
    assert!(is_over(&text, tokens / 10 * 7));
    assert!(is_over(&text, 100));
}

#[test]
fn a_chat_is_counted_as_the_template_renders_it() {
    let (with_template, facts) = (model(Some(CHATML)), facts(1_000));
    let is_over = |body: Value| {
        let engine = EngineBlockFacts::from_facts(&facts).unwrap().with_model(&with_template, 0);
        let body = body.to_string();
        let prompt = Prompt::find(&Object::parse(body.as_bytes()).unwrap());
        prompt.is_over_context(PromptForm::Chat, body.as_bytes(), &engine)
    };
    let long = json!([{"role": "user", "content": "many words ".repeat(3_000)}]);
    assert!(is_over(json!({"messages": long})));
    assert!(!is_over(json!({"messages": [{"role": "user", "content": "few words"}]})));
    assert!(
        !is_over(json!({"messages": long, "reasoning": {"enabled": true}})),
        "rendered otherwise"
    );
}

fn blocks_of_ids(ids: &[u32]) -> Blocks {
    let scheme = Scheme::plain(BlockTokens::for_page(1).unwrap());
    let (mut chain, mut hashes) = (Chain::new(&scheme), vec![]);
    chain.push(ids, &mut hashes);
    Blocks {
        tokens: chain.tokens(),
        block_tokens: scheme.block_tokens,
        hashes,
        has_agent_hashes: true,
    }
}

/// Returns the text that is tokenized, for a failure message.
fn rendered(model: &Model, body: &str) -> Option<String> {
    let body = Object::parse(body.as_bytes()).unwrap();
    let get = |key| body.get(key).map(RawValue::get);
    let chat_members = ChatMembers {
        messages: get("messages")?,
        tools: get("tools"),
        tool_choice: get("tool_choice"),
        variables: get("chat_template_kwargs"),
        reasoning_effort: get("reasoning_effort"),
    };
    model.render(&chat_members, 0)
}

#[test]
fn prompts_are_those_that_sglang_makes() {
    let text = std::str::from_utf8(data!("prompts.json")).unwrap();
    let truth = Object::parse(text.as_bytes()).unwrap();
    let cases: Vec<Case<'_>> = serde_json::from_str(truth.get("cases").unwrap().get()).unwrap();
    let mut wrong = vec![];
    for Case { case, template, body, ids } in &cases {
        let template: Option<String> = template
            .as_ref()
            .map(|name| serde_json::from_str(truth.get(name).unwrap().get()).unwrap());
        let model = model(template.as_deref());
        let form = if template.is_some() { PromptForm::Chat } else { PromptForm::Generate };
        let found = blocks(&model, form, body.get()).filter(|blocks| blocks.has_agent_hashes);
        if found != ids.as_deref().map(blocks_of_ids) {
            let want = ids.as_ref().map(|ids| model.tokenizer.decode(ids, false).unwrap());
            wrong.push(format!("{case}\n{want:?}\n{:?}", rendered(&model, body.get())));
        }
        // The ids must be right too, as an agent has the engine compute them.
        assert_eq!(self::ids(&model, form, body.get()), *ids, "{case}");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    assert!(cases.len() > 40, "prompts.json has all cases");
}

const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n\
                      {% endfor %}<|im_start|>assistant\n";

fn chat(texts: &[String]) -> String {
    let message = |(at, text): (usize, &String)| {
        let role = if at % 2 == 0 { "user" } else { "assistant" };
        json!({"role": role, "content": text})
    };
    let messages: Vec<Value> = texts.iter().enumerate().map(message).collect();
    json!({"model": "m", "messages": messages}).to_string()
}

#[test]
fn the_date_is_the_one_it_is_asked_at() {
    let model = model(Some("{{ strftime_now('%d %b %Y, %B %m %H:%M:%S %%') }}"));
    let chat_members =
        ChatMembers { messages: r#"[{"role":"user","content":"u"}]"#, ..ChatMembers::default() };
    let shown = |unix_s| model.render(&chat_members, unix_s).unwrap();
    assert_eq!(shown(0), "01 Jan 1970, January 01 00:00:00 %");
    assert_eq!(shown(951_782_400 + 3661), "29 Feb 2000, February 02 01:01:01 %");
    assert_eq!(shown(1_795_219_199), "20 Nov 2026, November 11 23:59:59 %");
    for odd in ["%c", "%A", "%-d", "%f", "%Z", "%Q", "%"] {
        let odd = self::model(Some(&format!("{{{{ strftime_now('{odd}') }}}}")));
        assert_eq!(odd.render(&chat_members, 0), None);
    }
}

#[test]
fn what_can_t_be_followed_is_told_by_its_text() {
    let model = model(Some(CHATML));
    let has_agent_hashes = |body: &Value| {
        blocks(&model, PromptForm::Chat, &body.to_string()).unwrap().has_agent_hashes
    };
    let messages = json!([{"role": "user", "content": "u"}]);
    assert!(has_agent_hashes(&json!({"messages": messages})));
    let image =
        json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]);
    for body in [
        json!({"messages": image}),
        json!({"messages": messages, "continue_final_message": true}),
        json!({"messages": messages, "chat_template_kwargs": {"chat_template": "x"}}),
        json!({"messages": messages, "reasoning": {"enabled": true}}),
        json!({"messages": messages, "extra_key": "a"}),
        json!({"messages": [{"role": "user"}]}),
    ] {
        assert!(!has_agent_hashes(&body), "{body}");
    }
    assert!(
        !blocks(&self::model(None), PromptForm::Chat, &chat(&["a".into()]))
            .unwrap()
            .has_agent_hashes
    );
    assert!(!blocks(&model, PromptForm::Other, &chat(&["a".into()])).unwrap().has_agent_hashes);
}

#[test]
fn a_template_that_never_ends_is_stopped() {
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
    assert!(
        !blocks(&model(Some(endless)), PromptForm::Chat, &chat(&["a".into()]))
            .unwrap()
            .has_agent_hashes
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// With or without cuts and cached segments, a conversation has the tokens of its whole text.
    #[test]
    fn a_conversation_s_tokens_are_those_of_its_whole_text(
        texts in prop::collection::vec("([a-z é漢']|<\\|im_end\\|>|<think>|<|\n){0,40}", 1..12),
    ) {
        let model = model(Some(CHATML));
        for turns in (1..=texts.len()).step_by(2) {
            let body = chat(&texts[..turns]);
            let whole = rendered(&model, &body).unwrap();
            let ids = model.tokenizer.encode(whole, false).unwrap();
            prop_assert_eq!(blocks(&model, PromptForm::Chat, &body), Some(blocks_of_ids(ids.get_ids())));
            prop_assert_eq!(self::ids(&model, PromptForm::Chat, &body), Some(ids.get_ids().to_vec()));
        }
    }
}
