//! Makes a prompt's routing blocks or token ids from text, with one model's tokenizer and template.
//!
//! A [`Model`] cuts a text into segments at *marks*, special tokens such as `<|im_start|>`, and
//! caches the blocks of the segments. So it tokenizes only the new text of a growing conversation.
//! This module doesn't check that the engine has the same tokenizer: `prompt::models` passes in the
//! engine's own files.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use blocks::block::Chain;
use parking_lot::Mutex;
use serde_json::Value;
use tokenizers::{AddedToken, Tokenizer};

use super::{Blocks, PromptForm, TextPrompt, chat::ChatMembers, template::Template};
use crate::{
    fleet::tokenizer_files::TokenizerFiles,
    prompt::{
        memory::TokenizerMemory,
        segments::{HashedPrefix, SegmentCache, split_at_marks},
    },
    shares::Share,
};

/// Per model. Enough for 200 million tokens in all, if a message has 200.
const SEGMENT_CACHE_BYTES_MAX: usize = 256 << 20;
/// The most new bytes tokenized per prompt, which take about a second. The tokens of the text after
/// them are estimated.
const TOKENIZED_BYTES_MAX: usize = 2 << 20;
/// The parts of a text whose tokens are only counted. Each takes 5 MB of memory.
const PIECE_BYTES: usize = 16 << 10;
/// An estimate, for text that isn't tokenized.
const BYTES_PER_TOKEN: u64 = 4;
/// Special tokens that templates and tokenizers know by name.
const SPECIAL_TOKEN_NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the tokenizer can't be read: {0}")]
    Tokenizer(tokenizers::Error),
    #[error("the tokenizer's config can't be read")]
    Config(#[source] serde_json::Error),
    #[error("the chat template can't be read")]
    Template(#[source] minijinja::Error),
}

#[derive(Debug)]
pub struct Model {
    tokenizer: Tokenizer,
    template: Option<Template>,
    marks: Vec<String>,
    /// What the engine puts before a text that isn't a chat.
    leading_tokens: Vec<u32>,
    token_bytes_max: usize,
    /// Locked for look-ups, not while text is tokenized. No other lock is taken while it is held.
    segment_cache: Mutex<SegmentCache>,
}

impl Model {
    /// This may take seconds.
    pub fn new(files: &TokenizerFiles) -> Result<Self, Error> {
        let mut tokenizer = Tokenizer::from_bytes(&files.tokenizer).map_err(Error::Tokenizer)?;
        // The engine uses neither truncation nor padding, whatever the file says.
        tokenizer.with_truncation(None).map_err(Error::Tokenizer)?.with_padding(None);
        let config: Value = match &files.config[..] {
            [] => Value::Null,
            config => serde_json::from_slice(config).map_err(Error::Config)?,
        };
        let special_tokens: Vec<(&str, String)> = SPECIAL_TOKEN_NAMES
            .iter()
            .filter_map(|name| Some((*name, token_text(config.get(name)?)?)))
            .collect();
        add_missing_tokens(&mut tokenizer, &config, &special_tokens).map_err(Error::Tokenizer)?;
        let leading_tokens =
            leading_tokens(&tokenizer, &config, &special_tokens).map_err(Error::Tokenizer)?;
        let token_bytes_max = tokenizer.get_vocab(true).keys().map(String::len).max();
        let template = files.template.as_deref();
        let marks = find_marks(&tokenizer, template.unwrap_or_default(), &special_tokens);
        let template = template.map(|source| Template::new(source, &special_tokens)).transpose();
        Ok(Self {
            tokenizer,
            template: template.map_err(Error::Template)?,
            marks,
            leading_tokens,
            token_bytes_max: token_bytes_max.unwrap_or(1).max(1),
            segment_cache: Mutex::new(SegmentCache::new(SEGMENT_CACHE_BYTES_MAX)),
        })
    }

    /// `None` if the prompt can't be made as the engine makes it, or is longer than the engine
    /// takes.
    pub(in crate::prompt) fn blocks(&self, text_prompt: &TextPrompt<'_>) -> Option<Blocks> {
        let (text, leading_tokens) = self.prompt_text(text_prompt)?;
        self.text_blocks(&text, leading_tokens, text_prompt)
    }

    /// Doesn't use the cache. `None` if the prompt can't be made as the engine makes it, or has
    /// more than [`TOKENIZED_BYTES_MAX`] bytes.
    pub(in crate::prompt) fn token_ids(&self, text_prompt: &TextPrompt<'_>) -> Option<Vec<u32>> {
        let (text, leading_tokens) = self.prompt_text(text_prompt)?;
        if text.len() > TOKENIZED_BYTES_MAX {
            return None;
        }
        let mut ids = leading_tokens.to_vec();
        for segment in split_at_marks(&text, &self.marks) {
            let _memory = take_memory(text_prompt, segment)?;
            ids.extend_from_slice(self.tokenizer.encode_fast(segment, false).ok()?.get_ids());
        }
        Some(ids)
    }

    /// `false` if unknown. Tokenizes until the answer is known, in pieces and without the cache. A
    /// cut through a word may add tokens, which the caller's margin covers.
    pub(in crate::prompt) fn has_more_tokens(
        &self,
        text_prompt: &TextPrompt<'_>,
        tokens: u64,
    ) -> bool {
        let Some((text, _)) = self.prompt_text(text_prompt) else { return false };
        let (mut rest, mut counted) = (&*text, 0);
        // A byte has at most one token.
        while counted + rest.len() as u64 > tokens {
            let (piece, after) = rest.split_at(rest.floor_char_boundary(PIECE_BYTES));
            let Ok(encoding) = self.tokenizer.encode_fast(piece, false) else { return false };
            counted += encoding.get_ids().len() as u64;
            if counted > tokens {
                return true;
            }
            rest = after;
        }
        false
    }

    fn prompt_text(&self, text_prompt: &TextPrompt<'_>) -> Option<(String, &[u32])> {
        match text_prompt.form {
            PromptForm::Generate | PromptForm::Completions => {
                let json = (text_prompt.member_json)(text_prompt.form.text_keys().first()?)?;
                Some((serde_json::from_str(json).ok()?, &self.leading_tokens))
            }
            PromptForm::Chat => {
                let chat_members = ChatMembers {
                    messages: (text_prompt.member_json)("messages")?,
                    tools: (text_prompt.member_json)("tools"),
                    tool_choice: (text_prompt.member_json)("tool_choice"),
                    variables: (text_prompt.member_json)("chat_template_kwargs"),
                    reasoning_effort: (text_prompt.member_json)("reasoning_effort"),
                };
                Some((self.render(&chat_members, text_prompt.unix_s)?, &[]))
            }
            PromptForm::Other => None,
        }
    }

    fn render(&self, chat_members: &ChatMembers<'_>, unix_s: u64) -> Option<String> {
        let template = self.template.as_ref()?;
        let chat = chat_members.read(template.takes_content_parts())?;
        // The engine also tries again with each tool's bare function if rendering fails.
        template
            .render(&chat, unix_s)
            .or_else(|_| template.render(&chat.with_bare_tools(), unix_s))
            .map_err(|error| tracing::debug!(%error, "rendering a chat failed"))
            .ok()
    }

    fn text_blocks(
        &self,
        text: &str,
        leading_tokens: &[u32],
        text_prompt: &TextPrompt<'_>,
    ) -> Option<Blocks> {
        let tokens_max = text_prompt.tokens_max;
        // A token stands for at most `token_bytes_max` bytes, so the engine refuses a longer text.
        // Twice that, because a tokenizer may drop or replace characters.
        let text_bytes_max = tokens_max.saturating_mul(2 * self.token_bytes_max as u64);
        if text.len() as u64 > text_bytes_max {
            return None;
        }
        let (mut chain, mut hashes) = (Chain::new(&text_prompt.scheme), vec![]);
        chain.push(leading_tokens, &mut hashes);
        let mut prefix = HashedPrefix::new(chain, hashes);
        let segments = split_at_marks(text, &self.marks);
        let cached_segment_count =
            self.segment_cache.lock().extend_by_cached(&mut prefix, &segments);
        let owner = text_prompt.memory.map_or_else(Arc::default, TokenizerMemory::client);
        let (mut new_bytes, mut untokenized_bytes) = (0, 0);
        for segment in &segments[cached_segment_count..] {
            new_bytes += segment.len();
            if untokenized_bytes > 0
                || new_bytes > TOKENIZED_BYTES_MAX
                || prefix.chain.tokens() > tokens_max
            {
                untokenized_bytes += segment.len() as u64;
                continue;
            }
            let Some(_memory) = take_memory(text_prompt, segment) else {
                untokenized_bytes = segment.len() as u64;
                continue;
            };
            let tokens = self.tokenizer.encode_fast(*segment, false).ok()?;
            let mut cache = self.segment_cache.lock();
            cache.extend_and_cache(&owner, &mut prefix, segment, tokens.get_ids());
        }
        let tokens = prefix.chain.tokens() + untokenized_bytes / BYTES_PER_TOKEN;
        let (block_tokens, hashes) = (text_prompt.scheme.block_tokens, prefix.hashes);
        // The engine refuses a longer prompt, so such a prompt leaves no KV.
        (tokens <= tokens_max).then_some(Blocks {
            tokens,
            block_tokens,
            hashes,
            has_agent_hashes: true,
        })
    }
}

/// `None` if there is no memory now; `Some(None)` if it isn't bounded.
fn take_memory(text_prompt: &TextPrompt<'_>, segment: &str) -> Option<Option<Share>> {
    match text_prompt.memory {
        None => Some(None),
        Some(memory) => memory.take_to_tokenize(segment.len()).map(Some),
    }
}

fn token_text(token: &Value) -> Option<String> {
    let text = token.as_str().or_else(|| token.get("content")?.as_str())?;
    Some(text.to_owned()).filter(|text| !text.is_empty())
}

/// Adds the tokens that the config has and the tokenizer lacks. The order is the engine's, because
/// it sets their ids: first the listed tokens by id, then the special tokens.
fn add_missing_tokens(
    tokenizer: &mut Tokenizer,
    config: &Value,
    special_tokens: &[(&str, String)],
) -> tokenizers::Result<()> {
    let listed_tokens = config.get("added_tokens_decoder").and_then(Value::as_object);
    let mut tokens: Vec<(u64, AddedToken)> = listed_tokens
        .into_iter()
        .flatten()
        .filter_map(|(id, token)| {
            Some((id.parse().ok()?, serde_json::from_value(token.clone()).ok()?))
        })
        .collect();
    tokens.sort_by_key(|(id, _)| *id);
    let special = special_tokens.iter().map(|(_, text)| AddedToken::from(text.as_str(), true));
    for token in tokens.into_iter().map(|(_, token)| token).chain(special) {
        let vocabulary = tokenizer.get_added_vocabulary().get_vocab();
        if !vocabulary.contains_key(&token.content) {
            tokenizer.add_tokens([token])?;
        }
    }
    Ok(())
}

/// The tokens that the engine puts before every text. If the config has `add_bos_token` or
/// `add_eos_token`, or the tokenizer no post-processor, the config says which. Otherwise they are
/// what the tokenizer adds before a sample text.
fn leading_tokens(
    tokenizer: &Tokenizer,
    config: &Value,
    special_tokens: &[(&str, String)],
) -> tokenizers::Result<Vec<u32>> {
    let token_settings = ["add_bos_token", "add_eos_token"].map(|key| config.get(key));
    if token_settings.iter().any(Option::is_some) || tokenizer.get_post_processor().is_none() {
        let adds_bos = token_settings[0].and_then(Value::as_bool) == Some(true);
        let bos = special_tokens.iter().find(|(name, _)| adds_bos && *name == "bos_token");
        return Ok(bos.and_then(|(_, text)| tokenizer.token_to_id(text)).into_iter().collect());
    }
    let sample_with_added = tokenizer.encode("a", true)?;
    let sample = tokenizer.encode("a", false)?;
    let (sample_with_added, sample) = (sample_with_added.get_ids(), sample.get_ids());
    let sample_start =
        sample_with_added.windows(sample.len().max(1)).position(|window| window == sample);
    Ok(sample_with_added[..sample_start.unwrap_or(0)].to_vec())
}

/// Finds the tokens before which a text can be cut: the tokenizer finds them whatever surrounds
/// them, and the text before them has the same tokens with and without them. Only special tokens,
/// and tokens that the template writes, are taken.
fn find_marks(
    tokenizer: &Tokenizer,
    template: &str,
    special_tokens: &[(&str, String)],
) -> Vec<String> {
    let added_tokens = tokenizer.get_added_tokens_decoder();
    // Whether `other`, found at a place before the mark, could take some or all of it.
    let can_begin_before = |mark: &str, other: &str| {
        other != mark && other.contains(mark)
            || mark.char_indices().skip(1).any(|(prefix_bytes, _)| {
                let prefix = &mark[..prefix_bytes];
                other.len() > prefix.len() && other.ends_with(prefix)
            })
    };
    let is_mark = |token: &&AddedToken| {
        let text = token.content.as_str();
        let is_used =
            template.contains(text) || special_tokens.iter().any(|(_, special)| special == text);
        let stands_alone = !token.lstrip && !token.single_word && !token.normalized;
        is_used
            && stands_alone
            && !text.is_empty()
            && !added_tokens.values().any(|other| can_begin_before(text, &other.content))
    };
    let mut marks: Vec<String> =
        added_tokens.values().filter(is_mark).map(|token| token.content.clone()).collect();
    marks.sort_unstable();
    marks
}
