//! Tests of who may use which port: keys, principals, admin routes, and a changing key file.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicUsize, Ordering},
    },
};

use axum::body::Body;
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use contract::{
    control::{CONTROL_ROUTES, ControlRoute},
    route::ROUTES,
};
use harness::{
    cluster::{Cluster, ClusterSettings, PATIENCE, agent_config, eventually, text_turn as turn},
    keys::{KeyFixture, TestKey, key_text},
    web::Headers,
};
use http::{Method, StatusCode};
use http_body_util::BodyExt as _;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use ring::signature::{Ed25519KeyPair, KeyPair as _};
use serde_json::{Value, json};
use service::{
    reload,
    server::{self, HEALTH_PATHS, PortLimits},
    tasks::Tasks,
    tls::server::{ServerFiles, ServerTls},
};

const KEYS: [TestKey<'_>; 4] = [
    ("alice", "sk-alice", ""),
    ("bob", "sk-bob", ""),
    ("ops", "sk-ops", "admin = true"),
    ("monitor", "sk-monitor", "scrape = true"),
];
const ALICE: (&str, &str) = ("authorization", "Bearer sk-alice");
const BOB: (&str, &str) = ("authorization", "Bearer sk-bob");
const OPS: (&str, &str) = ("authorization", "Bearer sk-ops");
const MONITOR: (&str, &str) = ("authorization", "Bearer sk-monitor");
const WRONG: (&str, &str) = ("authorization", "Bearer sk-eve");

async fn start(keys: &KeyFixture) -> Cluster {
    start_with(keys, |_| {}).await
}

/// Starts a worker and a router that both have the keys.
async fn start_with(keys: &KeyFixture, change: impl FnOnce(&mut ClusterSettings)) -> Cluster {
    let set = |settings: &mut ClusterSettings| {
        settings.agent.auth.keys_file = keys.path();
        if let Some(router) = &mut settings.router {
            router.auth.keys_file = keys.path();
        }
        change(settings);
    };
    Cluster::start(1, set).await.unwrap()
}

/// Returns the status and the refusal code of a request to the router's data port.
async fn ask(cluster: &Cluster, method: Method, path: &str, headers: Headers<'_>) -> (u16, String) {
    let answer = cluster.request(method, path, headers, Body::empty()).await;
    (answer.status.as_u16(), answer.header("x-berth-refusal").to_owned())
}

async fn opens(cluster: &Cluster, headers: Headers<'_>, id: &str) {
    let opened = cluster.post("/v1/sessions", headers, &json!({ "session_id": id })).await;
    assert_eq!(opened.status, StatusCode::CREATED, "{}", opened.text());
}

#[tokio::test]
async fn clients_see_harmless_facts_of_an_engine_and_nobody_its_keys() {
    let keys = KeyFixture::new(&KEYS).unwrap();
    let cluster = start(&keys).await;
    let ask =
        async |path: &str, who| cluster.request(Method::GET, path, &[who], Body::empty()).await;
    for path in ["/server_info", "/get_server_info", "/server_info/"] {
        let shown = ask(path, ALICE).await;
        let fields = shown.json();
        assert!(fields["max_total_num_tokens"].is_u64(), "{path}: {}", shown.text());
        assert!(fields["internal_states"][0]["last_gen_throughput"].is_number());
        for hidden in ["schedule_policy", "api_key", "launch_command", "kv_events_config"] {
            assert!(!shown.text().contains(hidden), "{hidden}: {}", shown.text());
        }
    }
    for path in ["/model_info", "/get_model_info"] {
        assert_eq!(ask(path, ALICE).await.json()["is_generation"], true, "{path}");
    }
    let all = ask("/server_info", OPS).await;
    let agents = all.json()["agents"].as_object().unwrap().clone();
    assert_eq!(agents.len(), 1);
    assert!(agents.values().all(|engine| engine["schedule_policy"] == "fcfs"), "{}", all.text());
    assert!(!all.text().contains("api_key"), "{}", all.text());
    assert_eq!(ask("/v1/loads", ALICE).await.code(), "admin_only");
    let loads = ask("/v1/loads", OPS).await.json();
    assert_eq!(loads["loads"][0]["dp_rank"], 0);
    assert_eq!(agents.keys().next().map(String::as_str), loads["loads"][0]["agent"].as_str());
}

