//! Removes the headers that a proxy must not pass on.

use http::{HeaderMap, HeaderName, header};
use proto::claim;

/// Headers that belong to one connection.
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];
/// The engine's own header for the DP rank. At the OpenAI routes it takes precedence over the rank
/// in the body.
const ENGINE_RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");
/// How headers begin that override members of the body inside the engine.
const ENGINE_OVERRIDE: &str = "x-override-";

/// Removes the headers of one connection: the known ones, and those that `Connection` names.
pub fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// Removes the headers of a request that its receiver must not get from a client.
///
/// These are the headers of the client's connection, those that the next connection sets itself,
/// those that only a router may send to an agent, and those by which only Berth may instruct the
/// engine.
pub fn strip_request(headers: &mut HeaderMap) {
    remove_hop_by_hop(headers);
    for name in [header::CONTENT_LENGTH, header::HOST, header::EXPECT, ENGINE_RANK] {
        headers.remove(name);
    }
    for name in claim::TRUSTED {
        headers.remove(name);
    }
    let overrides: Vec<HeaderName> =
        headers.keys().filter(|name| name.as_str().starts_with(ENGINE_OVERRIDE)).cloned().collect();
    for name in overrides {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn headers(names: &[&'static str]) -> HeaderMap {
        let value = HeaderValue::from_static("1");
        names.iter().map(|&name| (HeaderName::from_static(name), value.clone())).collect()
    }

    fn names(headers: &HeaderMap) -> Vec<&str> {
        let mut names: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn headers_of_one_connection_end_there_and_lengths_stay() {
        let mut all = headers(&["keep-alive", "te", "x-mine", "content-length", "x-other"]);
        all.insert(header::CONNECTION, HeaderValue::from_static("x-mine, close"));
        remove_hop_by_hop(&mut all);
        assert_eq!(names(&all), ["content-length", "x-other"]);
    }

    #[test]
    fn a_client_instructs_neither_agent_nor_engine_by_headers() {
        let mut all = headers(&[
            "x-berth-session",
            "x-berth-turn",
            "x-berth-rank",
            "x-berth-resident-tokens",
            "x-data-parallel-rank",
            "x-override-priority",
            "host",
            "expect",
            "content-length",
            "authorization",
            "x-berth-session-id",
        ]);
        strip_request(&mut all);
        assert_eq!(names(&all), ["authorization", "x-berth-session-id"]);
    }
}
