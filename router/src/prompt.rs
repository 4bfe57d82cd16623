//! Makes the routing blocks of a request's prompt from its body.
//!
//! Reading a turn only records where in the body the prompt is. Blocks are made when placement asks
//! for them; a turn that stays on its session's worker never needs them.
//!
//! - `ids`: token ids in the body. They are the engine's own, so their blocks are, too.
//! - [`model`]: makes the engine's tokens from text and messages if the model's files are known.
//! - `text`: stands in for a prompt whose tokens can't be made. Its bytes are the tokens, four
//!   bytes each. Such blocks only match each other, so they find only what workers were given
//!   before.
//! - `models`: holds the models and fetches their files from the agents. All else is pure.
//!
//! Prompts whose KV the engine keeps apart (by adapter, extra key or cache salt) have different
//! blocks. A turn with several prompts, or with only a delta, has no blocks.

mod ids;
pub mod model;
pub(crate) mod models;
#[cfg(feature = "text")]
mod segments;
mod text;

use std::ops::Range;

use proto::{
    block::{BlockHash, BlockTokens, Chain, Scheme},
    body::Object,
    load::EngineFacts,
    route::Kind,
};

use self::model::Model;

/// Members of a body that make up its prompt or keep its KV apart.
const KEYS: [&str; 27] = [
    "input_ids",
    "input_embeds",
    "text",
    "prompt",
    "system",
    "instructions",
    "tools",
    "messages",
    "input",
    "tool_choice",
    "chat_template_kwargs",
    "reasoning_effort",
    "reasoning",
    "thinking",
    "continue_final_message",
    "suffix",
    "image_data",
    "video_data",
    "audio_data",
    "session_params",
    "model",
    "lora_path",
    "extra_key",
    "cache_salt",
    "logprob_start_len",
    "echo",
    "return_hidden_states",
];
/// Members with which the engine's tokens are more than those of the text or the ids.
const MEDIA: [&str; 4] = ["input_embeds", "image_data", "video_data", "audio_data"];
/// Members with which the engine recomputes resident parts of a prompt, or reports less for them.
const RECOMPUTES: [&str; 3] = ["logprob_start_len", "echo", "return_hidden_states"];
/// Members with which the engine builds a prompt that differs from what [`model`] builds.
const UNSUPPORTED: [&str; 4] = ["reasoning", "thinking", "continue_final_message", "suffix"];

/// The form of a route's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptForm {
    /// SGLang's own route: ids or a text.
    Generate,
    /// OpenAI's completions: ids or a text.
    Completions,
    /// Messages in OpenAI's form.
    Chat,
    /// Messages in a form that the engine converts first.
    Other,
}

impl PromptForm {
    /// Returns the form of the bodies for a path, or `None` for a path that leaves no KV.
    #[must_use]
    pub fn for_path(path: &str) -> Option<Self> {
        match Kind::for_path(path)? {
            Kind::Generate => Some(Self::Generate),
            Kind::Completions => Some(Self::Completions),
            Kind::Chat => Some(Self::Chat),
            Kind::Messages | Kind::Responses => Some(Self::Other),
            Kind::Embeddings | Kind::Tokenizer | Kind::Models => None,
        }
    }

    /// Returns the members whose text makes up the prompt, in the order in which templates show
    /// them.
    fn texts(self) -> &'static [&'static str] {
        match self {
            Self::Generate => &["text"],
            Self::Completions => &["prompt"],
            Self::Chat => &["tools", "messages"],
            Self::Other => &["tools", "system", "instructions", "messages", "input"],
        }
    }
}

/// Where the prompt is in a body. Valid with that body only.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prompt {
    /// The values of [`KEYS`] in the body, with their byte ranges; nulls are left out.
    members: Vec<(&'static str, Range<usize>)>,
}