#[tokio::test]
async fn nobody_gets_in_without_a_key() {
    let keys = KeyFixture::new(&KEYS).unwrap();
    let cluster = start(&keys).await;
    let unauthorized = (401, "unauthorized".to_owned());
    let digest = key_text(&KEYS).split('"').nth(3).unwrap().to_owned();
    let digest = format!("Bearer {digest}");
    let basic = ("authorization", "Basic c2stYWxpY2U6");
    let two = [ALICE, ("x-api-key", "sk-bob")];
    for headers in [
        &[][..],
        &[WRONG],
        &[("authorization", "Bearer alice")],
        &[("authorization", digest.as_str())],
        &[("authorization", "Bearer ")],
        &[basic],
        &two,
    ] {
        for (method, path) in [
            (Method::POST, "/generate"),
            (Method::POST, "/v1/chat/completions"),
            (Method::GET, "/v1/models"),
            (Method::GET, "/v1/sessions"),
            (Method::POST, "/v1/sessions"),
            (Method::DELETE, "/v1/sessions/s"),
            (Method::POST, "/v1/sessions/s/demote"),
            (Method::POST, "/v1/sessions/s/prefetch"),
            (Method::POST, "/close_session"),
            (Method::GET, "/v1/workers"),
            (Method::GET, "/no/such/route"),
        ] {
            let refused = ask(&cluster, method, path, headers).await;
            assert_eq!(refused, unauthorized, "{path} {headers:?}");
        }
        assert_eq!(ask(&cluster, Method::GET, "/health", headers).await.0, 200);
    }
    let refused = cluster.post("/generate", &[WRONG], &turn("a", 1)).await;
    assert_eq!(refused.header("www-authenticate"), "Bearer");
    assert_eq!(refused.json()["error"]["type"], "authentication_error");
    assert!(refused.text().contains("x-api-key"), "it says what to do: {}", refused.text());
    assert_eq!(cluster.turns_seen("/generate"), [0], "nothing reached the engine");
    cluster.turn("/generate", &[ALICE], &turn("a", 1)).await;
}

/// Whether only admins may use a route of the data port.
fn is_for_admins(path: &str) -> bool {
    let lists = ["/v1/workers", "/v1/loads", "/v1/placements", "/v1/turns", "/v1/fleet/"];
    lists.iter().any(|list| path.starts_with(list)) || ControlRoute::for_path(path).is_some()
}

#[tokio::test]
async fn every_route_and_method_needs_a_key_with_its_right() {
    let keys = KeyFixture::new(&KEYS).unwrap();
    let cluster = start(&keys).await;
    let described = cluster.request(Method::GET, "/openapi.json", &[ALICE], Body::empty()).await;
    let described = described.json();
    let paths = described["paths"].as_object().unwrap();
    assert!(paths.len() > 20, "{}", paths.len());
    let (unauthorized, admin_only) = ((401, "unauthorized".into()), (403, "admin_only".into()));
    let mut routes_of_admins = 0;
    let controls = CONTROL_ROUTES.iter().map(|route| (route.path, json!({ "post": {} })));
    let turns = ROUTES.iter().map(|route| (route.path, json!({})));
    let own = paths.iter().map(|(path, methods)| (path.as_str(), methods.clone()));
    for (path, methods) in own.chain(controls).chain(turns) {
        let path = path.replace(['{', '}'], "");
        for method in ["GET", "POST", "PUT", "DELETE", "HEAD", "PATCH", "TRACE"] {
            let method: Method = method.parse().unwrap();
            let is_known = methods.get(method.as_str().to_lowercase()).is_some();
            let case = format!("{method} {path}");
            let refused = ask(&cluster, method.clone(), &path, &[]).await;
            if HEALTH_PATHS.contains(&path.as_str()) {
                assert!(matches!(refused.0, 200 | 405), "{case}: {refused:?}");
                continue;
            }
            assert_eq!(refused, unauthorized, "{case}");
            assert_eq!(
                ask(&cluster, method.clone(), &path, &[WRONG]).await,
                unauthorized,
                "{case}"
            );
            let (status, code) = ask(&cluster, method.clone(), &path, &[MONITOR]).await;
            assert!(matches!(status, 403..=405), "with a scrape key, {case}: {status} {code}");
            if is_known && is_for_admins(&path) {
                routes_of_admins += 1;
                assert_eq!(ask(&cluster, method, &path, &[ALICE]).await, admin_only, "{case}");
            }
        }
    }
    assert!(routes_of_admins > 5 + CONTROL_ROUTES.len(), "{routes_of_admins}");
    // The agent itself asks for what has no body.
    for route in ROUTES.iter().filter(|route| route.kind.has_json_body()) {
        assert_eq!(cluster.turns_seen(route.path), [0], "{} reached the engine", route.path);
    }
}

