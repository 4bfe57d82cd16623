//! Decodes the messages of SGLang's KV event publisher into [`CacheEvent`]s.
//!
//! SGLang calls pages blocks. A message is the array `[time, events, rank]`. An event is a map with
//! a `type` key, or in older releases of SGLang an array whose first element is the type. Unknown
//! fields and event types are skipped.
//!
//! Some engines list *token pairs* in place of tokens: a token and the one that follows it. The
//! pairs (1, 2) and (2, 3) stand for the tokens 1 and 2; the 3 is the token after them.

use super::msgpack::{self, Reader};

/// Engines have pages of up to 256 tokens.
const PAGE_TOKENS_MAX: u32 = 1 << 16;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the message is not in the form of KV events")]
    Form(#[from] msgpack::Error),
    #[error("an event has no {0}")]
    MissingField(&'static str),
    #[error("{0} is out of range")]
    OutOfRange(&'static str),
    #[error("{tokens} tokens don't fill {pages} pages of {page_tokens} tokens")]
    TokenCount {
        /// The number in the event.
        tokens: usize,
        pages: usize,
        page_tokens: u32,
    },
    /// A pair doesn't overlap the one before it, or pairs and single tokens are mixed.
    #[error("consecutive token pairs don't overlap by one token")]
    InvalidPairs,
}

/// The first 64 bits of a hash over the tokens of the page and of all pages before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageHash(pub u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Medium {
    Gpu,
    Cpu,
    /// Routing ignores storage that is farther away.
    Other,
}

/// The pages are in prefix order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// At least one.
    pub pages: Vec<PageHash>,
    /// The page before the first of `pages`. `None` if `pages` begin a prompt.
    pub parent: Option<PageHash>,
    /// For an image, the engine may put the image's hash here, which is wider than a token id.
    pub tokens: Vec<u64>,
    /// The token after the last page, which the engine hashes as part of that page. `None` if the
    /// engine sends single tokens.
    pub next_token: Option<u64>,
    pub page_tokens: u32,
    pub medium: Medium,
    pub lora: Option<String>,
    /// Prompts with different salts share no pages.
    pub cache_salt: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CacheEvent {
    Stored(Stored),
    Removed {
        pages: Vec<PageHash>,
        /// The memory that held them.
        medium: Medium,
    },
    Cleared,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    pub events: Vec<CacheEvent>,
    /// `None` if the message doesn't state it.
    pub dp_rank: Option<u32>,
}

/// If any part of the message is invalid, no events are returned: an incomplete batch would give a
/// wrong state.
pub fn decode(message: &[u8]) -> Result<Batch, Error> {
    let mut reader = Reader::new(message);
    let fields = reader.read_array_len()?;
    if fields < 2 {
        return Err(Error::MissingField("events"));
    }
    reader.skip_value()?;
    let count = reader.read_array_len()?;
    let mut events = Vec::with_capacity(count.min(reader.bytes_left()));
    for _ in 0..count {
        // An unknown type, as in another release of SGLang, adds nothing.
        events.extend(read_event(&mut reader)?);
    }
    let dp_rank = match fields {
        2 => None,
        _ if reader.take_nil()? => None,
        _ => {
            Some(u32::try_from(reader.read_int()?).map_err(|_| Error::OutOfRange("attn_dp_rank"))?)
        }
    };
    Ok(Batch { events, dp_rank })
}

struct Tokens {
    tokens: Vec<u64>,
    next_token: Option<u64>,
}

#[derive(Default)]
struct Fields<'a> {
    kind: Option<&'a str>,
    pages: Option<Vec<PageHash>>,
    parent: Option<PageHash>,
    tokens: Option<Tokens>,
    page_tokens: Option<u32>,
    medium: Option<&'a str>,
    lora: Option<&'a str>,
    cache_salt: Option<&'a str>,
}

/// The order is that of the array form.
fn field_names(kind: &str) -> &'static [&'static str] {
    match kind {
        "BlockStored" => {
            &["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"]
        }
        "BlockRemoved" => &["block_hashes", "medium"],
        _ => &[],
    }
}

fn read_event(reader: &mut Reader<'_>) -> Result<Option<CacheEvent>, Error> {
    let mut fields = Fields::default();
    if reader.is_array()? {
        let count = reader.read_array_len()?;
        if count == 0 {
            return Err(Error::MissingField("type"));
        }
        let kind = reader.read_text()?;
        fields.kind = Some(kind);
        for index in 0..count - 1 {
            fields.read(field_names(kind).get(index).copied().unwrap_or(""), reader)?;
        }
    } else {
        for _ in 0..reader.read_map_len()? {
            let name = reader.read_text()?;
            fields.read(name, reader)?;
        }
    }
    fields.into_event()
}

impl<'a> Fields<'a> {
    fn read(&mut self, name: &str, reader: &mut Reader<'a>) -> Result<(), Error> {
        if reader.take_nil()? {
            return Ok(());
        }
        match name {
            "type" => self.kind = Some(reader.read_text()?),
            "block_hashes" => {
                let count = reader.read_array_len()?;
                let mut pages = Vec::with_capacity(count.min(reader.bytes_left()));
                for _ in 0..count {
                    pages.push(read_page_hash(reader)?);
                }
                self.pages = Some(pages);
            }
            "parent_block_hash" => self.parent = Some(read_page_hash(reader)?),
            "token_ids" => self.tokens = Some(read_tokens(reader)?),
            "block_size" => {
                let size = u32::try_from(reader.read_int()?).ok();
                let size = size.filter(|size| (1..=PAGE_TOKENS_MAX).contains(size));
                self.page_tokens = Some(size.ok_or(Error::OutOfRange("block_size"))?);
            }
            "medium" => self.medium = Some(reader.read_text()?),
            "lora_name" => self.lora = Some(reader.read_text()?),
            "cache_salt" => self.cache_salt = Some(reader.read_text()?),
            _ => reader.skip_value()?,
        }
        Ok(())
    }

