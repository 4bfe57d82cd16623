//! An agent that describes itself as hundreds of thousands of ranks.
//!
//! The router takes no memory for it, and the turns of others don't notice.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use anyhow::{Context as _, ensure};
use axum::body::Body;
use bytes::{BufMut as _, Bytes, BytesMut};
use contract::v1::{self, load_event::Event};
use harness::{
    cluster::text_turn,
    fleet::{FleetPlan, Place, Processes, credential, own_host},
};
use http::{HeaderMap, Response, Uri, header::CONTENT_TYPE};
use http_body_util::StreamBody;
use hyper::body::Frame;
use prost::Message as _;
use service::clock::now;
use tokio::{net::TcpListener, task::JoinSet};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::service::Routes;

use crate::figures;

/// The ranks in the description. They take about 1 GB in a router that believes them.
const RANKS: u32 = 300_000;
/// How often the router must have heard the lie.
const LIES: usize = 5;
/// The most MiB by which the router may grow.
const MIB_MAX: u64 = 100;

/// Listed lies, and memory meanwhile.
pub(crate) async fn lying_agent(place: Place) -> anyhow::Result<String> {
    let list = place.folder().join("workers.toml");
    place.write("workers.toml", "workers = []\n")?;
    let plan = FleetPlan {
        router_settings: format!("discovery.file = {list:?}\n"),
        ..FleetPlan::default()
    };
    let fleet = Processes::start(place, &plan).await?;
    let before = fleet.routers[0].resident_bytes()?;
    let host = own_host();
    let listener = TcpListener::bind((host.as_str(), 31001)).await?;
    let lies = Arc::new(AtomicUsize::new(0));
    // It ends with this set.
    let mut liar = JoinSet::new();
    liar.spawn(lie(listener, Arc::clone(&lies)));
    fleet.place.write("workers.toml", &format!("workers = [\"http://{host}:31001\"]\n"))?;
    let (mut most, mut turns, began) = (before, 0, now());
    let (key, url) = (credential("alice"), fleet.url(0, "/generate"));
    let headers = [("authorization", key.as_str())];
    while lies.load(Ordering::Relaxed) < LIES {
        ensure!(began.elapsed() < figures::PATIENCE, "only {} lies", lies.load(Ordering::Relaxed));
        let answer = fleet.web.post(&url, &headers, &text_turn("hello", 4)).await?;
        ensure!(answer.status == 200, "a turn got {}: {}", answer.status, answer.text());
        turns += 1;
        most = most.max(fleet.routers[0].resident_bytes()?);
    }
    let (key, url) = (credential("ops"), fleet.url(0, "/v1/workers"));
    let headers = [("authorization", key.as_str())];
    let workers = fleet.web.request(http::Method::GET, &url, &headers, Body::empty()).await?.json();
    let workers = workers["workers"].as_array().context("no workers")?.len();
    ensure!(workers == 1, "{workers} workers of one agent and a liar");
    let grown = (most - before) >> 20;
    ensure!(grown < MIB_MAX, "the router grew by {grown} MiB");
    Ok(format!("{LIES} descriptions with {RANKS} ranks, {turns} turns, router +{grown} MiB"))
}

/// Describes itself, and reports its load, until it is dropped.
async fn lie(listener: TcpListener, lies: Arc<AtomicUsize>) -> anyhow::Result<()> {
    let rank = |dp_rank| v1::Rank { dp_rank, pool_tokens: 1, rows: 1, ..v1::Rank::default() };
    let description = v1::Description {
        agent_id: "liar".to_owned(),
        epoch: 1,
        data_port: 31_000,
        engine: Some(v1::EngineFacts {
            version: "0.5.23".to_owned(),
            models: vec!["model".to_owned()],
            page_tokens: 1,
            context_tokens: 1_000,
            instance: "1".to_owned(),
            disaggregation: "null".to_owned(),
            ..v1::EngineFacts::default()
        }),
        ranks: (0..RANKS).map(rank).collect(),
        ..v1::Description::default()
    };
    let report = v1::LoadReport {
        interval_ms: 500,
        ranks: (0..RANKS).map(|dp_rank| v1::RankLoad { dp_rank, ..Default::default() }).collect(),
        ..v1::LoadReport::default()
    };
    let events = [
        Event::Description(description.clone()),
        Event::Sessions(v1::SessionTable { sessions: vec![], last: true }),
        Event::Report(report),
    ];
    let events: Vec<u8> = (0..)
        .zip(events)
        .map(|(sequence, event)| v1::LoadEvent { epoch: 1, sequence, event: Some(event) })
        .flat_map(|event| framed(&event.encode_to_vec()))
        .collect();
    let (answer, events) = (framed(&description.encode_to_vec()), Bytes::from(events));
    let routes = axum::Router::new().fallback(move |uri: Uri| async move {
        lies.fetch_add(1, Ordering::Relaxed);
        let message = if uri.path().ends_with("/Describe") { answer } else { events };
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
        let frames = [Frame::data(message), Frame::trailers(trailers)];
        let frames = frames.map(Ok::<_, std::convert::Infallible>);
        let body = Body::new(StreamBody::new(tokio_stream::iter(frames)));
        let mut response = Response::new(body);
        let grpc = http::HeaderValue::from_static("application/grpc");
        response.headers_mut().insert(CONTENT_TYPE, grpc);
        response
    });
    let server = tonic::transport::Server::builder().add_routes(Routes::from(routes));
    Ok(server.serve_with_incoming(TcpListenerStream::new(listener)).await?)
}

/// Returns a message as gRPC sends it: not compressed, with its length.
fn framed(message: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(5 + message.len());
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(message.len()).expect("some megabytes"));
    bytes.extend_from_slice(message);
    bytes.freeze()
}
