//! The models that a fleet serves, as OpenAI's API lists them.

use serde::Serialize;
use utoipa::ToSchema;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Models {
    /// `list`.
    pub object: &'static str,
    pub data: Vec<Model>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Model {
    pub id: String,
    /// `model`.
    pub object: &'static str,
    /// 0: no engine says.
    pub created: u64,
    pub owned_by: &'static str,
    /// The name that the engines serve, if `id` stands for it.
    pub root: String,
    /// Tokens of the smallest context among the workers that serve it.
    pub max_model_len: u32,
}
