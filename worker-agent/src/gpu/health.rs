//! Decides whether a board can be used, from its readings and its XIDs. Pure.
//!
//! A board can't be used while one of these causes lasts:
//!
//! | cause | lasts until |
//! |---|---|
//! | NVML calls report that the board is lost or needs a reset | the board answers again |
//! | NVML calls fail, and the board answers no call | the board answers again |
//! | the driver asks for a recovery action, or sets its older reset flag | it stops asking |
//! | memory rows could not be replaced | the driver clears the flag |
//! | an XID after which the board needs a reset | a reset is observed, or the agent restarts |
//!
//! A reset is observed in two ways: a board that was lost or needed a reset answers again, or the
//! driver no longer asks for a recovery action that it asked for before.

use std::collections::BTreeSet;

use super::{
    reading::{BoardFault, Reading, RecoveryAction},
    xid,
};

#[derive(Debug, Default)]
pub struct BoardHealth {
    /// `None` if calls succeed.
    board_fault: Option<BoardFault>,
    /// `None` if the driver has never said.
    recovery_action: Option<RecoveryAction>,
    /// The driver's older flag.
    needs_reset: bool,
    has_failed_rows: bool,
    /// A reset clears it. Bounded by the number of XIDs that [`xid::fatal_xid`] knows.
    fatal_xids: BTreeSet<u64>,
}

impl BoardHealth {
    /// A value that the reading lacks keeps its last state.
    pub fn take_reading(&mut self, reading: &Reading) {
        let is_back_after_reset = self.update_board_fault(reading);
        self.has_failed_rows = reading.remapped_rows.has_failed.unwrap_or(self.has_failed_rows);
        self.needs_reset = reading.reset_needed.unwrap_or(self.needs_reset);
        let had_asked_for_recovery =
            self.recovery_action.is_some_and(|before| before != RecoveryAction::None);
        self.recovery_action = reading.recovery_action.or(self.recovery_action);
        if is_back_after_reset
            || had_asked_for_recovery && self.recovery_action == Some(RecoveryAction::None)
        {
            self.fatal_xids.clear();
        }
        self.check_in_debug();
    }

    /// Returns whether the board answers again after a fault that only a reset ends.
    fn update_board_fault(&mut self, reading: &Reading) -> bool {
        let fault_before = self.board_fault;
        let is_silent = !reading.is_answered();
        self.board_fault = match reading.board_fault {
            // An earlier fault is more specific.
            Some(BoardFault::Unreachable) => fault_before.or(reading.board_fault),
            Some(board_fault) => Some(board_fault),
            None if is_silent && !reading.failed_calls.is_empty() => {
                fault_before.or(Some(BoardFault::Unreachable))
            }
            // No call succeeded or failed, so the last state counts.
            None if is_silent => fault_before,
            None => None,
        };
        let needed_reset_before =
            matches!(fault_before, Some(BoardFault::Lost | BoardFault::ResetRequired));
        needed_reset_before && self.board_fault.is_none()
    }

    /// Ignores XIDs that aren't fatal.
    pub fn add_xid(&mut self, number: u64) {
        if xid::fatal_xid(number).is_some() {
            self.fatal_xids.insert(number);
        }
        self.check_in_debug();
    }