#[tokio::test]
async fn a_session_is_unknown_to_other_keys() {
    let keys = KeyFixture::new(&KEYS).unwrap();
    let cluster = start(&keys).await;
    opens(&cluster, &[ALICE], "s").await;
    let (session, delta) = (("x-berth-session-id", "s"), ("x-berth-delta", "1"));
    let stolen = cluster.post("/generate", &[BOB, session, delta], &turn("a", 1)).await;
    assert_eq!(stolen.status, StatusCode::NOT_FOUND, "{}", stolen.text());
    for (other, method) in [(BOB, Method::GET), (OPS, Method::DELETE), (BOB, Method::DELETE)] {
        let path = "/v1/sessions/s";
        assert_eq!(ask(&cluster, method, path, &[other]).await.0, 404, "{other:?}");
    }
    for other in [BOB, OPS] {
        for path in ["/v1/sessions/s/demote", "/v1/sessions/s/prefetch"] {
            assert_eq!(ask(&cluster, Method::POST, path, &[other]).await.0, 404, "{other:?}");
        }
    }
    // The same key in any form is the same owner.
    for mine in
        [("x-api-key", "sk-alice"), ("authorization", "bEaReR sk-alice"), ("X-Api-Key", "sk-alice")]
    {
        assert_eq!(ask(&cluster, Method::GET, "/v1/sessions/s", &[mine]).await.0, 200, "{mine:?}");
    }
}

#[tokio::test]
async fn a_new_secret_keeps_the_sessions_and_a_removed_one_is_shut_out() {
    let keys = KeyFixture::new(&KEYS).unwrap();
    let cluster = start(&keys).await;
    opens(&cluster, &[ALICE], "s").await;
    let new = ("x-api-key", "sk-alice-2");
    let path = "/v1/sessions/s";
    assert_eq!(ask(&cluster, Method::GET, path, &[new]).await.0, 401);
    keys.replace(&key_text(&[KEYS[0], ("alice", "sk-alice-2", "")])).unwrap();
    eventually("both secrets work", || async {
        (ask(&cluster, Method::GET, path, &[new]).await.0 == 200).then_some(())
    })
    .await;
    assert_eq!(ask(&cluster, Method::GET, path, &[ALICE]).await.0, 200);
    keys.replace(&key_text(&[("alice", "sk-alice-2", "")])).unwrap();
    eventually("the old secret is shut out", || async {
        (ask(&cluster, Method::GET, path, &[ALICE]).await.0 == 401).then_some(())
    })
    .await;
    assert_eq!(ask(&cluster, Method::GET, path, &[new]).await.0, 200, "the session has stayed");
}

