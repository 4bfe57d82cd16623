//! Connects a command to the control port of a running agent, with TLS and a token if need be.

use std::{sync::Arc, time::Duration};

use hyper_util::client::legacy::connect::HttpConnector;
use prometheus_client::registry::Registry;
use service::{
    proof::router::{AgentClient, SignedChannel, Signer},
    reload::{self, Reloaded},
    router_token::Tokens,
    tasks::Tasks,
    tls::{
        Protocol, ServerName,
        client::{ClientFiles, ClientTls, Connector},
    },
};
use tonic::transport::Endpoint;

use super::Error;
use crate::config::AgentArgs;

/// Connects within `wait_max`, which is also the time limit of each call.
pub(super) async fn connect(args: &AgentArgs, wait_max: Duration) -> Result<AgentClient, Error> {
    let addr = args.control_addr;
    let scheme = if args.ca.is_some() { "https" } else { "http" };
    let url = format!("{scheme}://{addr}");
    let endpoint = Endpoint::from_shared(url).expect("an address makes a URL").timeout(wait_max);
    let connector = Connector::new(HttpConnector::new(), tls(args)?, Protocol::Http2, wait_max);
    let channel = endpoint.connect_with_connector(connector).await;
    let channel = channel.map_err(|error| Error::Unreachable(addr, error))?;
    let tokens = args.token_file.clone().map(|path| Tokens::source(path).read()).transpose()?;
    let signer = tokens.map(|tokens| Arc::new(Signer::new(Reloaded::fixed(tokens))));
    SignedChannel::proven_client(channel, signer)
        .await
        .map(|(client, _agent_id)| client)
        .map_err(|status| Error::Refused(status.message().to_owned()))
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
