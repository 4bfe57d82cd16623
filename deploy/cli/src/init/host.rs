//! Defines what `init` knows of the engine's host, and which of the host's GPUs are the engine's.
//! Pure.

use serde::Serialize;

use super::engine::GpuFlags;

const ORDER_UNKNOWN: &str =
    "the GPUs are of several models, and CUDA_DEVICE_ORDER isn't PCI_BUS_ID";

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Host {
    pub name: String,
    /// In the order of PCI addresses, which is NVML's. Empty: unknown.
    pub gpus: Vec<HostGpu>,
    /// Ports at which something listens. Empty: unknown.
    pub ports_taken: Vec<u16>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HostGpu {
    /// `None` if the driver doesn't say it.
    pub uuid: Option<String>,
    pub model: String,
}

/// The process that listens at the engine's port.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct EngineProcess {
    /// `None` if this user may not see which process it is.
    pub pid: Option<u32>,
    pub uid: u32,
    pub user: Option<String>,
    /// The service of systemd that runs the process.
    pub unit: Option<String>,
    /// `None`: this user may not read it.
    #[serde(skip)]
    pub environment: Option<EngineEnvironment>,
}

/// By `CUDA_VISIBLE_DEVICES`, `CUDA_DEVICE_ORDER` and `BERTH_SHIM_SOCKET`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EngineEnvironment {
    pub visible_devices: Option<String>,
    pub is_in_pci_order: bool,
    pub shim_socket: Option<String>,
}

/// The values of `gpu.devices`, or why they aren't known.
pub fn devices(
    flags: &GpuFlags,
    environment: Option<&EngineEnvironment>,
    host: &Host,
) -> Result<Vec<String>, String> {
    if flags.device != "cuda" {
        return Err(format!("the engine runs on {}", flags.device));
    }
    if flags.hosts > 1 {
        return Err("the engine runs on several hosts".into());
    }
    let environment = environment.ok_or("the engine's environment can't be read")?;
    let is_in_pci_order = environment.is_in_pci_order;
    let visible = match environment.visible_devices.as_deref() {
        Some(list) => visible_devices(list, is_in_pci_order, host)?,
        None if host.gpus.is_empty() => return Err("the driver names no GPU".into()),
        None if !is_order_known(is_in_pci_order, host) => return Err(ORDER_UNKNOWN.into()),
        None => host.gpus.iter().enumerate().map(|(index, gpu)| name_of(index, gpu)).collect(),
    };
    let mine = visible.iter().skip(flags.first).step_by(flags.step).take(flags.count);
    let mine: Vec<String> = mine.cloned().collect();
    if mine.len() < flags.count {
        let (count, seen) = (flags.count, visible.len());
        return Err(format!("the engine takes {count} GPUs from number {} of {seen}", flags.first));
    }
    Ok(mine)
}

/// The entries of `CUDA_VISIBLE_DEVICES` are UUIDs or CUDA's numbers.
fn visible_devices(list: &str, is_in_pci_order: bool, host: &Host) -> Result<Vec<String>, String> {
    let entries = list.split(',').map(str::trim).filter(|entry| !entry.is_empty());
    let to_device = |entry: &str| {
        if entry.starts_with("GPU-") || entry.starts_with("MIG-") {
            return Ok(whole_uuid(entry, host));
        }
        let index: usize =
            entry.parse().map_err(|_| format!("CUDA_VISIBLE_DEVICES has {entry:?}"))?;
        if !is_order_known(is_in_pci_order, host) {
            return Err(ORDER_UNKNOWN.into());
        }
        Ok(host.gpus.get(index).map_or(index.to_string(), |gpu| name_of(index, gpu)))
    };
    entries.map(to_device).collect()
}

/// CUDA takes the beginning of a UUID too; the agent wants all of it.
fn whole_uuid(entry: &str, host: &Host) -> String {
    let uuids = host.gpus.iter().filter_map(|gpu| gpu.uuid.as_ref());
    let mut whole = uuids.filter(|uuid| uuid.starts_with(entry));
    whole.next().cloned().unwrap_or_else(|| entry.to_owned())
}

/// Whether CUDA's numbers are those of NVML. By default CUDA puts the fastest GPU first.
fn is_order_known(is_in_pci_order: bool, host: &Host) -> bool {
    is_in_pci_order || host.gpus.windows(2).all(|pair| pair[0].model == pair[1].model)
}

fn name_of(index: usize, gpu: &HostGpu) -> String {
    gpu.uuid.clone().unwrap_or_else(|| index.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(models: &[&str]) -> Host {
        let gpu = |(index, model): (usize, &&str)| HostGpu {
            uuid: Some(format!("GPU-{index}-end")),
            model: (*model).into(),
        };
        Host { gpus: models.iter().enumerate().map(gpu).collect(), ..Host::default() }
    }

    fn process(visible: Option<&str>, is_in_pci_order: bool) -> EngineEnvironment {
        let visible_devices = visible.map(str::to_owned);
        EngineEnvironment { visible_devices, is_in_pci_order, shim_socket: None }
    }

    fn flags(first: usize, step: usize, count: usize) -> GpuFlags {
        GpuFlags { device: "cuda".into(), count, first, step, hosts: 1 }
    }

    #[test]
    fn an_engine_s_gpus_are_those_that_its_flags_take_of_the_visible_ones() {
        let (same, other) = (host(&["a"; 4]), host(&["a", "b"]));
        let table: [(_, _, _, &[&str]); 6] = [
            (flags(0, 1, 2), process(None, false), &same, &["GPU-0-end", "GPU-1-end"]),
            (flags(2, 1, 2), process(None, false), &same, &["GPU-2-end", "GPU-3-end"]),
            (flags(0, 2, 2), process(None, false), &same, &["GPU-0-end", "GPU-2-end"]),
            (flags(1, 1, 1), process(Some("3,2"), false), &same, &["GPU-2-end"]),
            (flags(0, 1, 2), process(Some("GPU-1, MIG-x"), false), &other, &["GPU-1-end", "MIG-x"]),
            (flags(0, 1, 1), process(Some("1"), true), &other, &["GPU-1-end"]),
        ];
        for (flags, process, host, want) in table {
            assert_eq!(devices(&flags, Some(&process), host).unwrap(), want, "{flags:?}");
        }
        let unread = Host::default();
        assert_eq!(
            devices(&flags(0, 1, 1), Some(&process(Some("5"), false)), &unread),
            Ok(vec!["5".into()])
        );
    }

    #[test]
    fn where_the_gpus_aren_t_known_it_says_why() {
        let other = host(&["a", "b"]);
        let cpu = GpuFlags { device: "cpu".into(), ..flags(0, 1, 1) };
        let wide = GpuFlags { hosts: 2, ..flags(0, 1, 1) };
        let visible = process(None, false);
        for (flags, process, host, why) in [
            (cpu, Some(&visible), &other, "cpu"),
            (wide, Some(&visible), &other, "several hosts"),
            (flags(0, 1, 1), None, &other, "environment"),
            (flags(0, 1, 1), Some(&visible), &other, "CUDA_DEVICE_ORDER"),
            (flags(0, 1, 1), Some(&process(Some("0"), false)), &other, "CUDA_DEVICE_ORDER"),
            (flags(0, 1, 1), Some(&process(Some("x"), true)), &other, "\"x\""),
            (flags(1, 1, 2), Some(&process(None, true)), &other, "2 GPUs from number 1 of 2"),
            (flags(0, 1, 1), Some(&visible), &Host::default(), "driver"),
        ] {
            let problem = devices(&flags, process, host).unwrap_err();
            assert!(problem.contains(why), "{problem}");
        }
    }
}
