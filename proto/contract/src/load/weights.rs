//! Names the weights that a worker's engine has, and those that a client asks for.
//!
//! A group of samples should come from the same weights, so an answer names its weights in the
//! header [`WEIGHTS`], and a request may ask for some in the same header.

use std::fmt;

use http::HeaderName;
use serde::Serialize;

use crate::id;

/// An answer names the weights that it began with, a request those to place it on.
pub const WEIGHTS: HeaderName = HeaderName::from_static("x-berth-weights");

const LABEL_BYTES_MAX: usize = 64;

/// The text is the epoch, or `epoch/label`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Weights {
    /// Counts the changes that the agent has seen, from 1.
    pub epoch: u64,
    /// The engine's `weight_version`; empty if it has none.
    pub label: String,
}

/// The text is `epoch`, `epoch/label` or `/label`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedWeights {
    epoch: Option<u64>,
    label: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{WEIGHTS} names no weights: send `EPOCH`, `EPOCH/LABEL` or `/LABEL`")]
pub struct InvalidWeights;

impl Weights {
    /// A version that doesn't fit into a header gets its digest as label.
    #[must_use]
    pub fn new(epoch: u64, version: &str) -> Self {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._:+-".contains(&byte);
        let fits = version.len() <= LABEL_BYTES_MAX && version.bytes().all(is_plain);
        let label = if fits { version.to_owned() } else { id::short_sha256(version.as_bytes()) };
        Self { epoch, label }
    }
}

impl fmt::Display for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.label.as_str() {
            "" => write!(f, "{}", self.epoch),
            label => write!(f, "{}/{label}", self.epoch),
        }
    }
}

impl WantedWeights {
    pub fn parse(text: &str) -> Result<Self, InvalidWeights> {
        let (epoch, label) = match text.trim().split_once('/') {
            Some((epoch, label)) => (epoch, Some(label.to_owned())),
            None => (text.trim(), None),
        };
        let epoch = match epoch {
            "" => None,
            digits => Some(digits.parse().map_err(|_| InvalidWeights)?),
        };
        let label = label.filter(|label| !label.is_empty());
        if epoch.is_none() && label.is_none() {
            return Err(InvalidWeights);
        }
        Ok(Self { epoch, label })
    }

    #[must_use]
    pub fn matches(&self, weights: &Weights) -> bool {
        self.epoch.is_none_or(|epoch| epoch == weights.epoch)
            && self.label.as_ref().is_none_or(|label| *label == weights.label)
    }
}

impl fmt::Display for WantedWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(epoch) = self.epoch {
            write!(f, "{epoch}")?;
        }
        self.label.as_ref().map_or(Ok(()), |label| write!(f, "/{label}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_answer_names_can_be_asked_for() {
        for version in ["", "step-12", "a b", "ü", &"x".repeat(65)] {
            let weights = Weights::new(3, version);
            let wanted = WantedWeights::parse(&weights.to_string()).unwrap();
            assert!(wanted.matches(&weights), "{version}");
            assert_eq!(wanted.to_string(), weights.to_string());
            assert!(!wanted.matches(&Weights::new(4, version)), "another epoch");
        }
        let label = WantedWeights::parse("/step-12").unwrap();
        assert!(label.matches(&Weights::new(1, "step-12")), "any epoch");
        assert!(!label.matches(&Weights::new(1, "step-13")));
        for text in ["", "/", "x", "-1", "1.5", "1,2"] {
            assert!(WantedWeights::parse(text).is_err(), "{text}");
        }
    }
}
