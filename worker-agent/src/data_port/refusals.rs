//! Maps the errors of a turn to HTTP refusals for its client.

use http::StatusCode;
use service::{
    clock::now,
    descriptors, http_client,
    refusal::{Code, Refusal},
};
use tracing::warn;

use super::router_auth::Caller;
use crate::{owner, session};

/// The control port uses this mapping too.
#[must_use]
pub fn refusal(error: &owner::Error) -> Refusal {
    use session::Error as E;
    let code = match error {
        owner::Error::Session(session_error) => match session_error {
            E::UnknownSession => {
                let message = "there is no such session; open it first";
                return Refusal::new(Code::SessionUnknown, message);
            }
            E::Closing => Code::SessionClosing,
            E::Busy | E::NotAtRest => Code::SessionBusy,
            E::NotPinned(_) => Code::SessionNotPinned,
            E::DemotionUnavailable | E::DemotionRefused => Code::DemotionUnavailable,
            E::PrefetchShare { .. } => Code::PrefetchShare,
            E::PrefetchNoRoom(_) => Code::PrefetchNoRoom,
            E::PrefetchUnavailable(_) => Code::PrefetchUnavailable,
            E::RetentionUnavailable { .. } => Code::RetentionUnavailable,
            E::HasHistory => Code::SessionOpen,
            E::PredecessorFailed => Code::TurnBeforeFailed,
            E::OpenWithOtherRetention(_) => Code::SessionOpenOtherwise,
            E::DeltaNeedsPinned(_) => Code::DeltaNeedsPinned,
            E::PinnedRouteRefused | E::NotContinued { .. } => Code::WholeHistory,
            E::DeltaNeedsOpen => Code::DeltaNeedsOpen,
            E::Lost | E::NotTakenOver => Code::SessionLost,
            E::HistoryUnknown => Code::HistoryUnknown,
            E::Reclaimed => Code::SessionReclaimed,
            E::KvCorrupt => Code::KvCorrupt,
            E::WeightsChanged | E::CacheOutdated => Code::WeightsChanged,
            E::AdapterChanged => Code::AdapterChanged,
            E::OtherKv => Code::OtherKv,
            E::EngineHeld(_) => Code::EngineHeld,
            E::TooLarge { .. } => Code::TurnTooLarge,
            E::BatchOverShare { .. } => Code::BatchOverShare,
            E::OpenFailed(_) => Code::OpenFailed,
            E::JournalFailed(_) => Code::JournalFailed,
            E::EngineSilent(_) => Code::EngineSilent,
            E::EngineLost => Code::EngineLost,
            E::Stopping => Code::Stopping,
            E::OutOfRoom { resource, wait: Some(wait), .. } => {
                return Refusal::new(*resource, error.to_string()).retry_after(*wait);
            }
            E::OutOfRoom { resource, wait: None, .. } => *resource,
            E::NoRank(_) => Code::NoRank,
        },
        owner::Error::EngineDown { since, .. } => {
            let outage = now().saturating_duration_since(*since);
            return Refusal::new(Code::EngineDown, error.to_string()).retry_in_outage(outage);
        }
        owner::Error::Stopping => Code::Stopping,
        owner::Error::EngineBusy => Code::EngineBusy,
    };
    Refusal::new(code, error.to_string())
}

pub(super) fn connection_refusal(error: &http_client::Error) -> Refusal {
    warn!(error = error as &dyn std::error::Error, "engine unreachable");
    if error.is_connect() && descriptors::is_shortage(error) {
        let message =
            "this agent has no file descriptor left for a connection to its engine; try again";
        return Refusal::new(Code::AgentDescriptors, message);
    }
    if error.is_connect() {
        return Refusal::new(Code::EngineDown, "the engine accepts no connections; try again");
    }
    let message = "the engine closed the connection before its answer began; the turn may have \
                   run, so check before you send it again";
    Refusal::new(Code::EngineBrokeOff, message)
}

/// The engine's own words don't say whose credential it refused.
pub(super) fn engine_key_refusal(status: StatusCode, caller: Caller) -> Option<Refusal> {
    if status != StatusCode::UNAUTHORIZED {
        return None;
    }
    let message = match caller {
        Caller::Router => {
            "the engine refuses the agent's key; an operator sets the agent's BERTH_ENGINE_API_KEY \
             to the engine's --api-key"
        }
        Caller::Local => {
            "the engine wants its API key, and this agent adds it only for routers that prove \
             themselves; an operator sets auth.token_file of the agent and agents.token_file of \
             the router, or send the engine's key to a router that has no keys itself"
        }
    };
    Some(Refusal::new(Code::EngineKey, message))
}

