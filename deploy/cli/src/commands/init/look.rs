//! Looks at this host for `init`: which sockets listen, which process owns one, and the GPUs.
//!
//! All of it is in `/proc`. What this user may not read there is unknown, and no error.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Read as _,
    path::{Path, PathBuf},
};

use service::private_folder::own_uid;

use crate::init::host::{EngineEnvironment, EngineProcess, Host, HostGpu};

const BYTES_MAX: u64 = 4 << 20;
const PROCESSES_MAX: usize = 65_536;
const FILES_MAX: usize = 65_536;
/// The state in `/proc/net/tcp`.
const LISTEN: &str = "0A";

#[derive(Debug, Clone, Copy)]
struct Socket {
    uid: u32,
    inode: u64,
}

/// The sockets by port.
#[derive(Debug, Default)]
pub(super) struct Listening(BTreeMap<u16, Socket>);

impl Listening {
    /// `None` if this host shows no listening sockets.
    pub(super) fn ports(&self) -> Option<BTreeSet<u16>> {
        (!self.0.is_empty()).then(|| self.0.keys().copied().collect())
    }

    /// Whether this user or root listens at a port.
    pub(super) fn is_trusted(&self, port: u16) -> bool {
        self.0.get(&port).is_some_and(|socket| socket.uid == 0 || socket.uid == own_uid())
    }
}

pub(super) fn listening() -> Listening {
    let tables = ["/proc/net/tcp6", "/proc/net/tcp"].map(|path| read(Path::new(path)));
    Listening(tables.iter().flatten().flat_map(|text| parse_sockets(text)).collect())
}

/// `table` is the text of `/proc/net/tcp` or `tcp6`. Sockets that don't listen are left out.
fn parse_sockets(table: &str) -> impl Iterator<Item = (u16, Socket)> {
    table.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().take(10).collect();
        let [_, local, _, state, _, _, _, uid, _, inode] = fields[..] else { return None };
        let port = u16::from_str_radix(local.rsplit_once(':')?.1, 16).ok()?;
        let socket = Socket { uid: uid.parse().ok()?, inode: inode.parse().ok()? };
        (state == LISTEN).then_some((port, socket))
    })
}

/// Ports at which processes of SGLang listen, as far as this user may see that, and those that
/// their `--port` names.
pub(super) fn sglang_ports(listening: &Listening) -> BTreeSet<u16> {
    let mut ports = BTreeSet::new();
    let mut inodes = BTreeSet::new();
    for folder in processes() {
        let Some(line) = read(&folder.join("cmdline")) else { continue };
        if is_sglang(&line) {
            ports.extend(port_argument(&line));
            inodes.extend(sockets_of(&folder));
        }
    }
    let own = listening.0.iter().filter(|(_, socket)| inodes.contains(&socket.inode));
    ports.extend(own.map(|(port, _)| *port));
    ports
}

/// `line` has NUL after each word.
fn is_sglang(line: &str) -> bool {
    let mut words = line.split('\0').take(8);
    words.any(|word| {
        let name = word.rsplit('/').next().unwrap_or_default();
        name == "sglang" || name.starts_with("sglang.") || name.starts_with("sglang::")
    })
}

fn port_argument(line: &str) -> Option<u16> {
    let words: Vec<&str> = line.split('\0').collect();
    let next = words.windows(2).find(|pair| pair[0] == "--port").map(|pair| pair[1]);
    next.or_else(|| words.iter().find_map(|word| word.strip_prefix("--port=")))?.parse().ok()
}

fn processes() -> impl Iterator<Item = PathBuf> {
    entries(Path::new("/proc")).filter(|folder| pid_of(folder).is_some()).take(PROCESSES_MAX)
}

fn pid_of(folder: &Path) -> Option<u32> {
    folder.file_name()?.to_str()?.parse().ok()
}

fn sockets_of(folder: &Path) -> BTreeSet<u64> {
    let inode = |file: PathBuf| {
        let link = fs::read_link(file).ok()?;
        link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
    };
    entries(&folder.join("fd")).take(FILES_MAX).filter_map(inode).collect()
}

/// Leaves out what this user may not see.
fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// `None` if nothing listens at the port. A process that this user may not see has no `pid`.
pub(super) fn process_at(port: u16, listening: &Listening) -> Option<EngineProcess> {
    let socket = listening.0.get(&port)?;
    let folder = processes().find(|folder| sockets_of(folder).contains(&socket.inode));
    Some(EngineProcess {
        pid: folder.as_deref().and_then(pid_of),
        uid: socket.uid,
        user: read(Path::new("/etc/passwd")).and_then(|text| user_name(&text, socket.uid)),
        unit: folder.as_ref().and_then(|it| unit_of(&read(&it.join("cgroup"))?)),
        environment: folder.and_then(|it| Some(parse_environment(&read(&it.join("environ"))?))),
    })
}

fn user_name(passwd: &str, uid: u32) -> Option<String> {
    let uid = uid.to_string();
    passwd.lines().find_map(|line| match line.split(':').collect::<Vec<&str>>()[..] {
        [name, _, of, ..] if of == uid => Some(name.to_owned()),
        _ => None,
    })
}

