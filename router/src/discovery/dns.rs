//! Lists the agents that names of the Domain Name System stand for.
//!
//! A name stands for all addresses of a host, or for all targets of SRV records. A name without
//! records has no agents: that is what a headless service without ready pods answers. If a server
//! fails, the last answer stays.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    time::{Duration, Instant},
};

use hickory_resolver::{
    TokioResolver,
    config::{LookupIpStrategy, NameServerConfig, ResolverConfig},
    net::{DnsError, NetError, NoRecords, runtime::TokioRuntimeProvider},
    proto::{
        op::ResponseCode,
        rr::{RData, RecordType},
    },
};
use service::{clock::now, log::describe_error};

use super::Reporter;
use crate::{
    config::discovery::{DnsName, DnsTable},
    fleet::membership::{Listing, SourceList},
};

const ANSWER_TIME_MAX: Duration = Duration::from_secs(2);
const TRIES_MAX: usize = 2;

#[derive(Debug, Clone, Default)]
struct Answer {
    urls: Vec<String>,
    /// `None`: the answer had no time to live.
    valid_until: Option<Instant>,
}

pub(super) async fn run(settings: DnsTable, mut reporter: Reporter) {
    // The check of the settings has refused others.
    let names: Vec<DnsName> =
        settings.names.iter().filter_map(|name| DnsName::parse(name).ok()).collect();
    let ttl_min = Duration::from_millis(settings.ttl_ms_min);
    let ttl_max = Duration::from_millis(settings.ttl_ms_max);
    let mut answers: BTreeMap<usize, Answer> = BTreeMap::new();
    loop {
        let (mut next_at, mut failure) = (now() + ttl_max, None);
        match build_resolver(&settings) {
            Err(why) => failure = Some(why),
            Ok(resolver) => {
                for (index, name) in names.iter().enumerate() {
                    match look_up(&resolver, name).await {
                        Ok(answer) => {
                            let valid_until = answer.valid_until.unwrap_or_else(now);
                            next_at = next_at.min(valid_until);
                            answers.insert(index, answer);
                        }
                        Err(why) => failure = Some(format!("{}: {why}", settings.names[index])),
                    }
                }
            }
        }
        let urls = answers.values().flat_map(|answer| &answer.urls);
        let list: SourceList = urls.map(|url| (url.clone(), Listing::Serving)).collect();
        let has_failed = failure.is_some();
        // A list without a name that was never answered would let its agents leave.
        if !has_failed || answers.len() == names.len() {
            reporter.list(list).await;
        }
        if let Some(why) = failure {
            reporter.fail(why).await;
            next_at = now();
        }
        tokio::time::sleep_until(next_at.max(now() + ttl_min).into()).await;
    }
}

/// Without a cache: this module keeps the answers itself. The system's settings may change, so each
/// round has a resolver of its own.
fn build_resolver(settings: &DnsTable) -> Result<TokioResolver, String> {
    let mut builder = if settings.servers.is_empty() {
        TokioResolver::builder_tokio().map_err(|error| describe_error(&error))?
    } else {
        let servers = settings.servers.iter().map(|server| {
            let mut config = NameServerConfig::udp_and_tcp(server.ip());
            config.connections.iter_mut().for_each(|way| way.port = server.port());
            config
        });
        let config = ResolverConfig::from_parts(None, vec![], servers.collect());
        TokioResolver::builder_with_config(config, TokioRuntimeProvider::default())
    };
    let options = builder.options_mut();
    options.cache_size = 0;
    options.timeout = ANSWER_TIME_MAX;
    options.attempts = TRIES_MAX;
    options.ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
    builder.build().map_err(|error| describe_error(&error))
}

async fn look_up(resolver: &TokioResolver, name: &DnsName) -> Result<Answer, String> {
    match name {
        DnsName::Host { scheme, host, port } => {
            let (addresses, valid_until) = addresses_of(resolver, host).await?;
            let urls = addresses.iter().map(|ip| control_url(scheme, *ip, *port));
            Ok(Answer { urls: urls.collect(), valid_until })
        }
        DnsName::Service { scheme, name } => {
            let records = match resolver.lookup(name.as_str(), RecordType::SRV).await {
                Ok(records) => records,
                Err(error) if is_without_records(&error) => return Ok(Answer::default()),
                Err(error) => return Err(describe_error(&error)),
            };
            let mut answer = Answer { urls: vec![], valid_until: Some(records.valid_until()) };
            for record in records.answers() {
                let RData::SRV(srv) = &record.data else { continue };
                let (addresses, valid_until) =
                    addresses_of(resolver, &srv.target.to_utf8()).await?;
                answer.valid_until = answer.valid_until.min(valid_until);
                let urls = addresses.iter().map(|ip| control_url(scheme, *ip, srv.port));
                answer.urls.extend(urls);
            }
            Ok(answer)
        }
    }
}

/// Returns also the time until which the addresses are valid.
async fn addresses_of(
    resolver: &TokioResolver,
    host: &str,
) -> Result<(Vec<IpAddr>, Option<Instant>), String> {
    match resolver.lookup_ip(host).await {
        Ok(found) => Ok((found.iter().collect(), Some(found.valid_until()))),
        Err(error) if is_without_records(&error) => Ok((vec![], None)),
        Err(error) => Err(describe_error(&error)),
    }
}

/// Whether the servers said that the name has no records.
fn is_without_records(error: &NetError) -> bool {
    let NetError::Dns(DnsError::NoRecordsFound(NoRecords { response_code, .. })) = error else {
        return false;
    };
    matches!(response_code, ResponseCode::NXDomain | ResponseCode::NoError)
}

pub(super) fn control_url(scheme: &str, ip: IpAddr, port: u16) -> String {
    match ip {
        IpAddr::V4(ip) => format!("{scheme}://{ip}:{port}"),
        IpAddr::V6(ip) => format!("{scheme}://[{ip}]:{port}"),
    }
}
