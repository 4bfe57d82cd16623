//! Has etcd hold the claims: each is a key with a lease, changed by a transaction.
//!
//! A claim's generation is the revision of the key's last change. All claims of a while share one
//! lease, so that a claim is one round trip. A new connection has a new lease, and is made long
//! before the claims of the old lease should expire.

use std::{io, sync::Arc, time::Duration};

use contract::{
    id::WorkerId,
    placement_claim::{PlacementClaim, PlacementClaimRequest},
};
use hyper_util::client::legacy::connect::HttpConnector;
use service::{
    log::describe_error,
    tasks::Tasks,
    tls::{
        Protocol,
        client::{ClientTls, Connector},
    },
};
use tonic::{
    Request, Status, async_trait,
    metadata::{Ascii, MetadataValue},
    transport::{Channel, Endpoint},
};

use self::rpc::{
    AuthenticateRequest, Compare, KeyValue, LeaseGrantRequest, PutRequest, RangeRequest, RequestOp,
    TxnRequest, TxnResponse,
    auth_client::AuthClient,
    compare::{CompareResult, CompareTarget, TargetUnion},
    kv_client::KvClient,
    lease_client::LeaseClient,
    request_op::Request as Operation,
    response_op::Response as OperationResult,
};
use super::{
    connection::{CONNECT_TIME_MAX, Connect, Current, keep_connected, spawn_until_stopped},
    store::{ClaimStore, Error, hex, read_worker},
};
use crate::config::claims::ClaimsTable;

#[expect(clippy::allow_attributes_without_reason, unreachable_pub, reason = "generated code")]
mod rpc {
    tonic::include_proto!("etcdserverpb");
}

/// The interval of pings, and the time for their answers: a silent member is noticed after both.
const KEEPALIVE: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct EtcdStore {
    prefix: String,
    current: Arc<Current<Leased>>,
}

#[derive(Debug)]
struct Leased {
    channel: Channel,
    token: Option<MetadataValue<Ascii>>,
    lease: i64,
}

struct EtcdConnect {
    tls: Option<ClientTls>,
    /// The user's name and password.
    user: Option<(String, String)>,
    ttl: Duration,
}

impl EtcdStore {
    pub(super) fn open(
        settings: &ClaimsTable,
        tls: Option<ClientTls>,
        tasks: &Tasks,
    ) -> io::Result<Self> {
        let password = settings.password()?.unwrap_or_default();
        let user = (!settings.user.is_empty()).then(|| (settings.user.clone(), password));
        let (current, ttl) = (Arc::default(), settings.ttl());
        let maker = EtcdConnect { tls, user, ttl };
        let urls = settings.urls.clone();
        let keep = keep_connected(maker, Arc::clone(&current), urls, ttl / 2);
        spawn_until_stopped(tasks, keep);
        Ok(Self { prefix: settings.prefix.clone(), current })
    }

    async fn call(&self, request: PlacementClaimRequest) -> Result<PlacementClaim, Error> {
        let leased = self.current.get()?;
        let key = format!("{}/claims/{}", self.prefix, hex(request.key)).into_bytes();
        let worker = format!("{} {}", request.wanted.dp_rank, request.wanted.agent);
        let expected = request.expected.map_or(0, |expected| i64::try_from(expected).unwrap_or(0));
        let put = PutRequest { key: key.clone(), value: worker.into_bytes(), lease: leased.lease };
        let answer = leased.txn(&key, expected, &put).await?;
        match read_answer(answer, &request.wanted)? {
            Some(claim) => Ok(claim),
            // The expected claim has expired.
            None => {
                let answer = leased.txn(&key, 0, &put).await?;
                let none = || Error::Unreadable("a claim that isn't there".to_owned());
                read_answer(answer, &request.wanted)?.ok_or_else(none)
            }
        }
    }
}

#[async_trait]
impl ClaimStore for EtcdStore {
    async fn claim(
        &self,
        request: PlacementClaimRequest,
        time_max: Duration,
    ) -> Result<PlacementClaim, Error> {
        let claim = tokio::time::timeout(time_max, self.call(request)).await;
        let claim = claim.unwrap_or(Err(Error::Late(time_max)));
        if claim.as_ref().is_err_and(Error::is_of_connection) {
            self.current.report_failure();
        }
        claim
    }
}

