//! Determines which of the machine's devices are the engine's. Pure.
//!
//! The engine's devices are those that the setting `devices` names. Without it, those that the
//! engine's processes run on. If these are unknown, those that the engine's shims name, and without
//! shims the machine's only device. Of several devices, any may then be the engine's
//! ([`Basis::Unknown`]).

use super::reading::Identity;
use crate::config::selector::Selector;

/// An entry that names a GPU also matches all its slices.
fn selector_matches(selector: &Selector, identity: &Identity) -> bool {
    match selector {
        Selector::Uuid(uuid) => *uuid == identity.uuid || *uuid == identity.board_uuid(),
        Selector::Index(index) => *index == identity.index,
        Selector::Pci(address) => {
            let device_address = identity.pci_address.as_deref().and_then(|text| text.parse().ok());
            device_address == Some(*address)
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Basis {
    Configured,
    /// Processes of the engine have contexts on the devices.
    Processes,
    /// The shims name the devices of the KV pools. With tensor parallelism, the engine runs on
    /// others too.
    Shim,
    Only,
    /// The engine may run on any of the machine's devices.
    Unknown,
}

/// Remembers devices for readings that show no processes.
#[derive(Debug, Default)]
pub struct Selection {
    last_used_uuids: Vec<String>,
}

impl Selection {
    /// Returns indices into `devices`. `runs_on` returns `None` if the device reports no list of
    /// processes, as a lost device does. Then the device's last known state counts. If no process
    /// is seen on any device, the last picked devices count.
    pub fn pick(
        &mut self,
        configured: &[Selector],
        devices: &[Identity],
        runs_on: impl Fn(usize) -> Option<bool>,
        is_named: impl Fn(usize) -> bool,
    ) -> (Basis, Vec<usize>) {
        // A divided GPU runs no work itself; its slices are devices of their own.
        let is_usable = |&index: &usize| !devices[index].is_divided;
        let usable_where = |is_wanted: &dyn Fn(usize) -> bool| -> Vec<usize> {
            (0..devices.len()).filter(is_usable).filter(|&index| is_wanted(index)).collect()
        };
        if !configured.is_empty() {
            let is_configured = |index: usize| {
                configured.iter().any(|entry| selector_matches(entry, &devices[index]))
            };
            return (Basis::Configured, usable_where(&is_configured));
        }
        let was_used = |index: usize| self.last_used_uuids.contains(&devices[index].uuid);
        let mut used = usable_where(&|index| runs_on(index).unwrap_or_else(|| was_used(index)));
        if !used.iter().any(|&index| runs_on(index) == Some(true)) {
            used = usable_where(&was_used);
        }
        if !used.is_empty() {
            self.last_used_uuids = used.iter().map(|&index| devices[index].uuid.clone()).collect();
            return (Basis::Processes, used);
        }
        let named = usable_where(&is_named);
        if !named.is_empty() {
            return (Basis::Shim, named);
        }
        let usable = usable_where(&|_| true);
        (if usable.len() == 1 { Basis::Only } else { Basis::Unknown }, usable)
    }

    /// Called when the engine has new processes.
    pub fn forget(&mut self) {
        self.last_used_uuids.clear();
    }
}

#[must_use]
pub fn unmatched_selectors<'a>(
    configured: &'a [Selector],
    devices: &[Identity],
) -> Vec<&'a Selector> {
    configured
        .iter()
        .filter(|entry| !devices.iter().any(|device| selector_matches(entry, device)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no_shim(_: usize) -> bool {
        false
    }

    /// Two whole GPUs, and a GPU divided into two slices.
    fn machine() -> Vec<Identity> {
        let gpu = |index: u32| Identity {
            uuid: format!("GPU-{index}"),
            index,
            pci_address: Some(format!("00000000:{:02X}:00.0", 0x1b + index)),
            is_divided: index == 2,
            ..Identity::default()
        };
        let slice = |number: u32| Identity {
            uuid: format!("MIG-{number}"),
            parent_uuid: Some("GPU-2".into()),
            ..Identity { is_divided: false, ..gpu(2) }
        };
        vec![gpu(0), gpu(1), gpu(2), slice(0), slice(1)]
    }

    fn picked(configured: &[&str], running: &[usize]) -> (Basis, Vec<usize>) {
        let configured: Vec<Selector> =
            configured.iter().map(|text| text.parse().unwrap()).collect();
        Selection::default().pick(
            &configured,
            &machine(),
            |at| Some(running.contains(&at)),
            no_shim,
        )
    }

    #[test]
    fn a_setting_names_a_gpu_by_uuid_index_or_address_and_a_slice_by_uuid() {
        for (name, devices) in [
            ("GPU-1", vec![1]),
            ("1", vec![1]),
            ("00000000:1C:00.0", vec![1]),
            ("0000:1c:00.0", vec![1]),
            ("1c:00.0", vec![1]),
            ("MIG-1", vec![4]),
            ("GPU-2", vec![3, 4]),
            ("2", vec![3, 4]),
            ("GPU-9", vec![]),
        ] {
            assert_eq!(picked(&[name], &[0]), (Basis::Configured, devices), "{name}");
        }
        for text in ["", "H200", "-1", "GPU", "1c:00", "zz:00.0"] {
            assert!(text.parse::<Selector>().is_err(), "{text:?} was taken");
        }
        let configured = ["GPU-9".parse().unwrap(), "0".parse().unwrap()];
        assert_eq!(unmatched_selectors(&configured, &machine()), [&configured[0]]);
    }

    #[test]
    fn an_engine_is_where_its_processes_are() {
        assert_eq!(picked(&[], &[1]), (Basis::Processes, vec![1]));
        assert_eq!(picked(&[], &[0, 1]), (Basis::Processes, vec![0, 1]), "tensor parallel");
        // The driver lists a slice's processes under the whole GPU too.
        assert_eq!(picked(&[], &[2, 4]), (Basis::Processes, vec![4]));
    }

    #[test]
    fn an_engine_whose_processes_can_t_be_seen_is_where_its_shims_say() {
        let pick = |running: &[usize], named: &[usize]| {
            let (runs_on, is_named) = (|at| Some(running.contains(&at)), |at| named.contains(&at));
            Selection::default().pick(&[], &machine(), runs_on, is_named)
        };
        assert_eq!(pick(&[], &[1]), (Basis::Shim, vec![1]));
        assert_eq!(pick(&[0, 1], &[1]), (Basis::Processes, vec![0, 1]), "tensor parallel");
        assert_eq!(pick(&[], &[2]).0, Basis::Unknown, "a divided GPU runs nothing");
    }

    #[test]
    fn one_gpu_is_the_engine_s_and_of_several_none_is_sure() {
        let one = Selection::default().pick(&[], &machine()[..1], |_| Some(false), no_shim);
        assert_eq!(one, (Basis::Only, vec![0]));
        assert_eq!(picked(&[], &[]), (Basis::Unknown, vec![0, 1, 3, 4]));
        assert_eq!(
            Selection::default().pick(&[], &[], |_| None, no_shim),
            (Basis::Unknown, vec![])
        );
    }

    #[test]
    fn an_engine_whose_processes_can_t_be_seen_any_more_is_where_it_was() {
        let mut selection = Selection::default();
        selection.pick(&[], &machine(), |at| Some(at < 2), no_shim);
        let one_lost = selection.pick(&[], &machine(), |at| (at != 1).then_some(at == 0), no_shim);
        assert_eq!(one_lost, (Basis::Processes, vec![0, 1]));
        let ended = selection.pick(&[], &machine(), |_| Some(false), no_shim);
        assert_eq!(ended, (Basis::Processes, vec![0, 1]));
        let moved = selection.pick(&[], &machine(), |at| Some(at == 1), no_shim);
        assert_eq!(moved, (Basis::Processes, vec![1]));
        selection.forget();
        assert_eq!(selection.pick(&[], &machine(), |_| Some(false), no_shim).0, Basis::Unknown);
    }
}