#[tokio::test]
async fn the_dashboards_stream_ends_with_its_key() {
    let keys = KeyFixture::new(&KEYS).unwrap();
    let cluster = start(&keys).await;
    let url = cluster.routers[0].admin_url("/dashboard/events");
    let mut watching = cluster.web.send(Method::GET, &url, &[OPS], Body::empty()).await.unwrap();
    let next = watching.body_mut().frame().await.expect("the fleet");
    assert!(next.unwrap().data_ref().unwrap().starts_with(b"event: fleet"));
    keys.replace(&key_text(&[KEYS[0], ("new-ops", "sk-ops-2", "admin = true")])).unwrap();
    let ended = async { while watching.body_mut().frame().await.is_some() {} };
    tokio::time::timeout(PATIENCE, ended).await.expect("the stream ends");
    let refused = cluster.web.request(Method::GET, &url, &[OPS], Body::empty()).await.unwrap();
    assert_eq!(refused.status, StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn a_broken_key_file_keeps_the_old_keys_and_says_so() {
    let keys = KeyFixture::new(&KEYS).unwrap();
    let cluster = start(&keys).await;
    let failures = |count: usize| {
        let name = "berth_router_file_reloads_total";
        let metric = format!("{name}{{purpose=\"keys\",result=\"failed\"}} {count}\n");
        let url = cluster.routers[0].admin_url("/metrics");
        let (web, keys) = (cluster.web.clone(), [MONITOR]);
        eventually("the failed reload is counted", move || {
            let (web, url, metric) = (web.clone(), url.clone(), metric.clone());
            async move {
                let page = web.request(Method::GET, &url, &keys, Body::empty()).await.unwrap();
                page.text().contains(&metric).then_some(())
            }
        })
    };
    for (broken, count) in [("", 1), ("[[key]]\nname = \"alice\"\n", 2)] {
        keys.replace(broken).unwrap();
        failures(count).await;
        assert_eq!(ask(&cluster, Method::GET, "/v1/sessions", &[ALICE]).await.0, 200);
    }
    fs::remove_file(keys.path()).unwrap();
    failures(3).await;
    assert_eq!(ask(&cluster, Method::GET, "/v1/sessions", &[ALICE]).await.0, 200);
    keys.replace(&key_text(&[KEYS[1], KEYS[3]])).unwrap();
    eventually("the good file counts", || async {
        (ask(&cluster, Method::GET, "/v1/sessions", &[ALICE]).await.0 == 401).then_some(())
    })
    .await;
}

/// Kubernetes mounts a secret as a link to a folder, and swaps the link.
#[tokio::test]
async fn a_key_file_behind_swapped_links_is_followed() {
    let keys = KeyFixture::new(&[]).unwrap();
    let folder = keys.folder();
    for (version, key) in [("v1", KEYS[0]), ("v2", KEYS[1])] {
        fs::create_dir(folder.join(version)).unwrap();
        fs::write(folder.join(version).join("keys.toml"), key_text(&[key])).unwrap();
    }
    symlink("v1", folder.join("data")).unwrap();
    fs::remove_file(keys.path()).unwrap();
    symlink("data/keys.toml", keys.path()).unwrap();
    let cluster = start(&keys).await;
    assert_eq!(ask(&cluster, Method::GET, "/v1/sessions", &[ALICE]).await.0, 200);
    symlink("v2", folder.join("data-new")).unwrap();
    fs::rename(folder.join("data-new"), folder.join("data")).unwrap();
    eventually("the new keys count", || async {
        (ask(&cluster, Method::GET, "/v1/sessions", &[BOB]).await.0 == 200).then_some(())
    })
    .await;
    assert_eq!(ask(&cluster, Method::GET, "/v1/sessions", &[ALICE]).await.0, 401);
}

#[tokio::test]
async fn only_admins_see_the_fleet_and_why_turns_went_where() {
    let keys = KeyFixture::new(&KEYS).unwrap();
    let cluster = start(&keys).await;
    let answer = cluster.turn("/generate", &[ALICE], &turn("a", 1)).await;
    let placement = format!("/v1/placements/{}", answer.header("x-berth-turn"));
    for path in ["/v1/workers", "/v1/placements", "/v1/turns", "/v1/fleet/sessions", &placement] {
        let refused = ask(&cluster, Method::GET, path, &[ALICE]).await;
        assert_eq!(refused, (403, "admin_only".to_owned()), "{path}");
        assert_eq!(ask(&cluster, Method::GET, path, &[OPS]).await.0, 200, "{path}");
    }
    // A monitoring key is not a client.
    let refused = ask(&cluster, Method::GET, "/v1/sessions", &[MONITOR]).await;
    assert_eq!(refused, (403, "scrape_key".to_owned()));
}

#[tokio::test]
async fn admin_ports_show_figures_to_monitoring_and_no_secret_to_anybody() {
    let keys = KeyFixture::new(&KEYS).unwrap();
    let cluster = start(&keys).await;
    let text = key_text(&KEYS);
    let digest = text.split('"').nth(3).unwrap();
    for admin in [cluster.routers[0].admin, cluster.agent().admin] {
        let get = async |path: &str, headers: Headers<'_>| {
            let url = format!("http://{admin}{path}");
            cluster.web.request(Method::GET, &url, headers, Body::empty()).await.unwrap()
        };
        for path in ["/healthz", "/readyz"] {
            assert_eq!(get(path, &[]).await.status, StatusCode::OK);
        }
        for path in ["/metrics", "/config"] {
            for (headers, status) in
                [(&[][..], 401), (&[WRONG], 401), (&[ALICE], 403), (&[MONITOR], 200), (&[OPS], 200)]
            {
                let answer = get(path, headers).await;
                assert_eq!(answer.status.as_u16(), status, "{path} {headers:?}");
                for secret in ["sk-", digest] {
                    assert!(!answer.text().contains(secret), "{path} shows {secret}");
                }
            }
        }
        assert_eq!(get("/other", &[MONITOR]).await.status, StatusCode::FORBIDDEN);
        assert_eq!(get("/other", &[OPS]).await.status, StatusCode::NOT_FOUND);
    }
}

/// A token issuer with one key, whose number may change.
#[derive(Clone, Default)]
struct Issuer {
    key: Arc<AtomicU8>,
    readings: Arc<AtomicUsize>,
}

impl Issuer {
    fn pair(&self) -> Ed25519KeyPair {
        Ed25519KeyPair::from_seed_unchecked(&[self.key.load(Ordering::Relaxed); 32]).unwrap()
    }

    fn jwks(&self) -> Value {
        let x = URL_SAFE_NO_PAD.encode(self.pair().public_key());
        let kid = self.key.load(Ordering::Relaxed).to_string();
        json!({"keys": [{"kty": "OKP", "crv": "Ed25519", "kid": kid, "x": x}]})
    }

    /// Serves the public key, and returns its URL.
    async fn serve(&self) -> String {
        self.serve_with(None).await
    }

    /// Serves the public key by TLS, with a certificate of `authority`, and returns its URL.
    async fn serve_tls(&self, authority: &Authority, folder: &Path) -> String {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, authority).unwrap();
        let files = ServerFiles {
            cert: folder.join("issuer.pem"),
            key: folder.join("issuer.key"),
            clients: None,
        };
        fs::write(&files.cert, certificate.pem()).unwrap();
        fs::write(&files.key, key.serialize_pem()).unwrap();
        let tls = files.start(&reload::Metrics::default(), &Tasks::default()).unwrap();
        self.serve_with(Some(tls)).await
    }

    async fn serve_with(&self, tls: Option<ServerTls>) -> String {
        let issuer = self.clone();
        let answer = move || {
            issuer.readings.fetch_add(1, Ordering::Relaxed);
            std::future::ready(axum::Json(issuer.jwks()))
        };
        let app = axum::Router::new().route("/jwks.json", axum::routing::get(answer));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let scheme = if tls.is_some() { "https" } else { "http" };
        let url = format!("{scheme}://{}/jwks.json", listener.local_addr().unwrap());
        let metrics = server::Metrics::default();
        let (limits, tasks) = (PortLimits::admin(&metrics), Tasks::default());
        tasks.spawn(server::serve(listener, app, limits, tls, tasks.clone()));
        url
    }

    fn token(&self, owner: &str, kid: &str) -> String {
        let header = json!({"alg": "EdDSA", "kid": kid});
        let claims = json!({
            "iss": "https://issuer.example", "aud": "berth", "sub": owner, "exp": 4_102_444_800_u64,
        });
        let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let message = format!("{}.{}", part(&header), part(&claims));
        let signature = self.pair().sign(message.as_bytes());
        format!("Bearer {message}.{}", URL_SAFE_NO_PAD.encode(signature))
    }
}

