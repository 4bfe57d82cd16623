//! One message of SGLang's KV event publisher, decoded: `[time, events, rank]`, each event a map
//! with its type, or in older releases an array that begins with it. It judges the form and nothing
//! else; names it doesn't know are passed over.

use super::msgpack::{self, Reader};

/// Tokens of a page at most, for a length that makes no sense; engines have up to 256.
const PAGE_TOKENS_MAX: u32 = 1 << 16;

/// Why a message could not be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// It is no MessagePack, or not of this shape.
    #[error("the message has not the form of KV events")]
    Form(#[from] msgpack::Error),
    /// A field that every event of its type has is missing.
    #[error("an event lacks {0}")]
    Missing(&'static str),
    /// A number that can't be.
    #[error("{0} is out of its range")]
    Range(&'static str),
    /// As many pages as announced don't have as many tokens as are there.
    #[error("{tokens} tokens are not {pages} pages of {page_tokens}")]
    Tokens {
        /// Tokens found.
        tokens: usize,
        /// Pages announced.
        pages: usize,
        /// Tokens of each, as announced.
        page_tokens: u32,
    },
    /// Pairs of tokens that don't continue one another.
    #[error("pairs of tokens don't overlap by one")]
    Pairs,
}

/// What the engine calls a page: 64 bits of the hash of it and all before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageHash(pub u64);

/// Where pages are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Medium {
    /// The GPU's memory.
    Gpu,
    /// The host's memory.
    Cpu,
    /// Farther away: nothing is routed by it.
    Other,
}

/// Pages that became resident, each after the one before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// At least one.
    pub pages: Vec<PageHash>,
    /// What the first of them follows; none at the beginning of a prompt.
    pub parent: Option<PageHash>,
    /// Of all pages. Wider than ids usually are: the engine may put a hash of an image here.
    pub tokens: Vec<u64>,
    /// With pairs of tokens, the one after the last: part of the last page's hash.
    pub next_token: Option<u64>,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Where.
    pub medium: Medium,
    /// The adapter's name.
    pub lora: Option<String>,
    /// The caller's salt.
    pub cache_salt: Option<String>,
}

/// What happened to the engine's cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Pages became resident.
    Stored(Stored),
    /// Pages are resident no more.
    Removed {
        /// Which.
        pages: Vec<PageHash>,
        /// Where they were.
        medium: Medium,
    },
    /// Nothing is resident any more.
    Cleared,
}

/// The events of one message, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// In the order in which they happened.
    pub events: Vec<Event>,
    /// The rank that they happened on.
    pub dp_rank: Option<u32>,
}

/// Decodes a message.
///
/// # Errors
/// When it isn't one, as a whole: half of a batch would be a lie.
pub fn decode(message: &[u8]) -> Result<Batch, Error> {
    let mut reader = Reader::new(message);
    let fields = reader.array()?;
    if fields < 2 {
        return Err(Error::Missing("events"));
    }
    reader.skip()?;
    let count = reader.array()?;
    let mut events = Vec::with_capacity(count.min(reader.left()));
    for _ in 0..count {
        // A type of another release says nothing that is needed here.
        events.extend(event(&mut reader)?);
    }
    let dp_rank = match fields {
        2 => None,
        _ if reader.nil()? => None,
        _ => Some(u32::try_from(reader.int()?).map_err(|_| Error::Range("attn_dp_rank"))?),
    };
    Ok(Batch { events, dp_rank })
}

/// All fields that some event has.
#[derive(Default)]
struct Fields<'a> {
    kind: Option<&'a str>,
    pages: Option<Vec<PageHash>>,
    parent: Option<PageHash>,
    tokens: Option<(Vec<u64>, Option<u64>)>,
    page_tokens: Option<u32>,
    medium: Option<&'a str>,
    lora: Option<&'a str>,
    cache_salt: Option<&'a str>,
}

/// The fields of an event that is an array, in their order.
fn names_of(kind: &str) -> &'static [&'static str] {
    match kind {
        "BlockStored" => {
            &["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"]
        }
        "BlockRemoved" => &["block_hashes", "medium"],
        _ => &[],
    }
}

