//! The headers by which a router tells an agent to which session a turn belongs.
//!
//! The agent claims the session (reserves it for this turn) before it reads the request's body. It
//! trusts the headers: only the router checks the client's credential. The router removes the
//! headers from its clients' requests (`service::headers`), so that no client can write them.

use http::{HeaderMap, HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};

use crate::{
    bootstrap::BOOTSTRAP,
    hints::HINTS,
    id::{self, Digest, SessionKey},
    load::Retention,
};

/// The [`Claim`], as JSON.
pub const CLAIM: HeaderName = HeaderName::from_static("x-berth-session");
/// The router's turn id, for logs on both sides.
pub const TURN: HeaderName = HeaderName::from_static("x-berth-turn");
pub const RANK: HeaderName = HeaderName::from_static("x-berth-rank");
/// The principal of a turn's client: the name by which agents share their engines fairly. A turn
/// without a session has it too.
pub const PRINCIPAL: HeaderName = HeaderName::from_static("x-berth-principal");
/// Leading prompt tokens that are resident, as far as the router knows.
pub const RESIDENT: HeaderName = HeaderName::from_static("x-berth-resident-tokens");
/// On an answer: the code of the agent's own refusal. Absent when the engine answered.
pub const REFUSAL: HeaderName = HeaderName::from_static("x-berth-refusal");

/// Code of the refusal of a request that doesn't come from a router.
pub const NOT_A_ROUTER: &str = "not_a_router";

/// Only a router may send these to an agent.
pub const TRUSTED: [HeaderName; 9] = [
    CLAIM,
    TURN,
    RANK,
    PRINCIPAL,
    RESIDENT,
    crate::proof::REQUEST,
    HINTS,
    BOOTSTRAP,
    crate::control::ADMIN,
];

