//! Tests of the routes: that clients find each of an engine's, in the ways in which they ask.

use contract::route::{Kind, ROUTES};
use harness::web::Headers;
use http::{Method, StatusCode};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::{
    agent::Agent,
    harness::{Router, WAIT_MAX, config, wait_until},
};

/// `{"messages":[]}` as each encoding writes it.
const COMPRESSED: [(&str, &str); 6] = [
    ("gzip", "1f8b0800000000000203ab56ca4d2d2e4e4c4f2d56b28a8ead050091c330000f000000"),
    ("GZIP", "1f8b0800000000000203ab56ca4d2d2e4e4c4f2d56b28a8ead050091c330000f000000"),
    ("x-gzip", "1f8b0800000000000203ab56ca4d2d2e4e4c4f2d56b28a8ead050091c330000f000000"),
    ("deflate", "789cab56ca4d2d2e4e4c4f2d56b28a8ead05002cc40587"),
    ("br", "0b07807b226d65737361676573223a5b5d7d03"),
    ("zstd", "28b52ffd200f7900007b226d65737361676573223a5b5d7d"),
];

fn unhex(text: &str) -> Vec<u8> {
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    text.as_bytes().chunks(2).map(byte).collect()
}

#[tokio::test]
async fn each_route_of_an_engine_reaches_a_worker_by_each_of_its_methods() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let own = |kind: Kind| matches!(kind, Kind::Models | Kind::Info);
    for route in ROUTES.into_iter().filter(|route| !own(route.kind)) {
        for method in route.kind.methods() {
            for path in [route.path.to_owned(), format!("{}/", route.path)] {
                let answer = router.call(method.clone(), &path, &[], r#"{"input":"a"}"#).await;
                let received = a.turns().pop().unwrap();
                assert_eq!(received.path, route.path, "{method} {path}: {}", answer.text());
                a.inner.received.lock().clear();
            }
        }
        let wrong = router.call(Method::DELETE, route.path, &[], "").await;
        assert_eq!(wrong.status, StatusCode::METHOD_NOT_ALLOWED, "{}", route.path);
    }
}

#[tokio::test]
async fn a_sound_goes_to_a_worker_that_has_its_model_as_it_came() {
    let (chat, whisper) = (Agent::serving("a", "chat"), Agent::serving("b", "whisper-1"));
    let router = Router::start(&[&chat, &whisper]).await;
    let body = "--X\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n\
                RIFF\0\r\n--X\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n\
                whisper-1\r\n--X--\r\n";
    let headers: Headers<'_> = &[("content-type", "multipart/form-data; boundary=X")];
    let path = "/v1/audio/transcriptions";
    let answer = router.call(Method::POST, path, headers, body).await;
    assert_eq!(answer.header("x-berth-worker"), "b/0", "{}", answer.text());
    let received = whisper.turns().pop().unwrap();
    assert_eq!(received.body, body.as_bytes());
    assert_eq!(received.headers["content-type"], "multipart/form-data; boundary=X");
    let other = body.replace("whisper-1", "whisper-9");
    let answer = router.call(Method::POST, path, headers, other).await;
    assert_eq!(answer.status, StatusCode::NOT_FOUND, "{}", answer.text());
    assert!(answer.text().contains("chat, whisper-1"), "{}", answer.text());
}

#[tokio::test]
async fn compressed_bodies_are_taken_within_the_limit_of_their_real_size() {
    let a = Agent::start("a");
    let mut settings = config(&[&a]);
    settings.limits.body_bytes_max = 15;
    let router = Router::start_with(settings).await;
    wait_until("the router is ready", async || router.is_ready().await).await;
    let path = "/v1/chat/completions";
    for (encoding, hex) in COMPRESSED {
        let headers: Headers<'_> = &[("content-encoding", encoding)];
        let answer = router.call(Method::POST, path, headers, unhex(hex)).await;
        assert_eq!(answer.status, StatusCode::OK, "{encoding}: {}", answer.text());
        let received = a.turns().pop().unwrap();
        assert_eq!(received.body, r#"{"messages":[]}"#.as_bytes());
        assert!(!received.headers.contains_key("content-encoding"));
        assert_eq!(received.headers["content-length"], "15");
        let cut = unhex(hex)[..12].to_vec();
        let answer = router.call(Method::POST, path, headers, cut).await;
        assert_eq!(answer.header("x-berth-refusal"), "body_incomplete", "{encoding}");
    }
    let unknown: Headers<'_> = &[("content-encoding", "lzma")];
    let answer = router.call(Method::POST, path, unknown, "{}").await;
    assert_eq!(answer.status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    // 57 bytes that become 22 KB.
    let bomb = unhex(
        "1f8b0800000000000203edc1010d000000c2a0f74f6d0e37a000000000000000000000000000000000803703",
    );
    let answer = router.call(Method::POST, path, &[("content-encoding", "gzip")], bomb).await;
    assert_eq!(answer.status, StatusCode::PAYLOAD_TOO_LARGE, "{}", answer.text());
}

#[tokio::test]
async fn a_page_may_call_the_router_only_from_a_listed_origin() {
    let a = Agent::start("a");
    let preflight = async |router: &Router, origin: &str| {
        let headers: Headers<'_> = &[
            ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "authorization,content-type"),
        ];
        let answer = router.call(Method::OPTIONS, "/v1/chat/completions", headers, "").await;
        let allowed =
            |name: &str| answer.header(&format!("access-control-allow-{name}")).to_owned();
        (allowed("origin"), allowed("headers"))
    };
    let router = Router::start(&[&a]).await;
    assert_eq!(preflight(&router, "https://chat.example").await.0, "", "none is listed");
    let mut settings = config(&[&a]);
    settings.listen.cors_origins = vec!["https://chat.example".to_owned()];
    let router = Router::start_with(settings).await;
    wait_until("the router is ready", async || router.is_ready().await).await;
    let allowed = ("https://chat.example".to_owned(), "authorization,content-type".to_owned());
    assert_eq!(preflight(&router, "https://chat.example").await, allowed);
    assert_eq!(preflight(&router, "https://evil.example").await.0, "");
    let answer = router.chat(&[("origin", "https://chat.example")], "{}").await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(answer.header("access-control-allow-origin"), "https://chat.example");
    assert_eq!(answer.header("access-control-expose-headers"), "*");
}