/// What is known of the engine for which blocks are made.
#[derive(Debug, Clone, Copy)]
pub struct Engine<'a> {
    block_tokens: BlockTokens,
    context_tokens: u64,
    models: &'a [String],
    model: Option<&'a Model>,
    unix_s: u64,
}

impl<'a> Engine<'a> {
    /// Creates the engine's entry from the engine's facts. `None` if there are no blocks for the
    /// engine's page size.
    #[must_use]
    pub fn from_facts(facts: &'a EngineFacts) -> Option<Self> {
        Some(Self {
            block_tokens: BlockTokens::for_page(facts.page_tokens).ok()?,
            context_tokens: facts.context_tokens.into(),
            models: &facts.models,
            model: None,
            unix_s: 0,
        })
    }

    /// Adds the model that makes the engine's tokens from text, and the time: some templates show
    /// the date.
    #[must_use]
    pub fn with_model(self, model: &'a Model, unix_s: u64) -> Self {
        Self { model: Some(model), unix_s, ..self }
    }
}

/// A prompt as routing blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocks {
    /// Number of tokens in the prompt, including those of a last block that isn't full. If the
    /// blocks aren't exact, it is estimated from the text and at most the engine's context.
    pub tokens: u64,
    /// Number of tokens in a block.
    pub block_tokens: BlockTokens,
    /// The blocks' hashes, from the beginning of the prompt.
    pub hashes: Vec<BlockHash>,
    /// Whether agents report the same blocks by these hashes. If not, only `residency::learned` can
    /// know the blocks.
    pub exact: bool,
}

/// What separates a prompt's KV in the engine's cache from the KV of equal tokens.
#[derive(Debug, Default, PartialEq, Eq)]
struct CacheNamespace {
    lora: Option<String>,
    extra_key: Option<String>,
    cache_salt: Option<String>,
}

