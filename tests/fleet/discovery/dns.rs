//! A server of the Domain Name System for one case: SRV records of services, A records of hosts.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use engine_sim::loopback::own_addr;
use parking_lot::Mutex;
use tokio::{net::UdpSocket, task::JoinHandle};

const TYPE_A: u16 = 1;
const TYPE_SRV: u16 = 33;
/// Time to live of all answers, in seconds.
const TTL_S: u32 = 1;

/// What the server answers.
#[derive(Debug, Default)]
struct Zone {
    services: BTreeMap<String, Vec<SocketAddr>>,
    is_failing: bool,
    questions: u64,
}

/// A server that answers from a [`Zone`].
#[derive(Debug)]
pub(super) struct DnsServer {
    pub(super) address: SocketAddr,
    zone: Arc<Mutex<Zone>>,
    task: JoinHandle<()>,
}

impl Drop for DnsServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl DnsServer {
    #[expect(clippy::disallowed_methods, reason = "a process of its own, here as a task")]
    pub(super) async fn start() -> std::io::Result<Self> {
        let socket = UdpSocket::bind(own_addr()).await?;
        let (address, zone) = (socket.local_addr()?, Arc::<Mutex<Zone>>::default());
        let answers = Arc::clone(&zone);
        let task = tokio::spawn(async move {
            let mut question = [0; 512];
            while let Ok((bytes, from)) = socket.recv_from(&mut question).await {
                let answer = answers.lock().answer(&question[..bytes]);
                if let Some(answer) = answer {
                    // A lost answer is asked for again.
                    let _ = socket.send_to(&answer, from).await;
                }
            }
        });
        Ok(Self { address, zone, task })
    }

    /// Sets the targets of a service.
    pub(super) fn set_service(&self, name: &str, targets: &[SocketAddr]) {
        self.zone.lock().services.insert(name.to_owned(), targets.to_vec());
    }

    /// Sets whether the server answers that it failed.
    pub(super) fn set_failing(&self, is_failing: bool) {
        self.zone.lock().is_failing = is_failing;
    }

    /// Returns how many questions have come.
    pub(super) fn questions(&self) -> u64 {
        self.zone.lock().questions
    }
}

impl Zone {
    /// Returns the answer to a question; `None` if it can't be read.
    fn answer(&mut self, question: &[u8]) -> Option<Vec<u8>> {
        self.questions += 1;
        let (mut name, mut at) = (vec![], 12);
        loop {
            let length = usize::from(*question.get(at)?);
            at += 1;
            if length == 0 {
                break;
            }
            name.push(std::str::from_utf8(question.get(at..at + length)?).ok()?.to_lowercase());
            at += length;
        }
        let kind = u16::from_be_bytes([*question.get(at)?, *question.get(at + 1)?]);
        let name = name.join(".");
        let records = self.records(&name, kind);
        // Response and authoritative; SERVFAIL or no error.
        let code = if self.is_failing { 2 } else { 0 };
        let count = if self.is_failing { 0 } else { u16::try_from(records.len()).ok()? };
        let mut answer = question.get(..2)?.to_vec();
        answer.extend([0x84, code, 0, 1]);
        answer.extend(count.to_be_bytes());
        answer.extend([0; 4]);
        answer.extend(question.get(12..at + 4)?);
        for data in records.into_iter().take(usize::from(count)) {
            // The name is that of the question.
            answer.extend([0xc0, 12]);
            answer.extend(kind.to_be_bytes());
            answer.extend([0, 1]);
            answer.extend(TTL_S.to_be_bytes());
            answer.extend(u16::try_from(data.len()).ok()?.to_be_bytes());
            answer.extend(data);
        }
        Some(answer)
    }

    /// Returns the data of the records of a name. A host is named by the digits of its address.
    fn records(&self, name: &str, kind: u16) -> Vec<Vec<u8>> {
        if kind == TYPE_SRV {
            let targets = self.services.get(name).into_iter().flatten();
            return targets.map(|target| service_data(*target)).collect();
        }
        let ip = name.strip_suffix(".host.test").map(|digits| digits.replace('-', "."));
        let ip: Option<IpAddr> = ip.and_then(|ip| ip.parse().ok());
        match ip {
            Some(IpAddr::V4(ip)) if kind == TYPE_A => vec![ip.octets().to_vec()],
            _ => vec![],
        }
    }
}

/// Returns the data of an SRV record: priority, weight, port and the name of the host.
fn service_data(target: SocketAddr) -> Vec<u8> {
    let mut data = vec![0, 0, 0, 0];
    data.extend(target.port().to_be_bytes());
    for label in [target.ip().to_string().replace('.', "-").as_str(), "host", "test"] {
        data.push(u8::try_from(label.len()).unwrap_or(u8::MAX));
        data.extend(label.as_bytes());
    }
    data.push(0);
    data
}