#[cfg(test)]
mod tests {
    use std::{net::Ipv4Addr, time::Duration};

    use bytes::Bytes;
    use contract::load::Retention;
    use http::Request;
    use http_body_util::Full;
    use hyper_util::client::legacy::connect::HttpConnector;
    use service::http_client::{HttpClient, IdleLimits};
    use session::Error as E;

    use super::*;

    #[test]
    fn every_error_of_the_session_table_has_a_code() {
        let short = |resource| E::OutOfRoom { resource, detail: "none left".into(), wait: None };
        let cases = [
            (E::UnknownSession, Code::SessionUnknown),
            (E::Closing, Code::SessionClosing),
            (E::Busy, Code::SessionBusy),
            (E::NotAtRest, Code::SessionBusy),
            (E::NotPinned(Retention::Tagged), Code::SessionNotPinned),
            (E::DemotionUnavailable, Code::DemotionUnavailable),
            (E::DemotionRefused, Code::DemotionUnavailable),
            (E::HasHistory, Code::SessionOpen),
            (E::PredecessorFailed, Code::TurnBeforeFailed),
            (E::OpenWithOtherRetention(Retention::Tagged), Code::SessionOpenOtherwise),
            (E::DeltaNeedsPinned(Retention::Tagged), Code::DeltaNeedsPinned),
            (E::PinnedRouteRefused, Code::WholeHistory),
            (E::NotContinued { detail: "differs".into() }, Code::WholeHistory),
            (E::DeltaNeedsOpen, Code::DeltaNeedsOpen),
            (E::Lost, Code::SessionLost),
            (E::HistoryUnknown, Code::HistoryUnknown),
            (E::Reclaimed, Code::SessionReclaimed),
            (E::KvCorrupt, Code::KvCorrupt),
            (E::WeightsChanged, Code::WeightsChanged),
            (E::CacheOutdated, Code::WeightsChanged),
            (E::AdapterChanged, Code::AdapterChanged),
            (E::OtherKv, Code::OtherKv),
            (E::EngineHeld("paused".into()), Code::EngineHeld),
            (E::TooLarge { tokens_needed: 2, tokens_max: 1 }, Code::TurnTooLarge),
            (E::BatchOverShare { sequences: 2, sequences_max: 1 }, Code::BatchOverShare),
            (E::OpenFailed("no".into()), Code::OpenFailed),
            (E::NotTakenOver, Code::SessionLost),
            (E::JournalFailed("disk full".into()), Code::JournalFailed),
            (E::EngineSilent("it hangs".into()), Code::EngineSilent),
            (E::EngineLost, Code::EngineLost),
            (E::Stopping, Code::Stopping),
            (short(Code::Sessions), Code::Sessions),
            (short(Code::QueueShare), Code::QueueShare),
            (short(Code::PrincipalSessions), Code::PrincipalSessions),
            (short(Code::Turns), Code::Turns),
            (E::NoRank(7), Code::NoRank),
        ];
        for (error, code) in cases {
            let refusal = refusal(&owner::Error::Session(error));
            assert_eq!(refusal.code, code);
            assert!(!refusal.message.is_empty());
        }
    }

    /// Returns the error of a connection for which this host has no port. An address that the host
    /// doesn't have stands for the shortage.
    async fn shortage() -> http_client::Error {
        let mut connector = HttpConnector::new();
        connector.set_local_address(Some(Ipv4Addr::new(203, 0, 113, 1).into()));
        let limits = IdleLimits { time_max: Duration::ZERO, per_host_max: 0 };
        let client = HttpClient::new(connector, limits);
        let request = Request::get("http://127.0.0.1:9/").body(Full::<Bytes>::default()).unwrap();
        client.request(request).await.unwrap_err()
    }

    #[tokio::test]
    async fn an_agent_without_descriptors_does_not_blame_the_engine() {
        assert_eq!(connection_refusal(&shortage().await).code, Code::AgentDescriptors);
    }
}
