//! Tests of routers and agents of different versions: what 0.1 doesn't know is not needed.
//!
//! A relay stands before each agent's control port. It decodes and encodes every message with the
//! schema of 0.1, which drops what that doesn't have, and it knows only that version's calls. So
//! the router sees agents of 0.1, and each agent sees a router of 0.1.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

/// The contract as of version 0.1.
#[expect(
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    clippy::too_many_lines,
    unreachable_pub,
    reason = "generated code"
)]
mod v0_1 {
    tonic::include_proto!("berth.agent.v1");
}

use std::{net::SocketAddr, pin::Pin};

use http::StatusCode;
use serde_json::json;
use tests::cluster::{Agent, Cluster, router_config, text_turn as turn};
use tokio_stream::{Stream, StreamExt as _, wrappers::TcpListenerStream};
use tonic::{
    Request, Response, Status,
    transport::{Channel, Endpoint, Server},
};

use self::v0_1::{
    worker_agent_client::WorkerAgentClient,
    worker_agent_server::{WorkerAgent, WorkerAgentServer},
};

/// Passes each call on to an agent.
struct Relay(WorkerAgentClient<Channel>);

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Passes single calls and calls with a stream of answers on.
macro_rules! relay {
    (
        single: $($single:ident($single_in:ident) -> $single_out:ident,)*;
        streams: $($stream:ident($stream_in:ident) -> $stream_out:ident as $name:ident,)*
    ) => {
        #[tonic::async_trait]
        impl WorkerAgent for Relay {
            $(async fn $single(
                &self,
                request: Request<v0_1::$single_in>,
            ) -> Result<Response<v0_1::$single_out>, Status> {
                self.0.clone().$single(request).await
            })*
            $(type $name = Events<v0_1::$stream_out>;

            async fn $stream(
                &self,
                request: Request<v0_1::$stream_in>,
            ) -> Result<Response<Self::$name>, Status> {
                let events = self.0.clone().$stream(request).await?.into_inner();
                Ok(Response::new(Box::pin(events)))
            })*
        }
    };
}

relay! {
    single:
    describe(DescribeRequest) -> Description,
    open_session(OpenSessionRequest) -> Session,
    close_session(CloseSessionRequest) -> CloseSessionResponse,
    list_sessions(ListSessionsRequest) -> ListSessionsResponse,
    audit(AuditRequest) -> AuditResponse,;
    streams:
    watch_load(WatchLoadRequest) -> LoadEvent as WatchLoadStream,
    watch_kv(WatchKvRequest) -> KvEvent as WatchKvStream,
    fetch_model_files(FetchModelFilesRequest) -> ModelFilePart as FetchModelFilesStream,
}

/// Starts a relay before an agent, at the agent's own host: routers look for the data port there.
#[expect(clippy::disallowed_methods, reason = "a process of its own, here as a task")]
async fn relay_before(agent: &Agent) -> SocketAddr {
    let endpoint = Endpoint::from_shared(format!("http://{}", agent.control)).unwrap();
    let client = WorkerAgentClient::new(endpoint.connect().await.unwrap());
    let listener = tokio::net::TcpListener::bind((agent.control.ip(), 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = Server::builder().add_service(WorkerAgentServer::new(Relay(client)));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    address
}

/// Starts workers, a relay before each agent, and `routers` routers that know the relays.
async fn start(workers: usize, routers: usize) -> Cluster {
    let mut cluster = Cluster::start(workers, |settings| settings.router = None).await.unwrap();
    let mut relays = vec![];
    for agent in &cluster.agents {
        relays.push(format!("http://{}", relay_before(agent).await));
    }
    for _ in 0..routers {
        let config = router_config(&[]);
        cluster.start_router_before(relays.clone(), config).await.unwrap();
    }
    cluster
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_and_sessions_work_across_versions() {
    let cluster = start(2, 2).await;
    let session = [("x-berth-session-id", "s")];
    let text = "a prompt of some pages, which the second turn finds in the cache ".repeat(4);
    let first = cluster.turn("/generate", &session, &turn(&text, 4)).await;
    // The other router learns of the session from the agent's table.
    let url = cluster.routers[1].url("/generate");
    let longer = turn(&format!("{text} and more"), 4);
    let second = cluster.web.post(&url, &session, &longer).await.unwrap();
    assert_eq!(second.status, StatusCode::OK, "{}", second.text());
    assert_eq!(second.header("x-berth-worker"), first.header("x-berth-worker"));
    assert!(second.meta("cached_tokens").unwrap() > 100, "{}", second.text());

    cluster.open_pinned("deltas").await;
    let delta = json!({
        "text": "only what is new", "session_params": { "id": "deltas" },
        "sampling_params": { "max_new_tokens": 2 },
    });
    cluster.turn("/generate", &[], &delta).await;
    let refused = cluster.post("/v1/sessions/deltas/demote", &[], &json!({})).await;
    assert_eq!(refused.refusal(), (409, "demotion_unavailable".to_owned()), "{}", refused.text());
    assert!(refused.text().contains("upgrade the agent"), "{}", refused.text());
    assert_eq!(cluster.delete("/v1/sessions/deltas").await.status, StatusCode::NO_CONTENT);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_of_0_1_follows_an_agent_and_its_drain() {
    let cluster = Cluster::start(1, |settings| settings.router = None).await.unwrap();
    let endpoint = Endpoint::from_shared(format!("http://{}", cluster.agent().control)).unwrap();
    let mut router = WorkerAgentClient::new(endpoint.connect().await.unwrap());
    let description = router.describe(v0_1::DescribeRequest {}).await.unwrap().into_inner();
    assert_eq!(description.agent_id, "w0");
    let mut events = router.watch_load(v0_1::WatchLoadRequest {}).await.unwrap().into_inner();
    cluster.web.post(&cluster.agent().admin_url("/drain"), &[], &json!({})).await.unwrap();
    loop {
        let event = events.next().await.unwrap().unwrap().event.unwrap();
        if matches!(event, v0_1::load_event::Event::Report(report) if report.draining) {
            break;
        }
    }
}
