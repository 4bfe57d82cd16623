//! Fits a trace to a model: scales prompts and answers, and bounds contexts and outputs.
//!
//! The module is pure. Scaling applies to positions, not to block sizes: position `p` of a prompt
//! becomes `tokens(p)` in every prompt, so two prompts that share a prefix in the trace also share
//! the scaled prefix.

use crate::trace::{Conversation, TraceTurn};

/// The conversion from a trace's sizes to the replay's.
#[derive(Debug, Clone, Copy, PartialEq, clap::Args)]
pub struct Shape {
    /// The factor on prompt and answer tokens
    #[arg(long = "scale-tokens", default_value_t = 1.0)]
    pub scale: f64,
    /// Cut conversations where prompt and answer exceed this many tokens
    #[arg(long = "max-context")]
    pub context_tokens_max: Option<u64>,
    /// The most tokens of an answer
    #[arg(long = "max-output")]
    pub output_tokens_max: Option<u64>,
}

impl Default for Shape {
    fn default() -> Self {
        Self { scale: 1.0, context_tokens_max: None, output_tokens_max: None }
    }
}

/// The result of fitting a conversation to the context.
#[derive(Debug, Clone, PartialEq)]
pub enum Fit {
    /// All turns fit.
    Complete(Conversation),
    /// Only the leading turns fit.
    Shortened {
        /// The turns that fit.
        conversation: Conversation,
        /// The number of turns removed, those of subagents included.
        turns: u64,
    },
    /// Not even the first turn fits.
    Dropped,
}

impl Shape {
    /// Returns the scaled position of the trace's position `tokens`; monotonic in `tokens`.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "prompts are below 2^26 tokens and the scale is positive"
    )]
    pub fn tokens(&self, tokens: u64) -> u64 {
        (tokens as f64 * self.scale).ceil() as u64
    }

    /// Returns the scaled length of a turn's prompt; at least 1.
    pub fn prompt_tokens(&self, turn: &TraceTurn) -> u64 {
        self.tokens(turn.prompt_tokens).max(1)
    }

    /// Returns the scaled and bounded length of a turn's answer; at least 1.
    pub fn output_tokens(&self, turn: &TraceTurn) -> u64 {
        let scaled = self.tokens(turn.output_tokens).max(1);
        self.output_tokens_max.map_or(scaled, |max| scaled.min(max.max(1)))
    }

    /// Keeps the leading turns that fit the context.
    pub fn fit(&self, mut conversation: Conversation) -> Fit {
        let Some(max) = self.context_tokens_max else { return Fit::Complete(conversation) };
        let before = conversation.turns_total();
        let fits = |turn: &TraceTurn| self.prompt_tokens(turn) + self.output_tokens(turn) <= max;
        let kept = |turns: &[TraceTurn]| turns.iter().take_while(|turn| fits(turn)).count();
        let own = kept(&conversation.turns);
        if own == 0 {
            return Fit::Dropped;
        }
        conversation.turns.truncate(own);
        conversation.children.retain_mut(|child| {
            child.conversation.turns.truncate(kept(&child.conversation.turns));
            child.beside_turn < own && !child.conversation.turns.is_empty()
        });
        match before - conversation.turns_total() {
            0 => Fit::Complete(conversation),
            turns => Fit::Shortened { conversation, turns },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Blocks;

    fn conversation(prompts: &[u64]) -> Conversation {
        let turn = |&tokens: &u64| TraceTurn {
            prompt_tokens: tokens,
            output_tokens: 10,
            blocks: Blocks::from_ids(&[1]),
            ..TraceTurn::default()
        };
        Conversation {
            id: "c".to_owned(),
            block_tokens: 64,
            scope: Some(0),
            turns: prompts.iter().map(turn).collect(),
            ..Conversation::default()
        }
    }

    #[test]
    fn too_long_conversations_are_cut_where_they_stop_fitting() {
        let shape = Shape { context_tokens_max: Some(100), ..Shape::default() };
        assert!(matches!(shape.fit(conversation(&[10, 90])), Fit::Complete(_)));
        let Fit::Shortened { conversation: left, turns } = shape.fit(conversation(&[10, 91, 20]))
        else {
            panic!("the second turn is one token too long")
        };
        assert_eq!((left.turns.len(), turns), (1, 2));
        assert_eq!(shape.fit(conversation(&[91])), Fit::Dropped);
    }

    #[test]
    fn scaling_keeps_order_and_at_least_one_token() {
        let shape = Shape { scale: 0.01, output_tokens_max: Some(3), ..Shape::default() };
        let scaled: Vec<u64> = (0..500).map(|tokens| shape.tokens(tokens)).collect();
        assert!(scaled.is_sorted());
        let turn = &conversation(&[1]).turns[0];
        assert_eq!(shape.prompt_tokens(turn), 1);
        assert_eq!(shape.output_tokens(turn), 1);
        let wide = Shape { scale: 1.0, ..shape };
        assert_eq!(wide.output_tokens(turn), 3);
    }
}
