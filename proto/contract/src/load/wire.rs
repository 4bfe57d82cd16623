//! Converts an agent's reports between the domain types of `load` and the wire format.
//!
//! `TryFrom` rejects impossible values, such as a part that is larger than its whole. `From` can't
//! fail.

mod device;
mod figure;

use std::time::Duration;

use http::uri::Authority;

use self::figure::read_figure;
use super::{
    Description, Device, EngineFacts, Error, Figure, HostTier, KvTransfer, LoadReport, ModelFiles,
    PageAudit, PromptPlace, PromptRole, Rank, RankLoad, Retention, RetentionOff, Session,
    SessionState, Source, StagedPrefill, VolatilePrefix, Weights,
    bounds::{
        DEVICES_MAX, NAMES_MAX, check_figure, check_length, check_rank_order, check_turns,
        impossible,
    },
};
use crate::{id::Digest, v1};

/// Variants with the same name match. `$field` is the name in error messages; `$unsent` is never
/// sent.
macro_rules! wire_enum {
    ($domain:ident, $field:literal, $($variant:ident),+ $(; $unsent:ident)?) => {
        impl From<$domain> for v1::$domain {
            fn from(value: $domain) -> Self {
                match value {
                    $($domain::$variant => Self::$variant,)+
                    $($domain::$unsent => Self::Unspecified,)?
                }
            }
        }

        impl $domain {
            /// Fails if the number is unspecified or unknown.
            pub fn from_wire(value: i32) -> Result<Self, Error> {
                match v1::$domain::try_from(value) {
                    $(Ok(v1::$domain::$variant) => Ok(Self::$variant),)+
                    _ => Err(Error::Unknown { field: $field, value }),
                }
            }

            #[must_use]
            pub fn to_wire(self) -> i32 {
                v1::$domain::from(self) as i32
            }
        }
    };
}

wire_enum!(Retention, "retention", None, Tagged, Pinned);
wire_enum!(SessionState, "state", Opening, Idle, Running, Closing, Lost, Demoted);
wire_enum!(
    PromptRole,
    "role",
    System,
    Developer,
    User,
    Assistant,
    Tool,
    Instructions,
    Tools,
    Other
);
wire_enum!(
    Source,
    "source",
    Usage,
    Loads,
    ServerInfo,
    Ledger,
    Estimate,
    Shim,
    Nvml,
    Setting;
    Unknown
);

fn read_devices(wire: Vec<v1::Device>) -> Result<Vec<Device>, Error> {
    check_length("the number of devices", wire.len(), DEVICES_MAX)?;
    wire.into_iter().map(Device::try_from).collect()
}

impl TryFrom<v1::EngineFacts> for EngineFacts {
    type Error = Error;

    fn try_from(wire: v1::EngineFacts) -> Result<Self, Error> {
        if wire.models.is_empty() {
            return Err(Error::Missing("engine.models"));
        }
        if wire.page_tokens == 0 {
            return Err(impossible("page_tokens", 0_u32));
        }
        let adapters = wire.adapters.as_ref().map_or(0, |adapters| adapters.names.len());
        check_length("the number of models", wire.models.len(), NAMES_MAX)?;
        check_length("the number of adapters", adapters, NAMES_MAX)?;
        Ok(Self {
            version: wire.version,
            models: wire.models,
            page_tokens: wire.page_tokens,
            context_tokens: wire.context_tokens,
            vocabulary: (wire.vocabulary > 0).then_some(wire.vocabulary),
            streaming_sessions: wire.streaming_sessions,
            radix_sessions: wire.radix_sessions,
            instance: wire.instance,
            disaggregation: wire.disaggregation,
            shortens_prompts: wire.shortens_prompts,
            adapters: wire.adapters.map(|adapters| adapters.names),
            transfer: wire.transfer.map(KvTransfer::try_from).transpose()?,
        })
    }
}

impl From<EngineFacts> for v1::EngineFacts {
    fn from(facts: EngineFacts) -> Self {
        Self {
            version: facts.version,
            models: facts.models,
            page_tokens: facts.page_tokens,
            context_tokens: facts.context_tokens,
            vocabulary: facts.vocabulary.unwrap_or(0),
            streaming_sessions: facts.streaming_sessions,
            radix_sessions: facts.radix_sessions,
            instance: facts.instance,
            disaggregation: facts.disaggregation,
            shortens_prompts: facts.shortens_prompts,
            adapters: facts.adapters.map(|names| v1::Adapters { names }),
            transfer: facts.transfer.map(Into::into),
        }
    }
}

