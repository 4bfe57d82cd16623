//! Connects a command to the control port of a running agent, with TLS and a token if need be.

use std::{sync::Arc, time::Duration};

use hyper_util::client::legacy::connect::HttpConnector;
use prometheus_client::registry::Registry;
use proto::{claim, v1::worker_agent_client::WorkerAgentClient};
use service::{
    reload,
    router_token::Tokens,
    tasks::Tasks,
    tls::{
        Protocol, ServerName,
        client::{ClientFiles, ClientTls, Connector},
    },
};
use tonic::{
    Request, Status,
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Channel, Endpoint},
};

use super::Error;
use crate::config::AgentArgs;

/// The client of a control port.
pub(super) type ControlClient = WorkerAgentClient<InterceptedService<Channel, SendToken>>;

/// Adds the token to each call, if there is one.
#[derive(Debug, Clone)]
pub(super) struct SendToken(Option<Arc<Tokens>>);

impl Interceptor for SendToken {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(tokens) = &self.0 {
            request.metadata_mut().as_mut().insert(claim::TOKEN, tokens.to_header());
        }
        Ok(request)
    }
}

/// Connects within `wait_max`, which is also the time limit of each call.
pub(super) async fn connect(args: &AgentArgs, wait_max: Duration) -> Result<ControlClient, Error> {
    let addr = args.control_addr;
    let scheme = if args.ca.is_some() { "https" } else { "http" };
    let url = format!("{scheme}://{addr}");
    let endpoint = Endpoint::from_shared(url).expect("an address makes a URL").timeout(wait_max);
    let connector = Connector::new(HttpConnector::new(), tls(args)?, Protocol::Http2, wait_max);
    let channel = endpoint.connect_with_connector(connector).await;
    let channel = channel.map_err(|error| Error::Unreachable(addr, error))?;
    let tokens = args.token_file.clone().map(|path| Tokens::source(path).read());
    let token = SendToken(tokens.transpose()?.map(Arc::new));
    Ok(WorkerAgentClient::with_interceptor(channel, token))
}

/// Reads the certificates that the arguments name.
fn tls(args: &AgentArgs) -> Result<Option<ClientTls>, Error> {
    let Some(ca) = args.ca.clone() else { return Ok(None) };
    let server_name = args.server_name.clone().map(ServerName::try_from).transpose();
    let files = ClientFiles {
        ca,
        identity: args.cert.clone().zip(args.key.clone()),
        server_name: server_name.map_err(|_| Error::ServerName)?,
    };
    let metrics = reload::Metrics::new(&mut Registry::default());
    Ok(Some(files.start(&metrics, &Tasks::default())?))
}