/// A turn's session, and what the client wants done with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
// So from the first release on, a new member is a header of its own: an agent of the version before
// would refuse the turn.
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// The router has authenticated it.
    pub principal: String,
    pub id: String,
    /// How the engine should keep the session's KV, if this turn begins the session. `None`: tagged
    /// if the engine can tag KV.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention: Option<Retention>,
    /// The body holds only new messages or tokens, which the engine appends to the session's
    /// history.
    #[serde(default, skip_serializing_if = "is_false")]
    pub delta: bool,
    /// The client asked to open the session with this turn. The session then runs one turn at a
    /// time.
    #[serde(default, skip_serializing_if = "is_false")]
    pub open: bool,
    /// The session closes after this turn, however the turn ends.
    #[serde(default, skip_serializing_if = "is_false")]
    pub close: bool,
    /// Without a turn for so long, the session closes. `None`: the agent's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_ms_max: Option<u64>,
    /// The session that started this one, as a sub-agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<Digest>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the {CLAIM} header is not the JSON of a claim; only a router may send it")]
    Malformed(#[source] serde_json::Error),
    #[error("the {CLAIM} header has an invalid session id or principal")]
    Id(#[source] id::Error),
    #[error("the {RANK} header is not a DP rank")]
    Rank,
    #[error("the {PRINCIPAL} header is not a principal")]
    Principal,
    #[error("the {RESIDENT} header is not a number of tokens")]
    Resident,
}

impl Claim {
    /// A delta would be appended twice, and what opens or closes a session has changed it.
    #[must_use]
    pub fn is_idempotent(&self) -> bool {
        !(self.delta || self.open || self.close)
    }

    /// The turn has a full history, and no wish to open or close the session or to choose its
    /// retention.
    #[must_use]
    pub fn for_session(key: &SessionKey) -> Self {
        Self {
            principal: key.principal().to_owned(),
            id: key.id().to_owned(),
            retention: None,
            delta: false,
            open: false,
            close: false,
            idle_ms_max: None,
            parent: None,
        }
    }

    pub fn key(&self) -> Result<SessionKey, id::Error> {
        SessionKey::new(self.principal.clone(), self.id.clone())
    }

    pub fn write_to(&self, headers: &mut HeaderMap) {
        headers.insert(CLAIM, self.to_header());
    }

    /// Every valid id fits in a header, because JSON escapes control characters.
    fn to_header(&self) -> HeaderValue {
        let text = serde_json::to_vec(self).expect("a struct of strings and numbers serialises");
        // JSON leaves U+007F unescaped, but a header must not contain it.
        let escaped: Vec<u8> = text
            .iter()
            .flat_map(|&byte| if byte == 0x7f { b"\\u007f".to_vec() } else { vec![byte] })
            .collect();
        HeaderValue::from_bytes(&escaped).expect("JSON without bare control characters is legal")
    }

    /// `None` if there is no claim.
    pub fn from_headers(headers: &HeaderMap) -> Result<Option<(Self, SessionKey)>, Error> {
        let Some(value) = headers.get(CLAIM) else { return Ok(None) };
        let claim: Self = serde_json::from_slice(value.as_bytes()).map_err(Error::Malformed)?;
        let key = claim.key().map_err(Error::Id)?;
        Ok(Some((claim, key)))
    }
}

/// `None` if the header is absent.
pub fn rank(headers: &HeaderMap) -> Result<Option<u32>, Error> {
    let Some(value) = headers.get(RANK) else { return Ok(None) };
    value.to_str().ok().and_then(|text| text.parse().ok()).map(Some).ok_or(Error::Rank)
}

/// [`id::ANONYMOUS`] if the router named no principal.
pub fn principal(headers: &HeaderMap) -> Result<String, Error> {
    let Some(value) = headers.get(PRINCIPAL) else { return Ok(id::ANONYMOUS.to_owned()) };
    let text = std::str::from_utf8(value.as_bytes()).map_err(|_| Error::Principal)?;
    let is_valid = (1..=id::PRINCIPAL_BYTES_MAX).contains(&text.len());
    if is_valid { Ok(text.to_owned()) } else { Err(Error::Principal) }
}

/// 0 if the router sent no count.
pub fn resident_tokens(headers: &HeaderMap) -> Result<u64, Error> {
    let Some(value) = headers.get(RESIDENT) else { return Ok(0) };
    value.to_str().ok().and_then(|text| text.parse().ok()).ok_or(Error::Resident)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's skip_serializing_if wants a ref")]
fn is_false(value: &bool) -> bool {
    !value
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_valid_claim_survives_the_headers(
            id in "\\PC{1,40}|[\\x00-\\x7f]{1,200}", parent: Option<u64>,
        ) {
            let key = SessionKey::new("p", id).unwrap();
            let parent = parent.map(Digest);
            let claim = Claim { delta: true, parent, ..Claim::for_session(&key) };
            let mut headers = HeaderMap::new();
            claim.write_to(&mut headers);
            let (read, read_key) = Claim::from_headers(&headers).unwrap().unwrap();
            prop_assert_eq!(read, claim);
            prop_assert_eq!(read_key, key);
        }
    }

    #[test]
    fn a_parent_is_a_digest() {
        let key = SessionKey::new("p", "child").unwrap();
        let claim = Claim { parent: Some(Digest(7)), ..Claim::for_session(&key) };
        let mut headers = HeaderMap::new();
        claim.write_to(&mut headers);
        let text = r#"{"principal":"p","id":"child","parent":"0000000000000007"}"#;
        assert_eq!(headers[CLAIM], text);
        for wrong in ["", "7", "+000000000000007", "00000000000000007", "000000000000000G"] {
            let changed = text.replace("0000000000000007", wrong);
            headers.insert(CLAIM, HeaderValue::from_str(&changed).unwrap());
            assert!(matches!(Claim::from_headers(&headers), Err(Error::Malformed(_))), "{wrong:?}");
        }
    }

    #[test]
    fn a_claim_with_unknown_or_missing_members_is_refused() {
        for text in
            ["", "{}", r#"{"principal":"p","id":""}"#, r#"{"principal":"p","id":"a","x":1}"#]
        {
            let mut headers = HeaderMap::new();
            headers.insert(CLAIM, HeaderValue::from_str(text).unwrap());
            assert!(Claim::from_headers(&headers).is_err(), "{text:?} was taken");
        }
        assert!(Claim::from_headers(&HeaderMap::new()).unwrap().is_none());
    }
}
