//! Writes the heads of requests, and reads those of answers, as HTTP/1.1 has them. Pure.

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version, header,
};
use httparse::{EMPTY_HEADER, Status};

use super::{Broken, answer_reader::AnswerReader};

/// SGLang's answers have about ten, and an agent adds as many.
const HEADERS_MAX: usize = 100;
const HEAD_BYTES_MAX: usize = 64 * 1024;

/// An answer's head, and how its body is read.
#[derive(Debug)]
pub(super) struct AnswerHead {
    pub(super) head: Response<()>,
    pub(super) reader: AnswerReader,
    /// Whether the connection can take another request after the body.
    pub(super) stays_open: bool,
}

/// The URI has only the path and the query. What the headers say of the body's length is replaced.
pub(super) fn request_head<B>(request: &Request<B>, body_bytes: u64) -> Vec<u8> {
    let headers = request.headers();
    let header_bytes: usize = headers.iter().map(|(name, value)| line_bytes(name, value)).sum();
    let target = request.uri().path_and_query().map_or("/", |target| target.as_str());
    let mut head = Vec::with_capacity(header_bytes + target.len() + 64);
    let method = request.method();
    for part in [method.as_str(), " ", target, " HTTP/1.1\r\n"] {
        head.extend_from_slice(part.as_bytes());
    }
    for (name, value) in headers {
        if is_of_length(name) {
            continue;
        }
        for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
            head.extend_from_slice(part);
        }
    }
    // Without it, such a request would seem to be cut off.
    let has_usually_a_body = [Method::POST, Method::PUT, Method::PATCH].contains(method);
    if body_bytes > 0 || has_usually_a_body {
        head.extend_from_slice(format!("content-length: {body_bytes}\r\n").as_bytes());
    }
    head.extend_from_slice(b"\r\n");
    head
}

fn line_bytes(name: &HeaderName, value: &HeaderValue) -> usize {
    name.as_str().len() + value.len() + 4
}

fn is_of_length(name: &HeaderName) -> bool {
    [header::CONTENT_LENGTH, header::TRANSFER_ENCODING].contains(name)
}

/// Takes the head of an answer out of `input`. `None` if it isn't whole. Heads that only inform are
/// skipped.
pub(super) fn read_answer_head(
    input: &mut Bytes,
    method: &Method,
) -> Result<Option<AnswerHead>, Broken> {
    loop {
        let Some(head) = parse(input)? else { return Ok(None) };
        if head.status() == StatusCode::SWITCHING_PROTOCOLS {
            return Err(Broken::NotHttp("nobody asked for another protocol"));
        }
        if !head.status().is_informational() {
            return frame(head, method).map(Some);
        }
    }
}

