//! Gives each request an id, by which the client, the log and the engine name it.

use contract::abort::REQUEST_ID;
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::random;

/// The same header as Anthropic's clients read it, in answers.
const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
/// The longest id that is taken from a client, in bytes. A UUID has 36.
const ID_BYTES_MAX: usize = 128;

/// Takes the client's id, or makes one, and leaves it in the headers for the agent and the engine.
pub(super) fn identify(request_headers: &mut HeaderMap) -> HeaderValue {
    let is_usable = |id: &&HeaderValue| {
        (1..=ID_BYTES_MAX).contains(&id.len()) && id.as_bytes().iter().all(u8::is_ascii_graphic)
    };
    if let Some(id) = request_headers.get(&REQUEST_ID).filter(is_usable) {
        return id.clone();
    }
    let id = format!("req_{:032x}", random::number());
    let id = HeaderValue::from_str(&id).expect("hex digits are legal in a header");
    request_headers.insert(REQUEST_ID, id.clone());
    id
}

/// Adds the id to the headers of an answer. One that the engine has set stays.
pub(super) fn add(answer_headers: &mut HeaderMap, id: HeaderValue) {
    let id = answer_headers.entry(REQUEST_ID).or_insert(id).clone();
    answer_headers.entry(ANTHROPIC_REQUEST_ID).or_insert(id);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_s_own_id_stays_and_an_unusable_one_is_replaced() {
        let mut headers = HeaderMap::from_iter([(REQUEST_ID, HeaderValue::from_static("mine-7"))]);
        assert_eq!(identify(&mut headers), "mine-7");
        for unusable in [&b""[..], b"two words", b"\xff", &[b'a'; 129]] {
            headers.insert(REQUEST_ID, HeaderValue::from_bytes(unusable).unwrap());
            let id = identify(&mut headers);
            assert!(id.to_str().unwrap().starts_with("req_"), "{id:?} for {unusable:?}");
            assert_eq!(headers[REQUEST_ID], id);
        }
    }

    #[test]
    fn an_answer_names_its_request_once() {
        let mut headers = HeaderMap::new();
        add(&mut headers, HeaderValue::from_static("a"));
        add(&mut headers, HeaderValue::from_static("b"));
        assert_eq!(
            (&headers[REQUEST_ID], &headers[ANTHROPIC_REQUEST_ID]),
            (&"a".parse().unwrap(), &"a".parse().unwrap())
        );
    }
}
