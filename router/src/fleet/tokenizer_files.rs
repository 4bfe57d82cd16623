//! The tokenizer and chat template that an agent sends, so that the router can tokenize prompts.

/// The files of one model. Nothing here parses them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenizerFiles {
    /// `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    /// `tokenizer_config.json`; empty if there is no such file.
    pub config: Vec<u8>,
    /// `chat_template.jinja`. `None` if the engine makes prompts from messages without a template.
    pub template: Option<String>,
}
