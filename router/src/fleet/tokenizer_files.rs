//! The tokenizer and the chat template of a model, as an agent sends them.

/// The files of one model, as an agent sends them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenizerFiles {
    /// `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    /// `tokenizer_config.json`; empty if there is none.
    pub config: Vec<u8>,
    /// `chat_template.jinja`; `None` if the engine doesn't make prompts from messages by a
    /// template.
    pub template: Option<String>,
}