impl TryFrom<v1::Rank> for Rank {
    type Error = Error;

    fn try_from(wire: v1::Rank) -> Result<Self, Error> {
        if wire.rows == 0 {
            return Err(impossible("rows", 0_u32));
        }
        check_turns("rows", wire.rows)?;
        check_figure("pool_tokens", wire.pool_tokens)?;
        Ok(Self {
            dp_rank: wire.dp_rank,
            pool_tokens: wire.pool_tokens,
            rows: wire.rows,
            devices: read_devices(wire.devices)?,
        })
    }
}

impl From<Rank> for v1::Rank {
    fn from(rank: Rank) -> Self {
        Self {
            dp_rank: rank.dp_rank,
            pool_tokens: rank.pool_tokens,
            rows: rank.rows,
            devices: rank.devices.into_iter().map(Into::into).collect(),
        }
    }
}

impl TryFrom<v1::ModelFiles> for ModelFiles {
    type Error = Error;

    fn try_from(wire: v1::ModelFiles) -> Result<Self, Error> {
        let hash = wire.hash.try_into().map_err(|_| Error::Missing("model_files.hash"))?;
        Ok(Self { hash, bytes: wire.bytes })
    }
}

impl From<ModelFiles> for v1::ModelFiles {
    fn from(files: ModelFiles) -> Self {
        Self { hash: files.hash.to_vec(), bytes: files.bytes }
    }
}

/// An empty address is absent. Others are a host and a port, after a scheme if there is a
/// `separator`.
fn read_address(
    field: &'static str,
    value: String,
    separator: &str,
) -> Result<Option<String>, Error> {
    if value.is_empty() {
        return Ok(None);
    }
    let authority = match separator {
        "" => Some(value.as_str()),
        separator => value.split_once(separator).map(|(_, authority)| authority),
    };
    let authority = authority.and_then(|text| text.parse::<Authority>().ok());
    let is_address = authority.is_some_and(|authority| {
        // User and password would hide the host from people who read it.
        !authority.as_str().contains('@') && authority.port_u16().is_some_and(|port| port > 0)
    });
    if is_address { Ok(Some(value)) } else { Err(Error::Address { field, value }) }
}

impl TryFrom<v1::Description> for Description {
    type Error = Error;

    fn try_from(wire: v1::Description) -> Result<Self, Error> {
        if wire.agent_id.is_empty() {
            return Err(Error::Missing("agent_id"));
        }
        let data_port = u16::try_from(wire.data_port)
            .ok()
            .filter(|&port| port > 0)
            .ok_or_else(|| impossible("data_port", wire.data_port))?;
        check_rank_order(wire.ranks.iter().map(|rank| rank.dp_rank))?;
        for (field, length) in [
            ("the number of retentions", wire.retentions.len()),
            ("the number of retentions that are off", wire.retentions_off.len()),
            ("the number of SGLang versions", wire.trims.len()),
            ("the number of functions that are off", wire.shim_functions_off.len()),
        ] {
            check_length(field, length, NAMES_MAX)?;
        }
        Ok(Self {
            agent_id: wire.agent_id,
            epoch: wire.epoch,
            data_port,
            data_address: read_address("data_address", wire.data_address, "")?,
            control_url: read_address("control_url", wire.control_url, "://")?,
            data_tls: wire.data_tls,
            engine: wire.engine.ok_or(Error::Missing("engine"))?.try_into()?,
            ranks: wire.ranks.into_iter().map(Rank::try_from).collect::<Result<_, _>>()?,
            retentions: wire
                .retentions
                .into_iter()
                .map(Retention::from_wire)
                .collect::<Result<_, _>>()?,
            retentions_off: wire
                .retentions_off
                .into_iter()
                .map(RetentionOff::try_from)
                .collect::<Result<_, _>>()?,
            turns_queued_per_session_max: wire.turns_queued_per_session_max,
            model_files: wire.model_files.map(ModelFiles::try_from).transpose()?,
            trim_sglang_versions: wire.trims,
            shim_functions_off: wire.shim_functions_off.into_iter().map(Into::into).collect(),
        })
    }
}

