//! The MessagePack encoding of event batches, byte for byte as the engine's encoder makes it.

use super::event::{KvEvent, Stored};

const MEDIUM: &str = "GPU";

/// Encodes `[time, events, rank]`. Each event is a map, or an array as in older releases.
pub(super) fn batch(time: f64, events: &[KvEvent], rank: usize, arrays: bool) -> Vec<u8> {
    let mut out = Writer(Vec::new());
    out.array(3);
    out.float(time);
    out.array(events.len());
    for event in events {
        if arrays { out.array_event(event) } else { out.map_event(event) }
    }
    out.int(i64::try_from(rank).expect("ranks are few"));
    out.0
}

struct Writer(Vec<u8>);

impl Writer {
    fn map_event(&mut self, event: &KvEvent) {
        match event {
            KvEvent::Stored(stored) => self.map_stored(stored),
            KvEvent::Removed { hashes, .. } => {
                self.map(3);
                self.pair("type", "BlockRemoved");
                self.text("block_hashes");
                self.ints(hashes);
                self.pair("medium", MEDIUM);
            }
            KvEvent::Cleared => {
                self.map(1);
                self.pair("type", "AllBlocksCleared");
            }
        }
    }

    fn map_stored(&mut self, stored: &Stored) {
        let optional = [
            ("cache_salt", stored.space.cache_salt.as_deref()),
            ("session_id", stored.session_id.as_deref()),
        ];
        let optional = optional.into_iter().filter_map(|(key, text)| Some((key, text?)));
        self.map(7 + optional.clone().count());
        self.pair("type", "BlockStored");
        self.text("block_hashes");
        self.ints(&stored.hashes);
        self.text("parent_block_hash");
        self.maybe_int(stored.parent);
        self.text("token_ids");
        self.ints(&stored.tokens);
        self.text("block_size");
        self.int(i64::try_from(stored.block_size).expect("pages are small"));
        self.text("lora_id");
        self.nil();
        self.pair("medium", MEDIUM);
        for (key, text) in optional {
            self.pair(key, text);
        }
    }

    fn array_event(&mut self, event: &KvEvent) {
        match event {
            KvEvent::Stored(stored) => {
                self.array(7);
                self.text("BlockStored");
                self.ints(&stored.hashes);
                self.maybe_int(stored.parent);
                self.ints(&stored.tokens);
                self.int(i64::try_from(stored.block_size).expect("pages are small"));
                self.nil();
                self.text(MEDIUM);
            }
            KvEvent::Removed { hashes, .. } => {
                self.array(3);
                self.text("BlockRemoved");
                self.ints(hashes);
                self.text(MEDIUM);
            }
            KvEvent::Cleared => {
                self.array(1);
                self.text("AllBlocksCleared");
            }
        }
    }

    fn pair(&mut self, key: &str, text: &str) {
        self.text(key);
        self.text(text);
    }

    fn ints<T: Copy + Into<i64>>(&mut self, ints: &[T]) {
        self.array(ints.len());
        ints.iter().for_each(|&int| self.int(int.into()));
    }

    fn maybe_int(&mut self, int: Option<i64>) {
        match int {
            Some(int) => self.int(int),
            None => self.nil(),
        }
    }

    fn nil(&mut self) {
        self.0.push(0xc0);
    }

    fn float(&mut self, value: f64) {
        self.0.push(0xcb);
        self.0.extend(value.to_be_bytes());
    }

    /// Writes an integer in its shortest form, unsigned if it isn't negative.
    fn int(&mut self, value: i64) {
        let bytes = value.to_be_bytes();
        let (kind, size) = match value {
            -32..=0x7f => (None, 1),
            0x80..=0xff => (Some(0xcc), 1),
            0x100..=0xffff => (Some(0xcd), 2),
            0x1_0000..=0xffff_ffff => (Some(0xce), 4),
            0x1_0000_0000.. => (Some(0xcf), 8),
            -0x80..=-33 => (Some(0xd0), 1),
            -0x8000..=-0x81 => (Some(0xd1), 2),
            -0x8000_0000..=-0x8001 => (Some(0xd2), 4),
            i64::MIN..=-0x8000_0001 => (Some(0xd3), 8),
        };
        self.0.extend(kind);
        self.0.extend_from_slice(&bytes[8 - size..]);
    }

    fn text(&mut self, text: &str) {
        self.length(text.len(), (0xa0, 32), &[0xd9, 0xda, 0xdb]);
        self.0.extend_from_slice(text.as_bytes());
    }

    fn array(&mut self, count: usize) {
        self.length(count, (0x90, 16), &[0xdc, 0xdd]);
    }

    fn map(&mut self, count: usize) {
        self.length(count, (0x80, 16), &[0xde, 0xdf]);
    }

    /// Writes a type and length. A length below the short form's limit is part of the type byte.
    /// For larger lengths `kinds` has the type bytes of the one-, two- and four-byte forms; a type
    /// without the one-byte form leaves it out.
    fn length(&mut self, length: usize, short: (u8, usize), kinds: &[u8]) {
        let bytes = u32::try_from(length).expect("a batch is below 4 GiB").to_be_bytes();
        if length < short.1 {
            return self.0.push(short.0 | bytes[3]);
        }
        let size = [1, 2, 4].into_iter().skip(3 - kinds.len());
        let fits = |size: &usize| *size == 4 || length >> (8 * size) == 0;
        let (kind, size) = kinds.iter().zip(size).find(|(_, size)| fits(size)).expect("4 fits");
        self.0.push(*kind);
        self.0.extend_from_slice(&bytes[4 - size..]);
    }
}

#[cfg(test)]
mod tests {
    use super::{super::super::request::Space, *};
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
        };
        let removed = KvEvent::Removed { hashes: hashes[1..].to_vec(), extra_key: None };
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

    #[test]
    fn numbers_and_lengths_take_their_shortest_form() {
        let table = [
            (0, "00"),
            (127, "7f"),
            (128, "cc80"),
            (256, "cd0100"),
            (65_536, "ce00010000"),
            (1 << 32, "cf0000000100000000"),
            (-1, "ff"),
            (-32, "e0"),
            (-33, "d0df"),
            (-129, "d1ff7f"),
            (-32_769, "d2ffff7fff"),
            (-(1 << 31) - 1, "d3ffffffff7fffffff"),
        ];
        for (value, expected) in table {
            let mut out = Writer(vec![]);
            out.int(value);
            assert_eq!(hex(&out.0), expected, "{value}");
        }
        let lengths = [(15, "9f"), (16, "dc0010"), (65_536, "dd00010000")];
        for (length, expected) in lengths {
            let mut out = Writer(vec![]);
            out.array(length);
            assert_eq!(hex(&out.0), expected, "{length}");
        }
        let mut out = Writer(vec![]);
        out.text(&"x".repeat(32));
        assert!(hex(&out.0).starts_with("d92078"));
    }
}