fn unit_of(cgroup: &str) -> Option<String> {
    let path = cgroup.lines().find_map(|line| line.splitn(3, ':').nth(2))?;
    let unit =
        path.strip_prefix("/system.slice/")?.split('/').find(|it| it.ends_with(".service"))?;
    Some(unit.to_owned())
}

fn parse_environment(text: &str) -> EngineEnvironment {
    let value = |name: &str| {
        let mut variables = text.split('\0').filter_map(|it| it.split_once('='));
        variables.find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
    };
    EngineEnvironment {
        visible_devices: value("CUDA_VISIBLE_DEVICES"),
        is_in_pci_order: value("CUDA_DEVICE_ORDER").as_deref() == Some("PCI_BUS_ID"),
        shim_socket: value("BERTH_SHIM_SOCKET").filter(|path| !path.is_empty()),
    }
}

pub(super) fn host(listening: &Listening) -> Host {
    let name = read(Path::new("/proc/sys/kernel/hostname")).unwrap_or_default();
    // Each GPU has a folder with its PCI address as name.
    let gpus: BTreeSet<PathBuf> = entries(Path::new("/proc/driver/nvidia/gpus")).collect();
    let gpus =
        gpus.iter().filter_map(|folder| Some(parse_gpu(&read(&folder.join("information"))?)));
    Host {
        name: name.trim().to_owned(),
        gpus: gpus.collect(),
        ports_taken: listening.0.keys().copied().collect(),
    }
}

fn parse_gpu(information: &str) -> HostGpu {
    let value = |name: &str| {
        let mut lines = information.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim().to_owned())
    };
    let is_whole = |uuid: &String| uuid.starts_with("GPU-") && !uuid.contains('?');
    HostGpu { uuid: value("GPU UUID").filter(is_whole), model: value("Model").unwrap_or_default() }
}

fn read(path: &Path) -> Option<String> {
    let mut bytes = vec![];
    fs::File::open(path).ok()?.take(BYTES_MAX).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_root_and_the_user_are_trusted_with_a_key() {
        let of = |uid| Listening(BTreeMap::from([(1, Socket { uid, inode: 0 })]));
        assert!(of(0).is_trusted(1) && of(own_uid()).is_trusted(1));
        assert!(!of(own_uid() + 1).is_trusted(1) && !of(0).is_trusted(2));
    }

    #[test]
    fn sockets_that_listen_are_read_with_their_owner() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
            \x20  0: 0100007F:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 1 0\n\
            \x20  1: 0100007F:7531 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0\n\
            garbage\n";
        let found: Vec<(u16, Socket)> = parse_sockets(table).collect();
        let [(30_000, Socket { uid: 1000, inode: 4711 })] = found[..] else {
            panic!("{found:?}");
        };
    }

    #[test]
    fn sglang_is_known_by_its_command_line() {
        let line = |words: &[&str]| words.join("\0");
        for (words, port) in [
            (&["python3", "-m", "sglang.launch_server", "--port", "31234"][..], Some(31_234)),
            (&["/opt/bin/python", "/opt/bin/sglang", "serve", "--port=5"], Some(5)),
            (&["sglang::scheduler"], None),
            (&["python3", "-m", "sglang.launch_server", "--port", "x"], None),
        ] {
            assert!(is_sglang(&line(words)), "{words:?}");
            assert_eq!(port_argument(&line(words)), port, "{words:?}");
        }
        for words in [&["vi", "sglang-notes.txt"][..], &["python3", "-m", "other"], &[""]] {
            assert!(!is_sglang(&line(words)), "{words:?}");
        }
    }

    #[test]
    fn the_process_of_a_port_is_found_with_its_environment() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let process = process_at(port, &listening()).unwrap();
        assert_eq!(process.pid, Some(std::process::id()));
        assert!(process.environment.is_some());
        drop(listener);
        assert_eq!(process_at(port, &listening()), None);
    }

    #[test]
    fn user_unit_and_environment_are_read() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nsglang:x:998:7::/:/bin/sh\nbad\n";
        assert_eq!(user_name(passwd, 998).as_deref(), Some("sglang"));
        assert_eq!(user_name(passwd, 7), None);
        assert_eq!(unit_of("0::/system.slice/sglang.service\n").as_deref(), Some("sglang.service"));
        assert_eq!(unit_of("0::/system.slice/a.service/sub").as_deref(), Some("a.service"));
        assert_eq!(unit_of("0::/user.slice/user-1.slice/user@1.service/app.service"), None);
        let text =
            "A=1\0CUDA_VISIBLE_DEVICES=1,0\0CUDA_DEVICE_ORDER=PCI_BUS_ID\0BERTH_SHIM_SOCKET=\0";
        let environment = parse_environment(text);
        assert_eq!(environment.visible_devices.as_deref(), Some("1,0"));
        assert_eq!((environment.is_in_pci_order, environment.shim_socket), (true, None));
    }

    #[test]
    fn a_gpu_s_uuid_is_read_if_the_driver_shows_it() {
        let text = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 1\nGPU UUID: \t GPU-5e9a-0c\n";
        let gpu = parse_gpu(text);
        assert_eq!(
            (gpu.model.as_str(), gpu.uuid.as_deref()),
            ("NVIDIA H100 80GB HBM3", Some("GPU-5e9a-0c"))
        );
        let hidden = parse_gpu("GPU UUID: \t GPU-????????-????\n");
        assert_eq!(hidden.uuid, None);
    }
}
