//! Makes the routing blocks of a request's prompt from the request's body.
//!
//! A routing block is a hashed part of a prompt (see [`blocks::block`]). Reading a turn only
//! records where in the body the prompt is: that is a [`Prompt`]. Its blocks are made when
//! placement asks for them: a turn that stays on its session's worker usually doesn't need them.
//!
//! Token ids are hashed as they are (`ids`), text and messages with the engine's model if its files
//! are loaded ([`model`]). Of other prompts, four bytes of the body count as one token (`text`): no
//! engine reports such blocks, so they are only compared with those of prompts that this router
//! sent before. All but `models` is pure.
//!
//! Prompts have different blocks if the engine keeps their KV apart: by adapter, extra key or cache
//! salt. A turn with several prompts has no blocks, nor has a delta turn, whose body holds only
//! what is new in its session.

mod ids;
mod length;
pub(crate) mod memory;
pub mod model;
pub(crate) mod models;
#[cfg(feature = "text")]
mod segments;
mod text;

use std::ops::Range;

use blocks::block::{BlockHash, BlockTokens, Chain, Scheme};
use contract::{body::Object, load::EngineFacts, route::Kind};

use self::{memory::TokenizerMemory, model::Model};

/// Members of a body that make up its prompt, keep its KV apart or change how it is computed.
const PROMPT_KEYS: [&str; 27] = [
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
/// Members that add tokens to those of the text or the ids.
const MEDIA_KEYS: [&str; 4] = ["input_embeds", "image_data", "video_data", "audio_data"];
/// Members whose results concern the prompt's own tokens. For them, the engine computes resident
/// parts of the prompt again, or its results leave these parts out.
const RECOMPUTED_KEYS: [&str; 3] = ["logprob_start_len", "echo", "return_hidden_states"];
/// Members that change the engine's prompt in a way that [`model`] doesn't reproduce.
const UNSUPPORTED_KEYS: [&str; 4] = ["reasoning", "thinking", "continue_final_message", "suffix"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptForm {
    /// SGLang's own route, with ids or a text.
    Generate,
    /// OpenAI's completions, with ids or a text.
    Completions,
    /// Messages in OpenAI's form.
    Chat,
    /// Messages in a form that the engine converts first: OpenAI's responses, Anthropic's messages.
    Other,
}

impl PromptForm {
    /// `None` for a path that leaves no KV.
    #[must_use]
    pub fn for_path(path: &str) -> Option<Self> {
        match Kind::for_path(path)? {
            Kind::Generate => Some(Self::Generate),
            Kind::Completions => Some(Self::Completions),
            Kind::Chat => Some(Self::Chat),
            Kind::Messages | Kind::Responses => Some(Self::Other),
            _ => None,
        }
    }

    /// In the order in which templates print the members.
    fn text_keys(self) -> &'static [&'static str] {
        match self {
            Self::Generate => &["text"],
            Self::Completions => &["prompt"],
            Self::Chat => &["tools", "messages"],
            Self::Other => &["tools", "system", "instructions", "messages", "input"],
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prompt {
    /// Byte ranges of the values of [`PROMPT_KEYS`]; nulls are left out.
    members: Vec<(&'static str, Range<usize>)>,
}

#[derive(Debug, Clone, Copy)]
pub struct EngineBlockFacts<'a> {
    block_tokens: BlockTokens,
    context_tokens: u64,
    served_names: &'a [String],
    model: Option<&'a Model>,
    /// 0 without a model.
    unix_s: u64,
    /// `None`: the memory isn't bounded.
    memory: Option<&'a TokenizerMemory>,
}

impl<'a> EngineBlockFacts<'a> {
    #[must_use]
    pub fn from_facts(facts: &'a EngineFacts) -> Option<Self> {
        Some(Self {
            block_tokens: BlockTokens::for_page(facts.page_tokens).ok()?,
            context_tokens: facts.context_tokens.into(),
            served_names: &facts.models,
            model: None,
            unix_s: 0,
            memory: None,
        })
    }

    /// Also adds the time, because some templates show the date.
    #[must_use]
    pub fn with_model(self, model: &'a Model, unix_s: u64) -> Self {
        Self { model: Some(model), unix_s, ..self }
    }

    pub(crate) fn with_memory(self, memory: &'a TokenizerMemory) -> Self {
        Self { memory: Some(memory), ..self }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocks {
    /// Includes those after the last full block; at most the engine's context length. An estimate
    /// if some of the text wasn't tokenized.
    pub tokens: u64,
    pub block_tokens: BlockTokens,
    pub hashes: Vec<BlockHash>,
    /// Whether an agent that has these blocks reports them by the same hashes. If not, only this
    /// router's record of the prompts that it sent (`residency::learned`) can find the blocks.
    pub has_agent_hashes: bool,
}

/// The values of a request by which the engine keeps the KV of equal tokens apart.
#[derive(Debug, Default, PartialEq, Eq)]
struct CacheScope {
    lora: Option<String>,
    extra_key: Option<String>,
    cache_salt: Option<String>,
}

impl Prompt {
    #[must_use]
    pub fn find(body: &Object<'_>) -> Self {
        let mut members: Vec<(&'static str, Range<usize>)> = vec![];
        for member in body.members() {
            let Some(key) = PROMPT_KEYS.iter().find(|key| **key == member.key) else { continue };
            // JSON parsers take the last of duplicate members.
            members.retain(|(earlier_key, _)| earlier_key != key);
            if member.value.get() != "null" {
                members.push((key, member.range()));
            }
        }
        Self { members }
    }

    /// `None` if the body holds no full prompt or several prompts, or if the engine will refuse it.
    ///
    /// # Panics
    /// If `body` is not the body in which the prompt was found.
    #[must_use]
    pub fn blocks(
        &self,
        form: PromptForm,
        body: &[u8],
        engine: &EngineBlockFacts<'_>,
    ) -> Option<Blocks> {
        let body = std::str::from_utf8(body).expect("the body was read as JSON");
        if self.member_json(body, "session_params").is_some() {
            return None;
        }
        let cache_scope = self.cache_scope(form, body, engine)?;
        let ids_array = self.member_json(body, ids_key(form)).filter(|json| json.starts_with('['));
        match ids_array.filter(|_| form != PromptForm::Other) {
            Some(_) if MEDIA_KEYS.iter().any(|key| self.member_json(body, key).is_some()) => None,
            Some(ids_array) => ids_blocks(ids_array, &cache_scope, engine),
            None => self
                .model_blocks(form, body, &cache_scope, engine)
                .or_else(|| self.text_blocks(form, body, &cache_scope, engine)),
        }
    }

    /// The ids with which an agent can have the prompt computed before its turn (staged prefill),
    /// with the turn's [`Self::cache_salt`].
    ///
    /// `None` if the ids can't be known or are more than the engine takes, or if the turn would not
    /// find the computed KV: it has an adapter or an extra key, or the engine recomputes its
    /// prompt.
    ///
    /// # Panics
    /// If `body` is not the body in which the prompt was found.
    #[must_use]
    pub fn token_ids(
        &self,
        form: PromptForm,
        body: &[u8],
        engine: &EngineBlockFacts<'_>,
    ) -> Option<Vec<u32>> {
        let text = std::str::from_utf8(body).expect("the body was read as JSON");
        let cache_scope = self.cache_scope(form, text, engine)?;
        if self.member_json(text, "session_params").is_some()
            || cache_scope.lora.is_some()
            || cache_scope.extra_key.is_some()
        {
            return None;
        }
        if RECOMPUTED_KEYS
            .iter()
            .any(|key| self.member_json(text, key).is_some_and(|json| json != "false"))
        {
            return None;
        }
        let ids: Vec<u32> = if self.is_text(form, body) {
            self.with_text_model(form, text, &cache_scope, engine, |model, text_prompt| {
                model.token_ids(text_prompt)
            })?
        } else if MEDIA_KEYS.iter().any(|key| self.member_json(text, key).is_some()) {
            return None;
        } else {
            serde_json::from_str(self.member_json(text, ids_key(form))?).ok()?
        };
        (ids.len() as u64 <= engine.context_tokens).then_some(ids)
    }

    /// Empty salts count as absent, as for the engine.
    ///
    /// # Panics
    /// If `body` is not the body in which the prompt was found.
    #[must_use]
    pub fn cache_salt(&self, body: &[u8]) -> Option<String> {
        let text = std::str::from_utf8(body).expect("the body was read as JSON");
        serde_json::from_str(self.member_json(text, "cache_salt")?).ok().and_then(non_empty)
    }

    fn model_blocks(
        &self,
        form: PromptForm,
        body: &str,
        cache_scope: &CacheScope,
        engine: &EngineBlockFacts<'_>,
    ) -> Option<Blocks> {
        let blocks =
            self.with_text_model(form, body, cache_scope, engine, |model, text_prompt| {
                model.blocks(text_prompt)
            })?;
        Some(Blocks { has_agent_hashes: cache_scope.extra_key.is_none(), ..blocks })
    }

    /// `None` if no model is loaded, or if it can't make the engine's tokens for such a request.
    fn with_text_model<T>(
        &self,
        form: PromptForm,
        body: &str,
        cache_scope: &CacheScope,
        engine: &EngineBlockFacts<'_>,
        use_model: impl FnOnce(&Model, &model::TextPrompt<'_>) -> Option<T>,
    ) -> Option<T> {
        if self.has_unsupported_members(body) {
            return None;
        }
        let text_prompt = model::TextPrompt {
            form,
            member_json: &|key| self.member_json(body, key),
            scheme: cache_scope.scheme(engine.block_tokens),
            tokens_max: engine.context_tokens,
            unix_s: engine.unix_s,
            memory: engine.memory,
        };
        use_model(engine.model?, &text_prompt)
    }

    fn has_unsupported_members(&self, body: &str) -> bool {
        let is_set = |key: &&str| self.member_json(body, key).is_some_and(|json| json != "false");
        MEDIA_KEYS.iter().chain(&UNSUPPORTED_KEYS).any(is_set)
    }

    /// # Panics
    /// If `body` is not the body in which the prompt was found.
    #[must_use]
    pub fn is_text(&self, form: PromptForm, body: &[u8]) -> bool {
        let is_array = |key: &str| {
            let member = self.members.iter().find(|(member_key, _)| *member_key == key);
            member.is_some_and(|(_, range)| body[range.start] == b'[')
        };
        !is_array(ids_key(form))
    }

    fn text_blocks(
        &self,
        form: PromptForm,
        body: &str,
        cache_scope: &CacheScope,
        engine: &EngineBlockFacts<'_>,
    ) -> Option<Blocks> {
        let texts: Vec<&str> =
            form.text_keys().iter().filter_map(|key| self.member_json(body, key)).collect();
        let takes_only_string = matches!(form, PromptForm::Generate | PromptForm::Completions);
        if texts.is_empty() || takes_only_string && !texts[0].starts_with('"') {
            return None;
        }
        // These tokens are bytes, so their blocks must differ from those of an engine's tokens. No
        // client sets an extra key with U+0001 by accident, so such a key keeps them apart.
        let marked_extra_key =
            format!("\u{1}{}", cache_scope.extra_key.as_deref().unwrap_or_default());
        let scheme = Scheme {
            namespace: Some(&marked_extra_key),
            ..cache_scope.scheme(engine.block_tokens)
        };
        let (mut chain, mut hashes) = (Chain::new(&scheme), vec![]);
        text::push_texts(&texts, engine.context_tokens, &mut chain, &mut hashes);
        let block_tokens = engine.block_tokens;
        Some(Blocks { tokens: chain.tokens(), block_tokens, hashes, has_agent_hashes: false })
    }

    /// `None` if a member isn't a string: it may be a list with a value for each of several
    /// prompts.
    fn cache_scope(
        &self,
        form: PromptForm,
        body: &str,
        engine: &EngineBlockFacts<'_>,
    ) -> Option<CacheScope> {
        let string_member = |key| match self.member_json(body, key) {
            None => Some(None),
            Some(json) => serde_json::from_str(json).ok().map(non_empty),
        };
        let model = if form == PromptForm::Generate { None } else { string_member("model")? };
        let adapter = model.and_then(|model| adapter(&model, engine.served_names));
        Some(CacheScope {
            lora: adapter.or(string_member("lora_path")?),
            extra_key: string_member("extra_key")?,
            cache_salt: string_member("cache_salt")?,
        })
    }

    fn member_json<'a>(&self, body: &'a str, key: &str) -> Option<&'a str> {
        let (_, range) = self.members.iter().find(|(member_key, _)| *member_key == key)?;
        Some(&body[range.clone()])
    }
}

impl CacheScope {
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
    ids_array: &str,
    cache_scope: &CacheScope,
    engine: &EngineBlockFacts<'_>,
) -> Option<Blocks> {
    let scheme = cache_scope.scheme(engine.block_tokens);
    let (mut chain, mut hashes) = (Chain::new(&scheme), vec![]);
    ids::push_ids(ids_array, engine.context_tokens, &mut chain, &mut hashes).ok()?;
    Some(Blocks {
        tokens: chain.tokens(),
        block_tokens: engine.block_tokens,
        hashes,
        // An engine's KV events don't contain the extra key. So agents report these blocks without
        // it, by other hashes.
        has_agent_hashes: cache_scope.extra_key.is_none(),
    })
}

fn ids_key(form: PromptForm) -> &'static str {
    if form == PromptForm::Completions { "prompt" } else { "input_ids" }
}

fn non_empty(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

/// The LoRA adapter in a model's name, `base:adapter`, as the engine finds the adapter. A name that
/// the engine serves has no adapter, even if the name contains a colon.
fn adapter(model: &str, served_names: &[String]) -> Option<String> {
    if served_names.iter().any(|name| name == model) {
        return None;
    }
    let adapter_after = |name: &String| model.strip_prefix(name.as_str())?.strip_prefix(':');
    let adapter =
        served_names.iter().find_map(adapter_after).or(model.split_once(':').map(|(_, rest)| rest));
    adapter.and_then(|adapter| non_empty(adapter.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn engine(models: &[String]) -> EngineBlockFacts<'_> {
        let block_tokens = BlockTokens::for_page(1).unwrap();
        EngineBlockFacts {
            block_tokens,
            context_tokens: 100_000,
            served_names: models,
            model: None,
            unix_s: 0,
            memory: None,
        }
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
            has_agent_hashes: true,
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
        for rest in
            ["", r#","cache_salt":"","lora_path":null"#, r#","cache_salt":"a""#, r#","echo":false"#]
        {
            assert_eq!(with(rest), Some(vec![7, 8]), "{rest}");
        }
        for rest in [
            r#","lora_path":"a""#,
            r#","extra_key":"a""#,
            r#","cache_salt":["a"]"#,
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
        let too_long = format!(r#"{{"input_ids":{}}}"#, ids(100_001));
        assert_eq!(made(PromptForm::Generate, &too_long), None, "the engine refuses it");
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
            assert_eq!(separate.has_agent_hashes, !rest.contains("extra_key"), "{rest}");
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
        assert!(
            !one.has_agent_hashes && one.hashes.len() > 5 && two.hashes.len() > one.hashes.len()
        );
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
        fn no_body_panics(values in prop::collection::vec((0..PROMPT_KEYS.len(), "\\PC{0,20}", 0..4), 0..6)) {
            let members = values.into_iter().map(|(key, text, kind)| {
                let value = match kind {
                    0 => serde_json::json!(text),
                    1 => serde_json::json!([1, 2, 3]),
                    2 => serde_json::json!([{"content": text}]),
                    _ => serde_json::json!(null),
                };
                format!("{:?}:{value}", PROMPT_KEYS[key])
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
