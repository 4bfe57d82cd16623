//! One model, which makes routing blocks from text.
//!
//! It holds the tokenizer, the template, the marks at which texts can be cut, and what was
//! tokenized before. Of requests it knows only their members.

#[cfg(test)]
mod tests;

use parking_lot::Mutex;
use proto::block::Chain;
use serde_json::Value;
use tokenizers::{AddedToken, Tokenizer};

use super::{Blocks, PromptForm, TextPrompt, chat::Request, template::Template};
use crate::{
    fleet::tokenizer_files::TokenizerFiles,
    prompt::segments::{HashedPrefix, Segments, split_at_marks},
};

/// Memory for what was tokenized, per model: conversations of 200 million tokens in messages of
/// 200.
const SEGMENTS_BYTES_MAX: usize = 256 << 20;
/// New bytes tokenized per prompt, about a second's work. The text after them isn't tokenized.
const NEW_BYTES_MAX: usize = 2 << 20;
/// Estimated bytes per token of text that isn't tokenized.
const TOKEN_BYTES: u64 = 4;
/// Tokens with a role that templates and tokenizers know by name.
const ROLES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Why a model's files can't be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The `tokenizers` crate can't read the tokenizer.
    #[error("the tokenizer can't be read: {0}")]
    Tokenizer(tokenizers::Error),
    /// The config isn't valid JSON.
    #[error("the tokenizer's config can't be read")]
    Config(#[source] serde_json::Error),
    /// The template can't be compiled.
    #[error("the chat template can't be read")]
    Template(#[source] minijinja::Error),
}

/// Makes tokens from text.
#[derive(Debug)]
pub struct Model {
    tokenizer: Tokenizer,
    template: Option<Template>,
    /// Tokens before which texts are cut.
    marks: Vec<String>,
    /// Tokens that precede a text that isn't a chat.
    leading_tokens: Vec<u32>,
    /// A leaf lock. Held for look-ups, not while text is tokenized.
    segments: Mutex<Segments>,
}

impl Model {
    /// Reads a model's files. This may take seconds.
    ///
    /// # Errors
    /// If the files can't be read.
    pub fn new(files: &TokenizerFiles) -> Result<Self, Error> {
        let mut tokenizer = Tokenizer::from_bytes(&files.tokenizer).map_err(Error::Tokenizer)?;
        // The engine uses neither truncation nor padding, whatever the file says.
        tokenizer.with_truncation(None).map_err(Error::Tokenizer)?.with_padding(None);
        let config: Value = match &files.config[..] {
            [] => Value::Null,
            config => serde_json::from_slice(config).map_err(Error::Config)?,
        };
        let roles: Vec<(&str, String)> =
            ROLES.iter().filter_map(|role| Some((*role, content(config.get(role)?)?))).collect();
        add_missing(&mut tokenizer, &config, &roles).map_err(Error::Tokenizer)?;
        let leading_tokens =
            leading_tokens(&tokenizer, &config, &roles).map_err(Error::Tokenizer)?;
        let template = files.template.as_deref();
        let marks = marks(&tokenizer, template.unwrap_or_default(), &roles);
        let template = template.map(|source| Template::new(source, &roles)).transpose();
        Ok(Self {
            tokenizer,
            template: template.map_err(Error::Template)?,
            marks,
            leading_tokens,
            segments: Mutex::new(Segments::new(SEGMENTS_BYTES_MAX)),
        })
    }

    /// Makes a request's blocks. Returns `None` if the prompt can't be made as the engine makes it,
    /// or is longer than the engine takes.
    pub(in crate::prompt) fn blocks(&self, text_prompt: &TextPrompt<'_>) -> Option<Blocks> {
        let (text, leading_tokens) = self.text(text_prompt)?;
        self.text_blocks(&text, leading_tokens, text_prompt)
    }

    /// Makes a request's token ids, without reusing earlier results. Returns `None` if
    /// [`Self::blocks`] does, or if the text is too long.
    pub(in crate::prompt) fn token_ids(&self, text_prompt: &TextPrompt<'_>) -> Option<Vec<u32>> {
        let (text, leading_tokens) = self.text(text_prompt)?;
        if text.len() > NEW_BYTES_MAX {
            return None;
        }
        let mut ids = leading_tokens.to_vec();
        for segment in split_at_marks(&text, &self.marks) {
            ids.extend_from_slice(self.tokenizer.encode_fast(segment, false).ok()?.get_ids());
        }
        Some(ids)
    }

    /// Returns the text of a request's prompt, and the tokens that precede it.
    fn text(&self, text_prompt: &TextPrompt<'_>) -> Option<(String, &[u32])> {
        match text_prompt.form {
            PromptForm::Generate | PromptForm::Completions => {
                let json = (text_prompt.member)(text_prompt.form.texts().first()?)?;
                Some((serde_json::from_str(json).ok()?, &self.leading_tokens))
            }
            PromptForm::Chat => {
                let request = Request {
                    messages: (text_prompt.member)("messages")?,
                    tools: (text_prompt.member)("tools"),
                    tool_choice: (text_prompt.member)("tool_choice"),
                    values: (text_prompt.member)("chat_template_kwargs"),
                    reasoning_effort: (text_prompt.member)("reasoning_effort"),
                };
                Some((self.render(&request, text_prompt.unix_s)?, &[]))
            }
            PromptForm::Other => None,
        }
    }

    fn render(&self, request: &Request<'_>, unix_s: u64) -> Option<String> {
        let template = self.template.as_ref()?;
        let chat = request.read(template.takes_parts())?;
        // Like the engine: if rendering fails, try again with each tool's bare function.
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
        let (mut chain, mut hashes) = (Chain::new(&text_prompt.scheme), vec![]);
        chain.push(leading_tokens, &mut hashes);
        let mut prefix = HashedPrefix::new(chain, hashes);
        let segments = split_at_marks(text, &self.marks);
        let known = self.segments.lock().skip_cached(&mut prefix, &segments);
        let (mut new_bytes, mut left_bytes) = (0, 0);
        for segment in &segments[known..] {
            new_bytes += segment.len();
            if left_bytes > 0 || new_bytes > NEW_BYTES_MAX || prefix.chain.tokens() > tokens_max {
                left_bytes += segment.len() as u64;
                continue;
            }
            let tokens = self.tokenizer.encode_fast(*segment, false).ok()?;
            self.segments.lock().cache(&mut prefix, segment, tokens.get_ids());
        }
        let tokens = prefix.chain.tokens() + left_bytes / TOKEN_BYTES;
        let (block_tokens, hashes) = (text_prompt.scheme.block_tokens, prefix.hashes);
        // The engine refuses a longer prompt, which then leaves no KV.
        (tokens <= tokens_max).then_some(Blocks { tokens, block_tokens, hashes, exact: true })
    }
}

/// Returns the text of a token in a config: the string itself or an object's `content`.
fn content(token: &Value) -> Option<String> {
    let text = token.as_str().or_else(|| token.get("content")?.as_str())?;
    Some(text.to_owned()).filter(|text| !text.is_empty())
}

/// Adds the tokens that only the config has, in the engine's order: by id, then by role.
fn add_missing(
    tokenizer: &mut Tokenizer,
    config: &Value,
    roles: &[(&str, String)],
) -> tokenizers::Result<()> {
    let listed = config.get("added_tokens_decoder").and_then(Value::as_object);
    let mut tokens: Vec<(u64, AddedToken)> = listed
        .into_iter()
        .flatten()
        .filter_map(|(id, token)| {
            Some((id.parse().ok()?, serde_json::from_value(token.clone()).ok()?))
        })
        .collect();
    tokens.sort_by_key(|(id, _)| *id);
    let by_role = roles.iter().map(|(_, text)| AddedToken::from(text.as_str(), true));
    for token in tokens.into_iter().map(|(_, token)| token).chain(by_role) {
        let known = tokenizer.get_added_vocabulary().get_vocab().contains_key(&token.content);
        if !known {
            tokenizer.add_tokens([token])?;
        }
    }
    Ok(())
}

/// Returns the tokens that precede every text: by the config if it says so, else by the tokenizer.
fn leading_tokens(
    tokenizer: &Tokenizer,
    config: &Value,
    roles: &[(&str, String)],
) -> tokenizers::Result<Vec<u32>> {
    let settings = ["add_bos_token", "add_eos_token"].map(|key| config.get(key));
    if settings.iter().any(Option::is_some) || tokenizer.get_post_processor().is_none() {
        let adds = settings[0].and_then(Value::as_bool) == Some(true);
        let bos = roles.iter().find(|(role, _)| adds && *role == "bos_token");
        return Ok(bos.and_then(|(_, text)| tokenizer.token_to_id(text)).into_iter().collect());
    }
    let whole = tokenizer.encode("a", true)?;
    let bare = tokenizer.encode("a", false)?;
    let (whole, bare) = (whole.get_ids(), bare.get_ids());
    let at = whole.windows(bare.len().max(1)).position(|some| some == bare);
    Ok(whole[..at.unwrap_or(0)].to_vec())
}

/// Returns the tokens at which a text can be cut.
///
/// The tokenizer finds such a token wherever it stands, whatever surrounds it, and the text before
/// it has the same tokens with and without it. Only tokens that the template writes are used.
fn marks(tokenizer: &Tokenizer, template: &str, roles: &[(&str, String)]) -> Vec<String> {
    let added = tokenizer.get_added_tokens_decoder();
    let begins_before = |mark: &str, other: &str| {
        other != mark && other.contains(mark)
            || mark.char_indices().skip(1).any(|(end, _)| {
                let prefix = &mark[..end];
                other.len() > prefix.len() && other.ends_with(prefix)
            })
    };
    let is_mark = |token: &&AddedToken| {
        let text = token.content.as_str();
        let used = template.contains(text) || roles.iter().any(|(_, role)| role == text);
        let stands_alone = !token.lstrip && !token.single_word && !token.normalized;
        used && stands_alone
            && !text.is_empty()
            && !added.values().any(|other| begins_before(text, &other.content))
    };
    let mut marks: Vec<String> =
        added.values().filter(is_mark).map(|token| token.content.clone()).collect();
    marks.sort_unstable();
    marks
}
