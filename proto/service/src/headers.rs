//! Removes the headers that a router or an agent must not pass on from a request or an answer.

use contract::envelope::TRUSTED;
use http::{HeaderMap, HeaderName, HeaderValue, Method, header};

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
/// The header by which a client can choose the engine's DP rank. On the OpenAI routes, it takes
/// precedence over the rank in the body.
const ENGINE_RANK_HEADER: HeaderName = HeaderName::from_static("x-data-parallel-rank");
/// The beginning of the names of headers by which a server lets pages read its answers.
const CORS_PREFIX: &str = "access-control-";
/// The beginning of the names of headers by which a browser says what caused a request.
const BROWSER_PREFIX: &str = "sec-";
/// The beginning of the names of Berth's own headers, such as the code of an agent's refusal.
const OWN_PREFIX: &str = "x-berth-";
/// The beginning of the names of headers that override members of the body inside the engine.
const ENGINE_OVERRIDE_PREFIX: &str = "x-override-";

fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named_in_connection: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named_in_connection.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// Returns the value of `Allow` for a route that takes these methods.
#[must_use]
pub fn allow(methods: &[Method]) -> HeaderValue {
    let names: Vec<&str> = methods.iter().map(Method::as_str).collect();
    HeaderValue::from_str(&names.join(",")).expect("the names of methods are legal")
}

/// An engine must not speak to browsers, nor name its own address. Pages of which origins may read
/// an answer is the router's decision.
pub fn strip_answer(headers: &mut HeaderMap) {
    strip_answer_and(headers, &[CORS_PREFIX]);
}

/// Removes the same of an engine's answer, and what only an agent may say.
pub fn strip_engine_answer(headers: &mut HeaderMap) {
    strip_answer_and(headers, &[CORS_PREFIX, OWN_PREFIX]);
}

fn strip_answer_and(headers: &mut HeaderMap, prefixes: &[&str]) {
    remove_hop_by_hop(headers);
    for name in [header::SET_COOKIE, header::LOCATION] {
        headers.remove(name);
    }
    remove_with_prefixes(headers, prefixes);
}

fn remove_with_prefixes(headers: &mut HeaderMap, prefixes: &[&str]) {
    let is_found =
        |name: &HeaderName| prefixes.iter().any(|prefix| name.as_str().starts_with(prefix));
    let found: Vec<HeaderName> = headers.keys().filter(|name| is_found(name)).cloned().collect();
    for name in found {
        headers.remove(name);
    }
}

/// Removes what must not reach the next receiver:
/// - headers that concern the client's connection, or that the next connection sets itself;
/// - headers that an agent trusts, because only a router may send them ([`TRUSTED`]);
/// - headers by which a client could choose the engine's rank or override members of the body;
/// - headers by which browsers speak of their pages. A router checks those, for itself.
pub fn strip_request(headers: &mut HeaderMap) {
    remove_hop_by_hop(headers);
    for name in [header::CONTENT_LENGTH, header::HOST, header::EXPECT, ENGINE_RANK_HEADER] {
        headers.remove(name);
    }
    for name in TRUSTED {
        headers.remove(name);
    }
    for name in [header::ORIGIN, header::REFERER, header::COOKIE] {
        headers.remove(name);
    }
    remove_with_prefixes(headers, &[ENGINE_OVERRIDE_PREFIX, BROWSER_PREFIX]);
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
    fn an_engine_speaks_to_no_browser() {
        let mut all = headers(&[
            "access-control-allow-origin",
            "access-control-allow-credentials",
            "set-cookie",
            "location",
            "connection",
            "content-type",
            "retry-after",
        ]);
        strip_answer(&mut all);
        assert_eq!(names(&all), ["content-type", "retry-after"]);
        all.insert("x-berth-refusal", HeaderValue::from_static("not_a_router"));
        strip_engine_answer(&mut all);
        assert_eq!(names(&all), ["content-type", "retry-after"]);
    }

    #[test]
    fn a_client_instructs_neither_agent_nor_engine_by_headers() {
        let mut all = headers(&[
            "x-data-parallel-rank",
            "x-override-priority",
            "host",
            "expect",
            "content-length",
            "authorization",
            "origin",
            "cookie",
            "referer",
            "sec-fetch-site",
            "x-berth-session-id",
        ]);
        for name in TRUSTED {
            all.insert(name, HeaderValue::from_static("1"));
        }
        strip_request(&mut all);
        assert_eq!(names(&all), ["authorization", "x-berth-session-id"]);
    }
}
