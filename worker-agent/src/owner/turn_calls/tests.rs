//! Tests of turns without a session, at an owner task whose engine gets no calls.

use std::{
    pin::pin,
    sync::Arc,
    task::{Context, Waker},
    time::Duration,
};

use service::clock;

use super::*;
use crate::{
    Listeners,
    config::Config,
    engine::{BodyFacts, EngineInfo},
    gpu,
    owner::{AgentHandle, DrainState, Ending, EngineNews},
    session::{Need, PromptStart, RouteTurns},
};

struct Rig {
    agent: AgentHandle,
    _state: tempfile::TempDir,
}

impl Rig {
    fn start() -> Self {
        let (mut config, state) = (Config::default(), tempfile::tempdir().unwrap());
        let any_port = "127.0.0.1:0".parse().unwrap();
        config.listen.data_addr = any_port;
        config.listen.control_addr = any_port;
        config.listen.admin_addr = any_port;
        config.files.state_dir = state.path().to_owned();
        config.gpu.nvml_library = "no-nvml".into();
        (config.limits.turns_in_flight_max, config.limits.turns_queued_max) = (2, 1);
        let (gpus, listeners) = (gpu::start((&config).into()), Listeners::bind(&config));
        let (gpus, listeners) = (gpus.unwrap(), listeners.unwrap());
        let (engine, epoch) = (crate::engine_client(&config), clock::unix_ns());
        let (metrics, tasks) = Default::default();
        let started =
            crate::start_agent(&config, &gpus, &listeners, epoch, &engine, &metrics, &tasks);
        Self { agent: started.unwrap().0, _state: state }
    }

    async fn with_engine() -> Self {
        let rig = Self::start();
        rig.set_engine("first", 320).await;
        rig
    }

    async fn set_engine(&self, instance: &str, vocabulary: u32) {
        let mut info = Box::new(EngineInfo::example(instance));
        info.facts.vocabulary = Some(vocabulary);
        self.agent.report_engine(EngineNews::Up(info)).await;
        self.look().await;
    }

    /// Returns when the owner has handled all that was sent before.
    async fn look(&self) -> DrainState {
        // The state is that of the newest load report, which each change makes.
        let state = self.agent.set_drained(true).await.unwrap();
        self.agent.set_drained(false).await.unwrap();
        state
    }

    async fn send(&self, facts: Arc<BodyFacts>) -> Result<(TurnLease, Admission), Error> {
        let claim = ClaimRequest {
            principal: "p".into(),
            claim: None,
            is_hint: false,
            returns_soon: false,
            requested_rank: None,
            route_turns: RouteTurns::Nothing,
        };
        let need = Need { prompt_tokens: 8, answer_tokens: Some(8), ..Need::default() };
        let request = AdmissionRequest { need, prompt_start: PromptStart::default(), facts };
        self.agent.claim_and_admit(claim, request).await
    }

    fn facts(&self) -> Arc<BodyFacts> {
        self.agent.body_facts().unwrap()
    }

    async fn assert_empty(&self) {
        let DrainState { turns_running, turns_queued, .. } = self.look().await;
        assert_eq!((turns_running, turns_queued), (0, 0));
    }
}

#[tokio::test]
async fn a_turn_is_claimed_and_admitted_by_one_message() {
    let rig = Rig::with_engine().await;
    let (lease, admission) = rig.send(rig.facts()).await.unwrap();
    assert_eq!(admission.wait().await.unwrap().turn.session, None);
    assert_eq!(rig.look().await.turns_running, 1);
    drop(lease);
    rig.assert_empty().await;
}

#[tokio::test]
async fn a_client_that_goes_before_its_turn_is_claimed_leaves_no_place_taken() {
    let rig = Rig::with_engine().await;
    for is_handled in [false, true] {
        {
            let mut sending = pin!(rig.send(rig.facts()));
            let mut context = Context::from_waker(Waker::noop());
            assert!(sending.as_mut().poll(&mut context).is_pending(), "it is in the mailbox");
            if is_handled {
                assert_eq!(rig.look().await.turns_running, 1);
            }
        }
        rig.assert_empty().await;
    }
}

#[tokio::test]
async fn a_body_read_for_an_earlier_engine_does_not_reach_the_next() {
    let rig = Rig::with_engine().await;
    let facts = rig.facts();
    rig.set_engine("second", 320).await;
    let (_lease, admission) = rig.send(Arc::clone(&facts)).await.unwrap();
    admission.wait().await.expect("the engines have the same vocabulary");
    rig.set_engine("third", 256).await;
    let (_stale_lease, admission) = rig.send(facts).await.unwrap();
    assert_eq!(admission.wait().await.unwrap_err(), session::Error::EngineLost.into());
    let running = rig.look().await.turns_running;
    let (_lease, admission) = rig.send(rig.facts()).await.unwrap();
    admission.wait().await.unwrap();
    assert_eq!(rig.look().await.turns_running, running + 1, "the stale one has no place");
}

#[tokio::test]
async fn turns_that_nobody_can_take_are_refused_before_their_bodies_are_read() {
    let rig = Rig::start();
    assert!(matches!(rig.agent.body_facts(), Err(Error::EngineDown { .. })));
    let claimed = rig.send(Arc::default()).await;
    assert!(matches!(claimed, Err(Error::EngineDown { .. })), "{claimed:?}");
    rig.set_engine("first", 320).await;
    let facts = rig.facts();
    let mut turns = vec![];
    while rig.agent.body_facts().is_ok() {
        turns.push(rig.send(rig.facts()).await.unwrap());
    }
    assert_eq!(rig.look().await.turns_running, 2, "the others wait or are refused");
    assert_eq!(rig.agent.body_facts().unwrap_err(), rig.send(facts).await.unwrap_err());
    drop(turns);
    rig.assert_empty().await;
    let facts = rig.facts();
    rig.agent.drain(Duration::ZERO, Ending::Close).await;
    assert_eq!(rig.agent.body_facts(), Err(Error::Stopping));
    assert_eq!(rig.send(facts).await.unwrap_err(), Error::Stopping);
}
