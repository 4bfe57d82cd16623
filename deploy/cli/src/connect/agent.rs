//! Connects to the control port of an agent, as a router does.

use std::{error::Error as _, sync::Arc, time::Duration};

use service::{
    proof::router::{AgentClient, SignedChannel, Signer},
    reload::Reloaded,
    router_token::Tokens,
    tls::Protocol,
};
use tonic::{Code, Status, transport::Endpoint};

use super::{connector, normalize_url};
use crate::{
    args::TargetArgs,
    error::{Error, chain},
};

/// `wait_max` is the time limit of each call.
pub async fn connect(args: &TargetArgs, wait_max: Duration) -> Result<AgentClient, Error> {
    connect_to(args, &args.agent, wait_max).await
}

pub async fn connect_to(
    args: &TargetArgs,
    url: &str,
    wait_max: Duration,
) -> Result<AgentClient, Error> {
    let url = normalize_url("--agent", url)?;
    let connector = connector(args, &url, Protocol::Http2)?;
    let endpoint = Endpoint::from_shared(url.clone())
        .map_err(|error| Error::Usage(format!("--agent: {error}")))?
        .timeout(wait_max);
    let tokens = args.token_file.clone().map(|path| Tokens::source(path).read()).transpose()?;
    let channel = endpoint.connect_with_connector(connector).await;
    let channel = channel.map_err(|error| unreachable_error(url, chain(&error)))?;
    let signer = tokens.map(|tokens| Arc::new(Signer::new(Reloaded::fixed(tokens))));
    let client = SignedChannel::proven_client(channel, signer).await;
    client.map(|(client, _agent_id)| client).map_err(|status| call_error(args, &status))
}

/// Each error says why in the agent's own words.
#[must_use]
pub fn call_error(args: &TargetArgs, status: &Status) -> Error {
    let why = status.message().to_owned();
    match status.code() {
        Code::Unauthenticated | Code::PermissionDenied => Error::Refused { who: "agent", why },
        // A status that the agent itself has sent has no source.
        Code::Unavailable | Code::Unknown | Code::Internal if status.source().is_some() => {
            unreachable_error(args.agent.clone(), chain(status))
        }
        _ => Error::Failed { who: "agent", why },
    }
}

fn unreachable_error(url: String, why: String) -> Error {
    let hint = "give its control port with --agent, and --ca and --cert if it speaks TLS";
    Error::Unreachable { who: "agent", url, why, hint }
}