#[tokio::test]
async fn a_web_page_does_not_drive_a_router_without_keys() {
    let a = Agent::start("a");
    let mut settings = config(&[&a]);
    settings.listen.cors_origins = vec!["https://chat.example".to_owned()];
    settings.listen.allowed_hosts = vec!["llm.example".to_owned()];
    let router = Router::start_with(settings).await;
    wait_until("the router is ready", async || router.is_ready().await).await;
    let status = async |method: Method, path: &str, headers: Headers<'_>| {
        let answer = router.call(method, path, headers, "{}").await;
        let is_foreign = answer.header("x-berth-refusal") == "foreign_page";
        assert_eq!(is_foreign, answer.status == StatusCode::FORBIDDEN, "{}", answer.text());
        answer.status.as_u16()
    };
    // A page of another origin, and one whose name was made to resolve to this host.
    for (header, value) in [("origin", "https://evil.example"), ("host", "evil.example:8080")] {
        for (method, path) in [
            (Method::POST, "/v1/chat/completions"),
            (Method::POST, "/v1/sessions"),
            (Method::POST, "/flush_cache"),
            (Method::GET, "/v1/workers"),
        ] {
            assert_eq!(status(method, path, &[(header, value)]).await, 403, "{header} {path}");
        }
    }
    // What a page can have a browser GET has no origin, only the browser's own headers.
    for method in [Method::GET, Method::HEAD] {
        for path in ["/flush_cache", "/start_profile", "/stop_profile"] {
            let of_page: Headers<'_> = &[("sec-fetch-site", "cross-site")];
            assert_eq!(status(method.clone(), path, of_page).await, 403, "{method} {path}");
        }
    }
    for headers in [&[] as Headers<'_>, &[("sec-fetch-mode", "cors")]] {
        let answered = status(Method::GET, "/flush_cache", headers).await;
        assert_eq!(answered, 200, "as trainers and scripts call it");
    }
    assert_eq!(status(Method::GET, "/v1/models", &[("sec-fetch-site", "none")]).await, 200);
    for (header, value) in [("origin", "https://chat.example"), ("host", "llm.example:8080")] {
        let answered = status(Method::POST, "/v1/chat/completions", &[(header, value)]).await;
        assert_eq!(answered, 200, "{header}: {value}");
    }
}

#[tokio::test]
async fn a_model_is_found_by_its_name_and_an_unknown_one_is_told_the_others() {
    let (a, b) = (Agent::serving("a", "org/one"), Agent::serving("b", "two"));
    let router = Router::start(&[&a, &b]).await;
    let model = router.call(Method::GET, "/v1/models/org/one", &[], "").await;
    assert_eq!(model.json()["id"], "org/one", "{}", model.text());
    let missing = router.call(Method::GET, "/v1/models/three", &[], "").await;
    assert_eq!(missing.status, StatusCode::NOT_FOUND);
    assert_eq!(missing.json()["error"]["code"], "model_not_found");
    assert!(missing.text().contains("org/one, two"), "{}", missing.text());
}

#[tokio::test]
async fn every_answer_names_its_request_and_the_engine_hears_a_clients_own_name() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let answer = router.chat(&[("x-request-id", "mine-7")], "{}").await;
    assert_eq!((answer.header("x-request-id"), answer.header("request-id")), ("mine-7", "mine-7"));
    assert_eq!(a.turns().pop().unwrap().headers["x-request-id"], "mine-7");
    let refused = router.call(Method::POST, "/v1/messages", &[], "[").await;
    let id = refused.header("request-id").to_owned();
    assert!(id.starts_with("req_"), "{id:?}");
    assert_eq!(refused.json()["request_id"], id.as_str());
    assert_eq!(refused.json()["error"]["type"], "invalid_request_error");
}

#[tokio::test]
async fn a_connection_goes_on_after_a_request_for_an_unknown_route() {
    let a = Agent::start("a");
    let router = Router::start(&[&a]).await;
    let mut stream = TcpStream::connect(router.data()).await.unwrap();
    let head =
        b"POST /v1/responses/compact/x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n";
    stream.write_all(&[head.as_slice(), b"{}"].concat()).await.unwrap();
    for expected in ["HTTP/1.1 404", "HTTP/1.1 200"] {
        let mut status = [0; 12];
        tokio::time::timeout(WAIT_MAX, stream.read_exact(&mut status)).await.unwrap().unwrap();
        assert_eq!(std::str::from_utf8(&status).unwrap(), expected);
        let mut rest = vec![0; 4096];
        let _ = stream.read(&mut rest).await.unwrap();
        stream.write_all(b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    }
    // Nothing waits for a body that doesn't come. The client learns that the connection ends.
    let mut stream = TcpStream::connect(router.data()).await.unwrap();
    stream.write_all(head).await.unwrap();
    let mut answer = String::new();
    let ended = tokio::time::timeout(WAIT_MAX, stream.read_to_string(&mut answer)).await;
    ended.unwrap().unwrap();
    assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
    assert!(answer.contains("connection: close"), "{answer}");
}