fn parse(input: &mut Bytes) -> Result<Option<Response<()>>, Broken> {
    let mut headers = [EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Response::new(&mut headers);
    let bytes = match parsed.parse(input).map_err(Broken::Head)? {
        Status::Complete(bytes) => bytes,
        Status::Partial if input.len() >= HEAD_BYTES_MAX => {
            return Err(Broken::NotHttp("the head is too long"));
        }
        Status::Partial => return Ok(None),
    };
    let mut head = Response::new(());
    *head.version_mut() =
        if parsed.version == Some(1) { Version::HTTP_11 } else { Version::HTTP_10 };
    let status = StatusCode::from_u16(parsed.code.unwrap_or_default());
    *head.status_mut() = status.map_err(|_| Broken::NotHttp("the status is no number"))?;
    head.headers_mut().reserve(parsed.headers.len());
    for line in parsed.headers.iter() {
        let name = HeaderName::from_bytes(line.name.as_bytes());
        let value = HeaderValue::from_maybe_shared(input.slice_ref(line.value));
        let (Ok(name), Ok(value)) = (name, value) else {
            return Err(Broken::NotHttp("a header is illegal"));
        };
        head.headers_mut().append(name, value);
    }
    drop(input.split_to(bytes));
    Ok(Some(head))
}

/// RFC 9112, section 6.3.
fn frame(mut head: Response<()>, method: &Method) -> Result<AnswerHead, Broken> {
    let (version, status) = (head.version(), head.status());
    let headers = head.headers_mut();
    let mut stays_open = stays_open(version, headers);
    let has_no_body = method == Method::HEAD
        || [StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&status);
    let reader = if has_no_body {
        AnswerReader::length(0)
    } else if headers.contains_key(header::TRANSFER_ENCODING) {
        if version == Version::HTTP_10 {
            return Err(Broken::NotHttp("HTTP/1.0 has no transfer encodings"));
        }
        // A length beside the encoding may be meant for somebody else.
        stays_open &= headers.remove(header::CONTENT_LENGTH).is_none();
        let mut encodings = headers.get_all(header::TRANSFER_ENCODING).into_iter();
        let last = encodings.next_back().and_then(|value| value.to_str().ok()).unwrap_or_default();
        let last = last.rsplit(',').next().unwrap_or_default().trim();
        if last.eq_ignore_ascii_case("chunked") {
            AnswerReader::chunked()
        } else {
            AnswerReader::until_close()
        }
    } else {
        match content_length(headers)? {
            Some(bytes) => AnswerReader::length(bytes),
            None => AnswerReader::until_close(),
        }
    };
    stays_open &= !reader.ends_with_connection();
    Ok(AnswerHead { head, reader, stays_open })
}

/// `None` without a length. A length may be repeated.
fn content_length(headers: &HeaderMap) -> Result<Option<u64>, Broken> {
    let illegal = || Broken::NotHttp("the length is illegal");
    let mut length = None;
    for value in headers.get_all(header::CONTENT_LENGTH) {
        for text in value.to_str().map_err(|_| illegal())?.split(',') {
            let text = text.trim();
            let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
            let bytes = text.parse().ok().filter(|_| is_number).ok_or_else(illegal)?;
            if length.replace(bytes).is_some_and(|before| before != bytes) {
                return Err(illegal());
            }
        }
    }
    Ok(length)
}

fn stays_open(version: Version, headers: &HeaderMap) -> bool {
    let has = |word: &str| {
        let values = headers.get_all(header::CONNECTION).into_iter();
        let texts = values.filter_map(|value| value.to_str().ok());
        texts.flat_map(|text| text.split(',')).any(|it| it.trim().eq_ignore_ascii_case(word))
    };
    !has("close") && (version == Version::HTTP_11 || has("keep-alive"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &'static str) -> Result<Option<AnswerHead>, Broken> {
        read_answer_head(&mut Bytes::from_static(text.as_bytes()), &Method::POST)
    }

    fn whole(text: &'static str) -> AnswerHead {
        read(text).unwrap().unwrap()
    }

    #[test]
    fn a_request_has_its_headers_and_the_length_of_its_body() {
        let request = |method: Method| {
            let request = Request::builder().method(method).uri("/a?b").header("x-a", "1");
            request.header("content-length", "7").header("x-a", "2").body(()).unwrap()
        };
        let text =
            |method, bytes| String::from_utf8(request_head(&request(method), bytes)).unwrap();
        let post = "POST /a?b HTTP/1.1\r\nx-a: 1\r\nx-a: 2\r\ncontent-length: 3\r\n\r\n";
        assert_eq!(text(Method::POST, 3), post);
        assert!(text(Method::POST, 0).contains("content-length: 0\r\n"));
        assert_eq!(text(Method::GET, 0), "GET /a?b HTTP/1.1\r\nx-a: 1\r\nx-a: 2\r\n\r\n");
    }

    #[test]
    fn a_head_is_read_when_it_is_whole_and_heads_that_inform_are_skipped() {
        let text = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nX-A: 1\r\nx-a: 2\r\n\
                    content-length: 2\r\n\r\nok";
        for cut in 0..text.len() - 2 {
            let mut part = Bytes::from_static(&text.as_bytes()[..cut]);
            assert!(read_answer_head(&mut part, &Method::POST).unwrap().is_none(), "{cut}");
        }
        let mut input = Bytes::from_static(text.as_bytes());
        let AnswerHead { head, stays_open, .. } =
            read_answer_head(&mut input, &Method::POST).unwrap().unwrap();
        assert_eq!((head.status(), &*input, stays_open), (StatusCode::OK, &b"ok"[..], true));
        let values: Vec<_> = head.headers().get_all("x-a").iter().collect();
        assert_eq!(values, ["1", "2"]);
    }

    #[test]
    fn a_connection_is_used_again_only_if_both_know_where_the_body_ends() {
        for (text, stays_open) in [
            ("HTTP/1.1 200 OK\r\ncontent-length: 2, 2\r\n\r\n", true),
            ("HTTP/1.1 204 No Content\r\n\r\n", true),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, Chunked\r\n\r\n", true),
            ("HTTP/1.1 200 OK\r\nconnection: x, Close\r\ncontent-length: 2\r\n\r\n", false),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n", false),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked, gzip\r\n\r\n", false),
            ("HTTP/1.1 200 OK\r\n\r\n", false),
            ("HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n", false),
            (
                "HTTP/1.0 200 OK\r\nconnection: keep-alive, close\r\ncontent-length: 2\r\n\r\n",
                false,
            ),
            ("HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\n", true),
        ] {
            assert_eq!(whole(text).stays_open, stays_open, "{text}");
        }
        let mut input = Bytes::from_static(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n");
        let head = read_answer_head(&mut input, &Method::HEAD).unwrap().unwrap();
        assert!(head.reader.has_ended() && head.stays_open);
    }

    #[test]
    fn what_two_readers_may_read_in_two_ways_is_refused() {
        for text in [
            "HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: +2\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: \r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999\r\n\r\n",
            "HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
            "HTTP/1.1 200 OK\r\nx-a : 1\r\n\r\n",
            "HTTP/1.1 200 OK\r\nx-a: 1\r\n folded\r\n\r\n",
            "HTTP/1.1 101 Switching Protocols\r\n\r\n",
            "SSH-2.0-OpenSSH_9.2\r\n",
        ] {
            assert!(read(text).is_err(), "{text}");
        }
        let long = format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(HEAD_BYTES_MAX));
        assert!(read_answer_head(&mut long.into(), &Method::POST).is_err());
    }
}