fn event(reader: &mut Reader<'_>) -> Result<Option<Event>, Error> {
    let mut fields = Fields::default();
    if reader.is_array()? {
        let count = reader.array()?;
        if count == 0 {
            return Err(Error::Missing("type"));
        }
        let kind = reader.text()?;
        fields.kind = Some(kind);
        for at in 0..count - 1 {
            fields.read(names_of(kind).get(at).copied().unwrap_or(""), reader)?;
        }
    } else {
        for _ in 0..reader.map()? {
            let name = reader.text()?;
            fields.read(name, reader)?;
        }
    }
    fields.event()
}

impl<'a> Fields<'a> {
    fn read(&mut self, name: &str, reader: &mut Reader<'a>) -> Result<(), Error> {
        if reader.nil()? {
            return Ok(());
        }
        match name {
            "type" => self.kind = Some(reader.text()?),
            "block_hashes" => {
                let count = reader.array()?;
                let mut pages = Vec::with_capacity(count.min(reader.left()));
                for _ in 0..count {
                    pages.push(page(reader)?);
                }
                self.pages = Some(pages);
            }
            "parent_block_hash" => self.parent = Some(page(reader)?),
            "token_ids" => self.tokens = Some(tokens(reader)?),
            "block_size" => {
                let size = u32::try_from(reader.int()?).ok();
                let size = size.filter(|size| (1..=PAGE_TOKENS_MAX).contains(size));
                self.page_tokens = Some(size.ok_or(Error::Range("block_size"))?);
            }
            "medium" => self.medium = Some(reader.text()?),
            "lora_name" => self.lora = Some(reader.text()?),
            "cache_salt" => self.cache_salt = Some(reader.text()?),
            _ => reader.skip()?,
        }
        Ok(())
    }

    fn event(self) -> Result<Option<Event>, Error> {
        let medium = match self.medium {
            // Releases without this field have no other place.
            None | Some("GPU") => Medium::Gpu,
            Some("CPU_PINNED" | "CPU") => Medium::Cpu,
            Some(_) => Medium::Other,
        };
        let pages = self.pages.ok_or(Error::Missing("block_hashes"));
        Ok(Some(match self.kind.ok_or(Error::Missing("type"))? {
            "BlockStored" => {
                let pages = pages?;
                let (tokens, next_token) = self.tokens.ok_or(Error::Missing("token_ids"))?;
                let page_tokens = self.page_tokens.ok_or(Error::Missing("block_size"))?;
                if pages.is_empty() || tokens.len() != pages.len() * page_tokens as usize {
                    let (tokens, pages) = (tokens.len(), pages.len());
                    return Err(Error::Tokens { tokens, pages, page_tokens });
                }
                Event::Stored(Stored {
                    pages,
                    parent: self.parent,
                    tokens,
                    next_token,
                    page_tokens,
                    medium,
                    lora: self.lora.map(str::to_owned),
                    cache_salt: self.cache_salt.map(str::to_owned),
                })
            }
            "BlockRemoved" => Event::Removed { pages: pages?, medium },
            "AllBlocksCleared" => Event::Cleared,
            _ => return Ok(None),
        }))
    }
}

/// A hash, signed or not.
fn page(reader: &mut Reader<'_>) -> Result<PageHash, Error> {
    let int = reader.int()?;
    let signed = i64::try_from(int).map(i64::cast_unsigned);
    signed.or_else(|_| u64::try_from(int)).map(PageHash).map_err(|_| Error::Range("block_hashes"))
}

