//! The one header in which a router tells an agent all that it knows of a turn.
//!
//! The agent trusts it: only the router checks the client's credential. So only a router may send
//! it ([`TRUSTED`]), and its proof signs it. A request without the header is a turn without a
//! session of an anonymous client.
//!
//! The header is JSON. An agent refuses a session or a bootstrap with a member that it doesn't
//! know, because such a turn would run otherwise than its client wants. It ignores other members
//! that it doesn't know, and hints that it can't read. So from the first release on, a new member
//! that an agent of the version before may ignore stands beside `session`, not in it.
//!
//! The trace context isn't in the envelope. It stays in the standard header `traceparent`, which
//! clients, routers, agents and engines read alike; nobody trusts it.

use std::{borrow::Cow, sync::Arc};

use http::{HeaderMap, HeaderName, HeaderValue};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

use crate::{
    bootstrap::Bootstrap,
    claim::Claim,
    control,
    hints::TurnHints,
    id::{self, Digest, SessionKey, TurnId},
    load::Retention,
    proof,
};

/// The [`TurnEnvelope`], as JSON.
pub const ENVELOPE: HeaderName = HeaderName::from_static("x-berth-turn-envelope");

/// Only a router may send these to an agent. The router removes them from its clients' requests
/// (`service::headers`), so that no client can write them.
pub const TRUSTED: [HeaderName; 3] = [ENVELOPE, proof::REQUEST, control::ADMIN];

/// JSON makes 6 bytes of a control character, so the longest session id has 1,536 bytes and the
/// longest principal 768. A host name has 255, and all other members with their names 700.
pub const BYTES_MAX: usize = 4096;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TurnEnvelope {
    pub turn: Option<TurnId>,
    /// The turn's client: the name by which agents share their engines fairly.
    pub principal: Arc<str>,
    /// The principal's. `None` for a turn without a session.
    pub session: Option<Claim>,
    /// The DP rank on which the turn must run.
    pub rank: Option<u32>,
    /// Leading prompt tokens that are resident, as far as the router knows.
    pub resident_tokens: u64,
    pub hints: TurnHints,
    /// `None` if the turn isn't split over a pair of engines.
    pub bootstrap: Option<Bootstrap>,
}

impl Default for TurnEnvelope {
    fn default() -> Self {
        Self {
            turn: None,
            principal: id::ANONYMOUS.into(),
            session: None,
            rank: None,
            resident_tokens: 0,
            hints: TurnHints::default(),
            bootstrap: None,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "the {ENVELOPE} header has {0} bytes, more than {BYTES_MAX}; only a router may send it, so \
         send turns to a router"
    )]
    TooLong(usize),
    #[error(
        "the {ENVELOPE} header is not the JSON of an envelope; only a router may send it, so send \
         turns to a router"
    )]
    Malformed(#[source] serde_json::Error),
    #[error(
        "the {ENVELOPE} header has an invalid session id or principal: {0}; only a router may send \
         it, so send turns to a router"
    )]
    Id(#[source] id::Error),
}

impl TurnEnvelope {
    /// Every valid id fits, because JSON escapes control characters.
    pub fn write(&self, headers: &mut HeaderMap) {
        let owner = self.session.as_ref().map(|claim| claim.key.principal());
        debug_assert!(owner.is_none_or(|owner| owner == &*self.principal), "another's session");
        let mut json =
            serde_json::to_vec(&Wire::from(self)).expect("strings and numbers serialise");
        if memchr::memchr(DELETE, &json).is_some() {
            json = escape_delete(&json);
        }
        let value = HeaderValue::try_from(json);
        headers.insert(ENVELOPE, value.expect("JSON without bare control characters is legal"));
    }

    /// The default, if there is no envelope.
    pub fn read(headers: &HeaderMap) -> Result<Self, Error> {
        let Some(value) = headers.get(ENVELOPE) else { return Ok(Self::default()) };
        if value.len() > BYTES_MAX {
            return Err(Error::TooLong(value.len()));
        }
        let wire: Wire<'_> = serde_json::from_slice(value.as_bytes()).map_err(Error::Malformed)?;
        wire.try_into().map_err(Error::Id)
    }
}

const DELETE: u8 = 0x7f;

