//! Has Redis hold the claims: each is a key, changed by one script.
//!
//! Redis runs a script as one step, so it is the compare-and-set. Generations are Redis' time in
//! microseconds, raised where the clock has gone back, so they grow even after a key has expired.

use std::{sync::Arc, time::Duration};

use contract::placement_claim::{PlacementClaim, PlacementClaimRequest};
use http::Uri;
use hyper_util::{client::legacy::connect::HttpConnector, rt::TokioIo};
use redis::{
    AsyncConnectionConfig, RedisConnectionInfo, RedisError, Script, aio::MultiplexedConnection,
};
use service::{
    log::describe_error,
    tasks::Tasks,
    tls::{
        Protocol,
        client::{ClientTls, Connector},
    },
};
use tonic::async_trait;
use tower::ServiceExt as _;

use super::{
    SetupError,
    connection::{CONNECT_TIME_MAX, Connect, Current, keep_connected, spawn_until_stopped},
    store::{ClaimStore, Error, hex, read_worker},
};
use crate::config::claims::ClaimsTable;

/// Arguments: the expected generation or an empty text, the worker, and the time to live in ms.
/// Answer: the generation and the worker of the claim that holds, and 1 if it was granted.
///
/// What isn't a claim counts as none, and is replaced: anything else that writes to the server
/// would else keep a session from its first turn for ever. A generation has 16 digits until 2286.
const SCRIPT: &str = "\
local held = redis.pcall('GET', KEYS[1])
local generation, worker = '', ''
if type(held) == 'table' and held.err and not string.find(held.err, 'WRONGTYPE') then
  return held
end
if type(held) == 'string' then
  local found, text = string.match(held, '^(%d+) (%d+ .+)$')
  if found and #found <= 16 and #string.match(text, '^%d+') <= 9 then
    generation, worker = found, text
    if generation ~= ARGV[1] then return {generation, worker, 0} end
  end
end
if worker ~= ARGV[2] then
  local time = redis.call('TIME')
  local micros = time[1] * 1000000 + time[2]
  local before = tonumber(generation) or 0
  if micros <= before then micros = before + 1 end
  generation = string.format('%.0f', micros)
end
redis.call('SET', KEYS[1], generation .. ' ' .. ARGV[2], 'PX', ARGV[3])
return {generation, ARGV[2], 1}";

/// A server whose address has changed is found after that.
const AGE_MAX: Duration = Duration::from_secs(300);

#[derive(Debug)]
pub(super) struct RedisStore {
    current: Arc<Current<MultiplexedConnection>>,
    script: Script,
    prefix: String,
}

/// Claims share one connection, which passes on their commands side by side.
struct RedisConnect {
    connector: Connector,
    /// The database, the user and the password.
    info: RedisConnectionInfo,
    tasks: Tasks,
}

impl RedisStore {
    pub(super) fn open(
        settings: &ClaimsTable,
        tls: Option<ClientTls>,
        tasks: &Tasks,
    ) -> Result<Self, SetupError> {
        let url = settings.urls.first().map_or("", String::as_str);
        let invalid = || SetupError::Url(url.to_owned());
        let address = url.replacen("rediss://", "https://", 1).replacen("redis://", "http://", 1);
        let uri: Uri = address.parse().map_err(|_| invalid())?;
        let mut info = RedisConnectionInfo::default().set_skip_set_lib_name();
        let database = uri.path().trim_start_matches('/');
        if !database.is_empty() {
            info = info.set_db(database.parse().map_err(|_| invalid())?);
        }
        if let Some(password) = settings.password()? {
            info = info.set_password(password);
        }
        if !settings.user.is_empty() {
            info = info.set_username(&settings.user);
        }
        let connector =
            Connector::new(HttpConnector::new(), tls, Protocol::Http1, CONNECT_TIME_MAX);
        let current = Arc::default();
        let maker = RedisConnect { connector, info, tasks: tasks.clone() };
        let keep = keep_connected(maker, Arc::clone(&current), vec![address], AGE_MAX);
        spawn_until_stopped(tasks, keep);
        Ok(Self { current, script: Script::new(SCRIPT), prefix: settings.prefix.clone() })
    }

    async fn call(&self, request: PlacementClaimRequest) -> Result<PlacementClaim, Error> {
        let mut connection = MultiplexedConnection::clone(&*self.current.get()?);
        let expected = request.expected.map(|expected| expected.to_string()).unwrap_or_default();
        let mut call = self.script.key(format!("{}:claims:{}", self.prefix, hex(request.key)));
        call.arg(expected)
            .arg(format!("{} {}", request.wanted.dp_rank, request.wanted.agent))
            .arg(request.ttl.as_millis().to_string());
        let answer: Result<(u64, String, bool), _> = call.invoke_async(&mut connection).await;
        let (generation, worker, is_granted) = answer.map_err(|error| failed(&error))?;
        Ok(PlacementClaim { worker: read_worker(&worker)?, generation, is_granted })
    }
}

#[async_trait]
impl ClaimStore for RedisStore {
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

#[async_trait]
impl Connect for RedisConnect {
    type Connection = MultiplexedConnection;

    async fn connect(&self, url: &str) -> Result<MultiplexedConnection, Error> {
        let uri: Uri = url.parse().map_err(|_| Error::Failed(format!("{url} is no URL")))?;
        let connecting = self.connector.clone().oneshot(uri);
        let stream = connecting.await.map_err(|error| Error::Failed(describe_error(&*error)))?;
        // Each claim has a deadline of its own.
        let settings = AsyncConnectionConfig::new().set_response_timeout(None);
        let stream = TokioIo::new(stream);
        let made = MultiplexedConnection::new_with_config(&self.info, stream, settings).await;
        let (connection, driver) = made.map_err(|error| failed(&error))?;
        // It ends with the last clone of the connection.
        spawn_until_stopped(&self.tasks, driver);
        Ok(connection)
    }
}

fn failed(error: &RedisError) -> Error {
    Error::Failed(describe_error(error))
}