impl From<Description> for v1::Description {
    fn from(description: Description) -> Self {
        Self {
            agent_id: description.agent_id,
            epoch: description.epoch,
            data_port: u32::from(description.data_port),
            data_address: description.data_address.unwrap_or_default(),
            control_url: description.control_url.unwrap_or_default(),
            data_tls: description.data_tls,
            engine: Some(description.engine.into()),
            ranks: description.ranks.into_iter().map(Into::into).collect(),
            retentions: description.retentions.into_iter().map(Retention::to_wire).collect(),
            retentions_off: description.retentions_off.into_iter().map(Into::into).collect(),
            turns_queued_per_session_max: description.turns_queued_per_session_max,
            model_files: description.model_files.map(Into::into),
            trims: description.trim_sglang_versions,
            shim_functions_off: description
                .shim_functions_off
                .into_iter()
                .map(Into::into)
                .collect(),
        }
    }
}

impl TryFrom<v1::Session> for Session {
    type Error = Error;

    fn try_from(wire: v1::Session) -> Result<Self, Error> {
        check_turns("turns_running", wire.turns_running)?;
        if wire.exclusive && wire.turns_running > 1 {
            return Err(impossible("turns_running", wire.turns_running));
        }
        Ok(Self {
            key: wire.key.ok_or(Error::Missing("session key"))?.try_into()?,
            retention: Retention::from_wire(wire.retention)?,
            state: SessionState::from_wire(wire.state)?,
            dp_rank: wire.dp_rank,
            turns: wire.turns,
            turns_running: wire.turns_running,
            exclusive: wire.exclusive,
            resident_tokens: read_figure(wire.resident_tokens)?,
            idle: Duration::from_millis(wire.idle_ms),
            full_history: wire.whole_history,
            volatile_prefix: wire.volatile_prefix.map(Into::into),
            began_unix_ms: wire.began_unix_ms,
            parent: wire.parent.map(Digest),
        })
    }
}

impl From<Session> for v1::Session {
    fn from(session: Session) -> Self {
        Self {
            key: Some((&session.key).into()),
            retention: session.retention.to_wire(),
            state: session.state.to_wire(),
            dp_rank: session.dp_rank,
            turns: session.turns,
            turns_running: session.turns_running,
            exclusive: session.exclusive,
            resident_tokens: session.resident_tokens.map(Into::into),
            idle_ms: u64::try_from(session.idle.as_millis()).unwrap_or(u64::MAX),
            whole_history: session.full_history,
            volatile_prefix: session.volatile_prefix.map(Into::into),
            began_unix_ms: session.began_unix_ms,
            was_open: false,
            parent: session.parent.map(|parent| parent.0),
        }
    }
}

impl From<v1::VolatilePrefix> for VolatilePrefix {
    fn from(wire: v1::VolatilePrefix) -> Self {
        let place = wire.place.map(|place| PromptPlace {
            // A newer agent may send a role that this router doesn't know. The session must stay
            // readable.
            role: PromptRole::from_wire(place.role).unwrap_or(PromptRole::Other),
            message: place.message,
            block: place.block,
        });
        Self { token_index: wire.token_index, place, turns: wire.turns }
    }
}

impl From<VolatilePrefix> for v1::VolatilePrefix {
    fn from(prefix: VolatilePrefix) -> Self {
        let place = prefix.place.map(|place| v1::PromptPlace {
            role: place.role.to_wire(),
            message: place.message,
            block: place.block,
        });
        Self { token_index: prefix.token_index, place, turns: prefix.turns }
    }
}

impl TryFrom<v1::HostTier> for HostTier {
    type Error = Error;

    fn try_from(wire: v1::HostTier) -> Result<Self, Error> {
        let host = Self {
            total_tokens: read_figure(wire.total_tokens)?,
            used_tokens: read_figure(wire.used_tokens)?,
            evictable_tokens: read_figure(wire.evictable_tokens)?,
            loading_tokens: read_figure(wire.loading_tokens)?,
            writing_tokens: read_figure(wire.writing_tokens)?,
            load_tokens_per_s: read_figure(wire.load_tokens_per_s)?,
        };
        if host.load_tokens_per_s.is_some_and(|rate| rate.value == 0) {
            return Err(impossible("the host's load_tokens_per_s", 0_u32));
        }
        check_at_most("the host's used_tokens", host.used_tokens, host.total_tokens)?;
        check_at_most("the host's evictable_tokens", host.evictable_tokens, host.used_tokens)?;
        Ok(host)
    }
}