/// JSON leaves U+007F unescaped, but a header must not contain it.
fn escape_delete(json: &[u8]) -> Vec<u8> {
    let mut parts = json.split(|&byte| byte == DELETE);
    let mut escaped = parts.next().unwrap_or_default().to_vec();
    for part in parts {
        escaped.extend_from_slice(b"\\u007f");
        escaped.extend_from_slice(part);
    }
    escaped
}

#[derive(Serialize, Deserialize)]
struct Wire<'a> {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    turn: Option<TurnId>,
    #[serde(borrow, default = "anonymous", skip_serializing_if = "is_anonymous")]
    principal: Cow<'a, str>,
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    session: Option<WireClaim<'a>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rank: Option<u32>,
    #[serde(default, skip_serializing_if = "is_default")]
    resident_tokens: u64,
    #[serde(default, skip_serializing_if = "is_default", deserialize_with = "read_hints")]
    hints: TurnHints,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bootstrap: Option<Cow<'a, Bootstrap>>,
}

/// A [`Claim`] without the principal, which is the envelope's.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireClaim<'a> {
    #[serde(borrow)]
    id: Cow<'a, str>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    retention: Option<Retention>,
    #[serde(default, skip_serializing_if = "is_default")]
    delta: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    open: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    close: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    idle_ms_max: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    parent: Option<Digest>,
}

impl<'a> From<&'a TurnEnvelope> for Wire<'a> {
    fn from(envelope: &'a TurnEnvelope) -> Self {
        Self {
            turn: envelope.turn,
            principal: Cow::Borrowed(&envelope.principal),
            session: envelope.session.as_ref().map(WireClaim::from),
            rank: envelope.rank,
            resident_tokens: envelope.resident_tokens,
            hints: envelope.hints,
            bootstrap: envelope.bootstrap.as_ref().map(Cow::Borrowed),
        }
    }
}

impl<'a> From<&'a Claim> for WireClaim<'a> {
    fn from(claim: &'a Claim) -> Self {
        let Claim { key, retention, delta, open, close, idle_ms_max, parent } = claim;
        Self {
            id: Cow::Borrowed(key.id()),
            retention: *retention,
            delta: *delta,
            open: *open,
            close: *close,
            idle_ms_max: *idle_ms_max,
            parent: *parent,
        }
    }
}

impl WireClaim<'_> {
    fn into_claim(self, principal: &Arc<str>) -> Result<Claim, id::Error> {
        let Self { id, retention, delta, open, close, idle_ms_max, parent } = self;
        let key = SessionKey::new(Arc::clone(principal), id)?;
        Ok(Claim { key, retention, delta, open, close, idle_ms_max, parent })
    }
}

impl TryFrom<Wire<'_>> for TurnEnvelope {
    type Error = id::Error;

    fn try_from(wire: Wire<'_>) -> Result<Self, id::Error> {
        let Wire { turn, principal, session, rank, resident_tokens, hints, bootstrap } = wire;
        id::check_principal(&principal)?;
        let principal = Arc::from(principal);
        let session = session.map(|session| session.into_claim(&principal)).transpose()?;
        let bootstrap = bootstrap.map(Cow::into_owned);
        Ok(Self { turn, principal, session, rank, resident_tokens, hints, bootstrap })
    }
}

fn anonymous() -> Cow<'static, str> {
    Cow::Borrowed(id::ANONYMOUS)
}

fn is_anonymous(principal: &str) -> bool {
    principal == id::ANONYMOUS
}

