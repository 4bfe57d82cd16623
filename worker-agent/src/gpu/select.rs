//! Determines which devices are the engine's. Pure.
//!
//! They are the configured devices, or else those that the engine's processes run on, or else the
//! only device.

use super::reading::Identity;
use crate::config::selector::Selector;

/// Whether an entry of the setting `devices` matches a device. A slice is matched by its own UUID,
/// or together with all slices of its GPU.
fn is_named(selector: &Selector, identity: &Identity) -> bool {
    match selector {
        Selector::Uuid(uuid) => *uuid == identity.uuid || *uuid == identity.board(),
        Selector::Index(index) => *index == identity.index,
        Selector::Pci(address) => {
            let own = identity.pci_address.as_deref().and_then(|own| own.parse().ok());
            own == Some(*address)
        }
    }
}

/// How the engine's devices were determined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Basis {
    /// The settings name them.
    Configured,
    /// Processes of the engine have contexts on them.
    Processes,
    /// There is only one device.
    Only,
    /// Not determined: these are all devices that the engine may run on.
    Unknown,
}

/// Remembers the engine's devices for the time in which its processes can't be seen.
#[derive(Debug, Default)]
pub struct Selection {
    /// The devices' UUIDs.
    seen: Vec<String>,
}

impl Selection {
    /// Returns the worker's devices as indices into `devices`. `runs_on` returns whether a process
    /// of the engine has a context on a device, or `None` if the device doesn't tell, as when it is
    /// lost; then its last known state counts.
    pub fn pick(
        &mut self,
        configured: &[Selector],
        devices: &[Identity],
        runs_on: impl Fn(usize) -> Option<bool>,
    ) -> (Basis, Vec<usize>) {
        let usable = |&at: &usize| !devices[at].divided;
        let those = |wanted: &dyn Fn(usize) -> bool| -> Vec<usize> {
            (0..devices.len()).filter(usable).filter(|&at| wanted(at)).collect()
        };
        if !configured.is_empty() {
            let named = |at: usize| configured.iter().any(|one| is_named(one, &devices[at]));
            return (Basis::Configured, those(&named));
        }
        let before = |at: usize| self.seen.contains(&devices[at].uuid);
        let mut running = those(&|at| runs_on(at).unwrap_or_else(|| before(at)));
        if !running.iter().any(|&at| runs_on(at) == Some(true)) {
            running = those(&before);
        }
        if !running.is_empty() {
            self.seen = running.iter().map(|&at| devices[at].uuid.clone()).collect();
            return (Basis::Processes, running);
        }
        let all = those(&|_| true);
        (if all.len() == 1 { Basis::Only } else { Basis::Unknown }, all)
    }

    /// Forgets the devices, because the engine's processes are new.
    pub fn forget(&mut self) {
        self.seen.clear();
    }
}

/// Returns the entries of the settings that match no device.
#[must_use]
pub fn unmatched<'a>(configured: &'a [Selector], devices: &[Identity]) -> Vec<&'a Selector> {
    configured.iter().filter(|one| !devices.iter().any(|device| is_named(one, device))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two whole GPUs, and a GPU divided into two slices.
    fn machine() -> Vec<Identity> {
        let gpu = |index: u32| Identity {
            uuid: format!("GPU-{index}"),
            index,
            pci_address: Some(format!("00000000:{:02X}:00.0", 0x1b + index)),
            divided: index == 2,
            ..Identity::default()
        };
        let slice = |number: u32| Identity {
            uuid: format!("MIG-{number}"),
            parent_uuid: Some("GPU-2".into()),
            ..Identity { divided: false, ..gpu(2) }
        };
        vec![gpu(0), gpu(1), gpu(2), slice(0), slice(1)]
    }

    fn picked(configured: &[&str], running: &[usize]) -> (Basis, Vec<usize>) {
        let configured: Vec<Selector> =
            configured.iter().map(|text| text.parse().unwrap()).collect();
        Selection::default().pick(&configured, &machine(), |at| Some(running.contains(&at)))
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
        assert_eq!(unmatched(&configured, &machine()), [&configured[0]]);
    }

    #[test]
    fn an_engine_is_where_its_processes_are() {
        assert_eq!(picked(&[], &[1]), (Basis::Processes, vec![1]));
        assert_eq!(picked(&[], &[0, 1]), (Basis::Processes, vec![0, 1]), "tensor parallel");
        // The driver lists a slice's processes under the whole GPU too.
        assert_eq!(picked(&[], &[2, 4]), (Basis::Processes, vec![4]));
    }

    #[test]
    fn one_gpu_is_the_engine_s_and_of_several_none_is_sure() {
        let one = Selection::default().pick(&[], &machine()[..1], |_| Some(false));
        assert_eq!(one, (Basis::Only, vec![0]));
        assert_eq!(picked(&[], &[]), (Basis::Unknown, vec![0, 1, 3, 4]));
        assert_eq!(Selection::default().pick(&[], &[], |_| None), (Basis::Unknown, vec![]));
    }

    #[test]
    fn an_engine_whose_processes_can_t_be_seen_any_more_is_where_it_was() {
        let mut selection = Selection::default();
        selection.pick(&[], &machine(), |at| Some(at < 2));
        let one_lost = selection.pick(&[], &machine(), |at| (at != 1).then_some(at == 0));
        assert_eq!(one_lost, (Basis::Processes, vec![0, 1]));
        let ended = selection.pick(&[], &machine(), |_| Some(false));
        assert_eq!(ended, (Basis::Processes, vec![0, 1]));
        let moved = selection.pick(&[], &machine(), |at| Some(at == 1));
        assert_eq!(moved, (Basis::Processes, vec![1]));
        selection.forget();
        assert_eq!(selection.pick(&[], &machine(), |_| Some(false)).0, Basis::Unknown);
    }
}