    /// Calls to the board fail for any reason, so NVML should be reloaded.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.board_fault.is_some()
    }

    /// The gravest reason why the board can't be used, and what to do.
    #[must_use]
    pub fn reason(&self) -> Option<String> {
        let text = |reason: &str| Some(reason.to_owned());
        match self.board_fault {
            Some(BoardFault::Lost) => return text("it fell off the bus: restart the machine"),
            Some(BoardFault::ResetRequired) => {
                return text("it must be reset before it can be used");
            }
            // `Unreachable` is the last reason below, because any other reason explains it too.
            Some(BoardFault::Unreachable) | None => {}
        }
        let driver_reports_recovery = self.recovery_action.is_some();
        let fatal_xids =
            self.fatal_xids.iter().filter_map(|&number| Some((number, xid::fatal_xid(number)?)));
        let reliable_xids =
            fatal_xids.filter(|(_, fatal)| !(fatal.has_harmless_forms && driver_reports_recovery));
        // XID 79 is the gravest: the board fell off the bus.
        if let Some((number, fatal)) = reliable_xids.max_by_key(|(number, _)| *number == 79) {
            return Some(format!("XID {number}, {}: {}", fatal.description, fatal.operator_action));
        }
        match self.recovery_action {
            Some(RecoveryAction::Reset) => return text("the driver asks for a reset of the GPU"),
            Some(RecoveryAction::Reboot) => {
                return text("the driver asks for a restart of the machine");
            }
            Some(RecoveryAction::DrainPeers) => {
                return text("the driver asks that other GPUs stop using its memory");
            }
            Some(RecoveryAction::DrainAndReset) => {
                return text("the driver asks to end its work, then for a reset");
            }
            Some(RecoveryAction::Other(number)) => {
                return Some(format!("the driver asks for recovery action {number}"));
            }
            Some(RecoveryAction::None) | None => {}
        }
        if self.has_failed_rows {
            return text("memory rows could not be replaced: replace the GPU");
        }
        // A recovery action is more specific than the older flag.
        if self.needs_reset && !driver_reports_recovery {
            return text("the driver asks for a reset of the GPU");
        }
        self.board_fault?;
        text("NVML can't reach it: look for the cause in the kernel's log, and reset the GPU")
    }

    pub fn check_invariants(&self) {
        assert!(
            self.fatal_xids.iter().all(|&number| xid::fatal_xid(number).is_some()),
            "{:?}",
            self.fatal_xids
        );
    }

    fn check_in_debug(&self) {
        if cfg!(debug_assertions) {
            self.check_invariants();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::reading::RemappedRows, *};

    fn answered() -> Reading {
        Reading { temperature_celsius: Some(40), ..Reading::default() }
    }

    fn unreachable() -> Reading {
        Reading { board_fault: Some(BoardFault::Unreachable), ..Reading::default() }
    }

    fn all_failed() -> Reading {
        Reading { failed_calls: vec!["memory", "power", "fields"], ..Reading::default() }
    }

    fn after(events: impl FnOnce(&mut BoardHealth)) -> Option<String> {
        let mut health = BoardHealth::default();
        health.take_reading(&Reading::default());
        events(&mut health);
        health.reason()
    }

    fn asking(recovery: RecoveryAction) -> Reading {
        Reading { recovery_action: Some(recovery), ..Reading::default() }
    }

    #[test]
    fn a_board_of_which_nothing_bad_is_known_is_well() {
        assert_eq!(after(|_| {}), None);
        let harmless = [13, 31, 43, 45, 63, 92, 94, 154, 999];
        assert_eq!(after(|health| harmless.into_iter().for_each(|xid| health.add_xid(xid))), None);
    }

    #[test]
    fn a_lost_board_is_back_when_it_answers_and_has_been_reset_then() {
        let lost = Reading { board_fault: Some(BoardFault::Lost), ..Reading::default() };
        let reason = after(|health| {
            health.add_xid(79);
            health.take_reading(&lost);
        });
        assert!(reason.unwrap().contains("fell off the bus"));
        let back = after(|health| {
            health.add_xid(79);
            health.take_reading(&lost);
            health.take_reading(&answered());
        });
        assert_eq!(back, None);
    }

    #[test]
    fn a_lost_board_of_which_calls_fail_otherwise_or_tell_nothing_is_not_back() {
        let lost = Reading { board_fault: Some(BoardFault::Lost), ..Reading::default() };
        for since in [unreachable(), all_failed(), Reading::default()] {
            let mut health = BoardHealth::default();
            health.add_xid(79);
            health.take_reading(&lost);
            health.take_reading(&since);
            assert!(health.is_lost(), "NVML is loaded anew: {since:?}");
            assert!(health.reason().unwrap().contains("fell off the bus"), "{since:?}");
            health.take_reading(&answered());
            assert_eq!((health.is_lost(), health.reason()), (false, None), "{since:?}");
        }
    }

    #[test]
    fn a_board_that_answers_no_call_is_unreachable_until_it_does_and_keeps_its_xids() {
        for silent in [unreachable(), all_failed()] {
            let mut health = BoardHealth::default();
            health.take_reading(&silent);
            assert!(health.reason().unwrap().contains("can't reach it"), "{silent:?}");
            health.add_xid(62);
            assert!(health.reason().unwrap().contains("XID 62"), "it says more: {silent:?}");
            health.take_reading(&answered());
            assert!(!health.is_lost() && health.reason().is_some(), "no reset: {silent:?}");
        }
        let some_fail = Reading { failed_calls: vec!["power", "fields"], ..answered() };
        assert_eq!(after(|health| health.take_reading(&some_fail)), None);
    }

    #[test]
    fn an_xid_that_needs_a_reset_stays_until_there_was_one() {
        let stays = |health: &mut BoardHealth| {
            health.add_xid(62);
            (0..100).for_each(|_| health.take_reading(&Reading::default()));
            (0..100).for_each(|_| health.take_reading(&asking(RecoveryAction::None)));
        };
        let reason = after(stays).unwrap();
        assert!(reason.contains("XID 62") && reason.contains("reset"), "{reason}");
        let reset = after(|health| {
            stays(health);
            health.take_reading(&asking(RecoveryAction::Reset));
            health.take_reading(&asking(RecoveryAction::None));
        });
        assert_eq!(reset, None);
    }

    #[test]
    fn where_the_driver_tells_what_it_needs_a_doubtful_xid_is_left_to_it() {
        let alone = after(|health| health.add_xid(48));
        assert!(alone.unwrap().contains("XID 48"));
        let told = |recovery| {
            after(|health| {
                health.take_reading(&asking(recovery));
                health.add_xid(48);
            })
        };
        assert_eq!(told(RecoveryAction::None), None);
        assert!(told(RecoveryAction::Reset).unwrap().contains("asks for a reset"));
    }

    #[test]
    fn a_recovery_that_the_driver_asks_for_ends_when_it_says_so() {
        for number in 1..=7 {
            let recovery = RecoveryAction::from_nvml(number);
            assert!(
                after(|health| health.take_reading(&asking(recovery))).is_some(),
                "{recovery:?}"
            );
            let over = after(|health| {
                health.take_reading(&asking(recovery));
                health.take_reading(&asking(RecoveryAction::from_nvml(0)));
            });
            assert_eq!(over, None, "{recovery:?}");
        }
    }

    #[test]
    fn a_reading_that_is_missing_changes_nothing() {
        let rows = RemappedRows { has_failed: Some(true), ..RemappedRows::default() };
        let failed = Reading { remapped_rows: rows, ..Reading::default() };
        let reason = after(|health| {
            health.take_reading(&failed);
            health.take_reading(&Reading::default());
        });
        assert!(reason.unwrap().contains("rows"));
        let older = Reading { reset_needed: Some(true), ..Reading::default() };
        assert!(after(|health| health.take_reading(&older)).is_some());
        let newer = Reading { recovery_action: Some(RecoveryAction::None), ..older };
        assert_eq!(
            after(|health| health.take_reading(&newer)),
            None,
            "the recovery action says more"
        );
    }
}