impl Prompt {
    /// Records where a body's prompt is.
    #[must_use]
    pub fn find(body: &Object<'_>) -> Self {
        let mut members: Vec<(&'static str, Range<usize>)> = vec![];
        for member in body.members() {
            let Some(key) = KEYS.iter().find(|key| **key == member.key) else { continue };
            // JSON parsers take the last of duplicate members.
            members.retain(|(before, _)| before != key);
            if member.value.get() != "null" {
                members.push((key, member.range()));
            }
        }
        Self { members }
    }

    /// Makes the prompt's blocks for one engine. Returns `None` if the turn has no prompt of its
    /// own, has several, or has one that the engine will refuse.
    ///
    /// # Panics
    /// If `body` is not the body in which the prompt was found.
    #[must_use]
    pub fn blocks(&self, form: PromptForm, body: &[u8], engine: &Engine<'_>) -> Option<Blocks> {
        let body = std::str::from_utf8(body).expect("the body was read as JSON");
        if self.get(body, "session_params").is_some() {
            return None;
        }
        let cache_namespace = self.cache_namespace(form, body, engine)?;
        let key = if form == PromptForm::Completions { "prompt" } else { "input_ids" };
        let array = self.get(body, key).filter(|json| json.starts_with('['));
        match array.filter(|_| form != PromptForm::Other) {
            Some(_) if MEDIA.iter().any(|key| self.get(body, key).is_some()) => None,
            Some(array) => ids_blocks(array, &cache_namespace, engine),
            None => self
                .model_blocks(form, body, &cache_namespace, engine)
                .or_else(|| self.text_blocks(form, body, &cache_namespace, engine)),
        }
    }

    /// Returns the prompt's token ids as the engine has them, to compute the prompt before its
    /// turn.
    ///
    /// Returns `None` if the ids can't be known, if the engine keeps the prompt's KV apart by
    /// anything else, or if the engine will recompute the prompt in the turn anyway.
    ///
    /// # Panics
    /// If `body` is not the body in which the prompt was found.
    #[must_use]
    pub fn token_ids(
        &self,
        form: PromptForm,
        body: &[u8],
        engine: &Engine<'_>,
    ) -> Option<Vec<u32>> {
        let text = std::str::from_utf8(body).expect("the body was read as JSON");
        let cache_namespace = self.cache_namespace(form, text, engine)?;
        if self.get(text, "session_params").is_some()
            || cache_namespace != CacheNamespace::default()
        {
            return None;
        }
        if RECOMPUTES.iter().any(|key| self.get(text, key).is_some_and(|json| json != "false")) {
            return None;
        }
        if self.is_text(form, body) {
            return self.with_text_model(
                form,
                text,
                &cache_namespace,
                engine,
                |model, text_prompt| model.token_ids(text_prompt),
            );
        }
        if MEDIA.iter().any(|key| self.get(text, key).is_some()) {
            return None;
        }
        let key = if form == PromptForm::Completions { "prompt" } else { "input_ids" };
        serde_json::from_str(self.get(text, key)?).ok()
    }

    fn model_blocks(
        &self,
        form: PromptForm,
        body: &str,
        cache_namespace: &CacheNamespace,
        engine: &Engine<'_>,
    ) -> Option<Blocks> {
        let blocks =
            self.with_text_model(form, body, cache_namespace, engine, |model, text_prompt| {
                model.blocks(text_prompt)
            })?;
        Some(Blocks { exact: cache_namespace.extra_key.is_none(), ..blocks })
    }

    fn with_text_model<T>(
        &self,
        form: PromptForm,
        body: &str,
        cache_namespace: &CacheNamespace,
        engine: &Engine<'_>,
        use_model: impl FnOnce(&Model, &model::TextPrompt<'_>) -> Option<T>,
    ) -> Option<T> {
        let set = |key: &&&str| self.get(body, key).is_some_and(|json| json != "false");
        if MEDIA.iter().chain(&UNSUPPORTED).any(|key| set(&key)) {
            return None;
        }
        let text_prompt = model::TextPrompt {
            form,
            member: &|key| self.get(body, key),
            scheme: cache_namespace.scheme(engine.block_tokens),
            tokens_max: engine.context_tokens,
            unix_s: engine.unix_s,
        };
        use_model(engine.model?, &text_prompt)
    }

    /// Whether the prompt is text that must be tokenized.
    ///
    /// # Panics
    /// If `body` is not the body in which the prompt was found.
    #[must_use]
    pub fn is_text(&self, form: PromptForm, body: &[u8]) -> bool {
        let is_array = |key: &str| {
            let found = self.members.iter().find(|(known, _)| *known == key);
            found.is_some_and(|(_, range)| body[range.start] == b'[')
        };
        !is_array(if form == PromptForm::Completions { "prompt" } else { "input_ids" })
    }

    fn text_blocks(
        &self,
        form: PromptForm,
        body: &str,
        cache_namespace: &CacheNamespace,
        engine: &Engine<'_>,
    ) -> Option<Blocks> {
        let texts: Vec<&str> = form.texts().iter().filter_map(|key| self.get(body, key)).collect();
        let single = matches!(form, PromptForm::Generate | PromptForm::Completions);
        if texts.is_empty() || single && !texts[0].starts_with('"') {
            return None;
        }
        // A mark that no client sets by accident keeps these blocks apart from blocks of ids.
        let namespace =
            format!("\u{1}{}", cache_namespace.extra_key.as_deref().unwrap_or_default());
        let scheme =
            Scheme { namespace: Some(&namespace), ..cache_namespace.scheme(engine.block_tokens) };
        let (mut chain, mut hashes) = (Chain::new(&scheme), vec![]);
        text::push_texts(&texts, engine.context_tokens, &mut chain, &mut hashes);
        let block_tokens = engine.block_tokens;
        Some(Blocks { tokens: chain.tokens(), block_tokens, hashes, exact: false })
    }

    /// Returns what separates the prompt's KV from other KV, or `None` if that can't be known or
    /// the turn has several prompts.
    fn cache_namespace(
        &self,
        form: PromptForm,
        body: &str,
        engine: &Engine<'_>,
    ) -> Option<CacheNamespace> {
        let text = |key| match self.get(body, key) {
            None => Some(None),
            Some(json) => serde_json::from_str(json).ok().map(non_empty),
        };
        let model = if form == PromptForm::Generate { None } else { text("model")? };
        let adapter = model.and_then(|model| adapter(&model, engine.models));
        Some(CacheNamespace {
            lora: adapter.or(text("lora_path")?),
            extra_key: text("extra_key")?,
            cache_salt: text("cache_salt")?,
        })
    }

    fn get<'a>(&self, body: &'a str, key: &str) -> Option<&'a str> {
        let (_, range) = self.members.iter().find(|(known, _)| *known == key)?;
        Some(&body[range.clone()])
    }
}