impl From<HostTier> for v1::HostTier {
    fn from(host: HostTier) -> Self {
        Self {
            total_tokens: host.total_tokens.map(Into::into),
            used_tokens: host.used_tokens.map(Into::into),
            evictable_tokens: host.evictable_tokens.map(Into::into),
            loading_tokens: host.loading_tokens.map(Into::into),
            writing_tokens: host.writing_tokens.map(Into::into),
            load_tokens_per_s: host.load_tokens_per_s.map(Into::into),
        }
    }
}

impl TryFrom<v1::RankLoad> for RankLoad {
    type Error = Error;

    fn try_from(wire: v1::RankLoad) -> Result<Self, Error> {
        let load = Self {
            dp_rank: wire.dp_rank,
            turns_running: wire.turns_running,
            turns_running_max: wire.turns_running_max,
            requests_running: read_figure(wire.requests_running)?,
            requests_waiting: read_figure(wire.requests_waiting)?,
            pool_used_tokens: read_figure(wire.pool_used_tokens)?,
            pool_total_tokens: read_figure(wire.pool_total_tokens)?,
            pinned_tokens: read_figure(wire.pinned_tokens)?,
            resident_tokens_estimate: read_figure(wire.resident_tokens_estimate)?,
            rows_held: read_figure(wire.rows_held)?,
            rows_total: read_figure(wire.rows_total)?,
            sessions: wire.sessions,
            devices: read_devices(wire.devices)?,
            turns_queued: wire.turns_queued,
            pool_available_tokens: read_figure(wire.pool_available_tokens)?,
            pool_evictable_tokens: read_figure(wire.pool_evictable_tokens)?,
            foreign_tokens: read_figure(wire.foreign_tokens)?,
            pages: wire.pages.map(PageAudit::try_from).transpose()?,
            prefill_tokens_per_s: read_figure(wire.prefill_tokens_per_s)?,
            prefill_backlog_tokens: read_figure(wire.prefill_backlog_tokens)?,
            staged_prefill: wire.staged_prefill.map(
                |v1::StagedPrefill { tokens, prompts, stage_tokens }| StagedPrefill {
                    tokens,
                    prompts,
                    stage_tokens,
                },
            ),
            host: wire.host.map(HostTier::try_from).transpose()?,
        };
        for (field, count) in [
            ("turns_running", load.turns_running),
            ("turns_running_max", load.turns_running_max),
            ("sessions", load.sessions),
            ("turns_queued", load.turns_queued),
        ] {
            check_turns(field, count)?;
        }
        if let Some(staged_prefill) = load.staged_prefill {
            check_figure("the tokens of staged prefills", staged_prefill.tokens)?;
        }
        if load.prefill_tokens_per_s.is_some_and(|rate| rate.value == 0) {
            return Err(impossible("prefill_tokens_per_s", 0_u32));
        }
        if load.staged_prefill.is_some_and(|staged_prefill| staged_prefill.stage_tokens == 0) {
            return Err(impossible("stage_tokens", 0_u32));
        }
        check_at_most("pool_used_tokens", load.pool_used_tokens, load.pool_total_tokens)?;
        check_at_most("pinned_tokens", load.pinned_tokens, load.pool_total_tokens)?;
        check_at_most("foreign_tokens", load.foreign_tokens, load.pinned_tokens)?;
        check_at_most("rows_held", load.rows_held, load.rows_total)?;
        Ok(load)
    }
}

fn check_at_most(
    field: &'static str,
    part: Option<Figure>,
    whole: Option<Figure>,
) -> Result<(), Error> {
    match (part, whole) {
        (Some(part), Some(whole)) if part.value > whole.value => Err(impossible(field, part.value)),
        _ => Ok(()),
    }
}