fn read_hints<'de, D: Deserializer<'de>>(deserializer: D) -> Result<TurnHints, D::Error> {
    let json = <&RawValue>::deserialize(deserializer)?;
    Ok(serde_json::from_str(json.get()).unwrap_or_default())
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::bootstrap::{Half, ROOMS_END};

    fn headers(json: &str) -> HeaderMap {
        HeaderMap::from_iter([(ENVELOPE, HeaderValue::from_str(json).unwrap())])
    }

    fn read(json: &str) -> Result<TurnEnvelope, Error> {
        TurnEnvelope::read(&headers(json))
    }

    fn written(envelope: &TurnEnvelope) -> HeaderValue {
        let mut headers = HeaderMap::new();
        envelope.write(&mut headers);
        headers.remove(ENVELOPE).unwrap()
    }

    fn names() -> impl Strategy<Value = String> {
        prop_oneof!["\\PC{1,30}", "[\\x00-\\x7f]{1,128}", "[\"\\\\\\x7f]{1,9}"]
    }

    fn hints() -> impl Strategy<Value = TurnHints> {
        let hints = any::<(bool, Option<i64>, Option<u64>, bool)>();
        hints.prop_map(|(session, priority, answer_tokens, returns_soon)| TurnHints {
            session,
            priority,
            answer_tokens,
            returns_soon,
        })
    }

    fn bootstraps() -> impl Strategy<Value = Bootstrap> {
        let host = prop_oneof!["[a-z0-9:.\\[\\]-]{0,60}", "[\"\\\\\\x00-\\x7f]{0,9}", "\\PC{0,9}"];
        (any::<bool>(), host, any::<u16>(), 0..ROOMS_END, any::<u32>()).prop_map(
            |(is_prefill, host, port, room, prefill_rank)| {
                let half = if is_prefill { Half::Prefill } else { Half::Decode };
                Bootstrap { half, host, port, room, prefill_rank }
            },
        )
    }

    prop_compose! {
        fn claims()(
            id in names(), flags: (bool, bool, bool), retention in 0..4_usize,
            idle_ms_max: Option<u64>, parent: Option<u64>,
        ) -> Claim {
            let (delta, open, close) = flags;
            let retentions = [Retention::Pinned, Retention::Tagged, Retention::None];
            let retention = retentions.get(retention).copied();
            let parent = parent.map(Digest);
            let key = SessionKey::new(id::ANONYMOUS, id).unwrap();
            Claim { key, retention, delta, open, close, idle_ms_max, parent }
        }
    }

    prop_compose! {
        fn envelopes()(
            turn: Option<u64>, principal in names(), session in prop::option::of(claims()),
            rank: Option<u32>, resident_tokens: u64, hints in hints(),
            bootstrap in prop::option::of(bootstraps()),
        ) -> TurnEnvelope {
            let principal: Arc<str> = principal.into();
            let session = session.map(|claim| Claim {
                key: SessionKey::new(Arc::clone(&principal), claim.key.id()).unwrap(),
                ..claim
            });
            let turn = turn.map(TurnId);
            TurnEnvelope { turn, principal, session, rank, resident_tokens, hints, bootstrap }
        }
    }

    proptest! {
        #[test]
        fn any_valid_envelope_survives_the_header(envelope in envelopes()) {
            let mut headers = HeaderMap::new();
            envelope.write(&mut headers);
            prop_assert_eq!(TurnEnvelope::read(&headers).unwrap(), envelope);
        }
    }

    #[test]
    fn a_request_without_an_envelope_is_a_turn_without_session_of_an_anonymous_client() {
        let bare = TurnEnvelope::read(&HeaderMap::new()).unwrap();
        assert_eq!(bare, TurnEnvelope::default());
        assert_eq!((bare, &*read("{}").unwrap().principal), (read("{}").unwrap(), id::ANONYMOUS));
    }

    #[test]
    fn an_envelope_is_compact_and_names_the_principal_once() {
        let key = SessionKey::new("p", "child").unwrap();
        let claim = Claim { parent: Some(Digest(7)), delta: true, ..Claim::for_session(&key) };
        let envelope = TurnEnvelope {
            turn: Some(TurnId(10)),
            principal: "p".into(),
            session: Some(claim),
            rank: Some(0),
            ..TurnEnvelope::default()
        };
        let text = r#"{"turn":"000000000000000a","principal":"p","#.to_owned()
            + r#""session":{"id":"child","delta":true,"parent":"0000000000000007"},"rank":0}"#;
        assert_eq!(written(&envelope), text.as_str());
        for wrong in ["", "7", "+000000000000007", "00000000000000007", "000000000000000G"] {
            for number in ["0000000000000007", "000000000000000a"] {
                let changed = text.replace(number, wrong);
                assert!(matches!(read(&changed), Err(Error::Malformed(_))), "{wrong:?}");
            }
        }
    }

    #[test]
    fn the_longest_names_fit() {
        for character in ["\u{1}", "\u{7f}", "\"", "é"] {
            let longest = |bytes: usize| character.repeat(bytes / character.len());
            let key = SessionKey::new(
                longest(id::PRINCIPAL_BYTES_MAX),
                longest(id::SESSION_ID_BYTES_MAX),
            );
            let claim = Claim {
                retention: Some(Retention::Pinned),
                delta: true,
                open: true,
                close: true,
                idle_ms_max: Some(u64::MAX),
                parent: Some(Digest(u64::MAX)),
                ..Claim::for_session(&key.unwrap())
            };
            let envelope = TurnEnvelope {
                turn: Some(TurnId(u64::MAX)),
                principal: claim.key.principal().into(),
                session: Some(claim),
                rank: Some(u32::MAX),
                resident_tokens: u64::MAX,
                hints: TurnHints {
                    session: true,
                    priority: Some(i64::MIN),
                    answer_tokens: Some(u64::MAX),
                    returns_soon: true,
                },
                bootstrap: Some(Bootstrap {
                    half: Half::Prefill,
                    host: "h".repeat(255),
                    port: u16::MAX,
                    room: ROOMS_END - 1,
                    prefill_rank: u32::MAX,
                }),
            };
            let header = written(&envelope);
            assert!(header.len() <= BYTES_MAX - 512, "{}", header.len());
            let headers = HeaderMap::from_iter([(ENVELOPE, header)]);
            assert_eq!(TurnEnvelope::read(&headers).unwrap(), envelope);
        }
    }

    #[test]
    fn what_is_no_envelope_is_refused_with_what_to_do() {
        let long = format!(r#"{{"later":"{}"}}"#, "x".repeat(BYTES_MAX));
        let long_id = format!(r#"{{"session":{{"id":"{}"}}}}"#, "x".repeat(257));
        let long_name = format!(r#"{{"principal":"{}"}}"#, "x".repeat(129));
        let bootstrap =
            r#"{"bootstrap":{"half":"prefill","host":"h","port":1,"room":1,"prefill_rank":0}}"#;
        assert!(read(bootstrap).unwrap().bootstrap.is_some());
        let far_room = bootstrap.replace(r#""room":1"#, r#""room":9223372036854775808"#);
        let no_half = bootstrap.replace("prefill\"", "both\"");
        let unknown_half = bootstrap.replace(r#""port""#, r#""later":1,"port""#);
        for json in [
            "",
            "null",
            "{",
            "{} x",
            r#"{"principal":""}"#,
            r#"{"principal":1}"#,
            r#"{"session":{}}"#,
            r#"{"session":"s"}"#,
            r#"{"session":{"id":""}}"#,
            r#"{"session":{"id":"a","later":1}}"#,
            r#"{"session":{"id":"a","principal":"other"}}"#,
            r#"{"session":{"id":"a"},"session":{"id":"b"}}"#,
            r#"{"rank":-1}"#,
            r#"{"rank":4294967296}"#,
            r#"{"resident_tokens":"many"}"#,
            r#"{"bootstrap":{}}"#,
            &far_room,
            &no_half,
            &unknown_half,
            &long,
            &long_id,
            &long_name,
        ] {
            let error = read(json).expect_err(json).to_string();
            assert!(error.ends_with("send turns to a router"), "{error}");
        }
        let not_text = HeaderValue::from_bytes(b"{\"principal\":\"\xff\"}").unwrap();
        assert!(TurnEnvelope::read(&HeaderMap::from_iter([(ENVELOPE, not_text)])).is_err());
    }

    #[test]
    fn what_a_later_router_says_beside_the_session_is_ignored() {
        let key = SessionKey::new("p", "s").unwrap();
        let json = r#"{"later":{"a":1},"principal":"p","session":{"id":"s"}}"#;
        assert_eq!(read(json).unwrap().session, Some(Claim::for_session(&key)));
        for (hints, session) in [
            (r#"{"session":true,"later":{"a":1}}"#, true),
            (r#"{"session":1}"#, false),
            ("[]", false),
            ("null", false),
        ] {
            let hints = read(&format!(r#"{{"hints":{hints}}}"#)).unwrap().hints;
            assert_eq!(hints, TurnHints { session, ..TurnHints::default() });
        }
    }
}
