//! Lists a test for each refusal code that provokes a refusal with the code.

use super::Code;

/// A test that provokes a refusal: its file, its name, and the text by which it names the refusal.
pub(super) type Provoker = (&'static str, &'static str, &'static str);

const AGENT: &str = "tests/agent.rs";
const DEMOTION: &str = "tests/demotion.rs";
const DISCOVERY: &str = "tests/discovery.rs";
const TURNS: &str = "tests/turns.rs";
const MOMENTS: &str = "tests/refusals.rs";
const RL: &str = "tests/rl.rs";
const STAGED_PREFILL: &str = "tests/staged_prefill.rs";
const CLIENT_TURNS: &str = "tests/router/turns.rs";
const REFUSALS: &str = "tests/router/refusals.rs";
const CLIENT_SHARES: &str = "tests/router/shares.rs";
const LIFECYCLE: &str = "tests/router/lifecycle.rs";
const TABLE: &str = "worker-agent/src/session/table/tests.rs";
const MUST_CONTINUE: &str = "worker-agent/src/session/table/tests/must_continue.rs";
const TABLE_ENGINE: &str = "worker-agent/src/session/table/tests/engine.rs";
const TABLE_SHARES: &str = "worker-agent/src/session/table/tests/shares.rs";
const BODY: &str = "worker-agent/src/data_port/request.rs";
const BUDGET: &str = "proto/service/src/budget.rs";
const UNREADABLE: &str = "proto/service/src/server/unreadable.rs";
const AT_THE_AGENT: &str = "refusals_come_from_the_agent_and_never_reach_the_engine";
const ELSEWHERE: &str = "a_body_that_counts_on_a_history_elsewhere_is_refused";
const NOT_STAGED: &str = "an_agent_takes_prompts_that_its_engine_can_compute_and_no_others";
const NO_AGENT: &str = "errors_without_an_agent_have_codes_of_the_router";
const ROUTER_ERRORS: &str = "router/src/http/errors.rs";

/// For each code a test that provokes a refusal with the code.
pub(super) const PROVOKERS: &[(Code, Provoker)] = &[
    (Code::Unauthorized, ("tests/auth.rs", "nobody_gets_in_without_a_key", "unauthorized")),
    (
        Code::AdminOnly,
        ("tests/auth.rs", "only_admins_see_the_fleet_and_why_turns_went_where", "admin_only"),
    ),
    (
        Code::ForeignPage,
        (
            "tests/router/routes.rs",
            "a_web_page_does_not_drive_a_router_without_keys",
            "foreign_page",
        ),
    ),
    (
        Code::ScrapeKey,
        ("tests/auth.rs", "only_admins_see_the_fleet_and_why_turns_went_where", "scrape_key"),
    ),
    (
        Code::AnnounceForbidden,
        (DISCOVERY, "an_agent_announces_itself_and_a_rogue_gets_no_turn", "announce_forbidden"),
    ),
    (
        Code::AnnounceLimit,
        ("tests/announce.rs", "a_key_announces_no_more_than_its_share", "announce_limit"),
    ),
    (
        Code::NotARouter,
        (
            "tests/tls/main.rs",
            "who_is_no_router_can_not_act_for_a_session_whose_names_it_knows",
            "not_a_router",
        ),
    ),
    (
        Code::SessionBusy,
        (AGENT, "a_second_turn_is_refused_at_once_and_harms_nothing", "session_busy"),
    ),
    (
        Code::SessionLost,
        (AGENT, "an_engine_that_is_down_is_503_and_its_return_is_noticed", "session_lost"),
    ),
    (
        Code::SessionReclaimed,
        (TABLE, "idle_sessions_give_way_the_least_worth_keeping_first", "Error::Reclaimed"),
    ),
    (
        Code::WeightsChanged,
        (RL, "no_turn_continues_a_session_over_a_change_of_the_weights", "weights_changed"),
    ),
    (
        Code::AdapterChanged,
        (
            RL,
            "a_session_of_an_adapter_that_is_loaded_anew_says_so_and_goes_on_anew",
            "adapter_changed",
        ),
    ),
    (
        Code::OtherKv,
        (
            RL,
            "a_delta_under_another_salt_or_adapter_is_refused_and_the_session_goes_on",
            "other_kv",
        ),
    ),
    (
        Code::EngineHeld,
        (RL, "a_paused_engine_gets_no_turns_and_new_sessions_go_elsewhere", "engine_held"),
    ),
    (Code::EngineBusy, (RL, "memory_is_released_only_while_nothing_runs", "engine_busy")),
    (
        Code::WeightsUnavailable,
        (
            RL,
            "a_partial_failure_names_the_worker_and_the_others_have_the_new_weights",
            "weights_unavailable",
        ),
    ),
    (
        Code::WorkerUnknown,
        (
            RL,
            "a_partial_failure_names_the_worker_and_the_others_have_the_new_weights",
            "worker_unknown",
        ),
    ),
    (
        Code::HistoryUnknown,
        (
            TABLE,
            "a_turn_that_waited_is_not_appended_to_a_history_in_doubt",
            "Error::HistoryUnknown",
        ),
    ),
    (
        Code::KvCorrupt,
        (
            "worker-agent/src/session/table/tests/order.rs",
            "nothing_runs_on_kv_that_an_audit_found_corrupt",
            "Error::KvCorrupt",
        ),
    ),
    (
        Code::SessionOpenOtherwise,
        (
            "tests/e2e.rs",
            "the_client_receives_the_agent_s_reason_for_a_refused_open",
            "session_open_otherwise",
        ),
    ),
    (
        Code::SessionOpen,
        (
            MUST_CONTINUE,
            "a_client_that_reopens_a_session_with_a_full_history_may_append_to_it",
            "Error::HasHistory",
        ),
    ),
    (
        Code::EngineKey,
        (
            "tests/ports.rs",
            "an_engine_that_wants_a_key_gets_its_clients_and_a_refusal_says_why_not",
            "engine_key",
        ),
    ),
    (Code::SessionExists, (LIFECYCLE, "sglangs_own_routes_keep_its_shape", "session_exists")),
    (
        Code::TurnBeforeFailed,
        (MOMENTS, "a_delta_is_not_appended_without_the_turn_before", "turn_before_failed"),
    ),
    (Code::WholeHistory, (AGENT, AT_THE_AGENT, "whole_history")),
    (
        Code::DeltaNeedsOpen,
        (
            MUST_CONTINUE,
            "a_delta_client_is_told_when_another_client_reopened_the_session",
            "Error::DeltaNeedsOpen",
        ),
    ),
    (Code::DeltaNeedsPinned, (TABLE, "a_delta_may_open_its_session", "Error::DeltaNeedsPinned")),
    (Code::SessionNotPinned, (DEMOTION, "no_other_session_is_demoted", "session_not_pinned")),
    (Code::DemotionUnavailable, (DEMOTION, "no_other_session_is_demoted", "demotion_unavailable")),
    (
        Code::RetentionUnavailable,
        (
            LIFECYCLE,
            "a_retention_nobody_offers_is_refused_with_what_is_offered",
            "retention_unavailable",
        ),
    ),
    (
        Code::SessionClosing,
        (LIFECYCLE, "a_delete_does_not_wait_for_the_running_turn", "session_closing"),
    ),
    (
        Code::SessionUnknown,
        (CLIENT_TURNS, "what_is_wrong_with_a_request_is_said", "session_unknown"),
    ),
    (Code::TurnTooLarge, (TABLE, "what_no_budget_holds_is_refused_for_good", "Error::TooLarge")),
    (
        Code::BatchOverShare,
        (TABLE_SHARES, "a_batch_counts_as_the_turns_that_it_is", "BatchOverShare"),
    ),
    (Code::BodyTooLarge, (CLIENT_TURNS, "what_is_wrong_with_a_request_is_said", "body_too_large")),
    (
        Code::HeaderTooLarge,
        (
            UNREADABLE,
            "headers_that_are_too_large_are_refused_and_the_client_can_read_why",
            "header_too_large",
        ),
    ),
    (Code::Rows, (AGENT, "pinned_sessions_never_take_the_last_row", "rows")),
    (Code::PinTokens, (AGENT, "tokens_of_foreign_sessions_count_as_pinned", "pin_tokens")),
    (
        Code::QueuePlaces,
        (
            AGENT,
            "a_full_worker_lets_a_turn_wait_for_room_and_refuses_the_next_at_once",
            "queue_places",
        ),
    ),
    (
        Code::QueueShare,
        (
            TABLE_SHARES,
            "a_full_queue_makes_room_for_a_client_with_fewer_turns_in_it",
            "queue_share",
        ),
    ),
    (
        Code::QueueTime,
        (AGENT, "a_turn_that_waited_too_long_for_room_is_refused_with_retry_after", "queue_time"),
    ),
    (
        Code::PrincipalSessions,
        (
            AGENT,
            "a_client_that_pins_all_that_it_can_leaves_rows_to_others_and_takes_no_more_sessions",
            "principal_sessions",
        ),
    ),
    (Code::Sessions, (TABLE_SHARES, "a_client_opens_no_more_sessions_than_it_may", "\"sessions\"")),
    (Code::Turns, (MOMENTS, "an_agent_claims_so_many_turns_and_refuses_the_next", "\"turns\"")),
    (
        Code::SessionsShare,
        (
            CLIENT_SHARES,
            "a_client_with_turns_in_many_sessions_leaves_sessions_to_others",
            "sessions_share",
        ),
    ),
    (Code::KeySessions, (CLIENT_SHARES, "a_key_has_its_own_open_sessions", "key_sessions")),
    (
        Code::TurnsInFlightShare,
        (CLIENT_SHARES, "a_client_with_many_turns_leaves_some_to_others", "turns_in_flight_share"),
    ),
    (
        Code::KeyTurnsInFlight,
        (CLIENT_SHARES, "a_key_has_its_own_turns_and_its_own_rates", "key_turns_in_flight"),
    ),
    (Code::RequestsShare, (ROUTER_ERRORS, NO_AGENT, "Code::RequestsShare")),
    (Code::BodyBytesShare, (ROUTER_ERRORS, NO_AGENT, "Code::BodyBytesShare")),
    (
        Code::RequestsPerMinute,
        (CLIENT_SHARES, "a_key_has_its_own_turns_and_its_own_rates", "requests_per_minute"),
    ),
    (
        Code::TokensPerMinute,
        (CLIENT_SHARES, "a_key_has_its_own_turns_and_its_own_rates", "tokens_per_minute"),
    ),
    (
        Code::PriorityShed,
        (CLIENT_SHARES, "under_overload_lower_classes_are_refused_first", "priority_shed"),
    ),
    (
        Code::ContextLengthExceeded,
        (
            CLIENT_SHARES,
            "text_that_fits_no_context_is_refused_and_an_image_is_not",
            "context_length_exceeded",
        ),
    ),
    (Code::SessionsFull, (ROUTER_ERRORS, NO_AGENT, "Code::SessionsFull")),
    (
        Code::TurnsInFlight,
        (CLIENT_TURNS, "turns_beyond_the_bound_are_refused_at_once", "turns_in_flight"),
    ),
    (
        Code::WorkerFull,
        (
            ROUTER_ERRORS,
            "a_client_hears_the_agents_own_code_or_what_its_grpc_status_says",
            "Code::WorkerFull",
        ),
    ),
    (
        Code::EngineDown,
        (AGENT, "an_engine_that_is_down_is_503_and_its_return_is_noticed", "engine_down"),
    ),
    (
        Code::EngineLost,
        (
            MOMENTS,
            "a_turn_that_waits_while_its_engine_ends_is_refused_and_may_be_sent_again",
            "engine_lost",
        ),
    ),
    (
        Code::EngineBrokeOff,
        (
            AGENT,
            "a_delta_under_which_the_engine_dies_is_no_reason_to_repeat_it_blindly",
            "engine_broke_off",
        ),
    ),
    (
        Code::EngineSilent,
        (
            "tests/silence.rs",
            "a_hung_scheduler_refuses_what_was_not_sent_and_running_turns_go_on",
            "assert_refused_as_silent",
        ),
    ),
    (
        Code::JournalFailed,
        (
            "tests/restarts.rs",
            "a_full_disk_leaks_nothing_and_pins_nothing_and_says_why",
            "journal_failed",
        ),
    ),
    (
        Code::WorkerSilent,
        ("tests/ports.rs", "the_turns_of_a_frozen_agent_end_and_say_so", "worker_silent"),
    ),
    (
        Code::AuthUnavailable,
        ("tests/auth.rs", "tokens_wait_for_the_issuer_and_keys_do_not", "auth_unavailable"),
    ),
    (
        Code::ConnectionsFull,
        (
            "proto/service/src/server/tests.rs",
            "health_is_answered_and_turns_are_refused_while_every_place_works",
            "connections_full",
        ),
    ),
    (
        Code::RouterDescriptors,
        (
            ROUTER_ERRORS,
            "a_router_without_descriptors_does_not_blame_the_worker",
            "Code::RouterDescriptors",
        ),
    ),
    (
        Code::AgentDescriptors,
        (
            "worker-agent/src/data_port/refusals.rs",
            "an_agent_without_descriptors_does_not_blame_the_engine",
            "Code::AgentDescriptors",
        ),
    ),
    (
        Code::OpenFailed,
        (TABLE_ENGINE, "an_open_that_may_have_happened_is_closed", "Error::OpenFailed"),
    ),
    (
        Code::Stopping,
        (TABLE_ENGINE, "a_drain_refuses_what_waits_and_closes_what_is_open", "Error::Stopping"),
    ),
    (
        Code::NoWorker,
        (
            CLIENT_TURNS,
            "without_a_worker_the_answer_is_503_within_the_time_to_connect",
            "no_worker",
        ),
    ),
    (Code::EnginesDisaggregated, (ROUTER_ERRORS, NO_AGENT, "Code::EnginesDisaggregated")),
    (Code::NoPair, (ROUTER_ERRORS, NO_AGENT, "Code::NoPair")),
    (Code::HandOffLate, (ROUTER_ERRORS, NO_AGENT, "Code::HandOffLate")),
    (Code::PairUnsupported, (ROUTER_ERRORS, NO_AGENT, "Code::PairUnsupported")),
    (
        Code::WorkerUnreachable,
        (
            CLIENT_TURNS,
            "a_refused_connection_is_tried_elsewhere_unless_the_session_is_bound",
            "worker_unreachable",
        ),
    ),
    (
        Code::BodyBytesInFlight,
        (BUDGET, "a_dropped_body_gives_its_share_back", "Code::BodyBytesInFlight"),
    ),
    (
        Code::WorkerBrokeOff,
        (
            REFUSALS,
            "an_agent_that_dies_under_a_turn_is_no_reason_to_repeat_it_blindly",
            "worker_broke_off",
        ),
    ),
    (
        Code::WorkerFailed,
        (
            ROUTER_ERRORS,
            "a_client_hears_the_agents_own_code_or_what_its_grpc_status_says",
            "Code::WorkerFailed",
        ),
    ),
    (Code::TurnTimeout, (CLIENT_TURNS, "a_turn_has_one_deadline", "turn_timeout")),
    (
        Code::WorkerTimeout,
        (
            ROUTER_ERRORS,
            "a_client_hears_the_agents_own_code_or_what_its_grpc_status_says",
            "Code::WorkerTimeout",
        ),
    ),
    (Code::Internal, (ROUTER_ERRORS, NO_AGENT, "Code::Internal")),
    (
        Code::InvalidRequest,
        (UNREADABLE, "a_request_that_is_not_http_is_refused_in_berths_form", "invalid_request"),
    ),
    (
        Code::InvalidPath,
        (REFUSALS, "a_path_that_is_not_utf_8_is_refused_in_berths_form", "invalid_path"),
    ),
    (Code::InvalidJson, (CLIENT_TURNS, "what_is_wrong_with_a_request_is_said", "invalid_json")),
    (
        Code::InvalidSessionId,
        (CLIENT_TURNS, "what_is_wrong_with_a_request_is_said", "invalid_session_id"),
    ),
    (Code::InvalidField, (CLIENT_TURNS, "what_is_wrong_with_a_request_is_said", "invalid_field")),
    (
        Code::NotIsolated,
        ("tests/cache_isolation.rs", "every_route_is_isolated_or_refused", "not_isolated"),
    ),
    (
        Code::DeltaWithoutSession,
        (CLIENT_TURNS, "what_is_wrong_with_a_request_is_said", "delta_without_session"),
    ),
    (Code::SessionParams, (AGENT, AT_THE_AGENT, "session_params")),
    (Code::BatchInSession, (AGENT, AT_THE_AGENT, "batch_in_session")),
    (Code::TurnAborted, (TURNS, "a_turn_that_waits_for_room_ends_at_once", "turn_aborted")),
    (
        Code::ResponseUnknown,
        (
            TURNS,
            "a_stored_response_is_found_by_every_router_and_by_nobody_else",
            "response_unknown",
        ),
    ),
    (
        Code::ResponseElsewhere,
        (TURNS, "a_turn_goes_where_its_previous_response_is", "response_elsewhere"),
    ),
    (
        Code::EngineLacks,
        (TURNS, "what_the_engine_can_not_do_with_a_response_is_refused", "engine_lacks"),
    ),
    (
        Code::BackgroundUnsupported,
        (BODY, "a_turn_in_the_background_is_refused", "Code::BackgroundUnsupported"),
    ),
    (Code::ThreadUnsupported, (BODY, ELSEWHERE, "Code::ThreadUnsupported")),
    (Code::ThreadNotFound, (BODY, ELSEWHERE, "Code::ThreadNotFound")),
    (Code::ConversationUnsupported, (BODY, ELSEWHERE, "Code::ConversationUnsupported")),
    (Code::TokenIds, (BODY, "what_would_harm_the_engine_is_refused", "Code::TokenIds")),
    (Code::TokenOutOfVocabulary, (AGENT, AT_THE_AGENT, "token_out_of_vocabulary")),
    (Code::NoRank, (STAGED_PREFILL, NOT_STAGED, "no_rank")),
    (Code::Claim, (AGENT, AT_THE_AGENT, "claim")),
    (Code::BodyIncomplete, (BUDGET, "a_body_that_breaks_off_is_refused", "Code::BodyIncomplete")),
    (Code::BodyLate, (BUDGET, "a_silent_client_takes_no_budget_and_is_refused", "Code::BodyLate")),
    (Code::ContentEncoding, (AGENT, AT_THE_AGENT, "content_encoding")),
    (Code::ModelNotFound, (ROUTER_ERRORS, NO_AGENT, "Code::ModelNotFound")),
    (
        Code::PlacementUnknown,
        (
            CLIENT_TURNS,
            "why_a_turn_went_where_it_went_can_be_asked_afterwards",
            "placement_unknown",
        ),
    ),
    (Code::RouteUnknown, (CLIENT_TURNS, "what_is_wrong_with_a_request_is_said", "route_unknown")),
    (Code::MethodNotAllowed, (REFUSALS, "no_get_opens_or_closes_a_session", "method_not_allowed")),
    (Code::StagedPrefill, (STAGED_PREFILL, NOT_STAGED, "staged_prefill")),
    (
        Code::StagedPrefillFull,
        (STAGED_PREFILL, "a_prompt_beyond_the_queue_is_not_staged", "staged_prefill_full"),
    ),
    (
        Code::StagedPrefillLate,
        (STAGED_PREFILL, "a_stage_that_takes_too_long_is_given_up", "staged_prefill_late"),
    ),
    (
        Code::StagedPrefillFailed,
        (STAGED_PREFILL, "a_stage_that_the_engine_refuses_fails", "staged_prefill_failed"),
    ),
];