    fn into_event(self) -> Result<Option<CacheEvent>, Error> {
        let medium = match self.medium {
            // Releases without this field report the GPU only.
            None | Some("GPU") => Medium::Gpu,
            Some("CPU_PINNED" | "CPU") => Medium::Cpu,
            Some(_) => Medium::Other,
        };
        let pages = self.pages.ok_or(Error::MissingField("block_hashes"));
        Ok(Some(match self.kind.ok_or(Error::MissingField("type"))? {
            "BlockStored" => {
                let pages = pages?;
                let Tokens { tokens, next_token } =
                    self.tokens.ok_or(Error::MissingField("token_ids"))?;
                let page_tokens = self.page_tokens.ok_or(Error::MissingField("block_size"))?;
                if pages.is_empty() || tokens.len() != pages.len() * page_tokens as usize {
                    let (tokens, pages) = (tokens.len(), pages.len());
                    return Err(Error::TokenCount { tokens, pages, page_tokens });
                }
                CacheEvent::Stored(Stored {
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
            "BlockRemoved" => CacheEvent::Removed { pages: pages?, medium },
            "AllBlocksCleared" => CacheEvent::Cleared,
            _ => return Ok(None),
        }))
    }
}

/// The engine sends a signed or an unsigned 64-bit integer.
fn read_page_hash(reader: &mut Reader<'_>) -> Result<PageHash, Error> {
    let int = reader.read_int()?;
    let signed = i64::try_from(int).map(i64::cast_unsigned);
    signed
        .or_else(|_| u64::try_from(int))
        .map(PageHash)
        .map_err(|_| Error::OutOfRange("block_hashes"))
}

/// Consecutive pairs overlap by one token.
fn read_tokens(reader: &mut Reader<'_>) -> Result<Tokens, Error> {
    let read_token = |reader: &mut Reader<'_>| {
        u64::try_from(reader.read_int()?).map_err(|_| Error::OutOfRange("token_ids"))
    };
    let count = reader.read_array_len()?;
    let mut tokens = Vec::with_capacity(count.min(reader.bytes_left()));
    let mut next_token = None;
    for _ in 0..count {
        let is_pair = reader.is_array()?;
        if is_pair && reader.read_array_len()? != 2 {
            return Err(Error::InvalidPairs);
        }
        let token = read_token(reader)?;
        let expected_token =
            if is_pair { next_token.replace(read_token(reader)?) } else { next_token };
        // A pair and a single token must not follow each other.
        if !tokens.is_empty() && expected_token != is_pair.then_some(token) {
            return Err(Error::InvalidPairs);
        }
        tokens.push(token);
    }
    Ok(Tokens { tokens, next_token })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// As SGLang 0.5.23 encodes events.
    const MAPS: &str = "93cb3ff80000000000009488a474797065ab426c6f636b53746f726564ac626c6f636b5f686173\
        68657392d3cf97adeedb59e05bcf4ebfa8a1f3c34151b1706172656e745f626c6f636b5f68617368c0a9746f6b\
        656e5f696473980102030405060708aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da347\
        5055aa73657373696f6e5f6964a6617474722d3183a474797065ac426c6f636b52656d6f766564ac626c6f636b\
        5f68617368657391cf4ebfa8a1f3c34151a66d656469756daa4350555f50494e4e454481a474797065b0416c6c\
        426c6f636b73436c656172656488a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391\
        cf678c5307f2a02a2ab1706172656e745f626c6f636b5f68617368d3ede8ef26a097f0fda9746f6b656e5f6964\
        7392920304920405aa626c6f636b5f73697a6502a76c6f72615f6964c0aa63616368655f73616c74a874656e61\
        6e742d61a96c6f72615f6e616d65a373716c03";
    /// The first three events in the array form of older releases.
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

    fn first_three() -> Vec<CacheEvent> {
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
        let removed = CacheEvent::Removed { pages: pages[1..].to_vec(), medium: Medium::Cpu };
        vec![CacheEvent::Stored(stored), removed, CacheEvent::Cleared]
    }

    #[test]
    fn events_as_maps() {
        let mut events = first_three();
        events.push(CacheEvent::Stored(Stored {
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
        let tokens = Error::TokenCount { tokens: 8, pages: 2, page_tokens: 3 };
        assert_eq!(with("73697a6504", "73697a6503"), Err(tokens));
        assert_eq!(with("73697a6504", "73697a6500"), Err(Error::OutOfRange("block_size")));
        assert_eq!(with("920304920405", "920304920605"), Err(Error::InvalidPairs));
        assert_eq!(with("920304920405", "92030404c0c0"), Err(Error::InvalidPairs));
        assert_eq!(with("a474797065ab", "a474797066ab"), Err(Error::MissingField("type")));
        // An event type of a later release.
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
