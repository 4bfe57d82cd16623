//! One model: text in, routing blocks out. It holds the tokenizer, the template, where texts can be
//! cut, and what was tokenised before; it knows nothing of requests but their members.

#[cfg(test)]
mod tests;

use parking_lot::Mutex;
use proto::block::Chain;
use serde_json::Value;
use tokenizers::{AddedToken, Tokenizer};

use super::{Ask, Blocks, Files, Route, chat::Request, template::Template};
use crate::prompt::segments::{Segments, Walk, cut};

/// Of what was tokenised, for one model: conversations of 200 million tokens in messages of 200.
const SEGMENTS_BYTES_MAX: usize = 256 << 20;
/// New text of one prompt, bytes: about a second's work. What follows isn't tokenised.
const NEW_BYTES_MAX: usize = 2 << 20;
/// A text's bytes for each token, where it isn't tokenised.
const TOKEN_BYTES: u64 = 4;
/// Tokens with a role that templates and tokenizers know by name.
const ROLES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Why a model's files are of no use.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not what `tokenizers` reads.
    #[error("the tokenizer can't be read: {0}")]
    Tokenizer(tokenizers::Error),
    /// Not JSON.
    #[error("the tokenizer's config can't be read")]
    Config(#[source] serde_json::Error),
    /// Not a template that can be rendered here.
    #[error("the chat template can't be read")]
    Template(#[source] minijinja::Error),
}

/// Makes tokens of text.
#[derive(Debug)]
pub struct Model {
    tokenizer: Tokenizer,
    template: Option<Template>,
    /// Where texts are cut.
    marks: Vec<String>,
    /// What stands before a text that is no chat.
    lead: Vec<u32>,
    /// A leaf lock: for look-ups, not while anything is tokenised.
    segments: Mutex<Segments>,
}

impl Model {
    /// Reads a model's files. It may take seconds.
    ///
    /// # Errors
    /// When they can't be read.
    pub fn new(files: &Files) -> Result<Self, Error> {
        let mut tokenizer = Tokenizer::from_bytes(&files.tokenizer).map_err(Error::Tokenizer)?;
        // The engine asks for neither, whatever the file says.
        tokenizer.with_truncation(None).map_err(Error::Tokenizer)?.with_padding(None);
        let config: Value = match &files.config[..] {
            [] => Value::Null,
            config => serde_json::from_slice(config).map_err(Error::Config)?,
        };
        let roles: Vec<(&str, String)> =
            ROLES.iter().filter_map(|role| Some((*role, content(config.get(role)?)?))).collect();
        add_missing(&mut tokenizer, &config, &roles).map_err(Error::Tokenizer)?;
        let lead = lead(&tokenizer, &config, &roles).map_err(Error::Tokenizer)?;
        let template = files.template.as_deref();
        let marks = marks(&tokenizer, template.unwrap_or_default(), &roles);
        let template = template.map(|source| Template::new(source, &roles)).transpose();
        Ok(Self {
            tokenizer,
            template: template.map_err(Error::Template)?,
            marks,
            lead,
            segments: Mutex::new(Segments::new(SEGMENTS_BYTES_MAX)),
        })
    }

    /// A request's blocks. None: it becomes a prompt in another way than is known here, or it is
    /// longer than the engine takes.
    pub(in crate::prompt) fn blocks(&self, ask: &Ask<'_>) -> Option<Blocks> {
        let (text, lead) = self.text(ask)?;
        self.text_blocks(&text, lead, ask)
    }

    /// A request's token ids, all made anew. None: as for its blocks, or they are too many.
    pub(in crate::prompt) fn ids(&self, ask: &Ask<'_>) -> Option<Vec<u32>> {
        let (text, lead) = self.text(ask)?;
        if text.len() > NEW_BYTES_MAX {
            return None;
        }
        let mut ids = lead.to_vec();
        for segment in cut(&text, &self.marks) {
            ids.extend_from_slice(self.tokenizer.encode_fast(segment, false).ok()?.get_ids());
        }
        Some(ids)
    }

    /// The text that a request's prompt is, and the tokens before it.
    fn text(&self, ask: &Ask<'_>) -> Option<(String, &[u32])> {
        match ask.route {
            Route::Generate | Route::Completions => {
                let json = (ask.member)(ask.route.texts().first()?)?;
                Some((serde_json::from_str(json).ok()?, &self.lead))
            }
            Route::Chat => {
                let request = Request {
                    messages: (ask.member)("messages")?,
                    tools: (ask.member)("tools"),
                    tool_choice: (ask.member)("tool_choice"),
                    values: (ask.member)("chat_template_kwargs"),
                    reasoning_effort: (ask.member)("reasoning_effort"),
                };
                Some((self.render(&request, ask.unix_s)?, &[]))
            }
            Route::Other => None,
        }
    }

    fn render(&self, request: &Request<'_>, unix_s: u64) -> Option<String> {
        let template = self.template.as_ref()?;
        let chat = request.read(template.takes_parts())?;
        // As the engine does: some templates want a tool's function alone.
        template
            .render(&chat, unix_s)
            .or_else(|_| template.render(&chat.with_bare_tools(), unix_s))
            .map_err(|error| tracing::debug!(%error, "a chat was not rendered"))
            .ok()
    }

    fn text_blocks(&self, text: &str, lead: &[u32], ask: &Ask<'_>) -> Option<Blocks> {
        let tokens_max = ask.tokens_max;
        let (mut chain, mut hashes) = (Chain::new(&ask.scheme), vec![]);
        chain.push(lead, &mut hashes);
        let mut walk = Walk::new(chain, hashes);
        let segments = cut(text, &self.marks);
        let known = self.segments.lock().follow(&mut walk, &segments);
        let (mut new_bytes, mut left_bytes) = (0, 0);
        for segment in &segments[known..] {
            new_bytes += segment.len();
            if left_bytes > 0 || new_bytes > NEW_BYTES_MAX || walk.chain.tokens() > tokens_max {
                left_bytes += segment.len() as u64;
                continue;
            }
            let tokens = self.tokenizer.encode_fast(*segment, false).ok()?;
            self.segments.lock().learn(&mut walk, segment, tokens.get_ids());
        }
        let tokens = walk.chain.tokens() + left_bytes / TOKEN_BYTES;
        let (block_tokens, hashes) = (ask.scheme.block_tokens, walk.hashes);
        // The engine refuses what is longer, and leaves no KV of it.
        (tokens <= tokens_max).then_some(Blocks { tokens, block_tokens, hashes, exact: true })
    }
}

/// A token as configs write it: its text, or an object with it.
fn content(token: &Value) -> Option<String> {
    let text = token.as_str().or_else(|| token.get("content")?.as_str())?;
    Some(text.to_owned()).filter(|text| !text.is_empty())
}

/// Adds the tokens that only the config has, as the engine's loader does: by id, then by role.
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

/// What stands before every text: what the config says where it says anything, else what the
/// tokenizer puts there.
fn lead(
    tokenizer: &Tokenizer,
    config: &Value,
    roles: &[(&str, String)],
) -> tokenizers::Result<Vec<u32>> {
    let said = ["add_bos_token", "add_eos_token"].map(|key| config.get(key));
    if said.iter().any(Option::is_some) || tokenizer.get_post_processor().is_none() {
        let adds = said[0].and_then(Value::as_bool) == Some(true);
        let bos = roles.iter().find(|(role, _)| adds && *role == "bos_token");
        return Ok(bos.and_then(|(_, text)| tokenizer.token_to_id(text)).into_iter().collect());
    }
    let whole = tokenizer.encode("a", true)?;
    let bare = tokenizer.encode("a", false)?;
    let (whole, bare) = (whole.get_ids(), bare.get_ids());
    let at = whole.windows(bare.len().max(1)).position(|some| some == bare);
    Ok(whole[..at.unwrap_or(0)].to_vec())
}

/// Tokens at which a text can be cut: they are found wherever they are written, whatever is around
/// them, and what is before them has the same tokens without them. Those that the template writes
/// are enough.
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
