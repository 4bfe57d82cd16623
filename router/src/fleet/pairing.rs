//! Decides which prefill and decode engines can run turns together. Pure.
//!
//! The decode engine copies pages of KV as they are, so the two engines need the same model, pages
//! and data type, and one way to transfer.

use std::num::NonZeroU64;

use contract::load::{EngineFacts, EngineRole};
use xxhash_rust::xxh3::Xxh3;

/// The rest of a class is the hash.
const TP_BITS: u32 = 16;

/// The values of an engine on which its partners depend, in one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PairClass(NonZeroU64);

impl PairClass {
    /// `None` if the engine runs whole turns, or if its agent doesn't say how it hands over KV.
    #[must_use]
    pub fn read(engine: &EngineFacts) -> Option<Self> {
        let transfer =
            engine.transfer.as_ref().filter(|_| engine.role() != EngineRole::Aggregated)?;
        let mut hasher = Xxh3::new();
        let texts = engine.models.iter().chain([&transfer.backend, &transfer.kv_dtype]);
        for text in texts {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        hasher.update(&engine.page_tokens.to_le_bytes());
        let tp_size = u64::from(transfer.tp_size).clamp(1, (1 << TP_BITS) - 1);
        NonZeroU64::new(hasher.digest() << TP_BITS | tp_size).map(Self)
    }

    /// The KV of a head goes from a whole number of ranks to a whole number of ranks, so the
    /// smaller tensor parallel size must divide the greater.
    #[must_use]
    pub fn fits(self, other: Self) -> bool {
        let (greater, less) =
            (self.tp_size().max(other.tp_size()), self.tp_size().min(other.tp_size()));
        self.hash() == other.hash() && greater.is_multiple_of(less)
    }

    fn hash(self) -> u64 {
        self.0.get() >> TP_BITS
    }

    fn tp_size(self) -> u64 {
        self.0.get() & ((1 << TP_BITS) - 1)
    }
}

#[cfg(test)]
mod tests {
    use contract::load::KvTransfer;

    use super::*;
    use crate::fleet::testing::{description, disaggregated};

    fn class(change: impl FnOnce(&mut EngineFacts, &mut KvTransfer)) -> PairClass {
        let mut engine = disaggregated(description("a", 1, 1), "decode").engine;
        let mut transfer = engine.transfer.take().unwrap();
        change(&mut engine, &mut transfer);
        PairClass::read(&EngineFacts { transfer: Some(transfer), ..engine }).unwrap()
    }

    #[test]
    fn engines_pair_only_if_their_pages_are_alike() {
        let prefill = class(|_, _| ());
        let others = [
            class(|engine, _| engine.models.push("n".to_owned())),
            class(|engine, _| engine.page_tokens = 64),
            class(|_, transfer| transfer.kv_dtype = "fp8_e5m2".to_owned()),
            class(|_, transfer| transfer.backend = "nixl".to_owned()),
            class(|_, transfer| transfer.tp_size = 3),
        ];
        for (number, other) in others.into_iter().enumerate() {
            let is_divisor = number == 4;
            assert_eq!(prefill.fits(other), is_divisor, "case {number}");
            assert_eq!(other.fits(prefill), is_divisor, "case {number}");
        }
        let (two, three) = (class(|_, it| it.tp_size = 2), class(|_, it| it.tp_size = 3));
        assert!(!two.fits(three) && two.fits(class(|_, it| it.tp_size = 8)));
        // What a partner doesn't depend on.
        assert!(prefill.fits(class(|engine, it| {
            (engine.context_tokens, it.bootstrap_port, it.decode_cache) = (7, 7, true);
        })));
    }

    #[test]
    fn whole_turns_and_agents_that_do_not_say_have_no_class() {
        let mut engine = description("a", 1, 1).engine;
        assert_eq!(PairClass::read(&engine), None);
        engine.disaggregation = "prefill".to_owned();
        assert_eq!(PairClass::read(&engine), None);
    }
}