async fn start_with_tokens(keys: &KeyFixture, jwks: String) -> Cluster {
    start_with_issuer(keys, jwks, PathBuf::new()).await
}

/// Starts a cluster that takes tokens. `ca_file` is the CA of the URL's server.
async fn start_with_issuer(keys: &KeyFixture, jwks: String, ca_file: PathBuf) -> Cluster {
    let change = |settings: &mut ClusterSettings| {
        let jwt = &mut settings.router.as_mut().unwrap().auth.jwt;
        jwt.issuer = "https://issuer.example".to_owned();
        jwt.audience = "berth".to_owned();
        (jwt.jwks, jwt.ca_file) = (jwks, ca_file);
    };
    start_with(keys, change).await
}

type Authority = CertifiedIssuer<'static, KeyPair>;

/// Makes a certificate authority, and writes its certificate.
fn authority(path: &Path) -> Authority {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    fs::write(path, authority.pem()).unwrap();
    authority
}

#[tokio::test]
async fn the_issuer_s_keys_come_by_tls_from_a_server_that_the_router_trusts() {
    let keys = KeyFixture::new(&KEYS).unwrap();
    let (ca_file, other_file) = (keys.folder().join("ca.pem"), keys.folder().join("other.pem"));
    let (issuer, authority, _other) =
        (Issuer::default(), authority(&ca_file), authority(&other_file));
    let url = issuer.serve_tls(&authority, keys.folder()).await;
    let token = issuer.token("alice", "0");
    let list = ("/v1/sessions", [("authorization", token.as_str())]);
    let distrusting = start_with_issuer(&keys, url.clone(), other_file).await;
    let refused = ask(&distrusting, Method::GET, list.0, &list.1).await;
    assert_eq!(refused, (503, "auth_unavailable".to_owned()));
    assert_eq!(issuer.readings.load(Ordering::Relaxed), 0, "the router asked a stranger");
    let trusting = start_with_issuer(&keys, url, ca_file).await;
    assert_eq!(ask(&trusting, Method::GET, list.0, &list.1).await.0, 200);
}