/// Tokens, or pairs of each with its next one; then also the last one's next.
fn tokens(reader: &mut Reader<'_>) -> Result<(Vec<u64>, Option<u64>), Error> {
    let token = |reader: &mut Reader<'_>| {
        u64::try_from(reader.int()?).map_err(|_| Error::Range("token_ids"))
    };
    let count = reader.array()?;
    let mut tokens = Vec::with_capacity(count.min(reader.left()));
    let mut next = None;
    for _ in 0..count {
        let is_pair = reader.is_array()?;
        if is_pair && reader.array()? != 2 {
            return Err(Error::Pairs);
        }
        let first = token(reader)?;
        let expected = if is_pair { next.replace(token(reader)?) } else { next };
        let begins = tokens.is_empty() && (is_pair || next.is_none());
        if !begins && expected != is_pair.then_some(first) {
            return Err(Error::Pairs);
        }
        tokens.push(first);
    }
    Ok((tokens, next))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// As SGLang 0.5.23 encodes it.
    const MAPS: &str = "93cb3ff80000000000009488a474797065ab426c6f636b53746f726564ac626c6f636b5f686173\
        68657392d3cf97adeedb59e05bcf4ebfa8a1f3c34151b1706172656e745f626c6f636b5f68617368c0a9746f6b\
        656e5f696473980102030405060708aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da347\
        5055aa73657373696f6e5f6964a6617474722d3183a474797065ac426c6f636b52656d6f766564ac626c6f636b\
        5f68617368657391cf4ebfa8a1f3c34151a66d656469756daa4350555f50494e4e454481a474797065b0416c6c\
        426c6f636b73436c656172656488a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391\
        cf678c5307f2a02a2ab1706172656e745f626c6f636b5f68617368d3ede8ef26a097f0fda9746f6b656e5f6964\
        7392920304920405aa626c6f636b5f73697a6502a76c6f72615f6964c0aa63616368655f73616c74a874656e61\
        6e742d61a96c6f72615f6e616d65a373716c03";
    /// The first three events as older releases do.
    const ARRAYS: &str = "93cb3ff80000000000009397ab426c6f636b53746f72656492d3cf97adeedb59e05bcf4ebfa8\
        a1f3c34151c098010203040506070804c0a347505593ac426c6f636b52656d6f76656491cf4ebfa8a1f3c34151\
        aa4350555f50494e4e454491b0416c6c426c6f636b73436c6561726564c0";

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
        let byte = |pair: &[u8]| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap();
        digits.chunks(2).map(byte).collect()
    }

    fn page(hash: i64) -> PageHash {
        PageHash(hash.cast_unsigned())
    }

    fn first_three() -> Vec<Event> {
        let pages = vec![page(-3_488_128_144_981_237_669), page(5_674_439_469_042_975_057)];
        let stored = Stored {
            pages: pages.clone(),
            parent: None,
            tokens: (1..=8).collect(),
            next_token: None,
            page_tokens: 4,
            medium: Medium::Gpu,
            lora: None,
            cache_salt: None,
        };
        let removed = Event::Removed { pages: pages[1..].to_vec(), medium: Medium::Cpu };
        vec![Event::Stored(stored), removed, Event::Cleared]
    }

    #[test]
    fn events_as_maps() {
        let mut events = first_three();
        events.push(Event::Stored(Stored {
            pages: vec![page(7_461_429_976_246_528_554)],
            parent: Some(page(-1_303_529_142_941_650_691)),
            tokens: vec![3, 4],
            next_token: Some(5),
            page_tokens: 2,
            medium: Medium::Gpu,
            lora: Some("sql".to_owned()),
            cache_salt: Some("tenant-a".to_owned()),
        }));
        assert_eq!(decode(&bytes(MAPS)), Ok(Batch { events, dp_rank: Some(3) }));
    }

    #[test]
    fn events_as_arrays() {
        let batch = Batch { events: first_three(), dp_rank: None };
        assert_eq!(decode(&bytes(ARRAYS)), Ok(batch));
    }

    #[test]
    fn what_cannot_be_is_refused_whole() {
        let with =
            |from: &str, to: &str| decode(&bytes(&MAPS.replace([' ', '\n'], "").replace(from, to)));
        let tokens = Error::Tokens { tokens: 8, pages: 2, page_tokens: 3 };
        assert_eq!(with("73697a6504", "73697a6503"), Err(tokens));
        assert_eq!(with("73697a6504", "73697a6500"), Err(Error::Range("block_size")));
        assert_eq!(with("920304920405", "920304920605"), Err(Error::Pairs));
        assert_eq!(with("920304920405", "92030404c0c0"), Err(Error::Pairs));
        assert_eq!(with("a474797065ab", "a474797066ab"), Err(Error::Missing("type")));
        // A type of a later release.
        let later =
            with("b0416c6c426c6f636b73436c6561726564", "b0416c6c426c6f636b73436c6561726565");
        assert_eq!(later.unwrap().events.len(), 3);
    }

    proptest! {
        #[test]
        fn no_bytes_break_it(
            cut in 0..400_usize,
            changes in prop::collection::vec((0..400_usize, any::<u8>()), 0..6),
        ) {
            let mut message = bytes(MAPS);
            for (at, byte) in changes {
                let at = at % message.len();
                message[at] = byte;
            }
            let _ = decode(&message[..message.len().saturating_sub(cut)]);
        }
    }
}
