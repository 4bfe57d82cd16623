//! The tokenizer and chat template that an agent sends, so that the router can tokenize prompts.
//!
//! `control` fetches the files from the agent, and `prompt` reads them. Nothing here parses a file.

/// The files of one model. An agent, which runs beside an engine, reads them there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenizerFiles {
    /// The contents of `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    /// The contents of `tokenizer_config.json`; empty if there is no such file.
    pub config: Vec<u8>,
    /// The contents of `chat_template.jinja`. `None` if the engine doesn't use a template to make
    /// prompts from messages.
    pub template: Option<String>,
}