#[tokio::test]
async fn a_token_opens_sessions_of_its_owner_and_a_new_key_of_the_issuer_is_found() {
    let keys = KeyFixture::new(&KEYS).unwrap();
    let issuer = Issuer::default();
    let cluster = start_with_tokens(&keys, issuer.serve().await).await;
    // The owner has the name of a key, but is another principal.
    let token = issuer.token("alice", "0");
    opens(&cluster, &[("authorization", &token)], "s").await;
    opens(&cluster, &[ALICE], "s").await;
    let eve = issuer.token("eve", "0");
    let path = "/v1/sessions/s";
    assert_eq!(ask(&cluster, Method::GET, path, &[("authorization", &eve)]).await.0, 404);
    assert_eq!(ask(&cluster, Method::GET, "/v1/workers", &[("authorization", &eve)]).await.0, 403);
    assert_eq!(issuer.readings.load(Ordering::Relaxed), 1);

    issuer.key.store(1, Ordering::Relaxed);
    let new = issuer.token("alice", "1");
    assert_eq!(ask(&cluster, Method::GET, path, &[("authorization", &new)]).await.0, 200);
    assert_eq!(issuer.readings.load(Ordering::Relaxed), 2);
    // The old key is withdrawn, and invented key ids make the router ask nobody.
    for kid in ["0", "2", "3"] {
        let invented = issuer.token("alice", kid);
        let refused = ask(&cluster, Method::GET, path, &[("authorization", &invented)]).await;
        assert_eq!(refused, (401, "unauthorized".to_owned()));
    }
    assert_eq!(issuer.readings.load(Ordering::Relaxed), 2, "at most one in a minute");
}

#[tokio::test]
async fn tokens_wait_for_the_issuer_and_keys_do_not() {
    let keys = KeyFixture::new(&KEYS).unwrap();
    let nobody = engine_sim::loopback::own_addr();
    let cluster = start_with_tokens(&keys, format!("http://{}:9/jwks", nobody.ip())).await;
    let token = Issuer::default().token("alice", "0");
    let answer = cluster
        .request(Method::GET, "/v1/sessions", &[("authorization", &token)], Body::empty())
        .await;
    assert_eq!(answer.refusal(), (503, "auth_unavailable".to_owned()));
    assert_eq!(answer.header("retry-after"), "1");
    assert_eq!(ask(&cluster, Method::GET, "/v1/sessions", &[ALICE]).await.0, 200);
}