impl CacheNamespace {
    fn scheme(&self, block_tokens: BlockTokens) -> Scheme<'_> {
        Scheme {
            block_tokens,
            lora: self.lora.as_deref(),
            namespace: self.extra_key.as_deref(),
            cache_salt: self.cache_salt.as_deref(),
        }
    }
}

fn ids_blocks(
    array: &str,
    cache_namespace: &CacheNamespace,
    engine: &Engine<'_>,
) -> Option<Blocks> {
    let scheme = cache_namespace.scheme(engine.block_tokens);
    let (mut chain, mut hashes) = (Chain::new(&scheme), vec![]);
    ids::push_ids(array, engine.context_tokens, &mut chain, &mut hashes).ok()?;
    Some(Blocks {
        tokens: chain.tokens(),
        block_tokens: engine.block_tokens,
        hashes,
        // KV events don't contain the extra key, so no agent can tell these blocks from those
        // without it.
        exact: cache_namespace.extra_key.is_none(),
    })
}

fn non_empty(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

/// Returns the adapter in a model's name, `base:adapter`, as the engine finds it. A served name
/// that contains a colon is a base as a whole.
fn adapter(model: &str, served: &[String]) -> Option<String> {
    if served.iter().any(|name| name == model) {
        return None;
    }
    let of_served = |name: &String| model.strip_prefix(name.as_str())?.strip_prefix(':');
    let adapter = served.iter().find_map(of_served).or(model.split_once(':').map(|(_, rest)| rest));
    adapter.and_then(|adapter| non_empty(adapter.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn engine(models: &[String]) -> Engine<'_> {
        let block_tokens = BlockTokens::for_page(1).unwrap();
        Engine { block_tokens, context_tokens: 100_000, models, model: None, unix_s: 0 }
    }

    fn blocks(form: PromptForm, body: &str) -> Option<Blocks> {
        let prompt = Prompt::find(&Object::parse(body.as_bytes()).unwrap());
        prompt.blocks(form, body.as_bytes(), &engine(&["m:1".to_owned()]))
    }

    fn ids(tokens: u32) -> String {
        format!("{:?}", (0..tokens).collect::<Vec<u32>>())
    }

    fn blocks_of_ids(rest: &str) -> Option<Blocks> {
        blocks(PromptForm::Generate, &format!(r#"{{"input_ids":{}{rest}}}"#, ids(130)))
    }

    /// Returns the number of leading blocks that two prompts have in common.
    fn common(one: &Blocks, two: &Blocks) -> usize {
        one.hashes.iter().zip(&two.hashes).take_while(|(one, two)| one == two).count()
    }

    #[test]
    fn token_ids_name_the_blocks_that_an_agent_names() {
        let tokens: Vec<u32> = (0..130).collect();
        let scheme = Scheme::plain(BlockTokens::for_page(1).unwrap());
        let (mut chain, mut hashes) = (Chain::new(&scheme), vec![]);
        chain.push(&tokens, &mut hashes);
        let want = Blocks {
            tokens: 130,
            block_tokens: BlockTokens::for_page(1).unwrap(),
            hashes,
            exact: true,
        };
        assert_eq!(blocks_of_ids(""), Some(want.clone()));
        assert_eq!(
            blocks_of_ids(r#","text":"x","extra_key":"","lora_path":null"#),
            Some(want.clone())
        );
        let body = format!(r#"{{"model":"m:1","prompt":{}}}"#, ids(130));
        assert_eq!(blocks(PromptForm::Completions, &body), Some(want.clone()));
        let body = format!(r#"{{"input_ids":[1],"model":"m:1","input_ids":{}}}"#, ids(130));
        assert_eq!(blocks(PromptForm::Chat, &body), Some(want));
    }

    #[test]
    fn a_prompt_is_computed_before_its_turn_only_where_its_ids_are_all_there_is_to_it() {
        let made = |form: PromptForm, body: &str| {
            let prompt = Prompt::find(&Object::parse(body.as_bytes()).unwrap());
            prompt.token_ids(form, body.as_bytes(), &engine(&["m".to_owned()]))
        };
        let with =
            |rest: &str| made(PromptForm::Generate, &format!(r#"{{"input_ids":[7,8]{rest}}}"#));
        for rest in ["", r#","cache_salt":"","lora_path":null"#, r#","echo":false"#] {
            assert_eq!(with(rest), Some(vec![7, 8]), "{rest}");
        }
        for rest in [
            r#","lora_path":"a""#,
            r#","extra_key":"a""#,
            r#","cache_salt":"a""#,
            r#","session_params":{"id":"a"}"#,
            r#","image_data":"a""#,
            r#","logprob_start_len":0"#,
            r#","echo":true"#,
        ] {
            assert_eq!(with(rest), None, "{rest}");
        }
        assert_eq!(made(PromptForm::Completions, r#"{"prompt":[7],"model":"m"}"#), Some(vec![7]));
        assert_eq!(made(PromptForm::Completions, r#"{"prompt":[7],"model":"m:adapter"}"#), None);
        assert_eq!(made(PromptForm::Completions, r#"{"prompt":[[7],[8]]}"#), None, "two prompts");
        assert_eq!(made(PromptForm::Generate, r#"{"text":"no model makes tokens of it"}"#), None);
    }

    #[test]
    fn what_the_engine_keeps_apart_has_blocks_apart() {
        let plain = blocks_of_ids("").unwrap();
        let mut seen = vec![plain.hashes[0]];
        for rest in [
            r#","lora_path":"a""#,
            r#","extra_key":"a""#,
            r#","cache_salt":"a""#,
            r#","lora_path":"a","cache_salt":"a""#,
        ] {
            let separate = blocks_of_ids(rest).unwrap();
            assert!(!seen.contains(&separate.hashes[0]), "{rest}");
            assert_eq!(separate.exact, !rest.contains("extra_key"), "{rest}");
            seen.push(separate.hashes[0]);
        }
        let model = |model: &str| {
            let body = format!(r#"{{"model":"{model}","prompt":{}}}"#, ids(64));
            blocks(PromptForm::Completions, &body).unwrap().hashes[0]
        };
        assert_eq!(model("m:1"), plain.hashes[0], "a served name has no adapter");
        assert_eq!(model("m:1:a"), seen[1]);
        assert_eq!(model("other:a"), seen[1]);
    }

    #[test]
    fn a_turn_without_one_prompt_has_no_blocks() {
        for rest in [
            r#","lora_path":["a"]"#,
            r#","cache_salt":7"#,
            r#","session_params":{"id":"s"}"#,
            r#","image_data":"x""#,
            r#","input_embeds":[[0.1]]"#,
        ] {
            assert_eq!(blocks_of_ids(rest), None, "{rest}");
        }
        let many = ids(100_001);
        let generate = [
            "{}",
            r#"{"input_ids":[[1],[2]]}"#,
            r#"{"text":["a","b"]}"#,
            r#"{"input_ids":null}"#,
            &format!(r#"{{"input_ids":{many}}}"#),
        ];
        for body in generate {
            assert_eq!(blocks(PromptForm::Generate, body), None, "{:.60}", body);
        }
        assert_eq!(blocks(PromptForm::Completions, r#"{"prompt":["a"]}"#), None);
        assert_eq!(blocks(PromptForm::Chat, r#"{"prompt":"a"}"#), None);
    }

    fn chat(turns: usize, tail: &str) -> String {
        let turn = |at| {
            let (role, text) = (["user", "assistant"][at % 2], format!("{at} é ").repeat(60));
            serde_json::json!({"role": role, "content": text}).to_string()
        };
        let turns: Vec<String> = (0..turns).map(turn).collect();
        format!(r#"{{"tools":[{{"name":"f"}}],"messages":[{}{tail}],"n":1}}"#, turns.join(","))
    }

    #[test]
    fn a_conversation_that_grows_keeps_its_blocks() {
        let (one, two) = (chat(5, ""), chat(7, ""));
        let one = blocks(PromptForm::Chat, &one).unwrap();
        let two = blocks(PromptForm::Chat, &two).unwrap();
        assert!(!one.exact && one.hashes.len() > 5 && two.hashes.len() > one.hashes.len());
        assert_eq!(common(&one, &two), one.hashes.len());
        let other = blocks(PromptForm::Chat, &chat(5, "").replace("\"f\"", "\"g\"")).unwrap();
        assert_eq!(common(&one, &other), 0, "the tools differ");
        let salted = chat(5, "").replace("\"n\":1", "\"cache_salt\":\"a\"");
        assert_eq!(common(&one, &blocks(PromptForm::Chat, &salted).unwrap()), 0);
    }

    #[test]
    fn an_image_weighs_little_and_parts_what_follows_it() {
        let with = |image: &str| {
            let url = format!("data:image/png;base64,{}", image.repeat(100_000));
            let part = serde_json::json!({"type": "image_url", "image_url": {"url": url}});
            blocks(PromptForm::Chat, &chat(6, &format!(r#",{{"content":[{part}]}}"#))).unwrap()
        };
        let (one, two, none) =
            (with("A"), with("B"), blocks(PromptForm::Chat, &chat(6, "")).unwrap());
        assert!(one.tokens < none.tokens + 64, "{} {}", one.tokens, none.tokens);
        assert_eq!(common(&one, &none), none.hashes.len());
        let follows = |image: &str| {
            let url = format!("data:,{image}");
            blocks(
                PromptForm::Chat,
                &chat(6, "").replacen("0 é", &format!(r#"","i":"{url}","t":""#), 1),
            )
        };
        assert_eq!(common(&follows("A").unwrap(), &follows("B").unwrap()), 0);
        assert_eq!(one.tokens, two.tokens);
    }

    proptest! {
        #[test]
        fn no_body_panics(values in prop::collection::vec((0..KEYS.len(), "\\PC{0,20}", 0..4), 0..6)) {
            let members = values.into_iter().map(|(key, text, kind)| {
                let value = match kind {
                    0 => serde_json::json!(text),
                    1 => serde_json::json!([1, 2, 3]),
                    2 => serde_json::json!([{"content": text}]),
                    _ => serde_json::json!(null),
                };
                format!("{:?}:{value}", KEYS[key])
            });
            let body = format!("{{{}}}", members.collect::<Vec<_>>().join(","));
            for form in [PromptForm::Generate, PromptForm::Completions, PromptForm::Chat, PromptForm::Other] {
                if let Some(blocks) = blocks(form, &body) {
                    prop_assert_eq!(blocks.hashes.len() as u64, blocks.tokens / 64);
                }
            }
        }
    }
}
