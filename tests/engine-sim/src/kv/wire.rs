//! The MessagePack encoding of event batches, byte for byte as the engine's encoder makes it.

use rmp_serde::Serializer;
use serde::Serialize;

use super::event::{KvEvent, Medium};

/// Encodes `[time, events, rank]`. Each event is a map, or an array as in older releases.
pub(super) fn batch(time: f64, events: &[KvEvent], rank: usize, arrays: bool) -> Vec<u8> {
    let events: Vec<_> = events.iter().map(|event| WireEvent::new(event, arrays)).collect();
    let (mut bytes, batch) = (Vec::new(), (time, events, rank));
    let encoded = if arrays {
        batch.serialize(&mut Serializer::new(&mut bytes))
    } else {
        batch.serialize(&mut Serializer::new(&mut bytes).with_struct_map())
    };
    encoded.expect("all of it can be encoded, and a vector has room");
    bytes
}

/// An event with the engine's keys in the engine's order.
#[derive(Serialize)]
#[serde(untagged)]
enum WireEvent<'a> {
    Stored {
        r#type: &'static str,
        block_hashes: &'a [i64],
        parent_block_hash: Option<i64>,
        token_ids: &'a [u32],
        block_size: usize,
        lora_id: (),
        medium: &'static str,
        #[serde(skip_serializing_if = "Option::is_none")]
        cache_salt: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        session_id: Option<&'a str>,
    },
    Removed {
        r#type: &'static str,
        block_hashes: &'a [i64],
        medium: &'static str,
    },
    Cleared {
        r#type: &'static str,
    },
}

impl<'a> WireEvent<'a> {
    /// Older releases, which encode arrays, have neither salts nor sessions.
    fn new(event: &'a KvEvent, is_old: bool) -> Self {
        match event {
            KvEvent::Stored(stored) => WireEvent::Stored {
                r#type: "BlockStored",
                block_hashes: &stored.hashes,
                parent_block_hash: stored.parent,
                token_ids: &stored.tokens,
                block_size: stored.block_size,
                lora_id: (),
                medium: name(stored.medium),
                cache_salt: stored.space.cache_salt.as_deref().filter(|_| !is_old),
                session_id: stored.session_id.as_deref().filter(|_| !is_old),
            },
            KvEvent::Removed { hashes, medium, .. } => WireEvent::Removed {
                r#type: "BlockRemoved",
                block_hashes: hashes,
                medium: name(*medium),
            },
            KvEvent::Cleared => WireEvent::Cleared { r#type: "AllBlocksCleared" },
        }
    }
}

fn name(medium: Medium) -> &'static str {
    match medium {
        Medium::Device => "GPU",
        Medium::Host => "CPU_PINNED",
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{super::request::Space, event::Stored},
        *,
    };
    use std::fmt::Write as _;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }

    fn events() -> [KvEvent; 3] {
        let hashes = vec![-3_488_128_144_981_237_669, 5_674_439_469_042_975_057];
        let stored = Stored {
            hashes: hashes.clone(),
            parent: None,
            tokens: (1..=8).collect(),
            block_size: 4,
            space: Space::default(),
            session_id: Some("attr-1".to_owned()),
            medium: Medium::Device,
        };
        let (hashes, extra_key, medium) = (hashes[1..].to_vec(), None, Medium::Device);
        let removed = KvEvent::Removed { hashes, extra_key, medium };
        [KvEvent::Stored(stored), removed, KvEvent::Cleared]
    }

    /// The expected bytes come from the engine's own encoder.
    #[test]
    fn bytes_are_the_engine_s() {
        let maps = concat!(
            "93cb3ff80000000000009388a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739",
            "2d3cf97adeedb59e05bcf4ebfa8a1f3c34151b1706172656e745f626c6f636b5f68617368c0a9746f6b65",
            "6e5f696473980102030405060708aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da",
            "3475055aa73657373696f6e5f6964a6617474722d3183a474797065ac426c6f636b52656d6f766564ac62",
            "6c6f636b5f68617368657391cf4ebfa8a1f3c34151a66d656469756da347505581a474797065b0416c6c4",
            "26c6f636b73436c656172656403",
        );
        assert_eq!(hex(&batch(1.5, &events(), 3, false)), maps);
        let arrays = concat!(
            "93cb3ff80000000000009397ab426c6f636b53746f72656492d3cf97adeedb59e05bcf4ebfa8a1f3c3415",
            "1c098010203040506070804c0a347505593ac426c6f636b52656d6f76656491cf4ebfa8a1f3c34151a347",
            "505591b0416c6c426c6f636b73436c656172656403",
        );
        assert_eq!(hex(&batch(1.5, &events(), 3, true)), arrays);
    }
}