#[tokio::test]
async fn a_file_of_the_issuer_s_keys_is_followed() {
    let keys = KeyFixture::new(&KEYS).unwrap();
    let (issuer, path) = (Issuer::default(), keys.folder().join("jwks.json"));
    fs::write(&path, issuer.jwks().to_string()).unwrap();
    let cluster = start_with_tokens(&keys, path.to_str().unwrap().to_owned()).await;
    let old = issuer.token("alice", "0");
    assert_eq!(ask(&cluster, Method::GET, "/v1/sessions", &[("authorization", &old)]).await.0, 200);
    issuer.key.store(1, Ordering::Relaxed);
    fs::write(&path, issuer.jwks().to_string()).unwrap();
    let new = issuer.token("alice", "1");
    eventually("the new key counts", || async {
        let answer = ask(&cluster, Method::GET, "/v1/sessions", &[("authorization", &new)]).await;
        (answer.0 == 200).then_some(())
    })
    .await;
    assert_eq!(ask(&cluster, Method::GET, "/v1/sessions", &[("authorization", &old)]).await.0, 401);
}

#[tokio::test]
async fn a_router_that_serves_everybody_makes_nobody_an_admin() {
    let open = |settings: &mut ClusterSettings| {
        let router = settings.router.as_mut().unwrap();
        router.listen.data_addr = "0.0.0.0:0".parse().unwrap();
        router.auth.mode = router::config::auth::AuthMode::None;
    };
    let cluster = Cluster::start(1, open).await.unwrap();
    let port = cluster.routers[0].data.port();
    let url = |path: &str| format!("http://127.0.0.1:{port}{path}");
    let answer = cluster.web.post(&url("/generate"), &[], &turn("a", 1)).await.unwrap();
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    let refused = cluster.web.get(&url("/v1/workers")).await.unwrap();
    assert_eq!(refused.refusal(), (403, "admin_only".to_owned()));
    // A credential that nobody checks gives no sessions of one's own.
    let body = json!({"session_id": "s"});
    let opened = cluster.web.post(&url("/v1/sessions"), &[ALICE], &body).await.unwrap();
    assert_eq!(opened.status, StatusCode::CREATED);
    assert_eq!(cluster.web.get(&url("/v1/sessions/s")).await.unwrap().status, StatusCode::OK);
}

#[tokio::test]
async fn a_router_without_keys_refuses_to_serve_other_hosts() {
    let mut config = harness::cluster::router_config(&[]);
    config.workers = vec!["http://127.0.0.1:1".into()];
    assert_eq!(config.problems(), Vec::<String>::new());
    config.listen.data_addr = "0.0.0.0:0".parse().unwrap();
    config.listen.admin_addr = "[::]:0".parse().unwrap();
    let refused = harness::cluster::Router::start(config.clone()).await.unwrap().stop().await;
    let problems = config.problems();
    assert!(refused.is_err(), "the router started");
    assert_eq!(problems.len(), 2, "{problems:?}");
    for (problem, address) in problems.iter().zip(["data_addr", "admin_addr"]) {
        assert!(problem.contains(address) && problem.contains("auth.keys_file"), "{problem}");
    }
    let keys = KeyFixture::new(&KEYS).unwrap();
    config.auth.keys_file = keys.path();
    assert_eq!(config.problems(), Vec::<String>::new());
    config.auth.mode = router::config::auth::AuthMode::None;
    assert_eq!(config.problems().len(), 1, "keys that nobody needs are a mistake");
}

#[test]
fn an_agent_without_keys_shows_its_admin_port_to_its_host_alone() {
    use clap::Parser as _;
    let load = |args: &[&str]| {
        let args =
            [&["berth-agent", "--worker-id", "w", "--admin-addr", "0.0.0.0:1"], args].concat();
        worker_agent::config::Config::load(worker_agent::config::Args::parse_from(args))
    };
    let problems = load(&[]).unwrap_err().to_string();
    assert!(problems.contains("auth.keys_file"), "{problems}");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agent.toml");
    fs::write(&path, "[auth]\nmetrics_auth = \"none\"\n").unwrap();
    assert!(load(&["--config", path.to_str().unwrap()]).is_ok());
    fs::write(&path, "[auth]\nkeys_file = \"/nonexistent/keys.toml\"\n").unwrap();
    let problems = load(&["--config", path.to_str().unwrap()]).unwrap_err().to_string();
    assert!(problems.contains("/nonexistent/keys.toml"), "{problems}");
    assert!(agent_config("", "").auth.keys_path().is_none());
}
