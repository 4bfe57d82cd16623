//! Holds the keys of a key file, and finds the key that a credential is.
//!
//! Several digests may share a name, so that a secret can be replaced while both secrets work. The
//! name is the principal of the key's user, so sessions stay with their owner when the secret
//! changes. Pure.

use std::{collections::BTreeMap, fmt, num::NonZeroU32, sync::Arc};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use subtle::{ConditionallySelectable as _, ConstantTimeEq as _};

use super::announce::AnnounceRight;

/// The most digests in one key file. Each request compares its credential with all of them, which
/// takes about 50 µs for this many. Larger fleets of users have an identity provider.
pub const DIGESTS_MAX: usize = 1024;
pub const NAME_BYTES_MAX: usize = 64;

/// A priority class. Under overload, turns of lower classes are refused first.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum PriorityClass {
    /// Work that can wait, such as batches.
    Low,
    #[default]
    Normal,
    /// Work on which somebody waits.
    High,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KeyPriority {
    /// The class of a turn that asks for none.
    pub class: PriorityClass,
    /// The highest class that a turn may ask for. `None`: `class`.
    pub bound: Option<PriorityClass>,
}

/// The limits of one key. A limit that is `None` has the process's own default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KeyLimits {
    pub requests_per_minute: Option<NonZeroU32>,
    /// Most tokens per minute, of prompts and answers together.
    pub tokens_per_minute: Option<NonZeroU32>,
    pub turns_in_flight_max: Option<NonZeroU32>,
    pub sessions_max: Option<NonZeroU32>,
    pub priority: KeyPriority,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Key {
    /// The name, which is the principal of the key's user.
    pub name: Arc<str>,
    pub is_admin: bool,
    /// Whether the key is for monitoring: it may read `/metrics` and `/config`, and nothing else.
    pub is_scrape: bool,
    pub limits: Arc<KeyLimits>,
    pub announce: Arc<AnnounceRight>,
}

