//! Finds prompts that have more tokens than an engine takes, without tokenizing all of them. Pure.
//!
//! An engine tokenizes on the thread that serves all its clients: 2 MB of text keep that thread for
//! a second, and only then does the engine refuse the prompt. So the router counts the tokens
//! first, up to the engine's context. Prompts of the routes that the engine converts first
//! (`/v1/messages`, `/v1/responses`), and chats that the router can't render, aren't counted.

use blocks::block::Scheme;

use super::{EngineBlockFacts, Prompt, PromptForm, ids_key, model::TextPrompt};

/// Bytes of a prompt's JSON per token of the context from which the prompt is counted. Prose, code
/// and their escapes have about 4, token ids with their commas 6 to 8.
const BYTES_PER_TOKEN: u64 = 6;
/// A shorter prompt isn't counted: an engine tokenizes it within some milliseconds.
const PROMPT_BYTES_MIN: u64 = 64 << 10;
/// A text is too long if it has more than the context and a quarter of it: it is tokenized in
/// pieces, whose borders can add tokens, and the engine may tokenize a little differently.
const MARGIN_DIVISOR: u64 = 4;

impl Prompt {
    /// By its bytes, which costs nothing.
    #[must_use]
    pub fn looks_over_context(&self, form: PromptForm, context_tokens: u64) -> bool {
        if form == PromptForm::Other {
            return false;
        }
        let is_text = |key| form.text_keys().contains(&key) || key == ids_key(form);
        let texts = self.members.iter().filter(|(key, _)| is_text(*key));
        let bytes: u64 = texts.map(|(_, range)| range.len() as u64).sum();
        bytes > PROMPT_BYTES_MIN.max(BYTES_PER_TOKEN.saturating_mul(context_tokens))
    }

    /// `false` if that can't be known, as for several prompts, or for text without a loaded model.
    ///
    /// # Panics
    /// If `body` is not the body in which the prompt was found.
    #[must_use]
    pub fn is_over_context(
        &self,
        form: PromptForm,
        body: &[u8],
        engine: &EngineBlockFacts<'_>,
    ) -> bool {
        let body = std::str::from_utf8(body).expect("the body was read as JSON");
        let ids_array = self.member_json(body, ids_key(form)).filter(|json| json.starts_with('['));
        if let Some(ids_array) = ids_array.filter(|_| form != PromptForm::Other) {
            return count_ids(ids_array).is_some_and(|ids| ids > engine.context_tokens);
        }
        let Some(model) = engine.model else { return false };
        // Other members can only add tokens to a text. But a chat with them has another template.
        if form == PromptForm::Chat && self.has_unsupported_members(body) {
            return false;
        }
        let text_prompt = TextPrompt {
            form,
            member_json: &|key| self.member_json(body, key),
            scheme: Scheme::plain(engine.block_tokens),
            tokens_max: engine.context_tokens,
            unix_s: engine.unix_s,
            memory: None,
        };
        let margin = engine.context_tokens / MARGIN_DIVISOR;
        model.has_more_tokens(&text_prompt, engine.context_tokens.saturating_add(margin))
    }
}

/// Of a flat array; `None` for an array of anything but ids.
fn count_ids(json: &str) -> Option<u64> {
    let inner = json.strip_prefix('[')?.trim_ascii_start();
    inner.starts_with(|first: char| first.is_ascii_digit()).then_some(())?;
    Some(memchr::memchr_iter(b',', inner.as_bytes()).count() as u64 + 1)
}

#[cfg(test)]
mod tests {
    use blocks::block::BlockTokens;
    use contract::body::Object;

    use super::*;

    fn engine(context_tokens: u64) -> EngineBlockFacts<'static> {
        EngineBlockFacts {
            block_tokens: BlockTokens::for_page(1).unwrap(),
            context_tokens,
            served_names: &[],
            model: None,
            unix_s: 0,
            memory: None,
        }
    }

    fn is_over_context(form: PromptForm, body: &str, context_tokens: u64) -> bool {
        let prompt = Prompt::find(&Object::parse(body.as_bytes()).unwrap());
        prompt.is_over_context(form, body.as_bytes(), &engine(context_tokens))
    }

    #[test]
    fn token_ids_are_counted_and_several_prompts_are_not() {
        let over = |body: &str, context_tokens| {
            is_over_context(PromptForm::Generate, body, context_tokens)
        };
        assert!(!over(r#"{"input_ids":[1,2,3]}"#, 3));
        assert!(over(r#"{"input_ids":[ 1,2, 3]}"#, 2));
        for body in [
            r#"{"input_ids":[[1,2],[3,4]]}"#,
            r#"{"input_ids":[]}"#,
            r#"{"text":["a,b,c,d","e"]}"#,
            r#"{"text":"without a model, its tokens aren't known"}"#,
        ] {
            assert!(!over(body, 1), "{body}");
        }
        assert!(is_over_context(PromptForm::Completions, r#"{"prompt":[1,2]}"#, 1));
        assert!(!is_over_context(PromptForm::Completions, r#"{"prompt":["a,b","c"]}"#, 1));
    }

    #[test]
    fn only_what_has_far_more_bytes_than_usual_is_worth_counting() {
        let looks = |form, body: &str, context_tokens| {
            let prompt = Prompt::find(&Object::parse(body.as_bytes()).unwrap());
            prompt.looks_over_context(form, context_tokens)
        };
        let long = format!(r#"{{"prompt":"{}","tools":"{}"}}"#, "a".repeat(70_000), "b".repeat(10));
        assert!(looks(PromptForm::Completions, &long, 1_000));
        assert!(!looks(PromptForm::Completions, &long, 20_000), "it may well fit");
        assert!(!looks(PromptForm::Chat, &long, 1_000), "a chat has no such member");
        let short = format!(r#"{{"prompt":"{}"}}"#, "a".repeat(60_000));
        assert!(!looks(PromptForm::Completions, &short, 10), "the engine refuses it soon enough");
    }
}