impl From<RankLoad> for v1::RankLoad {
    fn from(load: RankLoad) -> Self {
        Self {
            kv_physical_usage: load.kv_physical_usage().map(Into::into),
            dp_rank: load.dp_rank,
            turns_running: load.turns_running,
            turns_running_max: load.turns_running_max,
            requests_running: load.requests_running.map(Into::into),
            requests_waiting: load.requests_waiting.map(Into::into),
            pool_used_tokens: load.pool_used_tokens.map(Into::into),
            pool_total_tokens: load.pool_total_tokens.map(Into::into),
            pinned_tokens: load.pinned_tokens.map(Into::into),
            resident_tokens_estimate: load.resident_tokens_estimate.map(Into::into),
            rows_held: load.rows_held.map(Into::into),
            rows_total: load.rows_total.map(Into::into),
            sessions: load.sessions,
            devices: load.devices.into_iter().map(Into::into).collect(),
            turns_queued: load.turns_queued,
            pool_available_tokens: load.pool_available_tokens.map(Into::into),
            pool_evictable_tokens: load.pool_evictable_tokens.map(Into::into),
            foreign_tokens: load.foreign_tokens.map(Into::into),
            pages: load.pages.map(Into::into),
            prefill_tokens_per_s: load.prefill_tokens_per_s.map(Into::into),
            prefill_backlog_tokens: load.prefill_backlog_tokens.map(Into::into),
            staged_prefill: load.staged_prefill.map(
                |StagedPrefill { tokens, prompts, stage_tokens }| v1::StagedPrefill {
                    tokens,
                    prompts,
                    stage_tokens,
                },
            ),
            host: load.host.map(Into::into),
        }
    }
}

impl TryFrom<v1::LoadReport> for LoadReport {
    type Error = Error;

    fn try_from(wire: v1::LoadReport) -> Result<Self, Error> {
        if wire.interval_ms == 0 {
            return Err(impossible("interval_ms", 0_u32));
        }
        check_rank_order(wire.ranks.iter().map(|rank| rank.dp_rank))?;
        Ok(Self {
            interval: Duration::from_millis(u64::from(wire.interval_ms)),
            ranks: wire.ranks.into_iter().map(RankLoad::try_from).collect::<Result<_, _>>()?,
            unhealthy: (!wire.unhealthy.is_empty()).then_some(wire.unhealthy),
            draining: wire.draining,
            restart_required: Some(wire.restart_required).filter(|reason| !reason.is_empty()),
            held: Some(wire.held).filter(|reason| !reason.is_empty()),
            weights: Weights::new(wire.weights_epoch, &wire.weights_label),
        })
    }
}