#[derive(Default, PartialEq, Eq)]
pub struct KeySet {
    /// Each digest with its key. Digests of one name share their key.
    digests: Vec<([u8; 32], Arc<Key>)>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The text has no line of the file, because a line may hold a secret.
    #[error("line {line}: {message}")]
    Form {
        /// The number of the line, from 1.
        line: usize,
        message: String,
    },
    #[error("{}", .0.join("; "))]
    Keys(Vec<String>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    key: Vec<FileEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileEntry {
    name: String,
    sha256: String,
    #[serde(default)]
    admin: bool,
    #[serde(default)]
    scrape: bool,
    #[serde(default)]
    limits: KeyLimits,
    #[serde(default)]
    announce: AnnounceRight,
}

impl KeyPriority {
    #[must_use]
    pub fn bound(&self) -> PriorityClass {
        self.bound.unwrap_or(self.class)
    }
}

impl KeySet {
    pub fn parse(text: &str) -> Result<Self, Error> {
        let file: File = toml::from_str(text).map_err(|error| {
            let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
            Error::Form { line: before.matches('\n').count() + 1, message: form_message(&error) }
        })?;
        let mut problems = vec![];
        // An empty file is a mistake, and would lock everybody out.
        if file.key.is_empty() {
            problems.push("the file has no [[key]]; add one for each client".to_owned());
        }
        if file.key.len() > DIGESTS_MAX {
            problems.push(format!("the file has more than {DIGESTS_MAX} keys"));
        }
        let mut keys: BTreeMap<String, Arc<Key>> = BTreeMap::new();
        let mut digests: Vec<([u8; 32], Arc<Key>)> = vec![];
        for (entry, number) in file.key.into_iter().zip(1..) {
            if let Err(problem) = add(entry, &mut keys, &mut digests) {
                problems.push(format!("key {number}: {problem}"));
            }
        }
        let set = Self { digests };
        if problems.is_empty() { Ok(set) } else { Err(Error::Keys(problems)) }
    }

    /// The time taken doesn't depend on which key it is, nor on how much of a digest is equal.
    #[must_use]
    pub fn find(&self, credential: &[u8]) -> Option<&Arc<Key>> {
        let digest: [u8; 32] = Sha256::digest(credential).into();
        // The number of the key from 1; 0 if no key is equal.
        let mut found = 0_u64;
        for ((key_digest, _), number) in self.digests.iter().zip(1_u64..) {
            found.conditional_assign(&number, key_digest.ct_eq(&digest));
        }
        let index = usize::try_from(found).ok()?.checked_sub(1)?;
        self.digests.get(index).map(|(_, key)| key)
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.digests.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.digests.is_empty()
    }
}

impl fmt::Debug for KeySet {
    /// Shows no digest.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeySet").field("len", &self.len()).finish_non_exhaustive()
    }
}

/// Returns what is wrong with the form of a key file, without values of the file.
fn form_message(error: &toml::de::Error) -> String {
    let message = error.message();
    // A wrong type is told with the value, in quotation marks. The value may be a secret.
    if message.contains("invalid type") || message.contains('"') {
        return "a value has the wrong type, or the line isn't TOML".to_owned();
    }
    message.to_owned()
}

/// The error doesn't have the digest: a user may have written the secret there.
fn add(
    entry: FileEntry,
    keys: &mut BTreeMap<String, Arc<Key>>,
    digests: &mut Vec<([u8; 32], Arc<Key>)>,
) -> Result<(), String> {
    let FileEntry { name, sha256, admin, scrape, limits, announce } = entry;
    let is_name_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"._@-".contains(&byte);
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(is_name_byte) {
        return Err(format!("name must have 1 to {NAME_BYTES_MAX} letters, digits and . _ @ -"));
    }
    if name == contract::id::ANONYMOUS {
        return Err(format!("{name:?} is the name of clients without a key; choose another"));
    }
    let digest = parse_digest(&sha256)
        .ok_or_else(|| format!("{name}: sha256 must be the key's SHA-256 in 64 hex digits"))?;
    if scrape && announce.is_some() {
        return Err(format!("{name}: a scrape key can't announce agents; use two keys"));
    }
    if admin && scrape {
        return Err(format!("{name}: a scrape key may only read; use two keys"));
    }
    if limits.priority.bound() < limits.priority.class {
        return Err(format!("{name}: the bound of the priority is below its class"));
    }
    let key = Key {
        name: name.as_str().into(),
        is_admin: admin,
        is_scrape: scrape,
        limits: Arc::new(limits),
        announce: Arc::new(announce),
    };
    let key = match keys.get(&name) {
        None => Arc::clone(keys.entry(name).or_insert(Arc::new(key))),
        Some(known) if **known == key => Arc::clone(known),
        Some(_) => return Err(format!("{name}: another entry of this name has other rights")),
    };
    if digests.iter().any(|(known, _)| *known == digest) {
        return Err(format!("{}: another entry has this digest", key.name));
    }
    digests.push((digest, key));
    Ok(())
}

fn nibble(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}

fn parse_digest(text: &str) -> Option<[u8; 32]> {
    let mut digest = [0; 32];
    if text.len() != 64 {
        return None;
    }
    for (byte, pair) in digest.iter_mut().zip(text.as_bytes().chunks(2)) {
        let [high, low] = pair else { return None };
        *byte = nibble(*high)? << 4 | nibble(*low)?;
    }
    Some(digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(secret: &str) -> String {
        Sha256::digest(secret).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn entry(name: &str, secret: &str, rest: &str) -> String {
        format!("[[key]]\nname = \"{name}\"\nsha256 = \"{}\"\n{rest}\n", hex(secret))
    }

    #[test]
    fn a_key_is_found_by_its_secret_alone() {
        let text = entry("a", "one", "admin = true") + &entry("b", "two", "scrape = true");
        let keys = KeySet::parse(&text).unwrap();
        let found = keys.find(b"one").unwrap();
        assert_eq!((&*found.name, found.is_admin, found.is_scrape), ("a", true, false));
        let found = keys.find(b"two").unwrap();
        assert_eq!((&*found.name, found.is_admin, found.is_scrape), ("b", false, true));
        // Neither a name nor a digest lets anybody in.
        for wrong in ["", "a", "three", "on", "onee", &hex("one"), &hex("one").to_uppercase()] {
            assert_eq!(keys.find(wrong.as_bytes()), None, "{wrong:?}");
        }
    }

    #[test]
    fn secrets_of_one_name_are_one_principal() {
        let text = entry("a", "old", "") + &entry("b", "other", "") + &entry("a", "new", "");
        let keys = KeySet::parse(&text).unwrap();
        assert!(Arc::ptr_eq(keys.find(b"old").unwrap(), keys.find(b"new").unwrap()));
        assert_eq!(&*keys.find(b"other").unwrap().name, "b");
        assert_eq!(keys.len(), 3);
    }

    #[test]
    fn limits_are_read_and_absent_ones_stay_open() {
        let limits = "limits = { requests_per_minute = 60, turns_in_flight_max = 4, \
                      priority = { class = \"low\", bound = \"high\" } }";
        let keys = KeySet::parse(&(entry("a", "one", limits) + &entry("b", "two", ""))).unwrap();
        let limits = &keys.find(b"one").unwrap().limits;
        assert_eq!(limits.requests_per_minute, NonZeroU32::new(60));
        assert_eq!(limits.turns_in_flight_max, NonZeroU32::new(4));
        assert_eq!((limits.tokens_per_minute, limits.sessions_max), (None, None));
        assert_eq!(limits.priority.bound(), PriorityClass::High);
        let limits = &keys.find(b"two").unwrap().limits;
        assert_eq!(**limits, KeyLimits::default());
        assert_eq!(limits.priority.bound(), PriorityClass::Normal);
    }

    #[test]
    fn every_wrong_key_is_told_without_its_value() {
        let text = entry("", "1", "")
            + &entry("a b", "2", "")
            + &entry("anonymous", "3", "")
            + "[[key]]\nname = \"plain\"\nsha256 = \"sk-secret\"\n"
            + &entry("both", "4", "admin = true\nscrape = true")
            + &entry("low", "5", "limits.priority = { class = \"high\", bound = \"low\" }")
            + &entry("twice", "6", "")
            + &entry("twice", "7", "admin = true")
            + &entry("same", "6", "");
        let Err(Error::Keys(problems)) = KeySet::parse(&text) else { panic!("it was taken") };
        assert_eq!(problems.len(), 8, "{problems:#?}");
        assert!(!problems.join("").contains("sk-secret"), "{problems:#?}");
        assert!(KeySet::parse("").is_err(), "no keys lock everybody out");
    }

    #[test]
    fn a_file_of_another_form_is_told_by_line_and_without_its_text() {
        for bad in [
            "[[key]]\nname = \"a\"\nsecret = \"sk-secret\"\n",
            "[[key]]\nname = \"a\"\nsha256 = sk-secret\n",
            "[[key]]\nname = \"a\"\nadmin = \"sk-secret\"\n",
            "[[key]]\nname = \"a\"\nlimits = \"sk-secret\"\n",
            "[[key]]\nname = \"a\"\nlimits.requests_per_minute = 0\n",
            "[[keys]]\n",
        ] {
            let Err(error) = KeySet::parse(bad) else { panic!("{bad} was taken") };
            let text = error.to_string();
            assert!(text.starts_with("line ") && !text.contains("sk-secret"), "{text}");
        }
    }

    #[test]
    fn a_key_set_shows_no_digest() {
        let keys = KeySet::parse(&entry("a", "one", "")).unwrap();
        assert_eq!(format!("{keys:?}"), "KeySet { len: 1, .. }");
    }
}
