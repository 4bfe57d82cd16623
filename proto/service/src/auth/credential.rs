//! Finds the credential of a request in its headers.
//!
//! A bearer token in `authorization` and the value of `x-api-key` mean the same, so one key works
//! with clients of either API.

use http::{HeaderMap, HeaderName, header};

const API_KEY_HEADER: HeaderName = HeaderName::from_static("x-api-key");

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the authorization header has another scheme than Bearer")]
    Scheme,
    /// The headers have two credentials that differ, so the sender isn't known.
    #[error("the request has two different credentials")]
    Ambiguous,
}

pub fn find(headers: &HeaderMap) -> Result<Option<&[u8]>, Error> {
    let mut found: Option<&[u8]> = None;
    let bearers = headers.get_all(header::AUTHORIZATION).iter().map(|value| {
        let value = value.as_bytes().trim_ascii();
        if value.is_empty() { Ok(value) } else { bearer_token(value).ok_or(Error::Scheme) }
    });
    let api_keys =
        headers.get_all(API_KEY_HEADER).iter().map(|value| Ok(value.as_bytes().trim_ascii()));
    for credential in bearers.chain(api_keys) {
        let credential = credential?;
        // Clients send an empty header if their key is not set.
        if credential.is_empty() {
            continue;
        }
        if found.is_some_and(|found| found != credential) {
            return Err(Error::Ambiguous);
        }
        found = Some(credential);
    }
    Ok(found)
}

/// Removes the credentials from a request's headers, so that the next receiver can't see them.
pub fn remove(headers: &mut HeaderMap) {
    headers.remove(header::AUTHORIZATION);
    headers.remove(API_KEY_HEADER);
}

/// Returns the token of `Bearer TOKEN`, with the scheme in any letter case. The token may be empty.
fn bearer_token(value: &[u8]) -> Option<&[u8]> {
    let end = value.iter().position(u8::is_ascii_whitespace).unwrap_or(value.len());
    let (scheme, token) = value.split_at(end);
    scheme.eq_ignore_ascii_case(b"bearer").then(|| token.trim_ascii())
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn headers(list: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in list {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn both_headers_name_the_same_key_in_any_letter_case() {
        for list in [
            &[("authorization", "Bearer k")][..],
            &[("authorization", "bEARER   k ")],
            &[("x-api-key", "k")],
            &[("authorization", "Bearer k"), ("x-api-key", "k")],
            &[("authorization", "Bearer k"), ("authorization", "bearer k")],
            &[("authorization", "Bearer "), ("x-api-key", "k")],
            &[("authorization", ""), ("x-api-key", "k")],
        ] {
            assert_eq!(find(&headers(list)), Ok(Some(&b"k"[..])), "{list:?}");
        }
        for list in [&[][..], &[("authorization", "Bearer")], &[("x-api-key", "")]] {
            assert_eq!(find(&headers(list)), Ok(None), "{list:?}");
        }
    }

    #[test]
    fn two_credentials_and_other_schemes_are_refused() {
        for list in [
            &[("authorization", "Bearer k"), ("x-api-key", "l")][..],
            &[("authorization", "Bearer k"), ("authorization", "Bearer l")],
            &[("x-api-key", "k"), ("x-api-key", "l")],
            &[("x-api-key", "k"), ("x-api-key", "kk")],
        ] {
            assert_eq!(find(&headers(list)), Err(Error::Ambiguous), "{list:?}");
        }
        for value in ["Basic azpr", "k", "Bearerk", "Token k"] {
            assert_eq!(find(&headers(&[("authorization", value)])), Err(Error::Scheme), "{value}");
        }
    }

    #[test]
    fn removed_credentials_are_gone_from_every_header() {
        let mut all =
            headers(&[("authorization", "a"), ("authorization", "b"), ("x-api-key", "c")]);
        remove(&mut all);
        assert!(all.is_empty(), "{all:?}");
    }
}