impl From<LoadReport> for v1::LoadReport {
    fn from(report: LoadReport) -> Self {
        Self {
            interval_ms: u32::try_from(report.interval.as_millis()).unwrap_or(u32::MAX),
            ranks: report.ranks.into_iter().map(Into::into).collect(),
            unhealthy: report.unhealthy.unwrap_or_default(),
            draining: report.draining,
            restart_required: report.restart_required.unwrap_or_default(),
            held: report.held.unwrap_or_default(),
            weights_epoch: report.weights.epoch,
            weights_label: report.weights.label,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(value: u64) -> Figure {
        Figure { value, source: Source::Loads, age_ms: 3 }
    }

    fn report() -> LoadReport {
        let rank = |dp_rank| RankLoad {
            dp_rank,
            turns_running: 1,
            turns_running_max: 64,
            requests_running: Some(tokens(1)),
            requests_waiting: None,
            pool_used_tokens: Some(tokens(100)),
            pool_total_tokens: Some(tokens(2048)),
            pinned_tokens: Some(tokens(32)),
            resident_tokens_estimate: None,
            rows_held: Some(tokens(1)),
            rows_total: Some(tokens(8)),
            sessions: 2,
            devices: vec![],
            turns_queued: 3,
            pool_available_tokens: Some(tokens(1900)),
            pool_evictable_tokens: None,
            foreign_tokens: Some(tokens(16)),
            pages: None,
            prefill_tokens_per_s: Some(tokens(20_000)),
            prefill_backlog_tokens: Some(tokens(0)),
            staged_prefill: (dp_rank == 0).then_some(StagedPrefill {
                tokens: 9,
                prompts: 2,
                stage_tokens: 4,
            }),
            host: (dp_rank == 1).then(|| HostTier {
                total_tokens: Some(tokens(4096)),
                used_tokens: Some(tokens(1000)),
                evictable_tokens: Some(tokens(900)),
                loading_tokens: Some(tokens(16)),
                writing_tokens: None,
                load_tokens_per_s: Some(tokens(250_000)),
            }),
        };
        LoadReport {
            interval: Duration::from_millis(500),
            ranks: vec![rank(0), rank(1)],
            unhealthy: None,
            draining: true,
            restart_required: Some("a session stays half closed".into()),
            held: Some("it is paused".into()),
            weights: Weights::new(3, "step-2"),
        }
    }

    #[test]
    fn a_report_survives_the_wire_and_absent_stays_absent() {
        let wire = v1::LoadReport::from(report());
        assert_eq!(LoadReport::try_from(wire).unwrap(), report());
    }

    /// Changes one thing in a valid report so that it becomes impossible.
    type Lie = fn(&mut v1::LoadReport);

    #[test]
    fn a_report_that_cannot_be_true_is_rejected() {
        let mutations: [(&str, Lie); 13] = [
            ("more ranks than any engine has", |r| {
                let rank = r.ranks[0].clone();
                let many = (0..=1024).map(|dp_rank| v1::RankLoad { dp_rank, ..rank.clone() });
                r.ranks = many.collect();
            }),
            ("more devices than any rank has", |r| {
                let device = v1::Device { uuid: "GPU-1".into(), ..Default::default() };
                r.ranks[0].devices = vec![device; 257];
            }),
            ("more tokens than any memory holds", |r| {
                r.ranks[0].prefill_backlog_tokens = Some(tokens(u64::MAX).into());
            }),
            ("more turns than any engine runs", |r| r.ranks[0].turns_running = u32::MAX),
            ("no interval", |r| r.interval_ms = 0),
            ("no ranks", |r| r.ranks.clear()),
            ("a rank twice", |r| r.ranks[1].dp_rank = 0),
            ("more used than there is", |r| {
                r.ranks[0].pool_used_tokens = Some(tokens(2049).into());
            }),
            ("more pinned than there is", |r| {
                r.ranks[0].pinned_tokens = Some(tokens(2049).into());
            }),
            ("more of others than is pinned", |r| {
                r.ranks[0].foreign_tokens = Some(tokens(33).into());
            }),
            ("more rows than there are", |r| r.ranks[1].rows_held = Some(tokens(9).into())),
            ("a figure without source", |r| {
                r.ranks[0].pinned_tokens = Some(v1::Figure { value: 1, source: 0, age_ms: 0 });
            }),
            ("a device busier than always", |r| {
                r.ranks[0].devices = vec![v1::Device {
                    uuid: "GPU-1".into(),
                    utilization_percent: Some(101),
                    ..Default::default()
                }];
            }),
        ];
        for (what, mutate) in mutations {
            let mut wire = v1::LoadReport::from(report());
            mutate(&mut wire);
            assert!(LoadReport::try_from(wire).is_err(), "{what} was taken");
        }
    }

    #[test]
    fn an_exclusive_session_runs_at_most_one_turn() {
        let wire = v1::Session {
            key: Some(v1::SessionKey { principal: "p".into(), id: "s".into() }),
            retention: Retention::Pinned.to_wire(),
            state: SessionState::Running.to_wire(),
            turns_running: 2,
            exclusive: true,
            ..Default::default()
        };
        assert!(Session::try_from(wire.clone()).is_err());
        assert!(Session::try_from(v1::Session { exclusive: false, ..wire }).is_ok());
    }

    #[test]
    fn a_volatile_prefix_survives_the_wire_and_an_unknown_role() {
        let place = PromptPlace { role: PromptRole::System, message: 0, block: 1 };
        let found = VolatilePrefix { token_index: Some(34), place: Some(place), turns: 3 };
        let mut wire = v1::VolatilePrefix::from(found);
        assert_eq!(VolatilePrefix::from(wire), found);
        wire.place.as_mut().expect("it was told").role = 99;
        let place = Some(PromptPlace { role: PromptRole::Other, ..place });
        assert_eq!(VolatilePrefix::from(wire), VolatilePrefix { place, ..found });
        let json = serde_json::to_value(found).expect("plain data");
        let shown = serde_json::json!({
            "token_index": 34, "role": "system", "message": 0, "block": 1, "turns": 3,
        });
        assert_eq!(json, shown);
    }
}