impl Leased {
    /// Puts the key if its revision is the expected one, or else reads it.
    async fn txn(&self, key: &[u8], expected: i64, put: &PutRequest) -> Result<TxnResponse, Error> {
        let compare = Compare {
            result: CompareResult::Equal as i32,
            target: CompareTarget::Mod as i32,
            key: key.to_vec(),
            target_union: Some(TargetUnion::ModRevision(expected)),
        };
        let read = RangeRequest { key: key.to_vec() };
        let operation = |operation| vec![RequestOp { request: Some(operation) }];
        let txn = TxnRequest {
            compare: vec![compare],
            success: operation(Operation::RequestPut(put.clone())),
            failure: operation(Operation::RequestRange(read)),
        };
        let mut client = KvClient::new(self.channel.clone());
        let answer = client.txn(with_token(txn, self.token.as_ref())).await;
        Ok(answer.map_err(|status| failed(&status))?.into_inner())
    }
}

#[async_trait]
impl Connect for EtcdConnect {
    type Connection = Leased;

    async fn connect(&self, url: &str) -> Result<Leased, Error> {
        let unreachable = |error: tonic::transport::Error| Error::Failed(describe_error(&error));
        let endpoint = Endpoint::from_shared(url.to_owned())
            .map_err(unreachable)?
            .http2_keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE);
        let (http, tls) = (HttpConnector::new(), self.tls.clone());
        let connector = Connector::new(http, tls, Protocol::Http2, CONNECT_TIME_MAX);
        let channel = endpoint.connect_with_connector(connector).await.map_err(unreachable)?;
        let mut token = None;
        if let Some((name, password)) = &self.user {
            let request = AuthenticateRequest { name: name.clone(), password: password.clone() };
            let answer = AuthClient::new(channel.clone()).authenticate(request).await;
            let text = answer.map_err(|status| failed(&status))?.into_inner().token;
            let unreadable = |_| Error::Unreadable("a token that no header carries".to_owned());
            token = Some(text.parse().map_err(unreadable)?);
        }
        // A claim is made up to half of its life after the lease, and should live a whole one, also
        // if the next lease comes late.
        let ttl = i64::try_from((self.ttl * 2).as_secs()).unwrap_or(i64::MAX).max(1);
        let request = with_token(LeaseGrantRequest { ttl }, token.as_ref());
        let lease = LeaseClient::new(channel.clone()).lease_grant(request).await;
        let lease = lease.map_err(|status| failed(&status))?.into_inner();
        if !lease.error.is_empty() {
            return Err(Error::Failed(lease.error));
        }
        Ok(Leased { channel, token, lease: lease.id })
    }
}

fn with_token<T>(message: T, token: Option<&MetadataValue<Ascii>>) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(token) = token {
        request.metadata_mut().insert("token", token.clone());
    }
    request
}

fn failed(status: &Status) -> Error {
    Error::Failed(format!("{:?}: {}", status.code(), status.message()))
}

/// `None` if the transaction failed because there is no claim.
fn read_answer(answer: TxnResponse, wanted: &WorkerId) -> Result<Option<PlacementClaim>, Error> {
    let generation = |revision: i64| {
        let generation = u64::try_from(revision).ok().filter(|&generation| generation > 0);
        generation.ok_or_else(|| Error::Unreadable(format!("revision {revision}")))
    };
    if answer.succeeded {
        let revision = answer.header.map_or(0, |header| header.revision);
        let claim = PlacementClaim {
            worker: wanted.clone(),
            generation: generation(revision)?,
            is_granted: true,
        };
        return Ok(Some(claim));
    }
    let result = answer.responses.into_iter().next().and_then(|result| result.response);
    let Some(OperationResult::ResponseRange(range)) = result else {
        return Err(Error::Unreadable("an answer without the key".to_owned()));
    };
    let Some(KeyValue { value, mod_revision, .. }) = range.kvs.into_iter().next() else {
        return Ok(None);
    };
    // What isn't a claim is one of no agent, which the next first turn replaces. Anything else that
    // writes to the server would else keep a session from its first turn for as long as it lasts.
    let nobody = |_| WorkerId { agent: String::new(), dp_rank: 0 };
    let worker = read_worker(&String::from_utf8_lossy(&value)).unwrap_or_else(nobody);
    let generation = generation(mod_revision)?;
    Ok(Some(PlacementClaim { worker, generation, is_granted: false }))
}
